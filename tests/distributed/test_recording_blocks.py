"""``with ringsim.trace(path)`` on real ranks.

Nested, repeated, ended by an exception, with different paths, on one rank, and inside a run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_server import RankServer
from test_recording import join, run

import ringsim
from ringsim.errors import RingError


def ops(trace: ringsim.Trace) -> list[str]:
    return [*trace.to_pandas()["op"]]


def blocks(directory: str, rank: int) -> list[Any]:
    """Runs all blocks of one job. Returns the operations in each, from rank 0, and the errors."""
    path = join(directory, rank, 2)
    tensor = torch.zeros(2)
    with ringsim.trace(path) as outer:
        dist.barrier()
        with ringsim.trace(f"{directory}/inner.ringtrace") as inner:
            dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        with ringsim.trace(f"{directory}/inner.ringtrace") as again:  # the same file, replaced
            dist.reduce(tensor, 0)
            dist.reduce(tensor, 0)
    send = dist.ProcessGroup.__dict__["send"]
    raised = []
    try:
        with ringsim.trace(f"{directory}/raising.ringtrace") as raising:
            dist.barrier()
            raise KeyError("mine")
    except KeyError as error:
        raised.append(str(error))
    assert dist.ProcessGroup.__dict__["send"] is send
    found: list[Any] = []
    for recording in (outer, inner, again, raising):
        if rank == 0:
            found.append(ops(recording.trace))
        else:
            with pytest.raises(
                RingError, match=r"is available only on rank 0 after the block.*rank 1 of 2"
            ):
                _ = recording.trace
    try:
        with ringsim.trace(f"{directory}/run-{rank}.ringtrace"):
            dist.barrier()
    except RingError as error:
        raised.append(str(error))
    return [found, raised]


def alone(directory: str, rank: int) -> int:
    with ringsim.trace(join(directory, rank, 1)) as recording, ringsim.span("work"):
        dist.barrier()
    return len(recording.trace.events)


def test_blocks_nest_repeat_raise_and_must_agree(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    with RankServer() as server:
        trace, ((found, raised), (nothing, silent)) = run(server, blocks, tmp_path)
        single, counts = run(server, alone, tmp_path / "alone", size=1)
    outer, inner, again, raising = found
    assert outer == ["barrier", "all_reduce", "broadcast", "reduce", "reduce"] * 2
    assert (inner, again, raising) == (
        ["all_reduce"] * 2,
        ["reduce", "reduce"] * 2,
        ["barrier"] * 2,
    )
    assert ringsim.load(tmp_path / "inner.ringtrace").events.seq.tolist() == [0, 1, 0, 1]
    assert trace.events.post_ns.min() >= 0
    assert (nothing, silent) == ([], ["'mine'"])
    assert raised[0] == "'mine'"
    assert "path of a recording must be the same on every rank" in raised[1]
    # if paths differ, the parts remain
    left = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("run-"))
    assert left == ["alone", "inner.ringtrace", "raising.ringtrace", "run.ringtrace", "store"]
    assert (counts, single.world_size, single.metadata["source"]) == ([2], 1, "measured")


def test_recording_needs_a_process_group(tmp_path: Path) -> None:
    words = r"without a process group\. First call ringsim.initialize_distributed\(\)"
    with pytest.raises(RingError, match=words), ringsim.trace(tmp_path / "x"):
        pass
    assert list(tmp_path.iterdir()) == []


def inside_a_run(path: str) -> int:
    dist.barrier()
    with ringsim.trace(path) as recording:
        dist.all_reduce(torch.zeros(1))
    dist.barrier()
    return len(recording.trace.events) if dist.get_rank() == 0 else -1


def test_a_block_inside_a_run_shares_its_recorder(tmp_path: Path) -> None:
    trace = ringsim.trace(inside_a_run, world_size=2, args=(str(tmp_path / "block.ringtrace"),))
    assert trace.results == [2, -1]
    assert ops(trace) == ["barrier", "all_reduce", "barrier"] * 2
    assert len(ringsim.load(tmp_path / "block.ringtrace").events) == 2
