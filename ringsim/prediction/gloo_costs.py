"""What Gloo costs on cores that ranks share, from traces.

The constants of `ringsim.topologies.GlooCosts`. Each is measured where it shows alone, as decision
13 has it, and none is fitted to the length of a run::

    carrying      processor time of a few ping-pongs beyond that of the main threads, a message:
                  `calibration_worker` marks it
    collective    what a collective of two ranks takes beyond its messages, where nothing stalled
    first use     processor time of the first few ping-pongs beyond that of those that follow
    stalls        messages that arrive a millisecond later than usual, where both ranks were at work
                  on one connection
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from ringsim.compute_costs import PROCESSOR
from ringsim.link import Link, fit_link
from ringsim.simulator.gloo import list_steps
from ringsim.simulator.links import CLOSE_S
from ringsim.topologies import GlooCosts
from ringsim.traces.collectives import COLLECTIVES
from ringsim.traces.events import COLLECTIVE, MARK, NONE, OK, OP_NAMES, RECV, SEND, Events, Ints
from ringsim.traces.value import Trace

__all__ = ["STALLED_S", "find_gloo_costs", "find_marks"]

STALLED_S: Final = 1e-3  # so much later than usual is no chance
LEAST_EXPOSED: Final = 50  # messages, to say which part of them stalls
QUICK: Final = 0.25  # of the intervals
LEAST_ALIKE: Final = 3  # collectives of a kind


def find_gloo_costs(traces: Sequence[Trace], link: Link) -> tuple[GlooCosts | None, list[str]]:
    """Returns the costs of Gloo, None if the traces show none of them.

    Also what they do not show, in a few words each.

    Args:
        traces: of real ranks on Gloo.
        link: what a message takes, in the place of its core time where that was not marked.
    """
    missing = []
    ranks = [
        found
        for trace in traces
        for rank in range(trace.world_size)
        if (found := _list_intervals(trace, rank))
    ]
    carrying, first = link, list(_list_first_uses(ranks))
    if ranks:
        carrying = _fit_carrying([each for of_rank in ranks for each in of_rank])
    else:
        missing += [
            "how much of the cores a message takes",
            "what fresh processes take for their first messages",
        ]
    collectives = [found for trace in traces for found in _list_collectives(trace, carrying)]
    if not collectives:
        missing.append("what a collective costs")
    messages = [_find_late(trace) for trace in traces]
    exposed = sum(int(exposes.sum()) for _, exposes in messages)
    late = [
        seconds
        for late_s, exposes in messages
        for seconds in late_s[exposes & (late_s > STALLED_S)].tolist()
    ]
    exposed += sum(number * len(late_s) for _, number, late_s in collectives)
    late += [
        seconds for _, _, late_s in collectives for seconds in late_s[late_s > STALLED_S].tolist()
    ]
    if exposed < LEAST_EXPOSED:
        exposed, late = 0, []
        missing.append("how often messages stall")
    costs = GlooCosts(
        carrying,
        collective_s=max(float(np.median([base_s for base_s, _, _ in collectives])), 0.0)
        if collectives
        else 0.0,
        first_use_s=max(float(np.mean(first)), 0.0) if first else 0.0,
        stall_s=float(np.mean(late)) if late else 0.0,
        stall_share=len(late) / exposed if exposed else 0.0,
    )
    return (None if costs == GlooCosts(link) else costs), missing


class _Interval(NamedTuple):
    """What a rank did between two marks of processor time.

    There it sent and received messages of one size.
    """

    size_bytes: int
    messages: int  # sent or received
    process_s: float  # processor time
    beyond_s: float  # of it that of other threads than the main one


def _list_intervals(trace: Trace, rank: int) -> list[_Interval]:
    """Returns the marked intervals of a rank, in order."""
    events = trace.events
    labels = events.tables.labels
    found = []
    for begin, end in pairwise(np.flatnonzero(find_marks(events) & (events.rank == rank))):
        within = (
            (events.rank == rank)
            & (events.post_ns >= events.post_ns[begin])
            & (events.post_ns < events.post_ns[end])
        )
        sizes = np.unique(events.size_bytes[within & (events.kind != MARK)])
        if len(sizes) == 1:  # else other things happened, too
            count = int(np.count_nonzero(within & np.isin(events.kind, (SEND, RECV))))
            (process_s, main_s), (process_before_s, main_before_s) = (
                _read_mark(labels[events.label[place]]) for place in (end, begin)
            )
            spent_s = process_s - process_before_s
            found.append(
                _Interval(int(sizes[0]), count, spent_s, spent_s - (main_s - main_before_s))
            )
    return found


def find_marks(events: Events) -> Ints:
    """Returns the mask of the marks of processor time."""
    marks = np.array([label.startswith(PROCESSOR) for label in events.tables.labels] or [False])
    where: Ints = (events.kind == MARK) & marks[events.label]
    return where


def _read_mark(label: str) -> tuple[float, float]:
    process_s, main_s = label.removeprefix(PROCESSOR).split()[:2]
    return float(process_s), float(main_s)


def _fit_carrying(intervals: Sequence[_Interval]) -> Link:
    """The core time of a message, both sides together, by the quicker intervals of each size.

    In others something stalled.
    """
    sizes = np.array([each.size_bytes for each in intervals])
    times = np.array([2 * each.beyond_s / each.messages for each in intervals])
    found = np.unique(sizes)
    quick = np.maximum([np.quantile(times[sizes == size], QUICK) for size in found], 1e-9)
    return fit_link(found, quick) if len(found) > 1 else Link(float(quick[0]), 0.0)


def _list_first_uses(ranks: Sequence[Sequence[_Interval]]) -> Iterator[float]:
    """Yields, for each rank, what its first interval took beyond the typical one of its size.

    In seconds of processor time.
    """
    for first, *rest in ranks:
        alike = [
            each.process_s / each.messages for each in rest if each.size_bytes == first.size_bytes
        ]
        if alike:
            yield first.process_s - first.messages * float(np.median(alike))


def _list_collectives(trace: Trace, carrying: Link) -> Iterator[tuple[float, int, Ints]]:
    """Yields, for each kind and size of collective on two ranks.

    Its time without messages, how many it has, and how late each one was.
    """
    events = trace.events
    pairs = np.array([len(group.ranks) == 2 for group in events.tables.groups] or [False])
    known = (
        (events.kind == COLLECTIVE)
        & (events.done_ns != NONE)
        & (events.status == OK)
        & pairs[events.group]
    )
    for op, group, size_bytes in np.unique(
        np.stack([events.op, events.group, events.size_bytes])[:, known], axis=1
    ).T.tolist():
        name = OP_NAMES[op]
        alike = (
            known & (events.op == op) & (events.group == group) & (events.size_bytes == size_bytes)
        )
        own = [
            np.flatnonzero(alike & (events.rank == rank))
            for rank in events.tables.groups[group].ranks
        ]
        count = min(map(len, own))
        if name not in COLLECTIVES or count < LEAST_ALIKE:
            continue
        posted, done = (
            np.stack([column[places[:count]] for places in own])
            for column in (events.post_ns, events.done_ns)
        )
        took_s = (done.max(axis=0) - posted.max(axis=0)) * 1e-9
        # most may have stalled
        usual_s = float(np.median(took_s[took_s <= np.quantile(took_s, 0.1) + STALLED_S]))
        steps = [list_steps(name, place, 2, 0, size_bytes)[0] for place in range(2)]
        messages_s = max(
            sum(carrying.time_s(step.size_bytes) / 2 for step in each) for each in steps
        )
        yield (
            usual_s - messages_s,
            sum(len(step.to) for each in steps for step in each),
            took_s - usual_s,
        )


def _find_late(trace: Trace) -> tuple[Ints, Ints]:
    """Returns, by message, how late it came, in seconds, and whether it might stall.

    Of those that were not awaited, 0 and no. Awaited are messages whose receiver began to wait at
    the latest when both sides were posted; late is what took longer than usual then. A message
    might stall if both ranks were at work on their connection at one time.
    """
    events, messages = trace.events, trace.messages
    sent, received, waited = (
        events.post_ns[messages.send],
        events.post_ns[messages.recv],
        events.wait_ns[messages.recv],
    )
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
    return late_s, awaited & (np.abs(sent - received) * 1e-9 < CLOSE_S)
