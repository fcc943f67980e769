"""Runs a job on ranks, and returns its trace or raises its error, with the recorded events."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ringsim import provenance
from ringsim.diagnose.explain import explain
from ringsim.diagnose.failure import (
    Verdict,
    describe_end,
    error_of_kind,
    indent,
    interrupted_once,
    make_error,
    raised_where,
)
from ringsim.diagnose.parting import tell_partings
from ringsim.diagnose.snapshot import operation_of, until
from ringsim.errors import Interrupted, RankFailed, RingError, RunTimeout, name_ranks
from ringsim.launch.job import Job, RankKind
from ringsim.launch.live import show_live
from ringsim.launch.protocol import Ends
from ringsim.launch.ranks import START_S, RankSet, get_launcher
from ringsim.launch.results import read_result
from ringsim.launch.supervisor import Doing, Supervisor
from ringsim.launch.supervisor import RunOptions as RunOptions
from ringsim.ring.pairs import all_pairs, list_groups
from ringsim.traces.cells import name_cells, rename_events
from ringsim.traces.findings import IN_THREAD, Diagnosis
from ringsim.traces.run_parts import read_parts
from ringsim.traces.sources import attach_sources
from ringsim.traces.value import Trace

GPU_LIMIT_S = 3600.0  # default limit of a run on GPUs, which is not watched
_SHOWN = 4  # ranks whose lines are shown in an error
_Error = TypeVar("_Error", RingError, Interrupted)


def run(job: Job, kind: RankKind, options: RunOptions) -> Trace:
    """Runs a job on ranks of the given kind.

    Returns the trace with the results and output of every rank. The function blocks until all ranks
    have finished, a rank has failed, the limit is reached, or the user interrupts the run.
    Afterwards, no rank remains except new ranks parked for the next call.

    Raises:
        RankFailed: a rank raised an error or died; ringsim errors raised by a rank keep their type.
        Deadlock, PeerExited, MessageMismatch: ranks could never have continued, see
            ``ringsim.launch.watcher``.
        RunTimeout: ``options.limit_s`` has passed.
        Interrupted: the user interrupted the run.
    """
    if options.limit_s is None and kind.comm_device == "gpu":
        options = replace(options, limit_s=GPU_LIMIT_S)
    ranks = get_launcher().get(kind, keep_at=options.keep_at)
    with interrupted_once():
        try:
            return Run(ranks, job, options).finish()
        finally:
            ranks.close()
            get_launcher().park(kind)


class Run(Supervisor):
    """One run, which ends with a trace or an error."""

    what = "run"

    def __init__(self, rank_set: RankSet, job: Job, options: RunOptions) -> None:
        super().__init__(rank_set, job, options)
        self._run_id = uuid.uuid4().hex[:12]
        if rank_set.keep:
            (rank_set.directory / "run.json").write_text(json.dumps(self._metadata()))

    def finish(self) -> Trace:
        """Runs the job to its end; returns the trace, or raises the error of the run."""
        if self.options.live:
            return show_live(self._finish, self.size)
        return self._finish(self.options.doing)

    def _finish(self, doing: Doing | None) -> Trace:
        try:
            self.watch(doing)
        except KeyboardInterrupt:
            elapsed_s = (time.monotonic_ns() - self.start_ns) / 1e9
            interrupted = Interrupted(f"the {self.what} was interrupted after {elapsed_s:.1f} s.")
            raise self._explained(interrupted) from None
        if (error := self._find_error()) is not None:
            raise error
        trace = self._make_trace(complete=True)
        # not earlier: the end of one rank breaks waits of other ranks' threads, which the trace is
        # to show
        self.dismiss()
        return trace

    def dismiss(self) -> None:
        """Ends the ranks, which have all returned."""
        self.tell_all("bye")

    # -- errors

    def _find_error(self) -> RingError | None:
        """Returns the error of the run, or None if all ranks have returned."""
        reports, verdict = self.reports, self.verdict
        if not self.rank_set.directory.is_dir():
            return self._explained(
                RingError(
                    f"the run's directory disappeared: {self.rank_set.directory}. Keep it until "
                    "the run has ended."
                )
            )
        if verdict is not None and not any(report.waited for report in reports):
            return self._error_of(verdict.diagnosis, self._quote_stuck(verdict))
        if verdict is None and (found := self._find_mismatch()) is not None:
            also = f"\n  {make_error(reports, self.size, [])}" if reports else ""
            return self._error_of(found, also)
        missing = [one.rank for one in self.ranks if one.result is None]
        if reports:
            stopped = [rank for rank in missing if self.ranks[rank].report is None]
            error = self._startup_error() or make_error(reports, self.size, stopped)
            return self._explained(error)
        return self._explained(self._name_missing(missing)) if missing else None

    def _quote_stuck(self, verdict: Verdict) -> str:
        """Returns the user's lines at which the waits of a verdict's ranks ended."""
        named = dict.fromkeys(
            rank
            for first in verdict.diagnosis.findings[:1]
            for finding in (first, *first.consequences)
            for rank in finding.ranks
        )
        reports = [self.ranks[rank].report for rank in named]
        stuck = [report for report in reports if report is not None]
        return "".join(map(raised_where, stuck[:_SHOWN]))

    def _name_missing(self, missing: Sequence[int]) -> RingError:
        """Returns the error for a run in which ranks neither returned nor failed."""
        came = sum(one.pid is not None for one in self.ranks)
        if came < self.size and (self.options.limit_s is None or self.options.limit_s > START_S):
            return RingError(
                f"only {came} of {self.size} ranks started within {START_S:g} s. Check this "
                "machine's load, and try again."
            )
        if self.late:
            return RunTimeout(
                f"{name_ranks(self.late)} of {self.size} waited in an operation for more than "
                f"timeout_s={self.options.timeout_s:g} s. Raise timeout_s, or look at error.trace "
                "to see where the ranks were."
            )
        starting = "" if self.has_begun else ", which were still starting"
        return RunTimeout(
            f"the run did not end within limit_s={self.options.limit_s:g} s: no result from ranks "
            f"{missing} of {self.size}{starting}. Raise limit_s, or look at error.trace to see "
            "where they were."
        )

    def _startup_error(self) -> RingError | None:
        """Returns an error with the output of the fork server, if no rank ever started."""
        ranks, reports = self.ranks, self.reports
        if any(one.num_threads for one in ranks) or any(report.error for report in reports):
            return None
        text = self.rank_set.startup_errors.strip()
        return RingError(f"cannot start ranks:\n{text}") if text else None

    def _find_mismatch(self) -> Diagnosis | None:
        """Returns the mismatches in all records, unless a mismatch has already ended the run."""
        if self.rank_set.kind.comm_device != "cpu" or not self.has_begun:
            return None
        ranks, records = self.ranks, self.records
        records.look(to_end=True)
        if any(one.result is None for one in ranks):
            records.look()  # a second look shows whether threads continued
        found = records.find_mismatch({one.rank for one in ranks if one.is_over})
        if found is None:
            return None
        states = tuple(
            "failed" if one.report is not None else "running" if one.result is None else "exited"
            for one in ranks
        )
        return replace(records.blame(found), states=states)

    def _error_of(self, diagnosis: Diagnosis, more: str) -> RingError:
        """Ends the run, and returns the error for a diagnosis."""
        trace = self._end_early()
        if trace is not None:
            diagnosis = tell_partings(diagnosis, until(trace.events, trace.metadata["given_up_ns"]))
        error = error_of_kind(diagnosis.kind)(f"{diagnosis}{more}")
        if isinstance(error, RankFailed):
            error.rank = diagnosis.findings[0].ranks[0]
        error.trace, error.diagnosis = trace, replace(diagnosis, trace=trace)
        error.variables = self.variables
        return error

    def _explained(self, error: _Error) -> _Error:
        """Adds the recorded trace and its diagnosis to an error."""
        error.trace = self._end_early()
        error.variables = self.variables
        if error.trace is not None and (found := explain(error.trace)).findings:
            error.diagnosis = found
            reports = self.reports
            lost = all(report.is_consequence for report in reports) and bool(found.edges)
            # no report contains the cause, or a limit ended the run
            if lost or not reports or found.kind == "stalled":
                error.args = (f"{error}\n{indent(str(found))}",)
            first, before = found.findings[0], ""
            if first.end is not None and first.end.how == IN_THREAD and reports:
                before = f"\n  after {first.message.removesuffix('.')}"
            error.args = (f"{error}{before}{self._last_of_the_dead(error.trace)}",)
        return error

    def _last_of_the_dead(self, trace: Trace) -> str:
        """Returns the last operations of the ranks that died without an exception.

        They have no traceback.
        """
        events, said = trace.events, ""
        for rank in (report.rank for report in self.reports if not report.error):
            posted = np.flatnonzero((events.rank == rank) & events.communicates)
            for event in posted[-1:].tolist():
                said += f"\n  rank {rank}'s last operation was {operation_of(events, event)}"
        return said

    # -- the trace

    def _end_early(self) -> Trace | None:
        """Ends all ranks and returns the trace of their records, or None if there are none."""
        self.end_all()
        try:
            return self._make_trace(complete=False)
        except RingError:
            return None

    def _make_trace(self, *, complete: bool) -> Trace:
        start_ns = self.start_ns
        results = [
            spans and read_result(self.rank_set.config.for_rank(rank).file("result"), spans)
            for rank, spans in enumerate(one.result for one in self.ranks)
        ]
        self.follow_outputs(last=True)
        events, facts = read_parts(self.rank_set.directory, start_ns=start_ns, world_size=self.size)
        cells = name_cells(events.tables.files)
        events = rename_events(events, cells)
        metadata = {**self._metadata(), **facts, "complete": complete and facts["complete"]}
        metadata["notes"] = [*facts.get("notes", ()), *self._note_threads()]
        metadata["ends"], metadata["end_ns"] = self._ends(), time.monotonic_ns() - start_ns
        # ending ranks takes time, which does not count as waiting
        if self.given_up_ns is not None:
            metadata["given_up_ns"] = self.given_up_ns - start_ns
        if self.caught:
            metadata["caught"] = [self._describe_caught(verdict) for verdict in self.caught]
        if self.verdict is not None and not self.verdict.proved:
            # no message was in flight, as far as is known
            metadata["at_rest"] = True
        output = [one.output.text for one in self.ranks]
        return attach_sources(Trace(events, metadata, results=results, output=output), cells)

    def _note_threads(self) -> list[str]:
        crowded = self.size >= (os.cpu_count() or 1) and "OMP_NUM_THREADS" not in self.job.environ
        loaded = {one.num_threads for one in self.ranks} - {None}
        if not crowded or loaded != {1}:
            return []
        return ["one torch thread per rank, because there are at least as many ranks as processors"]

    def _describe_caught(self, verdict: Verdict) -> dict[str, Any]:
        """Returns a verdict whose error the program caught, as metadata for ``explain``."""
        one = verdict.diagnosis.findings[0]
        return {
            "kind": one.kind,
            "ranks": list(one.ranks),
            "message": one.message,
            "hint": one.hint,
            "at_ns": verdict.at_ns - self.start_ns,
        }

    def _metadata(self) -> dict[str, Any]:
        kind = self.rank_set.kind
        backend = kind.backend or ("nccl" if kind.comm_device == "gpu" else "gloo")
        return {
            **provenance.measured_run(self.size, backend, self.start_unix_ns),
            "run_id": self._run_id,
            "ring_groups": list_groups(all_pairs(range(self.size))) if kind.ring else [],
        }

    def _ends(self) -> Ends:
        """Returns each rank's end, or its activity when it was ended, for ``explain``.

        After a verdict, these are the states at that time.
        """
        ranks, reports = self.ranks, self.reports
        gone = [one.rank for one in ranks if one.result is not None]
        ends: Ends = []
        # their activity after they were woken is not the cause
        if (verdict := self.verdict) is not None:
            waited = {report.rank for report in reports if report.waited}
            ends += [end for end in verdict.ends if end["rank"] not in waited]
            gone = [rank for rank in gone if verdict.diagnosis.states[rank] == "exited"]
            reports = [
                report
                for report in reports
                if report.waited
                or (report.at_ns <= verdict.at_ns and report.rank not in verdict.waiting)
            ]
        about = "has returned from its worker"
        ends += [{"rank": rank, "state": "exited", "about": about, "error": ""} for rank in gone]
        start_ns = self.start_ns
        ends += [{**describe_end(report), "at_ns": report.at_ns - start_ns} for report in reports]
        known = {end["rank"] for end in ends}
        ends += [end for end in self.unfinished if end["rank"] not in known]
        return sorted(ends, key=lambda end: int(end["rank"]))
