"""Tests of torch's private names: the installed torch has all of them, but may lack any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from fake_rank import fake_world, recorded
from torch.distributed import ProcessGroup, Work

from ringsim.comm import torch_private

# the replaced functions
PLACES = [
    value
    for value in vars(torch_private).values()
    if isinstance(value, tuple) and isinstance(value[-1], str)
]
ASKED = [
    *((dist.distributed_c10d, name) for name in ("_get_default_store", "_world")),
    *((ProcessGroup, name) for name in ("_get_backend", "_get_sequence_number_for_group")),
    *((Work, name) for name in ("_get_op_type", "_source_rank")),
]


@pytest.mark.parametrize(("owner", "name"), [*PLACES, *ASKED])
def test_torch_has_the_private_names_that_are_used_and_may_lack_each(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hasattr(owner, name)
    with fake_world():
        with monkeypatch.context() as patch:
            patch.delattr(owner, name)
            if name == "_world":  # without it torch itself would not work
                assert torch_private.count_groups() == 0
                return
            if name == "_get_default_store":
                assert torch_private.default_store() is None
                return
            with recorded(tmp_path):
                assert not hasattr(owner, name)
            unknown: Any = object()
            assert (
                torch_private.gpu_backend(unknown),
                torch_private.is_message(unknown),
                torch_private.source_rank(unknown),
            ) == ("", False, -1)


def test_a_device_mesh_has_the_names_of_its_groups() -> None:
    with fake_world():
        mesh = dist.init_device_mesh("cpu", (1,))
        assert mesh._dim_group_names == [mesh.get_group().group_name]
        torch_private.rename_groups_of(mesh, "ended")
        with pytest.raises(Exception, match="ended"):
            mesh.get_group()
