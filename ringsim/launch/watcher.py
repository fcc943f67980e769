"""Watches ranks while they run, and finds out when some of them can never go on.

Every now and then::

    look at the parts -> who is blocked in what -> can anybody still help them? -> if not: the same again at the next look -> a verdict

Nothing is decided by a time-out where it can be decided by proof. A message of Gloo needs both sides, so ranks that wait for messages
that are not posted, from ranks that wait in their turn, wait for ever: two looks with nothing in between are enough. A rule of patience
goes with what is not that certain:

=====================================  =====================================================================================
what the ranks wait for                how long nothing may happen before the verdict
=====================================  =====================================================================================
messages of each other                 from one look to the next
messages that another recv may have    from one look to the next, once each of them slept and no connection of theirs held or moved
got, one from any source being open    a byte meanwhile: what was on its way has arrived then, and it was not theirs
a collective                           1 s, for some return early; none where a member is gone that did not take part
anything, and a rank has more threads  3 s, if those are idle; where they are not, they might help: no verdict
nothing that could be proved           3 s and 1 s for each 50 MB under way, all ranks blocked or gone, none stopped, none computing
=====================================  =====================================================================================
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ringsim.diagnose.doubts import doubt
from ringsim.diagnose.verdict import judge, name_ranks, wait_text
from ringsim.diagnose.waitfor import GONE, Stuck, World, analyse
from ringsim.launch.live_part import Head
from ringsim.launch.live_parts import LiveParts
from ringsim.launch.processes import look_at
from ringsim.launch.stillness import at_rest
from ringsim.launch.verdicts import Verdict
from ringsim.launch.wake import Threads
from ringsim.traces.events import COLLECTIVE
from ringsim.traces.findings import Diagnosis, Finding

__all__ = ["POLL_S", "Watcher"]

POLL_S: Final = 0.02  # between two looks while ranks seem stuck
RELAX: Final = 1.5  # each look that finds nothing makes the time until the next one longer by this factor ...
POLL_MAX: Final = 5  # ... up to this many times the shortest
COLLECTIVE_S: Final = 1.0
THREADS_S: Final = 3.0
STALL_S: Final = 3.0
STALL_BYTES_PER_S: Final = 50e6
_AGAIN_S: Final = 0.25  # ranks whose other threads may help are asked again after this long
_CALM_S: Final = 1.0  # before a stall is called one, no rank has computed for this long


@dataclass
class _Suspicion:
    """Ranks that seem to be stuck, and since when they have been seen in the same state."""

    ranks: tuple[int, ...]
    heads: tuple[Head, ...]
    since_s: float
    asked_s: float
    threads: dict[int, Threads] = field(default_factory=dict)
    at_rest: bool = False  # whether there has been a moment since then at which nothing was on its way


class Watcher:
    """Watches the ranks of one run.

    Args:
        directory: where their parts are.
        world_size: number of ranks.
        ask: asks a rank for its threads; ``hear`` is called with the answer. Returns at once.
        poll_s: the shortest time between two looks.
        settle_s: how long ranks must have been seen in the same state for any verdict.

    Attributes:
        pause_s: how long to wait before the next look.
    """

    def __init__(
        self,
        directory: Path,
        world_size: int,
        *,
        ask: Callable[[int], None],
        poll_s: float = POLL_S,
        settle_s: float = 0.0,
    ) -> None:
        self._parts = LiveParts(directory, world_size)
        self._ask = ask
        self._poll_s = poll_s
        self._settle_s = settle_s
        self.pause_s = poll_s
        self._heads: list[Head] = []
        self._states: list[str] = []
        self._changed_s = time.monotonic()  # when something happened last on any rank
        self._suspicion: _Suspicion | None = None
        self._calm: tuple[float, list[int]] | None = None  # since when all of them sleep, and their CPU time then

    def hear(self, rank: int, threads: Threads) -> None:
        """Takes a rank's answer."""
        if self._suspicion is not None:
            self._suspicion.threads[rank] = threads

    def processes(self) -> list[tuple[int | None, bool]]:
        """Returns of each rank its process, None where it is not known or not on this machine, and whether it has ended its recording."""
        for part in self._parts.parts:
            if "pid" not in part.meta:
                part.read_names()
        return [part.process for part in self._parts.parts]

    def look(self, states: Sequence[str]) -> Verdict | None:
        """Looks once.

        Args:
            states: of each rank, as far as it is known from elsewhere: "running", "exited", "failed" or "killed".

        Returns:
            A verdict; None as long as there is none.
        """
        now_s, now_ns = time.monotonic(), time.monotonic_ns()
        heads = self._parts.look()
        if heads != self._heads:
            self._heads, self._changed_s, self._calm = heads, now_s, None
        elif self._suspicion is None and self._states == states:
            self._relax()
            return self._look_for_stall(states, now_s, now_ns)  # what could still go on then can still go on now
        self._states = list(states)
        if any(head.awaited for head in heads) and analyse(self._parts.outline(states, now_ns)) is not None:
            world = self._parts.world(states, now_ns)
            stuck = analyse(world)
            if stuck is not None:
                self.pause_s = self._poll_s
                return self._suspect(world, stuck, now_s, now_ns, proved=True)
            doubted = doubt(world)
            stuck = analyse(doubted)
            if stuck is not None:
                self._relax()
                return self._suspect(doubted, stuck, now_s, now_ns, proved=False) or self._look_for_stall(states, now_s, now_ns)
        self._suspicion = None
        self._relax()
        return None

    def _relax(self) -> None:
        self.pause_s = min(self.pause_s * RELAX, self._poll_s * POLL_MAX)

    def _suspect(self, world: World, stuck: Stuck, now_s: float, now_ns: int, *, proved: bool) -> Verdict | None:
        """Returns the verdict on ranks that seem stuck once there is no doubt."""
        heads = tuple(self._heads[rank] for rank in stuck.ranks)
        suspicion = self._suspicion
        if suspicion is None or (suspicion.ranks, suspicion.heads) != (stuck.ranks, heads):
            suspicion = self._suspicion = _Suspicion(stuck.ranks, heads, now_s, now_s)
            self._ask_all(stuck.ranks)
            return None
        if any(rank not in suspicion.threads for rank in stuck.ranks):
            return None  # who is blocked answers in no time; who does not is not blocked
        awaiting = {rank: self._parts.parts[rank].awaiting_threads() for rank in stuck.ranks}
        if any(suspicion.threads[rank].busy - awaiting[rank] for rank in stuck.ranks):
            if now_s - suspicion.asked_s > _AGAIN_S:
                suspicion.asked_s, suspicion.threads = now_s, {}
                self._ask_all(stuck.ranks)
            return None
        patience_s = self._settle_s
        if any(threads.idle for threads in suspicion.threads.values()):
            patience_s = max(patience_s, THREADS_S)
        if _hangs_on_collective(world, stuck):
            patience_s = max(patience_s, COLLECTIVE_S)
        if now_s - suspicion.since_s < patience_s:
            return None
        if not (proved or suspicion.at_rest):
            suspicion.at_rest = self._nothing_on_its_way(world, stuck)
            return None  # whoever was woken before that moment has gone on by the next look
        return Verdict(stuck.ranks, judge(world, stuck), now_ns, at_rest=not proved)

    def _nothing_on_its_way(self, world: World, stuck: Stuck) -> bool:
        """Tells whether nothing that was posted is still to come to ranks that seem stuck, from each other or from who is gone."""
        pids = [part.process[0] or 0 for part in self._parts.parts]
        gone = [rank for rank, view in enumerate(world.ranks) if view.state in GONE and look_at(pids[rank]) is not None]
        return at_rest([pids[rank] for rank in (*stuck.ranks, *gone)])

    def _ask_all(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._ask(rank)

    def _look_for_stall(self, states: Sequence[str], now_s: float, now_ns: int) -> Verdict | None:
        """Returns the verdict on ranks that all wait and that nothing reaches, for a reason that is not in what they posted."""
        if now_s - self._changed_s < STALL_S - _CALM_S:
            return None
        outline = self._parts.outline(states, now_ns)
        blocked = tuple(rank for rank, view in enumerate(outline.ranks) if view.state == "blocked")
        if not blocked or len(blocked) + sum(state in GONE for state in states) < len(states):
            self._calm = None
            return None
        processes = [look_at(self._parts.parts[rank].process[0] or 0) for rank in blocked]
        ticks = [process.ticks for process in processes if process is not None]
        if any(process is None or process.state not in "SD" for process in processes) or self._calm is None or self._calm[1] != ticks:
            self._calm = now_s, ticks
            return None
        patience_s = STALL_S + sum(part.open_bytes for part in self._parts.parts) / STALL_BYTES_PER_S
        if now_s - self._calm[0] < _CALM_S or now_s - self._changed_s < patience_s:
            return None
        world = self._parts.world(states, now_ns)
        operations = tuple(one.operation for rank in blocked for one in world.ranks[rank].awaited)
        waits = "; ".join(wait_text(operation) for operation in operations[:4])
        message = (
            f"{name_ranks(blocked)} {'waits' if len(blocked) == 1 else 'wait'}, and nothing has moved for {patience_s:.0f} s: {waits}."
        )
        hint = "Both sides of these operations are there, as far as is recorded. Look for communication that ringsim does not see."
        finding = Finding("stalled", blocked, operations, message, hint)
        return Verdict(blocked, Diagnosis((finding,), len(states), states=tuple(view.state for view in world.ranks)), now_ns)


def _hangs_on_collective(world: World, stuck: Stuck) -> bool:
    """Tells whether a verdict hangs on a collective that may return early: one whose missing members are all still there."""
    return any(
        one.posted.operation.kind == COLLECTIVE and not any(world.ranks[peer].state in GONE for peer in one.peers)
        for one in stuck.hindrances
    )
