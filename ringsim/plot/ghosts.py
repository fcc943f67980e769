"""Draws the recorded run of a predicted trace as pale bars below the predicted bars of each rank.

::

    rank 0  | forward |==| backward |           predicted
            [         |      |         ]        recorded: filled while the rank computed
"""

from __future__ import annotations

import numpy as np

from ringsim.plot import style
from ringsim.plot.bars import (
    BLOCKED,
    COLLECTIVE_BLOCKED,
    LATE_RECEIVER,
    LATE_SENDER,
    TRANSFER,
    make_bars,
    time_range,
)
from ringsim.plot.rows import SLOTS, RankRows, TimeAxis
from ringsim.plot.style import GROUND, MUTED, Look
from ringsim.traces.looks import LOOKS
from ringsim.traces.units import time_unit
from ringsim.traces.value import Trace

PALE = style.fade(LOOKS["recorded"].light, 0.7)
COMPUTING = Look("recorded run, computing", PALE, "", MUTED, edge=0.5)
WAITING = Look("recorded run, blocked", GROUND, "", MUTED, edge=0.5)
_WAITS = (TRANSFER, LATE_SENDER, LATE_RECEIVER, BLOCKED, COLLECTIVE_BLOCKED)


def fit_axis(trace: Trace) -> TimeAxis:
    """Returns a time axis for a trace and, if it was predicted, for its recorded run."""
    first_ns, last_ns = time_range(trace.events)
    if trace.recorded is not None:
        last_ns = max(last_ns, time_range(trace.recorded.events)[1])
    return TimeAxis(first_ns, last_ns, *time_unit(max(last_ns - first_ns, 1)))


def draw_recorded(rows: RankRows, recorded: Trace, axis: TimeAxis) -> None:
    """Draws a recorded run into the last lane."""
    bars, events = make_bars(recorded), recorded.events
    slot_ns = (axis.last_ns - axis.first_ns) / SLOTS
    waits = np.isin(bars.look, _WAITS) & (bars.end_ns - bars.start_ns > slot_ns)
    ranks = np.unique(events.rank)
    begin, end = np.array([time_range(events.select(events.rank == rank)) for rank in ranks]).T
    rows.draw(COMPUTING, "ghosts", ranks, -1, axis.at(begin), axis.at(end), zorder=2)
    times = axis.at(bars.start_ns[waits]), axis.at(bars.end_ns[waits])
    rows.draw(WAITING, "ghosts-blocked", bars.rank[waits], -1, *times, zorder=2.1)
