"""Dumps of torch's flight recorder. They are read unchanged, and other files are refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringsim
from ringsim import Trace
from ringsim.errors import TraceFileError
from ringsim.exchange import read_flight_recorder


def dump_json() -> bytes:
    return torch._C._distributed_c10d._dump_fr_trace_json(True, False)


def worker(directory: str) -> None:
    """Ranks 0 and 1 of three have begun an all_reduce that rank 2 has not."""
    rank, tensor = dist.get_rank(), torch.ones(3, 4)
    pair = dist.new_group([0, 1], group_desc="pair")
    dist.all_reduce(tensor)
    dist.all_gather_into_tensor(torch.empty(9, 4), tensor)
    dist.reduce_scatter_tensor(torch.empty(3), torch.ones(9))
    dist.scatter(tensor, [tensor] * 3 if rank == 0 else None)
    dist.barrier()
    if rank < 2:
        dist.all_reduce(tensor, group=pair)
        dist.all_reduce(tensor, async_op=True)
    while sum(not each["retired"] for each in json.loads(dump_json())["entries"]) > (rank < 2):
        pass  # torch records with a small delay that an operation is done
    Path(directory, "pickled", f"dump_{rank}").write_bytes(
        torch._C._distributed_c10d._dump_fr_trace(True, True, False)
    )
    Path(directory, "json", f"dump_{rank}.json").write_bytes(dump_json())


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace]:
    """Two forms of the dumps of three ranks, and ringsim's record of the same run."""
    directory = tmp_path_factory.mktemp("dumps")
    for form in ("pickled", "json"):
        (directory / form).mkdir()
    return directory, ringsim.trace(worker, world_size=3, args=(str(directory),))


@pytest.mark.parametrize("form", ["pickled", "json"])
def test_collectives_are_those_that_were_recorded(dumps: tuple[Path, Trace], form: str) -> None:
    directory, recorded = dumps
    trace = read_flight_recorder(directory / form)
    # JSON contains only the backend's operation
    columns = ["rank", "size_bytes", "status", *(["op", "line"] if form == "pickled" else [])]
    theirs, ours = trace.to_pandas(), recorded.to_pandas()
    ours = ours[(ours["kind"] == "collective") & (ours["op"] != "new_group")]
    # torch does not record it
    ours.loc[ours["op"] == "barrier", "size_bytes"] = theirs.loc[
        theirs["op"] == "barrier", "size_bytes"
    ].iloc[0]
    finished = ours[ours["line"] != ours["line"].max()], theirs[theirs["status"] == "ok"]
    assert len(finished[0]) == len(finished[1]) == 3 * 5 + 2
    assert [finished[1][name].astype(str).tolist() for name in columns if name != "status"] == [
        finished[0][name].astype(str).tolist() for name in columns if name != "status"
    ]
    assert set(theirs["group"]) == {"world", "pair"}
    assert (trace.world_size, trace.metadata["backend"]) == (3, "gloo")


@pytest.mark.parametrize("form", ["pickled", "json"])
def test_the_missing_rank_is_named(dumps: tuple[Path, Trace], form: str) -> None:
    (finding,) = read_flight_recorder(dumps[0] / form).explain().findings
    assert (finding.kind, finding.ranks) == ("stalled", (2, 0, 1))
    assert "\n  rank 2 was busy" in finding.message
    assert {operation.op for operation in finding.operations} == {"all_reduce"}


def entry(number: int, **changed: Any) -> dict[str, Any]:
    return {
        "record_id": number, "process_group": ("0", "default_pg"), "collective_seq_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1000 + number, "input_sizes": [[2]], "output_sizes": [[2]],
        "input_dtypes": ["Float"], "state": "completed",
        "time_discovered_completed_ns": 2000 + number, "is_p2p": False, **changed,
    }  # fmt: skip


def write(directory: Path, *entries: list[dict[str, Any]]) -> Path:
    for rank, mine in enumerate(entries):
        (directory / f"nccl_trace_rank_{rank}").write_bytes(
            pickle.dumps({"version": "2.10", "entries": mine}, protocol=2)
        )
    return directory


def test_what_one_rank_has_forgotten_is_left_out_on_all(tmp_path: Path) -> None:
    """The k-th collective of one rank matches the k-th of the others."""
    trace = read_flight_recorder(
        write(tmp_path, [entry(k) for k in range(1, 6)], [entry(k) for k in range(3, 6)])
    )
    assert trace.to_pandas()["done_ns"].tolist() == [1000, 1001, 1002] * 2
    assert (
        "left out: 2 operations that some rank's dump no longer contains" in trace.metadata["notes"]
    )


def test_messages_of_nccl_are_matched(tmp_path: Path) -> None:
    sends = [entry(1, profiling_name="nccl:send 0->1", is_p2p=True)]
    recvs = [entry(1, profiling_name="nccl:recv 1<-0", is_p2p=True)]
    trace = read_flight_recorder(write(tmp_path, sends, recvs))
    assert (len(trace.messages), trace.to_pandas()["size_bytes"].tolist()) == (1, [8, 8])


class Call:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/ringsim-was-here",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            pickle.dumps({"version": "2.10", "entries": [Call()]}),
            "objects other than containers, strings and numbers",
        ),
        # which took 16 GiB
        (
            b"\x80\x02}r" + (2**30).to_bytes(4, "little") + b".",
            "objects other than containers, .*LONG_BINPUT",
        ),
        (b"", "exhausted before seeing STOP"),
        (pickle.dumps({"version": "2.10", "entries": [{}]}), "record_id"),
        (
            pickle.dumps({"version": "2.10", "entries": [entry(1, time_created_ns=2**70)]}),
            "outside",
        ),
        (pickle.dumps({"version": "2.10", "entries": [entry(1, input_sizes=[[-1]])]}), "shape"),
        (json.dumps({"version": "1.0"}).encode(), "version 2"),
    ],
)
def test_anything_else_is_refused_and_nothing_is_called(
    tmp_path: Path, content: bytes, said: str
) -> None:
    (tmp_path / "dump_0").write_bytes(content)
    with pytest.raises(TraceFileError, match=said):
        read_flight_recorder(tmp_path)
    assert not os.path.exists("/tmp/ringsim-was-here")
