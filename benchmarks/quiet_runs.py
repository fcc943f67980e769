"""Looks for false alarms: runs correct programs many times on a loaded machine.

    python benchmarks/quiet_runs.py [--runs 100] [--poll-ms 2] [--busy PROCESSES]

The programs are the correct ones of ``tests/programs``, in one run, its scripts, and those of
``tests/distributed/test_fault_quiet.py`` that only look stuck. The watcher looks ten times as often
as by default, and one process per core computes in the background. Prints for each program how many
runs ended in an alarm or a finding (except for lateness), and how many in another error or with a
wrong result. Exits with 1 if any did.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paired import where

from ringsim.errors import RankFailed, RingError, RunTimeout
from ringsim.launch.api import make_kind
from ringsim.launch.job import Job, Kind, pack_call, pack_script
from ringsim.launch.ranks import get_launcher
from ringsim.launch.run import RunOptions, run

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "distributed"))

TIMEOUT_S = 120.0  # of one operation: a loaded machine is slow


@dataclass
class Program:
    """A program and the results of its runs.

    Attributes:
        results: the expected results of its ranks; None skips the comparison.
        alarms: runs that the watcher ended, or that have a finding.
        failures: runs with another error or result.
        seconds: how long each of the runs took.
    """

    job: Job
    kind: Kind
    results: list[Any] | None = None
    alarms: int = 0
    failures: int = 0
    seconds: list[float] = field(default_factory=list)

    def repeat(self, poll_s: float) -> str:
        """Runs it once; returns the problem, or ""."""
        from test_fault_quiet import LATE

        start = time.monotonic()
        try:
            trace = run(self.job, self.kind, RunOptions(poll_s=poll_s, show=False))
        except RingError as error:
            ended_itself = isinstance(error, RankFailed | RunTimeout)
            self.alarms, self.failures = (
                self.alarms + (not ended_itself),
                self.failures + ended_itself,
            )
            return f"{type(error).__name__}: {error}"
        finally:
            self.seconds.append(time.monotonic() - start)
        if self.results not in (None, trace.results):
            self.failures += 1
            return f"expected {self.results}, got {trace.results}"
        # of ranks that return while a message of theirs is on its way
        true = {*LATE, "leaked_request"}
        accused = [str(finding) for finding in trace.explain().findings if finding.kind not in true]
        self.alarms += bool(accused)
        return "\n".join(accused)


def all_programs() -> dict[str, Program]:
    """Returns the programs by name."""
    import test_fault_quiet as quiet
    import test_right_programs as right

    def call(size: int, function: Any, *args: Any, results: list[Any] | None = None) -> Program:
        return Program(
            pack_call(function, args, {}, seed=0),
            make_kind(size, "cpu", TIMEOUT_S, ring=True),
            results,
        )

    return {
        f"{len(right.PROGRAMS)} right programs": call(
            right.right_messages.SIZE, right.run_all, list(right.PROGRAMS)
        ),
        f"{len(quiet.COMPARED)} that look mismatched": call(quiet.SIZE, quiet.all_of_them),
        **{
            f"{name}.py": Program(
                pack_script(str(right.PLACE / "scripts" / f"{name}.py"), [], seed=0),
                make_kind(size, "cpu", TIMEOUT_S, ring=False),
            )
            for name, (size, _) in right.SCRIPTS.items()
        },
        **{
            program.__name__: call(
                size, program, results=[result(rank, size) for rank in range(size)]
            )
            for program, (size, result) in quiet.PROGRAMS.items()
        },
    }


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keeps cores busy in the background."""
    processes = [
        subprocess.Popen([sys.executable, "-I", "-c", "while True: pass"]) for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> int:
    """Prints a table, and returns whether there was an alarm."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100, help="of each program (default: 100)")
    parser.add_argument(
        "--poll-ms",
        type=float,
        default=2.0,
        help="between two looks of the watcher (default: 2; by default ringsim takes 20)",
    )
    parser.add_argument(
        "--busy",
        type=int,
        default=os.cpu_count() or 1,
        help="processes that compute in the background (default: one per core)",
    )
    options = parser.parse_args()
    print(where())
    print(
        (
            f"{options.runs} runs of each, a look every {options.poll_ms:g} ms, {options.busy} "
            "busy processes"
        ),
        flush=True,
    )
    with tempfile.TemporaryDirectory() as early, busy(options.busy):
        # DDP, FSDP and DTensor load it: 1 s in each of their ranks
        Path(early, "sitecustomize.py").write_text("import torch._dynamo\n")
        os.environ["PYTHONPATH"] = os.pathsep.join([early, os.environ.get("PYTHONPATH", "")])
        programs = all_programs()
        for number in range(options.runs):
            for name, program in programs.items():
                if wrong := program.repeat(options.poll_ms * 1e-3):
                    print(f"  {name}, run {number}: {wrong}", flush=True)
        get_launcher().close()
    print(
        f"  {'program':28}{'ranks':>6}{'alarms':>8}{'failures':>10}{'median s':>10}"
        f"{'longest s':>11}"
    )
    for name, program in programs.items():
        median_s, longest_s = statistics.median(program.seconds), max(program.seconds)
        print(
            f"  {name:28}{program.kind.world_size:6}{program.alarms:8}{program.failures:10}"
            f"{median_s:10.2f}{longest_s:11.2f}"
        )
    alarms, failures = (
        sum(getattr(program, what) for program in programs.values())
        for what in ("alarms", "failures")
    )
    print(f"alarms: {alarms} of {options.runs * len(programs)} runs; other failures: {failures}")
    return 1 if alarms or failures else 0


if __name__ == "__main__":
    sys.exit(main())
