"""Fair shares: cases worked out by hand, the definition of max-min fairness, and a filling in exact numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.simulator.links import fair_paces


def filled(routes: Sequence[Sequence[int]], speeds: Mapping[int, Fraction]) -> list[Fraction]:
    """Progressive filling as the books have it: raise all speeds together until a link is full; infinite is not needed here."""
    rates = [Fraction(0)] * len(routes)
    moving = set(range(len(routes)))
    while moving:
        room = {}
        for link, speed in speeds.items():
            users = sum(link in routes[flow] for flow in moving)
            if users:
                room[link] = (speed - sum(rate for rate, route in zip(rates, routes, strict=True) if link in route)) / users
        step = min(room.values())
        for flow in moving:
            rates[flow] += step
        full = {link for link, left in room.items() if left == step}
        moving -= {flow for flow in moving if full & set(routes[flow])}
    return rates


@pytest.mark.parametrize(
    ("routes", "speeds", "expected"),
    [
        (["A"], {"A": 4}, [4]),
        (["A", "A", "A", "A"], {"A": 4}, [1, 1, 1, 1]),
        (["A", "AB", "B"], {"A": 10, "B": 4}, [8, 2, 2]),
        (["AB", "A", "B"], {"A": 1, "B": 1}, [0.5, 0.5, 0.5]),  # both are full at once
        (["ABC", "A", "B", "C"], {"A": 4, "B": 8, "C": 16}, [2, 2, 6, 14]),  # the parking lot
        (["A", "A", "AB", "BC", "C"], {"A": 6, "B": 3, "C": 10}, [2.25, 2.25, 1.5, 1.5, 8.5]),
        ([""], {}, [float("inf")]),
    ],
)
def test_cases_by_hand(routes: list[str], speeds: dict[str, float], expected: list[float]) -> None:
    found = fair_paces([list(route) for route in routes], {link: 1 / speed for link, speed in speeds.items()})
    assert [1 / pace if pace else float("inf") for pace in found] == pytest.approx(expected, rel=1e-12)


def test_a_link_without_limit_shares_nothing() -> None:
    assert fair_paces([["A", "B"], ["B"], ["A"]], {"A": 0.25, "B": 0.0}) == [0.5, 0.0, 0.5]


def test_one_alone_has_the_very_pace_of_its_slowest_link() -> None:
    third = 1 / 3e9
    assert fair_paces([["A", "B"]], {"A": third, "B": third / 7}) == [third]


LINKS = st.dictionaries(st.integers(0, 5), st.integers(1, 50), min_size=1)


@given(st.data(), LINKS)
def test_the_same_as_in_exact_numbers(data: st.DataObject, speeds: dict[int, int]) -> None:
    routes = data.draw(st.lists(st.lists(st.sampled_from(sorted(speeds)), min_size=1, unique=True), min_size=1, max_size=12))
    found = fair_paces(routes, {link: 1 / speed for link, speed in speeds.items()})
    expected = filled(routes, {link: Fraction(speed) for link, speed in speeds.items()})
    assert [1 / pace for pace in found] == pytest.approx([float(rate) for rate in expected], rel=1e-9)


@given(st.data(), st.dictionaries(st.integers(0, 5), st.floats(1e-12, 1.0), min_size=1))
def test_nobody_could_go_faster_without_taking_from_a_slower_one(data: st.DataObject, paces: dict[int, float]) -> None:
    routes = data.draw(st.lists(st.lists(st.sampled_from(sorted(paces)), min_size=1, unique=True), min_size=1, max_size=12))
    rates = [1 / pace for pace in fair_paces(routes, paces)]
    load = {link: sum(rate for rate, route in zip(rates, routes, strict=True) if link in route) for link in paces}
    for link, pace in paces.items():
        assert load[link] <= 1 / pace * (1 + 1e-9)
    for rate, route in zip(rates, routes, strict=True):
        full = [link for link in route if load[link] >= 1 / paces[link] * (1 - 1e-9)]
        fastest = [max(other for other, way in zip(rates, routes, strict=True) if link in way) for link in full]
        assert any(rate >= most * (1 - 1e-9) for most in fastest)  # a full link on which nobody is faster
