"""From events to the rows of the log: a pure function, whoever recorded them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ringsim.costs import algbw_gb_per_s, busbw_gb_per_s
from ringsim.traces.events import ERROR, IN_FLIGHT, MARK, NONE, OK, OP_NAMES, RECV, SEND, SPAN, Events, Ints
from ringsim.traces.log_table import LogRow
from ringsim.traces.matching import match, split_waits

__all__ = ["is_operation", "make_rows", "straggler_ns"]

_LATE = 0.5  # a program that lets more than this share of an operation pass before it waits may have come after its end


def is_operation(events: Events) -> Ints:
    """Marks what the log is about: messages, collectives, and calls under ``timed_op`` (spans that have a group)."""
    kind = events.kind
    mask: Ints = (kind != MARK) & ((kind != SPAN) | (events.group != NONE))
    return mask


def make_rows(events: Events, first: Ints, *, one_clock: bool = True, by_tag: bool = True) -> tuple[LogRow, ...]:
    """Computes the log.

    Args:
        events: the operations to log, of all ranks, in order of rank and posting; for all of them ``is_operation`` holds.
        first: bool, as long as the events: whether it is the first that its rank did with that peer on that group.
        one_clock: whether the times of different ranks can be compared.
        by_tag: False for a backend that ignores tags (NCCL).

    Returns:
        The rows, by name, operation, group size and message size.

    Example:
        Two ranks reduce 1,000 bytes three times; the first time costs more:

        >>> from ringsim.traces.events import OP_CODES, Group, Payload, Tables, make_events
        >>> tables = Tables(groups=(Group("world", (0, 1)),), payloads=(Payload("uint8", (1000,), 1000),))
        >>> post = np.array([0, 100_000, 200_000] * 2)
        >>> events = make_events({"rank": [0, 0, 0, 1, 1, 1], "op": [OP_CODES["all_reduce"]] * 6, "group": [0] * 6, "payload": [0] * 6,
        ...                       "post_ns": post, "wait_ns": post, "done_ns": post + [50_000, 10_000, 10_000] * 2}, tables)
        >>> (row,) = make_rows(events, np.array([True, False, False] * 2))
        >>> row.name, row.count, row.first_mean_us, row.median_us, row.algbw_gb_per_s, row.busbw_gb_per_s
        ('all_reduce', 3, 50.0, 10.0, 0.1, 0.1)
    """
    if len(events) == 0:
        return ()
    events = replace(events, label=_labels_that_say_more(events))
    sizes = np.maximum(events.size_bytes, 0)
    group_sizes = np.array([*(len(group.ranks) for group in events.tables.groups), 1])[events.group]
    straggler = straggler_ns(events, by_tag=by_tag) if one_clock else np.full(len(events), math.nan)
    # `op` and `label` number names, so a row of this array tells one row of the log from another.
    keys, row_of = np.unique(np.stack([events.label, events.op, group_sizes, sizes]), axis=1, return_inverse=True)
    order = np.argsort(row_of, kind="stable")
    ends = np.cumsum(np.bincount(row_of))
    rows = []
    for (label, op, group_size, size_bytes), members in zip(keys.T.tolist(), np.split(order, ends[:-1]), strict=True):
        op_name = OP_NAMES[op]
        name = op_name if label == NONE else events.tables.labels[label]
        rows.append(_make_row(name, op_name, group_size, size_bytes, events.select(members), first[members], straggler[members]))
    return tuple(sorted(rows, key=lambda row: (row.name, row.op, row.group_size, row.size_bytes)))


def _labels_that_say_more(events: Events) -> Ints:
    """Returns the labels, without those that repeat the name of the operation."""
    pairs, pair_of = np.unique(np.stack([events.label, events.op.astype(np.int32)]), axis=1, return_inverse=True)
    labels = [NONE if label == NONE or events.tables.labels[label] == OP_NAMES[op] else label for label, op in pairs.T.tolist()]
    return np.array(labels, dtype=events.label.dtype)[pair_of]


def _make_row(name: str, op: str, group_size: int, size_bytes: int, events: Events, first: Ints, straggler: Ints) -> LogRow:
    done = (events.status == OK) & (events.done_ns != NONE)
    latency_us = (events.done_ns - events.post_ns) * 1e-3
    wait_ns = np.where(events.wait_ns == NONE, events.post_ns, events.wait_ns)  # a span has none: its caller was there all the time
    blocked_us = (events.done_ns - wait_ns) * 1e-3
    steady = done & ~first
    count = _count(events)
    median_us = _of(np.median, latency_us[steady])
    mean_us, blocked_mean_us = _of(np.mean, latency_us[steady]), _of(np.mean, blocked_us[steady])
    known_as = name if op == "span" else op
    return LogRow(
        name=name,
        op=op,
        group_size=group_size,
        size_bytes=size_bytes,
        count=count,
        in_flight=int(np.count_nonzero(events.status == IN_FLIGHT)),
        failed=int(np.count_nonzero(events.status == ERROR)),
        first_count=int(np.count_nonzero(first)),
        first_mean_us=_of(np.mean, latency_us[done & first]),
        total_us=float(latency_us[done].sum()) * count / len(events),
        mean_us=mean_us,
        median_us=median_us,
        p10_us=_of(lambda values: np.percentile(values, 10), latency_us[steady]),
        p90_us=_of(lambda values: np.percentile(values, 90), latency_us[steady]),
        blocked_mean_us=blocked_mean_us,
        overlap_mean_us=mean_us - blocked_mean_us,
        straggler_mean_us=_of(np.mean, straggler[steady & ~np.isnan(straggler)] * 1e-3),
        algbw_gb_per_s=algbw_gb_per_s(size_bytes, median_us),
        busbw_gb_per_s=busbw_gb_per_s(known_as, size_bytes, median_us, group_size),
        lower_bound=_of(np.median, (latency_us - blocked_us)[steady] / np.maximum(latency_us[steady], 1e-3)) > _LATE,
    )


def _of(statistic: object, values: Ints) -> float:
    """Returns a statistic, NaN of nothing."""
    return float(statistic(values)) if len(values) else math.nan  # type: ignore[operator]


def _count(events: Events) -> int:
    """Returns how many operations these records are of: a collective leaves one on each rank that took part."""
    if events.kind[0] in (SEND, RECV):
        return len(events)
    group_and_rank, records = np.unique(np.stack([events.group, events.rank]), axis=1, return_counts=True)
    most: dict[int, int] = {}
    for group, number in zip(group_and_rank[0].tolist(), records.tolist(), strict=True):
        most[group] = max(most.get(group, 0), number)
    return sum(most.values())


def straggler_ns(events: Events, *, by_tag: bool = True) -> Ints:
    """Returns how long each operation was blocked before the last rank it needs had posted its side.

    The k-th operation of a name, group and payload on one rank is taken for the k-th on the others, if all ranks of the group have equally
    many: ranks may log different things.

    Args:
        events: operations of all ranks, in order of rank and posting, on one clock.
        by_tag: False for a backend that ignores tags.

    Returns:
        float64 in ns, NaN where the other side is not known.

    Source:
        Scalasca's wait state "n-to-n": from the time a rank waits to the time the last one begins.
    """
    late = np.full(len(events), math.nan)
    messages = match(events, by_tag=by_tag)
    waits = split_waits(events, messages)
    for side in (messages.send, messages.recv):
        late[side] = waits.late_sender_ns[side] + waits.late_receiver_ns[side]
    kind = events.kind
    collective = np.flatnonzero((kind != SEND) & (kind != RECV))
    if len(collective) == 0:
        return late
    _, key = np.unique(
        np.stack([events.group[collective], events.op[collective], events.payload[collective], events.label[collective]]),
        axis=1,
        return_inverse=True,
    )
    for number in range(int(key.max()) + 1):
        members = collective[key == number]
        group = int(events.group[members[0]])
        expected = len(events.tables.groups[group].ranks) if group != NONE else 0
        ranks, records = np.unique(events.rank[members], return_counts=True)
        if len(ranks) != expected or len(set(records.tolist())) != 1:
            continue
        members = members.reshape(expected, -1)  # ordered by rank, and within it by posting: one column a collective
        last_post = events.post_ns[members].max(axis=0)
        wait, done = events.wait_ns[members], events.done_ns[members]
        begin = np.where(wait == NONE, events.post_ns[members], wait)
        until = np.where(done == NONE, last_post, np.minimum(last_post, done))
        late[members] = np.maximum(until - begin, 0)
    return late
