"""The launcher's side of a run: receives messages from the ranks, and watches them.

A run is in one phase at a time::

    phase     leads to   when
    -----     --------   ----
    STARTING  RUNNING    all ranks have loaded the job: "go"
    STARTING  OVER       not all ranks have come up after START_S
    RUNNING   JUDGED     the watcher has a verdict: the ranks that wait are woken
    JUDGED    RUNNING    WAKE_S later, if the program has caught the verdict's error
    JUDGED    OVER       all woken ranks have failed; or WAKE_S later, if none caught the error
    STARTING  FAILING    a rank has failed or died
    RUNNING   FAILING    a rank has failed or died
    FAILING   OVER       GRACE_S later
    any       OVER       all ranks have returned or failed; a limit; ``allows`` returns False
"""

from __future__ import annotations

import contextlib
import math
import pickle
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ringsim.diagnose.failure import (
    GRACE_S,
    LOST_PEERS,
    OWN,
    Report,
    Verdict,
    clear_verdict,
    error_of_kind,
    rename_files,
)
from ringsim.diagnose.snapshot import Head
from ringsim.errors import MessageMismatch
from ringsim.launch.debugging import answer
from ringsim.launch.job import Job
from ringsim.launch.output import RankOutput
from ringsim.launch.progress import Progress, count_progress
from ringsim.launch.protocol import (
    ASK,
    IDLE,
    OVER,
    VARIABLES,
    WAKE_S,
    WHERE,
    Ends,
    list_unfinished,
)
from ringsim.launch.ranks import START_S, RankSet
from ringsim.launch.results import Spans
from ringsim.launch.system import has_proc, look_at_living
from ringsim.launch.threads import Places, Threads
from ringsim.launch.watcher import COLLECTIVE_S, POLL_S, LiveRecords, Watcher
from ringsim.traces.cells import name_cells, rename_places
from ringsim.traces.events import ERROR
from ringsim.traces.parts import PartReader

Doing = Callable[[Path, str], str]  # see ``RunOptions``
_POLL_S = 0.05
# after each line for a debugger, its rank can ask for the next one before other ranks can ask
_TURN_S = 0.2
_LOST_S = 5.0  # a fork server reports within milliseconds that a rank has died


@dataclass(frozen=True)
class RunOptions:
    """The options of a run.

    Attributes:
        limit_s: the limit for the whole run, in seconds, or None for no limit (``GPU_LIMIT_S`` on
            GPUs).
        timeout_s: the limit for each blocked operation, in seconds, or None if the groups have it.
        show: whether the ranks' output is shown as it arrives.
        show_hidden: whether output hidden by print suppression is also shown.
        keep_at: the directory for the ranks' records, or None for a private directory that is
            removed at the end.
        doing: a function that returns the text for the progress line, given the run's directory and
            a few words about the progress, or None for these words.
        live: whether the run is shown while it runs, instead of the text of ``doing``.
        poll_s: the interval between polls for stuck ranks, in seconds, or None for no polls.
        allows: a function that returns whether the run may continue, given the processes of the
            unfinished ranks, or None for always.
    """

    limit_s: float | None = None
    timeout_s: float | None = None
    show: bool = True
    show_hidden: bool = False
    keep_at: Path | None = None
    doing: Doing | None = None
    live: bool = False
    poll_s: float | None = POLL_S
    allows: Callable[[Collection[int]], bool] | None = None


class _Phase(Enum):
    STARTING = auto()
    RUNNING = auto()
    JUDGED = auto()
    FAILING = auto()
    OVER = auto()


@dataclass
class Followed:
    """The launcher's view of one rank.

    Attributes:
        rank: the rank's number.
        channel: the channel to the rank; a closed channel means that the rank has ended.
        output: the rank's output.
        pid: the rank's process, after the rank has joined the others.
        num_threads: the number of torch's threads, after the rank has loaded the job.
        result: the location of the rank's result in its file, after the rank has returned.
        report: the rank's failure, if it failed.
        woken: whether the verdict's error was raised in the rank, and has not ended a thread.
        stuck_in: the slots of the operations that the rank waited for at the verdict.
        seems_dead: whether the rank was dead at the last check, although its channel is open.
        head: its progress, as far as it was read if the supervisor keeps ``timeout_s``.
        since_s: the time of the last change of ``head``, or the last time when it was not blocked.
        left: None, or if a rank of a session is ready for the next call, whether its default group
            exists, and the numbers of optimizer steps that began and ended.
    """

    rank: int
    channel: Connection
    output: RankOutput
    pid: int | None = None
    num_threads: int | None = None
    result: Spans | None = None
    report: Report | None = None
    woken: bool = False
    stuck_in: tuple[int, ...] = ()
    seems_dead: bool = False
    head: Head | None = None
    since_s: float = 0.0
    left: Any = None

    @property
    def is_over(self) -> bool:
        """Whether the rank has returned or failed."""
        return self.result is not None or self.report is not None

    def tell(self, message: Any) -> None:
        """Sends a message."""
        with contextlib.suppress(OSError):  # the rank is gone, as reading its channel will show
            self.channel.send(message)


class Supervisor:
    """Follows one run, from sending the job to the end of all ranks.

    Attributes:
        rank_set: the processes.
        job: the job that the processes run.
        options: the options of the run.
        size: the number of ranks.
        ranks: the view of each rank, by number.
        start_ns: the time when all ranks began, on CLOCK_MONOTONIC; before that, the time when this
            object was created.
        start_unix_ns: the same time on the wall clock.
        verdict: the watcher's verdict, unless the program has caught its error.
        caught: the earlier verdicts whose error the program has caught, so that the run continued.
        late: the ranks that an operation blocked for longer than ``options.timeout_s``.
        given_up_ns: the time of the decision to end the ranks.
        unfinished: the activities of ranks that had to be ended, as returned by
            ``describe_unfinished``.
    """

    verdict: Verdict | None = None
    given_up_ns: int | None = None
    _stood_s = 0.0  # the time that the user took to answer debuggers
    _stops = False  # whether ranks fail because they are stopped
    _phase = _Phase.STARTING
    _next_look_s = _next_follow_s = 0.0

    def __init__(self, rank_set: RankSet, job: Job, options: RunOptions) -> None:
        self.rank_set, self.job, self.options = rank_set, job, options
        self.size = rank_set.kind.world_size
        self.start_ns, self.start_unix_ns = time.monotonic_ns(), time.time_ns()
        self._progress = Progress(self.size, live=options.live)
        self.ranks = [
            Followed(
                rank,
                channel,
                RankOutput(
                    rank_set.config.for_rank(rank),
                    options.show,
                    options.show_hidden,
                    self._progress.make_room,
                ),
            )
            for rank, channel in enumerate(rank_set.channels)
        ]
        self.late: list[int] = []
        self.variables: dict[int, str] = {}  # by rank, if ranks keep them for an error
        self.unfinished: Ends = []
        self.records = LiveRecords(rank_set.directory, self.size)
        self.caught = self.records.caught
        self._open = {followed.channel: followed for followed in self.ranks}
        self._places: Places = {}  # the places reported by ranks
        self._turn: list[Connection] = []  # of the rank whose debugger was answered last
        self._watcher = self._make_watcher()
        self._phase_ends_s = time.monotonic() + START_S
        self._next_roll_call_s = time.monotonic() + _LOST_S

    def _make_watcher(self) -> Watcher | None:
        kind, poll_s = self.rank_set.kind, self.options.poll_s
        if poll_s is None or kind.comm_device != "cpu" or not has_proc():
            return None
        return Watcher(
            self.records,
            self.size,
            tell=self.tell,
            poll_s=poll_s,
            # an MPI send may end by itself, when its rank next polls
            settle_s=COLLECTIVE_S if kind.backend == "mpi" else 0.0,
        )

    @property
    def has_begun(self) -> bool:
        """Whether all ranks have loaded the job."""
        return all(one.num_threads is not None for one in self.ranks)

    @property
    def reports(self) -> list[Report]:
        """The reports of the failed ranks."""
        return [one.report for one in self.ranks if one.report is not None]

    @property
    def running(self) -> dict[int, int]:
        """The processes of the ranks that have neither returned nor failed."""
        return {one.rank: one.pid for one in self.ranks if one.pid is not None and not one.is_over}

    def tell(self, rank: int, message: Any) -> None:
        """Sends a message to a rank."""
        self.ranks[rank].tell(message)

    def tell_all(self, message: Any) -> None:
        """Sends a message to all ranks."""
        for followed in self.ranks:
            followed.tell(message)

    def watch(self, doing: Doing | None) -> None:
        """Sends the job; returns when all ranks have answered, or when waiting is pointless.

        The progress line shows the text of ``doing``, as described at ``RunOptions``.
        """
        self._doing = doing
        limit_s = self.options.limit_s
        deadline = math.inf if limit_s is None else self._now_s + limit_s
        try:
            self.tell_all(pickle.dumps(self.job))
            while self._phase is not _Phase.OVER:
                self._hear(self._pause_s)
                now = self._now_s
                allowed = self._follow(now)
                over = all(one.is_over for one in self.ranks) or not self._open
                self._phase = self._next_phase(now)
                if over or now > deadline or not allowed or self._is_late(now):
                    self._phase = _Phase.OVER
        finally:
            self._phase = _Phase.OVER
            self._progress.close()
        self._settle()

    def end_all(self) -> None:
        """Ends all ranks, after asking the running ranks what they are doing."""
        self.given_up_ns = self.given_up_ns or time.monotonic_ns()
        if self.verdict is None:
            self.unfinished = list_unfinished(self.running, self.tell, self._hear_places)
        self._stops = True
        self.stop_ranks()

    def stop_ranks(self) -> None:
        """Stops the ranks that still run the job: ends all ranks."""
        self.rank_set.kill()
        self.rank_set.wait_for_end()

    def follow_outputs(self, *, last: bool = False) -> None:
        """Shows the new output of the ranks."""
        for followed in self.ranks:
            followed.output.follow(last=last)

    # -- phases

    @property
    def _now_s(self) -> float:
        """The time on a clock that stands still while a debugger waits for the user."""
        return time.monotonic() - self._stood_s

    def _next_phase(self, now: float) -> _Phase:
        late, failed = now > self._phase_ends_s, bool(self.reports)
        if self._phase is _Phase.JUDGED and self.verdict is not None:
            if all(self.ranks[rank].report is not None for rank in self.verdict.waiting):
                return _Phase.OVER
            if late and not failed and self._is_caught(self.verdict):
                self._set_aside(self.verdict)
                return _Phase.RUNNING
            return _Phase.OVER if late else _Phase.JUDGED
        if self._phase is _Phase.FAILING:
            return _Phase.OVER if late else _Phase.FAILING
        if failed:
            self._phase_ends_s = now + GRACE_S
            return _Phase.FAILING
        if not self.has_begun:
            came = all(one.pid is not None for one in self.ranks)
            return _Phase.OVER if late and not came else _Phase.STARTING
        if self._phase is _Phase.STARTING:
            self._schedule_look(now)
        elif self._look_for_verdict(now):
            self._phase_ends_s = now + WAKE_S
            return _Phase.JUDGED
        return _Phase.RUNNING

    @property
    def _pause_s(self) -> float:
        """The time to wait for messages before the next step, in seconds."""
        if self._watcher is None or self._phase is not _Phase.RUNNING:
            return _POLL_S
        return min(_POLL_S, max(self._next_look_s - self._now_s, 0.0))

    def _schedule_look(self, now: float) -> None:
        if self._watcher is not None:
            self._next_look_s = now + self._watcher.pause_s

    def _look_for_verdict(self, now: float) -> bool:
        """If a check is due, looks for ranks that can never continue, and wakes them."""
        if self._watcher is None or now < self._next_look_s:
            return False
        # after a caught error, the ranks first mark its operations as failed
        if self.caught and now < self._phase_ends_s + WAKE_S and any(self._find_stuck()):
            return False
        self.verdict = self._watcher.look(
            ["exited" if one.result is not None else "running" for one in self.ranks]
        )
        self._schedule_look(now)
        if self.verdict is None:
            return False
        self.given_up_ns = self.verdict.at_ns
        for followed, head in zip(self.ranks, self.records.look(), strict=True):
            followed.stuck_in = head.awaited
        self._watcher.wake(self.verdict)
        return True

    def _settle(self) -> None:
        """Sets aside a verdict that has ended no rank; restores a verdict that later ended one."""
        if self.verdict is not None:
            if self._is_caught(self.verdict) and self._has_gone_on(self.verdict):
                self._set_aside(self.verdict)
        elif self.caught and self.reports and all(one.is_consequence for one in self.reports):
            self.verdict = self.caught.pop()
            self.given_up_ns = self.verdict.at_ns

    def _is_late(self, now: float) -> bool:
        """Looks for ranks that an operation has blocked for too long, if it keeps the limit."""
        limit_s = self.options.timeout_s
        if limit_s is None or self._phase is not _Phase.RUNNING:
            return False
        for one, head in zip(self.ranks, self.records.look(), strict=True):
            if head != one.head or not head.awaited:
                one.head, one.since_s = head, now
        self.late = [one.rank for one in self.ranks if now - one.since_s > limit_s]
        return bool(self.late)

    # -- verdicts whose error the program catches

    def _is_caught(self, verdict: Verdict) -> bool:
        """Returns whether all waits of a verdict are over, and none has ended a rank or thread.

        The waits ended with the verdict's error or, in C++, with torch's own error.
        """
        left = self._find_stuck()
        over = bool(verdict.waiting) and all(
            self.ranks[rank].woken or not left[rank] for rank in verdict.waiting
        )
        return over and self._was_raised(verdict)

    def _was_raised(self, verdict: Verdict) -> bool:
        """Returns whether an error was raised that a program could catch.

        Gloo silently completes most mismatched operations, so ranks may have left these operations
        before they are woken.
        """
        any_woken = any(one.woken for one in self.ranks)
        if any_woken or error_of_kind(verdict.diagnosis.kind) is not MessageMismatch:
            return True
        parts = (PartReader(self.rank_set.directory, rank) for rank in verdict.waiting)
        return any((part.read_all()["status"] == ERROR).any() for part in parts)

    def _find_stuck(self) -> list[list[int]]:
        """Returns the slots of the verdict's unfinished waits, by rank."""
        heads = self.records.look(to_end=True)
        return [
            [slot for slot in followed.stuck_in if slot in head.awaited]
            for followed, head in zip(self.ranks, heads, strict=True)
        ]

    def _has_gone_on(self, verdict: Verdict) -> bool:
        """Returns whether the program ended by itself after it caught a verdict.

        All ranks returned, or failed later for another reason.
        """
        by_itself = all(
            report.echo == OWN and report.error != "SystemExit" for report in self.reports
        )
        all_returned = all(one.result is not None for one in self.ranks)
        survived = verdict.diagnosis.kind in LOST_PEERS and bool(self.reports)
        return all_returned or (survived and by_itself)

    def _set_aside(self, verdict: Verdict) -> None:
        """Continues the run after a verdict whose error the program has caught."""
        self.caught.append(verdict)
        self.verdict = self.given_up_ns = None
        left = self._find_stuck()
        for rank in verdict.waiting:
            self.tell(rank, (OVER, left[rank]))
        for followed in self.ranks:
            followed.woken = False
        clear_verdict(self.rank_set.directory)

    # -- messages from the ranks

    def wait_until_idle(self, limit_s: float) -> None:
        """Waits until all ranks of a session are ready for the next call, or dead."""
        deadline = time.monotonic() + limit_s
        while (
            any(one.left is None for one in self._open.values())
            and (left_s := deadline - time.monotonic()) > 0
        ):
            self._hear(left_s)

    def _hear(self, wait_s: float) -> None:
        ready = wait(self._turn, timeout=_TURN_S) if self._turn else []
        self._turn = []
        for channel in ready or wait([*self._open], timeout=wait_s):
            # wait() returns the objects that it was given
            self._read(self._open[channel])  # type: ignore[index]
            if self._turn:
                break

    def _hear_places(self, wait_s: float) -> Places:
        self._hear(wait_s)
        return self._places

    def _read(self, one: Followed) -> None:
        """Handles one message from a rank, or the end of the rank's channel."""
        try:
            what, value = one.channel.recv()
        except (EOFError, OSError):
            del self._open[one.channel]
            self._places.setdefault(one.rank, None)
            # mpirun ends all ranks after a signal has ended one
            ended = bool(self.reports) and self.rank_set.kind.backend == "mpi"
            if not one.is_over and not ended:
                self._report_death(one)
            return
        if what == "ready":
            one.pid = value
        elif what == "loaded":
            one.num_threads = value
            if self.has_begun:
                self.start_ns, self.start_unix_ns = time.monotonic_ns(), time.time_ns()
                self.tell_all("go")
        elif what == ASK and self._watcher is not None:
            self._watcher.hear(one.rank, Threads(*value))
        elif what == WHERE:
            self._places[one.rank] = value
        elif what == VARIABLES:
            self.variables[one.rank] = rename_places(value, name_cells(self.job.lines))
        elif what == "woken":
            one.woken = value
        elif what == "result":
            one.result = value
        elif what == "failed":
            self._keep_report(one, value)
        elif what == IDLE:
            one.left = value
        elif what == "asks" and self._phase is not _Phase.OVER:
            self._answer(one, value)

    def _answer(self, one: Followed, text: str) -> None:
        """Shows the text of a rank's debugger, and sends the line that the user types."""
        self.follow_outputs()
        self._progress.make_room()
        start_s = time.monotonic()
        one.tell(answer(text))
        self._stood_s += time.monotonic() - start_s
        self._turn = [one.channel]
        self._watcher = self._make_watcher()  # it would count this time

    def _report_death(self, one: Followed) -> None:
        self._keep_report(one, self.rank_set.report_death(one.rank, one.output))

    def _keep_report(self, one: Followed, report: Report) -> None:
        if not self._stops:
            one.report = rename_files(report, name_cells(self.job.lines))

    def _follow(self, now: float) -> bool:
        """Updates the progress line and looks for lost ranks, at regular intervals.

        Returns whether the run may continue.
        """
        if now >= self._next_roll_call_s:
            self._next_roll_call_s = now + _LOST_S
            self._report_lost_ranks()
        if now < self._next_follow_s:
            return True
        self._next_follow_s = now + _POLL_S
        self.follow_outputs()
        self._progress.update(sum(one.result is not None for one in self.ranks), self._describe)
        allows = self.options.allows
        return allows is None or allows(self.running.values())

    def _describe(self) -> str:
        """Returns the text for the progress line."""
        words, doing = count_progress(self.records.parts), self._doing
        for what, numbers in (
            ("the program", [one.num_threads for one in self.ranks]),
            ("torch", [one.pid for one in self.ranks]),
        ):
            if None in numbers:
                words = f"loading {what} {self.size - numbers.count(None)}/{self.size}"
        return words if doing is None else doing(self.rank_set.directory, words)

    def _report_lost_ranks(self) -> None:
        """Reports ranks that were already dead at the last check.

        The ranks' fork server is stopped or stuck, and cannot report their deaths.
        """
        for rank, pid in self.running.items() if has_proc() else ():
            followed, is_dead = self.ranks[rank], look_at_living(pid) is None
            if followed.seems_dead and is_dead:
                self._report_death(followed)
            followed.seems_dead = is_dead
