"""A simulated schedule as a trace: the spans and messages that ranks record when they run it, or a part of them.

A step of a thousand ranks has fifty million events, so a trace can be asked for of some ranks, and of some time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from ringsim.errors import ArgumentError
from ringsim.simulator.operations import FORWARD, Operations
from ringsim.simulator.prices import Prices
from ringsim.traces.events import NONE, OP_CODES, Group, Ints, Payload, Tables, make_events
from ringsim.traces.stages import KINDS, STEP
from ringsim.traces.value import Trace

__all__ = ["make_trace"]

_WORLD: Final = "world"
_NS: Final = 1e9
MOST_EVENTS: Final = 20_000_000  # in one trace: two gigabytes


def make_trace(
    operations: Operations,
    prices: Prices,
    ends: Ints,
    starts: Ints,
    *,
    rendezvous: bool,
    sizes: list[int] | None,
    metadata: dict[str, Any],
    ranks: Iterable[int] | None = None,
    between: tuple[float, float] | None = None,
) -> Trace:
    """Writes down what the ranks of a simulated step did; a unit of the costs is a second.

    Args:
        operations: the schedule.
        prices: without K.
        ends: when each computation ends, shape (n,).
        starts: when the message of each starts, likewise.
        rendezvous: whether a send ends when its message has arrived, or at once.
        sizes: bytes of a message, for each boundary between stages; None where they are unknown.
        metadata: of the trace.
        ranks: whose events; None for all.
        between: of which time, from and until; None for all. What reaches into it is there whole.

    Returns:
        The trace. Messages are in it where both ranks are.

    Raises:
        ArgumentError: there is no such rank, or there are more events than a trace can hold.
    """
    wanted = _pick_ranks(operations.num_ranks, ranks)
    from_s, until_s = between or (-np.inf, np.inf)
    ends, starts = ends.astype(np.float64), starts.astype(np.float64)
    padded = np.append(ends, 0.0)
    rank, op = operations.rank, operations.direction

    source = _sources(operations)
    arrived = starts + (prices.occupancy[op, operations.stage] + prices.latency[op, operations.stage]).astype(np.float64)
    begins = np.maximum(padded[operations.before], arrived)
    sent, posted = padded[operations.sent_after], padded[operations.posted_after]
    some = np.flatnonzero(wanted[rank] & (ends >= from_s) & (begins <= until_s))
    met = np.flatnonzero((source >= 0) & wanted[rank] & wanted[source] & (arrived >= from_s) & (np.minimum(sent, posted) <= until_s))
    if len(some) + 2 * len(met) > MOST_EVENTS:
        raise ArgumentError(
            f"a trace must have {MOST_EVENTS:,} events or fewer, got {len(some) + 2 * len(met):,}. Ask for a part: trace(ranks=range(8)), "
            "or trace(between=(0, 10))."
        )
    label = operations.kind[some] + 1  # behind the step's
    columns = [_rows(rank[some], "span", 2 * some, post=begins[some], done=ends[some], label=label, of=(operations, some))]

    last = padded[operations.first[1:] - 1] * (np.diff(operations.first) > 0)
    shown = np.unique(rank[some])
    zero = np.zeros(len(shown))
    columns.append(_rows(shown, "span", 2 * operations.first[shown] - 2, post=zero, done=last[shown], label=0 * shown))

    some = met
    groups, group = _groups(operations, some, source[some])
    payloads, payload = _payloads(operations, some, sizes)
    same: dict[str, Any] = {"group": group, "payload": payload}
    over = np.maximum(last[source[some]], arrived[some] if rendezvous else sent[some])
    columns.append(
        _rows(
            source[some], "isend", 2 * operations.sent_after[some] + 1, post=sent[some], wait=last[source[some]], done=over,
            peer=rank[some], **same,
        )
    )  # fmt: skip
    after = np.where(operations.posted_after[some] >= 0, operations.posted_after[some], operations.first[rank[some]] - 1)
    own = padded[operations.before[some]]
    columns.append(
        _rows(
            rank[some], "irecv", 2 * after + 1, post=posted[some], wait=own, done=np.maximum(own, arrived[some]), peer=source[some],
            turn=1 + operations.sent_after[some], **same,
        )
    )  # fmt: skip
    joined = {name: np.concatenate([each[name] for each in columns]) for name in columns[0]}
    order = np.lexsort((joined.pop("turn"), joined.pop("slot"), joined["rank"]))
    labels = (STEP + operations.name, *KINDS)
    tables = Tables(groups=groups, payloads=payloads, labels=labels)
    return Trace(make_events({name: column[order] for name, column in joined.items()}, tables), metadata)


def _pick_ranks(num_ranks: int, ranks: Iterable[int] | None) -> Ints:
    """Returns a mask of the ranks."""
    if ranks is None:
        return np.ones(num_ranks, dtype=bool)
    wanted = np.zeros(num_ranks, dtype=bool)
    for rank in ranks:
        if not 0 <= rank < num_ranks:
            raise ArgumentError(f"ranks must be from 0 to {num_ranks - 1}, got {rank}. Name those to look at.")
        wanted[rank] = True
    return wanted


def _rows(
    rank: Ints, op: str, slot: Ints, *, of: tuple[Operations, Ints] | None = None, turn: Ints | int = 0, **given: Ints
) -> dict[str, Ints]:
    """Returns the columns of some events; ``slot`` and ``turn`` say where on their rank they stand, times are in seconds."""
    rows: dict[str, Ints] = {"rank": rank, "op": np.full(len(rank), OP_CODES[op]), "slot": slot, "turn": np.zeros(len(rank)) + turn}
    for name in ("post", "wait", "done"):
        time = given.get(name)
        rows[f"{name}_ns"] = np.full(len(rank), NONE) if time is None else np.rint(time * _NS).astype(np.int64)
    nothing = np.full(len(rank), NONE)
    operations, some = of or (None, None)
    rows["stage"] = nothing if operations is None else operations.stage[some]
    rows["microbatch"] = nothing if operations is None else operations.microbatch[some]
    rows["label"], rows["peer"] = given.get("label", nothing), given.get("peer", nothing)
    rows["group"], rows["payload"] = given.get("group", nothing), given.get("payload", nothing)
    rows["tag"] = nothing if given.get("peer") is None else 0 * nothing
    return rows


def _sources(operations: Operations) -> Ints:
    """Returns who sends the message of each computation, -1 where there is none."""
    owner = np.array([*operations.stage_ranks, NONE])
    step = np.where(operations.kind == FORWARD, -1, 1)
    source: Ints = owner[np.where(operations.sent_after >= 0, operations.stage + step, -1)]
    return source


def _groups(operations: Operations, some: Ints, source: Ints) -> tuple[tuple[Group, ...], Ints]:
    """Returns the groups that messages go over, and the number of each message's: the edge that its activations take."""
    size = operations.num_ranks
    forward = operations.kind[some] == FORWARD
    rank = operations.rank[some]
    begin, end = np.where(forward, source, rank), np.where(forward, rank, source)
    edge = np.where(end == (begin + 1) % size, begin, np.where(begin == (end + 1) % size, end, size))
    used, number = np.unique(edge, return_inverse=True)
    world = Group(_WORLD, tuple(range(size)))
    named = (
        world if first == size else Group(f"ring:{first}>{(first + 1) % size}", (first, (first + 1) % size)) for first in used.tolist()
    )
    return tuple(named), number


def _payloads(operations: Operations, some: Ints, sizes: list[int] | None) -> tuple[tuple[Payload, ...], Ints]:
    """Returns what messages carry, and the number of each one's; nothing where the sizes are unknown."""
    if sizes is None:
        return (), np.full(len(some), NONE)
    forward = operations.kind[some] == FORWARD
    boundary = operations.stage[some] - forward
    used, number = np.unique(np.array([*sizes, NONE])[boundary], return_inverse=True)
    return tuple(Payload("uint8", (size,), size) for size in used.tolist()), number
