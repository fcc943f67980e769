"""No false alarm: correct programs that look as if they were stuck, with the watcher looking as often as it can."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from quiet_programs import PROGRAMS

from ringsim.launch.api import make_kind
from ringsim.launch.job import pack_call
from ringsim.launch.run import RunOptions, run

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left_behind")]

POLL_S = 0.002  # ten times as often as by default


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_that_only_looks_stuck_ends_as_it_should(program: Callable[..., float]) -> None:
    size, expected = PROGRAMS[program]
    for _ in range(2):
        trace = run(pack_call(program, (), {}, seed=0), make_kind(size, "cpu", 60, ring=True), RunOptions(poll_s=POLL_S))
        assert trace.results == [expected(rank, size) for rank in range(size)]
