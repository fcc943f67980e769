"""What becomes of an operation that was posted, as another rank sees it: what was refused never was."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringsim.comm import recount
from ringsim.comm.recount import was_refused
from ringsim.traces.events import COLLECTIVE, ERROR, IN_FLIGHT, NONE, OP_CODES, RECORD
from ringsim.traces.parts import Neighbour


@dataclass
class Posted:
    """A rank that has posted an all_reduce, which the library refuses when it has been asked ``looks`` times how long it was starved.

    Attributes:
        looks: how often.
        starved: whether it waits for a processor all the while.
    """

    looks: int
    starved: bool
    records: Any = field(default_factory=lambda: np.zeros(8, RECORD))

    def __post_init__(self) -> None:
        self.records[0]["op"], self.records[0]["status"], self.records[0]["wait_ns"] = OP_CODES["all_reduce"], IN_FLIGHT, NONE

    @property
    def view(self) -> memoryview:
        return memoryview(self.records.tobytes()).cast("i")

    def starved_s(self) -> float:
        self.looks -= 1
        if self.looks == 0:
            self.records[0]["status"] = ERROR
        return time.monotonic() if self.starved else 0.0


@pytest.mark.parametrize("starved", [True, False])
def test_waiting_for_a_processor_costs_no_patience(starved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1.0 called it a mismatch when the other rank got no processor for 2 s, as with ten programs on two cores."""
    monkeypatch.setattr(recount, "_PATIENCE_S", {COLLECTIVE: 0.05})
    neighbour: Any = Posted(500, starved)  # half a millisecond each
    assert was_refused(neighbour, 0, COLLECTIVE) is starved


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not tell")
def test_what_the_system_tells_of_a_starved_process(tmp_path: Path) -> None:
    """Two processes that compute, on one processor: each waits for it about half of the time."""
    code = "import time\nbegin = time.monotonic()\nwhile time.monotonic() - begin < 0.6: pass"
    cpu = str(min(os.sched_getaffinity(0)))
    busy = [subprocess.Popen(["taskset", "-c", cpu, sys.executable, "-c", code]) for _ in range(2)]
    neighbour = Neighbour(tmp_path, 0)
    neighbour._meta = {"pid": busy[0].pid}
    starved = []
    while busy[0].poll() is None:
        starved.append(neighbour.starved_s())
    for each in busy:
        each.wait()
    assert starved == sorted(starved)
    assert max(starved) > 0.1
    assert Neighbour(tmp_path, 1).starved_s() == 0.0
