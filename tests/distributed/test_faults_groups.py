"""Groups that all ranks make in one order raise nothing, however they are made."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringsim
from ringsim.errors import Deadlock, PeerExited

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("nothing_left_behind")]


def makes_groups() -> float:
    for _ in range(5):
        for ranks in ([0, 1], [1, 2], [2, 3], [3, 0], [0, 1, 2, 3], None):
            dist.new_group(ranks)
    dist.new_subgroups(2)
    if dist.get_rank() < 2:
        for _ in range(2):
            dist.new_group([0, 1], use_local_synchronization=True)  # known to its members alone, named after how many groups each is in
    dist.new_group([2, 3], use_local_synchronization=True)  # the others pass by
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=mesh.get_group("rows"))
    return float(total)


def test_groups_in_one_order_raise_nothing() -> None:
    trace = ringsim.trace(makes_groups, world_size=4, limit_s=60)
    assert trace.results == [2.0, 4.0, 2.0, 4.0]
    assert [finding.kind for finding in trace.explain().findings if "mismatch" in finding.kind] == []


def its_members_alone() -> None:
    """Rank 0 and 2 are to make a group, of which rank 1 need not know."""
    if dist.get_rank() == 2:
        dist.new_group([0, 2], use_local_synchronization=True)


def test_a_group_that_its_members_alone_make_waits_for_no_one_who_has_left() -> None:
    """0.1.0 did not record its making: the member that made it waited for torch's store until the time-out of the run."""
    start = time.monotonic()
    with pytest.raises(PeerExited) as caught:
        ringsim.trace(its_members_alone, world_size=3)
    assert time.monotonic() - start < 20
    finding = caught.value.diagnosis.findings[0]
    assert (finding.kind, set(finding.ranks)) == ("missing_participant", {0, 2})
    assert [operation.line for operation in finding.operations] == [its_members_alone.__code__.co_firstlineno + 3]
    assert caught.value.trace is not None
    assert caught.value.trace.explain().findings[0].kind == "missing_participant"


def test_the_making_of_such_a_group_is_recorded_with_its_members() -> None:
    trace = ringsim.trace(makes_groups, world_size=4, limit_s=60)
    rows = trace.to_pandas()
    made = rows[(rows["op"] == "new_group") & rows["group"].astype(str).str.startswith("groups of [")]
    assert [(int(one.rank), one.shape) for one in made.itertuples()] == [(0, "0x1")] * 2 + [(1, "0x1")] * 2 + [(2, "2x3"), (3, "2x3")]


def in_different_numbers_of_groups() -> None:
    """Torch names a group that its members alone make by how many groups each of them is in: here they never meet."""
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    dist.new_group([0, 1], use_local_synchronization=True)


def test_members_that_torch_gives_other_names_of_their_group_wait_in_vain() -> None:
    start = time.monotonic()
    with pytest.raises(Deadlock) as caught:
        ringsim.trace(in_different_numbers_of_groups, world_size=2)
    assert time.monotonic() - start < 20
    finding = caught.value.diagnosis.findings[0]
    assert (finding.kind, set(finding.ranks)) == ("deadlock", {0, 1})
    assert {operation.line for operation in finding.operations} == {in_different_numbers_of_groups.__code__.co_firstlineno + 4}
    assert "after 4 others" in finding.message
    assert "let them make the same groups before it" in finding.hint
