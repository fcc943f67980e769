"""Collectives of simulated ranks whose tensors do not fit together, or share memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ringsim
from ringsim import comm as dist
from ringsim.errors import ArgumentError
from ringsim.simulator.api import simulate
from ringsim.simulator.collectives import ReductionRefused

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
