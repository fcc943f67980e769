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
* The threads of a rank do not wait for each other, and begin when they began in the run.

The typical times of messages form a `Link`. On a different link, each message takes longer or
shorter by the difference between the two links, and each collective by this difference for each of
its rounds (``ringsim.traces.collectives``). Time beyond the typical time, such as a stall, remains.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from ringsim.errors import LONGEST_S, ArgumentError, RingError
from ringsim.link import Link
from ringsim.prediction.calibration import find_typical
from ringsim.prediction.gloo_costs import fit_by_size
from ringsim.traces.collectives import count_rounds
from ringsim.traces.events import NONE, OP_CODES, OP_NAMES, SPAN, Events, Ints
from ringsim.traces.matching import CollectiveCalls, number_rows
from ringsim.traces.value import Trace

_POST, _WAIT, _DONE = range(3)  # the kinds of moments
_SEND = OP_CODES["send"]


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
        # by event: whether it belongs to a transfer (a message or a collective), the time that the
        # transfer took, how many messages follow one another in it, and their size
        self.moves = np.zeros(len(events), dtype=bool)
        self.took_ns, self.rounds, self.size_bytes = np.zeros((3, len(events)))
        # by transfer: the events that must be posted before it, and the events that end with it; of
        # a message, the send and the recv. Messages come first
        self.needs: list[Sequence[int]] = []
        self.ends: list[Sequence[int]] = []
        self.edges: list[int] = []  # by message, its link
        self._time_messages(events)
        self._time_collectives(events)
        self.computing_ns = np.bincount(
            self.rank, weights=self.gap_ns * self.works, minlength=trace.world_size
        )

    def _list_moments(self, events: Events) -> None:
        """Lists the moments of all threads as columns, thread by thread."""
        begin = np.where(self.is_waited, np.maximum(events.wait_ns, events.post_ns), events.post_ns)
        is_span = (events.kind == SPAN) & (events.done_ns != NONE)
        waited = np.flatnonzero(self.is_waited)
        ended = np.flatnonzero(self.is_waited | is_span)
        event = np.concatenate([np.arange(len(events)), waited, ended])
        kind = np.repeat([_POST, _WAIT, _DONE], [len(events), len(waited), len(ended)])
        time = np.concatenate(
            [events.post_ns, begin[waited], np.maximum(events.done_ns, begin)[ended]]
        )
        # at equal times, operations end first, then spans from the inside; then events begin
        ends = (kind == _DONE) & (begin[event] < time)
        first = np.where(ends, is_span[event], 2)
        second = np.where(ends & is_span[event], -event, event * 3 + kind)
        order = np.lexsort((second, first, time, events.thread[event], events.rank[event]))
        self.event, self.kind, time = event[order], kind[order], time[order]
        self.rank = events.rank[self.event]
        thread = number_rows(self.rank, events.thread[self.event])
        self.begin = np.flatnonzero(np.diff(thread, prepend=NONE))  # each thread's first moment
        blocks = self.is_waited[self.event] * ((self.kind == _WAIT) * 1 - (self.kind == _DONE))
        is_blocked = np.cumsum(blocks) > blocks  # before the moment
        in_call = (self.kind == _WAIT) & (np.diff(self.event, prepend=NONE) == 0)
        self.works = ~is_blocked & ~in_call  # whether the rank computed before the moment
        self.gap_ns = np.diff(time, prepend=0).astype(np.float64)
        self.works[self.begin], self.gap_ns[self.begin] = False, time[self.begin]

    def _time_messages(self, events: Events) -> None:
        """Finds how long each message took after the link was free and both sides were posted."""
        messages = self.trace.messages
        send, recv, edge = messages.send, messages.recv, number_rows(messages.src, messages.dst)
        sizes = np.maximum(events.size_bytes[send], 0)
        for side in (send, recv):
            self.moves[side], self.rounds[side], self.size_bytes[side] = True, 1, sizes
        self.needs += zip(send.tolist(), recv.tolist(), strict=True)
        self.ends += self.needs
        self.edges += edge.tolist()
        ready = np.maximum(events.post_ns[send], events.post_ns[recv]).astype(np.float64)
        took, is_seen = self._see(recv, ready)
        order = np.lexsort((ready, edge))
        follows = np.flatnonzero(np.diff(edge[order]) == 0)
        message, before = order[follows + 1], order[follows]
        is_alone = is_seen.copy()
        is_alone[message] &= ready[before] + took[before] <= ready[message]
        chosen = is_alone if is_alone.any() else np.isfinite(took)
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

    def _time_collectives(self, events: Events) -> None:
        """Finds the members that each member of a collective needs, and how long it took then."""
        calls = CollectiveCalls.of(events, self.trace.apart)
        sizes = np.array([len(group.ranks) for group in events.tables.groups], dtype=np.int64)
        counts = calls.complete[calls.call] & (events.op[calls.event] != OP_CODES["new_group"])
        counts &= sizes[events.group[calls.event]] > 1
        event, call = calls.event[counts], calls.call[counts]
        self.moves[event] = True
        start = events.post_ns[calls.last[call]].astype(np.float64)
        done = np.maximum(events.done_ns, events.post_ns)[event]
        is_early = self.is_waited[event] & (done < start)  # these do not need all members
        for place in np.flatnonzero(is_early):
            members = np.array(calls.events_of(int(call[place])))
            needed = members[events.post_ns[members] <= done[place]]
            self.needs.append(needed.tolist())
            self.ends.append([int(event[place])])
            start[place] = events.post_ns[needed].max()
        early = set(event[is_early].tolist())
        for each in np.unique(call).tolist():
            self.needs.append(calls.events_of(each))
            self.ends.append([one for one in self.needs[-1] if one not in early])
        took, is_seen = self._see(event, start)
        kinds = number_rows(events.op[event], events.group[event], events.size_bytes[event])
        for kind in np.unique(kinds):
            alike = kinds == kind
            of_kind = event[alike]
            self.rounds[of_kind], self.size_bytes[of_kind] = count_rounds(
                OP_NAMES[events.op[of_kind[0]]],
                int(sizes[events.group[of_kind[0]]]),
                max(int(events.size_bytes[of_kind[0]]), 0),
            )
            if (seen := alike & is_seen).any():
                took[alike & ~is_seen] = np.minimum(took[alike & ~is_seen], np.median(took[seen]))
        self.took_ns[event] = np.where(np.isfinite(took), took, 0)
        if self.link is None and is_seen.any():
            each_s = (took / self.rounds[event] * 1e-9)[is_seen]
            self.link = fit_by_size(self.size_bytes[event[is_seen]], each_s, find_typical)

    def _see(self, event: Ints, start: Ints) -> tuple[Ints, Ints]:
        """Returns the time from a transfer's start to each event's end, and a mask.

        The mask selects the events whose rank was blocked for at least half of this time, so that
        their ends show when the transfer ended. Other ends may be later. The time of an event
        without an end is infinite.
        """
        done, wait = self.trace.events.done_ns[event], self.trace.events.wait_ns[event]
        took = np.where(done == NONE, np.inf, np.maximum(done - start, 0))
        return took, self.is_waited[event] & (done - wait >= wait - start)

    def replay(self, edits: Edits) -> Trace:
        """Returns the run with other times.

        Raises:
            RingError: the recorded times contradict the recorded order.
        """
        return _Clock(self, edits).run()


class _Clock:
    """The state of one replay; its times are in ns."""

    def __init__(self, order: Order, edits: Edits) -> None:
        self._order, events = order, order.trace.events
        factors = np.array([edits.ranks.get(rank, 1) for rank in range(order.trace.world_size)])
        gaps = order.gap_ns * np.where(order.works, factors[order.rank], 1)
        moves = order.moves
        self._leaves = moves & (events.op == _SEND) & (edits.sends == "isend")
        waits = (order.kind == _DONE) & (moves & order.is_waited)[order.event]
        gaps[waits] = 0
        old = order.link or Link(0, 0)
        new = edits.link or old
        slower_s = new.beta_s_per_byte - old.beta_s_per_byte
        longer_s = order.rounds * (new.alpha_s - old.alpha_s + slower_s * order.size_bytes)
        took = np.maximum(order.took_ns + longer_s * 1e9, 0)
        self._alpha_ns = new.alpha_s * 1e9
        # plain lists, because their items are faster to read
        self._gaps, self._took, self._event = gaps.tolist(), took.tolist(), order.event.tolist()
        self._posts = ((order.kind == _POST) & moves[order.event]).tolist()
        self._waits = (waits & ~self._leaves[order.event]).tolist()
        self._until = [*order.begin[1:].tolist(), len(gaps)]
        self._next = order.begin.tolist()  # by thread
        self._at = [0.0] * len(gaps)  # the replayed time of each moment
        self._ended = [math.nan] * len(events)
        self._blocked: dict[int, tuple[int, float]] = {}  # thread and time, by awaited event
        self._free: dict[int, float] = defaultdict(float)  # by edge
        self._missing = list(map(len, order.needs))
        self._wanted: dict[int, list[int]] = defaultdict(list)  # the transfers that need an event
        for transfer, needs in enumerate(order.needs):
            for event in needs:
                self._wanted[event].append(transfer)
        self._due: list[tuple[float, int]] = []

    def run(self) -> Trace:
        """Runs all threads to their ends."""
        for thread in range(len(self._next)):
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
            if self._posts[moment]:
                heappush(self._due, (time, thread))
                return
            if self._waits[moment]:
                ended = self._ended[self._event[moment]]
                if math.isnan(ended):
                    self._blocked[self._event[moment]] = thread, time
                    return
                time = max(time, ended)
            self._pass(thread, moment, time)

    def _pass(self, thread: int, moment: int, time: float) -> None:
        self._at[moment] = time
        self._next[thread] = moment + 1

    def _post(self, event: int, time: float) -> None:
        """Posts an operation, and starts the transfers for which nothing is missing any more."""
        edges = self._order.edges
        for transfer in self._wanted[event]:
            self._missing[transfer] -= 1
            if self._missing[transfer] > 0:
                continue
            ends, start = self._order.ends[transfer], time
            if transfer < len(edges):  # a message
                start = max(time, self._free[edges[transfer]])
                took = max(self._took[ends[1]] - self._alpha_ns, 0)
                self._free[edges[transfer]] = start + took
            for one in ends:
                self._end(one, start)

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
        times = np.full((3, len(events)), float(NONE))
        times[order.kind, order.event] = at
        post, wait, done = times
        unwaited = (done == NONE) & (events.done_ns != NONE)
        done[unwaited] = (post + events.done_ns - events.post_ns)[unwaited]
        # a send that became an isend is waited for when its thread has ended
        left = self._leaves & order.is_waited
        length = np.diff(order.begin, append=len(at))
        last = np.zeros(len(events))
        last[order.event] = np.repeat(at[order.begin + length - 1], length)
        wait[left], done[left] = last[left], np.maximum(last, ended)[left]
        op = np.where(self._leaves, OP_CODES["isend"], events.op).astype(events.op.dtype)
        if times.max(initial=0) >= LONGEST_S * 1e9:
            raise ArgumentError(
                "the predicted run must be shorter than 285 years, because a trace counts ns. Use "
                "smaller factors, or a faster link."
            )
        post, wait, done = np.rint(times).astype(np.int64)
        events = replace(events, op=op, post_ns=post, wait_ns=wait, done_ns=done)
        # the threads of a rank may post in another order than before
        by_post = np.lexsort((np.arange(len(events)), events.post_ns, events.rank))
        events = replace(events.select(by_post), seq=order.trace.events.seq)
        return Trace(events, order.trace.metadata)
