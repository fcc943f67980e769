"""How long a message on a slow link is held back, by arithmetic."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import pytest

from ringsim.comm.injecting import _SlowLinks
from ringsim.traces.recorder import Recorder

FACTOR: Final = 5.0
CHANNEL: Final = (0, "ring:0>1", (0, 1), 0)


@pytest.fixture
def slept_ns(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: slept.append(round(seconds * 1e9, 3)))
    return slept


def test_message_takes_as_long_as_the_link_is_slow(tmp_path: Path, slept_ns: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path, rank=1, world_size=2)
    links = _SlowLinks(recorder, {0: FACTOR})
    sent_ns = [1000, 5000, 20_000, 50_000]
    monkeypatch.setattr(links._sends[0], "find_post_ns", lambda channel, place: sent_ns[place])

    # sent at 1000, the program has waited from 400, there at 1300: 300 ns become 1500.
    links._hold_back(CHANNEL, 0, posted_ns=400, size_bytes=8, begun_ns=400, done_ns=1300)
    # sent at 5000, but the receive came at 6000, there at 6200: 200 become 1000.
    links._hold_back(CHANNEL, 1, posted_ns=6000, size_bytes=8, begun_ns=6000, done_ns=6200)
    # sent at 20000, waited for from 20500 on, when it was there: 200 is the least until now, so it comes at 21000.
    links._hold_back(CHANNEL, 2, posted_ns=19_000, size_bytes=8, begun_ns=20_500, done_ns=20_510)
    # waited for so late that it would have come over the slow link, too.
    links._hold_back(CHANNEL, 3, posted_ns=19_000, size_bytes=8, begun_ns=58_000, done_ns=58_010)
    assert slept_ns == [1200, 800, 490, 0]
    recorder.close()


def test_sizes_are_told_apart(tmp_path: Path, slept_ns: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path, rank=1, world_size=2)
    links = _SlowLinks(recorder, {0: FACTOR})
    monkeypatch.setattr(links._sends[0], "find_post_ns", lambda channel, place: 1000)
    links._hold_back(CHANNEL, 0, posted_ns=0, size_bytes=8, begun_ns=0, done_ns=1100)
    # No message of this size was seen on its way: what the wait took is all that is known, and the slow link was done long ago.
    links._hold_back(CHANNEL, 1, posted_ns=0, size_bytes=800, begun_ns=5000, done_ns=5010)
    assert slept_ns == [400, 0]
    recorder.close()
