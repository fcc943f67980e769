"""The recorder: writes a rank's events to its part, as they happen, for whatever carries the messages; and spans and marks."""

from __future__ import annotations

import functools
import os
import socket
import time
import weakref
from collections.abc import Callable
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from ringsim.errors import ArgumentError
from ringsim.state import get_state
from ringsim.traces.buffer import RECORD_BYTES, PartBuffer
from ringsim.traces.call_sites import CallSites
from ringsim.traces.events import NONE, OP_CODES, RECORD, Ints
from ringsim.traces.hot_path import make_hot_path, meaning
from ringsim.traces.notices import word_notice


class Recorder:
    """Writes the events of one rank to ``directory``, from any thread.

    Operations go through ``hot``, the functions of ``ringsim.traces.hot_path``.

    Args:
        directory: where the part goes; see ``ringsim.traces.buffer``.
        rank: the rank that is recorded.
        world_size: how many ranks the run has.
        max_records: recording stops there, and says so; the program runs on. 72 bytes each.

    Raises:
        TraceFileError: the part cannot be made.

    Example:
        >>> import tempfile
        >>> from ringsim.traces.events import OP_CODES
        >>> recorder = Recorder(tempfile.mkdtemp(), rank=0, world_size=2)
        >>> group = recorder.number("group", name="world", ranks=[0, 1])
        >>> payload = recorder.number("payload", dtype="float32", shape=[2], size_bytes=8)
        >>> post = recorder.hot.make_post(OP_CODES["isend"])
        >>> slot = post(group, 1, 0, payload)
        >>> recorder.hot.begin_wait(slot)
        >>> recorder.hot.finish(slot)
        >>> recorder.count
        1
        >>> recorder.close()
    """

    def __init__(self, directory: Path | str, rank: int, world_size: int, *, max_records: int = 1 << 21) -> None:
        self.directory = Path(directory)
        self.rank = rank
        self.world_size = world_size
        self.users = 0  # how many hold the hooks of the communication library in place
        self.undo_hooks: Callable[[], None] = _do_nothing
        self.check_end: Callable[[], None] = _do_nothing  # raises where the program has left something undone, when it says that it is done
        self.on_growth: Callable[[], None] = _do_nothing  # called now and then, when the part grows
        self.on_reading: Callable[[], None] = _do_nothing  # called when the record is about to be read, and before it ends
        self.on_failure: Callable[[], None] = _do_nothing  # called when a wait has failed; may raise an error that says why
        self.complete_with: Callable[[Any, int], bool] = lambda _handle, _slot: (
            False
        )  # makes a handle complete one more record, if it is known
        self._buffer = PartBuffer(directory, rank, max_records=max_records)
        self._max_records = max_records
        self._stopped = False
        self._closed = False
        self._labels: dict[str, int] = {}
        self.sites = CallSites(lambda filename: self.number("file", name=filename))
        start_ns, start_unix_ns = time.monotonic_ns(), time.time_ns()
        self.start_ns = start_ns
        for key, value in {
            "rank": rank,
            "world_size": world_size,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "start_ns": start_ns,
            "start_unix_ns": start_unix_ns,
            "cost_ns_per_op": _measure_cost_ns(),
        }.items():
            self.set_meta(key, value)
        self.hot = make_hot_path(self._buffer.memory, self._grow, self.sites)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=functools.partial(_detach, weakref.ref(self)))
        self._post_span: Callable[..., int | None] = self.hot.make_post(OP_CODES["span"])
        self._post_mark: Callable[..., int | None] = self.hot.make_post(OP_CODES["mark"])

    @property
    def count(self) -> int:
        """How many records have been written."""
        return self._buffer.count

    def number(self, table: str, **entry: Any) -> int:
        """Returns the number of a group, payload, label or file; writes it down when it is new. NONE if the disk is full."""
        try:
            return self._buffer.number(table, **entry)
        except OSError as error:
            self._stop(error)
            return NONE

    def set_meta(self, key: str, value: Any) -> None:
        """Writes down one fact about the rank (JSON-able); the last value of a key counts."""
        self._buffer.set_meta(key, value)

    def _grow(self, offset: int) -> Any:
        """Returns the map that has room at ``offset``, None where recording stops."""
        if self._stopped:
            return None
        try:
            memory = self._buffer.grow(offset)
        except OSError as error:
            self._stop(error)
            return None
        if memory is None:
            self._stop(None)
        else:
            self.on_growth()
        return memory

    def _stop(self, error: OSError | None) -> None:
        """Stops recording, the program runs on; one note says why."""
        if self._stopped:
            return
        self._stopped = True
        why = f"the disk could not take more ({error})" if error else f"the maximum of {self._max_records:,} records was reached"
        try:
            self.set_meta("stopped_at_max", True)
            self.set_meta("note", f"Recording of rank {self.rank} stopped: {why}. What came later is not in the trace.")
        except OSError:
            pass  # the disk is full to the last byte; the records say how far it went

    def span_begin(self, name: str) -> int | None:
        """Writes a span as begun, with the stage and microbatch in force. Returns its slot, None once recording has stopped."""
        return self._post_span(NONE, NONE, NONE, NONE, self.number_label(name))

    def call_begin(self, label: int, group: int, payload: int) -> int | None:
        """Writes a span that has a group and a size: a call of a user's own collective. Returns its slot, as ``span_begin`` does."""
        return self._post_span(group, NONE, NONE, payload, label)

    def span_end(self, slot: int, *, failed: bool = False) -> None:
        """Writes a span as ended: ok, or error where an exception passed through it."""
        (self.hot.fail if failed else self.hot.finish)(slot)

    def mark(self, name: str) -> None:
        """Writes a mark: something happened now."""
        slot = self._post_mark(NONE, NONE, NONE, NONE, self.number_label(name))
        if slot is not None:
            self.hot.finish(slot)

    def notice(self, kind: str, message: str, group: int = NONE, peer: int = NONE, tag: int = NONE, payload: int = NONE) -> None:
        """Writes down that something wrong was found (see ``ringsim.traces.notices``), in the operation that the numbers describe."""
        slot = self._post_mark(group, peer, tag, payload, self.number_label(word_notice(kind, message)))
        if slot is not None:
            self.hot.finish(slot)

    def number_label(self, name: str) -> int:
        """Returns the number of a label; cheap when it was asked for before."""
        label = self._labels.get(name)
        if label is None:
            label = self._labels[name] = self.number("label", name=name)
        return label

    def records_between(self, first: int, last: int) -> Ints:
        """Returns what was written between two slots that ``hot.skip`` gave: an array of ``RECORD``, a copy."""
        words = RECORD_BYTES // 8
        records: Ints = np.frombuffer(self._buffer.memory, dtype=RECORD)[first // words + 1 : last // words]
        valid: Ints = records[records["status"] != 0]
        return valid

    def entry(self, table: str, number: int) -> dict[str, Any]:
        """Returns what ``number`` was told when it gave this number."""
        return self._buffer.entries[table][number]

    def complete_times(self) -> None:
        """Writes down what is known late, when GPUs were done, for whoever is about to read the records. It does not block."""
        if self._closed:
            return
        try:
            self.on_reading()
        except OSError as error:
            self._stop(error)

    def close(self) -> None:
        """Ends the part, and writes down when. Closing twice is harmless."""
        if self._closed:
            return
        self.complete_times()
        self._closed = True
        if not self._stopped:
            self.set_meta("end_ns", time.monotonic_ns())
        self._buffer.close()


class span:  # noqa: N801 - read as a verb: with ringsim.span("compute"):
    """Names a piece of the program, for the timeline; does nothing while nothing is recorded.

    Spans nest. Operations and spans inside take ``stage`` and ``microbatch`` from the innermost span that gives them.

    Args:
        name: what the timeline calls it.
        stage: index of the pipeline stage that works.
        microbatch: index of the microbatch that is worked on.

    Raises:
        ArgumentError: ``name`` is not a string, or an index is not an integer of at least 0.

    Example:
        >>> with span("compute", stage=1, microbatch=0):
        ...     result = 6 * 7
        >>> result
        42
    """

    __slots__ = ("_microbatch", "_name", "_outer", "_recorder", "_slot", "_stage")
    _outer: int

    def __init__(self, name: str, *, stage: int | None = None, microbatch: int | None = None) -> None:
        self._name = _check_name("span", name)
        self._stage = None if stage is None else _check_index("stage", stage)
        self._microbatch = None if microbatch is None else _check_index("microbatch", microbatch)

    def __enter__(self) -> Self:
        self._recorder = recorder = get_state().recorder
        if recorder is not None:
            self._outer = outer = meaning.get()
            stage = outer & 0xFFFFFFFF if self._stage is None else self._stage
            microbatch = outer >> 32 if self._microbatch is None else self._microbatch
            meaning.set(microbatch << 32 | stage)
            self._slot = recorder.span_begin(self._name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._recorder is not None:
            if self._slot is not None:
                self._recorder.span_end(self._slot, failed=kind is not None)
            meaning.set(self._outer)


def mark(name: str) -> None:
    """Writes down that something happened now, for the timeline; does nothing while nothing is recorded.

    Args:
        name: what the timeline calls it.

    Raises:
        ArgumentError: ``name`` is not a string.

    Example:
        >>> mark("warm-up is over")
    """
    _check_name("mark", name)
    recorder = get_state().recorder
    if recorder is not None:
        recorder.mark(name)


def _check_name(what: str, name: str) -> str:
    if not isinstance(name, str):
        raise ArgumentError(f'the name of a {what} must be a string, got {name!r}. Put it in quotes: {what}("compute").')
    return name


def _check_index(what: str, value: int) -> int:
    try:
        number = index(value)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 31:
        raise ArgumentError(f"{what} must be an integer from 0 to 2**31 - 1, got {value!r}. Count from 0, or leave it out.")
    return number


def _detach(reference: weakref.ref[Recorder]) -> None:
    """Lets go of the part, in a process that was forked from the rank: the two would write to the same places."""
    recorder = reference()
    if recorder is not None:
        recorder._stopped = recorder._closed = True
        recorder._buffer.abandon()
        recorder.hot.detach()


def _do_nothing() -> None:
    pass


def _measure_cost_ns() -> int:
    """CPU time of one recorded operation (post, wait, done) in ns, without the communication library's part: the least of some tries."""
    hot = make_hot_path(bytearray(RECORD_BYTES * 400), lambda _: None, CallSites(lambda _: 0))
    post, costs = hot.make_post(OP_CODES["isend"]), []
    for _ in range(4):
        start_ns = time.thread_time_ns()
        for _ in range(100):
            slot = post(0, 0, 0, 0) or 0
            hot.begin_wait(slot)
            hot.finish(slot)
        costs.append(time.thread_time_ns() - start_ns)
    return min(costs) // 100
