"""The rows of docs/faults.md in ranks that have loaded and done nothing before.

As users start theirs: one run for each. The other tests of the table share what a first use costs:
torch's modules are loaded early, or the ranks are simulated.
"""

from __future__ import annotations

import time

import pytest
from fault_programs import FAULTS
from fault_rows import ROWS, judge_on_ranks, run

import ringsim

pytestmark = pytest.mark.usefixtures("a_server")

# One row for each kind of finding: those whose first use takes long, if there are any. All others
# run in `make test-long`.
QUICK = {ROWS[number].kind: number for number in ROWS}
QUICK |= {
    ROWS[number].kind: number
    for number in ("1", "6c", "9", "18", "27", "86d", "49a", "39a", "43", "65", "70", "85b", "87a")
}


@pytest.fixture(scope="module")
def a_server(nothing_left_behind: None) -> None:
    """Ranks are forked from a process that has loaded torch.

    No run that a limit must end does so.
    """
    ringsim.trace(time.monotonic, world_size=2)


@pytest.mark.parametrize(
    "number",
    [
        number if number in QUICK.values() else pytest.param(number, marks=pytest.mark.long)
        for number in ROWS
    ],
)
def test_a_fault_ends_as_the_document_says_in_fresh_ranks(number: str) -> None:
    judge_on_ranks(number, run(FAULTS[number]))
