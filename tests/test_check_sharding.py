"""The checks of the lesson on sharding: right answers pass, wrong ones fail for their reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from verdicts import make_tests

from ringsim import check

pytestmark = pytest.mark.usefixtures("on_the_clock")

Answer = Callable[..., Any]
Tensor = Any  # as in a notebook, without type checks


# -- bucket_hooks


def overlapping(
    post: str = "when full",
    wait: str = "at the end",
    by: Callable[[], float] = dist.get_world_size,
    pads: int = 0,
    writes: bool = True,
    refills: bool = True,
    forgets: bool = True,
    leaves_out: int = 0,
    then_wait: str = "",
) -> Answer:
    """Returns an answer that is right, except for the given arguments.

    From the second step on, it waits as ``then_wait`` says.
    """

    def overlap(buckets: list[list[Any]]) -> Callable[[], None]:
        posted: list[Any] = []
        full: list[Any] = []
        waits = wait

        def reduce(bucket: list[Any]) -> None:
            joined = torch.cat(
                [*(each.grad.flatten() for each in bucket), torch.zeros(pads).double()]
            )
            posted.append((bucket, joined, dist.all_reduce(joined, async_op=True)))
            if waits == "at once":
                posted[-1][2].wait()

        def reduce_all() -> None:
            for bucket in full:
                reduce(bucket)
            full.clear()

        def watch(bucket: list[Any]) -> None:
            missing = set(bucket)

            def hook(parameter: Any) -> None:
                missing.discard(parameter)
                if not missing:
                    if refills:
                        missing.update(bucket)
                    (reduce if post == "when full" else full.append)(bucket)
                    if post == "with the last" and len(full) == len(buckets):
                        reduce_all()

            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(hook)

        def finish() -> None:
            nonlocal waits
            reduce_all()
            for bucket, joined, work in posted:
                if waits == "at the end":
                    work.wait()
                parts = (joined / by()).split([*(each.numel() for each in bucket), pads])
                for parameter, part in zip(bucket, parts, strict=False):
                    if writes:
                        parameter.grad.copy_(part.view_as(parameter))
            if forgets:
                posted.clear()
            waits = then_wait or waits

        for bucket in buckets[leaves_out:]:
            watch(bucket)
        return finish

    return overlap


def one_by_one(buckets: list[list[Any]]) -> Callable[[], None]:
    return overlapping()([[parameter] for bucket in buckets for parameter in bucket])


def all_in_one(buckets: list[list[Any]]) -> Callable[[], None]:
    return overlapping()([[parameter for bucket in buckets for parameter in bucket]])


# -- sharded_step


def stepping(
    by: Callable[[], float] = dist.get_world_size,
    shift: int = 0,
    copies: bool = False,
    reduces_all: bool = False,
    updates_all: bool = False,
    gathers: str = "parameter",
    updates: int = 1,
) -> Answer:
    """Returns an answer that is right, except for the given arguments."""

    def step(parameter: Tensor, gradient: Tensor, update: Answer) -> None:
        size = dist.get_world_size()
        own = (dist.get_rank() + shift) % size
        if reduces_all:
            dist.all_reduce(gradient)
            mine = gradient.chunk(size)[own]
        else:
            mine = torch.empty_like(gradient.chunk(size)[0])
            dist.reduce_scatter(mine, list(gradient.chunk(size)))
        shard = parameter.chunk(size)[own]
        for _ in range(updates):
            if updates_all:
                update(parameter, gradient)
            else:
                update(shard.clone() if copies else shard, mine / by())
        if gathers:
            source = shard if gathers == "parameter" else mine
            dist.all_gather(list(parameter.chunk(size)), source.clone())

    return step


def in_a_group_of_all(parameter: Tensor, gradient: Tensor, update: Answer) -> None:
    """Creates a group, which is no call that counts."""
    dist.new_group()
    stepping()(parameter, gradient, update)


def with_a_message(parameter: Tensor, gradient: Tensor, update: Answer) -> None:
    stepping()(parameter, gradient, update)
    if dist.get_rank() == 0:
        dist.send(gradient, 1)
    elif dist.get_rank() == 1:
        dist.recv(gradient, 0)


# -- sharded_linear


def gather(shard: Tensor) -> Tensor:
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard)
    return torch.cat(parts)


def multiplying(
    keeps: str = "shard",
    by: Callable[[], float] = dist.get_world_size,
    reduces_all: bool = False,
    turned: bool = False,
    gathers: int = 1,
    passes_back: bool = True,
) -> Answer:
    """Returns an answer that is right, except for the given arguments."""

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, shard: Tensor) -> Tensor:
            *_, weight = (gather(shard) for _ in range(gathers))
            if keeps == "attribute":
                ctx.weight = weight
            ctx.save_for_backward(x, weight if keeps == "weight" else shard)
            return x @ weight.T

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x, saved = ctx.saved_tensors
            size, rank = dist.get_world_size(), dist.get_rank()
            weight = saved if keeps == "weight" else gather(saved)
            whole = grad.T @ x
            mine = torch.empty_like(weight.chunk(size)[0])
            if reduces_all:
                dist.all_reduce(whole)
                mine = whole.chunk(size)[rank]
            else:
                parts = list(whole.chunk(size))
                dist.reduce_scatter(mine, parts[::-1] if turned else parts)
            return grad @ weight if passes_back else torch.zeros_like(x), mine / by()

    return Linear.apply


def one() -> float:
    return 1


RIGHT: dict[Answer, list[Answer]] = {
    check.bucket_hooks: [overlapping()],
    check.sharded_step: [stepping(), in_a_group_of_all],
    check.sharded_linear: [multiplying()],
}
CALLS = "With 2 ranks, rank 0: its calls must be "
LATE = "2 calls must be posted before the last gradient is complete"
# answers, with words of the reason and of the hint
WRONG: dict[Answer, list[tuple[Any, ...]]] = {
    check.bucket_hooks: [
        (lambda buckets: lambda: None, "bytes, but are none.", "hook(parameter)"),
        (overlapping(post="at the end"), LATE, "as soon as its gradient is complete"),
        (overlapping(post="with the last"), LATE, "When all gradients of a bucket"),
        (overlapping(wait="at once"), LATE, "keep the handle"),
        (overlapping(then_wait="at once"), LATE),
        (
            overlapping(wait="never"),
            "Rank 0 never waited for its all_reduce",
            "call its wait()",
        ),
        (
            overlapping(by=one),
            " is scaled.",
            "divides by the number of ranks",
        ),
        (overlapping(writes=False), " is different.", "writes each part"),
        (overlapping(pads=3), CALLS, "join"),
        (overlapping(leaves_out=1), CALLS),
        (overlapping(refills=False), "'NoneType' object has no attribute 'flatten'"),
        (one_by_one, CALLS, "join them"),
        (all_in_one, CALLS, "When all gradients of a bucket are complete"),
        (lambda buckets: None, "'NoneType' object is not callable"),
    ],
    check.sharded_step: [
        (lambda *_: None, "32 bytes, but are none.", "reduce_scatter adds up"),
        (stepping(reduces_all=True), "but are all_reduce of 32 bytes", "reduce_scatter"),
        (stepping(by=one), "the parameter is wrong.", "divide the result by N"),
        (stepping(shift=1), "the parameter is wrong.", "Rank r keeps part r"),
        (stepping(copies=True), "the parameter is wrong.", "your part of the parameter"),
        (stepping(updates_all=True), "RuntimeError: ", "your part"),
        (stepping(gathers=""), CALLS, "all_gather the parts"),
        (stepping(gathers="gradient"), "the parameter is wrong.", "into parameter"),
        (stepping(updates=2), "the parameter is wrong.", "Call update once"),
        (with_a_message, "all_gather of 32 bytes, send of 32 bytes"),
    ],
    check.sharded_linear: [
        (multiplying(keeps="weight"), CALLS, "Gather it again in backward"),
        (
            multiplying(keeps="attribute"),
            "bytes are left after the forward pass, so something keeps the weight",
            "save only",
        ),
        (multiplying(by=one), "the gradient of shard is wrong.", "divide by N"),
        (multiplying(reduces_all=True), CALLS, "reduce_scatter the parts"),
        (multiplying(turned=True), "the gradient of shard is wrong."),
        (multiplying(gathers=2), CALLS),
        (multiplying(passes_back=False), "the gradient of x is wrong.", "grad @ weight"),
        (lambda x, shard: x @ shard.T, "RuntimeError"),
    ],
}
test_a_right_answer_passes, test_a_wrong_answer_is_told_why = make_tests(RIGHT, WRONG)
