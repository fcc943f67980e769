"""Machine code for schedules gives the very times that numpy and plain Python give."""

from __future__ import annotations

import random
import sys
from itertools import product

import numpy as np
import pytest
from schedule_reference import draw_schedule, move_posts

from ringsim import Link, simulate_schedule
from ringsim.errors import ArgumentError, Deadlock
from ringsim.schedules import SCHEDULE_NAMES, make_schedule
from ringsim.schedules.costs import Costs
from ringsim.schedules.engine import SEMANTICS, Semantics
from ringsim.schedules.lowering import lower
from ringsim.simulator import compiled


def draw(chance: random.Random, ranks: int, stages: int) -> tuple[Costs, dict[tuple[int, int], Link]]:
    links = {pair: Link(chance.random(), chance.random()) for pair in product(range(ranks), repeat=2)}
    return Costs(*([chance.random() for _ in range(stages)] for _ in range(4))), links


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_waves(semantics: Semantics) -> None:
    pytest.importorskip("numba")
    chance = random.Random(semantics)
    for name, p, m, ahead in product(("gpipe", "1f1b"), (1, 2, 3, 7, 16), (1, 2, 6, 21), (0, 1, 3)):
        costs, links = draw(chance, p, p)
        plain, made = (
            simulate_schedule(
                name, costs, num_ranks=p, num_microbatches=m, link=links, size_bytes=1, semantics=semantics, ahead=ahead, compiled=each
            )
            for each in (False, True)
        )
        assert plain.makespan == made.makespan
        assert np.array_equal(plain.ends, made.ends)
        assert np.array_equal(plain.message_starts, made.message_starts)
        many = simulate_schedule(
            name,
            [Costs(), costs],
            num_ranks=p,
            num_microbatches=m,
            link=links,
            size_bytes=1,
            semantics=semantics,
            ahead=ahead,
            compiled=True,
        )
        assert many.makespan[1] == plain.makespan


def test_any_schedule() -> None:
    pytest.importorskip("numba")
    chance = random.Random(3)
    schedules = [make_schedule(name, 3, 7) for name in SCHEDULE_NAMES] + [lower(draw_schedule(chance)) for _ in range(40)]
    stuck = 0
    for schedule in schedules + [move_posts(each, chance) for each in schedules[-40:]]:
        costs, links = draw(chance, schedule.num_ranks, schedule.num_stages)
        try:
            plain = simulate_schedule(schedule, costs, link=links, size_bytes=1)
        except Deadlock as error:
            stuck += 1
            with pytest.raises(Deadlock) as raised:
                simulate_schedule(schedule, costs, link=links, size_bytes=1, compiled=True)
            assert str(raised.value) == str(error)  # noqa: PT017
            continue
        made = simulate_schedule(schedule, costs, link=links, size_bytes=1, compiled=True)
        assert np.array_equal(plain.ends, made.ends)
        assert np.array_equal(plain.message_starts, made.message_starts)
        assert simulate_schedule(schedule, [costs], link=links, size_bytes=1, compiled=True).makespan == [plain.makespan]
    assert 0 < stuck < 40


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    compiled._compile.cache_clear()
    with pytest.raises(ArgumentError, match=r"compiled must be left out where numba is not installed.*pip install 'ringsim\[fast\]'"):
        simulate_schedule("1f1b", num_ranks=2, num_microbatches=2, compiled=True)
    assert simulate_schedule("1f1b", num_ranks=2, num_microbatches=2).makespan == 9
