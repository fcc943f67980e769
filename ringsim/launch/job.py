"""What travels to the ranks: who each of them is, and the call, packed; what to say of a value that cannot travel."""

from __future__ import annotations

import dis
import inspect
import linecache
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import cloudpickle

from ringsim.errors import ArgumentError, check_call
from ringsim.faults import Injection
from ringsim.traces.parts import name_cells

CHECKS: Final = ("basic", "full", "off")  # which mistakes the ranks refuse to make, see `ringsim.trace`
# Values that torch, Gloo, NCCL, OpenMP, BLAS, the allocator, the loader or Python read when a process starts. A rank that
# started with other values than the caller's must not run the caller's job.
START_VALUES: Final = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|NUMEXPR|GLOO|NCCL|TORCH|PYTORCH|ATEN|C10|TP|CUDA|CUBLAS|CUDNN|NVIDIA|LD|MALLOC|GLIBC|PYTHON)(_.*)?"
    r"|GLIBC_TUNABLES|TMPDIR|LANG|LC_ALL"
)
HIDE, SHOW = "\x0e", "\x0f"  # "shift out" and "shift in": print suppression hid what lies between them in the output of a rank
LARGE_CAPTURE_BYTES: Final = 10_000_000
_CELL_LINES_BYTES: Final = 1_000_000  # limit of the source text of notebook cells that travels with a call


def start_environment() -> tuple[tuple[str, str], ...]:
    """Returns the part of the environment that is read once, when a process starts."""
    return tuple(sorted((name, value) for name, value in os.environ.items() if START_VALUES.fullmatch(name)))


@dataclass(frozen=True)
class Kind:
    """What fresh ranks and a call must have in common for the ranks to take it."""

    world_size: int
    comm_device: str
    timeout_s: float
    ring: bool
    environment: tuple[tuple[str, str], ...]
    interpreter: str = sys.executable


@dataclass(frozen=True)
class RankConfig:
    """What a rank is told when it starts, before it has a job.

    Attributes:
        directory: the run's private directory, for the rank's records, output and exit status.
        keep: whether the directory outlives a launcher that was killed (the run was given a path).
        ring: whether the rank joins the default group and the ring before it takes a job.
    """

    directory: str
    rank: int
    world_size: int
    comm_device: str
    timeout_s: float
    ring: bool
    keep: bool = False

    def for_rank(self, rank: int) -> RankConfig:
        """Returns the same for another rank."""
        return replace(self, rank=rank)

    @property
    def output_file(self) -> Path:
        """Where everything that the rank prints goes."""
        return Path(self.directory, f"rank-{self.rank}.out")

    @property
    def exit_file(self) -> Path:
        """Where the process that reaps the rank writes its exit status."""
        return Path(self.directory, f"rank-{self.rank}.exit")

    @property
    def port_file(self) -> Path:
        """Where rank 0 writes the port of the rendezvous."""
        return Path(self.directory, "port")


@dataclass(frozen=True)
class Job:
    """One call, ready to travel: the same for every rank.

    Attributes:
        call: cloudpickle bytes of (worker, args, kwargs), or None for a script.
        script: path of a script to run as ``__main__``, or None.
        environ, cwd, path, argv, affinity: the caller's, as they are now.
        lines: source lines of code that is in no file (notebook cells), for tracebacks.
        seed: rank r seeds torch, numpy and random with seed + r.
        check: which mistakes are refused, see ``ringsim.trace``.
        inject: the faults to inject, on any rank.
    """

    call: bytes | None
    script: str | None
    environ: dict[str, str]
    cwd: str
    path: list[str]
    argv: list[str]
    affinity: tuple[int, ...]
    lines: dict[str, list[str]]
    seed: int
    check: str = "basic"
    inject: tuple[Injection, ...] = ()


def pack_call(worker: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, seed: int) -> Job:
    """Packs a function (also one from a notebook cell, a closure or a lambda) and its arguments, the same on every rank.

    Raises:
        ArgumentError: ``args`` is no list, ``kwargs`` no dict, or something that the function uses cannot be pickled; the message names it
            and the line that uses it.
    """
    values, named = check_call(args, kwargs)
    try:
        call = cloudpickle.dumps((worker, values, named))
    except Exception as error:
        raise ArgumentError(_explain_unpicklable(worker, values, named, error)) from None
    if len(call) > LARGE_CAPTURE_BYTES:
        _warn_large(worker, values, named, len(call))
    return _pack(call, None, list(sys.argv), seed)


def pack_script(script: str, argv: Sequence[str], seed: int) -> Job:
    """Packs a script that runs as ``__main__``, with its command-line arguments."""
    return _pack(None, os.path.abspath(script), [script, *argv], seed)


def _pack(call: bytes | None, script: str | None, argv: list[str], seed: int) -> Job:
    affinity = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    path = [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path]
    return Job(call, script, dict(os.environ), os.getcwd(), path, argv, affinity, _cell_lines(), seed)


def _cell_lines() -> dict[str, list[str]]:
    """Returns the source lines that only this process has: those of notebook cells, the newest first, up to a limit."""
    lines: dict[str, list[str]] = {}
    left = _CELL_LINES_BYTES
    for name, entry in reversed(list(linecache.cache.items())):
        if len(entry) != 4 or entry[1] is not None or os.path.exists(name):
            continue  # lazy, or from a file: a rank reads it by itself
        left -= entry[0]
        if left < 0:
            break
        lines[name] = list(entry[2])
    return lines


def _captures(worker: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any, int | None]]:
    """Yields (what it is, value, line that uses it) for everything that travels with ``worker``."""
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
    line = None
    for instruction in dis.get_instructions(function):
        if instruction.positions is not None and instruction.positions.lineno is not None:
            line = instruction.positions.lineno
        if instruction.argval == name and "LOAD" in instruction.opname:
            return line
    return None


def _explain_unpicklable(worker: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> str:
    name = getattr(worker, "__name__", "worker")
    culprit = _find_unpicklable(worker, args, kwargs, depth=3)
    if culprit is None:
        return f"what {name} uses must be picklable, got {type(error).__name__}: {error}. Create it inside {name} instead."
    return f"{culprit}. Create it inside {name}, or pass what it is made from."


def _find_unpicklable(worker: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], depth: int) -> str | None:
    """Names the first value that cannot be pickled, and where it is used: also one that a used function uses."""
    for what, value, line in _captures(worker, args, kwargs):
        try:
            cloudpickle.dumps(value)
        except Exception:
            if isinstance(value, types.FunctionType) and depth > 0 and (inner := _find_unpicklable(value, (), {}, depth - 1)):
                return inner
            kind, where = f"{type(value).__module__}.{type(value).__qualname__}", ""
            code = getattr(inspect.unwrap(worker), "__code__", None)
            if code is not None and line is not None:
                file = name_cells([code.co_filename]).get(code.co_filename, code.co_filename)
                where = f" ({file}, line {line}, in {code.co_name})"
            return f"{what} must be picklable to travel to the ranks, got a {kind}{where}"
    return None


def _warn_large(worker: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], total_bytes: int) -> None:
    """Warns that a lot of data travels to each rank, and names the largest piece."""
    sizes = {what: len(cloudpickle.dumps(value)) for what, value, _ in _captures(worker, args, kwargs)}
    largest = max(sizes, key=lambda what: sizes[what], default="the worker")
    warnings.warn(
        f"{total_bytes / 1e6:.1f} MB travel to every rank, most of it in {largest} ({sizes.get(largest, total_bytes) / 1e6:.1f} MB). "
        "Create large data inside the worker, or load it there from a file.",
        stacklevel=4,
    )
