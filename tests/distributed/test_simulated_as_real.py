"""The same worker on real ranks and on simulated ones: the same results, to the last bit, and the same operations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from pipeline_cases import Case, gradients, make_microbatches, make_model

import ringsim
from ringsim import comm as dist
from ringsim.pipeline import generate
from ringsim.pipeline.training import train_step_pipeline
from ringsim.pipeline.transformer import SmallTransformer
from ringsim.schedules import SCHEDULE_NAMES
from ringsim.simulator.api import simulate
from ringsim.traces.value import Trace

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left_behind")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)
SAME = ["rank", "op", "group", "peer", "tag", "size_bytes", "dtype", "stage", "microbatch", "label", "line", "status"]


def both(worker: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> tuple[Trace, Trace]:
    real = ringsim.trace(worker, world_size=world_size, args=args, **options)
    return real, simulate(worker, world_size=world_size, args=args, link=LINK, **options)


def check_same(real: Trace, simulated: Trace) -> None:
    frames = [trace.to_pandas()[[name for name in SAME if name in trace.to_pandas()]] for trace in (real, simulated)]
    assert len(frames[0]) == len(frames[1])
    for name in frames[0]:
        ours, theirs = (frame[name].astype(str).tolist() for frame in frames)
        assert ours == theirs, name


def ring_worker(rounds: int) -> tuple[float, float, list[float]]:
    """The worker of the README, with random numbers."""
    ring = ringsim.current_ring()
    token = torch.full((1024,), float(ring.rank)) + torch.rand(1)
    for number in range(rounds):
        arriving = torch.empty_like(token)
        recv = dist.irecv(arriving, ring.pred, group=ring.pred_group)
        dist.isend(token, ring.succ, group=ring.succ_group).wait()
        recv.wait()
        with ringsim.span("compute", microbatch=number):
            token = arriving + float(np.random.random())
    total = torch.tensor([ring.rank])
    dist.all_reduce(total)
    dist.broadcast(token, 0)
    dist.barrier()
    return token[0].item(), token[-1].item(), total.tolist()


def test_the_ring_of_the_readme() -> None:
    real, simulated = both(ring_worker, 4, 3, seed=7)
    assert real.results == simulated.results
    check_same(real, simulated)


def train(names: list[str]) -> list[Any]:
    torch.set_num_threads(1)
    said = []
    for name in names:
        case = Case(dtype=torch.float32)
        model = make_model(case)
        loss = train_step_pipeline(model, *make_microbatches(case), schedule=name)
        said.append((name, loss, {key: grad.numpy().tobytes() for key, grad in gradients(model).items()}))
    return said


def test_every_schedule_gives_the_same_bits() -> None:
    threads = torch.get_num_threads()
    try:
        real, simulated = both(train, 3, list(SCHEDULE_NAMES))
    finally:
        torch.set_num_threads(threads)
    for mine, theirs in zip(real.results, simulated.results, strict=True):
        for (name, loss, grads), (_, other_loss, other_grads) in zip(mine, theirs, strict=True):
            assert loss == pytest.approx(other_loss, rel=1e-6), name  # summed over the ranks, in another order
            assert grads == other_grads, name
    check_same(real, simulated)


def tell() -> list[list[int]]:
    torch.manual_seed(3)
    model = SmallTransformer(61, hidden_size=32, num_layers=5, num_heads=4, max_length=64).double()
    return generate(model, [[1, 2, 3], [7], [8, 9]], 4)


def test_generation_gives_the_same_tokens() -> None:
    real, simulated = both(tell, 3)
    assert real.results == simulated.results
    check_same(real, simulated)


def make_groups() -> list[float]:
    """Groups of some, of all, and of one; a rank outside waits for nobody."""
    rank = ringsim.current_ring().rank
    some, everyone = dist.new_group([0, 2]), dist.new_group()
    dist.new_group([2, 0], sort_ranks=False)
    dist.new_group([1])
    tensor = torch.tensor([float(rank)])
    if rank != 1:
        dist.all_reduce(tensor, group=some)
    dist.all_reduce(tensor, group=everyone)
    return tensor.tolist()


def test_groups_are_made_on_both() -> None:
    real, simulated = both(make_groups, 3)
    check_same(real, simulated)
    assert real.results == simulated.results == [[5.0]] * 3
