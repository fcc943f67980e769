"""Plays lowered schedules as send-and-receive programs.

Each action is an operation. A computation first waits for its receive, and the waits for the sends
come after the last action::

    0F0 0SEND_F0 0RECV_B0 0B0        Compute(1) Send Receive Compute(2, after=2) Wait(1)

If two computations overlap, the first lasts only until the second may start.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringsim.schedules.costs import Costs
from ringsim.schedules.lowering import get_recv
from ringsim.schedules.programs import (
    Compute,
    Instruction,
    Receive,
    Run,
    Semantics,
    Send,
    Wait,
    run_programs,
)
from ringsim.schedules.schedule import SEND_KINDS, Action, Schedule


def play(lowered: Schedule, costs: Costs, semantics: Semantics, *, batched: bool = False) -> Run:
    """Runs a lowered schedule.

    Args:
        lowered: the schedule, with sends and receives that match.
        costs: the costs of its actions.
        semantics: the condition under which a message starts, as for ``run_programs``.
        batched: whether sends and receives without a computation between them are one batch.

    Returns:
        The run. The operation at a position of a rank's row belongs to the action at this position.
    """
    programs = [_translate(row, lowered.stage_ranks, costs, batched) for row in lowered.actions]
    return run_programs(programs, latency=costs.latency, semantics=semantics)


def _translate(
    row: tuple[Action, ...], stage_ranks: Sequence[int], costs: Costs, batched: bool
) -> list[Instruction]:
    """Translates a rank's actions into operations."""
    posts = {action: position for position, action in enumerate(row) if not action.is_compute}
    operations: list[Instruction] = []
    for position, action in enumerate(row):
        then = row[position + 1 : position + 2]
        if action.is_compute:
            recv = get_recv(action, stage_ranks)
            hidden = costs.get_hidden(action, then[0]) if action.overlaps else 0
            duration = costs.get_duration(action) - hidden
            operations.append(Compute(duration, None if recv is None else posts[recv]))
            continue
        other = action.other_side
        joins = batched and any(not each.is_compute for each in then)
        if action.kind in SEND_KINDS:
            operations.append(Send(stage_ranks[other.stage], action, joins))
        else:
            operations.append(Receive(stage_ranks[other.stage], other, joins))
    sends = (position for action, position in posts.items() if action.kind in SEND_KINDS)
    return [*operations, *map(Wait, sends)]
