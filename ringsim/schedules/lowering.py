"""From what a rank computes to what it does.

What each action waits for and passes on, and where the sends and receives go. Activations go up the
stages, gradients come back down.

For one microbatch, over three stages::

    0F -----> 1F -----> 2F
     |         |         |  down a column: backward needs the stage's own forward
     v         v         v
    0B <----- 1B <----- 2B  B may be I, followed by W any time later: only I has somebody waiting
                            for it

If both stages of an arrow are on one rank, there is no message.

``lower`` puts a send after the computation that makes its payload, and a receive one computation
before the one that needs it, so that the message travels while the rank computes. 1F1B over two
ranks, before and after::

    rank 0   0F0 0F1 0B0 0B1         0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1
    rank 1   1F0 1B0 1F1 1B1         1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

Both are *posts*: neither blocks. A computation waits for its receive, and the end of the step waits
for the sends.

This cannot deadlock even if a send ends only when it is received (a rendezvous): nobody waits for a
send before the end, so a rank stands still only for a message that has not been sent, and its
sender stands still only for a message of an earlier computation. That chain has an end, unless the
computations themselves wait for each other in a circle, which ``validate`` finds.

Two messages of one channel (from one rank to another) are received in the order in which they are
sent, because transports without tags match by order. If a rank needs them the other way round, it
posts the first one earlier: in a V, activations and gradients share a channel.

``lower_in_step`` is for transports that do the messages between two ranks one after the other, in
the order in which they are posted, as NCCL does. There, 1F1B as ``lower`` writes it would stand
still::

    rank 0   0SEND_F0 0RECV_B0 0SEND_F1      after 0SEND_F0, rank 0 is to receive and rank 1 is to
                                             receive:
    rank 1   1RECV_F0 1RECV_F1 1SEND_B0      nobody sends

So both ranks must post their messages in one order. There is one if all ranks work in step: in each
step, every rank does its next computation if it has what that needs; then the messages of the step
are posted, on both sides, in the order of the sending ranks. Whatever a message waits for was
posted before it, so the first message that has not arrived can always go on.

A receive is then posted no earlier than its send, so less of a message's travel time is hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest

from ringsim.errors import ScheduleError, check_integer
from ringsim.schedules.schedule import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Action, Schedule

__all__ = [
    "check_ahead",
    "get_needs",
    "get_recv",
    "get_send",
    "lower",
    "lower_checked",
    "lower_in_step",
]

_Post = tuple[Action, int]  # and its position
_BACKWARD = ("B", "I")  # both make the gradient that the stage before waits for


def get_send(action: Action, stage_ranks: Sequence[int]) -> Action | None:
    """Returns the send that follows a computation.

    None if nobody waits for its result, or only a stage on the same rank.

    Example:
        >>> [str(get_send(Action(1, kind, 0), stage_ranks=(0, 1, 2))) for kind in "FBIW"]
        ['1SEND_F0', '1SEND_B0', '1SEND_B0', 'None']
        >>> print(get_send(Action(0, "F", 0), stage_ranks=(0, 0)))
        None
    """
    return _message(action, stage_ranks, prefix="SEND", step=1)


def get_recv(action: Action, stage_ranks: Sequence[int]) -> Action | None:
    """Returns the recv that a computation waits for.

    None if neither its input nor its gradient comes from another rank.

    Example:
        >>> [str(get_recv(Action(1, kind, 0), stage_ranks=(0, 1, 2))) for kind in "FBIW"]
        ['1RECV_F0', '1RECV_B0', '1RECV_B0', 'None']
    """
    return _message(action, stage_ranks, prefix="RECV", step=-1)


def _message(
    action: Action, stage_ranks: Sequence[int], *, prefix: str, step: int
) -> Action | None:
    """The message between an action's stage and the one ``step`` further along its direction.

    Forward is up, backward is down.
    """
    if action.kind == "F":
        direction, other = "F", action.stage + step
    elif action.kind in _BACKWARD:
        direction, other = "B", action.stage - step
    else:
        return None
    if not 0 <= other < len(stage_ranks) or stage_ranks[other] == stage_ranks[action.stage]:
        return None
    return Action(action.stage, f"{prefix}_{direction}", action.microbatch)


def get_needs(action: Action, stage_ranks: Sequence[int]) -> list[tuple[Action, ...]]:
    """Returns what must be done on the same rank before a computation can start.

    Any one action of a tuple fulfils a need: a gradient comes from ``B`` or from ``I``.

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
    needs: list[tuple[Action, ...]] = (
        [(Action(stage, "F", microbatch),)] if kind in _BACKWARD else []
    )
    source = stage - 1 if kind == "F" else stage + 1
    recv = get_recv(action, stage_ranks)
    if recv is not None:
        needs.append((recv,))
    elif 0 <= source < len(stage_ranks):
        needs.append(
            tuple(
                Action(source, made_by, microbatch)
                for made_by in (("F",) if kind == "F" else _BACKWARD)
            )
        )
    return needs


def _check_places(schedule: Schedule) -> None:
    """Refuses actions that their rank cannot do.

    Unknown ones, those of another rank's stages, and second ones.
    """
    if schedule.num_microbatches < 1:
        raise ScheduleError(
            f"num_microbatches must be 1 or more, got {schedule.num_microbatches}. Cut the step "
            "into 1 or more."
        )
    for stage, owner in enumerate(schedule.stage_ranks):
        if not 0 <= owner < schedule.num_ranks:
            raise ScheduleError(
                f"stage {stage} must be on a rank below {schedule.num_ranks}, got {owner}. Give "
                "it to one that has a row."
            )
    for rank, row in enumerate(schedule.actions):
        done: set[Action] = set()
        for position, action in enumerate(row):
            where = f"(rank {rank}, position {position})"
            _check_place(action, rank, schedule, where)
            if action in done:
                raise ScheduleError(
                    f"{action} must be done once, got a second one {where}. Take one out."
                )
            other = {"B": "I", "I": "B"}.get(action.kind)
            if other is not None and action._replace(kind=other) in done:
                raise ScheduleError(
                    f"{action} must be the only gradient of its input, got {other} before it "
                    f"{where}. B is I and W in one."
                )
            done.add(action)


def _check_place(action: Action, rank: int, schedule: Schedule, where: str) -> None:
    """Refuses an action that does not belong in this row."""
    kinds = (*COMPUTE_KINDS, *SEND_KINDS, *RECV_KINDS)
    if action.kind not in kinds:
        raise ScheduleError(
            f"an action must be one of {', '.join(kinds)}, got {action} {where}. Write for "
            "example 2F0."
        )
    if not 0 <= action.stage < schedule.num_stages:
        raise ScheduleError(
            f"{action} must be of a stage below {schedule.num_stages}, got {action.stage} "
            f"{where}. Take it out, or add the stage."
        )
    if schedule.stage_ranks[action.stage] != rank:
        owner = schedule.stage_ranks[action.stage]
        raise ScheduleError(
            f"{action} must be done by rank {owner}, which has stage {action.stage}, got rank "
            f"{rank} {where}. Move it there."
        )
    if not 0 <= action.microbatch < schedule.num_microbatches:
        raise ScheduleError(
            f"{action} must be of a microbatch below {schedule.num_microbatches}, got "
            f"{action.microbatch} {where}. Take it out, or raise num_microbatches."
        )
    if not action.is_compute:
        other = action.other_side.stage
        if not 0 <= other < schedule.num_stages or schedule.stage_ranks[other] == rank:
            there = (
                f"on rank {rank} too" if 0 <= other < schedule.num_stages else "that does not exist"
            )
            raise ScheduleError(
                f"{action} must go between two ranks, got stage {other} {there} on the other "
                f"side {where}. Take it out."
            )


def _check_order(schedule: Schedule) -> None:
    """Refuses actions that come before what they need from their own rank.

    A backward pass needs its forward pass, ``W`` needs its ``I``, and a stage needs the previous
    one if both are on one rank. In a lowered schedule a computation also needs its receive, and a
    send the computation of what it sends.
    """
    lowered = schedule.lowered
    for rank, row in enumerate(schedule.actions):
        done: set[Action] = set()
        for position, action in enumerate(row):
            for need in _get_needs(action, schedule.stage_ranks, with_recvs=lowered):
                if done.isdisjoint(need):
                    names = " or ".join(map(str, need))
                    where = f"(rank {rank}, position {position})"
                    raise ScheduleError(
                        f"{action} must come after {names}, got it before or without {where}. "
                        f"Put {names} earlier."
                    )
            done.add(action)


def _get_needs(
    action: Action, stage_ranks: tuple[int, ...], *, with_recvs: bool
) -> list[tuple[Action, ...]]:
    """Returns what an action needs from its own rank.

    A computation's receive only if receives are written down.
    """
    if action.is_compute:
        return [need for need in get_needs(action, stage_ranks) if with_recvs or need[0].is_compute]
    if action.kind in RECV_KINDS:
        return []
    makers = (action._replace(kind=kind) for kind in ("F", "B", "I"))
    return [tuple(maker for maker in makers if get_send(maker, stage_ranks) == action)]


def _check_messages(schedule: Schedule) -> None:
    """Refuses sends and receives that do not meet.

    Between two ranks, the k-th send must be received by the k-th receive.
    """
    posts: dict[tuple[int, int], tuple[list[_Post], list[_Post]]] = {}
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            if not action.is_compute:
                peer = schedule.stage_ranks[action.other_side.stage]
                is_recv = action.kind in RECV_KINDS
                channel = (peer, rank) if is_recv else (rank, peer)
                posts.setdefault(channel, ([], []))[is_recv].append((action, position))
    for (source, rank), both in sorted(posts.items()):
        for sent, received in zip_longest(*both):
            if sent is None:
                action, got = received[0], "nothing"
                where = f"(rank {rank}, position {received[1]}, from rank {source})"
            elif received is None or sent[0].other_side != received[0]:
                action, got = sent[0], "nothing" if received is None else str(received[0])
                where = f"(rank {source}, position {sent[1]}, to rank {rank})"
            else:
                continue
            raise ScheduleError(
                f"{action} must meet {action.other_side}, got {got} {where}. Write both in one "
                "order."
            )


def _check_complete(schedule: Schedule) -> None:
    """Refuses a schedule in which a stage leaves out part of a microbatch."""
    for stage, rank in enumerate(schedule.stage_ranks):
        done = set(schedule.actions[rank])
        for microbatch in range(schedule.num_microbatches):
            forward, backward, gradient, weights = (
                Action(stage, kind, microbatch) for kind in "FBIW"
            )
            where = f"of microbatch {microbatch}, got none (rank {rank})"
            if forward not in done:
                raise ScheduleError(
                    f"stage {stage} must do the forward pass {where}. Add {forward}."
                )
            if backward not in done and gradient not in done:
                raise ScheduleError(
                    f"stage {stage} must do the backward pass {where}. Add {backward}, or "
                    f"{gradient} and {weights}."
                )
            if gradient in done and weights not in done:
                raise ScheduleError(
                    f"stage {stage} must make the weights' gradients {where}. Add {weights} "
                    f"after {gradient}."
                )


def lower(schedule: Schedule, *, ahead: int = 1) -> Schedule:
    """Inserts the sends and receives into a schedule of computations.

    Args:
        schedule: computations only; a lowered schedule is returned as it is.
        ahead: how many computations before its use a receive is posted, 0 or more. With 0 a receive
            blocks: the message starts to travel when the rank has nothing else to do.

    Returns:
        The schedule with ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B`` between stages of different
        ranks, and none within a rank.

    Raises:
        ArgumentError: ``ahead`` is no whole number, or negative.
        ScheduleError: something is sent that nobody needs, needed that nobody sends, or done twice.

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
    receives = _list_receives(schedule)
    rows = (
        _lower_row(row, schedule.stage_ranks, receives[rank], ahead)
        for rank, row in enumerate(schedule.actions)
    )
    return replace(schedule, actions=tuple(map(tuple, rows)))


def lower_checked(schedule: Schedule, *, whole: bool = False) -> Schedule:
    """Inserts the sends and receives into a schedule of any origin, after checking it.

    Args:
        schedule: any schedule; if it is lowered already, its own sends and receives are checked.
        whole: whether every stage must do every microbatch, forward and backward.

    Returns:
        The schedule as `lower` writes it.

    Raises:
        ScheduleError: with the first action that breaks a rule, its rank and its position.

    Example:
        >>> lower_checked(Schedule("mine", 1, (0,), ((Action(0, "B", 0), Action(0, "F", 0)),)))
        Traceback (most recent call last):
        ringsim.errors.ScheduleError: 0B0 must come after 0F0, got it before or without (rank 0, position 0). Put 0F0 earlier.
    """  # noqa: E501
    _check_places(schedule)
    if whole:
        _check_complete(schedule)
    _check_order(schedule)
    lowered = lower(schedule)
    _check_messages(lowered)
    return lowered


def check_ahead(ahead: int) -> None:
    """Raises ArgumentError if a receive would be posted after its use."""
    check_integer(
        "ahead", ahead, 0, "Say how many computations before its use a receive is posted."
    )


def _lower_row(
    row: tuple[Action, ...],
    stage_ranks: tuple[int, ...],
    receives: list[tuple[int, Action]],
    ahead: int,
) -> list[Action]:
    """Returns one rank's row.

    ``receives`` says before which computation each one is needed, the first needed first.
    """
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


def _list_receives(schedule: Schedule) -> list[list[tuple[int, Action]]]:
    """Lists each rank's receives in the order to post them.

    With the position of the computation before which each must stand.
    """
    needed, sent = _find_messages(schedule)
    channels: dict[tuple[int, int], list[Action]] = {}
    for recv, (source, _) in sent.items():
        channels.setdefault((source, needed[recv][0]), []).append(recv)
    receives: list[list[tuple[int, Action]]] = [[] for _ in schedule.actions]
    for (_, rank), channel in channels.items():
        channel.reverse()
        # before what needs it, and before what needs a later one of the same channel
        positions = accumulate((needed[recv][1] for recv in channel), min)
        receives[rank] += reversed([*zip(positions, channel, strict=True)])
    # a stable sort: each channel keeps its order
    return [sorted(each, key=lambda item: item[0]) for each in receives]


def _find_messages(
    schedule: Schedule,
) -> tuple[dict[Action, tuple[int, int]], dict[Action, tuple[int, Action]]]:
    """Finds what needs each receive, its rank and position, and what sends to it, in order."""
    needed: dict[Action, tuple[int, int]] = {}
    sent: dict[Action, tuple[int, Action]] = {}
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            recv = get_recv(action, schedule.stage_ranks)
            if recv in needed:
                raise ScheduleError(
                    f"{recv} must happen once, got it again for {action} (rank {rank}). Take the "
                    "second one out."
                )
            if recv is not None:
                needed[recv] = (rank, position)
            send = get_send(action, schedule.stage_ranks)
            if send is not None and send.other_side in sent:
                raise ScheduleError(
                    f"{send} must happen once, got it again (rank {rank}, after {action}). Take "
                    f"{action} out."
                )
            if send is not None:
                sent[send.other_side] = (rank, action)
    for recv, (rank, action) in sent.items():
        if recv not in needed:
            raise ScheduleError(
                f"{recv.other_side} must be for a computation of stage {recv.stage}, got none "
                f"(rank {rank}, after {action}). Take {action} out, or add what needs it."
            )
    for recv, (rank, position) in needed.items():
        if recv not in sent:
            action = schedule.actions[rank][position]
            raise ScheduleError(
                f"{action} must have a {recv.other_side} to wait for, got none (rank {rank}). Add "
                "what makes it."
            )
    return needed, sent


def lower_in_step(schedule: Schedule) -> Schedule:
    """Inserts the sends and receives.

    Any two ranks then post their messages to each other in one order.

    Args:
        schedule: computations only; a lowered schedule is returned as it is.

    Returns:
        The schedule with ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B`` between stages of different
        ranks, and none within a rank.

    Raises:
        ScheduleError: the computations wait for each other, or for something that no rank makes.

    Example:
        >>> from ringsim.schedules import one_f_one_b
        >>> for row in lower_in_step(one_f_one_b(num_ranks=2, num_microbatches=2)).actions:
        ...     print(*row)
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

    Source:
        ``torch/distributed/pipelining/schedules.py``, ``_add_send_recv``, which also puts each
        receive where its send is.
    """
    if schedule.lowered:
        return schedule
    waiting = [deque(row) for row in schedule.actions]
    lowered: list[list[Action]] = [[] for _ in waiting]
    done: set[Action] = set()
    while any(waiting):
        ready = [
            rank
            for rank, row in enumerate(waiting)
            if row
            and not any(done.isdisjoint(need) for need in get_needs(row[0], schedule.stage_ranks))
        ]
        step = [(rank, waiting[rank].popleft()) for rank in ready]
        if not step:
            stuck = ", ".join(f"{row[0]} on rank {rank}" for rank, row in enumerate(waiting) if row)
            raise ScheduleError(
                "a schedule must let every rank go on, got none that "
                f"can: {stuck}. Ask validate why."
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
