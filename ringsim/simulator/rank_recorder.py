"""The recorder of a simulated rank: spans and marks go onto the tape that all ranks share."""

from __future__ import annotations

import sys
from typing import Final

from ringsim.simulator.hub import Hub
from ringsim.simulator.tape import Tape
from ringsim.traces.events import NONE, OP_CODES
from ringsim.traces.notices import word_notice

__all__ = ["RankRecorder"]

_SPAN: Final = OP_CODES["span"]
_MARK: Final = OP_CODES["mark"]


class RankRecorder:
    """Writes the spans and marks of one rank; what ``RankState.recorder`` is asked for while a rank is simulated.

    Args:
        hub: the clock.
        tape: where they go.
        rank: whose they are.
        world_size: how many ranks there are.
        measures: whether computing takes the time that it takes here.
    """

    users = 0  # nobody hooks into torch

    def __init__(self, hub: Hub, tape: Tape, rank: int, world_size: int, measures: bool) -> None:
        self._measures = measures
        self._hub, self._tape = hub, tape
        self.rank, self.world_size = rank, world_size

    def span_begin(self, name: str) -> int:
        """Writes a span as begun, with the stage and microbatch in force; returns its slot."""
        if self._measures:
            self._hub.pay()
        tape = self._tape
        label, place = tape.number_label(name), tape.find_place(sys._getframe(1))
        return tape.write(self._hub.now, self.rank, _SPAN, NONE, NONE, NONE, NONE, label, place)

    def span_end(self, slot: int, *, failed: bool = False) -> None:
        """Writes a span as ended: ok, or error where an exception passed through it."""
        if self._measures:
            self._hub.pay()
        self._tape.times[slot + 2] = self._hub.now
        if failed:
            self._tape.failed.add(slot)

    def mark(self, name: str) -> None:
        """Writes a mark: something happened now."""
        self._write_mark(name, NONE, NONE, NONE, NONE)

    def notice(self, kind: str, message: str, group: int = NONE, peer: int = NONE, tag: int = NONE, payload: int = NONE) -> None:
        """Writes down that something wrong was found (see ``ringsim.traces.notices``), in the operation that the numbers describe."""
        self._write_mark(word_notice(kind, message), group, peer, tag, payload)

    def _write_mark(self, label: str, group: int, peer: int, tag: int, payload: int) -> None:
        tape = self._tape
        slot = tape.write(
            self._hub.now, self.rank, _MARK, group, peer, tag, payload, tape.number_label(label), tape.find_place(sys._getframe(1))
        )
        tape.times[slot + 2] = self._hub.now

    def number_label(self, name: str) -> int:
        """Returns the number of a label."""
        return self._tape.number_label(name)
