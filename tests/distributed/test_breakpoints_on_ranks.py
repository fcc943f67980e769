"""Breakpoints in real ranks: the debugger comes to the terminal, and nothing times out."""

from __future__ import annotations

import builtins
import os
import re
import subprocess
import sys
import textwrap
import time
from bdb import BdbQuit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringsim
from ringsim.errors import ArgumentError, Interrupted, RankFailed, RunTimeout

Typing = Callable[[list[str]], list[str]]


def stop_on_two() -> float:
    """Ranks 1 and 2 stop, and then send to rank 0."""
    rank, tensor = ringsim.current_ring().rank, torch.zeros(1)
    if rank == 0:
        for source in (1, 2):
            dist.recv(tensor, source)
    else:
        secret = 10 * rank
        breakpoint()
        tensor += secret
        dist.send(tensor, 0)
    return tensor.item()


def sleep_before_send(sleep_s: float) -> None:
    if ringsim.current_ring().rank == 0:
        dist.recv(torch.zeros(1), 1)
    else:
        time.sleep(sleep_s)
        dist.send(torch.zeros(1), 0)


@pytest.fixture
def types(monkeypatch: pytest.MonkeyPatch) -> Typing:
    """Returns a function that lets the user type lines, and returns the list of prompts.

    At the line "think", the user thinks for seven seconds.
    """

    def type_lines(lines: list[str]) -> list[str]:
        prompts: list[str] = []

        def ask(prompt: str) -> str:
            prompts.append(prompt)
            if not lines:
                raise EOFError
            line = lines.pop(0)
            if line == "interrupt":
                time.sleep(2)  # the other rank also stops
                raise KeyboardInterrupt
            if line == "think":
                time.sleep(7)
                return "p 1"
            return line

        monkeypatch.setattr(builtins, "input", ask)
        return prompts

    return type_lines


def debug(**options: Any) -> ringsim.Trace:
    return ringsim.trace(stop_on_two, world_size=3, debug=True, **options)


def test_ranks_that_stop_take_turns(types: Typing, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = types(["p secret + 1", "secret = 7", "c"] * 2)
    assert debug().results == [7.0, 7.0, 7.0]
    first, second = prompts[0], prompts[3]
    assert {first, second} == {"(rank 1) ", "(rank 2) "}
    assert prompts == [first] * 3 + [second] * 3
    shown = capsys.readouterr().out
    stops = re.findall(r"^> \S+test_breakpoints_on_ranks\.py\(\d+\)stop_on_two\(\)$", shown, re.M)
    assert len(stops) == 2
    assert {"11", "21"} <= set(shown.splitlines())


def test_nothing_times_out_while_a_rank_is_stopped(types: Typing) -> None:
    """Without the debugger, a stuck rank is found after 3.5 s."""
    prompts = types(["think", "think", "think", "c", "c"])
    assert debug(timeout_s=6, limit_s=20).results == [20.0, 10.0, 20.0]
    assert len(prompts) == 5


def test_an_operation_keeps_its_limit() -> None:
    sleeps = {"args": (60,), "world_size": 2}
    with pytest.raises(
        RunTimeout, match=r"rank 0 of 2 waited in an operation for more than timeout_s=1 s\."
    ) as caught:
        ringsim.trace(sleep_before_send, timeout_s=1, debug=True, **sleeps)  # type: ignore[call-overload]
    assert "recv from 1" in str(caught.value)
    assert caught.value.trace is not None


def test_limits_continue_after_the_debugger(types: Typing) -> None:
    types(["p 1", "c"])

    def worker() -> None:
        if ringsim.current_ring().rank == 1:
            breakpoint()
        sleep_before_send(60)

    with pytest.raises(RunTimeout, match="rank 0 of 2 waited in an operation"):
        ringsim.trace(worker, world_size=2, timeout_s=1, debug=True)


def test_the_end_of_the_input_and_ctrl_c_end_the_run(types: Typing) -> None:
    types([])
    with pytest.raises(RankFailed, match=r"rank [12] of 3 raised BdbQuit"):
        debug()
    prompts = types(["interrupt"])
    with pytest.raises(Interrupted):
        debug()
    assert len(prompts) == 1, "the debugger of the other rank must not ask"


def test_stuck_ranks_are_found_after_the_debugger(types: Typing) -> None:
    def worker() -> None:
        rank = ringsim.current_ring().rank
        if rank == 1:
            breakpoint()
        dist.recv(torch.zeros(1), 1 - rank)

    prompts = types(["n", "c"])
    with pytest.raises(ringsim.errors.Deadlock):
        ringsim.trace(worker, world_size=2, debug=True)
    assert prompts[0] == "(rank 1) "


def test_without_debug_no_debugger_asks(types: Typing) -> None:
    prompts = types([])
    with pytest.raises(RankFailed, match="raised BdbQuit"):
        ringsim.trace(stop_on_two, world_size=3)
    assert prompts == []


def test_a_process_that_a_rank_forks_does_not_ask(types: Typing) -> None:
    """It has no channel of its own."""

    def worker() -> int:
        pid = os.fork()
        if pid == 0:
            try:
                breakpoint()
                os._exit(1)
            except BdbQuit:
                os._exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    prompts = types(["c"])
    assert ringsim.trace(worker, world_size=1, debug=True).results == [7]
    assert prompts == []


def test_debug_is_refused_for_ranks_of_a_launcher() -> None:
    with pytest.raises(ArgumentError, match="debug must be omitted with a path, got True"):
        ringsim.trace("run.ringtrace", debug=True)  # type: ignore[call-overload]


def test_a_script_reads_commands_from_its_input(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import ringsim

        def worker():
            if ringsim.current_ring().rank == 1:
                print("begin", force=True)
                breakpoint()
            return ringsim.current_ring().rank

        if __name__ == "__main__":
            print(ringsim.trace(worker, world_size=2, debug=True).results)
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
    assert lines[0] == "[rank 1] begin"
    assert lines[1].startswith("> ")
    assert lines[2] == "-> return ringsim.current_ring().rank"
    assert lines[3:] == ["(rank 1) 42", "(rank 1) [0, 1]"]
