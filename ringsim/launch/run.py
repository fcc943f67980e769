"""One run: from ranks and a job to a trace, or to one error with what was recorded until then."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from ringsim import provenance
from ringsim.diagnose.explain import explain
from ringsim.diagnose.failure import (
    GRACE_S,
    LOST_PEERS,
    OWN,
    Report,
    Verdict,
    clear_verdict,
    describe_end,
    describe_unfinished,
    error_of_kind,
    indent,
    interrupted_once,
    make_error,
    raised_where,
    rename_files,
    report_death,
    write_verdict,
)
from ringsim.diagnose.parting import tell_partings
from ringsim.diagnose.snapshot import operation_of, until
from ringsim.errors import Interrupted, MessageMismatch, RankFailed, RingError, RunTimeout
from ringsim.launch.job import Job, Kind
from ringsim.launch.output import RankOutput
from ringsim.launch.progress import Progress
from ringsim.launch.ranks import START_S, RankSet, get_launcher
from ringsim.launch.results import read_result
from ringsim.launch.watcher import (
    ANSWER_S,
    ASK,
    COLLECTIVE_S,
    OVER,
    POLL_S,
    WAKE,
    WAKE_S,
    WHERE,
    LiveRecords,
    Watcher,
    has_proc,
    look_at,
)
from ringsim.traces.cells import name_cells, rename_file, rename_places
from ringsim.traces.events import COLLECTIVE, ERROR
from ringsim.traces.findings import IN_THREAD, Diagnosis
from ringsim.traces.parts import PartReader
from ringsim.traces.runs import read_parts
from ringsim.traces.value import Trace

_POLL_S: Final = 0.05
GPU_LIMIT_S: Final = 3600.0  # of a run on GPUs that has no limit of its own: nobody watches it
_LOST_S: Final = 5.0  # a fork server says within milliseconds that a rank has died
_SHOWN: Final = 4  # ranks whose lines an error shows
_Error = TypeVar("_Error", RingError, Interrupted)


@dataclass(frozen=True)
class RunOptions:
    """How to run.

    Attributes:
        limit_s: limit of the whole run, in seconds; None for no limit, and for ``GPU_LIMIT_S`` on
            GPUs.
        show: whether the ranks' output is shown as it comes.
        show_hidden: whether what print suppression hides is shown, too.
        keep_at: where the ranks' records go, None for a private directory that is removed at the
            end.
        doing: given the directory of the run, says in a few words what the ranks are doing, for the
            progress line; None for nothing.
        poll_s: how often to look whether ranks are stuck, in seconds; None for never.
        allows: given the processes of the ranks that have not finished, tells whether they may go
            on; None for always.
    """

    limit_s: float | None = None
    show: bool = True
    show_hidden: bool = False
    keep_at: Path | None = None
    doing: Callable[[Path], str] | None = None
    poll_s: float | None = POLL_S
    allows: Callable[[Collection[int]], bool] | None = None


def run(job: Job, kind: Kind, options: RunOptions) -> Trace:
    """Runs a job on ranks of a kind.

    Returns the trace with the results and output of every rank. Blocks until all ranks have
    finished, one has failed, the limit is reached or the user interrupts. No rank is left
    afterwards, except fresh ones that are parked for the next call.

    Raises:
        RankFailed: a rank raised or died; other errors of ringsim that a rank raised come as
            themselves.
        Deadlock, PeerExited, MessageMismatch: ranks could never have continued, see
            ``ringsim.launch.watcher``.
        RunTimeout: ``options.limit_s`` has passed.
        Interrupted: the user interrupted the run.
    """
    ranks = get_launcher().get(kind, keep_at=options.keep_at)
    with interrupted_once():
        try:
            return _Supervisor(ranks, job, options).finish()
        finally:
            ranks.close()
            get_launcher().park(kind)


class _Supervisor:
    """The launcher's side of one run, from sending the job to the trace."""

    def __init__(self, ranks: RankSet, job: Job, options: RunOptions) -> None:
        self._ranks = ranks
        self._job = job
        self._options = options
        self._size = ranks.kind.world_size
        self._limit_s = (
            GPU_LIMIT_S
            if options.limit_s is None and ranks.kind.comm_device == "gpu"
            else options.limit_s
        )
        self._start_ns = time.monotonic_ns()
        self._start_unix_ns = time.time_ns()
        self._outputs = [
            RankOutput(
                ranks.config.for_rank(rank), show=options.show, show_hidden=options.show_hidden
            )
            for rank in range(self._size)
        ]
        self._progress = Progress(self._size)
        self._loaded: dict[int, int] = {}  # rank -> its number of torch threads
        # rank -> where its result lies in its file
        self._results: dict[int, list[tuple[int, int]]] = {}
        self._reports: dict[int, Report] = {}
        self._rank_of = {id(channel): rank for rank, channel in enumerate(ranks.channels)}
        self._run_id = uuid.uuid4().hex[:12]
        self._verdict: Verdict | None = None
        # ranks in which the verdict's error was raised, and has not ended a thread
        self._woken: set[int] = set()
        # by rank, the slots of what it waited for at the verdict
        self._stuck_in: list[tuple[int, ...]] = []
        self._watcher: Watcher | None = None
        self._next_look = 0.0
        self._pids: dict[int, int] = {}
        # ranks that were dead at the last look, though their channels were open
        self._dead: set[int] = set()
        self._places: dict[int, tuple[str, int] | None] = {}  # where ranks said they were
        # what ranks were doing that had to be ended: "computing", "asleep", "stopped"
        self._processes: dict[int, str] = {}
        self._given_up_ns: int | None = None  # when it was decided to end the ranks
        self._records = LiveRecords(ranks.directory, self._size)
        # earlier verdicts, whose error the program caught: the run went on
        self._caught = self._records.caught
        if options.poll_s is not None and ranks.kind.comm_device == "cpu" and has_proc():
            self._watcher = Watcher(
                self._records,
                self._size,
                ask=lambda rank: self._say(rank, ASK),
                poll_s=options.poll_s,
                # a send over MPI may end by itself, at the next look of its rank
                settle_s=COLLECTIVE_S if ranks.kind.backend == "mpi" else 0.0,
            )
        if ranks.keep:
            (ranks.directory / "run.json").write_text(json.dumps(self._metadata()))

    def finish(self) -> Trace:
        """Runs the job to its end; returns the trace, or raises the error of the run."""
        deadline = None if self._limit_s is None else time.monotonic() + self._limit_s
        try:
            self._send(pickle.dumps(self._job))
            self._watch(deadline)
        except KeyboardInterrupt:
            raise self._explained(
                Interrupted(f"the run was interrupted after {self._elapsed_s:.1f} s.")
            ) from None
        finally:
            self._progress.clear()
        self._settle()
        if (error := self._find_error()) is not None:
            raise error
        trace = self._make_trace(self._read_results(), complete=True)
        # not before: the end of one rank breaks what a thread of another may still wait for, which
        # the trace is to show
        self._send("bye")
        return trace

    def _find_error(self) -> RingError | None:
        """Returns the error of the run, None if all ranks have returned."""
        reports = list(self._reports.values())
        if not self._ranks.directory.is_dir():
            return self._explained(
                RingError(
                    "the directory of a run must be there to its end, got "
                    f"{self._ranks.directory}, which is gone. Leave it there."
                )
            )
        if self._verdict is not None and not any(report.waited for report in reports):
            return self._error_of(self._verdict.diagnosis, self._quote_stuck(self._verdict))
        if self._verdict is None and (found := self._find_mismatch()) is not None:
            also = f"\n  {make_error(reports, self._size, [])}" if reports else ""
            return self._error_of(found, also)
        missing = [rank for rank in range(self._size) if rank not in self._results]
        if reports:
            stopped = [rank for rank in missing if rank not in self._reports]
            error = self._startup_error() or make_error(reports, self._size, stopped)
            return self._explained(error)
        return self._explained(self._name_missing(missing)) if missing else None

    def _quote_stuck(self, verdict: Verdict) -> str:
        """Returns the user's lines at which the waits of ranks ended that a verdict names."""
        named = dict.fromkeys(
            rank
            for first in verdict.diagnosis.findings[:1]
            for finding in (first, *first.consequences)
            for rank in finding.ranks
        )
        stuck = [rank for rank in named if rank in self._reports][:_SHOWN]
        return "".join(raised_where(self._reports[rank]) for rank in stuck)

    def _name_missing(self, missing: Sequence[int]) -> RingError:
        """Makes the error of a run in which ranks neither returned nor failed."""
        if len(self._pids) < self._size and (self._limit_s is None or self._limit_s > START_S):
            return RingError(
                f"ranks must come up within {START_S:g} s, got {len(self._pids)} of {self._size} "
                "by then. Call again; look at what else runs here."
            )
        starting = len(self._loaded) < self._size
        return RunTimeout(
            f"the run must end within limit_s={self._limit_s:g} s, got no result from ranks "
            f"{missing} of {self._size} by then"
            f"{': they were still being started' if starting else ''}. "
            "Raise limit_s, or look at error.trace for where they were."
        )

    @property
    def _elapsed_s(self) -> float:
        return (time.monotonic_ns() - self._start_ns) / 1e9

    def _send(self, message: Any) -> None:
        for rank in range(self._size):
            self._say(rank, message)

    def _say(self, rank: int, message: Any) -> None:
        with contextlib.suppress(OSError):  # the rank is gone; reading its channel will tell
            self._ranks.channels[rank].send(message)

    def _watch(self, deadline: float | None) -> None:
        """Follows the ranks until all have answered, or waiting longer makes no sense."""
        open_channels = list(self._ranks.channels)
        grace_ends: float | None = None
        next_follow, started = 0.0, time.monotonic()
        next_roll_call = started + _LOST_S
        pause_s = self._watch_for_stuck_ranks(0.0)
        while open_channels and len(self._results) + len(self._reports) < self._size:
            for channel in wait(open_channels, timeout=pause_s):
                # wait() gives back what it was given
                if not self._read(channel):  # type: ignore[arg-type]
                    open_channels.remove(channel)  # type: ignore[arg-type]  # likewise
            now = time.monotonic()
            if now >= next_follow:
                next_follow = now + _POLL_S
                self._follow_outputs()
                self._progress.update(len(self._results), self._doing)
                if self._options.allows is not None and not self._options.allows(self._running()):
                    break
            if now >= next_roll_call:
                next_roll_call = now + _LOST_S
                self._report_lost_ranks()
            pause_s = self._watch_for_stuck_ranks(now)
            if self._verdict is not None:
                grace_ends = grace_ends or now + WAKE_S
                if all(rank in self._reports for rank in self._verdict.waiting):
                    break
                if now > grace_ends and not self._reports and self._is_caught(self._verdict):
                    self._set_aside(self._verdict)
                    grace_ends = None
            if self._reports and grace_ends is None:
                grace_ends = now + GRACE_S
            if len(self._pids) < self._size and not self._reports and now > started + START_S:
                break
            if (deadline is not None and now > deadline) or (
                grace_ends is not None and now > grace_ends
            ):
                break

    def _is_caught(self, verdict: Verdict) -> bool:
        """Returns whether all waits of a verdict are over.

        By its error or, in C++, by torch's; and ended nothing as far as is known.
        """
        left = self._find_stuck()
        over = bool(verdict.waiting) and all(
            rank in self._woken or not left[rank] for rank in verdict.waiting
        )
        return over and self._was_raised(verdict)

    def _was_raised(self, verdict: Verdict) -> bool:
        """Returns whether anything was raised that a program could catch.

        Gloo completes most operations whose sides disagree without a word, so ranks may be gone
        from there before they are woken.
        """
        if self._woken or error_of_kind(verdict.diagnosis.kind) is not MessageMismatch:
            return True
        parts = (PartReader(self._ranks.directory, rank) for rank in verdict.waiting)
        return any((part.read_all()["status"] == ERROR).any() for part in parts)

    def _find_stuck(self) -> list[list[int]]:
        """Returns by rank the slots of what it waited for at the verdict, and has not left."""
        heads = self._records.look(to_end=True)
        return [
            [slot for slot in self._stuck_in[rank] if slot in head.awaited]
            for rank, head in enumerate(heads)
        ]

    def _has_gone_on(self, verdict: Verdict) -> bool:
        """Tells whether the program ended by itself after a verdict that it caught.

        All ranks returned, or got over a peer and failed.
        """
        survived = verdict.diagnosis.kind in LOST_PEERS
        failed = [
            report
            for report in self._reports.values()
            if report.echo == OWN and report.error != "SystemExit"
        ]
        return len(self._results) == self._size or (
            survived and len(failed) == len(self._reports) > 0
        )

    def _set_aside(self, verdict: Verdict) -> None:
        """Lets the run go on after a verdict whose error the program has caught."""
        self._caught.append(verdict)
        self._verdict = self._given_up_ns = None
        left = self._find_stuck()
        for rank in verdict.waiting:
            self._say(rank, (OVER, left[rank]))
        self._woken.clear()
        clear_verdict(self._ranks.directory)

    def _settle(self) -> None:
        """Sets aside a verdict that has ended no rank; takes one up again that did so later."""
        if (
            self._verdict is not None
            and self._is_caught(self._verdict)
            and self._has_gone_on(self._verdict)
        ):
            self._set_aside(self._verdict)
        elif (
            self._verdict is None
            and self._caught
            and self._reports
            and all(report.is_consequence for report in self._reports.values())
        ):
            self._verdict = self._caught.pop()
            self._given_up_ns = self._verdict.at_ns

    def _watch_for_stuck_ranks(self, now: float) -> float:
        """Looks for ranks that can never continue, if a look is due, and wakes them.

        Returns how long to wait before the next call.
        """
        if self._watcher is None or self._verdict is not None or self._reports:
            return _POLL_S
        if len(self._loaded) < self._size:
            self._next_look = now + self._watcher.pause_s
        elif now >= self._next_look:
            self._verdict = self._watcher.look(
                ["exited" if rank in self._results else "running" for rank in range(self._size)]
            )
            self._next_look = now + self._watcher.pause_s
            if self._verdict is not None:
                self._given_up_ns = self._verdict.at_ns
                self._stuck_in = [head.awaited for head in self._records.look()]
                write_verdict(self._ranks.directory, self._verdict)
                for rank in self._verdict.waiting:
                    self._say(rank, WAKE)
        return min(_POLL_S, max(self._next_look - now, 0.0))

    def _error_of(self, diagnosis: Diagnosis, more: str) -> RingError:
        """Makes the error that a diagnosis stands for; ends the run."""
        trace = self._end_early()
        if trace is not None:
            diagnosis = tell_partings(diagnosis, until(trace.events, trace.metadata["given_up_ns"]))
        error = error_of_kind(diagnosis.kind)(f"{diagnosis}{more}")
        if isinstance(error, RankFailed):
            error.rank = diagnosis.findings[0].ranks[0]
        error.trace, error.diagnosis = trace, replace(diagnosis, trace=trace)
        return error

    def _find_mismatch(self) -> Diagnosis | None:
        """Returns what disagrees in all that was recorded, if nobody has ended the run for it."""
        if self._ranks.kind.comm_device != "cpu" or len(self._loaded) < self._size:
            return None
        self._records.look(to_end=True)
        if len(self._results) < self._size:
            self._records.look()  # of what was read twice it is known whether its thread went on
        found = self._records.find_mismatch({*self._results, *self._reports})
        gone = {**dict.fromkeys(self._results, "exited"), **dict.fromkeys(self._reports, "failed")}
        return found and replace(
            self._records.blame(found),
            states=tuple(gone.get(rank, "running") for rank in range(self._size)),
        )

    def _explained(self, error: _Error) -> _Error:
        """Adds to an error what was recorded until then, and what that explains."""
        error.trace = self._end_early()
        if error.trace is not None and (found := explain(error.trace)).findings:
            error.diagnosis = found
            lost = all(report.is_consequence for report in self._reports.values()) and bool(
                error.diagnosis.edges
            )
            # no report says why, or a limit ended it
            if lost or not self._reports or error.diagnosis.kind == "stalled":
                error.args = (f"{error}\n{indent(str(error.diagnosis))}",)
            first, before = found.findings[0], ""
            if first.end is not None and first.end.how == IN_THREAD and self._reports:
                before = f"\n  after {first.message.removesuffix('.')}"
            error.args = (f"{error}{before}{self._last_of_the_dead(error.trace)}",)
        return error

    def _last_of_the_dead(self, trace: Trace) -> str:
        """Says what ranks that died without an exception had posted last.

        No traceback tells where they were.
        """
        events, said = trace.events, ""
        for rank in (rank for rank, report in self._reports.items() if not report.error):
            for event in np.flatnonzero((events.rank == rank) & (events.kind <= COLLECTIVE))[
                -1:
            ].tolist():
                said += f"\n  the last that rank {rank} posted was {operation_of(events, event)}"
        return said

    def _doing(self) -> str:
        return self._options.doing(self._ranks.directory) if self._options.doing is not None else ""

    def _read(self, channel: Connection) -> bool:
        """Takes one message of a rank; False when there will be no more."""
        rank = self._rank_of[id(channel)]
        try:
            what, value = channel.recv()
        except (EOFError, OSError):
            # mpirun ends all ranks with one that a signal has ended
            ended = bool(self._reports) and self._ranks.kind.backend == "mpi"
            if rank not in self._results and rank not in self._reports and not ended:
                self._report_death(rank)
            return False
        if what == "ready":
            self._pids[rank] = value
        elif what == "loaded":
            self._loaded[rank] = value
            if len(self._loaded) == self._size:
                self._start_ns, self._start_unix_ns = time.monotonic_ns(), time.time_ns()
                self._send("go")
        elif what == "threads" and self._watcher is not None:
            self._watcher.hear(rank, value)
        elif what == "woken":
            (self._woken.add if value else self._woken.discard)(rank)
        elif what == "where":
            self._places[rank] = value
        elif what == "result":
            self._results[rank] = value
        elif what == "failed":
            self._reports[rank] = rename_files(value, name_cells(self._job.lines))
        return True

    def _report_death(self, rank: int) -> None:
        code, at_ns = self._ranks.exit_status(rank)
        self._follow_outputs(last=True)
        crash = self._ranks.config.for_rank(rank).crash_file
        stack = crash.read_text(errors="replace") if crash.exists() else ""
        self._reports[rank] = rename_files(
            report_death(rank, code, at_ns, self._outputs[rank].text, stack),
            name_cells(self._job.lines),
        )

    def _running(self) -> list[int]:
        """Returns the processes of the ranks that have neither returned nor failed."""
        return [
            pid
            for rank, pid in self._pids.items()
            if rank not in self._results and rank not in self._reports
        ]

    def _report_lost_ranks(self) -> None:
        """Reports ranks that were dead at the last look already.

        Their fork server is stopped or stuck, and does not say so.
        """
        left = (
            self._pids.keys() - self._results.keys() - self._reports.keys() if has_proc() else set()
        )
        dead = {
            rank
            for rank in left
            if (process := look_at(self._pids[rank])) is None or process.state == "Z"
        }
        for rank in sorted(dead & self._dead):
            self._report_death(rank)
        self._dead = dead

    def _follow_outputs(self, *, last: bool = False) -> None:
        for output in self._outputs:
            output.follow(last=last)

    def _startup_error(self) -> RingError | None:
        """Returns what the fork server printed, if no rank ever started."""
        if self._loaded or any(report.error for report in self._reports.values()):
            return None
        text = self._ranks.startup_errors.strip()
        return RingError(f"ranks must be startable, got:\n{text}") if text else None

    def _end_early(self) -> Trace | None:
        """Ends all ranks and returns what they had recorded in their files.

        None where no rank had begun to.
        """
        self._given_up_ns = self._given_up_ns or time.monotonic_ns()
        if self._verdict is None:
            self._look_at_the_rest()
        self._ranks.kill()
        self._ranks.wait_for_end()
        results = self._read_results()
        try:
            return self._make_trace(results, complete=False)
        except RingError:
            return None

    def _look_at_the_rest(self) -> None:
        """Finds out what the ranks are doing that are still running."""
        left = [
            rank for rank in self._pids if rank not in self._results and rank not in self._reports
        ]
        found = {
            rank: process
            for rank in left
            if (process := look_at(self._pids[rank])) is not None and process.state not in "ZX"
        }
        self._processes = {rank: process.doing for rank, process in found.items()}
        asked = {rank for rank, doing in self._processes.items() if doing != "stopped"}
        for rank in asked:
            self._say(rank, WHERE)
        channels = [self._ranks.channels[rank] for rank in asked]
        deadline = time.monotonic() + ANSWER_S
        while (
            asked - self._places.keys() and channels and (left_s := deadline - time.monotonic()) > 0
        ):
            for channel in wait(channels, timeout=left_s):
                # wait() gives back what it was given
                if not self._read(channel):  # type: ignore[arg-type]
                    channels.remove(channel)  # type: ignore[arg-type]  # likewise

    def _read_results(self) -> list[Any]:
        """Returns what the workers returned, None for those that did not."""
        ranks = ((rank, self._results.get(rank)) for rank in range(self._size))
        return [
            spans and read_result(self._ranks.config.for_rank(rank).result_file, spans)
            for rank, spans in ranks
        ]

    def _make_trace(self, results: list[Any], *, complete: bool) -> Trace:
        self._follow_outputs(last=True)
        events, facts = read_parts(
            self._ranks.directory, start_ns=self._start_ns, world_size=self._size
        )
        cells, tables = name_cells(events.tables.files), events.tables
        files, labels = (
            (rename_file(name, cells) for name in tables.files),
            (rename_places(label, cells) for label in tables.labels),
        )
        events = replace(events, tables=tables._replace(files=tuple(files), labels=tuple(labels)))
        metadata = {**self._metadata(), **facts, "complete": complete and facts["complete"]}
        metadata["notes"] = list(facts.get("notes", []))
        if (
            set(self._loaded.values()) == {1}
            and self._size >= (os.cpu_count() or 1)
            and "OMP_NUM_THREADS" not in self._job.environ
        ):
            metadata["notes"].append(
                "one torch thread per rank, since there are at least as many ranks as processors"
            )
        metadata["ends"], metadata["end_ns"] = self._ends(), time.monotonic_ns() - self._start_ns
        # ending ranks takes time, in which nobody waits for anything
        if self._given_up_ns is not None:
            metadata["given_up_ns"] = self._given_up_ns - self._start_ns
        if self._caught:
            metadata["caught"] = [self._describe_caught(verdict) for verdict in self._caught]
        if self._verdict is not None and not self._verdict.proved:
            # nothing was on its way any more, as far as anybody can tell
            metadata["at_rest"] = True
        return Trace(
            events, metadata, results=results, output=[output.text for output in self._outputs]
        )

    def _describe_caught(self, verdict: Verdict) -> dict[str, Any]:
        """Says for ``explain`` what a verdict was whose error the program caught."""
        one = verdict.diagnosis.findings[0]
        said = {
            "kind": one.kind,
            "ranks": list(one.ranks),
            "message": one.message,
            "hint": one.hint,
        }
        return {**said, "at_ns": verdict.at_ns - self._start_ns}

    def _metadata(self) -> dict[str, Any]:
        kind = self._ranks.kind
        pairs = (
            [(rank, (rank + 1) % self._size) for rank in range(self._size)]
            if kind.ring and self._size > 1
            else []
        )
        backend = kind.backend or ("nccl" if kind.comm_device == "gpu" else "gloo")
        return {
            **provenance.measured_run(self._size, backend, self._start_unix_ns),
            "run_id": self._run_id,
            "ring_groups": [
                [f"ring:{source}>{target}", [source, target]] for source, target in pairs
            ],
        }

    def _ends(self) -> list[dict[str, Any]]:
        """Says for ``explain`` how each rank ended, or what it was doing when it was ended.

        After a verdict, how it stood then.
        """
        gone, reports = list(self._results), list(self._reports.values())
        woken: list[dict[str, Any]] = []
        # what they did once they were woken does not say why
        if (verdict := self._verdict) is not None:
            woken = [
                end
                for end in verdict.ends
                if not (end["rank"] in self._reports and self._reports[end["rank"]].waited)
            ]
            gone = [rank for rank in gone if verdict.diagnosis.states[rank] == "exited"]
            reports = [
                r
                for r in reports
                if r.waited or (r.at_ns <= verdict.at_ns and r.rank not in verdict.waiting)
            ]
        returned = [
            {"rank": rank, "state": "exited", "about": "has returned from its worker", "error": ""}
            for rank in gone
        ]
        failed = [
            {**describe_end(report), "at_ns": report.at_ns - self._start_ns} for report in reports
        ]
        returned += woken
        known = {end["rank"] for end in (*returned, *failed)}
        others = [
            describe_unfinished(rank, doing, self._places.get(rank))
            for rank, doing in self._processes.items()
            if rank not in known
        ]
        return sorted([*returned, *failed, *others], key=lambda end: int(end["rank"]))
