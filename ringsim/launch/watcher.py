"""Watches ranks while they run.

Finds out when some can never go on, or disagree, and wakes those that wait in vain. Every now and
then::

    look at the parts -> who is blocked in what -> can anybody still help them? -> if not: the same again at the next look -> a verdict
                      -> what disagrees among what cannot be refused any more -------------------------------------------> a verdict

A cut through several ranks at one moment comes from looking twice: a rank that is blocked in the
same operations both times, and has posted nothing in between, was in that state all the time
between the end of the first look and the beginning of the second. So was every other rank of which
that is true, at the same moments.

Nothing is decided by a time-out where it can be decided by proof. A message of Gloo needs both
sides, so ranks that wait for messages that are not posted, from ranks that wait in their turn, wait
for ever: two looks with nothing in between are enough. Patience goes with what is less certain:

=====================================  ===========================================================
what the ranks wait for                how long nothing may happen before the verdict
=====================================  ===========================================================
messages of each other                 from one look to the next
a collective                           1 s, for some return early; none where a member is gone
                                       that did not take part
anything, and a rank has more threads  3 s, if those wait for each other; where they do not, they
                                       might help: no verdict
a rank that is in no operation         3.5 s, if all ranks sleep and its threads wait for each
                                       other, for its locks and queues
nothing that could be proved           3 s and 1 s for each 50 MB under way, all ranks blocked or
                                       gone, none stopped, none computing: then nothing is on its
                                       way any more; the verdict says that this is no proof
=====================================  ===========================================================

A rank that waits with a limit of its own counts as able to go on (``comm/torch_hooks``), and so
does one whose first thread waits for another with a limit, or for anything outside of its process
(``launch/threads``).
"""  # noqa: E501

from __future__ import annotations

import linecache
import math
import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ringsim.diagnose.failure import Verdict, place_text, write_verdict
from ringsim.diagnose.host_links import STALL_BYTES_PER_S
from ringsim.diagnose.mismatches import find_new_mismatches
from ringsim.diagnose.snapshot import GONE, Head, Snapshot, SnapshotBuilder
from ringsim.diagnose.verdict import blame_threads, judge, waiting_text, waits_text
from ringsim.diagnose.waitfor import Stuck, analyse
from ringsim.launch.protocol import ASK, WAKE
from ringsim.launch.system import look_at
from ringsim.launch.threads import Threads
from ringsim.traces.events import COLLECTIVE, THREAD_FAILED, read_notice
from ringsim.traces.findings import Diagnosis, Finding, Operation
from ringsim.traces.parts import PartReader

POLL_S: Final = 0.02  # between two looks while ranks seem stuck
# each look that finds nothing makes the time until the next one longer by this factor ...
RELAX: Final = 1.5
POLL_MAX: Final = 5  # ... up to this many times the shortest
COMPARE_S: Final = 0.2  # between two comparisons of what the ranks have posted
# of its time that a watcher may look, or compare: it may live inside a rank, and hold its
# interpreter
SHARE: Final = 0.02
COLLECTIVE_S: Final = 1.0
THREADS_S: Final = 3.0
STALL_S: Final = 3.0
_AGAIN_S: Final = 0.25  # ranks whose other threads may help are asked again after this long
# what an idle rank uses all the same: threads of Gloo wake every 10 ms for nothing
_IDLE_S, _IDLE_SHARE = 0.02, 0.015
_SHOWN: Final = 3  # lines of a rank's threads
_NOT_PROVED: Final = (
    "This is not proved by the posted operations, but nothing has moved for {:.0f} s."
)


class LiveRecords:
    """What all ranks of a run record, while they record it.

    Args:
        directory: where their parts are; a rank without one counts as one that has done nothing.
        world_size: number of ranks.
        strangers: whether a part may have been left there by an earlier run: then only those of
            living processes count.

    Attributes:
        caught: verdicts whose error has been raised already, and caught: of operations that they
            name no more is found.
    """

    def __init__(self, directory: Path, world_size: int, *, strangers: bool = False) -> None:
        self.directory, self._size, self._strangers = directory, world_size, strangers
        self.caught: list[Verdict] = []
        self._begin()

    def _begin(self) -> None:
        self.parts = [PartReader(self.directory, rank) for rank in range(self._size)]
        self.builder = SnapshotBuilder(self._size)
        self._known = [not self._strangers] * self._size

    def look(self, *, to_end: bool = False) -> list[Head]:
        """Reads what is new of every rank, of much a part unless it is to be read ``to_end``.

        Returns how far each has come.
        """
        for rank, part in enumerate(self.parts):
            self._known[rank] = self._known[rank] or part.is_live()
            if not self._known[rank]:  # as far as can be told, it belongs to another run
                continue
            unread = True
            while unread:
                batch = part.advance()
                # by a new run of the same rank: nothing that was counted belongs together any more
                if part.replaced:
                    self._begin()
                    return self.look(to_end=to_end)
                self.builder.add(rank, *batch, part.names, part.fresh)
                unread = to_end and part.more
            for number in part.meta.get("from_any", ()):
                self.builder.from_any.add(
                    (self.builder.number_group(part.names["group"][number]), rank)
                )
            if part.meta.get("host", socket.gethostname()) != socket.gethostname():
                self.builder.elsewhere.add(rank)
        return [self.builder.head(rank) for rank in range(self._size)]

    def state(self, rank: int, state: str) -> str:
        """Returns the state of a rank.

        What is known from outside counts for more than what it wrote.
        """
        meta = self.parts[rank].meta
        if state == "running" and (
            not self.is_here(rank) or meta.get("stopped_at_max") or "end_ns" in meta
        ):
            return "unknown"  # what it does now is not recorded
        return state

    def is_here(self, rank: int) -> bool:
        """Returns whether a rank has begun to record, on this machine.

        What it writes can be read at once.
        """
        return self.parts[rank].meta.get("host") == socket.gethostname()

    def process(self, rank: int) -> tuple[int | None, bool]:
        """Returns a rank's process, None where it is not known or not on this machine.

        Also whether it has ended its recording.
        """
        meta = self.parts[rank].meta
        return (meta.get("pid") if self.is_here(rank) else None), "end_ns" in meta

    def find_mismatch(self, ended: Collection[int] = ()) -> Diagnosis | None:
        """Returns what disagrees of what was read since the last time, None where nothing does.

        See ``find_new_mismatches``.
        """
        heard = {
            _name(one)
            for verdict in self.caught
            for finding in verdict.diagnosis.findings
            for one in finding.operations
        }
        fresh = [
            one
            for one in find_new_mismatches(self.builder, ended)
            if not heard.issuperset(map(_name, one.operations))
        ]
        return Diagnosis(tuple(fresh), self._size) if fresh else None

    def blame(self, diagnosis: Diagnosis) -> Diagnosis:
        """Returns a diagnosis with what ended threads of the ranks before what follows from it."""
        notices = [
            (rank, read_notice(label))
            for rank, part in enumerate(self.parts)
            for label in reversed(part.names["label"].values())
        ]
        failed = {
            rank: said[1] for rank, said in notices if said is not None and said[0] == THREAD_FAILED
        }
        return replace(diagnosis, findings=blame_threads(diagnosis.findings, failed))


@dataclass
class _Suspicion:
    """Ranks that seem to be stuck, and since when they have been seen in the same state.

    Also what they said of their threads when asked.
    """

    ranks: tuple[int, ...]
    heads: tuple[Head, ...]
    since_s: float
    asked_s: float
    threads: dict[int, Threads] = field(default_factory=dict)


class Watcher:
    """Watches the ranks of one run.

    Args:
        records: what they record.
        world_size: number of ranks.
        tell: sends a word of ``protocol`` to a rank, and returns at once; ``hear`` is called with
            the answer to ``ASK``.
        poll_s: the shortest time between two looks.
        settle_s: how long ranks must have been seen in the same state before they are called stuck.

    Attributes:
        pause_s: how long to wait before the next look.
    """

    def __init__(
        self,
        records: LiveRecords,
        world_size: int,
        *,
        tell: Callable[[int, str], None],
        poll_s: float = POLL_S,
        settle_s: float = 0.0,
    ) -> None:
        self._records, self._size, self._tell = records, world_size, tell
        self._poll_s, self._settle_s = poll_s, settle_s
        self.pause_s = poll_s
        self._heads: list[Head] = []
        self._states: list[str] = []
        self._compare_s = 0.0  # when to compare next
        self._suspicion: _Suspicion | None = None
        # since when all of them wait and sleep, and their CPU time then
        self._calm: tuple[float, list[float]] | None = None

    def hear(self, rank: int, threads: Threads) -> None:
        """Takes a rank's answer."""
        if self._suspicion is not None:
            self._suspicion.threads[rank] = threads

    def wake(self, verdict: Verdict) -> None:
        """Writes a verdict down, and wakes the ranks that wait in vain: they raise its error."""
        write_verdict(self._records.directory, verdict)
        for rank in verdict.waiting:
            self._tell(rank, WAKE)

    def processes(self) -> list[tuple[int | None, bool]]:
        """Returns of each rank its process, and whether it has ended its recording.

        The process is None where it is not known or not on this machine.
        """
        for part in self._records.parts:
            if "pid" not in part.meta:
                part.read_names()
        return [self._records.process(rank) for rank in range(self._size)]

    def stands(self) -> str:
        """Names the state of this machine's ranks at the last look, the same while nothing happens.

        "" where one can go on.
        """
        here = [rank for rank in range(len(self._heads)) if self._records.is_here(rank)]
        if any(self._states[rank] not in GONE and not self._heads[rank].awaited for rank in here):
            return ""
        return " ".join(f"{rank} {self._heads[rank]} {self._states[rank]}" for rank in here)

    def look(self, states: Sequence[str]) -> Verdict | None:
        """Looks once; returns a verdict where there is one.

        Args:
            states: of each rank, as far as it is known from elsewhere: "running", "exited",
                "failed" or "killed".
        """
        start_s = time.monotonic()
        heads = self._records.look()
        # all that was read had happened by then
        now_s, now_ns = time.monotonic(), time.monotonic_ns()
        verdict = self._compare(states, now_ns)
        if (
            verdict is None
            and (stuck := self._look_for_stuck(heads, states, now_s, now_ns)) is not None
        ):
            self._compare_s = 0.0  # what disagrees may be why
            verdict = self._compare(states, now_ns) or stuck
        if self._suspicion is None or self.pause_s > self._poll_s:
            self.pause_s = max(self.pause_s, min((time.monotonic() - start_s) / SHARE, COMPARE_S))
        return verdict and replace(verdict, diagnosis=self._records.blame(verdict.diagnosis))

    def _compare(self, states: Sequence[str], now_ns: int) -> Verdict | None:
        """Returns the verdict on operations whose sides disagree, if it is time to compare them."""
        start_s = time.monotonic()
        if start_s < self._compare_s:
            return None
        found = self._records.find_mismatch(
            [rank for rank, state in enumerate(states) if state in GONE]
        )
        end_s = time.monotonic()
        self._compare_s = end_s + max(COMPARE_S, (end_s - start_s) / SHARE)
        if found is None:
            return None
        known = tuple(view.state for view in self._build(states, now_ns).ranks)
        return Verdict(found.findings[0].ranks, replace(found, states=known), now_ns)

    def _build(self, states: Sequence[str], now_ns: int) -> Snapshot:
        return self._records.builder.build(
            [self._records.state(rank, state) for rank, state in enumerate(states)], now_ns
        )

    def _look_for_stuck(
        self, heads: list[Head], states: Sequence[str], now_s: float, now_ns: int
    ) -> Verdict | None:
        """Returns the verdict on ranks that can never go on."""
        unchanged = heads == self._heads and self._states == states
        if heads != self._heads:
            self._calm = None
        self._heads, self._states = heads, list(states)
        if not (unchanged and self._suspicion is None) and any(head.awaited for head in heads):
            snapshot = self._build(states, now_ns)
            stuck = analyse(snapshot)
            if stuck is not None:
                self.pause_s = self._poll_s
                return self._suspect(snapshot, stuck, (), now_s, now_ns)
        there = [rank for rank, state in enumerate(states) if state not in GONE]
        calm_s = (
            self._calm_for(there, now_s)
            if unchanged and any(head.awaited for head in heads)
            else 0.0
        )
        silent = tuple(rank for rank in there if not heads[rank].awaited)
        if (
            calm_s >= STALL_S
            and silent
            and all(self._records.state(rank, "running") == "running" for rank in silent)
        ):
            snapshot = self._build(
                ["blocked" if rank in silent else state for rank, state in enumerate(states)],
                now_ns,
            )
            stuck = analyse(snapshot)
            if stuck is not None:
                self.pause_s = self._poll_s * POLL_MAX
                return self._suspect(snapshot, stuck, silent, now_s, now_ns)
        self._suspicion = None
        self.pause_s = min(self.pause_s * RELAX, self._poll_s * POLL_MAX)
        return None if silent else self._look_for_stall(states, there, calm_s, now_ns)

    def _suspect(
        self, snapshot: Snapshot, stuck: Stuck, silent: tuple[int, ...], now_s: float, now_ns: int
    ) -> Verdict | None:
        """Returns the verdict on ranks that seem stuck once there is no doubt.

        ``silent`` ranks wait in nothing that is recorded.
        """
        ranks = (*stuck.ranks, *silent)
        heads = tuple(self._heads[rank] for rank in ranks)
        suspicion = self._suspicion
        if suspicion is None or (suspicion.ranks, suspicion.heads) != (ranks, heads):
            self._suspicion = _Suspicion(ranks, heads, now_s, now_s)
            for rank in ranks:
                self._tell(rank, ASK)
            return None
        if any(rank not in suspicion.threads for rank in ranks):
            return None  # who is blocked answers in no time; who does not is not blocked
        threads = {
            rank: suspicion.threads[rank].besides(self._records.builder.awaiting_threads(rank))
            for rank in ranks
        }
        busy = any(each.busy for each in threads.values()) or any(
            threads[rank].timed for rank in silent
        )
        idle = any(each.idle for each in threads.values())
        if busy:
            suspicion.since_s = now_s
        if (busy or idle) and now_s - suspicion.asked_s > _AGAIN_S * (4 if busy and silent else 1):
            suspicion.asked_s, suspicion.threads = now_s, {}
            for rank in ranks:
                self._tell(rank, ASK)
        patience_s = max(
            self._settle_s,
            # of silent ones, nothing has moved for long already
            (2 * _AGAIN_S if silent else THREADS_S) if idle else 0.0,
            COLLECTIVE_S if _hangs_on_collective(snapshot, stuck) else 0.0,
        )
        if busy or now_s - suspicion.since_s < patience_s:
            return None
        about = {rank: text for rank in ranks if (text := _describe_idle(threads[rank]))}
        views = tuple(
            replace(view, end=view.end._replace(about=about.get(rank, view.end.about)))
            for rank, view in enumerate(snapshot.ranks)
        )
        return Verdict(stuck.ranks, judge(Snapshot(views), stuck), now_ns, about=about)

    def _look_for_stall(
        self, states: Sequence[str], there: list[int], calm_s: float, now_ns: int
    ) -> Verdict | None:
        """Returns the verdict on ranks that all wait and that nothing reaches.

        Though what they posted does not prove that nothing can.
        """
        if calm_s < STALL_S or calm_s < (
            patience_s := STALL_S + self._records.builder.open_bytes / STALL_BYTES_PER_S
        ):
            return None
        snapshot = self._build(states, now_ns)
        if any(snapshot.ranks[rank].state != "blocked" for rank in there):
            return None
        return self._judge_stall(snapshot.settle(), tuple(there), patience_s, now_ns)

    def _calm_for(self, there: list[int], now_s: float) -> float:
        """Returns for how long ranks have used hardly any CPU time; 0 if one does not sleep."""
        used_s = [_idle_cpu_s(self._records.process(rank)[0] or 0) for rank in there]
        since_s, before_s = self._calm or (now_s, used_s)
        idle_s = _IDLE_S + _IDLE_SHARE * (now_s - since_s)
        if (
            len(used_s) != len(before_s)
            or math.inf in used_s
            or any(new - old > idle_s for new, old in zip(used_s, before_s, strict=True))
        ):
            since_s, before_s = now_s, used_s
        self._calm = since_s, before_s
        return now_s - since_s

    def _judge_stall(
        self, snapshot: Snapshot, blocked: tuple[int, ...], patience_s: float, now_ns: int
    ) -> Verdict:
        """Says why nothing moves, as if nothing were on its way any more."""
        stuck = analyse(snapshot)
        if stuck is not None:
            diagnosis = judge(snapshot, stuck)
            first, *others = diagnosis.findings
            first = replace(first, hint=f"{first.hint}\n{_NOT_PROVED.format(patience_s)}".strip())
            return Verdict(
                stuck.ranks, replace(diagnosis, findings=(first, *others)), now_ns, proved=False
            )
        operations = tuple(
            one.operation for rank in blocked for one in snapshot.ranks[rank].awaited
        )
        message = (
            f"{waiting_text(blocked)}, and nothing has moved for {patience_s:.0f} s."
            f"{waits_text(operations)}"
        )
        hint = (
            "Look for communication that ringsim does not see: according to the records, both "
            "sides of these operations are posted."
        )
        finding = Finding("stalled", blocked, operations, message, hint)
        diagnosis = Diagnosis(
            (finding,), self._size, states=tuple(view.state for view in snapshot.ranks)
        )
        return Verdict(blocked, diagnosis, now_ns, proved=False)


def _name(operation: Operation) -> tuple[int, str]:
    return operation.rank, str(operation)


def _describe_idle(threads: Threads) -> str:
    """Returns "waits at train.py:7 (with lock:) for another of its threads".

    Or nothing where no line of the user's is known.
    """
    places = [
        f"{place_text(place)} ({linecache.getline(*place).strip()})"
        for place in dict.fromkeys(threads.idle.values())
        if place
    ]
    return (
        f"waits at {', and at '.join(places[:_SHOWN])} for another of its threads" if places else ""
    )


def _idle_cpu_s(pid: int) -> float:
    """Returns a sleeping process's CPU time, without that of the thread that asks.

    Of one that does not sleep, infinity.
    """
    process = look_at(pid)
    if process is None or process.state not in "SD":
        return math.inf
    return process.ticks / os.sysconf("SC_CLK_TCK") - (
        time.thread_time() if pid == os.getpid() else 0.0
    )


def _hangs_on_collective(snapshot: Snapshot, stuck: Stuck) -> bool:
    """Tells whether a verdict hangs on a collective that may return early.

    One whose missing members are all still there.
    """
    return any(
        one.posted.operation.kind == COLLECTIVE
        and not any(snapshot.ranks[peer].state in GONE for peer in one.peers)
        for one in stuck.hindrances
    )
