"""The arrows of a timeline: from where a message's send was posted to where its recv was done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ringsim.plot import style
from ringsim.plot.rows import Rows
from ringsim.plot.time_axis import TimeAxis
from ringsim.traces.events import NONE, Ints

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ringsim.traces.value import Trace

__all__ = ["choose_messages", "draw_arrows"]

MOST_ARROWS: Final = 160
HEAD_POINTS: Final = 1.0  # width of the shaft, by which matplotlib measures the head


def choose_messages(trace: Trace, first_ns: int, last_ns: int, most: int = MOST_ARROWS) -> Ints:
    """Picks the messages that get an arrow: all of them, or as many as keep the picture readable.

    Of those that go the same way at about the same time the first is taken; how long "about" is grows until few enough are left.

    Args:
        trace: any trace.
        first_ns: beginning of the picture.
        last_ns: its end.
        most: arrows, at most.

    Returns:
        Indices of messages, ascending. Messages whose recv is not done have no arrow, for it would have no end.
    """
    messages, events = trace.messages, trace.events
    done = np.flatnonzero(events.done_ns[messages.recv] != NONE)
    if len(done) <= most:
        return done
    pair = messages.src[done].astype(np.int64) * trace.world_size + messages.dst[done]
    post = (events.post_ns[messages.send[done]] - first_ns) / max(last_ns - first_ns, 1)
    phase = pair * 0.618 % 1  # pairs take turns: arrows at one moment would stand in a line
    slots = most
    while True:
        slot = np.floor(post * slots + phase).astype(np.int64)
        whole = (
            np.flatnonzero(slot > 0) if (slot > 0).any() else np.arange(len(done))
        )  # the first slot of a pair is cut short: none from it
        chosen = whole[np.unique((pair * (slots + 2) + slot)[whole], return_index=True)[1]]
        if len(chosen) <= most or slots == 1:
            # More pairs than arrows: every n-th pair, then.
            return done[np.sort(chosen)[:: -(-len(chosen) // most)]]
        slots = max(slots * 3 // 4, 1)


def draw_arrows(ax: Axes, trace: Trace, rows: Rows, send_lane: int, axis: TimeAxis) -> int:
    """Draws the arrows, from the lane of sends to that of recvs; returns how many."""
    messages, events = trace.messages, trace.events
    chosen = choose_messages(trace, axis.first_ns, axis.last_ns)
    if len(chosen) == 0:
        return 0
    src, dst = messages.src[chosen], messages.dst[chosen]
    x, y = axis.at(events.post_ns[messages.send[chosen]]), rows.middle(src, send_lane)
    to_x, to_y = axis.at(events.done_ns[messages.recv[chosen]]), rows.middle(dst, send_lane + 1)
    far = abs(dst - src) > 1  # an arrow across many rows steps back
    for some, colour, zorder in ((far, "#8C8C8C", 4.0), (~far, style.INK, 4.5)):
        if some.any():
            ax.quiver(
                x[some], y[some], (to_x - x)[some], (to_y - y)[some], angles="xy", scale_units="xy", scale=1, units="inches",
                width=HEAD_POINTS / 72, headwidth=6, headlength=7, headaxislength=6.5, minlength=0, color=colour, zorder=zorder,
                gid="arrows-far" if zorder == 4 else "arrows",
            )  # fmt: skip
    return len(chosen)
