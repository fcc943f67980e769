"""The view in a notebook: the page from ``html`` as a widget for Python to query and control.

The widget stores only the window and the selection, so that saved notebooks stay small. The kernel
sends the traces in a message when a view requests them. Without a kernel, the widget shows nothing,
but the picture below it is a separate output and stays visible.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anywidget
import pandas as pd
import traitlets
from IPython.display import display

from ringsim.errors import ArgumentError, say
from ringsim.launch.live import LiveTrace
from ringsim.traces.documents import JsonObject
from ringsim.traces.events import NO_EVENTS
from ringsim.traces.findings import Finding
from ringsim.traces.units import count
from ringsim.traces.value import Trace
from ringsim.view.html import (
    PROGRAM,
    Traces,
    align,
    check_runs,
    find,
    find_begin_ns,
    pack_all,
    page_body,
    part,
)

_STYLE = (
    ".ringsim { min-height: 560px; border: 1px solid var(--line); }"
    ".ringsim .side > canvas { width: min(100%, 220px); }"
)


class _Widget(anywidget.AnyWidget):
    """The widget state that a notebook stores: the program and a few numbers."""

    _page = page_body("", ())
    _esm = (
        f"{part(*PROGRAM, 'choices.js', 'widget.js')}\nconst [PAGE, STYLE] = "
        f"{json.dumps([_page, part('style.css') + _STYLE])};\n"
    )
    # the begin and end in ns on the axis; empty for the whole run
    window: traitlets.List[float] = traitlets.List().tag(sync=True)
    # the index of a trace, and of an event in that trace; empty if nothing is selected
    selected: traitlets.List[int] = traitlets.List().tag(sync=True)
    # an explorer's choices, and the chosen values
    choices: traitlets.List[Any] = traitlets.List().tag(sync=True)
    chosen: traitlets.List[Any] = traitlets.List().tag(sync=True)


def view(traces: Traces) -> View:
    """Shows traces interactively in a notebook.

    You can zoom, hover, search and play. Python code can read the selection and control the view.

    Args:
        traces: a trace, or up to 8 traces to draw on one axis, aligned at their first operations.

    Returns:
        The view. On the last line of a cell, the view displays itself, with the trace's picture
        below.

    Raises:
        ArgumentError: there are no traces, or too many.

    Example:
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> shown = view(
        ...     Trace(
        ...         make_events(
        ...             {"rank": [0], "op": [OP_CODES["barrier"]], "post_ns": [0], "done_ns": [5]}
        ...         ),
        ...         {"world_size": 1},
        ...     )
        ... )
        >>> shown.window, len(shown.selection)
        ((0.0, 5e-09), 1)
    """
    return View(check_runs(traces))


class View:
    """An interactive view of traces in a notebook, based on anywidget.

    Attributes:
        traces: the traces in the view.
        widget: the bare widget, which you can combine with other widgets (``ipywidgets.HBox``).
        about: further values that the widget receives with the traces.
    """

    def __init__(self, traces: Sequence[Trace], about: JsonObject | None = None) -> None:
        self.traces = tuple(traces)
        self.about = about or {}
        self.widget = _Widget()
        self.widget.on_msg(lambda *_: self._send())  # a view requests the traces
        self._version = 0

    @property
    def window(self) -> tuple[float, float]:
        """The begin and end of the visible time range, in seconds from the start of the run.

        You can also set the range. Several traces share one axis, on which their first operations
        are aligned. The range then has the times of the trace that begins last.
        """
        if self.widget.window:
            from_ns, until_ns = self.widget.window
            return from_ns / 1e9, until_ns / 1e9
        begin_s = max(map(find_begin_ns, self.traces)) / 1e9
        return begin_s, begin_s + max(trace.makespan_s for trace in self.traces)

    @window.setter
    def window(self, between_s: tuple[float, float]) -> None:
        from_s, until_s = between_s
        if not from_s < until_s:
            raise ArgumentError(
                "window must be two times in seconds, the earlier one first, got "
                f"{say(between_s)}. Use, for example, window = (0.5, 0.7)."
            )
        self.widget.window = [from_s * 1e9, until_s * 1e9]

    @property
    def selection(self) -> pd.DataFrame:
        """The selection, as rows of ``trace.to_pandas()``.

        If an event is selected, the rows are this event and its other side. Otherwise, they are all
        events that overlap the window. If the view has several traces, the rows come from the trace
        with the selected event, or from the first trace if no event is selected.
        """
        number, *chosen = self.widget.selected or [0]
        trace = self.traces[number]
        rows = trace.to_pandas()
        if chosen:
            message = rows["message_id"][chosen[0]]
            return (
                rows.loc[chosen]
                if message is pd.NA
                else rows[(rows["message_id"] == message).fillna(False)]
            )
        if not self.widget.window:
            return rows
        later_ns = align(self.traces)[number]
        from_ns, until_ns = (time_ns - later_ns for time_ns in self.widget.window)
        return rows[(rows["post_ns"] <= until_ns) & ~(rows["done_ns"] < from_ns).fillna(False)]

    def goto(self, what: Finding | int) -> None:
        """Selects an event and brings it into view.

        Args:
            what: a finding from ``trace.explain()``, or an event's row number in
                ``trace.to_pandas()``; the index of ``selection`` shows these numbers.

        Raises:
            ArgumentError: no trace in this view has such a finding or event.
        """
        for number, trace in enumerate(self.traces):
            event = (
                find(trace.events, what.operations[0])
                if isinstance(what, Finding) and what.operations
                else what
            )
            if isinstance(event, int) and 0 <= event < len(trace.events):
                self.widget.selected = [number, event]
                self.widget.send({"select": [number, event]})
                return
        raise ArgumentError(
            f"what must be a finding or an event's row number, got {say(what)}. Choose one "
            "from the traces in this view."
        )

    def show(self, traces: Traces) -> None:
        """Replaces the traces in the view.

        Args:
            traces: a trace, or up to 8 traces to draw on one axis, aligned at their first
                operations.

        Raises:
            ArgumentError: there are no traces, or too many.
        """
        self.traces = check_runs(traces)
        with self.widget.hold_sync():  # sends both in one message
            self.widget.selected, self.widget.window = [], []
        self._version += 1
        self._send()

    def _send(self) -> None:
        message = {"version": self._version, **self.about}
        self.widget.send(message, buffers=pack_all(self.traces, source=True))

    def __repr__(self) -> str:
        """Returns a description of the view; saved notebooks show it without a kernel."""
        shown = " and ".join(count(trace.world_size, "rank") for trace in self.traces)
        return (
            f"Interactive view of {shown}. Run this cell to zoom, search "
            "and play. A picture of the run is below."
        )

    def display_widget(self) -> None:
        """Displays the view, without the pictures."""
        data, _ = self.widget._repr_mimebundle_() or ({}, {})
        display({**data, "text/plain": repr(self)}, raw=True)

    def _ipython_display_(self) -> None:
        self.display_widget()
        for trace in self.traces:
            display(trace)


class LiveView(View):
    """A view that shows a run while it runs; see ``ringsim.launch.live``.

    Args:
        world_size: the number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__([Trace(NO_EVENTS, {"world_size": world_size})])
        self.display_widget()

    def show(self, traces: Traces) -> None:
        """Shows the newest part of the run or, at the end, the whole run."""
        if isinstance(traces, LiveTrace):
            self.widget.send({"live": True}, buffers=pack_all([traces]))
        else:
            super().show(traces)

    def close(self) -> None:
        """Does nothing, because the notebook keeps the view."""
