"""Ranks on greenlets behave like ranks on threads, or raise an error that they cannot."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from simulated_runs import LINK, exchange, run

import ringsim
from ringsim.errors import ArgumentError, RingError

sys.path.append(str(Path(__file__).parent / "golden"))
from programs import PROGRAMS


def simulate(name: str, stacks: str) -> tuple[Any, str]:
    """Returns the events of a program's trace, and the text of its error."""
    program = PROGRAMS[name]
    try:
        trace = ringsim.simulate(
            program.worker, world_size=program.world_size, stacks=stacks, **program.options
        )
    except RingError as error:
        failed: Any = error.trace
        return failed.to_pandas(), str(error)
    return trace.to_pandas(), ""


@pytest.mark.parametrize("name", PROGRAMS)
def test_both_give_the_same_trace(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        events, error = simulate(name, "greenlets")
        expected_events, expected_error = simulate(name, "threads")
    assert error == expected_error
    assert events.equals(expected_events)


def keep_state() -> list[Any]:
    """Waits with and without gradients, while the other ranks are elsewhere in their programs."""
    rank = dist.get_rank()
    os.environ["MINE"] = str(rank)
    torch.set_default_dtype([torch.float32, torch.float64, torch.float16][rank])
    found: list[Any] = []
    for place in range(3):
        with [torch.no_grad, torch.inference_mode, torch.enable_grad][(place + rank) % 3]():
            exchange(torch.zeros(1, dtype=torch.int8), torch.zeros(1, dtype=torch.int8))
            found += [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    return [*found, os.environ["MINE"], str(torch.get_default_dtype()), torch.rand(1).item()]


def test_what_belongs_to_a_rank_stays_with_it() -> None:
    found = run(keep_state, stacks="greenlets")
    assert found == run(keep_state, stacks="threads")
    assert [state[:2] for state in found] == [[False, False], [False, True], [True, False]]


def call_cpp() -> None:
    functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD) + 1


def wait_in_backward() -> None:
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda gradient: dist.all_reduce(gradient))
    weight.sum().backward()


def wait_in_autocast() -> None:
    with torch.autocast("cpu"):
        dist.barrier()


def wait_in_a_mode() -> None:
    with torch.device("cpu"):
        dist.barrier()


def wait_with_hooks() -> None:
    with torch.autograd.graph.save_on_cpu():
        dist.barrier()


def wait_in_a_loop() -> None:
    async def meet() -> None:
        dist.barrier()

    asyncio.run(meet())


@pytest.mark.parametrize(
    ("worker", "named"),
    [
        (call_cpp, "C++ code"),
        (wait_in_backward, "a backward pass"),
        (wait_in_autocast, "autocast"),
        (wait_in_a_mode, "a torch mode"),
        (wait_with_hooks, "hooks for saved tensors"),
        (wait_in_a_loop, "asyncio"),
    ],
)
def test_a_wait_that_greenlets_cannot_carry_is_refused(
    worker: Callable[[], None], named: str
) -> None:
    run(worker, 2)  # threads can run it
    with pytest.raises(RingError, match=re.escape(named)):
        run(worker, 2, stacks="greenlets")


def leave_early() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RingError, match=r"rank 1 of 3 failed: .* code 3"):
        run(leave_early, stacks="greenlets")


def pass_on() -> float:
    ring = ringsim.current_ring()
    token = torch.zeros(1)
    if ring.rank > 0:
        dist.recv(token, ring.pred, group=ring.pred_group)
    token += 1
    if ring.rank < ring.world_size - 1:
        dist.send(token, ring.succ, group=ring.succ_group)
    return token.item()


def test_thousands_of_ranks_need_no_threads() -> None:
    trace = ringsim.simulate(pass_on, world_size=3000, link=LINK, stacks="greenlets")
    assert trace.results == [float(rank + 1) for rank in range(3000)]


def test_another_word_is_refused() -> None:
    with pytest.raises(ArgumentError, match='"threads" or "greenlets", got \'fibers\''):
        run(pass_on, stacks="fibers")
