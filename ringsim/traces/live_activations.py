"""How many activations the ranks of a pipeline hold: measured, beside the bound that the schedule's closed form sets.

A forward pass keeps what its backward pass needs. It lives from the start of ``F`` to the end of ``B``, or of ``W``::

    F0 F1 F2    B0 F3 B1    B2 B3
    1  2  3     3  3..3     2  1  0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ringsim.errors import ScheduleError
from ringsim.schedules import closed_forms
from ringsim.traces.events import Ints
from ringsim.traces.stages import StageActions, find_step

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

__all__ = ["PeakActivations", "list_live", "measure_peaks", "peak_activations"]


@dataclass(frozen=True)
class PeakActivations:
    """The most live activations at a time, by rank; each is what one stage keeps of one microbatch.

    Attributes:
        schedule: what the step is called.
        ranks: the ranks that computed, ascending.
        peaks: for each of them, the most it held.
        bounds: for each of them, what the closed form says; None where none is known.
    """

    schedule: str
    ranks: tuple[int, ...]
    peaks: tuple[int, ...]
    bounds: tuple[int, ...] | None

    def __repr__(self) -> str:
        """Returns one line a rank."""
        bounds = self.bounds or (None,) * len(self.ranks)
        lines = [
            f"rank {rank:<4} {peak:>4}" + ("" if bound is None else f"   closed form {bound:>4}")
            for rank, peak, bound in zip(self.ranks, self.peaks, bounds, strict=True)
        ]
        return "\n".join([f"Peak live activations of a step ({self.schedule})", *lines])


def peak_activations(trace: Trace, step: int | None = None) -> PeakActivations:
    """Counts the most activations that each rank held at a time, in one step of a pipeline.

    Args:
        trace: of ranks that ran ``train_step_pipeline``.
        step: which step, from 0; None for the last one.

    Returns:
        The peaks by rank, with the closed form's where the schedule has one.

    Raises:
        ArgumentError: the trace has no such step.

    Example:
        >>> from ringsim.traces.events import OP_CODES, Tables, make_events
        >>> from ringsim.traces.value import Trace
        >>> labels = ("step gpipe", "forward", "backward")
        >>> spans = make_events({"rank": [0] * 5, "op": [OP_CODES["span"]] * 5, "label": [0, 1, 1, 2, 2], "stage": [-1, 0, 0, 0, 0],
        ...                      "microbatch": [-1, 0, 1, 0, 1], "post_ns": [0, 0, 10, 20, 40], "done_ns": [60, 10, 20, 40, 60]},
        ...                     Tables(labels=labels))
        >>> peak_activations(Trace(spans, {"world_size": 1}))
        Peak live activations of a step (gpipe)
        rank 0       2   closed form    2
    """
    return measure_peaks(find_step(trace, step))


def measure_peaks(actions: StageActions) -> PeakActivations:
    """Counts the most activations that each rank held in a step; see `peak_activations`.

    Args:
        actions: the computations of the step, measured or evaluated.
    """
    ranks = actions.ranks
    peaks = tuple(int(list_live(actions, rank)[1].max(initial=0)) for rank in ranks)
    return PeakActivations(actions.schedule, tuple(ranks), peaks, _find_bounds(actions))


def list_live(actions: StageActions, rank: int) -> tuple[Ints, Ints]:
    """Lists how many activations a rank holds, each time that changes.

    Args:
        actions: the computations of a step.
        rank: which rank.

    Returns:
        The times, ascending, and the number from each time on.
    """
    own = actions.of(rank)
    begins, ends = own.start[own.kind == "F"], own.end[(own.kind == "B") | (own.kind == "W")]
    times = np.concatenate([begins, ends])
    changes = np.concatenate([np.ones(len(begins), dtype=np.int64), np.full(len(ends), -1, dtype=np.int64)])
    order = np.lexsort((changes, times))  # what ends goes before what begins at the same moment
    return times[order], np.cumsum(changes[order])


def _find_bounds(actions: StageActions) -> tuple[int, ...] | None:
    step = actions.find_known()
    if step is None:
        return None
    try:
        peaks = closed_forms.peak_live(step)
    except ScheduleError:  # too few microbatches for the formula
        return None
    places = {stages: place for place, stages in enumerate(sorted({actions.stages_of(rank) for rank in actions.ranks}))}
    return tuple(peaks[places[actions.stages_of(rank)]] for rank in actions.ranks)
