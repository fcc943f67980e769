"""Tests whether the checks of the lessons judge correctly on an overloaded machine.

Right and wrong answers alternate, and run on real ranks.

    python benchmarks/check_verdicts.py [--checks 500] [--busy 30] [--seed 0]

The answers come from ``tests/test_check*.py``. Meanwhile, ``--busy`` processes compute. The script
prints each unexpected verdict, and then the number of each verdict and the time that the checks
took. It exits with 1 if a right answer was judged "not yet", or if a wrong answer passed. Undecided
verdicts are counted separately.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from paired import where
from quiet_runs import busy

from ringsim import check

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


class Case(NamedTuple):
    """An answer, the check that judges it, and whether the answer is right."""

    examine: Any
    answer: Any
    right: bool


def all_cases() -> list[Case]:
    """Returns the answers to judge."""
    import test_check_messages as messages
    import test_check_parallelism as parallelism
    import test_check_pipeline as pipeline
    import test_check_reading as reading
    import test_check_sharding as sharding

    by_way = [
        Case(
            functools.partial(check.no_deadlock, way=way),
            getattr(messages, f"by_{way}"),
            right=True,
        )
        for way in ("order", "isend", "batch")
    ]
    right = {
        check.hand_over: [pipeline.hand_over],
        check.alphabeta: [reading.weighted, reading.both_ends],
        check.slow_link: [reading.by_median],
        check.mesh_order: reading.RIGHT[check.mesh_order],
    }
    wrong = {
        check.alphabeta: [reading.unweighted, reading.of_means],
        check.slow_link: [reading.by_total, reading.with_waits],
        check.mesh_order: [row[0] for row in reading.WRONG[check.mesh_order]],
    }
    answers = [
        Case(examine, answer, right=True)
        for table in (messages.RIGHT, parallelism.RIGHT, pipeline.RIGHT, sharding.RIGHT, right)
        for examine, each in table.items()
        for answer in each
    ]
    rows = [
        (examine, row[0])
        for table in (messages.WRONG, parallelism.WRONG, pipeline.WRONG, sharding.WRONG)
        for examine, each in table.items()
        for row in each
    ]
    rows += [(examine, answer) for examine, each in wrong.items() for answer in each]
    return [*by_way, *answers, *(Case(examine, answer, right=False) for examine, answer in rows)]


def main() -> int:
    """Prints the verdicts, and returns whether any of them was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checks",
        type=int,
        default=500,
        help="the number of checks, half of them with right answers (default: 500)",
    )
    parser.add_argument(
        "--busy",
        type=int,
        default=30,
        help="the number of processes that compute in the background (default: 30)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="the seed for the order and the random choices of the checks (default: 0)",
    )
    options = parser.parse_args()
    print(where(), flush=True)
    drawn, cases = random.Random(options.seed), all_cases()
    verdicts: Counter[tuple[bool, str]] = Counter()
    seconds, loads, wrong = list[float](), list[float](), 0
    queues: dict[bool, list[Case]] = {True: [], False: []}
    with busy(options.busy):
        for number in range(options.checks):
            queue = queues[number % 2 == 0]
            if not queue:
                queue += drawn.sample(
                    these := [case for case in cases if case.right == (number % 2 == 0)], len(these)
                )
            case, began = queue.pop(), time.monotonic()
            result = case.examine(case.answer, seed=drawn.randrange(10**6))
            seconds.append(time.monotonic() - began)
            loads.append(os.getloadavg()[0])
            verdicts[case.right, result.verdict] += 1
            if result.verdict != ("passed" if case.right else "not yet"):
                wrong += result.verdict != "undecided"
                print(
                    (
                        f"  a {'right' if case.right else 'wrong'} answer, load {loads[-1]:.0f}, "
                        f"{seconds[-1]:.0f} s: {result!r}"
                    ),
                    flush=True,
                )
    for right in (True, False):
        counts = ", ".join(
            f"{verdicts[right, verdict]} {verdict}"
            for verdict in ("passed", "not yet", "undecided")
        )
        print(f"  {'right' if right else 'wrong'} answers: {counts}")
    print(
        f"  load average {statistics.mean(loads):.1f} in the mean, {min(loads):.1f} to "
        f"{max(loads):.1f}"
    )
    print(
        f"  a check took {statistics.median(seconds):.1f} s in the median, {max(seconds):.1f} s "
        "at most"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
