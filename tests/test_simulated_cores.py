"""Ranks that share the cores of one machine, on the virtual clock: who waits for a core, and for how long."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ringsim
from ringsim import comm as dist
from ringsim.link import Link
from ringsim.predict.calibration import Calibration
from ringsim.simulator.api import simulate
from ringsim.simulator.links import SharedCores
from ringsim.topologies import OneMachine

LINK = Link(alpha_s=0.004, beta_s_per_byte=0.0)
FREE = Link(0.0, 0.0)
CALIBRATION = Calibration(
    link=LINK,
    sending=FREE,
    sending_early_s=0.0,
    receiving_s=0.0,
    sleep_s=0.0,
    around_s=0.0,
    cores=1,
    costs=None,
    num_messages=3,
    sizes_bytes=(1,),
)


def _send_to_successor() -> float:
    """Rank 0 to rank 1, rank 2 to rank 3, both at once; returns when this rank is done, in ms."""
    ring = ringsim.current_ring()
    token = torch.zeros(1)
    if ring.rank % 2 == 0:
        dist.send(token, ring.succ, group=ring.succ_group)
    else:
        dist.recv(token, ring.pred, group=ring.pred_group)
    return _now_ms()


def _now_ms() -> float:
    clock = ringsim.state.get_state().clock
    assert clock is not None
    return round(clock.now_s() * 1e3, 6)


def _compute() -> float:
    ringsim.compute(0.010)
    return _now_ms()


@pytest.mark.parametrize(("cores", "done_ms"), [(1, [4, 4, 8, 8]), (2, [4, 4, 4, 4])])
def test_messages_wait_for_a_core(cores: int, done_ms: list[float]) -> None:
    assert simulate(_send_to_successor, world_size=4, topology=OneMachine(LINK, cores)).results == done_ms


@pytest.mark.parametrize(("cores", "done_ms"), [(1, [11, 12, 13, 14]), (2, [11, 11, 12, 12]), (4, [11] * 4)])
def test_ranks_sleep_side_by_side_and_go_on_one_after_the_other(cores: int, done_ms: list[float]) -> None:
    calibration = replace(CALIBRATION, around_s=0.001, cores=cores)
    assert simulate(_compute, world_size=4, topology=calibration.topology, compute=calibration).results == done_ms


def test_links_alone_share_no_cores() -> None:
    calibration = replace(CALIBRATION, around_s=0.001)
    assert simulate(_compute, world_size=4, link=LINK, compute=calibration).results == [11] * 4


def test_slower_link_needs_no_more_of_a_core() -> None:
    carrier = SharedCores(LINK, {(0, 1): 10.0}, count=1)
    assert carrier.carry(0, 1, 0, 0.0) == pytest.approx(0.040)
    assert carrier.carry(2, 3, 0, 0.0) == pytest.approx(0.008)  # after the 4 ms that the first one needed the core
