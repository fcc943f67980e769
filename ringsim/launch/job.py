"""What travels to the ranks: who each of them is, and the call, packed."""

from __future__ import annotations

import linecache
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ringsim.faults import Injection

# a logger: name, level; stream, level and format of handlers
Logging = tuple[str, int, list[tuple[str, int, logging.Formatter | None]]]
ALONE: Final = "virtual clock"  # the device of a process that runs a function alone
INTERRUPT: Final = "interrupt"  # asks such a process for what there is so far
# which mistakes the ranks refuse to make, see `ringsim.trace`
CHECKS: Final = ("basic", "full", "off")
# Values that torch, Gloo, NCCL, OpenMP, BLAS, the allocator, the loader or Python read when a
# process starts. A rank that started with other values than the caller's must not run the caller's
# job.
START_VALUES: Final = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|NUMEXPR|GLOO|NCCL|TORCH|PYTORCH|ATEN|C10|TP|CUDA|CUBLAS|"
    r"CUDNN|NVIDIA|LD|MALLOC|GLIBC|PYTHON)(_.*)?"
    r"|GLIBC_TUNABLES|TMPDIR|LANG|LC_ALL"
)
# limit of the source text of notebook cells that travels with a call
_CELL_LINES_BYTES: Final = 1_000_000


def start_environment() -> tuple[tuple[str, str], ...]:
    """Returns the part of the environment that is read once, when a process starts."""
    return tuple(
        sorted((name, value) for name, value in os.environ.items() if START_VALUES.fullmatch(name))
    )


@dataclass(frozen=True)
class Kind:
    """What fresh ranks and a call must have in common for the ranks to take it."""

    world_size: int
    comm_device: str
    timeout_s: float
    ring: bool
    environment: tuple[tuple[str, str], ...]
    interpreter: str = sys.executable
    backend: str | None = None


@dataclass(frozen=True)
class RankConfig:
    """What a rank is told when it starts, before it has a job.

    Attributes:
        directory: the run's private directory, for the rank's records, output and exit status.
        backend: "mpi", or None for the device's own.
        keep: whether the directory outlives a launcher that was killed (the run was given a path).
        ring: whether the rank joins the default group and the ring before it takes a job.
        mark: stands in the rank's output before and after what print suppression hides; no program
            knows it, so none prints it.
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

    def for_rank(self, rank: int) -> RankConfig:
        """Returns the same for another rank."""
        return replace(self, rank=rank)

    def file(self, what: str) -> Path:
        """Returns a file of the rank in the run's directory.

        Args:
            what: "out" for everything that the rank prints; "crash" for the line at which it
                crashes, which Python writes; "result" for what its worker returns; "exit" for its
                exit status, which the process that reaps it writes.
        """
        return Path(self.directory, f"rank-{self.rank}.{what}")

    @property
    def port_file(self) -> Path:
        """Where rank 0 writes the port of the rendezvous."""
        return Path(self.directory, "port")


@dataclass(frozen=True)
class Job:
    """One call, ready to travel: the same for every rank.

    Attributes:
        call: cloudpickle bytes of (worker, args, kwargs), or None for a script.
        script: path of a script to run as ``__main__``, or None; the name of a module where
            ``module`` says so.
        environ, cwd, path, argv, affinity: the caller's, as they are now.
        lines: source lines of code that is in no file (notebook cells), for tracebacks.
        seed: rank r seeds torch, numpy and random with seed + r.
        check: which mistakes are refused, see ``ringsim.trace``.
        inject: the faults to inject, on any rank.
        loggers: the caller's, as they are configured now.
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
    module: bool = False
    loggers: tuple[Logging, ...] = ()


def pack_call(
    worker: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, seed: int
) -> Job:
    """Packs a function and its arguments, the same on every rank.

    It may also be one from a notebook cell, a closure or a lambda.

    Raises:
        ArgumentError: ``args`` is no list, ``kwargs`` no dict, or something that the function uses
            cannot be pickled; the message names it and the line that uses it.
    """
    from ringsim.ring.packing import pack_worker  # on use: cloudpickle

    return _pack(pack_worker(worker, args, kwargs), None, list(sys.argv), seed)


def pack_script(script: str, argv: Sequence[str], seed: int, *, module: bool = False) -> Job:
    """Packs a script, or a module by its name, with its command-line arguments.

    It runs as ``__main__``.
    """
    return replace(
        _pack(None, script if module else os.path.abspath(script), [script, *argv], seed),
        module=module,
    )


def pack_caller() -> Job:
    """Packs nothing but the caller's surroundings: environment, directory, import path, loggers."""
    return _pack(None, None, list(sys.argv), 0)


def _pack(call: bytes | None, script: str | None, argv: list[str], seed: int) -> Job:
    affinity = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    path = [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path]
    return Job(
        call,
        script,
        dict(os.environ),
        os.getcwd(),
        path,
        argv,
        affinity,
        _cell_lines(),
        seed,
        loggers=list_loggers(),
    )


def list_loggers() -> tuple[Logging, ...]:
    """Returns how this process's loggers are configured.

    Their levels, and what they write to stdout and stderr in which format.
    """
    loggers = {"": logging.getLogger(), **logging.Logger.manager.loggerDict}
    found = []
    for name, logger in loggers.items():
        if isinstance(logger, logging.Logger):
            handlers = [
                (
                    "stdout" if handler.stream is sys.stdout else "stderr",
                    handler.level,
                    handler.formatter,
                )
                for handler in logger.handlers
                if type(handler) is logging.StreamHandler
                and handler.stream in (sys.stdout, sys.stderr)
            ]
            plain = [
                (stream, level, form if type(form) is logging.Formatter else None)
                for stream, level, form in handlers
            ]
            if logger.level or plain:
                found.append((name, logger.level, plain))
    return tuple(found)


def configure_loggers(loggers: tuple[Logging, ...]) -> None:
    """Configures the loggers of a rank as those of the caller."""
    for name, level, handlers in loggers:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        for stream, handler_level, form in handlers:
            handler = logging.StreamHandler(getattr(sys, stream))
            handler.setLevel(handler_level)
            handler.setFormatter(form)
            logger.addHandler(handler)


def _cell_lines() -> dict[str, list[str]]:
    """Returns the source lines that only this process has.

    Those of notebook cells, the newest first, up to a limit.
    """
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
