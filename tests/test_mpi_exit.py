"""When ``sys.exit`` ends a process of a job, and when it only looks like it; by processes that are forked from one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ringsim.comm import mpi

PROGRAM = """
import json, os, sys
from ringsim.comm.mpi import watch_exit

undo = watch_exit(lambda code: print("abort", code, flush=True))
codes = []
for number, ending in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        for place, name in enumerate(("out", "err"), 1):
            os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_WRONLY), place)
        break
    codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
else:
    print(codes, flush=True)
    os._exit(0)
exec(ending)
"""
ENDINGS = [  # and with which code the process ends, and what it says
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
]


def test_only_an_end_with_another_code_than_0_aborts(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, json.dumps([ending for ending, _, _ in ENDINGS])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    codes = json.loads(done.stdout)
    found = [(ending, codes[number], (tmp_path / f"{number}.out").read_text()) for number, (ending, _, _) in enumerate(ENDINGS)]
    assert found == ENDINGS
    assert (tmp_path / "1.err").read_text() == "no data\n"


def test_undoing_leaves_nothing() -> None:
    before = sys.exit
    mpi.watch_exit(lambda _: None)()
    assert sys.exit is before
