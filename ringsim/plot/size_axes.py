"""The two panels of a bandwidth chart, over one another: bandwidth and time against the size of a message, all on logarithmic scales."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from ringsim.plot import style
from ringsim.traces.units import bytes_text, time_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["BELOW", "add_time_panel", "scale_sizes"]

BELOW: Final = 0.74  # of the upper panel's height: the gap and the lower panel
GAP: Final = 0.08
MOST_TICKS: Final = 9


def add_time_panel(ax: Axes) -> Axes:
    """Adds the panel of times under axes, outside of their frame, and returns it."""
    below = ax.inset_axes((0, -BELOW, 1, BELOW - GAP), sharex=ax)
    for panel, label in ((ax, "bandwidth, GB/s"), (below, "time of a message")):
        panel.set_ylabel(label)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.grid(color=style.FAINT, linewidth=0.6)
        panel.set_axisbelow(True)
        panel.yaxis.set_major_locator(LogLocator(base=10, numticks=7))
        panel.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.12f}".rstrip("0").rstrip(".")))
    below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: time_text(value * 1e3)))
    ax.tick_params(labelbottom=False)
    below.set_xlabel("size of a message")
    return below


def scale_sizes(ax: Axes, below: Axes, smallest: float, largest: float) -> None:
    """Sets the range of sizes, with a mark at every power of two, or every second, third, ... where that would be too many."""
    low, high = math.floor(math.log2(smallest)), math.ceil(math.log2(largest))
    step = max(1, -(-(high - low + 1) // MOST_TICKS))
    ax.set_xlim(2 ** (low - 0.5), 2 ** (high + 0.5))
    for panel in (ax, below):
        panel.xaxis.set_major_locator(FixedLocator([2.0**power for power in range(low, high + 1, step)]))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_text(value)))
    ax.tick_params(labelbottom=False)
