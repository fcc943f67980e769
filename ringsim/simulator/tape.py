"""Where simulated ranks write what they do: one tape for all of them, one record an operation.

Times are float seconds on the virtual clock and become nanoseconds when the tape is read. Nothing of a record depends on the machine, so
that the same run gives the same bytes.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from ringsim.traces.call_sites import CallSites
from ringsim.traces.events import ERROR, IN_FLIGHT, NONE, OK, Events, Group, Payload, Tables, make_events
from ringsim.traces.hot_path import label_in_force, meaning

__all__ = ["Kind", "Tape"]

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
_pack: Final = struct.Struct("<d16siiiiiiiiqq").pack_into
_NOT_YET: Final = struct.pack("<dd", -1.0, -1.0)
_FIRST: Final = 1 << 12  # records that there is room for at the beginning
_PEER_AT: Final = _RECORD.fields["peer"][1] if _RECORD.fields else 0
_FILE_AT: Final = _RECORD.fields["file"][1] if _RECORD.fields else 0
_frame_at: Final = sys._getframe
_label_of: Final = label_in_force.get
_meaning_of: Final = meaning.get


class Kind:
    """What messages of one dtype and shape have in common.

    Attributes:
        number: its number among the payloads of the trace.
        size_bytes: of one such tensor.
        payload: what the trace says of it.
        plain: whether its bytes may be copied as they lie, where the tensor is contiguous.
        views: memory of the CPU where such tensors were met, by its address. A view says only where, and how much: it may be used for
            whatever tensor of this kind lies there now.
    """

    __slots__ = ("number", "payload", "plain", "size_bytes", "views")

    def __init__(self, number: int, payload: Payload, plain: bool) -> None:
        self.number, self.payload, self.plain = number, payload, plain
        self.size_bytes = payload.size_bytes
        self.views: dict[int, memoryview] = {}


class _Kinds(dict[tuple[torch.dtype, torch.Size], Kind]):
    """Makes a kind when it is first asked for."""

    def __init__(self, make: Callable[[tuple[torch.dtype, torch.Size]], Kind]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: tuple[torch.dtype, torch.Size]) -> Kind:
        kind = self[key] = self._make(key)
        return kind


class Tape:
    """The records of all ranks, in the order of posting.

    Attributes:
        times: the memory of the records as float64: ``times[slot]`` is when the record there was posted, the two after it when the
            program began to wait, and when it was done.
        failed: slots of what ended with an error.
        followed: slots of spans that the wait for an operation ends, and its slot.
        sites: what each source file is.
        kinds: of tensors, by (dtype, shape); a kind is made when it is first asked for.
    """

    def __init__(self) -> None:
        self._memory = bytearray(_FIRST * _RECORD.itemsize)
        self.times = memoryview(self._memory).cast("d")
        self.failed: set[int] = set()
        self.followed: dict[int, int] = {}
        kinds = _Kinds(self._add_kind)
        self.kinds = kinds
        self._end = 0  # in words
        self._payloads: dict[Payload, int] = {}
        self._groups: dict[Group, int] = {}
        self._labels: dict[str, int] = {}
        self._files: dict[str, int] = {}
        self.sites = CallSites(lambda name: self._files.setdefault(name, len(self._files)))
        self.sites.declare_library(*_torch_files())
        self._places = self.sites.places

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
        file, line = self._places.get(id(frame.f_code) + frame.f_lasti) or self.find_place(frame)
        slot = self._end
        try:
            _pack(self._memory, slot * 8, now, _NOT_YET, rank, group, payload, _label_of(), file, line, peer, tag, _meaning_of(), op)
        except struct.error:
            self._grow()
            _pack(self._memory, slot * 8, now, _NOT_YET, rank, group, payload, _label_of(), file, line, peer, tag, _meaning_of(), op)
        self._end = slot + _RECORD_WORDS
        return slot

    def write(
        self, now: float, rank: int, op: int, group: int, peer: int, tag: int, payload: int, label: int, place: tuple[int, int]
    ) -> int:
        """Writes a record; see ``post``. ``label`` is its number, ``place`` a file's number and a line. Returns the slot."""
        slot = self._end
        try:
            _pack(self._memory, slot * 8, now, _NOT_YET, rank, group, payload, label, *place, peer, tag, _meaning_of(), op)
        except struct.error:
            self._grow()
            _pack(self._memory, slot * 8, now, _NOT_YET, rank, group, payload, label, *place, peer, tag, _meaning_of(), op)
        self._end = slot + _RECORD_WORDS
        return slot

    def find_place(self, frame: Any) -> tuple[int, int]:
        """Returns file number and line of the user's code that a frame was called by, or is."""
        innermost, sites = frame, self.sites
        while frame is not None:
            name = frame.f_code.co_filename
            file = sites.get(name)
            if file is None:
                file = sites.learn(name)
            if file >= 0:
                return self._places.get(id(frame.f_code) + frame.f_lasti) or sites.learn_place(frame)
            frame = frame.f_back
        return sites.find_stand_in(innermost)

    def set_peer(self, slot: int, peer: int) -> None:
        """Writes down whom a message from anybody came from."""
        struct.pack_into("<i", self._memory, slot * 8 + _PEER_AT, peer)

    def place_of(self, slot: int) -> str:
        """Returns the file and line of a record, as " at ring.py:7"."""
        file, line = struct.unpack_from("<ii", self._memory, slot * 8 + _FILE_AT)
        name = next(name for name, number in self._files.items() if number == file)
        return f" at {os.path.basename(name)}:{line}"

    def _grow(self) -> None:
        memory = bytearray(2 * len(self._memory))
        memory[: len(self._memory)] = self._memory
        self._memory = memory
        self.times = memoryview(memory).cast("d")

    # -- names

    def _add_kind(self, key: tuple[torch.dtype, torch.Size]) -> Kind:
        dtype, shape = key
        payload = Payload(str(dtype).removeprefix("torch."), tuple(shape), shape.numel() * dtype.itemsize)
        return Kind(self.number_payload(payload), payload, not dtype.is_complex and shape.numel() > 1)

    def number_payload(self, payload: Payload) -> int:
        """Returns the number of what an operation carries."""
        return self._payloads.setdefault(payload, len(self._payloads))

    def number_group(self, name: str, ranks: Sequence[int]) -> int:
        """Returns the number of a group."""
        return self._groups.setdefault(Group(name, tuple(ranks)), len(self._groups))

    def number_label(self, name: str) -> int:
        """Returns the number of a label."""
        return self._labels.setdefault(name, len(self._labels))

    # -- reading

    def read(self, rank: int | None = None) -> Events:
        """Returns all that was written, ordered by rank; or what one rank did."""
        for span, operation in self.followed.items():
            self.times[span + 1], self.times[span + 2] = self.times[operation + 1], self.times[operation + 2]
            if operation in self.failed:
                self.failed.add(span)
        records = np.frombuffer(self._memory, dtype=_RECORD, count=self._end // _RECORD_WORDS)
        status = np.where(records["done_s"] < 0, IN_FLIGHT, OK)
        if self.failed:
            status[np.array(sorted(self.failed)) // _RECORD_WORDS] = ERROR
        order = np.argsort(records["rank"], kind="stable") if rank is None else np.flatnonzero(records["rank"] == rank)
        records, status = records[order], status[order]
        columns: dict[str, Any] = {name: records[name] for name in _RECORD.names or () if not name.endswith("_s")}
        for name in ("post", "wait", "done"):
            seconds = records[f"{name}_s"]
            columns[f"{name}_ns"] = np.where(seconds < 0, NONE, np.rint(seconds * 1e9)).astype(np.int64)
        tables = Tables(tuple(self._groups), tuple(self._payloads), tuple(self._labels), tuple(self._files))
        return make_events({**columns, "status": status}, tables)


def _torch_files() -> tuple[str, str]:
    directory = torch.__path__[0]
    return directory, f"{directory}/distributed/distributed_c10d.py"
