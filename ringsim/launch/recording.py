"""Implements ``with ringsim.trace(path) as recording:`` for ranks from another launcher.

Each rank writes its part into ``<path>.parts``, or under ``RINGSIM_PARTS`` on its own host. At the
end of the block, it announces in the default group's store or in a file that its part is complete.
Rank 0 fetches the parts from other hosts over the store (``gathering``) and merges all parts into
one file (``merging``). The process groups are not used: recording adds no message, and inside the
block no rank waits for another.

A recording is in one phase at a time::

    phase      leads to   by
    -----      --------   --
    NEW        RECORDING  entering the block
    RECORDING  LEFT       leaving it
    LEFT       SAVED      writing the file, on rank 0
    LEFT       RECORDING  entering it again
    SAVED      RECORDING  entering it again
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from ringsim import provenance
from ringsim.comm import torch_hooks
from ringsim.comm.log import interrupt_log, resume_log
from ringsim.diagnose.failure import clear_verdict, error_of_kind, note_failed_threads, read_verdict
from ringsim.diagnose.parting import tell_partings
from ringsim.errors import RingError
from ringsim.launch.block import (
    BlockStore,
    Patience,
    enter_block,
    find_place,
    lasts,
    place_of,
    store_port,
)
from ringsim.launch.clocks import ClockComparison
from ringsim.launch.ends import find_culprits, find_ends, tell_end
from ringsim.launch.gathering import Gathering, Offer
from ringsim.launch.hosts import HostWatch, Judge, Witness, stay_unwatched
from ringsim.launch.joined import JoinedWatch
from ringsim.launch.merging import WAIT_S, Merge, collect_announcements
from ringsim.launch.protocol import Ends
from ringsim.launch.system import has_proc
from ringsim.launch.watcher import LiveRecords
from ringsim.state import get_state
from ringsim.traces.files import load
from ringsim.traces.recorder import Recorder
from ringsim.traces.sources import attach_sources
from ringsim.traces.value import Trace

# events of a trace that rank 0 keeps in memory; a larger trace is read on demand
MOST_KEPT = 500_000
MOST_NOTES = 4  # ranks listed in an error


class _Phase(Enum):
    NEW = auto()
    RECORDING = auto()
    LEFT = auto()
    SAVED = auto()


@dataclass(frozen=True)
class _Block:
    """A block that this rank has entered, and perhaps left.

    Attributes:
        keys: the keys shared by its ranks.
        path: the path of the file.
        attempt: the number of this attempt of a restarted job, or None for other jobs.
        recorder: this rank's recorder.
        own: whether the recorder belongs to this block rather than to an enclosing block or run.
        place: the location of this rank's part, and its start.
        backend: the backend of the default group.
        first: the number of operations that the recorder already had.
        start_ns: the time when this rank entered, on CLOCK_MONOTONIC.
        start_unix_ns: the same time on the wall clock.
    """

    keys: BlockStore
    path: Path
    attempt: int | None
    recorder: Recorder
    own: bool
    place: dict[str, Any]
    backend: str
    first: int
    start_ns: int
    start_unix_ns: int

    @property
    def rank(self) -> int:
        return self.recorder.rank

    @property
    def world_size(self) -> int:
        return self.recorder.world_size

    @property
    def directory(self) -> Path:
        return self.recorder.directory


class Recording:
    """A ``with`` block that records ranks that are already running.

    Every rank of the default process group enters and leaves the block at its own time. You can
    nest and repeat blocks. An inner block, or a block inside a run of ``ringsim.trace(worker)``,
    saves the operations posted within it. If the block raises an exception, the trace is still
    saved, and the exception propagates.

    Args:
        path: the file that rank 0 writes, usually ``*.ringtrace``; the path must be the same on
            every rank. An existing file is replaced, unless torchrun may restart the ranks. In that
            case, each attempt has its own file: ``run.1.ringtrace`` follows ``run.ringtrace``.
        check: the mistakes that raise an error (see ``ringsim.trace``); an enclosing block or run
            takes precedence.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> import tempfile
        >>> with Recording(Path(tempfile.mkdtemp(), "run.ringtrace")) as recording:
        ...     dist.barrier()
        >>> [str(op) for op in recording.trace.to_pandas()["op"]]
        ['barrier']
        >>> dist.destroy_process_group()
    """

    _phase = _Phase.NEW
    _block: _Block | None = None
    _trace: Trace | None = None
    _watch: JoinedWatch | None = None
    _hosts: HostWatch | None = None

    def __init__(self, path: Path | str, *, check: str = "basic") -> None:
        self._check, self._path = check, Path(os.path.abspath(path))
        self._parts = ExitStack()  # ends this rank's part of the block
        self._lasting = ExitStack()  # ends rank 0's work, after all others have left

    @property
    def written(self) -> Path | None:
        """The file written by this rank, or None if it wrote none."""
        return self._block.path if self._block and self._phase is _Phase.SAVED else None

    @property
    def trace(self) -> Trace:
        """The trace of all ranks, available on rank 0 after the block.

        Raises:
            RingError: this is not rank 0, or the block has not ended.
        """
        block, path = self._block, self.written
        if path is None:
            where, todo = "(the block was not entered)", "Read it after the with block."
            if block is not None:
                where = f"(rank {block.rank} of {block.world_size})"
                todo = "Read it on rank 0, or load the file." if block.rank else todo
            raise RingError(
                f"a recording's trace is available only on rank 0 after the block {where}. {todo}"
            )
        if self._trace is None:
            self._trace = attach_sources(load(path))
        return self._trace

    def __enter__(self) -> Self:
        if not dist.is_initialized():
            raise RingError(
                "cannot record ranks without a process group. First call "
                "ringsim.initialize_distributed() or torch.distributed.init_process_group(), or "
                "let ringsim start the ranks: ringsim.trace(worker, world_size=4)."
            )
        log = get_state().log
        moves = log is not None and log.records.remove is not None
        with ExitStack() as parts, ExitStack() as lasting:
            # a log with its own recorder uses the block's recorder instead
            with _log_moved(moves):
                self._block = block = _enter(self._path)
                answering = parts if block.rank else lasting
                if block.own:
                    parts.callback(block.recorder.close)
                    _compare_clocks(block, answering)
                    parts.callback(note_failed_threads(block.recorder))
                torch_hooks.install(block.recorder, self._check)
                parts.callback(torch_hooks.uninstall, block.recorder)
            self._begin_watch(block, parts, answering)
            self._parts, self._lasting = parts.pop_all(), lasting.pop_all()
        self._phase, self._trace = _Phase.RECORDING, None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        block = self._block
        if block is None or self._phase is not _Phase.RECORDING:
            return
        never = contextlib.nullcontext(threading.Event())
        holds_back = never if block.rank else hold_back_sigterm()
        with holds_back as hurry:
            self._leave(block, error, hurry)

    # -- entering

    def _begin_watch(self, block: _Block, parts: ExitStack, answering: ExitStack) -> None:
        """Starts watching for stuck ranks.

        On a file system without named pipes, the block is recorded without a watcher.
        """
        self._watch = self._hosts = None
        if not block.own or "gloo" not in block.backend or not has_proc():
            return

        def keep_deaths(ranks: list[int]) -> None:  # in case no rank survives to write the file
            with contextlib.suppress(OSError):  # the disk may be full
                block.recorder.set_meta("deaths", find_ends(block.directory, ranks))

        try:
            self._watch = watch = JoinedWatch(block.recorder, keep_deaths)
        except OSError as error:
            if block.rank == 0:
                note = f"No watcher looked for stuck ranks: {error} (rank 0)."
                block.recorder.set_meta("note", note)
            else:
                stay_unwatched(block.keys, block.directory)
            return
        parts.callback(watch.stop)
        block.recorder.on_failure = watch.on_failure
        if block.world_size > 1:
            role = Witness if block.rank else Judge
            self._hosts = role(block.keys, block.recorder, watch.stands)
            answering.callback(self._hosts.stop)

    # -- leaving

    def _leave(self, block: _Block, error: BaseException | None, hurry: threading.Event) -> None:
        """Ends this rank's part of the block.

        Rank 0 writes the file, immediately if ``hurry`` is set.
        """
        left = tell_end(block.rank, error)
        if error is not None:
            _say_why(block, error, left)
        others: Ends = []
        if self._watch is not None and error is not None:
            others = self._watch.ask_others()
        span = [block.first, block.recorder.count]
        with _log_moved(block.own):
            _close(self._parts, error)
        self._phase = _Phase.LEFT
        mismatch = self._watch.unheard() if self._watch is not None and error is None else None
        try:
            announced = {"span": span, "path": str(block.path), "left": left}
            block.keys.put(f"left/{block.rank}", announced)
            if block.rank:
                place = block.keys, block.rank, block.directory, block.place, block.path
                Offer(*place, failed=error is not None).make()
            else:
                found = self._gather(block, error, hurry, others)
                mismatch = mismatch or found
        except (RingError, RuntimeError, OSError) as failure:
            if error is None:
                raise RingError(
                    f"cannot merge the parts of the recording: {type(failure).__name__}: {failure} "
                    f"(rank {block.rank} of {block.world_size}). The parts are in "
                    f"{block.directory}."
                ) from failure
            # the block's own exception is more important
            error.add_note(f"ringsim could not save the trace: {failure}")
        if mismatch is not None:
            mismatch.trace = self.trace if self._phase is _Phase.SAVED else None
            raise mismatch

    def _gather(
        self,
        block: _Block,
        error: BaseException | None,
        hurry: threading.Event,
        others: Ends,
    ) -> RingError | None:
        """On rank 0, collects the parts of all ranks and writes the file.

        Returns the error for mismatched operations, or None if there are none.
        """
        keys, directory, notes = block.keys, block.directory, list[str]()
        try:
            said, late = collect_announcements(
                keys, directory, block.path, block.world_size, failed=error is not None, hurry=hurry
            )
            if isinstance(self._hosts, Judge):
                others += self._hosts.find_lost(late)
                notes = self._hosts.said
        finally:
            _close(self._lasting, error)
        gathering = Gathering(keys, directory, block.world_size)
        gathering.fetch([*said], lambda: not hurry.is_set())
        whole, count = Merge(
            directory=directory,
            path=block.path,
            world_size=block.world_size,
            start_ns=block.start_ns,
            origin=_describe(block),
            said=said,
            late=late,
            others=others,
            missing=gathering.missing,
            notes=notes,
            watched=self._watch is not None,
        ).write()
        self._phase = _Phase.SAVED
        self._trace = attach_sources(load(block.path)) if count <= MOST_KEPT else None
        if isinstance(error, RingError) and error.trace is None:
            error.trace = self.trace
            error.diagnosis = error.diagnosis and replace(error.diagnosis, trace=self.trace)
        gathering.acknowledge(whole=whole and block.own, keep=block.own)
        mismatch = None
        if error is None and block.own and not late and "gloo" in block.backend:
            mismatch = self._find_mismatch(block)
        if block.own and whole:
            shutil.rmtree(directory, ignore_errors=True)
        return mismatch

    def _find_mismatch(self, block: _Block) -> RingError | None:
        """Returns the error for mismatched operations in a block that all ranks have left.

        Returns None if the ranks have already raised it.
        """
        records = LiveRecords(block.directory, block.world_size)
        if self._watch is not None and (verdict := read_verdict(block.directory)) is not None:
            records.caught.append(verdict)
        records.look(to_end=True)
        found = records.find_mismatch(range(block.world_size))
        if found is None:
            return None
        found = tell_partings(replace(found, trace=self.trace), self.trace.events)
        return error_of_kind(found.kind)(str(found), diagnosis=found)


def _close(stack: ExitStack, error: BaseException | None) -> None:
    stack.__exit__(None if error is None else type(error), error, None)


@contextmanager
def _log_moved(moves: bool) -> Iterator[None]:
    """Moves the log to another recorder, at the start or end of a block."""
    moved = interrupt_log() if moves else None
    yield
    resume_log(moved)


def _enter(path: Path) -> _Block:
    """Enters a block, and announces the location of this rank's part."""
    start_ns, start_unix_ns = time.monotonic_ns(), time.time_ns()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    keys = enter_block(rank, world_size)
    recorder, attempt = get_state().recorder, None
    own = recorder is None
    if own and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        attempt = _agree_on_attempt(keys, path, rank, world_size)
        path = number(path, attempt)
    if recorder is None:
        recorder = Recorder(parts_of(path), rank, world_size)
    place = {**place_of(recorder.directory), "start_ns": recorder.start_ns}
    block = _Block(
        keys=keys,
        path=path,
        attempt=attempt,
        recorder=recorder,
        own=own,
        place=place,
        backend=dist.get_backend(),
        first=recorder.count,
        start_ns=start_ns,
        start_unix_ns=start_unix_ns,
    )
    if own:
        _prepare_directory(block)
    keys.put(f"at/{rank}", place)
    return block


def _compare_clocks(block: _Block, answering: ExitStack) -> None:
    """Starts comparing the clocks of several machines."""
    # a store within a process blocks all its users while one waits
    if block.world_size == 1 or store_port() < 0:
        return

    def find_clock_of_rank_0(patience: Patience) -> str | None:
        return find_place(block.keys, 0, patience).get("clock")

    clocks = ClockComparison(block.keys.store, block.recorder, find_clock_of_rank_0)
    answering.push(lambda _kind, error, _trace: clocks.stop(failed=error is not None))


def _prepare_directory(block: _Block) -> None:
    """Claims the directory of parts for this block, and writes the block's metadata there."""
    directory, run_id = block.directory, block.keys.run_id
    block.recorder.set_meta("run_id", run_id)
    claim = directory / "run_id"
    # the first rank of the block in this directory
    if not claim.exists() or claim.read_text() != run_id:
        clear_verdict(directory)
        claim.write_text(run_id)
    if block.rank == 0:
        # left by an earlier run with more ranks that was killed
        for entry in directory.iterdir():
            match = re.fullmatch(r"rank-(\d+)\.\w+", entry.name)
            if match and int(match[1]) >= block.world_size:
                entry.unlink(missing_ok=True)
        unfinished = directory / "run.json.unfinished"
        unfinished.write_text(json.dumps({**_describe(block), "start_ns": block.start_ns}))
        unfinished.replace(directory / "run.json")


def _describe(block: _Block) -> dict[str, Any]:
    """Returns the metadata about the run's origin."""
    described = {
        **provenance.measured_run(block.world_size, block.backend, block.start_unix_ns),
        "run_id": block.keys.run_id,
    }
    if block.attempt is not None:
        described["job"] = os.environ.get("TORCHELASTIC_RUN_ID", "")
        described["attempt"] = block.attempt
    return described


def _agree_on_attempt(keys: BlockStore, path: Path, rank: int, world_size: int) -> int:
    """Returns the number of the current attempt of a restarted job.

    Rank 0 chooses the directory; the other ranks wait until rank 0 enters the block.
    """
    if rank == 0:
        keys.put("attempt", find_attempt(path))
    found: int | None = keys.read("attempt", lasts(WAIT_S))
    if found is None:
        raise RingError(
            f"rank 0 did not enter the recorded block within {WAIT_S:.0f} s after rank {rank} of "
            f"{world_size} had entered it, in a job that may be restarted. Enter the block at the "
            "same place on all ranks."
        )
    return found


def _say_why(block: _Block, error: BaseException, left: dict[str, Any]) -> None:
    """Records this rank's end in its part, in case rank 0 writes no file.

    A rank that lost a peer, or was stuck waiting for one, also records the peer's end.
    """
    ends = [left["end"]] if left["end"] is not None else []
    if left["lost"]:
        ends = find_culprits(block.directory, block.rank, block.world_size)
        for end in ends[:MOST_NOTES]:
            error.add_note(f"ringsim: rank {end['rank']} {end['about']}")
    if left["woken"] and (verdict := read_verdict(block.directory)) is not None:
        # ranks whose threads wait, and that record nothing more
        ends = [end for end in verdict.ends if end["rank"] not in verdict.waiting]
    if ends and block.own:
        with contextlib.suppress(OSError):  # the disk may be full
            block.recorder.set_meta("ends", ends)


def parts_of(path: Path) -> Path:
    """Returns the directory that holds the parts of a trace file.

    It is next to the file, or in ``RINGSIM_PARTS``, on a local disk of each host.
    """
    return Path(
        os.path.abspath(os.environ.get("RINGSIM_PARTS") or path.parent), f"{path.name}.parts"
    )


def number(path: Path, attempt: int) -> Path:
    """Returns the path of the trace file for one attempt of a job.

    Example:
        >>> [str(number(Path("out/run.ringtrace"), attempt)) for attempt in range(3)]
        ['out/run.ringtrace', 'out/run.1.ringtrace', 'out/run.2.ringtrace']
    """
    return path.with_name(f"{path.stem}.{attempt}{path.suffix}") if attempt else path


@functools.cache  # a repeated block replaces the file of its own attempt
def find_attempt(path: Path) -> int:
    """Returns the first attempt number that has no file and no parts yet."""
    return next(
        attempt
        for attempt in itertools.count()
        if not (file := number(path, attempt)).exists() and not parts_of(file).exists()
    )


@contextmanager
def hold_back_sigterm() -> Iterator[threading.Event]:
    """Delays a SIGTERM until the end of the block.

    Yields an event that is set when the signal arrives. When one rank has failed, a launcher such
    as torchrun sends the signal to the others, just while rank 0 writes the trace of the failure.
    """
    came = threading.Event()
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield came  # no handler can be set here, or the old one could not be restored
        return
    signal.signal(signal.SIGTERM, lambda *_: came.set())
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)
        if came.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
