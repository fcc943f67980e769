"""``with ringsim.trace(path)`` on real ranks: nested, repeated, ended by an exception, alone, and inside a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_server import RankServer
from test_recording import join, run

import ringsim
from ringsim.errors import RingError
from ringsim.launch.recording import Recording
from ringsim.traces.events import OP_NAMES

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    with RankServer() as running:
        yield running


def test_recording_needs_a_process_group(tmp_path: Path) -> None:
    with (
        pytest.raises(RingError, match=r"must be in a process group .* Call ringsim.initialize_distributed\(\)"),
        Recording(tmp_path / "x"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def nested(directory: str, rank: int) -> list[Any]:
    join(directory, rank, 2)
    tensor = torch.zeros(2)
    counts: list[Any] = []
    with ringsim.trace(f"{directory}/run.ringtrace") as outer:
        dist.barrier()
        with ringsim.trace(f"{directory}/inner.ringtrace") as inner:
            dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        with ringsim.trace(f"{directory}/inner.ringtrace") as again:  # the same file, replaced
            dist.reduce(tensor, 0)
            dist.reduce(tensor, 0)
    send = dist.ProcessGroup.__dict__["send"]
    with ringsim.trace(f"{directory}/later.ringtrace") as later:
        dist.barrier()
    assert dist.ProcessGroup.__dict__["send"] is send
    for recording in (outer, inner, again, later):
        if rank == 0:
            counts.append([OP_NAMES[op] for op in recording.trace.events.op])
        else:
            with pytest.raises(RingError, match=r"must be asked for on rank 0 after the block.*rank 1 of 2"):
                _ = recording.trace
    return counts


def test_blocks_nest_and_repeat(server: RankServer, tmp_path: Path) -> None:
    trace, results = run(server, nested, tmp_path)
    outer, inner, again, later = results[0]
    assert outer == ["barrier", "all_reduce", "broadcast", "reduce", "reduce"] * 2
    assert inner == ["all_reduce"] * 2
    assert again == ["reduce", "reduce"] * 2
    assert later == ["barrier"] * 2
    assert ringsim.load(tmp_path / "inner.ringtrace").events.seq.tolist() == [0, 1, 0, 1]
    assert trace.events.post_ns.min() >= 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inner.ringtrace", "later.ringtrace", "run.ringtrace", "store"]


def raising(directory: str, rank: int) -> str:
    path = join(directory, rank, 2)
    try:
        with ringsim.trace(path):
            dist.barrier()
            raise KeyError("mine")
    except KeyError as error:
        return str(error)
    return ""


def test_a_block_that_raises_saves_the_trace_and_raises(server: RankServer, tmp_path: Path) -> None:
    trace, results = run(server, raising, tmp_path)
    assert results == ["'mine'", "'mine'"]
    assert [OP_NAMES[op] for op in trace.events.op] == ["barrier", "barrier"]


def different_paths(directory: str, rank: int) -> None:
    join(directory, rank, 2)
    with ringsim.trace(f"{directory}/run-{rank}.ringtrace"):
        dist.barrier()


def test_different_paths_are_one_clear_error(server: RankServer, tmp_path: Path) -> None:
    ended = server.run(different_paths, [(str(tmp_path), rank) for rank in range(2)], limit_s=60)
    assert [(each.how, each.error) for each in ended] == [("raised", "RingError"), ("returned", "")]
    assert "path of a recording must be the same on every rank" in ended[0].value


def alone(directory: str, rank: int) -> int:
    path = join(directory, rank, 1)
    with ringsim.trace(path) as recording, ringsim.span("work"):
        dist.barrier()
    return len(recording.trace.events)


def test_one_rank_is_enough(server: RankServer, tmp_path: Path) -> None:
    trace, results = run(server, alone, tmp_path, size=1)
    assert results == [2]
    assert trace.world_size == 1
    assert trace.metadata["source"] == "measured"


def inside_a_run(path: str) -> int:
    dist.barrier()
    with ringsim.trace(path) as recording:
        dist.all_reduce(torch.zeros(1))
    dist.barrier()
    return len(recording.trace.events) if dist.get_rank() == 0 else -1


def test_a_block_inside_a_run_shares_its_recorder(tmp_path: Path) -> None:
    trace = ringsim.trace(inside_a_run, world_size=2, args=(str(tmp_path / "block.ringtrace"),))
    assert trace.results == [2, -1]
    ops = [OP_NAMES[op] for op in trace.events.select(trace.events.rank == 0).op]
    assert ops == ["barrier", "all_reduce", "barrier"]
    assert len(ringsim.load(tmp_path / "block.ringtrace").events) == 2
