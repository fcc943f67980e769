"""From what a rank computes to what it does: where the sends and the receives go.

1F1B over two ranks, before and after; a send stands after what makes its payload, a receive one computation before the one that needs it,
so that the message travels while the rank computes::

    rank 0   0F0 0F1 0B0 0B1         0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1
    rank 1   1F0 1B0 1F1 1B1         1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

Both are *posts*: neither blocks. A computation waits for its receive, and the end of the step waits for the sends.

Why this cannot deadlock where a send ends only when it is received (a rendezvous): nobody waits for a send before the end, so a rank stands
still only for a message that is not sent yet, and its sender stands still only for a message of a computation that comes before it. That
chain has an end, unless the computations themselves wait for each other in a circle, which ``validate`` finds.

Two messages of one channel (from one rank to another) are received in the order in which they are sent: transports without tags match by
order. Where a rank needs them the other way round, it posts the earlier one earlier: in a V, activations and gradients share a channel.
"""

from __future__ import annotations

from dataclasses import replace

from ringsim.errors import ScheduleError, check_integer
from ringsim.pipeline.actions import Action
from ringsim.pipeline.dataflow import get_recv, get_send
from ringsim.pipeline.schedule import Schedule

__all__ = ["check_ahead", "lower"]


def lower(schedule: Schedule, *, ahead: int = 1) -> Schedule:
    """Inserts the sends and receives into a schedule of computations.

    Args:
        schedule: computations only; a lowered schedule is returned as it is.
        ahead: how many computations before its use a receive is posted, 0 or more. 0 is a receive that blocks: the message starts to travel
            when the rank has nothing else to do.

    Returns:
        The schedule with ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B`` between stages of different ranks, and none within a rank.

    Raises:
        ArgumentError: ``ahead`` is no whole number, or negative.
        ScheduleError: something is sent that nobody needs, or needed that nobody sends, or twice.

    Example:
        >>> from ringsim.pipeline.schedules import one_f_one_b
        >>> for row in lower(one_f_one_b(num_ranks=2, num_microbatches=2), ahead=0).actions:
        ...     print(*row)
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
    """
    check_ahead(ahead)
    if schedule.lowered:
        return schedule
    receives = _receives_by_rank(schedule)
    rows = (_lower_row(row, schedule.stage_ranks, receives[rank], ahead) for rank, row in enumerate(schedule.actions))
    return replace(schedule, actions=tuple(map(tuple, rows)))


def check_ahead(ahead: int) -> None:
    """Raises ArgumentError for a receive that would be posted after its use."""
    check_integer("ahead", ahead, 0, "Say how many computations before its use a receive is posted.")


def _lower_row(row: tuple[Action, ...], stage_ranks: tuple[int, ...], receives: list[tuple[int, Action]], ahead: int) -> list[Action]:
    """Writes one rank's row; ``receives`` says before which computation each one is needed, the first needed first."""
    lowered: list[Action] = []
    waiting = list(reversed(receives))
    for position, action in enumerate(row):
        while waiting and waiting[-1][0] - ahead <= position:
            lowered.append(waiting.pop()[1])
        lowered.append(action)
        send = get_send(action, stage_ranks)
        if send is not None:
            lowered.append(send)
    return lowered


def _receives_by_rank(schedule: Schedule) -> list[list[tuple[int, Action]]]:
    """Lists each rank's receives in the order to post them, with the position of the computation before which each must stand."""
    needed = _find_receives(schedule)
    receives: list[list[tuple[int, Action]]] = [[] for _ in schedule.actions]
    for (_, rank), channel in _find_channels(schedule, needed).items():
        position = len(schedule.actions[rank])
        in_order = []
        for recv in reversed(channel):  # before what needs it, and before what needs a later one of the same channel
            position = min(position, needed[recv][1])
            in_order.append((position, recv))
        receives[rank] += reversed(in_order)
    for of_rank in receives:
        of_rank.sort(key=lambda item: item[0])  # a stable sort: each channel keeps its order
    return receives


def _find_receives(schedule: Schedule) -> dict[Action, tuple[int, int]]:
    """Maps each receive to the (rank, position) of the computation that needs it."""
    needed: dict[Action, tuple[int, int]] = {}
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            recv = get_recv(action, schedule.stage_ranks)
            if recv is None:
                continue
            if recv in needed:
                raise ScheduleError(f"{recv} must happen once, got it again for {action} (rank {rank}). Take the second one out.")
            needed[recv] = (rank, position)
    return needed


def _find_channels(schedule: Schedule, needed: dict[Action, tuple[int, int]]) -> dict[tuple[int, int], list[Action]]:
    """Maps each channel, (from rank, to rank), to the receives that its sends meet, in the order of the sends."""
    channels: dict[tuple[int, int], list[Action]] = {}
    unsent = dict(needed)
    for rank, row in enumerate(schedule.actions):
        for action in row:
            send = get_send(action, schedule.stage_ranks)
            if send is None:
                continue
            recv = send.other_side
            if unsent.pop(recv, None) is None:
                why = "happen once, got it again" if recv in needed else f"be for a computation of stage {recv.stage}, got none"
                raise ScheduleError(f"{send} must {why} (rank {rank}, after {action}). Take {action} out, or add what needs it.")
            channels.setdefault((rank, schedule.stage_ranks[recv.stage]), []).append(recv)
    for recv, (rank, position) in unsent.items():
        action = schedule.actions[rank][position]
        raise ScheduleError(f"{action} must have a {recv.other_side} to wait for, got none (rank {rank}). Add what makes it.")
    return channels
