"""The recorder: writes what happens on a rank as it happens.

Whatever carries the messages and whatever the clock. Each event is one record of fixed size
(``ringsim.traces.events.RECORD``). What does not fit into it (groups, shapes, names) is numbered,
and written once beside it. A real rank writes to two files of its own::

    rank-2.events  [record][record][record][ 0 ][ 0 ] ...   memory-mapped, grown chunk by chunk; a
                                                            slot with status 0 is empty
    rank-2.names   {"table": "group", "id": 0, "name": "world", "ranks": [0, 1, 2, 3]}
                   {"table": "payload", "id": 0, "dtype": "float32", "shape": [1024],
                    "size_bytes": 4096}

The kernel keeps what was written to the map whatever happens to the process: a rank that is killed
leaves everything up to that moment, and ``ringsim.traces.parts`` can read the files while they
grow. Simulated ranks share one recorder that writes to memory, in which the column of the thread
holds the rank.

Whoever carries messages records them with four calls::

    post = recorder.make_post(OP_CODES["isend"])  # once for each kind of operation
    slot = post(
        group, peer, tag, payload
    )  # when the program calls it; None once recording has stopped
    recorder.wait(slot)  # when the program begins to wait
    recorder.complete(slot)  # when that is over; ERROR where it raised
    recorder.amend(
        slot, peer=3
    )  # what is known late: where a message came from, the times of a GPU
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import numpy as np

from ringsim.errors import TraceFileError
from ringsim.traces.events import (
    ERROR,
    IN_FLIGHT,
    NONE,
    OK,
    OP_CODES,
    RECORD,
    Events,
    Group,
    Ints,
    Payload,
    Tables,
    make_events,
    read_word,
    word_notice,
    write_group,
)
from ringsim.traces.sites import CallSites
from ringsim.traces.spans import label_in_force, stage_and_microbatch

__all__ = ["LOST_PEER", "Recorder", "fail_posting"]

RECORD_BYTES: Final = RECORD.itemsize
# records that a file has room for at the start: every rank of a large run pays for them
FIRST_CHUNK: Final = 512
CHUNK: Final = 4096  # records by which it grows: 72 pages

_WORDS: Final = RECORD_BYTES // 8
# None for a dtype without fields
_PEER_AT, _STATUS_AT = (RECORD.fields[name][1] for name in ("peer", "status"))  # type: ignore[index]
_NOT_YET: Final = b"\xff" * 16  # NONE for wait_ns and done_ns
_POPULATE: Final = getattr(mmap, "MADV_POPULATE_WRITE", 23)  # Python names it from 3.14 on

# Globals rather than variables of a closure, which Python copies at every call.
_frame_at: Final = sys._getframe
# RECORD with some neighbours joined
_pack_record: Final = struct.Struct("<q16sQiiiqiiqI").pack_into
_pack_rank: Final = struct.Struct("<i").pack_into

_about: Final = stage_and_microbatch.get
_label: Final = label_in_force.get

Post = Callable[..., int | None]


class Recorder:
    """Writes the events of one rank to its files, from any thread.

    Or those of all simulated ranks to memory.

    Args:
        directory: where the files go; None to keep the records in memory, where ``read`` finds
            them.
        rank: the rank that is recorded; in memory, ``who`` tells.
        world_size: number of ranks in the run.
        max_records: recording to files stops there and says so, while the program runs on. 72 bytes
            each.
        now: the clock, in ns.
        who: what stands in the column of the thread: the thread, or in memory the rank that is
            running.

    Attributes:
        make_post: ``make_post(op, spoken={})`` makes ``post(group, peer, tag, payload,
            label=None) -> slot``, which writes down the beginning of operations of one kind, and is
            called by the function that the user or the library called. ``op`` is the code;
            ``spoken`` has better ones by the name of the library's function (in its speaking file)
            that the user called. ``peer`` is a global rank, NONE or ANY_SOURCE; ``label`` that in
            force where None. The slot is None once recording has stopped.
        wait: ``wait(slot)`` writes down that the program begins to wait for an operation.
        complete: ``complete(slot, status=OK, *, waited=True)`` writes down that it is done, or with
            ERROR that it raised; what raised before the program waited was refused. ``waited`` is
            False for what blocked the program from its posting until now.
        complete_at_once: ``complete_at_once(slot)`` does both, where the program begins to wait for
            what is done.
        directory: where the files are; of no meaning in memory.
        groups: what the numbers of groups mean; likewise ``payloads``, ``labels`` and ``files``.
        sites: finds the user's line.
        world: how often the process groups were made again: part of what tells groups from each
            other.
        users: how many have installed hooks that show operations to this recorder.
        undo_hooks: takes the hooks away again.
        check_end: raises where the program left something undone when it says that it is done.
        on_imports: called when the program has imported what it needs.
        on_growth: called now and then, when the file grows.
        on_reading: called before the records are read, and before the recorder closes.
        on_failure: called when a wait has failed, or takes long; may raise an error that says why.
        complete_with: ``complete_with(handle, slot)`` has the wait for a handle complete one more
            record; False where it is not known.

    Raises:
        TraceFileError: the files cannot be made.

    Example:
        >>> times = iter([10, 20, 30])
        >>> recorder = Recorder(None, 0, 2, now=times.__next__, who=lambda: 0)
        >>> group, payload = recorder.group("world", [0, 1]), recorder.payload("float32", [2], 8)
        >>> post = recorder.make_post(OP_CODES["isend"])
        >>> slot = post(group, 1, 0, payload)
        >>> recorder.wait(slot)
        >>> recorder.complete(slot)
        >>> events = recorder.read()
        >>> events.post_ns.tolist(), events.wait_ns.tolist(), events.done_ns.tolist()
        ([10], [20], [30])
    """

    make_post: Callable[..., Post]
    wait: Callable[[int], None]
    complete: Callable[..., None]
    complete_at_once: Callable[[int], None]

    def __init__(
        self,
        directory: Path | str | None,
        rank: int,
        world_size: int,
        *,
        max_records: int = 1 << 21,
        now: Callable[[], int] = time.monotonic_ns,
        who: Callable[[], int] = threading.get_ident,
    ) -> None:
        self._in_memory = directory is None
        self.directory = Path(directory or "")
        self.world_size = world_size
        self.groups: dict[int, Group] = {}
        self.payloads: dict[int, Payload] = {}
        self.labels: dict[int, str] = {}
        self.files: dict[int, str] = {}
        self.world = self.users = 0
        self.undo_hooks: Callable[[], None] = _do_nothing
        self.check_end: Callable[[], None] = _do_nothing
        self.on_imports: Callable[[], None] = _do_nothing
        self.on_growth: Callable[[], None] = _do_nothing
        self.on_reading: Callable[[], None] = _do_nothing
        self.on_failure: Callable[[], None] = _do_nothing
        self.complete_with: Callable[[Any, int], bool] = lambda _handle, _slot: False
        self._rank = rank
        self._max_records = max_records
        self._now, self._who = now, who
        self._stopped = self._closed = False
        self._lock = threading.RLock()  # a signal handler may record while its thread holds it
        self._numbers: dict[str, dict[Any, int]] = {
            "group": {},
            "payload": {},
            "label": {},
            "file": {},
        }
        self._next_number = {table: itertools.count().__next__ for table in self._numbers}
        # atomic: every thread gets slots of its own
        self._claim = itertools.count(step=_WORDS).__next__
        self.sites = CallSites(
            lambda name: self._number("file", name, self.files, name, {"name": name})
        )
        self._store = None if directory is None else _Files(directory, rank, max_records)
        memory: Any = _zeros(CHUNK) if self._store is None else self._store.memory
        self._make_calls(memoryview(memory).cast("B"))
        self._post_span = self.make_post(OP_CODES["span"])
        self._post_mark = self.make_post(OP_CODES["mark"])
        self.start_ns = 0 if self._in_memory else now()
        if not self._in_memory:
            self._introduce()

    def _introduce(self) -> None:
        """Writes down who records, and sees to it that a forked process does not."""
        for key, value in {
            "rank": self._rank,
            "world_size": self.world_size,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "start_ns": self.start_ns,
            "start_unix_ns": time.time_ns(),
            "cost_ns_per_op": _measure_cost_ns(),
        }.items():
            self.set_meta(key, value)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=functools.partial(_detach, weakref.ref(self)))

    @property
    def rank(self) -> int:
        """The rank that is recorded; in memory, the one that is running."""
        return self._who() if self._in_memory else self._rank

    # -- operations

    def _make_calls(self, memory: memoryview) -> None:
        """Makes what each operation calls.

        Closures over the memory, for looking that up would cost as much as the writing.
        """
        now, who, claim, post_anew = self._now, self._who, self._claim, self._post_anew
        locate, place_of = self.sites.locate, self.sites.places.get
        words = memory.cast("q")

        def use(grown: Any) -> None:
            nonlocal memory, words
            room = memoryview(grown).cast("B")
            if len(room) >= len(memory):  # else a signal handler has made more room meanwhile
                room_in_words = room.cast("q")
                words = room_in_words  # first: a thread that finds room in `memory` finds it here
                self._memory = memory = room

        def make_post(op: int, spoken: Mapping[str, int] | None = None) -> Post:
            posted = op | IN_FLIGHT << 16  # the column after op
            posted_as = {name: code | IN_FLIGHT << 16 for name, code in (spoken or {}).items()}
            known: tuple[int, tuple[CodeType, ...]] = posted, ()

            def post(
                group: int, peer: int, tag: int, payload: int, label: int | None = None
            ) -> int | None:
                nonlocal known
                state, way = known
                place = None
                try:  # the user's frame is mostly behind the same functions as last time
                    frame: Any = _frame_at(2)
                    for code in way:
                        if frame.f_code is not code:
                            break
                        frame = frame.f_back
                    else:
                        place = place_of(key := id(frame.f_code) + frame.f_lasti)
                        if place is None:  # a thin wrapper, mostly called by the user's frame
                            frame = frame.f_back
                            place = place_of((key, id(frame.f_code) + frame.f_lasti))
                except (ValueError, AttributeError):
                    pass  # a thread that begins in the library
                if place is None:
                    place, known = locate(posted, posted_as)
                    state = known[0]
                slot = claim()
                if label is None:
                    label = _label()
                try:
                    _pack_record(
                        memory,
                        slot * 8,
                        now(),
                        _NOT_YET,
                        who(),
                        group,
                        payload,
                        label,
                        place,
                        peer,
                        tag,
                        _about(),
                        state,
                    )
                except struct.error:
                    return post_anew(slot, who(), group, payload, label, place, peer, tag, state)
                return slot

            return post

        def wait(slot: int) -> None:
            words[slot + 1] = now()

        def complete_at_once(slot: int) -> None:
            words[slot + 1] = words[slot + 2] = now()
            memory[slot * 8 + _STATUS_AT] = OK

        def complete(slot: int, status: int = OK, *, waited: bool = True) -> None:
            if not waited:
                words[slot + 1] = words[slot]
            words[slot + 2] = now()
            memory[slot * 8 + _STATUS_AT] = status

        self._memory = memory
        self.make_post, self.wait, self.complete, self.complete_at_once, self._use = (
            make_post,
            wait,
            complete,
            complete_at_once,
            use,
        )

    def _post_anew(
        self,
        slot: int,
        who: int,
        group: int,
        payload: int,
        label: int,
        place: int,
        peer: Any,
        tag: Any,
        state: int,
    ) -> int | None:
        """Writes a record for which there was no room.

        Or whose peer or tag is no number that the library could take.
        """
        if slot * 8 + RECORD_BYTES > len(self._memory) and not self._grow(slot * 8):
            return None
        values = (group, payload, label, place, _fit(peer), _fit(tag), _about(), state)
        _pack_record(self._memory, slot * 8, self._now(), _NOT_YET, who, *values)
        return slot

    def post_for(
        self,
        who: int,
        frame: FrameType | None,
        op: int,
        group: int,
        peer: int,
        tag: int,
        payload: int,
    ) -> int | None:
        """Writes down an operation that somebody else posted.

        A simulated rank that gave way at ``frame``. Returns its slot.
        """
        place = NONE if frame is None else self.sites.place(frame)
        return self._post_anew(
            self._claim(), who, group, payload, _label(), place, peer, tag, op | IN_FLIGHT << 16
        )

    def amend(
        self,
        slot: int,
        *,
        peer: int | None = None,
        wait_ns: int | None = None,
        done_ns: int | None = None,
    ) -> None:
        """Writes down what is known late of an operation.

        Args:
            slot: the operation.
            peer: the global rank that a message received from any source came from.
            wait_ns: when it began to block; not before the program's own call, which caused it.
            done_ns: when it was done; likewise.
        """
        words = self._memory.cast("q")
        if peer is not None:
            _pack_rank(self._memory, slot * 8 + _PEER_AT, peer)
        if wait_ns is not None:
            words[slot + 1] = max(wait_ns, words[slot + 1])
        if done_ns is not None:
            words[slot + 2] = max(done_ns, words[slot + 1], words[slot + 2])

    # -- spans and marks

    def span_begin(self, name: str) -> int | None:
        """Writes down that a span begins, with the stage and microbatch in force.

        Returns its slot, None once recording has stopped.
        """
        return self._post_span(NONE, NONE, NONE, NONE, self.label(name))

    def call_begin(self, label: int, group: int, payload: int) -> int | None:
        """Begins a span that has a group and a size: a call of a user's own collective.

        Returns its slot, as ``span_begin`` does.
        """
        return self._post_span(group, NONE, NONE, payload, label)

    def span_end(self, slot: int, *, failed: bool = False) -> None:
        """Writes down that a span ends: ok, or error where an exception passed through it."""
        self.complete(slot, ERROR if failed else OK)

    def mark(self, name: str) -> None:
        """Writes a mark: something happened now."""
        self._mark(self.label(name), NONE, NONE, NONE, NONE)

    def notice(
        self,
        kind: str,
        text: str,
        group: int = NONE,
        peer: int = NONE,
        tag: int = NONE,
        payload: int = NONE,
    ) -> None:
        """Writes down a mistake that was found in the operation that the numbers describe.

        See ``ringsim.traces.events.word_notice``.
        """
        self._mark(self.label(word_notice(kind, text)), group, peer, tag, payload)

    def _mark(self, label: int, group: int, peer: int, tag: int, payload: int) -> None:
        slot = self._post_mark(group, peer, tag, payload, label)
        if slot is not None:
            self.complete(slot)

    # -- names

    def group(self, name: str, ranks: Sequence[int], *, fresh: bool = False) -> int:
        """Numbers a group.

        Args:
            name: what it is called.
            ranks: its members, global ranks in the group's order.
            fresh: nothing was posted on it before; so the k-th operation of one member is that of
                the others.

        Returns:
            Its number; NONE, here and below, where the disk is full.
        """
        group = Group(name, tuple(ranks), self.world)
        line = write_group(group) | ({"fresh": True} if fresh else {})
        return self._number("group", (group, fresh), self.groups, group, line)

    def payload(
        self,
        dtype: str,
        shape: Sequence[int],
        size_bytes: int,
        reduction: str = "",
        strides: Sequence[Sequence[int]] = (),
        splits: tuple[tuple[int, ...], ...] = (),
    ) -> int:
        """Numbers what an operation carries; see ``ringsim.traces.events.Payload``."""
        value = Payload(
            dtype, tuple(shape), size_bytes, reduction, tuple(map(tuple, strides)), splits
        )
        line = {
            key: said
            for key, said in value._asdict().items()
            if said or key not in ("reduction", "strides", "splits")
        }
        return self._number("payload", value, self.payloads, value, line)

    def label(self, name: str) -> int:
        """Numbers a name of a span, a mark or an operation."""
        return self._number("label", name, self.labels, name, {"name": name})

    def _number(
        self, table: str, key: Any, values: dict[int, Any], value: Any, line: dict[str, Any]
    ) -> int:
        numbers = self._numbers[table]
        if key in numbers:
            return numbers[key]
        with self._lock:
            if key not in numbers:
                number = self._next_number[table]()  # a signal handler gets the one after it
                # on disk before in memory: whoever reads a record with the number finds the name
                try:
                    self._append({"table": table, "id": number, **line})
                except OSError as error:
                    self._stop(error)
                    return NONE
                values[number] = value
                numbers[key] = number
            return numbers[key]

    def set_meta(self, key: str, value: Any) -> None:
        """Writes down one fact about the rank (JSON-able); the last value of a key counts."""
        self._append({"table": "meta", "key": key, "value": value})

    def _append(self, line: dict[str, Any]) -> None:
        if self._store is not None:
            with self._lock:
                self._store.append(line)

    # -- what has been written

    @property
    def count(self) -> int:
        """How many records have been written; in memory, by the rank that is running."""
        records = np.frombuffer(self._memory, dtype=RECORD)
        written = records["status"] != 0
        return int(
            np.count_nonzero(
                written & (records["thread"] == self._who()) if self._in_memory else written
            )
        )

    def awaited(self) -> set[int]:
        """Returns the operations that any thread waits for.

        By their places as readers of the part number them.
        """
        records = np.frombuffer(self._memory, dtype=RECORD)
        return set(
            np.flatnonzero((records["status"] == IN_FLIGHT) & (records["wait_ns"] != NONE)).tolist()
        )

    def complete_as_failed(self, places: Iterable[int]) -> None:
        """Writes down that operations are over whose wait was cut short.

        By their places as readers of the part number them.
        """
        for place in places:
            self.complete(place * _WORDS, ERROR)

    def bookmark(self) -> int:
        """Returns a place: what is posted from now on stands behind it."""
        slot = self._claim()
        if slot * 8 < len(self._memory):
            self._memory.cast("q")[slot] = NONE  # a reader sees that nothing will come here
        return slot

    def records_since(self, bookmark: int) -> Ints:
        """Returns what the calling thread, or the running rank, has written since a bookmark.

        An array of ``RECORD``, a copy.
        """
        end = self.bookmark()
        records: Ints = np.frombuffer(self._memory, dtype=RECORD)[
            bookmark // _WORDS + 1 : end // _WORDS
        ]
        mine: Ints = records[(records["status"] != 0) & (records["thread"] == self._who())]
        return mine

    def read(self, rank: int | None = None) -> Events:
        """Returns what was written to memory, ordered by rank.

        Where ``rank`` is given, what it wrote.
        """
        records = np.frombuffer(
            self._memory,
            dtype=RECORD,
            count=min(self._claim() // _WORDS, len(self._memory) // RECORD_BYTES),
        )
        wanted = records["status"] != 0
        records = records.compress(wanted if rank is None else wanted & (records["thread"] == rank))
        # faster than by an index
        records = records.take(np.argsort(records["thread"], kind="stable"))
        columns: dict[str, Any] = {
            name: records[name] for name in RECORD.names or () if name != "thread"
        }
        groups = (
            group._replace(name=read_word(group.name)) for _, group in sorted(self.groups.items())
        )
        payloads = (payload for _, payload in sorted(self.payloads.items()))
        labels = (read_word(label) for _, label in sorted(self.labels.items()))
        files = (read_word(file) for _, file in sorted(self.files.items()))
        tables = Tables(tuple(groups), tuple(payloads), tuple(labels), tuple(files))
        return make_events({**columns, "rank": records["thread"]}, tables)

    def group_of(self, slot: int) -> int:
        """Returns the number of the group on which an operation was posted."""
        return int(np.frombuffer(self._memory, dtype=RECORD, count=1, offset=slot * 8)["group"][0])

    def place_of(self, slot: int) -> str:
        """Returns where an operation was posted, as " at ring.py:7"; empty if unknown."""
        record = np.frombuffer(self._memory, dtype=RECORD, count=1, offset=slot * 8)[0]
        if record["file"] == NONE:
            return ""
        return f" at {os.path.basename(self.files[record['file']])}:{record['line']}"

    def complete_times(self) -> None:
        """Writes down what is known late (when GPUs were done). Does not block.

        For whoever is about to read the records.
        """
        if not self._closed:
            try:
                self.on_reading()
            except OSError as error:
                self._stop(error)

    def close(self) -> None:
        """Ends the record, and writes down when. Closing twice is harmless."""
        if self._closed:
            return
        self.complete_times()
        self._closed = True
        if not self._stopped:
            self.set_meta("end_ns", self._now())
        if self._store is not None:
            with self._lock:  # not while the file grows
                self._store.close()

    # -- room

    def _grow(self, offset: int) -> bool:
        """Makes room at ``offset``; False where recording stops."""
        with self._lock:
            if self._stopped:
                return False
            if self._store is None:
                # untouched pages cost nothing
                memory: Any = _zeros(4 * (offset // RECORD_BYTES + 1))
                memory[: len(self._memory)] = self._memory
            else:
                try:
                    memory = self._store.grow(offset)
                except OSError as error:
                    self._stop(error)
                    return False
            if memory is None:
                self._stop(None)
                return False
            self._use(memory)
        self.on_growth()
        return True

    def _stop(self, error: OSError | None) -> None:
        """Stops recording while the program runs on; one note says why."""
        if self._stopped:
            return
        self._stopped = True
        why = (
            f"the disk could not take more ({error})"
            if error
            else f"the maximum of {self._max_records:,} records was reached"
        )
        try:
            self.set_meta("stopped_at_max", True)
            self.set_meta(
                "note",
                (
                    f"Recording of rank {self._rank} stopped: {why}. What "
                    "came later is not in the trace."
                ),
            )
        except OSError:
            pass  # the disk is full to the last byte; the records say how far it went


def _zeros(records: int) -> Ints:
    return np.zeros(records * RECORD_BYTES, dtype=np.uint8)


class _Files:
    """The two files of a rank: a memory-mapped array of records, and lines of names.

    The recorder calls one method at a time, but a signal handler may call another in its middle.
    """

    def __init__(self, directory: Path | str, rank: int, max_records: int) -> None:
        self._most_bytes = max_records * RECORD_BYTES
        self._closed = False
        events_path = Path(directory, f"rank-{rank}.events")
        names_path = events_path.with_suffix(".names")
        try:
            events_path.parent.mkdir(parents=True, exist_ok=True)
            for path in (events_path, names_path):
                # rather than cut it: an earlier recorder that still maps it would crash
                path.unlink(missing_ok=True)
            self._names = os.open(
                names_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600
            )
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            self._events = os.open(events_path, flags, 0o600)
            self.memory: Any = b""
            self.memory = self._extend(FIRST_CHUNK)
        except OSError as error:
            raise TraceFileError(
                "the directory of a run must be writable and have "
                f"{FIRST_CHUNK * RECORD_BYTES:,} bytes free, got {error} (rank {rank}). "
                "Choose another path or free some space."
            ) from error

    def _extend(self, records: int) -> mmap.mmap:
        """Gives the file room for more records and maps it whole.

        The zeros are written, for a full disk is then an error here, and nowhere else. They are
        appended: if a signal handler has made room meanwhile, its records stay.
        """
        start = len(self.memory)
        length = min(start + records * RECORD_BYTES, self._most_bytes)
        zeros = memoryview(bytes(max(length - os.fstat(self._events).st_size, 0)))
        while zeros:
            zeros = zeros[os.write(self._events, zeros) :]
        # A new map each time, not a resized one: other threads may be writing through the old one,
        # which stays valid until they let go.
        memory = mmap.mmap(self._events, length)
        try:
            # map the pages now, at once, rather than in the middle of operations
            memory.madvise(_POPULATE, start, length - start)
        except (AttributeError, OSError, ValueError):
            pass  # not Linux, or one before 5.14
        return memory

    def grow(self, offset: int) -> Any:
        """Makes room at ``offset`` and returns where to write.

        None where the file has its largest size, or is closed.
        """
        if self._closed or offset >= self._most_bytes:
            return None
        while offset >= len(self.memory):
            self.memory = self._extend(CHUNK)
        return self.memory

    def append(self, line: dict[str, Any]) -> None:
        """Writes a line of names; in one go, so that a kill leaves a whole line or none."""
        if not self._closed:
            os.write(self._names, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Closes the files. The map stays valid for threads that are in the middle of a record."""
        if not self._closed:
            self._closed = True
            os.close(self._events)
            os.close(self._names)

    def abandon(self) -> None:
        """Writes nothing more, in a process forked from the one that does."""
        self._closed = True


def _detach(reference: weakref.ref[Recorder]) -> None:
    """Lets go of the files, in a process forked from the rank.

    The two would write to the same places.
    """
    recorder = reference()
    if recorder is not None and recorder._store is not None:
        recorder._stopped = recorder._closed = True
        recorder._lock = threading.RLock()  # another thread may have held the old one at the fork
        recorder._store.abandon()
        recorder._use(bytearray(recorder._memory))


def _fit(value: Any) -> int:
    """Returns a peer or tag as it can be written down.

    NONE for what no column holds (the library itself will refuse it).
    """
    return value if isinstance(value, int) and -(1 << 31) <= value < 1 << 31 else NONE


def _do_nothing() -> None:
    pass


def _measure_cost_ns() -> int:
    """CPU time of one recorded operation in ns, without the communication library's part.

    Post, wait, done: the least of some tries.
    """
    recorder = Recorder(None, 0, 1, now=time.monotonic_ns, who=threading.get_ident)
    post, costs = recorder.make_post(OP_CODES["isend"]), []
    for _ in range(4):
        start_ns = time.thread_time_ns()
        for _ in range(100):
            slot = post(0, 0, 0, 0) or 0
            recorder.wait(slot)
            recorder.complete(slot)
        costs.append(time.thread_time_ns() - start_ns)
    return min(costs) // 100


# -- operations whose peer is gone

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


def fail_posting(recorder: Recorder, slot: int, error: BaseException) -> bool:
    """Completes the record of an operation that raised when it was posted.

    Returns whether it was refused. A rank may notice that its peer has died before it posts its
    next message, which then raises at once instead of in the wait. That is recorded as a wait that
    broke, too. What was refused never reached the wire, and says nothing of the other side.
    """
    lost = any(words in str(error) for words in LOST_PEER)
    if lost:
        recorder.wait(slot)
    recorder.complete(slot, ERROR)
    return not lost
