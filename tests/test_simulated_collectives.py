"""Tensors of all kinds between simulated ranks, in messages and collectives: some do not fit together, or share memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ringsim
from ringsim import comm as dist
from ringsim.errors import ArgumentError, RingError
from ringsim.simulator.api import simulate
from ringsim.simulator.collectives import ReductionRefused
from ringsim.simulator.matching import Message

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)


def place() -> int:
    return ringsim.current_ring().rank


def on_rank(rank: int, shape: tuple[int, ...] = (4,)) -> torch.Tensor:
    """Ones; on one rank a tensor without data."""
    return torch.ones(shape, device="meta" if place() == rank else "cpu")


MIXED: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(on_rank(2)),
    "one of two": lambda: dist.all_reduce_coalesced([torch.ones(2), on_rank(2)]),
    "broadcast": lambda: dist.broadcast(on_rank(2), 0),
    "from meta": lambda: dist.broadcast(on_rank(0), 0),
    "reduce": lambda: dist.reduce(on_rank(2), 0),
    "inputs alone": lambda: dist.all_gather([torch.zeros(4) for _ in range(3)], torch.ones(4, device="meta")),
    "outputs alone": lambda: dist.all_to_all_single(torch.ones(3, device="meta"), torch.ones(3)),
    "gather": lambda: dist.gather(on_rank(2), [torch.zeros(4) for _ in range(3)] if place() == 1 else None, 1),
    "scatter": lambda: dist.scatter(on_rank(2), [torch.zeros(4) for _ in range(3)] if place() == 1 else None, 1),
}


def go_on_after(name: str) -> tuple[str, str]:
    """Catches what a collective raises; the next one must find all ranks in step."""
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
    meta, others = {"from meta": ("rank 0", "ranks 1 and 2")}.get(name, ("rank 2", "ranks 0, 1 and 2"))
    if "alone" in name:
        meta = "ranks 0, 1 and 2"
    for rank, (said, total) in enumerate(trace.results):
        rule = "the tensors of a collective must have data on all ranks, or on none"
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
    with pytest.raises(ringsim.errors.RankFailed, match="torch has for uint8, got AVG: result type Float can't be cast"):
        simulate(average_bytes, world_size=size, args=(device,), link=LINK)


def refuse_and_wait() -> list[str]:
    """Two of a kind: a handle says so in its wait, as on Gloo; nothing has moved."""
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
    trace = simulate(refuse_and_wait, world_size=2, link=LINK)
    assert trace.results == [[ReductionRefused.__name__] * 2 + ["True", "True"]] * 2


def write_into_one_place() -> str:
    try:
        dist.all_reduce(torch.ones(1).expand(4))
    except ArgumentError as error:
        return str(error).partition(":")[0]
    return "written"


def test_what_torch_cannot_write_is_an_error_on_all_ranks() -> None:
    trace = simulate(write_into_one_place, world_size=3, link=LINK)
    assert trace.results == ["the tensors of a collective must be some that torch can write into, got"] * 3


def gather_into_own_parts() -> list[list[float]]:
    mine = torch.arange(6.0).reshape(3, 2) + 10 * place()
    dist.all_gather([mine[2], mine[1], mine[0]], mine[place()])
    return mine.tolist()


def scatter_own_parts() -> list[float]:
    mine = torch.arange(3.0) + 10 * place()
    dist.scatter(mine[1:2], list(mine.split(1)) if place() == 0 else None, 0)
    return mine.tolist()


def gather_own_parts() -> list[float]:
    mine = torch.arange(3.0) + 10 * place()
    dist.gather(mine[:1], list(mine.split(1))[::-1] if place() == 0 else None, 0)
    return mine.tolist()


def reduce_into_next_part() -> list[float]:
    mine = torch.arange(3.0) + 10 * place()
    parts = list(mine.split(1))
    dist.reduce_scatter(parts[(place() + 1) % 3], parts)
    return mine.tolist()


@pytest.mark.parametrize(
    ("worker", "results"),
    [
        (gather_into_own_parts, [[[24, 25], [12, 13], [0, 1]]] * 3),
        (scatter_own_parts, [[0, 0, 2], [10, 1, 12], [20, 2, 22]]),
        (gather_own_parts, [[20, 10, 0], [10, 11, 12], [20, 21, 22]]),
        (reduce_into_next_part, [[0, 30, 2], [10, 11, 33], [36, 21, 22]]),
    ],
)
def test_outputs_may_share_memory_with_inputs(worker: Callable[[], Any], results: Any) -> None:
    """As if all had been read before anything was written."""
    assert simulate(worker, world_size=3, link=LINK).results == results


def ask_until_done(what: str, waits: bool) -> list[float]:
    """Rank 1 asks until its receive, or its collective, is done."""
    tensor = torch.full((2,), float(place()))
    if what == "irecv" and place() == 0:
        ringsim.compute(0.01)
        dist.send(tensor, 1)
        return tensor.tolist()
    handle: Any = dist.irecv(tensor, 0) if what == "irecv" else dist.all_reduce(tensor, async_op=True)
    while not handle.is_completed():
        pass
    ringsim.compute(0.001)
    if waits:
        handle.wait()
    return tensor.tolist()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("semantics", ["rendezvous", "buffered", "grouped"])
@pytest.mark.parametrize("what", ["irecv", "all_reduce"])
def test_what_was_asked_for_until_done_is_done(what: str, semantics: str, waits: bool) -> None:
    trace = simulate(ask_until_done, world_size=2, args=(what, waits), link=ringsim.Link(1e-3, 1e-9), semantics=semantics)
    assert trace.results[1] == ([0, 0] if what == "irecv" else [1, 1])
    frame = trace.to_pandas()
    asked = frame[frame.op == what]
    done_ns = 11_000_008 if what == "irecv" else 2_000_008  # each question takes 1,000
    assert ((asked.done_ns >= done_ns) & (asked.done_ns <= done_ns + 1000)).all()
    assert asked.status.tolist() == ["ok"] * len(asked)
    assert str(trace.explain()) == "Nothing wrong was found in this run of 2 ranks."
    if what == "irecv":
        assert trace.to_pandas("messages").transfer_ns.between(1_000_000, 1_001_008).all()


def send_to_meta(first: int) -> tuple[str, float]:
    """A message whose receiver has no data: either side may be the first; both catch it, and go on."""
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
