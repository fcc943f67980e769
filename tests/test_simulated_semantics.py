"""The times at which messages leave and sends are done, computed by hand for each semantics."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated_runs import Plan, now_s, post_all, run

import ringsim
from ringsim import comm as dist
from ringsim.errors import ArgumentError, Deadlock, MessageMismatch

# 4 bytes occupy the link for 4 s, and arrive 1 s later
LINK = ringsim.Link(alpha_s=1.0, beta_s_per_byte=1.0)


def late(receiver: bool, elements: int) -> float:
    """Rank 0 sends and rank 1 receives, one of them at 0 and the other at 10."""
    rank = dist.get_rank()
    ringsim.compute(10.0 * (receiver == rank))
    (dist.recv if rank else dist.send)(torch.zeros(elements), 1 - rank)
    return now_s()


@pytest.mark.parametrize(
    ("late_receiver", "semantics", "elements", "ends"),
    [
        (True, "rendezvous", 1, [15.0, 15.0]),
        (True, "buffered", 1, [0.0, 10.0]),  # the message arrived at 5
        (True, "buffered(8)", 2, [0.0, 10.0]),
        (True, "buffered(8)", 3, [23.0, 23.0]),
        (True, f"buffered({10**30})", 2, [0.0, 10.0]),  # larger than any message
        (True, "buffered", 3, [0.0, 13.0]),
        (False, "buffered", 1, [10.0, 15.0]),
        (False, "buffered(3)", 1, [15.0, 15.0]),
        (False, "grouped", 1, [15.0, 15.0]),
    ],
)
def test_a_message_takes_its_time(
    late_receiver: bool, semantics: str, elements: int, ends: list[float]
) -> None:
    assert run(late, 2, late_receiver, elements, link=LINK, semantics=semantics) == ends


def several(count: int) -> list[float]:
    """Several messages of 4 bytes on one link, all posted at 0."""
    begin = dist.irecv if dist.get_rank() else dist.isend
    ends = []
    for handle in [begin(torch.zeros(1), 1 - dist.get_rank()) for _ in range(count)]:
        handle.wait()
        ends.append(now_s())
    return ends


@pytest.mark.parametrize(
    ("semantics", "sender", "receiver"),
    [
        ("rendezvous", [5.0, 9.0, 13.0], [5.0, 9.0, 13.0]),  # the link is busy for 4 s each
        ("buffered", [0.0, 0.0, 0.0], [5.0, 9.0, 13.0]),
        ("grouped", [5.0, 10.0, 15.0], [5.0, 10.0, 15.0]),  # one after another
    ],
)
def test_a_busy_link_delays_the_next_message(
    semantics: str, sender: list[float], receiver: list[float]
) -> None:
    assert run(several, 2, 3, link=LINK, semantics=semantics) == [sender, receiver]


def change_after_send() -> float:
    """The sender continues, and overwrites the sent tensor, before the receiver asks for it."""
    tensor = torch.full((4,), 7.0)
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
        tensor.fill_(-1.0)
    else:
        ringsim.compute(100)
        tensor.zero_()
        dist.recv(tensor, 0)
    return tensor[0].item()


def test_a_buffered_message_is_what_it_was_when_it_was_sent() -> None:
    assert run(change_after_send, 2, semantics="buffered") == [-1.0, 7.0]


# -- orders


def both_send_first(how: str) -> float:
    peer, back = 1 - dist.get_rank(), torch.zeros(1)
    mine = torch.full((1,), float(dist.get_rank()))
    if how == "blocking":
        dist.send(mine, peer)
        dist.recv(back, peer)
        return back.item()
    if how == "batch":
        handles = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, back, peer)]
        )
    else:
        handles = [dist.isend(mine, peer), dist.irecv(back, peer)]
    for handle in handles:
        handle.wait()
    return back.item()


@pytest.mark.parametrize(
    ("how", "goes_on_with", "says"),
    [
        ("blocking", {"buffered"}, "send to"),
        ("posted", {"buffered", "buffered(3)", "rendezvous"}, "batch_isend_irecv"),
        ("batch", {"buffered", "buffered(3)", "rendezvous", "grouped"}, ""),
    ],
)
def test_where_both_ranks_may_send_first(how: str, goes_on_with: set[str], says: str) -> None:
    for semantics in ("rendezvous", "buffered", "buffered(3)", "grouped"):
        if semantics in goes_on_with:
            assert run(both_send_first, 2, how, semantics=semantics) == [1.0, 0.0]
            continue
        with pytest.raises(Deadlock, match=says) as caught:
            run(both_send_first, 2, how, semantics=semantics)
        assert caught.value.diagnosis is not None
        assert caught.value.diagnosis.findings[0].ranks == (0, 1)


def disagree() -> None:
    rank = dist.get_rank()
    for tensor in (torch.zeros(1), torch.zeros(2 + rank)):
        (dist.recv if rank else dist.send)(tensor, 1 - rank)


@pytest.mark.parametrize("semantics", ["rendezvous", "buffered", "grouped"])
def test_sides_that_disagree_are_told_so(semantics: str) -> None:
    with pytest.raises(MessageMismatch, match="size"):
        run(disagree, 2, semantics=semantics)


def from_anybody() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1))
    else:
        dist.send(torch.zeros(1), 0)


def test_nobody_receives_from_anybody_in_order() -> None:
    run(from_anybody, 2)
    with pytest.raises(ArgumentError, match="recv from any source"):
        run(from_anybody, 2, semantics="grouped")


# -- any exchange


def expected(plan: Plan, limit: float) -> list[float]:
    """Returns the arrival of each message, computed without a simulator.

    Links take messages in the order in which they became ready.
    """
    ready = sorted(
        (sent_s if size_bytes <= limit else max(sent_s, asked_s), src, dst, index)
        for index, (src, dst, size_bytes, sent_s, asked_s) in enumerate(plan)
    )
    free: dict[tuple[int, int], float] = {}
    ends = [0.0] * len(plan)
    for leaves_s, src, dst, index in ready:
        _, _, size_bytes, _, asked_s = plan[index]
        free[src, dst] = max(leaves_s, free.get((src, dst), 0.0)) + size_bytes
        ends[index] = max(free[src, dst] + 1, asked_s)
    return ends


times = st.integers(0, 40).map(lambda number: number + 0.0)
messages = st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(1, 4)).map(
    lambda m: (m[0], (m[0] + m[1]) % 3, 4 * m[2])
)


@given(
    st.lists(messages, min_size=1, max_size=6),
    st.data(),
    st.sampled_from(["rendezvous", "buffered(8)", "buffered"]),
)
def test_any_exchange_takes_what_the_links_say(
    pairs: list[tuple[int, int, int]], data: st.DataObject, semantics: str
) -> None:
    """The times have distinct fractions, so no two messages are ready at the same moment."""
    plan = [
        (*pair, data.draw(times) + 0.01 * index, data.draw(times) + 0.01 * index + 0.005)
        for index, pair in enumerate(pairs)
    ]
    limit = {"rendezvous": -1.0, "buffered(8)": 8.0, "buffered": math.inf}[semantics]
    by_rank = run(post_all, 3, plan, link=LINK, semantics=semantics, record=False)
    found = [max(ends[index] for ends in by_rank) for index in range(len(plan))]
    assert found == pytest.approx(expected(plan, limit), abs=1e-9)


# -- ranks that do not give up


def deadlock_again() -> list[str]:
    """Waits for a missing message, catches the errors, and continues to a barrier."""
    pred, seen = (dist.get_rank() - 1) % 3, []
    pending = dist.irecv(torch.zeros(1), pred)
    for attempt in [pending.wait, pending.wait, dist.barrier, dist.barrier]:
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            attempt()
        seen.append(caught.type.__name__)
    return seen


@pytest.mark.parametrize("semantics", ["rendezvous", "buffered", "grouped"])
def test_who_catches_a_deadlock_and_goes_on_gets_it_again(semantics: str) -> None:
    with pytest.raises(Deadlock) as caught:
        run(deadlock_again, 3, semantics=semantics)
    assert caught.value.trace.results == [["Deadlock"] * 4] * 3


def never_give_up() -> None:
    while True:
        with contextlib.suppress(BaseException):
            dist.recv(torch.zeros(1), 1 - dist.get_rank())


def test_who_never_gives_up_is_ended() -> None:
    with pytest.raises(Deadlock):
        run(never_give_up, 2)
