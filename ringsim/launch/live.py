"""Shows a run while it runs, as a small trace of its newest events that is renewed again and again.

::

    rank-r.events, growing --> PartReader --> Follower --> LiveTrace --> a widget under the cell
                                                |                        a page on loopback
                                                `----------> text --> the terminal

The launcher, or ``ringsim watch`` in a different process, reads the growing parts between its other
tasks. The ranks do nothing for it. A ``LiveTrace`` stays small however long the run is. At the end,
the whole trace replaces it.
"""

from __future__ import annotations

import os
import pkgutil
import sys
import time
import webbrowser
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ringsim.diagnose.lateness import Activity
from ringsim.diagnose.snapshot import RankRecords, snapshot_of_events
from ringsim.diagnose.waitfor import hindering
from ringsim.errors import Interrupted, RingError, name_ranks
from ringsim.launch.progress import count_progress
from ringsim.traces.cells import in_notebook
from ringsim.traces.clocks import count_from
from ringsim.traces.events import IN_FLIGHT, MARK, Events, Ints
from ringsim.traces.findings import Diagnosis
from ringsim.traces.matching import CollectiveCalls, match
from ringsim.traces.parts import PartReader
from ringsim.traces.run_parts import join_events, make_piece
from ringsim.traces.value import Trace

MOST_EVENTS = 5000
# if there are more, operations whose other side is missing are no longer kept
_MOST_KEPT = 4 * MOST_EVENTS


@dataclass(frozen=True, eq=False, repr=False)
class LiveTrace(Trace):
    """The newest part of a run that continues, so that nothing is diagnosed yet.

    It contains the newest events, and earlier operations that are still open. Times count from the
    first event of the run.

    Attributes:
        progress: the progress of the run in a few words.
    """

    progress: str = ""

    def explain(self) -> Diagnosis:
        """Returns a diagnosis without findings."""
        return Diagnosis((), self.world_size)

    def summary(self) -> str:
        """Returns a line for each rank: its state, since when, and the ranks that it waits for."""
        events, end_ns, ended = self.events, self.metadata["end_ns"], self.metadata["ended"]
        snapshot = snapshot_of_events(events, self.world_size, end_ns=end_ns)
        activity, lines = Activity(events, self.world_size), []
        for rank, view in enumerate(snapshot.ranks):
            mine = events.rank == rank
            if rank in ended:
                said = "has ended"
            elif view.awaited:
                one = view.awaited[0]
                peers = hindering(snapshot, one)
                whom = name_ranks(peers) if peers else "the transfer"
                said = f"waits {one.operation.waited_s:.1f} s for {whom}: {one.operation}"
            elif mine.any():
                since_ns = max(events.post_ns[mine].max(), events.done_ns[mine].max())
                doing = activity.doing(rank, end_ns - 1, end_ns)
                said = f"is {doing}, for {(end_ns - since_ns) * 1e-9:.1f} s"
            else:
                said = "has not begun"
            lines.append(f"rank {rank} {said}")
        return "\n".join(lines)


class Follower:
    """Follows a run, and shows it while it runs.

    Args:
        viewer: the viewer, from ``_open_viewer``, or None.
        world_size: the number of ranks.
    """

    _start_ns = 0  # no event was read yet

    def __init__(self, viewer: Any, world_size: int) -> None:
        self._viewer = viewer
        self._parts: list[PartReader] = []
        self._kept = [RankRecords(MARK) for _ in range(world_size)]

    def __call__(self, directory: Path, progress: str) -> str:
        """Reads new records, in limited amounts, and shows the run.

        Args:
            directory: the directory of the ranks' parts, always the same.
            progress: the progress of the run in a few words; if "", they come from the records.

        Returns:
            The text for the terminal, with a line for each rank if there is no viewer.
        """
        size, pieces = len(self._kept), []
        self._parts = self._parts or [PartReader(directory, rank, size) for rank in range(size)]
        for part, its in zip(self._parts, self._kept, strict=True):
            its.add(*part.advance())
            names = {  # only those that occur, which are few
                table: {number: known[number] for number in known.keys() & its.records[table]}
                for table, known in part.names.items()
            }
            pieces.append(make_piece(part.rank, its.records, names, 0, {}))
        events = join_events(pieces)
        keeps = _find_recent(events)
        for rank, its in enumerate(self._kept):
            its.keep(keeps[events.rank == rank])
        if not self._start_ns and len(events):
            self._start_ns = int(events.post_ns.min())
        metadata = {
            "world_size": size,
            "source": "measured",
            "end_ns": time.monotonic_ns() - self._start_ns,
            "ended": [part.rank for part in self._parts if "end_ns" in part.meta],
        }
        progress = progress or count_progress(self._parts) or "running"
        newest = count_from(events.select(keeps), self._start_ns)
        trace = LiveTrace(newest, metadata, progress=progress)
        if self._viewer is None:
            return f"{progress}\n{trace.summary()}"
        self._viewer.show(trace)
        return progress


def _find_recent(events: Events) -> Ints:
    """Marks the newest events, and earlier events that are open or whose other side is kept.

    All sides of a message or collective are forgotten together. Otherwise, the remaining operations
    would be matched incorrectly.
    """
    messages, calls = match(events), CollectiveCalls.of(events)
    since_ns = np.sort(events.post_ns)[-MOST_EVENTS:][:1]  # empty if there are no events
    recent = (events.post_ns >= since_ns) | (events.status == IN_FLIGHT)
    if len(events) <= _MOST_KEPT:  # the other side may still be unread
        recent[messages.unmatched] = True
        recent[calls.event[~calls.complete[calls.call]]] = True
    unit = np.arange(len(events))  # equal for all sides
    unit[messages.recv] = messages.send
    unit[calls.event] = calls.last[calls.call]
    return np.isin(unit, unit[recent])


def _open_viewer(world_size: int) -> Any:
    """Returns a viewer: a widget in a notebook, or a page if there are a terminal and a browser.

    A viewer has a method ``show(trace)``, and ``close()`` for the end. Returns None if there is
    neither a notebook nor a browser.
    """
    if in_notebook():
        name = "ringsim.view.notebook:LiveView"
    elif sys.stderr is not None and sys.stderr.isatty() and _has_browser():
        name = "ringsim.view.live:LivePage"
    else:
        return None
    return pkgutil.resolve_name(name)(world_size)  # by name, because it is on a higher floor


def _has_browser() -> bool:
    """Returns whether there is a browser that does not run in the terminal."""
    if sys.platform == "linux" and not os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"}:
        return False
    with suppress(webbrowser.Error):
        return bool(webbrowser.get())
    return False


def show_live(run: Callable[[Follower], Trace], world_size: int) -> Trace:
    """Calls ``run`` with a follower, to be called while the run lasts; shows and returns its trace.

    If the run fails, the trace of its error is shown.
    """
    viewer = _open_viewer(world_size)
    follower = Follower(viewer, world_size)
    if viewer is None:
        return run(follower)
    with closing(viewer):
        try:
            trace = run(follower)
        except (RingError, Interrupted) as error:
            if error.trace is not None:
                viewer.show(error.trace)
            raise
        viewer.show(trace)
        return trace
