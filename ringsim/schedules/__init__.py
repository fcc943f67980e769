"""Pipeline schedules as plain data.

One function creates each of the published schedules; ``make_schedule`` finds the function by name.

::

    name              function          stages per rank   purpose
    gpipe, afab       gpipe             1                 the simplest; memory grows with the
                                                          microbatches
    1f1b              one_f_one_b       1                 the same time, with memory that does not
                                                          grow
    interleaved_1f1b  interleaved_1f1b  num_chunks        a smaller bubble for more messages
    looped_bfs        looped_bfs        num_chunks        the same, breadth first
    zb_h1             zb_h1             1                 a smaller bubble by splitting the backward
    zb_h2             zb_h2             1                 no gaps on any rank, for twice the memory
    zb_v              zb_v              2, like a V       no gaps on any rank, for 1F1B's memory
    dualpipe_v        dualpipe_v        2, like a V       forwards together with backwards

You can also write your own schedule, as a ``Schedule`` of ``Action`` rows. ``from_text`` and
``from_csv`` read a schedule, ``validate`` checks it, ``lower`` and ``lower_in_step`` add the
messages, and ``evaluate`` times it.
"""

from __future__ import annotations

from collections.abc import Callable

from ringsim.errors import ScheduleError, is_integer, is_one_of, say
from ringsim.schedules.costs import Costs
from ringsim.schedules.engine import Evaluation, evaluate, validate
from ringsim.schedules.lowering import lower, lower_in_step
from ringsim.schedules.phases import (
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from ringsim.schedules.schedule import (
    Action,
    Schedule,
    check_size,
    from_csv,
    from_text,
    parse_action,
    to_csv,
    to_text,
)

__all__ = [
    "SCHEDULE_NAMES",
    "Action",
    "Costs",
    "Evaluation",
    "Schedule",
    "dualpipe_v",
    "evaluate",
    "find_num_chunks",
    "from_csv",
    "from_text",
    "gpipe",
    "interleaved_1f1b",
    "looped_bfs",
    "lower",
    "lower_in_step",
    "make_schedule",
    "one_f_one_b",
    "parse_action",
    "to_csv",
    "to_text",
    "validate",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

# the function and the number of stages per rank; None if the caller chooses the number
_MAKERS: dict[str, tuple[Callable[..., Schedule], int | None]] = {
    "gpipe": (gpipe, 1),
    "afab": (gpipe, 1),
    "1f1b": (one_f_one_b, 1),
    "zb_h1": (zb_h1, 1),
    "zb_h2": (zb_h2, 1),
    "zb_v": (zb_v, 2),
    "dualpipe_v": (dualpipe_v, 2),
    "interleaved_1f1b": (interleaved_1f1b, None),
    "looped_bfs": (looped_bfs, None),
}
SCHEDULE_NAMES = tuple(_MAKERS)


def make_schedule(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None
) -> Schedule:
    """Creates a schedule from its name.

    Args:
        name: one of ``SCHEDULE_NAMES``: ``gpipe`` (or ``afab``), ``1f1b``, ``interleaved_1f1b``,
            ``looped_bfs``, ``zb_h1``, ``zb_h2``, ``zb_v``, ``dualpipe_v``.
        num_ranks: the number of ranks.
        num_microbatches: the number of microbatches.
        num_chunks: the number of stages per rank, for the two schedules that allow any number; None
            means 2 for these schedules.

    Returns:
        The schedule, without sends and recvs, which ``lower`` adds.

    Raises:
        ArgumentError: a count is less than 1, or the step would have more than 100 million forward
            passes.
        ScheduleError: no schedule has that name, or the schedule requires a different number of
            chunks.

    Example:
        >>> make_schedule("1f1b", num_ranks=2, num_microbatches=4).stage_ranks
        (0, 1)
        >>> make_schedule(
        ...     "interleaved_1f1b", num_ranks=2, num_microbatches=4, num_chunks=3
        ... ).stage_ranks
        (0, 1, 0, 1, 0, 1)
    """
    chunks = find_num_chunks(name, num_chunks)
    check_size(num_ranks, num_microbatches, chunks)
    make, fixed = _MAKERS[name]
    return make(num_ranks, num_microbatches, *([chunks] if fixed is None else []))


def find_num_chunks(name: str, num_chunks: int | None = None) -> int:
    """Returns a schedule's number of stages per rank.

    Args:
        name: one of ``SCHEDULE_NAMES``.
        num_chunks: the number that the user chose, or None.

    Returns:
        The number of stages per rank. If the schedule allows any number, this is the user's number,
        or 2.

    Raises:
        ScheduleError: no schedule has that name, or the schedule requires a different number of
            chunks.

    Example:
        >>> find_num_chunks("1f1b"), find_num_chunks("zb_v"), find_num_chunks("looped_bfs", 3)
        (1, 2, 3)
    """
    if not is_one_of(name, SCHEDULE_NAMES):
        raise ScheduleError(
            f"a schedule must be one of {', '.join(SCHEDULE_NAMES)}, got {say(name)}."
        )
    chunks = _MAKERS[name][1]
    if chunks is None:
        return 2 if num_chunks is None else num_chunks
    if num_chunks is not None and not (is_integer(num_chunks) and num_chunks == chunks):
        raise ScheduleError(
            f"num_chunks must be {chunks} for {name}, got {say(num_chunks)}. Omit it, or use "
            "interleaved_1f1b or looped_bfs."
        )
    return chunks
