"""What a run leaves behind: one value, whether it came from real ranks, from the simulator or from a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ringsim.errors import ArgumentError, say
from ringsim.traces import frames, summary
from ringsim.traces.events import COLUMN_DTYPES, Events
from ringsim.traces.matching import Messages, Unmatched, describe_unmatched, match
from ringsim.traces.reached import bundle, reach
from ringsim.traces.waits import Waits, split_waits

if TYPE_CHECKING:
    from os import PathLike

    import pandas as pd
    from matplotlib.axes import Axes

    from ringsim.diagnose.finding import Diagnosis
    from ringsim.traces.bandwidths import Bandwidths
    from ringsim.traces.bubbles import Bubble
    from ringsim.traces.live_activations import PeakActivations

__all__ = ["Trace", "check_trace"]


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """The recorded events of a run, and what the ranks returned and printed.

    In a notebook a trace shows itself as pictures, in a terminal as a summary. Two traces are equal when their events and metadata are;
    results and output do not count, for a file does not keep them.

    Args:
        events: what happened, one row an event.
        metadata: where and how it was measured, or simulated; only what JSON can say.
        results: what the worker returned, by rank; empty where there was no worker, and for a trace that was loaded.
        output: what each rank printed, by rank; empty likewise.

    Example:
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> events = make_events({"rank": [0, 1], "op": [OP_CODES["send"], OP_CODES["recv"]], "group": [0, 0], "peer": [1, 0],
        ...                       "tag": [0, 0], "post_ns": [0, 0], "wait_ns": [0, 0], "done_ns": [2000, 3000]})
        >>> trace = Trace(events, {"world_size": 2})
        >>> trace.world_size, len(trace.messages), trace.unmatched
        (2, 1, [])
        >>> trace.makespan_s
        3e-06
    """

    events: Events
    metadata: dict[str, Any]
    results: list[Any] = field(default_factory=list)
    output: list[str] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        """Number of ranks in the run, those included that left no event."""
        known = self.metadata.get("world_size")
        return known if isinstance(known, int) else int(self.events.rank.max(initial=-1)) + 1

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from the first event posted to the last moment recorded; 0 for a trace without events."""
        events = self.events
        if len(events) == 0:
            return 0.0
        last = max(events.post_ns.max(), events.wait_ns.max(), events.done_ns.max())
        return float(last - events.post_ns.min()) * 1e-9

    @cached_property
    def messages(self) -> Messages:
        """Sends and recvs that met, one row a message. NCCL, also simulated, ignores tags: there the order alone decides."""
        return match(self.events, by_tag=self.metadata.get("backend") not in ("nccl", "virtual clock, grouped"))

    @cached_property
    def waits(self) -> Waits:
        """How long each event was blocked, and why."""
        return split_waits(self.events, self.messages)

    @cached_property
    def unmatched(self) -> list[Unmatched]:
        """Sends and recvs whose other side was never posted, each readable as a sentence."""
        return describe_unmatched(self.events, self.messages)

    def to_pandas(self, which: str = "events") -> pd.DataFrame:
        """Gives the trace as a table.

        Args:
            which: "events" for one row an event, "messages" for one row a message. ``ringsim.traces.frames`` lists the columns.

        Returns:
            A new pandas DataFrame.

        Raises:
            ArgumentError: ``which`` names no table.
        """
        return frames.to_pandas(self, which)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the trace to one file, usually ``*.ringtrace``, all of it or nothing; ``ringsim.load`` reads it.

        Results and output stay behind: a file holds numbers and names, nothing that could be executed.

        Args:
            path: where to; an existing file is replaced.

        Raises:
            TraceFileError: the file cannot be written.
        """
        reach("save")(self, path)

    def to_perfetto(self, path: str | PathLike[str]) -> None:
        """Writes the trace as ui.perfetto.dev opens it, usually ``*.pftrace``; ``ringsim.exchange.perfetto`` says what it shows."""
        reach("to_perfetto")(self, path)

    def to_chrome(self, path: str | PathLike[str]) -> None:
        """Writes the trace in Chrome's Trace Event Format, usually ``*.json``; ``ringsim.exchange.chrome`` says what it shows."""
        reach("to_chrome")(self, path)

    def to_goal(self, path: str | PathLike[str]) -> None:
        """Writes the trace as a program for LogGOPSim and ATLAHS, usually ``*.goal``; ``ringsim.exchange.goal`` says what is in it."""
        reach("to_goal")(self, path)

    def to_chakra(self, directory: str | PathLike[str]) -> None:
        """Writes the trace as Chakra execution traces, a file a rank; ``ringsim.exchange.chakra`` says what is in them."""
        reach("to_chakra")(self, directory)

    def to_otf2(self, directory: str | PathLike[str]) -> None:
        """Writes the trace as an archive of OTF2, for Vampir and Scalasca; ``ringsim.exchange.otf2`` says what is in it."""
        reach("to_otf2")(self, directory)

    def plot_ring(self, *, ax: Axes | None = None) -> Axes:
        """Draws who sent to whom, as a ring; on ``ax`` where given, else on a new figure."""
        axes: Axes = reach("plot_ring")(self, ax=ax)
        return axes

    def plot_timeline(self, *, step: int | None = None, ax: Axes | None = None) -> Axes:
        """Draws what each rank did when; on ``ax`` where given, else on a new figure.

        Args:
            step: of a pipeline's trace, which step, from 0; None for the last one.
            ax: where to draw.

        Returns:
            The axes.

        Raises:
            ArgumentError: the trace has no such step.
        """
        axes: Axes = reach("plot_timeline")(self, step=step, ax=ax)
        return axes

    def plot_bandwidth(self, *, curve: Bandwidths | None = None, ax: Axes | None = None) -> Axes:
        """Draws the bandwidth and the time that each message achieved; ``curve``, a measured table, stands behind them."""
        axes: Axes = reach("plot_bandwidth")(self, curve=curve, ax=ax)
        return axes

    def bubble(self, step: int | None = None) -> Bubble:
        """Measures how long the ranks of a pipeline did not compute in one step, beside what the schedule's closed form says.

        Args:
            step: which step, from 0; None for the last one.

        Returns:
            The bubble by rank and in all, by makespan and by span.

        Raises:
            ArgumentError: the trace has no such step.
        """
        measured: Bubble = reach("bubble")(self, step)
        return measured

    def peak_activations(self, step: int | None = None) -> PeakActivations:
        """Counts the most activations that each rank of a pipeline held at a time in one step, beside what the closed form says.

        Args:
            step: which step, from 0; None for the last one.

        Returns:
            The peaks by rank.

        Raises:
            ArgumentError: the trace has no such step.
        """
        measured: PeakActivations = reach("peak_activations")(self, step)
        return measured

    def explain(self) -> Diagnosis:
        """Says why the run ended as it did, or what made it slow; printing what it returns gives sentences, ``plot()`` a picture."""
        diagnosis: Diagnosis = reach("explain")(self)
        return diagnosis

    def summary(self) -> str:
        """Returns the trace in a few lines of text: ranks, messages, the busiest edge, the longest wait, what is missing."""
        return summary.summarise(self)

    def describe(self) -> str:
        """Returns the trace in one sentence, for those who cannot see its picture."""
        return summary.describe(self)

    def __repr__(self) -> str:
        """Returns the summary."""
        return self.summary()

    def __eq__(self, other: object) -> bool:
        """Tells whether the events and the metadata are the same."""
        if not isinstance(other, Trace):
            return NotImplemented
        mine, theirs = self.events, other.events
        return (
            self.metadata == other.metadata
            and mine.tables == theirs.tables
            and all(np.array_equal(getattr(mine, name), getattr(theirs, name)) for name in COLUMN_DTYPES)
        )

    __hash__ = None  # type: ignore[assignment]  # equal by content, and its columns are arrays

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Gives Jupyter the pictures with a text beside them, or the text alone where there is no matplotlib."""
        return bundle(self, self.summary(), "png", self.describe())


def check_trace(name: str, value: object) -> None:
    """Checks that an argument is a trace.

    Args:
        name: of the argument.
        value: what was passed.

    Raises:
        ArgumentError: it is none.
    """
    if not isinstance(value, Trace):
        raise ArgumentError(f"{name} must be a Trace, got {say(value)}. Pass what ringsim.trace, simulate or load returns.")
