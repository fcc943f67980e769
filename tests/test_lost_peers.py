"""Messages that raise when they are posted: refused by the library, or to a rank whose connection is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringsim.diagnose.snapshot import snapshot_of_events
from ringsim.traces.events import ERROR, NONE, OP_CODES
from ringsim.traces.matching import refused
from ringsim.traces.parts import read_parts
from ringsim.traces.recorder import LOST_PEER, Recorder, fail_posting


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        *((f"[../gloo/transport/tcp/pair.cc:538] {words} [127.0.0.1]:4182", True) for words in LOST_PEER),
        ("Invalid scalar type", False),
        ("Application timeout caused pair closure", False),  # by this rank itself: the other one may be well
    ],
)
def test_a_lost_connection_is_a_wait_that_broke_and_no_refusal(words: str, lost: bool, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, rank=0, world_size=2)
    group = recorder.group("world", [0, 1])
    slot = recorder.make_post(OP_CODES["send"])(group, 1, 0, NONE)
    assert slot is not None
    assert fail_posting(recorder, slot, RuntimeError(words)) is not lost
    recorder.close()
    events = read_parts(tmp_path)[0]
    assert events.status.tolist() == [ERROR]
    assert refused(events).tolist() == [not lost]
    assert bool(snapshot_of_events(events, 2).ranks[0].awaited) is lost
