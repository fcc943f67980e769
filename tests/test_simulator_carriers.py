"""Private links: each message against the rule, and a stream of them against the arithmetic of one line."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.errors import ArgumentError
from ringsim.link import Link
from ringsim.simulator.links import PrivateLinks, degraded

LINK = Link(alpha_s=1.0, beta_s_per_byte=0.5)


def test_a_busy_link_delays_by_its_bytes_and_not_by_its_latency() -> None:
    carrier = PrivateLinks(Link(alpha_s=100.0, beta_s_per_byte=1.0))
    assert [carrier.carry(0, 1, 10, 0.0) for _ in range(3)] == [110.0, 120.0, 130.0]


def test_both_ways_and_other_pairs_have_links_of_their_own() -> None:
    carrier = PrivateLinks(LINK)
    assert [carrier.carry(*pair, 4, 0.0) for pair in ((0, 1), (1, 0), (0, 2), (0, 1))] == [3.0, 3.0, 3.0, 5.0]


def test_each_edge_may_have_its_link() -> None:
    carrier = PrivateLinks({(0, 1): LINK, (1, 0): Link(0.0, 0.0)})
    assert carrier.carry(0, 1, 4, 10.0) == 13.0
    assert carrier.carry(1, 0, 4, 10.0) == 10.0
    with pytest.raises(ArgumentError, match=r"link must have an entry for each pair that talks, got none for \(1, 2\)"):
        carrier.carry(1, 2, 4, 10.0)


def test_a_degraded_link_takes_its_factor_longer() -> None:
    carrier = PrivateLinks(LINK, slower={(0, 1): 5.0})
    assert carrier.carry(0, 1, 4, 0.0) == 15.0
    assert carrier.carry(1, 0, 4, 0.0) == 3.0
    assert degraded(LINK, 1.0) is LINK


@pytest.mark.parametrize("link", [None, 3.0, {(0, 1): "fast"}])
def test_what_is_no_link_is_refused(link: object) -> None:
    with pytest.raises(ArgumentError, match="must be a Link"):
        PrivateLinks(link)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=20))
def test_the_last_arrival_is_the_longest_chain(messages: list[tuple[int, int]]) -> None:
    # All numbers are dyadic and small, so floats are exact. The link is free again at max over i of (ready_i + all bytes from i on).
    carrier = PrivateLinks(Link(alpha_s=0.25, beta_s_per_byte=0.5))
    arrivals = [carrier.carry(0, 1, size, float(ready)) for size, ready in messages]
    for last, arrival in enumerate(arrivals):
        chains = [messages[first][1] + Fraction(sum(size for size, _ in messages[first : last + 1]), 2) for first in range(last + 1)]
        assert Fraction(arrival) == max(0, *chains) + Fraction(1, 4)
