"""DeepSpeed's tests of its communication layer, rewritten; only the import differs.

Source: DeepSpeed, ``tests/unit/comm``: the tested operations.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from rank_server import RankServer, free_port, results

from ringsim.comm import deepspeed
from ringsim.comm import deepspeed as dist
from ringsim.comm.deepspeed import get_accelerator

FIVE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


# -- tests/unit/comm


def sums(numel: int, dtype: torch.dtype, operation: Callable[..., Any]) -> bool:
    x = (torch.ones(1, numel).to(get_accelerator().device_name()) * (dist.get_rank() + 1)).to(dtype)
    operation(x)
    return bool(torch.all(x == dist.get_world_size() * (dist.get_world_size() + 1) // 2))


def is_there() -> bool:
    said = tuple(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    place = dist.get_rank(), dist.get_world_size(), dist.get_local_rank()
    return dist.is_initialized() and said == place


def starts(required: bool | None, already: bool) -> bool:
    """Runs before this process has a world, and leaves no world behind."""
    if already:
        torch.distributed.init_process_group("gloo")
    try:
        deepspeed.init_distributed("gloo", dist_init_required=required)
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
}
CASES: dict[str, Callable[[], bool]] = {
    "init": is_there,
    **{f"all_reduce {n}": partial(sums, n, torch.float32, dist.all_reduce) for n in (128, 3)},
    **{
        f"inference_all_reduce {n} {dtype}": partial(sums, n, dtype, dist.inference_all_reduce)
        for n in (128, 3)
        for dtype in DTYPES
    },
}


def cases_of(size: int) -> dict[str, Callable[[], bool]]:
    return {**STARTS[size], **CASES}


# -- one job per world size


def do_all(ports: list[int], rank: int, size: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    for name, value in zip(FIVE, (rank, size, rank, "127.0.0.1"), strict=False):
        os.environ[name] = str(value)
    get_accelerator().set_device(rank)
    found: dict[str, Any] = {}
    for name, case in cases_of(size).items():
        if name in STARTS[size] or name == "init":
            os.environ["MASTER_PORT"] = str(ports.pop())
        if name == "init":
            backend = get_accelerator().communication_backend_name()
            deepspeed.init_distributed(dist_backend=backend, verbose=False)
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
    ("size", "name"), [(size, name) for size in STARTS for name in cases_of(size)]
)
def test_it_passes_on_ringsim(server: RankServer, size: int, name: str) -> None:
    assert [each[name] for each in answers(server, size)] == [True] * size
