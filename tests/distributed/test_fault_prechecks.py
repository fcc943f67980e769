"""Mistakes that plain Gloo answers with a crash, garbage or silence: here an error that names the line."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringsim
from ringsim.errors import ArgumentError, MessageMismatch, RingError
from ringsim.traces.events import ERROR, MARK, OP_NAMES, read_notice
from ringsim.traces.value import Trace

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("nothing_left_behind")]
LIMIT_S = 40  # nothing here comes near it


def rank_of_ring() -> int:
    return ringsim.current_ring().rank


def test_of_many_messages_the_one_that_disagrees_is_found() -> None:
    def worker() -> None:
        ring = ringsim.current_ring()
        for index in range(600):  # more than a part has room for at first
            size = 4 if index < 555 or ring.rank else 5
            sent = dist.isend(torch.zeros(size), ring.succ, group=ring.succ_group)
            dist.recv(torch.zeros(4), ring.pred, group=ring.pred_group)
            sent.wait()  # type: ignore[union-attr]

    trace, text = fail(MessageMismatch, worker)
    assert "rank 0 sends float32[5]" in text
    assert len(trace.messages) >= 3 * 555


def test_whoever_waits_when_sides_disagree_is_woken(tmp_path: Path) -> None:
    """Gloo takes one dtype for the other without a word; the program goes on, and one rank waits for the other."""

    def worker() -> None:
        if rank_of_ring() == 1:
            dist.recv(torch.zeros(4, dtype=torch.int32), 0)
            time.sleep(LIMIT_S)
        dist.send(torch.zeros(4), 1)
        try:
            dist.barrier()
        except MessageMismatch as error:
            print(f"heard: {error}")
            raise

    begin_s = time.monotonic()
    with pytest.raises(MessageMismatch, match="the dtype differs") as caught:
        ringsim.trace(worker, world_size=2, limit_s=LIMIT_S)
    assert time.monotonic() - begin_s < LIMIT_S / 2
    error = caught.value
    assert error.trace is not None
    assert error.trace.output[0].startswith("heard: message_mismatch: rank 0 sends float32[4]")
    error.trace.save(tmp_path / "run.ringtrace")
    for trace in (error.trace, ringsim.load(tmp_path / "run.ringtrace")):
        finding = trace.explain().findings[0]
        assert (finding.kind, finding.ranks) == ("message_mismatch", (0, 1))


def test_a_run_whose_ranks_have_all_returned_ends_with_the_mismatch() -> None:
    def worker() -> None:
        if rank_of_ring() == 0:
            dist.send(torch.ones(2, 3), 1)
        else:
            dist.recv(torch.zeros(3, 2), 0)

    with pytest.raises(MessageMismatch, match="the shape differs") as caught:
        ringsim.trace(worker, world_size=2, limit_s=LIMIT_S)
    assert caught.value.diagnosis.states == ("exited", "exited")


def turned(rank: int) -> torch.Tensor:
    return torch.zeros(3, 4) if rank else torch.zeros(4, 3).t()


def test_collectives_over_memory_in_another_order_raise() -> None:
    """Gloo takes the memory as it is: a tensor and its transpose would be mixed up."""
    text = fail(MessageMismatch, lambda: dist.all_reduce(turned(rank_of_ring())))[1]
    assert "the order of elements in memory differs" in text
    same = ringsim.trace(lambda: dist.all_reduce(torch.zeros(4, 3).t()), world_size=3, limit_s=LIMIT_S)
    assert [label for label in same.events.tables.labels if label.startswith("!")] == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: dist.all_reduce(torch.zeros(4, 4)[:, :2]),
        lambda: dist.broadcast(torch.zeros(4, 4)[:, :2], 0),
        lambda: dist.reduce(torch.zeros(4, 4)[:, :2], 0),
        lambda: dist.scatter(torch.zeros(4, 4)[:, :2], [torch.zeros(4, 2)] * 3 if rank_of_ring() == 0 else None),
        lambda: dist.scatter(torch.zeros(4, 2), [torch.zeros(4, 4)[:, :2]] * 3 if rank_of_ring() == 0 else None),
    ],
)
def test_a_collective_over_memory_with_gaps_raises(call: Callable[[], Any]) -> None:
    """Gloo 2.13 sees none: it reduces, or sends, the first elements in memory and leaves the others as they were."""
    trace, text = fail(ArgumentError, call)
    assert "must lie in memory without gaps, got one of shape (4, 2) and stride (4, 1)" in text
    assert the_mark(trace)[0] == "invalid_argument"


def test_a_collective_without_data_raises() -> None:
    trace, text = fail(ArgumentError, lambda: dist.all_reduce(torch.zeros(4, device="meta")))
    assert "must hold data, got one on the device meta" in text
    assert the_mark(trace)[0] == "invalid_argument"


def send_from_zero(tensor: Callable[[], torch.Tensor], dst: int, tag: int) -> None:
    if rank_of_ring() == 0:
        dist.isend(tensor(), dst, tag=tag)


ARGUMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "peer too large": ((lambda: torch.zeros(4), 5, 0), "a rank of its group, from 0 to 2, got 5"),
    "peer negative": ((lambda: torch.zeros(4), -1, 0), "a rank of its group, from 0 to 2, got -1"),
    "itself": ((lambda: torch.zeros(4), 0, 0), "must be another rank, got this one"),
    "tag negative": ((lambda: torch.zeros(4), 1, -1), "a tag must be an integer from 0 to 2,147,483,647, got -1"),
    "tag too large": ((lambda: torch.zeros(4), 1, 2**31), "got 2147483648"),
    "not contiguous": ((lambda: torch.zeros(2, 3).t(), 1, 0), "contiguous, got one of shape (3, 2) and stride (1, 3)"),
    "sparse": ((lambda: torch.zeros(2, 3).to_sparse(), 1, 0), "dense, got one of layout sparse_coo"),
    "meta": ((lambda: torch.zeros(4, device="meta"), 1, 0), "must hold data, got one on the device meta"),
}


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_arguments_that_cannot_be_right_raise(name: str) -> None:
    arguments, words = ARGUMENTS[name]
    trace, text = fail(ArgumentError, send_from_zero, *arguments)
    assert words in text
    assert "rank 0 of 3" in text
    assert "dist.isend(tensor(), dst, tag=tag)" in text  # the user's line
    kind, mark = the_mark(trace)
    assert kind == "invalid_argument"
    assert mark["line"] == send_from_zero.__code__.co_firstlineno + 2
    assert mark["file"] == __file__
    failed = [OP_NAMES[op] for op, status in zip(trace.events.op, trace.events.status, strict=True) if status == ERROR]
    assert failed == ["isend"]


@pytest.mark.parametrize("operation", [dist.recv, dist.irecv])
def test_a_message_on_a_group_that_one_is_not_in_raises(operation: Callable[..., Any]) -> None:
    def worker() -> None:
        group = dist.new_group([0, 2])
        if rank_of_ring() == 1:
            operation(torch.zeros(4), 0, group=group)

    trace, text = fail(ArgumentError, worker)
    assert "irecv must be called on a group that this rank is in, got one that it is not in (rank 1 of 3)" in text
    assert the_mark(trace)[0] == "invalid_argument"


def test_a_collective_outside_its_group_does_nothing_but_warn() -> None:
    """As in torch: programs call it on all ranks."""

    def worker() -> tuple[float, int]:
        group, tensor = dist.new_group([0, 2]), torch.ones(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dist.all_reduce(tensor, group=group)
        return float(tensor), sum("does not belong to the given group" in str(one.message) for one in caught)

    assert ringsim.trace(worker, world_size=3, limit_s=LIMIT_S).results == [(2.0, 0), (1.0, 1), (2.0, 0)]


def test_a_blocking_send_to_oneself_raises() -> None:
    assert "another rank, got this one" in fail(ArgumentError, lambda: dist.send(torch.zeros(4), rank_of_ring()))[1]


def test_no_check_is_made_where_none_is_wanted() -> None:
    """A receiver with room to spare: Gloo fills a part of it."""

    def worker() -> list[float]:
        received = torch.zeros(8)
        if rank_of_ring() == 0:
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(received, 0)
        return received.tolist()

    trace = ringsim.trace(worker, world_size=2, check="off", limit_s=LIMIT_S)
    assert trace.results[1] == [1.0] * 4 + [0.0] * 4


def test_the_kind_of_check_is_checked() -> None:
    with pytest.raises(ArgumentError, match="check must be one of 'basic', 'full', 'off', got 'ful'"):
        ringsim.trace(rank_of_ring, world_size=1, check="ful")


def test_the_reduction_is_in_the_trace(tmp_path: Path) -> None:
    def worker() -> None:
        dist.all_reduce(torch.zeros(4), op=dist.ReduceOp.MAX)
        dist.all_reduce(torch.zeros(4))
        dist.broadcast(torch.zeros(4), 0)

    trace = ringsim.trace(worker, world_size=2, limit_s=LIMIT_S)
    trace.save(tmp_path / "run.ringtrace")
    for one in (trace, ringsim.load(tmp_path / "run.ringtrace")):
        tables = one.events.tables
        reductions = [tables.payloads[payload].reduction for payload in one.events.select(one.events.rank == 0).payload]
        assert reductions == ["MAX", "SUM", ""]


def fail(error: type[RingError], worker: Callable[..., Any], *args: Any) -> tuple[Trace, str]:
    """Runs a worker on three ranks; returns trace and text of the error that it must end with."""
    with pytest.raises(error) as caught:
        ringsim.trace(worker, world_size=3, args=args, limit_s=LIMIT_S)
    assert caught.value.trace is not None
    return caught.value.trace, str(caught.value)


def the_mark(trace: Trace) -> tuple[str, dict[str, Any]]:
    """Returns what the first mark of a finding says, and where it stands."""
    events, tables = trace.events, trace.events.tables
    for index in range(len(events)):
        if events.kind[index] == MARK and (notice := read_notice(tables.labels[events.label[index]])):
            file = tables.files[events.file[index]]
            columns = {name: int(getattr(events, name)[index]) for name in ("rank", "peer", "tag", "line")}
            return notice[0], {**columns, "file": file}
    raise AssertionError("no finding is marked in the trace")
