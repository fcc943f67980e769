"""Groups that all ranks make in one order raise nothing, however they are made."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringsim

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("nothing_left_behind")]


def makes_groups() -> float:
    for _ in range(5):
        for ranks in ([0, 1], [1, 2], [2, 3], [3, 0], [0, 1, 2, 3], None):
            dist.new_group(ranks)
    dist.new_subgroups(2)
    if dist.get_rank() < 2:
        dist.new_group([0, 1], use_local_synchronization=True)  # known to its members alone, named after how many groups each is in
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=mesh.get_group("rows"))
    return float(total)


def test_groups_in_one_order_raise_nothing() -> None:
    trace = ringsim.trace(makes_groups, world_size=4, limit_s=60)
    assert trace.results == [2.0, 4.0, 2.0, 4.0]
    assert [finding.kind for finding in trace.explain().findings if "mismatch" in finding.kind] == []
