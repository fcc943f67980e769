"""The checks of the lessons on pipelines: right answers pass, wrong ones fail for their reason."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from verdicts import after, make_tests, receive, send, verdict

import ringsim
from ringsim import check, current_ring
from ringsim.pipeline import (
    Costs,
    backward_stage,
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
Tensor = Any  # as in a notebook, without type checks


def is_first() -> bool:
    return current_ring().rank == 0


def is_last() -> bool:
    return current_ring().rank == current_ring().world_size - 1


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


def with_headers(
    length: Callable[[int], int] = lambda source: 5,
    spare: int = 0,
    closed: bool = False,
    on: str = "",
    change: Callable[[Tensor], Tensor] = lambda received: received,
) -> Answer:
    """Returns the right answer, or one with another header, payload, line, group or result."""

    def answer(tensor: Tensor) -> Tensor | None:
        ring, waits, received = current_ring(), [], None
        if ring.world_size > 1 and (closed or not is_last()):
            header = torch.tensor([tensor.dim(), *tensor.shape, 0, 0, 0, 0][: length(ring.rank)])
            payload = torch.cat([tensor.flatten(), torch.zeros(spare)])
            waits = [send(header, on=on), send(payload, on=on)]
        if ring.world_size > 1 and (closed or not is_first()):
            header = receive(torch.empty(length(ring.pred), dtype=torch.int64), on=on)
            shape = header[1 : 1 + int(header[0])].tolist()
            received = receive(torch.empty(math.prod(shape) + spare), on=on)
            received = change(received[: math.prod(shape)].view(shape))
        for wait in waits:
            wait()
        return received

    return answer


hand_over = with_headers()


def dimension_by_dimension(tensor: Tensor) -> Tensor | None:
    waits, received, one = [], None, torch.empty(1, dtype=torch.int64)
    if not is_last():
        numbers = [torch.tensor([number]) for number in (tensor.dim(), *tensor.shape)]
        waits = [send(part) for part in (*numbers, tensor.contiguous())]
    if not is_first():
        shape = [int(receive(one)) for _ in range(int(receive(one)))]
        received = receive(torch.empty(shape))
    for wait in waits:
        wait()
    return received


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
    turned: Callable[[], bool] = lambda: False,
) -> None:
    kept = []
    for i, (x, target) in enumerate(zip(inputs, targets, strict=True)):
        x = x if is_first() else leaf(recv_activation(i))
        y = stage(x)
        if is_last():
            y = loss_fn(y, target) / (scale or len(inputs))
        else:
            send_activation(y, i)
        kept.append((x, y))
    for i, (x, y) in enumerate(kept[::-1] if turned() else kept):
        y.backward(None if is_last() else recv_gradient(i))
        if not is_first():
            send_gradient(x.grad, i)


def stepping(**options: Any) -> Answer:
    return lambda *args: step(*args, **options)


def one_after_the_other(
    stage: Any, inputs: list[Tensor], targets: list[Tensor], loss_fn: Answer
) -> None:
    for i, target in enumerate(targets):
        x = inputs[i] if is_first() else recv_activation(i)
        y = forward_stage(stage, x)
        if is_last():
            y = loss_fn(y, target) / len(inputs)
        else:
            send_activation(y, i)
        grad: Any = backward_stage(x, y, None if is_last() else recv_gradient(i))
        if not is_first():
            send_gradient(grad, i)


def forgets_the_first_microbatches(
    stage: Any, inputs: list[Tensor], targets: list[Tensor], loss_fn: Answer
) -> None:
    for x, target in zip(inputs, targets, strict=True):
        stage.zero_grad()
        step(stage, [x], [target], loss_fn, scale=len(inputs))


def step_and_update(stage: torch.nn.Module, *args: Any) -> None:
    step(stage, *args)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter -= parameter.grad


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


def turned_round(rank: int, p: int, m: int) -> list[str]:
    order = range(m) if rank == 0 else range(m)[::-1]
    return [f"{rank}{kind}{i}" for i in order for kind in "FB"]


def with_halves(rank: int, p: int, m: int) -> list[str]:
    row = written_down(rank, p, m)
    return " ".join(row).replace("B", "I").split() + [f"{rank}W{i}" for i in range(m)]


def zero_bubble(rank: int, p: int, m: int) -> list[str]:
    warm_up = p - 1 - rank
    row = [f"{rank}F{i}" for i in range(warm_up)]
    for i in range(m):
        row += [f"{rank}F{i + warm_up}"] if i + warm_up < m else []
        row += [f"{rank}I{i}"]
        row += [f"{rank}W{i - rank}"] if i >= rank else []
    return row + [f"{rank}W{i}" for i in range(m - rank, m)]


LOWERED = [[*map(str, row)] for row in lower(one_f_one_b(2, 4)).actions]


def with_messages(rank: int, p: int, m: int) -> list[str]:
    return LOWERED[rank] if (p, m) == (2, 4) else written_down(rank, p, m)


# -- fewest_microbatches, inner_iterations


def by_simulation(num_ranks: int, costs: Costs, limit: float) -> int:
    for number in itertools.count(1):
        sizes: Any = {"num_ranks": num_ranks, "num_microbatches": number}
        run = ringsim.simulate_schedule("1f1b", costs, semantics="buffered", **sizes)
        if run.bubble <= limit:
            break
    return number


def without_messages(num_ranks: int, costs: Costs, limit: float) -> int:
    return max(1, math.ceil((num_ranks - 1) * (1 - limit) / limit))


def fewest(stages: int) -> tuple[int, bool]:
    return math.ceil(4 * stages / 5), True


# -- average_gradients


def write_back(gradients: list[Tensor], bucket: Tensor) -> None:
    parts = bucket.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def averaging(
    world: bool = False,
    by: Callable[[Any], float] = dist.get_world_size,
    padding: int = 0,
    put: Callable[[list[Tensor], Tensor], None] = write_back,
    wait: bool = True,
) -> Answer:
    """Returns an answer that is right, except for the given arguments."""

    def average(gradients: list[Tensor], replicas: Any) -> None:
        bucket = torch.cat([*(gradient.flatten() for gradient in gradients), torch.zeros(padding)])
        work = dist.all_reduce(bucket, group=None if world else replicas, async_op=True)
        if wait:
            work.wait()
        put(gradients, bucket[: len(bucket) - padding] / by(replicas))

    return average


def one_by_one(gradients: list[Tensor], replicas: Any) -> None:
    for gradient in gradients:
        dist.all_reduce(gradient, group=replicas)
        gradient /= dist.get_world_size(replicas)


def in_slots_of_the_world(gradients: list[Tensor], replicas: Any) -> None:
    """Computes the right numbers, with one bucket of the world that has a slot for each stage."""
    own = torch.cat([gradient.flatten() for gradient in gradients])
    stages = dist.get_world_size() // dist.get_world_size(replicas)
    slots = torch.zeros(stages, len(own))
    slots[dist.get_rank() % stages] = own
    dist.all_reduce(slots)
    write_back(gradients, slots[dist.get_rank() % stages] / dist.get_world_size(replicas))


RIGHT: dict[Answer, list[Answer]] = {
    check.average_gradients: [averaging()],
    check.partition: [last_stages_get_more],
    check.gradients: [step, one_after_the_other, step_and_update],
    check.schedule: [written_down, lambda *case: " ".join(written_down(*case))],
    check.fast_schedule: [zero_bubble],
    check.fewest_microbatches: [by_simulation, lambda *case: np.int64(by_simulation(*case))],
    check.inner_iterations: [fewest],
}
BEFORE = "the gradients of rank 0 are unchanged."
ZEROS = "Stage 0 of 3 has a gradient of zeros for its parameter 0.weight"
DIFFERENT = "Stage 0 of 3 and a single process have different gradients for 0.weight after a"
HELD = "With 2 ranks and 4 microbatches, rank 0 holds 4 live activations, but may hold only 2."
LONG = "the step takes 24 units, but must take at most 15."
NO_NUMBER = "must be a number of microbatches, got "
# answers, with words of the reason and of the hint
WRONG: dict[Answer, list[tuple[Any, ...]]] = {
    check.average_gradients: [
        (averaging(put=lambda gradients, bucket: None), BEFORE, "copy_"),
        (
            averaging(by=lambda replicas: 1),
            "are the sum over the replicas, but must be the mean",
            "Divide",
        ),
        (averaging(by=lambda replicas: dist.get_world_size()), "ranks in the world", "Divide"),
        (averaging(world=True), "are mixed with the gradients of other stages.", "Pass the group"),
        (averaging(padding=100), "of 108 bytes, but are all_reduce of 508 bytes.", "Join"),
        (
            in_slots_of_the_world,
            "must be over ranks (0, 2), but are over (0, 1, 2, 3).",
            "Pass the group",
        ),
        (averaging(wait=False), "Rank 0 never waited for its all_reduce.", "call its wait()"),
        (
            one_by_one,
            "its calls must be all_reduce of 108 bytes, but are all_reduce of 48 bytes, all_",
            "Join the",
        ),
    ],
    check.partition: [
        (rest_to_the_last, "stages must differ by at most one layer, got [2, 2, 2, 4] layers."),
        (without_empty_stages, "stages, your answer must have one entry for each stage, but has 3"),
        (dealt_out, "the layers must be in order, got [[0, 4], [1, 5], [2, 6], [3, 7]]."),
        (lambda layers, stages: [range(layers)] * stages, "With 8 layers and 4 stages, layer 0"),
        (lambda *_: [range(i, i + 2) for i in (1, 3, 5, 7)], "there is no layer 8."),
        (lambda *_: [range(2), range(2, 4), range(4, 6), range(6, 7)], "1 layer is missing,"),
    ],
    check.hand_over: [
        (dimension_by_dimension, "messages to rank 1, a header", "A message for each dimension"),
        (with_headers(closed=True), "the line of stages ends", "the last rank has no successor"),
        (with_headers(spare=1), "Rank 0 of 3 must send a payload of ", "Send tensor.contiguous()"),
        (with_headers(length=lambda source: 6 - source), "The header must have the", "with zeros"),
        (with_headers(change=torch.flatten), "must return a tensor of shape (", "the shape from"),
        (
            with_headers(change=lambda received: received.flatten().flip(0).view(received.shape)),
            "must return the numbers of rank ",
        ),
        (after(hand_over, lambda tensor: tensor), "must return None, but returned a tensor."),
    ],
    check.gradients: [
        (lambda *_: None, "no gradient for its parameter 0.weight", "recv_gradient"),
        (
            stepping(scale=1),
            "gradients of stage 0 of 3 are 4 times as large as in a single process",
            "divide each loss",
        ),
        (
            stepping(scale=16),
            "are 0.25 times as large as in a single process",
            "divide the loss twice",
        ),
        (stepping(leaf=zeroed), ZEROS, "requires_grad_()"),
        (stepping(leaf=lambda x: x), "must be a tensor, got None", "requires_grad_()"),
        (forgets_the_first_microbatches, DIFFERENT, "do not reset the gradients"),
        (stepping(turned=is_first), DIFFERENT, "microbatch i goes with the x and the y"),
    ],
    check.schedule: [
        (all_forwards_first, HELD),
        (one_at_a_time, f"With 2 ranks and 4 microbatches, {LONG}"),
        (only_with_enough, f"With 4 ranks and 2 microbatches, {LONG}"),
        (with_halves, "1F1B runs each backward as a whole, but your schedule contains 0I0."),
        (turned_round, "the schedule cannot finish, because ranks wait for each other: rank "),
        (with_messages, "your answer must not contain sends or receives: ringsim adds"),
        (
            lambda rank, p, m: ["forward 0"],
            "an action must consist of a stage, one of F, B, I, W, ",
        ),
    ],
    check.fast_schedule: [
        (written_down, "the step takes 15 units, but must take at most 13."),
        (with_halves, HELD),
        (lambda rank, p, m: iter(zb_h1(p, m).actions[rank]), "Your answer calls ringsim's zb_h1"),
        (lambda rank, p, m: zero_bubble(rank, p, 4), "With 4 ranks and 8 microbatches: stage 0"),
        (
            lambda rank, p, m: zero_bubble(rank, p, m)[:-1],
            "does not compute its weights' gradients for",
        ),
        (lambda rank, p, m: None, "your answer must be a list of actions, got None."),
    ],
    check.fewest_microbatches: [
        (without_messages, "9 microbatches have a bubble of 40.0 %, but at most 25 % is allowed."),
        (lambda *case: by_simulation(*case) + 1, "26 microbatches are more than needed: 25 would"),
        (lambda *case: 40, "40 microbatches are more than needed: "),
        (lambda *case: "ten", NO_NUMBER),
        (lambda *case: 0, f"{NO_NUMBER}0."),
        (lambda *case: 10**400, f"{NO_NUMBER}1000"),
    ],
    check.inner_iterations: [
        (lambda n: (n, False), "100 % of the time, but 8 inner iterations would"),
        (lambda n: (1, False), "With 10 stages, the ring never finishes with (1, False)."),
        (lambda n: (n + 1, False), "With 10 stages, the ring never finishes with (11, False)."),
        (lambda n: (math.ceil(0.8 * n), False), "busy 78 % of the time, which is less than 80 %"),
        (lambda n: n, "a positive integer and True or False, got 10."),
        (lambda n: (0, True), "got (0, True)."),
    ],
}


test_a_right_answer_passes, test_a_wrong_answer_is_told_why = make_tests(RIGHT, WRONG)


def test_hand_over_passes_a_right_answer() -> None:
    for seed in (1, 2, 3, 4, None):  # the number of dimensions follows from the seed
        result = verdict(check.hand_over, hand_over, seed)
        assert result.passed, result
        assert "a header of 40 bytes" in result.reason


def test_a_schedule_that_is_not_good_enough_is_shown_as_it_was_evaluated() -> None:
    table = verdict(check.schedule, all_forwards_first).trace.to_pandas()
    spans = table.query("kind == 'span' and label in ('forward', 'backward') and rank == 0")
    assert spans["label"].tolist() == ["forward"] * 4 + ["backward"] * 4
    # in units, and not as a first step warms up
    assert (spans["done_ns"] - spans["post_ns"]).tolist() == [1e9] * 4 + [2e9] * 4
