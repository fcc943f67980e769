"""Files that torch.profiler wrote on real ranks, compared with ringsim's record of the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from trace_mutations import read_in_full

import ringsim
from ringsim import Trace
from ringsim.exchange import read_profiler


def worker(directory: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    some, all_of_it = torch.ones(6), torch.empty(6 * size)
    parts = list(all_of_it.chunk(size))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        with record_function("compute"):
            some = some + 1
        send = dist.P2POp(dist.isend, some, (rank + 1) % size, tag=3)
        receive = dist.P2POp(dist.irecv, parts[0], (rank - 1) % size, tag=3)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        if rank == 0:
            dist.send(some.double(), 1, tag=5)
        elif rank == 1:
            dist.recv(some.double(), 0, tag=5)
        dist.all_reduce(some)
        dist.broadcast(some, 1)
        dist.reduce(some, 1)
        dist.all_gather(parts, some)
        dist.gather(some, parts if rank == 1 else None, dst=1)
        dist.scatter(some, parts if rank == 1 else None, src=1)
        dist.reduce_scatter(some, parts)
        dist.all_to_all_single(torch.empty_like(all_of_it), all_of_it)
        dist.barrier()
        dist.monitored_barrier()
        dist.all_reduce(some.to(torch.int64))
    profiler.export_chrome_trace(f"{directory}/rank-{rank}.json{'.gz' if rank else ''}")


def told(trace: Trace, spelled: dict[str, str]) -> list[list[Any]]:
    """Returns, by rank and in posting order, the facts that both record of each operation."""
    frame = trace.to_pandas().query("kind not in ('span', 'mark')")
    frame = frame.assign(op=frame["op"].replace(spelled), size_bytes=frame["size_bytes"].fillna(0))
    frame.loc[(frame["op"] == "scatter") & (frame["rank"] != 1), "size_bytes"] = 0
    tag = frame["tag"].where(frame["kind"] != "collective").fillna(-1)
    frame = frame.assign(tag=tag, peer=frame["peer"].fillna(-1))
    return frame[["rank", "op", "peer", "tag", "size_bytes", "group", "status"]].to_numpy().tolist()


def test_the_profiler_saw_what_was_recorded(tmp_path: Path) -> None:
    recorded = ringsim.trace(worker, world_size=3, args=(str(tmp_path),))
    imported = read_profiler(tmp_path)
    # the c10d name for all of them
    spelled = {"send": "isend", "recv": "irecv", "batch_isend": "isend", "batch_irecv": "irecv"}
    assert told(imported, {}) == told(recorded, spelled)
    assert imported.unmatched == []
    mine, theirs = (
        zip(trace.messages.src.tolist(), trace.messages.dst.tolist(), strict=True)
        for trace in (recorded, imported)
    )
    assert sorted(theirs) == sorted(mine)
    assert (imported.metadata["source"], imported.world_size) == ("measured", 3)
    assert imported.to_pandas().query("kind == 'span'")["label"].tolist() == ["compute"] * 3
    barriers = imported.to_pandas().query("op == 'monitored_barrier'")
    assert (barriers["done_ns"] > barriers["post_ns"]).all()
    read_in_full(imported, draw=True)
    assert read_profiler([tmp_path / "rank-2.json.gz"]).world_size == 3, "one file is enough"
