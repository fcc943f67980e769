"""What Python and torch keep for the whole process, or for a thread, and can be put away: so each simulated rank has its own.

The default device (``torch.set_default_device``, ``torch.device`` as a context), anomaly mode, deterministic algorithms, the filters of
``warnings``, and the event loop of ``asyncio`` that is running.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device
from torch.utils._device import DeviceContext

__all__ = ["Surroundings", "keep_process", "other_modes", "read_surroundings", "write_surroundings"]


class Surroundings(NamedTuple):
    """What is in force.

    Attributes:
        functions: the torch function modes, the outermost first; those of ``torch.device`` are among them.
        default_device: what ``torch.set_default_device`` has put there, None for nothing.
        current_device: the device of the block that was entered last, None for none.
        anomaly: whether anomaly mode is on, and whether it looks for NaN.
        deterministic: whether algorithms are to be deterministic, and whether those that are not merely warn.
        filters: the list of the filters of warnings, what is in it, and who shows warnings.
        loop: the running event loop, its task, and what it does with asynchronous generators; None where none runs.
    """

    functions: list[Any]
    default_device: Any
    current_device: Any
    anomaly: tuple[bool, bool]
    deterministic: tuple[bool, bool]
    filters: tuple[list[Any], list[Any], Any, Any]
    loop: tuple[Any, Any, Any] | None


def read_surroundings() -> Surroundings:
    """Returns what is in force."""
    loop = asyncio._get_running_loop()
    return Surroundings(
        _get_current_function_mode_stack(),
        getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
        _device.CURRENT_DEVICE,
        (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        (warnings.filters, list(warnings.filters), warnings.showwarning, getattr(warnings, "_showwarnmsg_impl", None)),  # type: ignore[arg-type]
        None if loop is None else (loop, asyncio.current_task(loop), sys.get_asyncgen_hooks()),
    )


def write_surroundings(wanted: Surroundings, found: Surroundings) -> None:
    """Puts what is wanted in force, in the place of what ``read_surroundings`` has found there."""
    if not _are_same(wanted.functions, found.functions):
        for _ in found.functions:
            torch._C._pop_torch_function_stack()
        for mode in wanted.functions:
            torch._C._push_on_torch_function_stack(mode)
    torch._GLOBAL_DEVICE_CONTEXT.device_context = wanted.default_device
    _device.CURRENT_DEVICE = wanted.current_device
    if wanted.anomaly != found.anomaly:
        torch.set_anomaly_enabled(*wanted.anomaly)
    if wanted.deterministic != found.deterministic:
        torch.use_deterministic_algorithms(wanted.deterministic[0], warn_only=wanted.deterministic[1])
    if wanted.filters[0] is not found.filters[0] or wanted.filters[1:] != found.filters[1:]:
        _write_filters(*wanted.filters)
    if wanted.loop is not found.loop:
        _write_loop(wanted.loop, found.loop)


def _write_filters(filters: list[Any], content: list[Any], show: Any, show_message: Any) -> None:
    filters[:] = content
    warnings.filters = filters
    warnings.showwarning = show
    if show_message is not None:
        warnings._showwarnmsg_impl = show_message  # type: ignore[attr-defined]
    with warnings.catch_warnings():  # which says that filters have changed, on both sides
        pass


def _write_loop(wanted: tuple[Any, Any, Any] | None, found: tuple[Any, Any, Any] | None) -> None:
    """Lets a loop be the one that runs: it and its task as ``asyncio`` says to, under "Extending"."""
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


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def other_modes(common: Surroundings) -> bool:
    """Tells whether a torch function mode is in force that is none of ``torch.device``, and not among the common ones."""
    known = {id(mode) for mode in common.functions}
    return any(not isinstance(mode, DeviceContext) and id(mode) not in known for mode in _get_current_function_mode_stack())


@contextlib.contextmanager
def keep_process() -> Iterator[None]:
    """Puts back, at the end of the block, what ranks share and may have changed.

    The directory, the recursion limit, torch's threads, and the hooks of all modules: a ``FlopCounterMode`` that nobody leaves has some.
    """
    hooks = [(table, dict(table)) for name, table in vars(module).items() if name.startswith("_global_") and isinstance(table, dict)]
    recursion, threads = sys.getrecursionlimit(), torch.get_num_threads()
    try:
        directory = os.getcwd()
    except OSError:  # it is gone
        directory = None
    try:
        yield
    finally:
        for table, before in hooks:
            table.clear()
            table.update(before)
        if sys.getrecursionlimit() != recursion:
            sys.setrecursionlimit(recursion)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if directory is not None:
            os.chdir(directory)
