"""The same worker on real ranks and on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pipeline_cases import Case, gradients, make_microbatches, make_model

import ringsim
from ringsim import comm as dist
from ringsim import simulate
from ringsim.pipeline import SmallTransformer, generate, train_step_pipeline
from ringsim.schedules import SCHEDULE_NAMES

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)


DTYPES = "float32 bfloat16 int8 int64 bool complex64 float8_e4m3fn".split()
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def reduce_everything() -> dict[tuple[str, str, str], str]:
    """Returns the refused reductions of each dtype, and the results of the others."""
    found = {}
    rank, size = dist.get_rank(), dist.get_world_size()

    def make(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.arange(rank + 1, rank + 1 + count).to(dtype)

    for dtype in (getattr(torch, each) for each in DTYPES):
        for name in REDUCTIONS:
            op = getattr(dist.ReduceOp, name)
            tensor, output = make(2 * size, dtype), make(2, dtype)
            ways: dict[str, Callable[[], Any]] = {
                # called in this round
                "all_reduce": lambda: dist.all_reduce(tensor, op),  # noqa: B023
                "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([tensor], op),  # noqa: B023
                "reduce": lambda: dist.reduce(tensor, 0, op),  # noqa: B023
                "reduce_scatter": lambda: dist.reduce_scatter(output, list(tensor.split(2)), op),  # noqa: B023
                "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(output, tensor, op),  # noqa: B023
            }
            for way, reduce in ways.items():
                result = output if "scatter" in way else tensor
                try:
                    reduce()
                    if way == "reduce" and rank:
                        tensor = make(2 * size, dtype)  # only the root has it
                    found[way, name, str(dtype)] = (
                        str(result.tolist()) if way != "reduce" or not rank else "sent"
                    )
                except (RuntimeError, ValueError):
                    found[way, name, str(dtype)] = "refused"
    return found


def test_the_same_reductions_are_refused() -> None:
    real = ringsim.trace(reduce_everything, world_size=2).results
    simulated = simulate(reduce_everything, world_size=2, link=LINK).results
    for mine, theirs in zip(real, simulated, strict=True):
        assert len(mine) == 5 * len(DTYPES) * len(REDUCTIONS)
        assert mine == theirs
        assert 0 < list(mine.values()).count("refused") < len(mine)


SAME = "rank op group peer tag size_bytes dtype stage microbatch label line status".split()


def go_round() -> tuple[float, float, list[float]]:
    """The worker of the README, with random numbers."""
    ring = ringsim.current_ring()
    token = torch.full((1024,), float(ring.rank)) + torch.rand(1)
    for number in range(3):
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


def train() -> tuple[dict[str, float], dict[str, Any]]:
    torch.set_num_threads(1)
    losses, found = {}, {}
    for name in SCHEDULE_NAMES:
        case = Case(dtype=torch.float32)
        model = make_model(case)
        losses[name] = train_step_pipeline(model, *make_microbatches(case), schedule=name)
        found[name] = {key: grad.numpy().tobytes() for key, grad in gradients(model).items()}
    return losses, found


def tell() -> list[list[int]]:
    torch.manual_seed(3)
    model = SmallTransformer(61, hidden_size=32, num_layers=5, num_heads=4, max_length=64).double()
    return generate(model, [[1, 2, 3], [7], [8, 9]], 4)


def do_all() -> tuple[Any, ...]:
    return go_round(), tell(), *train()


def test_programs_give_the_same_bits_and_the_same_records() -> None:
    """A ring, the generation of tokens, and a training step with every schedule."""
    real = ringsim.trace(do_all, world_size=3, seed=7)
    simulated = simulate(do_all, world_size=3, link=LINK, seed=7)
    for (*mine, loss, grads), (*theirs, other_loss, other_grads) in zip(
        real.results, simulated.results, strict=True
    ):
        assert mine == theirs
        # summed over the ranks, in another order
        assert loss == pytest.approx(other_loss, rel=1e-6)
        assert grads == other_grads
    frames = [trace.to_pandas() for trace in (real, simulated)]
    for name in SAME:
        ours, theirs = (frame[name].astype(str).tolist() for frame in frames)
        assert ours == theirs, name
    comparison = ringsim.compare(real, simulated)
    assert comparison.operations.count > 60
    assert comparison.unpaired == (0, 0)
