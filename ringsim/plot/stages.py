"""A recorded step of a pipeline, as a picture: what each stage computed, and under it when the messages went."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import Patch

from ringsim.plot.actions import SEND_LANE
from ringsim.plot.bars import OPERATION_LOOKS, make_bars
from ringsim.plot.boxes import draw_long
from ringsim.plot.rows import Rows
from ringsim.plot.step_picture import StepPicture
from ringsim.plot.time_axis import TimeAxis
from ringsim.traces.events import COLLECTIVE, ERROR, MARK, NONE, SPAN
from ringsim.traces.steps import StageActions, count_steps, find_step, in_step
from ringsim.traces.units import time_text, time_unit
from ringsim.traces.value import Trace, count

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

__all__ = ["picture_step", "shows_step"]


def shows_step(trace: Trace) -> bool:
    """Tells whether a trace is best drawn as a step of a pipeline: it has one, and nothing in it is stuck or has failed.

    Args:
        trace: any trace.
    """
    events = trace.events
    operations = (events.kind != SPAN) & (events.kind != MARK)
    stuck = operations & (((events.wait_ns != NONE) & (events.done_ns == NONE)) | (events.status == ERROR))
    return not stuck.any() and count_steps(events) > 0


def picture_step(trace: Trace, step: int | None = None) -> StepPicture:
    """Makes the picture of a recorded step.

    Args:
        trace: of ranks that ran ``train_step_pipeline``.
        step: which step, from 0; None for the last one.

    Raises:
        ArgumentError: the trace has no such step.
    """
    measured = find_step(trace, step)
    steps = count_steps(trace.events)
    number = steps - 1 if step is None else step
    first, last = int(measured.start.min()), int(measured.end.max())
    unit_ns, unit = time_unit(last - first)
    axis = TimeAxis(first, last, unit_ns, unit)
    actions = replace(measured, start=axis.at(measured.start), end=axis.at(measured.end))
    length = time_text(last - first)

    def draw_messages(ax: Axes, rows: Rows) -> list[Artist]:
        return _draw_messages(ax, rows, trace, number, measured, axis)

    return StepPicture(
        actions=actions,
        time=f"time since the step began ({unit})",
        metadata=trace.metadata,
        about=f"step {number + 1} of {steps}, {length}" if steps > 1 else length,
        draw_messages=draw_messages if len(measured.ranks) > 1 else None,
        notes=_list_notes(trace),
    )


def _list_notes(trace: Trace) -> tuple[str, ...]:
    """What makes the ranks wait besides the schedule."""
    about = trace.metadata
    cores = (about.get("machine") or {}).get("cores")
    one_host = len({rank.get("host") for rank in about.get("ranks", ())}) <= 1
    if about.get("comm_device") != "cpu" or not cores or not one_host or trace.world_size <= cores:
        return ()
    return (
        f"{trace.world_size} ranks shared {count(cores, 'core')}: what had to wait for a core is drawn as computing, or makes others wait.",
    )


def _draw_messages(ax: Axes, rows: Rows, trace: Trace, step: int, actions: StageActions, axis: TimeAxis) -> list[Artist]:
    """Draws the sends and recvs of a step, each stretch by what it was spent on; returns what the legend says of them."""
    events = trace.events
    operations = (events.kind != SPAN) & (events.kind != MARK) & (events.kind != COLLECTIVE)
    own = Trace(events.select(operations & in_step(events, step)), trace.metadata)
    bars = make_bars(own)
    bars = replace(bars, rank=np.searchsorted(actions.ranks, bars.rank), lane=bars.lane + SEND_LANE)
    draw_long(ax, bars, np.flatnonzero(bars.end_ns > bars.start_ns), rows, axis)
    return [
        Patch(facecolor=look.colour, edgecolor=look.ink, hatch=look.hatch or None, linewidth=0.5, label=look.name)
        for look in (OPERATION_LOOKS[number] for number in np.unique(bars.look).tolist())
    ]
