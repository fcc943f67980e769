"""What Gloo costs on shared cores.

Times typed out, and constants found again in runs that were made with them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from synthetic import Story

import ringsim
from ringsim import Link, Trace, calibrate, calibration_worker, predict, simulate
from ringsim import comm as dist
from ringsim.compute_costs import PROCESSOR
from ringsim.errors import ArgumentError
from ringsim.prediction.calibration import Calibration
from ringsim.simulator.gloo import list_steps
from ringsim.topologies import GlooCosts, OneMachine
from ringsim.traces.collectives import COLLECTIVES

MS = 1e-3
# A message takes 1 ms on each side, and a collective 10 ms before its first.
GLOO = GlooCosts(carrying=Link(2 * MS, 0.0), collective_s=10 * MS)
FREE = Calibration(
    link=Link(1 * MS, 0.0), sending=Link(0.0, 0.0), sending_early_s=0.0, receiving_s=0.0,
    sleep_s=0.0, around_s=0.0,
    cores=2, costs=None, num_messages=3, sizes_bytes=(1,), gloo=GLOO,
)  # fmt: skip


def ends_ms(
    worker: object, world_size: int, calibration: Calibration, *args: object, seed: int = 0
) -> list[float]:
    """When each rank is through, in ms."""

    def run() -> float:
        worker(*args)  # type: ignore[operator]
        return ringsim.current_ring().rank

    trace = simulate(
        run, world_size=world_size, topology=calibration.topology, compute=calibration, seed=seed
    )
    done = trace.events.done_ns
    return [
        round(float(done[trace.events.rank == rank].max()) * 1e-6, 6) for rank in range(world_size)
    ]


def call(name: str) -> None:
    tensor = torch.zeros(4)
    {
        "barrier": dist.barrier,
        "all_reduce": lambda: dist.all_reduce(tensor),
        "broadcast": lambda: dist.broadcast(tensor, 0),
    }[name]()


# Two cores.    barrier of 2      10 ms each at once, then one exchange: two messages, 1 ms a side,
#                                 on two cores: 2 ms
#               all_reduce of 2   4 pieces each way, two at once: 10, then twice 2 x 2 messages
#                                 of 2 x 1 ms on two cores: 4 + 4 ms
#               broadcast of 2    10, and one message, both sides at once: 1 ms
#               barrier of 4      ranks 0 and 1 until 10, 2 and 3 until 20; 4 messages of 2 x 1 ms
#                                 are 4 ms of two cores, twice
@pytest.mark.parametrize(
    ("name", "ranks", "end_ms"),
    [("barrier", 2, 12), ("all_reduce", 2, 18), ("broadcast", 2, 11), ("barrier", 4, 28)],
)
def test_collectives_take_what_gloo_does_on_the_cores(name: str, ranks: int, end_ms: float) -> None:
    assert max(ends_ms(call, ranks, FREE, name)) == end_ms


def test_a_rank_goes_on_when_its_own_messages_are_there() -> None:
    root, *others = ends_ms(call, 8, replace(FREE, cores=8), "broadcast")
    assert root == 11  # its three messages leave at once, on eight cores
    # 4; 1 and 2, 5 and 6 whom they tell; 3, and 7 whom it tells
    assert sorted(others) == [11, 12, 12, 12, 12, 13, 13]


def exchange(apart_s: float) -> None:
    rank = dist.get_rank()
    if rank:
        ringsim.compute(apart_s)
    sending = dist.isend(torch.zeros(1), 1 - rank)
    dist.recv(torch.zeros(1), 1 - rank)
    assert sending is not None
    sending.wait()


def test_messages_stall_where_both_ranks_are_at_work_on_their_connection() -> None:
    stalling = replace(FREE, gloo=replace(GLOO, stall_s=50 * MS, stall_share=1.0))
    # the first message; rank 1 goes on beside it
    assert ends_ms(exchange, 2, stalling, 0.0) == [51, 51]
    # posted 5 ms after the other side; the second one waits for cores
    assert ends_ms(exchange, 2, stalling, 5 * MS) == [7, 7]


def test_which_messages_stall_is_drawn_from_the_seed() -> None:
    half = replace(FREE, gloo=replace(GLOO, stall_s=50 * MS, stall_share=0.5))
    drawn = [tuple(ends_ms(exchange, 2, half, 0.0, seed=seed)) for seed in range(12)]
    assert drawn == [tuple(ends_ms(exchange, 2, half, 0.0, seed=seed)) for seed in range(12)]
    assert len(set(drawn)) > 1


def test_the_first_operation_of_each_rank_takes_longer_once() -> None:
    def twice() -> None:
        call("barrier")
        call("barrier")

    slow = replace(FREE, gloo=replace(GLOO, first_use_s=100 * MS))
    assert ends_ms(twice, 2, slow) == [124, 124]
    # four ranks on two cores: 200, and two barriers of 28
    assert max(ends_ms(twice, 4, slow)) == 256


@given(
    name=st.sampled_from(sorted({row.name for row in COLLECTIVES.values()})),
    count=st.integers(2, 9),
    root=st.integers(0, 8),
    size_bytes=st.integers(0, 1 << 26),
)
def test_every_message_of_a_collective_has_two_sides(
    name: str, count: int, root: int, size_bytes: int
) -> None:
    sent, received = Counter[tuple[int, int, float]](), Counter[tuple[int, int, float]]()
    for place in range(count):
        for step in list_steps(name, place, count, root % count, size_bytes)[0]:
            sent.update((place, other, step.size_bytes) for other in step.to)
            received.update((other, place, step.size_bytes) for other in step.source)
    assert sent == received
    assert sum(sent.values()) > 0
    assert max(size for _, _, size in sent) <= max(size_bytes, 1 << 20)


@pytest.mark.parametrize(("count", "steps"), [(2, 4), (4, 12), (8, 28)])
def test_an_all_reduce_moves_every_byte_round_the_ring_twice(count: int, steps: int) -> None:
    found, under_way = list_steps("all_reduce", 1, count, -1, 4096)
    assert (len(found), under_way) == (steps, 2)
    # the least that an all_reduce can move
    assert sum(step.size_bytes for step in found) == 2 * (count - 1) / count * 4096


# -- finding them


MADE_WITH = Calibration(
    link=Link(50e-6, 0.5e-9), sending=Link(20e-6, 0.1e-9), sending_early_s=15e-6, receiving_s=10e-6,
    sleep_s=70e-6, around_s=30e-6,
    cores=2, costs=None, num_messages=32, sizes_bytes=(1024,),
    gloo=GlooCosts(Link(40e-6, 0.2e-9), collective_s=200e-6, first_use_s=5 * MS, stall_s=4 * MS,
                   stall_share=0.1),
)  # fmt: skip


def test_constants_are_found_again_in_a_run_that_was_made_with_them() -> None:
    trace = simulate(
        calibration_worker, world_size=2, topology=MADE_WITH.topology, compute=MADE_WITH
    )
    found = calibrate(Trace(trace.events, {**trace.metadata, "source": "measured"}))
    made = MADE_WITH.gloo
    assert made is not None
    assert found.gloo is not None
    # Processor time is not that of the virtual clock: what the messages of a collective take of it,
    # one to eight, has been taken off the time of the whole.
    assert found.gloo.collective_s <= made.collective_s + 8 * made.carrying.time_s(0) / 2
    assert found.gloo.collective_s + 8 * found.gloo.carrying.time_s(0) / 2 >= made.collective_s
    assert found.gloo.stall_s == pytest.approx(made.stall_s, rel=0.1)
    # some are hidden behind another one
    assert found.gloo.stall_share == pytest.approx(made.stall_share, rel=0.35)
    assert found.missing == ()
    # some wait for a core
    assert found.link.alpha_s == pytest.approx(MADE_WITH.link.alpha_s, rel=0.25)


def test_core_time_is_read_from_the_marks() -> None:
    story = Story(2)
    for number, size_bytes in enumerate([1000] * 4 + [2000] * 4 + [1]):
        at = 10.0 * number
        # 3 ms of main threads, and 0.1 or 0.2 ms of others on each side; and 7 ms at first
        for rank in range(2):
            main_s = 3 * MS * number + 7 * MS * (number > 0)
            others_s = 0.1 * MS * min(number, 4) + 0.2 * MS * max(number - 4, 0)
            story.op(
                rank, "mark", (at, at, at), label=f"{PROCESSOR}{main_s + others_s!r} {main_s!r} s"
            )
        story.message(
            0, 1, (at + 1, at + 1, at + 3), (at + 0.5, at + 0.6, at + 3), size_bytes=size_bytes
        )
    gloo = calibrate(story.trace()).gloo
    assert gloo is not None
    assert (gloo.carrying.time_s(1000), gloo.carrying.time_s(2000)) == pytest.approx(
        (0.2 * MS, 0.4 * MS)
    )
    assert gloo.first_use_s == pytest.approx(7 * MS)


def test_what_is_not_there_is_said() -> None:
    story = Story(2)
    for at in range(5):
        story.message(
            0, 1, (at + 0.5, at + 0.6, at + 0.7), (at, at + 0.1, at + 0.7), size_bytes=1000
        )
    found = calibrate(story.trace())
    assert found.gloo is None
    assert len(found.missing) == 4
    assert found.missing[2:] == ("what a collective costs", "how often messages stall")
    assert "world_size=2) takes a few seconds and shows everything" in str(found)


def test_all_times_are_scaled_and_nothing_else() -> None:
    double = MADE_WITH.scaled(2)
    assert double.topology == OneMachine(
        Link(100e-6, 1e-9),
        2,
        GlooCosts(
            Link(80e-6, 0.4e-9),
            collective_s=400e-6,
            first_use_s=10 * MS,
            stall_s=8 * MS,
            stall_share=0.1,
        ),
    )
    assert (double.sleep_s, double.post_s(True, 0), double.cores) == (140e-6, 40e-6, 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stall_share": 1.5}, "stall_share must be a number from 0 to 1, got 1.5"),
        ({"stall_s": -1.0}, "stall_s must be from 0"),
        ({"first_use_s": "1"}, "first_use_s must be from 0"),
    ],
)
def test_costs_of_gloo_are_checked(values: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        GlooCosts(Link(0.0, 0.0), **values)  # type: ignore[arg-type]


def test_the_worker_needs_two_ranks() -> None:
    with pytest.raises(ArgumentError, match="world_size must be 2 for calibration_worker, got 3"):
        simulate(calibration_worker, world_size=3, link=Link(0.0, 0.0))


# -- what comes of it


def ring_of(rounds: int) -> None:
    ring = ringsim.current_ring()
    for _ in range(rounds):
        ringsim.compute(0.001)
        sending = dist.isend(torch.zeros(1), ring.succ, group=ring.succ_group)
        dist.recv(torch.zeros(1), ring.pred, group=ring.pred_group)
        assert sending is not None
        sending.wait()


def test_a_prediction_says_between_which_times_it_may_be() -> None:
    predicted = predict(ring_of, world_size=4, from_trace=replace(MADE_WITH, spread=0.2), args=(5,))
    low_s, high_s = predicted.metadata["range_s"]
    assert low_s <= predicted.makespan_s <= high_s
    assert high_s > low_s
    certain = predict(ring_of, world_size=4, from_trace=replace(FREE, spread=0.0), args=(5,))
    assert certain.metadata["range_s"] == [certain.makespan_s] * 2
    assert (
        predicted.metadata
        == predict(
            ring_of, world_size=4, from_trace=replace(MADE_WITH, spread=0.2), args=(5,)
        ).metadata
    )


def test_the_time_of_two_runs_is_shared_out() -> None:
    """Each moment counts once.

    ::

    rank 0   compute 4 ms | program 1 | isend 2 | ................ | wait: 3 late, 1 on its way
    rank 1                                        recv at 10: posting 0, transfer 1
    """

    def run(longer_ms: float) -> Trace:
        story, after = Story(2), 11.0 + longer_ms
        story.span(0, "compute 0.004 s", 0.0, 4.0)
        story.op(0, "isend", (5.0, 7.0, after), peer=1, size_bytes=8, tag=0)
        story.op(1, "recv", (10.0, 10.0, after), peer=0, size_bytes=8, tag=0)
        return story.trace()

    rows = (
        ringsim.compare(run(0.0), run(2.0))
        .parts.to_pandas()
        .set_index(["part", "operation"])[["first_s", "second_s"]]
    )
    assert {
        key: tuple(values) for key, values in (rows * 1e3).round(6).T.to_dict("list").items()
    } == {
        ("computing", "compute"): (4, 4),
        ("program", ""): (1, 1),
        ("posting", "isend"): (2, 2),
        ("waiting", "isend"): (3, 3),
        ("transfer", "isend"): (1, 3),
        ("transfer", "recv"): (1, 3),
    }


@given(rounds=st.integers(1, 4), world_size=st.integers(2, 5), seed=st.integers(0, 9))
def test_nothing_is_lost_when_time_is_shared_out(rounds: int, world_size: int, seed: int) -> None:
    run = simulate(
        ring_of,
        world_size=world_size,
        args=(rounds,),
        topology=MADE_WITH.topology,
        compute=MADE_WITH,
        seed=seed,
    )
    events = run.events
    whole_ns = sum(
        int(max(events.done_ns[own].max(), events.wait_ns[own].max()) - events.post_ns[own].min())
        for own in (events.rank == rank for rank in range(world_size))
    )
    assert ringsim.compare(run, run).parts.seconds.sum(axis=0) == pytest.approx(
        [whole_ns * 1e-9] * 2
    )
