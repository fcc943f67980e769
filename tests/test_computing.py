"""``ringsim.compute`` on both clocks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fake_rank import fake_world, recorded

import ringsim
from ringsim import Link, Slow, compute
from ringsim.errors import ArgumentError

LINK = Link(alpha_s=1.0, beta_s_per_byte=0.0)


def test_the_virtual_clock_goes_on() -> None:
    def work() -> None:
        compute(3600)  # no rank sleeps
        compute(0.25)

    trace = ringsim.simulate(work, world_size=2, link=LINK, inject=[Slow(1, 2.5)])
    frame = trace.to_pandas()
    took_ns = (frame["done_ns"] - frame["post_ns"]).tolist()
    assert took_ns == [3600e9, 0.25e9, 9000e9, 0.625e9]


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


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "1", True])
def test_seconds_that_are_none(seconds: object) -> None:
    with pytest.raises(
        ArgumentError, match=r"seconds must be a non-negative number, got .*Pass seconds"
    ):
        compute(seconds)  # type: ignore[arg-type]
