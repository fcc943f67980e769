"""Converts a simulated step to a trace, with the spans and messages that ranks would record.

A step on a thousand ranks has fifty million events, so you can limit a trace to some ranks and to
part of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringsim.errors import LONGEST_S, ArgumentError, is_number, say
from ringsim.simulator.columns import FORWARD, Columns
from ringsim.simulator.levels import Times
from ringsim.traces.events import NONE, OP_CODES, Group, Ints, Payload, Tables, make_events
from ringsim.traces.steps import KINDS, STEP
from ringsim.traces.value import Trace

_NS = 1e9
_BLANK = dict.fromkeys(("stage", "microbatch", "label", "peer", "tag", "group", "payload"), NONE)
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
    operations, starts = times.columns, times.starts
    wanted = np.full(operations.num_ranks, ranks is None)
    wanted[list(ranks or ())] = True
    place = np.flatnonzero(wanted[operations.rank])
    source = operations.sources(place)
    met = place[(source >= 0) & wanted[source]]
    from_s, until_s = between or (-np.inf, np.inf)
    some = place[(times.ends[place] >= from_s) & (starts[place] <= until_s)]
    sent, posted = operations.sent_after[met], operations.posted_after[met]
    begins = np.minimum(times.ends_of(sent), times.ends_of(posted))
    met = met[(times.arrivals[met] >= from_s) & (begins <= until_s)]
    count = len(some) + 2 * len(met)
    if count > MOST_EVENTS:
        raise ArgumentError(
            f"a trace must have at most {MOST_EVENTS:,} events, got {count:,}. Select a part, for "
            "example with trace(ranks=range(8)) or trace(between=(0, 10))."
        )
    groups, group = _groups(operations, met)
    payloads, payload = _payloads(operations, met, sizes)
    columns = [
        *_list_spans(times, some, starts[some]),
        *_list_messages(times, met, {"group": group, "payload": payload, "tag": 0}),
    ]
    joined = {name: np.concatenate([each[name] for each in columns]) for name in columns[0]}
    order = np.lexsort((joined.pop("turn"), joined.pop("slot"), joined["rank"]))
    for name in ("post", "wait", "done"):
        joined[f"{name}_ns"] = np.rint(joined.pop(name).astype(np.float64) * _NS).astype(np.int64)
    name = operations.name if ranks is None and between is None else f"part of {operations.name}"
    tables = Tables(groups=groups, payloads=payloads, labels=(STEP + name, *KINDS))
    return Trace(
        make_events({name: column[order] for name, column in joined.items()}, tables), metadata
    )


def _list_spans(times: Times, some: Ints, starts: Ints) -> list[dict[str, Ints]]:
    """Returns the spans of given computations, and the spans of the step on their ranks."""
    operations, first = times.columns, times.columns.first
    rank = operations.rank[some]
    spans = _rows(
        "span",
        rank=rank,
        slot=2 * some,
        post=starts,
        done=times.ends[some],
        label=operations.kind[some] + 1,  # label 0 is the step's
        stage=operations.stage[some],
        microbatch=operations.microbatch[some],
        # a computation that overlaps with the previous one has a stream of its own
        thread=starts < times.ends_of(operations.before[some]),
    )
    shown = np.unique(rank)
    last = times.ends[first[shown + 1] - 1]
    steps = _rows("span", rank=shown, slot=2 * first[shown] - 2, post=0, done=last, label=0)
    return [spans, steps]


def _list_messages(times: Times, met: Ints, same: dict[str, Any]) -> list[dict[str, Ints]]:
    """Returns the sends and the receives of given messages."""
    operations, first = times.columns, times.columns.first
    rank, sender = operations.rank[met], operations.sources(met)
    made, after = operations.sent_after[met], operations.posted_after[met]
    sent, own, arrived = times.ends_of(made), times.free[met], times.arrivals[met]
    last = times.ends[first[sender + 1] - 1]  # of the sender
    sends = _rows(
        "isend",
        rank=sender,
        slot=2 * made + 1,
        post=sent,
        wait=last,
        done=np.maximum(last, arrived if times.rendezvous else sent),
        peer=rank,
        **same,
    )
    receives = _rows(
        "irecv",
        rank=rank,
        slot=2 * np.where(after >= 0, after, first[rank] - 1) + 1,
        turn=1 + made,
        post=times.ends_of(after),
        wait=own,
        done=np.maximum(own, arrived),
        peer=sender,
        **same,
    )
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


def _rows(op: str, **given: Any) -> dict[str, Ints]:
    """Returns the columns of some events.

    ``slot`` and ``turn`` order the events on their rank. A number applies to all of the events.
    Times are in seconds.
    """
    columns = {**_BLANK, "wait": NONE / _NS, "turn": 0, "thread": 0, **given, "op": OP_CODES[op]}
    return {name: np.broadcast_to(each, len(given["rank"])) for name, each in columns.items()}


def _groups(operations: Columns, some: Ints) -> tuple[tuple[Group, ...], Ints]:
    """Returns the groups of the messages, and the number of each message's group.

    A message's group is the ring's edge that carries the activations.
    """
    size = operations.num_ranks
    forward = operations.kind[some] == FORWARD
    rank, source = operations.rank[some], operations.sources(some)
    begin, end = np.where(forward, source, rank), np.where(forward, rank, source)
    edge = np.where(
        end == (begin + 1) % size, begin, np.where(begin == (end + 1) % size, end, size)
    )
    used, number = np.unique(edge, return_inverse=True)
    groups = (
        Group("world", tuple(range(size)))
        if first == size
        else Group(f"ring:{first}>{(first + 1) % size}", (first, (first + 1) % size))
        for first in used.tolist()
    )
    return tuple(groups), number


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
