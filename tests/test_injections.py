"""What can be injected: which values are refused, what several of them come to, and how long a slow link holds a message back."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Final

import pytest

from ringsim.comm.injecting import _SlowLinks
from ringsim.errors import ArgumentError
from ringsim.faults import Degrade, Fail, Jitter, Slow, check_injections, degraded_by, fails_at, jitter_of, make_failure, slowed_by
from ringsim.traces.recorder import Recorder

WORLD_SIZE = 4


def test_several_multiply_and_the_earliest_failure_counts() -> None:
    inject = [Slow(1, 2), Slow(0, 9), Degrade(0, 1, 5), Fail(2, 7), Slow(1, 1.5), Degrade(0, 1, 2), Fail(2, 3), Degrade(2, 0, 4)]
    checked = check_injections(iter(inject), WORLD_SIZE)
    assert checked == tuple(inject)
    assert [slowed_by(checked, rank) for rank in range(WORLD_SIZE)] == [9, 3, 1, 1]
    links = {(src, dst): degraded_by(checked, src, dst) for src in range(WORLD_SIZE) for dst in range(WORLD_SIZE)}
    assert {link: factor for link, factor in links.items() if factor != 1} == {(0, 1): 10, (2, 0): 4}
    assert [fails_at(checked, rank) for rank in range(WORLD_SIZE)] == [None, None, 3, None]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Slow(-1, 2), r"rank must be an integer from 0, got -1 \(Slow\)"),
        (lambda: Slow(True, 2), "rank must be an integer from 0, got True"),
        (lambda: Slow(0, 0.5), r"factor must be a number from 1, got 0.5 \(Slow\)"),
        (lambda: Slow(0, math.inf), "factor must be a number from 1, got inf"),
        (lambda: Slow(0, math.nan), "factor must be a number from 1, got nan"),
        (lambda: Slow(0, "2"), "factor must be a number from 1, got '2'"),  # type: ignore[arg-type]
        (lambda: Degrade(0, 0, 2), "src and dst must be two ranks, got Degrade"),
        (lambda: Degrade(0, 1.0, 2), r"dst must be an integer from 0, got 1.0 \(Degrade\)"),  # type: ignore[arg-type]
        (lambda: Degrade(0, 1, 0), r"factor must be a number from 1, got 0 \(Degrade\)"),
        (lambda: Jitter(0), r"fraction must be above 0 and at most 1, got 0 \(Jitter\)"),
        (lambda: Jitter(1.5), "fraction must be above 0 and at most 1, got 1.5"),
        (lambda: Jitter(math.nan), "fraction must be above 0 and at most 1, got nan"),
        (lambda: Jitter(0.1, seed=-1), r"seed must be an integer from 0, got -1 \(Jitter\)"),
        (lambda: Fail(0, -1), r"at_op must be an integer from 0, got -1 \(Fail\)"),
    ],
)
def test_value_that_breaks_its_rule(make: object, what: str) -> None:
    with pytest.raises(ArgumentError, match=what):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("inject", "what"),
    [
        (Slow(0, 2), "inject must be a list of Slow, Degrade, Fail and Jitter, got Slow"),
        (None, "inject must be a list of Slow, Degrade, Fail and Jitter, got None"),
        (["slow"], "inject must hold Slow, Degrade, Fail and Jitter, got 'slow'"),
        ([Slow(4, 2)], "the ranks of an injection must be from 0 to 3, got Slow"),
        ([Degrade(0, 4, 2)], "the ranks of an injection must be from 0 to 3, got Degrade"),
        ([Fail(9, 0)], "the ranks of an injection must be from 0 to 3, got Fail"),
    ],
)
def test_list_that_breaks_its_rule(inject: object, what: str) -> None:
    with pytest.raises(ArgumentError, match=what):
        check_injections(inject, WORLD_SIZE)  # type: ignore[arg-type]


def test_failure_names_rank_and_operation() -> None:
    error = make_failure(1, 3, world_size=4)
    assert error.rank == 1
    assert "rank 1 of 4 was made to fail in place of its operation 3" in str(error)


def test_jitter_differs_by_rank_and_draw_and_not_by_run() -> None:
    inject = check_injections([Jitter(0.25, seed=3), Slow(0, 2)], WORLD_SIZE)

    def drawn() -> list[list[float]]:
        streams = [jitter_of(inject, rank) for rank in range(WORLD_SIZE)]
        return [[stream() for _ in range(2000)] for stream in streams if stream is not None]

    rows = drawn()
    assert rows == drawn()
    assert len({factor for row in rows for factor in row}) == WORLD_SIZE * 2000
    assert all(0.75 <= factor <= 1.25 for row in rows for factor in row)
    # Even on 0.5: the mean of 8000 has a standard error of 0.25 / sqrt(3 * 8000) = 0.0016; the seed is fixed, so this cannot come and go.
    assert sum(map(sum, rows)) / 8000 == pytest.approx(1, abs=0.005)
    assert min(map(min, rows)) < 0.76
    assert max(map(max, rows)) > 1.24


def test_nothing_jitters_unless_asked_and_several_multiply() -> None:
    assert jitter_of([Slow(0, 2), Fail(0, 1), Degrade(0, 1, 2)], 0) is None
    one, other, both = (jitter_of(inject, 1) for inject in ([Jitter(0.5)], [Jitter(0.1, 4)], [Jitter(0.5), Jitter(0.1, 4)]))
    assert one is not None
    assert other is not None
    assert both is not None
    assert both() == one() * other()


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
