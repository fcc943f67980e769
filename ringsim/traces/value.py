"""``Trace``: the record of a run, as tables and as text.

A trace comes from real ranks, from the simulator or from a file. It provides two pandas tables:
"events" has one row per event, and "messages" has one row per message. Strings are categoricals. A
value that does not apply, or a time that has not been reached, is NA and never -1, so that a
duration computed from it is NA rather than wrong. Times are in ns from the start of the run. The
``message_id`` of an event is the row of its message in the table "messages".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, Unpack

import numpy as np

from ringsim.errors import ArgumentError, RingError, escape_line, say
from ringsim.traces.clocks import RunClock, list_clocks
from ringsim.traces.display import Bundle, Images, Style, bundle
from ringsim.traces.events import (
    ANY_SOURCE,
    BYTE_KINDS,
    COLUMN_DTYPES,
    KIND_NAMES,
    NONE,
    OP_NAMES,
    STATUS_NAMES,
    Events,
    Ints,
    Tables,
)
from ringsim.traces.items import Event, event_at
from ringsim.traces.matching import (
    Messages,
    Unmatched,
    Waits,
    describe_unmatched,
    match,
    split_waits,
)
from ringsim.traces.stats import Stats, Tally
from ringsim.traces.steps import Bubble, PeakActivations, find_step, measure_bubble, measure_peaks

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from ringsim.link import Link
    from ringsim.traces.bandwidths import Bandwidths
    from ringsim.traces.documents import JsonObject, StrPath
    from ringsim.traces.findings import Diagnosis


def removed(name: str, instead: str) -> Callable[..., NoReturn]:
    """Returns a placeholder for a removed function; calling the placeholder raises RingError.

    The placeholder is kept for one version.

    Args:
        name: the name of the removed function.
        instead: the name of the replacement.

    Example:
        >>> try:
        ...     removed("to_old", "to_new")("run.old")
        ... except RingError as error:
        ...     print(error)
        to_old was removed in ringsim 0.3. Use to_new, or install ringsim 0.2.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        """Raises RingError, because this function was removed."""
        raise RingError(
            f"{name} was removed in ringsim 0.3. Use {instead}, or install ringsim 0.2."
        )

    return refuse


def part_of(metadata: JsonObject) -> JsonObject:
    """Returns the entry about the part of the run that a trace contains; see ``filtering``."""
    part: JsonObject = metadata.get("part", {"of": [], "apart": []})
    return part


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """The recorded events of a run, with the results and output of the ranks.

    A trace is displayed as pictures in a notebook, and as a summary in a terminal. Two traces are
    equal if their events and metadata are equal. Results, output and source code are not compared,
    because trace files need not contain them.

    Args:
        events: the events, one row each.
        metadata: where and how the run was measured or simulated; must be JSON-serializable.
        results: the worker's return value on each rank, in rank order. The list is empty if there
            was no worker, or if the trace was loaded from a file.
        output: the output of each rank, in rank order; empty in the same cases as ``results``.
        sources: the source code of the user's files and notebook cells, by the name of the file;
            the interactive page shows this code.
        recorded: for a trace from ``what_if``, the recorded trace, which pictures show behind the
            predicted one; otherwise None. It is neither compared nor saved.

    Example:
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> events = make_events(
        ...     {
        ...         "rank": [0, 1],
        ...         "op": [OP_CODES["send"], OP_CODES["recv"]],
        ...         "group": [-1, -1],
        ...         "peer": [1, 0],
        ...         "tag": [0, 0],
        ...         "post_ns": [0, 0],
        ...         "wait_ns": [0, 0],
        ...         "done_ns": [2000, 3000],
        ...     }
        ... )
        >>> trace = Trace(events, {"world_size": 2})
        >>> trace.world_size, len(trace.messages), trace.unmatched
        (2, 1, [])
        >>> trace.makespan_s
        3e-06
        >>> len(trace), [event.done_ns for event in trace]
        (2, [2000, 3000])
        >>> trace[1]
        rank 1: recv from 0 (tag 0) from 0 ns to 3 µs
    """

    events: Events
    metadata: JsonObject
    results: list[Any] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    recorded: Trace | None = None

    def __len__(self) -> int:
        """Returns the number of events."""
        return len(self.events)

    def __bool__(self) -> bool:
        """Returns True even if the trace has no events."""
        return True

    def __getitem__(self, index: SupportsIndex) -> Event:
        """Returns a single event as a small value; a negative index counts from the end."""
        return event_at(self.events, index)

    def __iter__(self) -> Iterator[Event]:
        """Yields the events by rank, then in posting order."""
        return map(self.__getitem__, range(len(self)))

    @property
    def world_size(self) -> int:
        """The number of ranks in the run, including ranks without events."""
        known = self.metadata.get("world_size")
        return known if isinstance(known, int) else int(self.events.rank.max(initial=-1)) + 1

    @cached_property
    def hosts(self) -> list[str]:
        """Each rank's host name, in rank order, or "" if unknown.

        In a simulation whose topology has hosts, their names are "host0", "host1", and so on.

        Example:
            >>> from ringsim.traces.events import make_events
            >>> Trace(
            ...     make_events({"rank": [], "op": []}),
            ...     {"world_size": 2, "ranks": [{"rank": 0, "host": "node7"}]},
            ... ).hosts
            ['node7', '']
        """
        constants, about = self.metadata.get("constants"), self.metadata.get("ranks", ())
        if isinstance(constants, dict) and (
            said := re.match(
                r"Hosts\(ranks_per_host=([1-9]\d{0,8}),", str(constants.get("topology"))
            )
        ):
            return [f"host{rank // int(said[1])}" for rank in range(self.world_size)]
        names = {one.get("rank"): escape_line(str(one.get("host") or "")) for one in about}
        return [names.get(rank, "") for rank in range(self.world_size)]

    @cached_property
    def host_numbers(self) -> Ints:
        """The number of each rank's host, counted from 0, or -1 if unknown (int64)."""
        names = dict.fromkeys(filter(None, self.hosts))
        numbers = {name: number for number, name in enumerate(names)} | {"": NONE}
        return np.array([numbers[name] for name in self.hosts], dtype=np.int64)

    def crosses(self, src: Any, dst: Any) -> Ints:
        """Returns a mask of the links (pairs of ranks) that connect two different, known hosts."""
        host = self.host_numbers
        crosses: Ints = (host[src] != host[dst]) & (host[src] != NONE) & (host[dst] != NONE)
        return crosses

    @cached_property
    def clocks(self) -> list[RunClock]:
        """The clocks of the machines that ran the ranks, starting with rank 0's clock.

        Each entry shows how the clock was compared with rank 0's clock. The list is empty if all
        ranks shared a single clock.
        """
        return list_clocks(self.events, self.metadata.get("clocks", []), self.hosts)

    @cached_property
    def makespan_s(self) -> float:
        """The time from the first post to the last recorded moment, in seconds.

        For a trace without events, the value is the simulated time, or 0 if unknown.
        """
        events = self.events
        if len(events) == 0:
            end_ns = (
                self.metadata.get("end_ns") if self.metadata.get("source") == "simulated" else 0
            )
            return end_ns * 1e-9 if type(end_ns) is int and 0 <= end_ns < 2**63 else 0.0
        return float(events.last_ns.max() - events.post_ns.min()) * 1e-9

    @property
    def apart(self) -> Ints:
        """The indices of the operations whose other side was left out, in ascending order.

        Only a part returned by ``filter`` can contain such operations.
        """
        return np.array(part_of(self.metadata)["apart"], dtype=np.int64)

    @cached_property
    def messages(self) -> Messages:
        """The matched sends and recvs, one row per message.

        NCCL ignores tags, so messages in NCCL runs, even simulated ones, are matched only by order.
        """
        by_tag = self.metadata.get("backend") not in ("nccl", "virtual clock, grouped")
        return match(self.events, by_tag=by_tag, apart=self.apart)

    @cached_property
    def waits(self) -> Waits:
        """The time that each event was blocked, split by cause."""
        return split_waits(self.events, self.messages)

    @cached_property
    def unmatched(self) -> list[Unmatched]:
        """The sends and recvs whose other side was never posted; each prints as a sentence."""
        return describe_unmatched(self.events, self.messages.unmatched)

    def filter(
        self,
        *,
        ranks: SupportsIndex | Iterable[SupportsIndex] | None = None,
        between_s: tuple[float, float] | None = None,
        ops: str | Iterable[str] | None = None,
        groups: str | Iterable[str] | None = None,
        steps: SupportsIndex | Iterable[SupportsIndex] | None = None,
    ) -> Trace:
        """Returns part of the trace: the events that meet all conditions.

        You can save, load and draw a part like any other trace. Ranks and times are the same as in
        the whole run, but steps are counted from 0 again. An operation whose other side is left out
        has no match, and the cause of its wait becomes unknown. ``summary()`` counts these
        operations, but ``unmatched`` does not list them.

        Args:
            ranks: the rank or ranks to keep.
            between_s: the begin and end of a time range, in seconds from the start of the run;
                events that overlap the range are kept.
            ops: torch's names for the operations to keep, or "span" or "mark".
            groups: the names of the process groups to keep; spans and marks belong to no group.
            steps: the indices of pipeline steps, counted from 0; events posted in these steps are
                kept.

        Raises:
            ArgumentError: the trace has no such rank, operation, group or step.

        Example:
            >>> from ringsim.traces.events import OP_CODES, make_events
            >>> events = make_events(
            ...     {
            ...         "rank": [0, 1],
            ...         "op": [OP_CODES["send"], OP_CODES["recv"]],
            ...         "group": [-1, -1],
            ...         "peer": [1, 0],
            ...         "tag": [0, 0],
            ...         "post_ns": [0, 0],
            ...         "wait_ns": [0, 0],
            ...         "done_ns": [2000, 3000],
            ...     }
            ... )
            >>> print(Trace(events, {"world_size": 2}).filter(ranks=1))
            Trace of 2 ranks
              part          ranks 1; 1 operation whose other side is left out
              messages      0 messages, 0 B, 1 event in 3 µs
              unmatched     none
        """
        from ringsim.traces.filtering import filter_trace

        conditions = ranks, between_s, ops, groups, steps
        behind = self.recorded and filter_trace(self.recorded, *conditions)
        return replace(filter_trace(self, *conditions), recorded=behind)

    def step(self, number: int) -> Trace:
        """Returns the part of the trace that was posted in one pipeline step.

        Args:
            number: the index of the step, counted from 0.

        Raises:
            ArgumentError: the trace has no such step.
        """
        return self.filter(steps=number)

    def redact(self) -> Trace:
        """Returns a copy of the trace that you can share.

        Paths are shortened to their last component, host names become "host0" and so on, and user
        names become "user". Results, output and source code are dropped. Other text from the
        program, such as the names of spans and groups, is kept, so check that it reveals nothing
        private.
        """
        from ringsim.traces.redaction import redact

        return redact(self)

    def to_pandas(self, which: str = "events") -> pd.DataFrame:
        """Returns the trace as a table.

        Args:
            which: "events" for one row per event, or "messages" for one row per message.

        Returns:
            A new pandas DataFrame. ``shape`` is a string such as "4x1024", or "" for a scalar.
            ``peer`` is NA for an unmatched recv from any source. In the "messages" table,
            ``late_sender_ns`` is how long the receiver was blocked before the send was posted,
            ``late_receiver_ns`` is how long the sender was blocked before the recv was posted, and
            ``transfer_ns`` is the time from the later of the two posts to the end of the recv.

        Raises:
            ArgumentError: ``which`` is not the name of a table.

        Example:
            >>> from ringsim.traces.events import OP_CODES, make_events
            >>> events = make_events(
            ...     {
            ...         "rank": [0, 1],
            ...         "op": [OP_CODES["send"], OP_CODES["recv"]],
            ...         "group": [-1, -1],
            ...         "peer": [1, 0],
            ...         "tag": [0, 0],
            ...         "post_ns": [0, 0],
            ...         "wait_ns": [0, 0],
            ...         "done_ns": [2000, 3000],
            ...     }
            ... )
            >>> Trace(events, {}).to_pandas("messages")[["src", "dst", "transfer_ns"]]
               src  dst  transfer_ns
            0    0    1         3000
        """
        if which not in ("events", "messages"):
            raise ArgumentError(
                f'which must be "events" or "messages", got {which!r}. Choose one of the two.'
            )
        import pandas as pd

        return pd.DataFrame(
            _list_events(self) if which == "events" else _list_messages(self), copy=True
        )

    def save(self, path: StrPath, *, source: bool = False) -> None:
        """Saves the trace to a single file, usually ``*.ringtrace``, completely or not at all.

        Read the file with ``ringsim.load``. Results and output are not saved, because a trace file
        contains only data, nothing executable. Your source code is saved only with ``source=True``.
        Anyone who has such a file can read the code.

        Args:
            path: the file to write; an existing file is replaced.
            source: whether the file contains ``sources``, which the page needs to show your code.

        Raises:
            TraceFileError: the file cannot be written.
        """
        from ringsim.traces.files import save

        save(self, path, source=source)

    def to_perfetto(self, path: StrPath) -> None:
        """Writes the trace for ui.perfetto.dev, usually to ``*.pftrace``.

        Read the file with ``ringsim.exchange.read_perfetto``, which restores the trace without
        results and output.

        Args:
            path: the file to write; an existing file is replaced.

        Raises:
            TraceFileError: the file cannot be written.
        """
        from ringsim.exchange.perfetto import to_perfetto

        to_perfetto(self, path)

    def to_chrome(self, path: StrPath) -> None:
        """Writes the trace in Chrome's Trace Event Format, usually to ``*.json``.

        Read the file with ``ringsim.exchange.read_chrome``, which restores the trace without
        results and output.

        Args:
            path: the file to write; an existing file is replaced.

        Raises:
            TraceFileError: the file cannot be written.
        """
        from ringsim.exchange.chrome import to_chrome

        to_chrome(self, path)

    to_goal = removed("Trace.to_goal", "Perfetto's format (to_perfetto)")
    to_chakra = removed("Trace.to_chakra", "Perfetto's format (to_perfetto)")
    to_otf2 = removed("Trace.to_otf2", "Perfetto's format (to_perfetto)")

    def to_html(self, path: StrPath, *, source: bool = False) -> None:
        """Writes the trace as a single interactive page, usually ``*.html``, that works offline.

        Args:
            path: the file to write; an existing file is replaced.
            source: whether the page contains your source code, as in ``save``.
        """
        from ringsim.view.html import to_html

        to_html(self, path, source=source)

    def view(self) -> Any:
        """Shows the interactive page from ``to_html`` in a notebook.

        Returns:
            The view, a ``ringsim.view.notebook.View``, which Python code can query and control.
        """
        from ringsim.view.notebook import view

        return view(self)

    def plot_ring(self, *, ax: Axes | None = None, **look: Unpack[Style]) -> Axes:
        """Draws the messages between ranks as a ring.

        Args:
            ax: the axes to draw on; by default, those of a new figure.
            **look: the style of the new figure, such as its size and theme; see `Style`.

        Returns:
            The axes.
        """
        from ringsim.plot.ring import plot_ring

        return plot_ring(self, ax=ax, **look)

    def plot_timeline(
        self,
        *,
        step: int | None = None,
        align: bool = True,
        ax: Axes | None = None,
        **look: Unpack[Style],
    ) -> Axes:
        """Draws a timeline of each rank.

        Args:
            step: the index of the pipeline step to draw, counted from 0. By default, if the trace
                contains steps, the last one is drawn.
            align: whether to align the times of different hosts; if False, each host's times are
                drawn as its own clock showed them.
            ax: the axes to draw on; by default, those of a new figure.
            **look: the style of the new figure, such as its size and theme; see `Style`.

        Returns:
            The axes.

        Raises:
            ArgumentError: the trace has no such step.
        """
        from ringsim.plot.timeline import plot_timeline

        return plot_timeline(self, step=step, align=align, ax=ax, **look)

    def plot_memory(self, *, ax: Axes | None = None, **look: Unpack[Style]) -> Axes:
        """Draws the timeline of the run, and below it the bytes of tensors on up to four ranks.

        Args:
            ax: the axes to draw on; by default, those of a new figure.
            **look: the style of the new figure, such as its size and theme; see `Style`.

        Returns:
            The axes of the timeline.

        Raises:
            ArgumentError: the ranks did not count bytes with `ringsim.memory`.
        """
        from ringsim.plot.tensor_bytes import plot_memory

        return plot_memory(self, ax=ax, **look)

    def plot_bandwidth(
        self, *, curve: Bandwidths | None = None, ax: Axes | None = None, **look: Unpack[Style]
    ) -> Axes:
        """Draws the bandwidth and duration of each message against its size.

        Args:
            curve: measured bandwidths to compare the messages with, or None.
            ax: the axes to draw on; by default, those of a new figure.
            **look: the style of the new figure, such as its size and theme; see `Style`.

        Returns:
            The axes.
        """
        from ringsim.plot.charts import plot_bandwidth

        return plot_bandwidth(self, curve=curve, ax=ax, **look)

    def stats(self) -> Stats:
        """Computes statistics for each operation on each group.

        The columns show the count, bytes, blocked times, bandwidths and share of the run.

        Returns:
            A table with one row per operation and group. Printing the table shows its rows, and
            ``to_pandas()`` returns a DataFrame.

        Example:
            >>> from ringsim.traces.events import OP_CODES, make_events
            >>> Trace(make_events({"rank": [0], "op": [OP_CODES["span"]]}), {}).stats()
            no operations were recorded
        """
        tally = Tally()
        tally.add(self.events)
        return tally.table(self.events.tables, self.world_size, self.makespan_s)

    def bubble(self, step: int | None = None) -> Bubble:
        """Measures how long the ranks of a pipeline are idle during one step.

        The result includes the value predicted by the schedule's closed form, if there is one.

        Args:
            step: the index of the step, counted from 0, or None for the last step.

        Returns:
            The bubble of each rank and of all ranks together, relative to both the makespan and the
            span.

        Raises:
            ArgumentError: the trace has no such step.
        """
        return measure_bubble(find_step(self, step))

    def peak_activations(self, step: int | None = None) -> PeakActivations:
        """Finds the peak number of live activations on each rank of a pipeline in one step.

        The result includes the values predicted by the schedule's closed form, if there is one.

        Args:
            step: the index of the step, counted from 0, or None for the last step.

        Returns:
            The peak on each rank.

        Raises:
            ArgumentError: the trace has no such step.
        """
        return measure_peaks(find_step(self, step))

    def memory(self) -> pd.DataFrame:
        """Returns the bytes of each rank's tensors at many times, as `ringsim.memory` counted them.

        Returns:
            A table with one row per count, and the columns ``rank``, ``time_ns``, ``parameters``,
            ``gradients``, ``optimizer``, ``activations`` and ``total``. The table is empty if the
            program did not count.

        Example:
            >>> from ringsim.traces.events import make_events
            >>> len(Trace(make_events({"rank": [], "op": []}), {}).memory())
            0
        """
        import pandas as pd

        counts = self.events.select(self.events.counts_bytes)
        payloads = [self.events.tables.payloads[number] for number in counts.payload.tolist()]
        kinds = pd.DataFrame([each.shape for each in payloads], columns=BYTE_KINDS)
        table = pd.DataFrame({"rank": counts.rank, "time_ns": counts.post_ns, **kinds})
        return table.assign(total=counts.size_bytes)

    def explain(self) -> Diagnosis:
        """Explains why the run failed or was slow.

        If a single change would make a slow run at least 5 % shorter, a note predicts its effect;
        see ``what_if``.

        Returns:
            The diagnosis. Printing the diagnosis shows it as text, and its ``plot()`` method draws
            a picture.
        """
        from ringsim.diagnose.explain import explain
        from ringsim.prediction.edits import advise

        return advise(self, explain(self))

    def what_if(
        self,
        *,
        ranks: Mapping[int, float] | None = None,
        link: Link | None = None,
        sends: str | None = None,
    ) -> Trace:
        """Predicts how long this run would take with changes, by replaying its recorded order.

        The replay keeps what each rank computed, and the order of its operations. It determines
        again how long the ranks wait for each other: a message leaves when both sides are posted,
        and a collective ends after its last member has entered. See
        ``ringsim.prediction.replaying`` for the rules.

        Args:
            ranks: factors for the computing times of ranks. With ``{2: 0.5}``, rank 2 computes for
                half as long. All its time outside communication operations counts as computing.
            link: the link that carries all messages and collectives, instead of the typical link of
                this run. Time beyond the typical time, such as a stall, remains.
            sends: "isend" to make each blocking ``send`` an ``isend``, which does not wait for the
                receiver. The program then waits for these sends at its end.

        Returns:
            A predicted trace. Its notes compare it with the replay without changes, and report how
            far this replay is off from the run, as do its summary and its explanation.
            ``recorded`` is this trace. Without arguments, the result is the replay without changes.

        Raises:
            ArgumentError: an argument is invalid, or this trace is not a whole run that was
                recorded and has finished.
            RingError: the recorded times contradict each other.

        Example:
            >>> from ringsim.traces.events import OP_CODES, make_events
            >>> events = make_events(
            ...     {
            ...         "rank": [0, 0, 1],
            ...         "op": [OP_CODES["span"], OP_CODES["send"], OP_CODES["recv"]],
            ...         "peer": [-1, 1, 0],
            ...         "tag": [-1, 0, 0],
            ...         "post_ns": [0, 8000, 0],
            ...         "wait_ns": [-1, 8000, 0],
            ...         "done_ns": [8000, 10_000, 10_000],
            ...     }
            ... )
            >>> predicted = Trace(events, {"world_size": 2}).what_if(ranks={0: 0.5})
            >>> predicted.makespan_s
            6e-06
            >>> print(predicted.metadata["notes"][0].partition(" (")[2])
            the replay itself is less than 1 % off): 6 µs instead of 10 µs
        """
        from ringsim.prediction.edits import what_if

        return what_if(self, ranks, link, sends)

    def summary(self) -> str:
        """Returns a summary of the trace in a few lines of text.

        The summary covers the ranks, messages, busiest edge, longest wait and missing records.

        Example:
            >>> from ringsim.traces.events import OP_CODES, Payload, Tables, make_events
            >>> tables = Tables(payloads=(Payload("float32", (1024,), 4096),))
            >>> events = make_events(
            ...     {
            ...         "rank": [0, 1],
            ...         "op": [OP_CODES["send"], OP_CODES["recv"]],
            ...         "group": [-1, -1],
            ...         "peer": [1, 0],
            ...         "tag": [0, 0],
            ...         "payload": [0, 0],
            ...         "post_ns": [500, 0],
            ...         "wait_ns": [500, 0],
            ...         "done_ns": [2000, 3000],
            ...     },
            ...     tables,
            ... )
            >>> print(
            ...     Trace(
            ...         events, {"world_size": 2, "source": "measured", "backend": "gloo"}
            ...     ).summary()
            ... )
            Trace of 2 ranks (measured, gloo)
              messages      1 message, 4 KiB, 2 events in 3 µs
              busiest edge  0 -> 1: 1 message, 4 KiB
              longest wait  rank 1 waited 500 ns in recv for rank 0 to send
              unmatched     none
        """
        from ringsim.traces.summary import count_trace

        return str(count_trace(self))

    def describe(self) -> str:
        """Returns a one-sentence description of the trace, as a text alternative to its picture.

        Example:
            >>> from ringsim.traces.events import make_events
            >>> Trace(make_events({"rank": [], "op": []}), {"world_size": 4}).describe()
            'Trace of 4 ranks that exchanged no messages in 0 ns.'
        """
        from ringsim.traces.summary import describe

        return describe(self)

    def __repr__(self) -> str:
        """Returns the summary."""
        return self.summary()

    def __eq__(self, other: object) -> bool:
        """Returns whether the events and the metadata are equal."""
        if not isinstance(other, Trace):
            return NotImplemented
        mine, theirs = self.events, other.events
        return (
            self.metadata == other.metadata
            and mine.tables == theirs.tables
            and all(
                np.array_equal(getattr(mine, name), getattr(theirs, name)) for name in COLUMN_DTYPES
            )
        )

    __hash__ = None  # type: ignore[assignment]  # compared by content, which is mutable

    def _repr_mimebundle_(self, **_: Any) -> Bundle:
        """Returns the text and, if there are events, the pictures for Jupyter to show."""
        if not len(self.events):
            return {"text/plain": self.summary()}, {}
        return bundle(self.summary(), self.describe(), self._draw)

    def _draw(self) -> Images:
        from ringsim.plot.timeline import trace_images

        return trace_images(self)


def check_trace(name: str, value: object) -> None:
    """Raises ArgumentError unless the argument named ``name`` is a trace."""
    if not isinstance(value, Trace):
        raise ArgumentError(
            f"{name} must be a Trace, got {say(value)}. Pass the result of "
            "ringsim.trace, ringsim.simulate or ringsim.load."
        )


# -- as tables


def _list_events(trace: Trace) -> dict[str, Any]:
    events, messages, tables = trace.events, trace.messages, trace.events.tables
    message_id = np.full(len(events), NONE, dtype=np.int64)
    message_id[messages.send] = message_id[messages.recv] = np.arange(len(messages))
    peer = np.where(events.peer == ANY_SOURCE, NONE, events.peer)
    dtype, shape = _payload_words(tables)
    return {
        "run": _words(
            np.zeros(len(events), dtype=np.int8), [str(trace.metadata.get("run_id", ""))]
        ),
        "rank": events.rank,
        "thread": events.thread,
        "seq": events.seq,
        "kind": _words(events.kind, KIND_NAMES),
        "op": _words(events.op, OP_NAMES),
        "group": _words(events.group, [group.name for group in tables.groups]),
        "peer": _numbers(peer),
        "tag": _numbers(events.tag),
        "size_bytes": _numbers(events.size_bytes),
        "dtype": _words(events.payload, dtype),
        "shape": _words(events.payload, shape),
        "stage": _numbers(events.stage),
        "microbatch": _numbers(events.microbatch),
        "label": _words(events.label, tables.labels),
        "file": _words(events.file, tables.files),
        "line": _numbers(events.line),
        "post_ns": events.post_ns,
        "wait_ns": _numbers(events.wait_ns),
        "done_ns": _numbers(events.done_ns),
        "status": _words(events.status, STATUS_NAMES),
        "message_id": _numbers(message_id),
    }


def _list_messages(trace: Trace) -> dict[str, Any]:
    events, messages, waits = trace.events, trace.messages, trace.waits
    send, recv = messages.send, messages.recv
    dtype, shape = _payload_words(events.tables)
    recv_done = events.done_ns[recv]
    both_posted = np.maximum(events.post_ns[send], events.post_ns[recv])
    return {
        "src": messages.src,
        "dst": messages.dst,
        "tag": _numbers(messages.tag),
        "group": _words(messages.group, [group.name for group in events.tables.groups]),
        "size_bytes": _numbers(events.size_bytes[send]),
        "dtype": _words(messages.payload, dtype),
        "shape": _words(messages.payload, shape),
        "send_post_ns": events.post_ns[send],
        "send_done_ns": _numbers(events.done_ns[send]),
        "recv_post_ns": events.post_ns[recv],
        "recv_done_ns": _numbers(recv_done),
        "late_sender_ns": waits.late_sender_ns[recv],
        "late_receiver_ns": waits.late_receiver_ns[send],
        "transfer_ns": _numbers(
            np.where(recv_done == NONE, NONE, np.maximum(recv_done - both_posted, 0))
        ),
        "stage": _numbers(messages.stage),
        "microbatch": _numbers(messages.microbatch),
    }


def _numbers(values: Ints) -> pd.api.extensions.ExtensionArray:
    """Converts integers to a nullable column (Int32 or Int64) in which -1 becomes NA."""
    import pandas as pd

    return pd.arrays.IntegerArray(np.array(values), values == NONE)


def _words(codes: Ints, names: Any) -> pd.Categorical:
    """Returns a categorical of ``names[code]`` for each code, with NA for -1 and for None.

    Equal names share one category.
    """
    import pandas as pd

    number_of, unique = pd.factorize(np.array([*names, None], dtype=object))
    return pd.Categorical.from_codes(number_of[codes], categories=pd.Index(unique, dtype="str"))


def _payload_words(tables: Tables) -> tuple[list[str | None], list[str | None]]:
    """Returns the payloads' dtypes and shapes as strings.

    Both are None for a payload without data, such as a barrier's.
    """
    dtypes = [payload.dtype or None for payload in tables.payloads]
    return dtypes, [
        "x".join(map(str, payload.shape)) if payload.dtype else None for payload in tables.payloads
    ]
