"""Tries changes to a lowered schedule that hangs because posts are carried out in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, groupby

from ringsim.errors import ScheduleError
from ringsim.schedules.costs import Costs, Time
from ringsim.schedules.lowering import lower, lower_in_step
from ringsim.schedules.playing import play
from ringsim.schedules.programs import Semantics, read_semantics
from ringsim.schedules.schedule import Action, Schedule

_BATCH = "batch neighbouring sends and receives"


def try_cures(schedule: Schedule, costs: Costs, semantics: Semantics) -> dict[str, Time | None]:
    """Runs a lowered schedule that hangs with each of several changes.

    Args:
        schedule: the schedule.
        costs: the costs of its actions.
        semantics: the semantics with which it hangs; the posts of a communicator are in order.

    Returns:
        For each change, in words, the length of the step, or None if the ranks are still stuck. The
        shortest step comes first.

    Example:
        >>> from ringsim.schedules import one_f_one_b
        >>> cures = try_cures(lower(one_f_one_b(2, 2)), Costs(), "grouped")
        >>> {name: makespan for name, makespan in cures.items() if makespan}
        {'lower_in_step': 9}
    """
    cures: dict[str, Time | None] = {}
    for name, changed, then in _list_changes(schedule, semantics, overlap=bool(costs.overlap)):
        run = play(changed, costs, then, batched=name == _BATCH)
        # every message is needed, so no rank waits for a send after the last computation
        end = max(times[-1][1] for times in run.times if times)
        cures[name] = None if run.blocked else end
    return dict(sorted(cures.items(), key=lambda cure: (cure[1] is None, cure[1] or 0)))


def describe_cures(cures: dict[str, Time | None]) -> str:
    """Returns a sentence about the changes that were tried."""
    lengths = [
        f"{name} ({'hangs' if end is None else f'{float(end):,.6g}'})"
        for name, end in cures.items()
    ]
    return (
        "These changes were tried, with the length of the step, the cheapest first: "
        f"{', '.join(lengths)}."
    )


def _list_changes(
    schedule: Schedule, semantics: Semantics, *, overlap: bool
) -> Iterator[tuple[str, Schedule, Semantics]]:
    """Yields each change's name, schedule and semantics."""
    for parity, ranks in enumerate(("even", "odd")):
        rows = [*schedule.actions]
        rows[parity::2] = map(_receive_first, rows[parity::2])
        changed = replace(schedule, actions=tuple(rows))
        yield f"receive before sending on {ranks} ranks", changed, semantics
    rows = [tuple(action for action in row if action.is_compute) for row in schedule.actions]
    computations = replace(schedule, actions=tuple(rows))
    with suppress(ScheduleError):  # only part of a step, which cannot be lowered again
        for ahead in range(3):
            lowered = lower(computations, ahead=ahead, overlap=overlap)
            yield f"lower with ahead={ahead}", lowered, semantics
        yield "lower_in_step", lower_in_step(computations, overlap=overlap), semantics
    in_order = read_semantics(semantics).in_order
    if in_order == "grouped":
        yield _BATCH, schedule, semantics
        paired = semantics.replace(in_order, "paired")
        yield "a communicator for each pair of ranks", schedule, paired
    yield "a buffer for every message", schedule, f"{in_order}(0)"


def _receive_first(row: Iterable[Action]) -> tuple[Action, ...]:
    """Moves receives before the sends next to them."""
    groups = groupby(row, key=lambda action: action.is_compute)
    return tuple(
        chain.from_iterable(
            sorted(group, key=lambda action: action.kind.startswith("SEND")) for _, group in groups
        )
    )
