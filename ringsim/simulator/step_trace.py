"""Converts a simulated step to a trace, with the spans and messages that ranks would record.

A step on a thousand ranks has fifty million events, so you can limit a trace to some ranks and to
part of the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringsim.errors import LONGEST_S, ArgumentError, is_number, say
from ringsim.simulator.columns import FORWARD, Columns
from ringsim.simulator.levels import Times
from ringsim.traces.events import NONE, OP_CODES, Group, Ints, Payload, Tables, make_events
from ringsim.traces.steps import KINDS, STEP
from ringsim.traces.value import Trace

_WORLD = "world"
_NS = 1e9
_FROM_0 = ("turn", "thread")  # columns in which a missing number counts as 0
MOST_EVENTS = 20_000_000  # the most events in a trace; they take two gigabytes


def make_trace(
    times: Times,
    sizes: list[int] | None,
    metadata: dict[str, Any],
    ranks: Sequence[int] | None,
    between: tuple[float, float] | None,
) -> Trace:
    """Returns the trace of a simulated step, in which one unit of cost is one second.

    Args:
        times: the times of all events.
        sizes: the size in bytes of a message at each boundary between stages, or None if the sizes
            are unknown.
        metadata: the metadata of the trace.
        ranks: the ranks whose events to include, or None for all ranks. A message is included if
            both of its ranks are included.
        between: the start and the end of the time to include, or None for the whole step. Events
            that overlap this time are included whole.

    Raises:
        ArgumentError: the trace would have too many events, or the step takes too long.
    """
    if len(times.ends) and times.ends.max() > LONGEST_S:
        raise ArgumentError(
            f"a step in a trace must take at most {LONGEST_S:g} s (285 years), got "
            f"{float(times.ends.max()):g} s. "
            "Pass the costs in seconds."
        )
    from_s, until_s = between or (-np.inf, np.inf)
    part = _Part(times, ranks)
    some = np.flatnonzero((part.done >= from_s) & (part.begins <= until_s))
    met = np.flatnonzero(
        part.is_met & (part.arrived >= from_s) & (np.minimum(part.sent, part.posted) <= until_s)
    )
    count = len(some) + 2 * len(met)
    if count > MOST_EVENTS:
        raise ArgumentError(
            f"a trace must have at most {MOST_EVENTS:,} events, got {count:,}. Select a part, for "
            "example with trace(ranks=range(8)) or trace(between=(0, 10))."
        )
    operations = times.columns
    groups, group = _groups(operations, part.place[met], part.source[met])
    payloads, payload = _payloads(operations, part.place[met], sizes)
    joined = _join(
        *part.list_spans(some), *part.list_messages(met, {"group": group, "payload": payload})
    )
    order = np.lexsort((joined.pop("turn"), joined.pop("slot"), joined["rank"]))
    name = operations.name if ranks is None and between is None else f"part of {operations.name}"
    tables = Tables(groups=groups, payloads=payloads, labels=(STEP + name, *KINDS))
    return Trace(
        make_events({name: column[order] for name, column in joined.items()}, tables), metadata
    )


class _Part:
    """The computations of some ranks, with all times in seconds."""

    def __init__(self, times: Times, ranks: Sequence[int] | None) -> None:
        self.operations = operations = times.columns
        self.rendezvous = times.rendezvous
        wanted = np.full(operations.num_ranks, ranks is None)
        wanted[list(ranks or ())] = True
        self.place = place = np.flatnonzero(np.repeat(wanted, np.diff(operations.first)))
        # for each rank
        lasts = np.where(np.diff(operations.first) > 0, operations.first[1:] - 1, -1)
        self.before, self.sent, self.posted, self.last = (
            times.ends_of(each).astype(np.float64)
            for each in (
                operations.before[place],
                operations.sent_after[place],
                operations.posted_after[place],
                lasts,
            )
        )
        self.own, self.arrived, self.done = (
            each[place].astype(np.float64) for each in (times.free, times.arrivals, times.ends)
        )
        self.begins = np.maximum(self.own, self.arrived)
        self.source = operations.sources(place)
        self.is_met = (self.source >= 0) & wanted[self.source]

    def list_spans(self, some: Ints) -> list[dict[str, Any]]:
        """Returns the spans of given computations, and the spans of the step on their ranks."""
        operations, place = self.operations, self.place[some]
        rank, label = operations.rank[place], operations.kind[place] + 1  # label 0 is the step's
        spans = {
            "rank": rank,
            "op": OP_CODES["span"],
            "slot": 2 * place,
            "post_ns": _ns(self.begins[some]),
            "done_ns": _ns(self.done[some]),
            "label": label,
            "stage": operations.stage[place],
            "microbatch": operations.microbatch[place],
            # a computation that overlaps with the previous one has a stream of its own
            "thread": self.begins[some] < self.before[some],
        }
        shown = np.unique(rank)
        steps = {
            "rank": shown,
            "op": OP_CODES["span"],
            "slot": 2 * operations.first[shown] - 2,
            "post_ns": 0,
            "done_ns": _ns(self.last[shown]),
            "label": 0,
        }
        return [spans, steps]

    def list_messages(self, met: Ints, same: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the sends and the receives of given messages."""
        operations, place, sender = self.operations, self.place[met], self.source[met]
        rank, sent, arrived = operations.rank[place], self.sent[met], self.arrived[met]
        made, after = operations.sent_after[place], operations.posted_after[place]
        over = np.maximum(self.last[sender], arrived if self.rendezvous else sent)
        sends = {
            **same,
            "rank": sender,
            "op": OP_CODES["isend"],
            "slot": 2 * made + 1,
            "post_ns": _ns(sent),
            "wait_ns": _ns(self.last[sender]),
            "done_ns": _ns(over),
            "peer": rank,
            "tag": 0,
        }
        receives = {
            **same,
            "rank": rank,
            "op": OP_CODES["irecv"],
            "slot": 2 * np.where(after >= 0, after, operations.first[rank] - 1) + 1,
            "turn": 1 + made,
            "post_ns": _ns(self.posted[met]),
            "wait_ns": _ns(self.own[met]),
            "done_ns": _ns(np.maximum(self.own[met], arrived)),
            "peer": sender,
            "tag": 0,
        }
        return [sends, receives]


def check_between(between: object) -> None:
    """Raises ArgumentError unless ``between`` is None or two times."""
    times = between if isinstance(between, tuple | list) and len(between) == 2 else [None]
    known = all(is_number(time) or (isinstance(time, float) and np.isinf(time)) for time in times)
    if between is not None and not known:
        raise ArgumentError(
            f"between must be a start and an end time, got {say(between)}. Write, for example, "
            "between=(0, 10)."
        )


def _ns(time_s: Ints) -> Ints:
    """Converts times in seconds to the unit of traces."""
    return np.rint(time_s * _NS).astype(np.int64)


def _join(*parts: dict[str, Any]) -> dict[str, Ints]:
    """Joins the columns of several kinds of events, in which single numbers apply to all events.

    The columns ``slot`` and ``turn`` order the events on their rank. Columns that do not apply to a
    kind of event may be missing.
    """
    return {
        name: np.concatenate(
            [
                np.full(np.shape(part["rank"]), part.get(name, 0 if name in _FROM_0 else NONE))
                for part in parts
            ]
        )
        for name in dict.fromkeys(itertools.chain(*parts))
    }


def _groups(operations: Columns, some: Ints, source: Ints) -> tuple[tuple[Group, ...], Ints]:
    """Returns the groups of the messages, and the number of each message's group.

    A message's group is the ring's edge that carries the activations.
    """
    size = operations.num_ranks
    forward = operations.kind[some] == FORWARD
    rank = operations.rank[some]
    begin, end = np.where(forward, source, rank), np.where(forward, rank, source)
    edge = np.where(
        end == (begin + 1) % size, begin, np.where(begin == (end + 1) % size, end, size)
    )
    used, number = np.unique(edge, return_inverse=True)
    world = Group(_WORLD, tuple(range(size)))
    named = (
        world
        if first == size
        else Group(f"ring:{first}>{(first + 1) % size}", (first, (first + 1) % size))
        for first in used.tolist()
    )
    return tuple(named), number


def _payloads(
    operations: Columns, some: Ints, sizes: list[int] | None
) -> tuple[tuple[Payload, ...], Ints]:
    """Returns the payloads of the messages, and the number of each message's payload.

    There are no payloads if the sizes are unknown.
    """
    if sizes is None:
        return (), np.full(len(some), NONE)
    forward = operations.kind[some] == FORWARD
    boundary = operations.stage[some] - forward
    used, number = np.unique(np.array([*sizes, NONE])[boundary], return_inverse=True)
    return tuple(Payload("uint8", (size,), size) for size in used.tolist()), number
