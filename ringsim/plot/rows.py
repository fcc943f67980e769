"""Where things lie within a rank's row: marks at the top, spans below them, then sends, then recvs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ringsim.plot.bars import Bars
from ringsim.traces.events import MARK, Ints

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

__all__ = ["Rows"]

EDGE: Final = 0.42  # from the middle of a row, which is 1 high, to the first and the last thing in it
MARKS: Final = 0.17  # height of the strip for marks
OPERATIONS: Final = 0.32  # height of the two lanes for sends and recvs, where there are spans above them
GAP: Final = 0.03


@dataclass(frozen=True)
class Rows:
    """The lanes of a row, as distances from its middle; y grows downwards, rank 0 has its middle at 0.

    Attributes:
        top: upper edge of each lane, shape (lanes,).
        bottom: lower edge likewise.
        marks: upper and lower edge of the strip for marks.
    """

    top: Ints
    bottom: Ints
    marks: tuple[float, float]

    @classmethod
    def of(cls, trace: Trace, bars: Bars) -> Rows:
        """Shares a row out among what occurs in the trace."""
        has_marks = bool((trace.events.kind == MARK).any())
        has_operations = bool((bars.lane >= bars.depths).any())
        top = -EDGE + (MARKS + GAP if has_marks else 0)
        split = EDGE - OPERATIONS if has_operations and bars.depths else top if has_operations else EDGE
        span_edges = np.linspace(top, split - GAP if has_operations else split, bars.depths + 1)
        middle = (split + EDGE) / 2
        return cls(
            top=np.concatenate([span_edges[:-1], [split, middle + GAP / 2, split]]),
            bottom=np.concatenate([span_edges[1:], [middle - GAP / 2, EDGE, EDGE]]),
            marks=(-EDGE, -EDGE + MARKS),
        )

    def boxes(self, rank: Ints, lane: Ints, start: Ints, end: Ints, low: Ints | float = 0.0, high: Ints | float = 1.0) -> Ints:
        """Corners of boxes, shape (boxes, 4, 2); ``low`` and ``high`` are shares of the lane's height, counted from its lower edge."""
        height = self.bottom[lane] - self.top[lane]
        lower, upper = rank + self.bottom[lane] - low * height, rank + self.bottom[lane] - high * height
        return np.stack([start, lower, start, upper, end, upper, end, lower], axis=-1).reshape(-1, 4, 2)

    def middle(self, rank: Ints, lane: Ints | int) -> Ints:
        """Heights of the middle of a lane, in the rows of the ranks."""
        height: Ints = rank + (self.top[lane] + self.bottom[lane]) / 2
        return height
