"""The recorder, which writes a rank's events as they happen.

The recorder works with any transport and any clock. Each event is one record of fixed size
(``ringsim.traces.events.RECORD``). Data that does not fit into a record (groups, shapes, names) is
numbered and written once to a second file. A real rank writes these two files::

    rank-2.events  [record][record][record][ 0 ][ 0 ] ...   memory-mapped, grown chunk by chunk; a
                                                            slot with status 0 is empty
    rank-2.names   {"table": "group", "id": 0, "name": "world", "ranks": [0, 1, 2, 3]}
                   {"table": "payload", "id": 0, "dtype": "float32", "shape": [1024],
                    "size_bytes": 4096}

The kernel keeps data written to the memory map even if the process dies. A killed rank therefore
leaves everything up to that moment, and ``ringsim.traces.parts`` can read the files while they
grow. Simulated ranks share one recorder, which writes to memory; the column ``thread`` then holds
the rank.

A layer that carries messages records them with these calls::

    # once for each kind of operation
    post = recorder.make_post(OP_CODES["isend"])
    # when the program calls the operation; the slot is None once recording has stopped
    slot = post(group, peer, tag, payload)
    # when the program begins to wait
    recorder.wait(slot)
    # when the wait is over, with ERROR if the operation raised an error
    recorder.complete(slot)
    # for facts that become known later, such as the source of a message or a GPU's times
    recorder.amend(slot, peer=3)
"""

from __future__ import annotations

import functools
import itertools
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
from typing import Any, NamedTuple, TypeVar

import numpy as np

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
    write_payload,
)
from ringsim.traces.sites import CallSites
from ringsim.traces.spans import label_in_force, stage_and_microbatch
from ringsim.traces.store import CHUNK, RECORD_BYTES, FileStore, Full, RecordStore

_WORDS = RECORD_BYTES // 8
# Type checkers know that `fields` is None for a dtype without fields.
_PEER_AT, _STATUS_AT = (RECORD.fields[name][1] for name in ("peer", "status"))  # type: ignore[index]
_NOT_YET = b"\xff" * 16  # NONE for wait_ns and done_ns

# Globals, because Python copies the variables of a closure at every call.
_frame_at = sys._getframe
# RECORD, with some adjacent fields joined into one
_pack_record = struct.Struct("<q16sQiiiqiiqI").pack_into
_pack_rank = struct.Struct("<i").pack_into

_about = stage_and_microbatch.get
_label = label_in_force.get

Post = Callable[..., int | None]
_Entry = TypeVar("_Entry")


class Hooks(NamedTuple):
    """Callbacks into the code that reports a library's operations to a recorder.

    Attributes:
        undo: removes the hooks.
        check_end: called when the program reports its end; raises an error if the program left
            something unfinished.
        on_imports: called when the program has imported its modules.
        on_growth: called occasionally, when the file grows.
        on_reading: called before the records are read, and before the recorder closes.
        complete_with: ``complete_with(handle, slot)`` makes the wait for a handle complete one more
            record, or returns False if the handle is unknown.
    """

    undo: Callable[[], None] = lambda: None
    check_end: Callable[[], None] = lambda: None
    on_imports: Callable[[], None] = lambda: None
    on_growth: Callable[[], None] = lambda: None
    on_reading: Callable[[], None] = lambda: None
    complete_with: Callable[[Any, int], bool] = lambda _handle, _slot: False


class Recorder:
    """Writes one rank's events to its files, from any thread.

    A recorder can also write the events of all simulated ranks to memory.

    Args:
        directory: the directory to write to, or None to keep the records in memory, where ``read``
            reads them.
        rank: the rank to record; a recorder in memory ignores it and asks ``who``.
        world_size: the number of ranks in the run.
        max_records: the number of records after which recording to files stops with a note; the
            program continues. A record takes 72 bytes.
        now: the clock, which returns the time in ns.
        who: the function that returns the value for the column ``thread``: the thread's identifier,
            or in memory the rank that is running.

    Attributes:
        directory: the directory of the files; has no meaning in memory.
        groups: the groups by number; ``payloads``, ``labels`` and ``files`` are the other tables.
        sites: finds the user's line.
        world: how often the process groups were created again, which distinguishes groups with
            equal names.
        users: the number of callers whose hooks report operations to this recorder.
        hooks: the installed hooks; by default, they do nothing.
        is_settled: returns whether all earlier operations on a group were recorded and are done,
            given the group's name.
        on_failure: called when a wait has failed or takes long; may raise an error that explains
            the problem.

    Raises:
        TraceFileError: the files cannot be created.

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
        self.hooks = Hooks()
        self.on_failure: Callable[[], None] = lambda: None
        self.is_settled: Callable[[str], bool] = lambda _group: False
        self._rank = rank
        self._now, self._who = now, who
        self._stopped = self._closed = False
        self._lock = threading.RLock()  # re-entrant, because a signal handler may also record
        self._numbers: dict[str, dict[Any, int]] = {
            "group": {},
            "payload": {},
            "label": {},
            "file": {},
        }
        self._next_number = {table: itertools.count().__next__ for table in self._numbers}
        # atomic, so that each thread gets slots of its own
        self._claim = itertools.count(step=_WORDS).__next__
        self.sites = CallSites(
            lambda name: self._number("file", name, self.files, name, {"name": name})
        )
        self._store = (
            RecordStore(bytearray(CHUNK * RECORD_BYTES))
            if directory is None
            else FileStore(directory, rank, max_records)
        )
        self._post_span = self.make_post(OP_CODES["span"])
        self._post_mark = self.make_post(OP_CODES["mark"])
        self.start_ns = 0 if self._in_memory else now()
        if not self._in_memory:
            self._introduce()

    def _introduce(self) -> None:
        """Records metadata about the process and makes forked processes stop recording."""
        for key, value in {
            "rank": self._rank,
            "world_size": self.world_size,
            "pid": os.getpid(),
            "argv": sys.argv,
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
        """The rank being recorded; in memory, the running rank."""
        return self._who() if self._in_memory else self._rank

    # -- operations

    def make_post(self, op: int, spoken: Mapping[str, int] | None = None) -> Post:
        """Returns a function that records the start of operations of one kind.

        The function is a closure, because looking up its data would take as long as writing the
        record.

        Args:
            op: the code of the kind.
            spoken: more precise codes, by the name of the library function that the user called.

        Returns:
            ``post(group, peer, tag, payload, label=None) -> slot``. Call it directly from the
            function that the user or the library calls. ``peer`` is a global rank, NONE or
            ANY_SOURCE. If ``label`` is None, the current label is used. The slot is None once
            recording has stopped.
        """
        now, who, claim, store = self._now, self._who, self._claim, self._store
        locate, place_of, post_anew = self.sites.locate, self.sites.places.get, self._post_anew
        posted = op | IN_FLIGHT << 16  # the column after op
        posted_as = {name: code | IN_FLIGHT << 16 for name, code in (spoken or {}).items()}
        known: tuple[int, tuple[CodeType, ...]] = posted, ()

        def post(
            group: int, peer: int, tag: int, payload: int, label: int | None = None
        ) -> int | None:
            nonlocal known
            state, way = known
            place = None
            try:  # the functions up to the user's frame are usually the same as last time
                frame: Any = _frame_at(2)
                for code in way:
                    if frame.f_code is not code:
                        break
                    frame = frame.f_back
                else:
                    place = place_of(key := id(frame.f_code) + frame.f_lasti)
                    if place is None:  # this is usually a thin wrapper that the user's frame calls
                        frame = frame.f_back
                        place = place_of((key, id(frame.f_code) + frame.f_lasti))
            except (ValueError, AttributeError):
                pass  # the thread began in the library
            if place is None:
                place, known = locate(posted, posted_as)
                state = known[0]
            slot = claim()
            if label is None:
                label = _label()
            try:
                _pack_record(
                    store.memory,
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

    def wait(self, slot: int) -> None:
        """Records that the program begins to wait for an operation."""
        self._store.words[slot + 1] = self._now()

    def complete(self, slot: int, status: int = OK, waited: bool = True) -> None:
        """Records that an operation is done or, with ERROR, that it raised an error.

        Args:
            slot: the slot of the operation.
            status: OK or ERROR. An operation that raised an error before the program waited for it
                was refused.
            waited: whether ``wait`` was called; pass False for an operation that blocked the
                program from its post until now.
        """
        store = self._store
        words = store.words
        if not waited:
            words[slot + 1] = words[slot]
        words[slot + 2] = self._now()
        store.memory[slot * 8 + _STATUS_AT] = status

    def complete_at_once(self, slot: int) -> None:
        """Records that an operation was done as soon as the program began to wait for it."""
        store = self._store
        words = store.words
        words[slot + 1] = words[slot + 2] = self._now()
        store.memory[slot * 8 + _STATUS_AT] = OK

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
        """Writes a record after making room, and replaces a peer or tag that does not fit."""
        end = slot * 8 + RECORD_BYTES
        if end > len(self._store.memory) and not self._grow(end):
            return None
        values = (group, payload, label, place, _fit(peer), _fit(tag), _about(), state)
        _pack_record(self._store.memory, slot * 8, self._now(), _NOT_YET, who, *values)
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
        """Records an operation posted on behalf of a simulated rank that is paused at ``frame``.

        Returns the slot of the operation.
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
        status: int | None = None,
    ) -> None:
        """Records facts about an operation that became known only after it was posted.

        Args:
            slot: the slot of the operation.
            peer: the global rank that sent the message received from any source.
            wait_ns: the time at which the operation began to block; raised to the time of the
                program's own call if that was later.
            done_ns: the time at which the operation was done; raised in the same way.
            status: the status; IN_FLIGHT for an operation whose wait returned although it is not
                done, which removes the time at which it was done.
        """
        words = self._store.words
        if peer is not None:
            _pack_rank(self._store.memory, slot * 8 + _PEER_AT, peer)
        if wait_ns is not None:
            words[slot + 1] = max(wait_ns, words[slot + 1])
        if done_ns is not None:
            words[slot + 2] = max(done_ns, words[slot + 1], words[slot + 2])
        if status is not None:
            self._store.memory[slot * 8 + _STATUS_AT] = status
            if status == IN_FLIGHT:
                words[slot + 2] = NONE

    # -- spans and marks

    def span_begin(self, name: str) -> int | None:
        """Records the start of a span, with the current stage and microbatch.

        Returns the span's slot, or None once recording has stopped.
        """
        return self._post_span(NONE, NONE, NONE, NONE, self.label(name))

    def call_begin(self, label: int, group: int, payload: int) -> int | None:
        """Records the start of a user's own collective, as a span with a group and a size.

        Returns the span's slot, or None once recording has stopped.
        """
        return self._post_span(group, NONE, NONE, payload, label)

    def span_end(self, slot: int, *, failed: bool = False) -> None:
        """Records the end of a span, with the status ERROR if an exception passed through it."""
        self.complete(slot, ERROR if failed else OK)

    def mark(self, name: str) -> None:
        """Writes a mark at the current time."""
        self._mark(self.label(name))

    def notice(
        self,
        kind: str,
        text: str,
        group: int = NONE,
        peer: int = NONE,
        tag: int = NONE,
        payload: int = NONE,
    ) -> None:
        """Records a mistake in the operation that the given numbers describe.

        See ``ringsim.traces.events.word_notice``.
        """
        self._mark(self.label(word_notice(kind, text)), payload, group, peer, tag)

    def count_bytes(self, sizes: Sequence[int], label: str) -> None:
        """Records how many bytes the rank's tensors have now, by kind; see ``BYTE_KINDS``."""
        self._mark(self.label(label), self.payload("", sizes, sum(sizes)))

    def _mark(
        self,
        label: int,
        payload: int = NONE,
        group: int = NONE,
        peer: int = NONE,
        tag: int = NONE,
    ) -> None:
        slot = self._post_mark(group, peer, tag, payload, label)
        if slot is not None:
            self.complete(slot)

    # -- names

    def group(self, name: str, ranks: Sequence[int], *, fresh: bool = False) -> int:
        """Numbers a group.

        Args:
            name: the name of the group.
            ranks: the global ranks of its members, in the group's order.
            fresh: whether nothing was posted on the group before, so that the k-th operations of
                all its members belong together.

        Returns:
            The group's number, or NONE if the disk is full; the methods below also return NONE
            then.
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
        """Numbers an operation's payload; see ``ringsim.traces.events.Payload``."""
        value = Payload(
            dtype, tuple(shape), size_bytes, reduction, tuple(map(tuple, strides)), splits
        )
        return self._number("payload", value, self.payloads, value, write_payload(value))

    def label(self, name: str) -> int:
        """Assigns a number to the name of a span, a mark or an operation."""
        return self._number("label", name, self.labels, name, {"name": name})

    def _number(
        self, table: str, key: Any, values: dict[int, Any], value: Any, line: dict[str, Any]
    ) -> int:
        numbers = self._numbers[table]
        if key in numbers:
            return numbers[key]
        with self._lock:
            if key not in numbers:
                number = self._next_number[table]()  # a signal handler would get the next number
                # on disk first, so that a reader of the record also finds its names
                try:
                    self._store.append({"table": table, "id": number, **line})
                except OSError as error:
                    self._stop(error)
                    return NONE
                values[number] = value
                numbers[key] = number
            return numbers[key]

    def set_meta(self, key: str, value: Any) -> None:
        """Records one fact about the rank as JSON; for each key, the last recorded value wins."""
        with self._lock:
            self._store.append({"table": "meta", "key": key, "value": value})

    # -- reading

    @property
    def count(self) -> int:
        """The number of records written so far; in memory, only those of the running rank."""
        records = self._store.records
        written = records["status"] != 0
        if self._in_memory:
            written &= records["thread"] == self._who()
        return int(np.count_nonzero(written))

    def awaited(self) -> set[int]:
        """Returns the operations that any thread is waiting for, as indices into the part."""
        records = self._store.records
        return set(
            np.flatnonzero((records["status"] == IN_FLIGHT) & (records["wait_ns"] != NONE)).tolist()
        )

    def list_open_groups(self) -> set[str]:
        """Returns the names of the groups with operations in flight."""
        records = self._store.records
        numbers = records["group"][records["status"] == IN_FLIGHT]
        return {self.groups[number].name for number in numbers.tolist() if number in self.groups}

    def complete_as_failed(self, places: Iterable[int]) -> None:
        """Records that waits were cut short, given the indices of the operations in the part."""
        for place in places:
            self.complete(place * _WORDS, ERROR)

    def bookmark(self) -> int:
        """Returns a bookmark, which precedes everything that is posted after this call."""
        slot = self._claim()
        words = self._store.words
        if slot < len(words):
            words[slot] = NONE  # tells a reader that this slot stays empty
        return slot

    def records_since(self, bookmark: int) -> Ints:
        """Returns the records that the calling thread or running rank has written since a bookmark.

        The result is a copied array of ``RECORD``.
        """
        end = self.bookmark()
        records: Ints = self._store.records[bookmark // _WORDS + 1 : end // _WORDS]
        mine: Ints = records[(records["status"] != 0) & (records["thread"] == self._who())]
        return mine

    def read(self, rank: int | None = None, since: int = 0) -> Events:
        """Returns the events in memory, ordered by rank.

        With ``rank``, only this rank's events; with ``since``, only those after a bookmark.
        """
        records = self._store.records[since // _WORDS : self._claim() // _WORDS]
        wanted = records["status"] != 0
        records = records.compress(wanted if rank is None else wanted & (records["thread"] == rank))
        # take is faster than indexing
        records = records.take(np.argsort(records["thread"], kind="stable"))
        columns: dict[str, Any] = {
            name: records[name] for name in RECORD.names or () if name != "thread"
        }
        tables = Tables(
            tuple(group._replace(name=read_word(group.name)) for group in _in_order(self.groups)),
            tuple(_in_order(self.payloads)),
            tuple(map(read_word, _in_order(self.labels))),
            tuple(map(read_word, _in_order(self.files))),
        )
        return make_events({**columns, "rank": records["thread"]}, tables)

    def group_of(self, slot: int) -> int:
        """Returns the number of the group on which an operation was posted."""
        return int(self._store.records["group"][slot // _WORDS])

    def place_of(self, slot: int) -> str:
        """Returns the line that posted an operation, as " at ring.py:7", or "" if unknown."""
        record = self._store.records[slot // _WORDS]
        if record["file"] == NONE:
            return ""
        return f" at {os.path.basename(self.files[record['file']])}:{record['line']}"

    def complete_times(self) -> None:
        """Records newly known facts, such as when GPU work was done; never blocks.

        Call this method before you read the records.
        """
        if not self._closed:
            try:
                self.hooks.on_reading()
            except OSError as error:
                self._stop(error)

    def close(self) -> None:
        """Ends the recording and records the time; may be called more than once."""
        if self._closed:
            return
        self.complete_times()
        self._closed = True
        if not self._stopped:
            self.set_meta("end_ns", self._now())
        with self._lock:  # not while the file grows
            self._store.close()

    # -- room

    def _grow(self, end: int) -> bool:
        """Makes room for the bytes before ``end``, or returns False if recording has stopped."""
        with self._lock:
            if self._stopped:
                return False
            try:
                self._store.grow(end)
            except OSError as error:
                self._stop(error)
                return False
        self.hooks.on_growth()
        return True

    def _stop(self, error: OSError) -> None:
        """Stops recording and notes the reason; the program continues."""
        if self._stopped:
            return
        self._stopped = True
        why = error if isinstance(error, Full) else f"the disk is full or has failed ({error})"
        try:
            self.set_meta("stopped_at_max", True)
            self.set_meta(
                "note",
                f"Recording of rank {self._rank} stopped: {why}. "
                "Later events are not in the trace.",
            )
        except OSError:
            pass  # the disk is completely full, but the records show how far the program came


def _detach(reference: weakref.ref[Recorder]) -> None:
    """Detaches a process forked by the rank from the rank's files.

    Otherwise both processes would write to the same places.
    """
    recorder = reference()
    if recorder is not None:
        recorder._stopped = recorder._closed = True
        recorder._lock = threading.RLock()  # another thread may have held the old lock at the fork
        recorder._store.abandon()


def _in_order(table: dict[int, _Entry]) -> list[_Entry]:
    """Returns a table's entries sorted by number, as signal handlers may have reordered them."""
    return [entry for _, entry in sorted(table.items())]


def _fit(value: Any) -> int:
    """Converts a peer or tag to a value that fits into its column.

    A value that does not fit becomes NONE; the library itself will refuse the operation.
    """
    return value if isinstance(value, int) and -(1 << 31) <= value < 1 << 31 else NONE


def _measure_cost_ns() -> int:
    """Returns the CPU time that recording one operation takes, in ns, without the library.

    The time covers post, wait and done, and is the minimum of several tries.
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


# -- operations whose peer has died

LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "closed the connection",
    "Failed to recv",
    "failed to recv",
    "Socket is closed",
)  # torch's error texts for a rank whose peer has died


def fail_posting(recorder: Recorder, slot: int, error: BaseException) -> bool:
    """Completes the record of an operation that raised an error when it was posted.

    Returns whether the operation was refused. A refused operation never reached the wire, so it
    shows nothing about the other side. If the rank had already noticed that its peer has died, its
    next message raises immediately instead of in the wait. Such an operation was not refused, and
    is recorded as a broken wait.
    """
    lost = any(words in str(error) for words in LOST_PEER)
    if lost:
        recorder.wait(slot)
    recorder.complete(slot, ERROR)
    return not lost
