"""Looks for false alarms by running correct programs many times on a loaded machine.

    python benchmarks/quiet_runs.py [--runs 100] [--poll-ms 2] [--busy PROCESSES]

The programs are the correct programs in ``tests/programs`` (all in one run), the scripts in that
directory, and the programs in ``tests/distributed/test_fault_quiet.py`` that only look stuck. The
watcher polls ten times as often as by default, and one process per core computes in the background.
For each program, the script prints the number of runs with an alarm or a finding (except for
lateness), and the number of runs with a different error or a wrong result. It exits with 1 if there
are any such runs.
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
from ringsim.launch.job import Job, RankKind, pack_call, pack_script
from ringsim.launch.ranks import get_launcher
from ringsim.launch.run import RunOptions, run

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "distributed"))

TIMEOUT_S = 120.0  # for one operation; it is this long because a loaded machine is slow


@dataclass
class Program:
    """A program and the results of its runs.

    Attributes:
        results: the expected results of its ranks, or None if they are not compared.
        alarms: the number of runs that the watcher ended, or that have a finding.
        failures: the number of runs with a different error or a wrong result.
        seconds: the time that each run took.
    """

    job: Job
    kind: RankKind
    results: list[Any] | None = None
    alarms: int = 0
    failures: int = 0
    seconds: list[float] = field(default_factory=list)

    def repeat(self, poll_s: float) -> str:
        """Runs the program once, and returns the problem, or "" if there was none."""
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
        # findings about ranks that return while one of their messages is in flight
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
                pack_script(str(right.PLACE / "scripts" / f"{name}.py"), []),
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
    """Keeps cores busy in the background, with ``count`` processes."""
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
    parser.add_argument(
        "--runs", type=int, default=100, help="the number of runs of each program (default: 100)"
    )
    parser.add_argument(
        "--poll-ms",
        type=float,
        default=2.0,
        help="the time between two polls of the watcher (default: 2; ringsim's own default is 20)",
    )
    parser.add_argument(
        "--busy",
        type=int,
        default=os.cpu_count() or 1,
        help="the number of processes that compute in the background (default: one per core)",
    )
    options = parser.parse_args()
    print(where())
    print(
        (
            f"{options.runs} runs of each program, a poll every {options.poll_ms:g} ms, "
            f"{options.busy} busy processes"
        ),
        flush=True,
    )
    with tempfile.TemporaryDirectory() as early, busy(options.busy):
        # DDP, FSDP and DTensor load this module, which takes 1 s in each rank
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
