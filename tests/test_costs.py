"""Bandwidths: the factors of nccl-tests against what a ring really moves, for every operation that a trace can hold."""

from __future__ import annotations

import math

import pytest

from ringsim.errors import ArgumentError
from ringsim.traces.collectives import algbw_gb_per_s, bus_factor, busbw_gb_per_s
from ringsim.traces.events import OP_NAMES

WITHOUT_FACTOR = {"new_group", "span", "mark", "barrier", "monitored_barrier"}


def bytes_over_the_busiest_link(op: str, ranks: int, size_bytes: int) -> int:
    """Counts what rank 0 sends when each operation goes round a ring, shard by shard."""
    shard = size_bytes // ranks
    sent = 0
    for _ in range(ranks - 1):  # reduce-scatter, or all-gather: each round a rank passes one shard on
        sent += shard
    if op == "all_reduce":  # the one, then the other
        for _ in range(ranks - 1):
            sent += shard
    return sent


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_bus_factor_is_the_traffic_of_a_ring(op: str, ranks: int) -> None:
    size_bytes = 840 * ranks
    assert bus_factor(op, ranks) * size_bytes == pytest.approx(bytes_over_the_busiest_link(op, ranks, size_bytes))


@pytest.mark.parametrize("op", sorted(set(OP_NAMES) - WITHOUT_FACTOR))
def test_every_operation_of_a_trace_has_a_factor(op: str) -> None:
    assert all(0 < bus_factor(op, ranks) < 2 for ranks in (2, 3, 8))


@pytest.mark.parametrize("op", ["send", "irecv", "batch_isend", "broadcast", "reduce"])
def test_a_buffer_that_is_sent_on_whole_counts_once(op: str) -> None:
    assert {bus_factor(op, ranks) for ranks in (1, 2, 3, 8)} == {1.0}


@pytest.mark.parametrize("op", [*sorted(WITHOUT_FACTOR), "my_own_collective"])
def test_unknown_operation_has_none_and_ends_nothing(op: str) -> None:
    # DeepSpeed 0.19.8 calls exit(0) for operations that its bandwidth table has not.
    assert math.isnan(bus_factor(op, 4))
    assert math.isnan(busbw_gb_per_s(op, 8, 1.0, 4))


def test_algbw_is_size_over_time() -> None:
    # DeepSpeed 0.19.8 doubles the size for all_reduce.
    assert algbw_gb_per_s(8_000_000, 1000.0) == 8.0
    assert busbw_gb_per_s("all_reduce", 8_000_000, 1000.0, 2) == 8.0
    assert busbw_gb_per_s("send", 8_000_000, 1000.0, 64) == 8.0


@pytest.mark.parametrize(("size_bytes", "duration_us"), [(0, 5.0), (8, 0.0), (8, math.nan)])
def test_no_bandwidth_without_bytes_or_time(size_bytes: int, duration_us: float) -> None:
    assert math.isnan(algbw_gb_per_s(size_bytes, duration_us))


def test_group_size_must_be_positive() -> None:
    with pytest.raises(ArgumentError, match="group_size must be 1 or more, got 0"):
        bus_factor("all_reduce", 0)
