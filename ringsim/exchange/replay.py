"""Programs of other tools on the virtual clock.

Every message leaves when its step begins and takes the link of its pair of ranks, one after the other: it is over for the sender when its
bytes are on their way, and for the receiver when it has arrived. So a send never waits for its recv, as in LogGOPSim below its limit for
eager messages. Work of one thread of a rank is done one after the other. A collective begins when all have come to it, and takes as long as
its rounds (``ringsim.exchange.rounds``).
"""

from __future__ import annotations

import itertools
from collections import deque
from heapq import heappop, heappush
from typing import Any, Final

from ringsim.exchange.programs import RECV, SEND, TOGETHER, WORK, Step
from ringsim.exchange.rounds import count_rounds
from ringsim.exchange.rows import Rows
from ringsim.link import Link, check_link
from ringsim.simulator.carriers import PrivateLinks
from ringsim.traces.events import IN_FLIGHT, NONE, OK, Group, Payload
from ringsim.traces.value import Trace

__all__ = ["replay"]

_KINDS: Final = {SEND: "isend", RECV: "irecv"}

Place = tuple[int, int]  # rank, number of the step


def replay(programs: list[list[Step]], link: Link, source: str) -> Trace:
    """Runs programs, and says what happened when.

    Args:
        programs: by rank, the steps.
        link: what a message costs.
        source: the format that they come from, for the metadata.

    Returns:
        A simulated trace. A step that waits for ever is in flight; those behind it are not there.

    Raises:
        ArgumentError: ``link`` is no Link.
        ValueError: a step names a rank or a step that is not there, or steps need each other.

    Example:
        >>> programs = [[Step("work", work_ns=500), Step("send", needs=(0,), peer=1, size_bytes=1000)], [Step("recv", peer=0)]]
        >>> replay(programs, Link(alpha_s=1e-6, beta_s_per_byte=1e-9), "nothing").events.done_ns.tolist()
        [500, 1500, 2500]
    """
    run = _Run(programs, link)
    run.go()
    return run.trace(source)


class _Run:
    def __init__(self, programs: list[list[Step]], link: Link) -> None:
        check_link("link", link)
        _check(programs)
        self._programs, self._link, self._carrier = programs, link, PrivateLinks(link)
        self._world = Group("world", tuple(range(len(programs))))
        self._due: list[tuple[float, int, Place]] = []
        self._count = itertools.count().__next__
        self._missing = [[len(step.needs) + len(step.after) for step in program] for program in programs]
        self._ready = [[0.0] * len(program) for program in programs]
        self._begun: list[list[float]] = [[NONE] * len(program) for program in programs]
        self._done: list[list[float]] = [[NONE] * len(program) for program in programs]
        self._followers = [_followers(program) for program in programs]
        self._free: dict[tuple[int, int], float] = {}  # (rank, thread): when its work is over
        self._arrivals: dict[tuple[int, int, int], deque[float]] = {}
        self._receivers: dict[tuple[int, int, int], deque[Place]] = {}
        self._gathered: dict[Any, list[Place]] = {}
        self._calls: dict[tuple[int, Group], int] = {}

    def go(self) -> None:
        """Runs what can run."""
        for rank, missing in enumerate(self._missing):
            for number, count in enumerate(missing):
                if count == 0:
                    heappush(self._due, (0.0, self._count(), (rank, number)))
        while self._due:
            time, _, place = heappop(self._due)
            self._begin(time, place)

    def _begin(self, time: float, place: Place) -> None:
        rank, number = place
        step = self._programs[rank][number]
        if step.kind == WORK:
            time = max(time, self._free.get((rank, step.thread), 0.0))
            self._free[rank, step.thread] = time + step.work_ns * 1e-9
        self._begun[rank][number] = time
        for follower, needs_end in self._followers[rank][number]:
            if not needs_end:
                self._come(time, (rank, follower))
        if step.kind == WORK:
            self._end(time + step.work_ns * 1e-9, place)
        elif step.kind == SEND:
            arrival = self._carrier.carry(rank, step.peer, step.size_bytes, time)
            self._end(arrival - self._link.alpha_s, place)
            self._meet((rank, step.peer, step.tag), arrival=arrival)
        elif step.kind == RECV:
            self._meet((step.peer, rank, step.tag), receiver=place)
        else:
            self._gather(place, step)

    def _meet(self, key: tuple[int, int, int], *, arrival: float | None = None, receiver: Place | None = None) -> None:
        arrivals, receivers = self._arrivals.setdefault(key, deque()), self._receivers.setdefault(key, deque())
        if arrival is not None:
            arrivals.append(arrival)
        if receiver is not None:
            receivers.append(receiver)
        while arrivals and receivers:
            rank, number = place = receivers.popleft()
            self._end(max(arrivals.popleft(), self._begun[rank][number]), place)

    def _gather(self, place: Place, step: Step) -> None:
        rank, number = place
        group = step.group or self._world
        call = self._calls[rank, group] = self._calls.get((rank, group), 0) + 1
        there = self._gathered.setdefault((group, call), [])
        there.append(place)
        if len(there) == len(group.ranks):
            rounds, size_bytes = count_rounds(step.op, len(group.ranks), step.size_bytes)
            time = self._begun[rank][number] + rounds * self._link.time_s(size_bytes)
            for one in there:
                self._end(time, one)

    def _end(self, time: float, place: Place) -> None:
        rank, number = place
        self._done[rank][number] = time
        for follower, needs_end in self._followers[rank][number]:
            if needs_end:
                self._come(time, (rank, follower))

    def _come(self, time: float, place: Place) -> None:
        """Notes that one of the things that a step waits for is there."""
        rank, number = place
        self._ready[rank][number] = max(self._ready[rank][number], time)
        self._missing[rank][number] -= 1
        if self._missing[rank][number] == 0:
            heappush(self._due, (self._ready[rank][number], self._count(), place))

    def trace(self, source: str) -> Trace:
        """Returns what happened."""
        rows, stuck = Rows(), False
        for rank, program in enumerate(self._programs):
            waits = self._waits(rank)
            for number, step in enumerate(program):
                begun, done = self._begun[rank][number], self._done[rank][number]
                if begun == NONE:
                    stuck = True
                    continue
                times = {"done_ns": NONE if done == NONE else _ns(done), "status": IN_FLIGHT if done == NONE else OK}
                where = {"stage": step.stage, "microbatch": step.microbatch, "thread": step.thread}
                if step.kind == WORK:
                    rows.add(rank, "span", _ns(begun), label=step.label or "work", **times, **where)
                    continue
                more = {"payload": Payload("", (), step.size_bytes), "peer": step.peer, **times, **where}
                if step.kind == TOGETHER:
                    more["group"] = step.group or self._world
                else:
                    more["tag"] = step.tag
                rows.add(
                    rank, step.op or _KINDS[step.kind], _ns(begun), wait_ns=_ns(min(max(waits[number], begun), max(done, begun))), **more
                )
        if stuck and not any(
            begun != NONE and done == NONE for pair in zip(self._begun, self._done, strict=True) for begun, done in zip(*pair, strict=True)
        ):
            raise ValueError("steps of it need each other")
        link = {"alpha_s": self._link.alpha_s, "beta_s_per_byte": self._link.beta_s_per_byte}
        notes = [f"imported from {source} and run on the virtual clock: a message leaves when it is posted"]
        return rows.trace({"world_size": len(self._programs), "source": "simulated", "link": link, "notes": notes})

    def _waits(self, rank: int) -> list[float]:
        """Returns when somebody began to wait for each step: when all else was there that one of its followers needs."""
        waits = [float("inf")] * len(self._programs[rank])
        for step in self._programs[rank]:
            ends = sorted(self._done[rank][need] for need in step.needs)
            for need in step.needs:
                others = ends[-2] if len(ends) > 1 and ends[-1] == self._done[rank][need] else ends[-1] if len(ends) > 1 else 0.0
                waits[need] = min(waits[need], others)
        return waits


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)


def _followers(program: list[Step]) -> list[list[tuple[int, bool]]]:
    """Returns for each step those that wait for it, and whether for its end (or for its beginning)."""
    followers: list[list[tuple[int, bool]]] = [[] for _ in program]
    for number, step in enumerate(program):
        for need in step.needs:
            followers[need].append((number, True))
        for need in step.after:
            followers[need].append((number, False))
    return followers


def _check(programs: list[list[Step]]) -> None:
    for rank, program in enumerate(programs):
        for step in program:
            if not all(0 <= need < len(program) for need in step.needs + step.after):
                raise ValueError(f"a step of rank {rank} needs one that is not there")
            if step.kind in (SEND, RECV) and not (0 <= step.peer < len(programs) and step.peer != rank):
                raise ValueError(f"rank {rank} sends to or receives from rank {step.peer} of {len(programs)}")
            if step.work_ns < 0 or step.size_bytes < 0:
                raise ValueError(f"a step of rank {rank} takes less than no time, or moves less than nothing")
            if step.group is not None and rank not in step.group.ranks:
                raise ValueError(f"rank {rank} calls a collective of a group that it is not in")
