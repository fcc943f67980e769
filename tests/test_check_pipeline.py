"""The checks of the lessons on pipelines, on simulated ranks.

Right answers pass, and each wrong one fails for its own reason.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from verdicts import make_tests, verdict

import ringsim
from ringsim import check
from ringsim.pipeline import (
    Costs,
    backward_stage,
    by_count,
    forward_stage,
    lower,
    one_f_one_b,
    recv_activation,
    recv_gradient,
    send_activation,
    send_gradient,
    zb_h1,
)

pytestmark = [
    pytest.mark.usefixtures("on_the_clock"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
]

Answer = Callable[..., Any]
Tensor = Any  # as from a notebook, where nobody checks types

# -- partition


def last_stages_get_more(num_layers: int, num_stages: int) -> list[list[int]]:
    cuts = [stage * num_layers // num_stages for stage in range(num_stages + 1)]
    return [list(range(start, stop)) for start, stop in itertools.pairwise(cuts)]


def rest_to_the_last(num_layers: int, num_stages: int) -> list[range]:
    share = num_layers // num_stages
    starts = [stage * share for stage in range(num_stages)] + [num_layers]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def without_empty_stages(num_layers: int, num_stages: int) -> list[list[int]]:
    return [layers for layers in last_stages_get_more(num_layers, num_stages) if layers]


def dealt_out(num_layers: int, num_stages: int) -> list[range]:
    return [range(stage, num_layers, num_stages) for stage in range(num_stages)]


# -- hand_over: a tensor of any shape


def hand_over(
    tensor: Tensor,
    header_of: Callable[[Tensor], list[int]] | None = None,
    group_of: Callable[[Any], Any] | None = None,
) -> Tensor | None:
    ring = ringsim.current_ring()
    sends: list[Any] = []
    if ring.rank < ring.world_size - 1:
        padded = (
            [tensor.dim(), *tensor.shape, 0, 0, 0][:5] if header_of is None else header_of(tensor)
        )
        sends = [
            dist.isend(part, ring.succ, group=ring.succ_group)
            for part in (torch.tensor(padded), tensor.contiguous())
        ]
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
        sends = [
            dist.isend(part, ring.succ, group=ring.succ_group)
            for part in (*numbers, tensor.contiguous())
        ]
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


def with_headers(
    length: Callable[[int], int] = lambda src: 5, spare: int = 0, closed: bool = False
) -> Answer:
    """Returns an answer whose header has a length by rank.

    The payload may have numbers to spare, and the line may be closed.
    """

    def answer(tensor: Tensor) -> Tensor | None:
        ring = ringsim.current_ring()
        sends: list[Any] = []
        if ring.world_size > 1 and (closed or ring.rank < ring.world_size - 1):
            padded = [tensor.dim(), *tensor.shape, 0, 0, 0, 0][: length(ring.rank)]
            payload = torch.cat([tensor.flatten(), torch.zeros(spare)])
            sends = [
                dist.isend(part, ring.succ, group=ring.succ_group)
                for part in (torch.tensor(padded), payload)
            ]
        received = None
        if ring.world_size > 1 and (closed or ring.rank > 0):
            header = torch.empty(length(ring.pred), dtype=torch.int64)
            dist.recv(header, ring.pred, group=ring.pred_group)
            shape = header[1 : 1 + int(header[0])].tolist()
            received = torch.empty(math.prod(shape) + spare)
            dist.recv(received, ring.pred, group=ring.pred_group)
        for sent in sends:
            sent.wait()
        return received

    return answer


def all_round_the_ring(tensor: Tensor) -> Tensor:
    ring = ringsim.current_ring()
    if ring.world_size > 1:
        sent: Any = dist.isend(tensor.contiguous(), ring.succ, group=ring.succ_group)
        dist.recv(torch.empty(10_000), ring.pred, group=ring.pred_group)
        sent.wait()
    return tensor


def changed(change: Callable[[Tensor], Tensor]) -> Answer:
    """The right answer, but that what was received is changed."""
    return lambda tensor: None if (received := hand_over(tensor)) is None else change(received)


# -- gradients


def zeroed(x: Tensor) -> Tensor:
    x.requires_grad_().register_hook(torch.zeros_like)
    return x


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


def one_after_the_other(
    stage: Any, inputs: list[Tensor], targets: list[Tensor], loss_fn: Answer
) -> None:
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


def forgets_the_first_microbatches(
    stage: Any, inputs: list[Tensor], targets: list[Tensor], loss_fn: Answer
) -> None:
    for x, target in zip(inputs, targets, strict=True):
        for parameter in stage.parameters():
            parameter.grad = None
        step(stage, [x], [target], loss_fn, scale=len(inputs))


def first_stage_mixes_up(
    stage: Any, inputs: list[Tensor], targets: list[Tensor], loss_fn: Answer
) -> None:
    turned = ringsim.current_ring().rank == 0
    step(
        stage, inputs, targets, loss_fn, backwards=lambda m: list(range(m))[:: -1 if turned else 1]
    )


# -- schedule, fast_schedule


def written_down(rank: int, p: int, m: int) -> list[str]:
    warm_up = min(p - rank - 1, m)
    row = [f"{rank}F{i}" for i in range(warm_up)]
    for i in range(m - warm_up):
        row += [f"{rank}F{i + warm_up}", f"{rank}B{i}"]
    return row + [f"{rank}B{i}" for i in range(m - warm_up, m)]


def all_forwards_first(rank: int, p: int, m: int) -> list[str]:
    return [f"{rank}{kind}{i}" for kind in "FB" for i in range(m)]


def one_at_a_time(rank: int, p: int, m: int) -> list[str]:
    return [f"{rank}{kind}{i}" for i in range(m) for kind in "FB"]


def only_with_enough(rank: int, p: int, m: int) -> list[str]:
    return written_down(rank, p, m) if m >= p else one_at_a_time(rank, p, m)


def in_a_circle(rank: int, p: int, m: int) -> list[str]:
    return (
        one_at_a_time(rank, p, m)
        if rank == 0 or m < 2
        else [f"{rank}F1", f"{rank}B1", *one_at_a_time(rank, p, m)[:2]]
    )


def with_halves(rank: int, p: int, m: int) -> list[str]:
    return [
        half
        for action in written_down(rank, p, m)
        for half in ([action] if "F" in action else [action.replace("B", x) for x in "IW"])
    ]


def zero_bubble(rank: int, p: int, m: int) -> list[str]:
    warm_up = p - 1 - rank
    row = [f"{rank}F{i}" for i in range(warm_up)]
    for i in range(m):
        row += [f"{rank}F{i + warm_up}"] if i + warm_up < m else []
        row += [f"{rank}I{i}"]
        row += [f"{rank}W{i - rank}"] if i >= rank else []
    return row + [f"{rank}W{i}" for i in range(m - rank, m)]


def all_weights_at_the_end(rank: int, p: int, m: int) -> list[str]:
    row = with_halves(rank, p, m)
    return [action for action in row if "W" not in action] + [f"{rank}W{i}" for i in range(m)]


WITH_MESSAGES = {
    (rank, 2, 4): [str(action) for action in row]
    for rank, row in enumerate(lower(one_f_one_b(2, 4)).actions)
}


# -- fewest_microbatches, inner_iterations


def by_simulation(num_ranks: int, costs: Costs, limit: float) -> int:
    number = 1
    while simulated_bubble(num_ranks, costs, number) > limit:
        number += 1
    return number


def simulated_bubble(num_ranks: int, costs: Costs, number: int) -> float:
    return ringsim.simulate_schedule(
        "1f1b", costs, num_ranks=num_ranks, num_microbatches=number, semantics="buffered"
    ).bubble


def fewest(stages: int) -> tuple[int, bool]:
    return math.ceil(4 * stages / 5), True


def fewest_counted(stages: int) -> tuple[int, bool]:
    turns = 1
    while turns < 0.8 * stages:
        turns += 1
    return turns, True


# -- average_gradients


def write_back(gradients: list[Tensor], bucket: Tensor) -> None:
    for gradient, part in zip(
        gradients, bucket.split([gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(part.view_as(gradient))


def averaging(
    group_of: Callable[[Any], Any] = lambda replicas: replicas,
    by: Callable[[Any], float] = dist.get_world_size,
    padding: int = 0,
    put: Callable[[list[Tensor], Tensor], None] = write_back,
    wait: bool = True,
) -> Answer:
    """Returns an answer that is right, but for what is given."""

    def average(gradients: list[Tensor], replicas: Any) -> None:
        bucket = torch.cat([*(gradient.flatten() for gradient in gradients), torch.zeros(padding)])
        work = dist.all_reduce(bucket, group=group_of(replicas), async_op=True)
        if wait:
            work.wait()
        put(gradients, bucket[: len(bucket) - padding] / by(replicas))

    return average


def one_by_one(gradients: list[Tensor], replicas: Any) -> None:
    for gradient in gradients:
        dist.all_reduce(gradient, group=replicas)
        gradient /= dist.get_world_size(replicas)


def by_all_gather(gradients: list[Tensor], replicas: Any) -> None:
    bucket = torch.cat([gradient.flatten() for gradient in gradients])
    parts = [torch.empty_like(bucket) for _ in range(dist.get_world_size(replicas))]
    dist.all_gather(parts, bucket, group=replicas)
    write_back(gradients, sum(parts) / len(parts))


def in_slots_of_the_world(gradients: list[Tensor], replicas: Any) -> None:
    """Right in numbers: each stage has a place of its own in one bucket of the world."""
    own = torch.cat([gradient.flatten() for gradient in gradients])
    replica_count = dist.get_world_size(replicas)
    stages = dist.get_world_size() // replica_count
    slots = torch.zeros(stages, len(own))
    slots[dist.get_rank() % stages] = own
    dist.all_reduce(slots)
    write_back(gradients, slots[dist.get_rank() % stages] / replica_count)


def sparse_gradients(stage: torch.nn.Module, *_: Any) -> None:
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter).to_sparse()


def step_and_update(stage: torch.nn.Module, *args: Any) -> None:
    step(stage, *args)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter -= parameter.grad


RIGHT: dict[Answer, list[Answer]] = {
    check.average_gradients: [averaging()],
    check.partition: [last_stages_get_more],
    check.gradients: [step, one_after_the_other, step_and_update],
    check.schedule: [written_down, lambda *case: " ".join(written_down(*case))],
    check.fast_schedule: [zero_bubble],
    check.fewest_microbatches: [by_simulation, lambda *case: np.int64(by_simulation(*case))],
    check.inner_iterations: [fewest, fewest_counted],
}
# what is answered, words of the reason, and of the hint
WRONG: dict[Answer, list[tuple[Any, ...]]] = {
    check.average_gradients: [
        (
            lambda gradients, replicas: None,
            "the gradients of rank 0 are what they were before.",
            "copy_",
        ),
        (
            averaging(put=lambda gradients, bucket: None),
            "the gradients of rank 0 are what they were before.",
            "copy_",
        ),
        (
            averaging(by=lambda replicas: 1),
            "are the sum over the replicas, and must be the mean.",
            "Divide",
        ),
        (
            averaging(by=lambda replicas: 2),
            "With 1 stage and 3 replicas the gradients of rank 0 are not the mean",
            "Divide",
        ),
        (
            averaging(by=lambda replicas: dist.get_world_size()),
            "are divided by the 4 ranks of the world",
            "Divide",
        ),
        (
            averaging(group_of=lambda replicas: None),
            "are mixed with those of other stages.",
            "Pass the group",
        ),
        (
            averaging(padding=100),
            "rank 0 must reduce 108 bytes, as many as it has gradients, and reduced 508.",
            "Join them",
        ),
        (
            in_slots_of_the_world,
            "rank 0 must reduce over ranks (0, 2), and did so over (0, 1, 2, 3).",
            "Pass the group",
        ),
        (averaging(wait=False), "rank 0's all_reduce is never waited for.", "wait()"),
        (
            lambda gradients, replicas: gradients[0].resize_(2),
            "With 2 stages and 2 replicas the gradients of rank 0 have other shapes than before.",
            "copy_",
        ),
        (
            one_by_one,
            "rank 0 must call one all_reduce, called 4 operations (all_reduce).",
            "Join them",
        ),
        (
            by_all_gather,
            "rank 0 must call one all_reduce, called 1 operation (all_gather).",
            "Join them",
        ),
    ],
    check.partition: [
        (
            rest_to_the_last,
            (
                "With 10 layers and 4 stages stages must differ by one layer at most, got [2, 2, "
                "2, 4] layers."
            ),
        ),
        (
            without_empty_stages,
            "With 3 layers and 4 stages the answer must have one entry for each stage, got 3.",
        ),
        (
            dealt_out,
            (
                "With 8 layers and 4 stages the layers must be in order, got [[0, 4], [1, 5], [2, "
                "6], [3, 7]]."
            ),
        ),
        (
            lambda layers, stages: [range(layers)] * stages,
            "With 8 layers and 4 stages layer 0 is in more than one place.",
        ),
        (
            lambda layers, stages: [range(1, 3), range(3, 5), range(5, 7), range(7, 9)],
            "there is no layer 8.",
        ),
        (
            lambda layers, stages: [range(2), range(2, 4), range(4, 6), range(6, 7)],
            "1 layer is lost, the first of them layer 7.",
        ),
        (
            lambda layers, stages: [len(each) for each in last_stages_get_more(layers, stages)],
            "must be a list of ranges, one for each stage, got [2",
        ),
        (by_count, "The answer calls by_count of ringsim, and must do that by itself."),
        (lambda layers, stages: None, "must be a list of ranges, one for each stage, got None."),
    ],
    check.hand_over: [
        (
            dimension_by_dimension,
            "messages to rank 1, a header and a payload, sent ",
            "A message for each dimension",
        ),
        (
            lambda tensor: None,
            "Rank 0 of 3 must send 2 messages to rank 1, a header and a payload, sent none.",
            "Two messages",
        ),
        (all_round_the_ring, "must ", ""),
        (
            with_headers(closed=True),
            "Rank 0 of 3 received 2 messages, and the line ends there.",
            "the last rank no successor",
        ),
        (
            with_headers(spare=1),
            "Rank 0 of 3 must send a payload of ",
            "Send tensor.contiguous()",
        ),
        (
            with_headers(length=lambda src: 6 - src),
            "The header must have one size for all, got 48 bytes for shape (",
            "fill up with zeros",
        ),
        (changed(torch.flatten), "must return a tensor of shape (", "the shape from the header"),
        (
            changed(lambda received: received.to("meta")),
            "got one whose numbers cannot be read.",
            "",
        ),
        (
            changed(lambda received: received.flatten().flip(0).view(received.shape)),
            "must return the numbers that rank ",
            "",
        ),
        (
            lambda tensor: (hand_over(tensor), tensor)[1],
            "Rank 0 of 3 has no predecessor and must return None, got a tensor.",
            "",
        ),
        (
            lambda tensor: hand_over(tensor, group_of=lambda ring: None),
            'on the group "world"',
            "Name the group",
        ),
    ],
    check.gradients: [
        (
            lambda *args: None,
            "Stage 0 of 3 has no gradient for its parameter 0.weight, with 4 microbatches.",
            "recv_gradient",
        ),
        (
            lambda *args: step(*args, scale=1),
            "The gradients of stage 0 of 3 are 4 times those of one process",
            "divide each one's loss",
        ),
        (
            sparse_gradients,
            "Stage 0 of 3 has a gradient of zeros for its parameter 0.weight",
            "requires_grad_()",
        ),
        (
            lambda *args: step(*args, scale=16),
            "The gradients of stage 0 of 3 are 0.25 times those of one process",
            "divided twice",
        ),
        (
            lambda *args: step(*args, leaf=lambda x: x),
            "must be a tensor, got None",
            "requires_grad_()",
        ),
        (
            forgets_the_first_microbatches,
            "Stage 0 of 3 has another gradient for 0.weight than one process",
            "nothing may be set to zero",
        ),
        (
            lambda *args: step(*args, leaf=zeroed),
            "Stage 0 of 3 has a gradient of zeros for its parameter 0.weight",
            "requires_grad_()",
        ),
        (
            first_stage_mixes_up,
            "Stage 0 of 3 has another gradient for 0.weight than one process",
            "microbatch i goes with the x and the y",
        ),
    ],
    check.schedule: [
        (
            all_forwards_first,
            (
                "With 2 ranks and 4 microbatches rank 0 holds 4 live activations "
                "at a time, and may hold 2."
            ),
        ),
        (
            one_at_a_time,
            "With 2 ranks and 4 microbatches the step takes 24 units, and must take 15 at most.",
        ),
        (
            only_with_enough,
            "With 4 ranks and 2 microbatches the step takes 24 units, and must take 15 at most.",
        ),
        (
            lambda *case: one_f_one_b(*case[1:]).actions[case[0]],
            "The answer calls one_f_one_b of ringsim, and must do that by itself.",
        ),
        (with_halves, "1F1B does a backward in one piece, got 0I0."),
        (
            in_a_circle,
            (
                "With 2 ranks and 4 microbatches: stage 1 must do the forward pass of microbatch "
                "2, got none (rank 1). Add 1F2."
            ),
        ),
        (
            lambda *case: WITH_MESSAGES.get(case) or written_down(*case),
            "the answer must leave out sends and receives: they are put in for it.",
        ),
        (
            lambda rank, p, m: ["forward 0", "backward 0"],
            "an action must be a stage, one of F, B, I, W, ",
        ),
        (
            lambda rank, p, m: None,
            "With 2 ranks and 4 microbatches the answer must be a list of actions, got None.",
        ),
    ],
    check.fast_schedule: [
        (
            written_down,
            "With 2 ranks and 4 microbatches the step takes 15 units, and must take 13 at most.",
        ),
        (
            all_weights_at_the_end,
            (
                "With 2 ranks and 4 microbatches rank 0 holds 4 live activations "
                "at a time, and may hold 2."
            ),
        ),
        (
            lambda rank, p, m: (action for action in zb_h1(p, m).actions[rank]),
            "The answer calls zb_h1 of ringsim",
        ),
        (
            lambda rank, p, m: zero_bubble(rank, p, 4),
            "With 4 ranks and 8 microbatches: stage 0 must do the forward pass of microbatch 4",
        ),
        (
            lambda rank, p, m: zero_bubble(rank, p, m)[:-1],
            "must make the weights' gradients of microbatch 3, got none (rank 0). Add 0W3",
        ),
        (lambda rank, p, m: None, "the answer must be a list of actions, got None."),
    ],
    check.fewest_microbatches: [
        (
            lambda ranks, costs, limit: max(1, math.ceil((ranks - 1) * (1 - limit) / limit)),
            (
                "F 1, B 2 and 0.5 a message, 9 microbatches have a bubble "
                "of 40.0 %, and 25 % is allowed."
            ),
        ),
        (
            lambda *case: by_simulation(*case) + 1,
            "26 microbatches are more than needed: 25 would do.",
        ),
        (lambda *case: 40, "40 microbatches are more than needed: "),
        (lambda *case: "ten", "must be a number of microbatches, got "),
        (lambda *case: 0, "must be a number of microbatches, got 0."),
        (lambda *case: 10**400, "must be a number of microbatches, got 1000"),
        (lambda *case: None, "must be a number of microbatches, got None."),
    ],
    check.inner_iterations: [
        (
            lambda stages: (stages, False),
            (
                "With 10 stages (10, False) keeps a stage at work 100 % of the time, and 8 inner "
                "iterations would"
            ),
        ),
        (lambda stages: (1, False), "With 10 stages (1, False) never finishes."),
        (lambda stages: (stages + 1, False), "With 10 stages (11, False) never finishes."),
        (
            lambda stages: (math.ceil(0.8 * stages), False),
            "(8, False) keeps a stage at work 78 % of the time, which is less than 80 %.",
        ),
        (
            lambda stages: stages,
            "the answer must be a number of 1 or more and True or False, got 10.",
        ),
        (lambda stages: (0, True), "got (0, True)."),
    ],
}


test_a_right_answer_passes, test_a_wrong_answer_is_told_why = make_tests(RIGHT, WRONG)


def test_hand_over_passes_a_right_answer() -> None:
    for seed in (1, 2, 3, 4, None):  # the number of dimensions follows from the seed
        result = verdict(check.hand_over, hand_over, seed)
        assert result.passed, result
        assert "a header of 40 bytes" in result.reason


def test_a_header_that_depends_on_the_shape_does_not_pass() -> None:
    def own_length(tensor: Tensor) -> Tensor | None:
        ring = ringsim.current_ring()
        sends: list[Any] = []
        if ring.rank < ring.world_size - 1:
            header = torch.tensor([tensor.dim(), *tensor.shape])
            sends = [
                dist.isend(part, ring.succ, group=ring.succ_group)
                for part in (header, tensor.contiguous())
            ]
        if ring.rank > 0:
            header = torch.empty(10, dtype=torch.int64)
            # only the author knows how long
            dist.recv(header[: 3 + ring.rank % 2], ring.pred, group=ring.pred_group)
        for sent in sends:
            sent.wait()
        return None

    result = verdict(check.hand_over, own_length)
    assert not result.passed


def test_schedule_names_the_circle_of_a_deadlock() -> None:
    def turned_round(rank: int, p: int, m: int) -> list[str]:
        return (
            one_at_a_time(rank, p, m)
            if rank == 0
            else [action for i in reversed(range(m)) for action in (f"{rank}F{i}", f"{rank}B{i}")]
        )

    result = verdict(check.schedule, turned_round)
    assert not result.passed
    assert "must let every rank go on, got a circle: rank " in result.reason


def test_a_schedule_that_is_not_good_enough_is_shown_as_it_was_evaluated() -> None:
    trace = verdict(check.schedule, all_forwards_first).trace
    assert trace is not None
    spans = trace.to_pandas().query(
        "kind == 'span' and label in ('forward', 'backward') and rank == 0"
    )
    assert spans["label"].tolist() == ["forward"] * 4 + ["backward"] * 4
    assert (spans["done_ns"] - spans["post_ns"]).tolist() == [1e9] * 4 + [2e9] * 4, (
        "in units, and not as a first step warms up"
    )
