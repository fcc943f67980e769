"""The jobs of the MPI tests, which the ranks run one after the other.

``mpirun -n 3 python mpi_jobs.py DIRECTORY NAME ...``.
"""

from __future__ import annotations

import builtins
import datetime as dt
import json
import os
import pickle
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from conformance import run_rules

import ringsim
from ringsim import comm as dist
from ringsim import initialize_distributed
from ringsim.comm import deepspeed
from ringsim.errors import ArgumentError, MessageMismatch, RendezvousFailed, RingError, RunTimeout

PRINT = builtins.print


def join(timeout_s: float = 20) -> tuple[int, int]:
    dist.set_backend("mpi")
    dist.init_process_group("mpi", timeout=dt.timedelta(seconds=timeout_s))
    return dist.get_rank(), dist.get_world_size()


def keep_the_rules(directory: str) -> None:
    join()
    run_rules(dist, directory, {})
    dist.destroy_process_group()


def come_from_deepspeed(directory: str) -> None:
    dist.set_backend("torch")
    deepspeed.init_distributed("mpi", verbose=False, timeout=dt.timedelta(seconds=20))
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.cdb.name == "mpi"
    for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_RANK", rank)):
        assert os.environ[name] == str(value)
    assert {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    total = torch.tensor([rank + 1.0])
    deepspeed.all_reduce(total)
    assert total.item() == size * (size + 1) / 2
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]


def log(_: str) -> None:
    """Logs messages, collectives and its own operation, which the last rank answers late."""
    rank, size = join()

    @dist.timed_op
    def exchange(tensor: torch.Tensor) -> object:
        return dist.all_reduce(tensor, async_op=True)

    dist.configure(enabled=True)
    for turn in range(4):
        if rank == 0 < size - 1:
            dist.send(torch.ones(256), 1, tag=turn)
        elif rank == 1:
            dist.recv(torch.empty(256), 0, tag=turn)
    work = exchange(torch.ones(8))
    time.sleep(0.1 * rank)
    work.wait()  # type: ignore[attr-defined]
    table = dist.log_summary()
    data = dist.log_summary(return_dict=True)
    dist.configure(enabled=False)
    rows = {(row.op, row.size_bytes): row for row in table.rows}
    messages = {("send", 1024): 4, ("recv", 1024): 4} if size > 1 else {}
    others = {("all_reduce", 32): 1, ("span", 32): 1}
    assert {key: row.count for key, row in rows.items()} == {**messages, **others}
    assert all(row.in_flight == 0 for row in table.rows)
    span, inner = rows["span", 32], rows["all_reduce", 32]
    assert span.name == "exchange"
    # the span also ends with the wait
    assert span.first_mean_us > inner.first_mean_us > (50_000 if size > 1 else 0)
    assert size == 1 or [each["count"] for each in data["summary"]["send"][1024]] == [4]
    dist.reset_log()  # for the next jobs
    dist.destroy_process_group()


def live_twice(_: str) -> None:
    """Starts the job twice; operations that were never waited for do not delay it."""
    for _ in range(2):
        rank, size = join()
        with pytest.raises(ValueError, match="initialize the default process group twice"):
            dist.init_process_group("mpi")
        lost = dist.irecv(torch.empty(1), (rank + 1) % size, tag=1)
        dist.isend(torch.ones(1), (rank + 1) % size, tag=2)  # the handle is dropped
        assert dist.recv(torch.empty(1), (rank - 1) % size, tag=2) == (rank - 1) % size
        begin = time.monotonic()
        dist.destroy_process_group()
        assert time.monotonic() - begin < 4
        assert not dist.is_initialized()
        with pytest.raises(RingError, match="when the process group was destroyed"):
            lost.wait()


def mismatch(_: str) -> None:
    rank, _ = join()
    if rank == 0:
        for _ in range(2):
            dist.send(torch.ones(4), 1)
    elif rank == 1:
        handle = dist.irecv(torch.empty(5), 0)
        for _ in range(2):  # each wait raises the error
            with pytest.raises(MessageMismatch, match="into a tensor of 20 bytes"):
                handle.wait()
        with pytest.raises(
            MessageMismatch, match="received a longer message into a tensor of 12 bytes"
        ):
            dist.recv(torch.empty(3), 0)
    dist.barrier()
    dist.destroy_process_group()


def miss(directory: str) -> None:
    """The last rank does not enter a barrier."""
    rank, size = join(timeout_s=0.5)
    if rank < size - 1:
        words = f"waiting for rank {size - 1}" if rank == 0 else "monitored_barrier"
        with pytest.raises(RunTimeout, match=words):
            dist.monitored_barrier(timeout=dt.timedelta(seconds=0.5), wait_all_ranks=True)
        with pytest.raises(RunTimeout, match=r"all_reduce .* timed out after 0.5 s"):
            dist.all_reduce(torch.ones(1))
        with pytest.raises(RunTimeout):
            dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
    else:
        time.sleep(2.5)
    Path(directory, f"missed-{rank}").touch()
    while len(list(Path(directory).glob("missed-*"))) < size:
        time.sleep(0.02)
    if rank == 1:
        raise ValueError("no more data")
    dist.irecv(torch.empty(1), 0 if rank else 1).wait(dt.timedelta(seconds=100))


def leave(_: str) -> None:
    """Rank 1 leaves by sys.exit while the others wait for it."""
    if join(timeout_s=100)[0] == 1:
        sys.exit(3)
    dist.barrier()


def leave_well(_: str) -> None:
    """Rank 1 only seems to exit, and all ranks end normally, without destroy_process_group."""
    if join(timeout_s=60)[0] == 1:
        with pytest.raises(SystemExit) as caught:
            sys.exit(3)
        assert caught.value.code == 3
    dist.barrier()
    print("done leave_well\n", end="", flush=True)
    sys.exit()


# -- unchanged programs for torch.distributed


def load_programs(directory: str) -> dict[str, Any]:
    """Returns the programs that a test requests, by name."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "programs"))
    import right_messages
    import right_modules  # noqa: F401 - adds its programs to the others
    import two_clocks

    known = {name: program for name, (program, _) in right_messages.PROGRAMS.items()}
    known |= two_clocks.EXACT | two_clocks.CLOSE | two_clocks.WRONG
    names = json.loads(Path(directory, "names.json").read_text())
    return {name: known[name] for name in names}


def run_programs(directory: str) -> None:
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("mpi")
    found = {}
    for name, program in load_programs(directory).items():
        torch.distributed.barrier()
        found[name] = program()
    Path(directory, f"{torch.distributed.get_rank()}.pickle").write_bytes(pickle.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_wrong(directory: str) -> None:
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("mpi", timeout=dt.timedelta(seconds=2))
    for program in load_programs(directory).values():
        program()


# -- rings


def worker(rounds: int) -> float:
    """Runs the first worker of README.md, with the other import."""
    ring = ringsim.current_ring()
    token = torch.full((1024,), float(ring.rank))
    for _ in range(rounds):
        arriving = torch.empty_like(token)
        if ring.world_size > 1:
            recv = dist.irecv(arriving, ring.pred, group=ring.pred_group)
            dist.isend(token, ring.succ, group=ring.succ_group).wait()
            recv.wait()
        with ringsim.span("compute"):
            token = (arriving if ring.world_size > 1 else token) + 1
    return token[0].item()


def look(group: Any) -> list[Any] | None:
    members = group and dist.get_process_group_ranks(group)
    return group and [group.group_name, members, group.rank(), group.size()]


def go_round(directory: str, **given: int) -> None:
    """Joins, records three passes of a token around the ring, and fails to join again."""
    for turn in range(2):
        dist.set_backend("mpi")
        ringsim.initialize_distributed(timeout_s=20, **given)
        ring = ringsim.current_ring()
        with ringsim.trace(f"{directory}/{turn}.ringtrace"):
            result = worker(3)
        ringsim.initialize_distributed()
        assert ringsim.current_ring() is ring
        with pytest.raises(ArgumentError, match="must be 'cpu', as in the existing ring"):
            initialize_distributed(comm_device="gpu")
        print(f"from rank {ring.rank}\n", end="")
        place = ring.rank, ring.world_size, ring.pred, ring.succ, ring.ranks
        pred_group = ringsim.get_pipeline_parallel_pred_group()
        succ_group = ringsim.get_pipeline_parallel_succ_group()
        report = {
            "place": [*place, ringsim.get_comm_device()],
            "groups": [look(pred_group), look(succ_group)],
            "distinct": ring.pred_group is not ring.succ_group,
            "result": result,
        }
        Path(directory, f"ring-{ring.rank}.json").write_text(json.dumps(report))
        dist.barrier()
        ringsim.destroy_distributed()
        assert not dist.is_initialized()
        assert builtins.print is PRINT
        with pytest.raises(RingError, match="this rank is not in a ring"):
            ringsim.current_ring()


def go_round_alone(directory: str) -> None:
    go_round(directory, world_size=1)


def refuse(_: str) -> None:
    """Checks that errors are raised on every rank, and leave nothing behind."""
    dist.set_backend("mpi")
    with pytest.raises(ArgumentError, match="comm_device must be 'cpu' with the backend 'mpi'"):
        initialize_distributed(comm_device="gpu")
    with pytest.raises(ArgumentError, match="world_size must be 3, as in MPI"):
        dist.init_process_group("mpi", world_size=7, rank=0)
    with pytest.raises(ArgumentError, match="world_size must be 3, as in MPI"):
        initialize_distributed("127.0.0.1", 29500, 4, 0, 0)
    rank = ringsim.environment.discover().rank
    with pytest.raises(RendezvousFailed, match=r"passed \[0, 1, 2\], but rank 1 passed \[1\]"):
        initialize_distributed(ring_ranks=[1] if rank == 1 else None)
    assert not dist.is_initialized()
    with pytest.raises(RingError, match="this rank is not in a ring"):
        ringsim.current_ring()


if __name__ == "__main__":
    warnings.simplefilter("error")
    # torch's warning about its coalesced functions
    warnings.filterwarnings("ignore", category=FutureWarning)
    directory, *names = sys.argv[1:]
    for name in names:
        globals()[name](directory)
        print(f"done {name}\n", end="", flush=True)
