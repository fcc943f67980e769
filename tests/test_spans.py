"""The names that a program gives to its sections."""

from __future__ import annotations

from typing import Any

import pytest

import ringsim
from ringsim.errors import ArgumentError


def test_spans_and_marks_do_nothing_where_nothing_is_recorded() -> None:
    with ringsim.span("work", stage=0) as entered:
        ringsim.mark("here")
    assert isinstance(entered, ringsim.span)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": 3}, r"name of a span must be a string, got 3"),
        ({"name": "x", "stage": -1}, r"stage must be an integer from 0 .* got -1"),
        ({"name": "x", "microbatch": "0"}, r"microbatch must be an integer from 0 .* got '0'"),
    ],
)
def test_wrong_arguments_of_a_span_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ringsim.span(**arguments)
