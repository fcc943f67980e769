"""The log of ``ringsim.comm`` on simulated ranks: the rows of a real run's log, with times of the virtual clock."""

from __future__ import annotations

import logging
import sys
from typing import Any

import cloudpickle
import pytest
import torch

import ringsim
from ringsim import comm as dist
from ringsim.simulator.api import simulate

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("nothing_left_behind")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

LINK = ringsim.Link(alpha_s=1e-3, beta_s_per_byte=1e-6)
COUNTED = ("name", "op", "size_bytes", "group_size", "count", "first_count", "in_flight", "failed")


def row_keys(table: Any) -> list[tuple[Any, ...]]:
    return sorted(tuple(getattr(row, name) for name in COUNTED) for row in table.rows)


@dist.timed_op
def swap(tensor: torch.Tensor, group: Any = None) -> Any:
    """A collective of the user's own, which returns a handle."""
    other = 1 - dist.get_rank()
    handles = [dist.isend(tensor.clone(), other, group=group), dist.irecv(tensor, other, group=group)]
    handles[0].wait()
    return handles[1]


def train() -> list[Any]:
    """Logs in all the ways that there are; returns the rows of three logs."""
    rank, tensor = ringsim.current_ring().rank, torch.ones(1000)
    dist.all_reduce(tensor)  # not yet
    dist.configure(enabled=True)
    for _ in range(3):
        dist.all_reduce(tensor)
    dist.all_reduce(tensor, log_name="gradients")
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    swap(tensor).wait()
    left = dist.irecv(torch.zeros(3), 1 - rank)  # is never sent
    found = [dist.log_summary()]
    dist.configure(prof_all=False, prof_ops=["barrier"])
    dist.barrier()
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0, prof=True)
    found.append(dist.log_summary())
    dist.reset_log()
    dist.barrier()
    dist.configure(enabled=False)
    dist.barrier()
    found.append(dist.log_summary())
    dist.send(torch.zeros(3), 1) if rank == 0 else left.wait()
    left.wait() if rank == 0 else dist.send(torch.zeros(3), 0)
    return [row_keys(table) for table in found]


def test_the_rows_are_those_of_a_real_run() -> None:
    real = ringsim.trace(train, world_size=2)
    virtual = simulate(train, world_size=2, link=LINK)
    assert virtual.results == real.results
    first, second, third = real.results[0]
    assert {(row[0], row[4]) for row in first} >= {("all_reduce", 3), ("gradients", 1), ("swap", 1)}
    assert {row[0] for row in second} - {row[0] for row in first} == {"barrier", "broadcast"}
    assert [(row[0], row[4]) for row in third] == [("barrier", 1)]
    assert virtual.output[0].count("Communication of 2 ranks") == 3


def reduce_five_times() -> tuple[float, float, int]:
    dist.configure(enabled=True)
    for _ in range(5):
        dist.all_reduce(torch.zeros(500))
    (row,) = dist.log_summary().rows
    return row.median_us, row.algbw_gb_per_s, dist.get_comm_operation_count()


def test_times_are_the_formulas() -> None:
    took_us = 2 * (1000 + 1000)  # two steps of 1 ms and 1,000 bytes
    assert simulate(reduce_five_times, world_size=2, link=LINK).results == [(took_us, pytest.approx(2000 / took_us * 1e-3), 5)] * 2


def write_lines() -> None:
    dist.configure(enabled=True, verbose=True)
    dist.all_reduce(torch.zeros(500), log_name="gradients")
    dist.isend(torch.zeros(1), 1).wait() if dist.get_rank() == 0 else dist.recv(torch.zeros(1), 0)


def test_lines_of_a_verbose_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ringsim.comm"):
        simulate(write_lines, world_size=2, link=LINK)
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("gradients: all_reduce, world, 1.95 KiB, 4 ms") for line in lines) == 2
    assert sum(line.startswith("isend, world, 4 B, posted") for line in lines) == 1
    assert len(lines) == 4
