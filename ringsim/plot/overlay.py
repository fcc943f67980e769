"""Draws two runs in one picture, such as a measurement and the prediction for it.

Each rank's row shows the measurement above the prediction::

    rank 0  [F0 ][F1 ]xxxx[B0  ][B1  ]  measured; the colour shows the kind of computation
            [   ][   ]    [    ][    ]  predicted; the colour shows how much too early or too late
                                        each computation ends
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

import numpy as np

from ringsim.errors import ArgumentError
from ringsim.plot import sheet, style
from ringsim.plot.pipeline_step import PHASE_NAME_POINTS, PHASES, draw_actions, name_schedule
from ringsim.plot.rows import WIDTH_INCHES, divide, lay_rows, strip_inches
from ringsim.plot.sheet import Picture
from ringsim.plot.style import Look
from ringsim.provenance import footer
from ringsim.traces.display import Images, Style
from ringsim.traces.events import NONE, SPAN, Events, Ints
from ringsim.traces.steps import count_steps, find_step, is_action
from ringsim.traces.units import count, time_text, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ringsim.prediction.comparison import Comparison

ROW_INCHES = 0.66
LOWER = 0.37  # the height of the lower lane
MEASURED_LANE, PREDICTED_LANE = 0, 3
MEASURED_LOOK = Look.of("measured")
# The bounds between the looks, as shares of the step. An end that is off by up to 1 % is on time.
BOUNDS = (-0.05, -0.01, 0.01, 0.05)
_LATENESS = ("much_earlier", "earlier", "alike", "later", "much_later")
LATENESS_LOOKS = dict(enumerate(map(Look.of, _LATENESS)))


def plot_overlay(
    comparison: Comparison,
    *,
    step: int | None = None,
    ax: Axes | None = None,
    **look: Unpack[Style],
) -> Axes:
    """Draws a step of the second run (the prediction) below the same step of the first run.

    Colours show how much earlier or later each computation ends in the second run.

    Args:
        comparison: the comparison, from ``ringsim.compare``.
        step: the index of the step, counted from 0, or None for the step with the median length.
        ax: the axes to draw on, or None to create a new figure.
        **look: the style of the new figure, such as its size and theme; see
            `ringsim.traces.display.Style`.

    Returns:
        The axes. Call ``ax.figure.savefig(...)`` to save the figure.

    Raises:
        ArgumentError: there is no such step, or the runs contain no spans or waits to draw.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("Agg")
        >>> from ringsim.prediction.comparison import compare
        >>> from ringsim.traces.events import OP_CODES, Tables, make_events
        >>> from ringsim.traces.value import Trace
        >>> def run(end_ns):
        ...     events = make_events(
        ...         {
        ...             "rank": [0],
        ...             "op": [OP_CODES["span"]],
        ...             "label": [0],
        ...             "post_ns": [0],
        ...             "done_ns": [end_ns],
        ...         },
        ...         Tables(labels=("work",)),
        ...     )
        ...     return Trace(events, {"world_size": 1})
        >>> plot_overlay(compare(run(2_000_000), run(1_900_000))).get_title(loc="left")
        'Second 1.9 ms, first 2 ms: 5.0 % shorter'
    """
    return sheet.show([_overlay(comparison, step)], ax, **look)


def overlay_images(comparison: Comparison) -> Images:
    """Draws the step with the median length for a notebook."""
    return sheet.draw_images([_overlay(comparison, None)], comparison.describe())


def _overlay(comparison: Comparison, step: int | None) -> Picture:
    lengths = comparison.real_steps_s
    if step is None:
        step = int(np.argsort(lengths, kind="stable")[(len(lengths) - 1) // 2])
    if not 0 <= step < len(lengths):
        raise ArgumentError(
            f"step must be from 0 to {len(lengths) - 1}, got {step}. Omit step to draw the step of "
            "median length."
        )
    height = float(np.clip(ROW_INCHES * comparison.real.world_size + 0.15, 1.2, 8.5))
    strip = strip_inches(2 * comparison.real.world_size) + PHASE_NAME_POINTS / 72
    return Picture(lambda ax: _draw_overlay(comparison, step, ax), WIDTH_INCHES, height, strip)


def _draw_overlay(comparison: Comparison, step: int, ax: Axes) -> None:
    real, virtual = comparison.real, comparison.virtual
    lengths_s = comparison.real_steps_s[step], comparison.virtual_steps_s[step]
    unit_ns, unit = time_unit(round(max(lengths_s) * 1e9))
    steps = count_steps(real.events)
    names = [f"rank {rank}" for rank in range(real.world_size)]
    what = f"time since the {'step' if steps else 'run'} began"
    length = max(lengths_s) * 1e9 / unit_ns
    lanes = divide(strip=PHASES, operations=LOWER)
    rows = lay_rows(ax, names, length, what, unit, lanes, above=PHASE_NAME_POINTS)
    chosen, begin_ns = _choose(comparison, step), comparison.real_begin_ns[step]
    if steps:
        measured = find_step(real, step)
        draw_actions(measured.count_from(begin_ns, unit_ns), rows)
    else:
        index = comparison.real_index[chosen]
        look = replace(MEASURED_LOOK, name=comparison.names[0])
        times = _times(real.events, index, begin_ns, unit_ns)
        rows.draw(look, "measured", real.events.rank[index], MEASURED_LANE, *times)
    index = comparison.virtual_index[chosen]
    times = _times(virtual.events, index, comparison.virtual_begin_ns[step], unit_ns)
    off = np.searchsorted(BOUNDS, comparison.lag_s[chosen] / lengths_s[0])
    ranks = virtual.events.rank[index]
    rows.draw_each(LATENESS_LOOKS, "predicted", off, ranks, PREDICTED_LANE, *times)
    dashes = "solid", (0, (4, 2))
    for length_s, dash, name in zip(lengths_s, dashes, comparison.names, strict=True):
        ax.axvline(
            length_s * 1e9 / unit_ns,
            color=style.INK,
            linewidth=1.2,
            linestyle=dash,
            zorder=8,
            label=f"end, {name}",
        )
    words = _words(comparison, step, steps)
    style.dress(ax, *words, _notes(comparison), metadata=real.metadata)


def _notes(comparison: Comparison) -> list[str]:
    above, below, source = "the first run", "the second", "The second"
    if comparison.predicts:
        above, below, source = "the measurement", "the prediction", "Prediction"
    if comparison.called is not None:
        above, below = comparison.called
        source = source if comparison.predicts else below
    return [
        f"Each row shows {above} above {below}. Colours show how much earlier or later each box "
        "ends, as a share of the step.",
        f"{source}: {footer(comparison.virtual.metadata)}.",
    ]


def _choose(comparison: Comparison, step: int) -> Ints:
    """Returns the computations in a step, as indices into the comparison.

    For a run without steps, returns all spans or, if there are no spans, all waits.
    """
    events, index = comparison.real.events, comparison.real_index
    drawn = is_action(events) if count_steps(events) else events.kind == SPAN
    spans = (events.kind[index] == SPAN) & (events.label[index] != NONE)
    waited = events.wait_ns[index] != NONE
    waited &= comparison.virtual.events.wait_ns[comparison.virtual_index] != NONE
    which = spans & drawn[index] if spans.any() else waited
    chosen = np.flatnonzero((comparison.step == step) & which)
    if len(chosen) == 0:
        raise ArgumentError(
            "cannot draw a comparison without spans or waits. Record the ranks' work in "
            "ringsim.span blocks."
        )
    return chosen


def _times(events: Events, index: Ints, begin_ns: int, unit_ns: float) -> tuple[Ints, Ints]:
    """Returns the start and end positions of spans and waits on the time axis."""
    begins = np.where(events.kind[index] == SPAN, events.post_ns[index], events.wait_ns[index])
    return (begins - begin_ns) / unit_ns, (events.done_ns[index] - begin_ns) / unit_ns


def _words(comparison: Comparison, step: int, steps: int) -> tuple[str, str]:
    real_s, virtual_s = comparison.real_steps_s[step], comparison.virtual_steps_s[step]
    off = virtual_s / real_s - 1
    short, long = ("too short", "too long") if comparison.predicts else ("shorter", "longer")
    how = f"{abs(off):.1%} {short if off < 0 else long}"
    if abs(off) < 0.0005:
        how = "off by less than 0.1%"
    first, second = comparison.names
    named = second if comparison.called else second.capitalize()
    title = f"{named} {time_text(virtual_s * 1e9)}, {first} {time_text(real_s * 1e9)}: {how}"
    said = [count(comparison.real.world_size, "rank")]
    if steps:
        schedule = find_step(comparison.real, step).schedule
        said = [f"{name_schedule(schedule)}, {said[0]}"]
    if steps > 1:
        errors = comparison.steps
        said.append(
            f"step {step + 1} of {steps}: all steps are off by {errors.mean:.1%} on average, "
            f"{errors.worst:.1%} at most"
        )
    if comparison.predicts and comparison.no_communication_s is not None:
        said.append(
            f"without communication it would be {comparison.no_communication_s / real_s - 1:+.1%}"
        )
    return title.replace("%", " %"), "; ".join(said).replace("%", " %")
