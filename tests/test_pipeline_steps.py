"""The passes of one stage: leaves, halves, headers; no ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ringsim.errors import ArgumentError, MessageMismatch
from ringsim.pipeline.messages import HEADER_SIZE, Header, Payload
from ringsim.pipeline.stage import backward_input, backward_stage, backward_weight, forward_stage


def make_stages() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    return (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double(),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double(),
    )


def reference() -> list[torch.Tensor]:
    first, second = make_stages()
    second(first(torch.ones(5, 3).double())).square().mean().backward()
    return [parameter.grad for stage in (first, second) for parameter in stage.parameters()]


@pytest.mark.parametrize("split", [False, True])
def test_two_stages_by_hand_equal_one_model(split: bool) -> None:
    first, second = make_stages()
    y = first(torch.ones(5, 3).double())
    x = y.detach().clone()  # as if it had been received
    loss = forward_stage(lambda x: second(x).square().mean(), x)
    if split:
        grad = backward_input(x, loss, None)
        assert all(parameter.grad is None for parameter in second.parameters())
        backward_weight(loss, None, second.parameters())
    else:
        grad = backward_stage(x, loss, None)
    backward_stage(torch.ones(5, 3), y, grad)
    mine = [parameter.grad for stage in (first, second) for parameter in stage.parameters()]
    torch.testing.assert_close(mine, reference(), rtol=1e-12, atol=0)


def test_token_ids_have_no_gradient() -> None:
    embedding = nn.Embedding(4, 2)
    x = torch.tensor([1, 3])
    y = forward_stage(embedding, x)
    assert backward_stage(x, y, torch.ones(2, 2)) is None
    assert embedding.weight.grad.tolist() == [[0, 0], [1, 1], [0, 0], [1, 1]]


def test_a_stage_without_layers_passes_the_gradient_on() -> None:
    x = torch.ones(2)
    y = forward_stage(lambda x: x, x)
    assert backward_stage(x, y, torch.tensor([5.0, 7.0])).tolist() == [5, 7]


def test_a_frozen_stage_still_gives_the_gradient_of_its_input() -> None:
    layer = nn.Linear(2, 1, bias=False).requires_grad_(False)
    x = torch.ones(1, 2)
    y = forward_stage(layer, x)
    assert backward_input(x, y, torch.ones(1, 1)).tolist() == layer.weight.tolist()
    backward_weight(y, torch.ones(1, 1), layer.parameters())
    assert layer.weight.grad is None


def test_what_autograd_has_recorded_is_no_input() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(ArgumentError, match=r"x must be a leaf of autograd's graph, got the result of MulBackward0\. .*x\.detach\(\)"):
        forward_stage(nn.Identity(), x)


# -- headers

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]


@given(
    st.sampled_from(["greeting", "activation", "gradient"]),
    st.integers(0, 2**40),
    st.lists(st.integers(0, 2**40), max_size=8),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_header_survives_the_wire(
    kind: str, microbatch: int, shape: list[int], dtype: torch.dtype, has_data: bool, alike: bool, digest: int
) -> None:
    header = Header(kind, microbatch, Payload(tuple(shape), dtype, has_data), alike, digest)
    packed = header.pack()
    assert (packed.dtype, tuple(packed.shape)) == (torch.int64, (HEADER_SIZE,))
    assert Header.unpack(packed) == header


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=HEADER_SIZE, max_size=HEADER_SIZE))
def test_what_is_no_header_is_refused(numbers: list[int]) -> None:
    with pytest.raises(MessageMismatch, match="a message must begin with a header"):
        Header.unpack(torch.tensor(numbers))


@pytest.mark.parametrize("payload", [Payload((1,) * 9, torch.float32), Payload((1,), torch.quint8)])
def test_what_no_header_can_say_is_refused(payload: Payload) -> None:
    with pytest.raises(ArgumentError, match="a message must have at most 8 dimensions and one of float32"):
        Header("activation", 0, payload).pack()
