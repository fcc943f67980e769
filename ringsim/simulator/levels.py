"""Computes all times in a schedule with NumPy, level by level over all ranks.

Every computation and every message is on a level, which is the first level for which everything it
needs is on earlier levels. (A computation may need a message on its own level.) Each level takes a
few array operations, whatever the schedule looks like. In reverse order, the levels determine the
latest times at which everything may end. These are the levels of the computations in 1F1B (3 ranks,
4 microbatches)::

    level     0  1  2  3  4  5  6  7  8  9 10 11
    rank 0   F0    F1    F2 B0 F3 B1    B2    B3
    rank 1      F0    F1 B0 F2 B1 F3 B2    B3
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3

`find_levels` finds the levels of any schedule. The levels of GPipe and 1F1B follow a rule: a
microbatch is a fixed number of levels behind the previous microbatch, and a rank is one level
behind its neighbour. With this rule, `Wave` represents each level as a slice of the ranks and keeps
only the ranks' clocks, so that a thousand ranks and thousands of microbatches take a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, starmap
from typing import Any, NamedTuple

import numpy as np

from ringsim.schedules.phases import gpipe, one_f_one_b
from ringsim.schedules.schedule import PhasedRows, Schedule
from ringsim.simulator.columns import Columns, Prices
from ringsim.traces.events import Ints


@dataclass(frozen=True, eq=False)
class Times:
    """All times in a step, as arrays of shape (n,) with one entry per computation.

    Attributes:
        columns: the schedule.
        prices: the costs of computations and messages, for a single set of costs.
        rendezvous: whether a message starts only when its receive is also posted.
        ends: the end of each computation.
        message_starts: the time at which each computation's message starts to use its link, or -inf
            if there is no message.
        received: the time at which each computation's receive is done, or None if this is when its
            message arrives.
    """

    columns: Columns
    prices: Prices
    rendezvous: bool
    ends: Ints
    message_starts: Ints
    received: Ints | None = None

    @cached_property
    def arrivals(self) -> Ints:
        """The arrival time of each computation's message, or -inf if there is no message."""
        if self.received is not None:
            return self.received
        way = self.columns.direction, self.columns.stage
        arrivals: Ints = self.message_starts + self.prices.occupancy[way] + self.prices.latency[way]
        return arrivals

    @cached_property
    def free(self) -> Ints:
        """The time from which the rank is free for each computation."""
        columns, prices = self.columns, self.prices
        hidden = columns.find_hidden(prices.duration[columns.kind, columns.stage], prices.overlap)
        free: Ints = self.ends_of(columns.before) - hidden
        return free

    @property
    def starts(self) -> Ints:
        """The start of each computation: its rank is free, and its message has arrived."""
        starts: Ints = np.maximum(self.free, self.arrivals)
        return starts

    def ends_of(self, operations: Ints) -> Ints:
        """Returns the ends of computations, with 0 for index -1, the start of the step."""
        ends: Ints = np.append(self.ends, self.ends[:0].sum())[operations]
        return ends


@dataclass(frozen=True, eq=False)
class Levels:
    """Computations and messages in an order in which their times can be computed together.

    Attributes:
        columns: the schedule.
        order: the computations by level, shape (n,).
        messages: the messages by level, given by the computations that wait for them, shape (m,).
        levels: for each level, its part of ``messages`` and its part of ``order``.
    """

    columns: Columns
    order: Ints
    messages: Ints
    levels: list[tuple[slice, slice]]

    @cached_property
    def _place(self) -> Ints:
        """The index of each computation in ``order``. An extra entry keeps -1 as -1."""
        return _invert(self.order, len(self.order))

    @cached_property
    def _message_place(self) -> Ints:
        """The index in ``messages`` of each computation's message, or -1 if there is none."""
        return _invert(self.messages, len(self.order))

    @cached_property
    def _needs(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """The needs of computations and messages, as indexes.

        A computation needs the previous computation and its message. A message needs the
        computations after which it is sent, posted and queued.
        """
        columns, place, message_place = self.columns, self._place, self._message_place
        return (
            place[columns.before[self.order]],
            message_place[self.order],
            place[columns.sent_after[self.messages]],
            place[columns.posted_after[self.messages]],
            message_place[columns.queued_after[self.messages]],
        )

    @cached_property
    def _in_order(self) -> tuple[Ints, Ints, Ints] | None:
        """The arrays ``in_order`` of the columns for each message, as indexes."""
        if self.columns.in_order is None:
            return None
        send_after, receive_after, waits = (each[self.messages] for each in self.columns.in_order)
        return self._message_place[send_after], self._message_place[receive_after], waits

    def _price(self, prices: Prices) -> tuple[Ints, ...]:
        """Returns tables of prices with a row for each kind and stage.

        The other results are the hidden time of each computation, its row, and the row of each
        message.
        """
        columns, stages = self.columns, np.int32(self.columns.num_stages)
        *tables, overlap = prices.map(lambda table: table.reshape(-1, *table.shape[2:]))
        rows = columns.kind * stages + columns.stage
        hidden = columns.find_hidden(tables[0][rows], overlap)[self.order]
        message_row = columns.direction[self.messages] * stages + columns.stage[self.messages]
        return *tables, hidden, rows[self.order], message_row

    def time(self, prices: Prices, *, rendezvous: bool) -> tuple[Ints, Ints, Ints | None]:
        """Returns each computation's end, message start and end of the receive, as in `Times`.

        The shapes are (n,), or (n, K) for K sets of costs.
        """
        duration, occupancy, latency, hidden, row, message_row = self._price(prices)
        before, message, sent, posted, queued = self._needs
        count, extra = len(self.order), duration.shape[1:]
        # the last entry, which -1 selects, is the start of the step
        ends = np.zeros((count + 1, *extra), dtype=duration.dtype)
        started = np.full((len(self.messages) + 1, *extra), -np.inf, dtype=duration.dtype)
        free, arrived = started.copy(), started.copy()
        for messages, operations in self.levels:
            start = ends[sent[messages]]
            if self._in_order is not None:
                send_after, receive_after, waits = (each[messages] for each in self._in_order)
                np.maximum(start, arrived[send_after], out=start)
                ready = np.maximum(ends[posted[messages]], arrived[receive_after])
                start[waits] = np.maximum(start, ready)[waits]
            elif rendezvous:
                np.maximum(start, ends[posted[messages]], out=start)
            np.maximum(start, free[queued[messages]], out=start)
            started[messages] = start
            start += occupancy[message_row[messages]]
            free[messages] = start
            start += latency[message_row[messages]]
            arrived[messages] = start if self._in_order is None else np.maximum(start, ready)
            end = np.maximum(
                ends[before[operations]] - hidden[operations], arrived[message[operations]]
            )
            end += duration[row[operations]]
            ends[operations] = end
        place = self._message_place[:-1]
        received = None if self._in_order is None else arrived[place]
        return ends[self._place[:-1]], started[place], received

    def last_ends(self, prices: Prices, *, rendezvous: bool) -> Ints:
        """Returns the ends of computations, which include the last one on each rank."""
        return self.time(prices, rendezvous=rendezvous)[0]

    def latest_ends(self, prices: Prices, makespan: float, *, rendezvous: bool) -> Ints:
        """Returns each computation's latest end that does not lengthen the step, shape (n,).

        The prices must be float64, for a single set of costs.
        """
        duration, occupancy, latency, hidden, row, message_row = self._price(prices)
        before, message, sent, posted, queued = self._needs
        ends = np.full(len(self.order) + 1, makespan)
        frees, arrivals = np.full((2, len(self.messages) + 1), np.inf)
        for messages, operations in reversed(self.levels):
            start = ends[operations] - duration[row[operations]]
            previous = before[operations]
            ends[previous] = np.minimum(ends[previous], start + hidden[operations])
            awaited = message[operations]
            arrivals[awaited] = np.minimum(arrivals[awaited], start)
            arrival = arrivals[messages]
            start = np.minimum(frees[messages], arrival - latency[message_row[messages]])
            start -= occupancy[message_row[messages]]
            frees[queued[messages]] = np.minimum(frees[queued[messages]], start)
            np.minimum.at(ends, sent[messages], start)  # several sends may follow a computation
            if self._in_order is not None:
                send_after, receive_after, waits = (each[messages] for each in self._in_order)
                ready = np.where(waits, start, arrival)
                np.minimum.at(ends, posted[messages], ready)
                np.minimum.at(arrivals, send_after, start)
                np.minimum.at(arrivals, receive_after, ready)
            elif rendezvous:
                np.minimum.at(ends, posted[messages], start)
        return ends[self._place[:-1]]


def _invert(numbers: Ints, count: int) -> Ints:
    """Returns the index at which each number occurs.

    Missing numbers get -1, and an extra entry keeps -1 as -1.
    """
    place = np.full(count + 1, -1, dtype=np.int32)
    place[numbers] = np.arange(len(numbers), dtype=np.int32)
    return place


def find_levels(columns: Columns) -> Levels | None:
    """Returns the levels of a schedule, or None if its ranks wait for each other in a cycle.

    Example:
        >>> from ringsim.schedules import one_f_one_b
        >>> from ringsim.simulator.columns import columns_of
        >>> levels = find_levels(columns_of(one_f_one_b(2, 2)))
        >>> [
        ...     [str(levels.columns.action(one)) for one in levels.order[operations]]
        ...     for _, operations in levels.levels
        ... ]
        [['0F0'], ['0F1', '1F0'], ['1B0'], ['0B0', '1F1'], ['1B1'], ['0B1']]
    """
    sent, posted, queued = columns.sent_after, columns.posted_after, columns.queued_after
    following = _invert(queued, len(columns))
    # whether each computation is on a level so far, and its message; entry -1 is the start
    is_timed, is_met = np.zeros((2, len(columns) + 1), dtype=bool)
    is_timed[-1] = is_met[-1] = True
    heads = np.flatnonzero((sent >= 0) & (queued < 0))
    begins, ends = columns.first[:-1], columns.first[1:]
    here, until = begins[begins < ends], ends[begins < ends]
    order, messages = [here[:0]], [here[:0]]
    while len(here):
        can_start = is_timed[sent[heads]] & is_timed[posted[heads]]
        for after in (columns.in_order or ())[:2]:
            can_start &= is_met[after[heads]]
        ready = heads[can_start]
        is_met[ready] = True
        after = following[ready]
        heads = np.concatenate([heads[~can_start], after[after >= 0]])
        can = (sent[here] < 0) | is_met[here]
        if not can.any() and len(ready) == 0:
            return None
        is_timed[here[can]] = True
        order.append(here[can])
        messages.append(ready)
        here = here + can
        left = here < until
        here, until = here[left], until[left]
    levels = zip(_cut(messages), _cut(order), strict=True)
    return Levels(columns, np.concatenate(order), np.concatenate(messages), [*levels][1:])


def _cut(parts: list[Ints]) -> Iterator[slice]:
    """Yields the place of each part when all parts are joined."""
    return starmap(slice, pairwise(accumulate(map(len, parts), initial=0)))


class Wave(NamedTuple):
    """The levels of GPipe or 1F1B by rule: F j of rank s is on level s + stride * j.

    Attributes:
        num_ranks: P.
        num_microbatches: M.
        stride: the number of levels between two consecutive microbatches.
        turn: the level of the last rank's first backward; B j of rank s is on level turn + (P - 1 -
            s) + stride * j.
        ahead: the number of computations between the post of a receive and its use.
    """

    num_ranks: int
    num_microbatches: int
    stride: int
    turn: int
    ahead: int

    @property
    def num_levels(self) -> int:
        """The number of levels."""
        return self.turn + self.num_ranks + self.stride * (self.num_microbatches - 1)

    def find_ranks(self, direction: int, level: int) -> slice:
        """Returns the ranks that have a forward (0) or a backward (1) on a level."""
        # at first, ranks are counted from the rank where the direction begins
        away = level - self.turn if direction else level
        last_away = away - self.stride * (self.num_microbatches - 1)
        nearest = max(away % self.stride, last_away)
        farthest = min(away, self.num_ranks - 1)
        if nearest > farthest:
            return slice(0, 0)
        if direction == 0:
            return slice(nearest, farthest + 1, self.stride)
        farthest -= (farthest - nearest) % self.stride
        end = self.num_ranks - nearest
        return slice(self.num_ranks - 1 - farthest, end, self.stride)

    def last_ends(self, prices: Prices, *, rendezvous: bool) -> Ints:
        """Returns the end of each rank's last computation, shape (P,) or (P, K).

        The method keeps only one row of times per rank. The prices must be float64.
        """
        last = np.zeros((self.num_ranks, *prices.duration.shape[2:]))
        for _, ranks, _, end in self._sweep(prices, rendezvous):
            last[ranks] = end
        return last

    def time(self, prices: Prices, *, rendezvous: bool) -> tuple[Ints, Ints, None]:
        """Returns the times of all computations and messages, as `Levels.time` does."""
        ends, starts = np.empty((2, self.num_ranks * 2 * self.num_microbatches))
        # the index of each rank's next computation
        place = np.arange(self.num_ranks) * (2 * self.num_microbatches)
        for direction, ranks, start, end in self._sweep(prices, rendezvous):
            start[prices.latency[direction, ranks] < 0] = -np.inf  # no message
            ends[place[ranks]] = end
            starts[place[ranks]] = start
            place[ranks] += 1
        return ends, starts, None

    def _sweep(self, prices: Prices, rendezvous: bool) -> Iterator[tuple[int, slice, Ints, Ints]]:
        """Times the computations level by level, forwards and backwards.

        Yields the direction (0 for forwards, 1 for backwards), the ranks that take part, the starts
        of their messages, and the ends of their computations.
        """
        # with an extra idle rank at either end
        shape = (self.num_ranks + 2, *prices.duration.shape[2:])
        free = np.full((2, *shape), -np.inf)  # when the link for each rank's next message is free
        # the end of each rank's last computation, of the one before, and so on; the receive of the
        # next computation is posted at the oldest of these ends
        past = np.zeros((1 + min(self.ahead, 2 * self.num_microbatches), *shape))
        for level in range(self.num_levels):
            before = past[0].copy()
            for direction, step in ((0, -1), (1, 1)):
                ranks = self.find_ranks(direction, level)
                if ranks.start == ranks.stop:
                    continue
                own = slice(ranks.start + 1, ranks.stop + 1, ranks.step)
                senders = slice(own.start + step, own.stop + step, ranks.step)
                start = np.maximum(before[senders], free[direction, own])
                if rendezvous:
                    start = np.maximum(start, past[-1, own])
                free[direction, own] = start + prices.occupancy[direction, ranks]
                arrived = free[direction, own] + prices.latency[direction, ranks]
                end = np.maximum(arrived, past[0, own]) + prices.duration[direction, ranks]
                past[1:, own] = past[:-1, own]
                past[0, own] = end
                yield direction, ranks, start, end


def find_wave(schedule: Schedule, ahead: int = 1) -> Wave | None:
    """Returns the rule for the levels of GPipe or 1F1B, or None for other schedules.

    Example:
        >>> from ringsim.schedules import zb_h1
        >>> find_wave(one_f_one_b(3, 4)), find_wave(zb_h1(3, 4))
        (Wave(num_ranks=3, num_microbatches=4, stride=2, turn=3, ahead=1), None)
        >>> from ringsim.schedules.costs import Costs
        >>> from ringsim.simulator.columns import make_prices
        >>> prices = make_prices((0, 1, 2), Costs(), None, [0, 0])
        >>> find_wave(one_f_one_b(3, 4)).last_ends(prices, rendezvous=True).tolist()
        [18.0, 16.0, 14.0]
    """
    p, m = schedule.num_ranks, schedule.num_microbatches
    if not isinstance(schedule.actions, PhasedRows) or schedule.stage_ranks != tuple(range(p)):
        return None
    for known, stride, turn in ((one_f_one_b, 2, p), (gpipe, 1, p - 1 + m)):
        actions: Any = known(p, m).actions
        if actions.rows == schedule.actions.rows:
            return Wave(p, m, stride, turn, ahead)
    return None
