"""The ends of runs on GPUs, with a stand-in for the GPU; ``test_gpu.py`` uses a real one."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ringsim
from ringsim.errors import RankFailed

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def hang_on_gpu(tests: str) -> None:
    """Passes a token to rank 1, whose stand-in for a GPU never ends the second recv."""
    sys.path.append(tests)
    from stand_in_gpu import GPU, LATER, StandInGpu

    from ringsim.comm import torch_hooks

    gpu = StandInGpu()
    token = torch.zeros(4)
    with pytest.MonkeyPatch.context() as patch:
        gpu.install(patch)
        patch.setattr(torch_hooks, "is_nccl", lambda group: True)
        patch.setattr(torch_hooks, "find_gpu", lambda value: GPU)
        group = dist.new_group([0, 1])
        for number in range(2):
            if dist.get_rank() == 0:
                dist.send(token, 1, group=group)
                continue
            if number:
                gpu.queue(LATER)
            dist.recv(token, 0, group=group)
            gpu.now_ns += 1000
        dist.barrier()
        if dist.get_rank() == 0:
            raise ValueError("enough")
        time.sleep(60)


def test_the_events_are_read_before_ranks_are_ended() -> None:
    tests = str(Path(__file__).parents[1])
    with pytest.raises(RankFailed, match="enough") as raised:
        ringsim.trace(hang_on_gpu, world_size=2, args=(tests,))
    assert raised.value.trace is not None
    rows = raised.value.trace.to_pandas().query("op == 'recv'")
    assert rows["status"].tolist() == ["ok", "in_flight"]
    assert rows["done_ns"].notna().tolist() == [True, False]
