"""A stand-in for a GPU's streams and events, with a clock of its own: for what a machine without a GPU can show of ``comm/gpu_times``.

The real thing is asked in ``tests/distributed/test_gpu.py``, where there is one.
"""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

LOOK_NS = 900  # how long a call of the driver takes
GPU = torch.device("cuda", 0)


class StandInGpu:
    """A GPU whose clock has an offset to the host's, and drifts. Time passes when ``now_ns`` is changed, and with every call.

    Args:
        offset_ns: what the GPU's clock shows when the host's shows 0.
        drift: how much faster it goes.
    """

    def __init__(self, offset_ns: int = 0, drift: float = 0.0) -> None:
        self.offset_ns = offset_ns
        self.drift = drift
        self.now_ns = 10**12
        self.busy_until_ns = 0  # the program's stream
        self.pool_busy_until_ns = 0  # the streams of torch's pool
        self.capturing = False
        self.broken = False
        self.recorded: list[StandInEvent] = []
        self.asked = 0

    def now(self) -> int:
        self.now_ns += 40
        return self.now_ns

    def queue(self, work_ns: int) -> None:
        """Gives the program's stream so much to do."""
        self.busy_until_ns = max(self.busy_until_ns, self.now_ns) + work_ns

    def call(self) -> None:
        self.now_ns += LOOK_NS
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts it in the place of torch's."""

        def refuse(*_: Any) -> NoReturn:
            raise AssertionError("recording never synchronises")

        for name, stand_in in {
            "Event": lambda enable_timing=False: StandInEvent(self, enable_timing),
            "Stream": object,
            "device": lambda _: contextlib.nullcontext(),
            "is_current_stream_capturing": lambda: self.capturing,
            "synchronize": refuse,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)


class StandInEvent:
    """An event; ``passed_ns`` is when the stream gets past it, in the host's time, which only the tests know."""

    def __init__(self, gpu: StandInGpu, enable_timing: bool) -> None:
        assert enable_timing
        self.gpu = gpu
        self.passed_ns = self.gpu_ns = -1

    def record(self, stream: Any = None) -> None:
        assert not self.gpu.capturing
        self.gpu.call()
        self.passed_ns = max(self.gpu.now_ns, self.gpu.busy_until_ns if stream is None else self.gpu.pool_busy_until_ns)
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

    def synchronize(self) -> NoReturn:
        raise AssertionError("recording never synchronises")
