"""The two simulators agree: a worker that does a schedule, on the virtual clock, and the schedule alone, computation by computation."""

from __future__ import annotations

import random

import pytest

from ringsim.link import Link
from ringsim.pipeline.executor import rehearse
from ringsim.schedules import SCHEDULE_NAMES, make_schedule
from ringsim.schedules.costs import Costs
from ringsim.schedules.engine import Semantics
from ringsim.simulator.api import simulate
from ringsim.simulator.schedules import simulate_schedule
from ringsim.traces.steps import find_step

SIZE_BYTES = 1000


@pytest.mark.parametrize(("semantics", "ahead"), [("rendezvous", 0), ("rendezvous", 1), ("rendezvous", 2), ("buffered", 1)])
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_computation_ends_at_the_same_time(name: str, semantics: Semantics, ahead: int) -> None:
    """Stages take different times, each link has its own latency and bandwidth, and some are slower than the stages: messages queue."""
    draw = random.Random(f"{name} {semantics} {ahead}")
    for num_ranks, num_microbatches in ((1, 3), (2, 4), (3, 6), (5, 10)):
        schedule = make_schedule(name, num_ranks, num_microbatches)
        forward, input_grad, weight = ([draw.randrange(1, 9) * 1e-3 for _ in range(schedule.num_stages)] for _ in range(3))
        costs = Costs(forward, input_grad, weight)
        pairs = [(src, dst) for src in range(num_ranks) for dst in range(num_ranks) if src != dst]
        links = {pair: Link(draw.randrange(4) * 1e-3, draw.randrange(6) * 1e-6) for pair in pairs}
        link = links or Link(0, 0)
        kwargs = {"size_bytes": SIZE_BYTES, "ahead": ahead}
        trace = simulate(rehearse, world_size=num_ranks, args=(schedule, costs), kwargs=kwargs, link=link, semantics=semantics)
        step = find_step(trace)
        rows = zip(step.stage.tolist(), step.kind.tolist(), step.microbatch.tolist(), strict=True)
        worked = dict(zip(rows, step.end.tolist(), strict=True))
        run = simulate_schedule(schedule, costs, link=link, size_bytes=SIZE_BYTES, semantics=semantics, ahead=ahead)
        reckoned = {tuple(run.operations.action(place)): 1e9 * float(end) for place, end in enumerate(run.ends)}
        assert worked == pytest.approx(reckoned, abs=1e3)  # ns; times are whole ns in a trace, and some hundred are added up
