"""The functions of ``torch.distributed`` that go through the current backend.

Made from the signatures of the torch that is installed. With torch as the backend and no log, a
call is passed on as it is. Otherwise the backend's own operation of that name is called, or another
spelling of it, or what can be built instead: collectives and messages from ``isend`` and ``irecv``
(``ringsim.comm.built``), objects from operations on tensors (``ringsim.comm.objects``), subgroups
from ``new_group``. What is built says so once, in a warning. A function or a parameter that a later
torch adds appears here by itself.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from types import FrameType, FunctionType
from typing import Any, Final

import torch.distributed as dist

from ringsim.comm.backend import TORCH, Backend, TorchBackend
from ringsim.comm.built import BUILT, find_own
from ringsim.comm.collectives import name_function
from ringsim.comm.objects import OBJECTS
from ringsim.errors import ArgumentError, RingError
from ringsim.state import get_state, is_plain, process

__all__ = ["FALLBACKS", "FUNCTIONS", "MANAGING", "P2POp", "find", "make_function"]

# what can be built, by name: after the backend torch's arguments
FALLBACKS: Final[dict[str, Callable[..., Any]]] = {**BUILT, **OBJECTS}
_REFUSAL: Final = re.compile(r"Backend \S+ does not support \w+")
_HERE: Final = os.path.dirname(os.path.dirname(__file__))
# arguments of the log: see ``LogOptions.call``
_EXTRAS: Final = {"prof": False, "log_name": None, "debug": None}
# these carry messages as well; all others say so by a parameter `group`
_WITHOUT_GROUP: Final = ("batch_isend_irecv",)
_MANAGING: Final = (  # these say who is there; nothing is sent that a log could count
    *(
        "init_process_group",
        "destroy_process_group",
        "is_initialized",
        "get_rank",
        "get_world_size",
        "get_process_group_ranks",
    ),
    *(
        "get_group_rank",
        "get_global_rank",
        "get_backend",
        "get_backend_config",
        "get_backend_impl",
        "get_pg_count",
        "set_timeout",
    ),
    *(
        "new_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "split_group",
        "shrink_group",
        "init_device_mesh",
        "breakpoint",
    ),
)


def find(backend: Backend, op: str) -> Callable[..., Any]:
    """Returns what does an operation on a backend: its own method, or one that is built.

    Args:
        backend: the backend.
        op: as torch.distributed spells it.

    Returns:
        A function that takes torch's arguments.

    Raises:
        RingError: neither exists.

    Example:
        >>> find(TORCH, "isend").__name__
        'isend'
    """
    return find_own(backend, op) or _build(backend, op)


def _build(backend: Backend, op: str) -> Callable[..., Any]:
    """Returns an operation that is built from others of a backend; warns once."""
    if op not in FALLBACKS:
        raise RingError(
            f"ringsim.comm.{op} must be something that the backend {backend.name!r} can do, got "
            "a backend without it. "
            "Use set_backend('torch') for what only torch has."
        )
    # objects travel as tensors on every backend: there is no faster way
    if "object" not in op and "subgroups" not in op:
        _warn_once(op, backend.name)
    return functools.partial(FALLBACKS[op], backend)


@functools.cache
def _warn_once(op: str, backend_name: str) -> None:
    """Warns at the line of the user."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame, level = frame.f_back, level + 1
    message = (
        f"the backend {backend_name!r} has no {op}; ringsim.comm builds it from other "
        "operations, "
        "which is slower"
    )
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def _is_refusal(error: RuntimeError, op: str) -> bool:
    """Returns whether an error says that torch's own backend lacks an operation that can be built.

    Torch says so before anything is sent: ``Backend gloo does not support gather_single`` (torch
    2.15).
    """
    return op in FALLBACKS and _REFUSAL.match(str(error)) is not None


def make_function(
    name: str, signature: inspect.Signature, native: Callable[..., Any] | None, *, logged: bool
) -> FunctionType:
    """Makes the function that stands in for one of torch's.

    Args:
        name: of the function.
        signature: torch's.
        native: torch's function, called where torch is the backend and there is no log; None where
            torch has it not.
        logged: whether the log may count it, so that it has ``prof``, ``log_name`` and ``debug``
            besides.

    Returns:
        The function.
    """
    torchs = native or (lambda *args, **kwargs: _build(TORCH, name)(*args, **kwargs))

    def communicate(
        *args: Any,
        prof: bool = False,
        log_name: str | None = None,
        debug: str | None = None,
        **kwargs: Any,
    ) -> Any:
        if process.unchanged or is_plain(get_state()):
            try:
                return torchs(*args, **kwargs)
            except RuntimeError as error:
                if not _is_refusal(error, name):
                    raise
                return _build(TORCH, name)(*args, **kwargs)
        return _run(name, signature, args, kwargs, (prof, log_name, debug))

    def manage(*args: Any, **kwargs: Any) -> Any:
        # Asked for anew: in ranks with a world of ringsim's own, init_process_group is replaced.
        return (
            getattr(dist, name, torchs)(*args, **kwargs)
            if is_plain(get_state())
            else _run(name, signature, args, kwargs, None)
        )

    shown = _with_extras(signature) if logged else signature
    function = name_function(
        communicate if logged else manage,
        name,
        (native or FALLBACKS[name]).__doc__,
        shown,
        "ringsim.comm",
    )
    function.__annotations__ = {
        each.name: each.annotation
        for each in signature.parameters.values()
        if each.annotation is not each.empty
    }
    if signature.return_annotation is not signature.empty:
        function.__annotations__["return"] = signature.return_annotation
    made: FunctionType = function
    return made


def _with_extras(signature: inspect.Signature) -> inspect.Signature:
    """Adds the keyword-only parameters of the log, behind all others but ``**kwargs``."""
    parameters = list(signature.parameters.values())
    added = [
        inspect.Parameter(extra, inspect.Parameter.KEYWORD_ONLY, default=default)
        for extra, default in _EXTRAS.items()
    ]
    last = [each for each in parameters if each.kind is each.VAR_KEYWORD]
    return signature.replace(
        parameters=[*(each for each in parameters if each not in last), *added, *last]
    )


def _run(
    name: str,
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    extras: tuple[bool, str | None, str | None] | None,
) -> Any:
    """Runs an operation where another backend, or a log, is in force.

    ``extras`` are the log's, None where it does not count.
    """
    state = get_state()
    backend, log = state.backend or TORCH, state.log if extras else None
    own = getattr(backend, name, None) if log is None and backend.direct else None
    if own is not None:
        return own(*args, **kwargs)
    if state.backend is not None:
        args, kwargs = _place(signature, args, kwargs)

    def run(function: Callable[..., Any]) -> Any:
        return (
            function(*args, **kwargs)
            if log is None
            else log.call(name, function, tuple(args), kwargs, *(extras or ()))
        )

    try:
        return run(find(backend, name))
    except RuntimeError as error:
        if not _is_refusal(error, name):
            raise
        return run(_build(backend, name))


def _place(
    signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Returns arguments as a backend takes them.

    By position, without those at the end that have torch's default value.
    """
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    values, defaults = list(bound.args), [each.default for each in signature.parameters.values()]
    while values and not bound.kwargs and values[-1] is defaults[len(values) - 1]:
        values.pop()
    return values, bound.kwargs


def _communicates(name: str, function: Any) -> bool:
    """Returns whether a function of torch sends something.

    Also one that this module has never heard of.
    """
    if type(function) is not FunctionType or name.startswith("_") or name in _MANAGING:
        return False
    if function.__module__ != dist.distributed_c10d.__name__:
        return False
    return name in _WITHOUT_GROUP or "group" in inspect.signature(function).parameters


def _find_communicating() -> Iterator[tuple[str, inspect.Signature, Any]]:
    """Yields name, signature and torch's function for all that communicate.

    Also for those that only the fallbacks have. Where a tool has put something else in the place of
    torch's function, which may not tell its arguments, they are taken from ours.
    """
    for name, function in vars(dist).items():
        if _communicates(name, function):
            yield name, inspect.signature(function), function
    for name, ours in {"isend": Backend.isend, "irecv": Backend.irecv, **FALLBACKS}.items():
        function = getattr(dist, name, None)
        if function is None or not (name in _MANAGING or _communicates(name, function)):
            signature = inspect.signature(ours)
            # without the backend
            yield (
                name,
                signature.replace(parameters=list(signature.parameters.values())[1:]),
                function,
            )


FUNCTIONS: Final[dict[str, FunctionType]] = {  # those that communicate, by name
    name: make_function(name, signature, native, logged=True)
    for name, signature, native in sorted(_find_communicating(), key=itemgetter(0))
}
MANAGING: Final[dict[str, FunctionType]] = {  # those that say who is there
    name: make_function(
        name, inspect.signature(getattr(dist, name)), getattr(dist, name), logged=False
    )
    for name in sorted(_MANAGING)
    if hasattr(dist, name)
}


_SIGNATURE: Final = inspect.signature(dist.P2POp)
_OURS: Final = ("ringsim.comm", "ringsim.comm.deepspeed")


def _find_original(op: Any) -> Any:
    """Returns torch's function for one of ours, whoever's arguments that takes.

    Any other value as it is.
    """
    return (
        getattr(dist.distributed_c10d, op.__name__, op)
        if getattr(op, "__module__", "") in _OURS
        else op
    )


class P2POp(dist.P2POp):
    """A send or a receive for ``batch_isend_irecv``; those of torch may stand in the same list.

    Its attribute ``op`` is torch's function, whichever was given.
    """

    __doc__ = dist.P2POp.__doc__

    def __new__(cls, op: Any, *args: Any, **kwargs: Any) -> P2POp:
        """Checks the arguments as torch does."""
        made: P2POp = dist.P2POp.__new__(cls, _find_original(op), *args, **kwargs)
        return made

    def __init__(self, op: Any, *args: Any, **kwargs: Any) -> None:
        """Takes torch's arguments; peers are found by the current backend."""
        op = _find_original(op)
        backend = get_state().backend
        if backend is None or isinstance(backend, TorchBackend):
            super().__init__(op, *args, **kwargs)
            return
        given = _SIGNATURE.bind(op, *args, **kwargs)
        given.apply_defaults()
        arguments = given.arguments
        peer, place = arguments["peer"], arguments["group_peer"]
        if (peer is None) == (place is None):
            raise ArgumentError(
                f"peer must be given once, got peer={peer!r} and group_peer={place!r} (P2POp). "
                "Give one of them."
            )
        self.op, self.tensor, self.group, self.tag = (
            op,
            arguments["tensor"],
            arguments["group"],
            arguments["tag"],
        )
        self.peer = backend.get_global_rank(self.group, place) if peer is None else peer
        self.group_peer = backend.get_group_rank(self.group, peer) if place is None else place

    def __repr__(self) -> str:
        return (
            f"P2POp({self.op.__name__} peer={self.peer}, tag={self.tag}, "
            f"{tuple(self.tensor.shape)}, {self.tensor.dtype})"
        )


P2POp.__signature__ = _SIGNATURE  # type: ignore[attr-defined]  # inspect reads it from any callable
