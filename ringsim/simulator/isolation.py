"""Keeps the random numbers and torch settings of simulated ranks apart.

Simulated ranks share a process. Each rank is a thread, so grad mode, inference mode, autocast, the
default device, torch's modes and hooks, and a running event loop are separate anyway. Everything
else belongs to the process. When a rank continues, its own state is restored:

* torch's CPU generator, and streams for the functions of ``random`` and ``np.random`` called as
  ``random.x()`` and ``np.random.x()``;
* the default dtype, anomaly mode, deterministic algorithms, and the precision of matrix products;
* the module ``__main__``, of which each rank of a script has its own copy, and torch's groups.

Ranks share the filters of ``warnings``, the working directory, and the random streams behind
functions of ``random`` and ``np.random`` that are imported by name. If ranks draw from these
streams, a note in the trace reports it.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import numpy.random  # loaded before processes are forked
import torch


@dataclass(slots=True, eq=False)
class Isolated:
    """The state of one rank while another rank runs."""

    seed: int
    generator: torch.Tensor | None = None  # None before the rank has started
    settings: tuple[Any, ...] | None = None  # None for the initial settings
    main: ModuleType | None = None
    streams: dict[Any, Any] = field(default_factory=dict)  # for `random` and `np.random`
    # environment variables; None if removed
    variables: dict[str, str | None] = field(default_factory=dict)
    handlers: dict[int, Any] = field(default_factory=dict)  # signal handlers
    world: dict[str, Any] = field(default_factory=dict)  # torch's tables of groups


class _Nothing:
    """An empty object that accepts any attributes, used before any groups exist."""


class Isolation:
    """Keeps the ranks of a simulation apart.

    Args:
        seed: the seed of the random numbers that ranks share.

    Attributes:
        world: the object in which torch looks up its tables of groups.

    Example:
        >>> import torch
        >>> one, other = Isolated(seed=1), Isolated(seed=1)
        >>> isolation = Isolation(seed=0)
        >>> isolation.put(one)
        >>> first = torch.rand(1)
        >>> torch.set_default_dtype(torch.float64)
        >>> isolation.put(other)
        >>> torch.get_default_dtype(), torch.rand(1) == first
        (torch.float32, tensor([True]))
    """

    def __init__(self, seed: int) -> None:
        self._holder: Isolated | None = None  # the rank whose state is active
        self._settings = _read_settings()
        self._main = sys.modules["__main__"]
        self.world: Any = _Nothing()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._read: dict[str, Callable[[], Any]] = {
            "random": random.getstate,
            "numpy.random": np.random.get_state,
        }
        self._begin = self._read_streams()
        for module, name, method in _list_functions():
            setattr(module, name, self._make_draw(module, method, getattr(module, name)))

    def put(self, own: Isolated) -> None:
        """Activates a rank's state, and seeds the rank if it is starting."""
        holder = self._holder
        if holder is own:
            return
        generator, settings = torch.default_generator, _read_settings()
        if holder is not None:
            holder.generator = generator.get_state()
            holder.settings = settings
            holder.main = sys.modules["__main__"]
        if own.generator is None:
            generator.manual_seed(own.seed)
        else:
            generator.set_state(own.generator)
        wanted = own.settings or self._settings
        if wanted != settings:
            _write_settings(wanted, settings)
        sys.modules["__main__"] = own.main or self._main
        self.world.__dict__ = own.world
        self._holder = own

    def list_shared_draws(self) -> list[str]:
        """Returns the shared streams ("random", "numpy.random") from which ranks have drawn."""
        states = self._read_streams().items()
        return [name for name, state in states if state != self._begin[name]]

    def _read_streams(self) -> dict[str, bytes]:
        return {name: pickle.dumps(read()) for name, read in self._read.items()}

    def _make_draw(
        self, module: Any, method: str, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Returns a function that draws from the running rank's stream."""

        @functools.wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            own = self._holder
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


def _list_functions() -> list[tuple[Any, str, str]]:
    """Lists the functions that draw from a shared stream, as (module, name, method) tuples."""
    found: list[tuple[Any, str, str]] = [
        (np.random, "seed", "seed"),
        (np.random, "ranf", "random_sample"),
        (np.random, "sample", "random_sample"),
    ]
    for module, kind in ((random, random.Random), (np.random, np.random.RandomState)):
        owners = (
            (name, getattr(getattr(module, name), "__self__", None)) for name in module.__all__
        )
        found += [(module, name, name) for name, owner in owners if isinstance(owner, kind)]
    return found


def _read_settings() -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(),
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
    )


def _write_settings(wanted: tuple[Any, ...], now: tuple[Any, ...]) -> None:
    """Writes only the settings that differ, because some of them import much of torch."""
    dtype, anomaly, check_nan, deterministic, warn_only, precision = wanted
    if dtype != now[0]:
        torch.set_default_dtype(dtype)
    if (anomaly, check_nan) != now[1:3]:
        torch.autograd.set_detect_anomaly(anomaly, check_nan)
    if (deterministic, warn_only) != now[3:5]:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    if precision != now[5]:
        torch.set_float32_matmul_precision(precision)
