"""The checks of the lessons on context and tensor parallelism, with right and wrong answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import verdicts
from torch.distributed.nn.functional import all_reduce
from verdicts import make_tests, receive, send

from ringsim import check, current_ring

pytestmark = pytest.mark.usefixtures("on_the_clock")

Answer = Callable[..., Any]
Tensor = torch.Tensor


# -- ring_attention: blocks that travel while the ranks attend


def exchanging(
    rounds: Callable[[int], int] = lambda size: size - 1,
    first: str = "post attend wait",
    sends: Answer = dist.isend,
    receives: Answer = dist.irecv,
    to: str = "succ",
    source: str = "pred",
    on: str = "",
    in_place: bool = False,
    own: bool = False,
    last: bool = True,
) -> Answer:
    """Returns the right answer, or one that differs in the given way."""

    def answer(block: Tensor, attend: Answer) -> None:
        ring: Any = current_ring()
        groups = [
            None if on == "world" else getattr(ring, f"{name}_group") for name in (to, source)
        ]
        for _ in range(rounds(ring.world_size)):
            arriving = block if in_place else torch.empty_like(block)
            handles: list[Any] = []
            for what in first.split():
                if what == "post":
                    handles.append(sends(block, getattr(ring, to), group=groups[0]))
                    handles.append(receives(arriving, getattr(ring, source), group=groups[1]))
                elif what == "wait":
                    for handle in handles:
                        if hasattr(handle, "wait"):
                            handle.wait()
                else:
                    attend(block)
            block = block if own else arriving
        if last:
            attend(block)

    return answer


exchange = exchanging()


def attends_before_arrival(block: Tensor, attend: Answer) -> None:
    own, ring = block, current_ring()
    for _ in range(ring.world_size - 1):
        arriving = torch.empty_like(block)
        wait = send(block)
        handle: Any = dist.irecv(arriving, ring.pred, group=ring.pred_group)
        attend(arriving)
        handle.wait()
        wait()
        block = arriving
    attend(own)


def by_batches(block: Tensor, attend: Answer) -> None:
    """Exchanges by batches, each with one operation, because an edge has its own group."""
    ring: Any = current_ring()
    for _ in range(ring.world_size - 1):
        arriving = torch.empty_like(block)
        handles = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, arriving, ring.pred, ring.pred_group)]
        )
        handles += dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, block, ring.succ, ring.succ_group)]
        )
        attend(block)
        for handle in handles:
            handle.wait()
        block = arriving
    attend(block)


def receives_are_posted_at_the_start(block: Tensor, attend: Answer) -> None:
    ring: Any = current_ring()
    arriving = [torch.empty_like(block) for _ in range(ring.world_size - 1)]
    handles = [dist.irecv(each, ring.pred, group=ring.pred_group) for each in arriving]
    for handle, following in zip(handles, arriving, strict=True):
        wait = send(block)
        attend(block)
        handle.wait()
        wait()
        block = following
    attend(block)


def attends_then_exchanges(block: Tensor, attend: Answer) -> None:
    """Does not overlap; it is the exchange that the lesson begins with."""
    ring = current_ring()
    for step in range(ring.world_size):
        attend(block)
        if step < ring.world_size - 1:
            wait = send(block)
            block = receive(block)
            wait()


def gathers(block: Tensor, attend: Answer) -> None:
    blocks = [torch.empty_like(block) for _ in range(dist.get_world_size())]
    dist.all_gather(blocks, block)
    for each in blocks:
        attend(each)


def sends_keys_and_values(block: Tensor, attend: Answer) -> None:
    """Sends two messages in each round."""
    for _ in range(current_ring().world_size - 1):
        waits = [send(part.contiguous()) for part in block]
        attend(block)
        block = torch.stack([receive(part) for part in block])
        for wait in waits:
            wait()
    attend(block)


def blocks_from_the_board(block: Tensor, attend: Answer) -> None:
    """Sends all messages, but the blocks bypass them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    verdicts.BOARD[rank, size] = block.clone()
    order = iter(range(size))
    exchange(block, lambda _: attend(verdicts.BOARD[(rank - next(order)) % size, size]))


# -- tensor_parallel: a layer whose matrices are cut


def add_up(tensor: Tensor, group: Any = None, times: int = 1) -> Tensor:
    total = tensor.detach().clone()
    for _ in range(times):
        dist.all_reduce(total, group=group)
    return total


def cut_layer(
    forward: Callable[[Tensor, Any], Tensor] = lambda part, group: add_up(part, group),
    backward: Callable[[Tensor, Any], Tensor | None] = add_up,
) -> Answer:
    """Returns the right answer, or one with another sum of the outputs or of the gradients."""

    def answer(x: Tensor, up: Tensor, down: Tensor, group: Any) -> Tensor:
        x = x.view_as(x)
        x.register_hook(lambda gradient: backward(gradient, group))
        part = torch.relu(x @ up) @ down
        return part + (forward(part, group) - part).detach()

    return answer


layer = cut_layer()


class Copied(torch.autograd.Function):
    """Copies x in the forward pass, and adds up its gradients in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return add_up(gradient, ctx.group), None


class Summed(torch.autograd.Function):
    """Adds up the outputs in the forward pass, and passes their gradient on."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        return add_up(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def by_functions(x: Tensor, up: Tensor, down: Tensor, group: Any) -> Tensor:
    return Summed.apply(torch.relu(Copied.apply(x, group) @ up) @ down, group)


def sums_in_both_directions(x: Tensor, up: Tensor, down: Tensor, group: Any) -> Tensor:
    """Uses torch's all_reduce for autograd, which adds up the gradients of all ranks' losses."""
    return all_reduce(torch.relu(x @ up) @ down, group=group)


def gathers_matrices(x: Tensor, up: Tensor, down: Tensor, group: Any) -> Tensor:
    """Computes everything on every rank."""
    whole = []
    for part, dim in ((up, 1), (down, 0)):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.detach().clone(), group=group)
        parts[dist.get_rank(group)] = part
        whole.append(torch.cat(parts, dim))
    return torch.relu(x @ whole[0]) @ whole[1]


def sums_the_hidden_numbers(x: Tensor, up: Tensor, down: Tensor, group: Any) -> Tensor:
    """Cuts in the wrong order: relu is applied to parts of sums."""
    hidden = x @ up
    return torch.relu(hidden + (add_up(hidden, group) - hidden).detach()) @ down


def with_padding(x: Tensor, up: Tensor, down: Tensor, group: Any) -> Tensor:
    """Adds up a row of zeros as well."""

    def pad_and_add_up(tensor: Tensor, group: Any) -> Tensor:
        return add_up(torch.cat([tensor, torch.zeros_like(tensor[:1])]), group)[:-1]

    return cut_layer(pad_and_add_up, pad_and_add_up)(x, up, down, group)


def does_not_wait(x: Tensor, up: Tensor, down: Tensor, group: Any) -> Tensor:
    part = torch.relu(x @ up) @ down
    dist.all_reduce(part.detach(), group=group, async_op=True)
    return part


RIGHT: dict[Answer, list[Answer]] = {
    check.ring_attention: [exchange, by_batches, receives_are_posted_at_the_start],
    check.tensor_parallel: [layer, by_functions],
}
OVERLAP = "before it calls attend, and wait for it between this call and the next one."
NOT_ALL = "Rank 0 of 3 must attend to the block of each rank once, but its attention is not that of"
OUTPUT = "the output of rank 0 is not that of a single process."
GRADIENT = "the gradient of x of rank 0 is not that of a single process."
# answers, with words of the reason and of the hint
WRONG: dict[Answer, list[tuple[Any, ...]]] = {
    check.ring_attention: [
        (
            lambda block, attend: attend(block),
            "must send 2 blocks to its successor, but sent none.",
        ),
        (attends_then_exchanges, f"Rank 0 of 3 must post each send {OVERLAP}", "post dist.isend"),
        (exchanging(first="post wait attend"), f"Rank 0 of 3 must post each send {OVERLAP}"),
        (exchanging(receives=dist.recv), f"Rank 0 of 3 must post each receive {OVERLAP}"),
        (attends_before_arrival, NOT_ALL),
        (exchanging(lambda size: size), "must send 2 blocks to its successor, but sent 3."),
        (exchanging(lambda size: 2), "must send 1 block to its successor, but sent 2."),
        (exchanging(own=True), NOT_ALL, "Begin with your own block"),
        (exchanging(in_place=True), NOT_ALL, "Receive into a new tensor"),
        (exchanging(last=False), NOT_ALL),
        (exchanging(first="post attend attend wait"), NOT_ALL),
        (exchanging(first="post attend"), "Rank 0 never waited for its isend"),
        (exchanging(to="pred", source="succ"), "Rank 0 of 3 sent to rank 2, its predecessor"),
        (exchanging(on="world"), 'on the group "world", but must use its '),
        (exchanging(sends=dist.send), "In a ring of 3 ranks, ranks 0, 1 and 2 wait for each other"),
        (sends_keys_and_values, "must send 2 blocks to its successor, but sent 4."),
        (gathers, "called all_gather, but only messages between neighbours are allowed."),
        (blocks_from_the_board, "is the same even if every message contains only zeros"),
        (lambda block, attend: None, "but sent none."),
        (
            lambda block, attend: attend(None),
            "Rank 0 of 3 raised AttributeError: 'NoneType' object",
        ),
    ],
    check.tensor_parallel: [
        (
            lambda x, up, down, group: torch.relu(x @ up) @ down,
            OUTPUT,
            "outputs",
        ),
        (cut_layer(backward=lambda gradient, group: None), GRADIENT),
        (cut_layer(lambda part, group: part), OUTPUT),
        (cut_layer(lambda part, group: add_up(part)), OUTPUT),
        (cut_layer(backward=lambda gradient, _: add_up(gradient)), GRADIENT),
        (
            cut_layer(lambda part, group: add_up(part, group) / dist.get_world_size(group)),
            OUTPUT,
        ),
        (sums_in_both_directions, GRADIENT, "unchanged"),
        (sums_the_hidden_numbers, OUTPUT),
        (
            gathers_matrices,
            "its calls must be all_reduce of 288 bytes, all_reduce of 288 bytes, but are all_",
        ),
        (does_not_wait, "Rank 0 never waited for its all_reduce"),
        (with_padding, "288 bytes, but are all_reduce of 336 bytes, all_reduce of 336 bytes."),
        (lambda x, up, down, group: None, "raised TypeError"),
    ],
}


test_a_right_answer_passes, test_a_wrong_answer_is_told_why = make_tests(RIGHT, WRONG)
