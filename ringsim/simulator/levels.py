"""Any schedule, level after level over all ranks at once, with numpy: for one set of prices, or for K at once.

Every computation and every message has a level, the first at which all that it needs stands on levels before (a computation may need a
message of its own level). So a level is two gathers and a few array operations, whatever the schedule looks like; and backwards, it says
how late everything may end.

GPipe and 1F1B, level after level over all ranks at once, with numpy: the time of a step with memory for the ranks alone.

1F1B, the level of each computation (P = 3, M = 4); whatever a computation needs stands one or two levels before it::

    level     0  1  2  3  4  5  6  7  8  9 10 11
    rank 0   F0    F1    F2 B0 F3 B1    B2    B3
    rank 1      F0    F1 B0 F2 B1 F3 B2    B3
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3

A level has forwards on every second rank and backwards on the ones between: two slices, a few array operations each.

One schedule with K sets of costs at once: what if this stage were faster, or that link slower?
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from ringsim.simulator.columns import Linear, Operations, Prices, stack_prices
from ringsim.simulator.compiled import sweep_compiled, work_through_compiled
from ringsim.traces.events import Ints

__all__ = ["Levels", "Sweep", "WhatIfs", "find_levels", "sweep", "time_variants"]


@dataclass(frozen=True, eq=False)
class Levels:
    """The order in which computations and messages can be worked out together.

    Attributes:
        operations: the schedule.
        order: the computations by level, shape (n,).
        bounds: where each level begins in ``order``, and n.
        messages: the messages by level, as the computations that wait for them, shape (m,).
        message_bounds: where each level begins in ``messages``, and m.
    """

    operations: Operations
    order: Ints
    bounds: list[int]
    messages: Ints
    message_bounds: list[int]

    @cached_property
    def _place(self) -> Ints:
        """Where each computation stands in ``order``; one more, -1, stays -1."""
        place = np.full(len(self.order) + 1, -1, dtype=np.int64)
        place[self.order] = np.arange(len(self.order))
        return place

    @cached_property
    def _message_place(self) -> Ints:
        """Where the message of each computation stands in ``messages``; -1 without one."""
        place = np.full(len(self.order) + 1, -1, dtype=np.int64)
        place[self.messages] = np.arange(len(self.messages))
        return place

    @cached_property
    def _needs(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """In places: of each computation the one before it and its message; of each message what it is sent, posted and queued after."""
        operations, place = self.operations, self._place
        sent, posted = place[operations.sent_after[self.messages]], place[operations.posted_after[self.messages]]
        queued = self._message_place[operations.queued_after[self.messages]]
        return place[operations.before[self.order]], self._message_place[self.order], sent, posted, queued

    def _price(self, prices: Prices) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Returns tables of prices in one row a kind and stage, and which row each computation and message has."""
        operations, stages = self.operations, self.operations.num_stages
        duration, occupancy, latency = (
            table.reshape(-1, *table.shape[2:]) for table in (prices.duration, prices.occupancy, prices.latency)
        )
        row = operations.kind[self.order].astype(np.int64) * stages + operations.stage[self.order]
        message_row = operations.direction[self.messages].astype(np.int64) * stages + operations.stage[self.messages]
        return duration, occupancy, latency, row, message_row

    def time(self, prices: Prices, *, rendezvous: bool) -> tuple[Ints, Ints]:
        """Times every computation and message.

        Args:
            prices: float64, with or without K.
            rendezvous: whether a message starts only when its receive is posted, too.

        Returns:
            When each computation ends, and when its message starts to go over its link (-inf without one); shapes (n,) or (n, K).
        """
        duration, occupancy, latency, row, message_row = self._price(prices)
        before, message, sent, posted, queued = self._needs
        count, extra = len(self.order), duration.shape[1:]
        ends = np.zeros((count + 1, *extra))  # the last one, which -1 picks, is the start of the step
        started = np.full((len(self.messages) + 1, *extra), -np.inf)
        free, arrived = started.copy(), started.copy()
        for level in range(len(self.bounds) - 1):
            some = slice(self.message_bounds[level], self.message_bounds[level + 1])
            if some.start < some.stop:
                start = ends[sent[some]]
                if rendezvous:
                    np.maximum(start, ends[posted[some]], out=start)
                np.maximum(start, free[queued[some]], out=start)
                started[some] = start
                start += occupancy[message_row[some]]
                free[some] = start
                start += latency[message_row[some]]
                arrived[some] = start
            some = slice(self.bounds[level], self.bounds[level + 1])
            if some.start < some.stop:
                end = np.maximum(ends[before[some]], arrived[message[some]])
                end += duration[row[some]]
                ends[some] = end
        return ends[self._place[:-1]], started[self._message_place[:-1]]

    def latest_ends(self, prices: Prices, makespan: float, *, rendezvous: bool) -> Ints:
        """Says how late each computation may end without the step taking longer.

        Args:
            prices: float64, without K.
            makespan: when the step ends.
            rendezvous: as for `time`.

        Returns:
            The times, shape (n,).
        """
        duration, occupancy, latency, row, message_row = self._price(prices)
        before, message, sent, posted, queued = self._needs
        ends = np.full(len(self.order) + 1, makespan)
        frees = np.full(len(self.messages) + 1, np.inf)
        for level in range(len(self.bounds) - 2, -1, -1):
            some = slice(self.bounds[level], self.bounds[level + 1])
            start = ends[some] - duration[row[some]]
            ends[before[some]] = np.minimum(ends[before[some]], start)
            waits = message[some] >= 0
            own = message[some][waits]
            frees[own] = np.minimum(frees[own], start[waits] - latency[message_row[own]])
            some = slice(self.message_bounds[level], self.message_bounds[level + 1])
            start = frees[some] - occupancy[message_row[some]]
            frees[queued[some]] = np.minimum(frees[queued[some]], start)
            np.minimum.at(ends, sent[some], start)  # a computation may be followed by several sends
            if rendezvous:
                np.minimum.at(ends, posted[some], start)
        return ends[self._place[:-1]]


def find_levels(operations: Operations) -> Levels | None:
    """Finds the levels of a schedule; None where ranks wait for each other in a circle.

    Args:
        operations: the schedule.

    Example:
        >>> from itertools import pairwise
        >>> from ringsim.schedules import one_f_one_b
        >>> from ringsim.simulator.columns import read_schedule
        >>> levels = find_levels(read_schedule(one_f_one_b(2, 2)))
        >>> [[str(levels.operations.action(one)) for one in levels.order[begin:end]] for begin, end in pairwise(levels.bounds)]
        [['0F0'], ['0F1', '1F0'], ['1B0'], ['0B0', '1F1'], ['1B1'], ['0B1']]
    """
    count = len(operations)
    sent, posted, queued = (np.append(column, -1) for column in (operations.sent_after, operations.posted_after, operations.queued_after))
    following = np.full(count, -1, dtype=np.int64)
    followers = np.flatnonzero(queued[:-1] >= 0)
    following[queued[followers]] = followers
    level_of, message_level = np.full(count + 1, -1, dtype=np.int64), np.full(count + 1, -1, dtype=np.int64)
    level_of[-1] = message_level[-1] = 0  # of -1, the start of the step
    heads = np.flatnonzero((sent[:-1] >= 0) & (queued[:-1] < 0))
    begins, ends = operations.first[:-1], operations.first[1:]
    here, until = begins[begins < ends], ends[begins < ends]
    waits = sent >= 0
    level = 0
    while len(here):
        ready = heads[(level_of[sent[heads]] >= 0) & (level_of[posted[heads]] >= 0)]
        message_level[ready] = level
        heads = np.concatenate([heads[message_level[heads] < 0], following[ready][following[ready] >= 0]])
        can = ~waits[here] | (message_level[here] >= 0)
        if not can.any() and len(ready) == 0:
            return None
        level_of[here[can]] = level
        here = here + can
        left = here < until
        here, until = here[left], until[left]
        level += 1
    order, messages = np.argsort(level_of[:-1], kind="stable"), np.flatnonzero(waits[:-1])
    messages = messages[np.argsort(message_level[messages], kind="stable")]
    steps = np.arange(level + 1)
    bounds, message_bounds = np.searchsorted(level_of[order], steps), np.searchsorted(message_level[messages], steps)
    return Levels(operations, order, bounds.tolist(), messages, message_bounds.tolist())


@dataclass(frozen=True, eq=False)
class Sweep:
    """What a sweep found; K is there where the prices have it.

    Attributes:
        last: when each rank's last computation ends, shape (P,) or (P, K).
        ends: when each computation ends, in the order of `Operations`, shape (n,); None where it was not asked for.
        starts: when the message of each starts to go over its link, likewise; -inf without a message.
    """

    last: Ints
    ends: Ints | None = None
    starts: Ints | None = None


def sweep(linear: Linear, prices: Prices, *, rendezvous: bool, ahead: int, keep: bool = False) -> Sweep:
    """Times a step.

    Args:
        linear: GPipe or 1F1B.
        prices: float64, with or without K.
        rendezvous: whether a message starts only when its receive is posted, too.
        ahead: as in `lower`: how many computations before its use a receive is posted.
        keep: whether to return the times of all computations; without K.

    Returns:
        The times.

    Example:
        >>> from ringsim.schedules.costs import Costs
        >>> from ringsim.simulator.columns import make_prices
        >>> sweep(Linear("1f1b", 3, 4), make_prices((0, 1, 2), Costs(), None, 0), rendezvous=True, ahead=1).last.tolist()
        [18.0, 16.0, 14.0]
    """
    state = _State(linear, prices, rendezvous=rendezvous, ahead=ahead, keep=keep)
    p = linear.num_ranks
    places = _place(linear, np.arange(1, p + 1))
    history, started = np.empty((2, linear.levels if keep else 0, p))
    for level in range(linear.levels):
        state.advance(level)
        if keep:
            history[level], started[level] = state.turns[1 - level % 2][places], state.started[places]
    last = state.turns[linear.levels % 2][places]
    if not keep:
        return Sweep(last)
    ends, starts = np.full((2, p, 2 * linear.num_microbatches), -np.inf)
    for rank in range(p):
        for own, level, source in zip(linear.positions(rank), linear.first_levels(rank), (rank - 1, rank + 1), strict=True):
            levels = slice(level, level + linear.stride * linear.num_microbatches, linear.stride)
            ends[rank, own] = history[levels, rank]
            if 0 <= source < p:
                starts[rank, own] = started[levels, rank]
    return Sweep(last, ends.ravel(), starts.ravel())


def _place(linear: Linear, rank: Any) -> Any:
    """Returns where ranks, counted from 1, stand in the arrays: in 1F1B odd ones behind the even ones, so that slices have no holes."""
    return rank // 2 + rank % 2 * (linear.num_ranks // 2 + 1) if linear.name == "1f1b" else rank


class _State:
    """How far the ranks have come: arrays over the ranks, with one that does nothing at either end."""

    def __init__(self, linear: Linear, prices: Prices, *, rendezvous: bool, ahead: int, keep: bool) -> None:
        self.linear = linear
        self.rendezvous, self.keep, self.has_occupancy = rendezvous, keep, prices.has_occupancy
        p = linear.num_ranks
        places = _place(linear, np.arange(1, p + 1))
        shape = (2 * (p // 2 + 1) + 1, *prices.duration.shape[2:])
        self.duration, self.latency, self.occupancy = np.zeros((2, *shape)), np.full((2, *shape), -np.inf), np.zeros((2, *shape))
        self.duration[:, places], self.latency[:, places] = prices.duration[:2], prices.latency
        self.occupancy[:, places] = prices.occupancy
        self.turns = np.zeros((2, *shape))  # when the last computation of each rank ended: before a level, and after it, in turns
        self.free = np.zeros((2, *shape))
        self.posts = np.zeros((ahead, *shape))  # when the last but one ended, and those before it
        self.started = np.zeros(shape)
        self.room = np.empty(shape)
        self.views: list[Any] = [(None, ()), (None, ())]

    def advance(self, level: int) -> None:
        """Does the computations of a level."""
        turn = level % 2
        blocks = _blocks(self.linear, level)
        if self.views[turn][0] != blocks:
            self.views[turn] = (blocks, [self._view(turn, *block) for block in blocks])
        np.copyto(self.turns[1 - turn], self.turns[turn])
        for own, after, ready, room, latency, duration, occupancy, link, posts, started in self.views[turn][1]:
            start = ready
            if self.rendezvous:
                start = np.maximum(ready, posts[-1], out=room)
            if self.has_occupancy:
                start = np.maximum(start, link, out=room)
            if self.keep:
                np.copyto(started, start)
            if self.has_occupancy:
                start = np.add(start, occupancy, out=link)
            np.add(start, latency, out=room)
            np.maximum(room, own, out=room)
            np.add(room, duration, out=after)
            for older, newer in zip(posts[:0:-1], posts[-2::-1], strict=True):
                np.copyto(older, newer)

    def _view(self, turn: int, direction: int, low: int, high: int) -> tuple[Any, ...]:
        """Returns the parts of the arrays that belong to the ranks of a block, and to their senders."""
        here = slice(_place(self.linear, low), _place(self.linear, high) + 1)
        step = 1 if direction else -1
        there = slice(_place(self.linear, low + step), _place(self.linear, high + step) + 1)
        own = self.turns[turn][here]
        priced = (table[direction][here] for table in (self.latency, self.duration, self.occupancy, self.free))
        posts = [own, *(post[here] for post in self.posts)]
        return (own, self.turns[1 - turn][here], self.turns[turn][there], self.room[here], *priced, posts, self.started[here])


def _blocks(linear: Linear, level: int) -> list[tuple[int, int, int]]:
    """Says what a level holds: forwards (0) or gradients (1), and the first and the last rank, counted from 1; in 1F1B every second."""
    p, m = linear.num_ranks, linear.num_microbatches
    if linear.name == "1f1b":
        forward = (0, max(level % 2, level - 2 * (m - 1)) + 1, min(p - 1 - (p - 1 - level) % 2, level) + 1)
        high = min(p - 1 - (p - level) % 2, 2 * p + 2 * m - 3 - level)
        backward = (1, max((level + 1) % 2, 2 * p - 1 - level) + 1, high + 1)
        return [block for block in (forward, backward) if block[1] <= block[2]]
    if level < p + m - 1:
        return [(0, max(0, level - m + 1) + 1, min(p - 1, level) + 1)]
    back = level - (p + m - 1)
    return [(1, p - min(p - 1, back), p - max(0, back - m + 1))]


_MOST_TIMES: Final = 2_000_000  # kept at once, of all variants: more would not stay in a cache


@dataclass(frozen=True, eq=False, repr=False)
class WhatIfs:
    """What a schedule takes with each of K sets of costs.

    Attributes:
        name: what the schedule is called.
        makespan: how long the step takes, float64, shape (K,).
        busy: how long each rank computes, shape (K, ranks).

    Example:
        >>> from ringsim.schedules.costs import Costs
        >>> from ringsim.simulator.schedules import simulate_schedule
        >>> what_ifs = simulate_schedule("1f1b", [Costs(), Costs(forward=2)], num_ranks=4, num_microbatches=8)
        >>> what_ifs.makespan.tolist(), what_ifs.bubble.round(3).tolist()
        ([33.0, 44.0], [0.273, 0.273])
    """

    name: str
    makespan: Ints
    busy: Ints

    def __len__(self) -> int:
        """Returns K."""
        return len(self.makespan)

    @property
    def idle(self) -> Ints:
        """How long each rank does not compute while the step lasts, shape (K, ranks)."""
        idle: Ints = self.makespan[:, None] - self.busy
        return idle

    @property
    def bubble(self) -> Ints:
        """The part of the step in which ranks do not compute, over all of them, shape (K,); 0 for a step that takes no time."""
        whole = self.makespan * self.busy.shape[1]
        share: Ints = np.divide(self.idle.sum(axis=1), whole, out=np.zeros(len(self)), where=whole > 0)
        return share

    def __repr__(self) -> str:
        """Returns how many there are, and between which times."""
        return f"{len(self)} what-ifs of {self.name}: {self.makespan.min():.6g} to {self.makespan.max():.6g}"


def time_variants(source: Linear | Levels, variants: list[Prices], *, rendezvous: bool, ahead: int, compiled: bool) -> Ints:
    """Times a schedule with several prices, many at once.

    Args:
        source: the schedule.
        variants: K prices, none of them with a K.
        rendezvous: whether a message starts only when its receive is posted, too.
        ahead: as in `lower`; only a `Linear` has to be told.
        compiled: whether one after the other by machine code.

    Returns:
        The makespans, float64, shape (K,).
    """
    if compiled:
        return np.array([_last_compiled(source, prices, rendezvous=rendezvous, ahead=ahead).max(initial=0.0) for prices in variants])
    kept = source.num_ranks if isinstance(source, Linear) else len(source.order)
    at_once = max(1, _MOST_TIMES // max(kept, 1))
    makespans = []
    for first in range(0, len(variants), at_once):
        prices = stack_prices(variants[first : first + at_once])
        if isinstance(source, Linear):
            last = sweep(source, prices, rendezvous=rendezvous, ahead=ahead).last
        else:
            last, _ = source.time(prices, rendezvous=rendezvous)
        makespans.append(last.max(axis=0, initial=0.0))
    return np.concatenate(makespans)


def _last_compiled(source: Linear | Levels, prices: Prices, *, rendezvous: bool, ahead: int) -> Ints:
    """Returns when computations end, the last ones at least."""
    if isinstance(source, Linear):
        return sweep_compiled(source, prices, rendezvous=rendezvous, ahead=ahead)
    times = work_through_compiled(source.operations, prices, rendezvous=rendezvous)
    assert times is not None  # it has levels, so it comes to an end
    return times[0]
