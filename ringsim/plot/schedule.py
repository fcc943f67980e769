"""A schedule as a picture, without ranks: what would happen when, if each computation took its unit of time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from ringsim.pipeline.evaluator import Evaluation, evaluate
from ringsim.pipeline.schedule import Schedule
from ringsim.plot import style
from ringsim.plot.actions import RECV_LANE, SEND_LANE
from ringsim.plot.bars import OPERATION_LOOKS, TRANSFER
from ringsim.plot.rows import Rows
from ringsim.plot.step_picture import StepPicture, draw_step, plot_step
from ringsim.traces.steps import StageActions

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

__all__ = ["plot_schedule"]


def plot_schedule(schedule: Schedule | Evaluation, *, ax: Axes | None = None) -> Axes:
    """Draws a schedule as `plot_timeline` draws a recorded step, in units of time.

    Args:
        schedule: what to draw. A ``Schedule`` is timed first: forward 1, backward 2 or 1 for each of its halves, messages take no time.
            For other costs pass what ``evaluate(schedule, costs)`` returns.
        ax: where to draw; a new figure by default, which also has the live activations.

    Returns:
        The axes of the rows. ``ax.figure.savefig(...)`` writes them.

    Raises:
        ScheduleError: the schedule cannot be timed.
        Deadlock: its ranks would wait for each other.

    Example:
        >>> import matplotlib; matplotlib.use("Agg")
        >>> from ringsim.pipeline import make_schedule
        >>> plot_schedule(make_schedule("1f1b", 4, 8)).get_title(loc="left")
        '1F1B, 4 ranks, 8 microbatches: bubble 27 %, closed form 27 %'
    """
    if isinstance(schedule, Evaluation):
        evaluation, source = schedule, "simulated, with costs of one's own"
        has_messages = any(each.arrived > each.posted for each in schedule.messages)
    else:
        evaluation, source = evaluate(schedule), "simulated: forward 1, backward 2 or 1 for each half, messages take no time"
        has_messages = False
    timed = [(rank, *each) for rank in range(evaluation.schedule.num_ranks) for each in evaluation.get_computations(rank)]
    actions = StageActions(
        schedule=evaluation.schedule.name,
        rank=np.array([rank for rank, *_ in timed]),
        stage=np.array([action.stage for _, action, _, _ in timed]),
        kind=np.array([action.kind for _, action, _, _ in timed]),
        microbatch=np.array([action.microbatch for _, action, _, _ in timed]),
        start=np.array([float(start) for _, _, start, _ in timed]),
        end=np.array([float(end) for _, _, _, end in timed]),
    )

    def draw_messages(ax: Axes, rows: Rows) -> list[Artist]:
        return _draw_messages(ax, rows, evaluation)

    picture = StepPicture(
        actions=actions,
        time="time (units)",
        metadata={"source": source},
        about=f"{float(evaluation.makespan):,.6g} units",
        draw_messages=draw_messages if has_messages else None,
    )
    with style.drawing():
        if ax is None:
            return plot_step(picture)
        draw_step(picture, ax)
    return ax


def _draw_messages(ax: Axes, rows: Rows, evaluation: Evaluation) -> list[Artist]:
    """Draws each message twice, with its sender and with its receiver, from its post to its arrival."""
    look = OPERATION_LOOKS[TRANSFER]
    messages = evaluation.messages
    posted, arrived = (np.array([float(time) for time in times]) for times in zip(*((m.posted, m.arrived) for m in messages), strict=True))
    for lane, places in ((SEND_LANE, [m.source for m in messages]), (RECV_LANE, [m.rank for m in messages])):
        corners: Any = rows.boxes(np.array(places), np.full(len(places), lane), posted, arrived)
        ax.add_collection(PolyCollection(corners, facecolors=look.colour, linewidths=0, zorder=3, gid=f"messages-{lane}"), autolim=False)
    return [Patch(facecolor=look.colour, label="message on its way")]
