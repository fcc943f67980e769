"""The newest part of a run that continues, as a small trace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ringsim.launch.live import MOST_EVENTS, Follower, LiveTrace
from ringsim.traces.events import IN_FLIGHT, OP_CODES
from ringsim.traces.recorder import Recorder
from ringsim.view.html import pack_all


class Run:
    """Two ranks that record, and a viewer that keeps the last trace."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.recorders = [Recorder(directory, rank, 2) for rank in range(2)]
        self.group = [one.group("world", [0, 1], fresh=True) for one in self.recorders]
        self.follow = Follower(self, 2)

    def show(self, trace: LiveTrace) -> None:
        self.trace = trace

    def look(self) -> LiveTrace:
        self.follow(self.directory, "")
        return self.trace

    def post(self, rank: int, op: str, size: int, *, done: bool = True) -> int:
        """Posts an operation with a payload of a given size, and waits for it."""
        recorder = self.recorders[rank]
        payload = recorder.payload("uint8", [size], size)
        peer = -1 if op == "barrier" else 1 - rank
        slot = recorder.make_post(OP_CODES[op])(self.group[rank], peer, 0, payload)
        recorder.wait(slot)
        if done:
            recorder.complete(slot)
        return slot


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    for recorder in made.recorders:
        recorder.close()


def test_messages_and_collectives_stay_matched_while_old_events_are_forgotten(run: Run) -> None:
    # a wait that does not end, at the start of a long run
    waits = run.post(0, "irecv", 7, done=False)
    number, late, sizes = 0, [], []
    for turn in range(6):
        for _ in range(1500):
            number += 1
            run.post(0, "send", number)
            late.append(number)
            if turn % 2:  # rank 1 falls behind, and catches up
                for each in late:
                    run.post(1, "recv", each)
                late = []
            if number % 10 == 0:
                run.post(0, "barrier", number)
                run.post(1, "barrier", number)
        trace = run.look()
        events, messages = trace.events, trace.messages
        size = events.size_bytes
        assert (size[messages.send] == size[messages.recv]).all()
        assert turn % 2 == 0 or len(messages) > 500
        calls = trace.to_pandas()
        calls = calls[calls.op == "barrier"]
        by_rank = [calls[calls["rank"] == rank].size_bytes.tolist() for rank in range(2)]
        assert by_rank[0] == by_rank[1]  # otherwise, the k-th calls would not belong together
        (still_open,) = np.flatnonzero(events.status == IN_FLIGHT)
        assert (events.rank[still_open], events.size_bytes[still_open]) == (0, 7)
        assert "rank 0 waits" in trace.summary()
        sizes.append(len(events))
    # each of the newest events may keep one other side
    assert max(sizes[1::2]) <= 2 * MOST_EVENTS
    assert trace.progress == "9,000 messages"
    assert events.post_ns.min() == 0  # times count from the first event
    assert len(pack_all([trace])[0]) < 100_000
    run.recorders[0].complete(waits)
    assert not (run.look().events.status == IN_FLIGHT).any()


def test_operations_without_another_side_do_not_pile_up(run: Run) -> None:
    """The other side may be on a different host, whose records cannot be read here."""
    for _ in range(8):
        for _ in range(MOST_EVENTS):
            run.post(0, "send", 1)
        trace = run.look()
    assert len(trace.events) <= 4 * MOST_EVENTS
    assert trace.progress == f"{8 * MOST_EVENTS:,} messages"


def test_only_the_names_that_occur_are_sent(run: Run) -> None:
    for number in range(MOST_EVENTS + 1000):
        slot = run.recorders[0].span_begin(f"part {number}")
        assert slot is not None
        run.recorders[0].span_end(slot)
    trace = run.look()
    assert len(run.look().events.tables.labels) == MOST_EVENTS
    assert trace.events.tables.labels[-1] == f"part {number}"


def test_each_rank_is_described(run: Run) -> None:
    assert run.look().summary() == "rank 0 has not begun\nrank 1 has not begun"
    run.recorders[1].span_begin("step mine")
    run.recorders[1].span_begin("forward")
    run.post(0, "recv", 5, done=False)

    def say() -> list[str]:
        """Returns the lines without the seconds."""
        return re.sub(r"\d+\.\d s", "N s", run.look().summary()).splitlines()

    recv = "recv from 1 (world, tag 0, uint8[5]"
    assert say()[0].startswith(f"rank 0 waits N s for rank 1: {recv}")
    assert say()[1] == 'rank 1 is still in "forward", for N s'
    run.post(1, "send", 5, done=False)
    assert say()[0].startswith(f"rank 0 waits N s for the transfer: {recv}")
    assert run.trace.progress == "1 message, step 1"
    assert run.trace.explain().findings == ()
    run.recorders[1].close()
    assert run.look().summary().splitlines()[1] == "rank 1 has ended"
    # without a viewer, the text is for the terminal
    text = Follower(None, 2)(run.directory, "loading torch 1/2")
    assert text.splitlines()[0] == "loading torch 1/2"
    assert text.splitlines()[2] == "rank 1 has ended"
