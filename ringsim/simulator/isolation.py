"""What belongs to one rank, though all simulated ranks share a thread.

Modes of torch and random numbers. A rank that waits takes its modes out and leaves the common ones,
those that ``simulate`` was called under; when it goes on, it puts its own back in. Most ranks have
changed nothing, which a few questions tell. Everything is read and written by public functions.

* Each rank has its own: gradients, inference mode, autocast, default dtype, default device, anomaly
  mode, deterministic algorithms, the running ``asyncio`` loop, torch's CPU generator, and streams
  for the functions of ``random`` and ``np.random`` called as ``random.x()`` and ``np.random.x()``.
* A rank must not wait inside: a block of ``torch.device``, other torch modes, saved-tensor hooks,
  ``torch.func``, a backward pass.
* Shared, and put back after the run: filters of ``warnings``, the working directory, the recursion
  limit, torch's threads; and the stream of functions of ``random`` and ``np.random`` that were
  imported by name before. The trace says if a rank drew from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from ringsim.errors import RingError

__all__ = ["PRIVATE_QUESTIONS", "Isolated", "Isolation", "ask_modes"]

_DEVICES: Final = ("cpu", "cuda", "xpu", "mps")  # whose autocast settings are kept

# Questions that torch answers nowhere in public, with the answer where nothing is going on. They
# change nothing; where a version of torch lacks one, what it would tell goes unnoticed.
PRIVATE_QUESTIONS: Final[dict[str, Any]] = {
    "_is_any_autocast_enabled": False,
    "_len_torch_function_stack": 0,
    "_len_torch_dispatch_stack": 0,
    "_current_graph_task_id": -1,
    "_autograd._top_saved_tensors_default_hooks": None,
    "_functorch.peek_interpreter_stack": None,
}


def _question(name: str) -> Callable[..., Any]:
    found: Any = torch._C
    for part in name.split("."):
        if not hasattr(found, part):
            return lambda *_: PRIVATE_QUESTIONS[name]
        found = getattr(found, part)
    question: Callable[..., Any] = found
    return question


_grad: Final = torch.is_grad_enabled
_inference: Final = torch.is_inference_mode_enabled
_dtype: Final = torch.get_default_dtype
_anomaly: Final = torch.is_anomaly_enabled
_deterministic: Final = torch.are_deterministic_algorithms_enabled
_loop: Final = asyncio._get_running_loop
_autocast, _functions, _dispatches, _backward, _saved, _functorch = map(
    _question, PRIVATE_QUESTIONS
)


def ask_modes() -> tuple[Any, ...]:
    """Returns what tells whether the common modes are in force, and nothing is open.

    Asked at every switch.
    """
    modes = _grad(), _inference(), _dtype(), _anomaly(), _deterministic(), _autocast(), _loop()
    return modes, _functions(), _dispatches(), _backward(), _saved(True), _functorch()


class _Modes(NamedTuple):
    """The modes of a rank that is not running."""

    settings: list[Any]  # the values of `_SETTINGS`
    # the context that leads out of its inference mode; None where that is the common one
    inference: Any
    nesting: int  # how many autocast blocks are open
    device: torch.device | None  # its default device; None for the common one


class Isolated:
    """What one rank has for itself."""

    __slots__ = ("generator", "modes", "seed", "streams")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.modes: _Modes | None = None  # while another rank runs; None for the common ones
        # the state of torch's, likewise; None before the rank has begun, too
        self.generator: torch.Tensor | None = None
        # its generators for the functions of `random` and `np.random`
        self.streams: dict[Any, Any] = {}


class Isolation:
    """Keeps the ranks of one simulation apart; a context, in force while they run.

    Args:
        seed: of the random numbers that ranks share.

    Attributes:
        common: what ``ask_modes`` says while the common modes are in force; None where only a
            closer look can tell.
        shared_draws: after the block, which shared generators ranks have drawn from: "random",
            "numpy.random".

    Example:
        >>> import torch
        >>> one, other = Isolated(seed=1), Isolated(seed=2)
        >>> with Isolation(seed=0) as isolation:
        ...     isolation.put(one)
        ...     torch.set_grad_enabled(False)
        ...     isolation.take(one)
        ...     isolation.put(other)
        ...     print(torch.is_grad_enabled())
        ...     isolation.put(one)
        ...     print(torch.is_grad_enabled())
        ...     isolation.leave()
        torch.autograd.grad_mode.set_grad_enabled(mode=False)
        True
        False
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._current: Isolated | None = None  # the rank that runs
        self._holder: Isolated | None = None  # the rank whose numbers torch's generator gives
        self._blocks = contextlib.ExitStack()
        self.shared_draws: list[str] = []

    def __enter__(self) -> Isolation:
        self._inference, self._functions, self._dispatches, self._saved = (
            _inference(),
            _functions(),
            _dispatches(),
            _saved(True),
        )
        self._device = torch.get_default_device() if self._functions else None
        self._blocks.enter_context(_keep_process())
        # what an open block changes shows only at a closer look
        self.common = None if _autocast() or self._functions else ask_modes()
        self._settings = [read() for read, _ in _SETTINGS]
        self._blocks.enter_context(self._own_random_numbers())
        return self

    def __exit__(self, *exc: object) -> None:
        self._blocks.close()

    # -- switches

    def take(self, own: Isolated) -> None:
        """Puts the common modes in force, in the place of those of a rank that gives way.

        Where ``ask_modes`` does not say ``common``.

        Raises:
            RingError: the rank is inside something that cannot be taken out.
        """
        self._check("a simulated rank must not wait for others {}, got a wait there")
        own.modes = self._take()

    def put(self, own: Isolated) -> None:
        """Puts modes and random numbers of a rank in force; the common modes must be.

        Seeds a rank that begins.
        """
        self._current = own
        holder = self._holder
        if holder is not own:
            generator = torch.default_generator
            if holder is not None:
                holder.generator = generator.get_state()
            if own.generator is None:
                generator.manual_seed(own.seed)
            else:
                generator.set_state(own.generator)
                own.generator = None  # its 5 KB are at hand for the next state that is read
            self._holder = own
        if own.modes is not None:
            self._put(own.modes)
            own.modes = None

    def leave(self) -> None:
        """Puts the common modes in force after a rank has ended.

        Raises:
            RingError: the rank has left something open that cannot be taken out.
        """
        self._current = None
        if ask_modes() != self.common:
            try:
                self._check("a simulated rank must leave what it has entered, got an end {}")
            finally:
                self._take()

    def _take(self) -> _Modes:
        settings = [read() for read, _ in _SETTINGS]
        nesting = 0
        while torch.autocast_decrement_nesting() >= 0:
            nesting += 1
        torch.autocast_increment_nesting()
        torch.clear_autocast_cache()  # it holds casts of the rank's own parameters
        guard = None
        if _inference() is not self._inference:
            guard = torch.inference_mode(self._inference)
            guard.__enter__()
        for (_, write), value in zip(_SETTINGS, self._settings, strict=True):
            write(value)
        return _Modes(settings, guard, nesting, self._take_device())

    def _put(self, modes: _Modes) -> None:
        if modes.inference is not None:
            modes.inference.__exit__(None, None, None)
        for (_, write), value in zip(_SETTINGS, modes.settings, strict=True):
            write(value)
        for _ in range(modes.nesting):
            torch.autocast_increment_nesting()
        if modes.device is not None:
            torch.set_default_device(modes.device)

    def _take_device(self) -> torch.device | None:
        """Puts the common default device in force.

        Returns the one that was, None where it is the same or a block's.
        """
        device, depth = torch.get_default_device(), _functions()
        if depth == self._functions and device == (self._device or device):
            return None
        if abs(depth - self._functions) <= 1:  # more are blocks
            torch.set_default_device(self._device)
        return device if _functions() == self._functions else None

    def _check(self, rule: str) -> None:
        """Raises RingError where something is open that cannot be taken out."""
        where = self._find_open()
        if where:
            raise RingError(
                f"{rule.format(where)}: torch keeps it for the thread, which all simulated ranks "
                "share. Move the communication out of it, "
                "or run on real ranks: ringsim.trace."
            )

    def _find_open(self) -> str:
        if _backward() != -1:
            return "in a backward pass"
        if _dispatches() != self._dispatches:
            return "inside a torch dispatch mode"
        if _saved(True) is not self._saved:
            return "inside hooks on saved tensors"
        if _functorch() is not None:
            return "inside a transformation of torch.func"
        device = self._take_device()
        found = _functions() != self._functions
        if device is not None:
            torch.set_default_device(device)
        return "inside a torch function mode, or a block of torch.device" if found else ""

    # -- random numbers

    @contextlib.contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Gives the ranks streams of their own, and the caller back its own as they were."""
        outside, torch_state = _read_streams(), torch.default_generator.get_state()
        random.seed(self._seed)
        np.random.seed(self._seed % 2**32)
        begin = _read_streams()
        originals = [
            (module, name, getattr(module, name), method)
            for module, name, method in _list_functions()
        ]
        for module, name, original, method in originals:
            setattr(module, name, self._stand_in(module, method, original))
        try:
            yield
        finally:
            for module, name, original, _ in originals:
                setattr(module, name, original)
            self.shared_draws = [
                name
                for name, state in _read_streams().items()
                if pickle.dumps(state) != pickle.dumps(begin[name])
            ]
            random.setstate(outside["random"])
            np.random.set_state(outside["numpy.random"])
            torch.default_generator.set_state(torch_state)

    def _stand_in(
        self, module: Any, method: str, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Returns a function that draws from the running rank's stream, made at its first draw."""

        @functools.wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            own = self._current
            if own is None:
                return original(*args, **kwargs)
            if module not in own.streams:
                own.streams[module] = (
                    random.Random(own.seed)
                    if module is random
                    else np.random.RandomState(own.seed % 2**32)
                )
            return getattr(own.streams[module], method)(*args, **kwargs)

        return draw


def _read_streams() -> dict[str, Any]:
    return {"random": random.getstate(), "numpy.random": np.random.get_state()}


def _list_functions() -> list[tuple[Any, str, str]]:
    """Returns the functions of ``random`` and ``np.random`` that draw from the shared stream.

    Module, name, method of a generator.
    """
    found: list[tuple[Any, str, str]] = [
        (np.random, "seed", "seed"),
        (np.random, "ranf", "random_sample"),
        (np.random, "sample", "random_sample"),
    ]
    for module, kind in ((random, random.Random), (np.random, np.random.RandomState)):
        found += [
            (module, name, name)
            for name in module.__all__
            if isinstance(getattr(getattr(module, name), "__self__", None), kind)
        ]
    return found


# -- settings that are read and written


def _read_autocast() -> tuple[Any, ...]:
    """Returns (whether it is on, dtype) for each device, and whether casts are cached."""
    found = [
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES
    ]
    return *found, torch.is_autocast_cache_enabled()


def _write_autocast(settings: tuple[Any, ...]) -> None:
    *devices, cached = settings
    for device, (enabled, dtype) in zip(_DEVICES, devices, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(cached)


def _read_loop() -> tuple[Any, Any, Any] | None:
    """Returns the running event loop, its task, and its hooks for asynchronous generators.

    None where none runs.
    """
    loop = _loop()
    return None if loop is None else (loop, asyncio.current_task(loop), sys.get_asyncgen_hooks())


def _write_loop(wanted: tuple[Any, Any, Any] | None) -> None:
    """Makes a loop the running one.

    It and its task as the page "Extending" of the documentation of ``asyncio`` says.
    """
    found = _read_loop()
    if found is not None:
        loop, task, _ = found
        if task is not None:
            asyncio._leave_task(loop, task)
        asyncio._set_running_loop(None)
        sys.set_asyncgen_hooks(None, None)
    if wanted is not None:
        loop, task, hooks = wanted
        asyncio._set_running_loop(loop)
        sys.set_asyncgen_hooks(*hooks)
        if task is not None:
            asyncio._enter_task(loop, task)


_SETTINGS: Final[tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...]] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_read_autocast, _write_autocast),
    (
        lambda: (_anomaly(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
    (
        lambda: (_deterministic(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    (_read_loop, _write_loop),
)


@contextlib.contextmanager
def _keep_process() -> Iterator[None]:
    """Puts back what ranks share.

    Filters of warnings, directory, recursion limit, torch's threads and default device. The event
    loop that the caller may run in, as a notebook does, is put away meanwhile.
    """
    loop = _read_loop()
    recursion, threads, functions = sys.getrecursionlimit(), torch.get_num_threads(), _functions()
    device = torch.get_default_device() if functions else None
    try:
        directory = os.getcwd()
    except OSError:  # it is gone
        directory = None
    with warnings.catch_warnings():
        _write_loop(None)
        try:
            yield
        finally:
            _write_loop(loop)
            sys.setrecursionlimit(recursion)
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            if _functions() != functions or (
                device is not None and torch.get_default_device() != device
            ):
                torch.set_default_device(device)
            if directory is not None:
                os.chdir(directory)
