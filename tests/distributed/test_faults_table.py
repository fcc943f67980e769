"""The rows of tests/distributed/faults.md that need real ranks.

They are about dead and stopped processes, limits, rendezvous, and failures of torch and Gloo. All
others run on simulated ranks, see test_simulated_faults; a few of them also run here, one of each
kind of finding.
"""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from accusations import accused
from fault_programs import FAULTS
from fault_rows import (
    AS_WRITTEN,
    ELSEWHERE,
    LIMIT_S,
    OTHERWISE,
    RIGHT,
    ROWS,
    Outcome,
    judge_on_ranks,
    run,
)

import ringsim

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

# Rows that end in the same way on simulated ranks, but also run here. Gloo aborts: 8, 27. It is
# silent: 9, 28c.
ALIKE = "1 4b 6a 6c 6d 8 9 13a 13b 18 24 26d 27 28c 29 43 47b 49a 53a 65 66a 68 74b 77a 80b".split()
# Correct programs, which run one after the other.
FINE = "15 44c 51c 56 58 62 66b 67a 71a 71b 55a 55b".split()
# Rows that end differently on simulated ranks, and a few others.
HERE = [number for number in ROWS if number in {*ELSEWHERE, *OTHERWISE, *ALIKE} - set(FINE)]
# The rows that run at the same time, by the number of runs: those that only a limit ends, or that
# have their own rendezvous, and those written as users write them, most of which wait. Row 69
# interrupts this process.
SIDE_BY_SIDE = {
    12: [number for number in HERE if FAULTS[number].within_s is None and number != "69"],
    4: [number for number in HERE if number in AS_WRITTEN],
}


@pytest.fixture(scope="module")
def ended(
    nothing_left_behind: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Future[Outcome]]:
    """The ends of the rows that run at the same time."""
    early, found = tmp_path_factory.mktemp("early"), {}
    # DDP, FSDP and DTensor load it: 1 s in each of their ranks
    (early / "sitecustomize.py").write_text("import torch._dynamo\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(early), prepend=os.pathsep)
        # starts what ranks are forked from: no run that a limit must end loads torch
        ringsim.trace(time.monotonic, world_size=2)
    for at_once, numbers in SIDE_BY_SIDE.items():
        with ThreadPoolExecutor(at_once) as pool:
            found |= {number: pool.submit(run, FAULTS[number]) for number in numbers}
    return found


def test_every_row_has_a_program_and_every_program_a_row() -> None:
    assert ROWS.keys() == FAULTS.keys()
    assert {int(re.sub("[a-z]", "", row)) for row in ROWS} == set(range(1, 91))
    kinds = {ROWS[number].kind for number in HERE}
    assert kinds >= {row.kind for row in ROWS.values()} - set(RIGHT), "one of each runs here"


@pytest.mark.parametrize("number", HERE)
def test_a_fault_ends_as_the_document_says(number: str, ended: dict[str, Future[Outcome]]) -> None:
    judge_on_ranks(number, ended[number].result() if number in ended else run(FAULTS[number]))


def one_after_the_other(size: int) -> dict[str, Any]:
    """Runs the correct programs for the given number of ranks; the last one destroys its groups."""
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
        assert {*results.values()} <= {None, True}, results
    # Row 66b drops a handle on purpose, and no other does.
    assert accused(trace) == ([(ROWS["66b"].kind, (1,))] if size == 2 else [])
    if size == 2:
        (lines,) = (
            {operation.line for operation in one.operations}
            for one in trace.explain().findings
            if one.kind == ROWS["66b"].kind
        )
        assert lines == FAULTS["66b"].lines
