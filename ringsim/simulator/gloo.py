"""Implements Gloo's algorithms for collectives.

A member of a collective posts one step after another. A step consists of the messages that the
member sends and receives together. One or two steps are in flight, and the member posts the next
step when the oldest one is complete. The pieces of a ring are halved, so that one half is in flight
while the other half is added up::

    all_reduce, 2 ranks     step 0 |=====|
                            step 1    |=====|            posted immediately: two steps in flight
                            step 2         |=====|       waits for step 0

| collective | steps of each member, S bytes, N ranks | in flight |
|---|---|---|
| all_reduce, reduce_scatter | 4 (N - 1) to the previous rank, of S / 2N (see below) | 2 |
| all_gather | 2 (N - 1) to the next rank, of S / 2N | 2 |
| reduce | 2 (N - 1) to the previous rank, then S / N to the root | 2 |
| broadcast | a binomial tree: receive S, then send S to all children | 1 |
| gather, scatter, all_to_all | everything in one step | 1 |
| barrier | log2 N exchanges, with ranks 1, 2, 4, ... places on | 1 |

In an all_reduce, the data goes around the ring once to be added up, and once more to be
distributed. The pieces of a ring have at most 1 MiB, so a larger S has more pieces. torch carries
out a reduce_scatter as an all_reduce, and keeps only a part of the result.

Source:
    Gloo, ``allreduce.cc``, ``reduce.cc``, ``allgather.cc``, ``broadcast.cc``, ``scatter.cc``,
    ``alltoall.cc``, ``barrier.cc``; torch, ``ProcessGroupGloo.cpp``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from ringsim.simulator.links import SharedCores
from ringsim.traces.collectives import COLLECTIVES, make_rounds

if TYPE_CHECKING:  # reading a trace needs no torch
    from ringsim.simulator.work import SimulatedWork

_LARGEST_BYTES = 1 << 20  # the largest piece of a ring


class GlooStep(NamedTuple):
    """The messages that a member posts at the same time.

    A step holds the places that the member sends to and receives from, and the size of each
    message.
    """

    to: tuple[int, ...]
    source: tuple[int, ...]
    size_bytes: float


def list_steps(
    name: str, place: int, count: int, root: int, size_bytes: int
) -> tuple[list[GlooStep], int]:
    """Returns a member's steps, and the number of steps that may be in flight.

    Args:
        name: the name of the collective in torch.
        place: the place of the member in its group.
        count: the number of members, at least 2.
        root: the root's place, which is ignored for collectives without a root.
        size_bytes: S.

    Example:
        >>> steps, under_way = list_steps("barrier", 0, 4, -1, 0)
        >>> [(step.to, step.source, step.size_bytes) for step in steps], under_way
        ([((1,), (3,), 0), ((2,), (2,), 0)], 1)
        >>> steps, under_way = list_steps("all_reduce", 1, 4, -1, 4096)
        >>> len(steps), steps[0], under_way
        (12, GlooStep(to=(0,), source=(2,), size_bytes=512.0), 2)
    """
    before, after = (place - 1) % count, (place + 1) % count
    others = tuple((place + shift) % count for shift in range(1, count))
    part = size_bytes / count
    collects = GlooStep((), others, part) if place == root else GlooStep((root,), (), part)
    pieces = -(-max(2 * count, -(-size_bytes // _LARGEST_BYTES)) // count) * count
    match COLLECTIVES[name].family:
        case "all_reduce" | "reduce_scatter":
            return [GlooStep((before,), (after,), size_bytes / pieces)] * (2 * (pieces - 2)), 2
        case "all_gather":
            return [GlooStep((after,), (before,), part / 2)] * (2 * (count - 1)), 2
        case "reduce":
            return [
                *[GlooStep((before,), (after,), size_bytes / pieces)] * (pieces - 2),
                collects,
            ], 2
        case "broadcast":
            return _spread(place, count, root, size_bytes), 1
        case "gather":
            return [collects], 1
        case "scatter":
            return [GlooStep(collects.source, collects.to, part)], 1
        case "all_to_all":
            return [GlooStep(others, tuple(reversed(others)), part)], 1
        case _:
            hops = [1 << bit for bit in range((count - 1).bit_length())]
            return [
                GlooStep(((place + hop) % count,), ((place - hop) % count,), 0) for hop in hops
            ], 1


def _spread(place: int, count: int, root: int, size_bytes: int) -> list[GlooStep]:
    """Returns a member's steps in a binomial tree."""
    messages = [*chain(*make_rounds("broadcast", count, root, size_bytes))]
    parents = tuple(source for source, to, _ in messages if to == place)
    children = tuple(to for source, to, _ in messages if source == place)
    steps = GlooStep((), parents, size_bytes), GlooStep(children, (), size_bytes)
    return [step for step in steps if step.to or step.source]


@dataclass(slots=True)
class _Member:
    """A member's progress through its steps."""

    steps: Sequence[GlooStep]
    most: int  # the number of steps that may be in flight
    posted: int = 0
    complete: int = 0
    # for each step in flight, the number of messages that have not arrived
    missing: deque[int] = field(default_factory=deque)


class GlooCollective:
    """Carries out one collective that all members have called.

    Args:
        name: the name of the collective in torch.
        parts: the parts of the members, by place, which are completed one by one.
        root: the root's place.
        size_bytes: S.
        links: the cores, with Gloo's costs.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[SimulatedWork],
        root: int,
        size_bytes: int,
        links: SharedCores,
    ) -> None:
        assert links.gloo is not None  # the caller has checked
        self._parts, self._links, self._gloo = parts, links, links.gloo
        self._clock = clock = parts[0].rank.clock
        self._members = [
            _Member(*list_steps(name, place, len(parts), root, size_bytes))
            for place in range(len(parts))
        ]
        # The messages of which only one side is posted, by source and destination. An entry
        # consists of a flag (the posted side is the send), its step, and the time.
        self._waiting: defaultdict[tuple[int, int], deque[tuple[bool, int, float]]] = defaultdict(
            deque
        )
        for place in range(len(parts)):
            clock.at(
                links.cores.book(clock.now, self._gloo.collective_s), partial(self._post, place)
            )

    def _post(self, place: int) -> None:
        """Posts as many of a member's steps as may be in flight."""
        member = self._members[place]
        while member.posted < len(member.steps) and member.posted - member.complete < member.most:
            step, number = member.steps[member.posted], member.posted
            member.posted += 1
            member.missing.append(len(step.to) + len(step.source))
            for other in step.to:
                self._meet(True, number, place, other, step.size_bytes)
            for other in step.source:
                self._meet(False, number, other, place, step.size_bytes)
        if member.complete == len(member.steps):
            self._parts[place].complete(self._clock.now)

    def _meet(self, sends: bool, number: int, source: int, to: int, size_bytes: float) -> None:
        """Posts one side of a message, and carries the message if the other side is posted."""
        now_s, queue = self._clock.now, self._waiting[source, to]
        if not queue or queue[0][0] is sends:
            queue.append((sends, number, now_s))
            return
        _, other_number, posted_s = queue.popleft()
        arrives_s = self._links.carry_piece(
            self._gloo, self._parts[to].rank.number, size_bytes, now_s, now_s - posted_s
        )
        sent, received = (number, other_number) if sends else (other_number, number)
        self._clock.at(
            arrives_s, partial(self._arrive, source, sent), partial(self._arrive, to, received)
        )

    def _arrive(self, place: int, number: int) -> None:
        """Records that a message of a member's step has arrived.

        If the member was waiting for this message, it continues.
        """
        member = self._members[place]
        member.missing[number - member.complete] -= 1
        before = member.complete
        while member.missing and not member.missing[0]:
            member.missing.popleft()
            member.complete += 1
        if member.complete > before:
            self._post(place)
