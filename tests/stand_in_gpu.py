"""A stand-in for a GPU; ``tests/distributed/test_gpu.py`` uses a real one."""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

LOOK_NS = 900  # the duration of a driver call
GPU = torch.device("cuda", 0)
MS = 10**6
LATER = 10**15  # ns, on the host's clock


def refuse(*_: Any) -> NoReturn:
    raise AssertionError("recording never synchronises")


class StandInGpu:
    """A GPU whose clock has an offset from the host's clock, and drifts.

    Time passes when ``now_ns`` is changed, and with every call.
    """

    def __init__(self, offset_ns: int = 0, drift: float = 0.0) -> None:
        self.offset_ns, self.drift = offset_ns, drift
        self.now_ns = 10**12
        self.busy_until_ns = 0  # the program's stream
        self.pool_busy_until_ns = 0  # the streams of torch's pool
        self.capturing = self.broken = False
        self.recorded: list[StandInEvent] = []
        self.asked = 0

    def now(self) -> int:
        self.now_ns += 40
        return self.now_ns

    def queue(self, work_ns: int) -> None:
        """Queues work of this duration on the program's stream."""
        self.busy_until_ns = max(self.busy_until_ns, self.now_ns) + work_ns

    def call(self) -> None:
        assert not self.capturing, "the driver must not be called while a graph is captured"
        self.now_ns += LOOK_NS
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replaces torch's GPU functions."""
        for name, stand_in in {
            "Event": lambda enable_timing=False: StandInEvent(self, enable_timing),
            "Stream": object,
            "current_stream": lambda _: None,
            "device": lambda _: contextlib.nullcontext(),
            "is_current_stream_capturing": lambda: self.capturing,
            "synchronize": refuse,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)


class StandInEvent:
    """An event.

    ``passed_ns`` is the host time at which the stream passes it, known only to the tests.
    """

    synchronize = refuse

    def __init__(self, gpu: StandInGpu, enable_timing: bool) -> None:
        assert enable_timing
        self.gpu = gpu
        self.passed_ns = self.gpu_ns = -1

    def record(self, stream: Any = None) -> None:
        self.gpu.call()
        self.passed_ns = max(
            self.gpu.now_ns,
            self.gpu.busy_until_ns if stream is None else self.gpu.pool_busy_until_ns,
        )
        self.gpu_ns = round(self.gpu.offset_ns + self.passed_ns * (1 + self.gpu.drift))
        if stream is None:
            self.gpu.recorded.append(self)

    def query(self) -> bool:
        self.gpu.call()
        self.gpu.asked += 1
        assert self.passed_ns >= 0
        return self.passed_ns <= self.gpu.now_ns

    def elapsed_time(self, other: StandInEvent) -> float:
        if max(self.passed_ns, other.passed_ns) > self.gpu.now_ns:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return float(np.float32((other.gpu_ns - self.gpu_ns) * 1e-6))
