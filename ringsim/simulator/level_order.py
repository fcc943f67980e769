"""Any schedule, level after level over all ranks at once, with numpy: for one set of prices, or for K at once.

Every computation and every message has a level, the first at which all that it needs stands on levels before (a computation may need a
message of its own level). So a level is two gathers and a few array operations, whatever the schedule looks like; and backwards, it says
how late everything may end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ringsim.simulator.operations import Operations
from ringsim.simulator.prices import Prices
from ringsim.traces.events import Ints

__all__ = ["Levels", "find_levels"]


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
        >>> from ringsim.pipeline.schedules import one_f_one_b
        >>> from ringsim.simulator.schedule_operations import read_schedule
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
