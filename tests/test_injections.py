"""What can be injected.

Which values are refused, what several of them come to, and how long a slow link holds a message
back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from fake_rank import fake_world, recording

from ringsim import Degrade, Fail, Jitter, Slow
from ringsim.comm.injecting import _SlowLinks
from ringsim.errors import ArgumentError, RankFailed
from ringsim.faults import (
    check_injections,
    degraded_by,
    fails_at,
    jitter_of,
    make_failure,
    slowed_by,
)
from ringsim.traces.events import OP_NAMES
from ringsim.traces.recorder import Recorder

WORLD_SIZE = 4


def test_several_multiply_and_the_earliest_failure_counts() -> None:
    inject = [
        Slow(1, 2),
        Slow(0, 9),
        Degrade(0, 1, 5),
        Fail(2, 7),
        Slow(1, 1.5),
        Degrade(0, 1, 2),
        Fail(2, 3),
        Degrade(2, 0, 4),
    ]
    checked = check_injections(iter(inject), WORLD_SIZE)
    assert checked == tuple(inject)
    assert [slowed_by(checked, rank) for rank in range(WORLD_SIZE)] == [9, 3, 1, 1]
    links = {
        (src, dst): degraded_by(checked, src, dst)
        for src in range(WORLD_SIZE)
        for dst in range(WORLD_SIZE)
    }
    assert {link: factor for link, factor in links.items() if factor != 1} == {
        (0, 1): 10,
        (2, 0): 4,
    }
    assert [fails_at(checked, rank) for rank in range(WORLD_SIZE)] == [None, None, 3, None]


LIST = "inject must be a list of Slow, Degrade, Fail and Jitter, got"
RANKS = "the ranks of an injection must be from 0 to 3, got"
WRONG: list[tuple[Callable[[], Any], str]] = [
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
    (lambda: check_injections(Slow(0, 2), WORLD_SIZE), f"{LIST} Slow"),  # type: ignore[arg-type]
    (lambda: check_injections(None, WORLD_SIZE), f"{LIST} None"),  # type: ignore[arg-type]
    (
        lambda: check_injections(["slow"], WORLD_SIZE),
        "inject must hold Slow, Degrade, Fail and Jitter, got 'slow'",
    ),  # type: ignore[list-item]
    *(
        (lambda each=each: check_injections([each], WORLD_SIZE), RANKS)
        for each in (Slow(4, 2), Degrade(0, 4, 2), Fail(9, 0))
    ),
]


@pytest.mark.parametrize(("make", "what"), WRONG)
def test_value_or_list_that_breaks_its_rule(make: Callable[[], Any], what: str) -> None:
    with pytest.raises(ArgumentError, match=what):
        make()


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
    # Even on 0.5: the mean of 8000 has a standard error of 0.25 / sqrt(3 * 8000) = 0.0016; the seed
    # is fixed, so this cannot come and go.
    assert sum(map(sum, rows)) / 8000 == pytest.approx(1, abs=0.005)
    assert min(map(min, rows)) < 0.76
    assert max(map(max, rows)) > 1.24


def test_nothing_jitters_unless_asked_and_several_multiply() -> None:
    assert jitter_of([Slow(0, 2), Fail(0, 1), Degrade(0, 1, 2)], 0) is None
    one, other, both = (
        jitter_of(inject, 1)
        for inject in ([Jitter(0.5)], [Jitter(0.1, 4)], [Jitter(0.5), Jitter(0.1, 4)])
    )
    assert one is not None
    assert other is not None
    assert both is not None
    assert both() == one() * other()


FACTOR: Final = 5.0
CHANNEL: Final = (0, "ring:0>1", (0, 1), 0)


# When the sender posted a message; when the receiver posted, of how many bytes, began to wait and
# had it; and how long it is held back.
MESSAGES = {
    "it travels at a slow link's speed": [
        (1000, 400, 8, 400, 1300, 1200),  # 300 ns on its way become 1500
        (5000, 6000, 8, 6000, 6200, 800),  # the receive came later: 200 become 1000
        # it was there at the wait: 200 is the least until now, so it comes at 21000
        (20_000, 19_000, 8, 20_500, 20_510, 490),
        # waited for so late that it would have come over the slow link, too
        (50_000, 19_000, 8, 58_000, 58_010, 0),
    ],
    # No message of this size was seen on its way: what the wait took is all that is known, and the
    # slow link was done long ago.
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


def test_later_operations_fail_as_well_and_a_rank_that_does_less_does_not(tmp_path: Path) -> None:
    for rounds, failures in ((1, 0), (3, 2)):
        recorder = Recorder(tmp_path / str(rounds), rank=0, world_size=4)
        with fake_world(), recording(recorder, inject=[Fail(0, 2)]) as stop:
            said = []
            dist.barrier()
            for _ in range(rounds):
                try:
                    dist.all_reduce(torch.ones(2))
                except RankFailed as error:
                    said.append(str(error).partition(",")[0])
            assert said == ["rank 0 of 4 was made to fail in place of its operation 2"] * failures
            assert [OP_NAMES[op] for op in stop()[0].op] == ["barrier", "all_reduce"]
