"""Watchers of parts that a test writes, or that the ranks of a machine write, on a fake clock."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from part_writer import Writer
from rendezvous_machine import Machine, Op

from ringsim.diagnose.failure import Verdict
from ringsim.launch import watcher as module
from ringsim.launch.system import ProcessState
from ringsim.launch.threads import Threads
from ringsim.launch.watcher import LiveRecords, Watcher
from ringsim.traces.events import ANY_SOURCE, OP_CODES

TICK_S = 0.02


class Bench(AbstractContextManager["Bench"]):
    """A watcher of some ranks, with a clock and the answers of ranks.

    Its groups are those of ``part_writer``, and each contains all ranks.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self.writers = [Writer(directory, rank, size) for rank in range(size)]
        self.states = ["running"] * size
        self.now_s = 100.0
        self.asked: list[int] = []
        self.threads = dict.fromkeys(range(size), Threads({threading.get_ident()}, {}))
        self.silent: set[int] = set()
        self.process = ProcessState("S", 5)
        self.records = LiveRecords(directory, size)
        self.watcher = Watcher(self.records, size, tell=self.answer)
        self._patch = mock.patch.multiple(module, time=self, look_at=lambda _pid: self.process)

    def __enter__(self) -> Bench:
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()
        for writer in self.writers:
            writer.recorder.close()

    def thread_time(self) -> float:
        return 0.0

    def monotonic(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)

    def answer(self, rank: int, _question: str) -> None:
        self.asked.append(rank)
        if rank not in self.silent:
            self.watcher.hear(rank, self.threads[rank])

    def waits(self, rank: int, op: str, peer: int, tag: int = 0) -> None:
        self.writers[rank].post(op, 0, peer, tag)
        self.writers[rank].act("wait", -1)

    def both_receive(self) -> None:
        self.waits(0, "recv", 1)
        self.waits(1, "recv", 0)

    def look(self) -> Verdict | None:
        return self.watcher.look(self.states)

    def look_for(self, seconds: float, tick_s: float = TICK_S) -> tuple[Verdict | None, Any]:
        """Looks for a while; returns the verdict and the time until it came."""
        start_s = self.now_s
        while self.now_s - start_s <= seconds:
            verdict = self.look()
            if verdict is not None:
                return verdict, self.now_s - start_s
            self.now_s += tick_s
        return None, seconds


class WatchedMachine:
    """A machine that writes the operations of its ranks to the parts of a bench."""

    def __init__(self, bench: Bench, machine: Machine) -> None:
        self._bench, self._machine = bench, machine
        # slot, whether a rank waits for it, and whether it is done
        self._written: dict[Op, tuple[int, bool, bool]] = {}

    def run(self, order: Any) -> list[Verdict]:
        """Runs the machine in a drawn order, and looks up to three times after each step.

        Returns all verdicts.
        """
        verdicts: list[Verdict | None] = []

        def look(machine: Machine) -> None:
            for writer, posted in zip(self._bench.writers, machine.posted, strict=True):
                for op in posted:
                    self._write(writer, op)
            self._bench.states = [
                "exited" if rank in machine.finished else "running"
                for rank in range(len(machine.programs))
            ]
            verdicts.extend(
                self._bench.look_for(0)[0] for _ in range(order.choice([0, 0, 1, 2, 3]))
            )

        self._machine.run(order.choice, look)
        return [verdict for verdict in verdicts if verdict is not None]

    def _write(self, writer: Writer, op: Op) -> None:
        """Writes the changes of an operation since the last call."""
        recorder = writer.recorder
        slot, waited, done = self._written.get(op, (None, False, False))
        if slot is None:
            slot = recorder.make_post(OP_CODES[op.op])(
                writer.groups[op.group], op.peer, op.tag, writer.payload
            )
            assert slot is not None
        if op.wait >= 0 and not waited:
            recorder.wait(slot)
        if op.done >= 0 and not done:
            if op.peer == ANY_SOURCE:
                assert op.partner is not None
                recorder.amend(slot, peer=op.partner.rank)
            recorder.complete(slot)
        self._written[op] = slot, op.wait >= 0, op.done >= 0
