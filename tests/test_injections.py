"""What can be injected: which values are refused, and what several of them come to."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.errors import ArgumentError
from ringsim.faults import (
    Degrade,
    Fail,
    Injection,
    Jitter,
    Slow,
    check_injections,
    degraded_by,
    fails_at,
    jitter_of,
    make_failure,
    slowed_by,
)

WORLD_SIZE = 4
RANKS = st.integers(0, WORLD_SIZE - 1)
FACTORS = st.sampled_from([1, 1.5, 2, 4])  # products of these are exact
INJECTIONS = st.lists(
    st.one_of(
        st.builds(Slow, RANKS, FACTORS),
        st.tuples(RANKS, RANKS, FACTORS).filter(lambda each: each[0] != each[1]).map(lambda each: Degrade(*each)),
        st.builds(Fail, RANKS, st.integers(0, 9)),
    )
)


@given(INJECTIONS)
def test_several_multiply_and_the_earliest_failure_counts(inject: list[Injection]) -> None:
    slowed = dict.fromkeys(range(WORLD_SIZE), 1.0)
    degraded = {(src, dst): 1.0 for src in range(WORLD_SIZE) for dst in range(WORLD_SIZE)}
    failing = dict.fromkeys(range(WORLD_SIZE), math.inf)
    for each in inject:
        match each:
            case Slow(rank, factor):
                slowed[rank] *= factor
            case Degrade(src, dst, factor):
                degraded[src, dst] *= factor
            case Fail(rank, at_op):
                failing[rank] = min(failing[rank], at_op)
    checked = check_injections(inject, WORLD_SIZE)
    assert {rank: slowed_by(checked, rank) for rank in slowed} == slowed
    assert {(src, dst): degraded_by(checked, src, dst) for src, dst in degraded} == degraded
    assert {rank: fails_at(checked, rank) for rank in failing} == {
        rank: None if at_op == math.inf else at_op for rank, at_op in failing.items()
    }


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Slow(-1, 2), r"rank must be an integer from 0, got -1 \(Slow\)"),
        (lambda: Slow(True, 2), "rank must be an integer from 0, got True"),
        (lambda: Slow(0, 0.5), r"factor must be a number from 1, got 0.5 \(Slow\)"),
        (lambda: Slow(0, math.inf), "factor must be a number from 1, got inf"),
        (lambda: Slow(0, math.nan), "factor must be a number from 1, got nan"),
        (lambda: Slow(0, "2"), "factor must be a number from 1, got '2'"),  # type: ignore[arg-type]
        (lambda: Degrade(0, 0, 2), "src and dst must be two ranks, got Degrade"),
        (lambda: Degrade(0, 1.0, 2), r"dst must be an integer from 0, got 1.0 \(Degrade\)"),  # type: ignore[arg-type]
        (lambda: Degrade(0, 1, 0), r"factor must be a number from 1, got 0 \(Degrade\)"),
        (lambda: Jitter(0), r"fraction must be above 0 and at most 1, got 0 \(Jitter\)"),
        (lambda: Jitter(1.5), "fraction must be above 0 and at most 1, got 1.5"),
        (lambda: Jitter(math.nan), "fraction must be above 0 and at most 1, got nan"),
        (lambda: Jitter(0.1, seed=-1), r"seed must be an integer from 0, got -1 \(Jitter\)"),
        (lambda: Fail(0, -1), r"at_op must be an integer from 0, got -1 \(Fail\)"),
    ],
)
def test_value_that_breaks_its_rule(make: object, what: str) -> None:
    with pytest.raises(ArgumentError, match=what):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("inject", "what"),
    [
        (Slow(0, 2), "inject must be a list of Slow, Degrade, Fail and Jitter, got Slow"),
        (None, "inject must be a list of Slow, Degrade, Fail and Jitter, got None"),
        (["slow"], "inject must hold Slow, Degrade, Fail and Jitter, got 'slow'"),
        ([Slow(4, 2)], "the ranks of an injection must be from 0 to 3, got Slow"),
        ([Degrade(0, 4, 2)], "the ranks of an injection must be from 0 to 3, got Degrade"),
        ([Fail(9, 0)], "the ranks of an injection must be from 0 to 3, got Fail"),
    ],
)
def test_list_that_breaks_its_rule(inject: object, what: str) -> None:
    with pytest.raises(ArgumentError, match=what):
        check_injections(inject, WORLD_SIZE)  # type: ignore[arg-type]


def test_failure_names_rank_and_operation() -> None:
    error = make_failure(1, 3, world_size=4)
    assert error.rank == 1
    assert "rank 1 of 4 was made to fail in place of its operation 3" in str(error)


def test_jitter_differs_by_rank_and_draw_and_not_by_run() -> None:
    inject = check_injections([Jitter(0.25, seed=3), Slow(0, 2)], WORLD_SIZE)

    def drawn() -> list[list[float]]:
        streams = [jitter_of(inject, rank) for rank in range(WORLD_SIZE)]
        return [[stream() for _ in range(2000)] for stream in streams if stream is not None]

    rows = drawn()
    assert rows == drawn()
    assert len({factor for row in rows for factor in row}) == WORLD_SIZE * 2000
    assert all(0.75 <= factor <= 1.25 for row in rows for factor in row)
    # Even on 0.5: the mean of 8000 has a standard error of 0.25 / sqrt(3 * 8000) = 0.0016; the seed is fixed, so this cannot come and go.
    assert sum(map(sum, rows)) / 8000 == pytest.approx(1, abs=0.005)
    assert min(map(min, rows)) < 0.76
    assert max(map(max, rows)) > 1.24


def test_nothing_jitters_unless_asked_and_several_multiply() -> None:
    assert jitter_of([Slow(0, 2), Fail(0, 1), Degrade(0, 1, 2)], 0) is None
    one, other, both = (jitter_of(inject, 1) for inject in ([Jitter(0.5)], [Jitter(0.1, 4)], [Jitter(0.5), Jitter(0.1, 4)]))
    assert one is not None
    assert other is not None
    assert both is not None
    assert both() == one() * other()
