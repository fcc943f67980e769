"""What Python and torch keep for the whole process belongs to a rank, or comes back to the caller as it was."""

from __future__ import annotations

import asyncio
import os
import sys
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_simulated_state import Unchanged, run

import ringsim
from ringsim import comm as dist
from ringsim.errors import RingError


def look() -> tuple[Any, ...]:
    """What the caller has, and is to have again."""
    return (
        torch.empty(1).device.type,
        torch.get_default_device().type,
        len(torch.overrides._get_current_function_mode_stack()),
        torch._C._len_torch_dispatch_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        warnings.filters,
        list(warnings.filters),
        warnings.showwarning,
        sys.getrecursionlimit(),
        torch.get_num_threads(),
        os.getcwd(),
        asyncio._get_running_loop(),
        sys.get_asyncgen_hooks(),
    )


@pytest.fixture(autouse=True)
def the_same_afterwards() -> Iterator[None]:
    before = look()
    yield
    assert look() == before
    assert look()[9] is before[9]


def default_device() -> list[str]:
    rank, seen = dist.get_rank(), []
    if rank == 0:
        torch.set_default_device("meta")
    for _ in range(2):
        seen.append(torch.empty(1).device.type)
        dist.barrier()
    seen.append(torch.get_default_device().type)
    torch.set_default_device(None)
    dist.barrier()
    return [*seen, torch.empty(1).device.type]


def test_the_default_device_is_that_of_the_rank() -> None:
    assert run(default_device) == [["meta", "meta", "meta", "cpu"]] + [["cpu"] * 4] * 2


def test_the_default_device_of_the_caller_is_that_of_all_ranks() -> None:
    torch.set_default_device("meta")
    try:
        assert run(default_device) == [["meta", "meta", "meta", "cpu"]] * 3
        assert (torch.empty(1).device.type, torch.get_default_device().type) == ("meta", "meta")
    finally:
        torch.set_default_device(None)


def waits_in_a_block(default: str | None) -> None:
    torch.set_default_device(default)
    with torch.device("meta"):
        dist.barrier()


@pytest.mark.parametrize("default", [None, "cpu"])
def test_a_rank_must_not_wait_in_a_block_with_a_device(default: str | None) -> None:
    with pytest.raises(RingError, match=r"must not wait for others inside .*torch\.device"):
        run(waits_in_a_block, 3, default)


def moved_while_others_have_devices() -> list[float]:
    """Collectives and objects work where the default device has no data."""
    if dist.get_rank() == 1:
        torch.set_default_device("meta")
    total, objects = torch.ones(2, device="cpu"), [None] * 3
    dist.all_reduce(total)
    dist.all_gather_object(objects, dist.get_rank())
    assert objects == [0, 1, 2]
    return total.tolist()


def test_a_default_device_is_none_of_the_messages() -> None:
    assert run(moved_while_others_have_devices) == [[3.0, 3.0]] * 3


def anomaly() -> list[bool]:
    rank = dist.get_rank()
    with torch.autograd.set_detect_anomaly(rank == 1, check_nan=rank != 1):
        dist.barrier()
        seen = [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()]
    dist.barrier()
    return [*seen, torch.is_anomaly_enabled()]


def deterministic() -> list[bool]:
    rank = dist.get_rank()
    torch.use_deterministic_algorithms(rank == 1, warn_only=True)
    dist.barrier()
    return [torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()]


def test_anomaly_mode_and_determinism_are_those_of_the_rank() -> None:
    off = [False, True, False]
    assert run(anomaly) == [off, [True, False, False], off]
    assert [first for first, _ in run(deterministic)] == [False, True, False]
    assert run(deterministic)[1] == [True, True]


def in_a_loop() -> list[Any]:
    """Ranks talk within coroutines: a rank's wait holds up its own loop, as on real ranks, and no other one."""

    async def count() -> AsyncIterator[int]:
        for number in range(2):
            dist.barrier()
            yield number

    async def total(value: float) -> float:
        tensor = torch.full((1,), value)
        task = asyncio.current_task()
        dist.all_reduce(tensor)
        await asyncio.sleep(0)
        assert asyncio.current_task() is task
        return tensor.item()

    async def main() -> list[Any]:
        loop = asyncio.get_running_loop()
        numbers = [number async for number in count()]
        totals = await asyncio.gather(total(1.0), total(2.0))
        assert asyncio.get_running_loop() is loop
        return [numbers, totals]

    return asyncio.run(main())


def test_every_rank_may_run_a_loop() -> None:
    assert run(in_a_loop) == [[[0, 1], [3.0, 6.0]]] * 3


def test_a_caller_may_have_a_loop() -> None:
    """As in a notebook, whose cells run within one."""

    async def main() -> list[Any]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        results = run(in_a_loop)
        await asyncio.sleep(0)
        assert (asyncio.get_running_loop(), asyncio.current_task()) == (loop, task)
        return results

    assert asyncio.run(main()) == [[[0, 1], [3.0, 6.0]]] * 3


def change_everything(where: str, fails: bool) -> str:
    os.chdir(where)
    sys.setrecursionlimit(sys.getrecursionlimit() + 100)
    torch.set_num_threads(torch.get_num_threads() + 1)
    dist.barrier()
    torch.set_default_device("meta")
    torch.autograd.set_detect_anomaly(True)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    warnings.simplefilter("error")
    if fails:
        raise ValueError("with all of it in force")
    return os.getcwd()


def test_what_ranks_leave_behind_is_gone(tmp_path: Path) -> None:
    assert run(change_everything, 3, str(tmp_path), False) == [str(tmp_path)] * 3
    with pytest.raises(ringsim.errors.RankFailed, match="with all of it in force"):
        run(change_everything, 3, str(tmp_path), True)


def test_a_mode_that_is_left_open_is_an_error() -> None:
    mode = Unchanged()

    def leave_open() -> None:
        mode.__enter__()

    with pytest.raises(RingError, match="must leave what it has entered"):
        run(leave_open, 1)
    mode.__exit__(None, None, None)
