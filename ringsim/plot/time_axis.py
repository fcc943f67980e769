"""The time axis of a timeline: where it begins, in which unit it counts, and how long a pixel of it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ringsim.plot.bars import time_range
from ringsim.traces.events import Events, Ints
from ringsim.traces.units import time_text, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["TimeAxis"]

SLOTS: Final = 1600  # pixels, about: what is shorter is merged with its neighbours
LATE_START: Final = 0.15  # share of the time before the first event from which on the axis begins there


@dataclass(frozen=True)
class TimeAxis:
    """Turns times of a trace into places on the axis.

    Attributes:
        first_ns: where the picture begins; the axis calls it 0.
        last_ns: where it ends.
        unit_ns: ns in the axis' unit.
        unit: its name.
    """

    first_ns: int
    last_ns: int
    unit_ns: float
    unit: str

    @classmethod
    def of(cls, events: Events) -> TimeAxis:
        """Counts from the start of the run, or, where ranks took long to get going, from the first event.

        Example:
            >>> from ringsim.traces.events import make_events
            >>> axis = TimeAxis.of(make_events({"rank": [0], "op": [0], "post_ns": [900_000], "done_ns": [960_000]}))
            >>> axis.label, float(axis.at(910_000))
            ('time since the first event (µs), which came 900 µs after the start of the run', 10.0)
        """
        first, last = time_range(events)
        first = 0 if first < LATE_START * last else first
        unit_ns, unit = time_unit(max(last - first, 1))
        return cls(first, last, unit_ns, unit)

    @property
    def slot_ns(self) -> float:
        """Length of a pixel."""
        return max(self.last_ns - self.first_ns, 1) / SLOTS

    @property
    def label(self) -> str:
        """What stands under the axis."""
        if self.first_ns == 0:
            return f"time since the start of the run ({self.unit})"
        return f"time since the first event ({self.unit}), which came {time_text(self.first_ns)} after the start of the run"

    def at(self, time_ns: Ints | float) -> Ints:
        """Place of a time, or of many, on the axis."""
        place: Ints = (time_ns - self.first_ns) / self.unit_ns  # type: ignore[assignment]
        return place

    def limit(self, ax: Axes) -> None:
        """Sets the axes' limits and label."""
        length = max(self.last_ns - self.first_ns, 1) / self.unit_ns
        ax.set_xlim(-0.004 * length, 1.012 * length)
        ax.set_xlabel(self.label, loc="left")
