"""The recorder: writes a rank's events to its part, as they happen, for whatever carries the messages.

The hot path is a handful of closures over one preallocated ``struct``: an operation costs one record written when it is posted, one
number when the program begins to wait for it, and two when it is done. Nothing is allocated, locked or looked up twice.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from ringsim.errors import ArgumentError
from ringsim.state import get_state
from ringsim.traces.buffer import RECORD_BYTES, PartBuffer
from ringsim.traces.call_sites import SPEAKER, CallSites
from ringsim.traces.events import ERROR, IN_FLIGHT, NONE, OK, OP_CODES, RECORD

_PEER, _STATUS = (RECORD.fields[name][1] for name in ("peer", "status"))  # type: ignore[index]
_NOT_YET: Final = b"\xff" * 16  # NONE for wait_ns and done_ns
_POSTED: Final = IN_FLIGHT << 16  # the column after op
_UNSET: Final[Any] = object()
_NO_OPS: Final[Mapping[str, int]] = {}

# The stage and the microbatch of the innermost span, joined.
_meaning: ContextVar[int] = ContextVar("ringsim_meaning", default=NONE)


class Recorder:
    """Writes the events of one rank to ``directory``, from any thread.

    The functions of the hot path are attributes, so that hooks can bind them once:

    * ``make_post(op, ops={}, poster=None, blocking=None)`` makes the function that begins operations of one kind,
      ``post(group, peer, tag, payload, label=NONE) -> slot``; the slot is None once recording has stopped. The line is the user's.
      ``op`` is the operation's code; where a frame of the library's speaking file (see ``CallSites``) on the way to the user bears a
      name in ``ops``, the code there is the better one. ``poster`` and ``blocking``, which calls it, are the library's functions on
      the two commonest ways.
    * ``make_wait(call, take, otherwise)``: makes a method ``wait(self, timeout)`` around ``call`` that records entry and end.
      ``take(self, None)`` gives the slot of the handle; where it gives None, ``otherwise(self[, timeout])`` is called instead.
    * ``begin_wait(slot)``: the program begins to wait for it.
    * ``finish(slot)``: it is done. ``fail(slot)``: it raised. ``finish_at_once(slot)``: it blocked from its posting until now.
    * ``set_peer(slot, peer)``: the message from anybody came from ``peer``.

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
        >>> post = recorder.make_post(OP_CODES["isend"])
        >>> slot = post(group, 1, 0, payload)
        >>> recorder.begin_wait(slot)
        >>> recorder.finish(slot)
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
        self.on_growth: Callable[[], None] = _do_nothing  # called now and then, when the part grows
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
        }.items():
            self.set_meta(key, value)
        self.make_post: Callable[..., Callable[..., int | None]]
        self.make_post, self.make_wait, self.begin_wait, self.finish, self.finish_at_once, self.fail, self.set_peer = _make_hot_path(
            self._buffer.memory, self._grow, self.sites
        )
        self._post_span: Callable[..., int | None] = self.make_post(OP_CODES["span"])
        self._post_mark: Callable[..., int | None] = self.make_post(OP_CODES["mark"])

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
        return self._post_span(NONE, NONE, NONE, NONE, self._number_label(name))

    def span_end(self, slot: int, *, failed: bool = False) -> None:
        """Writes a span as ended: ok, or error where an exception passed through it."""
        (self.fail if failed else self.finish)(slot)

    def mark(self, name: str) -> None:
        """Writes a mark: something happened now."""
        slot = self._post_mark(NONE, NONE, NONE, NONE, self._number_label(name))
        if slot is not None:
            self.finish(slot)

    def _number_label(self, name: str) -> int:
        label = self._labels.get(name)
        if label is None:
            label = self._labels[name] = self.number("label", name=name)
        return label

    def close(self) -> None:
        """Ends the part: writes down when, and what recording an operation costs here. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        if not self._stopped:
            self.set_meta("cost_ns_per_op", _measure_cost_ns())
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
            self._outer = outer = _meaning.get()
            stage = outer & 0xFFFFFFFF if self._stage is None else self._stage
            microbatch = outer >> 32 if self._microbatch is None else self._microbatch
            _meaning.set(microbatch << 32 | stage)
            self._slot = recorder.span_begin(self._name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._recorder is not None:
            if self._slot is not None:
                self._recorder.span_end(self._slot, failed=kind is not None)
            _meaning.set(self._outer)


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


def _do_nothing() -> None:
    pass


def _fit(value: Any) -> int:
    """Returns a peer or tag as it can be written down: NONE for what no column holds (the library itself will refuse it)."""
    return value if isinstance(value, int) and -(1 << 31) <= value < 1 << 31 else NONE


def _measure_cost_ns() -> int:
    """CPU time of one recorded operation (post, wait, done) in ns, without the communication library's part: the least of some tries."""
    make_post, _, begin_wait, finish, *_ = _make_hot_path(bytearray(RECORD_BYTES * 400), lambda _: None, CallSites(lambda _: 0))
    post, costs = make_post(OP_CODES["isend"]), []
    for _ in range(4):
        start_ns = time.thread_time_ns()
        for _ in range(100):
            slot = post(0, 0, 0, 0)
            begin_wait(slot)
            finish(slot)
        costs.append(time.thread_time_ns() - start_ns)
    return min(costs) // 100


def _make_hot_path(memory: Any, grow: Callable[[int], Any], sites: CallSites) -> tuple[Callable[..., Any], ...]:
    """Makes the functions that write records.

    A slot is a record's place counted in words of 8 bytes, so that its times are ``words[slot + 1]`` and ``words[slot + 2]``. Where
    neighbouring columns are known together they are written as one: wait_ns and done_ns, stage and microbatch, op and status.

    Args:
        memory: where the records go, a writable buffer.
        grow: given an offset in bytes, returns the buffer that has room for a record there, None where there is none.
        sites: what each source file is.

    Returns:
        make_post, make_wait, begin_wait, finish, finish_at_once, fail, set_peer: see ``Recorder``.
    """
    words = memoryview(memory).cast("B").cast("q")
    claim = itertools.count(step=RECORD_BYTES // 8).__next__  # atomic: every thread gets slots of its own
    pack_record = struct.Struct("<q16sQiiiiiiiqI").pack_into  # RECORD_FORMAT with the joined columns
    pack_rank = struct.Struct("<i").pack_into
    now, thread_of, frame_at, meaning_of = time.monotonic_ns, threading.get_ident, sys._getframe, _meaning.get

    def make_post(op: int, ops: Mapping[str, int] = _NO_OPS, poster: Any = None, blocking: Any = None) -> Callable[..., int | None]:
        posted = op | _POSTED
        posted_as = {name: code | _POSTED for name, code in ops.items()}
        poster_code = poster and poster.__code__
        blocking_code, blocking_depth, blocking_posted = None, 0, posted
        if blocking:
            function, blocking_depth = blocking, 4  # post, hook, poster, blocking, and then the decorators
            while hasattr(function, "__wrapped__"):
                function, blocking_depth = function.__wrapped__, blocking_depth + 1
            blocking_code, blocking_posted = function.__code__, posted_as[blocking.__name__]

        def post(group: int, peer: int, tag: int, payload: int, label: int = NONE) -> int | None:
            nonlocal memory, words
            state = posted
            frame: Any
            try:
                frame = innermost = frame_at(2)
                code = frame.f_code
                if code is poster_code:  # the two commonest ways to come here, without a look-up
                    frame = frame.f_back
                    code = frame.f_code
                    if code is blocking_code:
                        state = blocking_posted
                        frame = frame_at(blocking_depth)
                        code = frame.f_code
            except (ValueError, AttributeError):  # a thread that begins in the library: no frame is the user's
                frame = innermost = frame_at(1)
                code = frame.f_code
            while True:
                try:
                    file = sites[code.co_filename]
                except KeyError:
                    file = sites.learn(code.co_filename)
                if file >= 0:
                    line = frame.f_lineno
                    break
                if file == SPEAKER:
                    state = posted_as.get(code.co_name, state)
                frame = frame.f_back
                if frame is None:
                    file, line = sites.find_stand_in(innermost)
                    break
                code = frame.f_code
            slot = claim()
            meaning = meaning_of()
            thread = thread_of()
            try:
                pack_record(memory, slot * 8, now(), _NOT_YET, thread, group, payload, label, file, line, peer, tag, meaning, state)
            except struct.error:
                grown = grow(slot * 8)
                if grown is None:
                    return None
                words = memoryview(grown).cast("B").cast("q")  # before `memory`: who finds room there finds it here
                memory = grown
                values = (thread, group, payload, label, file, line, _fit(peer), _fit(tag), meaning, state)
                pack_record(memory, slot * 8, now(), _NOT_YET, *values)
            return slot

        return post

    def make_wait(call: Callable[..., Any], take: Callable[..., int | None], otherwise: Callable[..., Any]) -> Callable[..., Any]:
        def wait(self: Any, timeout: Any = _UNSET) -> Any:
            slot = take(self, None)
            if slot is None:
                return otherwise(self) if timeout is _UNSET else otherwise(self, timeout)
            words[slot + 1] = now()
            try:
                result = call(self) if timeout is _UNSET else call(self, timeout)
            except BaseException:
                fail(slot)
                raise
            words[slot + 2] = now()
            memory[slot * 8 + _STATUS] = OK
            return result

        return wait

    def begin_wait(slot: int) -> None:
        words[slot + 1] = now()

    def finish(slot: int) -> None:
        words[slot + 2] = now()
        memory[slot * 8 + _STATUS] = OK

    def finish_at_once(slot: int) -> None:
        words[slot + 1] = words[slot]
        finish(slot)

    def fail(slot: int) -> None:
        words[slot + 2] = now()
        memory[slot * 8 + _STATUS] = ERROR

    def set_peer(slot: int, peer: int) -> None:
        pack_rank(memory, slot * 8 + _PEER, peer)

    return make_post, make_wait, begin_wait, finish, finish_at_once, fail, set_peer
