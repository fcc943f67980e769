"""Groups that simulated ranks make: who waits for whom, and what is said when somebody never comes."""

from __future__ import annotations

import pytest

import ringsim
from ringsim import comm as dist
from ringsim.errors import PeerExited, RendezvousFailed
from ringsim.simulator.api import simulate
from ringsim.state import get_state

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)


def now_s() -> float:
    clock = get_state().clock
    assert clock is not None
    return clock.now_s()


def come_late() -> tuple[float, float]:
    rank = ringsim.current_ring().rank
    ringsim.compute(rank)
    dist.new_group([1, 3])
    first_s = now_s()
    dist.new_group([0])
    return first_s, now_s()


def test_members_wait_for_each_other_and_others_pass() -> None:
    trace = simulate(come_late, world_size=4, link=LINK)
    assert trace.results == [(0.0, 0.0), (3.0, 3.0), (2.0, 2.0), (3.0, 3.0)]
    assert [operation.shape for operation in trace.to_pandas().itertuples() if operation.op == "new_group"] == ["1x3", "0"] * 4


def stay_away() -> None:
    if ringsim.current_ring().rank != 2:
        dist.new_group([0, 1, 2])


@pytest.mark.parametrize("record", [True, False])
def test_a_member_that_never_comes_is_named(record: bool) -> None:
    with pytest.raises(PeerExited) as caught:
        simulate(stay_away, world_size=4, link=LINK, record=record)
    diagnosis = caught.value.diagnosis
    assert diagnosis is not None
    assert (diagnosis.findings[0].kind, diagnosis.findings[0].ranks) == ("missing_participant", (0, 1, 2))


def disagree() -> None:
    dist.new_group([0, 1] if ringsim.current_ring().rank != 1 else [1, 2])


def test_another_group_in_its_place_is_refused_with_the_line_of_the_first() -> None:
    place = rf"got \[1, 2\] here and \[0, 1\] in rank 0's new_group at {__file__.rsplit('/', 1)[1]}:\d+ \(rank 1 of 3\)"
    with pytest.raises(RendezvousFailed, match=place) as caught:
        simulate(disagree, world_size=3, link=LINK)
    assert caught.value.trace is not None
    made = caught.value.trace.to_pandas().query("op == 'new_group' and rank == 1")
    assert made.status.tolist() == ["error"]
