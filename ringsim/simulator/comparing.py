"""Implements ``ringsim.compare_semantics``, which runs a program under several semantics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringsim.errors import RingError
from ringsim.simulator.api import simulate
from ringsim.traces.units import time_text

_FROM_LOOSE_TO_STRICT = (
    "buffered", "rendezvous", "paired(65536)", "grouped(65536)", "paired", "grouped",
)  # fmt: skip
_CARRIES_OVER = """
The program ends under rendezvous. Therefore it ends whatever the size of the buffers, provided that
no recv is from any source, and that nothing depends on whether an operation is done (is_completed).
This does not carry over to grouped and paired, where a send or recv may also wait for earlier ones.
"""


class SemanticsRow(NamedTuple):
    """A program under one semantics.

    Attributes:
        semantics: the semantics, as for ``ringsim.simulate``.
        makespan_s: the length of the run in seconds, or None if it did not end.
        error: the error that ended the run, with its trace and its diagnosis, or None.
    """

    semantics: str
    makespan_s: float | None
    error: RingError | None


@dataclass(frozen=True, repr=False)
class SemanticsTable:
    """A program under several semantics.

    Printing the table shows when the program ends under each, or the verdict if it does not.

    Attributes:
        rows: one row per semantics.

    Example:
        See ``compare_semantics``.
    """

    rows: tuple[SemanticsRow, ...]

    def __repr__(self) -> str:
        """Returns the table as text."""
        lines = [f"{'semantics':<16}ends after"]
        for name, makespan_s, error in self.rows:
            never = f"never: {error}".partition("\n")[0]
            lines.append(f"{name:<16}{never if error else time_text(1e9 * (makespan_s or 0.0))}")
        ended = any(row.semantics == "rendezvous" and row.error is None for row in self.rows)
        return "\n".join(lines) + _CARRIES_OVER.rstrip() * ended


def compare_semantics(
    worker: Callable[..., Any],
    *,
    world_size: int,
    semantics: Iterable[str] = _FROM_LOOSE_TO_STRICT,
    **settings: Any,
) -> SemanticsTable:
    """Simulates a program under several semantics, to find out where it would hang.

    Gloo, MPI and NCCL treat the same sends differently. A program without receives from any source,
    and without decisions that depend on whether an operation is done, is free of deadlock with
    buffers of any size if it is free of deadlock under "rendezvous". NCCL, however, carries out
    messages in order, so it can hang in spite of this.

    Args:
        worker: the function to run, as for ``ringsim.simulate``.
        world_size: the number of ranks.
        semantics: the names to compare, as for ``ringsim.simulate``.
        settings: the other arguments of ``ringsim.simulate``.

    Returns:
        The table.

    Raises:
        ArgumentError: an argument is invalid.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> import ringsim
        >>> def worker():
        ...     peer = 1 - dist.get_rank()
        ...     sending = dist.isend(torch.zeros(8), peer)
        ...     dist.recv(torch.zeros(8), peer)
        ...     sending.wait()
        >>> link = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=0.0)
        >>> table = compare_semantics(worker, world_size=2, link=link)
        >>> for row in table.rows:
        ...     print(row.semantics, row.makespan_s, type(row.error).__name__)
        buffered 1e-05 NoneType
        rendezvous 1e-05 NoneType
        paired(65536) 1e-05 NoneType
        grouped(65536) 1e-05 NoneType
        paired None Deadlock
        grouped None Deadlock

    Source:
        S. F. Siegel, G. S. Avrunin, Modeling wildcard-free MPI programs for verification, PPoPP
        2005.
    """
    rows = []
    for name in semantics:
        try:
            trace = simulate(worker, world_size=world_size, semantics=name, **settings)
            rows.append(SemanticsRow(name, trace.makespan_s, None))
        except RingError as error:
            if error.trace is None:
                raise
            rows.append(SemanticsRow(name, None, error))
    return SemanticsTable(tuple(rows))
