"""``ringsim.simulate``.

A worker on a virtual clock; one run of it, from the worker to a trace, or to one error that carries
the trace.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import pickle
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from greenlet import GreenletExit

from ringsim.compute_costs import PostingCosts, check_costs
from ringsim.diagnose.explain import explain
from ringsim.diagnose.failure import (
    GRACE_S,
    Report,
    call_to_end,
    describe_end,
    error_of_kind,
    impose,
    interrupted_once,
    make_error,
    raised_where,
    report_exception,
)
from ringsim.diagnose.parting import tell_partings
from ringsim.diagnose.snapshot import Snapshot, read_ends, snapshot_of_events
from ringsim.diagnose.verdict import judge, wait_text
from ringsim.errors import (
    ArgumentError,
    Interrupted,
    RingError,
    check_duration,
    check_seed,
    check_worker,
    is_integer,
    name_ranks,
    say,
)
from ringsim.faults import Injection, check_injections, fails_at, jitter_of, slowed_by
from ringsim.link import Link, check_links
from ringsim.provenance import __version__, note_doubts
from ringsim.ring import Ring
from ringsim.ring.groups import pair_name
from ringsim.ring.packing import pack_worker
from ringsim.ring.printing import Quiet, make_print
from ringsim.simulator.clock import Clock
from ringsim.simulator.isolation import Isolation
from ringsim.simulator.links import SharedCores, make_links
from ringsim.simulator.matching import SimulatedGroup, make_matcher
from ringsim.simulator.rank import SimulatedRank, World
from ringsim.state import RankState, enter_rank, get_state, simulated_states
from ringsim.topologies import Topology
from ringsim.traces.findings import Diagnosis, Edge, Finding
from ringsim.traces.parts import name_cells, rename_file
from ringsim.traces.recorder import Recorder
from ringsim.traces.value import Trace

__all__ = ["simulate"]

_WORLD_SIZE_MAX: Final = 1_000_000
_PORT: Final = 29_500  # nobody listens there: a ring has one
_TORCH_FILE: Final = os.path.join("torch", "distributed", "distributed_c10d.py")
_SHOWN: Final = 4  # ranks whose lines an error shows
# of operations of a rank that catches what says that it can never go on; then it is ended
_MOST_REFUSALS: Final = 1000
_TICK_S: Final = 1e-9  # the unit that traces count in


def simulate(
    worker: Callable[..., Any],
    *,
    world_size: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    link: Link | Mapping[tuple[int, int], Link] | None = None,
    semantics: str = "rendezvous",
    compute: Any = None,
    topology: Topology | None = None,
    seed: int = 0,
    inject: Iterable[Injection] = (),
    record: bool = True,
) -> Trace:
    """Runs a function on simulated ranks, on a virtual clock.

    The function is that of ``ringsim.trace``: it finds itself with ``ringsim.current_ring()``,
    talks with ``ringsim.comm``, and computes for real. But all ranks live in this process, take
    turns, and their messages take as long as a model says. So there may be thousands of them, and
    the same call gives the same trace, to the last byte.

    Computing takes no time, apart from ``ringsim.compute`` and what ``compute`` charges for.
    ``torch.distributed`` itself knows nothing of simulated ranks: take the same names from
    ``ringsim.comm``.

    Args:
        worker: the function.
        world_size: number of ranks, 1 or more.
        args: positional arguments of the worker; each rank gets a copy.
        kwargs: keyword arguments, likewise.
        link: what a message costs: one for all pairs of ranks, or one for each ordered pair (src,
            dst) that talks. A busy link delays the next message.
        semantics: when messages leave. "rendezvous": a send waits for its recv, as on Gloo.
            "buffered(65536)": up to so many bytes it does not, as on MPI; "buffered": never.
            "grouped": a rank's messages on a group go one after the other, and those of
            ``batch_isend_irecv`` together, as on NCCL.
        compute: what computing costs: ``ringsim.FlopCosts``, or what ``ringsim.calibrate`` found,
            which also has what posting a message costs, and whose doubts the trace repeats;
            "measured": what it takes here, which no other run repeats, and the trace says so.
        topology: which links there are, instead of ``link``, where pairs of ranks share some: see
            ``ringsim.topologies``.
        seed: rank r seeds torch, numpy and random with ``seed + r``.
        inject: what goes wrong: ``Slow``, ``Degrade``, ``Fail``, ``Jitter``.
        record: whether to record the operations. Without, it is faster, and the trace has results
            only.

    Returns:
        The trace: ``results`` and ``output`` by rank, events, pictures.

    Raises:
        ArgumentError: an argument breaks its rule.
        RankFailed: a rank raised. The message shows the first failure; ``error.trace`` is what was
            recorded until then.
        Deadlock, PeerExited, MessageMismatch: ranks can never go on; ``error.diagnosis`` says why.
        RingError: it was called by a simulated rank.

    Example:
        >>> import torch
        >>> import ringsim
        >>> from ringsim import comm as dist
        >>> def worker():
        ...     ring = ringsim.current_ring()
        ...     token = torch.tensor([float(ring.rank)])
        ...     sending = dist.isend(token.clone(), ring.succ, group=ring.succ_group)
        ...     dist.recv(token, ring.pred, group=ring.pred_group)
        ...     sending.wait()
        ...     return token.item()
        >>> trace = simulate(
        ...     worker, world_size=3, link=ringsim.Link(alpha_s=1e-3, beta_s_per_byte=1e-9)
        ... )
        >>> trace.results, trace.makespan_s
        ([2.0, 0.0, 1.0], 0.001000004)
    """
    check_worker(worker)
    world_size, seed = _check_settings(world_size, seed, link, record=record)
    check_costs(None if _is_measured(compute) else compute)
    injections = check_injections(inject, world_size)
    packed = pack_worker(worker, args, kwargs)
    metadata = {
        "format": 1,
        "source": "simulated",
        "world_size": world_size,
        "backend": f"virtual clock, {semantics}",
        "comm_device": "cpu",
        "constants": _list_constants(semantics, seed, link, topology, compute, injections),
        "versions": {"ringsim": __version__},
    }
    settings = _Settings(
        world_size, link, topology, semantics, compute, seed, injections, record, metadata
    )
    with _ALONE, interrupted_once():
        return _Simulation(packed, settings).finish()


# generators of random numbers, the output and modes belong to the process: threads simulate in turn
_ALONE: Final = threading.Lock()


def _check_settings(world_size: Any, seed: Any, link: Any, *, record: Any) -> tuple[int, int]:
    """Checks what a simulation is told of its ranks and links.

    Returns ``world_size`` and ``seed`` as plain integers.
    """
    if get_state().clock is not None:
        raise RingError(
            "simulate must be called outside of simulated ranks, got a call from one. Simulate "
            "one after the other."
        )
    if not is_integer(world_size) or not 1 <= world_size <= _WORLD_SIZE_MAX:
        raise ArgumentError(
            f"world_size must be an integer from 1 to {_WORLD_SIZE_MAX:,}, got "
            f"{say(world_size)}. Say how many ranks there are."
        )
    world_size = int(world_size)
    seed = check_seed(seed, world_size)
    if not isinstance(record, bool):
        raise ArgumentError(
            f"record must be True or False, got {say(record)}. Say whether "
            "to record the operations."
        )
    if link is not None:
        check_links(link, world_size)
        for each in [link] if isinstance(link, Link) else link.values():
            check_duration("alpha_s of link", each.alpha_s)
    return world_size, seed


def _is_measured(compute: Any) -> bool:
    return isinstance(compute, str) and compute == "measured"


def _list_constants(
    semantics: str,
    seed: int,
    link: Link | Mapping[tuple[int, int], Link] | None,
    topology: Topology | None,
    compute: Any,
    injections: Sequence[Injection],
) -> dict[str, Any]:
    """Returns what a simulation was made with, for the metadata of its trace."""
    constants: dict[str, Any] = {"semantics": semantics, "seed": seed}
    if isinstance(link, Link):
        constants["links"] = {"all": _write_link(link)}
    elif link is not None:
        constants["links"] = {
            f"{src}>{dst}": _write_link(each) for (src, dst), each in link.items()
        }
    if topology is not None:
        constants["topology"] = repr(topology)
    if compute is not None:
        constants["compute"] = compute if isinstance(compute, str) else repr(compute)
    if injections:
        constants["inject"] = [repr(each) for each in injections]
    return constants


def _write_link(link: Link) -> dict[str, float]:
    return {"alpha_s": link.alpha_s, "beta_s_per_byte": link.beta_s_per_byte}


class _Outputs:
    """What simulated ranks print, kept by rank and shown as that of real ranks is.

    Stands in for ``sys.stdout`` and ``sys.stderr``.
    """

    encoding = "utf-8"
    errors = "strict"

    def __init__(self, clock: Clock, world_size: int) -> None:
        self._clock = clock
        self._shown = sys.stdout
        self._kept: list[list[str]] = [[] for _ in range(world_size)]
        self._lines: dict[int, str] = {}  # of a rank whose line has not ended

    def write(self, text: str) -> int:
        """Keeps what the rank that runs prints, and shows its whole lines."""
        rank = self._clock.current.number
        if rank < 0:
            return self._shown.write(text)
        self._kept[rank].append(text)
        *lines, self._lines[rank] = (self._lines.get(rank, "") + text).split("\n")
        for line in lines:
            self._shown.write(f"[rank {rank}] {line}\n")
        return len(text)

    def hide(self, text: str) -> None:
        """Keeps what print suppression hides."""
        self._kept[self._clock.current.number].append(text)

    def flush(self) -> None:
        """Shows at once what is to be shown."""
        self._shown.flush()

    def isatty(self) -> bool:
        """Returns False: what a rank prints goes through here first."""
        return False

    def finish(self) -> list[str]:
        """Shows the last lines that have no end; returns all that was printed, by rank."""
        for rank, line in sorted(self._lines.items()):
            if line:
                self._shown.write(f"[rank {rank}] {line}\n")
        return ["".join(kept) for kept in self._kept]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown, name)


class _MeasuringRecorder(Recorder):
    """Has ranks pay for what they computed before a span begins, and before it ends."""

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


@dataclass(frozen=True)
class _Settings:
    """How a run is simulated.

    The arguments of ``ringsim.simulate``; ``metadata`` is the trace's.
    """

    world_size: int
    link: Link | Mapping[tuple[int, int], Link] | None
    topology: Topology | None
    semantics: str
    compute: Any
    seed: int
    inject: tuple[Injection, ...]
    record: bool
    metadata: dict[str, Any]


class _Simulation:
    """One run of a worker, packed with its arguments."""

    def __init__(self, packed: bytes, settings: _Settings) -> None:
        self._packed = packed
        self._settings = settings
        self._size = size = settings.world_size
        self._isolation = Isolation(settings.seed)
        self._clock = clock = Clock(self._isolation, measures=_is_measured(settings.compute))
        self._recorder = recorder = _make_recorder(clock, size)
        everyone = tuple(range(size))
        links = make_links(
            clock,
            size,
            link=settings.link,
            topology=settings.topology,
            inject=settings.inject,
            seed=settings.seed,
        )
        clock.cores = links.cores if isinstance(links, SharedCores) else None
        everybody = SimulatedGroup(
            clock, "world", everyone, recorder.group("world", everyone), "default_pg"
        )
        self._costs = settings.compute if isinstance(settings.compute, PostingCosts) else None
        matcher = make_matcher(settings.semantics, clock, links)
        self._world = world = World(
            clock, recorder, settings.record, links, matcher, everybody, self._costs
        )
        self._ranks = [
            SimulatedRank(world, rank, settings.seed + rank, fails_at(settings.inject, rank))
            for rank in everyone
        ]
        self._pairs = self._make_pairs() if size > 1 else []
        self._outputs = _Outputs(clock, size)
        self._results: list[Any] = [None] * size
        self._returned: set[int] = set()
        self._reports: list[Report] = []
        self._stuck: frozenset[int] = frozenset()  # the ranks that had to be ended
        self._given_up_ns: int | None = None  # and when
        self._printed: list[str] = []

    def finish(self) -> Trace:
        """Sees the run through.

        Returns the trace; raises where a rank has raised, or ranks can never go on.
        """
        try:
            with self._isolation, simulated_states(), self._printing():
                self._clock.run([(rank, self._make_life(rank)) for rank in self._ranks])
                error = self._judge()
        except KeyboardInterrupt:
            raise self._explained(
                Interrupted(
                    f"the simulation was interrupted at {self._clock.now:.6g} s of virtual time."
                )
            ) from None
        if error is not None:
            raise error
        if self._reports:
            raise self._explained(make_error(self._reports, self._size, []))
        return self._make_trace(complete=True)

    def _make_pairs(self) -> list[SimulatedGroup]:
        pairs = [(rank, (rank + 1) % self._size) for rank in range(self._size)]
        return [
            SimulatedGroup(
                self._clock, pair_name(pair), pair, self._recorder.group(pair_name(pair), pair)
            )
            for pair in pairs
        ]

    def _make_life(self, rank: SimulatedRank) -> Callable[[], None]:
        """Returns what the greenlet of a rank does."""

        def live() -> None:
            enter_rank(self._make_state(rank))
            try:
                worker, args, kwargs = pickle.loads(self._packed)
                self._results[rank.number] = call_to_end(functools.partial(worker, *args, **kwargs))
                if self._clock.measures:
                    self._clock.pay()
                self._isolation.leave()
                self._returned.add(rank.number)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                if not isinstance(error, GreenletExit):
                    if not self._reports:
                        self._clock.until_s = self._clock.now + GRACE_S
                    self._reports.append(
                        report_exception(
                            rank.number, _explain_torch(error, rank), self._clock.now_ns
                        )
                    )
                with contextlib.suppress(RingError):  # the first error counts
                    self._isolation.leave()

        return live

    def _make_state(self, rank: SimulatedRank) -> RankState:
        size, number, settings = self._size, rank.number, self._settings
        inject = settings.inject
        # the types are torch's: other backends have groups of their own
        pred_group: Any = self._pairs[number - 1] if size > 1 else None
        succ_group: Any = self._pairs[number] if size > 1 else None
        recorder: Any = rank.recorder if settings.record else None
        pred, succ = (number - 1) % size, (number + 1) % size
        ring = Ring(
            number,
            size,
            pred,
            succ,
            rank.everybody.ranks,
            pred_group,
            succ_group,
            local_rank=number,
            port=_PORT,
            backend=rank,
        )
        return RankState(
            ring=ring,
            recorder=recorder,
            hidden_output=self._outputs.hide,
            undo_print=Quiet(number),
            backend=rank,
            clock=self._clock,
            slowdown=slowed_by(inject, number),
            jitter=jitter_of(inject, number),
            costs=None if self._clock.measures else settings.compute,
            sleep_s=self._costs.sleep_s if self._costs is not None else 0.0,
            around_s=self._costs.around_s if self._costs is not None else 0.0,
        )

    @contextlib.contextmanager
    def _printing(self) -> Iterator[None]:
        """Lets the ranks print each into an output of its own."""

        def hides() -> bool:
            quiet = get_state().undo_print
            return isinstance(quiet, Quiet) and quiet.rank != 0

        before, stdout, stderr = builtins.print, sys.stdout, sys.stderr
        builtins.print = make_print(before, hides)
        outputs: Any = self._outputs  # has all that print needs of a file
        sys.stdout = sys.stderr = outputs
        try:
            yield
        finally:
            builtins.print, sys.stdout, sys.stderr = before, stdout, stderr
            self._printed = self._outputs.finish()

    # -- the end

    def _judge(self) -> RingError | None:
        """Ends the ranks that can never go on, and says why they cannot.

        None where there are none, or one has failed before.
        """
        failed = {report.rank for report in self._reports}
        stuck = [
            rank
            for rank in self._ranks
            if rank.number not in self._returned and rank.number not in failed
        ]
        if not stuck:
            return None
        if failed:
            self._give_up(stuck)
            self._end(stuck)
            return None
        self._write_waiting()
        events = self._recorder.read()
        snapshot = snapshot_of_events(
            events,
            self._size,
            read_ends({"ends": self._ends()}, self._size),
            end_ns=self._clock.now_ns,
        ).settle()
        diagnosis = judge(snapshot)
        if not diagnosis.findings:  # each side of what they wait for has been posted
            diagnosis = _judge_order(snapshot, diagnosis)
        diagnosis = tell_partings(diagnosis, events)
        text = str(diagnosis)
        self._give_up(stuck)
        for rank in stuck:
            rank.refuse(lambda: impose(diagnosis.kind, text), _MOST_REFUSALS)
        for rank in stuck:
            for _ in range(_MOST_REFUSALS):  # whoever catches it and waits again gets it again
                if rank.greenlet.dead:
                    break
                self._clock.throw(rank, impose(diagnosis.kind, text))
        self._end(stuck)
        if any(report.waited for report in self._reports):
            return None
        reports = {report.rank: report for report in self._reports}
        for finding in diagnosis.findings[:1]:
            text += "".join(
                raised_where(reports[rank]) for rank in finding.ranks[:_SHOWN] if rank in reports
            )
        error = error_of_kind(diagnosis.kind)(text)
        error.trace = self._make_trace(complete=False)
        error.diagnosis = replace(diagnosis, trace=error.trace)
        return error

    def _give_up(self, ranks: Sequence[SimulatedRank]) -> None:
        """Notes which ranks are ended from now on.

        What they do about it lies later, though no time passes.
        """
        self._stuck, self._given_up_ns = (
            frozenset(rank.number for rank in ranks),
            self._clock.now_ns,
        )
        self._clock.set(self._clock.now + _TICK_S)

    def _end(self, ranks: Sequence[SimulatedRank]) -> None:
        """Takes down the stacks of ranks that will never go on."""
        for rank in ranks:
            self._clock.throw(rank, GreenletExit())

    def _write_waiting(self) -> None:
        """Writes down the operations that wait for their other side, if nothing was recorded."""
        if self._settings.record:
            return
        groups = self._groups()
        waiting = sorted(self._world.matcher.waiting(), key=lambda message: message.number)
        parts = [
            part
            for group in groups
            if group.meetings
            for met in group.meetings.open.values()
            for part in met
        ]
        parts += [part for making in self._world.made for part in making.waiting if part.waiting]
        for each in (*waiting, *parts):
            frame = each.rank.greenlet.gr_frame if each.waiting else None
            numbers = each.group.number, each.peer, each.tag, each.kind.number
            slot = self._recorder.post_for(each.rank.number, frame, each.op, *numbers)
            if each.waiting and slot is not None:
                self._recorder.wait(slot)

    def _groups(self) -> list[SimulatedGroup]:
        """Returns all groups."""
        return [self._world.everybody, *self._pairs, *(making.group for making in self._world.made)]

    def _explained(self, error: Any) -> Any:
        """Gives an error what was recorded until then.

        Also why it came to that, as far as can be told from it.
        """
        error.trace = self._make_trace(complete=False)
        if (found := explain(error.trace)).findings:
            error.diagnosis = found
        return error

    # -- the trace

    def _make_trace(self, *, complete: bool) -> Trace:
        events = self._recorder.read()
        cells = name_cells(events.tables.files)
        events = replace(
            events,
            tables=events.tables._replace(
                files=tuple(rename_file(name, cells) for name in events.tables.files)
            ),
        )
        groups = [[group.group_name, list(group.ranks)] for group in self._pairs]
        metadata = {
            **self._settings.metadata,
            "ring_groups": groups,
            "not_recorded": [],
            "notes": [],
            "complete": complete,
        }
        metadata["notes"] += note_doubts(getattr(self._costs, "notes", ()))
        if not self._settings.record:
            metadata["notes"].append("operations were not recorded: record=False")
        if self._clock.measures:
            metadata["notes"].append(
                "computing took the time of the thread that simulated it: "
                "another run gives other times"
            )
        if self._isolation.shared_draws:
            names = " and ".join(self._isolation.shared_draws)
            metadata["notes"].append(
                f"ranks drew from the streams of {names} that they share, "
                "by functions imported by name"
            )
        algorithms: Counter[str] = sum(
            (group.meetings.algorithms for group in self._groups() if group.meetings), Counter()
        )
        if algorithms:
            metadata["algorithms"] = dict(sorted(algorithms.items()))
        # what is still on its way then delays no rank
        over = all(rank.greenlet.dead for rank in self._ranks)
        metadata["ends"], metadata["end_ns"] = (
            self._ends(),
            self._clock.ended_ns if over else self._clock.now_ns,
        )
        if self._given_up_ns is not None:
            metadata["given_up_ns"] = self._given_up_ns
        return Trace(events, metadata, results=self._results, output=self._printed)

    def _ends(self) -> list[dict[str, Any]]:
        """Says how the ranks ended, for ``explain``.

        Nothing of those that were ended here, unless an exception was held up by the wait.
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
        return sorted([*returned, *failed], key=lambda end: int(end["rank"]))


def _explain_torch(error: BaseException, rank: SimulatedRank) -> BaseException:
    """Returns an error that says what to do, where ``torch.distributed`` itself was called.

    Any other error as it is.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    if (
        isinstance(error, RingError)
        or not frames
        or not frames[-1][0].f_code.co_filename.endswith(_TORCH_FILE)
    ):
        return error
    explained = RingError(
        "a simulated rank must talk with ringsim.comm, got a call of torch.distributed, which "
        f"says: {error} ({rank.here()}). "
        "Write: from ringsim import comm as dist."
    )
    explained.__cause__ = error
    return explained.with_traceback(error.__traceback__)


def _judge_order(world: Snapshot, nothing: Diagnosis) -> Diagnosis:
    """Says why ranks can never go on whose operations are posted on both sides.

    Each stands behind another of its rank.
    """
    awaited = [
        (rank, one.operation) for rank, view in enumerate(world.ranks) for one in view.awaited
    ]
    ranks = sorted({rank for rank, _ in awaited})
    waits = "; ".join(wait_text(operation) for _, operation in awaited[:_SHOWN])
    message = (
        f"{name_ranks(ranks)} wait for what stands behind something else in the order of a rank's "
        f"operations on a group: {waits}."
    )
    hint = (
        "Post the sends and recvs that belong together with batch_isend_irecv, or let one side "
        "receive first."
    )
    finding = Finding(
        "deadlock", tuple(ranks), tuple(operation for _, operation in awaited), message, hint
    )
    edges = tuple(
        Edge(rank, operation.peer, operation) for rank, operation in awaited if operation.peer >= 0
    )
    return replace(nothing, findings=(finding,), edges=edges)
