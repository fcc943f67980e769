"""Each rank keeps its own state, although ranks share a process; the caller's does not change."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
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


def draw_alone(seed: int, times: int) -> list[Any]:
    """Draws the same numbers without ranks."""
    seed_streams(seed)
    return draw(times, lambda: None)


def test_random_numbers_are_those_of_the_rank() -> None:
    expected, outside = [draw_alone(11 + rank, 4) for rank in range(3)], draw_alone(5, 1)
    seed_streams(5)
    own = ringsim.simulate(draw, world_size=3, args=(4,), link=LINK, seed=11)
    assert own.results == expected
    assert own.metadata["notes"] == []
    assert draw(1, lambda: None) == outside  # the caller's streams have not changed


def test_functions_imported_by_name_draw_from_the_ranks_own_numbers_too() -> None:
    expected = []
    for rank in range(2):
        seed_streams(3 + rank)
        expected.append([random.gauss(0, 1), float(np.random.standard_normal())])
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
    assert run(seed_anew, 3, what) == [seed_anew(what, lambda: None)] * 3


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


def see() -> dict[str, Any]:
    """Looks at the modes after other ranks have set theirs."""
    switch()
    x = torch.ones(2, requires_grad=True) * 2
    return {
        "grad": (torch.is_grad_enabled(), x.requires_grad),
        "inference": x.is_inference(),
        "product": (torch.ones(2, 2) @ torch.ones(2, 2)).dtype,
        "number": torch.tensor(1.0).dtype,
        "device": (torch.empty(1).device.type, torch.get_default_device().type),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "precision": torch.get_float32_matmul_precision(),
    }


SINGLE, DOUBLE, HALF, BRAIN = torch.float32, torch.float64, torch.float16, torch.bfloat16
PLAIN = {
    "grad": (True, True),
    "inference": False,
    "product": SINGLE,
    "number": SINGLE,
    "device": ("cpu", "cpu"),
    "anomaly": (False, True),
    "deterministic": (False, False),
    "precision": "highest",
}
OFF, PRECISION = (False, False), torch.set_float32_matmul_precision
Block = Callable[[], AbstractContextManager[Any]]
Changes = dict[str, Any]
# a mode, the state it changes, another mode inside, and the state that both change
BLOCKS: list[tuple[Block, Changes, Block, Changes]] = [
    (torch.no_grad, {"grad": OFF}, torch.enable_grad, {}),
    (torch.inference_mode, {"grad": OFF, "inference": True},
     partial(torch.inference_mode, False), {}),
    (partial(torch.autocast, "cpu", dtype=BRAIN), {"product": BRAIN},
     partial(torch.autocast, "cpu", enabled=False), {}),
    (partial(setting, torch.set_default_dtype, DOUBLE, SINGLE),
     {"product": DOUBLE, "number": DOUBLE},
     partial(setting, torch.set_default_dtype, HALF, DOUBLE), {"product": HALF, "number": HALF}),
    (partial(setting, torch.set_default_device, "meta", None), {"device": ("meta", "meta")},
     partial(setting, torch.set_default_device, "cpu", "meta"), {}),
    (partial(torch.autograd.set_detect_anomaly, True, check_nan=False), {"anomaly": (True, False)},
     partial(torch.autograd.set_detect_anomaly, False), {}),
    (partial(setting, set_deterministic, 1, 0), {"deterministic": (True, True)},
     partial(setting, set_deterministic, 2, 1), {"deterministic": (True, False)}),
    (partial(setting, PRECISION, "high", "highest"), {"precision": "high"},
     partial(setting, PRECISION, "medium", "high"), {"precision": "medium"}),
]  # fmt: skip


def see_own_modes() -> list[dict[str, Any]]:
    """Each rank has different modes."""
    outer, _, inner, _ = BLOCKS[dist.get_rank()]
    seen = [see()]
    with outer():
        seen.append(see())
        with inner():
            seen.append(see())
    return [*seen, see()]


def test_modes_are_those_of_the_rank() -> None:
    expected = [[PLAIN, {**PLAIN, **one}, {**PLAIN, **both}, PLAIN] for _, one, _, both in BLOCKS]
    assert run(see_own_modes, len(BLOCKS)) == expected


def test_modes_of_the_caller_are_not_those_of_ranks() -> None:
    """As on real ranks, which are separate processes."""
    with (
        torch.inference_mode(),
        setting(torch.set_default_dtype, DOUBLE, SINGLE),
        setting(torch.set_default_device, "meta", None),
    ):
        assert run(see) == [PLAIN] * 3
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
    """A message arrives in a tensor that was created in inference mode.

    The sending rank is not in this mode; then the other way around.
    """
    ring = ringsim.current_ring()
    with torch.inference_mode(ring.rank % 2 == 1):
        row, sums = torch.zeros(2, 4)[1], torch.ones(2)
        exchange(torch.full((4,), float(ring.rank)), row)
        dist.all_reduce(sums)
        return [*row.tolist(), *sums.tolist()]


def leaf_that_wants_gradients() -> tuple[bool, Any]:
    """Messages are not part of the autograd graph."""
    weight = torch.nn.Parameter(torch.full((3,), float(dist.get_rank())))
    received = torch.nn.Parameter(torch.zeros(3))
    exchange(weight * 2, received)
    (received * 3).sum().backward()
    return received.is_leaf, received.grad.tolist() if received.grad is not None else None


class Talking(torch.autograd.Function):
    """A module that communicates in its forward pass, where gradients are off."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        switch()
        assert not torch.is_grad_enabled()
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def talk_in_forward() -> tuple[bool, float]:
    x = torch.ones(2, requires_grad=True)
    y = Talking.apply(x) * 2
    switch()
    y.sum().backward()
    assert x.grad is not None
    return torch.is_grad_enabled(), x.grad.sum().item()


def moved_while_others_have_devices() -> list[float]:
    """Collectives and objects work if the default device has no data."""
    if dist.get_rank() == 1:
        torch.set_default_device("meta")
    total, objects = torch.ones(2, device="cpu"), [None] * 3
    dist.all_reduce(total)
    dist.all_gather_object(objects, dist.get_rank())
    assert objects == [0, 1, 2]
    return total.tolist()


async def talk_in_coroutines() -> list[Any]:
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

    loop = asyncio.get_running_loop()
    numbers = [number async for number in count()]
    totals = await asyncio.gather(total(1.0), total(2.0))
    assert asyncio.get_running_loop() is loop
    return [numbers, totals]


def in_a_loop() -> list[Any]:
    """A rank's wait blocks its own event loop, as on real ranks, and no other loop."""
    return asyncio.run(talk_in_coroutines())


@pytest.mark.parametrize(
    ("worker", "results"),
    [
        (cached_casts, [24.0] * 3),
        (inference_buffers, [[float((rank - 1) % 3)] * 4 + [3.0] * 2 for rank in range(3)]),
        (leaf_that_wants_gradients, [(True, [3.0] * 3)] * 3),
        (talk_in_forward, [(True, 4.0)] * 3),
        (moved_while_others_have_devices, [[3.0, 3.0]] * 3),
        (in_a_loop, [[[0, 1], [3.0, 6.0]]] * 3),
    ],
)
def test_messages_and_modes_do_not_get_into_each_others_way(
    worker: Callable[[], Any], results: list[Any]
) -> None:
    assert run(worker) == results


def test_a_caller_may_have_a_loop() -> None:
    """Tests a caller inside an event loop, such as the cell of a notebook."""

    async def main() -> list[Any]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        results = run(in_a_loop)
        await asyncio.sleep(0)
        assert (asyncio.get_running_loop(), asyncio.current_task()) == (loop, task)
        return results

    assert asyncio.run(main()) == [[[0, 1], [3.0, 6.0]]] * 3


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


def in_backward() -> tuple[float, list[float]]:
    """A hook waits for other ranks, and so does the gradient."""
    found: list[float] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: found.append(from_pred()))
    x.register_hook(lambda grad: grad * (1 + from_pred()))
    (x * 2).sum().backward()
    assert x.grad is not None
    return found[0], x.grad.tolist()


def in_a_function_mode() -> list[float]:
    """The mode is active on one rank only."""
    if dist.get_rank() != 1:
        return [from_pred(), torch.full((1,), 3.0).item()]
    with Doubling():
        return [from_pred(), torch.full((1,), 3.0).item()]


def in_a_dispatch_mode() -> list[float]:
    """Counts the products of this rank only."""
    with FlopCounterMode(display=False) as counter:
        came = [from_pred()]
        for _ in range(dist.get_rank()):
            torch.ones(2, 2) @ torch.ones(2, 2)
            dist.barrier()
        for _ in range(2 - dist.get_rank()):
            dist.barrier()
        return [*came, float(counter.get_total_flops())]


def in_hooks_on_saved_tensors() -> list[float]:
    x = torch.full((2,), 3.0, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        came = from_pred()
        y = x * x
    y.sum().backward()
    assert x.grad is not None
    return [came, *x.grad.tolist()]


def in_a_block_of_a_device() -> list[Any]:
    """The device is set on one rank only."""
    with torch.device("meta" if dist.get_rank() == 1 else "cpu"):
        return [from_pred(), torch.zeros(1).device.type]


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
    ("worker", "of_pred"),
    [
        (in_backward, lambda rank, pred: (pred, [2 * (1 + pred)] * 2)),
        (in_a_function_mode, lambda rank, pred: [pred, 6.0 if rank == 1 else 3.0]),
        (in_a_dispatch_mode, lambda rank, pred: [pred, 16.0 * rank]),
        (in_hooks_on_saved_tensors, lambda rank, pred: [pred, 6.0, 6.0]),
        (in_a_block_of_a_device, lambda rank, pred: [pred, "meta" if rank == 1 else "cpu"]),
        (in_recomputation, lambda rank, pred: [pred, pred, 2 * (1 + pred), 2 * (1 + pred)]),
        (in_a_functional_gradient, lambda rank, pred: [2 * (1 + pred)] * 2),
    ],
)
def test_a_rank_may_wait_wherever_torch_calls_it(
    worker: Callable[[], Any], of_pred: Callable[[int, float], Any]
) -> None:
    assert run(worker) == [of_pred(rank, float((rank - 1) % 3)) for rank in range(3)]


def leave_open() -> float:
    """Rank 0 enters a mode and never leaves it."""
    if dist.get_rank() == 0:
        Doubling().__enter__()
    dist.barrier()
    return torch.full((1,), 3.0).item()


def test_a_mode_that_is_left_open_is_left_to_its_rank() -> None:
    assert run(leave_open) == [6.0, 3.0, 3.0]


# -- state that a process has once


def use_variables() -> list[Any]:
    """Each rank sees the variables of the caller, and its own changes."""
    rank = dist.get_rank()
    os.environ["OF_THE_RANK"] = f"{rank}"
    if rank == 1:
        del os.environ["OF_THE_CALLER"]
    switch()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OF_THE_RANK", "OF_THE_CALLER")
    assert os.environ.copy() == dict(os.environ)
    assert ("OF_THE_CALLER" in os.environ) == (rank != 1)
    return [os.environ.get(name) for name in names] + [os.getenv("OF_THE_RANK")]


def test_environment_variables_are_the_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_CALLER", "here")
    assert run(use_variables) == [
        [f"{rank}", f"{rank}", "3", f"{rank}", None if rank == 1 else "here", f"{rank}"]
        for rank in range(3)
    ]
    assert "OF_THE_RANK" not in os.environ


def ignore(number: int, frame: Any) -> None:
    pass


def handle_signals() -> list[bool]:
    """Some ranks set handlers, which apply only to them."""
    rank, first = dist.get_rank(), signal.getsignal(signal.SIGTERM)
    if rank:
        before = signal.signal(signal.SIGTERM, ignore if rank == 1 else signal.SIG_IGN)
        assert before == first
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    switch()
    wanted = [first, ignore, signal.SIG_IGN][rank]
    return [
        signal.getsignal(signal.SIGTERM) == wanted,
        (signal.getsignal(signal.SIGINT) == signal.SIG_DFL) == (rank > 0),
    ]


def test_signal_handlers_are_the_ranks_own() -> None:
    assert run(handle_signals) == [[True, True]] * 3


@pytest.mark.parametrize(
    "ask", [lambda: signal.alarm(1), lambda: signal.setitimer(signal.ITIMER_REAL, 1.0)]
)
def test_a_timer_of_signals_is_refused(ask: Callable[[], Any]) -> None:
    with pytest.raises(
        RingError, match="need a process for each rank and do not work on simulated ranks"
    ):
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
    before = look()
    assert run(change_everything, 3, str(tmp_path), False) == [str(tmp_path)] * 3
    with pytest.raises(RankFailed, match="rank 1 of 3 raised ValueError: with all of it in force"):
        run(change_everything, 3, str(tmp_path), True)
    assert look() == before
    assert run(see) == [PLAIN] * 3
