"""The recorder: writes a rank's events to its part, as they happen, for whatever carries the messages; and spans and marks.

Which source file a stack frame belongs to: the user's, ringsim's, the communication library's, or Python's.

The line of an event is the user's: the recorder walks outward from the operation, past every frame that is not the user's own.

What a rank leaves on disk while it runs: a memory-mapped array of records, and the names that the records number.

The kernel keeps what was written to the map whatever happens to the process, so a rank that is killed leaves everything up to that
moment, and a watcher can read the file live::

    rank-2.events   [record][record][record][ 0 ][ 0 ] ... grown chunk by chunk; a slot with status 0 is empty
    rank-2.names    {"table": "group", "id": 0, "name": "world", "ranks": [0, 1, 2, 3]}
                    {"table": "payload", "id": 0, "dtype": "float32", "shape": [1024], "size_bytes": 4096}

The functions that write a rank's records while its operations run: the part of the recorder that has to be fast.

They are closures over one preallocated ``struct`` and one memory map. An operation costs one record written when it is posted, one number
when the program begins to wait for it, and two when it is done; nothing is allocated, locked or looked up twice.

How an operation is recorded whose connection was gone when it was posted: as a wait that broke, not as a refusal.

A rank may notice that its peer has died before it posts its next message, which then raises at once instead of in the wait. To the user
both are the same: a message to a rank that is gone. What was refused never reached the wire and says nothing of the other side.
"""

from __future__ import annotations

import functools
import itertools
import json
import mmap
import os
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from operator import index
from pathlib import Path
from threading import Lock
from types import CodeType, FrameType, TracebackType
from typing import Any, Final, NamedTuple, Self

import numpy as np

from ringsim.errors import ArgumentError, TraceFileError
from ringsim.state import get_state
from ringsim.traces.events import ERROR, IN_FLIGHT, NONE, OK, OP_CODES, RECORD, Ints, word_notice

__all__ = ["LOST_PEER", "fail_posting"]


class Recorder:
    """Writes the events of one rank to ``directory``, from any thread.

    Operations go through ``hot``, the functions of ``ringsim.traces.recorder``.

    Args:
        directory: where the part goes; see ``ringsim.traces.recorder``.
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
        """Writes down that something wrong was found (see ``ringsim.traces.events``), in the operation that the numbers describe."""
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


OURS: Final = -1  # ringsim itself
LIBRARY: Final = -2  # torch, Python's own modules
SPEAKER: Final = -3  # the library file whose functions name the operations

_RINGSIM: Final = str(Path(__file__).resolve().parent.parent) + os.sep
_DEMONSTRATIONS: Final = (_RINGSIM + "cli/demo_programs.py",)  # it stands for the program of a user
_PYTHON: Final = os.path.dirname(os.__file__) + os.sep
_DECORATOR: Final = os.sep + "typing_extensions.py"  # its `deprecated` stands between torch's own frames
_INSTALLED: Final = tuple(os.path.join(_PYTHON, name) + os.sep for name in ("site-packages", "dist-packages"))


class CallSites(dict[str, int]):
    """Says of each source file what it is: its number if it is the user's, else OURS, LIBRARY or SPEAKER.

    ``places`` says the same of the user's instructions that were met before, with the line: Python finds the line of a frame by reading
    its function's table from the start, which in a function of 300 lines takes 9 us. The key is ``id(code) + frame.f_lasti``, the address
    of the instruction but for a constant: a code object holds its instructions, so no two have the same key while both live.

    Args:
        number: gives a file name its number.
    """

    def __init__(self, number: Callable[[str], int]) -> None:
        super().__init__()
        self._number = number
        self.places: dict[int, tuple[int, int]] = {}
        self._alive: list[CodeType] = []  # those in `places`
        self._libraries: tuple[str, ...] = ("<frozen ",)

    def declare_library(self, directory: str, speaker: str) -> None:
        """Counts the files under ``directory`` as the library's, and ``speaker``, one of them, as the one that names operations."""
        self.clear()
        self.places.clear()
        self._libraries = (*self._libraries, directory + os.sep)
        self[speaker] = SPEAKER

    def learn(self, filename: str) -> int:
        """Returns what a file is, and remembers it; afterwards ``sites[filename]`` says the same."""
        of_python = filename.startswith(_PYTHON) and not filename.startswith(_INSTALLED)
        if filename.startswith(_RINGSIM) and filename not in _DEMONSTRATIONS:
            kind = OURS
        elif of_python or filename.startswith(self._libraries) or filename.endswith(_DECORATOR):
            kind = LIBRARY
        else:
            kind = self._number(filename)
        self[filename] = kind
        return kind

    def learn_place(self, frame: FrameType) -> tuple[int, int]:
        """Returns file number and line of a frame of the user's, and remembers them."""
        code = frame.f_code
        place = self[code.co_filename], frame.f_lineno
        self._alive.append(code)  # first, for the key is good only while it lives
        self.places[id(code) + frame.f_lasti] = place
        return place

    def find_stand_in(self, frame: FrameType) -> tuple[int, int]:
        """Returns file number and line where no frame is the user's: the innermost outside the library, else ``frame`` itself."""
        innermost, outward = frame, frame.f_back
        while outward is not None:
            if self.get(outward.f_code.co_filename) == OURS:
                frame = outward
                break
            outward = outward.f_back
        else:
            frame = innermost
        return self._number(frame.f_code.co_filename), frame.f_lineno


RECORD_BYTES: Final = RECORD.itemsize
FIRST_CHUNK: Final = 512  # records that there is room for at the start: every rank of a large run pays for them
CHUNK: Final = 4096  # records by which the array grows: 72 pages, a tenth of a millisecond
_POPULATE: Final = getattr(mmap, "MADV_POPULATE_WRITE", 23)  # Python names it from 3.14 on


class PartBuffer:
    """The two files that one rank writes: slots for records, and lines for names.

    Args:
        directory: where the files go; made if it does not exist.
        rank: whose files these are.
        max_records: where the array ends; ``grow`` returns None from there on.

    Raises:
        TraceFileError: the files cannot be made (no permission, disk full).

    Example:
        >>> import struct, tempfile
        >>> from ringsim.traces.events import OK, RECORD_FORMAT
        >>> buffer = PartBuffer(tempfile.mkdtemp(), rank=0, max_records=10)
        >>> struct.pack_into(RECORD_FORMAT, buffer.memory, 0, *range(14), OK)
        >>> buffer.count, buffer.number("label", name="compute"), buffer.number("label", name="compute")
        (1, 0, 0)
        >>> buffer.close()
    """

    def __init__(self, directory: Path | str, rank: int, *, max_records: int) -> None:
        self._lock = Lock()
        self._numbers: dict[str, dict[str, int]] = {}
        self.entries: dict[str, list[dict[str, Any]]] = {}  # what each number of a table means
        self._capacity = 0  # records that the file has room for
        self._max_records = max_records
        self._closed = False
        events_path = Path(directory, f"rank-{rank}.events")
        try:
            events_path.parent.mkdir(parents=True, exist_ok=True)
            for path in (events_path, events_path.with_suffix(".names")):
                path.unlink(missing_ok=True)  # rather than cut it: whoever has mapped the one of an earlier recording would crash
            self._names = os.open(events_path.with_suffix(".names"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            self._events = os.open(events_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            self.memory = self._extend(min(FIRST_CHUNK, max_records))
        except OSError as error:
            raise TraceFileError(
                f"the directory of a run must be writable and have {FIRST_CHUNK * RECORD_BYTES:,} bytes free, got {error} (rank {rank}). "
                "Choose another path or free some space."
            ) from error

    def _extend(self, capacity: int) -> mmap.mmap:
        """Gives the file room for ``capacity`` records and maps it whole. A full disk shows here, as an error, and nowhere else."""
        start, length = self._capacity * RECORD_BYTES, (capacity - self._capacity) * RECORD_BYTES
        if hasattr(os, "posix_fallocate"):  # not on macOS and Windows, where writing has to do
            os.posix_fallocate(self._events, start, length)
        # Zeros are there already, but writing them makes the pages known: the first touch of each through the map costs a fifth.
        os.lseek(self._events, start, os.SEEK_SET)
        zeros = memoryview(bytes(length))
        while zeros:
            zeros = zeros[os.write(self._events, zeros) :]
        self._capacity = capacity
        # A new map each time, not a resized one: other threads may be writing through the old one, which stays valid until they let go.
        memory = mmap.mmap(self._events, capacity * RECORD_BYTES)
        try:
            memory.madvise(_POPULATE, start, length)  # map the pages now, at once, rather than one by one in the middle of operations
        except (AttributeError, OSError, ValueError):
            pass  # not Linux, or one before 5.14
        return memory

    def grow(self, offset: int) -> mmap.mmap | None:
        """Makes room for the record at ``offset``.

        Args:
            offset: in bytes from the start of the file.

        Returns:
            The map to write it to; None where the array has its largest size, or is closed.

        Raises:
            OSError: the disk is full. What was written stays valid.
        """
        with self._lock:
            if self._closed or offset >= self._max_records * RECORD_BYTES:
                return None
            while offset >= self._capacity * RECORD_BYTES:
                self.memory = self._extend(min(self._capacity + CHUNK, self._max_records))
            return self.memory

    @property
    def count(self) -> int:
        """How many records have been written."""
        return int(np.count_nonzero(np.frombuffer(self.memory, dtype=RECORD)["status"]))

    def number(self, table: str, **entry: Any) -> int:
        """Returns the number of a name, and writes the name down when it is new.

        Args:
            table: "group", "payload", "label" or "file".
            entry: what the table's lines hold, JSON-able.
        """
        key = json.dumps(entry)
        with self._lock:
            numbers = self._numbers.setdefault(table, {})
            if key not in numbers:
                # On disk before in memory: whoever reads a record that bears the number finds the name.
                self._append({"table": table, "id": len(numbers), **entry})
                self.entries.setdefault(table, []).append(entry)
                numbers[key] = len(numbers)
            return numbers[key]

    def set_meta(self, key: str, value: Any) -> None:
        """Writes down one fact about the rank; the last value of a key counts."""
        with self._lock:
            self._append({"table": "meta", "key": key, "value": value})

    def _append(self, line: dict[str, Any]) -> None:
        if not self._closed:
            os.write(self._names, json.dumps(line).encode() + b"\n")  # one write a line: a kill leaves a whole line or none

    def close(self) -> None:
        """Closes the files. The map stays valid for threads that are in the middle of a record."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._events)
                os.close(self._names)

    def abandon(self) -> None:
        """Writes nothing more, in a process that was forked from the one that does."""
        self._lock = Lock()  # another thread may have held the old one when the process was forked
        self._closed = True


_PEER, _STATUS = (RECORD.fields[name][1] for name in ("peer", "status"))  # type: ignore[index]
_NOT_YET: Final = b"\xff" * 16  # NONE for wait_ns and done_ns
_UNSET: Final[Any] = object()
_NO_OPS: Final[Mapping[str, int]] = {}

# Globals rather than variables of the closures, which Python copies at every call.
_now: Final = time.monotonic_ns
_thread_of: Final = threading.get_ident
_frame_at: Final = sys._getframe
_pack_record: Final = struct.Struct("<q16sQiiiiiiiqI").pack_into  # RECORD_FORMAT with some neighbours joined
_pack_rank: Final = struct.Struct("<i").pack_into

# The stage and the microbatch of the innermost span, joined.
meaning: Final[ContextVar[int]] = ContextVar("ringsim_meaning", default=NONE)
_meaning_of: Final = meaning.get
# The label of the operations that are posted now, where whoever calls them gave one: the name they have in the log.
label_in_force: Final[ContextVar[int]] = ContextVar("ringsim_label", default=NONE)
_label_of: Final = label_in_force.get


class HotPath(NamedTuple):
    """The functions, to be bound once by whoever shows operations to a recorder. A slot is the place of a record.

    Attributes:
        make_post: ``make_post(op, ops={}, poster=None, blocking=None, status=IN_FLIGHT)`` makes the function that begins operations of one
            kind, ``post(group, peer, tag, payload, label=None) -> slot``. It is called by a hook that the library, or the user, called;
            the line is the user's, and the label the one in force where none is given. The slot is None once recording has stopped.
            ``op`` is the operation's code; where a frame of the library's speaking file (see ``CallSites``) on the way to the user bears
            a name in ``ops``, the code there is the better one. ``poster`` and ``blocking``, which calls it, are the library's functions
            on the two commonest ways. ``status`` is the one that a record has from the beginning: ERROR for what is refused at once.
        make_wait: ``make_wait(call, take, otherwise, failed)`` makes a method ``wait(self, timeout)`` around ``call`` that records when
            it is entered and left. ``take(self, None)`` gives the slot of the handle; where it gives None, ``otherwise(self[, timeout])``
            is called instead. ``failed(self)`` is called when ``call`` raises; where it raises, the record stays as it is: the wait was
            cut short, the operation is not done.
        begin_wait: ``begin_wait(slot)``: the program begins to wait.
        finish: ``finish(slot)``: the operation is done.
        finish_at_once: ``finish_at_once(slot)``: it is done, and blocked from its posting until now.
        fail: ``fail(slot)``: it raised.
        set_times: ``set_times(slot, wait_ns, done_ns)``: of a finished one it is known better when it began to block, and when it was done.
            Neither is before the program's own call, which caused it: what says so is inexact, and is set right.
        set_peer: ``set_peer(slot, peer)``: the message from anybody came from ``peer``.
        skip: ``skip() -> slot`` takes a slot that stays empty: what is posted from now on has a later one.
        detach: ``detach()``: what is written from now on goes nowhere, not even to the records that there are.
    """

    make_post: Callable[..., Callable[..., int | None]]
    make_wait: Callable[..., Callable[..., Any]]
    begin_wait: Callable[[int], None]
    finish: Callable[[int], None]
    finish_at_once: Callable[[int], None]
    fail: Callable[[int], None]
    set_times: Callable[[int, int, int], None]
    set_peer: Callable[[int, int], None]
    skip: Callable[[], int]
    detach: Callable[[], None]


def _fit(value: Any) -> int:
    """Returns a peer or tag as it can be written down: NONE for what no column holds (the library itself will refuse it)."""
    return value if isinstance(value, int) and -(1 << 31) <= value < 1 << 31 else NONE


def make_hot_path(memory: Any, grow: Callable[[int], Any], sites: CallSites) -> HotPath:
    """Makes the functions that write records.

    A slot is a record's place counted in words of 8 bytes, so that its times are ``words[slot + 1]`` and ``words[slot + 2]``. Where
    neighbouring columns are known together they are written as one: wait_ns and done_ns, stage and microbatch, op and status.

    Args:
        memory: where the records go, a writable buffer.
        grow: given an offset in bytes, returns the buffer that has room for a record there, None where there is none.
        sites: what each source file is.
    """
    words = memoryview(memory).cast("B").cast("q")
    place_of = sites.places.get
    claim = itertools.count(step=RECORD_BYTES // 8).__next__  # atomic: every thread gets slots of its own

    def make_post(
        op: int, ops: Mapping[str, int] = _NO_OPS, poster: Any = None, blocking: Any = None, status: int = IN_FLIGHT
    ) -> Callable[..., int | None]:
        posted = op | status << 16  # the column after op
        posted_as = {name: code | status << 16 for name, code in ops.items()}
        poster_code = poster and poster.__code__
        blocking_code, blocking_depth, blocking_posted = None, 0, posted
        if blocking:
            function, blocking_depth = blocking, 4  # post, hook, poster, blocking, and then the decorators
            while hasattr(function, "__wrapped__"):
                function, blocking_depth = function.__wrapped__, blocking_depth + 1
            blocking_code, blocking_posted = function.__code__, posted_as[blocking.__name__]

        def post(group: int, peer: int, tag: int, payload: int, label: int | None = None) -> int | None:
            nonlocal memory, words
            state = posted
            frame: Any
            try:
                frame = innermost = _frame_at(2)
                code = frame.f_code
                if code is poster_code:  # the two commonest ways to come here, without a look-up
                    frame = frame.f_back
                    code = frame.f_code
                    if code is blocking_code:
                        state = blocking_posted
                        frame = _frame_at(blocking_depth)
                        code = frame.f_code
            except (ValueError, AttributeError):  # a thread that begins in the library: no frame is the user's
                frame = innermost = _frame_at(1)
                code = frame.f_code
            place = place_of(id(code) + frame.f_lasti)
            while place is None:
                try:
                    file = sites[code.co_filename]
                except KeyError:
                    file = sites.learn(code.co_filename)
                if file >= 0:
                    place = place_of(id(code) + frame.f_lasti) or sites.learn_place(frame)
                    break
                if file == SPEAKER:
                    state = posted_as.get(code.co_name, state)
                frame = frame.f_back
                if frame is None:
                    place = sites.find_stand_in(innermost)
                    break
                code = frame.f_code
            file, line = place
            slot = claim()
            if label is None:
                label = _label_of()
            about = _meaning_of()
            thread = _thread_of()
            try:
                _pack_record(memory, slot * 8, _now(), _NOT_YET, thread, group, payload, label, file, line, peer, tag, about, state)
            except struct.error:
                grown = grow(slot * 8)
                if grown is None:
                    return None
                words = memoryview(grown).cast("B").cast("q")  # before `memory`: who finds room there finds it here
                memory = grown
                values = (thread, group, payload, label, file, line, _fit(peer), _fit(tag), about, state)
                _pack_record(memory, slot * 8, _now(), _NOT_YET, *values)
            return slot

        return post

    def make_wait(
        call: Callable[..., Any], take: Callable[..., int | None], otherwise: Callable[..., Any], failed: Callable[[Any], None]
    ) -> Callable[..., Any]:
        def wait(self: Any, timeout: Any = _UNSET) -> Any:
            slot = take(self, None)
            if slot is None:
                return otherwise(self) if timeout is _UNSET else otherwise(self, timeout)
            words[slot + 1] = _now()
            try:
                result = call(self) if timeout is _UNSET else call(self, timeout)
            except BaseException:
                failed(self)
                fail(slot)
                raise
            words[slot + 2] = _now()
            memory[slot * 8 + _STATUS] = OK
            return result

        return wait

    def begin_wait(slot: int) -> None:
        words[slot + 1] = _now()

    def finish(slot: int) -> None:
        words[slot + 2] = _now()
        memory[slot * 8 + _STATUS] = OK

    def finish_at_once(slot: int) -> None:
        words[slot + 1] = words[slot]
        finish(slot)

    def fail(slot: int) -> None:
        words[slot + 2] = _now()
        memory[slot * 8 + _STATUS] = ERROR

    def set_times(slot: int, wait_ns: int, done_ns: int) -> None:
        words[slot + 1] = wait_ns = max(wait_ns, words[slot + 1])
        words[slot + 2] = max(done_ns, wait_ns, words[slot + 2])

    def set_peer(slot: int, peer: int) -> None:
        _pack_rank(memory, slot * 8 + _PEER, peer)

    def skip() -> int:
        slot = claim()
        if slot * 8 < len(memory):
            words[slot] = NONE  # a reader that follows sees that nothing will come here
        return slot

    def detach() -> None:
        nonlocal memory, words
        memory = bytearray(memory)
        words = memoryview(memory).cast("q")

    return HotPath(make_post, make_wait, begin_wait, finish, finish_at_once, fail, set_times, set_peer, skip, detach)


LOST_PEER: Final = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "closed the connection",
    "Failed to recv",
    "failed to recv",
    "Socket is closed",
)  # how torch words an error of a rank whose peer is gone


def fail_posting(hot: HotPath, slot: int, error: BaseException) -> bool:
    """Completes the record of an operation that raised when it was posted.

    Args:
        hot: of the recorder that has the record.
        slot: where the record is.
        error: what was raised.

    Returns:
        Whether the operation was refused: False where its peer is gone.
    """
    lost = any(words in str(error) for words in LOST_PEER)
    if lost:
        hot.begin_wait(slot)
    hot.fail(slot)
    return not lost
