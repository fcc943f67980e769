"""Implements ``ringsim.calibrate``, which measures a machine's costs of computing and messages.

The costs come from traces of real ranks, and the virtual clock uses them. The time of a rank in its
trace splits into these parts::

    | posting |  around  | compute ......... overshoot |  around  | posting | blocked ...... |
    ^ isend                ^ compute(0.005) begins      ^ ends               ^ wait          ^ done

Posting and blocking belong to messages. The overshoot is the time by which a sleep lasts longer
than requested, and "around" is the time that the program itself takes between recorded events. Each
constant is a mean without the extremes, because the times along a chain of events add up, and so do
their means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from ringsim.compute_costs import read_label
from ringsim.errors import ArgumentError
from ringsim.link import Link
from ringsim.prediction.gloo_costs import STALLED_S, find_gloo_costs, find_marks, fit_by_size
from ringsim.schedules.costs import Costs
from ringsim.schedules.schedule import Action
from ringsim.simulator.links import AWAKE_S
from ringsim.topologies import GlooCosts, OneMachine
from ringsim.traces.events import COLLECTIVE, NONE, OK, RECV, SEND, SPAN, Events, Ints
from ringsim.traces.steps import is_step, list_steps, number_steps
from ringsim.traces.value import Trace, check_trace

if TYPE_CHECKING:
    from ringsim.compute_costs import Work

LEAST_MESSAGES = 3  # of one size, and observed from beginning to end
# on an idle machine, the 10th and the 90th percentile of overshoots differ by at most this much
WIDEST_SLEEP_S = 1e-3
# nine in ten receives are posted within this time if the rank has a core to itself
SLOWEST_POST_S = 0.5e-3
# the longest time between two operations on ranks that compute nothing
LONGEST_BETWEEN_S = 1e-3
TAIL = 0.02  # the share of times to cut off at both ends, so that rare events do not count
_FIND_ALL = (
    "To measure everything, run ringsim.trace(ringsim.calibration_worker, world_size=2), which "
    "takes a few seconds."
)
# measured from the post of the second side, for programs in which receivers never wait from the
# beginning
LATEST_WAIT_S = 1e-3
PARTS = 5  # the traces are split into parts, whose differences show the uncertainty
FEW = 5  # with this many times or more, at least one is cut off at both ends


class Moment(IntEnum):
    """The kind of event at a moment on a rank.

    If several moments coincide, which happens only on a virtual clock, ends come first.
    """

    DONE = 0
    END = 1
    BEGIN = 2
    POST_SEND = 3  # a send whose receive is already posted
    POST_EARLY = 4  # a send whose receive is not posted yet
    POST_RECV = 5
    POST_COLLECTIVE = 6
    COMPUTE = 7
    WAIT = 8
    OTHER = 9


POSTS = (Moment.POST_SEND, Moment.POST_EARLY, Moment.POST_RECV, Moment.POST_COLLECTIVE)
_AROUND = (Moment.DONE, Moment.BEGIN, Moment.END)


@dataclass(frozen=True)
class Calibration:
    """A machine's constants.

    Pass a calibration to ``ringsim.simulate`` as ``compute``, together with its ``topology``.
    ``ringsim.predict`` does both for you.

    Attributes:
        link: the cost of a message, from when its second side is posted until the receiver
            continues.
        sending: the time that posting a send takes if its receive is already posted: Gloo then
            immediately copies as much as the connection accepts. ``link`` already includes this
            time.
        sending_early_s: the time that posting a send takes if its receive is not posted yet. The
            bytes are copied later, without the rank's help.
        receiving_s: the time that posting a receive takes.
        sleep_s: the time by which ``ringsim.compute`` lasts longer than requested, or 0 if no trace
            contains a call to ``ringsim.compute``.
        around_s: the time that the program takes around each computation, in seconds.
        cores: the machine's number of cores, or 0 if a trace does not contain it.
        costs: the measured times of the stages, in seconds, for each kind of computation, or None
            if no trace contains a pipeline step.
        num_messages: the number of messages on which ``link`` is based.
        sizes_bytes: the sizes of these messages.
        notes: reasons to doubt the constants, one sentence each; empty if there are none.
        gloo: Gloo's other costs on cores that ranks share, or None if the traces do not show them.
        missing: short descriptions of the costs that the traces do not show. These costs count as
            zero, or as the substitute that the description names.
        spread: the uncertainty of message times, as the relative standard deviation between fifths
            of the traces.
    """

    link: Link
    sending: Link
    sending_early_s: float
    receiving_s: float
    sleep_s: float
    around_s: float
    cores: int
    costs: Costs | None
    num_messages: int
    sizes_bytes: tuple[int, ...]
    notes: tuple[str, ...] = ()
    gloo: GlooCosts | None = None
    missing: tuple[str, ...] = ()
    spread: float = 0.0

    @property
    def topology(self) -> OneMachine:
        """The links of this machine, on which ranks share the cores.

        Pass this topology to ``simulate`` instead of ``link``.

        Raises:
            ArgumentError: a trace does not contain the number of cores.
        """
        if not self.cores:
            raise ArgumentError(
                "this calibration has no topology, because a trace does not contain the number of "
                "cores. Use its link instead."
            )
        return OneMachine(self.link, self.cores, self.gloo)

    def scaled(self, factor: float) -> Calibration:
        """Returns the constants, with all times multiplied by ``factor``.

        The share of messages that stall and the costs of computing do not change.

        Args:
            factor: the factor, at least 0.
        """
        times = ("link", "sending", "sending_early_s", "receiving_s", "sleep_s", "around_s")
        gloo = self.gloo
        if gloo is not None:
            of_gloo = ("carrying", "awake", "collective_s", "first_use_s", "stall_s")
            gloo = replace(gloo, **_scale(gloo, of_gloo, factor))
        return replace(self, gloo=gloo, **_scale(self, times, factor))

    def post_s(self, sends: bool, size_bytes: int, *, met: bool = True) -> float:
        """Returns the time that a rank spends posting a message, in seconds.

        Args:
            sends: whether the message is posted as a send.
            size_bytes: the size of the message.
            met: for a send, whether the matching receive is already posted.
        """
        if not sends:
            return self.receiving_s
        return self.sending.time_s(size_bytes) if met else self.sending_early_s

    def time_s(self, work: Work) -> float:
        """Returns the measured time of a pipeline stage's computation, in seconds.

        The virtual clock calls this method if the calibration is passed to ``simulate`` as
        ``compute``.

        Args:
            work: the computation and its stage.

        Raises:
            ArgumentError: no trace contains a pipeline step, or the step has no such stage.
        """
        if self.costs is None:
            raise ArgumentError(
                "this calibration contains no costs of pipeline stages, because its traces contain "
                "no pipeline step. Record a trace with a pipeline step."
            )
        return float(self.costs.get_duration(Action(work.stage, work.kind, work.microbatch)))

    def __str__(self) -> str:
        """Returns a few lines of text that list the constants."""
        lines = [
            f"link      {_say(self.link)}, from {self.num_messages} messages, +-{self.spread:.0%}",
            f"posting   a send {_say(self.sending)}, a send before its receive "
            f"{self.sending_early_s * 1e6:.1f} us, a receive {self.receiving_s * 1e6:.1f} us",
            f"compute   {self.sleep_s * 1e6:.1f} us longer than requested, and "
            f"{self.around_s * 1e6:.1f} us around each call",
        ]
        if (gloo := self.gloo) is not None:
            first_ms, stall_ms = gloo.first_use_s * 1e3, gloo.stall_s * 1e3
            if gloo.awake is not None:
                lines.append(f"awake     {_say(gloo.awake)}, while the cores are busy")
            lines.append(
                f"gloo      core time of a message {_say(gloo.carrying)}, a collective "
                f"{gloo.collective_s * 1e6:.1f} us, a first "
                f"operation {first_ms:.1f} ms; {gloo.stall_share:.1%} of messages stall for "
                f"{stall_ms:.1f} ms"
            )
        if self.missing:
            lines.append(f"not found: {', '.join(self.missing)}. {_FIND_ALL}")
        return "\n".join([*lines, *(f"doubtful: {note}" for note in self.notes)])


def calibrate(*traces: Trace) -> Calibration:
    """Measures a machine's constants from traces of real ranks on that machine.

    Two ranks are enough, and better than many, because ranks without a free core have to wait.
    Messages should have at least two sizes, because a single size cannot separate latency from
    bandwidth. A message counts only if it was observed from beginning to end: its receiver was
    already waiting when the second side was posted, or did nothing between its post and its wait.

    Args:
        traces: one or more traces, measured on the same machine.

    Returns:
        The constants. Their ``notes`` list reasons for doubt, such as a busy machine, or messages
        of only one size.

    Raises:
        ArgumentError: no trace is given, a trace is simulated, or too few messages are usable.

    Example:
        >>> import ringsim
        >>> from ringsim.pipeline import Costs, gpipe, rehearse
        >>> def worker():
        ...     for size_bytes in (1024, 262144):
        ...         rehearse(
        ...             gpipe(2, 8),
        ...             Costs(forward=0.002, backward=0.004),
        ...             size_bytes=size_bytes,
        ...             ahead=0,
        ...         )
        >>> calibration = calibrate(ringsim.trace(worker, world_size=2))
        >>> calibration.sizes_bytes, calibration.link.alpha_s > 0, calibration.sleep_s > 0
        ((1024, 262144), True, True)
    """
    if not traces:
        raise ArgumentError(
            "calibrate requires at least one trace. Record one with ringsim.trace(worker, "
            "world_size=2)."
        )
    for trace in traces:
        check_trace("a trace to calibrate from", trace)
        source = trace.metadata.get("source")
        if source in ("simulated", "predicted"):
            raise ArgumentError(
                f"a trace to calibrate from must be measured, got a {source} one. Record real "
                "ranks with ringsim.trace."
            )
    sizes, times, awake = join_columns(map(_sample_messages, traces))
    asleep = ~awake if _count(sizes[~awake]) else np.ones_like(awake)
    link, counts, spread = _fit_messages(sizes[asleep], times[asleep])
    gloo, missing = find_gloo_costs(traces, link)
    if gloo is not None and _count(sizes[awake]):
        gloo = replace(gloo, awake=_fit_messages(sizes[awake], times[awake])[0])
    kinds, gaps, sizes = join_columns(map(_measure_moments, traces))
    overshoots = np.concatenate([_sample_overshoots(trace) for trace in traces])
    beside = _find_beside(kinds)
    around_s = 0.0
    for kind in _AROUND:
        chosen = gaps[beside & (kinds == kind)]
        around_s += find_typical(chosen) * len(chosen)
    met = kinds == Moment.POST_SEND
    if not met.any():
        met = kinds == Moment.POST_EARLY
    receiving = gaps[kinds == Moment.POST_RECV]
    costs = _find_costs(traces)
    between_s = find_typical(gaps[np.isin(kinds, _AROUND)]) if costs is None else 0.0
    return Calibration(
        link=link,
        sending=fit_by_size(sizes[met], gaps[met], find_typical),
        sending_early_s=find_typical(gaps[kinds == Moment.POST_EARLY]),
        receiving_s=find_typical(receiving),
        sleep_s=max(find_typical(overshoots), 0.0),
        around_s=around_s / len(overshoots) if len(overshoots) else 0.0,
        cores=min(int((trace.metadata.get("machine") or {}).get("cores") or 0) for trace in traces),
        costs=costs,
        num_messages=sum(counts.values()),
        sizes_bytes=tuple(counts),
        notes=tuple(_find_doubts(len(counts), overshoots, receiving, between_s)),
        gloo=gloo,
        missing=tuple(missing),
        spread=spread,
    )


def _find_doubts(
    num_sizes: int, overshoots: Ints, receiving: Ints, between_s: float
) -> Iterator[str]:
    """Yields the reasons to doubt the constants, one sentence each.

    ``between_s`` is the usual time around computations, or 0 if the stages' costs explain it.
    """
    if num_sizes == 1:
        yield (
            "all messages had the same size, so their whole time counts as latency, and "
            "predictions ignore the size of a message"
        )
    if len(overshoots):
        first_s, last_s = np.quantile(overshoots, [0.1, 0.9])
        if last_s - first_s > WIDEST_SLEEP_S:
            yield (
                "the machine was busy with other work: the times at which sleeps ended varied by "
                f"{(last_s - first_s) * 1e3:.1f} ms (usually less than 1 ms)"
            )
    elif between_s > LONGEST_BETWEEN_S:
        yield (
            f"ranks computed for {between_s * 1e3:.1f} ms at a time outside ringsim.compute, and "
            "predictions ignore this time"
        )
    if len(receiving):
        slow_s = np.quantile(receiving, 0.9)
        if slow_s > SLOWEST_POST_S:
            yield (
                "the machine was busy with other work: posting a receive took up to "
                f"{slow_s * 1e3:.1f} ms (usually less than 0.5 ms)"
            )


def join_columns(parts: Iterable[Iterable[Ints]]) -> Iterator[Ints]:
    """Joins several tables that have the same columns, and yields the joined columns."""
    return map(np.concatenate, zip(*parts, strict=True))


def _scale(constants: object, names: Sequence[str], factor: float) -> dict[str, Any]:
    """Returns the named times and links, multiplied by ``factor``. None stays None."""
    scaled = {}
    for name in names:
        value = getattr(constants, name)
        if isinstance(value, Link):
            value = Link(value.alpha_s * factor, value.beta_s_per_byte * factor)
        elif value is not None:
            value *= factor
        scaled[name] = value
    return scaled


def _say(link: Link) -> str:
    return f"{link.alpha_s * 1e6:.1f} us + {link.beta_s_per_byte * 1e9:.3f} ns per byte"


def find_asked(events: Events) -> Ints:
    """Returns the seconds requested in each ``ringsim.compute``, or NaN for other events."""
    asked_s = np.array([*map(read_label, events.tables.labels), None], dtype=float)
    found: Ints = np.where(events.kind == SPAN, asked_s[events.label], np.nan)
    return found


def _sample_messages(trace: Trace) -> tuple[Ints, Ints, Ints]:
    """Returns the messages observed from start to end, or all messages if there are too few.

    The columns are the size in bytes, the time in seconds, and whether a different message had just
    been in flight.
    """
    events, messages = trace.events, trace.messages
    ready = np.maximum(events.post_ns[messages.send], events.post_ns[messages.recv])
    wait, done = events.wait_ns[messages.recv], events.done_ns[messages.recv]
    # whether nothing happened on the rank between the post and the wait
    at_once = np.zeros(len(events), dtype=bool)
    for rank in np.unique(events.rank):
        own = events.rank == rank
        post_ns, wait_ns = events.post_ns[own], events.wait_ns[own]
        moments = np.sort(np.concatenate([post_ns, wait_ns, events.done_ns[own]]))
        following = np.searchsorted(moments, post_ns, "right")
        waits_next = moments[np.minimum(following, len(moments) - 1)] == wait_ns
        waits_next[:-1] &= post_ns[1:] >= wait_ns[:-1]
        at_once[own] = waits_next
    whole = (wait != NONE) & (events.status[messages.recv] == OK) & _counts(events)[messages.recv]
    seen = whole & ((wait <= ready) | at_once[messages.recv])
    if np.count_nonzero(seen) < LEAST_MESSAGES:
        seen = whole & (wait - ready < LATEST_WAIT_S * 1e9)
    before = np.sort(np.append(done[done != NONE], np.iinfo(np.int64).min // 2))
    awake = (ready - before[np.searchsorted(before, ready, "right") - 1]) * 1e-9 < AWAKE_S
    return events.size_bytes[messages.recv][seen], (done - ready)[seen] * 1e-9, awake[seen]


def _counts(events: Events) -> Ints:
    """Returns a mask of the events that reveal the costs of messages and computing.

    If the trace contains pipeline steps with messages, only events in steps count.
    """
    steps: Ints = number_steps(events) != NONE
    return steps if (steps & (events.kind == SEND)).any() else np.ones_like(steps)


def _count(sizes: Ints) -> dict[int, int]:
    """Returns the number of messages of each size, for sizes with enough messages."""
    counts = Counter(sizes.tolist())
    return {size: counts[size] for size in sorted(counts) if counts[size] >= LEAST_MESSAGES}


def _fit_messages(sizes: Ints, times: Ints) -> tuple[Link, dict[int, int], float]:
    """Returns the link, the number of messages per size, and the spread between parts."""
    enough = _count(sizes)
    if not enough:
        raise ArgumentError(
            f"calibrate requires at least {LEAST_MESSAGES} messages of the same size for which "
            f"the receiver had to wait, got {len(sizes)} messages of all sizes. Use blocking "
            "receives, and have the sender compute before it sends, so that the receiver waits. "
            f"{_FIND_ALL}"
        )
    chosen = np.isin(sizes, list(enough))
    sizes, times = sizes[chosen], times[chosen]
    relative = times.copy()
    for size in enough:
        relative[sizes == size] /= max(find_typical(times[sizes == size]), 1e-9)
    parts = [find_typical(part) for part in np.array_split(relative, PARTS) if len(part)]
    return fit_by_size(sizes, times, find_typical), enough, float(np.std(parts))


def find_typical(times: Ints) -> float:
    """Returns the mean, excluding the longest and the shortest fiftieth and any stalls.

    With five or more times, at least one is cut off at each end. The mean of no times is 0.
    """
    if not len(times):
        return 0.0
    ordered = np.sort(times[times <= np.median(times) + STALLED_S])
    cut = max(round(len(ordered) * TAIL), int(len(ordered) >= FEW))
    return float(ordered[cut : len(ordered) - cut].mean())


def list_moments(trace: Trace) -> tuple[Ints, Ints, Ints]:
    """Returns each moment's event and kind, and the time in seconds to the next moment.

    The next moment is the next one on the same thread. If the trace contains pipeline steps with
    messages, only moments in steps count. In a trace of ``calibration_worker``, only moments of its
    computing count.

    Args:
        trace: the trace, measured or simulated.
    """
    events = trace.events
    spans, sends, recvs, collectives = (
        events.kind == kind for kind in (SPAN, SEND, RECV, COLLECTIVE)
    )
    asleep = np.isfinite(find_asked(events))
    steps = is_step(events)  # the time after a step is not part of the step
    both = sends | recvs | collectives
    messages = trace.messages
    early = np.zeros(len(events), dtype=bool)
    early[messages.send] = events.post_ns[messages.recv] > events.post_ns[messages.send]
    known = (events.done_ns != NONE) & (spans | (events.wait_ns != NONE)) & _counts(events)
    known &= events.post_ns > events.post_ns[find_marks(events)].max(initial=np.iinfo(np.int64).min)
    parts = [  # (events, their times, kind of moment)
        (sends & ~early, events.post_ns, Moment.POST_SEND),
        (sends & early, events.post_ns, Moment.POST_EARLY),
        (recvs, events.post_ns, Moment.POST_RECV),
        (collectives, events.post_ns, Moment.POST_COLLECTIVE),
        # otherwise, the rank did not wait
        (both & (events.done_ns > events.wait_ns), events.wait_ns, Moment.WAIT),
        (both, events.done_ns, Moment.DONE),
        (spans & ~asleep, events.post_ns, Moment.BEGIN),
        (asleep, events.post_ns, Moment.COMPUTE),
        (spans & ~steps, events.done_ns, Moment.END),
        (steps, events.done_ns, Moment.OTHER),
    ]
    index, time, kind = join_columns(
        (some := np.flatnonzero(which & known), when[some], np.full(len(some), what))
        for which, when, what in parts
    )
    order = np.lexsort((kind, time, events.thread[index], events.rank[index]))
    index, time, kind = index[order], time[order], kind[order]
    same = (np.diff(events.rank[index]) == 0) & (np.diff(events.thread[index]) == 0)
    return index[:-1][same], kind[:-1][same], np.diff(time)[same] * 1e-9


def _measure_moments(trace: Trace) -> tuple[Ints, Ints, Ints]:
    """Returns each moment's kind, the seconds until the next moment, and the event's bytes."""
    event, kind, seconds = list_moments(trace)
    return kind, seconds, trace.events.size_bytes[event]


def _find_beside(kinds: Ints) -> Ints:
    """Returns a mask of the moments between the two operations around a computation.

    The two operations are the last operation before the computation and the first one after it.
    """
    stretch = np.cumsum(np.isin(kinds, (*POSTS, Moment.WAIT)))
    computes: Ints = np.bincount(stretch, weights=kinds == Moment.COMPUTE)[stretch] > 0
    return computes


def _sample_overshoots(trace: Trace) -> Ints:
    """Returns the time in seconds by which each ``ringsim.compute`` exceeded its request."""
    events = trace.events
    longer_s = (events.done_ns - events.post_ns) * 1e-9 - find_asked(events)
    found: Ints = longer_s[np.isfinite(longer_s) & (events.status == OK)]
    return found


def _find_costs(traces: Sequence[Trace]) -> Costs | None:
    """Returns the stages' times from the first trace that contains steps."""
    for trace in traces:
        if steps := list_steps(trace):
            columns = ((each.stage, each.kind, (each.end - each.start) * 1e-9) for each in steps)
            return median_costs(*join_columns(columns))
    return None


def median_costs(stage: Ints, kind: Ints, took: Ints) -> Costs:
    """Returns the median time of each kind of computation on each stage.

    Args:
        stage: the stage of each computation.
        kind: the kind of each computation: "F", "B", "I" or "W".
        took: the time of each computation, in any unit.

    Example:
        >>> median_costs(
        ...     np.array([0, 0, 0, 1]),
        ...     np.array(["F", "F", "F", "F"]),
        ...     np.array([1.0, 2.0, 9.0, 4.0]),
        ... ).forward
        (2.0, 4.0)
    """

    def times(letter: str) -> tuple[float, ...]:
        chosen = [
            took[(stage == number) & (kind == letter)] for number in range(int(stage.max()) + 1)
        ]
        return tuple(float(np.median(some)) if len(some) else 0.0 for some in chosen)

    return Costs(
        forward=times("F"),
        input=times("I"),
        weight=times("W"),
        backward=times("B") if (kind == "B").any() else None,
    )
