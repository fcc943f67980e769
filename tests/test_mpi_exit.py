"""When ``sys.exit`` ends a process of a job, and when it only looks like it; by processes that load nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ringsim.comm import mpi

PROGRAM = f"""
import runpy, sys
undo = runpy.run_path({mpi.__file__!r})["watch_exit"](lambda code: print("abort", code, flush=True))
"""


def run(ending: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM + ending], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("sys.exit(3)", 3, "abort 3\n"),
        ("sys.exit('no data')", 1, "abort 1\n"),
        ("def main():\n    try:\n        sys.exit(2)\n    finally:\n        print('cleaned')\nmain()", 2, "cleaned\nabort 2\n"),
        ("try:\n    sys.exit(4)\nexcept SystemExit as error:\n    assert error.code == 4\n    raise", 4, "abort 4\n"),
        ("import argparse\nargparse.ArgumentParser().error('no')", 2, "abort 2\n"),
        ("import atexit\natexit.register(print, 'last words')\nsys.exit(5)", 5, "last words\nabort 5\n"),
        ("sys.exit()", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("try:\n    sys.exit(3)\nexcept SystemExit as error:\n    kept = error\nassert kept.code == 3 and kept.args == (3,)", 0, ""),
        ("try:\n    sys.exit(3)\nexcept SystemExit:\n    pass\nsys.exit(0)", 0, ""),
        ("import threading\nthread = threading.Thread(target=sys.exit, args=(3,))\nthread.start()\nthread.join()", 0, ""),
        ("kept = sys.exit\nundo()\nassert sys.exit is not kept\nkept(3)", 3, ""),
    ],
)
def test_only_an_end_with_another_code_than_0_aborts(ending: str, code: int, said: str) -> None:
    done = run(ending)
    assert (done.returncode, done.stdout) == (code, said), done.stderr
    if "no data" in ending:
        assert done.stderr == "no data\n"


def test_undoing_leaves_nothing() -> None:
    before = sys.exit
    mpi.watch_exit(lambda _: None)()
    assert sys.exit is before
