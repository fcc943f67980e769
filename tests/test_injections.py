"""Injections: refused values, several combined, and slow links."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringsim
from ringsim import Degrade, Fail, Jitter, Link, Slow
from ringsim.errors import ArgumentError, RankFailed

SIZE = 4
# one second for an empty message, and no other cost
LINK = Link(alpha_s=1.0, beta_s_per_byte=0.0)


def simulate(worker: Callable[[], Any], *inject: Any) -> ringsim.Trace:
    options: dict[str, Any] = {"world_size": SIZE, "link": LINK, "inject": list(inject)}
    return ringsim.simulate(worker, **options)


def seconds_of(trace: ringsim.Trace, op: str) -> list[float]:
    """Returns the durations of the operations of a name, in the order of the ranks."""
    rows = trace.to_pandas().query(f"op == '{op}'").sort_values(["rank", "seq"])
    took_s: list[float] = ((rows["done_ns"] - rows["post_ns"]) * 1e-9).tolist()
    return took_s


def compute_for_a_second() -> None:
    ringsim.compute(1.0)


def exchange_in_pairs() -> None:
    other = dist.get_rank() ^ 1
    sent = dist.isend(torch.zeros(1), other)
    dist.recv(torch.zeros(1), other)
    sent.wait()


def test_several_multiply_and_the_earliest_failure_counts() -> None:
    slow = simulate(compute_for_a_second, Slow(1, 2), Slow(0, 9), Slow(1, 1.5))
    assert seconds_of(slow, "span") == pytest.approx([9, 3, 1, 1])
    degraded = simulate(exchange_in_pairs, Degrade(0, 1, 5), Degrade(0, 1, 2), Degrade(2, 3, 4))
    assert seconds_of(degraded, "recv") == pytest.approx([1, 10, 1, 4])
    with pytest.raises(RankFailed, match=r"rank 2 of 4 was made to fail .* operation 1"):
        simulate(exchange_in_pairs, Fail(2, 7), Fail(2, 1))


RANKS = "every rank in inject must be from 0 to 3, got"
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: Slow(-1, 2), r"rank must be a non-negative integer, got -1 \(Slow\)"),
    (lambda: Slow(0, 0.5), r"factor must be a number of at least 1, got 0.5 \(Slow\)"),
    (lambda: Slow(0, math.inf), "factor must be a number of at least 1, got inf"),
    (lambda: Slow(0, "2"), "factor must be a number of at least 1, got '2'"),  # type: ignore[arg-type]
    (lambda: Degrade(0, 0, 2), "src and dst must be different ranks, got Degrade"),
    (lambda: Degrade(0, 1.0, 2), r"dst must be a non-negative integer, got 1.0 \(Degrade\)"),  # type: ignore[arg-type]
    (lambda: Jitter(0), r"fraction must be positive and at most 1, got 0 \(Jitter\)"),
    (lambda: Jitter(math.nan), "fraction must be positive and at most 1, got nan"),
    (lambda: Jitter(0.1, seed=-1), r"seed must be a non-negative integer, got -1 \(Jitter\)"),
    (lambda: Fail(0, -1), r"at_op must be a non-negative integer, got -1 \(Fail\)"),
    (lambda: simulate(print, "slow"), "inject must contain only .* got 'slow'"),
    (lambda: simulate(print, Slow(4, 2)), RANKS),
    (lambda: simulate(print, Degrade(0, 4, 2)), RANKS),
    (lambda: simulate(print, Fail(9, 0)), RANKS),
    (
        lambda: ringsim.simulate(print, world_size=SIZE, link=LINK, inject=Slow(0, 2)),  # type: ignore[arg-type]
        "inject must be a list of .*, got Slow",
    ),
]


@pytest.mark.parametrize(("make", "what"), WRONG)
def test_value_or_list_that_breaks_its_rule(make: Callable[[], Any], what: str) -> None:
    with pytest.raises(ArgumentError, match=what):
        make()


def compute_often() -> None:
    for _ in range(2000):
        ringsim.compute(1.0)


def test_jitter_differs_by_rank_and_draw_and_not_by_run() -> None:
    factors = seconds_of(simulate(compute_often, Jitter(0.25, seed=3)), "span")
    assert factors == seconds_of(simulate(compute_often, Jitter(0.25, seed=3)), "span")
    assert len(set(factors)) > 0.999 * SIZE * 2000
    assert all(0.75 <= factor <= 1.25 for factor in factors)
    # Even on 0.5: the mean of 8000 has a standard error of 0.25 / sqrt(3 * 8000) = 0.0016; the seed
    # is fixed, so this cannot come and go.
    assert sum(factors) / len(factors) == pytest.approx(1, abs=0.005)
    assert min(factors) < 0.76
    assert max(factors) > 1.24


def test_jitters_multiply_what_is_slow() -> None:
    one, other, both = (
        seconds_of(simulate(compute_for_a_second, *inject), "span")
        for inject in ([Jitter(0.5)], [Jitter(0.1, 4)], [Jitter(0.5), Jitter(0.1, 4), Slow(0, 2)])
    )
    products = [a * b * c for a, b, c in zip(one, other, [2, 1, 1, 1], strict=True)]
    assert both == pytest.approx(products)
