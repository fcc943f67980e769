"""A machine whose ranks write parts, and a watcher over them that looks at any moment."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from part_writer import Writer
from rendezvous_machine import Machine, Op

from ringsim.diagnose.failure import Verdict
from ringsim.launch import watcher as module
from ringsim.launch.watcher import LiveRecords, Process, Threads, Watcher
from ringsim.traces.events import ANY_SOURCE, OP_CODES


class WatchedMachine(AbstractContextManager["WatchedMachine"]):
    """Plays a machine's programs into parts. Its groups must be those of ``part_writer``, each of all ranks.

    Args:
        directory: for the parts.
        machine: not yet run.
    """

    def __init__(self, directory: Path, machine: Machine) -> None:
        self._machine = machine
        self._size = len(machine.programs)
        self._writers = [Writer(directory, rank, self._size) for rank in range(self._size)]
        self.now_s = 100.0
        self._records = LiveRecords(directory, self._size)
        self._watcher = Watcher(self._records, self._size, ask=self._answer)
        self._slots: dict[int, int] = {}  # by the machine's operation
        self._began: set[int] = set()
        self._finished: set[int] = set()

    def __exit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.recorder.close()

    def run(self, order: Any) -> list[Verdict]:
        """Runs the machine in a drawn order, and looks every now and then, up to three times; returns all verdicts."""
        verdicts = []

        def look(_: Machine) -> None:
            self._write()
            for _ in range(order.choice([0, 0, 1, 2, 3])):
                verdict = self._look()
                if verdict is not None:
                    verdicts.append(verdict)

        self._machine.run(order.choice, look)
        return verdicts

    def look_at_the_end(self) -> Verdict | None:
        """Looks until it is sure, or has seen nothing move for as long as a stall takes."""
        for _ in range(20):
            verdict = self._look()
            if verdict is not None:
                break
            self.now_s += 0.5
        return verdict

    def thread_time(self) -> float:
        return 0.0

    def monotonic(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)

    def _look(self) -> Verdict | None:
        self.now_s += 0.01
        with mock.patch.multiple(module, time=self, look_at=lambda _pid: Process("S", 0)):
            return self._watcher.look(["exited" if rank in self._machine.finished else "running" for rank in range(self._size)])

    def _answer(self, rank: int) -> None:
        threads = self._records.builder.awaiting_threads(rank)
        self._watcher.hear(rank, Threads(frozenset(threads), idle=False))

    def _write(self) -> None:
        """Writes down what the machine has done since the last time."""
        for writer, posted in zip(self._writers, self._machine.posted, strict=True):
            for op in posted:
                self._write_one(writer, op)

    def _write_one(self, writer: Writer, op: Op) -> None:
        recorder = writer.recorder
        if id(op) not in self._slots:
            slot = recorder.make_post(OP_CODES[op.op])(writer.groups[op.group], op.peer, op.tag, writer.payload)
            assert slot is not None
            self._slots[id(op)] = slot
        slot = self._slots[id(op)]
        if op.wait >= 0 and id(op) not in self._began:
            self._began.add(id(op))
            recorder.wait(slot)
        if op.done >= 0 and id(op) not in self._finished:
            self._finished.add(id(op))
            if op.peer == ANY_SOURCE:
                source = self._machine.source(op)
                assert source is not None
                recorder.amend(slot, peer=source)
            recorder.complete(slot)
