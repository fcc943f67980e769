"""Unchanged programs compute and record the same on real and on simulated ranks.

The wrong programs get the same verdict.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

import ringsim
from ringsim import Trace
from ringsim.cli import main
from ringsim.errors import RingError

PLACE = Path(__file__).parents[1] / "programs"
sys.path.insert(0, str(PLACE))
import right_messages  # noqa: E402
import right_modules  # noqa: E402
import two_clocks  # noqa: E402

for module in (right_messages, right_modules, two_clocks):
    cloudpickle.register_pickle_by_value(module)

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)
SIZE = two_clocks.SIZE
NEW = {**two_clocks.EXACT, **two_clocks.CLOSE}
THREADED = {  # a simulated rank communicates in one thread
    "a_thread_for_each_peer",
    "asyncio_in_turn",
    "fetched_ahead",
    "sent_by_a_timer",
}
IN_ANY_ORDER = {"served_by_whoever_comes"}  # real ranks race here
RIGHT = {
    name: program
    for name, (program, _) in right_messages.PROGRAMS.items()
    if name not in THREADED | IN_ANY_ORDER
}
BOTH = {**RIGHT, **NEW}
Operations = dict[tuple[int, str], list[tuple[Any, ...]]]


def run_all(names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        dist.barrier()
        with ringsim.span(name):
            found[name] = BOTH[name]()
    return found


@pytest.fixture(scope="module")
def real() -> Trace:
    return ringsim.trace(run_all, world_size=SIZE, args=(list(BOTH),), limit_s=200)


@pytest.fixture(scope="module")
def simulated() -> Trace:
    return ringsim.simulate(run_all, world_size=SIZE, args=(list(BOTH),), link=LINK, limit_s=200)


def list_operations(trace: Trace) -> Operations:
    """Returns, by rank and program, each operation: name, group, peer, tag, dtype, shape, bytes."""
    frame = trace.to_pandas().sort_values(["rank", "seq"])
    found: Operations = {}
    name: dict[int, str] = {}
    for row in frame.itertuples():
        if row.label in BOTH:
            name[row.rank] = row.label
        elif row.kind in ("send", "recv", "collective") and row.rank in name:
            about = (row.op, row.group, row.peer, row.tag, row.dtype, row.shape, row.size_bytes)
            found.setdefault((row.rank, name[row.rank]), []).append(about)
    return found


@pytest.fixture(scope="module")
def operations(real: Trace, simulated: Trace) -> tuple[Operations, Operations]:
    """Returns the recorded operations on real and on simulated ranks."""
    return list_operations(real), list_operations(simulated)


@pytest.mark.parametrize("name", NEW)
def test_results_are_those_of_real_ranks(name: str, real: Trace, simulated: Trace) -> None:
    tolerance = (
        {"atol": 0.0, "rtol": 0.0} if name in two_clocks.EXACT else {"atol": 1e-5, "rtol": 1e-4}
    )
    for mine, theirs in zip(simulated.results, real.results, strict=True):
        torch.testing.assert_close(mine[name], theirs[name], **tolerance)


@pytest.mark.parametrize("name", BOTH)
def test_the_same_operations_are_recorded(
    name: str, operations: tuple[Operations, Operations]
) -> None:
    expected, found = operations
    for rank in range(SIZE):
        assert found.get((rank, name)) == expected.get((rank, name))


@pytest.mark.parametrize("name", two_clocks.WRONG)
def test_wrong_programs_get_the_verdict_of_real_ranks(name: str) -> None:
    worker = two_clocks.WRONG[name]
    with pytest.raises(RingError) as simulated:
        ringsim.simulate(worker, world_size=SIZE, link=LINK, limit_s=60)
    with pytest.raises(RingError) as real:
        ringsim.trace(worker, world_size=SIZE, limit_s=60)
    assert type(simulated.value) is type(real.value)
    assert simulated.value.diagnosis.kind == real.value.diagnosis.kind
    first, expected = (each.value.diagnosis.findings[0] for each in (simulated, real))
    assert first.ranks[0] == expected.ranks[0]


@pytest.mark.parametrize("name", ["data_parallel", "fully_sharded", "pipelining"])
def test_a_script_runs_as_it_is(name: str, tmp_path: Path) -> None:
    script = str(PLACE / "scripts" / f"{name}.py")
    real, simulated = tmp_path / "real.ringtrace", tmp_path / "simulated.ringtrace"
    assert main(["trace", "-n", "2", "-o", str(real), script]) == 0
    assert main(["simulate", "-n", "2", "--save", str(simulated), script]) == 0
    counts = []
    for file in (real, simulated):
        frame = ringsim.load(file).to_pandas()
        calls = frame[frame["kind"].isin(["send", "recv", "collective"])]
        counts.append(calls.groupby(["rank", "op"]).size().to_dict())
    assert counts[0] == counts[1]


# -- virtual times, by closed forms


class Costly(torch.autograd.Function):
    """Takes time in the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ringsim.compute(ctx.seconds)
        return gradient, None


def reduce_gradients(layers: int, layer_s: float) -> None:
    """Runs two backward passes under DDP, with one bucket per layer."""
    from torch.nn.parallel import DistributedDataParallel

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1024))

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return Costly.apply(values * self.weight, layer_s)

    model = DistributedDataParallel(
        torch.nn.Sequential(*[Layer() for _ in range(layers)]), bucket_cap_mb=0.001
    )
    for _ in range(2):  # DDP orders its buckets after the first pass
        loss = model(torch.ones(1024, requires_grad=True)).sum()
        dist.barrier()
        with ringsim.span("backward"):
            loss.backward()


def test_gradients_travel_while_the_backward_pass_goes_on() -> None:
    """8 layers of 1 ms; the all_reduce of each takes 0.5 ms, so only the last one shows."""
    link = ringsim.Link(alpha_s=0.25e-3, beta_s_per_byte=0.0)  # two ranks: two steps
    trace = ringsim.simulate(reduce_gradients, world_size=2, args=(8, 1e-3), link=link)
    frame = trace.to_pandas()
    last = frame[(frame["label"] == "backward") & (frame["rank"] == 0)].iloc[-1]
    assert last["done_ns"] - last["post_ns"] == 8_500_000
    reductions = frame[(frame["op"] == "all_reduce") & (frame["rank"] == 0)]
    blocked_ns = reductions["done_ns"] - reductions["wait_ns"]
    assert blocked_ns.iloc[-1] == 500_000  # the rank waits for the last one


def run_torchs_1f1b(microbatches: int, forward_s: float, backward_s: float) -> None:
    """Runs one step of torch's own 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            ringsim.compute(forward_s)
            return Costly.apply(values * self.weight, backward_s)

    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(Stage(), rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=lambda output, _: output.sum())
    whole = torch.ones(microbatches, 4)
    for _ in range(2):  # in the first step the stages send each other their shapes
        dist.barrier()
        with ringsim.span("step"):
            if rank == 0:
                schedule.step(whole)
            elif rank == size - 1:
                schedule.step(target=whole)
            else:
                schedule.step()


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_torchs_1f1b_takes_as_long_as_the_evaluator_says(ranks: int, microbatches: int) -> None:
    link = ringsim.Link(alpha_s=0.0, beta_s_per_byte=0.0)
    trace = ringsim.simulate(
        run_torchs_1f1b, world_size=ranks, args=(microbatches, 1e-3, 2e-3), link=link
    )
    frame = trace.to_pandas()
    steps = frame[frame["label"] == "step"].groupby("rank").last()
    took_ns = steps["done_ns"].max() - steps["post_ns"].min()
    costs = ringsim.pipeline.Costs(forward=1e-3, backward=2e-3)
    planned = ringsim.simulate_schedule(
        "1f1b", costs, num_ranks=ranks, num_microbatches=microbatches
    )
    assert took_ns == pytest.approx(float(planned.makespan) * 1e9)
    assert took_ns == pytest.approx((microbatches + ranks - 1) * 3e-3 * 1e9)  # the closed form
