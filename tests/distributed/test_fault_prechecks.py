"""Mistakes that plain Gloo answers with a crash, garbage or silence: here an error at the line that makes them, and a mark in the trace."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringsim
from ringsim.errors import ArgumentError, MessageMismatch, PeerExited, RingError
from ringsim.traces.events import ERROR, MARK, OP_NAMES, read_notice
from ringsim.traces.value import Trace

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("nothing_left_behind")]
LIMIT_S = 40  # nothing here comes near it


def rank_of_ring() -> int:
    return ringsim.current_ring().rank


def exchange(sent: Callable[[], torch.Tensor], received: Callable[[], torch.Tensor]) -> None:
    """Rank 0 sends to rank 1; 2 looks on."""
    if rank_of_ring() == 0:
        dist.send(sent(), 1, tag=7)
    elif rank_of_ring() == 1:
        dist.recv(received(), 0, tag=7)


# What the sender has, what the receiver has, and in what they disagree.
MISMATCHES: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor], str]] = {
    "recv smaller": (lambda: torch.zeros(8), lambda: torch.zeros(4), "size"),
    "recv larger": (lambda: torch.zeros(4), lambda: torch.zeros(8), "size"),
    "shape turned": (lambda: torch.zeros(2, 3), lambda: torch.zeros(3, 2), "shape"),
    "float as int": (lambda: torch.zeros(4), lambda: torch.zeros(4, dtype=torch.int32), "dtype"),
    "half as bfloat16": (lambda: torch.zeros(4).half(), lambda: torch.zeros(4, dtype=torch.bfloat16), "dtype"),
    "float as double": (lambda: torch.zeros(4), lambda: torch.zeros(4, dtype=torch.float64), "size"),
    "nothing for something": (lambda: torch.zeros(0), lambda: torch.zeros(4), "size"),
    "large": (lambda: torch.zeros(1 << 20), lambda: torch.zeros(1 << 19), "size"),
}


@pytest.mark.parametrize("name", list(MISMATCHES))
def test_two_sides_that_disagree_raise_before_the_message(name: str) -> None:
    sent, received, what = MISMATCHES[name]
    trace, text = fail(MessageMismatch, exchange, sent, received)
    assert f"the two sides of a message must agree on its {what}, got " in text
    assert "tag 7, group world" in text
    assert text.count("Traceback") == 1
    kind, mark = the_mark(trace)
    assert kind == "message_mismatch"
    assert mark["tag"] == 7
    assert {mark["rank"], mark["peer"]} == {0, 1}


def test_whoever_catches_a_mismatch_is_not_told_that_nobody_tried() -> None:
    def worker() -> None:
        if rank_of_ring() == 0:
            sent: Any = dist.isend(torch.zeros(4), 1, tag=7)
            dist.send(torch.zeros(1), 1)
            sent.wait()
        else:
            dist.recv(torch.zeros(1), 0)
            with contextlib.suppress(MessageMismatch):
                dist.recv(torch.zeros(8), 0, tag=7)

    with pytest.raises(PeerExited) as caught:
        ringsim.trace(worker, world_size=2, limit_s=LIMIT_S)
    assert re.search(r"Rank 1 tried: its recv from 0 \(.*\) at .* raised an error, so it was not posted", str(caught.value))
    assert "add the missing" not in str(caught.value)


def test_of_many_messages_the_one_that_disagrees_is_found() -> None:
    def worker() -> None:
        ring = ringsim.current_ring()
        for index in range(600):  # more than a part has room for at first
            size = 4 if index < 555 or ring.rank else 5
            sent = dist.isend(torch.zeros(size), ring.succ, group=ring.succ_group)
            dist.recv(torch.zeros(4), ring.pred, group=ring.pred_group)
            sent.wait()  # type: ignore[union-attr]

    trace, text = fail(MessageMismatch, worker)
    assert "float32[5] (20 bytes)" in text
    assert len(trace.messages) >= 3 * 555


def test_swapped_messages_of_different_sizes_are_found() -> None:
    def worker() -> None:
        small, large = torch.zeros(4), torch.zeros(8)
        if rank_of_ring() == 0:
            dist.isend(small, 1).wait()  # type: ignore[union-attr]
            dist.isend(large, 1).wait()  # type: ignore[union-attr]
        elif rank_of_ring() == 1:
            dist.irecv(large, 0).wait()  # type: ignore[union-attr]
            dist.irecv(small, 0).wait()  # type: ignore[union-attr]

    assert "on its size" in fail(MessageMismatch, worker)[1]


def test_whoever_catches_a_mismatch_may_try_again() -> None:
    def worker() -> Any:
        store, received = dist.distributed_c10d._get_default_store(), torch.zeros(4)
        if rank_of_ring() == 0:
            work = dist.isend(torch.arange(4.0), 1)
            store.set("posted", "")
            work.wait()  # type: ignore[union-attr]
            return None
        store.wait(["posted"])
        try:
            dist.recv(torch.zeros(2), 0)
        except MessageMismatch:
            dist.recv(received, 0)
        return received.tolist()

    assert ringsim.trace(worker, world_size=2, limit_s=LIMIT_S).results[1] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("waits", ["send", "all_reduce"])
def test_whoever_posted_first_hears_why_its_wait_broke(waits: str, tmp_path: Path) -> None:
    """It saw "Connection closed by peer" alone: the mismatch is seen by whoever posts second."""

    def worker() -> None:
        store = dist.distributed_c10d._get_default_store()
        if rank_of_ring() == 1:
            store.wait(["posted"])
            dist.recv(torch.zeros(5), 0) if waits == "send" else dist.all_reduce(torch.zeros(5))
        try:
            if waits == "send":
                work = dist.isend(torch.zeros(4), 1)
            else:
                work = dist.all_reduce(torch.zeros(4), async_op=True)
            store.set("posted", "")
            work.wait()  # type: ignore[union-attr]
        except MessageMismatch as error:
            print(f"heard: {error}")
            raise

    with pytest.raises(MessageMismatch, match="must") as caught:
        ringsim.trace(worker, world_size=2, limit_s=LIMIT_S)
    error = caught.value
    assert error.trace is not None
    assert error.trace.output[0].startswith("heard: rank 1 of 2 ended with an error that explains this: ")
    assert "got float32[5] (20 bytes)" in error.trace.output[0]
    assert f"in rank 0's {'isend' if waits == 'send' else waits} at " in error.trace.output[0]
    assert str(error).count("Traceback") == 1
    assert "lost their peer because of it: rank 0" in str(error)
    error.trace.save(tmp_path / "run.ringtrace")
    for trace in (error.trace, ringsim.load(tmp_path / "run.ringtrace")):
        (finding,) = trace.explain().findings
        assert (finding.kind, finding.ranks) == ("message_mismatch" if waits == "send" else "collective_mismatch", (0, 1))
        assert finding.message.startswith("ranks 0 and 1: ")


def collective(rank_zero: Callable[[], Any], others: Callable[[], Any]) -> None:
    (others if rank_of_ring() else rank_zero)()


COLLECTIVES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "operation": (lambda: dist.all_reduce(torch.zeros(4)), lambda: dist.broadcast(torch.zeros(4), 0), "one operation"),
    "barrier": (lambda: dist.barrier(), lambda: dist.all_reduce(torch.zeros(4)), "one operation"),
    "size": (lambda: dist.all_reduce(torch.zeros(4)), lambda: dist.all_reduce(torch.zeros(8)), "one size"),
    "shape": (lambda: dist.all_reduce(torch.zeros(2, 3)), lambda: dist.all_reduce(torch.zeros(3, 2)), "one shape"),
    "dtype": (lambda: dist.all_reduce(torch.zeros(4)), lambda: dist.all_reduce(torch.zeros(4, dtype=torch.int32)), "one dtype"),
    "reduction": (
        lambda: dist.all_reduce(torch.zeros(4), op=dist.ReduceOp.MAX),
        lambda: dist.all_reduce(torch.zeros(4)),
        "one reduction",
    ),
    "root": (lambda: dist.broadcast(torch.zeros(4), 0), lambda: dist.broadcast(torch.zeros(4), 1), "one root"),
}


@pytest.mark.parametrize("name", list(COLLECTIVES))
def test_collectives_that_disagree_raise(name: str) -> None:
    zero, others, what = COLLECTIVES[name]
    trace, text = fail(MessageMismatch, collective, zero, others)
    assert f"must call the same collectives in the same order, with {what}, got " in text
    assert the_mark(trace)[0] == "collective_mismatch"


def turned(rank: int) -> torch.Tensor:
    return torch.zeros(3, 4) if rank else torch.zeros(4, 3).t()


def test_collectives_over_memory_in_another_order_raise() -> None:
    """Gloo takes the memory as it is: a tensor and its transpose would be mixed up."""
    text = fail(MessageMismatch, lambda: dist.all_reduce(turned(rank_of_ring())))[1]
    assert "with one order of elements in memory, got " in text
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
