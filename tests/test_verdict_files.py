"""A verdict on its way to the ranks: what one writes, another reads, whole."""

from __future__ import annotations

from pathlib import Path

from ringsim.diagnose.failure import Verdict, read_verdict, write_verdict
from ringsim.diagnose.snapshot import RankSnapshot
from ringsim.diagnose.verdict import judge
from ringsim.diagnose.waitfor import Posted, Snapshot
from ringsim.errors import Deadlock
from ringsim.traces.events import Group
from ringsim.traces.findings import Operation


def receives(rank: int, peer: int) -> RankSnapshot:
    operation = Operation(rank, "recv", peer, 3, "world", 32, "float32", (2, 4), "/home/me/ring.py", 41, waited_s=0.25)
    return RankSnapshot("blocked", (Posted(operation, Group("world", (0, 1, 2)), awaited=True),))


def test_the_error_carries_the_diagnosis_that_the_watcher_made(tmp_path: Path) -> None:
    diagnosis = judge(Snapshot((receives(0, 1), receives(1, 0), receives(2, 0))))
    assert diagnosis.findings[0].consequences
    assert diagnosis.edges
    write_verdict(tmp_path, Verdict((0, 1), diagnosis, 5))
    error = read_verdict(tmp_path, 1)
    assert isinstance(error, Deadlock)
    assert error.diagnosis == diagnosis
    assert str(error) == str(diagnosis)
    assert read_verdict(tmp_path, 2) is None
