"""Measures Gloo's costs on shared cores from traces.

The costs are the constants of `ringsim.topologies.GlooCosts`. Each constant is measured in a part
of a trace where nothing else interferes (see decision 13). None is fitted to the length of a run::

    carrying      CPU time per message of a few ping-pongs, without the CPU time of the main
                  threads; `calibration_worker` marks it
    collective    the time of a collective of two ranks without its messages, if nothing stalled
    first use     CPU time of the first few ping-pongs beyond the CPU time of the following ones
    stalls        messages that arrive a millisecond later than usual, while both ranks were busy
                  on one connection
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ringsim.compute_costs import PROCESSOR
from ringsim.link import Link, fit_link
from ringsim.simulator.gloo import list_steps
from ringsim.simulator.links import CLOSE_S
from ringsim.topologies import GlooCosts
from ringsim.traces.collectives import COLLECTIVES
from ringsim.traces.events import COLLECTIVE, MARK, NONE, OK, OP_NAMES, RECV, SEND, Events, Ints
from ringsim.traces.matching import number_rows
from ringsim.traces.value import Trace

STALLED_S = 1e-3  # a delay of this length is no coincidence
LEAST_EXPOSED = 50  # the fewest messages that show the share that stalls
QUICK = 0.25  # the quantile of the intervals that counts
LEAST_ALIKE = 3  # the fewest collectives of one kind


def find_gloo_costs(traces: Sequence[Trace], link: Link) -> tuple[GlooCosts | None, list[str]]:
    """Returns Gloo's costs, or None if the traces show none of them.

    The second result is a list of short descriptions of the costs that the traces do not show.

    Args:
        traces: traces of real ranks on Gloo.
        link: the cost of a message, which is used as the core time if the traces do not mark the
            core time.
    """
    missing = []
    ranks = [_list_intervals(trace, rank) for trace in traces for rank in range(trace.world_size)]
    intervals = [each for of_rank in ranks for each in of_rank]
    first_s = list(_list_first_uses(ranks))
    carrying = link
    if intervals:
        carrying = _fit_carrying(intervals)
    else:
        missing += [
            "the core time of a message",
            "the time of a new process's first messages",
        ]
    collectives = [found for trace in traces for found in _list_collectives(trace, carrying)]
    if not collectives:
        missing.append("the cost of a collective")
    messages_s = [_find_late(trace) for trace in traces]
    exposed = sum(map(len, messages_s)) + sum(
        each.messages * len(each.late_s) for each in collectives
    )
    late_s = np.concatenate([*messages_s, *(each.late_s for each in collectives)])
    late_s = late_s[late_s > STALLED_S]
    if exposed < LEAST_EXPOSED:
        late_s = late_s[:0]
        missing.append("the share of messages that stall")
    costs = GlooCosts(
        carrying,
        collective_s=max(float(np.median([each.own_s for each in collectives] or [0.0])), 0.0),
        first_use_s=max(float(np.mean(first_s or [0.0])), 0.0),
        stall_s=float(np.mean(late_s)) if len(late_s) else 0.0,
        stall_share=len(late_s) / max(exposed, 1),
    )
    return (None if costs == GlooCosts(link) else costs), missing


class _Interval(NamedTuple):
    """A rank's activity between two CPU-time readings.

    In this interval, the rank sent and received messages of one size.
    """

    size_bytes: int
    messages: int  # sent or received
    process_s: float  # CPU time
    beyond_s: float  # the CPU time on threads other than the main thread


def _list_intervals(trace: Trace, rank: int) -> list[_Interval]:
    """Returns a rank's intervals between CPU-time readings, in order."""
    events = trace.events
    labels = events.tables.labels
    found = []
    own, post_ns = events.rank == rank, events.post_ns
    for begin, end in pairwise(np.flatnonzero(find_marks(events) & own)):
        within = own & (post_ns >= post_ns[begin]) & (post_ns < post_ns[end])
        sizes = np.unique(events.size_bytes[within & (events.kind != MARK)])
        if len(sizes) == 1:  # otherwise, the rank also did something else
            count = int(np.count_nonzero(within & np.isin(events.kind, (SEND, RECV))))
            before_s, after_s = (_read_mark(labels[events.label[at]]) for at in (begin, end))
            process_s, main_s = after_s - before_s
            found.append(_Interval(int(sizes[0]), count, process_s, process_s - main_s))
    return found


def find_marks(events: Events) -> Ints:
    """Returns a mask of the events that carry a CPU-time reading."""
    marks = np.array([label.startswith(PROCESSOR) for label in events.tables.labels] or [False])
    where: Ints = (events.kind == MARK) & marks[events.label]
    return where


def _read_mark(label: str) -> Ints:
    """Returns the CPU times of the process and of its main thread, in seconds."""
    return np.array(label.removeprefix(PROCESSOR).split()[:2], dtype=float)


def _fit_carrying(intervals: Sequence[_Interval]) -> Link:
    """Returns a message's core time on both sides, from the faster intervals of each size.

    In the slower intervals, something stalled.
    """
    sizes = np.array([each.size_bytes for each in intervals])
    times = np.array([2 * each.beyond_s / each.messages for each in intervals])
    return fit_by_size(sizes, times, lambda alike: max(float(np.quantile(alike, QUICK)), 1e-9))


def fit_by_size(sizes: Ints, times: Ints, typical: Callable[[Ints], float]) -> Link:
    """Fits a line to the typical time of each size, or a constant if there is only one size."""
    found = np.unique(sizes)
    usual = [typical(times[sizes == size]) for size in found]
    return Link(usual[0], 0.0) if len(found) == 1 else fit_link(found, np.maximum(usual, 1e-9))


def _list_first_uses(ranks: Sequence[Sequence[_Interval]]) -> Iterator[float]:
    """Yields, for each rank, the excess of its first interval over a typical one.

    The excess is in seconds of CPU time, and compares intervals of the same size.
    """
    for of_rank in filter(None, ranks):
        first, *rest = of_rank
        alike = [
            each.process_s / each.messages for each in rest if each.size_bytes == first.size_bytes
        ]
        if alike:
            yield first.process_s - first.messages * float(np.median(alike))


class _Collectives(NamedTuple):
    """Collectives of one kind and size on two ranks."""

    own_s: float  # the time of a collective without its messages
    messages: int  # per collective
    late_s: Ints  # the delay of each collective, compared with the usual time


def _list_collectives(trace: Trace, carrying: Link) -> Iterator[_Collectives]:
    """Yields the collectives of two ranks, grouped by kind and size."""
    events = trace.events
    pairs = np.array([len(group.ranks) == 2 for group in events.tables.groups] or [False])
    known = np.flatnonzero(
        (events.kind == COLLECTIVE)
        & (events.done_ns != NONE)
        & (events.status == OK)
        & pairs[events.group]
    )
    kind = number_rows(events.op[known], events.group[known], events.size_bytes[known])
    for number in np.unique(kind):
        alike = known[kind == number]
        name, size_bytes = OP_NAMES[events.op[alike[0]]], int(events.size_bytes[alike[0]])
        ranks = events.tables.groups[events.group[alike[0]]].ranks
        own = [alike[events.rank[alike] == rank] for rank in ranks]
        count = min(map(len, own))
        if name not in COLLECTIVES or count < LEAST_ALIKE:
            continue
        calls = np.stack([places[:count] for places in own])
        took_s = (events.done_ns[calls].max(axis=0) - events.post_ns[calls].max(axis=0)) * 1e-9
        # more than half of them may have stalled
        usual_s = float(np.median(took_s[took_s <= np.quantile(took_s, 0.1) + STALLED_S]))
        steps = [list_steps(name, place, 2, 0, size_bytes)[0] for place in range(2)]
        messages_s = max(
            sum(carrying.time_s(step.size_bytes) / 2 for step in each) for each in steps
        )
        messages = sum(len(step.to) for each in steps for step in each)
        yield _Collectives(usual_s - messages_s, messages, took_s - usual_s)


def _find_late(trace: Trace) -> Ints:
    """Returns the delays, in seconds, of the messages that could stall.

    A message can stall if both ranks are busy on their connection at the same time. The delay is
    the time beyond the usual time for the message's size. A message counts only if its receiver was
    already waiting when both sides had been posted.
    """
    events, messages = trace.events, trace.messages
    sent, received = events.post_ns[messages.send], events.post_ns[messages.recv]
    waited = events.wait_ns[messages.recv]
    ready = np.maximum(sent, received)
    awaited = (
        (waited != NONE)
        & (events.status[messages.recv] == OK)
        & ((waited - ready) * 1e-9 < CLOSE_S)
    )
    took_s, sizes = (events.done_ns[messages.recv] - ready) * 1e-9, events.size_bytes[messages.recv]
    late_s = np.zeros(len(took_s))
    for size in np.unique(sizes[awaited]):
        alike = awaited & (sizes == size)
        late_s[alike] = took_s[alike] - np.median(took_s[alike])
    might_stall: Ints = late_s[awaited & (np.abs(sent - received) * 1e-9 < CLOSE_S)]
    return might_stall
