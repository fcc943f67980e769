"""Schedules as text, to read, to write by hand, and to exchange with torch.

As text, one line a rank::

    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1

As CSV, in the form of torch: one row a rank, one cell an action. An empty cell is a planned pause; a list without times needs none::

    0F0,0F1,,0B0,0B1
    ,1F0,1B0,1F1,1B1

Which rank has which stage, and how many microbatches there are, follows from the actions.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from typing import Final

from ringsim.errors import ScheduleError
from ringsim.pipeline.actions import Action, parse_action
from ringsim.pipeline.schedule import Schedule

__all__ = ["from_csv", "from_text", "to_csv", "to_text"]

_LINE: Final = re.compile(r"rank (\d{1,9}):(.*)", re.ASCII)
_SHARDING: Final = re.compile(r"\d{1,9}(UNSHARD|RESHARD|REDUCE_GRAD)", re.ASCII)
_OVERLAP: Final = re.compile(r"\((.*)\)OVERLAP_F_B", re.ASCII)


def to_text(schedule: Schedule) -> str:
    """Writes a schedule as text, one line a rank.

    Args:
        schedule: the schedule, lowered or not.

    Returns:
        The lines; ``from_text`` reads them.

    Example:
        >>> from ringsim.pipeline.schedules import one_f_one_b
        >>> print(to_text(one_f_one_b(2, 2)), end="")
        rank 0: 0F0 0F1 0B0 0B1
        rank 1: 1F0 1B0 1F1 1B1
    """
    return "".join(" ".join([f"rank {rank}:", *map(str, row)]) + "\n" for rank, row in enumerate(schedule.actions))


def from_text(text: str, *, name: str = "own") -> Schedule:
    """Reads a schedule from text.

    Args:
        text: one line a rank, in order, as ``to_text`` writes them; empty lines are passed over.
        name: what to call the schedule.

    Returns:
        The schedule. Whether it can work, ``validate`` says.

    Raises:
        ScheduleError: a line or an action is none, or a stage is on two ranks or missing; the message says in which row and column.

    Example:
        >>> from_text("rank 0: 0F0 0B0").actions
        ((Action(stage=0, kind='F', microbatch=0), Action(stage=0, kind='B', microbatch=0)),)
    """
    rows: list[list[str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None or int(found[1]) != len(rows):
            raise ScheduleError(
                f"a line must begin with 'rank {len(rows)}:', got {line.strip()[:40]!r} (line {number}). Write one line a rank."
            )
        rows.append(found[2].split())
    return _from_cells(rows, name)


def to_csv(schedule: Schedule) -> str:
    """Writes a schedule as CSV, in the form that ``torch.distributed.pipelining`` loads.

    Args:
        schedule: the schedule, lowered or not; torch reads one with sends and recvs as ``compute_comms``, else as ``compute_only``.

    Returns:
        One row a rank, one cell an action.

    Example:
        >>> from ringsim.pipeline.schedules import gpipe
        >>> to_csv(gpipe(2, 1)).split()
        ['0F0,0B0', '1F0,1B0']
    """
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([map(str, row) for row in schedule.actions])
    return buffer.getvalue()


def from_csv(text: str, *, name: str = "own") -> Schedule:
    r"""Reads a schedule from CSV, in the form that ``torch.distributed.pipelining`` dumps.

    Args:
        text: one row a rank, one cell an action. ``(0F7;7B3)OVERLAP_F_B`` is read as ``0F7`` and then ``7B3``; ``0UNSHARD``, ``0RESHARD``
            and ``0REDUCE_GRAD``, what torch does around a pipeline with sharded parameters, are passed over.
        name: what to call the schedule.

    Returns:
        The schedule. Whether it can work, ``validate`` says.

    Raises:
        ScheduleError: a cell is no action, or a stage is on two ranks or missing; the message says in which row and column.

    Example:
        >>> [" ".join(map(str, row)) for row in from_csv("0F0,,0B0\n,1F0,1B0").actions]
        ['0F0 0B0', '1F0 1B0']

    Source:
        ``torch/distributed/pipelining/schedules.py``, ``_dump_csv`` and ``_load_csv``: the form.
    """
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise ScheduleError(f"a schedule must be CSV, got text that is not ({error}). Write one row a rank, one cell an action.") from None
    return _from_cells(rows, name)


def _from_cells(rows: Iterable[list[str]], name: str) -> Schedule:
    actions: list[list[Action]] = []
    owners: dict[int, int] = {}  # the rank of each stage
    for rank, cells in enumerate(rows):
        actions.append([])
        for column, cell in enumerate(cells, start=1):
            where = f"row {rank + 1}, column {column}"
            for action in _read_cell(cell.strip(), where):
                if owners.setdefault(action.stage, rank) != rank:
                    raise ScheduleError(
                        f"a stage must be on one rank, got {action} on rank {rank} where stage {action.stage} is on rank "
                        f"{owners[action.stage]} ({where}). Move the action to that row."
                    )
                actions[rank].append(action)
    if not owners:
        raise ScheduleError("a schedule must have at least one action, got none. Write one row a rank, for example 0F0,0B0.")
    missing = next((stage for stage in range(len(owners)) if stage not in owners), None)
    if missing is not None:
        raise ScheduleError(f"stages must be numbered from 0 without gaps, got {max(owners)} and no stage {missing}. Number them again.")
    return Schedule(
        name=name,
        num_microbatches=1 + max(action.microbatch for row in actions for action in row),
        stage_ranks=tuple(owners[stage] for stage in range(len(owners))),
        actions=tuple(map(tuple, actions)),
    )


def _read_cell(cell: str, where: str) -> list[Action]:
    """Reads the actions of a cell: both of torch's overlapped pair, none of an empty cell or one that is about shards."""
    if not cell or _SHARDING.fullmatch(cell):
        return []
    pair = _OVERLAP.fullmatch(cell)
    try:
        return [parse_action(text.strip()) for text in (pair[1].split(";") if pair else [cell])]
    except ScheduleError as error:
        raise ScheduleError(f"{error} ({where})") from None
