"""Rehearsing a step: what moves is what the schedule says, and the times are those that were asked for, or longer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ringsim
from ringsim.errors import ArgumentError
from ringsim.pipeline import Costs, lower, make_schedule, rehearse
from ringsim.traces.steps import find_step

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left_behind")]


@pytest.mark.parametrize(("name", "world_size", "chunks"), [("1f1b", 3, 1), ("gpipe", 2, 1), ("interleaved_1f1b", 2, 2), ("zb_v", 2, 2)])
def test_step_is_the_schedules(name: str, world_size: int, chunks: int) -> None:
    schedule = make_schedule(name, world_size, 4, chunks)
    costs = Costs(forward=0.001, input=0.002, weight=0.001)
    trace = ringsim.trace(rehearse, world_size=world_size, args=(schedule, costs), kwargs={"size_bytes": 64, "steps": 2})
    for step in range(2):
        actions = find_step(trace, step)
        for rank in range(world_size):
            assert actions.list_actions(rank) == tuple(action for action in schedule.actions[rank] if action.is_compute)
        wanted = np.array([0.001 if kind == "F" else 0.001 if kind == "W" else 0.002 if kind == "I" else 0.003 for kind in actions.kind])
        assert (actions.end - actions.start >= wanted * 1e9).all()
    sends = sum(action.kind.startswith("SEND") for row in lower(schedule).actions for action in row)
    assert len(trace.messages) == 2 * sends
    assert trace.unmatched == []
    assert set(trace.to_pandas("messages")["size_bytes"]) == {64}


def test_each_message_says_what_it_is_about() -> None:
    schedule = make_schedule("gpipe", 2, 3)
    trace = ringsim.trace(rehearse, world_size=2, args=(schedule, Costs(forward=0, backward=0)), kwargs={"size_bytes": 8})
    table = trace.to_pandas("messages")
    activations = table[table.src == 0]
    assert list(activations.microbatch) == [0, 1, 2]
    assert list(activations.stage) == [0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"costs": Costs(latency=1)}, "latency must be 0, got 1"),
        ({"size_bytes": -1}, "size_bytes must be 0 or more, got -1"),
        ({"steps": 0}, "steps must be 1 or more, got 0"),
        ({"schedule": make_schedule("gpipe", 2, 1)}, "schedule must be for the 1 ranks of the ring, got one for 2"),
    ],
)
def test_value_that_breaks_its_rule(changes: dict[str, Any], what: str) -> None:
    arguments = {"schedule": make_schedule("gpipe", 1, 1), "costs": Costs(forward=0, backward=0), **changes}
    with pytest.raises(ArgumentError, match=what):
        ringsim.trace(rehearse, world_size=1, kwargs=arguments)
