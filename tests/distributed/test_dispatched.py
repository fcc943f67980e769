"""Collectives issued by C++."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_server import RankServer, free_port, results
from torch import nn

import ringsim
from ringsim import Trace
from ringsim.errors import MessageMismatch

# more than torch's first bucket, 1 MiB
SIZES = [(64, 512), (512, 512), (512, 512), (512, 8)]
BYTES = 4 * sum(rows * columns + columns for rows, columns in SIZES)


def train(steps: int) -> list[torch.Tensor]:
    """Trains a model in several buckets, and returns the gradients of the last step."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(*[nn.Linear(*size) for size in SIZES]), bucket_cap_mb=1
    )
    torch.manual_seed(dist.get_rank())
    for _ in range(steps):
        model.zero_grad()
        with ringsim.span("backward"):
            model(torch.randn(4, SIZES[0][0])).square().sum().backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


def train_unrecorded(port: int, rank: int, size: int) -> list[Any]:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    gradients = [gradient.tolist() for gradient in train(3)]
    dist.destroy_process_group()
    return gradients


def functional() -> None:
    import torch.distributed._functional_collectives as functional_collectives

    assert (
        float(functional_collectives.all_reduce(torch.ones(3), "sum", dist.group.WORLD).sum())
        == 3 * dist.get_world_size()
    )


class Slow(torch.autograd.Function):
    """A layer that passes its input on, and is slow in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ringsim.compute(ctx.seconds)
        return gradient, None


def overlapping() -> None:
    """Computes the next bucket while one is reduced; rank 1 is late with the last bucket."""
    layers = [nn.Linear(512, 512) for _ in range(3)]
    seconds = [2.0 if dist.get_rank() == 1 else 0.05, 0.05, 0.05]
    model = nn.ModuleList(layers)
    model.forward = lambda x: functools.reduce(
        lambda hidden, number: Slow.apply(layers[number](hidden), seconds[number]), range(3), x
    )
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    for _ in range(3):
        with ringsim.span("step"):
            model(torch.randn(4, 512)).sum().backward()


def all_in_turn() -> list[torch.Tensor]:
    gradients = train(3)
    functional()
    overlapping()
    return gradients


@pytest.fixture(scope="module")
def trace() -> Trace:
    return ringsim.trace(all_in_turn, world_size=3)


def reductions_in(trace: Trace, label: str, rank: int) -> list[Any]:
    """Returns a rank's all_reduce operations within each of its spans with a name."""
    frame = trace.to_pandas().query(f"rank == {rank}")
    mine, spans = frame[frame["op"] == "all_reduce"], frame[frame["label"] == label]
    return [
        mine[mine["post_ns"].between(*times)]
        for times in zip(spans["post_ns"], spans["done_ns"], strict=True)
    ]


def test_buckets_are_recorded_once_with_their_bytes(trace: Trace) -> None:
    for rank in range(trace.world_size):
        steps = [found["size_bytes"].tolist() for found in reductions_in(trace, "backward", rank)]
        assert [sum(sizes) for sizes in steps] == [BYTES] * 3
        assert len(steps[0]) == 1  # torch creates its buckets in the first step
        assert len(steps[1]) == len(steps[2]) > 1
    frame = trace.to_pandas()
    assert set(frame["status"]) == {"ok"}
    reductions = frame[frame["op"] == "all_reduce"]
    assert set(reductions["group"]) == {"world"}
    assert set(reductions["file"]) == {__file__}
    assert (reductions["done_ns"] >= reductions["post_ns"]).all()


def changes_no_bit(recorded: list[list[torch.Tensor]], server: RankServer) -> bool:
    """Returns whether ranks without recording have the same gradients."""
    port, size = free_port(), len(recorded)
    ended = server.run(train_unrecorded, [(port, rank, size) for rank in range(size)])
    return [[each.tolist() for each in rank] for rank in recorded] == results(ended)


def test_recording_changes_no_bit_of_a_gradient(trace: Trace, server: RankServer) -> None:
    assert changes_no_bit(trace.results, server)


def test_a_program_waits_where_its_functional_collective_does(trace: Trace) -> None:
    waited = trace.to_pandas().query("op == 'all_reduce' and size_bytes == 12")
    assert len(waited) == trace.world_size
    assert (waited["wait_ns"] >= waited["post_ns"]).all()


def test_only_the_last_bucket_of_a_step_blocks(trace: Trace) -> None:
    for rank in (0, 2):
        steps = [found["wait_ns"].notna().tolist() for found in reductions_in(trace, "step", rank)]
        assert steps == [[True], [False, False, True], [False, False, True]]


def test_the_rank_that_comes_late_is_named_and_nothing_is_said_to_be_missing(trace: Trace) -> None:
    assert trace.metadata["not_recorded"] == []
    diagnosis = trace.explain()
    # a busy machine is also slow
    slow = {"link", "slow_link", "late_sender", "late_receiver", "straggler"}
    assert {finding.kind for finding in diagnosis.findings} <= slow
    assert ("straggler", (1,)) in [(finding.kind, finding.ranks) for finding in diagnosis.findings]
    assert 'still in "compute 2 s"' in str(diagnosis)


def slow_group_first() -> None:
    """Makes rank 1 enter the first group's collective after rank 0 entered the second group's."""
    import torch.distributed._functional_collectives as functional_collectives

    slow, fast = dist.new_group([0, 1]), dist.new_group([0, 1])
    store = dist.distributed_c10d._get_default_store()
    issue, wait = functional_collectives.all_reduce, functional_collectives.wait_tensor
    if dist.get_rank() == 0:
        late, early = issue(torch.ones(4), "sum", slow), issue(torch.ones(8), "sum", fast)
        wait(early)
        ringsim.mark("early is here")
        store.set("early is here", "")
    else:
        wait(issue(torch.ones(8), "sum", fast))
        store.wait(["early is here"])
        late = issue(torch.ones(4), "sum", slow)
    wait(late)


def test_a_slow_group_does_not_delay_the_end_of_another() -> None:
    """In 0.2.0, the early collective got the end of the late one."""
    frame = ringsim.trace(slow_group_first, world_size=2).to_pandas().query("rank == 0")
    late, early = frame[frame["op"] == "all_reduce"].sort_values("size_bytes").itertuples()
    (mark,) = frame[frame["op"] == "mark"].itertuples()
    # whether rank 0 had to wait for the late one depends on timing
    assert early.done_ns <= mark.post_ns < late.done_ns


WAYS = {
    "then": lambda future: future.then(lambda done: done.value()).wait(),
    "wait_all": lambda future: torch.futures.wait_all([future]),
}


def stuck_in_a_future(way: str) -> None:
    if dist.get_rank() == 0:
        WAYS[way](dist.all_reduce(torch.ones(3), async_op=True).get_future())
    else:
        dist.recv(torch.ones(2), 0)


@pytest.mark.parametrize("way", list(WAYS))
def test_a_rank_that_waits_for_a_future_waits_for_its_operation(way: str) -> None:
    """In 0.2.0, the message said that it waited for another of its threads."""
    with pytest.raises(MessageMismatch) as caught:
        ringsim.trace(stuck_in_a_future, world_size=2, args=(way,), limit_s=60)
    (finding,) = caught.value.diagnosis.findings
    assert {(each.rank, each.op) for each in finding.operations} == {(0, "all_reduce"), (1, "recv")}
    assert "threads" not in str(caught.value)


def unequal() -> None:
    """Trains with one more batch on rank 1."""
    train(2 + dist.get_rank())
    dist.barrier()


def saves_a_checkpoint() -> str:
    """Runs ``unequal`` in a program that saves its state before it gives up."""
    try:
        unequal()
    except RuntimeError:
        time.sleep(4.0)  # longer than ringsim waits for a woken rank
        return "saved"
    return "trained"


def test_a_rank_that_has_left_its_wait_in_cpp_may_finish() -> None:
    """In 0.2.0 it was ended after 2 s.

    Its peer's wait also overwrote another record of the rank.
    """
    trace = ringsim.trace(saves_a_checkpoint, world_size=2, limit_s=60)
    assert trace.results == ["saved", "saved"]
    calls = trace.to_pandas().query("kind == 'collective'")
    rank_0, rank_1 = (
        list(zip(some["op"], some["status"], strict=True)) for _, some in calls.groupby("rank")
    )
    steps = len(rank_0) - 1
    assert rank_0 == [*rank_1[:steps], ("barrier", "error")]
    assert {*rank_1[steps:]} == {("all_reduce", "error")}
    assert [(one["kind"], one["ranks"]) for one in trace.metadata["caught"]] == [
        ("collective_mismatch", [0, 1])
    ]


def uneven() -> None:
    """Trains with two more batches on rank 1, and forgets a handle of its own."""
    from torch.distributed.algorithms.join import Join

    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    with Join([model]):
        for _ in range(3 + 2 * dist.get_rank()):
            model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(torch.ones(3), async_op=True)
    dist.barrier()


def test_handles_that_torch_makes_and_drops_are_not_the_programs_mistake() -> None:
    """In 0.2.0, the program was accused of never waiting for an all_reduce.

    Torch's Join uses it to count the ranks with batches left.
    """
    trace = ringsim.trace(uneven, world_size=2)
    findings = trace.explain().findings
    assert [one.kind for one in findings] == ["leaked_request"] * 2
    assert {operation.size_bytes for one in findings for operation in one.operations} == {12}
    frame = trace.to_pandas().query("size_bytes == 4")
    assert len(frame) > 0
    assert (frame["done_ns"] >= frame["post_ns"]).all()
