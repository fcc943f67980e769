"""What one rank has posted, read from its part while it writes it.

Each look reads what is new since the last one, and the operations that were not done then::

    slots   [done][done][posted, awaited][done][posted][ 0 ][ 0 ]
                         ^ blocked in it        ^ open   ^ the next look begins here
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import socket
from array import array
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ringsim.diagnose.snapshot import MOST_REFUSED
from ringsim.traces.events import (
    ANY_SOURCE,
    COLLECTIVE,
    ERROR,
    IN_FLIGHT,
    NONE,
    OK,
    OP_KINDS,
    OP_NAMES,
    RECORD,
    RECV,
    SEND,
    Group,
    Ints,
    Payload,
    read_group,
    read_payload,
)
from ringsim.traces.findings import Operation
from ringsim.traces.parts import name_cells

__all__ = ["Channel", "Head", "LivePart"]

_WINDOW: Final = 64  # slots that a look reads at first; more follow where they are full
_WINDOW_MAX: Final = 1 << 16
_NO_SLOTS: Final[Ints] = np.zeros(0, dtype=np.int64)
_NO_GROUP: Final = Group("", ())
_NO_PAYLOAD: Final = Payload("", (), NONE)


class Head(NamedTuple):
    """How far a rank has come: equal heads at two looks say that nothing has happened in between.

    Attributes:
        slots: how many slots it had written.
        open: how many of its operations were not done.
        awaited: the slots of those in which it is blocked.
    """

    slots: int
    open: int
    awaited: tuple[int, ...]


class Channel(NamedTuple):
    """What is matched in order: the sends, or the recvs, from one rank to another under one tag."""

    group: Group
    src: int
    dst: int
    tag: int
    kind: int


_BEFORE: Final = Head(0, 0, ())


class LivePart:
    """The part of one rank, while it grows.

    Args:
        directory: where the parts are.
        rank: whose part it is.
        world_size: number of ranks.
    """

    def __init__(self, directory: Path, rank: int, world_size: int) -> None:
        self.rank = rank
        self._world_size = world_size
        self._events_path = directory / f"rank-{rank}.events"
        self._names_path = self._events_path.with_suffix(".names")
        self._begin()

    def _begin(self) -> None:
        """Knows nothing of the rank yet."""
        self.head = _BEFORE
        self.meta: dict[str, Any] = {}
        self._inode = 0
        self._names_read = 0  # bytes
        self._unfinished = b""  # the last line of the names, where its end is not there yet
        self._groups: dict[int, Group] = {}
        self._payloads: dict[int, Payload] = {}
        self._files: dict[int, str] = {}
        self._records: Ints = np.zeros(0, dtype=RECORD)
        self._next = 0  # the first slot that no look has seen written
        self._holes = _NO_SLOTS  # slots before it that were empty: left so for good, or about to be written by another thread
        self._open = _NO_SLOTS
        self._forget()

    def _forget(self) -> None:
        """Has everything counted anew."""
        self._counted = 0
        self._late: list[Ints] = []  # slots that were holes when what surrounds them was counted
        self._channels: dict[tuple[int, int, int, int], int] = {}  # (group, peer, tag, kind) by this rank's numbers: how many
        self._collectives: dict[int, array[int]] = {}  # group: slots
        self._from_any: list[int] = []  # slots of recvs from any source that were open when they were counted
        self._refused: list[int] = []  # slots of messages that were refused
        self._index: dict[int, int] = {}  # slot of what was open when it was counted: its place on its channel

    def look(self) -> Head:
        """Reads what is new; cheap where little is. A rank that has not begun to record has the head of one that has done nothing."""
        if not self._map():
            return self.head
        status = self._records["status"]
        if len(self._holes):
            left = self._records["post_ns"][self._holes] == 0  # where nothing will come, there is another number
            filled = status[self._holes] != 0
            fresh, self._holes = self._holes[filled], self._holes[left & ~filled]
            if len(fresh):
                self._late.append(fresh[fresh < self._counted])
                self._take(fresh)
        width = _WINDOW
        while True:
            window = status[self._next : self._next + width]
            written = np.flatnonzero(window)
            if not len(written):
                break
            if len(written) <= written[-1]:
                self._holes = np.concatenate([self._holes, self._next + np.flatnonzero(window[: written[-1]] == 0)])
            self._take(self._next + written)
            self._next += int(written[-1]) + 1
            if len(window) < width:
                break
            width = min(4 * width, _WINDOW_MAX)
        if len(self._open):
            now = status[self._open]
            if ((now == ERROR) & (self._records["wait_ns"][self._open] == NONE)).any():
                self._forget()  # it was refused: what was never posted takes no place among the messages
            self._open = self._open[now == IN_FLIGHT]
        awaited = self._open
        if len(awaited):
            awaited = awaited[(self._records["wait_ns"][awaited] != NONE) & (self._records["done_ns"][awaited] == NONE)]
        self.head = Head(self._next - len(self._holes), len(self._open), tuple(awaited.tolist()))
        return self.head

    def _take(self, slots: Ints) -> None:
        """Notes which of some newly written slots are messages or collectives that are not done."""
        slots = slots[(self._records["status"][slots] == IN_FLIGHT) & (OP_KINDS[self._records["op"][slots]] <= COLLECTIVE)]
        if len(slots):
            self._open = np.concatenate([self._open, slots])

    def _map(self) -> bool:
        """Maps the file as far as it reaches by now; False where there is none. Only the map keeps a descriptor: ranks may be many."""
        try:
            about = os.stat(self._events_path)
            if about.st_ino != self._inode:  # the first, or one of another run that stands in the place of the last
                self._begin()
            if about.st_size // RECORD.itemsize > len(self._records):
                with self._events_path.open("rb") as file:
                    self._inode = os.fstat(file.fileno()).st_ino
                    memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                self._records = np.frombuffer(memory, dtype=RECORD, count=len(memory) // RECORD.itemsize)
        except (OSError, ValueError):  # ValueError: it is empty yet
            return False
        return len(self._records) > 0

    def read_names(self) -> None:
        """Reads the names that are new: groups, payloads, files, and what the rank says of itself."""
        try:
            with self._names_path.open("rb", buffering=0) as file:
                file.seek(self._names_read)
                fresh = file.readall()
        except OSError:
            return
        if fresh:
            self._names_read += len(fresh)
            *lines, self._unfinished = (self._unfinished + fresh).split(b"\n")
            for line in lines:
                entry = json.loads(line)
                if entry["table"] == "meta":
                    self.meta[entry["key"]] = entry["value"]
                elif entry["table"] == "group":
                    self._groups[entry["id"]] = read_group(entry)
                elif entry["table"] == "payload":
                    self._payloads[entry["id"]] = read_payload(entry)
                elif entry["table"] == "file":
                    name = entry["name"]
                    self._files[entry["id"]] = name_cells([name]).get(name, name)

    # -- counting: what has its place in which order ---------------------------------------------------------------------------------

    def count(self) -> None:
        """Counts what was posted since the last time, up to what the last look saw."""
        for slots in (*self._late, np.arange(self._counted, self._next)):
            if len(slots):
                self._count(slots)
        self._counted, self._late = self._next, []
        if self._from_any:
            self._from_any = [slot for slot in self._from_any if not self._count_from_any(slot)]
        if len(self._index) > 2 * len(self._open) + 64:
            still = set(self._open.tolist())
            self._index = {slot: index for slot, index in self._index.items() if slot in still}

    def _count(self, slots: Ints) -> None:
        records = self._records[slots]
        kind = OP_KINDS[records["op"]]
        refused = (records["status"] == ERROR) & (records["wait_ns"] == NONE)
        self._refused += slots[refused & (kind <= RECV)].tolist()
        valid = (records["status"] != 0) & ~refused & (kind <= COLLECTIVE)
        slots, records, kind = slots[valid], records[valid], kind[valid]
        for group in np.unique(records["group"][kind == COLLECTIVE]).tolist():
            mine = slots[(kind == COLLECTIVE) & (records["group"] == group)].tolist()
            before = self._collectives.setdefault(group, array("q"))
            self._index.update(zip(mine, range(len(before), len(before) + len(mine)), strict=True))
            before.extend(mine)
        from_any = (kind == RECV) & (records["peer"] == ANY_SOURCE)
        self._from_any += slots[from_any].tolist()
        message = (kind <= RECV) & ~from_any
        slots, records, kind = slots[message], records[message], kind[message]
        group, tag = records["group"].astype(np.int64), records["tag"].astype(np.int64)  # one number a channel has room in 64 bits
        key = (((group + 1) * (self._world_size + 1) + records["peer"] + 1) * 2 + kind) << 32 | (tag & 0xFFFFFFFF)
        order = np.argsort(key, kind="stable")
        starts = np.flatnonzero(np.diff(key[order], prepend=-1))  # of each channel's run
        for first, last in itertools.pairwise([*starts.tolist(), len(order)]):
            one = records[order[first]]
            channel = (int(one["group"]), int(one["peer"]), int(one["tag"]), int(kind[order[first]]))
            before_it = self._channels.get(channel, 0)
            self._channels[channel] = before_it + last - first
            places = order[first:last]
            for place in np.flatnonzero(records["status"][places] == IN_FLIGHT).tolist():
                self._index[int(slots[places[place]])] = before_it + place

    def _count_from_any(self, slot: int) -> bool:
        """Counts a recv from any source as one from its source, once that is known; True when there is nothing more to wait for."""
        record = self._records[slot]
        if record["status"] == IN_FLIGHT:
            return False
        if record["peer"] >= 0:
            channel = (int(record["group"]), int(record["peer"]), int(record["tag"]), RECV)
            self._channels[channel] = self._channels.get(channel, 0) + 1
            for still in self._index:  # what is open on that channel moves back by one, for the message is gone, whoever was posted first
                other = self._records[still]
                if all(other[name] == record[name] for name in ("group", "peer", "tag")) and OP_KINDS[other["op"]] == RECV:
                    self._index[still] += 1
        return True

    def channels(self) -> dict[Channel, int]:
        """Returns how many messages were posted on each channel; after ``count``."""
        found: dict[Channel, int] = {}
        for (group, peer, tag, kind), count in self._channels.items():
            ends = (self.rank, peer) if kind == SEND else (peer, self.rank)
            found[Channel(self._groups.get(group, _NO_GROUP), *ends, tag, kind)] = count
        return found

    @property
    def open_from_any(self) -> tuple[int, ...]:
        """The slots of the recvs from any source that are not done; after ``count``."""
        return tuple(self._from_any)

    def collectives(self) -> dict[Group, array[int]]:
        """Returns the slots of the collectives on each group, in order; after ``count``."""
        return {self._groups.get(group, _NO_GROUP): slots for group, slots in self._collectives.items()}

    # -- single operations -----------------------------------------------------------------------------------------------------------

    def operation(self, slot: int, now_ns: int) -> tuple[Operation, Group]:
        """Returns what the record in a slot says, and on which group."""
        record = self._records[slot]
        group = self._groups.get(int(record["group"]), _NO_GROUP)
        payload = self._payloads.get(int(record["payload"]), _NO_PAYLOAD)
        wait_ns = int(record["wait_ns"])
        return Operation(
            rank=self.rank,
            op=OP_NAMES[record["op"]],
            peer=int(record["peer"]),
            tag=int(record["tag"]),
            group=group.name,
            size_bytes=payload.size_bytes,
            dtype=payload.dtype,
            shape=payload.shape,
            file=self._files.get(int(record["file"]), ""),
            line=int(record["line"]),
            status="in_flight",
            waited_s=max(now_ns - wait_ns, 0) * 1e-9 if wait_ns != NONE else 0.0,
        ), group

    def open_slots(self) -> list[int]:
        """Returns the slots of what is posted and not done."""
        slots: list[int] = self._open.tolist()
        return slots

    def refused(self) -> list[tuple[int, int]]:
        """Returns the slots of the latest messages that raised instead of being posted, and their would-be places; after ``count``."""
        found = []
        for slot in self._refused[-MOST_REFUSED:]:
            record, before = self._records[slot], self._records[:slot]
            same = [before[name] == record[name] for name in ("group", "peer", "tag")]
            posted = (before["status"] == IN_FLIGHT) | (before["wait_ns"] != NONE) | (before["status"] == OK)
            alike = OP_KINDS[before["op"]] == OP_KINDS[record["op"]]
            found.append((slot, int(np.logical_and.reduce([*same, posted, alike]).sum())))
        return found

    def index(self, slot: int) -> int:
        """Returns the place of an open operation on its channel, or among its rank's collectives on the group; after ``count``."""
        return self._index.get(slot, 0)

    def count_overtaking(self, slot: int) -> int:
        """Counts the recvs on the channel of an open one that were posted after it and are done.

        They were from any source, and have its message; or it is about to be finished, too.
        """
        record, later = self._records[slot], self._records[slot + 1 : self._next]
        same = [later[name] == record[name] for name in ("group", "peer", "tag")]
        return int(np.logical_and.reduce([*same, later["status"] == OK, OP_KINDS[later["op"]] == RECV]).sum())

    @property
    def process(self) -> tuple[int | None, bool]:
        """The rank's process, None where it is not known or not on this machine; and whether it has ended its recording."""
        pid = self.meta.get("pid") if self.is_here else None
        return pid, "end_ns" in self.meta

    @property
    def is_here(self) -> bool:
        """Whether the rank has begun to record, on this machine: what it writes can be read at once."""
        return self.meta.get("host") == socket.gethostname()

    def awaiting_threads(self) -> set[int]:
        """Returns the threads, by ``threading.get_ident()``, that are blocked in an operation."""
        return set(self._records["thread"][list(self.head.awaited)].tolist())

    @property
    def open_bytes(self) -> int:
        """How much is on its way, as far as is known."""
        numbers = self._records["payload"][self._open].tolist()
        return sum(max(self._payloads.get(number, _NO_PAYLOAD).size_bytes, 0) for number in numbers)
