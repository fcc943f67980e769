"""Recording on real ranks: every way to communicate is seen, and nothing is changed."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_server import RankServer
from torch.distributed import isend

import ringsim
from ringsim.traces.events import ERROR, IN_FLIGHT, OK, OP_NAMES
from ringsim.traces.value import Trace

pytestmark = pytest.mark.timeout(90)
PATIENCE = timedelta(seconds=40)  # nothing that should work comes near it, also on two loaded cores


def join(directory: str, rank: int, size: int) -> str:
    """Joins the ranks in the default group; returns the path of the trace."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", size), rank=rank, world_size=size, timeout=PATIENCE)
    return f"{directory}/run.ringtrace"


def run(server: RankServer, function: Any, directory: Path, size: int = 2) -> tuple[Trace, list[Any]]:
    """Runs ``function(directory, rank)`` on all ranks; returns the trace that it saved, and what each rank returned."""
    ended = server.run(function, [(str(directory), rank) for rank in range(size)], limit_s=60)
    assert [(each.how, each.value) for each in ended if each.how != "returned"] == []
    return ringsim.load(directory / "run.ringtrace"), [each.value for each in ended]


def line_of(mark: str) -> int:
    """The line of this file that ends with ``# <mark>``."""
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if line.endswith("# " + mark))


def messages(trace: Trace) -> list[tuple[Any, ...]]:
    """(sender's op, receiver's op, src, dst, tag, group, payload) of each message, by time of sending."""
    events, tables, found = trace.events, trace.events.tables, trace.messages
    rows = []
    for i in sorted(range(len(found)), key=lambda i: events.post_ns[found.send[i]]):
        send, recv = found.send[i], found.recv[i]
        payload = tables.payloads[events.payload[send]]
        rows.append(
            (OP_NAMES[events.op[send]], OP_NAMES[events.op[recv]], int(found.src[i]), int(found.dst[i]), int(found.tag[i]),
             tables.groups[found.group[i]].name, (payload.dtype, payload.shape, payload.size_bytes))
        )  # fmt: skip
    return rows


def lines(trace: Trace, rank: int) -> list[int]:
    """The lines of a rank's events; all must be in this file."""
    events = trace.events.select(trace.events.rank == rank)
    assert {trace.events.tables.files[file] for file in events.file} == {__file__}
    return [int(line) for line in events.line]


def every_message(directory: str, rank: int) -> list[float]:
    """Beside those of the random programs in test_recording_property."""
    path = join(directory, rank, 2)
    pair = dist.new_group([0, 1])
    objects: list[Any] = ["x", {"y": 1}]
    two = torch.full((2,), 7.0)
    with ringsim.trace(path):
        if rank == 0:
            isend(two, 1, tag=3).wait()  # bound before
            dist.isend(two, 1, tag=6).wait()  # to anybody, by irecv
            dist.send_object_list(objects, 1)  # objects
            dist.send(two, 1, group=pair, tag=7)  # pair group
            dist.group.WORLD.send([two], 1, 8).wait()  # method
            thread = threading.Thread(target=send_from_thread, args=(two,))
            thread.start()
            thread.join()
            with torch.inference_mode():
                dist.send(two, 1, tag=10)  # inference
            return []
        came, total = torch.zeros(2), torch.zeros(2)
        dist.recv(came, 0, tag=3)  # recv
        total += came
        dist.irecv(came, tag=6).wait()  # from anybody, irecv
        received: list[Any] = [None, None]
        dist.recv_object_list(received, 0)
        assert received == objects
        dist.recv(came, 0, group=pair, tag=7)
        for tag in (8, 9, 10):
            dist.recv(came, 0, tag=tag)
            total += came
    return total.tolist()


def send_from_thread(tensor: torch.Tensor) -> None:
    dist.send(tensor, 1, tag=9)  # thread


def test_every_way_to_send_is_seen(server: RankServer, tmp_path: Path) -> None:
    trace, results = run(server, every_message, tmp_path)
    two = ("float32", (2,), 8)
    bound, anybody, sizes, objects, pair, method, thread, inference = messages(trace)
    assert bound == ("isend", "recv", 0, 1, 3, "world", two)
    assert anybody == ("isend", "irecv", 0, 1, 6, "world", two)
    assert sizes == ("send_object_list", "recv_object_list", 0, 1, 0, "world", ("int64", (2,), 16))
    assert (objects[:6], objects[6][0]) == (sizes[:6], "uint8")
    assert pair[:5] == ("send", "recv", 0, 1, 7)
    assert pair[5] not in ("world", "")
    assert method == ("isend", "recv", 0, 1, 8, "world", two)
    assert thread == ("send", "recv", 0, 1, 9, "world", two)
    assert inference == ("send", "recv", 0, 1, 10, "world", two)
    assert trace.unmatched == []
    assert (trace.events.status == OK).all()
    assert results[1] == [28.0, 28.0]
    marks = ["bound before", "to anybody, by irecv", "objects", "objects", "pair group", "method", "thread", "inference"]
    assert lines(trace, 0) == [line_of(mark) for mark in marks]
    assert lines(trace, 1)[:2] == [line_of("recv"), line_of("from anybody, irecv")]
    assert list(trace.events.select(trace.events.rank == 0).thread) == [0] * 6 + [1, 0]
    assert (trace.events.wait_ns >= trace.events.post_ns).all()
    assert (trace.events.done_ns >= trace.events.wait_ns).all()


def every_collective(directory: str, rank: int) -> None:
    path = join(directory, rank, 2)
    shard, full, pieces = torch.ones(3), torch.ones(6), [torch.ones(3), torch.ones(3)]
    with ringsim.trace(path):
        dist.broadcast(shard, 1)
        dist.all_reduce(shard)
        dist.all_reduce(shard, async_op=True).wait()
        dist.reduce(shard, 1)
        dist.all_gather(pieces, shard)
        dist.gather(shard, pieces if rank == 1 else None, 1)
        dist.scatter(shard, pieces if rank == 1 else None, 1)
        dist.all_to_all_single(full, full.clone())
        dist.barrier()
        dist.monitored_barrier()
        dist.broadcast_object_list([rank], 0)


def test_collectives_issued_from_python_are_seen(server: RankServer, tmp_path: Path) -> None:
    trace, _ = run(server, every_collective, tmp_path)
    expected = [
        *(("broadcast", 12, 1), ("all_reduce", 12, -1), ("all_reduce", 12, -1), ("reduce", 12, 1), ("all_gather", 24, -1)),
        *(("gather", 24, 1), ("scatter", 24, 1), ("all_to_all_single", 24, -1), ("barrier", 0, -1), ("monitored_barrier", 0, -1)),
        ("broadcast", 8, 0),
    ]
    for rank in range(2):
        events = trace.events.select(trace.events.rank == rank)
        found = [(OP_NAMES[op], int(size), int(peer)) for op, size, peer in zip(events.op, events.size_bytes, events.peer, strict=True)]
        assert found[:-1] == expected
        assert found[-1][0] == "broadcast"  # the objects themselves
        assert (events.done_ns >= events.wait_ns).all()
        assert (events.wait_ns >= events.post_ns).all()
        assert sorted(set(lines(trace, rank))) == sorted(set(lines(trace, 0)))
    assert trace.metadata["not_recorded"] == []


def pipeline(directory: str, rank: int) -> float | None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    path = join(directory, rank, 2)
    torch.manual_seed(rank)
    stage = PipelineStage(torch.nn.Linear(4, 4), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 3, loss_fn=torch.nn.functional.mse_loss)
    x, losses = torch.ones(6, 4), []
    with ringsim.trace(path):
        if rank == 0:
            schedule.step(x)  # step
        else:
            schedule.step(target=x, losses=losses)
    return float(sum(losses)) if losses else None


def test_a_pipeline_of_torch_is_seen(server: RankServer, tmp_path: Path) -> None:
    trace, _ = run(server, pipeline, tmp_path)
    rows = [row for row in messages(trace) if row[6][0] == "float32"]  # the others are about shapes
    activations = [row for row in rows if row[2:4] == (0, 1)]
    gradients = [row for row in rows if row[2:4] == (1, 0)]
    assert len(activations) == len(gradients) == 3
    assert {row[6] for row in rows} == {("float32", (2, 4), 32)}
    assert {row[:2] for row in rows} <= {("isend", "irecv"), ("batch_isend", "batch_irecv")}  # versions of torch differ
    assert set(lines(trace, 0)) == {line_of("step")}
    assert trace.unmatched == []


def handles(directory: str, rank: int) -> list[float]:
    path = join(directory, rank, 2)
    tensor = torch.full((4,), float(rank))
    came = torch.zeros(4)
    with ringsim.trace(path):
        if rank == 0:
            work = dist.isend(tensor, 1)
            assert work.wait() is True
            assert work.wait() is True  # would wait until the group's time-out, and break the connection
            assert work.wait(timeout=PATIENCE) is True
            dist.isend(torch.full((4,), 5.0), 1, tag=1)  # nobody keeps the handle: the message would be lost
        else:
            work = dist.irecv(came, 0)
            work.wait(PATIENCE)
            assert work.wait() is True
            work = dist.recv(came, 0, tag=1)
            work = dist.irecv(torch.zeros(4), tag=2)
        if rank == 0:
            dist.send(tensor, 1, tag=2)
        else:
            work.wait()
            work.wait()
            assert work._source_rank() == 0
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        work.wait()
    return came.tolist()


def test_handles_behave_better_never_worse(server: RankServer, tmp_path: Path) -> None:
    trace, results = run(server, handles, tmp_path)
    assert results[1] == [5.0] * 4
    assert trace.unmatched == []
    first = trace.events.select(trace.events.rank == 0)
    assert list(first.status) == [OK, IN_FLIGHT, OK, OK]  # the dropped one was never waited for


def failures(directory: str, rank: int) -> list[str]:
    path = join(directory, rank, 2)
    messages = []
    with ringsim.trace(path):
        dist.barrier()
        if rank == 0:
            late = dist.irecv(torch.zeros(4), 1)
            for go_wrong in (
                lambda: late.wait(timedelta(milliseconds=50)),
                lambda: late.wait(timedelta(milliseconds=50)),  # it did not come, and waiting again does not say that it did
                lambda: dist.isend(torch.zeros(4, 4).t()[1:], 1),
            ):
                try:
                    go_wrong()
                except (RuntimeError, ValueError) as error:
                    messages.append(f"{type(error).__name__}: {error}")
        # The connection is broken now: meet at the store, so that rank 1 does not hang up too early.
        store = dist.distributed_c10d._get_default_store()
        store.set(f"seen {rank}", "")
        store.wait(["seen 0", "seen 1"], PATIENCE)
    return messages


def test_what_fails_is_recorded_and_raised_as_it_was(server: RankServer, tmp_path: Path) -> None:
    trace, results = run(server, failures, tmp_path)
    assert "Timed out" in results[0][0]
    assert len(results[0]) == 3
    assert "contiguous" in results[0][2]
    failed = trace.events.select(trace.events.rank == 0)
    assert [(OP_NAMES[op], int(status)) for op, status in zip(failed.op, failed.status, strict=True)] == [
        *(("barrier", OK), ("irecv", ERROR), ("isend", ERROR), ("mark", OK)),  # the mark says what was wrong with it
    ]
    assert (failed.done_ns > 0).all()
