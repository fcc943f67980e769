"""Runs a worker on simulated ranks, in a separate process, and creates the trace.

``ringsim.simulator.api`` starts the process, which calls ``simulate_here``.
"""

from __future__ import annotations

import builtins
import functools
import gc
import os
import pickle
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NoReturn, TextIO

import torch

from ringsim.comm.checks import Attempt
from ringsim.comm.numbering import COLLECTIVE_NAMES, RECV_NAMES, SEND_NAMES
from ringsim.comm.program_spans import find_pipelining, make_replacements, make_stage_replacements
from ringsim.comm.torch_hooks import put
from ringsim.compute_costs import PostingCosts
from ringsim.diagnose.explain import explain
from ringsim.diagnose.failure import (
    GRACE_S,
    Report,
    call_to_end,
    describe_end,
    error_of_kind,
    impose,
    make_error,
    place_text,
    raised_where,
    rename_files,
    report_death,
    report_exception,
)
from ringsim.diagnose.parting import tell_partings
from ringsim.diagnose.snapshot import Snapshot, read_ends, snapshot_of_events
from ringsim.diagnose.variables import describe_error
from ringsim.diagnose.verdict import judge, waiting_text, waits_text
from ringsim.errors import RingError
from ringsim.faults import fails_at, jitter_of, slowed_by
from ringsim.launch.process import Process
from ringsim.launch.rank import launcher_variables
from ringsim.launch.results import describe_unpicklable
from ringsim.provenance import note_doubts
from ringsim.ring import Ring
from ringsim.ring.packing import dumps
from ringsim.ring.pairs import all_pairs, list_groups
from ringsim.ring.printing import Quiet, make_print
from ringsim.simulator.clock import Clock, Ended, Rank
from ringsim.simulator.environment import RankEnvironment, RankSignals
from ringsim.simulator.isolation import Isolation
from ringsim.simulator.links import SharedCores, make_links
from ringsim.simulator.point_to_point import make_matcher
from ringsim.simulator.rank import Shared, SimulatedRank
from ringsim.simulator.settings import Settings
from ringsim.simulator.stacks import STACKS
from ringsim.simulator.watchdog import watch
from ringsim.simulator.world import Worlds
from ringsim.state import RankState, enter_rank, get_state, simulated_states
from ringsim.traces.cells import rename_events, rename_places
from ringsim.traces.events import NONE, OP_CODES, OP_NAMES
from ringsim.traces.findings import Diagnosis, Edge, Finding, Operation, lines_text
from ringsim.traces.frames import current_frames
from ringsim.traces.recorder import Recorder
from ringsim.traces.sources import attach_sources
from ringsim.traces.value import Trace

_PORT = 29_500  # a ring has a port, although no process listens on this one
_SHOWN = 4  # an error shows the lines of at most this many ranks
_MOST_REFUSALS = 1000  # a rank that catches every error is ended after this many
_COLLECT_AFTER = 10_000  # new objects, most of which ranks keep on their stacks
_NAMES = {"isend": SEND_NAMES, "irecv": RECV_NAMES}
_TICK_S = 1e-9  # the unit of the times in traces


@dataclass(frozen=True)
class Outcome:
    """The outcome of a simulation.

    Attributes:
        trace: the trace of the simulation.
        error: the error that ended the simulation, or None.
        diagnosis: the reason why the ranks of an interrupted simulation wait, or None.
        more: further facts, depending on the kind of simulation.
    """

    trace: Trace
    error: BaseException | None = None
    diagnosis: Diagnosis | None = None
    more: Any = None

    def end(self) -> Trace:
        """Returns the trace, or raises the error."""
        if self.error is not None:
            raise self.error
        return self.trace


def begin(kind: Callable[..., Any], process: Process, *run: Any) -> Any:
    """Returns a simulation in this process, which must run nothing else afterwards.

    Args:
        kind: the kind of simulation.
        process: this process.
        run: the arguments of the simulation.
    """
    _pin_to_one_core()
    gc.freeze()  # the garbage collector need not scan the existing objects again and again
    gc.set_threshold(_COLLECT_AFTER, *gc.get_threshold()[1:])
    simulation = kind(*run)
    simulation.process, process.hand_over = process, simulation.interrupt
    return simulation


def run_in(kind: Callable[..., Any], process: Process, *run: Any) -> Any:
    """Runs a worker on simulated ranks in this process, and returns the outcome; see ``begin``."""
    return begin(kind, process, *run).finish()


def _pin_to_one_core() -> None:
    """Pins all ranks to one core, where switches between them are cheaper.

    This costs nothing, because ranks run one at a time. A thread with the batch policy does not
    preempt the running thread as soon as it is woken. So a rank that passes on the baton reaches
    its own wait first, which takes one switch instead of three.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {random.SystemRandom().choice(cores)})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)


class _Outputs:
    """Collects simulated ranks' output by rank, and shows it like the output of real ranks.

    An object of this class replaces ``sys.stdout`` and ``sys.stderr``, and has the attributes of
    the process's own output, which is a file.
    """

    def __init__(self, clock: Clock, world_size: int) -> None:
        self._clock = clock
        self.shown: TextIO = sys.stdout
        self._kept: list[list[str]] = [[] for _ in range(world_size)]
        self._lines: dict[int, str] = {}  # the unfinished line of each rank

    def write(self, text: str) -> int:
        """Keeps the running rank's output, and shows its complete lines."""
        rank = self._clock.current.number
        if rank < 0:
            return self.shown.write(text)
        self._kept[rank].append(text)
        *lines, self._lines[rank] = (self._lines.get(rank, "") + text).split("\n")
        for line in lines:
            self.shown.write(f"[rank {rank}] {line}\n")
        return len(text)

    def hide(self, text: str) -> None:
        """Keeps output that print suppression hides, without showing it."""
        self._kept[self._clock.current.number].append(text)

    def finish(self) -> None:
        """Shows the last, unfinished lines."""
        for rank, line in sorted(self._lines.items()):
            if line:
                self.shown.write(f"[rank {rank}] {line}\n")
        self._lines.clear()

    def list(self) -> list[str]:
        """Returns the output so far, by rank."""
        return ["".join(kept) for kept in self._kept]

    def clear(self) -> None:
        """Forgets the output so far."""
        for kept in self._kept:
            kept.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.shown, name)


class _MeasuringRecorder(Recorder):
    """A recorder that charges ranks for computing before a span begins and before it ends."""

    clock: Clock

    def span_begin(self, name: str) -> int | None:
        self.clock.pay()
        return super().span_begin(name)

    def span_end(self, slot: int, *, failed: bool = False) -> None:
        self.clock.pay()
        super().span_end(slot, failed=failed)


def _make_recorder(clock: Clock, world_size: int) -> Recorder:
    kind = _MeasuringRecorder if clock.measures else Recorder
    recorder = kind(None, 0, world_size, now=lambda: clock.now_ns, who=lambda: clock.current.number)
    if isinstance(recorder, _MeasuringRecorder):
        recorder.clock = clock
    recorder.sites.declare_library(
        torch.__path__[0], f"{torch.__path__[0]}/distributed/distributed_c10d.py"
    )
    return recorder


class Simulation:
    """One run of a worker on simulated ranks.

    Args:
        packed: the worker and its arguments, pickled.
        settings: the settings of the simulation.
        cells: the names of notebook cells, by file.
    """

    process: Process
    _debug = False  # whether an error keeps the variables of ranks
    # called on the rank that is about to post an operation
    _on_operation: Callable[[Attempt], None] | None = None

    def __init__(self, packed: bytes, settings: Settings, cells: Mapping[str, str]) -> None:
        self._settings = settings
        self._size = size = settings.world_size
        self._isolation = Isolation(settings.seed)
        self._clock = clock = Clock(
            self._isolation, STACKS[settings.stacks], measures=settings.measures
        )
        self._recorder = recorder = _make_recorder(clock, size)
        links = make_links(clock, settings)
        clock.cores = links.cores if isinstance(links, SharedCores) else None
        costs = settings.compute
        self._costs = costs if isinstance(costs, PostingCosts) else None
        matcher = make_matcher(settings.semantics, clock, links)
        clock.in_order = not matcher.by_tag
        self._shared = Shared(clock, recorder, settings.record, links, matcher, self._costs)
        self._shared.on_operation = self._on_operation
        self._worlds = Worlds(self._shared, size, self._isolation)
        self._ranks = [self._make_rank(number) for number in range(size)]
        self._outputs = _Outputs(clock, size)
        clock.give_up = self._report_wait
        self._begin(packed, cells)

    def _begin(self, packed: bytes, cells: Mapping[str, str]) -> None:
        self._packed, self._cells = packed, cells
        self._begin_slot = self._recorder.bookmark()
        self._results: list[Any] = [None] * self._size
        self._returned: set[int] = set()
        self._reports: list[Report] = []
        self._variables: dict[int, str] = {}  # by rank
        self._stuck: set[int] = set()  # the ranks that had to be ended
        self._given_up_ns: int | None = None  # the time at which they were ended

    def finish(self) -> Outcome:
        """Runs the simulation to its end, and returns the outcome."""
        self._prepare_process()
        return self._run()

    def _run(self) -> Outcome:
        with simulated_states():
            stop = watch(self._clock)
            self._clock.run(self._ranks, self._live)
            error = self._judge()
            stop()
        if error is None and self._reports:
            reports = [rename_files(report, self._cells) for report in self._reports]
            error = make_error(reports, self._size, [])
            error.trace = self._make_trace(complete=False)
            if (found := explain(error.trace)).findings:
                error.diagnosis = found
        if error is not None:
            error.variables = self._variables
            return Outcome(error.trace, error)
        return Outcome(self._make_trace(complete=True))

    def interrupt(self) -> Outcome:
        """Returns the outcome so far. A different thread calls this method."""
        trace = self._make_trace(complete=False)
        found = explain(trace)
        return Outcome(trace, None, found if found.findings else None)

    def _report_wait(self, reason: str) -> None:
        """Ends the run because a rank can never give way. A different thread calls this method."""
        error = RingError(reason, trace=self._make_trace(complete=False))
        self.process.finish(Outcome(error.trace, error))

    def _prepare_process(self) -> None:
        """Replaces process-wide objects that must differ between ranks."""
        RankEnvironment(os.environ, self._clock).install()
        RankSignals(self._clock, self._die).install()
        if self._settings.record:
            put(make_replacements(self._recorder, lambda: None))
            self._shared.on_new_kind = self._look_for_pipelining

        def hides() -> bool:
            quiet = get_state().undo_print
            return isinstance(quiet, Quiet) and quiet.rank != 0

        builtins.print = make_print(builtins.print, hides)
        outputs: Any = self._outputs  # has all the file methods that print needs
        sys.stdout = sys.stderr = outputs

    def _look_for_pipelining(self) -> None:
        """Makes torch's pipeline stages record spans if the program has imported them."""
        schedules = find_pipelining()
        if schedules is not None:
            self._shared.on_new_kind = lambda: None
            put(make_stage_replacements(schedules))

    def _make_rank(self, number: int) -> SimulatedRank:
        settings = self._settings
        fails = fails_at(settings.inject, number)
        return SimulatedRank(self._shared, number, settings.seed + number, fails)

    def _live(self, rank: SimulatedRank) -> None:
        """Runs the worker on a rank."""
        try:
            result = call_to_end(self._load(rank))
            if self._clock.measures:
                self._clock.pay()
            self._results[rank.number] = _pack_result(result, rank)
            self._returned.add(rank.number)
        except BaseException as error:
            if self._debug:
                text = describe_error(error)
                self._variables[rank.number] = rename_places(text, self._cells)
            if isinstance(error, Ended):
                return
            self._report(report_exception(rank.number, error, self._clock.now_ns))

    def _report(self, report: Report) -> None:
        """Keeps the report of a failed rank. The first failure ends the run after a while."""
        if not self._reports:
            self._clock.until_s = self._clock.now + GRACE_S
        self._reports.append(report)

    def _load(self, rank: SimulatedRank) -> Callable[[], Any]:
        """Prepares a rank, and returns the function that it calls."""
        self._enter(rank)
        worker, args, kwargs = pickle.loads(self._packed)
        return functools.partial(worker, *args, **kwargs)

    def _enter(self, rank: SimulatedRank) -> None:
        """Gives the calling rank its state, groups and variables."""
        enter_rank(self._make_state(rank))
        self._worlds.join(rank)
        os.environ.update(launcher_variables(rank.number, self._size, _PORT))

    def _die(self, code: int) -> NoReturn:
        """Ends the calling rank as its process would end, without unwinding the stack.

        Args:
            code: the exit code, or the negative number of a signal.
        """
        clock, rank = self._clock, self._clock.current
        stack = "".join(
            f'File "{place.filename}", line {place.lineno} in {place.name}\n'
            for place in reversed(traceback.extract_stack())
        )
        self._report(report_death(rank.number, code, clock.now_ns, "", stack))
        clock.leave(rank)
        rank.wait_for_baton()
        raise AssertionError  # the rank never gets the baton again

    def _make_ring(self, number: int) -> Ring:
        size, pairs = self._size, self._worlds.pairs
        return Ring(
            number,
            size,
            (number - 1) % size,
            (number + 1) % size,
            self._worlds.ranks,
            pairs[number - 1] if pairs else None,
            pairs[number] if pairs else None,
            local_rank=number,
            port=_PORT,
            in_order=self._clock.in_order,
        )

    def _make_state(self, rank: SimulatedRank) -> RankState:
        number, settings = rank.number, self._settings
        inject = settings.inject
        costs = self._costs
        return RankState(
            ring=self._make_ring(number),
            recorder=self._recorder if settings.record else None,
            hidden_output=self._outputs.hide,
            undo_print=Quiet(number),
            clock=self._clock,
            slowdown=slowed_by(inject, number),
            jitter=jitter_of(inject, number),
            costs=None if self._clock.measures else settings.compute,
            sleep_s=costs.sleep_s if costs is not None else 0.0,
            around_s=costs.around_s if costs is not None else 0.0,
        )

    # -- the end

    def _judge(self) -> RingError | None:
        """Ends the ranks that can never continue, and returns an error with the reason.

        The result is None if there are no such ranks, or if a different rank has already failed.
        """
        over = self._returned | {report.rank for report in self._reports}
        stuck = [rank for rank in self._ranks if rank.number not in over]
        if not stuck:
            return None
        if self._reports:
            self._give_up(stuck)
            self._end(stuck)
            return None
        self._write_waiting()
        events = self._recorder.read(since=self._begin_slot)
        ends = read_ends({"ends": self._ends()}, self._size)
        snapshot = snapshot_of_events(events, self._size, ends, end_ns=self._clock.now_ns).settle()
        diagnosis = judge(snapshot)
        if not diagnosis.findings:  # both sides of the awaited operations are posted
            found = _judge_order(snapshot, {rank.number: self._find_place(rank) for rank in stuck})
            edges = tuple(
                Edge(one.rank, one.peer, one) for one in found.operations if one.peer >= 0
            )
            diagnosis = replace(diagnosis, findings=(found,), edges=edges)
        diagnosis = tell_partings(diagnosis, events)
        text = str(diagnosis)
        self._give_up(stuck)
        make_verdict = functools.partial(impose, diagnosis.kind, text)
        for rank in stuck:
            rank.refuse(make_verdict, _MOST_REFUSALS)
        for rank in stuck:
            for _ in range(_MOST_REFUSALS):  # a rank may catch the error and wait again
                if rank.ended:
                    break
                self._clock.throw(rank, make_verdict())
        self._end(stuck)
        if any(report.waited for report in self._reports):
            return None
        reports = {report.rank: report for report in self._reports}
        shown = diagnosis.findings[0].ranks[:_SHOWN]
        text += "".join(raised_where(reports[rank]) for rank in shown if rank in reports)
        trace = self._make_trace(complete=False)
        kind = error_of_kind(diagnosis.kind)
        return kind(text, trace=trace, diagnosis=replace(diagnosis, trace=trace))

    def _describe(self, attempt: Attempt) -> str:
        """Describes the operation that the running rank is about to post."""
        recorder = self._recorder
        names = _NAMES.get(attempt.op, COLLECTIVE_NAMES)
        _, (code, _) = recorder.sites.locate(OP_CODES[attempt.op], names)
        tag = NONE if attempt.tag is None else attempt.tag
        group = recorder.groups[attempt.group].name
        return f"{Operation(NONE, OP_NAMES[code], attempt.peer, tag, group)} at {self._here()}"

    def _here(self) -> str:
        """Returns the file and line in the program at which the running rank is."""
        return rename_places(self._find_place(self._clock.current), self._cells)

    def _find_place(self, rank: Rank) -> str:
        """Returns the file and line in the program at which a rank is waiting."""
        frame = self._recorder.sites.find(rank.stack.find_frame(current_frames()))
        return "" if frame is None else place_text((frame.f_code.co_filename, frame.f_lineno))

    def _give_up(self, ranks: Sequence[SimulatedRank]) -> None:
        """Marks the ranks that are ended from now on.

        Events recorded by these ranks get later timestamps, although no time passes.
        """
        self._stuck = {rank.number for rank in ranks}
        self._given_up_ns = self._clock.now_ns
        self._clock.set(self._clock.now + _TICK_S)

    def _end(self, ranks: Sequence[SimulatedRank]) -> None:
        """Unwinds the stacks of ranks that can never continue."""
        for rank in ranks:
            self._clock.throw(rank, Ended())

    def _write_waiting(self) -> None:
        """Records the operations still waiting for their other side in a run with record=False."""
        if self._settings.record:
            return
        messages = sorted(self._shared.matcher.waiting(), key=lambda message: message.number)
        parts = [
            part
            for team in self._worlds.teams
            if team.meetings
            for met in team.meetings.open.values()
            for part in met
        ]
        parts += [part for part in self._worlds.makings if part.waiting]
        frames = current_frames()
        for each in (*messages, *parts):
            frame = each.rank.stack.find_frame(frames) if each.waiting else None
            numbers = each.group.number, each.peer, each.tag, each.kind.number
            slot = self._recorder.post_for(each.rank.number, frame, each.op, *numbers)
            if each.waiting and slot is not None:
                self._recorder.wait(slot)

    # -- the trace

    def _make_trace(self, *, complete: bool) -> Trace:
        """Creates the trace from the events recorded so far."""
        events = rename_events(self._recorder.read(since=self._begin_slot), self._cells)
        pairs = all_pairs(range(self._size)) if self._worlds.pairs else []
        metadata = {
            **self._settings.metadata,
            "ring_groups": list_groups(pairs),
            "not_recorded": [],
            "notes": self._list_notes(),
            "complete": complete,
        }
        meetings = [team.meetings for team in self._worlds.teams if team.meetings]
        algorithms: Counter[str] = sum((each.algorithms for each in meetings), Counter())
        if algorithms:
            metadata["algorithms"] = dict(sorted(algorithms.items()))
        over = all(rank.ended for rank in self._ranks)  # messages still in flight delay no rank
        metadata["ends"] = self._ends()
        metadata["end_ns"] = self._clock.ended_ns if over else self._clock.now_ns
        if self._given_up_ns is not None:
            metadata["given_up_ns"] = self._given_up_ns
        if over:
            self._outputs.finish()
        printed = self._outputs.list()
        trace = Trace(events, metadata, results=[*self._results], output=printed)
        return attach_sources(trace, self._cells)

    def _list_notes(self) -> list[str]:
        notes = [*note_doubts(getattr(self._costs, "notes", ()))]
        if not self._settings.record:
            notes.append("operations were not recorded, because record=False")
        if self._clock.measures:
            notes.append(
                "computations took the time measured on the simulating machine, so a second run "
                "will produce different times"
            )
        drawn = self._isolation.list_shared_draws()
        if drawn:
            notes.append(
                f"ranks drew random numbers from the shared streams of {' and '.join(drawn)}, "
                "through functions imported by name"
            )
        return notes

    def _ends(self) -> list[dict[str, Any]]:
        """Returns the ranks' ends, in the form that ``explain`` reads.

        Ranks that the simulation ended are left out, unless the wait held up an exception.
        """
        returned = [
            {"rank": rank, "state": "exited", "about": "has returned from its worker", "error": ""}
            for rank in self._returned
            if rank not in self._stuck
        ]
        failed = [
            {**describe_end(report), "at_ns": report.at_ns}
            for report in self._reports
            if report.rank not in self._stuck or report.waited
        ]
        return sorted([*returned, *failed], key=itemgetter("rank"))


def _judge_order(world: Snapshot, places: Mapping[int, str]) -> Finding:
    """Returns the finding for stuck ranks whose operations are posted on both sides.

    Args:
        world: the ranks, and the operations that they wait for.
        places: the line of the program where each of these ranks waits.
    """
    operations = tuple(one.operation for view in world.ranks for one in view.awaited)
    waits, ranks = waits_text(operations), tuple(sorted({each.rank for each in operations}))
    others = tuple(sorted(places.keys() - set(ranks)))  # ranks that do not wait for an operation
    if others:
        where = lines_text([f"rank {rank} waits at {places[rank]}" for rank in others])
        message = (
            f"{waiting_text(others)} for a future that no rank will complete, or a store key that "
            f"no rank will set.{where}{waits}"
        )
        hint = "Look for the rank that should complete the future or set the key."
    else:
        message = (
            f"{waiting_text(ranks)} for operations that are queued behind other operations of the "
            f"same group.{waits}"
        )
        hint = (
            "Post sends and recvs that belong together with batch_isend_irecv, or receive first on "
            "one side."
        )
    return Finding("deadlock", (*others, *ranks), operations, message, hint)


class _Packed(bytes):
    """A pickled value, which arrives in another process as the value itself."""

    def __reduce__(self) -> Any:
        return pickle.loads, (bytes(self),)


def _pack_result(result: Any, rank: SimulatedRank) -> _Packed:
    """Pickles a worker's result in its present state.

    Raises:
        TypeError: the result cannot be pickled, so a real rank could not return it either.
    """
    try:
        return _Packed(dumps(result))
    except Exception as error:
        raise TypeError(describe_unpicklable(result, error, rank.here())) from None


simulate_here = functools.partial(run_in, Simulation)
