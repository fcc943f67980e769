"""The costs of Gloo on shared cores.

Times computed by hand, and constants recovered from runs that used them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from synthetic import Story

import ringsim
from ringsim import Link, Trace, calibrate, calibration_worker, predict, simulate
from ringsim import comm as dist
from ringsim.errors import ArgumentError
from ringsim.simulator.gloo import list_steps
from ringsim.topologies import GlooCosts, OneMachine
from ringsim.traces.collectives import COLLECTIVES

MS = 1e-3
NOTHING = Link(0.0, 0.0)


def five_messages() -> Trace:
    story = Story(2)
    for at in range(5):
        sent, received = (at + 0.5, at + 0.6, at + 0.7), (at, at + 0.1, at + 0.7)
        story.message(0, 1, sent, received, size_bytes=1000)
    return story.trace()


# A message takes 1 ms on each side; a collective takes 10 ms before its first message.
FREE = replace(
    calibrate(five_messages()),
    link=Link(1 * MS, 0.0),
    sending=NOTHING,
    sending_early_s=0.0,
    receiving_s=0.0,
    gloo=GlooCosts(carrying=Link(2 * MS, 0.0), collective_s=10 * MS),
)
MADE_WITH = replace(
    FREE,
    link=Link(50e-6, 0.5e-9),
    sending=Link(20e-6, 0.1e-9),
    sending_early_s=15e-6,
    receiving_s=10e-6,
    sleep_s=70e-6,
    around_s=30e-6,
    gloo=GlooCosts(
        Link(40e-6, 0.2e-9),
        collective_s=200e-6,
        first_use_s=5 * MS,
        stall_s=4 * MS,
        stall_share=0.1,
    ),
)


def costing(**gloo: float) -> Any:
    return replace(FREE, gloo=replace(FREE.gloo, **gloo))


def ends_ms(
    worker: Callable[..., None], world_size: int, calibration: Any, *args: object, seed: int = 0
) -> list[float]:
    """Returns the end of each rank, in ms."""
    network = {"topology": calibration.topology, "compute": calibration}
    trace = simulate(worker, world_size=world_size, args=args, seed=seed, **network)
    done_ns = trace.to_pandas().groupby("rank")["done_ns"].max()
    return (done_ns * 1e-6).round(6).tolist()


def call(name: str, times: int = 1) -> None:
    tensor = torch.zeros(4)
    for _ in range(times):
        if name == "barrier":
            dist.barrier()
        elif name == "all_reduce":
            dist.all_reduce(tensor)
        else:
            dist.broadcast(tensor, 0)


# Two cores.    barrier of 2      10 ms each in parallel, then one exchange: two messages, 1 ms per
#                                 side, on two cores: 2 ms
#               all_reduce of 2   4 pieces each way, two at a time: 10, then twice 2 x 2 messages
#                                 of 2 x 1 ms on two cores: 4 + 4 ms
#               broadcast of 2    10, and one message, both sides in parallel: 1 ms
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
    assert root == 11  # its three messages leave together, on eight cores
    # 4; 1 and 2, then 5 and 6, to which they send; 3, then 7, to which it sends
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
    stalling = costing(stall_s=50 * MS, stall_share=1.0)
    # the first message; meanwhile rank 1 continues
    assert ends_ms(exchange, 2, stalling, 0.0) == [51, 51]
    # posted 5 ms after the other side; the second message waits for cores
    assert ends_ms(exchange, 2, stalling, 5 * MS) == [7, 7]
    half = costing(stall_s=50 * MS, stall_share=0.5)
    drawn = [tuple(ends_ms(exchange, 2, half, 0.0, seed=seed)) for seed in (0, 1, 2, 3, 4, 5, 0)]
    assert drawn[0] == drawn[-1]  # drawn from the seed
    assert len(set(drawn)) > 1


def test_the_first_operation_of_each_rank_takes_longer_once() -> None:
    slow = costing(first_use_s=100 * MS)
    assert ends_ms(call, 2, slow, "barrier", 2) == [124, 124]
    # four ranks on two cores: 200, and two barriers of 28
    assert max(ends_ms(call, 4, slow, "barrier", 2)) == 256


# -- recovering the constants


def test_constants_are_found_again_in_a_run_that_was_made_with_them() -> None:
    network: dict[str, Any] = {"topology": MADE_WITH.topology, "compute": MADE_WITH}
    trace = simulate(calibration_worker, world_size=2, **network)
    found = calibrate(Trace(trace.events, {**trace.metadata, "source": "measured"}))
    made = MADE_WITH.gloo
    assert made is not None
    assert found.gloo is not None
    assert found.missing == ()
    # CPU time is not the time of the virtual clock: the CPU time of the one to eight messages of a
    # collective has been subtracted from the time of the whole.
    assert found.gloo.collective_s <= made.collective_s + 8 * made.carrying.time_s(0) / 2
    assert found.gloo.collective_s + 8 * found.gloo.carrying.time_s(0) / 2 >= made.collective_s
    assert found.gloo.stall_s == pytest.approx(made.stall_s, rel=0.1)
    # some are hidden by another message, and some wait for a core
    assert found.gloo.stall_share == pytest.approx(made.stall_share, rel=0.35)
    assert found.link.alpha_s == pytest.approx(MADE_WITH.link.alpha_s, rel=0.25)


def test_core_time_is_read_from_the_marks() -> None:
    story = Story(2)
    for number, size_bytes in enumerate([1000] * 4 + [2000] * 4 + [1]):
        at = 10.0 * number
        # 3 ms of main threads, 0.1 or 0.2 ms of other threads on each side, and 7 ms at first
        for rank in range(2):
            main_s = 3 * MS * number + 7 * MS * (number > 0)
            others_s = 0.1 * MS * min(number, 4) + 0.2 * MS * max(number - 4, 0)
            label = f"processor time {main_s + others_s!r} {main_s!r} s"
            story.op(rank, "mark", (at, at, at), label=label)
        sent, received = (at + 1, at + 1, at + 3), (at + 0.5, at + 0.6, at + 3)
        story.message(0, 1, sent, received, size_bytes=size_bytes)
    gloo = calibrate(story.trace()).gloo
    assert gloo is not None
    assert gloo.carrying.time_s(1000) == pytest.approx(0.2 * MS)
    assert gloo.carrying.time_s(2000) == pytest.approx(0.4 * MS)
    assert gloo.first_use_s == pytest.approx(7 * MS)


def test_what_is_not_there_is_said() -> None:
    found = calibrate(five_messages())
    assert found.gloo is None
    assert found.missing[2:] == ("the cost of a collective", "the share of messages that stall")
    assert f"not found: {', '.join(found.missing)}" in str(found)


def test_all_times_are_scaled_and_nothing_else() -> None:
    double = MADE_WITH.scaled(2)
    gloo = {"collective_s": 400e-6, "first_use_s": 10 * MS, "stall_s": 8 * MS, "stall_share": 0.1}
    assert double.topology == OneMachine(
        Link(100e-6, 1e-9), 2, GlooCosts(Link(80e-6, 0.4e-9), **gloo)
    )
    assert (double.sleep_s, double.post_s(True, 0), double.cores) == (140e-6, 40e-6, 2)


def test_the_worker_needs_two_ranks() -> None:
    with pytest.raises(ArgumentError, match="world_size must be 2 for calibration_worker, got 3"):
        simulate(calibration_worker, world_size=3, link=NOTHING)


# -- predictions with them


def ring_of(rounds: int) -> None:
    ring = ringsim.current_ring()
    for _ in range(rounds):
        ringsim.compute(0.001)
        sending = dist.isend(torch.zeros(1), ring.succ, group=ring.succ_group)
        dist.recv(torch.zeros(1), ring.pred, group=ring.pred_group)
        assert sending is not None
        sending.wait()


def test_a_prediction_says_between_which_times_it_may_be() -> None:
    doubtful, again, certain = (
        predict(ring_of, world_size=4, from_trace=replace(made, spread=spread), args=(5,))
        for made, spread in ((MADE_WITH, 0.2), (MADE_WITH, 0.2), (FREE, 0.0))
    )
    low_s, high_s = doubtful.metadata["range_s"]
    assert low_s <= doubtful.makespan_s <= high_s
    assert high_s > low_s
    assert doubtful.metadata == again.metadata
    assert certain.metadata["range_s"] == [certain.makespan_s] * 2


def test_the_time_of_two_runs_is_shared_out() -> None:
    """Each moment counts once.

    ::

    rank 0   compute 4 ms | program 1 | isend 2 | ................ | wait: 3 late, 1 in flight
    rank 1                                        recv at 10: posting 0, transfer 1
    """

    def run(longer_ms: float) -> Trace:
        story, after = Story(2), 11.0 + longer_ms
        story.span(0, "compute 0.004 s", 0.0, 4.0)
        story.op(0, "isend", (5.0, 7.0, after), peer=1, size_bytes=8, tag=0)
        story.op(1, "recv", (10.0, 10.0, after), peer=0, size_bytes=8, tag=0)
        return story.trace()

    table = ringsim.compare(run(0.0), run(2.0)).parts.to_pandas()
    rows = table.set_index(["part", "operation"])[["first_s", "second_s"]] * 1e3
    assert {key: tuple(row) for key, row in rows.round(6).T.to_dict("list").items()} == {
        ("computing", "compute"): (4, 4),
        ("program", ""): (1, 1),
        ("posting", "isend"): (2, 2),
        ("waiting", "isend"): (3, 3),
        ("transfer", "isend"): (1, 3),
        ("transfer", "recv"): (1, 3),
    }


@pytest.mark.parametrize("world_size", [2, 5])
def test_nothing_is_lost_when_time_is_shared_out(world_size: int) -> None:
    network: dict[str, Any] = {"topology": MADE_WITH.topology, "compute": MADE_WITH}
    run = simulate(ring_of, world_size=world_size, args=(3,), **network)
    frame = run.to_pandas().groupby("rank")
    whole_ns = (frame[["done_ns", "wait_ns"]].max().max(axis=1) - frame["post_ns"].min()).sum()
    shares = ringsim.compare(run, run).parts.seconds.sum(axis=0)
    assert shares == pytest.approx([whole_ns * 1e-9] * 2)


# -- the messages that make up Gloo's collectives


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
