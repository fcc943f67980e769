"""When messages leave, and when sends are done, under each semantics: times by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringsim
from ringsim import comm as dist
from ringsim.errors import ArgumentError, Deadlock
from ringsim.simulator.api import simulate
from ringsim.traces.value import Trace

LINK = ringsim.Link(alpha_s=1.0, beta_s_per_byte=1.0)  # 4 bytes hold it for 4 s, and arrive 1 s later


def now() -> float:
    from ringsim.state import get_state

    clock = get_state().clock
    assert clock is not None
    return clock.now_s()


def run(worker: Any, *args: Any, world_size: int = 2, **kwargs: Any) -> Trace:
    return simulate(worker, world_size=world_size, args=args, **{"link": LINK, **kwargs})


def late_recv(elements: int) -> tuple[float, ...]:
    """Rank 0 sends at 0, rank 1 receives at 10."""
    ring = ringsim.current_ring()
    tensor = torch.zeros(elements)
    if ring.rank == 0:
        dist.send(tensor, 1)
    else:
        ringsim.compute(10)
        dist.recv(tensor, 0)
    return now()


def late_send(elements: int) -> float:
    """Rank 1 receives at 0, rank 0 sends at 10."""
    tensor = torch.zeros(elements)
    if ringsim.current_ring().rank == 0:
        ringsim.compute(10)
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    return now()


@pytest.mark.parametrize(
    ("worker", "semantics", "elements", "ends"),
    [
        (late_recv, "rendezvous", 1, [15.0, 15.0]),
        (late_recv, "grouped", 1, [15.0, 15.0]),
        (late_recv, "buffered", 1, [0.0, 10.0]),  # it was there at 5
        (late_recv, "buffered(8)", 2, [0.0, 10.0]),
        (late_recv, "buffered(8)", 3, [23.0, 23.0]),
        (late_recv, f"buffered({10**30})", 2, [0.0, 10.0]),  # more than any message has
        (late_recv, "buffered", 3, [0.0, 13.0]),
        (late_send, "rendezvous", 1, [15.0, 15.0]),
        (late_send, "buffered", 1, [10.0, 15.0]),
        (late_send, "buffered(3)", 1, [15.0, 15.0]),
        (late_send, "grouped", 1, [15.0, 15.0]),
    ],
)
def test_a_message_takes_its_time(worker: Any, semantics: str, elements: int, ends: list[float]) -> None:
    assert run(worker, elements, semantics=semantics).results == ends


def change_after_send() -> float:
    """The sender goes on, and writes over what it has sent, before the receiver asks for it."""
    tensor = torch.full((4,), 7.0)
    if ringsim.current_ring().rank == 0:
        dist.send(tensor, 1)
        tensor.fill_(-1.0)
    else:
        ringsim.compute(100)
        tensor.zero_()
        dist.recv(tensor, 0)
    return tensor[0].item()


def test_a_buffered_message_is_what_it_was_when_it_was_sent() -> None:
    assert run(change_after_send, semantics="buffered").results == [-1.0, 7.0]


def several(count: int) -> list[float]:
    """Messages of 4 bytes behind each other on one link, all posted at 0."""
    tensors = [torch.zeros(1) for _ in range(count)]
    if ringsim.current_ring().rank == 0:
        handles = [dist.isend(tensor, 1) for tensor in tensors]
    else:
        handles = [dist.irecv(tensor, 0) for tensor in tensors]
    ends = []
    for handle in handles:
        handle.wait()
        ends.append(now())
    return ends


@pytest.mark.parametrize(
    ("semantics", "sender", "receiver"),
    [
        ("rendezvous", [5.0, 9.0, 13.0], [5.0, 9.0, 13.0]),  # the link is busy for 4 s each
        ("buffered", [0.0, 0.0, 0.0], [5.0, 9.0, 13.0]),
        ("grouped", [5.0, 10.0, 15.0], [5.0, 10.0, 15.0]),  # one after the other
    ],
)
def test_a_busy_link_delays_the_next_message(semantics: str, sender: list[float], receiver: list[float]) -> None:
    assert run(several, 3, semantics=semantics).results == [sender, receiver]


def both_send_first() -> None:
    ring = ringsim.current_ring()
    mine, theirs = torch.zeros(1), torch.zeros(1)
    dist.send(mine, 1 - ring.rank)
    dist.recv(theirs, 1 - ring.rank)


def both_post_in_one_order(together: bool) -> float:
    ring = ringsim.current_ring()
    mine, theirs = torch.full((1,), float(ring.rank)), torch.zeros(1)
    ops = [dist.P2POp(dist.isend, mine, 1 - ring.rank), dist.P2POp(dist.irecv, theirs, 1 - ring.rank)]
    if together:
        handles = dist.batch_isend_irecv(ops)
    else:
        handles = [dist.isend(mine, 1 - ring.rank), dist.irecv(theirs, 1 - ring.rank)]
    for handle in handles:
        handle.wait()
    return theirs.item()


def test_who_sends_first_on_both_sides() -> None:
    assert run(both_send_first, semantics="buffered").results == [None, None]
    for semantics in ("rendezvous", "grouped", "buffered(3)"):
        with pytest.raises(Deadlock) as caught:
            run(both_send_first, semantics=semantics)
        assert caught.value.diagnosis.findings[0].ranks == (0, 1)
        assert "send to" in str(caught.value)


def test_operations_in_a_row_need_a_batch_where_they_are_carried_out_in_order() -> None:
    for semantics in ("rendezvous", "buffered", "grouped"):
        assert run(both_post_in_one_order, True, semantics=semantics).results == [1.0, 0.0]
    assert run(both_post_in_one_order, False, semantics="rendezvous").results == [1.0, 0.0]
    with pytest.raises(Deadlock) as caught:
        run(both_post_in_one_order, False, semantics="grouped")
    assert "batch_isend_irecv" in str(caught.value)
    assert caught.value.diagnosis.findings[0].ranks == (0, 1)


def disagree() -> None:
    ring = ringsim.current_ring()
    first, second = torch.zeros(1), torch.zeros(2 + ring.rank)
    for tensor in (first, second):
        (dist.send if ring.rank == 0 else dist.recv)(tensor, 1 - ring.rank)


def test_sides_that_disagree_are_told_so() -> None:
    for semantics in ("rendezvous", "buffered", "grouped"):
        with pytest.raises(ringsim.errors.MessageMismatch, match="must agree on its size"):
            run(disagree, semantics=semantics)


def from_anybody() -> None:
    if ringsim.current_ring().rank == 0:
        dist.recv(torch.zeros(1))
    else:
        dist.send(torch.zeros(1), 0)


def test_nobody_receives_from_anybody_in_order() -> None:
    run(from_anybody)
    with pytest.raises(ArgumentError, match="recv from anybody"):
        run(from_anybody, semantics="grouped")


@pytest.mark.parametrize("semantics", ["eager", "buffered()", "buffered(-1)", "buffered(1.5)", 7, None])
def test_there_are_no_other_semantics(semantics: Any) -> None:
    with pytest.raises(ArgumentError, match="semantics must be"):
        run(late_recv, 1, semantics=semantics)


def exchange(plan: list[tuple[int, int, int, float, float]]) -> list[float]:
    """Messages (source, destination, elements, when sent, when asked for), all posted without waiting; returns when each recv was done."""
    rank = ringsim.current_ring().rank
    posts = sorted(
        [(sent_s, index, True) for index, (src, _, _, sent_s, _) in enumerate(plan) if src == rank]
        + [(asked_s, index, False) for index, (_, dst, _, _, asked_s) in enumerate(plan) if dst == rank]
    )
    handles = []
    for at_s, index, sends in posts:
        ringsim.compute(max(at_s - now(), 0.0))
        src, dst, elements, _, _ = plan[index]
        tensor = torch.zeros(elements)
        handles.append((index, dist.isend(tensor, dst, tag=index) if sends else dist.irecv(tensor, src, tag=index)))
    ends = [-1.0] * len(plan)
    for index, handle in handles:
        handle.wait()
        if plan[index][1] == rank:
            ends[index] = handle.done_s
    return ends


def expected(plan: list[tuple[int, int, int, float, float]], limit: float) -> list[float]:
    """When each message arrives, reckoned without a simulator: links take what is ready in the order in which it became ready."""
    ready = []
    for index, (src, dst, elements, sent_s, asked_s) in enumerate(plan):
        leaves_s = sent_s if 4 * elements <= limit else max(sent_s, asked_s)
        ready.append((leaves_s, src, dst, index, elements, asked_s))
    free: dict[tuple[int, int], float] = {}
    ends = [0.0] * len(plan)
    for leaves_s, src, dst, index, elements, asked_s in sorted(ready):
        start = max(leaves_s, free.get((src, dst), 0.0))
        free[src, dst] = start + 4 * elements
        ends[index] = max(free[src, dst] + 1, asked_s)
    return ends


times = st.integers(0, 40).map(lambda number: number + 0.0)
messages = st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(1, 4)).map(lambda m: (m[0], (m[0] + m[1]) % 3, m[2]))


@given(st.lists(messages, min_size=1, max_size=6), st.data(), st.sampled_from(["rendezvous", "buffered(8)", "buffered"]))
def test_any_exchange_takes_what_the_links_say(pairs: list[tuple[int, int, int]], data: st.DataObject, semantics: str) -> None:
    """Times that differ by fractions of their own, so that no two messages are ready at one moment."""
    plan = [(*pair, data.draw(times) + 0.01 * index, data.draw(times) + 0.01 * index + 0.005) for index, pair in enumerate(pairs)]
    limit = {"rendezvous": -1.0, "buffered(8)": 8.0, "buffered": float("inf")}[semantics]
    by_rank = run(exchange, plan, world_size=3, semantics=semantics, record=False).results
    found = [max(ends[index] for ends in by_rank) for index in range(len(plan))]
    assert found == pytest.approx(expected(plan, limit), abs=1e-9)


def deadlock_again(times: int) -> list[str]:
    """Waits for what never comes, catches what says so, and goes on to what everybody does."""
    ring, seen = ringsim.current_ring(), []
    pending = dist.irecv(torch.zeros(1), ring.pred, group=ring.pred_group)
    attempts = [pending.wait, pending.wait, dist.barrier, lambda: dist.isend(torch.zeros(1), ring.succ, group=ring.succ_group)]
    for attempt in (attempts * times)[: 4 * times]:
        try:
            attempt()
            seen.append("went on")
        except BaseException as error:
            seen.append(type(error).__name__)
    return seen


@pytest.mark.parametrize("semantics", ["rendezvous", "buffered", "grouped"])
def test_who_catches_a_deadlock_and_goes_on_gets_it_again(semantics: str) -> None:
    with pytest.raises(Deadlock) as caught:
        run(deadlock_again, 2, world_size=3, semantics=semantics)
    assert caught.value.trace.results == [["Deadlock"] * 8] * 3


def never_give_up() -> None:
    while True:
        try:
            dist.recv(torch.zeros(1), 1 - ringsim.current_ring().rank)
        except BaseException:
            continue


def test_who_never_gives_up_is_ended() -> None:
    with pytest.raises(Deadlock):
        run(never_give_up)
