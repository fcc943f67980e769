"""Draws the bytes of the ranks' tensors below the timeline.

::

    rank 0   | forward      | backward         | step |
    rank 1   | forward      | backward         | step |
             ___________________________________________
             |           .--''''--..            activations
    rank 0   |_____.--'''___________'''--.____  gradients
             |________________________________  parameters
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Unpack

import numpy as np

from ringsim.errors import ArgumentError
from ringsim.plot import sheet, style
from ringsim.plot.rows import TimeAxis, label_time
from ringsim.plot.timeline import timeline_picture
from ringsim.traces.display import Style
from ringsim.traces.events import BYTE_KINDS, LAST_BYTES
from ringsim.traces.looks import LOOKS
from ringsim.traces.units import bytes_text

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from ringsim.traces.value import Trace

MOST_PANELS = 4
PANEL_INCHES = 0.9
GAP_INCHES = 0.14


def plot_memory(trace: Trace, *, ax: Axes | None = None, **look: Unpack[Style]) -> Axes:
    """Draws the timeline, and the bytes of up to four evenly spaced ranks.

    See ``Trace.plot_memory``.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("Agg")
        >>> from ringsim.traces.events import BYTES, OP_CODES, Payload, Tables, make_events
        >>> from ringsim.traces.value import Trace
        >>> tables = Tables(labels=(BYTES,), payloads=(Payload("", (4, 4, 0, 8), 16),))
        >>> events = make_events(
        ...     {"rank": [0], "op": [OP_CODES["mark"]], "label": [0], "payload": [0]}, tables
        ... )
        >>> (panel,) = plot_memory(Trace(events, {"world_size": 1})).child_axes
        >>> panel.texts[0].get_text()
        'rank 0: 16 B'
    """
    counts = trace.memory()
    if not len(counts):
        raise ArgumentError(
            "the trace contains no counts of bytes. Run the step inside `with "
            "ringsim.memory(model, optimizer):` on each rank."
        )
    counted = trace.events.select(trace.events.counts_bytes)
    is_last = np.array(counted.tables.labels)[counted.label] == LAST_BYTES
    counts["block"] = np.cumsum(is_last) - is_last
    picture = timeline_picture(trace, draw_under=lambda ax, axis: _draw_panels(counts, ax, axis))
    return sheet.show([picture], ax, **look)


def _draw_panels(counts: pd.DataFrame, ax: Axes, axis: TimeAxis) -> None:
    for kind in BYTE_KINDS:
        style.swatch(ax, kind, LOOKS[kind].light)
    ax.set_xlabel("")
    ax.tick_params(axis="x", labelbottom=False)
    ranks = counts["rank"].unique().tolist()
    shown = ranks[:: math.ceil(len(ranks) / MOST_PANELS)]
    most = counts["total"].max()
    inch = 72 / style.points(ax)[1]  # as a share of the axes
    for number, rank in enumerate(shown, start=1):
        place = 0, -number * (GAP_INCHES + PANEL_INCHES) * inch, 1, PANEL_INCHES * inch
        panel = ax.inset_axes(place, sharex=ax)
        own = counts[counts["rank"] == rank]
        for _, block in own.groupby("block"):  # between two blocks, no bytes are known
            panel.stackplot(
                axis.at(block["time_ns"]),
                block[[*BYTE_KINDS]].T,
                colors=[LOOKS[kind].light for kind in BYTE_KINDS],
                step="post",
            )
        panel.set_ylim(0, most * 1.08)
        panel.set_yticks([0, most], ["0", bytes_text(most)])
        panel.grid(color=style.GRID)
        panel.tick_params(axis="x", labelbottom=rank == shown[-1])
        words = f"rank {rank}: {bytes_text(own['total'].max())}"
        style.write_beside(panel, words, (1, 0.5), (5, 0), va="center", fontsize=9)
    label_time(panel, "time since the start of the run", axis.unit)
