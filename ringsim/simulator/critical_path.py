"""What a step's time was made of: the chain of computations and messages, each beginning when the one before it ended, and why so late.

The reasons::

    program order    the rank was busy with the computation before
    data             a computation waited for its message; a message, to be made
    link busy        the message before it was still on the link
    receiver late    its receive was not posted
    start            nothing was before it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from ringsim.pipeline.actions import Action
from ringsim.pipeline.programs import Time
from ringsim.simulator.operations import FORWARD, Operations
from ringsim.simulator.prices import Prices
from ringsim.traces.events import Ints

__all__ = ["DATA", "LINK_BUSY", "PROGRAM", "REASONS", "RECEIVER_LATE", "START", "CriticalPath", "Hop", "find_critical_path"]

START: Final = "start"
PROGRAM: Final = "program order"
DATA: Final = "data"
LINK_BUSY: Final = "link busy"
RECEIVER_LATE: Final = "receiver late"
REASONS: Final = (START, PROGRAM, DATA, LINK_BUSY, RECEIVER_LATE)


class Hop(NamedTuple):
    """One stretch of the critical path.

    Attributes:
        action: a computation, or the send of a message.
        rank: who computes, or receives.
        source: who sends; -1 for a computation.
        start: when it begins, which is when the hop before it ends.
        end: when it ends, or when the message has arrived, or has left the link to the next one.
        reason: why it did not begin earlier.
    """

    action: Action
    rank: int
    source: int
    start: Time
    end: Time
    reason: str


@dataclass(frozen=True)
class CriticalPath:
    """The chain that takes as long as the step: whatever is not on it may be a little slower for free.

    Attributes:
        hops: from the start of the step to its end.

    Example:
        See ``ScheduleRun.critical_path``.
    """

    hops: tuple[Hop, ...]

    def __len__(self) -> int:
        """Returns the number of hops."""
        return len(self.hops)

    @property
    def by_reason(self) -> dict[str, int]:
        """How often each reason occurs; those that do not are left out."""
        counts = dict.fromkeys(REASONS, 0)
        for hop in self.hops:
            counts[hop.reason] += 1
        return {reason: number for reason, number in counts.items() if number}

    @property
    def computing(self) -> Time:
        """How much of the step the path computes."""
        return sum(hop.end - hop.start for hop in self.hops if hop.source < 0)

    @property
    def travelling(self) -> Time:
        """How much of the step the path is on links; with ``computing`` it makes the step."""
        return sum(hop.end - hop.start for hop in self.hops if hop.source >= 0)

    def __repr__(self) -> str:
        """Returns what it is made of."""
        why = ", ".join(f"{reason} {number:,}" for reason, number in self.by_reason.items())
        return f"Critical path of {len(self):,} hops: computing {float(self.computing):.6g}, on links {float(self.travelling):.6g}; {why}"


def find_critical_path(operations: Operations, prices: Prices, ends: Ints, starts: Ints, *, rendezvous: bool) -> CriticalPath:
    """Walks from the last computation back to the start of the step, each time to what was waited for longest.

    Where two ends fall together, the rank's own order goes first, then the data.

    Args:
        operations: the schedule.
        prices: without K.
        ends: when each computation ends, shape (n,).
        starts: when the message of each starts, likewise.
        rendezvous: whether a message starts only when its receive is posted, too.

    Returns:
        The path.
    """
    hops: list[Hop] = []
    here = int(ends.argmax()) if len(ends) else -1
    zero = ends[:0].sum()
    while here >= 0:
        kind, stage, rank = int(operations.kind[here]), int(operations.stage[here]), operations.rank_of(here)
        before, made = int(operations.before[here]), int(operations.sent_after[here])
        direction = int(kind != FORWARD)
        own = ends[before] if before >= 0 else zero
        arrived = starts[here] + prices.occupancy[direction, stage] + prices.latency[direction, stage] if made >= 0 else None
        if arrived is None or arrived <= own:
            hops.append(Hop(operations.action(here), rank, -1, _plain(own), _plain(ends[here]), PROGRAM if before >= 0 else START))
            here = before
            continue
        hops.append(Hop(operations.action(here), rank, -1, _plain(arrived), _plain(ends[here]), DATA))
        here = _walk_messages(hops, operations, ends, starts, here, arrived, rendezvous=rendezvous)
    return CriticalPath(tuple(reversed(hops)))


def _walk_messages(hops: list[Hop], operations: Operations, ends: Ints, starts: Ints, here: int, until: Time, *, rendezvous: bool) -> int:
    """Adds the message of a computation, and those that it queued behind; returns the computation that the first of them waited for."""
    rank, source = operations.rank_of(here), operations.source(here)
    while True:
        start, queued = starts[here], int(operations.queued_after[here])
        made, posted = int(operations.sent_after[here]), int(operations.posted_after[here])
        reason, next_place = DATA, made
        if ends[made] != start:
            is_late = rendezvous and posted >= 0 and ends[posted] == start
            reason, next_place = (RECEIVER_LATE, posted) if is_late else (LINK_BUSY, queued)
        kind, step = ("SEND_F", -1) if operations.kind[here] == FORWARD else ("SEND_B", 1)
        send = Action(int(operations.stage[here]) + step, kind, int(operations.microbatch[here]))
        hops.append(Hop(send, rank, source, _plain(start), _plain(until), reason))
        if reason != LINK_BUSY:
            return next_place
        here, until = next_place, start


def _plain(time: Time) -> Time:
    """A float of Python's own for numpy's; Fractions stay."""
    return float(time) if isinstance(time, float) else time
