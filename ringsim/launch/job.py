"""The data sent to the ranks: each rank's configuration, and the packed call."""

from __future__ import annotations

import linecache
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ringsim.errors import ArgumentError
from ringsim.faults import Injection

Lines = dict[str, list[str]]  # the source lines of code outside files, by name
# a logger: name, level; stream, level and format of handlers
Logging = tuple[str, int, list[tuple[str, int, logging.Formatter | None]]]
ALONE = "virtual clock"  # the device of a process that runs a function alone
INTERRUPT = "interrupt"  # asks such a process for its partial result
# the mistakes that the ranks refuse, see `ringsim.trace`
CHECKS = ("basic", "full", "off")
# Variables that torch, Gloo, NCCL, OpenMP, BLAS, the allocator, the loader or Python read when a
# process starts. A rank that started with different values must not run the caller's job.
START_VALUES = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|NUMEXPR|GLOO|NCCL|TORCH|PYTORCH|ATEN|C10|TP|CUDA|CUBLAS|"
    r"CUDNN|NVIDIA|LD|MALLOC|GLIBC|PYTHON)(_.*)?"
    r"|GLIBC_TUNABLES|TMPDIR|LANG|LC_ALL"
)
# limit of the source text of notebook cells sent with a call
_CELL_LINES_BYTES = 1_000_000


def refuse_unknown(check: str) -> None:
    """Checks that ``check`` is one of ``CHECKS``."""
    if check not in CHECKS:
        raise ArgumentError(f"check must be one of {', '.join(map(repr, CHECKS))}, got {check!r}.")


def start_environment() -> tuple[tuple[str, str], ...]:
    """Returns the environment variables that a process reads only once, when it starts."""
    return tuple(
        sorted((name, value) for name, value in os.environ.items() if START_VALUES.fullmatch(name))
    )


@dataclass(frozen=True)
class RankKind:
    """The properties that ranks and a call must share."""

    world_size: int
    comm_device: str
    timeout_s: float
    ring: bool
    environment: tuple[tuple[str, str], ...]
    interpreter: str = sys.executable
    backend: str | None = None
    stays: bool = False


@dataclass(frozen=True)
class RankConfig:
    """The configuration that a rank receives when it starts, before it has a job.

    Attributes:
        directory: the run's private directory, for the rank's records, output and exit status.
        backend: "mpi", or None for the default of the device.
        keep: whether the directory remains if the launcher is killed (if the run was given a path).
        ring: whether the rank joins the default group and the ring before it takes a job.
        mark: a secret text printed before and after output hidden by print suppression.
        stays: whether the rank belongs to a session, and takes one call after the other.
    """

    directory: str
    rank: int
    world_size: int
    comm_device: str
    timeout_s: float
    ring: bool
    keep: bool = False
    mark: str = ""
    backend: str | None = None
    stays: bool = False

    def for_rank(self, rank: int) -> RankConfig:
        """Returns the configuration of another rank."""
        return replace(self, rank=rank)

    def file(self, what: str) -> Path:
        """Returns the path of one of the rank's files in the run's directory.

        Args:
            what: "out" for the rank's output; "crash" for the line of a crash, written by Python;
                "result" for the worker's result; "exit" for the exit status, written by the process
                that reaps the rank.
        """
        return Path(self.directory, f"rank-{self.rank}.{what}")

    @property
    def port_file(self) -> Path:
        """The file into which rank 0 writes the rendezvous port."""
        return Path(self.directory, "port")


@dataclass(frozen=True)
class Job:
    """A packed call, the same for every rank.

    Attributes:
        environ, cwd, path, argv, affinity: the caller's current values.
        lines: the source lines of code outside files (notebook cells), for tracebacks.
        loggers: the current configuration of the caller's loggers.
        call: the pickled (worker, args, kwargs), made by cloudpickle, or None for a script.
        script: the path of a script to run as ``__main__``, or None; the name of a module if
            ``module`` is set.
        seed: rank r seeds torch, numpy and random with seed + r.
        check: the mistakes to refuse; see ``ringsim.trace``.
        inject: the faults to inject, on any rank.
        directory: the directory of a session's call, or None for the directory of the ranks.
        epoch: how often a session has made its groups again.
        only: the ranks that run a session's call; the others return at once. None means all.
        debug: whether breakpoints bring a rank's debugger to the caller.
    """

    environ: dict[str, str]
    cwd: str
    path: list[str]
    argv: list[str]
    affinity: tuple[int, ...]
    lines: Lines
    loggers: tuple[Logging, ...]
    call: bytes | None = None
    script: str | None = None
    module: bool = False
    seed: int = 0
    check: str = "basic"
    inject: tuple[Injection, ...] = ()
    directory: str | None = None
    epoch: int = 0
    only: tuple[int, ...] | None = None
    debug: bool = False


def pack_call(
    worker: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    seed: int,
    pack: Callable[[Any], bytes] | None = None,
) -> Job:
    """Packs a function and its arguments, which are the same on every rank.

    The function may come from a notebook cell, or be a closure or a lambda. ``pack`` replaces
    ``dumps``.

    Raises:
        ArgumentError: ``args`` is not a list, ``kwargs`` is not a dict, or the function uses an
            object that cannot be pickled; the message names the object and the line that uses it.
    """
    from ringsim.ring.packing import dumps, pack_worker  # imported on use: cloudpickle

    packed = pack_worker(worker, args, kwargs, pack or dumps)
    return replace(pack_caller(), call=packed, seed=seed)


def pack_script(script: str, argv: Sequence[str], *, module: bool = False) -> Job:
    """Packs a script, or a module by its name, with its command-line arguments.

    The script runs as ``__main__``.
    """
    path = script if module else os.path.abspath(script)
    return replace(pack_caller(), script=path, argv=[script, *argv], module=module)


def pack_caller() -> Job:
    """Packs only the caller's environment, working directory, import path and loggers."""
    affinity = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    path = [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path]
    return Job(
        dict(os.environ),
        os.getcwd(),
        path,
        list(sys.argv),
        affinity,
        _cell_lines(),
        list_loggers(),
    )


def list_loggers() -> tuple[Logging, ...]:
    """Returns the configuration of this process's loggers.

    The configuration contains the loggers' levels, and the levels and formats of their stdout and
    stderr handlers.
    """
    loggers = {"": logging.getLogger(), **logging.Logger.manager.loggerDict}
    found = []
    for name, logger in loggers.items():
        if isinstance(logger, logging.Logger):
            handlers = [
                (
                    "stdout" if handler.stream is sys.stdout else "stderr",
                    handler.level,
                    handler.formatter if type(handler.formatter) is logging.Formatter else None,
                )
                for handler in logger.handlers
                if type(handler) is logging.StreamHandler
                and handler.stream in (sys.stdout, sys.stderr)
            ]
            if logger.level or handlers:
                found.append((name, logger.level, handlers))
    return tuple(found)


def configure_loggers(loggers: tuple[Logging, ...]) -> None:
    """Configures a rank's loggers like the caller's loggers."""
    for name, level, handlers in loggers:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        for stream, handler_level, form in handlers:
            handler = logging.StreamHandler(getattr(sys, stream))
            handler.setLevel(handler_level)
            handler.setFormatter(form)
            logger.addHandler(handler)


def _cell_lines() -> Lines:
    """Returns the source lines of notebook cells, the newest first, up to a limit.

    Only this process has these lines.
    """
    lines: Lines = {}
    left = _CELL_LINES_BYTES
    for name, entry in reversed(list(linecache.cache.items())):
        if len(entry) != 4 or entry[1] is not None or os.path.exists(name):
            continue  # lazy, or from a file: a rank can read it by itself
        left -= entry[0]
        if left < 0:
            break
        lines[name] = list(entry[2])
    return lines


def show_lines(cells: Lines) -> None:
    """Makes the source lines of code outside files known to tracebacks."""
    for name, lines in cells.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
