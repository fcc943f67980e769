"""Which collective of one rank met which of another: the k-th of each on a group belong together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from ringsim.traces.events import COLLECTIVE, NONE, Events, Ints
from ringsim.traces.matching import number_places, number_rows, refused

__all__ = ["CollectiveCalls"]


@dataclass(frozen=True, eq=False)
class CollectiveCalls:
    """The collectives of a run.

    Attributes:
        event: index of each among the events (int64).
        call: number of the call that it is part of (int64).
        place: the how-manieth of its rank on the group it is, from 0 (int64).
        last: by call, the event that was posted last (int64).
        complete: by call, whether every member of the group takes part (bool).
    """

    event: Ints
    call: Ints
    place: Ints
    last: Ints
    complete: Ints

    @classmethod
    def of(cls, events: Events) -> Self:
        """Sorts the collectives of a run into calls.

        Example:
            >>> from ringsim.traces.events import OP_CODES, Group, Tables, make_events
            >>> barrier = {"rank": [0, 0, 1], "op": [OP_CODES["barrier"]] * 3, "group": [0] * 3, "post_ns": [1, 5, 2]}
            >>> calls = CollectiveCalls.of(make_events(barrier, Tables(groups=(Group("world", (0, 1)),))))
            >>> calls.call.tolist(), calls.last.tolist(), calls.complete.tolist()
            ([0, 1, 0], [2, 1], [True, False])
            >>> calls.call_of(2), calls.events_of(0)
            (0, (0, 2))
        """
        event = np.flatnonzero((events.kind == COLLECTIVE) & (events.group != NONE) & ~refused(events))
        place = number_places(number_rows(events.group[event], events.rank[event]))
        call = number_rows(events.group[event], place)
        number = int(call.max(initial=-1)) + 1
        last = np.zeros(number, dtype=np.int64)
        order = np.argsort(events.post_ns[event], kind="stable")
        last[call[order]] = event[order]
        sizes = np.array([len(group.ranks) for group in events.tables.groups], dtype=np.int64)
        return cls(event, call, place, last, np.bincount(call, minlength=number) >= sizes[events.group[last]])

    def call_of(self, event: int) -> int:
        """Returns the number of the call that an event is part of, -1 for none."""
        at = int(np.searchsorted(self.event, event))
        return int(self.call[at]) if at < len(self.event) and self.event[at] == event else NONE

    def events_of(self, call: int) -> tuple[int, ...]:
        """Returns the events that a call is made of, ascending."""
        order, starts = self._by_call
        return tuple(self.event[order[starts[call] : starts[call + 1]]].tolist())

    @cached_property
    def _by_call(self) -> tuple[Ints, Ints]:
        """The events in the order of their calls, and where each call begins."""
        order = np.argsort(self.call, kind="stable")
        return order, np.searchsorted(self.call[order], np.arange(len(self.last) + 1))
