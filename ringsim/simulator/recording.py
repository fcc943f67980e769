"""Where simulated ranks write what they do: one tape for all of them, one record an operation.

Times are float seconds on the virtual clock and become nanoseconds when the tape is read. Nothing of a record depends on the machine, so
that the same run gives the same bytes.

The recorder of a simulated rank: spans and marks go onto the tape that all ranks share; the log of ``ringsim.comm`` reads there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ringsim.simulator.clock import Clock
from ringsim.traces.events import (
    ERROR,
    IN_FLIGHT,
    NONE,
    OK,
    OP_CODES,
    Events,
    Group,
    Ints,
    Payload,
    Tables,
    make_events,
    readable,
    word_notice,
)
from ringsim.traces.recorder import CallSites, label_in_force, stage_and_microbatch

__all__ = ["Kind", "RankRecorder", "Tape"]

_RECORD: Final = np.dtype(
    [
        ("post_s", "<f8"),
        ("wait_s", "<f8"),
        ("done_s", "<f8"),
        ("rank", "<i4"),
        ("group", "<i4"),
        ("payload", "<i4"),
        ("label", "<i4"),
        ("file", "<i4"),
        ("line", "<i4"),
        ("peer", "<i4"),
        ("tag", "<i4"),
        ("stage", "<i4"),
        ("microbatch", "<i4"),
        ("op", "<i8"),
    ]
)
_RECORD_WORDS: Final = _RECORD.itemsize // 8
_NOT_YET: Final = -1.0
_FIRST: Final = 1 << 12  # records that there is room for at the beginning
_LEAPS_TO: Final = 1 << 28  # bytes up to which room grows by leaps: what is not used costs nothing, and what is copied does
_NUMBERS_AT: Final = 6  # where a record's numbers of four bytes begin, in their size: rank, group, payload, label, file, line, peer, tag
_CODES_AT: Final = 7  # where those of eight bytes begin: stage and microbatch as one, op
_label_of: Final = label_in_force.get
_meaning_of: Final = stage_and_microbatch.get


class Kind:
    """What messages of one dtype and shape have in common.

    Attributes:
        number: its number among the payloads of the trace.
        size_bytes: of one such tensor.
        payload: what the trace says of it.
        dtype: of the tensors, None where there are several.
        shape: likewise.
    """

    __slots__ = ("dtype", "number", "payload", "shape", "size_bytes")

    def __init__(self, number: int, payload: Payload, dtype: torch.dtype | None = None, shape: torch.Size | None = None) -> None:
        self.number, self.payload, self.dtype, self.shape = number, payload, dtype, shape
        self.size_bytes = payload.size_bytes

    def fits(self, tensor: torch.Tensor) -> bool:
        """Returns whether this is a plain tensor of this kind on the CPU."""
        return (
            type(tensor) is torch.Tensor
            and tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and tensor.is_cpu
            and tensor.layout is torch.strided
        )


class Tape:
    """The records of all ranks, in the order of posting.

    Attributes:
        times: the memory of the records as float64: ``times[slot]`` is when the record there was posted, the two after it when the
            program began to wait, and when it was done.
        failed: slots of what ended with an error.
        followed: slots of spans that the wait for an operation ends, and its slot.
        sites: what each source file is.
    """

    def __init__(self) -> None:
        self._look_at(_make_memory(_FIRST * _RECORD.itemsize))
        self.failed: set[int] = set()
        self.followed: dict[int, int] = {}
        self._kinds: dict[tuple[torch.dtype, torch.Size], Kind] = {}
        self._end = 0  # in words
        self._payloads: dict[Payload, int] = {}
        self._groups: dict[Group, int] = {}
        self._labels: dict[str, int] = {}
        self._files: dict[str, int] = {}
        self.sites = CallSites(lambda name: self._files.setdefault(name, len(self._files)))
        self.sites.declare_library(*_torch_files())

    def post(self, now: float, rank: int, op: int, group: int, peer: int, tag: int, payload: int, frame: Any) -> int:
        """Writes down that an operation begins.

        Args:
            now: when.
            rank: whose.
            op: its code.
            group: its number.
            peer: a global rank, NONE or ANY_SOURCE.
            tag: of a message, else NONE.
            payload: its number.
            frame: from which to look for the user's line: that of the user in the commonest case.

        Returns:
            The slot.
        """
        place = self.sites.places.get(id(frame.f_code) + frame.f_lasti)
        if place is None or place[0] < 0:
            place = self.find_place(frame)
        return self.write(now, rank, op, group, peer, tag, payload, _label_of(), place)

    def write(
        self, now: float, rank: int, op: int, group: int, peer: int, tag: int, payload: int, label: int, place: tuple[int, int]
    ) -> int:
        """Writes a record; see ``post``. ``label`` is its number, ``place`` a file's number and a line. Returns the slot."""
        slot = self._end
        if slot + _RECORD_WORDS > len(self.times):
            self._grow()
        self.times[slot] = now
        self.times[slot + 1] = self.times[slot + 2] = _NOT_YET
        at = 2 * slot + _NUMBERS_AT
        self._numbers[at] = rank
        self._numbers[at + 1] = group
        self._numbers[at + 2] = payload
        self._numbers[at + 3] = label
        self._numbers[at + 4], self._numbers[at + 5] = place
        self._numbers[at + 6] = peer
        self._numbers[at + 7] = tag
        self._codes[slot + _CODES_AT] = _meaning_of()
        self._codes[slot + _CODES_AT + 1] = op
        self._end = slot + _RECORD_WORDS
        return slot

    def find_place(self, frame: Any) -> tuple[int, int]:
        """Returns file number and line of the user's code that a frame was called by, or is."""
        found = self.sites.find(frame)
        return self.sites.find_stand_in(frame) if found is None else self.sites.learn(found)

    def set_peer(self, slot: int, peer: int) -> None:
        """Writes down whom a message from anybody came from."""
        self._numbers[2 * slot + _NUMBERS_AT + 6] = peer

    def place_of(self, slot: int) -> str:
        """Returns the file and line of a record, as " at ring.py:7"."""
        at = 2 * slot + _NUMBERS_AT
        file, line = self._numbers[at + 4], self._numbers[at + 5]
        name = next(name for name, number in self._files.items() if number == file)
        return f" at {os.path.basename(name)}:{line}"

    def _grow(self) -> None:
        size = len(self._memory)
        memory = _make_memory(max(2 * size, min(8 * size, _LEAPS_TO)))
        memory[: len(self._memory)] = self._memory
        self._look_at(memory)

    def _look_at(self, memory: memoryview) -> None:
        self._memory = memory
        self.times = memory.cast("d")
        self._numbers = memory.cast("i")
        self._codes = memory.cast("q")

    # -- names

    def kind_of(self, tensor: torch.Tensor) -> Kind:
        """Returns what a tensor has in common with others of its dtype and shape."""
        dtype, shape = tensor.dtype, tensor.shape
        kind = self._kinds.get((dtype, shape))
        if kind is None:
            kind = self._kinds[dtype, shape] = self._make_kind(dtype, shape)
        return kind

    def _make_kind(self, dtype: torch.dtype, shape: torch.Size) -> Kind:
        payload = Payload(str(dtype).removeprefix("torch."), tuple(shape), shape.numel() * dtype.itemsize)
        return Kind(self.number_payload(payload), payload, dtype, shape)

    def number_payload(self, payload: Payload) -> int:
        """Returns the number of what an operation carries."""
        return self._payloads.setdefault(payload, len(self._payloads))

    def number_group(self, name: str, ranks: Sequence[int]) -> int:
        """Returns the number of a group."""
        return self._groups.setdefault(Group(name, tuple(ranks)), len(self._groups))

    def label(self, name: str) -> int:
        """Returns the number of a label."""
        return self._labels.setdefault(name, len(self._labels))

    # -- reading

    def read(self, rank: int | None = None) -> Events:
        """Returns all that was written, ordered by rank; or what one rank did."""
        for span, operation in self.followed.items():
            self.times[span + 1], self.times[span + 2] = self.times[operation + 1], self.times[operation + 2]
            if operation in self.failed:
                self.failed.add(span)
        rows = np.frombuffer(self._memory, dtype=np.int64, count=self._end).reshape(-1, _RECORD_WORDS)
        ranks = rows.view(_RECORD)["rank"][:, 0]
        order = np.argsort(ranks, kind="stable") if rank is None else np.flatnonzero(ranks == rank)
        records = rows.take(order, axis=0).view(_RECORD)[:, 0]  # rows of words: faster than records
        columns: dict[str, Any] = {name: records[name] for name in _RECORD.names or () if not name.endswith("_s")}
        for name in ("post", "wait", "done"):
            columns[f"{name}_ns"] = _to_ns(records[f"{name}_s"])
        columns["seq"] = _places_within(records["rank"])
        status = np.where(columns["done_ns"] == NONE, IN_FLIGHT, OK)
        if self.failed:
            status[np.isin(order, np.array(sorted(self.failed)) // _RECORD_WORDS)] = ERROR
        columns["status"] = status
        # Names as a trace of real ranks has them, which is read from files: what no reader can take is written out.
        groups = tuple(group._replace(name=readable(group.name)) for group in self._groups)
        tables = Tables(groups, tuple(self._payloads), tuple(map(readable, self._labels)), tuple(self._files))
        return make_events(columns, tables)


def _make_memory(size: int) -> memoryview:
    """Returns memory that is not touched before it is used: half of it may never be."""
    return np.empty(size, dtype=np.uint8).data


def _to_ns(seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Returns times in nanoseconds, NONE for those that are not yet."""
    ns = seconds * 1e9
    np.rint(ns, out=ns)
    np.copyto(ns, NONE, where=ns < 0)
    return ns.astype(np.int64)


def _places_within(ranks: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Returns for each of these ranks, which are in order, how many of the same one come before it."""
    counts = np.bincount(ranks)
    return np.arange(len(ranks)) - np.repeat(np.cumsum(counts) - counts, counts)


def _torch_files() -> tuple[str, str]:
    directory = torch.__path__[0]
    return directory, f"{directory}/distributed/distributed_c10d.py"


_SPAN: Final = OP_CODES["span"]
_MARK: Final = OP_CODES["mark"]
_LINE_COLUMNS: Final = ("op", "status", "label", "group", "payload", "post_ns", "done_ns")


class RankRecorder:
    """Writes the spans and marks of one rank; what ``RankState.recorder`` is asked for while a rank is simulated.

    It answers what the log asks of ``ringsim.traces.recorder.Recorder``, in the same words.

    Args:
        clock: the clock.
        tape: where they go.
        rank: whose they are.
        world_size: how many ranks there are.
    """

    users = 0  # nobody hooks into torch

    def __init__(self, clock: Clock, tape: Tape, rank: int, world_size: int) -> None:
        self._clock, self._tape = clock, tape
        self.rank, self.world_size = rank, world_size
        self.sites = tape.sites

    def span_begin(self, name: str) -> int:
        """Writes a span as begun, with the stage and microbatch in force; returns its slot."""
        if self._clock.measures:
            self._clock.pay()
        tape = self._tape
        label, place = tape.number_label(name), tape.find_place(sys._getframe(1))
        return tape.write(self._clock.now, self.rank, _SPAN, NONE, NONE, NONE, NONE, label, place)

    def span_end(self, slot: int, *, failed: bool = False) -> None:
        """Writes a span as ended: ok, or error where an exception passed through it."""
        if self._clock.measures:
            self._clock.pay()
        self._tape.times[slot + 2] = self._clock.now
        if failed:
            self._tape.failed.add(slot)

    def mark(self, name: str) -> None:
        """Writes a mark: something happened now."""
        self._write_mark(name, NONE, NONE, NONE, NONE)

    def notice(self, kind: str, message: str, group: int = NONE, peer: int = NONE, tag: int = NONE, payload: int = NONE) -> None:
        """Writes down that something wrong was found (see ``ringsim.traces.events``), in the operation that the numbers describe."""
        self._write_mark(word_notice(kind, message), group, peer, tag, payload)

    def _write_mark(self, label: str, group: int, peer: int, tag: int, payload: int) -> None:
        tape = self._tape
        slot = tape.write(
            self._clock.now, self.rank, _MARK, group, peer, tag, payload, tape.number_label(label), tape.find_place(sys._getframe(1))
        )
        tape.times[slot + 2] = self._clock.now

    def label(self, name: str) -> int:
        """Returns the number of a label."""
        return self._tape.number_label(name)

    # -- what the log asks

    @property
    def count(self) -> int:
        """How many records this rank has written."""
        return len(self.read())

    def bookmark(self) -> int:
        """Returns a place: what is posted from now on stands behind it."""
        return self.count

    def read(self) -> Events:
        """Returns what this rank has done."""
        return self._tape.read(self.rank)

    def records_since(self, bookmark: int) -> Ints:
        """Returns what was written since a bookmark."""
        events = self.read()
        records: Ints = np.zeros(len(events) - bookmark, dtype=[(name, "<i8") for name in _LINE_COLUMNS])
        for name in _LINE_COLUMNS:
            records[name] = getattr(events, name)[bookmark:]
        return records

    @property
    def groups(self) -> tuple[Group, ...]:
        """What the numbers of groups mean."""
        return self.read().tables.groups

    @property
    def payloads(self) -> tuple[Payload, ...]:
        """What the numbers of payloads mean."""
        return self.read().tables.payloads

    @property
    def labels(self) -> tuple[str, ...]:
        """What the numbers of labels mean."""
        return self.read().tables.labels

    def group(self, name: str, ranks: Sequence[int]) -> int:
        """Returns the number of a group."""
        return self._tape.number_group(name, ranks)

    def payload(self, dtype: str, shape: Sequence[int], size_bytes: int) -> int:
        """Returns the number of a payload."""
        return self._tape.number_payload(Payload(dtype, tuple(shape), size_bytes))

    def call_begin(self, label: int, group: int, payload: int) -> int:
        """Writes a span that has a group and a size: a call of a user's own collective. Returns its slot."""
        place = self._tape.find_place(sys._getframe(1))
        return self._tape.write(self._clock.now, self.rank, _SPAN, group, NONE, NONE, payload, label, place)

    def complete_with(self, handle: Any, slot: int) -> bool:
        """Lets the wait for an operation complete a record, too; False where it is none, or has been waited for."""
        slot_of: int = getattr(handle, "slot", -1)
        if slot_of < 0:
            return False
        self._tape.followed[slot] = slot_of
        return True
