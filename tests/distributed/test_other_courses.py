"""Tests of other courses, which start ranks with mp.spawn under pytest, as in the how-to guide."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rank_server import free_port
from test_readme import find_program

import ringsim

TEST = find_program("other-courses", "# test_ddp.py")
ANSWER = find_program("other-courses", "# ddp.py")
# only rank 0 calls this, in the answer on the page
MISTAKE = "            if dist.get_rank() == 0:\n                dist.broadcast("
WAITING = """\
collective mismatch: the ranks disagree on collective 1 of group world: the kind differs.
  rank 0 calls broadcast (world, float32[8,8], 256 bytes) at ddp.py:15
  rank 1 calls all_reduce (world, float32[4], 16 bytes) at test_ddp.py:21 > ddp.py:20
  Hint: Call the same collectives in the same order, with the same arguments, on all ranks of a group.
"""  # noqa: E501


def run_pytest(
    directory: Path, monkeypatch: pytest.MonkeyPatch, answer: str, *words: str
) -> subprocess.CompletedProcess[str]:
    """Runs the test of the page on an answer, under ``ringsim trace``."""
    for name, program in (("test_ddp.py", TEST), ("ddp.py", answer)):
        (directory / name).write_text(program)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    traced = [sys.executable, "-m", "ringsim", "trace", *words, "-m", "pytest"]
    tests = ["-x", "-p", "no:cacheprovider", "test_ddp.py", "-k", "True"]
    return subprocess.run(
        [*traced, *tests], cwd=directory, capture_output=True, text=True, check=False
    )


def test_a_right_answer_passes_and_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MISTAKE in ANSWER
    right = ANSWER.replace(MISTAKE, "            dist.broadcast(")
    done = run_pytest(tmp_path, monkeypatch, right)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 1 deselected" in done.stdout
    trace = ringsim.load(tmp_path / "pytest.ringtrace")
    collectives = trace.to_pandas().query("rank == 0 and kind == 'collective'")
    calls = collectives["op"].astype(str).value_counts()
    assert calls.to_dict() == {"all_reduce": 3 * 4, "broadcast": 4, "all_gather": 4}
    assert str(trace.explain()).startswith("Nothing wrong was found")


def test_an_answer_that_hangs_fails_with_the_students_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run_pytest(tmp_path, monkeypatch, ANSWER)
    assert done.returncode == 1
    assert "1 failed" in done.stdout, done.stdout + done.stderr
    error, *lines = WAITING.splitlines()
    assert f"E       ringsim.errors.MessageMismatch: {error}\n" in done.stdout
    assert [line for line in lines if f"E       {line}\n" not in done.stdout] == []
    trace = ringsim.load(tmp_path / "pytest.ringtrace")
    assert str(trace.explain()).startswith(WAITING.rstrip())
