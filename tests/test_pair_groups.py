"""Which pairs a rank is in, and that building them in order never ends in a circle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.pair_groups import build_order, pair_name, pairs_of

rings = st.lists(st.integers(0, 500), min_size=2, max_size=70, unique=True)


@given(rings)
def test_i_send_on_the_group_that_my_successor_receives_on(ring: list[int]) -> None:
    for place, rank in enumerate(ring):
        pred_pair, succ_pair = pairs_of(rank, ring) or pytest.fail("a ring of two or more has pairs")
        assert pred_pair == (ring[place - 1], rank)
        assert succ_pair == (rank, ring[(place + 1) % len(ring)])
        assert (pairs_of(succ_pair[1], ring) or [None])[0] == succ_pair


@given(rings)
def test_a_ring_of_n_has_n_groups_by_name(ring: list[int]) -> None:
    names = {pair_name(pair) for rank in ring for pair in pairs_of(rank, ring) or ()}
    assert len(names) == len(ring)


def test_a_ring_of_one_has_no_pairs() -> None:
    assert pairs_of(3, [3]) is None
    assert build_order(3, [3]) == []


def steps_until_built(orders: dict[int, list[tuple[int, int]]]) -> int:
    """Plays ranks that build their pairs in order, a pair when both members are at it; returns the steps, fails in a circle."""
    steps = 0
    while any(orders.values()):
        meeting = {
            orders[rank][0] for rank in orders if orders[rank] and all(orders[other][:1] == orders[rank][:1] for other in orders[rank][0])
        }
        assert meeting, f"nobody can go on: {orders}"
        for pair in meeting:
            for rank in pair:
                orders[rank].pop(0)
        steps += 1
    return steps


@pytest.mark.parametrize("count", range(2, 68))
def test_building_in_order_takes_two_steps_or_three_and_never_stops(count: int) -> None:
    ring = range(count)
    assert steps_until_built({rank: build_order(rank, ring) for rank in ring}) == (2 if count % 2 == 0 else 3)


def test_the_play_finds_a_circle() -> None:
    with pytest.raises(AssertionError, match="nobody can go on"):
        steps_until_built({rank: [(rank, (rank + 1) % 3), ((rank - 1) % 3, rank)] for rank in range(3)})
