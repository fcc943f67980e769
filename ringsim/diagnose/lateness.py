"""Finds the ranks that kept others waiting in a finished run.

These ranks are late senders, late receivers, and stragglers, which are always late. A wait counts
from its beginning until the other side was posted. A rank that was late because it was itself
waiting is not to blame: its own wait is followed until a busy rank is found::

    rank 0  [ compute, microbatch 3 ....................... ] send
    rank 1  recv ==== late sender ============================ | send
    rank 2    recv ==== late sender ============================= |    follows from what rank 1
                                                                       waited for: folded
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ringsim.diagnose.snapshot import operation_of
from ringsim.traces.events import ERROR, NONE, SPAN, Events, Ints
from ringsim.traces.findings import Finding, lines_text
from ringsim.traces.items import event_at, part_text
from ringsim.traces.matching import CollectiveCalls, number_rows, wait_for_last
from ringsim.traces.units import count, span_text, time_text

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

# waits at one line for one rank are reported only if their total is at least this,
LATE_NS = 1_000_000
LATE_SHARE = 0.05  # and at least this share of the run
STRAGGLER_SHARE = 0.5  # a straggler causes at least this share of all waiting,
STRAGGLER_OF_RUN = 0.1  # at least this share of the run for each other rank,
STRAGGLER_TIMES = 3  # and at least this number of waits
# parts of the run: a rank that is always slow leads in all of them, and a rank that was disturbed
# once leads in only one
PARTS = 4
MOST_FINDINGS = 5
_SENDER, _RECEIVER, _MEMBER = range(3)
_KINDS = ("late_sender", "late_receiver", "straggler")


class _Waits(NamedTuple):
    """The waits for late ranks, as columns of equal length."""

    waiter: Ints  # rank
    late: Ints  # rank
    start_ns: Ints
    length_ns: Ints
    end_ns: Ints
    event: Ints  # the waiting rank's
    partner: Ints  # the late rank's
    kind: Ints


def find_lateness(trace: Trace) -> tuple[Finding, ...]:
    """Finds the ranks that kept others waiting for a long time in a finished run.

    A straggler comes first, if there is one, then late senders and receivers, the longest wait
    first. A wait that follows from another is folded into it. Waits at one line are left out if
    their total is below ``LATE_NS``, or below ``LATE_SHARE`` of the run.

    Example:
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> from ringsim.traces.value import Trace
        >>> events = make_events(
        ...     {
        ...         "rank": [0, 1],
        ...         "op": [OP_CODES["send"], OP_CODES["recv"]],
        ...         "peer": [1, 0],
        ...         "tag": [0, 0],
        ...         "post_ns": [50_000_000, 0],
        ...         "wait_ns": [50_000_000, 0],
        ...         "done_ns": [51_000_000, 52_000_000],
        ...     }
        ... )
        >>> for finding in find_lateness(Trace(events, {"world_size": 2})):
        ...     print(finding)
        rank 1 waited 50 ms for rank 0.
          rank 1 waited in recv from 0 (tag 0)
          rank 0 was busy outside any span
          Hint: Send earlier on rank 0, give that rank less to do, or have rank 1 do other work meanwhile (irecv).
    """  # noqa: E501
    waits = _collect(trace)
    if len(waits.late) == 0:
        return ()
    activity = Activity(trace.events, trace.world_size)
    own_ns = _own_time(waits, activity)
    straggler = _find_straggler(trace, waits, own_ns, activity)
    found = _describe_groups(trace, waits, own_ns, activity)
    if straggler is None:
        return tuple(found[:MOST_FINDINGS])
    mine = [finding for finding in found if straggler.ranks[0] in finding.ranks[:-1]]
    rest = [finding for finding in found if finding not in mine]
    folded = tuple(
        replace(one, consequences=())
        for finding in mine
        for one in (finding, *finding.consequences)
    )
    return (replace(straggler, consequences=folded), *rest[:MOST_FINDINGS])


def _collect(trace: Trace) -> _Waits:
    events, sends, recvs = trace.events, trace.messages.send, trace.messages.recv
    calls = CollectiveCalls.of(events, trace.apart)
    pieces = (
        (recvs, sends, trace.waits.late_sender_ns),
        (sends, recvs, trace.waits.late_receiver_ns),
        # in complete collectives, for the last member to arrive
        (calls.event, calls.last[calls.call], wait_for_last(events, trace.apart)),
    )
    found = []
    for kind, (mine, other, late_ns) in enumerate(pieces):
        some = (late_ns[mine] > 0) & (events.rank[mine] != events.rank[other])
        mine, other, kinds = mine[some], other[some], np.full(some.sum(), kind)
        start, length = events.wait_ns[mine], late_ns[mine]
        ranks = events.rank[mine], events.rank[other]
        found.append((*ranks, start, length, start + length, mine, other, kinds))
    return _Waits._make(np.concatenate(column) for column in zip(*found, strict=True))


def _own_time(waits: _Waits, activity: Activity) -> Ints:
    """Returns, for each wait, the time in ns during which the late rank was not itself blocked."""
    own = waits.length_ns.copy()
    for rank in np.unique(waits.late).tolist():
        some = waits.late == rank
        own[some] -= activity.blocked_between(rank, waits.start_ns[some], waits.end_ns[some])
    return own.clip(0)


class _Blame(NamedTuple):
    """How long and how often other ranks waited for each busy rank."""

    length_ns: Ints
    times: Ints
    worst: int  # the rank that caused the most waiting
    leads: str  # the parts of the run in which it did so

    @classmethod
    def of(cls, waits: _Waits, own_ns: Ints, size: int) -> _Blame:
        length = np.bincount(waits.late, weights=own_ns, minlength=size)
        times = np.bincount(waits.late, weights=own_ns > 0, minlength=size)
        worst = int(length.argmax())
        start, end = waits.start_ns.min(initial=0), waits.end_ns.max(initial=1)
        part = np.minimum((waits.start_ns - start) * PARTS // max(end - start, 1), PARTS - 1)
        by_part = np.zeros((PARTS, size))
        np.add.at(by_part, (part, waits.late), own_ns)
        waited = by_part[by_part.sum(axis=1) > 0]
        leads = np.count_nonzero(waited.argmax(axis=1) == worst)
        return cls(length, times, worst, f"{leads} of {len(waited)} quarters of the run")

    @property
    def share(self) -> float:
        """The worst rank's share of all waiting time."""
        return float(self.length_ns[self.worst] / max(self.length_ns.sum(), 1))


def describe_waiting(trace: Trace) -> str:
    """Describes the total waiting for late ranks, and the rank that caused most of it.

    Example:
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> from ringsim.traces.value import Trace
        >>> events = make_events(
        ...     {
        ...         "rank": [0, 1],
        ...         "op": [OP_CODES["send"], OP_CODES["recv"]],
        ...         "peer": [1, 0],
        ...         "tag": [0, 0],
        ...         "post_ns": [200, 0],
        ...         "wait_ns": [200, 0],
        ...         "done_ns": [300, 10_000],
        ...     }
        ... )
        >>> print(
        ...     describe_waiting(Trace(events, {"world_size": 2}))
        ... )  # doctest: +NORMALIZE_WHITESPACE
        Ranks waited 200 ns in total for late ranks, 1 % of all ranks' time. Rank 0 caused 200 ns (100 %) of this waiting, in 1 of 1
        waits, and caused the most waiting in 1 of 1 quarters of the run.
    """  # noqa: E501
    waits = _collect(trace)
    blame = _Blame.of(
        waits, _own_time(waits, Activity(trace.events, trace.world_size)), trace.world_size
    )
    total_ns = blame.length_ns.sum()
    if total_ns == 0:
        return "No rank waited for a late rank."
    of_run = 100 * total_ns / (trace.world_size * trace.makespan_s * 1e9)
    mine = blame.length_ns[blame.worst]
    times = f"{blame.times[blame.worst]:,.0f} of {blame.times.sum():,.0f}"
    return (
        f"Ranks waited {time_text(total_ns)} in total for late ranks, {of_run:.0f} % of all ranks' "
        f"time. Rank {blame.worst} caused {time_text(mine)} ({100 * blame.share:.0f} %) of this "
        f"waiting, in {times} waits, and caused the most waiting in {blame.leads}."
    )


def _find_straggler(
    trace: Trace, waits: _Waits, own_ns: Ints, activity: Activity
) -> Finding | None:
    size = trace.world_size
    if size == 2:  # for messages, the findings by line are enough
        own_ns = np.where(waits.kind == _MEMBER, own_ns, 0)
    found = _Blame.of(waits, own_ns, size)
    blame, times, worst, _ = found
    enough = STRAGGLER_OF_RUN * trace.makespan_s * 1e9 * (size - 1)
    if (
        found.share < STRAGGLER_SHARE
        or blame[worst] < max(enough, LATE_NS)
        or times[worst] < STRAGGLER_TIMES
    ):
        return None
    busy = activity.busy_shares(trace.makespan_s * 1e9)
    others = float(np.median(np.delete(busy, worst)))
    longest = np.where(waits.late == worst, own_ns, NONE).argmax()
    doing = activity.doing(worst, waits.start_ns[longest], waits.end_ns[longest])
    message = (
        f"rank {worst} made others wait {count(int(times[worst]), 'time')}, for "
        f"{time_text(blame[worst])} in total."
        f"\n  that is {100 * found.share:.0f} % of all waiting for late ranks"
        f"\n  rank {worst} caused the most waiting in {found.leads}"
        f"\n  rank {worst} was busy for {100 * busy[worst]:.0f} % of the run, the others for "
        f"{100 * others:.0f} % (median)"
        f"\n  during the longest wait, rank {worst} was {doing}"
    )
    operations = (operation_of(trace.events, waits.event[longest]),)
    return Finding(
        "straggler",
        (worst,),
        operations,
        message,
        f"Give rank {worst} less to do, or find out why it is slow.",
    )


def _describe_groups(
    trace: Trace, waits: _Waits, own_ns: Ints, activity: Activity
) -> list[Finding]:
    """Returns a finding for each line at which one rank waited for another, longest wait first.

    Findings that follow from others are folded into them.
    """
    events = trace.events
    places = events.file[waits.event], events.line[waits.event]
    group = number_rows(waits.kind, waits.waiter, waits.late, *places)
    total, times = np.bincount(group, weights=waits.length_ns), np.bincount(group)
    least = max(LATE_NS, LATE_SHARE * trace.makespan_s * 1e9)
    order = np.lexsort((-waits.length_ns, group))
    longest = order[np.searchsorted(group[order], np.arange(len(total)))]
    kept = [
        int(one)
        for one in np.argsort(-total, kind="stable")
        if total[one] >= least and waits.kind[longest[one]] != _MEMBER
    ]
    findings: dict[int, Finding] = {}
    follows: dict[int, int] = {}
    for one in kept:
        wait = longest[one]
        chain = _chain(waits, own_ns, wait)
        if len(chain) > 1:
            follows[one] = group[chain[1]]
        findings[one] = _late_finding(trace, waits, activity, chain, times[one], total[one])
    roots = []
    for one in kept:
        above, seen = one, {one}
        while (parent := follows.get(above)) in findings and parent not in seen:
            above = parent
            seen.add(above)
        if above == one or follows.get(above) in seen:
            roots.append(one)
        else:
            findings[above] = replace(
                findings[above], consequences=(*findings[above].consequences, findings[one])
            )
    return [findings[one] for one in roots]


def _chain(waits: _Waits, own_ns: Ints, wait: int) -> list[int]:
    """Returns a wait, then the wait of the rank that was late, and so on.

    The chain ends at a late rank that was mostly busy.
    """
    chain = [wait]
    while own_ns[wait] < waits.length_ns[wait] / 2:
        some = np.flatnonzero(waits.waiter == waits.late[wait])
        overlap = np.minimum(waits.end_ns[some], waits.end_ns[wait]) - np.maximum(
            waits.start_ns[some], waits.start_ns[wait]
        )
        if overlap.max(initial=0) == 0 or some[overlap.argmax()] in chain:
            break
        wait = some[overlap.argmax()]
        chain.append(wait)
    return chain


def _late_finding(
    trace: Trace, waits: _Waits, activity: Activity, chain: list[int], times: int, total_ns: float
) -> Finding:
    events = trace.events
    first, last = chain[0], chain[-1]
    operation = operation_of(events, waits.event[first])
    culprit = int(waits.late[last])
    doing = activity.doing(culprit, waits.start_ns[last], waits.end_ns[last])
    because = [
        f"rank {operation.rank} waited in {operation}",
        *(f"rank {waits.waiter[wait]} waited for rank {waits.late[wait]}" for wait in chain[1:]),
        f"rank {culprit} was {doing}",
    ]
    if times > 1:
        because.append(
            f"rank {operation.rank} waited there {times:,} times, for {time_text(total_ns)} in "
            "total"
        )
    message = (
        f"rank {operation.rank} waited {time_text(waits.length_ns[first])} "
        f"for rank {waits.late[first]}.{lines_text(because)}"
    )
    sends = waits.kind[last] == _SENDER
    act, other = ("Send", "irecv") if sends else ("Receive", "isend")
    hint = (
        f"{act} earlier on rank {culprit}, give that rank less to do, or have rank "
        f"{waits.waiter[last]} do other work meanwhile ({other})."
    )
    late = [int(waits.late[wait]) for wait in chain]
    ranks = tuple(dict.fromkeys([*reversed(late), operation.rank]))
    partner = operation_of(events, waits.partner[first])
    return Finding(_KINDS[waits.kind[first]], ranks, (operation, partner), message, hint)


class Activity:
    """The ranks' activity over time, from the events of a run with ``world_size`` ranks.

    Example:
        >>> from ringsim.traces.events import OP_CODES, Tables, make_events
        >>> names = Tables(labels=("compute",))
        >>> events = make_events(
        ...     {
        ...         "rank": [0, 0],
        ...         "op": [OP_CODES["span"], OP_CODES["recv"]],
        ...         "label": [0, -1],
        ...         "stage": [1, -1],
        ...         "microbatch": [3, -1],
        ...         "post_ns": [0, 80],
        ...         "wait_ns": [-1, 80],
        ...         "done_ns": [70, 100],
        ...     },
        ...     names,
        ... )
        >>> activity = Activity(events, 1)
        >>> (
        ...     activity.doing(0, 10, 60),
        ...     int(activity.blocked_between(0, np.array([60]), np.array([90]))[0]),
        ... )
        ('still computing stage 1, microbatch 3', 10)
    """

    def __init__(self, events: Events, world_size: int) -> None:
        self._events = events
        self._size = world_size
        self._ends: dict[int, tuple[Ints, Ints]] = {}

    def blocked_between(self, rank: int, start_ns: Ints, end_ns: Ints) -> Ints:
        """Returns the time that a rank was blocked in each interval, in ns (int64)."""
        times, blocked = self._blocked_until(rank)
        return (np.interp(end_ns, times, blocked) - np.interp(start_ns, times, blocked)).astype(
            np.int64
        )

    def busy_shares(self, length_ns: float) -> Ints:
        """Returns the share of the run during which each rank was not blocked.

        The run is ``length_ns`` long; the shares are float64.
        """
        blocked = np.array([self._blocked_until(rank)[1][-1] for rank in range(self._size)])
        return 1 - blocked / max(length_ns, 1)

    def doing(self, rank: int, start_ns: int, end_ns: int) -> str:
        """Describes a rank's main activity during an interval.

        For example, "still computing stage 1, microbatch 3".
        """
        if span := self.in_span(rank, start_ns, end_ns):
            return span
        events = self._events
        mine = (events.rank == rank) & events.communicates
        last = np.flatnonzero(mine & (events.post_ns <= start_ns))
        if len(last) and events.file[last[-1]] != NONE:
            latest = operation_of(events, last[-1])
            return f"busy outside any span, after its {latest.op} at {latest.place}"
        return "busy outside any span"

    def in_span(self, rank: int, start_ns: int, end_ns: int) -> str:
        """Describes the span that fills most of an interval, or returns "" if there is none."""
        events = self._events
        mine = np.flatnonzero((events.rank == rank) & (events.kind == SPAN))
        done = np.where(events.done_ns[mine] == NONE, end_ns, events.done_ns[mine])
        overlap = np.minimum(done, end_ns) - np.maximum(events.post_ns[mine], start_ns)
        # Spans nest: among those that cover about as much, the latest one is the innermost.
        if 2 * overlap.max(initial=0) > end_ns - start_ns:
            wide = mine[overlap >= 0.9 * overlap.max()]
            return f"still {self._span_text(wide[np.argmax(events.post_ns[wide])])}"
        return ""

    def _span_text(self, event: int) -> str:
        one = event_at(self._events, event)
        name = "a span" if one.label is None else span_text(one.label)
        words = part_text(one)
        if name == "compute":
            return f"computing {words}".rstrip()
        return f'in "{name}"' + (f" ({words})" if words else "")

    def _blocked_until(self, rank: int) -> tuple[Ints, Ints]:
        """Returns ascending times from 0, and the rank's blocked time until each of these times.

        Overlapping times count once.
        """
        if rank not in self._ends:
            events = self._events
            over = (events.wait_ns != NONE) & (events.done_ns != NONE)
            # a wait that reached its own limit is not caused by another rank
            over &= events.status != ERROR
            mine = np.flatnonzero((events.rank == rank) & events.communicates & over)
            mine = mine[np.argsort(events.wait_ns[mine], kind="stable")]
            wait, done = events.wait_ns[mine], events.done_ns[mine]
            end = np.maximum.accumulate(np.maximum(done, wait))
            start = np.minimum(np.maximum(wait, np.append(0, end)[:-1]), end)
            total = np.cumsum(end - start)
            times = np.append(0, np.stack([start, end], axis=1))
            until = np.append(0, np.stack([total - (end - start), total], axis=1))
            self._ends[rank] = times, until
        return self._ends[rank]
