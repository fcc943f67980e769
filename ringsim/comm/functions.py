"""What is done where a backend, or the installed torch, lacks an operation: it is built from those that exist.

| operation | built from, the first that exists |
|---|---|
| send, recv, batch_isend_irecv | isend, irecv |
| barrier | all_reduce; messages |
| broadcast, gather, scatter, reduce, all_to_all, all_to_all_single, object forms, monitored_barrier | messages |
| all_reduce, all_gather_single, all_gather_into_tensor | all_gather; messages |
| all_gather | all_gather_single, all_gather_into_tensor; messages |
| reduce_scatter_single, reduce_scatter_tensor | reduce_scatter; messages |
| gather_single, gather_into_tensor | gather; messages |
| reduce_scatter | messages |
| all_reduce_coalesced, all_gather_coalesced | all_reduce, all_gather, one after the other; else as these are |
| new_subgroups, new_subgroups_by_enumeration | new_group |

The result is the native one bit for bit, but for sums and products of floats, which are taken in the order of the ranks (``reductions``).

``P2POp`` for ``batch_isend_irecv``: torch's own, which also takes the ``isend`` and ``irecv`` of ``ringsim.comm``.

The functions of ``torch.distributed`` that go through the current backend, made from the signatures of the torch that is installed.

Each is compiled from a few lines of text, so that a call passes no ``*args, **kwargs`` on. With torch as the backend and no log, ::

    def broadcast(tensor, src=None, group=None, async_op=False, group_src=None, *, prof=False, log_name=None, debug=None):
        state = get_state()
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
import re
import warnings
from collections.abc import Callable, Iterator
from operator import itemgetter
from types import FunctionType
from typing import Any, Final

import torch.distributed as dist

from ringsim.comm import built, objects
from ringsim.comm.backend import TORCH, Backend, TorchBackend
from ringsim.errors import ArgumentError, RingError
from ringsim.state import RankState, get_state
from ringsim.traces.events import OP_CODES

__all__ = ["FALLBACKS", "FUNCTIONS", "MANAGING", "P2POp", "find", "make_function"]

FALLBACKS: Final[dict[str, Callable[..., Any]]] = {
    **{name: getattr(built, name) for name in built.BUILT},
    **{name: getattr(objects, name) for name in objects.BUILT},
    "all_gather_into_tensor": built.all_gather_single,
    "reduce_scatter_tensor": built.reduce_scatter_single,
    "gather_into_tensor": built.gather_single,
}
_SPELLINGS: Final = (  # of one operation
    ("all_gather_into_tensor", "all_gather_single"),
    ("reduce_scatter_tensor", "reduce_scatter_single"),
    ("gather_into_tensor", "gather_single"),
)
_REFUSAL: Final = re.compile(r"Backend \S+ does not support \w+")
_TWINS: Final = {name: twin for pair in _SPELLINGS for name, twin in (pair, pair[::-1])}


def find(backend: Backend, op: str, depth: int = 0) -> Callable[..., Any]:
    """Returns what does an operation on a backend: its own method, or one that is built; the latter warns once.

    Args:
        backend: the backend.
        op: as torch.distributed spells it.
        depth: whose line the warning names: 0 the caller's, 1 that of its caller, and so on.

    Returns:
        A function that takes torch's arguments.

    Raises:
        RingError: neither exists.

    Example:
        >>> from ringsim.comm.backend import TORCH
        >>> find(TORCH, "isend").__name__
        'isend'
    """
    if backend.supports(op):
        method: Callable[..., Any] = getattr(backend, op)
        return method
    twin = _TWINS.get(op)
    if twin is not None and backend.supports(twin):
        return find(backend, twin)
    return build(backend, op, depth + 1)


def build(backend: Backend, op: str, depth: int) -> Callable[..., Any]:
    """Returns an operation that is built from others of a backend; warns once.

    Args:
        backend: the backend.
        op: as torch.distributed spells it.
        depth: whose line the warning names: 0 the caller's, 1 that of its caller, and so on.

    Raises:
        RingError: nobody knows how.
    """
    if op not in FALLBACKS:
        raise RingError(
            f"ringsim.comm.{op} must be something that the backend {backend.name!r} can do, got a backend without it. "
            "Use set_backend('torch') for what only torch has."
        )
    _warn_once(op, backend.name, 3 + depth)
    return functools.partial(FALLBACKS[op], backend)


def is_refusal(error: RuntimeError, op: str) -> bool:
    """Returns whether an error says that a backend lacks an operation that can be built: torch offers it, its Gloo or NCCL may not have it.

    Torch says so before anything is sent: ``Backend gloo does not support gather_single`` (torch 2.15).
    """
    return op in FALLBACKS and _REFUSAL.match(str(error)) is not None


@functools.cache
def _warn_once(op: str, backend_name: str, stacklevel: int) -> None:
    warnings.warn(
        f"the backend {backend_name!r} has no {op}; ringsim.comm builds it from other operations, which is slower",
        RuntimeWarning,
        stacklevel=stacklevel,
    )


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
    scope: dict[str, Any] = {"get_state": get_state, "native": native}
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
        "    state = get_state()",
        *(short_way if native else ()),
        *(
            (
                "    backend = state.backend",
                "    if backend is not None and state.log is None and backend.direct:",
                f"        return backend.{_DIRECT[name]}({values.removesuffix(', ')})",
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
            return state.log.call(op, function, args[:count], *extras)

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

_SIGNATURE: Final = inspect.signature(dist.P2POp)
_ORIGINALS: Final[dict[Any, Any]] = {FUNCTIONS[name]: getattr(dist, name) for name in ("isend", "irecv")}


class P2POp(dist.P2POp):
    """A send or a receive for ``batch_isend_irecv``; those of torch may stand in the same list.

    Its attribute ``op`` is torch's function, whichever was given.
    """

    __doc__ = dist.P2POp.__doc__

    def __new__(cls, op: Any, *args: Any, **kwargs: Any) -> P2POp:
        """Checks the arguments as torch does."""
        made: P2POp = dist.P2POp.__new__(cls, _ORIGINALS.get(op, op), *args, **kwargs)
        return made

    def __init__(self, op: Any, *args: Any, **kwargs: Any) -> None:
        """Takes torch's arguments; peers are found by the current backend."""
        op = _ORIGINALS.get(op, op)
        backend = get_state().backend
        if backend is None or isinstance(backend, TorchBackend):
            super().__init__(op, *args, **kwargs)
            return
        given = _SIGNATURE.bind(op, *args, **kwargs)
        given.apply_defaults()
        arguments = given.arguments
        if (arguments["peer"] is None) == (arguments["group_peer"] is None):
            raise ArgumentError(
                f"peer must be given once, got peer={arguments['peer']!r} and group_peer={arguments['group_peer']!r} (P2POp). "
                "Give one of them."
            )
        self.op, self.tensor, self.group, self.tag = op, arguments["tensor"], arguments["group"], arguments["tag"]
        if arguments["peer"] is None:
            self.group_peer = arguments["group_peer"]
            self.peer = backend.get_global_rank(self.group, self.group_peer)
        else:
            self.peer = arguments["peer"]
            self.group_peer = backend.get_group_rank(self.group, self.peer)

    def __repr__(self) -> str:
        return f"P2POp({self.op.__name__} peer={self.peer}, tag={self.tag}, {tuple(self.tensor.shape)}, {self.tensor.dtype})"


P2POp.__signature__ = _SIGNATURE  # type: ignore[attr-defined]
