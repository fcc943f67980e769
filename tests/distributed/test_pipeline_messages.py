"""Messages between stages on real ranks: any shape, and an error on both sides where the two do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ringsim
from ringsim.errors import MessageMismatch, RingError
from ringsim.pipeline import Schedule, backward_stage, build_stages, forward_stage, partition_model, train_step_pipeline
from ringsim.pipeline.messages import recv_activation, recv_gradient, send_activation, send_gradient
from ringsim.schedules.schedule import parse_action

PAYLOADS = [
    torch.arange(6.0).reshape(2, 3),
    torch.arange(6, dtype=torch.int64).reshape(2, 3).T,  # not contiguous
    torch.tensor(7.0, dtype=torch.bfloat16),
    torch.zeros(0, 4),
    torch.ones(1, 1, 1, 1, 1, 1, 1, 2, dtype=torch.float64),
    torch.tensor([True, False]),
]


def pass_on() -> list[torch.Tensor]:
    """Every payload goes from rank to rank as an activation, and comes back as a gradient; rank 0 returns what comes back."""
    ring = ringsim.current_ring()
    back = []
    for index, payload in enumerate(PAYLOADS):
        tensor = payload if ring.rank == 0 else recv_activation(index)
        if ring.rank < ring.world_size - 1:
            send_activation(tensor, index)
            tensor = recv_gradient(index)
        if ring.rank > 0:
            send_gradient(tensor, index)
        back.append(tensor)
    return back


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_tensor_arrives_as_it_was(world_size: int) -> None:
    for received in ringsim.trace(pass_on, world_size=world_size).results:
        for tensor, payload in zip(received, PAYLOADS, strict=True):
            assert (tensor.dtype, tensor.shape) == (payload.dtype, payload.shape)
            assert torch.equal(tensor, payload)


def catch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except MessageMismatch as error:
        return str(error)
    return "nothing"


def disagree() -> list[str]:
    """Sends what the other side does not wait for, three times; then a message that fits, for nothing may be left on the way."""
    found = []
    if ringsim.current_ring().rank == 0:
        found.append(catch(send_activation, torch.ones(1000), 1))
        found.append(catch(send_activation, torch.ones(3), 0))
        send_activation(torch.ones(2), 5)
    else:
        found.append(catch(recv_activation, 0))
        found.append(catch(recv_activation, 7))
        assert recv_activation(5).tolist() == [1, 1]
    return found


def test_both_sides_learn_of_a_mismatch_and_can_go_on() -> None:
    of_sender, of_receiver = ringsim.trace(disagree, world_size=2).results
    assert of_sender == of_receiver
    assert of_sender[0] == (
        "a message must be what its receiver waits for, the activation of microbatch 0, got the activation of microbatch 1 "
        "(rank 0 to rank 1). Send and receive in the same order."
    )


def disagree_in_kind() -> str:
    ring = ringsim.current_ring()
    if ring.rank == 0:
        return catch(recv_gradient, 0)
    # To the predecessor, on the group where it waits for a gradient: an activation, as a wrong neighbour would send it.
    from ringsim.pipeline.messages import (
        Route,
        _send,  # the public functions know the way, and cannot do this
    )

    return catch(_send, "activation", torch.ones(2), 0, Route.over_edge(ring, 0, 1))


def test_a_wrong_kind_is_a_mismatch() -> None:
    first, second = ringsim.trace(disagree_in_kind, world_size=2).results
    assert first == second
    assert "the gradient of microbatch 0, got the activation of microbatch 0 (rank 1 to rank 0)" in first


def send_alone() -> str:
    try:
        send_activation(torch.ones(1), 0)
    except RingError as error:
        return str(error)
    return "nothing"


def test_a_ring_of_one_has_nobody_to_send_to() -> None:
    (found,) = ringsim.trace(send_alone, world_size=1).results
    assert found == "a ring must have two ranks or more for a message, got one. Hand the tensor from stage to stage directly."


# -- steps that are not the same on every rank


def step_of_ones_own(differences: list[list[dict[str, Any]]]) -> list[str]:
    """Runs steps whose arguments differ between ranks, and a sound one after them."""
    rank = ringsim.current_ring().rank
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))

    def step(count: int = 4, **options: Any) -> float:
        return train_step_pipeline(model, [torch.ones(2, 3)] * count, [torch.tensor([0, 1])] * count, **options)

    found = [catch(step, **by_rank[rank]) for by_rank in differences]
    step()
    return found


def test_ranks_that_run_different_steps_all_hear_of_it() -> None:
    differences: list[list[dict[str, Any]]] = [
        [{}, {"count": 3}],
        [{"schedule": "gpipe"}, {"schedule": "1f1b"}],
        [{"partition": [3, 1]}, {"partition": [2, 2]}],
    ]
    results = ringsim.trace(step_of_ones_own, world_size=2, args=(differences,)).results
    for rank, found in enumerate(results):
        for message in found:
            assert "a step must be the same on every rank" in message, (rank, found)
    for rank, (count, schedule, partition) in enumerate(results):
        other = 1 - rank
        assert f"got one of {4 - rank} microbatches on rank {rank} and one of {4 - other} on rank {other}. Call" in count
        assert f"got another schedule on rank {other} than on rank {rank}. Call" in schedule
        assert f"got another partition of the model on rank {other} than on rank {rank}. Call" in partition


def grow() -> str:
    """The second microbatch leaves stage 0 in another shape, though all inputs are alike."""
    sizes = iter((2, 3, 2))

    class Growing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[: next(sizes)]

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), Growing(), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    return catch(train_step_pipeline, model, [torch.ones(3, 3)] * 2, [torch.zeros(2, dtype=torch.int64)] * 2)


def test_an_activation_that_is_not_as_announced_is_an_error_and_no_abort() -> None:
    with pytest.raises(RingError) as failure:
        ringsim.trace(grow_or_fail, world_size=2, timeout_s=5)
    assert "the activations of a boundary must be alike if all microbatches are" in str(failure.value)


def grow_or_fail() -> None:
    found = grow()
    if found != "nothing":
        raise MessageMismatch(found)


def test_a_schedule_for_another_ring_is_refused() -> None:
    rows = tuple(tuple(map(parse_action, row.split())) for row in ("0F0 0B0", "1F0 1B0"))
    with pytest.raises(RingError, match=r"must be for 1 ranks and 1 microbatches, got one \(mine\) for 2 and 1"):
        train_step_pipeline(
            torch.nn.Sequential(torch.nn.Linear(1, 1)),
            [torch.ones(1, 1)],
            [torch.zeros(1, dtype=torch.int64)],
            schedule=Schedule("mine", 1, (0, 1), rows),
        )


# -- a pipeline written by hand


def by_hand(middle_stage_source: str) -> float:
    """AFAB with the four functions: the first stage, the one of the document, and the last; returns the worst gradient's difference."""
    from pipeline_cases import Case, cross_entropy, difference, gradients, make_microbatches, make_model, single_process

    ring = ringsim.current_ring()
    reference, model = make_model(Case()), make_model(Case())
    inputs, targets = make_microbatches(Case())
    single_process(reference, inputs, targets)
    stage = build_stages(model, partition_model(model, 3))[ring.rank]
    if ring.rank == 0:
        outputs = [stage(tokens) for tokens in inputs]
        for index, y in enumerate(outputs):
            send_activation(y, index)
        for index, y in enumerate(outputs):
            backward_stage(inputs[index], y, recv_gradient(index))
    elif ring.rank == 1:
        scope: dict[str, Any] = {}
        exec(middle_stage_source, scope)
        scope["middle_stage"](stage, len(inputs))
    else:
        kept = []
        for index, target in enumerate(targets):
            x = recv_activation(index)
            kept.append((x, cross_entropy(forward_stage(stage, x), target) / len(inputs)))
        for index, (x, loss) in enumerate(kept):
            grad = backward_stage(x, loss, None)
            assert grad is not None
            send_gradient(grad, index)
    return max(difference(grad, gradients(reference)[name]) for name, grad in gradients(model).items())


def test_the_stage_of_the_document_works() -> None:
    document = (Path(__file__).parent.parent.parent / "docs" / "pipeline.md").read_text()
    (source,) = [block.partition("\n```")[0] for block in document.split("```python\n") if "def middle_stage" in block]
    assert max(ringsim.trace(by_hand, world_size=3, args=(source,)).results) < 1e-10
