"""How ranks leave a block of ``with ringsim.trace(path)``: what the file says of one that raises, exits, dies or is done too early."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_server import RankServer
from test_recording import join

import ringsim
from ringsim.launch.recording import gather_ends, hold_back_sigterm

pytestmark = pytest.mark.timeout(90)


def ends_early(directory: str, rank: int, who: int, how: str, when: str) -> list[str]:
    """Rank ``who`` leaves before it sends what all others wait for; returns what their errors say besides torch's words."""
    path, store = join(directory, rank, 3), dist.distributed_c10d._get_default_store()
    try:
        with ringsim.trace(path):
            if rank == who:
                if when == "while they wait":
                    store.wait(["waiting"])
                    time.sleep(0.2)
                if how == "raises":
                    raise ValueError("no such layer")
                if how == "exits":
                    sys.exit(0)
                if how == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
            if rank != who:
                if when == "before they wait":
                    time.sleep(1.2)
                store.set("waiting", "")
                dist.recv(torch.zeros(3), who)
    except (RuntimeError, ValueError, SystemExit) as error:
        if rank == who:
            os._exit(1)
        return getattr(error, "__notes__", [])
    os._exit(0)


RAISED = r"raised ValueError: no such layer \(.*test_recorded_ends.py, line "


@pytest.mark.parametrize(
    ("who", "how", "when", "kind", "words"),
    [
        (1, "raises", "while they wait", "rank_failed", f"rank 1 {RAISED}"),
        (1, "raises", "before they wait", "rank_failed", f"rank 1 {RAISED}"),
        (1, "exits", "while they wait", "peer_exited", r"but rank 1 left with sys.exit\(0\)"),
        (1, "dies", "while they wait", "peer_exited", r"but rank 1 died within the recorded block, by a signal or os._exit\(\)"),
        (1, "dies", "before they wait", "peer_exited", r"but rank 1 died within the recorded block, by a signal or os._exit\(\)"),
        (1, "is done", "before they wait", "peer_exited", "but rank 1 has left the recorded block"),
        (0, "raises", "while they wait", "rank_failed", f"rank 0 {RAISED}"),
        (0, "raises", "before they wait", "rank_failed", f"rank 0 {RAISED}"),
    ],
)
def test_the_file_says_who_ended_and_why(server: RankServer, tmp_path: Path, who: int, how: str, kind: str, words: str, when: str) -> None:
    """0.1.0 found nothing wrong, or a rank that was busy."""
    ended = server.run(ends_early, [(str(tmp_path), rank, who, how, when) for rank in range(3)])
    trace = ringsim.load(tmp_path / "run.ringtrace")
    findings = trace.explain().findings
    if how == "dies":
        assert not trace.metadata["complete"]
        assert any("ranks [1] had not left" in note for note in trace.metadata["notes"])
        assert (tmp_path / "run.ringtrace.parts" / "rank-1.events").exists()  # the evidence stays
    assert [each.kind for each in findings] == [kind]
    assert who in findings[0].ranks
    assert re.search(words, findings[0].message)
    if kind == "rank_failed":
        assert len(findings[0].consequences) == 2
    notes = [note for each in ended if each.how == "returned" for note in each.value]
    assert len(notes) == 2
    assert all(note.startswith(f"ringsim: rank {who} ") for note in notes)


def under_torchrun(directory: Path, block: str) -> str:
    """Runs a script of two ranks under torchrun, which ends the other once one has failed; returns what they wrote as errors."""
    begin = "import os, time, torch, torch.distributed as dist, ringsim\ndist.init_process_group('gloo')\nrank = dist.get_rank()\n"
    script = begin + "with ringsim.trace('run.ringtrace'):\n" + textwrap.indent(textwrap.dedent(block), "    ")
    (directory / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=80)
    assert done.returncode != 0
    return done.stderr


def test_under_torchrun_stuck_ranks_raise_the_verdict_and_the_trace_is_kept(tmp_path: Path) -> None:
    errors = under_torchrun(tmp_path, "dist.recv(torch.zeros(3), 1 - rank)")
    assert "ringsim.errors.Deadlock: deadlock: ranks 0 and 1 wait for each other: " in errors
    assert 'script.py", line 5, in <module>' in errors
    findings = ringsim.load(tmp_path / "run.ringtrace").explain().findings
    assert [(each.kind, set(each.ranks)) for each in findings] == [("deadlock", {0, 1})]


def test_torchrun_does_not_end_rank_0_before_the_file_is_there(tmp_path: Path) -> None:
    under_torchrun(tmp_path, "if rank == 1:\n    time.sleep(0.5); raise ValueError('boom')\ndist.recv(torch.zeros(3), 1)")
    assert (tmp_path / "run.ringtrace").exists()
    (finding,) = ringsim.load(tmp_path / "run.ringtrace").explain().findings
    assert finding.kind == "rank_failed"
    assert finding.message.startswith("rank 1 raised ValueError: boom (")


def test_where_no_file_was_written_the_parts_tell_who_died(tmp_path: Path) -> None:
    """Rank 0 computes when torchrun ends it."""
    under_torchrun(tmp_path, "if rank == 1:\n    time.sleep(0.5); raise ValueError('boom')\ntime.sleep(60)")
    assert not (tmp_path / "run.ringtrace").exists()
    for path in (tmp_path / "run.ringtrace", tmp_path / "run.ringtrace.parts", f"{tmp_path}/run.ringtrace.parts/"):
        (finding,) = ringsim.load(path).explain().findings
        assert finding.kind == "rank_failed"
        assert finding.message.startswith("rank 1 raised ValueError: boom (")


def left_and_at_work(directory: str, rank: int) -> None:
    path = join(directory, rank, 2)
    with ringsim.trace(path):
        work: Any = dist.isend(torch.zeros(3), 1 - rank)
        dist.recv(torch.zeros(3), 1 - rank)
    work.wait()
    dist.barrier()


def test_who_left_in_peace_is_not_accused(server: RankServer, tmp_path: Path) -> None:
    ended = server.run(left_and_at_work, [(str(tmp_path), rank) for rank in range(2)])
    assert [each.how for each in ended] == ["returned", "returned"]
    trace = ringsim.load(tmp_path / "run.ringtrace")
    assert "ends" not in trace.metadata
    assert not {each.kind for each in trace.explain().findings} - {"late_sender", "late_receiver", "straggler"}


def test_who_was_at_work_when_another_failed_is_not_called_dead() -> None:
    """A launcher ends it because of the other, before the file is written."""
    dead = [{"rank": rank, "state": "killed", "about": "is dead", "error": ""} for rank in (1, 2)]
    asleep = {"rank": 2, "state": "running", "about": "asleep", "error": ""}
    ends = gather_ends({0: {"raised": True, "lost": True, "end": None}}, [*dead, asleep], 0)
    assert [(end["rank"], end["state"]) for end in ends] == [(1, "killed"), (2, "running")]


def test_a_sigterm_is_put_off_and_comes_afterwards() -> None:
    heard: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("mine"))
    try:
        with hold_back_sigterm() as came:
            assert not came.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
            assert came.wait(10)
            assert heard == []
        assert heard == ["mine"]
        with hold_back_sigterm():
            pass
        assert heard == ["mine"]
    finally:
        signal.signal(signal.SIGTERM, before)
