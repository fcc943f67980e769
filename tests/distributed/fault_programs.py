"""The programs of tests/distributed/faults.md.

Each is one row of the table, with one mistake or the appearance of one. The lines that the finding
of a row must name are marked with ``# here``.
"""

from __future__ import annotations

import inspect
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Worker = Callable[..., bool | None]

FAST_S = 1.0  # from the last event to the end, for messages
SLOW_S = 3.0  # and for everything else
SHORT_S = 4.0  # limit of a run that only a limit ends
# for programs that run at the same time, and may have to be silent for 3 s first
EASE: Any = {"within_s": 8.0, "limit_s": 20.0}


class Fault(NamedTuple):
    """A program and how to run it.

    Attributes:
        worker: the function of every rank; if it returns a value, this must be True.
        size: the number of ranks.
        within_s: the longest time from the last event to the end of the run; None if only a limit
            ends it.
        options: the options of ``ringsim.trace``.
        args: a function that returns the worker's arguments.
        lines: exactly the lines that the error must name.
    """

    worker: Worker
    size: int
    within_s: float | None
    options: dict[str, Any]
    args: Callable[[], tuple[Any, ...]]
    lines: frozenset[int]


FAULTS: dict[str, Fault] = {}  # by the row's number in the document


def fault(
    row: str,
    size: int = 2,
    within_s: float | None = FAST_S,
    args: Callable[[], tuple[Any, ...]] = tuple,
    blame: Sequence[Callable[..., Any]] = (),
    **options: Any,
) -> Callable[[Worker], Worker]:
    """Registers a worker as the program of a row.

    The first lines of the functions in ``blame`` count as marked.
    """

    def register(worker: Worker) -> Worker:
        if row in FAULTS:
            raise ValueError(f"a row must have one program, got two for row {row}")
        lines = marked_lines(worker) | {function.__code__.co_firstlineno for function in blame}
        FAULTS[row] = Fault(worker, size, within_s, options, args, frozenset(lines))
        return worker

    return register


def marked_lines(worker: Callable[..., Any]) -> set[int]:
    """Returns the marked lines of a program."""
    lines, first = inspect.getsourcelines(worker)
    return {first + offset for offset, line in enumerate(lines) if "# here" in line}


def large(value: int) -> torch.Tensor:
    """Returns a message of 256 MB, which takes about 50 ms from rank to rank."""
    return torch.full((1 << 28,), value, dtype=torch.uint8)


def die_within(message: torch.Tensor) -> None:
    """Kills this process when a message begins to arrive, which changes its buffer of zeros.

    No fixed time would do.
    """

    def watch() -> None:
        first = memoryview(message.numpy())
        while not first[0]:
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
