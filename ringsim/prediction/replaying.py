"""Replays the order in which a run computed and communicated, on a virtual clock.

The recorded order of a thread is a list of moments: an operation is posted, waited for and done,
and a span begins and ends. Between two moments, the thread computed, unless it was blocked::

    recorded   post i | computes 3 ms | wait i ------ blocked ------> done i | computes 1 ms
    replayed   post i | computes 3 ms | wait i -> done i | computes 1 ms

A replay keeps the order and the computing times, and determines the blocked times again:

* A message leaves when both sides have been posted (a rendezvous, as on Gloo), and when the link
  has carried the earlier messages between the two ranks. The wait for a send or a recv is done when
  the message has arrived.
* A collective is done some time after all members have entered it. A member that was done before
  other members entered, such as the root of a broadcast, does not need them.
* Each message and each collective takes as long as it took in the run. If the program waited for
  it so late that the run does not show this time, it takes at most as long as is typical.
* Waits without a known other side, and the creation of groups, take as long as they took.
* The threads of a rank do not wait for each other. A thread begins after the moments before it.

The typical times of messages form a `Link`. On a different link, each message takes longer or
shorter by the difference between the two links, and each collective by this difference for each of
its rounds (``ringsim.traces.collectives``). Time beyond the typical time, such as a stall, remains.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Final

import numpy as np

from ringsim.errors import LONGEST_S, ArgumentError, RingError
from ringsim.link import Link
from ringsim.prediction.calibration import find_typical
from ringsim.prediction.gloo_costs import fit_by_size
from ringsim.traces.collectives import count_rounds
from ringsim.traces.events import COLLECTIVE, NONE, OP_CODES, OP_NAMES, RECV, SPAN, Events, Ints
from ringsim.traces.matching import CollectiveCalls, number_rows
from ringsim.traces.value import Trace

__all__ = ["Edits", "Order"]

_POST, _WAIT, _DONE = range(3)  # the kinds of moments
_SEND: Final = OP_CODES["send"]


@dataclass(frozen=True)
class Edits:
    """The changes to a run; ``Trace.what_if`` describes their meaning."""

    ranks: Mapping[int, float]
    link: Link | None = None
    sends: str | None = None


class Order:
    """The recorded order of a run that finished, and the times of its transfers.

    Args:
        trace: the run.

    Attributes:
        link: the typical time of a message, or of one round of a collective if there are no
            messages; None if nothing was transferred.
        computing_ns: the time that each rank computed.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace, events = trace, trace.events
        self.link: Link | None = None
        self.is_waited = (events.wait_ns != NONE) & (events.done_ns != NONE)
        self._list_moments(events)
        self._find_starts()
        # by event: the time that its transfer took, how many messages follow one another in it, and
        # the size of each
        self.took_ns = np.zeros(len(events))
        self.rounds = np.zeros(len(events))
        self.size_bytes = np.zeros(len(events))
        self._time_messages()
        self._time_collectives()
        self.computing_ns = np.bincount(
            self.rank, weights=self.gap_ns * self.works, minlength=trace.world_size
        )

    def _list_moments(self, events: Events) -> None:
        """Lists the moments of all threads as columns, thread by thread."""
        begin = np.where(self.is_waited, np.maximum(events.wait_ns, events.post_ns), events.post_ns)
        is_span = (events.kind == SPAN) & (events.done_ns != NONE)
        parts = [
            (np.arange(len(events)), _POST, events.post_ns),
            (np.flatnonzero(self.is_waited), _WAIT, begin),
            (np.flatnonzero(self.is_waited | is_span), _DONE, np.maximum(events.done_ns, begin)),
        ]
        event = np.concatenate([index for index, _, _ in parts])
        kind = np.concatenate([np.full(len(index), kind) for index, kind, _ in parts])
        time = np.concatenate([times[index] for index, _, times in parts])
        # at equal times, operations end first, then spans from the inside; then events begin
        ends = (kind == _DONE) & (begin[event] < time)
        first = np.where(ends, is_span[event], 2)
        second = np.where(ends & is_span[event], -event, event * 3 + kind)
        order = np.lexsort((second, first, time, events.thread[event], events.rank[event]))
        self.event, self.kind, self.time_ns = event[order], kind[order], time[order]
        self.rank = events.rank[self.event]
        thread = number_rows(self.rank, events.thread[self.event])
        self.begin = np.flatnonzero(np.diff(thread, prepend=NONE))  # each thread's first moment
        blocks = self.is_waited[self.event] * ((self.kind == _WAIT) * 1 - (self.kind == _DONE))
        is_blocked = np.cumsum(blocks) > blocks  # before the moment
        in_call = (self.kind == _WAIT) & (np.diff(self.event, prepend=NONE) == 0)
        self.works = ~is_blocked & ~in_call  # whether the rank computed before the moment
        self.gap_ns = np.diff(self.time_ns, prepend=0).astype(np.float64)

    def _find_starts(self) -> None:
        """Finds the moment after which each thread begins, if its rank has earlier moments."""
        self.followers: dict[int, list[int]] = defaultdict(list)  # threads, by moment
        self.starters: list[int] = []  # threads
        for thread, begin in enumerate(self.begin.tolist()):
            low, high = np.searchsorted(self.rank, [self.rank[begin], self.rank[begin] + 1])
            earlier = low + np.flatnonzero(self.time_ns[low:high] < self.time_ns[begin])
            if len(earlier):
                before = int(earlier[self.time_ns[earlier].argmax()])
                self.followers[before].append(thread)
                self.gap_ns[begin] = self.time_ns[begin] - self.time_ns[before]
            else:
                self.starters.append(thread)
                self.gap_ns[begin], self.works[begin] = self.time_ns[begin], False

    def _time_messages(self) -> None:
        """Finds how long each message took after the link was free and both sides were posted."""
        events, messages = self.trace.events, self.trace.messages
        send, recv = messages.send, messages.recv
        self.other, self.edge = np.full((2, len(events)), NONE)
        self.other[send], self.other[recv] = recv, send
        self.edge[send] = self.edge[recv] = edge = number_rows(messages.src, messages.dst)
        sizes = np.maximum(events.size_bytes[send], 0)
        self.rounds[send] = self.rounds[recv] = 1
        self.size_bytes[send] = self.size_bytes[recv] = sizes
        ready = np.maximum(events.post_ns[send], events.post_ns[recv]).astype(np.float64)
        took, is_seen = self._see(recv, ready)
        order = np.lexsort((ready, edge))
        follows = np.flatnonzero(np.diff(edge[order]) == 0)
        message, before = order[follows + 1], order[follows]
        is_alone = np.ones(len(recv), dtype=bool)
        is_alone[message] = ready[before] + took[before] <= ready[message]
        chosen = is_seen & is_alone if (is_seen & is_alone).any() else np.isfinite(took)
        if not chosen.any():
            return
        self.link = fit_by_size(sizes[chosen], took[chosen] * 1e-9, find_typical)
        typical = (self.link.alpha_s + self.link.beta_s_per_byte * sizes) * 1e9
        took = np.where(is_seen, took, np.minimum(took, typical))
        start = ready.copy()
        free = ready[before] + took[before] - self.link.alpha_s * 1e9
        start[message] = np.clip(free, ready[message], ready[message] + took[message])
        self.took_ns[recv] = ready + took - start
        took, is_seen = self._see(send, start)
        self.took_ns[send] = np.where(is_seen, took, np.minimum(took, self.took_ns[recv]))

    def _time_collectives(self) -> None:
        """Finds the members that each member of a collective needs, and how long it took then."""
        events = self.trace.events
        calls = CollectiveCalls.of(events, self.trace.apart)
        sizes = np.array([len(group.ranks) for group in events.tables.groups], dtype=np.int64)
        counts = calls.complete[calls.call] & (events.op[calls.event] != OP_CODES["new_group"])
        counts &= sizes[events.group[calls.event]] > 1
        event, call = calls.event[counts], calls.call[counts]
        self.call = np.full(len(events), NONE)
        self.call[event] = call
        self.members = {one: calls.events_of(one) for one in np.unique(call).tolist()}
        self.needs: dict[int, list[int]] = {}  # by event, if it does not need all members
        start = events.post_ns[calls.last[call]].astype(np.float64)
        done = np.maximum(events.done_ns, events.post_ns)[event]
        for place in np.flatnonzero(self.is_waited[event] & (done < start)):
            members = np.array(self.members[int(call[place])])
            needed = members[events.post_ns[members] <= done[place]]
            self.needs[int(event[place])] = needed.tolist()
            start[place] = events.post_ns[needed].max()
        took, is_seen = self._see(event, start)
        kinds = number_rows(events.op[event], events.group[event], events.size_bytes[event])
        for kind in range(int(kinds.max(initial=NONE)) + 1):
            alike = kinds == kind
            index = event[alike][0]
            self.rounds[event[alike]], self.size_bytes[event[alike]] = count_rounds(
                OP_NAMES[events.op[index]],
                int(sizes[events.group[index]]),
                max(int(events.size_bytes[index]), 0),
            )
            seen = took[alike & is_seen]
            if len(seen):
                took[alike & ~is_seen] = np.minimum(took[alike & ~is_seen], np.median(seen))
        self.took_ns[event] = np.where(np.isfinite(took), took, 0)
        chosen = is_seen & (self.rounds[event] > 0)
        if self.link is None and chosen.any():
            each_s = self.took_ns[event] / np.maximum(self.rounds[event], 1) * 1e-9
            self.link = fit_by_size(self.size_bytes[event[chosen]], each_s[chosen], find_typical)

    def _see(self, event: Ints, start: Ints) -> tuple[Ints, Ints]:
        """Returns the time from a transfer's start to each event's end, and a mask.

        The mask selects the events whose rank was blocked for at least half of this time, so that
        their ends show when the transfer ended. Other ends may be later. The time of an event
        without an end is infinite.
        """
        events = self.trace.events
        done, wait = events.done_ns[event], events.wait_ns[event]
        took = np.where(done == NONE, np.inf, np.maximum(done - start, 0))
        is_seen = self.is_waited[event] & (done - wait >= wait - start)
        return took, is_seen

    def replay(self, edits: Edits) -> Trace:
        """Returns the run with other times.

        Raises:
            RingError: the recorded times contradict the recorded order.
        """
        return _Clock(self, edits).run()


class _Clock:
    """The state of one replay; its times are in ns."""

    def __init__(self, order: Order, edits: Edits) -> None:
        self._order, self._edits = order, edits
        events = order.trace.events
        factors = np.ones(order.trace.world_size)
        for rank, factor in edits.ranks.items():
            factors[rank] = factor
        gaps = order.gap_ns * np.where(order.works, factors[order.rank], 1)
        is_transfer = (order.other != NONE) | (order.call != NONE)
        self._leaves = is_transfer & (events.op == _SEND) & (edits.sends == "isend")
        waits = (order.kind == _DONE) & (is_transfer & order.is_waited)[order.event]
        gaps[waits] = 0
        took, alpha_s = order.took_ns, order.link.alpha_s if order.link else 0.0
        if edits.link is not None and order.link is not None:
            alpha_s = edits.link.alpha_s
            change_s = order.rounds * (alpha_s - order.link.alpha_s) + order.rounds * (
                order.size_bytes * (edits.link.beta_s_per_byte - order.link.beta_s_per_byte)
            )
            took = np.maximum(took + change_s * 1e9, 0)
        self._alpha_ns = alpha_s * 1e9
        # plain lists, because their items are faster to read
        self._gaps, self._took = gaps.tolist(), took.tolist()
        self._kind, self._event = order.kind.tolist(), order.event.tolist()
        self._acts = ((order.kind == _POST) & is_transfer[order.event]).tolist()
        self._waits = (waits & ~self._leaves[order.event]).tolist()
        self._other, self._call = order.other.tolist(), order.call.tolist()
        self._edge, self._receives = order.edge.tolist(), (events.kind == RECV).tolist()
        self._until = [*order.begin[1:].tolist(), len(gaps)]
        self._next = order.begin.tolist()  # by thread
        self._at = [0.0] * len(gaps)  # the replayed time of each moment
        self._is_posted = [False] * len(events)
        self._ended = [math.nan] * len(events)
        self._blocked: dict[int, tuple[int, float]] = {}  # thread and time, by awaited event
        self._free: dict[int, float] = defaultdict(float)  # by edge
        self._missing = {call: len(members) for call, members in order.members.items()}
        self._wanted: dict[int, list[int]] = defaultdict(list)  # by needed member
        self._lacks: dict[int, int] = {}  # by member
        for member, needs in order.needs.items():
            self._lacks[member] = len(needs)
            for one in needs:
                self._wanted[one].append(member)
        self._due: list[tuple[float, int]] = []

    def run(self) -> Trace:
        """Runs all threads to their ends."""
        for thread in self._order.starters:
            self._move(thread, 0.0)
        while self._due:
            time, thread = heappop(self._due)
            moment = self._next[thread]
            self._post(self._event[moment], time)
            self._pass(thread, moment, time)
            self._move(thread, time)
        if self._next != self._until:
            raise RingError(
                "cannot replay this run: its recorded times contradict the order of its "
                "operations. Record it again, or compare the clocks of its hosts."
            )
        return self._trace()

    def _move(self, thread: int, time: float) -> None:
        """Moves a thread on, until it posts an operation or has to wait."""
        for moment in range(self._next[thread], self._until[thread]):
            time += self._gaps[moment]
            if self._acts[moment]:
                heappush(self._due, (time, thread))
                return
            if self._waits[moment]:
                event = self._event[moment]
                ended = self._ended[event]
                if math.isnan(ended):
                    self._blocked[event] = thread, time
                    return
                time = max(time, ended)
            self._pass(thread, moment, time)

    def _pass(self, thread: int, moment: int, time: float) -> None:
        self._at[moment] = time
        self._next[thread] = moment + 1
        for follower in self._order.followers.get(moment, ()):
            self._move(follower, time)

    def _post(self, event: int, time: float) -> None:
        """Posts an operation, and starts its transfer if nothing is missing."""
        self._is_posted[event] = True
        other, call = self._other[event], self._call[event]
        if other != NONE:
            if self._is_posted[other]:
                edge = self._edge[event]
                start = max(time, self._free[edge])
                recv = event if self._receives[event] else other
                self._free[edge] = max(start + self._took[recv] - self._alpha_ns, start)
                self._end(event, start)
                self._end(other, start)
            return
        for member in self._wanted.get(event, ()):
            self._lacks[member] -= 1
            if self._lacks[member] == 0:
                self._end(member, time)
        self._missing[call] -= 1
        if self._missing[call] == 0:
            for member in self._order.members[call]:
                if member not in self._lacks:
                    self._end(member, time)

    def _end(self, event: int, start: float) -> None:
        """Ends an operation, and moves the thread on that waits for it."""
        self._ended[event] = ended = start + self._took[event]
        if event in self._blocked:
            thread, time = self._blocked.pop(event)
            time = max(time, ended)
            self._pass(thread, self._next[thread], time)
            self._move(thread, time)

    def _trace(self) -> Trace:
        order, events = self._order, self._order.trace.events
        at, ended = np.array(self._at), np.array(self._ended)
        post, wait, done = np.full((3, len(events)), float(NONE))
        for kind, column in enumerate((post, wait, done)):
            column[order.event[order.kind == kind]] = at[order.kind == kind]
        unwaited = ~order.is_waited & (events.kind <= COLLECTIVE) & (events.done_ns != NONE)
        done[unwaited] = (post + events.done_ns - events.post_ns)[unwaited]
        ends = unwaited & np.isfinite(ended)
        done[ends] = ended[ends]
        # a send that became an isend is waited for when its thread has ended
        left = self._leaves & order.is_waited
        length = np.diff(order.begin, append=len(at))
        last = np.zeros(len(events))
        last[order.event] = np.repeat(at[order.begin + length - 1], length)
        wait[left], done[left] = last[left], np.maximum(last, ended)[left]
        op = np.where(self._leaves, OP_CODES["isend"], events.op).astype(events.op.dtype)
        if np.max([post, wait, done], initial=0) >= LONGEST_S * 1e9:
            raise ArgumentError(
                "the predicted run must be shorter than 285 years, because a trace counts ns. Use "
                "smaller factors, or a faster link."
            )
        times = {
            name: np.rint(column).astype(np.int64)
            for name, column in (("post_ns", post), ("wait_ns", wait), ("done_ns", done))
        }
        events = replace(events, op=op, **times)
        # the threads of a rank may post in another order than before
        by_post = np.lexsort((np.arange(len(events)), events.post_ns, events.rank))
        events = replace(events.select(by_post), seq=order.trace.events.seq)
        return Trace(events, order.trace.metadata)
