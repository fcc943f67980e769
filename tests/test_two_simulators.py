"""The two simulators agree: a schedule alone, and the same step rehearsed by simulated ranks that really post their messages."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from schedule_reference import draw_schedule

from ringsim import Link, simulate, simulate_schedule
from ringsim.pipeline.executor import rehearse
from ringsim.schedules import SCHEDULE_NAMES, make_schedule
from ringsim.schedules.costs import Costs
from ringsim.schedules.engine import SEMANTICS, Semantics
from ringsim.schedules.schedule import Schedule
from ringsim.traces.events import Events
from ringsim.traces.steps import find_step


def where(events: Events) -> list[tuple[int, int, int, int, str]]:
    groups = [events.tables.groups[number].name for number in events.group]
    return sorted(zip(events.rank.tolist(), events.peer.tolist(), events.tag.tolist(), events.size_bytes.tolist(), groups, strict=True))


def compare(schedule: Schedule, chance: random.Random, ahead: int, semantics: Semantics = "rendezvous") -> int:
    """Holds the computations and the messages of both against each other, to the nanosecond; returns how many messages there were."""
    p, size = schedule.num_ranks, 1000
    costs = Costs(*([chance.uniform(1e-3, 3e-3) for _ in range(schedule.num_stages)] for _ in range(4)))
    links = {(src, dst): Link(chance.uniform(0, 1e-3), chance.uniform(0, 2e-6)) for src, dst in product(range(p), repeat=2) if src != dst}
    worked = simulate(
        rehearse, world_size=p, args=(schedule, costs), kwargs={"size_bytes": size, "ahead": ahead}, link=links, semantics=semantics
    )
    alone = simulate_schedule(schedule, costs, link=links, size_bytes=size, ahead=ahead, semantics=semantics).trace()
    mine, theirs = find_step(alone), find_step(worked)
    assert [mine.list_actions(rank) for rank in mine.ranks] == [theirs.list_actions(rank) for rank in theirs.ranks]
    for name in ("start", "end"):
        assert np.abs(getattr(mine, name) - getattr(theirs, name)).max() <= 1, name
    for name in ("send", "recv"):
        ours, others = (trace.events.select(getattr(trace.messages, name)) for trace in (alone, worked))
        assert where(ours) == where(others)
        for rank in range(p):
            for column in ("post_ns", "done_ns") if name == "recv" else ("post_ns",):
                one, other = (np.sort(getattr(events, column)[events.rank == rank]) for events in (ours, others))
                assert np.abs(one - other).max(initial=0) <= 1, (name, column, rank)
    return len(alone.messages)


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_schedule(name: str, semantics: Semantics) -> None:
    chance, sizes = random.Random(name), [(1, 2, 1), (2, 3, 1), (3, 6, 0), (4, 8, 1), (5, 4, 2)]
    assert sum(compare(make_schedule(name, p, m), chance, ahead, semantics) for p, m, ahead in sizes)


def test_schedules_of_ones_own() -> None:
    chance = random.Random(11)
    schedules = [schedule for schedule in (draw_schedule(chance) for _ in range(40)) if all(schedule.actions)]
    assert sum(compare(schedule, chance, chance.randint(0, 2)) for schedule in schedules) > 100
