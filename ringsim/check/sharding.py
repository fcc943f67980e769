"""The checks for the lesson on sharding: buckets in hooks, a sharded step, and a sharded layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ringsim
from ringsim.check.examination import (
    Answer,
    CheckResult,
    Examination,
    Wrong,
    examine,
    find_wrong,
    make_task,
)
from ringsim.check.replicas import judge_calls
from ringsim.traces.events import LAST_BYTES
from ringsim.traces.items import Event

if TYPE_CHECKING:
    from torch import Tensor

Report = tuple[str, list[str]]  # a complaint, or ""; and the calls that are due
RANKS = (2, 3)
LAST = "last gradient complete"
_HOOK_HINT = (
    "Call parameter.register_post_accumulate_grad_hook(hook) for each parameter: hook(parameter) "
    "runs as soon as its gradient is complete. When all gradients of a bucket are complete, join "
    "them, post dist.all_reduce(joined, async_op=True), and keep the handle. finish() waits for "
    "each handle, divides by the number of ranks, and writes each part into its gradient. Then "
    "forget the handles, because the hooks also run in the next step."
)
_STEP_HINT = (
    "Rank r keeps part r of parameter.chunk(N). reduce_scatter adds up the parts of all ranks' "
    "gradients: divide the result by N. Call update once, with this mean and your part of the "
    "parameter. all_gather the parts into parameter, so that the caller sees them."
)
_LAYER_HINT = (
    "Gather the weight in forward, and save only x and shard for backward. Gather it again in "
    "backward: the gradient of x is grad @ weight, and that of the weight is grad.T @ x. "
    "reduce_scatter the parts of the second, and divide by N."
)


def bucket_hooks(overlap: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks data parallelism with buckets that are reduced during the backward pass.

    ``overlap(buckets)`` gets lists of parameters. It registers hooks, and returns a function
    ``finish()``, which is called after each backward pass. Then each gradient must be the mean over
    all ranks. Each bucket must be reduced by one ``all_reduce``, which is posted as soon as all
    gradients of the bucket are complete, and waited for after the last gradient. The check looks at
    the calls of two steps.

    Args:
        overlap: the answer.
        seed: the seed for generating the numbers, or None for a random seed.

    Returns:
        The verdict; its trace shows the last run.

    Example:
        >>> print(bucket_hooks(lambda buckets: lambda: None, seed=1).reason)
        With 2 ranks, rank 0: its calls must be all_reduce of 952 bytes, ... but are none.
    """
    return _examine("bucket_hooks", overlap, seed, _overlap_on_rank, _HOOK_HINT, _judge_overlap)


def sharded_step(step: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a training step in which each rank updates, and keeps the state of, only its shard.

    ``step(parameter, gradient, update)`` gets two one-dimensional tensors of the same length, a
    multiple of N. It must average its shard of the gradient over all ranks with one
    ``reduce_scatter``, call ``update(parameter_shard, gradient_shard)``, which changes the
    parameter's shard in place, and collect the new shards in ``parameter`` with one ``all_gather``.

    Args:
        step: the answer.
        seed: the seed for generating the numbers, or None for a random seed.

    Returns:
        The verdict; its trace shows the last run.

    Example:
        >>> print(sharded_step(lambda parameter, gradient, update: None, seed=1).reason)
        With 2 ranks, rank 0: its calls must be reduce_scatter of 32 bytes, ...
    """
    return _examine("sharded_step", step, seed, _update_on_rank, _STEP_HINT)


def sharded_linear(apply: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a linear layer that gathers its weight, and frees it as early as possible.

    ``apply(x, shard)`` returns ``x @ weight.T``, where each rank keeps an N-th of the weight's rows
    in ``shard``. It is usually the ``apply`` of a ``torch.autograd.Function``. Each pass must
    gather the weight once, and free it: the check counts the bytes that exist after the forward
    pass. The gradient of ``shard`` must be the mean over all ranks, from one ``reduce_scatter``.

    Args:
        apply: the answer.
        seed: the seed for generating the numbers, or None for a random seed.

    Returns:
        The verdict; its trace shows the last run.

    Example:
        >>> print(sharded_linear(lambda x, shard: x @ shard.T.repeat(1, 2), seed=1).reason)
        With 2 ranks, rank 0: its calls must be all_gather of 8192 bytes, ...
    """
    return _examine("sharded_linear", apply, seed, _multiply_on_rank, _LAYER_HINT, _judge_bytes)


def _examine(
    name: str,
    answer: Answer,
    seed: int | None,
    on_rank: Answer,
    hint: str,
    judge_events: Callable[[Sequence[Event]], str] = lambda _: "",
) -> CheckResult:
    """Runs an answer, and judges the calls, and each rank's numbers and other events."""

    def judge(examination: Examination) -> str:
        for size in RANKS:
            about = f"With {size} ranks"
            trace = examination.run(on_rank, size, examination.random.randrange(10**9), hint=hint)
            judge_calls(trace, about, trace.results[0][1], hint)
            for rank, (complaint, _) in enumerate(trace.results):
                own = [event for event in trace if event.rank == rank]
                complaint = complaint or judge_events(own)
                if complaint:
                    raise Wrong(f"{about}, rank {rank}: {complaint}.", hint)
        return "The calls, their times, the results and the bytes are right on 2 and 3 ranks."

    return examine(name, answer, judge, seed)


def _judge_overlap(own: Sequence[Event]) -> str:
    for last_ns in [event.post_ns for event in own if event.label == LAST]:
        if sum(event.post_ns < last_ns <= (event.wait_ns or 0) for event in own) != 2:
            return (
                "2 calls must be posted before the last gradient is complete, and waited for "
                "afterwards; otherwise they do not overlap with the backward pass"
            )
    return ""


def _judge_bytes(own: Sequence[Event]) -> str:
    whole = max(event.size_bytes or 0 for event in own if event.kind == "collective")
    left = [event.size_bytes or 0 for event in own if event.label == LAST_BYTES][-1]
    if left < whole:
        return ""
    return f"{left} bytes are left after the forward pass, so something keeps the weight"


def _compare(*rows: tuple[str, Any, Tensor]) -> str:
    """Returns a complaint about the first tensor that is not as due, or ""."""
    wrong = [what for what, found, due in rows if not found.allclose(due, 1e-3, 1e-4)]
    return f"{wrong[0]} is wrong" if wrong else ""


def _overlap_on_rank(overlap: Answer, secret: int) -> Report:
    """Trains two steps, in which each gradient takes 1 ms."""
    from ringsim import comm as dist
    from ringsim.pipeline.training import cross_entropy

    task = make_task(secret, dist.get_world_size())
    model = copy.deepcopy(task.model)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda _: ringsim.compute(0.001))
    parameters[0].register_post_accumulate_grad_hook(lambda _: ringsim.mark(LAST))
    buckets = [parameters[7:], parameters[3:7], parameters[:3]]
    due = [f"all_reduce of {sum(each.nbytes for each in bucket)} bytes" for bucket in buckets]
    finish = overlap(buckets)
    wrong = None
    for _ in range(2):
        model.zero_grad()
        logits = model(task.inputs[dist.get_rank()])
        cross_entropy(logits, task.targets[dist.get_rank()]).backward()
        finish()
        wrong = wrong or find_wrong(task, dict(model.named_parameters()), parameters)
    complaint = f"the gradient of {wrong.parameter} is {wrong.verdict}" if wrong else ""
    return complaint, due * 2


def _update_on_rank(step: Answer, secret: int) -> Report:
    """Trains two steps with momentum, whose state has the size of a shard."""
    import torch

    from ringsim import comm as dist

    torch.manual_seed(secret)
    size = dist.get_world_size()
    parameter, gradients = torch.randn(4 * size), torch.randn(2, size, 4 * size)
    due, velocity, state = parameter.clone(), torch.zeros(4 * size), torch.zeros(4)

    def update(shard: Tensor, gradient: Tensor) -> None:
        shard.sub_(state.mul_(0.9).add_(gradient))

    for every in gradients:
        step(parameter, every[dist.get_rank()].clone(), update)
        due.sub_(velocity.mul_(0.9).add_(every.mean(0)))
    calls = [f"reduce_scatter of {16 * size} bytes", f"all_gather of {16 * size} bytes"]
    return _compare(("the parameter", parameter, due)), calls * 2


def _multiply_on_rank(apply: Answer, secret: int) -> Report:
    """Runs both passes of a layer, and counts the bytes that the forward pass leaves."""
    import torch

    from ringsim import comm as dist

    torch.manual_seed(secret)
    size, rank = dist.get_world_size(), dist.get_rank()
    weight, batch = torch.randn(16 * size, 64), torch.randn(size, 3, 64)
    grads, shard = torch.randn(size, 3, 16 * size), weight.chunk(size)[rank].clone()
    x = batch[rank].requires_grad_()
    shard.requires_grad_()
    with ringsim.memory(torch.nn.Module()):
        y = apply(x, shard)
        ringsim.compute(0.5)  # a thread of Gloo keeps the tensors of a collective a little longer
    y.backward(grads[rank])
    mean = torch.einsum("rbo,rbi->oi", grads, batch) / size
    return _compare(
        ("the output", y, x @ weight.T),
        ("the gradient of x", x.grad, grads[rank] @ weight),
        ("the gradient of shard", shard.grad, mean.chunk(size)[rank]),
    ), [f"{op} of {weight.nbytes} bytes" for op in ("all_gather", "all_gather", "reduce_scatter")]
