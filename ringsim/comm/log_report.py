"""What the log says: of all ranks as a table, and of this rank in a word."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, Literal, overload

import numpy as np

from ringsim.comm.log import pause_log
from ringsim.comm.log_gather import gather, gather_by_objects, make_own_table
from ringsim.comm.log_records import Segment, join_segments, read_segment
from ringsim.comm.torch_backend import TORCH
from ringsim.state import get_state
from ringsim.traces.log_rows import make_rows
from ringsim.traces.log_table import LogTable

__all__ = ["get_comm_operation_count", "get_logged_comm_ops", "has_comm_data", "log_summary"]


@overload
def log_summary(show_straggler: bool = False, return_dict: Literal[False] = False) -> LogTable: ...


@overload
def log_summary(show_straggler: bool = False, *, return_dict: Literal[True]) -> dict[str, Any]: ...


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> LogTable | dict[str, Any]:
    """Brings the logs of all ranks together; rank 0 prints them as a table.

    All ranks call it, with the log on or stopped; it blocks until all have. With torch as the backend it goes over the store of the default
    group, not over the groups whose operations are logged, and a rank that does not come within half a minute is left out, which the table
    says. Before there is a process group, it is this rank's own log.

    Args:
        show_straggler: whether the printed table has the column of straggler time; the data have it always.
        return_dict: whether to return a dictionary, of the form of ``LogTable.to_dict``.

    Returns:
        The table, the same on every rank: ``str`` of it is the text, ``to_pandas()`` gives a DataFrame.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from ringsim.comm.log import configure, reset_log
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> configure(enabled=True)
        >>> dist.all_reduce(torch.zeros(4))
        >>> configure(enabled=False)
        >>> summary = log_summary(return_dict=True)  # doctest: +ELLIPSIS
        Communication of 1 rank
        operation       size     n   count ...
        all_reduce      16 B     1       1 ...
        >>> summary["summary"]["all_reduce"][16][0]["count"]
        1
        >>> reset_log(); dist.destroy_process_group()

    Source:
        DeepSpeed, ``deepspeed.comm.log_summary``: name and arguments.
    """
    state = get_state()
    backend = state.backend or TORCH
    joined = backend.is_initialized()
    rank, world_size = (backend.get_rank(), backend.get_world_size()) if joined else (0, 1)
    segment = _read_own()
    if world_size == 1:
        table = make_own_table(segment, rank, world_size)
    elif state.backend is None:
        table = gather(segment, rank, world_size)
    else:
        with pause_log():
            table = gather_by_objects(backend, segment, rank, world_size)
    table = replace(table, show_straggler=show_straggler)
    if rank == 0:
        sys.stdout.write(f"{table}\n")
        sys.stdout.flush()
    return table.to_dict() if return_dict else table


def _read_own() -> Segment:
    """Returns what this rank has logged until now."""
    state = get_state()
    log = state.log or state.stopped_log
    if log is None:
        return join_segments([])
    now = [] if log.records is None else [read_segment(log.records, log.periods, log.met)]
    return join_segments([*log.kept, *now])


def has_comm_data() -> bool:
    """Returns whether this rank has logged anything. Any rank calls it at any time; it does not block.

    Example:
        >>> has_comm_data()
        False
    """
    return len(_read_own().events) > 0


def get_comm_operation_count() -> int:
    """Returns how many operations this rank has logged. Any rank calls it at any time; it does not block.

    Example:
        >>> get_comm_operation_count()
        0
    """
    return len(_read_own().events)


def get_logged_comm_ops() -> list[str]:
    """Returns the names under which this rank has logged operations, sorted. Any rank calls it at any time; it does not block.

    Example:
        >>> get_logged_comm_ops()
        []
    """
    segment = _read_own()
    rows = make_rows(segment.events, np.zeros(len(segment.events), dtype=bool), one_clock=False)
    return sorted({row.name for row in rows})
