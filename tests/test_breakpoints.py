"""Breakpoints in simulated ranks: the debugger comes to the terminal, and time stands still."""

from __future__ import annotations

import builtins
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from simulated_runs import LINK

import ringsim
from ringsim.errors import Interrupted, RankFailed

Typing = Callable[[list[str]], list[str]]


def send_twice() -> float:
    """Ranks 1 and 2 send to rank 0, and rank 2 stops before its send."""
    ring, tensor = ringsim.current_ring(), torch.zeros(1)
    ringsim.compute(1.25e-3)
    if ring.rank == 0:
        for source in (1, 2):
            dist.recv(tensor, source)
    else:
        secret = 10 * ring.rank
        if ring.rank == 2:
            breakpoint()
        tensor += secret
        dist.send(tensor, 0)
    return tensor.item()


@pytest.fixture
def types(monkeypatch: pytest.MonkeyPatch) -> Typing:
    """Returns a function that lets the user type lines, and returns the list of prompts."""

    def type_lines(lines: list[str]) -> list[str]:
        prompts: list[str] = []

        def ask(prompt: str) -> str:
            prompts.append(prompt)
            if not lines:
                raise EOFError
            return lines.pop(0)

        monkeypatch.setattr(builtins, "input", ask)
        return prompts

    return type_lines


def debug(**options: Any) -> ringsim.Trace:
    return ringsim.simulate(send_twice, world_size=3, link=LINK, debug=True, **options)


def test_a_rank_stops_with_its_time_in_the_prompt(
    types: Typing, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = types(["p secret", "secret = 7", "n", "n", "c"])
    trace = debug()
    assert trace.results == [7.0, 10.0, 7.0]
    assert prompts == [*["(rank 2 at 1.25 ms) "] * 4, "(rank 2 at 1.27 ms) "]
    shown = capsys.readouterr().out
    assert re.search(r"^> \S+test_breakpoints\.py\(\d+\)send_twice\(\)$", shown, re.MULTILINE)
    assert "-> tensor += secret\n" in shown
    assert "\n20\n" in shown


def test_look_lists_what_is_posted_matched_and_blocked(
    types: Typing, capsys: pytest.CaptureFixture[str]
) -> None:
    types(["look", "c"])
    debug()
    shown = capsys.readouterr().out
    assert "rank 2 has stopped\n" in shown
    assert re.search(r"^rank 0: recv from 1 .*, in flight, blocked$", shown, re.MULTILINE)
    assert re.search(r"^rank 1: send to 0 .*, in flight, blocked$", shown, re.MULTILINE)
    assert "matched: 1 message\n" in shown


def test_op_goes_to_the_next_operation_of_any_rank(
    types: Typing, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = types(["op 0", "p source", "look", "op", "look", "c"])
    debug()
    stops = ["rank 2 at 1.25 ms", *["rank 0 at 1.26 ms"] * 3]
    assert prompts[:4] == [f"({stop}) " for stop in stops]
    shown = capsys.readouterr().out
    assert "-> dist.recv(tensor, source)\n" in shown
    assert "\n2\n" in shown
    assert re.search(r"^rank 0 has stopped before recv from 2 \(world, tag 0\) at ", shown, re.M)


def test_nothing_times_out_while_a_rank_is_stopped(types: Typing) -> None:
    """The watchdog would end the run after 4 s of sleep."""
    prompts = types([])
    typed = iter(["p 1", "c"])

    def ask(prompt: str) -> str:
        prompts.append(prompt)
        time.sleep(7)
        return next(typed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "input", ask)
        assert debug(limit_s=60).results == [20.0, 10.0, 20.0]
    assert len(prompts) == 2


def test_the_end_of_the_input_and_ctrl_c_end_the_run(
    types: Typing, monkeypatch: pytest.MonkeyPatch
) -> None:
    types([])
    with pytest.raises(RankFailed, match="rank 2 of 3 raised BdbQuit"):
        debug()

    def interrupt(_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "input", interrupt)
    with pytest.raises(Interrupted):
        debug()


def test_a_script_reads_commands_from_its_input(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import ringsim

        def worker():
            print("begin", force=True)
            if ringsim.current_ring().rank == 1:
                breakpoint()
            return ringsim.current_ring().rank

        if __name__ == "__main__":
            link = ringsim.Link(alpha_s=0, beta_s_per_byte=0)
            print(ringsim.simulate(worker, world_size=2, link=link, debug=True).results)
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        input="p 6 * 7\nc\n",
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == ["[rank 0] begin", "[rank 1] begin"]
    assert lines[2].startswith("> ")
    assert lines[3] == "-> return ringsim.current_ring().rank"
    assert lines[4:] == ["(rank 1 at 0 ns) 42", "(rank 1 at 0 ns) [0, 1]"]
