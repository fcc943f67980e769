"""A call in a thread of its own: its value, its error, its limit."""

from __future__ import annotations

import threading

import pytest

from ringsim.comm.bootstrap import BackgroundCall


def test_value() -> None:
    assert BackgroundCall(lambda: [1]).result(10) == [1]


def test_value_none_is_a_value() -> None:
    assert BackgroundCall(lambda: None).result(10) is None


def test_error() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        BackgroundCall(fail).result(10)


def test_what_never_returns_is_left_behind_and_may_still_end() -> None:
    gate = threading.Event()
    call = BackgroundCall(lambda: gate.wait(30))
    with pytest.raises(TimeoutError, match="no answer within"):
        call.result(0.01)
    gate.set()
    assert call.result(10) is True
