"""What all ranks of a run have posted, read from their parts while they write them.

A cut through several ranks at one moment comes from looking twice: a rank that is blocked in the same operations both times, and has
posted nothing in between, was in that state all the time between the end of the first look and the beginning of the second. So was every
other rank of which that is true, at the same moments.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ringsim.diagnose.waitfor import GONE, Posted, RankSnapshot, Snapshot
from ringsim.launch.live_part import Channel, Head, LivePart
from ringsim.traces.events import ANY_SOURCE, COLLECTIVE, RECV, SEND, Group
from ringsim.traces.findings import Operation

__all__ = ["LiveParts"]


class LiveParts:
    """The parts of all ranks, while they grow.

    Args:
        directory: where the parts are; one that is not there yet counts as a rank that has done nothing.
        world_size: number of ranks.
    """

    def __init__(self, directory: Path, world_size: int) -> None:
        self.parts = [LivePart(directory, rank, world_size) for rank in range(world_size)]

    def look(self) -> list[Head]:
        """Reads what is new of every rank."""
        return [part.look() for part in self.parts]

    def outline(self, states: Sequence[str], now_ns: int) -> Snapshot:
        """Returns what the ranks are blocked in, as if nothing were matched: where this world can go on, so can the real one.

        Args:
            states: of each rank, "running" for one that is not known to be anything else.
            now_ns: CLOCK_MONOTONIC.
        """
        views = []
        for part, state in zip(self.parts, states, strict=True):
            part.read_names()
            posted = () if state in GONE else tuple(Posted(*part.operation(slot, now_ns), awaited=True) for slot in part.head.awaited)
            views.append(RankSnapshot(_state(part, state, blocked=bool(posted)), posted))
        return Snapshot(tuple(views))

    def world(self, states: Sequence[str], now_ns: int) -> Snapshot:
        """Returns all that is posted and not done, with what it is matched with, as of the last look.

        Args:
            states: see ``outline``.
            now_ns: CLOCK_MONOTONIC.
        """
        channels: dict[Channel, int] = {}
        collectives: dict[Group, dict[int, array[int]]] = {}  # group, rank: slots
        calls: dict[tuple[Group, int], tuple[Operation, ...]] = {}  # (group, place): what its members posted, one tuple for all of them
        from_any: dict[tuple[Group, int, int], list[int]] = {}  # (group, receiver, tag): slots of recvs from any source that are not done
        for part in self.parts:
            part.count()
            part.read_names()
            channels.update(part.channels())
            for on, slots in part.collectives().items():
                collectives.setdefault(on, {})[part.rank] = slots
            for slot in part.open_from_any:
                operation, group = part.operation(slot, now_ns)
                from_any.setdefault((group, part.rank, operation.tag), []).append(slot)

        def place(part: LivePart, slot: int) -> Posted:
            operation, group = part.operation(slot, now_ns)
            awaited, index = slot in part.head.awaited, part.index(slot)
            if operation.kind == COLLECTIVE:
                if (group, index) not in calls:
                    entered = ((rank, slots[index]) for rank, slots in collectives[group].items() if index < len(slots))
                    calls[group, index] = tuple(self.parts[rank].operation(its, now_ns)[0] for rank, its in entered)
                return Posted(operation, group, awaited, index, entered=calls[group, index])
            if operation.peer == ANY_SOURCE:
                left, sure = _left_for_anybody(part, group, operation.tag, channels, now_ns)
                earlier = sum(other < slot for other in from_any.get((group, part.rank, operation.tag), ()))
                there = max(left - earlier, 0)
                return Posted(operation, group, awaited, 0, counterparts=there, contested=there - max(sure - earlier, 0))
            sends = operation.kind == SEND
            ends_of = (part.rank, operation.peer) if sends else (operation.peer, part.rank)
            there = channels.get(Channel(group, *ends_of, operation.tag, RECV if sends else SEND), 0)
            receiver = operation.peer if sends else part.rank
            hidden = len(from_any.get((group, receiver, operation.tag), ()))
            if sends:  # a recv from any source that is not done may be on its way to get this very message
                there += hidden
            elif awaited:
                hidden += part.count_overtaking(slot)
            return Posted(operation, group, awaited, index, counterparts=there, contested=min(hidden, there))

        views = []
        for part, state in zip(self.parts, states, strict=True):
            posted = tuple(place(part, slot) for slot in part.open_slots())
            refused = tuple(Posted(*part.operation(slot, now_ns), awaited=False, index=index) for slot, index in part.refused())
            views.append(RankSnapshot(_state(part, state, blocked=bool(part.head.awaited)), posted, refused=refused))
        return Snapshot(tuple(views))


def _left_for_anybody(part: LivePart, group: Group, tag: int, channels: Mapping[Channel, int], now_ns: int) -> tuple[int, int]:
    """Counts the messages to a rank that recvs from any source may get, and those that no other recv can.

    A recv from one source that is not done either may get some of them; which of the two gets which is not known before.
    """
    posted = [part.operation(slot, now_ns) for slot in part.open_slots()]
    open_from = Counter(one.peer for one, its in posted if (one.kind, one.tag, its) == (RECV, tag, group))
    left = sure = 0
    for src in group.ranks:
        sent = Channel(group, src, part.rank, tag, SEND)
        over = channels.get(sent, 0) - channels.get(sent._replace(kind=RECV), 0)
        left += max(over + open_from[src], 0)
        sure += max(over, 0)
    return left, sure


def _state(part: LivePart, state: str, *, blocked: bool) -> str:
    """Returns the state of a rank: what is known from outside counts for more than what it wrote."""
    if state != "running":
        return state
    if not part.is_here or part.meta.get("stopped_at_max") or "end_ns" in part.meta:
        return "unknown"  # what it does now is not recorded
    return "blocked" if blocked else "running"
