"""Which pairs a rank is in. That they can be built and used is shown on real ranks, in tests/distributed/test_ring.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.ring.groups import pair_name, pairs_of

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
