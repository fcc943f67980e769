"""When everything in a schedule happens, with numpy: level by level over all ranks at once.

Every computation and every message has a level, the first at which all that it needs stands on
earlier levels (a computation may need a message of its own level). So a level is a few array
operations, whatever the schedule looks like; going backwards, the levels say how late everything
may end. 1F1B, the level of each computation (3 ranks, 4 microbatches)::

    level     0  1  2  3  4  5  6  7  8  9 10 11
    rank 0   F0    F1    F2 B0 F3 B1    B2    B3
    rank 1      F0    F1 B0 F2 B1 F3 B2    B3
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3

`Levels` finds them for any schedule. With one stage a rank and phases like those above they follow
from the phases alone: a microbatch is a fixed number of levels behind the one before it, and a rank
one level behind its neighbour. `sweep` uses that: each level is a slice of the ranks, and only the
ranks' clocks are kept, so a thousand ranks and thousands of microbatches take a fraction of a
second.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ringsim.schedules.schedule import Order, PhasedRow, PhasedRows, Schedule
from ringsim.simulator.columns import Columns, Prices
from ringsim.traces.events import Ints

__all__ = ["Levels", "Times", "Wave", "find_levels", "find_wave", "sweep", "sweep_all"]


@dataclass(frozen=True, eq=False)
class Times:
    """When everything in a step happens; arrays of shape (n,), an entry for each computation.

    Attributes:
        columns: the schedule.
        prices: what its computations and messages cost, without K.
        rendezvous: whether a message starts only when its receive is posted, too.
        ends: when each computation ends.
        message_starts: when its message starts to go over its link; -inf without one.
    """

    columns: Columns
    prices: Prices
    rendezvous: bool
    ends: Ints
    message_starts: Ints

    @cached_property
    def arrivals(self) -> Ints:
        """When the message of each computation is there; -inf without one."""
        way = self.columns.direction, self.columns.stage
        arrivals: Ints = self.message_starts + self.prices.occupancy[way] + self.prices.latency[way]
        return arrivals

    def ends_of(self, operations: Ints) -> Ints:
        """Returns when computations end; 0 for -1, the start of the step."""
        ends: Ints = np.append(self.ends, self.ends[:0].sum())[operations]
        return ends


@dataclass(frozen=True, eq=False)
class Levels:
    """The order in which computations and messages can be worked out together.

    Attributes:
        columns: the schedule.
        order: the computations by level, shape (n,).
        bounds: where each level begins in ``order``, and n.
        messages: the messages by level, as the computations that wait for them, shape (m,).
        message_bounds: where each level begins in ``messages``, and m.
    """

    columns: Columns
    order: Ints
    bounds: list[int]
    messages: Ints
    message_bounds: list[int]

    @cached_property
    def _place(self) -> Ints:
        """Where each computation stands in ``order``; one more, -1, stays -1."""
        return _invert(self.order, len(self.order))

    @cached_property
    def _message_place(self) -> Ints:
        """Where the message of each computation stands in ``messages``; -1 without one."""
        return _invert(self.messages, len(self.order))

    @cached_property
    def _needs(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """In places: of each computation the previous one and its message.

        Of each message what it is sent, posted and queued after.
        """
        columns, place = self.columns, self._place
        sent, posted = (
            place[columns.sent_after[self.messages]],
            place[columns.posted_after[self.messages]],
        )
        queued = self._message_place[columns.queued_after[self.messages]]
        return (
            place[columns.before[self.order]],
            self._message_place[self.order],
            sent,
            posted,
            queued,
        )

    def _price(self, prices: Prices) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Returns tables of prices with a row for each kind and stage.

        Also which row each computation and message has.
        """
        columns, stages = self.columns, np.int32(self.columns.num_stages)
        duration, occupancy, latency = (
            table.reshape(-1, *table.shape[2:])
            for table in (prices.duration, prices.occupancy, prices.latency)
        )
        row = columns.kind[self.order] * stages + columns.stage[self.order]
        message_row = columns.direction[self.messages] * stages + columns.stage[self.messages]
        return duration, occupancy, latency, row, message_row

    def time(self, prices: Prices, *, rendezvous: bool) -> tuple[Ints, Ints]:
        """Returns when each computation ends and its message starts, as in `Times`.

        Shapes (n,) or, where the prices have a K, (n, K).
        """
        duration, occupancy, latency, row, message_row = self._price(prices)
        before, message, sent, posted, queued = self._needs
        count, extra = len(self.order), duration.shape[1:]
        # the last one, which -1 picks, is the start of the step
        ends = np.zeros((count + 1, *extra), dtype=duration.dtype)
        started = np.full((len(self.messages) + 1, *extra), -np.inf, dtype=duration.dtype)
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
        """Returns how late each computation may end without making the step longer, shape (n,).

        The prices are float64, without K.
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


def _invert(numbers: Ints, count: int) -> Ints:
    """Returns where each number stands.

    -1 for those that are missing, and one more, so that -1 stays -1.
    """
    place = np.full(count + 1, -1, dtype=np.int32)
    place[numbers] = np.arange(len(numbers), dtype=np.int32)
    return place


def find_levels(columns: Columns) -> Levels | None:
    """Finds the levels of a schedule; None where ranks wait for each other in a circle.

    Example:
        >>> from itertools import pairwise
        >>> from ringsim.schedules import one_f_one_b
        >>> from ringsim.simulator.columns import columns_of
        >>> levels = find_levels(columns_of(one_f_one_b(2, 2)))
        >>> [
        ...     [str(levels.columns.action(one)) for one in levels.order[begin:end]]
        ...     for begin, end in pairwise(levels.bounds)
        ... ]
        [['0F0'], ['0F1', '1F0'], ['1B0'], ['0B0', '1F1'], ['1B1'], ['0B1']]
    """
    count = len(columns)
    sent, posted, queued = (
        np.append(column, np.int32(-1))
        for column in (columns.sent_after, columns.posted_after, columns.queued_after)
    )
    followers = np.flatnonzero(queued[:-1] >= 0)
    following = np.full(count, -1, dtype=np.int32)
    following[queued[followers]] = followers
    level_of, message_level = np.full((2, count + 1), -1, dtype=np.int32)
    level_of[-1] = message_level[-1] = 0  # of -1, the start of the step
    heads = np.flatnonzero((sent[:-1] >= 0) & (queued[:-1] < 0))
    begins, ends = columns.first[:-1], columns.first[1:]
    here, until = begins[begins < ends], ends[begins < ends]
    level = 0
    while len(here):
        can_start = (level_of[sent[heads]] >= 0) & (level_of[posted[heads]] >= 0)
        ready = heads[can_start]
        message_level[ready] = level
        after = following[ready]
        heads = np.concatenate([heads[~can_start], after[after >= 0]])
        can = (sent[here] < 0) | (message_level[here] >= 0)
        if not can.any() and len(ready) == 0:
            return None
        level_of[here[can]] = level
        here = here + can
        left = here < until
        here, until = here[left], until[left]
        level += 1
    narrow = np.int16 if level < 2**15 else np.int32  # numpy sorts short integers in one pass
    levels, messages = level_of[:-1].astype(narrow), np.flatnonzero(sent[:-1] >= 0).astype(np.int32)
    order = np.argsort(levels, kind="stable").astype(np.int32)
    messages = messages[np.argsort(message_level[messages].astype(narrow), kind="stable")]
    steps = np.arange(level + 1)
    bounds, message_bounds = (
        np.searchsorted(levels[order], steps),
        np.searchsorted(message_level[messages], steps),
    )
    return Levels(columns, order, bounds.tolist(), messages, message_bounds.tolist())


class Wave(NamedTuple):
    """The levels of a schedule with one stage a rank, in a rule.

    F j of rank s is on level s + stride * j.

    Attributes:
        num_ranks: P.
        num_microbatches: M.
        stride: how many levels a microbatch is behind the one before it.
        turn: the level of the first backward of the last rank; B j of rank s is on level turn +
            (P - 1 - s) + stride * j.
    """

    num_ranks: int
    num_microbatches: int
    stride: int
    turn: int

    @property
    def num_levels(self) -> int:
        """How many levels there are."""
        return self.turn + self.num_ranks + self.stride * (self.num_microbatches - 1)

    def count_early(self, rank: int) -> int:
        """Returns how many forwards of a rank are on levels before its first backward."""
        return min(
            self.num_microbatches, -(-(self.turn + self.num_ranks - 1 - 2 * rank) // self.stride)
        )


def find_wave(schedule: Schedule) -> Wave | None:
    """Reads the rule of a schedule's levels from its phases.

    None where these are not ``F``, ``F B``, ``B``, or follow no such rule.

    Example:
        >>> from ringsim.schedules import gpipe, one_f_one_b, zb_h1
        >>> find_wave(one_f_one_b(3, 4)), find_wave(zb_h1(3, 4))
        (Wave(num_ranks=3, num_microbatches=4, stride=2, turn=3), None)
        >>> find_wave(gpipe(3, 4))
        Wave(num_ranks=3, num_microbatches=4, stride=1, turn=6)
    """
    p, m = schedule.num_ranks, schedule.num_microbatches
    if not isinstance(schedule.actions, PhasedRows) or schedule.stage_ranks != tuple(range(p)):
        return None
    rows = schedule.actions.rows
    warm_ups = [_warm_up(rank, row, m) for rank, row in enumerate(rows)]
    stride = 1 if warm_ups[-1] == m else 2
    # the last rank's backward follows the forwards before it at once
    turn = p - 1 + min(m, warm_ups[-1] + 1)
    wave = Wave(p, m, stride, turn)
    fits = all(
        warm_up >= 0 and min(m, warm_up + 1) == wave.count_early(rank)
        for rank, warm_up in enumerate(warm_ups)
    )
    return wave if fits else None


def _warm_up(stage: int, row: PhasedRow, num_microbatches: int) -> int:
    """Returns how many forwards a row begins with.

    If it then does one forward and one backward in turn; -1 if it does anything else.
    """
    order = (Order.of_stage(stage, num_microbatches),)
    phases = [phase for phase in row.phases if phase[0] > 0]
    warm_up = phases[0][0] if phases[0][1] == "F" else 0
    steady = num_microbatches - warm_up
    expected = [
        phase for phase in ((warm_up, "F"), (steady, "F B"), (warm_up, "B")) if phase[0] > 0
    ]
    return warm_up if phases == expected and row.forwards == row.backwards == order else -1


def sweep(wave: Wave, prices: Prices, *, rendezvous: bool, ahead: int) -> Ints:
    """Returns when each rank's last computation ends, shape (P,) or (P, K).

    With memory for the ranks alone; the prices are float64.

    Example:
        >>> from ringsim.schedules import one_f_one_b
        >>> from ringsim.schedules.costs import Costs
        >>> from ringsim.simulator.columns import make_prices
        >>> sweep(
        ...     find_wave(one_f_one_b(3, 4)),
        ...     make_prices((0, 1, 2), Costs(), None, 0),
        ...     rendezvous=True,
        ...     ahead=1,
        ... ).tolist()
        [18.0, 16.0, 14.0]
    """
    state = _Sweep(wave, prices, rendezvous=rendezvous, ahead=ahead)
    for level in range(wave.num_levels):
        state.advance(level)
    return state.last()


def sweep_all(wave: Wave, prices: Prices, *, rendezvous: bool, ahead: int) -> tuple[Ints, Ints]:
    """Times every computation and message of a step.

    The arguments are those of `sweep`, the result is that of `Levels.time`.
    """
    p, m = wave.num_ranks, wave.num_microbatches
    # ends and starts of messages, of forwards and backwards, by rank and microbatch
    history = np.full((2, 2, p * m), -np.inf)
    state = _Sweep(wave, prices, rendezvous=rendezvous, ahead=ahead)
    for level in range(wave.num_levels):
        for direction, low, high, start, end in state.advance(level):
            # the level of the first microbatch on the first of these ranks
            away = wave.turn + p - low if direction else low - 1
            first = (low - 1) * m + (level - away) // wave.stride
            # the next of these ranks is one microbatch behind, or ahead
            step = max(wave.stride * m + (1 if direction else -1), 1)
            some = slice(first, first + (high - low) // wave.stride * step + 1, step)
            history[0, direction, some], history[1, direction, some] = end, start
    forward, backward = history.reshape(2, 2, p, m).swapaxes(0, 1)
    forward[1, 0] = backward[1, -1] = -np.inf  # nobody sends to where a direction begins
    times = np.empty((2, p, 2 * m))
    for rank in range(p):
        # forwards before the rank takes turns, and backwards after it
        alone = wave.count_early(rank) - 1
        row, turns = times[:, rank], 2 * (m - alone)
        row[:, :alone], row[:, alone + turns :] = (
            forward[:, rank, :alone],
            backward[:, rank, m - alone :],
        )
        row[:, alone : alone + turns : 2], row[:, alone + 1 : alone + turns : 2] = (
            forward[:, rank, alone:],
            backward[:, rank, : m - alone],
        )
    return times[0].ravel(), times[1].ravel()


class _Sweep:
    """The clocks of the ranks: arrays over the ranks, with one that does nothing at either end.

    Ranks are counted from 1. Those a stride apart stand side by side, so that the ranks of a level
    are a slice.
    """

    def __init__(self, wave: Wave, prices: Prices, *, rendezvous: bool, ahead: int) -> None:
        self.wave = wave
        self.rendezvous, self.has_occupancy = rendezvous, bool((prices.occupancy > 0).any())
        self.ranks = self._place(np.arange(1, wave.num_ranks + 1))
        shape = (wave.stride * (wave.num_ranks // wave.stride + 2), *prices.duration.shape[2:])
        self.duration, self.latency, self.occupancy = (
            np.zeros((2, *shape)),
            np.full((2, *shape), -np.inf),
            np.zeros((2, *shape)),
        )
        self.duration[:, self.ranks] = prices.duration[:2]
        self.latency[:, self.ranks], self.occupancy[:, self.ranks] = (
            prices.latency,
            prices.occupancy,
        )
        # when each rank's last computation ended: before a level and after it, taking turns
        self.ends = np.zeros((2, *shape))
        # when the last but one ended, and those before it
        self.posts = np.zeros((min(ahead, 2 * wave.num_microbatches), *shape))
        self.free = np.zeros((2, *shape))  # when the link of each rank's next message is free again
        self.start, self.room = np.empty((2, *shape))
        self.views: list[Any] = [(None, ()), (None, ())]

    def last(self) -> Ints:
        """Returns when each rank's last computation ended."""
        last: Ints = self.ends[self.wave.num_levels % 2][self.ranks]
        return last

    def advance(self, level: int) -> list[Any]:
        """Does the computations of a level.

        Returns the blocks of ranks that take part, with when their messages start and they end.
        """
        turn = level % 2
        blocks = self._list_blocks(level)
        if self.views[turn][0] != blocks:
            self.views[turn] = (blocks, [self._view(turn, *block) for block in blocks])
        np.copyto(self.ends[1 - turn], self.ends[turn])
        times = []
        for (
            block,
            own,
            after,
            ready,
            start,
            room,
            latency,
            duration,
            occupancy,
            link,
            posts,
        ) in self.views[turn][1]:
            if self.rendezvous:
                ready = np.maximum(ready, posts[-1], out=start)
            left = ready
            if self.has_occupancy:
                ready = np.maximum(ready, link, out=start)
                left = np.add(ready, occupancy, out=link)
            np.add(left, latency, out=room)
            np.maximum(room, own, out=room)
            np.add(room, duration, out=after)
            for older, newer in zip(posts[:0:-1], posts[-2::-1], strict=True):
                np.copyto(older, newer)
            times.append((*block, ready, after))
        return times

    def _place(self, rank: Any) -> Any:
        """Returns where ranks stand in the arrays."""
        stride = self.wave.stride
        return rank // stride + rank % stride * (self.wave.num_ranks // stride + 2)

    def _view(self, turn: int, direction: int, low: int, high: int) -> tuple[Any, ...]:
        """Returns the parts of the arrays of the ranks from low to high, and of their senders."""
        step = 1 if direction else -1
        here, there = (
            slice(self._place(low + away), self._place(high + away) + 1) for away in (0, step)
        )
        own = self.ends[turn][here]
        priced = (
            table[direction][here]
            for table in (self.latency, self.duration, self.occupancy, self.free)
        )
        posts = [own, *(post[here] for post in self.posts)]
        after, ready = self.ends[1 - turn][here], self.ends[turn][there]
        return (
            (direction, low, high),
            own,
            after,
            ready,
            self.start[here],
            self.room[here],
            *priced,
            posts,
        )

    def _list_blocks(self, level: int) -> list[tuple[int, int, int]]:
        """Says what a level holds.

        Forwards (0) or gradients (1), and the first and last rank; only every stride-th takes part.
        """
        blocks = []
        for direction, away in ((0, level), (1, level - self.wave.turn)):
            nearest = max(
                away % self.wave.stride, away - self.wave.stride * (self.wave.num_microbatches - 1)
            )
            most = min(self.wave.num_ranks - 1, away)
            farthest = most - (away - most) % self.wave.stride
            # counted from the rank where the direction begins: activations at the first, gradients
            # at the last
            if nearest <= farthest:
                last = self.wave.num_ranks
                blocks.append(
                    (1, last - farthest, last - nearest)
                    if direction
                    else (0, nearest + 1, farthest + 1)
                )
        return blocks
