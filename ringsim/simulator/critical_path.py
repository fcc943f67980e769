"""Finds the critical path of a simulated step, and the parts that are worth improving.

The critical path is a chain of computations and messages, each of which begins when the previous
one ends. Each of these hops has a reason that it did not begin earlier::

    program order    the rank was busy with the previous computation
    data             a computation waited for its message, or a message for its payload
    link busy        the previous message was still on the link or, if messages are carried out in
                     order, an earlier message of one of the two ranks was not done
    receiver late    the receive was not posted
    start            nothing came before

The length of a step is the longest of many paths through it. Improving a stage, a link or the size
of messages therefore saves at most the time that the critical path spends on it, and less if a
different path becomes the longest. A second simulation determines the exact gain.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ringsim.schedules.costs import Time
from ringsim.schedules.lowering import get_recv
from ringsim.schedules.schedule import Action
from ringsim.simulator.columns import Prices
from ringsim.simulator.levels import Times

START = "start"
PROGRAM = "program order"
DATA = "data"
LINK_BUSY = "link busy"
RECEIVER_LATE = "receiver late"
REASONS = (START, PROGRAM, DATA, LINK_BUSY, RECEIVER_LATE)


class PathPart(NamedTuple):
    """One part of the critical path.

    Attributes:
        action: a computation, or the send of a message.
        rank: the rank that computes or receives.
        source: the rank that sends, or -1 for a computation.
        start: the start of the hop, which is the end of the previous hop.
        end: the end of the hop; for a message, the time at which it arrives or frees the link for
            the next message.
        reason: the reason that the hop did not start earlier.
    """

    action: Action
    rank: int
    source: int
    start: Time
    end: Time
    reason: str


@dataclass(frozen=True)
class CriticalPath:
    """The chain of computations and messages that determines the length of the step.

    Anything that is not on the chain could be slightly slower without making the step longer.

    Attributes:
        hops: the hops from the start of the step to its end.

    Example:
        See ``ScheduleRun.critical_path``.
    """

    hops: tuple[PathPart, ...]

    def __len__(self) -> int:
        """Returns the number of hops."""
        return len(self.hops)

    @property
    def by_reason(self) -> dict[str, int]:
        """The number of hops by reason. Reasons that do not occur are left out."""
        counts = Counter(hop.reason for hop in self.hops)
        return {reason: counts[reason] for reason in REASONS if counts[reason]}

    @property
    def computing(self) -> Time:
        """The time that the path spends computing."""
        return sum(hop.end - hop.start for hop in self.hops if hop.source < 0)

    @property
    def travelling(self) -> Time:
        """The time that the path spends on links.

        This time and ``computing`` add up to the length of the step.
        """
        return sum(hop.end - hop.start for hop in self.hops if hop.source >= 0)

    def __repr__(self) -> str:
        """Returns a one-line summary of the path's length and parts."""
        why = ", ".join(f"{reason} {number:,}" for reason, number in self.by_reason.items())
        return (
            f"Critical path of {len(self):,} hops: computing {float(self.computing):.6g}, on links "
            f"{float(self.travelling):.6g}; {why}"
        )


def find_critical_path(times: Times) -> CriticalPath:
    """Finds the critical path by walking back from the last computation to the start.

    Each hop leads back to the cause of the longest wait. If two causes end at the same time,
    program order takes precedence over data.
    """
    operations, ends, hops = times.columns, times.ends, list[PathPart]()
    here = int(ends.argmax()) if len(ends) else -1
    until: Any = ends.max(initial=0)
    while here >= 0:
        before = int(operations.before[here])
        own, arrived = times.free[here], times.arrivals[here]
        waited = arrived > own
        reason = DATA if waited else PROGRAM if before >= 0 else START
        action, rank = operations.action(here), int(operations.rank[here])
        start = plain(arrived if waited else own)
        hops.append(PathPart(action, rank, -1, start, plain(until), reason))
        here = _walk_messages(hops, times, here) if waited else before
        until = (
            ends[here] if waited else own
        )  # two that overlap share the time until the first ends
    return CriticalPath(tuple(reversed(hops)))


def _walk_messages(hops: list[PathPart], times: Times, here: int) -> int:
    """Adds a computation's message and the messages that it was queued behind.

    Returns the computation that the first of these messages waited for.
    """
    operations, ends = times.columns, times.ends
    until = times.arrivals[here]
    while True:
        recv: Any = get_recv(operations.action(here), operations.stage_ranks)
        send, rank = recv.other_side, int(operations.rank[here])
        start, queued = times.message_starts[here], int(operations.queued_after[here])
        made, posted = int(operations.sent_after[here]), int(operations.posted_after[here])
        reason, next_place = DATA, made
        if ends[made] != start:
            is_late = times.rendezvous and posted >= 0 and ends[posted] == start
            reason, next_place = (RECEIVER_LATE, posted) if is_late else (LINK_BUSY, queued)
            if not is_late and operations.in_order is not None:
                places = (int(each[here]) for each in operations.in_order[:2])
                ended = (each for each in places if each >= 0 and times.arrivals[each] == start)
                next_place = next(ended, queued)
        source = operations.stage_ranks[send.stage]
        hops.append(PathPart(send, rank, source, plain(start), plain(until), reason))
        if reason != LINK_BUSY:
            return next_place
        here, until = next_place, start


def plain(time: Time) -> Time:
    """Converts a NumPy float to a Python float, and leaves Fractions unchanged."""
    return float(time) if isinstance(time, float) else time


@dataclass(frozen=True)
class Lever:
    """A part of a step that could be improved.

    Attributes:
        what: ``stage 3``, ``link 2>3`` or ``message size``.
        on_path: the time that the critical path spends on this part, in the unit of the costs.
        gain: the time saved by improving this part, according to a simulation.
        bound: an upper limit on the gain, computed from ``on_path``.
    """

    what: str
    on_path: float
    gain: float
    bound: float


@dataclass(frozen=True, repr=False)
class Sensitivity:
    """The gains from improving single parts of a step, largest first.

    Attributes:
        by: the improvement of each part: 0.1 makes a part 10 % faster.
        makespan: the current length of the step.
        levers: the parts that were tried.
    """

    by: float
    makespan: float
    levers: tuple[Lever, ...]

    def __repr__(self) -> str:
        """Returns a table of the gains."""
        lines = [f"Improved by {self.by:.0%}:    gain    of the step   at most"]
        for lever in self.levers:
            share = lever.gain / self.makespan if self.makespan else 0.0
            lines.append(
                f"  {lever.what:<16} {lever.gain:>9.4g} {share:>12.2%} {lever.bound:>9.4g}"
            )
        return "\n".join(lines)


def list_levers(path: CriticalPath, prices: Prices) -> dict[str, float]:
    """Returns the time that the critical path spends on each lever.

    The levers are stages, links and the message size, in descending order of time.
    """
    # the numbers have the same type as the costs: int, float or Fraction
    spent: defaultdict[str, Any] = defaultdict(int)
    for (stage, kind, _), rank, source, start, end, _ in path.hops:
        spent[f"stage {stage}" if source < 0 else f"link {source}>{rank}"] += end - start
        if source >= 0:
            receiver = (0, stage + 1) if kind == "SEND_F" else (1, stage - 1)
            spent["message size"] += prices.occupancy[receiver]
    ordered = sorted(spent.items(), key=lambda item: (-float(item[1]), item[0]))
    return {what: float(time) for what, time in ordered if time > 0}


def improve(what: str, by: float, stage_ranks: Sequence[int], prices: Prices) -> Prices:
    """Returns prices in which one lever is cheaper by a fraction of its cost.

    ``what`` names the lever, as in `Lever.what`.
    """
    factor = 1 - by
    better = prices.map(lambda table: table.astype(float))
    noun, _, name = what.partition(" ")
    if noun == "message":
        return better._replace(occupancy=better.occupancy * factor)
    if noun == "stage":
        better.duration[:, int(name)] *= factor
        return better
    source, rank = map(int, name.split(">"))
    owner = np.array([-1, *stage_ranks, -1])
    for direction, senders in ((0, owner[:-2]), (1, owner[2:])):
        over_it = (senders == source) & (owner[1:-1] == rank)
        better.occupancy[direction, over_it] *= factor
        better.latency[direction, over_it] *= factor
    return better
