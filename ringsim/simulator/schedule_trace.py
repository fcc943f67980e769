"""A simulated schedule as a trace: the spans and messages that ranks record when they run it, or a part of them.

A step of a thousand ranks has fifty million events, so a trace can be asked for of some ranks, and of some time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from ringsim.errors import LONGEST_S, ArgumentError, is_integer, is_number, say
from ringsim.simulator.operations import FORWARD, Operations
from ringsim.simulator.prices import Prices
from ringsim.traces.events import NONE, OP_CODES, Group, Ints, Payload, Tables, make_events
from ringsim.traces.stages import KINDS, STEP
from ringsim.traces.value import Trace

__all__ = ["check_between", "check_ranks", "make_trace"]

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
    ranks: Sequence[int] | None = None,
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
        ArgumentError: there are more events, or the step takes longer, than a trace can hold.
    """
    wanted = _pick_ranks(operations.num_ranks, ranks)
    if len(ends) and ends.max() > LONGEST_S:
        raise ArgumentError(
            f"costs must make a step of {LONGEST_S:g} or less for a trace of it, got {float(ends.max()):g}: a unit is a second there, and "
            "285 years are what fits. Give the costs in seconds."
        )
    from_s, until_s = between or (-np.inf, np.inf)
    # Only what belongs to the ranks is worked out: they may be few of many.
    near = np.flatnonzero(np.repeat(wanted, np.diff(operations.first)))
    direction, stage = operations.direction[near], operations.stage[near]
    travel = (prices.occupancy[direction, stage] + prices.latency[direction, stage]).astype(np.float64)
    arrived = starts[near].astype(np.float64) + travel
    done = ends[near].astype(np.float64)
    own = _ends_of(ends, operations.before[near])
    begins = np.maximum(own, arrived)
    source = _sources(operations, near)
    sent, posted = _ends_of(ends, operations.sent_after[near]), _ends_of(ends, operations.posted_after[near])
    some = np.flatnonzero((done >= from_s) & (begins <= until_s))
    met = np.flatnonzero((source >= 0) & wanted[source] & (arrived >= from_s) & (np.minimum(sent, posted) <= until_s))
    if len(some) + 2 * len(met) > MOST_EVENTS:
        raise ArgumentError(
            f"a trace must have {MOST_EVENTS:,} events or fewer, got {len(some) + 2 * len(met):,}. Ask for a part: trace(ranks=range(8)), "
            "or trace(between=(0, 10))."
        )
    rank, place, label = operations.rank[near[some]], near[some], operations.kind[near[some]] + 1  # behind the step's
    columns = [_rows(rank, "span", 2 * place, post=begins[some], done=done[some], label=label, of=(operations, place))]

    last = _ends_of(ends, np.where(np.diff(operations.first) > 0, operations.first[1:] - 1, -1))
    shown = np.unique(rank)
    zero = np.zeros(len(shown))
    columns.append(_rows(shown, "span", 2 * operations.first[shown] - 2, post=zero, done=last[shown], label=0 * shown))

    rank, place, sender = operations.rank[near[met]], near[met], source[met]
    sent, posted, own, arrived = sent[met], posted[met], own[met], arrived[met]
    groups, group = _groups(operations, place, sender)
    payloads, payload = _payloads(operations, place, sizes)
    same: dict[str, Any] = {"group": group, "payload": payload}
    made, after = operations.sent_after[place], operations.posted_after[place]
    over = np.maximum(last[sender], arrived if rendezvous else sent)
    columns.append(_rows(sender, "isend", 2 * made + 1, post=sent, wait=last[sender], done=over, peer=rank, **same))
    slot = 2 * np.where(after >= 0, after, operations.first[rank] - 1) + 1
    over = np.maximum(own, arrived)
    columns.append(_rows(rank, "irecv", slot, post=posted, wait=own, done=over, peer=sender, turn=1 + made, **same))
    joined = {name: np.concatenate([each[name] for each in columns]) for name in columns[0]}
    order = np.lexsort((joined.pop("turn"), joined.pop("slot"), joined["rank"]))
    name = operations.name if ranks is None and between is None else f"part of {operations.name}"
    labels = (STEP + name, *KINDS)
    tables = Tables(groups=groups, payloads=payloads, labels=labels)
    return Trace(make_events({name: column[order] for name, column in joined.items()}, tables), metadata)


def check_ranks(ranks: Iterable[int], num_ranks: int) -> list[int]:
    """Returns the ranks whose events are asked for, checked.

    Args:
        ranks: some ranks.
        num_ranks: how many there are.

    Raises:
        ArgumentError: they are no ranks, or there is no such one.

    Example:
        >>> check_ranks(range(2), num_ranks=4)
        [0, 1]
    """
    try:
        chosen = list(ranks)
    except TypeError:
        raise ArgumentError(f"ranks must be a list of them, got {say(ranks)}. Write ranks=[0].") from None
    for rank in chosen:
        if not is_integer(rank) or not 0 <= rank < num_ranks:
            raise ArgumentError(f"ranks must be from 0 to {num_ranks - 1}, got {say(rank)}. Name those to look at.")
    return chosen


def check_between(between: object) -> None:
    """Checks that an argument is two times, or None.

    Args:
        between: what was passed.

    Raises:
        ArgumentError: it is neither.
    """
    times = between if isinstance(between, tuple | list) and len(between) == 2 else [None]
    known = all(is_number(time) or (isinstance(time, float) and np.isinf(time)) for time in times)
    if between is not None and not known:
        raise ArgumentError(f"between must be two times, from and until, got {say(between)}. Write between=(0, 10).")


def _pick_ranks(num_ranks: int, ranks: Sequence[int] | None) -> Ints:
    """Returns a mask of the ranks."""
    wanted = np.full(num_ranks, ranks is None)
    wanted[list(ranks or ())] = True
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


def _ends_of(ends: Ints, some: Ints) -> Ints:
    """Returns when computations end; 0 for -1, the start of the step."""
    times = np.zeros(len(some))
    times[some >= 0] = ends[some[some >= 0]]
    return times


def _sources(operations: Operations, some: Ints) -> Ints:
    """Returns who sends the messages of computations, -1 where there is none."""
    owner = np.array([*operations.stage_ranks, NONE])
    step = np.where(operations.kind[some] == FORWARD, -1, 1)
    source: Ints = owner[np.where(operations.sent_after[some] >= 0, operations.stage[some] + step, -1)]
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
