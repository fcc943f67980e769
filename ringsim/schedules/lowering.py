"""Adds sends and receives to the computations of a schedule.

Activations go up the stages, and gradients come back down. For one microbatch over three stages::

    0F -----> 1F -----> 2F
     |         |         |  down a column: backward needs the stage's own forward
     v         v         v
    0B <----- 1B <----- 2B  B may be I, followed by W at any later time: only I has a stage that
                            waits for it

If an arrow connects two stages on the same rank, there is no message.

``lower`` puts a send directly after the computation of its payload. It puts a receive one
computation before the computation that needs it, so that the message travels while the rank
computes. This is 1F1B over two ranks, before and after::

    rank 0   0F0 0F1 0B0 0B1         0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1
    rank 1   1F0 1B0 1F1 1B1         1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

Sends and receives are *posts*, which do not block. A computation waits for its receive, and the end
of the step waits for the sends.

With ``overlap=True``, two computations that overlap count as one: their receives are posted before
both, and their sends after both, as in torch. Otherwise, they run one after the other.

A lowered schedule cannot deadlock even if a send ends only when it is received (a rendezvous). No
rank waits for a send before the end of the step, so a rank can only be stopped by a message that
has not been sent. Its sender, in turn, can only be stopped by a message for an earlier computation.
This chain ends, unless the computations themselves wait for each other in a cycle, which
``validate`` detects.

The messages of a channel (from one rank to a second rank) are received in the order in which they
are sent, because transports without tags match by order. If a rank needs two messages in the
opposite order, it posts the first receive earlier. This happens in a V, where activations and
gradients share a channel.

``lower_in_step`` is for transports such as NCCL, which process the messages between two ranks one
after another, in the order in which they are posted. On such a transport, 1F1B would deadlock in
the form that ``lower`` writes::

    rank 0   0SEND_F0 0RECV_B0 0SEND_F1      after 0SEND_F0, rank 0 waits to receive and rank 1
                                             waits to receive:
    rank 1   1RECV_F0 1RECV_F1 1SEND_B0      no rank sends

So both ranks must post their messages in the same order. Such an order exists if all ranks work in
step. In each step, every rank does its next computation if the computation's needs are met. Then
both sides post the messages of the step, in the order of the sending ranks. Everything that a
message waits for was posted before the message, so the first message that has not arrived can
always proceed.

The price is that a receive is posted no earlier than its send, so less of a message's travel time
is hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from ringsim.errors import ScheduleError, check_integer
from ringsim.schedules.schedule import (
    COMPUTE_KINDS,
    RECV_KINDS,
    SEND_KINDS,
    Action,
    Schedule,
    join_pairs,
)

_BACKWARD = ("B", "I")  # both compute the gradient that the previous stage waits for


def get_send(action: Action, stage_ranks: Sequence[int]) -> Action | None:
    """Returns the send that follows a computation, or None if there is none.

    There is none if no stage waits for the result, or if only a stage on the same rank does.

    Example:
        >>> [str(get_send(Action(1, kind, 0), stage_ranks=(0, 1, 2))) for kind in "FBIW"]
        ['1SEND_F0', '1SEND_B0', '1SEND_B0', 'None']
        >>> print(get_send(Action(0, "F", 0), stage_ranks=(0, 0)))
        None
    """
    return _message(action, stage_ranks, "SEND")


def get_recv(action: Action, stage_ranks: Sequence[int]) -> Action | None:
    """Returns the recv that a computation waits for, or None if there is none.

    There is none if neither the input nor the gradient comes from a different rank.

    Example:
        >>> [str(get_recv(Action(1, kind, 0), stage_ranks=(0, 1, 2))) for kind in "FBIW"]
        ['1RECV_F0', '1RECV_B0', '1RECV_B0', 'None']
    """
    return _message(action, stage_ranks, "RECV")


def _message(action: Action, stage_ranks: Sequence[int], prefix: str) -> Action | None:
    """Returns an action's message to or from a different rank, or None."""
    stage, kind, microbatch = action
    if kind not in "FBI":
        return None
    message = Action(stage, f"{prefix}_{'F' if kind == 'F' else 'B'}", microbatch)
    other = message.other_side.stage
    if not 0 <= other < len(stage_ranks) or stage_ranks[other] == stage_ranks[stage]:
        return None
    return message


def get_needs(action: Action, stage_ranks: Sequence[int]) -> list[tuple[Action, ...]]:
    """Returns an action's needs: the actions that must precede it on the same rank.

    A computation needs its data, and a send needs the computation of its payload. Each need is a
    tuple of actions, any of which meets the need, because a gradient comes from ``B`` or from
    ``I``.

    Example:
        >>> get_needs(
        ...     Action(0, "B", 0), stage_ranks=(0, 0)
        ... )  # both stages on this rank: the gradient comes from stage 1
        [(Action(stage=0, kind='F', microbatch=0),), (Action(stage=1, kind='B', microbatch=0), Action(stage=1, kind='I', microbatch=0))]
        >>> get_needs(Action(1, "F", 0), stage_ranks=(0, 1))
        [(Action(stage=1, kind='RECV_F', microbatch=0),)]
    """  # noqa: E501
    stage, kind, microbatch = action
    if kind == "W":
        return [(Action(stage, "I", microbatch),)]
    if kind in RECV_KINDS:
        return []
    makers = ("F",) if kind in ("F", "SEND_F") else _BACKWARD
    if kind in SEND_KINDS:
        return [tuple(Action(stage, each, microbatch) for each in makers)]
    needs: list[tuple[Action, ...]] = []
    if kind in _BACKWARD:
        needs.append((Action(stage, "F", microbatch),))
    source = stage - 1 if kind == "F" else stage + 1
    recv = get_recv(action, stage_ranks)
    if recv is not None:
        needs.append((recv,))
    elif 0 <= source < len(stage_ranks):
        needs.append(tuple(Action(source, each, microbatch) for each in makers))
    return needs


def _check_places(schedule: Schedule) -> None:
    """Raises an error for actions that their rank cannot perform.

    These are unknown actions, actions on a different rank's stages, and duplicates.
    """
    if schedule.num_microbatches < 1:
        raise ScheduleError(
            f"num_microbatches must be at least 1, got {schedule.num_microbatches}. Split the "
            "batch into microbatches."
        )
    for stage, owner in enumerate(schedule.stage_ranks):
        if not 0 <= owner < schedule.num_ranks:
            raise ScheduleError(
                f"the rank of stage {stage} must be non-negative and below {schedule.num_ranks}, "
                f"got {owner}. Assign the stage to a rank that has a row of actions."
            )
    for rank, row in enumerate(schedule.actions):
        done: set[Action] = set()
        for position, action in enumerate(row):
            where = f"(rank {rank}, position {position})"
            _check_place(action, rank, schedule, where)
            if action in done:
                raise ScheduleError(
                    f"the schedule lists {action} twice {where}. Remove one of the two."
                )
            if action.overlaps and not any(one.is_compute for one in row[position + 1 :][:1]):
                raise ScheduleError(
                    f"{action} overlaps with the next action, which must be a computation {where}. "
                    "Move sends and receives before or after the pair."
                )
            other = {"B": "I", "I": "B"}.get(action.kind)
            if other is not None and action._replace(kind=other) in done:
                raise ScheduleError(
                    f"the schedule lists {action} after {action._replace(kind=other)}, but B "
                    f"already contains I and W {where}. Use either B, or I and W."
                )
            done.add(action)


def _check_place(action: Action, rank: int, schedule: Schedule, where: str) -> None:
    """Raises an error for an action that does not belong in this row."""
    kinds = (*COMPUTE_KINDS, *SEND_KINDS, *RECV_KINDS)
    if action.kind not in kinds:
        raise ScheduleError(
            f"an action's kind must be one of {', '.join(kinds)}, got {action} {where}. "
            "Write, for example, 2F0."
        )
    if not 0 <= action.stage < schedule.num_stages:
        raise ScheduleError(
            f"the stage of {action} must be non-negative and below {schedule.num_stages}, got "
            f"{action.stage} {where}. Remove the action, or add the stage."
        )
    if schedule.stage_ranks[action.stage] != rank:
        owner = schedule.stage_ranks[action.stage]
        raise ScheduleError(
            f"{action} is on rank {rank}, but stage {action.stage} is on rank {owner} {where}. "
            f"Move the action to rank {owner}."
        )
    if not 0 <= action.microbatch < schedule.num_microbatches:
        raise ScheduleError(
            f"the microbatch of {action} must be non-negative and below "
            f"{schedule.num_microbatches}, got {action.microbatch} {where}. Remove the action, or "
            "raise num_microbatches."
        )
    if not action.is_compute:
        other = action.other_side.stage
        if not 0 <= other < schedule.num_stages or schedule.stage_ranks[other] == rank:
            there = (
                f"which is also on rank {rank}"
                if 0 <= other < schedule.num_stages
                else "which does not exist"
            )
            raise ScheduleError(
                f"the other side of {action} would be stage {other}, {there} {where}. Remove "
                f"{action}."
            )


def _check_order(schedule: Schedule) -> None:
    """Raises an error for an action that precedes an action it needs on the same rank.

    A backward pass needs its forward pass, ``W`` needs its ``I``, and a stage needs the previous
    stage if both are on the same rank. In a lowered schedule, a computation also needs its receive,
    and a send needs the computation of its payload. Computations that overlap cannot need each
    other.
    """
    lowered = schedule.lowered
    for rank, row in enumerate(schedule.actions):
        done: set[Action] = set()
        for position, action in enumerate(row):
            for need in get_needs(action, schedule.stage_ranks):
                if done.isdisjoint(need) and (lowered or need[0].is_compute):
                    names = " or ".join(map(str, need))
                    where = f"(rank {rank}, position {position})"
                    raise ScheduleError(
                        f"{action} needs {names}, which comes later or is missing {where}. "
                        f"Put {names} before {action}."
                    )
            if not action.overlaps:  # both of two that overlap are done after the second
                done.update(row[max(position - 1, 0) : position + 1])


def _check_messages(schedule: Schedule) -> None:
    """Raises an error for sends and receives that do not match.

    Between two ranks, the k-th receive must receive the k-th send.
    """
    posts: dict[tuple[int, int], tuple[list[Any], list[Any]]] = {}
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            if not action.is_compute:
                peer = schedule.stage_ranks[action.other_side.stage]
                is_recv = action.kind in RECV_KINDS
                channel = (peer, rank) if is_recv else (rank, peer)
                posts.setdefault(channel, ([], []))[is_recv].append((action, position))
    for (source, rank), both in sorted(posts.items()):
        for (sent, left), (received, place) in zip_longest(*both, fillvalue=(None, -1)):
            if sent is None:
                where = f"rank {rank}, position {place}, from rank {source}"
            elif sent.other_side != received:
                where = f"rank {source}, position {left}, to rank {rank}"
            else:
                continue
            post: Any = sent or received
            raise ScheduleError(
                f"{post} needs {post.other_side} on the other side, but meets "
                f"{(sent and received) or 'nothing'} ({where}). Write sends and receives in the "
                "same order."
            )


def _check_complete(schedule: Schedule) -> None:
    """Raises an error if a stage skips a pass of a microbatch."""
    for stage, rank in enumerate(schedule.stage_ranks):
        done = set(schedule.actions[rank])
        for microbatch in range(schedule.num_microbatches):
            forward, backward, gradient, weights = (
                Action(stage, kind, microbatch) for kind in "FBIW"
            )
            where = f"microbatch {microbatch} (rank {rank})"
            if forward not in done:
                raise ScheduleError(
                    f"stage {stage} has no forward pass for {where}. Add {forward}."
                )
            if backward not in done and gradient not in done:
                raise ScheduleError(
                    f"stage {stage} has no backward pass for {where}. Add {backward}, or "
                    f"{gradient} and {weights}."
                )
            if gradient in done and weights not in done:
                raise ScheduleError(
                    f"stage {stage} does not compute its weights' gradients for {where}. Add "
                    f"{weights} after {gradient}."
                )


def lower(schedule: Schedule, *, ahead: int = 1, overlap: bool = False) -> Schedule:
    """Inserts sends and receives into a schedule of computations.

    Args:
        schedule: a schedule of computations; a lowered schedule is returned unchanged.
        ahead: the number of computations between the post of a receive and its use, at least 0.
            With 0, a receive blocks: the message starts to travel when the rank has nothing else to
            do.
        overlap: whether two actions in ``OVERLAP_F_B`` remain a pair.

    Returns:
        The schedule with ``SEND_F``, ``RECV_F``, ``SEND_B`` and ``RECV_B`` between stages on
        different ranks. Stages on the same rank need no messages.

    Raises:
        ArgumentError: ``ahead`` is not an integer, or is negative.
        ScheduleError: a message is sent but not needed, needed but not sent, or occurs twice.

    Example:
        >>> from ringsim.schedules import one_f_one_b
        >>> for row in lower(one_f_one_b(num_ranks=2, num_microbatches=2), ahead=0).actions:
        ...     print(*row)
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
    """
    check_ahead(ahead)
    if schedule.lowered:
        return schedule
    schedule = schedule if overlap else _take_apart(schedule)
    rows = []
    for row, receives in zip(schedule.actions, _list_receives(schedule), strict=True):
        lowered: list[Action] = []
        position = 0
        for item in join_pairs(row):
            position += len(item)
            while receives and receives[-1][0] - ahead < position:
                lowered.append(receives.pop()[1])
            lowered += item
            lowered += filter(None, [get_send(action, schedule.stage_ranks) for action in item])
        rows.append(tuple(lowered))
    return replace(schedule, actions=tuple(rows))


def _take_apart(schedule: Schedule) -> Schedule:
    """Returns a schedule in which no actions overlap."""
    rows = (tuple(map(Action._make, row)) for row in schedule.actions)
    return replace(schedule, actions=tuple(rows))


def lower_checked(schedule: Schedule, *, whole: bool = False, overlap: bool = False) -> Schedule:
    """Checks a schedule from any source, and inserts sends and receives.

    Args:
        schedule: any schedule; if it is already lowered, its own sends and receives are checked.
        whole: whether every stage must do the forward and backward of every microbatch.
        overlap: whether two actions in ``OVERLAP_F_B`` remain a pair.

    Returns:
        The schedule in the form that `lower` writes.

    Raises:
        ScheduleError: the schedule breaks a rule; the message names the first action that does, its
            rank, and its position.

    Example:
        >>> lower_checked(Schedule("mine", 1, (0,), ((Action(0, "B", 0), Action(0, "F", 0)),)))
        Traceback (most recent call last):
        ringsim.errors.ScheduleError: 0B0 needs 0F0, which comes later or is missing (rank 0, position 0). Put 0F0 before 0B0.
    """  # noqa: E501
    _check_places(schedule)
    if whole:
        _check_complete(schedule)
    _check_order(schedule)
    lowered = lower(schedule, overlap=overlap)
    _check_messages(lowered)
    return lowered


def check_ahead(ahead: int) -> None:
    """Raises ArgumentError if ``ahead`` is not a non-negative integer."""
    check_integer(
        "ahead",
        ahead,
        0,
        "Pass the number of computations between the post of a receive and its use.",
    )


def _list_receives(schedule: Schedule) -> list[list[tuple[int, Action]]]:
    """Lists each rank's receives, with the positions of the computations that they must precede.

    The receive that a rank must post first comes last.
    """
    needed, sent = _find_messages(schedule)
    earliest: dict[tuple[int, int], int] = {}  # of the receives of a channel so far
    receives: list[list[tuple[int, Action]]] = [[] for _ in schedule.actions]
    for recv, (source, _) in reversed(sent.items()):
        rank, position = needed[recv]
        # before the action that needs the receive, and any that needs a later one of its channel
        position = min(position, earliest.get((source, rank), position))
        earliest[source, rank] = position
        receives[rank].append((position, recv))
    # a stable sort: each channel keeps its order
    return [sorted(each, key=lambda item: -item[0]) for each in receives]


def _find_messages(
    schedule: Schedule,
) -> tuple[dict[Action, tuple[int, int]], dict[Action, tuple[int, Action]]]:
    """Returns the rank and position that need each receive, and the rank and action behind it.

    The second dictionary is in the order of the sends.
    """
    needed: dict[Action, tuple[int, int]] = {}
    sent: dict[Action, tuple[int, Action]] = {}
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            recv = get_recv(action, schedule.stage_ranks)
            if recv in needed:
                raise ScheduleError(
                    f"two computations need {recv}; the second is {action} (rank {rank}). Remove "
                    "one of the two."
                )
            if recv is not None:
                needed[recv] = (rank, position)
            send = get_send(action, schedule.stage_ranks)
            if send is not None and send.other_side in sent:
                raise ScheduleError(
                    f"two computations produce the data for {send}; the second is {action} (rank "
                    f"{rank}). Remove {action}."
                )
            if send is not None:
                sent[send.other_side] = (rank, action)
    for recv, (rank, action) in sent.items():
        if recv not in needed:
            raise ScheduleError(
                f"{recv.other_side} sends a message that stage {recv.stage} does not need "
                f"(rank {rank}, after {action}). Remove {action}, or add the computation that "
                "needs the message."
            )
    for recv, (rank, position) in needed.items():
        if recv not in sent:
            action = schedule.actions[rank][position]
            raise ScheduleError(
                f"{action} needs {recv.other_side}, which is missing (rank {rank}). Add "
                "the computation whose result is sent."
            )
    return needed, sent


def lower_in_step(schedule: Schedule, *, overlap: bool = False) -> Schedule:
    """Inserts sends and receives in an order that any two ranks share.

    Both ranks of a pair post the messages between them in the same order, as NCCL requires.

    Args:
        schedule: a schedule of computations; a lowered schedule is returned unchanged.
        overlap: whether two actions in ``OVERLAP_F_B`` remain a pair.

    Returns:
        The schedule with ``SEND_F``, ``RECV_F``, ``SEND_B`` and ``RECV_B`` between stages on
        different ranks. Stages on the same rank need no messages.

    Raises:
        ScheduleError: the computations wait for each other, or for data that no rank computes.

    Example:
        >>> from ringsim.schedules import one_f_one_b
        >>> for row in lower_in_step(one_f_one_b(num_ranks=2, num_microbatches=2)).actions:
        ...     print(*row)
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

    Source:
        ``torch/distributed/pipelining/schedules.py``, ``_add_send_recv``, which also puts each
        receive at the place of its send.
    """
    if schedule.lowered:
        return schedule
    schedule = schedule if overlap else _take_apart(schedule)
    waiting = [deque(join_pairs(row)) for row in schedule.actions]
    lowered: list[list[Action]] = [[] for _ in waiting]
    done: set[Action] = set()
    while any(waiting):
        ready = [
            rank
            for rank, row in enumerate(waiting)
            if row
            and not any(
                done.isdisjoint(need)
                for action in row[0]
                for need in get_needs(action, schedule.stage_ranks)
            )
        ]
        step = [(rank, action) for rank in ready for action in waiting[rank].popleft()]
        if not step:
            stuck = ", ".join(
                f"{row[0][0]} on rank {rank}" for rank, row in enumerate(waiting) if row
            )
            raise ScheduleError(
                "the schedule cannot finish, because no rank can perform its next "
                f"action: {stuck}. Call validate to find the reason."
            )
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
