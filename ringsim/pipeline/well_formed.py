"""What can be said of a schedule by reading it, without a clock: each rank's actions are its own, each once, each after what it needs."""

from __future__ import annotations

from itertools import zip_longest

from ringsim.errors import ScheduleError
from ringsim.pipeline.actions import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Action
from ringsim.pipeline.dataflow import get_needs, get_send
from ringsim.pipeline.schedule import Schedule

__all__ = ["check_messages", "check_order", "check_places"]


def check_places(schedule: Schedule) -> None:
    """Refuses actions that their rank cannot do: unknown ones, those of another rank's stages, and second ones.

    Args:
        schedule: any schedule.

    Raises:
        ScheduleError: with the first such action, its rank and position.

    Example:
        >>> check_places(Schedule("mine", 1, (0,), ((Action(0, "F", 0), Action(0, "F", 0)),)))
        Traceback (most recent call last):
        ringsim.errors.ScheduleError: 0F0 must be done once, got a second one (rank 0, position 1). Take one out.
    """
    if schedule.num_microbatches < 1:
        raise ScheduleError(f"num_microbatches must be 1 or more, got {schedule.num_microbatches}. Cut the step into 1 or more.")
    for stage, owner in enumerate(schedule.stage_ranks):
        if not 0 <= owner < schedule.num_ranks:
            raise ScheduleError(f"stage {stage} must be on a rank below {schedule.num_ranks}, got {owner}. Give it to one that has a row.")
    for rank, row in enumerate(schedule.actions):
        done: set[Action] = set()
        for position, action in enumerate(row):
            where = f"(rank {rank}, position {position})"
            _check_place(action, rank, schedule, where)
            if action in done:
                raise ScheduleError(f"{action} must be done once, got a second one {where}. Take one out.")
            other = {"B": "I", "I": "B"}.get(action.kind)
            if other is not None and action._replace(kind=other) in done:
                raise ScheduleError(f"{action} must be the only gradient of its input, got {other} before it {where}. B is I and W in one.")
            done.add(action)


def _check_place(action: Action, rank: int, schedule: Schedule, where: str) -> None:
    """Refuses an action that does not belong into this row."""
    kinds = (*COMPUTE_KINDS, *SEND_KINDS, *RECV_KINDS)
    if action.kind not in kinds:
        raise ScheduleError(f"an action must be one of {', '.join(kinds)}, got {action} {where}. Write for example 2F0.")
    if not 0 <= action.stage < schedule.num_stages:
        raise ScheduleError(
            f"{action} must be of a stage below {schedule.num_stages}, got {action.stage} {where}. Take it out, or add the stage."
        )
    if schedule.stage_ranks[action.stage] != rank:
        owner = schedule.stage_ranks[action.stage]
        raise ScheduleError(
            f"{action} must be done by rank {owner}, which has stage {action.stage}, got rank {rank} {where}. Move it there."
        )
    if not 0 <= action.microbatch < schedule.num_microbatches:
        limit = f"must be of a microbatch below {schedule.num_microbatches}, got {action.microbatch}"
        raise ScheduleError(f"{action} {limit} {where}. Take it out, or raise num_microbatches.")
    if not action.is_compute:
        other = action.other_side.stage
        if not 0 <= other < schedule.num_stages or schedule.stage_ranks[other] == rank:
            there = f"on rank {rank} too" if 0 <= other < schedule.num_stages else "that does not exist"
            raise ScheduleError(f"{action} must go between two ranks, got stage {other} {there} on the other side {where}. Take it out.")


def check_order(schedule: Schedule) -> None:
    """Refuses actions that come before what they need from their own rank.

    A backward pass needs its forward pass, ``W`` needs its ``I``, a stage needs the one before it where both are on one rank; in a lowered
    schedule a computation needs its receive too, and a send the computation of what it sends.

    Args:
        schedule: one that ``check_places`` passed.

    Raises:
        ScheduleError: with the first such action, its rank and position.

    Example:
        >>> check_order(Schedule("mine", 1, (0,), ((Action(0, "B", 0), Action(0, "F", 0)),)))
        Traceback (most recent call last):
        ringsim.errors.ScheduleError: 0B0 must come after 0F0, got it before or without (rank 0, position 0). Put 0F0 earlier.
    """
    lowered = schedule.lowered
    for rank, row in enumerate(schedule.actions):
        done: set[Action] = set()
        for position, action in enumerate(row):
            for need in _get_needs(action, schedule.stage_ranks, with_recvs=lowered):
                if done.isdisjoint(need):
                    names = " or ".join(map(str, need))
                    where = f"(rank {rank}, position {position})"
                    raise ScheduleError(f"{action} must come after {names}, got it before or without {where}. Put {names} earlier.")
            done.add(action)


def _get_needs(action: Action, stage_ranks: tuple[int, ...], *, with_recvs: bool) -> list[tuple[Action, ...]]:
    """What an action needs from its own rank; a computation's receive only where receives are written down."""
    if action.is_compute:
        return [need for need in get_needs(action, stage_ranks) if with_recvs or need[0].is_compute]
    if action.kind in RECV_KINDS:
        return []
    makers = (action._replace(kind=kind) for kind in ("F", "B", "I"))
    return [tuple(maker for maker in makers if get_send(maker, stage_ranks) == action)]


def check_messages(schedule: Schedule) -> None:
    """Refuses sends and receives that do not meet: between two ranks, the k-th send must be received by the k-th receive.

    Args:
        schedule: a lowered one that ``check_places`` passed.

    Raises:
        ScheduleError: with the first action that does not meet its other side, its rank and position.

    Example:
        >>> rows = ((Action(0, "F", 0), Action(0, "SEND_F", 0)), ())
        >>> check_messages(Schedule("mine", 1, (0, 1), rows))
        Traceback (most recent call last):
        ringsim.errors.ScheduleError: 0SEND_F0 must meet 1RECV_F0, got nothing (rank 0, position 1, to rank 1). Write both in one order.
    """
    sends: dict[tuple[int, int], list[tuple[Action, int]]] = {}
    receives: dict[tuple[int, int], list[tuple[Action, int]]] = {}
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            if action.is_compute:
                continue
            peer = schedule.stage_ranks[action.other_side.stage]
            if action.kind in SEND_KINDS:
                sends.setdefault((rank, peer), []).append((action, position))
            else:
                receives.setdefault((peer, rank), []).append((action, position))
    for source, rank in sorted({*sends, *receives}):
        for sent, received in zip_longest(sends.get((source, rank), []), receives.get((source, rank), [])):
            if sent is None:
                raise ScheduleError(_describe(received[0], None, f"(rank {rank}, position {received[1]}, from rank {source})"))
            if received is None or sent[0].other_side != received[0]:
                got = None if received is None else received[0]
                raise ScheduleError(_describe(sent[0], got, f"(rank {source}, position {sent[1]}, to rank {rank})"))


def _describe(action: Action, got: Action | None, where: str) -> str:
    """Says of a message what it should have met."""
    return f"{action} must meet {action.other_side}, got {'nothing' if got is None else got} {where}. Write both in one order."
