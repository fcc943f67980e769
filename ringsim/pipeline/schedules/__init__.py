"""The schedules of the papers, each made by one function; ``make_schedule`` finds them by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ringsim.errors import ScheduleError
from ringsim.pipeline.schedule import Schedule
from ringsim.pipeline.schedules.linear import gpipe, one_f_one_b

__all__ = ["gpipe", "make_schedule", "one_f_one_b"]

_ONE_STAGE_A_RANK: Final[dict[str, Callable[[int, int], Schedule]]] = {"gpipe": gpipe, "afab": gpipe, "1f1b": one_f_one_b}


def make_schedule(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """Makes a schedule by its name.

    Args:
        name: ``gpipe`` (or ``afab``), ``1f1b``.
        num_ranks: how many ranks.
        num_microbatches: how many microbatches.

    Returns:
        The schedule.

    Raises:
        ScheduleError: no schedule has that name.

    Example:
        >>> make_schedule("1f1b", num_ranks=2, num_microbatches=4).name
        '1f1b'
    """
    if name not in _ONE_STAGE_A_RANK:
        raise ScheduleError(f"a schedule must be one of {', '.join(_ONE_STAGE_A_RANK)}, got {name!r}. Take one of these names.")
    return _ONE_STAGE_A_RANK[name](num_ranks, num_microbatches)
