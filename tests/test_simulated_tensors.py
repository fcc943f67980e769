"""Tensors of all kinds go from one simulated rank to another, one after the other on the same way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ringsim
from ringsim import comm as dist
from ringsim.errors import RingError
from ringsim.simulator.api import simulate
from ringsim.simulator.matching import Message

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)


def of_all_kinds() -> list[torch.Tensor]:
    """Returns tensors that neighbours in the list differ from in dtype, shape, strides or place."""
    numbers = torch.arange(24.0)
    return [
        *(numbers[:6], numbers[6:12], numbers[1:7], numbers[:6].view(2, 3), numbers[:6].view(3, 2)),
        *(numbers.view(4, 6)[:, :3], numbers.view(4, 6).t(), numbers[3:4].expand(6), numbers[::2]),
        *(numbers[:6].double(), numbers[:6].to(torch.bfloat16), numbers[:6] > 2, numbers[:6].int()),
        *(torch.complex(numbers, -numbers).conj(), torch.complex(numbers, -numbers), torch.complex(numbers, -numbers).conj().imag),
        *(numbers[5], numbers[5:6], numbers[:0], torch.nn.Parameter(numbers[:6] + 1), numbers[:6] * 2),
    ]


def exchange(times: int) -> list[Any]:
    """Rank 0 sends all of them, and rank 1 says what has come: into memory that lies as the sender's, and into columns of a matrix."""
    if dist.get_rank() == 0:
        for _ in range(times):
            for tensor in of_all_kinds():
                dist.send(tensor, 1)
        return []
    come = []
    for turn in range(times):
        for tensor in of_all_kinds():
            if turn % 2:
                target = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)[..., 1]
            else:
                target = torch.zeros(tensor.shape, dtype=tensor.dtype)
            dist.recv(target, 0)
            come.append(target)
    return come


@pytest.mark.parametrize("semantics", ["rendezvous", "buffered", "grouped"])
def test_each_kind_arrives(semantics: str) -> None:
    come = simulate(exchange, world_size=2, args=(3,), link=LINK, semantics=semantics).results[1]
    sent = [tensor.detach() for tensor in of_all_kinds()] * 3
    assert [tensor.dtype for tensor in come] == [tensor.dtype for tensor in sent]
    assert all(torch.equal(one, other) for one, other in zip(come, sent, strict=True))


def without_and_with_data() -> list[float]:
    """Sizes alone travel first, then data, on the same way."""
    here = []
    for device in ("meta", "cpu", "meta", "cpu"):
        tensor = torch.full((4,), 3.0, device=device)
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
        else:
            target = torch.zeros(4, device=device)
            dist.recv(target, 0)
            here += [] if device == "meta" else target.tolist()
    return here


def test_tensors_without_data_and_with_data_share_a_way() -> None:
    assert simulate(without_and_with_data, world_size=2, link=LINK).results[1] == [3.0] * 8


def changed_in_flight(change: str, who: int) -> list[float]:
    """The tensor of one side changes while it waits for the other side, which comes later. Each side has sent, or received, before."""
    rank = dist.get_rank()
    tensor = torch.arange(4.0).view(2, 2) if rank == 0 else torch.zeros(2, 2)
    for turn in range(2):
        if rank != who:
            ringsim.compute(1.0)
        handle = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
        assert handle is not None
        if turn and rank == who:
            if change == "transposed":
                tensor.t_()
            elif change == "smaller":
                tensor.resize_(1, 2)
            else:
                tensor.set_(torch.full((2, 2), 7.0))
        handle.wait()
    return tensor.flatten().tolist()


@pytest.mark.parametrize(
    ("change", "who", "expected"),
    [
        ("transposed", 0, [0.0, 2.0, 1.0, 3.0]),
        ("transposed", 1, [0.0, 1.0, 2.0, 3.0]),
        ("other memory", 0, [7.0, 7.0, 7.0, 7.0]),
        ("other memory", 1, [0.0, 1.0, 2.0, 3.0]),
    ],
)
def test_a_tensor_counts_as_it_is_when_its_message_moves(change: str, who: int, expected: list[float]) -> None:
    assert simulate(changed_in_flight, world_size=2, args=(change, who), link=LINK).results[1] == expected


@pytest.mark.parametrize("who", [0, 1])
def test_a_tensor_that_has_become_too_small_is_refused(who: int) -> None:
    with pytest.raises(RingError, match="must keep its size until"):
        simulate(changed_in_flight, world_size=2, args=("smaller", who), link=LINK)


def pass_on(make: Any) -> list[float]:
    """Rank 0 sends what is made, of which nobody may read more than is there."""
    if dist.get_rank() == 0:
        dist.send(make(), 1)
        return []
    target = torch.ones(4)
    dist.recv(target, 0)
    return target.tolist()


def fake() -> torch.Tensor:
    return FakeTensorMode().from_tensor(torch.ones(4))


def negated() -> torch.Tensor:
    return torch._neg_view(torch.full((4,), 2.0))


def cut() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(4)
    return tensor


@pytest.mark.parametrize("semantics", ["rendezvous", "buffered", "grouped"])
def test_views_and_zero_tensors_arrive_as_their_values(semantics: str) -> None:
    def zeros() -> torch.Tensor:
        return torch._efficientzerotensor(4)

    for make, expected in ((negated, -2.0), (zeros, 0.0)):
        assert simulate(pass_on, world_size=2, args=(make,), link=LINK, semantics=semantics).results[1] == [expected] * 4


@pytest.mark.parametrize("semantics", ["rendezvous", "buffered", "grouped"])
@pytest.mark.parametrize(("make", "words"), [(fake, "FakeTensor"), (cut, "storage of 4 bytes for 16")])
def test_what_torch_cannot_copy_is_refused(make: Any, words: str, semantics: str) -> None:
    with pytest.raises(RingError, match=words):
        simulate(pass_on, world_size=2, args=(make,), link=LINK, semantics=semantics)


def cut_in_flight(who: int, collective: bool) -> None:
    """The storage of one side is resized while its message is under way."""
    rank, tensor = dist.get_rank(), torch.ones(1 << 16)
    if rank != who:
        ringsim.compute(1.0)
    if collective:
        handle = dist.all_reduce(tensor, async_op=True)
    else:
        handle = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    assert handle is not None
    if rank == who:
        tensor.untyped_storage().resize_(0)
    handle.wait()


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("collective", [False, True])
def test_a_storage_that_is_resized_under_way_is_refused(who: int, collective: bool) -> None:
    with pytest.raises(RingError, match="must keep its memory until"):
        simulate(cut_in_flight, world_size=2, args=(who, collective), link=LINK)


def test_a_handle_that_was_never_begun_raises() -> None:
    with pytest.raises(AttributeError):
        Message.__new__(Message).wait()
