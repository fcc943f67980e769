"""The rows of tests/distributed/faults.md in new ranks, one run each, as users start them."""

from __future__ import annotations

import time

import pytest
from fault_programs import FAULTS
from fault_rows import ROWS, judge_on_ranks, run

import ringsim

pytestmark = pytest.mark.usefixtures("a_server")


@pytest.fixture(scope="module")
def a_server(nothing_left_behind: None) -> None:
    """Loads torch in the process that forks ranks, so that no run with a limit does."""
    ringsim.trace(time.monotonic, world_size=2)


@pytest.mark.parametrize("number", ROWS)
def test_a_fault_ends_as_the_document_says_in_fresh_ranks(number: str) -> None:
    judge_on_ranks(number, run(FAULTS[number]))
