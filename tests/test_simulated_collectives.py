"""Tensors of all kinds between simulated ranks, in messages and collectives.

Some tensors do not match, or share memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from simulated_runs import LINK, run
from torch._subclasses.fake_tensor import FakeTensorMode

import ringsim
from ringsim import comm as dist
from ringsim import simulate
from ringsim.errors import ArgumentError, RankFailed, RingError

SEMANTICS = pytest.mark.parametrize("semantics", ["rendezvous", "buffered", "grouped"])

place = dist.get_rank


def on_rank(rank: int, shape: tuple[int, ...] = (4,)) -> torch.Tensor:
    """Returns ones; on one rank, a tensor without data."""
    return torch.ones(shape, device="meta" if place() == rank else "cpu")


MIXED: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(on_rank(2)),
    "one of two": lambda: dist.all_reduce_coalesced([torch.ones(2), on_rank(2)]),
    "broadcast": lambda: dist.broadcast(on_rank(2), 0),
    "from meta": lambda: dist.broadcast(on_rank(0), 0),
    "reduce": lambda: dist.reduce(on_rank(2), 0),
    "inputs alone": lambda: dist.all_gather(
        [torch.zeros(4) for _ in range(3)], torch.ones(4, device="meta")
    ),
    "outputs alone": lambda: dist.all_to_all_single(torch.ones(3, device="meta"), torch.ones(3)),
    "gather": lambda: dist.gather(
        on_rank(2), [torch.zeros(4) for _ in range(3)] if place() == 1 else None, 1
    ),
    "scatter": lambda: dist.scatter(
        on_rank(2), [torch.zeros(4) for _ in range(3)] if place() == 1 else None, 1
    ),
}


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except ArgumentError as error:
        return str(error)
    return ""


def go_on_after_each() -> dict[str, tuple[str, float]]:
    """The next collective must find all ranks in step after each refused one."""
    found = {}
    for name, mixed in MIXED.items():
        total = torch.ones(1)
        said = refusal(mixed)
        dist.all_reduce(total)
        found[name] = said, total.item()
    return found


def test_tensors_with_and_without_data_do_not_go_together() -> None:
    trace = simulate(go_on_after_each, world_size=3, link=LINK)
    for rank, found in enumerate(trace.results):
        for name, (said, total) in found.items():
            meta = "rank 2"
            if name == "from meta":
                meta = "rank 0"
            elif "alone" in name:
                meta = "ranks 0, 1 and 2"
            assert f"meta tensors on {meta}, and tensors with data on rank" in said, name
            assert f"(rank {rank} of 3, " in said
            assert total == 3
    assert trace.to_pandas().status.tolist() == ["error", "ok"] * 3 * len(MIXED)


def average_bytes(device: str) -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.uint8, device=device), dist.ReduceOp.AVG)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_refused_reduction_ends_the_run_that_does_not_catch_it(size: int, device: str) -> None:
    with pytest.raises(RankFailed, match="does not support AVG for uint8: result type Float"):
        run(average_bytes, size, device)


def refuse_and_wait() -> list[Any]:
    """A handle raises in its wait, as on Gloo; no data moves."""
    tensor = torch.full((2,), float(place()))
    handle = dist.all_reduce(tensor, dist.ReduceOp.BOR, async_op=True)
    for kind in (RuntimeError, ValueError):
        with pytest.raises(kind):
            handle.wait()
    return [handle.is_completed(), *tensor.tolist()]


def test_the_handle_of_a_refused_reduction_raises_in_its_wait() -> None:
    assert run(refuse_and_wait, 2) == [[True, 0.0, 0.0], [True, 1.0, 1.0]]


def write_into_one_place() -> str:
    outputs = [torch.ones(1).expand(4) for _ in range(3)]
    return refusal(lambda: dist.all_gather(outputs, torch.ones(4)))


def test_what_torch_cannot_write_is_an_error_on_all_ranks() -> None:
    assert all("torch cannot write" in said for said in run(write_into_one_place))


# the calls of ranks with three numbers, and their results
SHARING: list[tuple[Callable[[torch.Tensor, list[torch.Tensor]], Any], list[list[int]]]] = [
    (
        lambda mine, parts: dist.all_gather(parts[::-1], parts[place()]),
        [[22, 11, 0]] * 3,
    ),
    (
        lambda mine, parts: dist.scatter(mine[1:2], parts if place() == 0 else None, 0),
        [[0, 0, 2], [10, 1, 12], [20, 2, 22]],
    ),
    (
        lambda mine, parts: dist.gather(mine[:1], parts[::-1] if place() == 0 else None, 0),
        [[20, 10, 0], [10, 11, 12], [20, 21, 22]],
    ),
    (
        lambda mine, parts: dist.reduce_scatter(parts[(place() + 1) % 3], parts),
        [[0, 30, 2], [10, 11, 33], [36, 21, 22]],
    ),
]


def share() -> list[list[float]]:
    found = []
    for call, _ in SHARING:
        mine = torch.arange(3.0) + 10 * place()
        call(mine, list(mine.split(1)))
        found.append(mine.tolist())
    return found


def test_outputs_may_share_memory_with_inputs() -> None:
    """Inputs count as read before any output is written."""
    for rank, found in enumerate(run(share)):
        assert found == [expected[rank] for _, expected in SHARING]


def send_to_meta(first: int) -> tuple[str, float]:
    """A message whose receiver has no data, between ranks that continue after the error."""
    if place() != first:
        ringsim.compute(0.001)
    if place() == 0:
        said = refusal(lambda: dist.send(torch.ones(4), 1))
    else:
        said = refusal(lambda: dist.recv(torch.ones(4, device="meta"), 0))
    total = torch.ones(1)
    dist.all_reduce(total)
    return said, total.item()


@pytest.mark.parametrize("first", [0, 1])
def test_both_sides_of_a_message_without_data_are_told(first: int) -> None:
    trace = simulate(send_to_meta, world_size=2, args=(first,), link=LINK)
    for said, total in trace.results:
        assert "data" in said
        assert total == 2
    assert trace.to_pandas().query("op != 'span'").status.tolist() == ["error", "ok"] * 2


def of_all_kinds() -> list[torch.Tensor]:
    """Returns tensors of which neighbors in the list differ in dtype, shape or memory."""
    numbers = torch.arange(24.0)
    six = numbers[:6]
    return [
        *(six, numbers[6:12], numbers[1:7], six.view(2, 3), six.view(3, 2)),
        *(six.double(), six.to(torch.bfloat16), six > 2, six.int()),
        torch.complex(numbers, numbers),
        *(numbers[5], numbers[5:6], numbers[:0], torch.nn.Parameter(six + 1), six * 2),
        numbers[:4].to("meta"),  # without data, only sizes share the code with data
    ]


def send_all_kinds(times: int) -> list[Any]:
    """Rank 0 sends; rank 1 receives into separate memory, and into a row of a matrix."""
    come = []
    for turn in range(times):
        for tensor in of_all_kinds():
            if place() == 0:
                dist.send(tensor, 1)
                continue
            rows = torch.zeros(2, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
            come.append(rows[1] if turn % 2 else torch.zeros_like(rows[1]))
            dist.recv(come[-1], 0)
    return come


@SEMANTICS
def test_each_kind_arrives(semantics: str) -> None:
    come = run(send_all_kinds, 2, 3, semantics=semantics)[1]
    for one, other in zip(come, [tensor.detach() for tensor in of_all_kinds()] * 3, strict=True):
        assert (one.dtype, one.is_meta) == (other.dtype, other.is_meta)
        assert one.is_meta or torch.equal(one, other)


def check(expected: list[float] | str, worker: Callable[..., Any], *args: Any) -> None:
    """Checks what arrives at rank 1, or the error."""
    if isinstance(expected, str):
        with pytest.raises(RingError, match=expected):
            run(worker, 2, *args)
    else:
        assert run(worker, 2, *args)[1] == expected


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "transposed": lambda tensor: tensor.t_(),
    "elsewhere": lambda tensor: tensor.set_(torch.full((2, 2), 7.0)),
    "smaller": lambda tensor: tensor.resize_(1, 2),
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
}


def changed_in_flight(change: str, who: int, collective: bool) -> list[float]:
    """The tensor of one side changes while it waits for the other side, which comes later.

    Each side has sent or received before.
    """
    tensor = torch.zeros(2, 2) if place() else torch.arange(4.0).view(2, 2)
    for turn in range(2):
        if place() != who:
            ringsim.compute(1.0)
        if collective:
            handle: Any = dist.all_reduce(tensor, async_op=True)
        else:
            handle = dist.irecv(tensor, 0) if place() else dist.isend(tensor, 1)
        if turn and place() == who:
            CHANGES[change](tensor)
        handle.wait()
    return tensor.flatten().tolist()


@pytest.mark.parametrize(
    ("change", "who", "collective", "expected"),
    [
        ("transposed", 0, False, [0.0, 2.0, 1.0, 3.0]),
        ("transposed", 1, False, [0.0, 1.0, 2.0, 3.0]),
        ("elsewhere", 0, False, [7.0, 7.0, 7.0, 7.0]),
        ("elsewhere", 1, False, [0.0, 1.0, 2.0, 3.0]),
        ("smaller", 0, False, "changed its size before"),
        ("smaller", 1, False, "changed its size before"),
        ("freed", 0, False, "lost its memory before"),
        ("freed", 1, False, "lost its memory before"),
        ("freed", 0, True, "lost its memory before"),
        ("freed", 1, True, "lost its memory before"),
    ],
)
def test_a_tensor_counts_as_it_is_when_its_message_moves(
    change: str, who: int, collective: bool, expected: list[float] | str
) -> None:
    check(expected, changed_in_flight, change, who, collective)


def cut() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(4)
    return tensor


def pass_on(make: Callable[[], torch.Tensor]) -> list[float]:
    target = torch.ones(4)
    if place() == 0:
        dist.send(make(), 1)
    else:
        dist.recv(target, 0)
    return target.tolist()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch._neg_view(torch.full((4,), 2.0)), [-2.0] * 4),
        (lambda: torch._efficientzerotensor(4), [0.0] * 4),
        (lambda: FakeTensorMode().from_tensor(torch.ones(4)), "FakeTensor"),
        (cut, "storage has 4 bytes, but the tensor needs 16"),
    ],
)
def test_a_view_arrives_as_its_values_and_what_torch_cannot_copy_is_refused(
    make: Callable[[], torch.Tensor], expected: list[float] | str
) -> None:
    check(expected, pass_on, make)


def hold_the_memory_of_numpy() -> list[float]:
    """NumPy must not resize the memory of a tensor whose message is in flight."""
    array = np.full(1 << 16, 7.0, dtype=np.float32)
    post, peer = (dist.irecv, 0) if place() else (dist.isend, 1)
    handle: Any = post(torch.from_numpy(array), peer)
    with pytest.raises(ValueError, match="cannot resize an array"):
        array.resize(1)
    handle.wait()
    return array[[0, -1]].tolist()


@pytest.mark.parametrize("semantics", ["rendezvous", "grouped"])
def test_memory_of_numpy_is_held_until_its_message_is_done(semantics: str) -> None:
    assert run(hold_the_memory_of_numpy, 2, semantics=semantics) == [[7.0, 7.0]] * 2


OTHERS = [
    torch.ones(3, dtype=torch.int64),
    torch.ones(2, 2),
    torch.ones(2, 3).t(),
    torch.nn.Parameter(torch.ones(3)),
    torch.ones(3),
]


def call_again(others: list[torch.Tensor]) -> list[Any]:
    """Repeats calls of the rank with other tensors, or with other arguments."""
    rank, group, found = place(), dist.new_group(), list[Any]()
    for value in (1.0, 10.0):
        mine, whole, part = torch.full((3,), value * rank), torch.zeros(9), torch.zeros(1)
        dist.all_gather_into_tensor(whole, mine, group)
        dist.reduce_scatter_tensor(part, mine + torch.arange(3.0), group=group)
        dist.all_reduce(mine, group=group)
        found += [mine.tolist(), whole.tolist(), part.tolist()]
    for tensor in others:
        dist.all_reduce(tensor, group=group)
        found.append(tensor.flatten().tolist())
    largest = torch.full((3,), float(rank))
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(largest, group=group)
    return [*found, largest.tolist()]


def test_a_call_like_an_earlier_one_is_read_as_that_was() -> None:
    trace = simulate(call_again, world_size=3, args=(OTHERS,), link=LINK)
    for rank, found in enumerate(trace.results):
        assert found == [
            *([3.0] * 3, [0.0] * 3 + [1.0] * 3 + [2.0] * 3, [3.0 + 3 * rank]),
            *([30.0] * 3, [0.0] * 3 + [10.0] * 3 + [20.0] * 3, [30.0 + 3 * rank]),
            *([3] * 3, [3.0] * 4, [3.0] * 6, [3.0] * 3, [3.0] * 3),
            [6.0] * 3,
        ]
    frame = trace.to_pandas().query("rank == 0 and op == 'all_reduce'")
    assert frame.dtype.tolist()[2:] == ["int64"] + ["float32"] * 6
    assert frame["shape"].tolist()[2:] == ["3", "2x2", "3x2", "3", "3", "3", "3"]
