"""What follows from a simulated step.

Its critical path, what improving a part would gain, and the step as a trace. The critical path is a
chain of computations and messages, each of which begins when the previous one ends. Why it did not
begin earlier::

    program order    the rank was busy with the previous computation
    data             a computation waited for its message, or a message for its payload
    link busy        the previous message was still on the link
    receiver late    the receive was not posted
    start            nothing came before

A step is as long as the longest of many ways through it. So improving a stage, a link or the size
of messages gains no more than what the critical path spends on it, and less once another way is the
longest: how much is found by simulating again.

The trace holds the spans and messages that ranks would record. A step of a thousand ranks has fifty
million events, so a trace can be made of some ranks and some time only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from ringsim.errors import LONGEST_S, ArgumentError, is_integer, is_number, say
from ringsim.schedules.costs import Time
from ringsim.schedules.schedule import Action
from ringsim.simulator.columns import FORWARD, Columns, Prices
from ringsim.simulator.levels import Times
from ringsim.traces.events import NONE, OP_CODES, Group, Ints, Payload, Tables, make_events
from ringsim.traces.steps import KINDS, STEP
from ringsim.traces.value import Trace

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
    """The chain that takes as long as the step.

    Anything that is not on it may be a little slower at no cost.

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
        counts = Counter(hop.reason for hop in self.hops)
        return {reason: counts[reason] for reason in REASONS if counts[reason]}

    @property
    def computing(self) -> Time:
        """How much of the step the path spends computing."""
        return sum(hop.end - hop.start for hop in self.hops if hop.source < 0)

    @property
    def travelling(self) -> Time:
        """How much of the step the path spends on links.

        Together with ``computing`` it is the whole step.
        """
        return sum(hop.end - hop.start for hop in self.hops if hop.source >= 0)

    def __repr__(self) -> str:
        """Returns its length and its parts."""
        why = ", ".join(f"{reason} {number:,}" for reason, number in self.by_reason.items())
        return (
            f"Critical path of {len(self):,} hops: computing {float(self.computing):.6g}, on links "
            f"{float(self.travelling):.6g}; {why}"
        )


def find_critical_path(times: Times) -> CriticalPath:
    """Walks from the last computation back to the step's start.

    Each time to what was waited for longest. If two ends coincide, the rank's own order counts
    first, then the data.
    """
    operations, ends, hops = times.columns, times.ends, list[Hop]()
    zero: Any = ends[:0].sum()
    here = int(ends.argmax()) if len(ends) else -1
    while here >= 0:
        before = int(operations.before[here])
        own, arrived = ends[before] if before >= 0 else zero, times.arrivals[here]
        waited = arrived > own
        reason = DATA if waited else PROGRAM if before >= 0 else START
        hops.append(
            Hop(
                operations.action(here),
                operations.rank_of(here),
                -1,
                plain(arrived if waited else own),
                plain(ends[here]),
                reason,
            )
        )
        here = _walk_messages(hops, times, here) if waited else before
    return CriticalPath(tuple(reversed(hops)))


def _walk_messages(hops: list[Hop], times: Times, here: int) -> int:
    """Adds the message of a computation, and those it queued behind.

    Returns the computation that the first of them waited for.
    """
    operations, ends = times.columns, times.ends
    rank, until = operations.rank_of(here), times.arrivals[here]
    source = int(operations.sources(np.array([here]))[0])
    while True:
        start, queued = times.message_starts[here], int(operations.queued_after[here])
        made, posted = int(operations.sent_after[here]), int(operations.posted_after[here])
        reason, next_place = DATA, made
        if ends[made] != start:
            is_late = times.rendezvous and posted >= 0 and ends[posted] == start
            reason, next_place = (RECEIVER_LATE, posted) if is_late else (LINK_BUSY, queued)
        kind, step = ("SEND_F", -1) if operations.kind[here] == FORWARD else ("SEND_B", 1)
        send = Action(int(operations.stage[here]) + step, kind, int(operations.microbatch[here]))
        hops.append(Hop(send, rank, source, plain(start), plain(until), reason))
        if reason != LINK_BUSY:
            return next_place
        here, until = next_place, start


def plain(time: Time) -> Time:
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
            lines.append(
                f"  {lever.what:<16} {lever.gain:>9.4g} {share:>12.2%} {lever.bound:>9.4g}"
            )
        return "\n".join(lines)


def list_levers(path: CriticalPath, prices: Prices) -> dict[str, float]:
    """Returns how long the critical path spends on each stage, link and size of messages.

    The longest first.
    """
    # numbers of the costs' kind: whole, float or Fraction
    spent: defaultdict[str, Any] = defaultdict(int)
    for (stage, kind, _), rank, source, start, end, _ in path.hops:
        spent[f"stage {stage}" if source < 0 else f"link {source}>{rank}"] += end - start
        if source >= 0:
            receiver = (0, stage + 1) if kind == "SEND_F" else (1, stage - 1)
            spent["message size"] += prices.occupancy[receiver]
    ordered = sorted(spent.items(), key=lambda item: (-float(item[1]), item[0]))
    return {what: float(time) for what, time in ordered if time > 0}


def improve(what: str, by: float, stage_ranks: Sequence[int], prices: Prices) -> Prices:
    """Returns prices with one thing cheaper, by a part of its cost.

    ``what`` is as in `Lever.what`.
    """
    factor = 1 - by
    better = prices.map(lambda table: table.astype(float))
    noun, _, name = what.partition(" ")
    if noun == "message":
        return better._replace(occupancy=better.occupancy * factor)
    if noun == "stage":
        better.duration[:, int(name)] *= factor
        return better
    source, rank = map(int, name.split(">"))
    owner = np.array([-1, *stage_ranks, -1])
    for direction, senders in ((0, owner[:-2]), (1, owner[2:])):
        over_it = (senders == source) & (owner[1:-1] == rank)
        better.occupancy[direction, over_it] *= factor
        better.latency[direction, over_it] *= factor
    return better


_WORLD: Final = "world"
_NS: Final = 1e9
MOST_EVENTS: Final = 20_000_000  # in one trace: two gigabytes


def make_trace(
    times: Times,
    sizes: list[int] | None,
    metadata: dict[str, Any],
    ranks: Sequence[int] | None,
    between: tuple[float, float] | None,
) -> Trace:
    """Makes the trace of a simulated step; a unit of the costs is a second.

    Args:
        times: when everything happens.
        sizes: bytes of a message, for each boundary between stages; None where they are unknown.
        metadata: of the trace.
        ranks: whose events; None for all. The trace has the messages whose two ranks it has.
        between: of which time, from and until; None for all. Events that reach into it are
            complete.

    Raises:
        ArgumentError: there are more events, or the step takes longer, than a trace can hold.
    """
    if len(times.ends) and times.ends.max() > LONGEST_S:
        raise ArgumentError(
            f"costs must make a step of {LONGEST_S:g} or less for a trace of it, got "
            f"{float(times.ends.max()):g}: a unit is a second, and "
            "285 years are what fits. Give the costs in seconds."
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
            f"a trace must have {MOST_EVENTS:,} events or fewer, got {count:,}. Ask for a part: "
            "trace(ranks=range(8)), or trace(between=(0, 10))."
        )
    operations = times.columns
    groups, group = _groups(operations, part.place[met], part.source[met])
    payloads, payload = _payloads(operations, part.place[met], sizes)
    columns = [
        *part.list_spans(some),
        *part.list_messages(met, {"group": group, "payload": payload}),
    ]
    joined = {name: np.concatenate([each[name] for each in columns]) for name in columns[0]}
    order = np.lexsort((joined.pop("turn"), joined.pop("slot"), joined["rank"]))
    name = operations.name if ranks is None and between is None else f"part of {operations.name}"
    tables = Tables(groups=groups, payloads=payloads, labels=(STEP + name, *KINDS))
    return Trace(
        make_events({name: column[order] for name, column in joined.items()}, tables), metadata
    )


class _Part:
    """The computations of some ranks, and when everything about them happens, in seconds.

    The ranks may be few of many.
    """

    def __init__(self, times: Times, ranks: Sequence[int] | None) -> None:
        self.operations = operations = times.columns
        self.rendezvous = times.rendezvous
        wanted = np.full(operations.num_ranks, ranks is None)
        wanted[list(ranks or ())] = True
        self.place = place = np.flatnonzero(np.repeat(wanted, np.diff(operations.first)))
        # of each rank
        lasts = np.where(np.diff(operations.first) > 0, operations.first[1:] - 1, -1)
        self.own, self.sent, self.posted, self.last = (
            times.ends_of(each).astype(np.float64)
            for each in (
                operations.before[place],
                operations.sent_after[place],
                operations.posted_after[place],
                lasts,
            )
        )
        self.arrived = times.arrivals[place].astype(np.float64)
        self.done = times.ends[place].astype(np.float64)
        self.begins = np.maximum(self.own, self.arrived)
        self.source = operations.sources(place)
        self.is_met = (self.source >= 0) & wanted[self.source]

    def list_spans(self, some: Ints) -> list[dict[str, Ints]]:
        """Returns the spans of these computations, and that of the step on each of their ranks."""
        operations, place = self.operations, self.place[some]
        rank, label = operations.rank[place], operations.kind[place] + 1  # behind the step's
        of = {"stage": operations.stage[place], "microbatch": operations.microbatch[place]}
        spans = _rows(
            rank, "span", 2 * place, post=self.begins[some], done=self.done[some], label=label, **of
        )
        shown = np.unique(rank)
        steps = _rows(
            shown,
            "span",
            2 * operations.first[shown] - 2,
            post=np.zeros(len(shown)),
            done=self.last[shown],
            label=0 * shown,
        )
        return [spans, steps]

    def list_messages(self, met: Ints, same: dict[str, Any]) -> list[dict[str, Ints]]:
        """Returns the sends and the receives of these messages."""
        operations, place, sender = self.operations, self.place[met], self.source[met]
        rank, sent, arrived = operations.rank[place], self.sent[met], self.arrived[met]
        made, after = operations.sent_after[place], operations.posted_after[place]
        over = np.maximum(self.last[sender], arrived if self.rendezvous else sent)
        sends = _rows(
            sender,
            "isend",
            2 * made + 1,
            post=sent,
            wait=self.last[sender],
            done=over,
            peer=rank,
            **same,
        )
        slot = 2 * np.where(after >= 0, after, operations.first[rank] - 1) + 1
        own, over = self.own[met], np.maximum(self.own[met], arrived)
        receives = _rows(
            rank,
            "irecv",
            slot,
            post=self.posted[met],
            wait=own,
            done=over,
            peer=sender,
            turn=1 + made,
            **same,
        )
        return [sends, receives]


def check_ranks(ranks: Iterable[int], num_ranks: int) -> list[int]:
    """Returns the ranks whose events are asked for, checked."""
    try:
        chosen = list(ranks)
    except TypeError:
        raise ArgumentError(
            f"ranks must be a list of them, got {say(ranks)}. Write ranks=[0]."
        ) from None
    for rank in chosen:
        if not is_integer(rank) or not 0 <= rank < num_ranks:
            raise ArgumentError(
                f"ranks must be from 0 to {num_ranks - 1}, got {say(rank)}. Name those to look at."
            )
    return chosen


def check_between(between: object) -> None:
    """Refuses what is neither two times nor None."""
    times = between if isinstance(between, tuple | list) and len(between) == 2 else [None]
    known = all(is_number(time) or (isinstance(time, float) and np.isinf(time)) for time in times)
    if between is not None and not known:
        raise ArgumentError(
            f"between must be two times, from and until, got {say(between)}. Write between=(0, 10)."
        )


def _rows(
    rank: Ints, op: str, slot: Ints, *, turn: Ints | int = 0, **given: Ints
) -> dict[str, Ints]:
    """Returns the columns of some events.

    ``slot`` and ``turn`` order them on their rank, times are in seconds.
    """
    rows: dict[str, Ints] = {
        "rank": rank,
        "op": np.full(len(rank), OP_CODES[op]),
        "slot": slot,
        "turn": np.zeros(len(rank)) + turn,
    }
    nothing = np.full(len(rank), NONE)
    for name in ("post", "wait", "done"):
        rows[f"{name}_ns"] = (
            np.rint(given[name] * _NS).astype(np.int64) if name in given else nothing
        )
    for name in ("stage", "microbatch", "label", "peer", "group", "payload"):
        rows[name] = given.get(name, nothing)
    rows["tag"] = 0 * nothing if "peer" in given else nothing
    return rows


def _groups(operations: Columns, some: Ints, source: Ints) -> tuple[tuple[Group, ...], Ints]:
    """Returns the groups that messages go over, and the number of each message's.

    The edge that its activations take.
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
    """Returns what messages carry, and the number of each one's.

    Nothing if the sizes are unknown.
    """
    if sizes is None:
        return (), np.full(len(some), NONE)
    forward = operations.kind[some] == FORWARD
    boundary = operations.stage[some] - forward
    used, number = np.unique(np.array([*sizes, NONE])[boundary], return_inverse=True)
    return tuple(Payload("uint8", (size,), size) for size in used.tolist()), number
