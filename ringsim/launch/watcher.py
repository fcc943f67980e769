"""Watches running ranks, finds stuck or mismatched ranks, and wakes the waiting ranks.

It polls at regular intervals::

    read the parts -> blocked ranks -> can a rank still help? -> if not: the same at the next look -> a verdict
                   -> mismatches among operations that can no longer be refused --------------------> a verdict

Two polls give a consistent cut through several ranks: a rank that is blocked in the same operations
both times, and has posted none in between, was in that state from the end of the first poll to the
start of the second. The same holds for all other ranks, over the same time.

Proofs are preferred to timeouts. A Gloo message needs both sides, so ranks that wait for unposted
messages from ranks that also wait are stuck: two equal polls are enough. Less certain cases need
patience:

=====================================  ===========================================================
the ranks wait for                     time without any progress before the verdict
=====================================  ===========================================================
messages of each other                 from one look to the next
a collective                           1 s, because some return early; 0 s if a missing member is
                                       gone
anything, and a rank has more threads  3 s, if these wait for each other; otherwise they might
                                       help, and there is no verdict
a rank that is in no operation         3.5 s, if all ranks sleep and its threads wait for each
                                       other, or for its locks and queues
anything, without a proof              3 s and 1 s per 50 MB in flight, if all ranks are blocked
                                       or gone, and none is stopped or computing: then no message
                                       is in flight. The verdict is marked as not proved
=====================================  ===========================================================

A rank that waits with its own time limit counts as able to continue (``comm/torch_hooks``). So does
a rank whose main thread waits for another thread with a limit, or for anything outside its process
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

POLL_S = 0.02  # time between two looks while ranks seem stuck
# each look without a finding increases the time to the next one by this factor ...
RELAX = 1.5
POLL_MAX = 5  # ... up to this multiple of the shortest time
COMPARE_S = 0.2  # time between two comparisons of the posted operations
# share of its time in which a watcher may look or compare: it may run inside a rank, and hold its
# interpreter
SHARE = 0.02
COLLECTIVE_S = 1.0
THREADS_S = 3.0
STALL_S = 3.0
_AGAIN_S = 0.25  # time before ranks whose other threads may help are asked again
# CPU time of an idle rank: Gloo's threads wake every 10 ms
_IDLE_S, _IDLE_SHARE = 0.02, 0.015
_SHOWN = 3  # lines of a rank's threads
_NOT_PROVED = "The posted operations do not prove this, but nothing has moved for {:.0f} s."


class LiveRecords:
    """The growing records of all ranks in a run.

    Args:
        directory: the directory of their parts; a rank without a part has done nothing yet.
        world_size: the number of ranks.
        strangers: whether the directory may hold parts of an earlier run; then only the parts of
            living processes count.

    Attributes:
        caught: the verdicts whose error was raised and caught; their operations cause no further
            finding.
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
        """Reads the new records of every rank, in limited amounts unless ``to_end`` is set.

        Returns the progress of each rank.
        """
        for rank, part in enumerate(self.parts):
            self._known[rank] = self._known[rank] or part.is_live()
            if not self._known[rank]:  # it may belong to another run
                continue
            unread = True
            while unread:
                batch = part.advance()
                # by a new run of the same rank: all earlier records and counts are invalid
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
        """Returns the state of a rank; facts from outside override its records."""
        meta = self.parts[rank].meta
        if state == "running" and (
            not self.is_here(rank) or meta.get("stopped_at_max") or "end_ns" in meta
        ):
            return "unknown"  # its current activity is not recorded
        return state

    def is_here(self, rank: int) -> bool:
        """Returns whether a rank records on this machine, so that its records are visible."""
        return self.parts[rank].meta.get("host") == socket.gethostname()

    def process(self, rank: int) -> tuple[int | None, bool]:
        """Returns a rank's process, and whether the rank has ended its recording.

        The process is None if it is unknown or on another machine.
        """
        meta = self.parts[rank].meta
        return (meta.get("pid") if self.is_here(rank) else None), "end_ns" in meta

    def find_mismatch(self, ended: Collection[int] = ()) -> Diagnosis | None:
        """Returns the mismatches among the records read since the last call, or None if none exist.

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
        """Returns a diagnosis with failed threads as the causes of the findings."""
        failed = {
            rank: said[1]
            for rank, part in enumerate(self.parts)
            for label in reversed(part.names["label"].values())
            if (said := read_notice(label)) is not None and said[0] == THREAD_FAILED
        }
        return replace(diagnosis, findings=blame_threads(diagnosis.findings, failed))


@dataclass
class _Suspicion:
    """Ranks that seem stuck, the time of their last change, and their threads."""

    ranks: tuple[int, ...]
    heads: tuple[Head, ...]
    since_s: float
    asked_s: float
    threads: dict[int, Threads] = field(default_factory=dict)


class Watcher:
    """Watches one run.

    Args:
        records: the records of the ranks.
        world_size: the number of ranks.
        tell: a function that sends a message of ``protocol`` to a rank and returns immediately;
            ``hear`` is called with the answer to ``ASK``.
        poll_s: the shortest time between two polls.
        settle_s: the time without a change before ranks count as stuck.

    Attributes:
        pause_s: the time before the next poll.
    """

    _heads: Sequence[Head] = ()
    _states: Sequence[str] = ()
    _compare_s = 0.0  # time of the next comparison
    _suspicion: _Suspicion | None = None
    # the time since which all of them wait and sleep, and their CPU time then
    _calm: tuple[float, list[float]] | None = None

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

    def hear(self, rank: int, threads: Threads) -> None:
        """Stores a rank's answer."""
        if self._suspicion is not None:
            self._suspicion.threads[rank] = threads

    def wake(self, verdict: Verdict) -> None:
        """Writes a verdict, and wakes the ranks that wait, so that they raise its error."""
        write_verdict(self._records.directory, verdict)
        for rank in verdict.waiting:
            self._tell(rank, WAKE)

    def processes(self) -> list[tuple[int | None, bool]]:
        """Returns the process of each rank, and whether the rank has ended its recording.

        The process is None if it is unknown or on another machine.
        """
        for part in self._records.parts:
            if "pid" not in part.meta:
                part.read_names()
        return [self._records.process(rank) for rank in range(self._size)]

    def stands(self) -> str:
        """Returns a text for the state of this machine's ranks, which changes on any progress.

        Returns "" if a rank can continue.
        """
        here = [rank for rank in range(len(self._heads)) if self._records.is_here(rank)]
        if any(self._states[rank] not in GONE and not self._heads[rank].awaited for rank in here):
            return ""
        return " ".join(f"{rank} {self._heads[rank]} {self._states[rank]}" for rank in here)

    def look(self, states: Sequence[str]) -> Verdict | None:
        """Polls once, and returns a verdict or None.

        Args:
            states: the state of each rank, as far as the caller knows: "running", "exited",
                "failed" or "killed".
        """
        start_s = time.monotonic()
        heads = self._records.look()
        # everything in the records had happened by then
        self._now_s, self._now_ns = time.monotonic(), time.monotonic_ns()
        verdict = self._compare(states)
        if verdict is None and (stuck := self._look_for_stuck(heads, states)) is not None:
            self._compare_s = 0.0  # a mismatch may be the cause
            verdict = self._compare(states) or stuck
        if self._suspicion is None or self.pause_s > self._poll_s:
            self.pause_s = max(self.pause_s, min((time.monotonic() - start_s) / SHARE, COMPARE_S))
        return verdict and replace(verdict, diagnosis=self._records.blame(verdict.diagnosis))

    def _compare(self, states: Sequence[str]) -> Verdict | None:
        """Returns the verdict on mismatched operations, if a comparison is due."""
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
        known = tuple(view.state for view in self._build(states).ranks)
        return Verdict(found.findings[0].ranks, replace(found, states=known), self._now_ns)

    def _build(self, states: Sequence[str]) -> Snapshot:
        return self._records.builder.build(
            [self._records.state(rank, state) for rank, state in enumerate(states)], self._now_ns
        )

    def _look_for_stuck(self, heads: list[Head], states: Sequence[str]) -> Verdict | None:
        """Returns the verdict on ranks that can never continue."""
        unchanged = heads == self._heads and [*states] == self._states
        if heads != self._heads:
            self._calm = None
        self._heads, self._states = heads, list(states)
        if not (unchanged and self._suspicion is None) and any(head.awaited for head in heads):
            snapshot = self._build(states)
            stuck = analyse(snapshot)
            if stuck is not None:
                self.pause_s = self._poll_s
                return self._suspect(snapshot, stuck, ())
        there = [rank for rank, state in enumerate(states) if state not in GONE]
        calm_s = self._calm_for(there) if unchanged and any(head.awaited for head in heads) else 0.0
        silent = tuple(rank for rank in there if not heads[rank].awaited)
        if (
            calm_s >= STALL_S
            and silent
            and all(self._records.state(rank, "running") == "running" for rank in silent)
        ):
            snapshot = self._build(
                ["blocked" if rank in silent else state for rank, state in enumerate(states)]
            )
            stuck = analyse(snapshot)
            if stuck is not None:
                self.pause_s = self._poll_s * POLL_MAX
                return self._suspect(snapshot, stuck, silent)
        self._suspicion = None
        self.pause_s = min(self.pause_s * RELAX, self._poll_s * POLL_MAX)
        return None if silent else self._look_for_stall(states, there, calm_s)

    def _suspect(self, snapshot: Snapshot, stuck: Stuck, silent: tuple[int, ...]) -> Verdict | None:
        """Returns the verdict on ranks that seem stuck, as soon as it is certain.

        ``silent`` ranks wait in no recorded operation.
        """
        ranks, now_s = (*stuck.ranks, *silent), self._now_s
        heads = tuple(self._heads[rank] for rank in ranks)
        suspicion = self._suspicion
        if suspicion is None or (suspicion.ranks, suspicion.heads) != (ranks, heads):
            self._suspicion = _Suspicion(ranks, heads, now_s, now_s)
            for rank in ranks:
                self._tell(rank, ASK)
            return None
        if any(rank not in suspicion.threads for rank in ranks):
            return None  # a blocked rank answers quickly; a rank that does not is not blocked
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
            # silent ranks have not moved for long already
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
        return Verdict(stuck.ranks, judge(Snapshot(views), stuck), self._now_ns, about=about)

    def _look_for_stall(
        self, states: Sequence[str], there: list[int], calm_s: float
    ) -> Verdict | None:
        """Returns an unproven verdict on ranks that all wait without progress."""
        if calm_s < STALL_S or calm_s < (
            patience_s := STALL_S + self._records.builder.open_bytes / STALL_BYTES_PER_S
        ):
            return None
        snapshot = self._build(states)
        if any(snapshot.ranks[rank].state != "blocked" for rank in there):
            return None
        return self._judge_stall(snapshot.settle(), tuple(there), patience_s)

    def _calm_for(self, there: list[int]) -> float:
        """Returns the time for which ranks have used little CPU time, or 0 if any is not asleep."""
        used_s = [_idle_cpu_s(self._records.process(rank)[0] or 0) for rank in there]
        now_s = self._now_s
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
        self, snapshot: Snapshot, blocked: tuple[int, ...], patience_s: float
    ) -> Verdict:
        """Returns a verdict under the assumption that no message is in flight."""
        stuck = analyse(snapshot)
        if stuck is not None:
            diagnosis = judge(snapshot, stuck)
            first, *others = diagnosis.findings
            first = replace(first, hint=f"{first.hint}\n{_NOT_PROVED.format(patience_s)}".strip())
            return Verdict(
                stuck.ranks,
                replace(diagnosis, findings=(first, *others)),
                self._now_ns,
                proved=False,
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
            "sides of these operations have been posted."
        )
        finding = Finding("stalled", blocked, operations, message, hint)
        diagnosis = Diagnosis(
            (finding,), self._size, states=tuple(view.state for view in snapshot.ranks)
        )
        return Verdict(blocked, diagnosis, self._now_ns, proved=False)


def _name(operation: Operation) -> tuple[int, str]:
    return operation.rank, str(operation)


def _describe_idle(threads: Threads) -> str:
    """Returns "waits at train.py:7 (with lock:) for another of its threads".

    Returns "" if none of the user's lines is known.
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
    """Returns a sleeping process's CPU time, without the calling thread's CPU time.

    Returns infinity if the process is not asleep.
    """
    process = look_at(pid)
    if process is None or process.state not in "SD":
        return math.inf
    return process.ticks / os.sysconf("SC_CLK_TCK") - (
        time.thread_time() if pid == os.getpid() else 0.0
    )


def _hangs_on_collective(snapshot: Snapshot, stuck: Stuck) -> bool:
    """Returns whether a verdict depends on a collective that may return early.

    No missing member of such a collective is gone.
    """
    return any(
        one.posted.operation.kind == COLLECTIVE
        and not any(snapshot.ranks[peer].state in GONE for peer in one.peers)
        for one in stuck.hindrances
    )
