"""What follows from a simulated step: its critical path, what improving a part would gain, and the step as a trace.

The critical path is a chain of computations and messages, each of which begins when the previous one ends. Why it did not begin earlier::

    program order    the rank was busy with the previous computation
    data             a computation waited for its message, or a message for its payload
    link busy        the previous message was still on the link
    receiver late    the receive was not posted
    start            nothing came before

A step is as long as the longest of many ways through it. So improving a stage, a link or the size of messages gains no more than what the
critical path spends on it, and less once another way is the longest: how much is found by simulating again.

The trace holds the spans and messages that ranks would record. A step of a thousand ranks has fifty million events, so a trace can be made
of some ranks and some time only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from ringsim.errors import LONGEST_S, ArgumentError, is_integer, is_number, say
from ringsim.schedules.costs import Time
from ringsim.schedules.schedule import Action
from ringsim.simulator.columns import FORWARD, Columns, Prices
from ringsim.traces.events import NONE, OP_CODES, Group, Ints, Payload, Tables, make_events
from ringsim.traces.steps import KINDS, STEP
from ringsim.traces.value import Trace

__all__ = [
    "DATA",
    "LINK_BUSY",
    "PROGRAM",
    "REASONS",
    "RECEIVER_LATE",
    "START",
    "CriticalPath",
    "Hop",
    "Lever",
    "Sensitivity",
    "check_between",
    "check_ranks",
    "find_critical_path",
    "improve",
    "list_levers",
    "make_trace",
]

START: Final = "start"
PROGRAM: Final = "program order"
DATA: Final = "data"
LINK_BUSY: Final = "link busy"
RECEIVER_LATE: Final = "receiver late"
REASONS: Final = (START, PROGRAM, DATA, LINK_BUSY, RECEIVER_LATE)


class Hop(NamedTuple):
    """One stretch of the critical path.

    Attributes:
        action: a computation, or the send of a message.
        rank: who computes, or receives.
        source: who sends; -1 for a computation.
        start: when it begins, which is when the hop before it ends.
        end: when it ends, or when the message has arrived, or has left the link to the next one.
        reason: why it did not begin earlier.
    """

    action: Action
    rank: int
    source: int
    start: Time
    end: Time
    reason: str


@dataclass(frozen=True)
class CriticalPath:
    """The chain that takes as long as the step: anything that is not on it may be a little slower at no cost.

    Attributes:
        hops: from the start of the step to its end.

    Example:
        See ``ScheduleRun.critical_path``.
    """

    hops: tuple[Hop, ...]

    def __len__(self) -> int:
        """Returns the number of hops."""
        return len(self.hops)

    @property
    def by_reason(self) -> dict[str, int]:
        """How often each reason occurs; those that do not occur are left out."""
        counts = dict.fromkeys(REASONS, 0)
        for hop in self.hops:
            counts[hop.reason] += 1
        return {reason: number for reason, number in counts.items() if number}

    @property
    def computing(self) -> Time:
        """How much of the step the path spends computing."""
        return sum(hop.end - hop.start for hop in self.hops if hop.source < 0)

    @property
    def travelling(self) -> Time:
        """How much of the step the path spends on links; together with ``computing`` it is the whole step."""
        return sum(hop.end - hop.start for hop in self.hops if hop.source >= 0)

    def __repr__(self) -> str:
        """Returns its length and its parts."""
        why = ", ".join(f"{reason} {number:,}" for reason, number in self.by_reason.items())
        return f"Critical path of {len(self):,} hops: computing {float(self.computing):.6g}, on links {float(self.travelling):.6g}; {why}"


def find_critical_path(operations: Columns, prices: Prices, ends: Ints, starts: Ints, *, rendezvous: bool) -> CriticalPath:
    """Walks from the last computation back to the start of the step, each time to what was waited for longest.

    If two ends coincide, the rank's own order counts first, then the data.

    Args:
        operations: the schedule.
        prices: without K.
        ends: when each computation ends, shape (n,).
        starts: when the message of each starts, likewise.
        rendezvous: whether a message starts only when its receive is posted, too.

    Returns:
        The path.
    """
    hops: list[Hop] = []
    here = int(ends.argmax()) if len(ends) else -1
    zero = ends[:0].sum()
    while here >= 0:
        kind, stage, rank = int(operations.kind[here]), int(operations.stage[here]), operations.rank_of(here)
        before, made = int(operations.before[here]), int(operations.sent_after[here])
        direction = int(kind != FORWARD)
        own = ends[before] if before >= 0 else zero
        arrived = starts[here] + prices.occupancy[direction, stage] + prices.latency[direction, stage] if made >= 0 else None
        if arrived is None or arrived <= own:
            hops.append(Hop(operations.action(here), rank, -1, _plain(own), _plain(ends[here]), PROGRAM if before >= 0 else START))
            here = before
            continue
        hops.append(Hop(operations.action(here), rank, -1, _plain(arrived), _plain(ends[here]), DATA))
        here = _walk_messages(hops, operations, ends, starts, here, arrived, rendezvous=rendezvous)
    return CriticalPath(tuple(reversed(hops)))


def _walk_messages(hops: list[Hop], operations: Columns, ends: Ints, starts: Ints, here: int, until: Time, *, rendezvous: bool) -> int:
    """Adds the message of a computation, and those it queued behind; returns the computation that the first of them waited for."""
    rank, source = operations.rank_of(here), operations.source(here)
    while True:
        start, queued = starts[here], int(operations.queued_after[here])
        made, posted = int(operations.sent_after[here]), int(operations.posted_after[here])
        reason, next_place = DATA, made
        if ends[made] != start:
            is_late = rendezvous and posted >= 0 and ends[posted] == start
            reason, next_place = (RECEIVER_LATE, posted) if is_late else (LINK_BUSY, queued)
        kind, step = ("SEND_F", -1) if operations.kind[here] == FORWARD else ("SEND_B", 1)
        send = Action(int(operations.stage[here]) + step, kind, int(operations.microbatch[here]))
        hops.append(Hop(send, rank, source, _plain(start), _plain(until), reason))
        if reason != LINK_BUSY:
            return next_place
        here, until = next_place, start


def _plain(time: Time) -> Time:
    """Returns a Python float for one of numpy; Fractions stay."""
    return float(time) if isinstance(time, float) else time


@dataclass(frozen=True)
class Lever:
    """One thing that could be improved.

    Attributes:
        what: ``stage 3``, ``link 2>3`` or ``message size``.
        on_path: how long the critical path spends on it, in the unit of the costs.
        gain: by how much the step is shorter when it is improved, simulated.
        bound: by how much at most, from ``on_path``.
    """

    what: str
    on_path: float
    gain: float
    bound: float


@dataclass(frozen=True, repr=False)
class Sensitivity:
    """What improving single things would bring, the best first.

    Attributes:
        by: how much each is improved: 0.1 makes it 10 % faster.
        makespan: how long the step takes now.
        levers: what was tried.
    """

    by: float
    makespan: float
    levers: tuple[Lever, ...]

    def __repr__(self) -> str:
        """Returns a table."""
        lines = [f"Improved by {self.by:.0%}:    gain    of the step   at most"]
        for lever in self.levers:
            share = lever.gain / self.makespan if self.makespan else 0.0
            lines.append(f"  {lever.what:<16} {lever.gain:>9.4g} {share:>12.2%} {lever.bound:>9.4g}")
        return "\n".join(lines)


def list_levers(path: CriticalPath, prices: Prices) -> dict[str, float]:
    """Returns how long the critical path spends on each stage, each link and on the size of messages, the longest first.

    Args:
        path: the critical path.
        prices: without K.

    Returns:
        Times by name, as in ``Lever.what``; what is not on the path is left out.
    """
    spent: dict[str, Time] = {}
    for hop in path.hops:
        stage, kind, _ = hop.action
        if hop.source < 0:
            spent[f"stage {stage}"] = spent.get(f"stage {stage}", 0) + (hop.end - hop.start)
            continue
        link = f"link {hop.source}>{hop.rank}"
        spent[link] = spent.get(link, 0) + (hop.end - hop.start)
        receiver, direction = (stage + 1, 0) if kind == "SEND_F" else (stage - 1, 1)
        if prices.occupancy[direction, receiver] > 0:
            spent["message size"] = spent.get("message size", 0) + prices.occupancy[direction, receiver]
    ordered = sorted(spent.items(), key=lambda item: (-float(item[1]), item[0]))
    return {what: float(time) for what, time in ordered if time > 0}


def improve(what: str, by: float, stage_ranks: Sequence[int], prices: Prices) -> Prices:
    """Returns prices with one thing cheaper.

    Args:
        what: as in ``Lever.what``.
        by: which part of its cost is saved, from 0 to 1.
        stage_ranks: for each stage, the rank that has it.
        prices: without K.
    """
    factor = 1 - by
    duration, occupancy, latency = (table.astype(float) for table in (prices.duration, prices.occupancy, prices.latency))
    if what == "message size":
        return replace(prices, duration=duration, occupancy=occupancy * factor, latency=latency)
    noun, _, name = what.partition(" ")
    if noun == "stage":
        duration[:, int(name)] *= factor
        return replace(prices, duration=duration, occupancy=occupancy, latency=latency)
    source, rank = map(int, name.split(">"))
    for direction, step in ((FORWARD, -1), (1, 1)):
        for stage in range(len(stage_ranks)):
            if 0 <= stage + step < len(stage_ranks) and (stage_ranks[stage + step], stage_ranks[stage]) == (source, rank):
                occupancy[direction, stage] *= factor
                latency[direction, stage] *= factor
    return replace(prices, duration=duration, occupancy=occupancy, latency=latency)


_WORLD: Final = "world"
_NS: Final = 1e9
MOST_EVENTS: Final = 20_000_000  # in one trace: two gigabytes


def make_trace(
    operations: Columns,
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
    """Makes the trace of a simulated step; a unit of the costs is a second.

    Args:
        operations: the schedule.
        prices: without K.
        ends: when each computation ends, shape (n,).
        starts: when the message of each starts, likewise.
        rendezvous: whether a send ends when its message has arrived, or at once.
        sizes: bytes of a message, for each boundary between stages; None where they are unknown.
        metadata: of the trace.
        ranks: whose events; None for all.
        between: of which time, from and until; None for all. Events that reach into it are complete.

    Returns:
        The trace. It has the messages whose two ranks it has.

    Raises:
        ArgumentError: there are more events, or the step takes longer, than a trace can hold.
    """
    if len(ends) and ends.max() > LONGEST_S:
        raise ArgumentError(
            f"costs must make a step of {LONGEST_S:g} or less for a trace of it, got {float(ends.max()):g}: a unit is a second there, and "
            "285 years are what fits. Give the costs in seconds."
        )
    from_s, until_s = between or (-np.inf, np.inf)
    part = _Part(operations, prices, ends, starts, ranks)
    some = np.flatnonzero((part.done >= from_s) & (part.begins <= until_s))
    met = np.flatnonzero(part.is_met & (part.arrived >= from_s) & (np.minimum(part.sent, part.posted) <= until_s))
    if len(some) + 2 * len(met) > MOST_EVENTS:
        raise ArgumentError(
            f"a trace must have {MOST_EVENTS:,} events or fewer, got {len(some) + 2 * len(met):,}. Ask for a part: trace(ranks=range(8)), "
            "or trace(between=(0, 10))."
        )
    groups, group = _groups(operations, part.place[met], part.source[met])
    payloads, payload = _payloads(operations, part.place[met], sizes)
    columns = [*part.list_spans(some), *part.list_messages(met, {"group": group, "payload": payload}, rendezvous=rendezvous)]
    joined = {name: np.concatenate([each[name] for each in columns]) for name in columns[0]}
    order = np.lexsort((joined.pop("turn"), joined.pop("slot"), joined["rank"]))
    name = operations.name if ranks is None and between is None else f"part of {operations.name}"
    tables = Tables(groups=groups, payloads=payloads, labels=(STEP + name, *KINDS))
    return Trace(make_events({name: column[order] for name, column in joined.items()}, tables), metadata)


class _Part:
    """The computations of some ranks, which may be few of many, and when everything about them happens, in seconds."""

    def __init__(self, operations: Columns, prices: Prices, ends: Ints, starts: Ints, ranks: Sequence[int] | None) -> None:
        wanted = np.full(operations.num_ranks, ranks is None)
        wanted[list(ranks or ())] = True
        self.operations = operations
        self.place = place = np.flatnonzero(np.repeat(wanted, np.diff(operations.first)))
        way = operations.direction[place], operations.stage[place]
        self.arrived = starts[place].astype(np.float64) + (prices.occupancy[way] + prices.latency[way]).astype(np.float64)
        self.own = _ends_of(ends, operations.before[place])  # when the rank has done what came before
        self.begins, self.done = np.maximum(self.own, self.arrived), ends[place].astype(np.float64)
        self.sent, self.posted = _ends_of(ends, operations.sent_after[place]), _ends_of(ends, operations.posted_after[place])
        self.source = _sources(operations, place)
        self.is_met = (self.source >= 0) & wanted[self.source]
        self.last = _ends_of(ends, np.where(np.diff(operations.first) > 0, operations.first[1:] - 1, -1))  # of each rank

    def list_spans(self, some: Ints) -> list[dict[str, Ints]]:
        """Returns the spans of these computations, and that of the step on each of their ranks."""
        operations, place = self.operations, self.place[some]
        rank, label = operations.rank[place], operations.kind[place] + 1  # behind the step's
        spans = _rows(rank, "span", 2 * place, post=self.begins[some], done=self.done[some], label=label, of=(operations, place))
        shown = np.unique(rank)
        zero = np.zeros(len(shown))
        steps = _rows(shown, "span", 2 * operations.first[shown] - 2, post=zero, done=self.last[shown], label=0 * shown)
        return [spans, steps]

    def list_messages(self, met: Ints, same: dict[str, Any], *, rendezvous: bool) -> list[dict[str, Ints]]:
        """Returns the sends and the receives of these messages."""
        operations, place, sender = self.operations, self.place[met], self.source[met]
        rank, sent, arrived = operations.rank[place], self.sent[met], self.arrived[met]
        made, after = operations.sent_after[place], operations.posted_after[place]
        over = np.maximum(self.last[sender], arrived if rendezvous else sent)
        sends = _rows(sender, "isend", 2 * made + 1, post=sent, wait=self.last[sender], done=over, peer=rank, **same)
        slot = 2 * np.where(after >= 0, after, operations.first[rank] - 1) + 1
        own, over = self.own[met], np.maximum(self.own[met], arrived)
        receives = _rows(rank, "irecv", slot, post=self.posted[met], wait=own, done=over, peer=sender, turn=1 + made, **same)
        return [sends, receives]


def check_ranks(ranks: Iterable[int], num_ranks: int) -> list[int]:
    """Returns the ranks whose events are asked for, checked.

    Args:
        ranks: some ranks.
        num_ranks: how many there are.

    Raises:
        ArgumentError: they are not ranks, or do not exist.

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
        ArgumentError: it is not.
    """
    times = between if isinstance(between, tuple | list) and len(between) == 2 else [None]
    known = all(is_number(time) or (isinstance(time, float) and np.isinf(time)) for time in times)
    if between is not None and not known:
        raise ArgumentError(f"between must be two times, from and until, got {say(between)}. Write between=(0, 10).")


def _rows(
    rank: Ints, op: str, slot: Ints, *, of: tuple[Columns, Ints] | None = None, turn: Ints | int = 0, **given: Ints
) -> dict[str, Ints]:
    """Returns the columns of some events; ``slot`` and ``turn`` order them on their rank, times are in seconds."""
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


def _sources(operations: Columns, some: Ints) -> Ints:
    """Returns which rank sends the message of each computation, -1 without a message."""
    owner = np.array([*operations.stage_ranks, NONE])
    step = np.where(operations.kind[some] == FORWARD, -1, 1)
    source: Ints = owner[np.where(operations.sent_after[some] >= 0, operations.stage[some] + step, -1)]
    return source


def _groups(operations: Columns, some: Ints, source: Ints) -> tuple[tuple[Group, ...], Ints]:
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


def _payloads(operations: Columns, some: Ints, sizes: list[int] | None) -> tuple[tuple[Payload, ...], Ints]:
    """Returns what messages carry, and the number of each one's; nothing if the sizes are unknown."""
    if sizes is None:
        return (), np.full(len(some), NONE)
    forward = operations.kind[some] == FORWARD
    boundary = operations.stage[some] - forward
    used, number = np.unique(np.array([*sizes, NONE])[boundary], return_inverse=True)
    return tuple(Payload("uint8", (size,), size) for size in used.tolist()), number
