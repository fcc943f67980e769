"""The picture of a trace in a notebook: ring and timeline in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from matplotlib.figure import Figure

from ringsim.plot import style
from ringsim.plot.ring import SIZE_INCHES, draw_ring
from ringsim.plot.timeline import WIDTH_INCHES, draw_timeline, timeline_height

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

__all__ = ["png"]

GAP_POINTS: Final = 16.0
SHARE: Final = 0.68  # of the pictures' own sizes: the words stay as large, and can be read when a notebook shrinks the picture


def png(trace: Trace) -> bytes:
    """Draws both pictures side by side, for a notebook; the ring alone where nothing happened.

    Args:
        trace: any trace.

    Returns:
        A PNG, 100 pixels an inch; the same bytes for the same trace. The trace's description is in the file.

    Example:
        >>> from ringsim.traces.events import make_events
        >>> from ringsim.traces.value import Trace
        >>> png(Trace(make_events({"rank": [], "op": []}), {"world_size": 2}))[1:4]
        b'PNG'
    """
    ring_inches = (SIZE_INCHES[0] * SHARE, SIZE_INCHES[1] * SHARE)
    timeline_inches = (WIDTH_INCHES * SHARE, max(timeline_height(trace), 2.6))
    with style.drawing():
        figure = Figure()
        if not len(trace.events):
            ring = figure.add_axes((0, 0, 1, 1))
            style.fit(figure, [(ring, *ring_inches, style.Margins(0, 0, 0, 0))])
            style.fit(figure, [(ring, *ring_inches, draw_ring(trace, ring))])
            return style.figure_png(figure, description=trace.describe())
        ring, timeline = figure.add_axes((0, 0, 1, 1)), figure.add_axes((0, 0, 1, 1), label="timeline")
        # Sizes first: what is written into a picture depends on the room there is.
        nothing = style.Margins(0, 0, 0, 0)
        style.fit(figure, [(ring, *ring_inches, nothing), (timeline, *timeline_inches, nothing)])
        ring_margins, timeline_margins = draw_ring(trace, ring), draw_timeline(trace, timeline)
        spaced = ring_margins._replace(right=ring_margins.right + GAP_POINTS)
        style.fit(figure, [(ring, *ring_inches, spaced), (timeline, *timeline_inches, timeline_margins)])
    return style.figure_png(figure, description=trace.describe())
