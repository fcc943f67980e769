"""The messages that make up Gloo's collectives."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.simulator.gloo import list_steps
from ringsim.traces.collectives import COLLECTIVES


@given(
    name=st.sampled_from(sorted({row.name for row in COLLECTIVES.values()})),
    count=st.integers(2, 9),
    root=st.integers(0, 8),
    size_bytes=st.integers(0, 1 << 26),
)
def test_every_message_of_a_collective_has_two_sides(
    name: str, count: int, root: int, size_bytes: int
) -> None:
    sent, received = Counter[tuple[int, int, float]](), Counter[tuple[int, int, float]]()
    for place in range(count):
        for step in list_steps(name, place, count, root % count, size_bytes)[0]:
            sent.update((place, other, step.size_bytes) for other in step.to)
            received.update((other, place, step.size_bytes) for other in step.source)
    assert sent == received
    assert sum(sent.values()) > 0
    assert max(size for _, _, size in sent) <= max(size_bytes, 1 << 20)


@pytest.mark.parametrize(("count", "steps"), [(2, 4), (4, 12), (8, 28)])
def test_an_all_reduce_moves_every_byte_round_the_ring_twice(count: int, steps: int) -> None:
    found, under_way = list_steps("all_reduce", 1, count, -1, 4096)
    assert (len(found), under_way) == (steps, 2)
    # the lower bound for an all_reduce
    assert sum(step.size_bytes for step in found) == 2 * (count - 1) / count * 4096
