"""The checks for the lesson on sharding: buckets in hooks, a sharded step, and a sharded layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ringsim
from ringsim.check.examination import Answer, CheckResult, Examination, Wrong, examine
from ringsim.traces.collectives import COLLECTIVES
from ringsim.traces.value import Trace

if TYPE_CHECKING:
    from torch import Tensor

Report = tuple[str, list[tuple[str, int]]]  # a complaint, or ""; and the calls due, with bytes
RANKS = (2, 3)
READY, OVER = "gradient ready", "backward over"
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
        With 2 ranks, rank 0 must call all_reduce of 480 bytes, all_reduce of 480 bytes, all_reduce of 240 bytes, all_reduce of 480 bytes, all_reduce of 480 bytes, all_reduce of 240 bytes, but called nothing.
    """  # noqa: E501
    return examine("bucket_hooks", overlap, _judge_hooks, seed)


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
        With 2 ranks, rank 0 must call ...
    """
    return examine("sharded_step", step, _judge_step, seed)


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
        With 2 ranks, rank 0 must call ...
    """
    return examine("sharded_linear", apply, _judge_layer, seed)


def _judge_hooks(examination: Examination) -> str:
    for size in RANKS:
        trace = _run(examination, _overlap_on_rank, size, _HOOK_HINT)
        for rank in range(size):
            own = [event for event in trace if event.rank == rank]
            step = own[: [event.label for event in own].index(OVER)]
            last_ns = max(event.post_ns for event in step if event.label == READY)
            calls = [event for event in step if event.kind == "collective"]
            early = [call for call in calls if call.post_ns < last_ns <= (call.wait_ns or 0)]
            if len(early) < 2:
                raise Wrong(
                    f"Rank {rank} must post 2 calls before its last gradient is complete, and wait "
                    "for them afterwards; otherwise they do not overlap with the backward pass.",
                    _HOOK_HINT,
                )
    return "Each gradient is the mean, and all buckets but the last overlap with the backward pass."


def _judge_step(examination: Examination) -> str:
    for size in RANKS:
        _run(examination, _update_on_rank, size, _STEP_HINT)
    return "Each rank reduces, updates and gathers only its own shard."


def _judge_layer(examination: Examination) -> str:
    for size in RANKS:
        trace = _run(examination, _multiply_on_rank, size, _LAYER_HINT)
        left = trace.memory().groupby("rank")["total"].last().max()
        whole = trace.results[0][1][0][1]
        if left >= whole:
            raise Wrong(
                f"After the forward pass, {left} bytes are left, so something keeps the weight of "
                f"{whole} bytes.",
                _LAYER_HINT,
            )
    return "Each pass gathers the weight, and frees it again."


def _run(examination: Examination, on_rank: Answer, size: int, hint: str) -> Trace:
    """Runs an answer, and judges its collectives and numbers."""
    trace = examination.run(on_rank, size, examination.random.randrange(10**9), hint=hint)
    for rank, (complaint, due) in enumerate(trace.results):
        who = f"With {size} ranks, rank {rank}"
        calls = [event for event in trace if event.rank == rank and event.kind == "collective"]
        found = [(COLLECTIVES[call.op].family, call.size_bytes) for call in calls]
        if sorted(found) != sorted(due):
            texts = [", ".join(f"{op} of {n} bytes" for op, n in each) for each in (due, found)]
            raise Wrong(f"{who} must call {texts[0]}, but called {texts[1] or 'nothing'}.", hint)
        if any(call.status != "ok" for call in calls):
            raise Wrong(f"{who} never waits for one of its collectives.", hint)
        if complaint:
            raise Wrong(f"{who}: {complaint}.", hint)
    return trace


def _compare(*rows: tuple[str, Any, Tensor]) -> str:
    """Returns a complaint about the first tensor that is not as due, or ""."""
    from ringsim import comm as dist  # here, because it loads torch

    for what, found, due in rows:
        if not found.allclose(due, 1e-3, 1e-4):
            is_sum = found.allclose(due * dist.get_world_size(), 1e-3, 1e-4)
            is_what = "the sum over the ranks, but must be the mean" if is_sum else "wrong"
            return f"{what} is {is_what}"
    return ""


def _overlap_on_rank(overlap: Answer, secret: int) -> Report:
    """Trains two steps, in which each gradient takes 1 ms."""
    import torch

    from ringsim import comm as dist

    torch.manual_seed(secret)
    layers = [torch.nn.Linear(5, 5).double() for _ in range(5)]
    model, batch = torch.nn.Sequential(*layers), torch.randn(dist.get_world_size(), 3, 5).double()
    parameters = list(model.parameters())
    means = torch.autograd.grad(model(batch).square().mean(), parameters)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(_pass_time)
    buckets = [[*parameters[6:]], [*parameters[2:6]], [*parameters[:2]]]
    finish = overlap([list(bucket) for bucket in buckets])
    complaint = ""
    for _ in range(2):
        model.zero_grad()
        model(batch[dist.get_rank()]).square().mean().backward()
        ringsim.mark(OVER)
        finish()
        found = [parameter.grad for parameter in parameters]
        rows = zip(["a gradient"] * 10, found, means, strict=True)
        complaint = complaint or _compare(*rows)
    sizes = [sum(parameter.nbytes for parameter in bucket) for bucket in buckets]
    return complaint, [("all_reduce", size) for size in sizes * 2]


def _pass_time(_: Tensor) -> None:
    ringsim.compute(0.001)
    ringsim.mark(READY)


def _update_on_rank(step: Answer, secret: int) -> Report:
    """Trains two steps with momentum, whose state has the size of a shard."""
    import torch

    from ringsim import comm as dist

    torch.manual_seed(secret)
    size = dist.get_world_size()
    parameter, gradients = torch.randn(4 * size), torch.randn(2, size, 4 * size)
    due, velocity, state, updated = parameter.clone(), 0.0, torch.zeros(4), []

    def update(shard: Tensor, gradient: Tensor) -> None:
        updated.append(shard.numel())
        if shard.shape == state.shape:
            shard.sub_(state.mul_(0.9).add_(gradient))

    for every in gradients:
        step(parameter, every[dist.get_rank()].clone(), update)
        velocity = 0.9 * velocity + every.mean(0)
        due -= velocity
    calls = [("reduce_scatter", 16 * size), ("all_gather", 16 * size)] * 2
    if updated != [4, 4]:
        return f"each step must update 4 of {4 * size} numbers, but two updated {updated}", calls
    return _compare(("the parameter", parameter, due)), calls


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
    y.backward(grads[rank])
    mean = torch.einsum("rbo,rbi->oi", grads, batch) / size
    return _compare(
        ("the output", y, x @ weight.T),
        ("the gradient of x", x.grad, grads[rank] @ weight),
        ("the gradient of shard", shard.grad, mean.chunk(size)[rank]),
    ), [*[("all_gather", weight.nbytes)] * 2, ("reduce_scatter", weight.nbytes)]
