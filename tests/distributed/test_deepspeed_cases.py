"""DeepSpeed's tests of its communication layer and the operations of its benchmarks, rewritten.

Only the import differs.

Source:
    DeepSpeed, ``tests/unit/comm``, and DeepSpeedExamples, ``benchmarks/communication``: the tested
    and the timed operations.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from rank_server import RankServer, free_port, results

from ringsim.comm import deepspeed
from ringsim.comm import deepspeed as dist
from ringsim.comm.deepspeed import TorchBackend, get_accelerator

FIVE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


# -- tests/unit/comm


def sums(numel: int, dtype: torch.dtype, operation: Callable[..., Any]) -> bool:
    x = (torch.ones(1, numel).to(get_accelerator().device_name()) * (dist.get_rank() + 1)).to(dtype)
    operation(x)
    return bool(torch.all(x == dist.get_world_size() * (dist.get_world_size() + 1) // 2))


def is_there() -> bool:
    said = tuple(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return dist.is_initialized() and said == (
        dist.get_rank(),
        dist.get_world_size(),
        dist.get_local_rank(),
    )


def log_stops_and_starts() -> bool:
    dist.configure(enabled=True, prof_all=True)
    dist.all_reduce(torch.ones(256))
    dist.configure(prof_all=False)
    dist.all_reduce(torch.ones(256))
    return bool(dist.get_comm_operation_count() == 1)


def log_summary_leaves_the_log() -> bool:
    before, after = (dist.log_summary(return_dict=True) for _ in range(2))
    assert before is not None
    assert after is not None
    return (
        bool(before["summary"] == after["summary"])
        and before["summary"]["all_reduce"][1024]["count"] == 1
    )


def log_is_reset() -> bool:
    had, _ = dist.has_comm_data(), dist.reset_log()
    dist.configure(enabled=False)
    return had and not dist.has_comm_data()


def starts(required: bool | None, already: bool) -> bool:
    """Runs before this process has a world, and leaves no world behind."""
    if already:
        torch.distributed.init_process_group(get_accelerator().communication_backend_name())
    try:
        deepspeed.init_distributed(
            get_accelerator().communication_backend_name(), dist_init_required=required
        )
    except Exception:
        return required is False and not already
    dist.destroy_process_group()
    return required is not False or already


def starts_without_variables() -> bool:
    kept = {name: os.environ.pop(name) for name in FIVE}
    address = f"tcp://127.0.0.1:{kept['MASTER_PORT']}"
    torch.distributed.init_process_group("gloo", init_method=address, world_size=1, rank=0)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=True)
    dist.destroy_process_group()
    os.environ.update(kept)
    return True


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STARTS: dict[int, dict[str, Callable[[], bool]]] = {  # by world size
    1: {"start without variables": starts_without_variables},
    2: {
        f"start, required {required}, already {a}": partial(starts, required, a)
        for required in (True, False, None)
        for a in (True, False)
    },
    4: {},
}
CASES: dict[str, Callable[[], bool]] = {
    "init": is_there,
    **{f"all_reduce {n}": partial(sums, n, torch.float32, dist.all_reduce) for n in (128, 3)},
    **{
        f"inference_all_reduce {n} {dtype}": partial(sums, n, dtype, dist.inference_all_reduce)
        for n in (128, 3)
        for dtype in DTYPES
    },
    "the log stops and starts": log_stops_and_starts,
    "the summary leaves the log as it was": log_summary_leaves_the_log,
    "the log is reset": log_is_reset,
}


# -- benchmarks/communication: each returns a handle, if any, and the result

Operation = Callable[[torch.Tensor, bool], tuple[Any, torch.Tensor]]


def pass_on(tensor: torch.Tensor, is_async: bool) -> tuple[Any, torch.Tensor]:
    if dist.get_rank() == 0:
        return (dist.isend if is_async else dist.send)(tensor, 1), tensor
    if dist.get_rank() == 1:
        work = (dist.irecv if is_async else dist.recv)(tensor, src=0)
        return (work if is_async else None), tensor
    return None, tensor


def pass_on_in_a_batch(tensor: torch.Tensor, is_async: bool) -> tuple[Any, torch.Tensor]:
    """DeepSpeed has no ``P2POp``."""
    if dist.get_rank() > 1:
        return None, tensor
    operation, peer = (dist.isend, 1) if dist.get_rank() == 0 else (dist.irecv, 0)
    (work,) = dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer)])
    return work, tensor


def gather(
    function: Callable[..., Any], tensor: torch.Tensor, is_async: bool
) -> tuple[Any, torch.Tensor]:
    output = torch.empty(dist.get_world_size() * len(tensor))
    return function(output, tensor, group=None, async_op=is_async), output


def exchange(tensor: torch.Tensor, is_async: bool) -> tuple[Any, torch.Tensor]:
    output = torch.empty(len(tensor))
    return dist.all_to_all_single(output, tensor, async_op=is_async), output


# and a rank's share of four numbers, its rank
OPERATIONS: dict[str, tuple[Operation, Callable[[int, int], list[int]]]] = {
    "all_reduce": (
        lambda tensor, is_async: (dist.all_reduce(tensor, async_op=is_async), tensor),
        lambda rank, size: [sum(range(size))] * 4,
    ),
    "all_gather": (
        partial(gather, dist.allgather_fn),
        lambda rank, size: sorted([*range(size)] * 4),
    ),
    "all_gather of torch": (
        partial(gather, TorchBackend.get_all_gather_function()),
        lambda rank, size: sorted([*range(size)] * 4),
    ),
    "all_to_all": (exchange, lambda rank, size: sorted([*range(size)] * (4 // size))),
    "broadcast": (
        lambda tensor, is_async: (dist.broadcast(tensor, 0, async_op=is_async), tensor),
        lambda rank, size: [0] * 4,
    ),
    "pt2pt": (pass_on, lambda rank, size: [0 if rank == 1 else rank] * 4),
    "pt2pt in a batch": (pass_on_in_a_batch, lambda rank, size: [0 if rank == 1 else rank] * 4),
}


def runs(name: str, is_async: bool) -> bool:
    operation, expected = OPERATIONS[name]
    rank, begin = dist.get_rank(), time.perf_counter()
    for _ in range(3):
        tensor = torch.ones(4).to(get_accelerator().device_name(rank)) * rank
        get_accelerator().empty_cache()
        get_accelerator().synchronize()
        dist.barrier()
        work, result = operation(tensor, is_async)
        if work is not None:
            work.wait()
        if result.tolist() != expected(rank, dist.get_world_size()):
            return False
    return time.perf_counter() > begin and get_accelerator().total_memory(rank) > result.nbytes


BENCHMARKS = {
    f"{name}{', asynchronous' * is_async}": partial(runs, name, is_async)
    for name in OPERATIONS
    for is_async in (False, True)
}
BENCHMARKED = (2, 4)


# -- one job per world size


def do_all(ports: list[int], rank: int, size: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    for name, value in zip(FIVE, (rank, size, rank, "127.0.0.1"), strict=False):
        os.environ[name] = str(value)
    get_accelerator().set_device(rank)
    found: dict[str, Any] = {}
    cases: dict[str, Callable[[], bool]] = {
        **STARTS[size],
        **CASES,
        **(BENCHMARKS if size in BENCHMARKED else {}),
    }
    for name, case in cases.items():
        if name in STARTS[size] or name == "init":
            os.environ["MASTER_PORT"] = str(ports.pop())
        if name == "init":
            deepspeed.init_distributed(
                dist_backend=get_accelerator().communication_backend_name(), verbose=False
            )
        try:
            found[name] = case()
        except Exception as error:
            found[name] = repr(error)
    dist.destroy_process_group()
    return found


@cache
def answers(server: RankServer, size: int) -> list[dict[str, Any]]:
    ports = [free_port() for _ in range(len(STARTS[size]) + 1)]
    return results(server.run(do_all, [(ports, rank, size) for rank in range(size)]))


@pytest.mark.parametrize(
    ("size", "name"),
    [
        (size, name)
        for size in STARTS
        for name in (*STARTS[size], *CASES, *(BENCHMARKS if size in BENCHMARKED else ()))
    ],
)
def test_it_passes_on_ringsim(server: RankServer, size: int, name: str) -> None:
    assert [each[name] for each in answers(server, size)] == [True] * size
