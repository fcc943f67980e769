"""The rows of tests/distributed/faults.md in ranks that have loaded and done nothing before.

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


@pytest.fixture(scope="module")
def a_server(nothing_left_behind: None) -> None:
    """Ranks are forked from a process that has loaded torch.

    No run that a limit must end does so.
    """
    ringsim.trace(time.monotonic, world_size=2)


@pytest.mark.parametrize("number", ROWS)
def test_a_fault_ends_as_the_document_says_in_fresh_ranks(number: str) -> None:
    judge_on_ranks(number, run(FAULTS[number]))
