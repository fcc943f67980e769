"""What an action waits for and what it passes on: activations go up the stages, gradients come back down.

For one microbatch, over three stages::

    0F -----> 1F -----> 2F
     |         |         |          down a column: backward needs the stage's own forward
     v         v         v
    0B <----- 1B <----- 2B          B may be I, followed by W any time later: only I has somebody waiting for it

Where the two stages of an arrow are on one rank, the arrow costs nothing and there is no message.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringsim.pipeline.actions import Action

__all__ = ["get_needs", "get_recv", "get_send"]

_BACKWARD = ("B", "I")  # both make the gradient that the stage before waits for


def get_send(action: Action, stage_ranks: Sequence[int]) -> Action | None:
    """Returns the send that follows a computation.

    Args:
        action: a computation.
        stage_ranks: for each stage, the rank that has it.

    Returns:
        The send of its output or gradient; None where nobody waits for one, or only a stage on the same rank.

    Example:
        >>> [str(get_send(Action(1, kind, 0), stage_ranks=(0, 1, 2))) for kind in "FBIW"]
        ['1SEND_F0', '1SEND_B0', '1SEND_B0', 'None']
        >>> print(get_send(Action(0, "F", 0), stage_ranks=(0, 0)))
        None
    """
    return _message(action, stage_ranks, prefix="SEND", step=1)


def get_recv(action: Action, stage_ranks: Sequence[int]) -> Action | None:
    """Returns the recv that a computation waits for.

    Args:
        action: a computation.
        stage_ranks: for each stage, the rank that has it.

    Returns:
        The recv of its input, or of the gradient of its output; None where neither comes from another rank.

    Example:
        >>> [str(get_recv(Action(1, kind, 0), stage_ranks=(0, 1, 2))) for kind in "FBIW"]
        ['1RECV_F0', '1RECV_B0', '1RECV_B0', 'None']
    """
    return _message(action, stage_ranks, prefix="RECV", step=-1)


def _message(action: Action, stage_ranks: Sequence[int], *, prefix: str, step: int) -> Action | None:
    """The message between an action's stage and the one ``step`` further along its direction: forward is up, backward is down."""
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

    Args:
        action: a computation.
        stage_ranks: for each stage, the rank that has it.

    Returns:
        A list of needs; any one of the actions of a tuple fulfils it: a gradient comes from ``B`` or from ``I``.

    Example:
        >>> get_needs(Action(0, "B", 0), stage_ranks=(0, 0))  # both stages on this rank: the gradient comes from stage 1
        [(Action(stage=0, kind='F', microbatch=0),), (Action(stage=1, kind='B', microbatch=0), Action(stage=1, kind='I', microbatch=0))]
        >>> get_needs(Action(1, "F", 0), stage_ranks=(0, 1))
        [(Action(stage=1, kind='RECV_F', microbatch=0),)]
    """
    stage, kind, microbatch = action
    if kind == "W":
        return [(Action(stage, "I", microbatch),)]
    needs: list[tuple[Action, ...]] = [(Action(stage, "F", microbatch),)] if kind in _BACKWARD else []
    source = stage - 1 if kind == "F" else stage + 1
    recv = get_recv(action, stage_ranks)
    if recv is not None:
        needs.append((recv,))
    elif 0 <= source < len(stage_ranks):
        needs.append(tuple(Action(source, made_by, microbatch) for made_by in (("F",) if kind == "F" else _BACKWARD)))
    return needs
