"""Actions: their text is torch's, and reading gives back what was written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.errors import ArgumentError, ScheduleError
from ringsim.schedules.schedule import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Action, parse_action

COUNTS = st.integers(0, 10**6)
KINDS = (*COMPUTE_KINDS, *SEND_KINDS, *RECV_KINDS)


@given(COUNTS, st.sampled_from(KINDS), COUNTS)
def test_text_gives_the_action_back(stage: int, kind: str, microbatch: int) -> None:
    action = Action(stage, kind, microbatch)
    assert parse_action(str(action)) == action
    assert action.is_compute == (kind in "FBIW")


@pytest.mark.parametrize(
    ("text", "action"), [("2F0", Action(2, "F", 0)), ("1SEND_F0", Action(1, "SEND_F", 0)), ("10RECV_B12", Action(10, "RECV_B", 12))]
)
def test_text_is_that_of_torch(text: str, action: Action) -> None:
    assert parse_action(text) == action
    assert str(action) == text


@pytest.mark.parametrize("text", ["", "F0", "2F", "2BW0", "-1F0", "2f0", "2F0 ", "2F0\n", "2F0,2F1", "٢F0", "1UNSHARD", "1F" + "0" * 5000])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="an action must be a stage"):
        parse_action(text)


@pytest.mark.parametrize(
    ("one", "other"), [("1SEND_F3", "2RECV_F3"), ("1RECV_F3", "0SEND_F3"), ("1SEND_B3", "0RECV_B3"), ("1RECV_B3", "2SEND_B3")]
)
def test_forwards_go_up_and_gradients_come_down(one: str, other: str) -> None:
    assert str(parse_action(one).other_side) == other
    assert parse_action(other).other_side == parse_action(one)


def test_a_computation_has_no_other_side() -> None:
    with pytest.raises(ArgumentError, match="must be a send or a recv, got 1F0"):
        _ = Action(1, "F", 0).other_side
