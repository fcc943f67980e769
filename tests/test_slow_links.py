"""The simulated delays of a slow rank and of a slow link on real ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import pytest

from ringsim import compute
from ringsim.comm.injecting import _SlowLinks
from ringsim.compute_costs import stretched
from ringsim.state import change_state
from ringsim.traces.recorder import Recorder

FACTOR: Final = 5.0
CHANNEL: Final = (0, "ring:0>1", (0, 1), 0)

# The time when the sender posted a message; the receiver's post time, the size in bytes, the time
# when it began to wait and the time when the message arrived; and the delay.
MESSAGES = {
    "it travels at a slow link's speed": [
        (1000, 400, 8, 400, 1300, 1200),  # 300 ns in flight become 1500
        (5000, 6000, 8, 6000, 6200, 800),  # the receive came later: 200 become 1000
        # it had arrived before the wait: 200 is the shortest time so far, so it arrives at 21000
        (20_000, 19_000, 8, 20_500, 20_510, 490),
        # waited for so late that it would have arrived over the slow link anyway
        (50_000, 19_000, 8, 58_000, 58_010, 0),
    ],
    # No message of this size was seen in flight: only the duration of the wait is known, and the
    # slow link was done long before.
    "sizes are told apart": [(1000, 0, 8, 0, 1100, 400), (1000, 0, 800, 5000, 5010, 0)],
}


@pytest.mark.parametrize("what", MESSAGES)
def test_a_message_on_a_slow_link(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept_ns: list[float] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: slept_ns.append(round(seconds * 1e9, 3)))
    recorder = Recorder(tmp_path, rank=1, world_size=2)
    links = _SlowLinks(recorder, {0: FACTOR})
    messages = MESSAGES[what]
    monkeypatch.setattr(links._sends[0], "find_post_ns", lambda channel, place: messages[place][0])
    for place, (_, posted_ns, size_bytes, begun_ns, done_ns, _) in enumerate(messages):
        links._hold_back(CHANNEL, place, posted_ns, size_bytes, begun_ns, done_ns)
    assert slept_ns == [message[-1] for message in messages]
    recorder.close()


def test_what_a_slow_rank_computes_is_stretched_and_its_sleeps_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, slept = [0.0], []
    change_state(slowdown=4.0)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    with stretched():
        now[0] += 2.0  # it computes
        compute(1.0)  # which itself sleeps four times as long
    assert slept == [4.0, 6.0]
    change_state(slowdown=1.0)
    with stretched():
        pass
    assert len(slept) == 2
