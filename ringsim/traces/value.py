"""``Trace``: what a run leaves behind, whether it came from real ranks, from the simulator or from a file; as tables and in words.

There are two pandas tables: "events" has one row an event, "messages" one row a message. Words are categoricals. What does not apply, or
has not come yet, is NA and never -1, so that a duration computed from it is NA too, and not a wrong number. Times are ns from the start of
the run. ``message_id`` of an event is the row of its message in the other table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, Unpack

import numpy as np

from ringsim.environment import count_crossings
from ringsim.errors import ArgumentError, escape, say
from ringsim.traces.clocks import Clock, list_clocks
from ringsim.traces.collectives import COLLECTIVES
from ringsim.traces.events import ANY_SOURCE, COLLECTIVE, COLUMN_DTYPES, KIND_NAMES, NONE, OP_NAMES, STATUS_NAMES, Events, Ints, Tables
from ringsim.traces.items import Event, event_at
from ringsim.traces.lazy import Style, bundle, resolve
from ringsim.traces.matching import Messages, Unmatched, Waits, describe_unmatched, match, split_waits
from ringsim.traces.stats import OperationStats, Stats, measure_stats
from ringsim.traces.steps import Bubble, PeakActivations, count_steps, find_step, measure_bubble, measure_peaks
from ringsim.traces.units import bytes_text, rate_text, time_text

if TYPE_CHECKING:
    from os import PathLike

    import pandas as pd
    from matplotlib.axes import Axes

    from ringsim.traces.bandwidths import Bandwidths
    from ringsim.traces.findings import Diagnosis

__all__ = ["Trace", "check_trace", "count"]


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
        >>> events = make_events({"rank": [0, 1], "op": [OP_CODES["send"], OP_CODES["recv"]], "group": [-1, -1], "peer": [1, 0],
        ...                       "tag": [0, 0], "post_ns": [0, 0], "wait_ns": [0, 0], "done_ns": [2000, 3000]})
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
    metadata: dict[str, Any]
    results: list[Any] = field(default_factory=list)
    output: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        """Returns the number of events."""
        return len(self.events)

    def __bool__(self) -> bool:
        """A trace is true, also that of a run in which nothing happened."""
        return True

    def __getitem__(self, index: SupportsIndex) -> Event:
        """Returns one event as a small value; an index below 0 counts from the end."""
        return event_at(self.events, index)

    def __iter__(self) -> Iterator[Event]:
        """Yields the events by rank, then in the order of posting."""
        return map(self.__getitem__, range(len(self)))

    @property
    def world_size(self) -> int:
        """Number of ranks in the run, those included that left no event."""
        known = self.metadata.get("world_size")
        return known if isinstance(known, int) else int(self.events.rank.max(initial=-1)) + 1

    @cached_property
    def hosts(self) -> list[str]:
        """Name of each rank's host, by rank; "" where it is not known. A simulation with a topology of hosts calls them "host0", ...

        Example:
            >>> from ringsim.traces.events import make_events
            >>> Trace(make_events({"rank": [], "op": []}), {"world_size": 2, "ranks": [{"rank": 0, "host": "node7"}]}).hosts
            ['node7', '']
        """
        constants, about = self.metadata.get("constants"), self.metadata.get("ranks", ())
        if isinstance(constants, dict) and (said := re.match(r"Hosts\(ranks_per_host=([1-9]\d{0,8}),", str(constants.get("topology")))):
            return [f"host{rank // int(said[1])}" for rank in range(self.world_size)]
        names = {one.get("rank"): escape(str(one.get("host") or ""), lines=False) for one in about}
        return [names.get(rank, "") for rank in range(self.world_size)]

    def crosses(self, src: Any, dst: Any) -> Ints:
        """Tells which links, given by their two ranks, lead from one known host to another."""
        known = {name: number for number, name in enumerate(dict.fromkeys(filter(None, self.hosts)))}
        host = np.array([known.get(name, NONE) for name in self.hosts], dtype=np.int64)
        crosses: Ints = (host[src] != host[dst]) & (host[src] != NONE) & (host[dst] != NONE)
        return crosses

    @cached_property
    def clocks(self) -> list[Clock]:
        """The clocks of the machines that ran the ranks, rank 0's first, as they were compared; empty where all ranks had one clock."""
        return list_clocks(self.events, self.metadata.get("clocks", []), self.hosts)

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from the first event posted to the last moment recorded; without events those that were simulated, or 0."""
        events = self.events
        if len(events) == 0:
            end_ns = self.metadata.get("end_ns") if self.metadata.get("source") == "simulated" else 0
            return end_ns * 1e-9 if type(end_ns) is int and 0 <= end_ns < 2**63 else 0.0
        last = max(events.post_ns.max(), events.wait_ns.max(), events.done_ns.max())
        return float(last - events.post_ns.min()) * 1e-9

    @property
    def apart(self) -> Ints:
        """Of a part that ``filter`` made, the places of the operations whose other side was left out, ascending."""
        places = self.metadata["part"]["apart"] if "part" in self.metadata else []
        return np.array(places, dtype=np.int64)

    @cached_property
    def messages(self) -> Messages:
        """Sends and recvs that met, one row a message. NCCL, also simulated, ignores tags: there the order alone decides."""
        by_tag = self.metadata.get("backend") not in ("nccl", "virtual clock, grouped")
        return match(self.events, by_tag=by_tag, apart=self.apart)

    @cached_property
    def waits(self) -> Waits:
        """How long each event was blocked, and why."""
        return split_waits(self.events, self.messages)

    @cached_property
    def unmatched(self) -> list[Unmatched]:
        """Sends and recvs whose other side was never posted, each readable as a sentence."""
        return describe_unmatched(self.events, self.messages)

    def filter(
        self,
        *,
        ranks: SupportsIndex | Iterable[SupportsIndex] | None = None,
        between_s: tuple[float, float] | None = None,
        ops: str | Iterable[str] | None = None,
        groups: str | Iterable[str] | None = None,
        steps: SupportsIndex | Iterable[SupportsIndex] | None = None,
    ) -> Trace:
        """Returns a part of the trace: the events that meet all conditions. It is saved, loaded and drawn like any other.

        Ranks and times stay those of the run; steps are counted anew. An operation whose other side is left out matches nothing: why it
        was blocked is not known any more. ``summary()`` counts these, and ``unmatched`` does not.

        Args:
            ranks: one, or several.
            between_s: a stretch of time, in seconds from the start of the run; what lies in it with one end only is in it.
            ops: names of operations as torch spells them, "span" or "mark".
            groups: names of process groups; spans and marks are of none.
            steps: of a pipeline, from 0; what was posted in them.

        Raises:
            ArgumentError: the trace has no such rank, operation, group or step.

        Example:
            >>> from ringsim.traces.events import OP_CODES, make_events
            >>> events = make_events({"rank": [0, 1], "op": [OP_CODES["send"], OP_CODES["recv"]], "group": [-1, -1], "peer": [1, 0],
            ...                       "tag": [0, 0], "post_ns": [0, 0], "wait_ns": [0, 0], "done_ns": [2000, 3000]})
            >>> print(Trace(events, {"world_size": 2}).filter(ranks=1))
            Trace of 2 ranks
              part          ranks 1; 1 operation whose other side is left out
              messages      0 messages, 0 B, 1 event in 3 µs
              unmatched     none
        """
        part: Trace = resolve("filter")(self, ranks, between_s, ops, groups, steps)
        return part

    def step(self, number: int) -> Trace:
        """Returns the part that was posted in one step of a pipeline, counted from 0; raises ArgumentError if there is none."""
        return self.filter(steps=number)

    def redact(self) -> Trace:
        """Returns the trace to hand on: paths keep their last part, hosts become "host0", users "user"; results and output are dropped.

        What else the program wrote, such as names of spans and groups, stays: look whether it says more than it should.
        """
        shared: Trace = resolve("redact")(self)
        return shared

    def to_pandas(self, which: str = "events") -> pd.DataFrame:
        """Gives the trace as a table.

        Args:
            which: "events" for one row an event, "messages" for one row a message.

        Returns:
            A new pandas DataFrame. ``shape`` reads "4x1024", and "" for a scalar. ``peer`` is NA for a recv from any source that has not
            met its sender. In the messages, ``late_sender_ns`` is how long the receiver was blocked before the send was posted,
            ``late_receiver_ns`` the reverse, and ``transfer_ns`` the time from the later of the two posts to the end of the recv.

        Raises:
            ArgumentError: ``which`` names no table.

        Example:
            >>> from ringsim.traces.events import OP_CODES, make_events
            >>> events = make_events({"rank": [0, 1], "op": [OP_CODES["send"], OP_CODES["recv"]], "group": [-1, -1], "peer": [1, 0],
            ...                       "tag": [0, 0], "post_ns": [0, 0], "wait_ns": [0, 0], "done_ns": [2000, 3000]})
            >>> Trace(events, {}).to_pandas("messages")[["src", "dst", "transfer_ns"]]
               src  dst  transfer_ns
            0    0    1         3000
        """
        if which not in ("events", "messages"):
            raise ArgumentError(f'which must be "events" or "messages", got {which!r}. Choose one of the two tables.')
        import pandas as pd

        return pd.DataFrame(_list_events(self) if which == "events" else _list_messages(self), copy=True)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the trace to one file, usually ``*.ringtrace``, all of it or nothing; ``ringsim.load`` reads it.

        Results and output stay behind: a file holds numbers and names, nothing that could be executed.

        Args:
            path: where to; an existing file is replaced.

        Raises:
            TraceFileError: the file cannot be written.
        """
        resolve("save")(self, path)

    def to_perfetto(self, path: str | PathLike[str]) -> None:
        """Writes the trace as ui.perfetto.dev opens it, usually ``*.pftrace``; ``ringsim.exchange.perfetto`` says what it shows."""
        resolve("to_perfetto")(self, path)

    def to_chrome(self, path: str | PathLike[str]) -> None:
        """Writes the trace in Chrome's Trace Event Format, usually ``*.json``; ``ringsim.exchange.chrome`` says what it shows."""
        resolve("to_chrome")(self, path)

    def to_goal(self, path: str | PathLike[str]) -> None:
        """Writes the trace as a program for LogGOPSim and ATLAHS, usually ``*.goal``; ``ringsim.exchange.goal`` says what is in it."""
        resolve("to_goal")(self, path)

    def to_chakra(self, directory: str | PathLike[str]) -> None:
        """Writes the trace as Chakra execution traces, a file a rank; ``ringsim.exchange.chakra`` says what is in them."""
        resolve("to_chakra")(self, directory)

    def to_otf2(self, directory: str | PathLike[str]) -> None:
        """Writes the trace as an archive of OTF2, for Vampir and Scalasca; ``ringsim.exchange.otf2`` says what is in it."""
        resolve("to_otf2")(self, directory)

    def to_html(self, path: str | PathLike[str]) -> None:
        """Writes the trace as one interactive page, usually ``*.html``: zoom, hover, search, play; it needs no network."""
        resolve("to_html")(self, path)

    def view(self) -> Any:
        """Shows the page of ``to_html`` in a notebook; ``ringsim.view.notebook.View`` says what Python can ask of it."""
        return resolve("view")(self)

    def plot_ring(self, *, ax: Axes | None = None, **look: Unpack[Style]) -> Axes:
        """Draws who sent to whom, as a ring; on ``ax`` where given, else on a new figure that ``look`` describes."""
        axes: Axes = resolve("plot_ring")(self, ax=ax, **look)
        return axes

    def plot_timeline(self, *, step: int | None = None, align: bool = True, ax: Axes | None = None, **look: Unpack[Style]) -> Axes:
        """Draws what each rank did when; on ``ax`` where given, else on a new figure.

        Args:
            step: of a pipeline's trace, which step, from 0; None for the last one.
            align: whether times of several hosts are aligned; False draws what each host's own clock showed.
            ax: where to draw.
            **look: size, theme and so on of the new figure, see `Style`.

        Returns:
            The axes.

        Raises:
            ArgumentError: the trace has no such step.
        """
        axes: Axes = resolve("plot_timeline")(self, step=step, align=align, ax=ax, **look)
        return axes

    def plot_bandwidth(self, *, curve: Bandwidths | None = None, ax: Axes | None = None, **look: Unpack[Style]) -> Axes:
        """Draws what bandwidth and time each message achieved; ``curve``, a measured table, stands behind them, ``look`` the figure's."""
        axes: Axes = resolve("plot_bandwidth")(self, curve=curve, ax=ax, **look)
        return axes

    def stats(self) -> Stats:
        """Computes a table with one row for each operation and group: count, bytes, blocked times, bandwidths, share of the run.

        Returns:
            The table; it prints itself, and ``to_pandas()`` makes a DataFrame of it.

        Example:
            >>> from ringsim.traces.events import OP_CODES, make_events
            >>> Trace(make_events({"rank": [0], "op": [OP_CODES["span"]]}), {}).stats()
            no operation was recorded
        """
        return measure_stats(self.events, self.world_size, self.makespan_s)

    def bubble(self, step: int | None = None) -> Bubble:
        """Measures how long the ranks of a pipeline did not compute in one step, beside what the schedule's closed form says.

        Args:
            step: which step, from 0; None for the last one.

        Returns:
            The bubble by rank and in all, by makespan and by span.

        Raises:
            ArgumentError: the trace has no such step.
        """
        return measure_bubble(find_step(self, step))

    def peak_activations(self, step: int | None = None) -> PeakActivations:
        """Counts the most activations that each rank of a pipeline held at a time in one step, beside what the closed form says.

        Args:
            step: which step, from 0; None for the last one.

        Returns:
            The peaks by rank.

        Raises:
            ArgumentError: the trace has no such step.
        """
        return measure_peaks(find_step(self, step))

    def explain(self) -> Diagnosis:
        """Says why the run ended as it did, or what made it slow; printing what it returns gives sentences, ``plot()`` a picture."""
        diagnosis: Diagnosis = resolve("explain")(self)
        return diagnosis

    def summary(self) -> str:
        """Returns the trace in a few lines of text: ranks, messages, the busiest edge, the longest wait, what is missing.

        Example:
            >>> from ringsim.traces.events import OP_CODES, Payload, Tables, make_events
            >>> tables = Tables(payloads=(Payload("float32", (1024,), 4096),))
            >>> events = make_events({"rank": [0, 1], "op": [OP_CODES["send"], OP_CODES["recv"]], "group": [-1, -1], "peer": [1, 0],
            ...                       "tag": [0, 0], "payload": [0, 0], "post_ns": [500, 0], "wait_ns": [500, 0],
            ...                       "done_ns": [2000, 3000]}, tables)
            >>> print(Trace(events, {"world_size": 2, "source": "measured", "backend": "gloo"}).summary())
            Trace of 2 ranks (measured, gloo)
              messages      1 message, 4 KiB, 2 events in 3 µs
              busiest edge  0 -> 1: 1 message, 4 KiB
              longest wait  rank 1 waited 500 ns in recv for rank 0 to send
              unmatched     none
        """
        return _summarise(self)

    def describe(self) -> str:
        """Returns the trace in one sentence, for those who cannot see its picture.

        Example:
            >>> from ringsim.traces.events import make_events
            >>> Trace(make_events({"rank": [], "op": []}), {"world_size": 4}).describe()
            'Trace of 4 ranks that exchanged no message in 0 ns.'
        """
        return _describe(self)

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
    """Raises ArgumentError unless an argument, called ``name``, is a trace."""
    if not isinstance(value, Trace):
        raise ArgumentError(f"{name} must be a Trace, got {say(value)}. Pass what ringsim.trace, simulate or load returns.")


# -- as tables


def _list_events(trace: Trace) -> dict[str, Any]:
    events, messages, tables = trace.events, trace.messages, trace.events.tables
    message_id = np.full(len(events), NONE, dtype=np.int64)
    message_id[messages.send] = message_id[messages.recv] = np.arange(len(messages))
    peer = np.where(events.peer == ANY_SOURCE, NONE, events.peer)
    dtype, shape = _payload_words(tables)
    return {
        "run": _words(np.zeros(len(events), dtype=np.int8), [str(trace.metadata.get("run_id", ""))]),
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
        "transfer_ns": _numbers(np.where(recv_done == NONE, NONE, np.maximum(recv_done - both_posted, 0))),
        "stage": _numbers(messages.stage),
        "microbatch": _numbers(messages.microbatch),
    }


def _numbers(values: Ints) -> pd.api.extensions.ExtensionArray:
    """Makes a nullable column (Int32 or Int64) in which -1 is NA."""
    import pandas as pd

    return pd.arrays.IntegerArray(np.array(values), values == NONE)


def _words(codes: Ints, names: Any) -> pd.Categorical:
    """Makes a categorical of ``names[code]``, NA for -1 and for a name of None; names that several codes share become one category."""
    import pandas as pd

    unique = {name: number for number, name in enumerate(dict.fromkeys(name for name in names if name is not None))}
    number_of = np.array([unique.get(name, NONE) for name in names] + [NONE], dtype=np.int64)
    return pd.Categorical.from_codes(number_of[codes], categories=pd.Index(list(unique), dtype="str"))


def _payload_words(tables: Tables) -> tuple[list[str | None], list[str | None]]:
    """Returns the dtype and the shape of each payload as words, None for one that carries nothing (a barrier's)."""
    dtypes = [payload.dtype or None for payload in tables.payloads]
    return dtypes, ["x".join(map(str, payload.shape)) if payload.dtype else None for payload in tables.payloads]


# -- in words

_SHOWN = 3  # lines of one sort before "and n more"


def _summarise(trace: Trace) -> str:
    events, metadata = trace.events, trace.metadata
    about = ", ".join(str(metadata[key]) for key in ("source", "backend", "date") if metadata.get(key))
    total, lasted = int(np.maximum(events.size_bytes[trace.messages.send], 0).sum()), time_text(trace.makespan_s * 1e9)
    lines = [
        f"Trace of {count(trace.world_size, 'rank')}" + (f" ({about})" if about else ""),
        *_say_part(trace),
        f"  messages      {count(len(trace.messages), 'message')}, {bytes_text(total)}, {count(len(events), 'event')} in {lasted}",
    ]
    edge = _busiest_edge(trace)
    if edge is not None:
        others = f" and {count(edge.equals, 'other')} alike" if edge.equals else ""
        lines.append(f"  busiest edge  {edge.src} -> {edge.dst}{others}: {count(edge.number, 'message')}, {bytes_text(edge.total_bytes)}")
        lines.append(f"  longest wait  {_longest_wait(trace) or 'nobody waited for a partner'}")
    lines += _summarise_hosts(trace)
    lines += _summarise_collectives(trace)
    if count_steps(events):
        lines.append(f"  pipeline      {_last_step(trace)}")
    unmatched = trace.unmatched
    lines.append(f"  unmatched     {count(len(unmatched), 'operation') if unmatched else 'none'}")
    lines += _some([f"    {operation!r}" for operation in unmatched])
    lines += _some([f"  note: {note}" for note in metadata.get("notes", ())])
    lines += _some([f"  not recorded: {what}" for what in metadata.get("not_recorded", ())])
    return "\n".join(lines)


def _say_part(trace: Trace) -> list[str]:
    """Returns a line that says what a part of a trace is of, and how much in it is apart."""
    if "part" not in trace.metadata:
        return []
    apart = f"{count(len(trace.apart), 'operation')} whose other side is left out"
    return [f"  part          {'; '.join([*trace.metadata['part']['of'], *([apart] if len(trace.apart) else [])])}"]


def _summarise_hosts(trace: Trace) -> list[str]:
    """Returns how well times of several hosts compare, and what went within hosts and across; nothing where there was one host."""
    names = list(dict.fromkeys(filter(None, trace.hosts)))
    if len(names) < 2 and not trace.clocks:
        return []
    messages, early = trace.messages, int(trace.messages.early.sum())
    known = [clock.uncertainty_ns for clock in trace.clocks]
    exact = [time_ns for time_ns in known if time_ns is not None]
    clocks = [] if not known else ["clocks not all compared" if len(exact) < len(known) else f"clocks known to ±{time_text(max(exact))}"]
    clocks += [f"{count(early, 'message')} arrived before being sent"] if early or known else []
    more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    lines = [f"  hosts         {'; '.join([', '.join([*names[:_SHOWN], *more]), *clocks])}"]
    crosses = trace.crosses(messages.src, messages.dst)
    for where, chosen in (("within hosts", ~crosses), ("across hosts", crosses)):
        lines += [f"    {where}: {_say_messages(trace, chosen)}"] if chosen.any() else []
    return lines + _say_crossings(trace)


def _say_crossings(trace: Trace) -> list[str]:
    """Returns how often the rings change hosts where another order of their ranks would do so less often."""
    names = [re.fullmatch(r"ring:(\d{1,9})>(\d{1,9})", group.name) for group in trace.events.tables.groups]
    pairs = [(int(name[1]), int(name[2])) for name in names if name is not None]
    after = {pred: succ for pred, succ in pairs if max(pred, succ) < trace.world_size}
    crossed = needed = 0
    for first in sorted(after, key=lambda rank: rank in after.values()):  # where an edge was not used, from behind it
        ring = [first]
        while ring[-1] in after:
            ring.append(after.pop(ring[-1]))
        hosts = [trace.hosts[rank] for rank in dict.fromkeys(ring)]
        crossed, needed = crossed + count_crossings(hosts), needed + count_crossings(sorted(hosts))
    hint = 'initialize_distributed(ring_order="hosts")'
    return [f"    the ring crosses hosts {count(crossed, 'time')}, {needed} would do: {hint}"] if crossed > needed else []


def _say_messages(trace: Trace, chosen: Ints) -> str:
    """Returns the number of some messages, their bandwidth while both sides were there, and how long their two sides were blocked."""
    events, send, recv = trace.events, trace.messages.send[chosen], trace.messages.recv[chosen]
    done = events.done_ns[recv] != NONE
    sent = int(np.maximum(events.size_bytes[send], 0)[done].sum())
    took_ns = np.maximum(events.done_ns[recv] - np.maximum(events.post_ns[send], events.post_ns[recv]), 0)[done].sum()
    blocked_ns = np.maximum(trace.waits.blocked_ns[np.concatenate([send, recv])], 0).sum()
    rate = f", {rate_text(sent / took_ns)}" if took_ns and sent else ""
    return f"{count(len(send), 'message')}, {bytes_text(sent)}{rate}, blocked {time_text(blocked_ns)}"


def _summarise_collectives(trace: Trace) -> list[str]:
    """Returns what the collectives carried and how much they blocked, in a line for the first few."""
    rows = _collective_rows(trace)
    if not rows:
        return []
    total, calls = sum(row.size_bytes for row in rows), sum(row.count for row in rows)
    said = [f"    {row.op} on {row.group}: {count(row.count, 'call')}, {bytes_text(row.size_bytes)}, {_say_blocked(row)}" for row in rows]
    return [f"  collectives   {count(calls, 'call')}, {bytes_text(total)}", *_some(said)]


def _collective_rows(trace: Trace) -> list[OperationStats]:
    """Returns the collectives' rows of ``Trace.stats``, without those of messages: a ring has a group for each of its pairs."""
    events = trace.events
    rows = measure_stats(events.select(events.kind == COLLECTIVE), trace.world_size, trace.makespan_s).rows
    return [row for row in rows if row.op in COLLECTIVES]


def _say_blocked(row: OperationStats) -> str:
    if row.blocked_max_us != row.blocked_max_us:
        return "awaited in C++"
    return f"blocked {time_text(1e3 * row.blocked_p50_us)} each (median), {100 * row.share:.0f} % of the run"


def _describe(trace: Trace) -> str:
    number = len(trace.messages)
    calls = sum(row.count for row in _collective_rows(trace))
    did = (
        f"called {count(calls, 'collective')}"
        if calls and not number
        else f"exchanged {count(number, 'message') if number else 'no message'}"
    )
    part = "Part of a trace" if "part" in trace.metadata else "Trace"
    sentence = f"{part} of {count(trace.world_size, 'rank')} that {did} in {time_text(trace.makespan_s * 1e9)}"
    edge = _busiest_edge(trace)
    if edge is not None and not edge.equals:
        sentence += f", {'all' if edge.number == number else 'most bytes'} from rank {edge.src} to rank {edge.dst}"
    wait = _longest_wait(trace)
    if wait is not None:
        sentence += f"; the longest wait: {wait}"
    if count_steps(trace.events):
        sentence += f"; {_last_step(trace)}"
    if trace.unmatched:
        sentence += f"; {count(len(trace.unmatched), 'operation')} without a partner"
    return sentence + "."


def count(number: int, noun: str) -> str:
    """Returns a number with its noun: "1 rank", "4 ranks", "12,000 messages".

    Example:
        >>> count(1, "rank"), count(12000, "message"), count(2, "microbatch")
        ('1 rank', '12,000 messages', '2 microbatches')
    """
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def _last_step(trace: Trace) -> str:
    """Returns what a pipeline's last step was, and its bubble, in words."""
    measured = trace.bubble()
    said = f"{count(count_steps(trace.events), 'step')}, the last one of {measured.schedule}: bubble {100 * measured.of_total:.0f} %"
    return said if measured.closed_form is None else f"{said} (closed form {100 * measured.closed_form.of_total:.0f} %)"


class _Edge(NamedTuple):
    """What went from ``src`` to ``dst``, and how many other edges carried exactly as much."""

    src: int
    dst: int
    number: int
    total_bytes: int
    equals: int


def _busiest_edge(trace: Trace) -> _Edge | None:
    """Returns the edge that carried most bytes, of several alike that of the lowest ranks; None without messages."""
    messages = trace.messages
    if len(messages) == 0:
        return None
    edges, edge_of, number = np.unique(messages.src.astype(np.int64) << 32 | messages.dst, return_inverse=True, return_counts=True)
    total = np.zeros(len(edges), dtype=np.int64)
    np.add.at(total, edge_of, np.maximum(trace.events.size_bytes[messages.send], 0))
    best = int(np.lexsort((-number, -total))[0])
    equals = int(np.count_nonzero((total == total[best]) & (number == number[best]))) - 1
    return _Edge(int(edges[best]) >> 32, int(edges[best]) & 0xFFFFFFFF, int(number[best]), int(total[best]), equals)


def _longest_wait(trace: Trace) -> str | None:
    """Returns who waited longest for whom, in words, None where nobody waited for a partner."""
    waits, messages = trace.waits, trace.messages
    if len(messages) == 0:
        return None
    late_sender, late_receiver = waits.late_sender_ns[messages.recv], waits.late_receiver_ns[messages.send]
    worst = int(np.argmax(np.maximum(late_sender, late_receiver)))
    by_sender = late_sender[worst] >= late_receiver[worst]
    longest = int(max(late_sender[worst], late_receiver[worst]))
    if longest == 0:
        return None
    src, dst = int(messages.src[worst]), int(messages.dst[worst])
    waiter, late, verb, index = (dst, src, "send", messages.recv[worst]) if by_sender else (src, dst, "receive", messages.send[worst])
    events = trace.events
    file = events.file[index]
    place = f" ({events.tables.files[file]}:{events.line[index]})" if file != NONE else ""
    return f"rank {waiter} waited {time_text(longest)} in {OP_NAMES[events.op[index]]}{place} for rank {late} to {verb}"


def _some(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"    ... and {len(lines) - _SHOWN} more"]
