"""The rows of docs/faults.md that only real ranks can show: dead and stopped processes, limits, rendezvous, failures of torch and Gloo.

All others run on simulated ranks, see test_simulated_faults; of those that end alike, a few run here, too: one of each kind of finding.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from fault_programs import FAULTS, Fault
from fault_rows import ELSEWHERE, LATE, OTHERWISE, RIGHT, ROWS, judge

import ringsim
from ringsim import errors
from ringsim.traces.events import OK, Events
from ringsim.traces.findings import KINDS
from ringsim.traces.value import Trace

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("nothing_left_behind")]

LIMIT_S = 60  # of a run; nothing here comes near it
# Rows that end alike on simulated ranks, and run here all the same. Gloo aborts: 8, 27. It says nothing: 9, 28c.
ALIKE: tuple[str, ...] = ("1", "2b", "4b", "6a", "8", "9", "18", "23a", "24", "25b", "26d", "27", "28c", "29", "43", "44b", "47b", "49a")
ALIKE += ("53a", "65", "66a")
# Correct programs, which run one behind the other.
FINE = ("15", "44c", "51c", "56", "58", "62", "66b", "67a", "71a", "71b", "55a", "55b")
AT_ONCE = 12  # runs that wait for their limits do so side by side


class Outcome(NamedTuple):
    """How a run ended: the error, if any, and what was recorded."""

    error: errors.RingError | errors.Interrupted | None
    trace: Trace | None


def of_real_ranks() -> list[str]:
    """Returns the rows that run here: those that do not end alike on simulated ranks, and a few that do."""
    here = {*ELSEWHERE, *OTHERWISE, *ALIKE} - set(FINE)
    return [number for number in ROWS if number in here]


def run(fault: Fault) -> Outcome:
    options = {"limit_s": LIMIT_S, **fault.options}
    try:
        trace = ringsim.trace(fault.worker, world_size=fault.size, args=fault.args(), **options)
    except (errors.RingError, errors.Interrupted) as error:
        return Outcome(error, error.trace)
    assert set(trace.results) <= {None, True}
    return Outcome(None, trace)


@pytest.fixture(scope="module")
def at_their_limits(nothing_left_behind: None) -> dict[str, Future[Outcome]]:
    """Runs those that only a limit ends, or that meet by themselves: nothing says how soon they must end."""
    ringsim.trace(time.monotonic, world_size=2)  # the first run loads torch: none of those that a limit must end
    slow = [number for number in of_real_ranks() if FAULTS[number].within_s is None and number != "69"]  # which interrupts this process
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {number: pool.submit(run, FAULTS[number]) for number in slow}


def test_every_row_has_a_program_and_every_program_a_row() -> None:
    assert ROWS.keys() == FAULTS.keys()
    assert {int(re.sub("[a-z]", "", row)) for row in ROWS} == set(range(1, 72))
    kinds = {ROWS[number].kind for number in of_real_ranks()}
    assert kinds >= {row.kind for row in ROWS.values()} - set(RIGHT)
    assert kinds <= {*KINDS, *RIGHT}


@pytest.mark.parametrize("number", of_real_ranks())
def test_a_fault_ends_as_the_document_says(number: str, at_their_limits: dict[str, Future[Outcome]]) -> None:
    error, trace = at_their_limits[number].result() if number in at_their_limits else run(FAULTS[number])
    judge(number, ROWS[number], error, trace)
    within_s = FAULTS[number].within_s
    if trace is not None and within_s is not None and len(trace.events):
        assert trace.metadata["end_ns"] / 1e9 - last_event_s(trace.events) < within_s


def last_event_s(events: Events) -> float:
    """Returns when the last operation was posted, waited for or done, in seconds from the start of the run."""
    done = events.done_ns[events.status == OK]  # others are ended by the verdict
    return float(max(events.post_ns.max(), events.wait_ns.max(), done.max(initial=0))) / 1e9


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
