"""The rows of docs/faults.md that only real ranks can show: dead and stopped processes, limits, rendezvous, failures of torch and Gloo.

All others run on simulated ranks, see test_simulated_faults, and rows 72 to 90 in test_wrong_programs; of those that end alike, a few run
here, too: one of each kind of finding.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from fault_programs import FAULTS
from fault_rows import AS_WRITTEN, ELSEWHERE, LATE, LIMIT_S, OTHERWISE, RIGHT, ROWS, Outcome, judge_on_ranks, run

import ringsim
from ringsim.traces.findings import KINDS

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("nothing_left_behind")]

# Rows that end alike on simulated ranks, and run here all the same. Gloo aborts: 8, 27. It says nothing: 9, 28c.
ALIKE: tuple[str, ...] = ("1", "4b", "6a", "6c", "6d", "8", "9", "18", "24", "26d", "27", "28c", "29", "43")
ALIKE += ("47b", "49a", "53a", "65", "66a", "68")
# Correct programs, which run one behind the other.
FINE = ("15", "44c", "51c", "56", "58", "62", "66b", "67a", "71a", "71b", "55a", "55b")
AT_ONCE = 12  # runs that wait for their limits do so side by side


def of_real_ranks() -> list[str]:
    """Returns the rows that run here: those that do not end alike on simulated ranks, and a few that do."""
    here = {*ELSEWHERE, *OTHERWISE, *ALIKE} - set(FINE) - AS_WRITTEN
    return [number for number in ROWS if number in here]


@pytest.fixture(scope="module")
def at_their_limits(nothing_left_behind: None) -> dict[str, Future[Outcome]]:
    """Runs those that only a limit ends, or that meet by themselves: nothing says how soon they must end."""
    ringsim.trace(time.monotonic, world_size=2)  # the first run loads torch: none of those that a limit must end
    slow = [number for number in of_real_ranks() if FAULTS[number].within_s is None and number != "69"]  # which interrupts this process
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {number: pool.submit(run, FAULTS[number]) for number in slow}


def test_every_row_has_a_program_and_every_program_a_row() -> None:
    assert ROWS.keys() == FAULTS.keys()
    assert {int(re.sub("[a-z]", "", row)) for row in ROWS} == set(range(1, 91))
    kinds = {ROWS[number].kind for number in of_real_ranks()}
    assert kinds >= {row.kind for row in ROWS.values()} - set(RIGHT)
    assert kinds <= {*KINDS, *RIGHT}


@pytest.mark.parametrize("number", of_real_ranks())
def test_a_fault_ends_as_the_document_says(number: str, at_their_limits: dict[str, Future[Outcome]]) -> None:
    judge_on_ranks(number, at_their_limits[number].result() if number in at_their_limits else run(FAULTS[number]))


def one_after_the_other(size: int) -> dict[str, Any]:
    """Runs the correct programs for so many ranks; the last takes its groups down."""
    results: dict[str, Any] = {}
    for number in FINE:
        if FAULTS[number].size == size:
            results[number] = FAULTS[number].worker()
            if number != FINE[-1]:
                dist.barrier()
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_fine_ends_well(size: int) -> None:
    trace = ringsim.trace(one_after_the_other, world_size=size, args=(size,), limit_s=LIMIT_S)
    for results in trace.results:
        assert {number: result for number, result in results.items() if result not in (None, True)} == {}
    found = [finding for finding in trace.explain().findings if finding.kind not in LATE]
    # Row 66b drops a handle on purpose, and no other does.
    assert [(one.kind, one.ranks, {each.line for each in one.operations}) for one in found] == (
        [(ROWS["66b"].kind, (1,), set(FAULTS["66b"].lines))] if size == 2 else []
    )
