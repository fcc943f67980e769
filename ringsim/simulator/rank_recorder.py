"""The recorder of a simulated rank: spans and marks go onto the tape that all ranks share; the log of ``ringsim.comm`` reads there."""

from __future__ import annotations

import sys
import threading
from typing import Any, Final

import numpy as np

from ringsim.simulator.clock import Clock
from ringsim.simulator.handles import Operation
from ringsim.simulator.tape import Tape
from ringsim.traces.events import NONE, OP_CODES, Events, Ints, Payload, word_notice

__all__ = ["RankRecorder"]

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

    def number_label(self, name: str) -> int:
        """Returns the number of a label."""
        return self._tape.number_label(name)

    # -- what the log asks

    @property
    def count(self) -> int:
        """How many records this rank has written."""
        return len(self.read())

    @property
    def hot(self) -> RankRecorder:
        """Who says where the records are: see ``skip``."""
        return self

    def skip(self) -> int:
        """Returns what `records_between` takes for the end of what there is."""
        return self.count

    def read(self) -> Events:
        """Returns what this rank has done."""
        return self._tape.read(self.rank)

    def records_between(self, first: int, last: int) -> Ints:
        """Returns what was written between two of ``skip``, as records of the calling thread."""
        events = self.read()
        records: Ints = np.zeros(last - first, dtype=[("thread", "<i8"), *((name, "<i8") for name in _LINE_COLUMNS)])
        for name in _LINE_COLUMNS:
            records[name] = getattr(events, name)[first:last]
        records["thread"] = threading.get_ident()
        return records

    def entry(self, table: str, number: int) -> dict[str, Any]:
        """Returns what a number of a table stands for."""
        tables = self.read().tables
        if table == "label":
            return {"name": tables.labels[number]}
        return tables.groups[number]._asdict() if table == "group" else tables.payloads[number]._asdict()

    def number(self, table: str, **entry: Any) -> int:
        """Returns the number of a group or a payload."""
        if table == "group":
            return self._tape.number_group(entry["name"], entry["ranks"])
        return self._tape.number_payload(Payload(entry["dtype"], tuple(entry["shape"]), entry["size_bytes"]))

    def call_begin(self, label: int, group: int, payload: int) -> int:
        """Writes a span that has a group and a size: a call of a user's own collective. Returns its slot."""
        place = self._tape.find_place(sys._getframe(1))
        return self._tape.write(self._clock.now, self.rank, _SPAN, group, NONE, NONE, payload, label, place)

    def complete_with(self, handle: Any, slot: int) -> bool:
        """Lets the wait for an operation complete a record, too; False where it is none, or has been waited for."""
        if not isinstance(handle, Operation) or handle.slot < 0:
            return False
        self._tape.followed[slot] = handle.slot
        return True
