"""What belongs to a rank stays with it, where ranks take turns in one thread, and comes back to the caller as it was."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from random import gauss
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import standard_normal
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ringsim
from ringsim import comm as dist
from ringsim.errors import RingError
from ringsim.simulator.api import simulate
from ringsim.simulator.isolation import PRIVATE_QUESTIONS

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)


def run(worker: Callable[..., Any], world_size: int = 3, *args: Any, **kwargs: Any) -> list[Any]:
    return simulate(worker, world_size=world_size, args=args, link=LINK, **kwargs).results


def switch() -> None:
    """Lets all other ranks go on before this one does."""
    ring = ringsim.current_ring()
    out, back = (torch.zeros(2, dtype=torch.float32) for _ in range(2))
    with_both = [dist.isend(out, ring.succ, group=ring.succ_group), dist.irecv(back, ring.pred, group=ring.pred_group)]
    for handle in with_both:
        handle.wait()


def draw(times: int, switch: Callable[[], None] = switch) -> list[Any]:
    """Draws an odd number of normal numbers, so that each generator has one drawn ahead when it is left."""
    drawn: list[Any] = []
    for _ in range(times):
        drawn += [random.random(), random.gauss(0, 1), random.randrange(1000)]
        switch()
        drawn += [float(np.random.standard_normal()), float(np.random.random()), int(np.random.randint(1000))]
        switch()
        drawn += [torch.randn(1).item(), torch.rand(623).sum().item(), torch.randn(1, dtype=torch.float64).item()]
        switch()
        drawn += [random.gauss(0, 1), float(np.random.standard_normal()), torch.randn(1).item(), torch.rand(624)[0].item()]
    return drawn


def seed_streams(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draw_alone(seed: int, times: int) -> list[Any]:
    """The same without ranks."""
    seed_streams(seed)
    return draw(times, lambda: None)


def test_random_numbers_are_those_of_the_rank() -> None:
    expected = [draw_alone(11 + rank, 4) for rank in range(3)]
    seed_streams(5)
    outside = draw_alone(5, 1)
    seed_streams(5)
    assert run(draw, 3, 4, seed=11) == expected
    assert draw_alone(5, 1) == outside  # the caller's own are as they were


def draw_by_name() -> list[float]:
    switch()
    return [gauss(0, 1), float(standard_normal())]


def test_functions_imported_by_name_share_a_stream_and_the_trace_says_so() -> None:
    seed_streams(5)
    outside = draw_alone(5, 1)
    seed_streams(5)
    trace = simulate(draw_by_name, world_size=2, link=LINK, seed=3)
    first, second = trace.results
    assert first != second
    assert any("numpy.random" in note and "share" in note for note in trace.metadata["notes"])
    assert draw_alone(5, 1) == outside
    assert simulate(reseed, world_size=2, link=LINK).metadata["notes"] == []


def test_the_private_questions_are_there() -> None:
    """What this version of torch lacks goes unnoticed: look for another way to ask."""
    for name, quiet in PRIVATE_QUESTIONS.items():
        question = functools.reduce(getattr, name.split("."), torch._C)
        assert (question(True) if "hooks" in name else question()) == quiet


def reseed() -> list[float]:
    """Draws, and seeds anew with one number on all ranks."""
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        switch()
        drawn += [torch.rand(1).item(), float(np.random.random()), random.random()]
        switch()
    return drawn


def test_a_rank_may_seed_anew() -> None:
    first, *others = run(reseed)
    assert len(set(first)) == 6
    assert all(other == first for other in others)


SEEDED: dict[str, tuple[Callable[[int], Any], Callable[[], Any]]] = {  # how to seed, and to draw
    "torch": (torch.manual_seed, lambda: torch.rand(1).item()),
    "torch above 32 bits": (lambda seed: torch.manual_seed(7 + (seed << 32)), torch.initial_seed),
    "numpy": (lambda seed: np.random.seed(seed), lambda: float(np.random.random())),
    "random": (lambda seed: random.seed(seed), lambda: random.random()),
}


def seed_twice(what: str, switch: Callable[[], None] = switch) -> Any:
    """Seeds twice before it draws, and waits in between."""
    seed, draw = SEEDED[what]
    for number in (1, 2):
        seed(number)
        switch()
    return draw()


@pytest.mark.parametrize("what", SEEDED)
def test_a_seed_counts_that_nobody_has_drawn_from(what: str) -> None:
    assert run(seed_twice, 2, what) == [seed_twice(what, lambda: None)] * 2


def own_modes() -> list[Any]:
    """Each rank has other modes, and looks at them after each switch."""
    rank = ringsim.current_ring().rank
    seen = []

    def look() -> tuple[Any, ...]:
        switch()
        x = torch.ones(2, requires_grad=True) * 2
        y = torch.ones(2, 2) @ torch.ones(2, 2)
        return x.requires_grad, x.is_inference(), y.dtype, torch.tensor(1.0).dtype, torch.is_grad_enabled()

    seen.append(look())
    if rank == 0:
        with torch.no_grad():
            seen.append(look())
            with torch.enable_grad():
                seen.append(look())
    elif rank == 1:
        with torch.inference_mode():
            seen.append(look())
            with torch.inference_mode(False):
                seen.append(look())
    elif rank == 2:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            seen.append(look())
            with torch.autocast("cpu", enabled=False):
                seen.append(look())
    else:
        torch.set_default_dtype(torch.float64)
        seen.append(look())
        torch.set_default_dtype(torch.float16)
        seen.append(look())
        torch.set_default_dtype(torch.float32)
    seen.append(look())
    return seen


def test_modes_are_those_of_the_rank() -> None:
    single, double, half, brain = torch.float32, torch.float64, torch.float16, torch.bfloat16
    plain = (True, False, single, single, True)
    assert run(own_modes, 4) == [
        [plain, (False, False, single, single, False), plain, plain],
        [plain, (False, True, single, single, False), plain, plain],
        [plain, (True, False, brain, single, True), plain, plain],
        [plain, (True, False, double, double, True), (True, False, half, half, True), plain],
    ]
    assert (torch.is_grad_enabled(), torch.get_default_dtype(), torch._C._is_any_autocast_enabled()) == (True, single, False)


def test_modes_of_the_caller_are_those_of_all_ranks() -> None:
    def look() -> bool:
        switch()
        return torch.is_grad_enabled()

    with torch.no_grad():
        assert run(look) == [False] * 3
        assert not torch.is_grad_enabled()


def cached_casts() -> float:
    """Under autocast the cast of a parameter is kept until the end of the block: not of another rank's."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    for step in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            switch()
            result = (torch.ones(2, 2) @ weight).sum().item()
            switch()
        assert result == 8.0 * (1 + step)
        with torch.no_grad():
            weight += 1
    return result


def test_casts_are_not_kept_for_too_long() -> None:
    assert run(cached_casts) == [24.0] * 3


def inference_buffers() -> list[float]:
    """A message lands in a tensor that was made in inference mode, while the rank that sends is in none, and the other way round."""
    ring = ringsim.current_ring()
    if ring.rank % 2:
        with torch.inference_mode():
            return talk(ring)
    return talk(ring)


def talk(ring: Any) -> list[float]:
    columns = torch.zeros(4, 2)
    strided, sums = columns[:, 0], torch.ones(2)
    sending = dist.isend(torch.full((4,), float(ring.rank)), ring.succ, group=ring.succ_group)
    dist.recv(strided, ring.pred, group=ring.pred_group)
    sending.wait()
    dist.all_reduce(sums)
    return [*strided.tolist(), *sums.tolist()]


def test_tensors_of_inference_mode_are_written_to() -> None:
    assert run(inference_buffers, 4) == [[float((rank - 1) % 4)] * 4 + [4.0] * 2 for rank in range(4)]


def leaf_that_wants_gradients() -> tuple[bool, Any]:
    ring = ringsim.current_ring()
    weight = torch.nn.Parameter(torch.full((3,), float(ring.rank)))
    sending = dist.isend(weight * 2, ring.succ, group=ring.succ_group)
    received = torch.nn.Parameter(torch.zeros(3))
    dist.recv(received, ring.pred, group=ring.pred_group)
    sending.wait()
    (received * 3).sum().backward()
    return received.is_leaf, received.grad.tolist() if received.grad is not None else None


def test_messages_are_no_part_of_a_history() -> None:
    assert run(leaf_that_wants_gradients) == [(True, [3.0] * 3)] * 3


class Talking(torch.autograd.Function):
    """Communicates in its forward pass, where gradients are off."""

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


def test_a_function_of_autograd_may_talk_in_its_forward_pass() -> None:
    assert run(talk_in_forward) == [(True, 4.0)] * 3


class Unchanged(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def switch_and(result: Any) -> Any:
    switch()
    return result


def in_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: switch())
    (x * 2).sum().backward()


def in_block(make: Callable[[], Any]) -> None:
    with make():
        switch()


def in_recomputation() -> None:
    checkpoint(lambda x: switch_and(x * 2), torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()


def in_functional_gradient() -> None:
    torch.func.grad(lambda x: switch_and((x * x).sum()))(torch.ones(2))


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        (in_backward, "in a backward pass"),
        (lambda: in_block(Unchanged), "inside a torch function mode"),
        (lambda: in_block(lambda: FlopCounterMode(display=False)), "inside a torch dispatch mode"),
        (lambda: in_block(torch.autograd.graph.save_on_cpu), "inside hooks on saved tensors"),
        (in_recomputation, "hooks on saved tensors"),
        (in_functional_gradient, "inside a transformation of torch.func"),
    ],
)
def test_what_cannot_be_right_raises(worker: Callable[[], None], words: str) -> None:
    with pytest.raises(RingError, match="must not wait for others") as caught:
        run(worker)
    assert words in str(caught.value)
    assert run(own_modes, 4)[0][0][0]  # and leaves nothing behind


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
