"""Each rank keeps its own state, although ranks share a process; the caller's does not change."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from simulated_runs import LINK, draw_by_name, exchange, run, switch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ringsim
from ringsim import comm as dist
from ringsim.errors import RankFailed, RingError


def look() -> tuple[Any, ...]:
    """Returns the state that the caller must have again afterwards."""
    return (
        torch.empty(1).device.type, torch.get_default_device().type, torch.get_default_dtype(),
        torch.is_grad_enabled(), torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        id(warnings.filters), list(warnings.filters), warnings.showwarning,
        sys.getrecursionlimit(), torch.get_num_threads(), os.getcwd(), dict(os.environ),
        signal.getsignal(signal.SIGINT), sys.modules["__main__"],
        random.getstate(), str(np.random.get_state()), torch.random.get_rng_state().tolist(),
    )  # fmt: skip


# -- random numbers


def draw(times: int, switch: Callable[[], None] = switch) -> list[Any]:
    """Draws an odd number of normal numbers, so each generator has one drawn ahead when left."""
    drawn: list[Any] = []
    for _ in range(times):
        drawn += [random.random(), random.gauss(0, 1), random.randrange(1000)]
        switch()
        drawn += [np.random.standard_normal(), np.random.random(), np.random.randint(1000)]
        switch()
        drawn += [*torch.randn(1), torch.rand(623).sum(), *torch.randn(1, dtype=torch.float64)]
        switch()
        drawn += [random.gauss(0, 1), np.random.standard_normal(), *torch.randn(1)]
        drawn += [torch.rand(624)[0]]
    return [float(one) for one in drawn]


def seed_streams(seed: int) -> None:
    for seed_stream in (random.seed, np.random.seed, torch.manual_seed):
        seed_stream(seed)


def alone(seed: int, draw: Callable[[], list[Any]]) -> list[Any]:
    """Draws the numbers of a rank without ranks."""
    seed_streams(seed)
    return draw()


def stay() -> None:
    """Lets no other rank run, because there is none."""


def test_random_numbers_are_those_of_the_rank() -> None:
    expected = [alone(11 + rank, lambda: draw(4, stay)) for rank in range(3)]
    outside = alone(5, lambda: draw(1, stay))
    seed_streams(5)
    own = ringsim.simulate(draw, world_size=3, args=(4,), link=LINK, seed=11)
    assert own.results == expected
    assert own.metadata["notes"] == []
    assert draw(1, stay) == outside  # the caller's streams have not changed


def test_functions_imported_by_name_draw_from_the_ranks_own_numbers_too() -> None:
    expected = [
        alone(3 + rank, lambda: [random.gauss(0, 1), np.random.standard_normal()])
        for rank in range(2)
    ]
    trace = ringsim.simulate(draw_by_name, world_size=2, link=LINK, seed=3)
    assert trace.results == expected
    assert trace.metadata["notes"] == []


SEEDED: dict[str, tuple[Callable[[int], Any], Callable[[], Any]]] = {  # how to seed, and to draw
    "torch": (torch.manual_seed, lambda: torch.rand(1).item()),
    "torch above 32 bits": (lambda seed: torch.manual_seed(7 + (seed << 32)), torch.initial_seed),
    "numpy": (lambda seed: np.random.seed(seed), lambda: float(np.random.random())),
    "random": (lambda seed: random.seed(seed), lambda: random.random()),
}


def seed_anew(what: str, switch: Callable[[], None] = switch) -> list[Any]:
    """Seeds before drawing, again without having drawn since, and again after drawing."""
    seed, draw = SEEDED[what]
    drawn = []
    for number in (1, 2, 3):
        seed(number)
        switch()
        drawn += [draw()] * (number > 1)
        switch()
    return drawn


@pytest.mark.parametrize("what", SEEDED)
def test_a_seed_counts_whether_or_not_anything_was_drawn(what: str) -> None:
    assert run(seed_anew, 3, what) == [seed_anew(what, stay)] * 3


# -- modes


def test_threads_that_simulate_at_once_get_what_each_gets_alone() -> None:
    def work(number: int) -> tuple[float, list[Any]]:
        total = torch.full((4,), float(dist.get_rank() + number))
        for _ in range(20):
            dist.all_reduce(total)
        print(number)
        return total.sum().item(), draw(1)

    def simulate(number: int) -> tuple[ringsim.Trace, list[str]]:
        trace = ringsim.simulate(work, world_size=3, args=(number,), link=LINK, seed=number)
        return trace, [*map(repr, trace.results), *trace.output]

    alone = list(map(simulate, range(4)))
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(simulate, range(4))) == alone


@contextmanager
def setting(write: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    write(value)
    yield
    write(before)


def set_deterministic(level: int) -> None:
    torch.use_deterministic_algorithms(level > 0, warn_only=level == 1)


SINGLE, DOUBLE, HALF, BRAIN = torch.float32, torch.float64, torch.float16, torch.bfloat16
PRECISION = torch.set_float32_matmul_precision
Block = Callable[[], AbstractContextManager[Any]]
BLOCKS: list[tuple[Block, Block]] = [  # a mode, and another one inside
    (torch.no_grad, torch.enable_grad),
    (torch.inference_mode, partial(torch.inference_mode, False)),
    (partial(torch.autocast, "cpu", dtype=BRAIN), partial(torch.autocast, "cpu", enabled=False)),
    (partial(setting, torch.set_default_dtype, DOUBLE, SINGLE),
     partial(setting, torch.set_default_dtype, HALF, DOUBLE)),
    (partial(setting, torch.set_default_device, "meta", None),
     partial(setting, torch.set_default_device, "cpu", "meta")),
    (partial(torch.autograd.set_detect_anomaly, True, check_nan=False),
     partial(torch.autograd.set_detect_anomaly, False)),
    (partial(setting, set_deterministic, 1, 0), partial(setting, set_deterministic, 2, 1)),
    (partial(setting, PRECISION, "high", "highest"), partial(setting, PRECISION, "medium", "high")),
]  # fmt: skip


def see(switch: Callable[[], None] = switch) -> list[Any]:
    """Looks at the modes after other ranks have set theirs."""
    switch()
    x = torch.ones(2, requires_grad=True) * 2
    return [
        *(torch.is_grad_enabled(), x.requires_grad, x.is_inference()),
        *((torch.ones(2, 2) @ torch.ones(2, 2)).dtype, torch.tensor(1.0).dtype),
        *(torch.empty(1).device.type, torch.get_default_device().type),
        *(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
    ]


def see_modes(number: int, switch: Callable[[], None] = switch) -> list[list[Any]]:
    outer, inner = BLOCKS[number]
    seen = [see(switch)]
    with outer():
        seen.append(see(switch))
        with inner():
            seen.append(see(switch))
    return [*seen, see(switch)]


def test_modes_are_those_of_the_rank() -> None:
    """Each rank has different modes, and sees what it would see alone."""
    expected = [see_modes(number, stay) for number in range(len(BLOCKS))]
    for plain, outer, inner, after in expected:
        assert plain == after != outer != inner
    assert run(lambda: see_modes(dist.get_rank()), len(BLOCKS)) == expected


def test_modes_of_the_caller_are_not_those_of_ranks() -> None:
    """As on real ranks, which are separate processes."""
    plain = see(stay)
    with (
        torch.inference_mode(),
        setting(torch.set_default_dtype, DOUBLE, SINGLE),
        setting(torch.set_default_device, "meta", None),
    ):
        assert run(see) == [plain] * 3
        assert (torch.get_default_dtype(), torch.get_default_device().type) == (DOUBLE, "meta")


def cached_casts() -> float:
    """Under autocast, the cast of a parameter is kept until the end of the block.

    It must not be the cast of another rank.
    """
    weight = torch.nn.Parameter(torch.ones(2, 2))
    for step in range(3):
        with torch.autocast("cpu", dtype=BRAIN):
            switch()
            result = (torch.ones(2, 2) @ weight).sum().item()
            switch()
        assert result == 8.0 * (1 + step)
        with torch.no_grad():
            weight += 1
    return result


def inference_buffers() -> list[float]:
    """A message arrives in a tensor that was created in inference mode, on some ranks."""
    rank = dist.get_rank()
    with torch.inference_mode(rank % 2 == 1):
        row, sums = torch.zeros(2, 4)[1], torch.ones(2)
        exchange(torch.full((4,), float(rank)), row)
        dist.all_reduce(sums)
        return [*row.tolist(), *sums.tolist()]


def leaf_that_wants_gradients() -> tuple[bool, Any]:
    """Messages are not part of the autograd graph."""
    weight = torch.nn.Parameter(torch.full((3,), float(dist.get_rank())))
    received = torch.nn.Parameter(torch.zeros(3))
    exchange(weight * 2, received)
    (received * 3).sum().backward()
    return received.is_leaf, received.grad.tolist() if received.grad is not None else None


def moved_while_others_have_devices() -> list[float]:
    """Collectives and objects work if the default device has no data."""
    if dist.get_rank() == 1:
        torch.set_default_device("meta")
    total, objects = torch.ones(2, device="cpu"), [None] * 3
    dist.all_reduce(total)
    dist.all_gather_object(objects, dist.get_rank())
    assert objects == [0, 1, 2]
    return total.tolist()


# -- waits inside torch


class Doubling(TorchFunctionMode):
    """A mode that doubles the result of ``torch.full``."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.full else result


def from_pred() -> float:
    """Waits for the number of the previous rank."""
    number = torch.tensor([float(dist.get_rank())], device="cpu")
    return exchange(number, torch.zeros(1, device="cpu")).item()


def in_a_dispatch_mode() -> list[float]:
    """Counts the products of this rank only."""
    with FlopCounterMode(display=False) as counter:
        came = from_pred()
        for turn in range(2):
            if turn < dist.get_rank():
                torch.ones(2, 2) @ torch.ones(2, 2)
            dist.barrier()
        return [came, float(counter.get_total_flops())]


def in_hooks_on_saved_tensors() -> list[float]:
    x = torch.full((2,), 3.0, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        came = from_pred()
        y = x * x
    y.sum().backward()
    assert x.grad is not None
    return [came, *x.grad.tolist()]


def in_recomputation() -> list[float]:
    """The backward pass recomputes the forward pass, and waits again."""
    found: list[float] = []

    def wait(x: torch.Tensor) -> torch.Tensor:
        found.append(from_pred())
        return x * x * (1 + found[-1])

    x = torch.ones(2, requires_grad=True)
    checkpoint(wait, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    return [*found, *x.grad.tolist()]


def in_a_functional_gradient() -> list[float]:
    return torch.func.grad(lambda x: (x * x * (1 + from_pred())).sum())(torch.ones(2)).tolist()


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        (cached_casts, lambda rank, pred: 24.0),
        (inference_buffers, lambda rank, pred: [pred] * 4 + [3.0] * 2),
        (leaf_that_wants_gradients, lambda rank, pred: (True, [3.0] * 3)),
        (moved_while_others_have_devices, lambda rank, pred: [3.0, 3.0]),
        (in_a_dispatch_mode, lambda rank, pred: [pred, 16.0 * rank]),
        (in_hooks_on_saved_tensors, lambda rank, pred: [pred, 6.0, 6.0]),
        (in_recomputation, lambda rank, pred: [pred, pred, 2 * (1 + pred), 2 * (1 + pred)]),
        (in_a_functional_gradient, lambda rank, pred: [2 * (1 + pred)] * 2),
    ],
)
def test_messages_and_torch_do_not_get_into_each_others_way(
    worker: Callable[[], Any], expected: Callable[[int, float], Any]
) -> None:
    """A rank may wait in any mode, and wherever torch calls it."""
    assert run(worker) == [expected(rank, float((rank - 1) % 3)) for rank in range(3)]


def leave_open() -> float:
    """Rank 0 enters a mode, waits inside, and never leaves it."""
    if dist.get_rank() == 0:
        Doubling().__enter__()
    dist.barrier()
    return torch.full((1,), 3.0).item()


def test_a_mode_is_active_on_its_rank_only_even_if_it_is_left_open() -> None:
    assert run(leave_open) == [6.0, 3.0, 3.0]


# -- event loops


async def talk_in_coroutines() -> list[float]:
    async def total(value: float) -> float:
        tensor = torch.full((1,), value)
        dist.all_reduce(tensor)
        await asyncio.sleep(0)
        return tensor.item()

    dist.barrier()
    return await asyncio.gather(total(1.0), total(2.0))


def test_ranks_and_their_caller_have_loops_of_their_own() -> None:
    """A rank's wait blocks its own loop, as on real ranks; the caller may be a notebook's cell."""

    async def main() -> list[Any]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        results = run(lambda: asyncio.run(talk_in_coroutines()))
        await asyncio.sleep(0)
        assert (asyncio.get_running_loop(), asyncio.current_task()) == (loop, task)
        return results

    assert asyncio.run(main()) == [[3.0, 6.0]] * 3


# -- state that a process has once


def use_variables() -> list[str | None]:
    rank = dist.get_rank()
    os.environ["OF_THE_RANK"] = f"{rank}"
    if rank == 1:
        del os.environ["OF_THE_CALLER"]
    switch()
    assert os.environ.copy() == dict(os.environ)
    assert ("OF_THE_CALLER" in os.environ) == (rank != 1)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OF_THE_RANK", "OF_THE_CALLER")
    return [os.getenv(name) for name in names]


def test_environment_variables_are_the_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_CALLER", "here")
    assert run(use_variables) == [
        [f"{rank}", f"{rank}", "3", f"{rank}", None if rank == 1 else "here"] for rank in range(3)
    ]
    assert "OF_THE_RANK" not in os.environ


def handle_signals() -> bool:
    wanted = [signal.getsignal(signal.SIGTERM), lambda *_: None, signal.SIG_IGN][dist.get_rank()]
    before = signal.getsignal(signal.SIGTERM)
    assert signal.signal(signal.SIGTERM, wanted) == before
    switch()
    return signal.getsignal(signal.SIGTERM) == wanted


def test_signal_handlers_are_the_ranks_own() -> None:
    assert run(handle_signals) == [True] * 3


@pytest.mark.parametrize(
    "ask", [lambda: signal.alarm(1), lambda: signal.setitimer(signal.ITIMER_REAL, 1.0)]
)
def test_a_timer_of_signals_is_refused(ask: Callable[[], Any]) -> None:
    with pytest.raises(RingError, match="do not work on simulated ranks"):
        run(ask)


def change_everything(where: str, fails: bool) -> str:
    os.chdir(where)
    sys.setrecursionlimit(sys.getrecursionlimit() + 100)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_default_dtype(DOUBLE)
    dist.barrier()
    torch.set_default_device("meta")
    torch.autograd.set_detect_anomaly(True)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    torch.set_grad_enabled(False)
    warnings.simplefilter("error")
    seed_streams(7)
    os.environ["OF_THE_RANK"] = "7"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if fails and dist.get_rank() == 1:
        raise ValueError("with all of it in force")
    return os.getcwd()


def test_what_ranks_leave_behind_is_gone(tmp_path: Path) -> None:
    before, plain = look(), see(stay)
    assert run(change_everything, 3, str(tmp_path), False) == [str(tmp_path)] * 3
    with pytest.raises(RankFailed, match="rank 1 of 3 raised ValueError: with all of it in force"):
        run(change_everything, 3, str(tmp_path), True)
    assert look() == before
    assert run(see) == [plain] * 3
