"""The checks of the lessons on stages and on gradients: cuts, a tensor of any shape handed over, and a step with the right gradients."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from verdicts import verdict

import ringsim
from ringsim import check
from ringsim.pipeline import (
    backward_stage,
    by_count,
    forward_stage,
    recv_activation,
    recv_gradient,
    send_activation,
    send_gradient,
)

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("on_the_clock")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as from a notebook; and ranks need not import pytest

Tensor = Any  # as from a notebook, where nobody checks types
Answer = Callable[..., Any]

# -- the cut


def last_stages_get_more(num_layers: int, num_stages: int) -> list[list[int]]:
    cuts = [stage * num_layers // num_stages for stage in range(num_stages + 1)]
    return [list(range(start, stop)) for start, stop in itertools.pairwise(cuts)]


def rest_to_the_last(num_layers: int, num_stages: int) -> list[range]:
    share = num_layers // num_stages
    starts = [stage * share for stage in range(num_stages)] + [num_layers]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def without_empty_stages(num_layers: int, num_stages: int) -> list[range]:
    return [layers for layers in by_count(num_layers, num_stages) if layers]


def dealt_out(num_layers: int, num_stages: int) -> list[range]:
    return [range(stage, num_layers, num_stages) for stage in range(num_stages)]


@pytest.mark.parametrize("answer", [by_count, last_stages_get_more])
def test_partition_passes_a_right_answer(answer: Answer) -> None:
    for seed in (1, None):
        result = verdict(check.partition, answer, seed)
        assert result.passed, result


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (rest_to_the_last, "With 10 layers and 4 stages stages must differ by one layer at most, got [2, 2, 2, 4] layers."),
        (without_empty_stages, "With 3 layers and 4 stages the answer must have one entry for each stage, got 3."),
        (dealt_out, "With 8 layers and 4 stages the layers must be in order, got [[0, 4], [1, 5], [2, 6], [3, 7]]."),
        (lambda layers, stages: [range(layers)] * stages, "With 8 layers and 4 stages layer 0 is in more than one place."),
        (lambda layers, stages: [range(1, 3), range(3, 5), range(5, 7), range(7, 9)], "there is no layer 8."),
        (lambda layers, stages: [range(2), range(2, 4), range(4, 6), range(6, 7)], "1 layer is lost, the first of them layer 7."),
        (lambda layers, stages: [len(each) for each in by_count(layers, stages)], "must be a list of ranges, one for each stage, got [2"),
        (lambda layers, stages: None, "must be a list of ranges, one for each stage, got None."),
        (lambda layers, stages: "0123", "must be a list of ranges, one for each stage, got '0123'."),
        (lambda layers, stages: [range(layer // (layers // stages)) for layer in range(stages)], "raised ZeroDivisionError"),
        (7, "The answer must be a function, got 7."),
    ],
)
def test_partition_says_what_is_wrong(answer: Any, reason: str) -> None:
    result = verdict(check.partition, answer)
    assert not result.passed
    assert reason in result.reason


# -- the tensor of any shape


def hand_over(
    tensor: Tensor, header_of: Callable[[Tensor], list[int]] | None = None, group_of: Callable[[Any], Any] | None = None
) -> Tensor | None:
    ring = ringsim.current_ring()
    sends: list[Any] = []
    if ring.rank < ring.world_size - 1:
        padded = [tensor.dim(), *tensor.shape, 0, 0, 0][:5] if header_of is None else header_of(tensor)
        sends = [dist.isend(part, ring.succ, group=ring.succ_group) for part in (torch.tensor(padded), tensor.contiguous())]
    received = None
    if ring.rank > 0:
        header = torch.empty(5, dtype=torch.int64)
        dist.recv(header, ring.pred, group=ring.pred_group if group_of is None else group_of(ring))
        received = torch.empty(header[1 : 1 + int(header[0])].tolist())
        dist.recv(received, ring.pred, group=ring.pred_group)
    for sent in sends:
        sent.wait()
    return received


def dimension_by_dimension(tensor: Tensor) -> Tensor | None:
    ring = ringsim.current_ring()
    sends: list[Any] = []
    if ring.rank < ring.world_size - 1:
        numbers = [torch.tensor([number]) for number in (tensor.dim(), *tensor.shape)]
        sends = [dist.isend(part, ring.succ, group=ring.succ_group) for part in (*numbers, tensor.contiguous())]
    received = None
    if ring.rank > 0:
        number = torch.empty(1, dtype=torch.int64)
        dist.recv(number, ring.pred, group=ring.pred_group)
        shape = []
        for _ in range(int(number)):
            dist.recv(number, ring.pred, group=ring.pred_group)
            shape.append(int(number))
        received = torch.empty(shape)
        dist.recv(received, ring.pred, group=ring.pred_group)
    for sent in sends:
        sent.wait()
    return received


def sent_as_it_lies(tensor: Tensor) -> Tensor | None:
    ring = ringsim.current_ring()
    if ring.rank < ring.world_size - 1:
        dist.send(tensor, ring.succ, group=ring.succ_group)
    return None


def all_round_the_ring(tensor: Tensor) -> Tensor:
    ring = ringsim.current_ring()
    if ring.world_size > 1:
        sent: Any = dist.isend(tensor.contiguous(), ring.succ, group=ring.succ_group)
        dist.recv(torch.empty(10_000), ring.pred, group=ring.pred_group)
        sent.wait()
    return tensor


def flat(tensor: Tensor) -> Tensor | None:
    received = hand_over(tensor)
    return None if received is None else received.flatten()


def numbers_in_another_order(tensor: Tensor) -> Tensor | None:
    received = hand_over(tensor)
    return None if received is None else received.flatten().flip(0).view(received.shape)


def test_hand_over_passes_a_right_answer() -> None:
    for seed in (1, 2, 3, 4, None):  # the number of dimensions follows from the seed
        result = verdict(check.hand_over, hand_over, seed)
        assert result.passed, result
        assert "a header of 40 bytes" in result.reason


@pytest.mark.parametrize(
    ("answer", "words", "hint"),
    [
        (dimension_by_dimension, "messages to rank 1, a header and a payload, sent ", "A message for each dimension"),
        (lambda tensor: None, "Rank 0 of 3 must send 2 messages to rank 1, a header and a payload, sent none.", "Two messages"),
        (all_round_the_ring, "must ", ""),
        (flat, "must return a tensor of shape (", "the shape from the header"),
        (numbers_in_another_order, "must return the numbers that rank ", ""),
        (lambda tensor: (hand_over(tensor), None)[1], "must return a tensor of shape (", ""),
        (lambda tensor: (hand_over(tensor), tensor)[1], "Rank 0 of 3 has nobody before it and must return None, got a tensor.", ""),
        (lambda tensor: hand_over(tensor, group_of=lambda ring: None), 'on the group "world"', "Name the group"),
        (7, "The answer must be a function", ""),
    ],
)
def test_hand_over_says_what_is_wrong(answer: Any, words: str, hint: str) -> None:
    result = verdict(check.hand_over, answer)
    assert not result.passed
    assert words in result.reason
    assert hint in result.hint


def test_a_header_that_depends_on_the_shape_does_not_pass() -> None:
    def own_length(tensor: Tensor) -> Tensor | None:
        ring = ringsim.current_ring()
        sends: list[Any] = []
        if ring.rank < ring.world_size - 1:
            header = torch.tensor([tensor.dim(), *tensor.shape])
            sends = [dist.isend(part, ring.succ, group=ring.succ_group) for part in (header, tensor.contiguous())]
        if ring.rank > 0:
            header = torch.empty(10, dtype=torch.int64)
            dist.recv(header[: 3 + ring.rank % 2], ring.pred, group=ring.pred_group)  # only the author knows how long
        for sent in sends:
            sent.wait()
        return None

    result = verdict(check.hand_over, own_length)
    assert not result.passed


# -- the gradients


def step(
    stage: Any,
    inputs: list[Tensor],
    targets: list[Tensor],
    loss_fn: Answer,
    *,
    leaf: Callable[[Tensor], Tensor] = torch.Tensor.requires_grad_,
    scale: float | None = None,
    backwards: Callable[[int], list[int]] = lambda m: list(range(m)),
) -> None:
    ring = ringsim.current_ring()
    first, last = ring.rank == 0, ring.rank == ring.world_size - 1
    kept = []
    for i, (x, target) in enumerate(zip(inputs, targets, strict=True)):
        x = x if first else leaf(recv_activation(i))
        y = stage(x)
        if last:
            y = loss_fn(y, target) / (len(inputs) if scale is None else scale)
        else:
            send_activation(y, i)
        kept.append((x, y))
    for i, matching in zip(range(len(inputs)), backwards(len(inputs)), strict=True):
        x, y = kept[matching]
        grad = None if last else recv_gradient(i)
        y.backward(grad)
        if not first:
            send_gradient(x.grad, i)


def one_after_the_other(stage: Any, inputs: list[Tensor], targets: list[Tensor], loss_fn: Answer) -> None:
    ring = ringsim.current_ring()
    first, last = ring.rank == 0, ring.rank == ring.world_size - 1
    for i, target in enumerate(targets):
        x = inputs[i] if first else recv_activation(i)
        y = forward_stage(stage, x)
        if last:
            y = loss_fn(y, target) / len(inputs)
        else:
            send_activation(y, i)
        grad: Any = backward_stage(x, y, None if last else recv_gradient(i))
        if not first:
            send_gradient(grad, i)


def forgets_the_first_microbatches(stage: Any, inputs: list[Tensor], targets: list[Tensor], loss_fn: Answer) -> None:
    for x, target in zip(inputs, targets, strict=True):
        for parameter in stage.parameters():
            parameter.grad = None
        step(stage, [x], [target], loss_fn, scale=len(inputs))


def first_stage_forgets_the_backward(stage: Any, inputs: list[Tensor], targets: list[Tensor], loss_fn: Answer) -> None:
    step(stage, inputs, targets, loss_fn)
    if ringsim.current_ring().rank == 0:
        stage.zero_grad()


def sends_zeros(stage: Any, inputs: list[Tensor], targets: list[Tensor], loss_fn: Answer) -> None:
    def zeroed(x: Tensor) -> Tensor:
        x.requires_grad_().register_hook(torch.zeros_like)
        return x

    step(stage, inputs, targets, loss_fn, leaf=zeroed)


def first_stage_mixes_up(stage: Any, inputs: list[Tensor], targets: list[Tensor], loss_fn: Answer) -> None:
    turned = ringsim.current_ring().rank == 0
    step(stage, inputs, targets, loss_fn, backwards=lambda m: list(range(m))[:: -1 if turned else 1])


@pytest.mark.parametrize("answer", [step, one_after_the_other])
def test_gradients_passes_a_right_answer(answer: Answer) -> None:
    for seed in (1, None):
        result = verdict(check.gradients, answer, seed)
        assert result.passed, result
        assert result.trace is not None


@pytest.mark.parametrize(
    ("answer", "words", "hint"),
    [
        (lambda *args: None, "Stage 0 of 3 has no gradient for its parameter 0.weight, with 4 microbatches.", "recv_gradient"),
        (lambda *args: step(*args, scale=1), "The gradients of stage 0 of 3 are 4 times those of one process", "divide each one's loss"),
        (lambda *args: step(*args, scale=16), "The gradients of stage 0 of 3 are 0.25 times those of one process", "divided twice"),
        (lambda *args: step(*args, leaf=lambda x: x), "must be a tensor, got None", "requires_grad_()"),
        (lambda *args: step(*args, leaf=lambda x: x.requires_grad_().clone()), "must be a tensor, got None", "requires_grad_()"),
        (forgets_the_first_microbatches, "Stage 0 of 3 has another gradient for 0.weight than one process", "nothing may be set to zero"),
        (first_stage_forgets_the_backward, "Stage 0 of 3 has no gradient for its parameter 0.weight", "recv_gradient"),
        (sends_zeros, "Stage 0 of 3 has a gradient of zeros for its parameter 0.weight", "requires_grad_()"),
        (first_stage_mixes_up, "Stage 0 of 3 has another gradient for 0.weight than one process", "microbatch i goes with the x and the y"),
        (lambda stage: None, "takes 1 positional argument but 4 were given", ""),
        (7, "The answer must be a function", ""),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_gradients_says_what_is_wrong(answer: Any, words: str, hint: str) -> None:
    result = verdict(check.gradients, answer)
    assert not result.passed
    assert words in result.reason
    assert hint in result.hint
