"""Plays lowered schedules as send-and-receive programs.

A computation first waits for its receive. Sends and receives are posted in the order of the row,
and the waits for the sends come at the end::

    0F0 0SEND_F0 0RECV_B0 0B0        Compute Send Receive Wait(2) Compute Wait(1)

If two computations overlap, the first lasts only until the second may start.
"""

from __future__ import annotations

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
from ringsim.schedules.schedule import Action, Schedule


def play(
    lowered: Schedule, costs: Costs, semantics: Semantics, *, batched: bool = False
) -> tuple[Run, list[list[int]]]:
    """Runs a lowered schedule.

    Args:
        lowered: the schedule, with sends and receives that match.
        costs: the costs of its actions.
        semantics: the condition under which a message starts, as for ``run_programs``.
        batched: whether sends and receives without a computation between them are one batch.

    Returns:
        The run and, for each rank, the positions of the actions that its operations belong to.
    """
    translated = [_translate(row, lowered, costs, batched) for row in lowered.actions]
    programs = [program for program, _ in translated]
    run = run_programs(programs, latency=costs.latency, semantics=semantics)
    return run, [owners for _, owners in translated]


def _translate(
    row: tuple[Action, ...], schedule: Schedule, costs: Costs, batched: bool
) -> tuple[list[Instruction], list[int]]:
    """Translates a rank's actions into operations and the positions of their actions."""
    operations: list[tuple[Instruction, int]] = []
    posts: dict[Action, int] = {}
    for owner, action in enumerate(row):
        if action.is_compute:
            recv = get_recv(action, schedule.stage_ranks)
            if recv is not None:
                operations.append((Wait(posts[recv]), owner))
            hidden = costs.get_hidden(action, row[owner + 1]) if action.overlaps else 0
            operations.append((Compute(costs.get_duration(action) - hidden), owner))
        else:
            posts[action] = len(operations)
            peer = schedule.stage_ranks[action.other_side.stage]
            joins = batched and any(not each.is_compute for each in row[owner + 1 : owner + 2])
            operations.append(
                (
                    Send(peer, action, joins)
                    if action.kind.startswith("SEND")
                    else Receive(peer, action.other_side, joins),
                    owner,
                )
            )
    operations += [
        (Wait(position), operations[position][1])
        for action, position in posts.items()
        if action.kind.startswith("SEND")
    ]
    return [operation for operation, _ in operations], [owner for _, owner in operations]
