"""Does the watcher ever call a correct program stuck? Programs that only look so, many times, with the machine loaded.

    python benchmarks/quiet_runs.py [--runs 100] [--poll-ms 2] [--busy PROCESSES]

The programs are those of ``tests/distributed/quiet_programs.py``. The watcher looks ten times as often as by default, and one process that
does nothing but compute runs beside them for each processor. Prints, for each program, how many runs ended in an alarm, and how many in
another error or with a result that is not the one that is known beforehand; and exits with 1 where any did.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from paired import where

from ringsim.errors import RankFailed, RingError, RunTimeout
from ringsim.launch.api import make_kind
from ringsim.launch.job import pack_call
from ringsim.launch.ranks import get_launcher
from ringsim.launch.run import RunOptions, run

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "distributed"))

TIMEOUT_S = 120.0  # of one operation: a loaded machine is slow


class Count(NamedTuple):
    """What became of the runs of a program.

    Attributes:
        alarms: runs that the watcher ended.
        failures: runs that ended otherwise than they should.
        seconds: how long each of the runs took.
    """

    alarms: int
    failures: int
    seconds: list[float]


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keeps processors busy meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def repeat(program: Callable[..., float], size: int, expected: list[float], runs: int, poll_s: float) -> Count:
    """Runs a program many times."""
    alarms, failures, seconds = 0, 0, []
    for number in range(runs):
        start = time.monotonic()
        try:
            trace = run(pack_call(program, (), {}, seed=0), make_kind(size, "cpu", TIMEOUT_S, ring=True), RunOptions(poll_s=poll_s))
        except RingError as error:
            ended_itself = isinstance(error, RankFailed | RunTimeout)
            alarms, failures = alarms + (not ended_itself), failures + ended_itself
            print(f"  {program.__name__}, run {number}: {type(error).__name__}: {error}", flush=True)
        else:
            if trace.results != expected:
                failures += 1
                print(f"  {program.__name__}, run {number}: expected {expected}, got {trace.results}", flush=True)
        seconds.append(time.monotonic() - start)
    return Count(alarms, failures, seconds)


def main() -> int:
    """Prints a table, and tells whether there was an alarm."""
    from quiet_programs import PROGRAMS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="of each program (default: 100)")
    parser.add_argument(
        "--poll-ms", type=float, default=2.0, help="between two looks of the watcher (default: 2; by default ringsim takes 20)"
    )
    parser.add_argument("--busy", type=int, default=os.cpu_count() or 1, help="processes that compute meanwhile (default: one a processor)")
    options = parser.parse_args()
    print(where())
    print(f"{options.runs} runs of each, a look every {options.poll_ms:g} ms, {options.busy} busy processes beside them")
    print(f"  {'program':28}{'ranks':>6}{'alarms':>8}{'failures':>10}{'median s':>10}{'longest s':>11}", flush=True)
    counts = []
    with busy(options.busy):
        for program, (size, result) in PROGRAMS.items():
            count = repeat(program, size, [result(rank, size) for rank in range(size)], options.runs, options.poll_ms * 1e-3)
            counts.append(count)
            median_s, longest_s = statistics.median(count.seconds), max(count.seconds)
            print(f"  {program.__name__:28}{size:6}{count.alarms:8}{count.failures:10}{median_s:10.2f}{longest_s:11.2f}", flush=True)
    get_launcher().close()
    alarms, failures, total = sum(count.alarms for count in counts), sum(count.failures for count in counts), options.runs * len(counts)
    print(f"alarms: {alarms} of {total} runs; other failures: {failures}")
    return 1 if alarms or failures else 0


if __name__ == "__main__":
    sys.exit(main())
