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


def go_on_after(name: str) -> tuple[str, str]:
    """Catches the error of a collective; the next collective must find all ranks in step."""
    said = ""
    try:
        MIXED[name]()
    except ArgumentError as error:
        said = str(error)
    total = torch.ones(1)
    dist.all_reduce(total)
    return said, f"{total.item():g}"


@pytest.mark.parametrize("name", MIXED)
def test_tensors_with_and_without_data_do_not_go_together(name: str) -> None:
    trace = simulate(go_on_after, world_size=3, args=(name,), link=LINK)
    meta, others = {"from meta": ("rank 0", "ranks 1 and 2")}.get(
        name, ("rank 2", "ranks 0, 1 and 2")
    )
    if "alone" in name:
        meta = "ranks 0, 1 and 2"
    for rank, (said, total) in enumerate(trace.results):
        rule = "the tensors of a collective must have data on all ranks or on none"
        assert said.startswith(f"{rule}, got meta tensors on {meta} and others on ranks"), said
        assert others in said or "ranks 0 and 1" in said
        assert f"(rank {rank} of 3, " in said
        assert total == "3"
    assert trace.to_pandas().status.tolist() == ["error", "ok"] * 3


def average_bytes(device: str) -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.uint8, device=device), dist.ReduceOp.AVG)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_refused_reduction_ends_the_run_that_does_not_catch_it(size: int, device: str) -> None:
    with pytest.raises(
        RankFailed, match="by torch for uint8, got AVG: result type Float can't be cast"
    ):
        run(average_bytes, size, device)


def refuse_and_wait() -> list[str]:
    """Calls a collective twice: a handle raises in its wait, as on Gloo; no data moves."""
    tensor = torch.full((2,), float(place()))
    handle = dist.all_reduce(tensor, dist.ReduceOp.BOR, async_op=True)
    said = []
    for kind in (RuntimeError, ValueError):
        try:
            handle.wait()
        except kind as error:
            said.append(type(error).__name__)
    return [*said, str(handle.is_completed()), str(tensor.tolist() == [place()] * 2)]


def test_the_handle_of_a_refused_reduction_raises_in_its_wait() -> None:
    assert run(refuse_and_wait, 2) == [["Refused"] * 2 + ["True", "True"]] * 2


def write_into_one_place() -> str:
    try:
        dist.all_gather([torch.ones(1).expand(4) for _ in range(3)], torch.ones(4))
    except ArgumentError as error:
        return str(error).partition(":")[0]
    return "written"


def test_what_torch_cannot_write_is_an_error_on_all_ranks() -> None:
    assert (
        run(write_into_one_place) == ["the tensors of a collective must be writable by torch"] * 3
    )


# the calls of ranks with three numbers, and their results
SHARING: dict[str, tuple[Callable[[torch.Tensor, list[torch.Tensor]], Any], Any]] = {
    "all_gather": (
        lambda mine, parts: dist.all_gather(parts[::-1], parts[place()]),
        [[22, 11, 0]] * 3,
    ),
    "scatter": (
        lambda mine, parts: dist.scatter(mine[1:2], parts if place() == 0 else None, 0),
        [[0, 0, 2], [10, 1, 12], [20, 2, 22]],
    ),
    "gather": (
        lambda mine, parts: dist.gather(mine[:1], parts[::-1] if place() == 0 else None, 0),
        [[20, 10, 0], [10, 11, 12], [20, 21, 22]],
    ),
    "reduce_scatter": (
        lambda mine, parts: dist.reduce_scatter(parts[(place() + 1) % 3], parts),
        [[0, 30, 2], [10, 11, 33], [36, 21, 22]],
    ),
}


def share(name: str) -> list[float]:
    mine = torch.arange(3.0) + 10 * place()
    SHARING[name][0](mine, list(mine.split(1)))
    return mine.tolist()


@pytest.mark.parametrize("name", SHARING)
def test_outputs_may_share_memory_with_inputs(name: str) -> None:
    """Inputs count as read before any output is written."""
    assert run(share, 3, name) == SHARING[name][1]


def ask_until_done(what: str, waits: bool) -> list[float]:
    """Rank 1 asks until its receive, or its collective, is done."""
    tensor = torch.full((2,), float(place()))
    if what == "irecv" and place() == 0:
        ringsim.compute(0.01)
        dist.send(tensor, 1)
        return tensor.tolist()
    handle: Any = (
        dist.irecv(tensor, 0) if what == "irecv" else dist.all_reduce(tensor, async_op=True)
    )
    while not handle.is_completed():
        pass
    ringsim.compute(0.001)
    if waits:
        handle.wait()
    return tensor.tolist()


@pytest.mark.parametrize("waits", [False, True])
@SEMANTICS
@pytest.mark.parametrize("what", ["irecv", "all_reduce"])
def test_what_was_asked_for_until_done_is_done(what: str, semantics: str, waits: bool) -> None:
    trace = simulate(
        ask_until_done,
        world_size=2,
        args=(what, waits),
        link=ringsim.Link(1e-3, 1e-9),
        semantics=semantics,
    )
    assert trace.results[1] == ([0, 0] if what == "irecv" else [1, 1])
    frame = trace.to_pandas()
    asked = frame[frame.op == what]
    done_ns = 11_000_008 if what == "irecv" else 2_000_008  # each question takes 1,000
    assert ((asked.done_ns >= done_ns) & (asked.done_ns <= done_ns + 1000)).all()
    assert asked.status.tolist() == ["ok"] * len(asked)
    assert trace.explain().findings == ()
    if what == "irecv":
        assert trace.to_pandas("messages").transfer_ns.between(1_000_000, 1_001_008).all()


def send_to_meta(first: int) -> tuple[str, float]:
    """A message whose receiver has no data.

    Either side may be the first; both catch the error and continue.
    """
    if place() != first:
        ringsim.compute(0.001)
    said = ""
    try:
        if place() == 0:
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(torch.ones(4, device="meta"), 0)
    except ArgumentError as error:
        said = str(error).partition(",")[0]
    total = torch.ones(1)
    dist.all_reduce(total)
    return said, total.item()


@pytest.mark.parametrize("first", [0, 1])
def test_both_sides_of_a_message_without_data_are_told(first: int) -> None:
    trace = simulate(send_to_meta, world_size=2, args=(first,), link=LINK)
    assert trace.results == [("both sides of a message must have data", 2.0)] * 2
    assert trace.to_pandas().query("op != 'span'").status.tolist() == ["error", "ok"] * 2


def of_all_kinds() -> list[torch.Tensor]:
    """Returns tensors of which neighbors in the list differ in dtype, shape or memory."""
    numbers = torch.arange(24.0)
    return [
        *(numbers[:6], numbers[6:12], numbers[1:7], numbers[:6].view(2, 3), numbers[:6].view(3, 2)),
        *(numbers[:6].double(), numbers[:6].to(torch.bfloat16), numbers[:6] > 2, numbers[:6].int()),
        torch.complex(numbers, -numbers),
        *(
            numbers[5],
            numbers[5:6],
            numbers[:0],
            torch.nn.Parameter(numbers[:6] + 1),
            numbers[:6] * 2,
        ),
        numbers[:4].to("meta"),  # without data, only sizes share the code with data
    ]


def send_all_kinds(times: int) -> list[Any]:
    """Rank 0 sends all tensors, and rank 1 returns the received ones.

    They go into separate memory, and into a row of a matrix.
    """
    if place() == 0:
        for _ in range(times):
            for tensor in of_all_kinds():
                dist.send(tensor, 1)
        return []
    come = []
    for turn in range(times):
        for tensor in of_all_kinds():
            rows = torch.zeros(2, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
            come.append(rows[1] if turn % 2 else torch.zeros_like(rows[1]))
            dist.recv(come[-1], 0)
    return come


@SEMANTICS
def test_each_kind_arrives(semantics: str) -> None:
    come = run(send_all_kinds, 2, 3, semantics=semantics)[1]
    sent = [tensor.detach() for tensor in of_all_kinds()] * 3
    assert [tensor.dtype for tensor in come] == [tensor.dtype for tensor in sent]
    assert all(
        one.is_meta or torch.equal(one, other) for one, other in zip(come, sent, strict=True)
    )
    assert [tensor.is_meta for tensor in come] == [tensor.is_meta for tensor in sent]


def changed_in_flight(change: str, who: int) -> list[float]:
    """The tensor of one side changes while it waits for the other side, which comes later.

    Each side has sent or received before.
    """
    rank = place()
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
def test_a_tensor_counts_as_it_is_when_its_message_moves(
    change: str, who: int, expected: list[float]
) -> None:
    assert run(changed_in_flight, 2, change, who)[1] == expected


def cut() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(4)
    return tensor


# the sent tensor, and the value that arrives, or the reason for the refusal
MADE: dict[str, tuple[Callable[[], torch.Tensor], float | str]] = {
    "negated": (lambda: torch._neg_view(torch.full((4,), 2.0)), -2.0),
    "zeros": (lambda: torch._efficientzerotensor(4), 0.0),
    "fake": (lambda: FakeTensorMode().from_tensor(torch.ones(4)), "FakeTensor"),
    "cut": (cut, "storage has 4 bytes, but the tensor needs 16"),
}


def pass_on(name: str) -> list[float]:
    target = torch.ones(4)
    if place() == 0:
        dist.send(MADE[name][0](), 1)
    else:
        dist.recv(target, 0)
    return target.tolist()


@SEMANTICS
@pytest.mark.parametrize("name", MADE)
def test_views_and_zeros_arrive_as_their_values_and_what_torch_cannot_copy_is_refused(
    name: str, semantics: str
) -> None:
    expected = MADE[name][1]
    if isinstance(expected, str):
        with pytest.raises(RingError, match=expected):
            run(pass_on, 2, name, semantics=semantics)
    else:
        assert run(pass_on, 2, name, semantics=semantics)[1] == [expected] * 4


def cut_in_flight(collective: bool, who: int) -> None:
    """The storage of one side is resized while its message is in flight."""
    rank, tensor = place(), torch.ones(1 << 16)
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
@pytest.mark.parametrize(
    ("worker", "what", "words"),
    [
        (changed_in_flight, ("smaller",), "changed its size before"),
        (cut_in_flight, (False,), "lost its memory before"),
        (cut_in_flight, (True,), "lost its memory before"),
    ],
)
def test_a_tensor_that_has_become_too_small_is_refused(
    worker: Callable[..., Any], what: tuple[Any, ...], words: str, who: int
) -> None:
    with pytest.raises(RingError, match=words):
        run(worker, 2, *what, who)


def resize_behind_a_message() -> str:
    """A pending operation holds its tensor, and the tensor holds the memory of NumPy.

    So NumPy does not resize the memory.
    """
    array, rank = np.full(1 << 16, 7.0, dtype=np.float32), dist.get_rank()
    tensor = torch.from_numpy(array)
    handle = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    assert handle is not None
    del tensor
    try:
        array.resize(1)
    except ValueError as error:
        said = str(error)
    handle.wait()
    assert array.tolist() == [7.0] * (1 << 16)
    return said


@pytest.mark.parametrize("semantics", ["rendezvous", "grouped"])
def test_memory_of_numpy_is_held_until_its_message_is_done(semantics: str) -> None:
    for said in run(resize_behind_a_message, 2, semantics=semantics):
        assert said.startswith("cannot resize an array that references or is referenced")


def call_again() -> list[Any]:
    """Repeats calls of the rank with other tensors, or with other arguments."""
    rank, group, found = place(), dist.new_group(), list[Any]()
    for value in (1.0, 10.0):
        mine, whole, part = torch.full((3,), value * rank), torch.zeros(9), torch.zeros(1)
        dist.all_gather_into_tensor(whole, mine, group)
        dist.reduce_scatter_tensor(part, mine + torch.arange(3.0), group=group)
        dist.all_reduce(mine, group=group)
        found.append([mine.tolist(), whole.tolist(), part.tolist()])
    others = [
        torch.ones(3, dtype=torch.int64),
        torch.ones(2, 2),
        torch.ones(2, 3).t(),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3),
    ]
    for tensor in others:
        dist.all_reduce(tensor, group=group)
        dist.broadcast(tensor, 0, group=group)
    largest = torch.full((3,), float(rank))
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    handle = dist.all_reduce(largest, group=group, async_op=True)
    assert handle is not None
    assert handle.wait()
    return [*found, [tensor.flatten().tolist() for tensor in others], largest.tolist()]


def test_a_call_like_an_earlier_one_is_read_as_that_was() -> None:
    trace = simulate(call_again, world_size=3, link=LINK)
    for rank, (first, second, others, largest) in enumerate(trace.results):
        for scale, come in ((1.0, first), (10.0, second)):
            assert come == [
                [3 * scale] * 3,
                [0.0] * 3 + [scale] * 3 + [2 * scale] * 3,
                [3.0 * (scale + rank)],
            ]
        assert others == [[3] * 3, [3.0] * 4, [3.0] * 6, [3.0] * 3, [3.0] * 3]
        assert largest == [6.0] * 3
    frame = trace.to_pandas().query("rank == 0 and op == 'all_reduce'")
    assert list(zip(frame["dtype"], frame["shape"], strict=True))[2:] == [
        ("int64", "3"), ("float32", "2x2"), ("float32", "3x2"), ("float32", "3"), ("float32", "3"),
        ("float32", "3"), ("float32", "3"),
    ]  # fmt: skip
