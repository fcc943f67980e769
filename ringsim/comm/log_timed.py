"""``timed_op``: the log for functions of the user's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from ringsim.comm.log import LogOptions, enter_label, write_lines
from ringsim.comm.torch_backend import TORCH
from ringsim.state import get_state
from ringsim.traces.events import NONE
from ringsim.traces.recorder import Recorder, label_in_force

__all__ = ["timed_op"]

P = ParamSpec("P")
R = TypeVar("R")


def timed_op(function: Callable[P, R]) -> Callable[P, R]:
    """Makes the calls of a function appear in the log of ``ringsim.comm``: a decorator for collectives of your own.

    While the log is on and the call is selected (``prof_all``, the name in ``prof_ops``, or ``prof=True`` where the function has that
    parameter), the call is recorded as a span with a size and a group, and what it sends bears its name. It is done when the function
    returns, or, if that returns the handle of an operation, when the handle has been waited for. At other times it is a plain call. Name,
    signature, docstring and result are the function's own.

    Args:
        function: what to log. Its parameters ``prof``, ``log_name``, ``debug`` and ``group``, if it has them, mean what they mean in
            ``ringsim.comm``; its size is that of the first parameter that holds a tensor, or tensors.

    Returns:
        The function that stands in for it.

    Example:
        >>> @timed_op
        ... def gossip(tensor, group=None):
        ...     "Tells the neighbours."
        >>> gossip.__name__, gossip.__doc__, str(inspect.signature(gossip))
        ('gossip', 'Tells the neighbours.', '(tensor, group=None)')

    Source:
        DeepSpeed, ``deepspeed.comm.timed_op``: the name. The function that it makes has lost its own name and signature.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def timed(*args: P.args, **kwargs: P.kwargs) -> R:
        log = get_state().log
        if log is None or log.records is None:
            return function(*args, **kwargs)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # which says what is wrong
        bound.apply_defaults()
        given = bound.arguments
        name = given.get("log_name") or function.__name__
        if not log.selects(function.__name__, name, bool(given.get("prof", False))):
            return function(*args, **kwargs)
        return _record(log, name, given, lambda: function(*args, **kwargs))

    return timed


def _record(log: LogOptions, name: str, given: dict[str, Any], run: Callable[[], R]) -> R:
    """Runs a call that is selected, and records it."""
    assert log.records is not None
    recorder = log.records.recorder
    before = recorder.bookmark() if log.verbose else 0
    label = enter_label(log, name, given.get("debug"))
    slot = recorder.call_begin(label_in_force.get(), _number_group(log, given.get("group")), _number_payload(log, given))
    failed = True
    try:
        result = run()
        failed = False
    finally:
        label_in_force.reset(label)
        if slot is not None and (failed or not _leave_to_wait(recorder, result, slot)):
            recorder.span_end(slot, failed=failed)
        if log.verbose:
            write_lines(recorder, before)
    return result


def _leave_to_wait(recorder: Recorder, result: Any, slot: int) -> bool:
    """Lets the wait for a handle complete a record; False where ``result`` is no handle, or has been waited for."""
    complete_record = getattr(result, "complete_record", None)  # torch's handles have none: the hooks know them
    return recorder.complete_with(result, slot) if complete_record is None else complete_record(recorder, slot)


def _number_group(log: LogOptions, group: Any) -> int:
    """Numbers the group of a call; the number of a group of this rank alone where there is no process group."""
    assert log.records is not None
    backend = get_state().backend or TORCH
    if not backend.is_initialized():
        return log.records.recorder.group("", [0])
    if group is None:
        return log.records.recorder.group("world", range(backend.get_world_size()))
    name = str(getattr(group, "group_name", ""))
    return log.records.recorder.group(name, backend.get_process_group_ranks(group))


def _number_payload(log: LogOptions, given: dict[str, Any]) -> int:
    """Numbers what a call carries: the first of its arguments that is a tensor, or holds some."""
    assert log.records is not None
    for value in given.values():
        tensors = list(_find_tensors(value))
        if tensors:
            size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            shape = list(tensors[0].shape) if len(tensors) == 1 else [sum(tensor.numel() for tensor in tensors)]
            dtype = str(tensors[0].dtype).removeprefix("torch.")
            return log.records.recorder.payload(dtype, shape, size_bytes)
    return NONE


def _find_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _find_tensors(each)
