"""The functions of ``torch.distributed`` that communicate, with a log of how long they take.

The functions are created from the signatures of the installed torch. Without a log, a call is
passed to torch's own function after two checks. An operation that this version of torch lacks, or
that its backend rejects, is built from messages (``ringsim.comm.building``), with one warning.
Functions and parameters added by a later torch appear here automatically.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from types import FunctionType
from typing import Any

import torch.distributed as dist

from ringsim.comm.building import build, warn_once
from ringsim.comm.calls import (
    READINGS,
    Members,
    make_signature,
    name_function,
    read_call,
)
from ringsim.comm.mpi import check_place
from ringsim.comm.numbering import name_and_ranks
from ringsim.comm.python_group import PythonGroup
from ringsim.state import get_state, process

_MODULE = "ringsim.comm"  # the module that exports the functions
# Torch raises this before it sends anything: "Backend gloo does not support gather_single" (2.15).
_REFUSAL = re.compile(r"Backend \S+ does not support \w+")
# arguments for the log: see ``LogOptions.call``
_EXTRAS = {"prof": False, "log_name": None, "debug": None}
# these functions have a parameter `group`, but send nothing that a log could count
QUESTIONS = (
    "destroy_process_group",
    "get_rank",
    "get_world_size",
    "get_process_group_ranks",
    "get_group_rank",
    "get_global_rank",
    "get_backend",
    "get_backend_config",
    "get_backend_impl",
    "get_pg_count",
    "set_timeout",
    "split_group",
    "shrink_group",
    "breakpoint",
)
# functions that create groups: if the program names no backend, they use the backend from
# ``set_backend``
_MAKERS = (
    "init_process_group",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
)


# -- operations that torch lacks


def _build(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Builds a collective from messages; a group written in Python uses its own implementation.

    Returns:
        The handle of an asynchronous call, or None for other calls and outside the group.
    """
    arguments = READINGS[name].bind(args, kwargs)
    group: Any = arguments["group"] or dist.group.WORLD
    if dist.get_rank(group) < 0:
        return None
    root = READINGS[name].collective.root
    if root and arguments[f"group_{root}"] is None:
        arguments[f"group_{root}"] = dist.get_group_rank(group, arguments[root] or 0)
    if isinstance(group, PythonGroup):
        handle = group.begin_collective(name, arguments)
    else:
        warn_once(name, dist.get_backend(group))
        title, ranks = name_and_ranks(group)
        members = Members(ranks, group.rank(), title)
        handle = build(group, read_call(name, arguments, members))
    if arguments["async_op"]:
        return handle
    handle.wait()
    return None


def _monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
    """Calls torch's function, which supports only Gloo, or a Python group's own method."""
    own = group or dist.group.WORLD
    if isinstance(own, PythonGroup):
        return own.monitored_barrier(timeout, wait_all_ranks)
    return dist.monitored_barrier(group, timeout, wait_all_ranks)


# -- creating the functions


def make_function(
    name: str, signature: inspect.Signature, native: Callable[..., Any] | None
) -> FunctionType:
    """Creates the replacement for one of torch's communication functions.

    Args:
        name: the name of the function.
        signature: the signature of torch's function.
        native: torch's function, or None if torch lacks it.

    Returns:
        The function, with the additional parameters ``prof``, ``log_name`` and ``debug``.
    """

    def call_built(*args: Any, **kwargs: Any) -> Any:
        return _build(name, args, kwargs)

    torchs = _monitored_barrier if name == "monitored_barrier" else native or call_built

    def communicate(
        *args: Any,
        prof: bool = False,
        log_name: str | None = None,
        debug: str | None = None,
        **kwargs: Any,
    ) -> Any:
        try:
            if process.unchanged or get_state().log is None:
                return torchs(*args, **kwargs)
            return get_state().log.call(name, torchs, args, kwargs, prof, log_name, debug)
        except RuntimeError as error:
            if name not in READINGS or not _REFUSAL.match(str(error)):
                raise
        log = get_state().log
        if log is None:
            return call_built(*args, **kwargs)
        return log.call(name, call_built, args, kwargs, prof, log_name, debug)

    doc = native.__doc__ if native else f"Performs ``{name}``, built from messages."
    return name_function(communicate, name, doc, _with_extras(signature), _MODULE)


def _make_maker(name: str, signature: inspect.Signature) -> FunctionType:
    """Creates the replacement for one of torch's functions that create groups."""

    def make(*args: Any, **kwargs: Any) -> Any:
        # Looked up at each call: on simulated ranks, init_process_group is replaced.
        torchs = getattr(dist, name)
        state = get_state()
        begins = name == "init_process_group" and state.clock is None
        if state.backend is None and not begins:
            return torchs(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("backend") is None and state.backend is not None:
            given.arguments["backend"] = state.backend
        if begins:
            _check_mpi(given.arguments)
        return torchs(*given.args, **given.kwargs)

    return name_function(make, name, getattr(dist, name).__doc__, signature, _MODULE)


def _check_mpi(arguments: dict[str, Any]) -> None:
    """Checks the rank and world size passed to ``init_process_group``; MPI sets both itself."""
    if str(arguments.get("backend")).lower() != "mpi" or not dist.is_mpi_available():
        return
    # torch would warn that it ignores them
    check_place(arguments.pop("world_size", -1), arguments.pop("rank", -1))


def _with_extras(signature: inspect.Signature) -> inspect.Signature:
    """Adds the log's keyword-only parameters after all parameters except ``**kwargs``."""
    added = [
        inspect.Parameter(extra, inspect.Parameter.KEYWORD_ONLY, default=default)
        for extra, default in _EXTRAS.items()
    ]
    parameters = [*signature.parameters.values(), *added]
    return signature.replace(parameters=sorted(parameters, key=attrgetter("kind")))


def _communicates(name: str, function: Any) -> bool:
    """Returns whether a torch function communicates, even if this module does not list it."""
    return (
        type(function) is FunctionType
        and not name.startswith("_")
        and name not in (*QUESTIONS, *_MAKERS)
        and function.__module__ == dist.distributed_c10d.__name__
        # all other functions that communicate have a parameter `group`
        and (name == "batch_isend_irecv" or "group" in inspect.signature(function).parameters)
    )


# for functions that a tool has replaced: the replacement may hide the arguments
_SPELLINGS = {
    "isend": "tensor, dst=None, group=None, tag=0, group_dst=None",
    "irecv": "tensor, src=None, group=None, tag=0, group_src=None",
    "send": "tensor, dst=None, group=None, tag=0, group_dst=None",
    "recv": "tensor, src=None, group=None, tag=0, group_src=None",
    "batch_isend_irecv": "p2p_op_list",
    "monitored_barrier": "group=None, timeout=None, wait_all_ranks=False",
}


def _find_communicating() -> Iterator[tuple[str, inspect.Signature, Any]]:
    """Yields the name, the signature and torch's version of each function that communicates.

    Functions that exist only in later versions of torch are included; they are built from messages.
    """
    known = {name: make_signature(arguments) for name, arguments in _SPELLINGS.items()}
    known |= {name: reading.signature for name, reading in READINGS.items()}
    for name, function in vars(dist).items():
        if _communicates(name, function):
            known.pop(name, None)
            yield name, inspect.signature(function), function
    for name, signature in known.items():
        yield name, signature, getattr(dist, name, None)


FUNCTIONS: dict[str, FunctionType] = {  # functions that communicate, by name
    name: make_function(name, signature, native)
    for name, signature, native in sorted(_find_communicating(), key=itemgetter(0))
}
MANAGING: dict[str, FunctionType] = {  # functions that create groups
    name: _make_maker(name, inspect.signature(getattr(dist, name))) for name in _MAKERS
}


# -- messages in a batch


_OURS = (_MODULE, "ringsim.comm.deepspeed")


class P2POp(dist.P2POp):
    """A send or a receive for ``batch_isend_irecv``, which also accepts torch's own ``P2POp``.

    The attribute ``op`` is always torch's function.
    """

    __doc__ = dist.P2POp.__doc__

    def __new__(cls, op: Any, *args: Any, **kwargs: Any) -> P2POp:
        """Checks the arguments as torch does."""
        made: P2POp = dist.P2POp.__new__(cls, _find_original(op), *args, **kwargs)
        return made

    def __init__(self, op: Any, *args: Any, **kwargs: Any) -> None:
        """Accepts torch's arguments."""
        super().__init__(_find_original(op), *args, **kwargs)

    def __repr__(self) -> str:
        return (
            f"P2POp({self.op.__name__} peer={self.peer}, tag={self.tag}, "
            f"{tuple(self.tensor.shape)}, {self.tensor.dtype})"
        )


def _find_original(op: Any) -> Any:
    """Returns torch's counterpart of a function in this package, or any other value unchanged."""
    if getattr(op, "__module__", "") not in _OURS:
        return op
    return getattr(dist.distributed_c10d, op.__name__, op)


P2POp.__signature__ = inspect.signature(dist.P2POp)  # type: ignore[attr-defined]
