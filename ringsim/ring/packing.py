"""Packs a worker and its arguments as bytes, so that each rank receives a copy.

This module also explains why a value cannot be packed. It serves real and simulated ranks.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import io
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

from ringsim.errors import ArgumentError, check_call
from ringsim.traces.cells import name_cells
from ringsim.traces.sites import RINGSIM, warn_user

Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]  # a function and its arguments
_LARGE_BYTES = 10_000_000


class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # cloudpickle has no types
    """A cloudpickle pickler that also handles modules whose class is not the standard one.

    For example, ``torch.ops`` and ``torch.backends.cudnn`` are pickled by name.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Returns the recipe for ``obj``: an import for a special module, else cloudpickle's."""
        if (
            isinstance(obj, types.ModuleType)
            and type(obj) is not types.ModuleType
            and sys.modules.get(obj.__name__) is obj
        ):
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def dumps(value: object) -> bytes:
    """Returns ``value`` as pickled bytes."""
    with io.BytesIO() as packed:
        Pickler(packed).dump(value)
        return packed.getvalue()


def pack_worker(
    worker: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    pack: Callable[[Any], bytes] = dumps,
) -> bytes:
    """Packs a function and its arguments, pickled as ``(worker, args, kwargs)`` by ``pack``.

    The function may come from a notebook cell, and it may be a closure or a lambda.

    Raises:
        ArgumentError: ``args`` is not a sequence, ``kwargs`` is not a dict, or a value that the
            function uses cannot be pickled; the message names the value and the line that uses it.
    """
    call = worker, *check_call(args, kwargs)
    _add_strangers(getattr(worker, "__module__", None) or "__main__")
    try:
        packed = pack(call)
    except Exception as error:
        raise ArgumentError(_explain_unpicklable(call, error)) from None
    if len(packed) > _LARGE_BYTES:
        _warn_large(call, len(packed))
    return packed


def _add_strangers(name: str) -> None:
    """Makes cloudpickle pack a module that ranks cannot import, along with its sibling modules.

    Pytest loads such modules, because it loads files by path (``--import-mode=importlib``).
    """
    if name == "__main__" or _can_be_imported(name):
        return
    package = name.partition(".")[0]
    loaded: dict[str, object] = dict(sys.modules)  # may contain any kind of object
    for other, module in loaded.items():
        if (
            other.partition(".")[0] == package
            and isinstance(module, types.ModuleType)
            and not _can_be_imported(other)
        ):
            cloudpickle.register_pickle_by_value(module)


def _can_be_imported(name: str) -> bool:
    places = None
    for part in itertools.accumulate(name.split("."), "{}.{}".format):
        spec = next(
            (
                spec
                for finder in sys.meta_path
                if (spec := finder.find_spec(part, places)) is not None
            ),
            None,
        )
        if spec is None:
            return False
        places = spec.submodule_search_locations
    return True


def _captures(call: Call) -> Iterator[tuple[str, Any, int | None]]:
    """Yields (description, value, line of use) for each value packed with a call's function."""
    worker, args, kwargs = call
    yield from ((f"argument {index} of args", value, None) for index, value in enumerate(args))
    yield from ((f"argument {name!r} of kwargs", value, None) for name, value in kwargs.items())
    function = inspect.unwrap(worker)
    if not isinstance(function, types.FunctionType):
        yield (f"the worker {worker!r}", worker, None)
        return
    captured = inspect.getclosurevars(function)
    for name, value in {**captured.globals, **captured.nonlocals}.items():
        if not isinstance(value, types.ModuleType):
            yield (f"the variable {name!r}", value, _line_of(function, name))


def _line_of(function: types.FunctionType, name: str) -> int | None:
    """Returns the line on which ``function`` first uses the variable ``name``."""
    for instruction in dis.get_instructions(function):
        if instruction.argval == name and "LOAD" in instruction.opname and instruction.positions:
            return instruction.positions.lineno
    return None


def _explain_unpicklable(call: Call, error: Exception) -> str:
    name = getattr(call[0], "__name__", "worker")
    culprit = _find_unpicklable(call, depth=3)
    if culprit is None:
        return (
            f"cannot pickle {name} and the values it uses: {type(error).__name__}: {error}. "
            f"Create these values inside {name} instead."
        )
    return f"{culprit}. Create it inside {name}, or pass the data from which it is built."


def _find_unpicklable(call: Call, depth: int) -> str | None:
    """Describes the first value that cannot be pickled and the place where it is used.

    Values used by other functions that the worker uses are also checked.
    """
    for what, value, line in _captures(call):
        try:
            dumps(value)
        except Exception:
            if (
                isinstance(value, types.FunctionType)
                and depth > 0
                and (inner := _find_unpicklable((value, (), {}), depth - 1))
            ):
                return inner
            kind, where = f"{type(value).__module__}.{type(value).__qualname__}", ""
            code = getattr(inspect.unwrap(call[0]), "__code__", None)
            if code is not None and line is not None:
                file = name_cells([code.co_filename]).get(code.co_filename, code.co_filename)
                where = f" ({file}, line {line}, in {code.co_name})"
            return f"{what} cannot be sent to the ranks, because a {kind} cannot be pickled{where}"
    return None


def _warn_large(call: Call, total_bytes: int) -> None:
    """Warns that a large amount of data is sent to each rank, and names the largest value."""
    sizes = {what: len(dumps(value)) for what, value, _ in _captures(call)}
    largest = max(sizes, key=lambda what: sizes[what], default="the worker")
    message = (
        f"ringsim sends {total_bytes / 1e6:.1f} MB to every rank; the largest part is {largest} "
        f"({sizes.get(largest, total_bytes) / 1e6:.1f} MB). Create large data inside the worker, "
        "or load it there from a file."
    )
    warn_user(message, UserWarning, (RINGSIM,))
