"""The scheduler: ranks go in the order that you choose, and every order can be tried."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import tempfile
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ringsim import current_ring, explore
from ringsim.errors import ArgumentError, Deadlock, PeerExited, RankFailed, RunTimeout

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
    assert repr(game).endswith("\nmatched: 0 messages")
    assert game.step(2).possible == (0, 1)
    assert re.search(r"^rank 2: send to 0 .*, blocked\nmatched: 0 messages$", repr(game), re.M)
    assert ", posted\n" not in repr(game)
    assert game.step(0).possible == (0, 1, 2)
    assert repr(game).endswith("\nmatched: 1 message")
    assert game.trace.to_pandas("messages")[["src", "dst"]].to_numpy().tolist() == [[2, 0]]
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
    assert {event.rank for event in game.trace if event.status != "ok"} == {0, 1, 2}
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


def ask_twice() -> None:
    """Rank 0 asks twice in a row; only the answers "no" and "no" are an error."""
    message = dist.isend(torch.zeros(1), 1) if current_ring().rank == 0 else None
    if message is None:
        dist.recv(torch.zeros(1), 0)
    elif not any(message.is_completed() for _ in range(2)):
        raise ValueError("slow")


def test_questions_that_are_repeated_a_few_times_are_counted() -> None:
    """Before 0.4, a second question at the same line was taken for the first one."""
    found = explore.scheduler(ask_twice, world_size=2).explore()
    assert found.order == (0, 0, 0)
    assert "slow" in found.error


def wait_for_all() -> None:
    """Each rank asks again and again for the message of the previous rank."""
    ring = current_ring()
    sent = dist.isend(torch.zeros(1), ring.succ)
    message = dist.irecv(torch.zeros(1), ring.pred)
    while not message.is_completed():
        pass
    sent.wait()


def test_a_loop_of_questions_is_one_question() -> None:
    """A rank need not ask again in the same state before its message comes."""
    found = explore.scheduler(wait_for_all, world_size=4).explore()
    assert (found.left, found.order) == (0, None)
    assert found.tried < 100


def break_down(how: str) -> None:
    """Rank 0 loops, or kills the process, if the message of rank 2 comes first."""
    if current_ring().rank > 0:
        dist.send(torch.zeros(1), 0)
        return
    if dist.recv(torch.zeros(1)) == 2:
        ctypes.string_at(0) if how == "dies" else time.sleep(60)
    dist.recv(torch.zeros(1))


def test_an_order_may_crash_or_exceed_its_limit() -> None:
    with pytest.raises(RunTimeout, match=r"did not end within limit_s=3 s"):
        explore.scheduler(break_down, args=("loops",)).explore(limit_s=3)
    with pytest.raises(RankFailed, match="SIGSEGV"):
        explore.scheduler(break_down, args=("dies",)).explore()


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


def run_program(programs: tuple[Program, ...], path: str) -> None:
    """Runs a rank's program, and appends a line with its values and answers to a file."""
    rank, handles, seen = current_ring().rank, [], []
    for position, (op, number) in enumerate(programs[rank]):
        if op == "test":
            seen += [float(handle.is_completed()) for handle, _ in handles[number:][:1]]
            continue
        tensor = torch.full((1,), 10.0 * rank + position)
        other = None if number < 0 else number
        if op.endswith("recv"):
            handles.append((dist.irecv(tensor, other), tensor))
        else:
            handles.append((dist.isend(tensor, number), torch.zeros(1)))
        if not op.startswith("i"):
            handles[-1][0].wait()
    for handle, tensor in handles:
        handle.wait()
        seen.append(tensor.item())
    with open(path, "a") as file:  # each order has its own process
        file.write(f"{os.getpid()} {rank} {seen}\n")


Posted = tuple[tuple[int, int], ...]
Seen = tuple[tuple[float, ...], ...]


class Model:
    """All interleavings of programs, without clocks, threads or tensors.

    A state holds the steps so far, each a rank and its position, and the answers of each rank.
    """

    def __init__(self, programs: tuple[Program, ...], buffered: bool) -> None:
        self.programs, self.buffered = programs, buffered
        self.ends = functools.cache(self._ends)

    def _ends(self, posted: Posted, seen: Seen) -> frozenset[Seen | None]:
        """Returns the results with which the programs can end, or None if they can get stuck."""
        met = self._match(posted)
        done = {place for pair in met for place in pair}
        if self.buffered:
            done |= {place for place in posted if self._op(place).endswith("send")}
        ranks = range(len(self.programs))
        may = [rank for rank in ranks if self._is_free(rank, posted, done)]
        if may:
            return frozenset().union(*(self._go(rank, posted, seen, done) for rank in may))
        everything = {(rank, at) for rank in ranks for at in range(len(self.programs[rank]))}
        messages = {place for place in everything if self._op(place) != "test"}
        if not messages <= done or len(posted) < len(everything):
            return frozenset({None})
        sources = {recv: 10.0 * send[0] + send[1] for send, recv in met}
        values = [
            tuple(sources.get(place, 0.0) for place in sorted(messages) if place[0] == rank)
            for rank in ranks
        ]
        return frozenset({tuple(one + two for one, two in zip(seen, values, strict=True))})

    def _go(self, rank: int, posted: Posted, seen: Seen, done: set[Any]) -> frozenset[Any]:
        at = self._position(rank, posted)
        op, number = self.programs[rank][at]
        if op == "test":
            earlier = [one for one in range(at) if self._op((rank, one)) != "test"]
            answers = tuple(float((rank, one) in done) for one in earlier[number:][:1])
            mine = (*seen[rank], *answers)
            seen = (*seen[:rank], mine, *seen[rank + 1 :])
        return self.ends((*posted, (rank, at)), seen)

    def _op(self, place: tuple[int, int]) -> str:
        return self.programs[place[0]][place[1]][0]

    def _position(self, rank: int, posted: Posted) -> int:
        return sum(one[0] == rank for one in posted)

    def _is_free(self, rank: int, posted: Posted, done: set[Any]) -> bool:
        position = self._position(rank, posted)
        if position == len(self.programs[rank]):
            return False
        before = (rank, position - 1)
        return position == 0 or not self._op(before).startswith(("s", "r")) or before in done

    def _match(self, posted: Posted) -> list[tuple[Any, Any]]:
        """Returns pairs of a send and a recv, each matched with the oldest one that fits."""
        waiting: list[tuple[int, int]] = []
        met = []
        for new in posted:
            fitting = [old for old in waiting if self._fit(old, new) or self._fit(new, old)]
            if fitting:
                waiting.remove(fitting[0])
                pair = fitting[0], new
                met.append(pair if self._op(new).endswith("recv") else pair[::-1])
            elif self._op(new) != "test":
                waiting.append(new)
        return met

    def _fit(self, send: tuple[int, int], recv: tuple[int, int]) -> bool:
        (op, peer), (op_2, peer_2) = (self.programs[rank][at] for rank, at in (send, recv))
        sides = op.endswith("send") and op_2.endswith("recv")
        return sides and peer == recv[0] and peer_2 in (-1, send[0])


def programs(size: int, most: int) -> Any:
    def operations(rank: int) -> Any:
        others = [peer for peer in range(size) if peer != rank]
        send = st.tuples(st.sampled_from(["send", "isend"]), st.sampled_from(others))
        recv = st.tuples(st.sampled_from(["recv", "irecv"]), st.sampled_from([-1, *others]))
        test = st.tuples(st.just("test"), st.integers(0, most - 2))
        return st.lists(send | recv | test, max_size=most).map(tuple)

    return st.tuples(*map(operations, range(size)))


@st.composite
def fitting_programs(draw: Any, size: int, most: int) -> tuple[Program, ...]:
    """Programs whose messages fit in one interleaving at least, with questions in between."""
    found: list[list[tuple[str, int]]] = [[] for _ in range(size)]
    for _ in range(draw(st.integers(1, size * most // 2))):
        free = [rank for rank in range(size) if len(found[rank]) < most]
        if len(free) < 2:
            break
        src, dst = draw(st.permutations(free))[:2]
        found[src].append((draw(st.sampled_from(["send", "isend", "isend"])), dst))
        source = draw(st.sampled_from([-1, -1, src]))
        found[dst].append((draw(st.sampled_from(["recv", "irecv", "irecv"])), source))
        if len(found[asker := draw(st.sampled_from(free))]) < most:
            question = ("test", draw(st.integers(0, len(found[asker]))))
            found[asker].append(question) if draw(st.booleans()) else None
    return tuple(map(tuple, found))


@given(
    programs(3, 3) | fitting_programs(3, 3) | fitting_programs(3, 4) | fitting_programs(2, 4),
    st.booleans(),
)
def test_the_exploration_finds_all_results_of_all_interleavings(
    found: tuple[Program, ...], buffered: bool
) -> None:
    ends = Model(found, buffered).ends((), ((),) * len(found))
    with tempfile.NamedTemporaryFile("r") as file:
        result = explore.scheduler(
            run_program,
            world_size=len(found),
            args=(found, file.name),
            semantics="buffered" if buffered else "rendezvous",
        ).explore()
        lines = [line.split(maxsplit=2) for line in file]
    assert (result.order is not None) is (None in ends)
    if result.order is not None:
        return
    assert result.left == 0
    orders: dict[str, dict[str, Any]] = {}
    for pid, rank, seen in lines:
        orders.setdefault(pid, {})[rank] = tuple(json.loads(seen))
    whole = [order for order in orders.values() if len(order) == len(found)]
    assert {tuple(order[str(rank)] for rank in range(len(found))) for order in whole} == ends
    assert result.tried <= len(whole)
