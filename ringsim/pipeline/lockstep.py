"""Where the sends and receives go on transports that do what two ranks post to each other one after the other, as NCCL does.

There a message waits for all that its rank has posted before to or from the same peer. 1F1B as ``lower`` writes it would stand still::

    rank 0   0SEND_F0 0RECV_B0 0SEND_F1      after 0SEND_F0, rank 0 is to receive and rank 1 is to receive:
    rank 1   1RECV_F0 1RECV_F1 1SEND_B0      nobody sends

So both ranks must post their messages in one order. There is one if all ranks work in step: in each step, every rank does its next
computation if it has what that needs; then the messages of the step are posted, on both sides, in the order of the ranks that send. What a
message waits for was posted in an earlier step, or earlier in the same one, so the first message that has not arrived can always go on.

A receive is posted no earlier than its send, so it hides less of a message's way than one that is posted ahead.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from ringsim.errors import ScheduleError
from ringsim.pipeline.actions import Action
from ringsim.pipeline.dataflow import get_needs, get_send
from ringsim.pipeline.schedule import Schedule

__all__ = ["lower_in_step"]


def lower_in_step(schedule: Schedule) -> Schedule:
    """Inserts the sends and receives so that any two ranks post their messages to each other in one order.

    Args:
        schedule: computations only; a lowered schedule is returned as it is.

    Returns:
        The schedule with ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B`` between stages of different ranks, and none within a rank.

    Raises:
        ScheduleError: the computations wait for each other, or for something that nobody makes.

    Example:
        >>> from ringsim.pipeline.schedules import one_f_one_b
        >>> for row in lower_in_step(one_f_one_b(num_ranks=2, num_microbatches=2)).actions:
        ...     print(*row)
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

    Source:
        ``torch/distributed/pipelining/schedules.py``, ``_add_send_recv``: the receive is put in where the send is, while all rows are gone
        through together.
    """
    if schedule.lowered:
        return schedule
    waiting = [deque(row) for row in schedule.actions]
    lowered: list[list[Action]] = [[] for _ in waiting]
    done: set[Action] = set()
    while any(waiting):
        step = [(rank, row.popleft()) for rank, row in enumerate(waiting) if row and _can_start(row[0], schedule, done)]
        if not step:
            stuck = ", ".join(f"{row[0]} on rank {rank}" for rank, row in enumerate(waiting) if row)
            raise ScheduleError(f"a schedule must let every rank go on, got none that can: {stuck}. Ask validate why.")
        for rank, action in step:
            lowered[rank].append(action)
            done.add(action)
        for rank, action in step:
            send = get_send(action, schedule.stage_ranks)
            if send is not None:
                recv = send.other_side
                lowered[rank].append(send)
                lowered[schedule.stage_ranks[recv.stage]].append(recv)
                done.add(recv)
    return replace(schedule, actions=tuple(map(tuple, lowered)))


def _can_start(action: Action, schedule: Schedule, done: set[Action]) -> bool:
    """Whether everything that a computation needs was done in an earlier step."""
    return all(not done.isdisjoint(need) for need in get_needs(action, schedule.stage_ranks))
