"""The scheduler: ranks go in the order that you choose, and every order can be tried."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ringsim import current_ring, explore
from ringsim.errors import ArgumentError, Deadlock, PeerExited, RankFailed

Program = tuple[tuple[str, int], ...]  # the operations of a rank, each with its peer


def collect(first: int | None = None) -> list[int]:
    """Rank 0 hears from any rank, then from rank 1, and answers both."""
    number = torch.full((1,), current_ring().rank)
    print("started")
    if current_ring().rank > 0:
        dist.send(number, 0)
        dist.recv(number, 0)
        return []
    heard = [dist.recv(number, first), dist.recv(number, 1)]
    for rank in (1, 2):
        dist.send(number, rank)
    return heard


def test_ranks_go_in_the_order_of_the_choices(capfd: pytest.CaptureFixture[str]) -> None:
    game = explore.scheduler(collect)
    assert game.possible == (0, 1, 2)
    here = r" \(world, tag 0\) at test_scheduler\.py:\d+$"
    texts = ("recv from any rank", "send to 0", "send to 0")
    assert all(re.match(text + here, game.next[rank]) for rank, text in enumerate(texts))
    assert game.posted == []
    assert game.step(2).possible == (0, 1)
    assert [(one.rank, one.op, one.peer) for one in game.blocked] == [(2, "send", 0)]
    assert "rank 2: send to 0" in repr(game)
    assert repr(game).endswith(", blocked\nmatched: 0 messages")
    assert game.step(0).possible == (0, 1, 2)
    assert game.matched[["src", "dst"]].to_numpy().tolist() == [[2, 0]]
    with pytest.raises(ArgumentError, match=r"rank must be one that may go \(0, 1, 2\), got 3"):
        game.step(3)
    game.step(1, 0, 0, 1, 2, 0)
    assert game.finished
    assert game.possible == ()
    assert game.trace.results[0] == [2, 1]
    with pytest.raises(ArgumentError, match=r"may go \(none\), got 0. Use back\(\)"):
        game.step(0)
    assert capfd.readouterr().out == "", "each choice would repeat the output"
    assert game.trace.output == ["started\n"] * 3


def test_an_order_can_deadlock_and_be_undone() -> None:
    game = explore.scheduler(collect).step(0, 1, 0, 2, 1)
    assert game.deadlock is not None
    assert game.deadlock.findings[0].ranks == (0, 1)
    assert isinstance(game.error, Deadlock)
    assert (game.finished, game.possible) == (False, ())
    assert {one.rank for one in game.blocked} == {0, 1, 2}
    assert "ranks 0 and 1 wait for each other" in repr(game)
    assert "ranks 0 and 1 wait for each other" in game._repr_html_()
    assert game.back().deadlock is None
    assert game.possible == (1,)


def test_the_picture_shows_the_order() -> None:
    trace = explore.scheduler(collect).step(2, 0, 1).trace
    posted = {event.rank: event.post_ns for event in trace}
    assert [posted[rank] for rank in (2, 0, 1)] == [1_000, 2_000, 4_000]
    assert "image/png" in explore.scheduler(collect).step(2, 0)._repr_html_()


def test_buttons_choose_ranks() -> None:
    box = explore.scheduler(collect).play()
    buttons, shown = box.children
    rank_0, rank_1, rank_2, back = buttons.children
    rank_2.click()
    assert rank_2.disabled
    assert not rank_0.disabled
    assert not rank_1.disabled
    assert "order so far: 2\n" in shown.value
    back.click()
    assert "order so far: none" in shown.value
    assert not rank_2.disabled


def test_every_order_is_tried() -> None:
    found = explore.scheduler(collect).explore()
    assert found.order is not None
    assert found.error.startswith("deadlock: ranks 0 and 1 wait for each other.")
    assert explore.scheduler(collect).step(*found.order).deadlock is not None
    repaired = explore.scheduler(collect, args=(2,)).explore()
    assert (repaired.tried, repaired.left, repaired.order) == (1, 0, None)
    assert repr(repaired).startswith("no order fails: 1 order tried, and every other order is ")


def gather(count: int) -> None:
    """Rank 0 receives from any rank, several times from each."""
    tensor = torch.zeros(1)
    for _ in range(count * (current_ring().world_size - 1) if current_ring().rank == 0 else count):
        dist.recv(tensor) if current_ring().rank == 0 else dist.send(tensor, 0)


def test_orders_that_differ_are_counted() -> None:
    """Two sends of each of two ranks arrive in 4! / (2! 2!) orders."""
    game = explore.scheduler(gather, args=(2,))
    assert game.explore()[:3] == (6, 0, None)
    some = [game.explore(most=3, seed=seed) for seed in (0, 0)]
    assert some[0] == some[1]
    assert (some[0].tried, some[0].order) == (3, None)
    assert 1 <= some[0].left <= 3
    least = 3 + some[0].left
    assert repr(some[0]) == f"no order failed: 3 orders tried, of at least {least}"


def ask(again: bool) -> None:
    """Rank 0 asks, once or repeatedly, whether its message is there."""
    tensor = torch.zeros(1)
    if current_ring().rank == 1:
        dist.send(tensor, 0)
        return
    message = dist.irecv(tensor, 1)
    while not message.is_completed():
        if not again:
            raise ValueError("too early")


def test_a_question_may_come_before_or_after_the_answer() -> None:
    game = explore.scheduler(ask, world_size=2, args=(False,))
    assert re.match(r"is_completed at test_scheduler\.py:\d+$", game.step(0).next[0])
    assert game.step(1, 0).finished
    assert isinstance(game.back().back().step(0).error, RankFailed)
    found = game.explore()
    assert found.order == (0, 0)
    assert "raised ValueError: too early" in found.error
    patient = explore.scheduler(ask, world_size=2, args=(True,)).explore()
    assert (patient.left, patient.order) == (0, None)


def ask_in_vain() -> None:
    if current_ring().rank == 0:
        message = dist.irecv(torch.zeros(1), 1)
        while not message.is_completed():
            pass


def test_a_question_that_stays_open_is_reported() -> None:
    found = explore.scheduler(ask_in_vain, world_size=2).explore()
    assert "rank 0 keeps calling is_completed" in found.error


def leave_early() -> None:
    if current_ring().rank == 0:
        dist.recv(torch.zeros(1), 1)


def test_a_rank_that_has_left_is_named() -> None:
    game = explore.scheduler(leave_early, world_size=2).step(0)
    assert isinstance(game.error, PeerExited)
    assert game.deadlock is not None
    assert "rank 1 has returned from its worker" in str(game.deadlock)


def exchange(collectives: bool) -> None:
    """All ranks send first, or meet."""
    ring, tensor = current_ring(), torch.ones(1)
    if collectives:
        dist.all_reduce(tensor)
        dist.barrier()
    else:
        dist.send(tensor, ring.succ, group=ring.succ_group)
        dist.recv(tensor, ring.pred, group=ring.pred_group)


def test_semantics_and_collectives() -> None:
    assert explore.scheduler(exchange, args=(False,)).explore().order == (0, 1, 2)
    buffered = explore.scheduler(exchange, args=(False,), semantics="buffered").explore()
    met = explore.scheduler(exchange, args=(True,))
    assert met.next[0].startswith("all_reduce (world) at ")
    assert (buffered.tried, met.explore().tried) == (1, 1)
    with pytest.raises(ArgumentError, match=r'semantics must be "rendezvous" \(Gloo\)'):
        explore.scheduler(exchange, semantics="eager")
    with pytest.raises(ArgumentError, match="world_size must be an integer from 1"):
        explore.scheduler(exchange, world_size=0)


# -- random programs, against an independent model


def run_program(programs: tuple[Program, ...]) -> None:
    handles = []
    for op, peer in programs[current_ring().rank]:
        tensor = torch.zeros(1)
        other = None if peer < 0 else peer
        handle = dist.irecv(tensor, other) if op.endswith("recv") else dist.isend(tensor, peer)
        if op.startswith("i"):
            handles.append(handle)
        else:
            handle.wait()
    for handle in handles:
        handle.wait()


class Model:
    """All orders of programs without clocks, threads or tensors.

    A state holds each rank's position, and the pairs of positions that met.
    """

    def __init__(self, programs: tuple[Program, ...]) -> None:
        self.programs = programs
        self.ends = functools.cache(self._ends)

    def _ends(self, posted: tuple[tuple[int, int], ...]) -> frozenset[bool]:
        """Returns whether the program can end, and whether it can get stuck."""
        met = self._match(posted)
        done = {place for pair in met for place in pair}
        may = [rank for rank in range(len(self.programs)) if self._is_free(rank, posted, done)]
        if not may:
            everything = sum(map(len, self.programs))
            return frozenset({len(posted) == everything == len(done)})
        after = [self.ends((*posted, (rank, self._position(rank, posted)))) for rank in may]
        return frozenset().union(*after)

    def _position(self, rank: int, posted: Any) -> int:
        return sum(one[0] == rank for one in posted)

    def _is_free(self, rank: int, posted: Any, done: set[Any]) -> bool:
        position = self._position(rank, posted)
        program = self.programs[rank]
        if position == len(program):
            return False
        before = (rank, position - 1)
        blocks = position > 0 and not program[position - 1][0].startswith("i")
        return not blocks or before in done

    def _match(self, posted: Any) -> list[tuple[Any, Any]]:
        """Matches in the order of posts, each time with the oldest operation that fits."""
        waiting: list[tuple[int, int]] = []
        met = []
        for new in posted:
            fitting = [old for old in waiting if self._fit(old, new)]
            if fitting:
                waiting.remove(fitting[0])
                met.append((fitting[0], new))
            else:
                waiting.append(new)
        return met

    def _fit(self, one: tuple[int, int], other: tuple[int, int]) -> bool:
        (op, peer), (op_2, peer_2) = (self.programs[rank][at] for rank, at in (one, other))
        if op.endswith("send") == op_2.endswith("send"):
            return False
        if op.endswith("recv"):
            return self._fit(other, one)
        return peer == other[0] and peer_2 in (-1, one[0])


def programs() -> Any:
    def operations(rank: int) -> Any:
        others = [peer for peer in range(3) if peer != rank]
        send = st.tuples(st.sampled_from(["send", "isend"]), st.sampled_from(others))
        recv = st.tuples(st.sampled_from(["recv", "irecv"]), st.sampled_from([-1, *others]))
        return st.lists(send | recv, max_size=3).map(tuple)

    return st.tuples(*map(operations, range(3)))


@given(programs())
def test_the_exploration_finds_a_deadlock_exactly_if_there_is_one(
    found: tuple[Program, ...],
) -> None:
    result = explore.scheduler(run_program, args=(found,)).explore()
    assert (result.order is not None) is (False in Model(found).ends(()))
    assert result.left == 0 or result.order is not None
