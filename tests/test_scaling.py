"""From few ranks to many: compared with schedules that are simulated with the constants themselves."""

from __future__ import annotations

import pytest

from ringsim.errors import ArgumentError
from ringsim.link import Link
from ringsim.pipeline.executor import rehearse
from ringsim.predict.scaling import scale
from ringsim.schedules import make_schedule
from ringsim.schedules.costs import Costs
from ringsim.simulator.api import simulate
from ringsim.simulator.schedules import simulate_schedule
from ringsim.traces.value import Trace

LINK = Link(alpha_s=200e-6, beta_s_per_byte=0.0)  # of a trace with one size, all counts as latency
SIZE_BYTES = 4096


def recorded(name: str, world_size: int, costs: Costs, *, num_microbatches: int = 8, steps: int = 2) -> Trace:
    """A trace as ranks would leave it that take just these times."""
    schedule = make_schedule(name, world_size, num_microbatches)
    kwargs = {"size_bytes": SIZE_BYTES, "steps": steps}
    trace = simulate(rehearse, world_size=world_size, args=(schedule, costs), kwargs=kwargs, link=LINK)
    return Trace(trace.events, {**trace.metadata, "source": "measured"})


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("world_size", [2, 16])
def test_like_stages_scale_to_the_schedule_itself(name: str, world_size: int) -> None:
    costs = Costs(forward=0.003, input=0.004, weight=0.002)
    found = scale(recorded(name, 4, costs), world_size=world_size)
    wanted = simulate_schedule(name, costs, num_ranks=world_size, num_microbatches=8, link=LINK, size_bytes=SIZE_BYTES)
    assert found.makespan == pytest.approx(wanted.makespan, rel=1e-5)


def test_ends_keep_their_times_and_those_between_take_the_mean() -> None:
    found = scale(recorded("1f1b", 4, Costs(forward=(0.001, 0.002, 0.004, 0.006), backward=0.002)), world_size=9, num_microbatches=32)
    costs = Costs(forward=(0.001, *[0.003] * 7, 0.006), backward=0.002)
    wanted = simulate_schedule("1f1b", costs, num_ranks=9, num_microbatches=32, link=LINK, size_bytes=SIZE_BYTES)
    assert found.makespan == pytest.approx(wanted.makespan, rel=1e-5)
    assert (found.num_ranks, found.num_microbatches) == (9, 32)


def test_two_stages_have_nothing_between_but_their_mean() -> None:
    found = scale(recorded("gpipe", 2, Costs(forward=(0.001, 0.003), backward=0.002)), world_size=5)
    costs = Costs(forward=(0.001, 0.002, 0.002, 0.002, 0.003), backward=0.002)
    wanted = simulate_schedule("gpipe", costs, num_ranks=5, num_microbatches=8, link=LINK, size_bytes=SIZE_BYTES)
    assert found.makespan == pytest.approx(wanted.makespan, rel=1e-5)


def test_what_cannot_be_scaled() -> None:
    trace = recorded("1f1b", 2, Costs(forward=0.001, backward=0.002))
    with pytest.raises(ArgumentError, match="world_size must be an integer from 2, got 1"):
        scale(trace, world_size=1)
    without = Trace(trace.events.select(trace.events.label < 0), trace.metadata)
    with pytest.raises(ArgumentError, match="trace must have a step of a pipeline, got one without"):
        scale(without, world_size=4)
    unknown = make_schedule("gpipe", 2, 2)
    kwargs = {"size_bytes": 8}
    odd = simulate(
        rehearse, world_size=2, args=(type(unknown)("mine", *list(vars(unknown).values())[1:]), Costs()), kwargs=kwargs, link=LINK
    )
    with pytest.raises(ArgumentError, match="must have a step of a known schedule on 2 ranks or more, got 'mine' on 2"):
        scale(odd, world_size=4)
