"""``ringsim.compute`` on both clocks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from fake_rank import fake_world, recorded

import ringsim
from ringsim import Jitter, Link, Slow, compute
from ringsim.errors import ArgumentError

LINK = Link(alpha_s=1.0, beta_s_per_byte=0.0)


@pytest.mark.parametrize(
    ("inject", "seconds", "took_s"),
    [
        ([], [3600, 0.25], [3600, 0.25]),  # no rank sleeps
        ([Slow(0, 2.5)], [2], [5.0]),
    ],
)
def test_the_virtual_clock_goes_on(
    inject: list[Any], seconds: list[float], took_s: list[float]
) -> None:
    def work() -> None:
        for each in seconds:
            compute(each)

    trace = ringsim.simulate(work, world_size=1, link=LINK, inject=inject)
    frame = trace.to_pandas()
    assert (frame["done_ns"] - frame["post_ns"]).tolist() == [each * 1e9 for each in took_s]


def test_jitter_is_drawn_anew_for_each_and_multiplies_what_is_slow() -> None:
    def work() -> None:
        compute(1)
        compute(1)

    def took_s(*inject: Any) -> list[float]:
        trace = ringsim.simulate(work, world_size=1, link=LINK, inject=[*inject])
        frame = trace.to_pandas()
        return [float(each) * 1e-9 for each in frame["done_ns"] - frame["post_ns"]]

    first, second = took_s(Jitter(0.5))
    assert first != second
    assert took_s(Jitter(0.5), Slow(0, 2)) == pytest.approx([2 * first, 2 * second])


def test_a_real_rank_sleeps_at_least_that_long_and_its_label_tells_the_seconds(
    tmp_path: Path,
) -> None:
    with fake_world(1), recorded(tmp_path) as stop:
        begin_s = time.monotonic()
        compute(0.02)
        assert time.monotonic() - begin_s >= 0.02
        for seconds in (0.005, 1e-7, 0.0030000000000000004):
            compute(seconds)
    labels = stop().to_pandas()["label"].tolist()
    said = [float(label.removeprefix("compute ").removesuffix(" s")) for label in labels]
    assert said == [0.02, 0.005, 1e-7, 0.0030000000000000004]


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "1", True, None])
def test_seconds_that_are_none(seconds: object) -> None:
    with pytest.raises(ArgumentError, match=r"seconds must be a number from 0, got .*Give seconds"):
        compute(seconds)  # type: ignore[arg-type]
