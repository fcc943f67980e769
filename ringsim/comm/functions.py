"""The functions of ``torch.distributed`` that go through the current backend, made from the signatures of the torch that is installed.

Each is compiled from a few lines of text, so that a call passes no ``*args, **kwargs`` on. With torch as the backend and no log, ::

    def broadcast(tensor, src=None, group=None, async_op=False, group_src=None, *, prof=False, log_name=None, debug=None):
        state = cell[0] or simulated() or cell[-1]
        if state.backend is None and (state.log is None or state.log.plain and not prof and (log_name is None or log_name == "broadcast")):
            try:
                return native(tensor, src, group, async_op, group_src)
            except RuntimeError as error:
                if not is_refusal(error, "broadcast"):
                    raise
                return build(torch_backend, "broadcast", 1)(tensor, src, group, async_op, group_src)
        return elsewhere(state, (tensor, src, group, async_op, group_src), prof, log_name, debug)

is all there is to it. A parameter that a later torch adds appears here by itself.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
from collections.abc import Callable, Iterator
from operator import itemgetter
from types import FunctionType
from typing import Any, Final

import torch.distributed as dist

from ringsim.comm.fallbacks import FALLBACKS, build, find, is_refusal
from ringsim.comm.log import call
from ringsim.comm.torch_backend import TORCH
from ringsim.state import RankState, get_cell, get_simulated
from ringsim.traces.events import OP_CODES

__all__ = ["FUNCTIONS", "MANAGING", "make_function"]

_CELL: Final = get_cell()
_EXTRAS: Final[dict[str, Any]] = {"prof": False, "log_name": None, "debug": None}
_DIRECT: Final = {"send": "send", "recv": "recv", "isend": "begin_send", "irecv": "begin_recv"}  # see Backend.direct
_WITHOUT_GROUP: Final = ("batch_isend_irecv",)  # these carry messages as well; all others say so by a parameter `group`
_MANAGING: Final = (  # these say who is there; nothing is sent that a log could count
    *("init_process_group", "destroy_process_group", "is_initialized", "get_rank", "get_world_size", "get_process_group_ranks"),
    *("get_group_rank", "get_global_rank", "get_backend", "get_backend_config", "get_backend_impl", "get_pg_count", "set_timeout"),
    *("new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group", "shrink_group", "init_device_mesh", "breakpoint"),
)


def _communicates(name: str, function: Any) -> bool:
    """Returns whether a function of torch sends something; also one that this module has never heard of."""
    if type(function) is not FunctionType or name.startswith("_") or name in _MANAGING:
        return False
    if function.__module__ != dist.distributed_c10d.__name__:
        return False
    return name in _WITHOUT_GROUP or "group" in inspect.signature(function).parameters


def make_function(name: str, signature: inspect.Signature, native: Callable[..., Any] | None, extras: dict[str, Any]) -> FunctionType:
    """Makes the function that stands in for one of torch's.

    Args:
        name: of the function.
        signature: torch's.
        native: torch's function, called where torch is the backend and there is no log; None where torch has it not.
        extras: keyword-only parameters that it has besides, with their defaults: those of the log, or none.

    Returns:
        The function.
    """
    parameters = list(signature.parameters.values())
    passed = [f"*{each.name}" if each.kind is each.VAR_POSITIONAL else each.name for each in parameters if each.kind < each.KEYWORD_ONLY]
    named = [f"**{each.name}" if each.kind is each.VAR_KEYWORD else f"{each.name}={each.name}" for each in parameters if each.kind >= 3]
    scope: dict[str, Any] = {"cell": _CELL, "simulated": get_simulated, "native": native}
    scope.update(is_refusal=is_refusal, build=build, torch_backend=TORCH)
    added = [inspect.Parameter(extra, inspect.Parameter.KEYWORD_ONLY, default=default) for extra, default in extras.items()]
    everything = parameters + added
    defaults = {f"default_{each.name}": each.default for each in everything if each.default is not each.empty}
    scope.update(defaults)
    plain = inspect.Signature([each.replace(annotation=each.empty, default=_Name(each)) for each in everything])
    values, keywords = "".join(f"{each}, " for each in passed), ", ".join(named)
    # A log that has nothing to do for this call is passed by, too.
    passive = f"state.log.{'plain' if name in OP_CODES else 'idle'} and not prof and (log_name is None or log_name == {name!r})"
    quiet = f"state.backend is None and (state.log is None or {passive})" if extras else "state.backend is None"
    short_way = [
        f"    if {quiet}:",
        "        try:",
        f"            return native({(values + keywords).removesuffix(', ')})",
        "        except RuntimeError as error:",
        f"            if not is_refusal(error, {name!r}):",
        "                raise",
        f"            return build(torch_backend, {name!r}, 1)({(values + keywords).removesuffix(', ')})",
    ]
    text = [
        f"def {name}{plain}:",
        "    state = cell[0] or simulated() or cell[-1]",
        *(short_way if native else ()),
        *(
            (
                "    short = state.short",
                "    if short is not None:",
                f"        return short.{_DIRECT[name]}({values.removesuffix(', ')})",
            )
            if name in _DIRECT
            else ()
        ),
        f"    return elsewhere(state, ({values}), dict({keywords}){''.join(f', {extra}' for extra in extras)})",
    ]
    source = "\n".join(text) + "\n"
    positional_defaults = tuple(each.default for each in parameters if each.kind < each.KEYWORD_ONLY)
    scope["elsewhere"] = _make_elsewhere(name, positional_defaults)
    filename = os.path.join(os.path.dirname(__file__), f"<{name}>")  # under ringsim's directory: the recorder passes over its frames
    exec(compile(source, filename, "exec"), scope)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)  # for tracebacks
    function: FunctionType = scope[name]
    function.__module__ = "ringsim.comm"
    function.__doc__ = (native or FALLBACKS[name]).__doc__
    function.__annotations__ = {each.name: each.annotation for each in parameters if each.annotation is not each.empty}
    if signature.return_annotation is not signature.empty:
        function.__annotations__["return"] = signature.return_annotation
    return function


class _Name:
    """How a parameter's default is spelled in the text: by a name in the scope."""

    def __new__(cls, parameter: inspect.Parameter) -> Any:
        if parameter.default is parameter.empty:
            return parameter.empty
        return super().__new__(cls)

    def __init__(self, parameter: inspect.Parameter) -> None:
        self._name = f"default_{parameter.name}"

    def __repr__(self) -> str:
        return self._name


def _make_elsewhere(op: str, defaults: tuple[Any, ...]) -> Callable[..., Any]:
    """Makes the function that is called where another backend, or a log, is in force."""

    def elsewhere(state: RankState, args: tuple[Any, ...], named: dict[str, Any], *extras: Any) -> Any:
        count = len(args)
        while count and count <= len(defaults) and args[count - 1] is defaults[count - 1]:
            count -= 1
        backend = state.backend or TORCH

        def run(function: Callable[..., Any]) -> Any:
            if named:
                function = functools.partial(function, **named)
            if state.log is None or not extras:
                return function(*args[:count])
            return call(op, function, args[:count], *extras)

        try:
            return run(find(backend, op, 2))
        except RuntimeError as error:
            if not is_refusal(error, op):
                raise
            return run(build(backend, op, 2))

    return elsewhere


def _find_communicating() -> Iterator[tuple[str, inspect.Signature, Any]]:
    """Yields name, signature and torch's function for all that communicate; also for those that only the fallbacks have."""
    for name, function in vars(dist).items():
        if _communicates(name, function):
            yield name, inspect.signature(function), function
    for name, fallback in FALLBACKS.items():
        if not hasattr(dist, name):
            signature = inspect.signature(fallback)
            yield name, signature.replace(parameters=list(signature.parameters.values())[1:]), None  # without the backend


FUNCTIONS: Final[dict[str, FunctionType]] = {  # those that communicate, by name
    name: make_function(name, signature, native, _EXTRAS) for name, signature, native in sorted(_find_communicating(), key=itemgetter(0))
}
MANAGING: Final[dict[str, FunctionType]] = {  # those that say who is there
    name: make_function(name, inspect.signature(getattr(dist, name)), getattr(dist, name), {})
    for name in sorted(_MANAGING)
    if hasattr(dist, name)
}
