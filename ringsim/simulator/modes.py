"""What torch and Python keep for a thread, kept for each simulated rank: gradients on or off, inference mode, autocast, the default dtype.

The default device, warnings and some more are in ``surroundings``.

All ranks share one thread. A rank that gives way takes its modes out, so that they are those that ``simulate`` was called under, and puts
them back when it goes on. Most ranks have changed nothing, which a few questions tell.

Some things cannot be taken out: a stack of modes (``FakeTensorMode``), hooks on saved tensors, a transformation of ``torch.func``, a
backward pass. A rank that would give way in the midst of one gets an error instead.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from ringsim.errors import RingError
from ringsim.simulator.mode_words import find_words
from ringsim.simulator.surroundings import Surroundings, other_modes, read_surroundings, write_surroundings

__all__ = ["Modes", "TakenModes"]

_grad: Final = torch.is_grad_enabled
_inference: Final = torch.is_inference_mode_enabled
_autocast: Final = torch._C._is_any_autocast_enabled
_dtype: Final = torch.get_default_dtype
_functions: Final = torch._C._len_torch_function_stack
_dispatches: Final = torch._C._len_torch_dispatch_stack
_backward: Final = torch._C._current_graph_task_id
_saved: Final[Callable[[bool], Any]] = torch._C._autograd._top_saved_tensors_default_hooks
_functorch: Final = torch._C._functorch.peek_interpreter_stack
_anomaly: Final = torch.is_anomaly_enabled
_deterministic: Final = torch._C._get_deterministic_algorithms
_loop: Final = asyncio._get_running_loop
_warnings: Final = vars(warnings)
_DEVICES: Final = ("cpu", "cuda", "xpu", "mps")  # that autocast is kept for


class TakenModes(NamedTuple):
    """The modes of a rank that is not running, where they differ from the common ones."""

    grad: bool
    inference: Any  # what leads back into the rank's own mode, None where that is the common one
    autocast: tuple[Any, ...]
    nesting: int
    dtype: torch.dtype
    surroundings: Surroundings | None  # None where those are the common ones


class Modes:
    """Takes the modes of ranks out and puts them in; the common ones are those in force when it is made, without a running event loop.

    Example:
        >>> modes = Modes()
        >>> with torch.no_grad():
        ...     taken = modes.take()
        ...     print(torch.is_grad_enabled())
        ...     modes.put(taken)
        ...     print(torch.is_grad_enabled())
        True
        False
    """

    def __init__(self) -> None:
        self._grad, self._inference, self._dtype = _grad(), _inference(), _dtype()
        self._autocast = _read_autocast()
        self._any_autocast = _autocast()
        self._functions, self._dispatches, self._saved = _functions(), _dispatches(), _saved(True)
        self._surroundings = surroundings = read_surroundings()._replace(loop=None)
        self._anomaly, self._deterministic = surroundings.anomaly[0], surroundings.deterministic[0]
        self._filters = surroundings.filters[0]
        self._num_filters, self._filter = len(self._filters), self._filters[0] if self._filters else None
        empty = not (self._functions or self._dispatches or self._any_autocast or self._anomaly)
        self._words = find_words() if empty and self._saved is None and _functorch() is None else None
        self._kept = bytearray() if self._words is None else self._words.copy()

    def are_common(self) -> bool:
        """Tells whether the modes in force are the common ones, and nothing is under way that cannot be taken out."""
        if self._words is not None and self._words.match(self._kept):
            return _backward() == -1 and _dtype() is self._dtype and self._is_process_common()
        if not self._are_all_common():
            return False
        if self._words is not None:  # the same modes in other words: a stack that is empty again keeps its memory
            self._words.read(self._kept)
        return True

    def _are_all_common(self) -> bool:
        """Tells the same by a question for each."""
        return (
            _grad() is self._grad
            and _backward() == -1
            and _inference() is self._inference
            and _dispatches() == self._dispatches
            and _saved(True) is self._saved
            and _dtype() is self._dtype
            and _autocast() is self._any_autocast
            and _functorch() is None
            and not self._any_autocast
            and self._is_at_home()
        )

    def _is_at_home(self) -> bool:
        """Tells whether the surroundings are the common ones."""
        return (
            _functions() == self._functions
            and (self._functions == 0 or self._has_its_functions())
            and _anomaly() is self._anomaly
            and self._is_process_common()
        )

    def _is_process_common(self) -> bool:
        """Tells the same of those that are no modes of the thread in torch."""
        return (
            _deterministic() is self._deterministic
            and _warnings["filters"] is self._filters
            and len(self._filters) == self._num_filters
            and (self._num_filters == 0 or self._filters[0] is self._filter)
            and _loop() is None
        )

    def take(self) -> TakenModes | None:
        """Makes the common modes those in force.

        Returns:
            What was in force, for ``put``; None where that was the common ones.

        Raises:
            RingError: the rank is in the midst of something that cannot be taken out.
        """
        if self.are_common():
            return None
        self._check()
        return self._take()

    def leave(self) -> None:
        """Makes the common modes those in force: what a rank that has ended has left there is gone."""
        if self.are_common():
            return
        while _dispatches() > self._dispatches:
            torch._C._pop_torch_dispatch_stack(None)
        while self._saved is None and _saved(True) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        self._take()

    def _take(self) -> TakenModes:
        surroundings = None if self._is_at_home() else read_surroundings()
        taken = _read_autocast()
        nesting = 0
        while torch.autocast_decrement_nesting() >= 0:
            nesting += 1
        torch.autocast_increment_nesting()
        torch.clear_autocast_cache()  # what it holds belongs to the rank's own parameters
        _write_autocast(self._autocast)
        grad, dtype, guard = _grad(), _dtype(), None
        if _inference() is not self._inference:
            guard = torch._C._InferenceMode(self._inference)
            guard.__enter__()
        torch._C._set_grad_enabled(self._grad)
        torch.set_default_dtype(self._dtype)
        if surroundings is not None:
            write_surroundings(self._surroundings, surroundings)
        return TakenModes(grad, guard, taken, nesting, dtype, surroundings)

    def put(self, taken: TakenModes | None) -> None:
        """Makes the modes those that ``take`` returned; the common ones must be in force."""
        if taken is None:
            return
        if taken.inference is not None:
            taken.inference.__exit__(None, None, None)
        torch._C._set_grad_enabled(taken.grad)
        torch.set_default_dtype(taken.dtype)
        _write_autocast(taken.autocast)
        for _ in range(taken.nesting):
            torch.autocast_increment_nesting()
        if taken.surroundings is not None:
            write_surroundings(taken.surroundings, self._surroundings)

    def _has_its_functions(self) -> bool:
        return all(torch._C._get_function_stack_at(place) is mode for place, mode in enumerate(self._surroundings.functions))

    def _check(self) -> None:
        found = next((what for what, is_so in self._hindrances() if is_so()), None)
        if found is not None:
            raise RingError(
                f"a simulated rank must not wait for others {found}, got a wait there: what torch keeps of it belongs to the thread, which "
                "all simulated ranks share. Move the communication out of it, or run on real ranks: ringsim.trace."
            )

    def _hindrances(self) -> tuple[tuple[str, Callable[[], bool]], ...]:
        return (
            ("in a backward pass", lambda: _backward() != -1),
            ("inside a torch function mode", lambda: other_modes(self._surroundings)),
            ("inside a torch dispatch mode", lambda: _dispatches() != self._dispatches),
            ("inside hooks on saved tensors", lambda: _saved(True) is not self._saved),
            ("inside a transformation of torch.func", lambda: _functorch() is not None),
        )


def _read_autocast() -> tuple[Any, ...]:
    """Returns (device, whether it is on, dtype) for each device, and whether casts are cached."""
    found = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES]
    return *found, torch.is_autocast_cache_enabled()


def _write_autocast(settings: tuple[Any, ...]) -> None:
    *devices, cached = settings
    for device, enabled, dtype in devices:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(cached)
