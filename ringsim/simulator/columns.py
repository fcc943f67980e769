"""A schedule as columns: what each computation is, and the message that it waits for.

With the order of every rank fixed, a step is a graph that nobody's speed can change, and its time the longest way through it. A computation
starts when the one before it on its rank has ended and its message has arrived; a message starts when three things have happened::

    sender    ..[ made ]--post--.
                                 >-- start --- occupancy ---|-- latency --> arrives      [ the computation ] on the receiver
    link      ..the message before it has left              ^ the link is free again
    receiver  ..[ posted_after ]--post (rendezvous only)

A message has no row of its own: a computation needs at most one, so it has the number of the computation that waits for it.

Any schedule as columns, with the places of its messages: what `lower` and the evaluator find action by action, found array by array.

What breaks a rule is handed to the evaluator's own checks, which say it in words.

GPipe and 1F1B as columns without a list of actions: a thousand ranks and thousands of microbatches in a few array operations.

Rank p of P in 1F1B over M microbatches, w = min(P - 1 - p, M)::

    position   0 .. w-1      w .. 2M-w-1              2M-w .. 2M-1
               F0 .. F(w-1)  Fw B0 F(w+1) B1 ...      B(M-w) .. B(M-1)

GPipe is the same with w = M on every rank.

What the computations and messages of a schedule cost, as arrays by stage: for one set of costs, or for K of them at once.

A message keeps its link busy while its bytes go by, and arrives one latency later::

    Costs.latency        arrives after latency, the link is never busy
    link=, size_bytes=   busy for size * beta, arrives alpha later; seconds
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import Any, Final

import numpy as np

from ringsim.errors import ArgumentError, ScheduleError, is_integer, is_list, say
from ringsim.link import Link, check_links
from ringsim.schedules.costs import Costs
from ringsim.schedules.lowering import check_ahead, check_messages, check_order, check_places, lower
from ringsim.schedules.schedule import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Action, Schedule
from ringsim.traces.events import Ints

__all__ = [
    "FORWARD",
    "KIND_LETTERS",
    "Linear",
    "Links",
    "Operations",
    "Prices",
    "Sizes",
    "make_prices",
    "read_schedule",
    "spread_sizes",
    "stack_prices",
]

KIND_LETTERS: Final = ("F", "B", "I", "W")
FORWARD: Final = 0


@dataclass(frozen=True, eq=False)
class Operations:
    """The computations of a schedule, rank after rank, each rank's in its order: numpy arrays of one length n.

    Attributes:
        name: what the schedule is called.
        num_microbatches: how many microbatches the step is cut into.
        stage_ranks: for each stage, the rank that has it.
        first: where each rank begins, and n; shape (ranks + 1,).
        stage: of which stage.
        kind: its place in ``KIND_LETTERS``.
        microbatch: on which microbatch.
        sent_after: the computation, on the sender, after which its message is sent; -1 for a computation without a message.
        posted_after: the computation, on its own rank, after which its receive is posted; -1: before the first.
        queued_after: whose message has the link before this one's; -1 for a link's first message, and without a message.
    """

    name: str
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    first: Ints
    stage: Ints
    kind: Ints
    microbatch: Ints
    sent_after: Ints
    posted_after: Ints
    queued_after: Ints

    def __len__(self) -> int:
        """Returns the number of computations."""
        return len(self.stage)

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.first) - 1

    @property
    def num_stages(self) -> int:
        """How many stages there are, over all ranks."""
        return len(self.stage_ranks)

    @cached_property
    def rank(self) -> Ints:
        """Which rank computes, int32, shape (n,)."""
        return np.repeat(np.arange(self.num_ranks, dtype=np.int32), np.diff(self.first))

    @cached_property
    def before(self) -> Ints:
        """The computation before each one on its rank, -1 for a rank's first; int32, shape (n,)."""
        before = np.arange(-1, len(self) - 1, dtype=np.int32)
        before[self.first[:-1][np.diff(self.first) > 0]] = -1
        return before

    @cached_property
    def direction(self) -> Ints:
        """Which way the message of each computation goes: 0 an activation, 1 a gradient; int8, shape (n,)."""
        direction: Ints = (self.kind != FORWARD).astype(np.int8)
        return direction

    def rank_of(self, operation: int) -> int:
        """Returns the rank that computes an operation."""
        return int(np.searchsorted(self.first, operation, side="right")) - 1

    def action(self, operation: int) -> Action:
        """Returns what an operation is."""
        return Action(int(self.stage[operation]), KIND_LETTERS[self.kind[operation]], int(self.microbatch[operation]))

    def source(self, operation: int) -> int:
        """Returns the rank that sends an operation's message."""
        step = -1 if self.kind[operation] == FORWARD else 1
        return self.stage_ranks[int(self.stage[operation]) + step]

    def to_schedule(self) -> Schedule:
        """Returns the schedule without its sends and receives."""
        kinds = [KIND_LETTERS[kind] for kind in self.kind.tolist()]
        actions = list(map(Action, self.stage.tolist(), kinds, self.microbatch.tolist()))
        rows = tuple(tuple(actions[begin:end]) for begin, end in zip(self.first[:-1].tolist(), self.first[1:].tolist(), strict=True))
        return Schedule(self.name, self.num_microbatches, self.stage_ranks, rows)


_CODES: Final = {kind: code for code, kind in enumerate((*COMPUTE_KINDS, *SEND_KINDS, *RECV_KINDS))}
_F, _B, _I, _W, _SEND_F, _SEND_B, _RECV_F, _RECV_B = range(8)
# Of a send or receive: how many stages away the other side is.
_AWAY: Final = np.array([0, 0, 0, 0, 1, -1, -1, 1])


class _Broken(Exception):
    """The schedule breaks a rule."""


def read_schedule(schedule: Schedule, ahead: int = 1) -> Operations:
    """Returns a schedule as columns.

    Args:
        schedule: any schedule, lowered or not; it need not be a whole step.
        ahead: as in `lower`: how many computations before its use a receive is posted. A lowered schedule says that itself.

    Returns:
        Its computations, with the places of their messages.

    Raises:
        ScheduleError: an action is not its rank's, comes twice, before what it needs, or without the other side of its message.
        ArgumentError: ``ahead`` is no whole number, or negative.

    Example:
        >>> from ringsim.schedules import one_f_one_b
        >>> operations = read_schedule(one_f_one_b(num_ranks=2, num_microbatches=2))
        >>> [str(operations.action(number)) for number in range(len(operations))]
        ['0F0', '0F1', '0B0', '0B1', '1F0', '1B0', '1F1', '1B1']
        >>> operations.sent_after.tolist(), operations.posted_after.tolist()
        ([-1, -1, 5, 7, 0, -1, 1, -1], [-1, -1, 0, 1, -1, -1, 4, -1])
    """
    check_ahead(ahead)
    try:
        return _Reader(schedule).read(min(ahead, max(map(len, schedule.actions), default=0)))  # sooner than at once is at once
    except (_Broken, KeyError):
        _refuse(schedule)
        raise


def _refuse(schedule: Schedule) -> None:
    """Says in words which rule a schedule breaks, as `evaluate` does."""
    check_places(schedule)
    check_order(schedule)
    check_messages(lower(schedule))


class _Reader:
    """The columns of all actions, sends and receives included, and where each action stands."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        rows = schedule.actions
        columns = list(zip(*chain.from_iterable(rows), strict=True)) or [(), (), ()]
        self.stage = np.array(columns[0], dtype=np.int64)
        self.kind = np.array([_CODES[kind] for kind in columns[1]], dtype=np.int64)
        self.microbatch = np.array(columns[2], dtype=np.int64)
        self.rank = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        self.owner = np.array(schedule.stage_ranks, dtype=np.int64)
        self.computes = self.kind <= _W
        self._check_places()
        self.place = np.full((len(_CODES), schedule.num_stages + 2, max(schedule.num_microbatches, 1)), -1, dtype=np.int64)
        self.place[self.kind, self.stage, self.microbatch] = np.arange(len(self.stage))  # two rows more: -1 and S have nothing
        found = self.place[self.kind, self.stage, self.microbatch]
        gradients = (self.place[_B] >= 0) & (self.place[_I] >= 0)
        _require((found == np.arange(len(found))).all() and not gradients.any())
        self.makes = np.maximum(self.place[_B], self.place[_I])  # of a gradient; one of the two is -1
        self._check_needs()

    def _check_places(self) -> None:
        """Refuses what `check_places` refuses, but for second ones."""
        schedule = self.schedule
        _require(schedule.num_microbatches >= 1 and ((self.owner >= 0) & (self.owner < schedule.num_ranks)).all())
        _require(((self.stage >= 0) & (self.stage < schedule.num_stages)).all())
        _require(((self.microbatch >= 0) & (self.microbatch < schedule.num_microbatches)).all())
        _require((self.owner[self.stage] == self.rank).all())
        messages = ~self.computes
        other = (self.stage + _AWAY[self.kind])[messages]
        _require(((other >= 0) & (other < schedule.num_stages)).all())
        _require((self.owner[other] != self.rank[messages]).all())

    def _check_needs(self) -> None:
        """Refuses what comes before what it needs on its own rank, and finds what makes each message."""
        here = np.arange(len(self.stage))
        own_forward, own_gradient = self.place[_F, self.stage, self.microbatch], self.makes[self.stage, self.microbatch]
        for code, made in (
            (_B, own_forward), (_I, own_forward), (_W, self.place[_I, self.stage, self.microbatch]),
            (_SEND_F, own_forward), (_SEND_B, own_gradient),
        ):  # fmt: skip
            some = self.kind == code
            _require(((made[some] >= 0) & (made[some] < here[some])).all())
        forward, gradient = self.kind == _F, (self.kind == _B) | (self.kind == _I)
        source = np.where(forward, self.stage - 1, np.where(gradient, self.stage + 1, -1))
        inside = (source >= 0) & (source < len(self.owner))
        away = inside & (self.owner[np.where(inside, source, 0)] != self.rank)
        self.maker = np.where(forward, self.place[_F, source, self.microbatch], self.makes[source, self.microbatch])
        near = inside & ~away
        _require(((self.maker[near] >= 0) & (self.maker[near] < here[near])).all())
        self.needs_message = away
        if not self.schedule.lowered:
            _require((self.maker[away] >= 0).all() and self._count_sends() == away.sum())

    def _count_sends(self) -> int:
        """Counts the computations whose output or gradient another rank could need."""
        forward, gradient = self.kind == _F, (self.kind == _B) | (self.kind == _I)
        target = self.stage + np.where(forward, 1, -1)
        inside = (forward | gradient) & (target >= 0) & (target < len(self.owner))
        return int((self.owner[target[inside]] != self.rank[inside]).sum())

    def read(self, ahead: int) -> Operations:
        """Returns the columns of the computations."""
        computes = np.flatnonzero(self.computes)
        number = np.cumsum(self.computes) - 1  # of each action: the last computation up to it
        begins = np.searchsorted(self.rank[computes], np.arange(self.schedule.num_ranks + 1))
        needing = computes[self.needs_message[computes]]
        if self.schedule.lowered:
            send, receive = self._meet(needing)
            order, channel = self._by_channel(send, needing)
            sent, posted = number[send], number[receive]
        else:
            send = self.maker[needing]
            order, channel = self._by_channel(send, needing)
            sent = number[send]
            position = number[needing] - begins[self.rank[needing]]
            for some in np.split(order, np.flatnonzero(np.diff(channel)) + 1):  # before what needs a later one of the same channel
                position[some] = np.minimum.accumulate(position[some][::-1])[::-1]
            posted = begins[self.rank[needing]] + position - ahead - 1
        columns = np.full((3, len(computes)), -1, dtype=np.int32)
        of = number[needing]
        columns[0, of] = sent
        columns[1, of] = np.where(posted >= begins[self.rank[needing]], posted, -1)
        follows = channel[1:] == channel[:-1]
        columns[2, of[order[1:][follows]]] = of[order[:-1][follows]]
        stage, kind, microbatch = (column[computes].astype(np.int32) for column in (self.stage, self.kind, self.microbatch))
        schedule = self.schedule
        return Operations(
            schedule.name, schedule.num_microbatches, schedule.stage_ranks, begins, stage, kind.astype(np.int8), microbatch, *columns
        )

    def _by_channel(self, send: Ints, needing: Ints) -> tuple[Ints, Ints]:
        """Orders messages by channel (from a rank, to a rank), then as they are sent; returns the order and the channels in it."""
        channel = self.rank[send] * self.schedule.num_ranks + self.rank[needing]
        order = np.lexsort((send, channel))
        return order, channel[order]

    def _meet(self, needing: Ints) -> tuple[Ints, Ints]:
        """Finds the written sends and receives of messages; both sides of a channel must have one order."""
        ahead = self.kind[needing] == _F
        stage, microbatch = self.stage[needing], self.microbatch[needing]
        receive = self.place[np.where(ahead, _RECV_F, _RECV_B), stage, microbatch]
        send = self.place[np.where(ahead, _SEND_F, _SEND_B), stage + np.where(ahead, -1, 1), microbatch]
        _require(((receive >= 0) & (receive < needing) & (send >= 0)).all())
        unneeded = np.setdiff1d(np.flatnonzero(self.kind > _SEND_B), receive)
        if len(unneeded):
            index = int(unneeded[0])
            action = Action(
                int(self.stage[index]), (*COMPUTE_KINDS, *SEND_KINDS, *RECV_KINDS)[self.kind[index]], int(self.microbatch[index])
            )
            check_messages(self.schedule)
            raise ScheduleError(
                f"{action} must be for a computation, got none that needs it (rank {self.rank[index]}). Take both sides out."
            )
        _require(2 * len(needing) == (~self.computes).sum())
        order, channel = self._by_channel(send, needing)
        later = np.diff(receive[order])
        _require((later[channel[1:] == channel[:-1]] > 0).all())
        return send, receive


def _require(holds: bool | np.bool) -> None:
    if not holds:
        raise _Broken


@dataclass(frozen=True)
class Linear:
    """A schedule with one stage a rank, each doing some forwards, then forwards and backwards in turn, then backwards.

    Attributes:
        name: ``gpipe`` or ``1f1b``.
        num_ranks: how many ranks, P.
        num_microbatches: how many microbatches, M.

    Example:
        >>> operations = Linear("1f1b", 2, 2).to_operations(ahead=1)
        >>> [str(operations.action(number)) for number in range(len(operations))]
        ['0F0', '0F1', '0B0', '0B1', '1F0', '1B0', '1F1', '1B1']
    """

    name: str
    num_ranks: int
    num_microbatches: int

    @property
    def levels(self) -> int:
        """How many levels there are; see `first_levels`."""
        return 2 * (self.num_microbatches + self.num_ranks - 1)

    @property
    def stride(self) -> int:
        """How many levels one microbatch is behind the other."""
        return 2 if self.name == "1f1b" else 1

    def first_levels(self, rank: int) -> tuple[int, int]:
        """Returns the levels of a rank's forward and backward of microbatch 0; each further one is a stride later.

        Whatever a computation needs is on a level before its own, and a rank has at most one on each.
        """
        turn = 2 * self.num_ranks - 1 if self.name == "1f1b" else 2 * self.num_ranks + self.num_microbatches - 2
        return rank, turn - rank

    def positions(self, rank: int) -> tuple[Ints, Ints]:
        """Returns where a rank's forwards and backwards stand in its row, by microbatch."""
        m = self.num_microbatches
        w = min(self.num_ranks - 1 - rank, m) if self.name == "1f1b" else m
        forwards = np.concatenate([np.arange(w), np.arange(w, 2 * m - w, 2)])
        backwards = np.concatenate([np.arange(w + 1, 2 * m - w, 2), np.arange(2 * m - w, 2 * m)])
        return forwards, backwards

    def to_operations(self, ahead: int) -> Operations:
        """Returns the columns with the places of the messages; ``ahead`` as in `lower`."""
        p, m = self.num_ranks, self.num_microbatches
        microbatch, sent, posted, queued = np.full((4, p, 2 * m), -1, dtype=np.int32)
        kind = np.empty((p, 2 * m), dtype=np.int8)
        places = [self.positions(rank) for rank in range(p)]
        for rank, of_rank in enumerate(places):
            row = 2 * m * rank + np.arange(2 * m)
            for direction, source in enumerate((rank - 1, rank + 1)):
                own = of_rank[direction]
                kind[rank, own], microbatch[rank, own] = direction, np.arange(m)
                if 0 <= source < p:
                    sent[rank, own] = 2 * m * source + places[source][direction]
                    posted[rank, own] = np.where(own > ahead, row[own] - ahead - 1, -1)
                    queued[rank, own[1:]] = row[own[:-1]]
        stage = np.repeat(np.arange(p, dtype=np.int32), 2 * m)
        first = np.arange(p + 1, dtype=np.int64) * 2 * m
        columns = (each.ravel() for each in (kind, microbatch, sent, posted, queued))
        return Operations(self.name, m, tuple(range(p)), first, stage, *columns)


Links = Link | Mapping[tuple[int, int], Link]
Sizes = int | Sequence[int]
_MOST_BYTES: Final = 2**53  # up to here each size is a number of its own as a float, too
_FIELDS: Final = {"F": "forward", "I": "input", "W": "weight", "B": "backward"}  # of Costs
_BACKWARD, _INPUT, _WEIGHT = (KIND_LETTERS.index(letter) for letter in "BIW")


@dataclass(frozen=True, eq=False)
class Prices:
    """Times by stage S; a last axis of K where there are several sets of costs. Fractions where a cost is one, else float64.

    Attributes:
        duration: of a computation, shape (4, S): by its place in ``KIND_LETTERS`` and its stage.
        occupancy: how long the message that a stage receives keeps its link, shape (2, S): activations, gradients.
        latency: how long it then still travels, likewise. -inf where a stage receives none from another rank.
    """

    duration: Ints
    occupancy: Ints
    latency: Ints

    @property
    def is_exact(self) -> bool:
        """Whether the times are Fractions."""
        return self.duration.dtype == object

    @property
    def has_occupancy(self) -> bool:
        """Whether any message keeps its link busy."""
        return bool((self.occupancy > 0).any())


def make_prices(stage_ranks: Sequence[int], costs: Costs, link: Links | None, size_bytes: Sizes) -> Prices:
    """Lays one set of costs out by stage.

    Args:
        stage_ranks: for each stage, the rank that has it.
        costs: of the computations; and the latency, where no link is given.
        link: what a message costs, in seconds: one for all, or by (from rank, to rank); None: ``costs.latency``.
        size_bytes: of an activation and of its gradient: one for all, or for each boundary between two stages.

    Returns:
        The prices, without a K.

    Raises:
        ArgumentError: a time or size breaks its rule, or a link is missing.

    Example:
        >>> prices = make_prices((0, 1), Costs(), Link(alpha_s=0.5, beta_s_per_byte=0.25), 8)
        >>> prices.duration[1].tolist(), prices.occupancy.tolist(), prices.latency.tolist()
        ([2.0, 2.0], [[0.0, 2.0], [2.0, 0.0]], [[-inf, 0.5], [0.5, -inf]])
    """
    costs.check(len(stage_ranks))
    if link is not None:
        check_links(link)
    if link is not None and costs.latency != 0:
        raise ArgumentError(f"latency must be 0 where link is given, got {costs.latency}. Say it once: as the link's alpha_s.")
    by_kind = {kind: getattr(costs, name) for kind, name in _FIELDS.items()}
    times = {kind: _list_times(time, len(stage_ranks)) for kind, time in by_kind.items() if time is not None}
    exact = any(isinstance(time, Fraction) for row in (*times.values(), [costs.latency]) for time in row)
    dtype: Any = object if exact else np.float64
    duration = np.zeros((len(KIND_LETTERS), len(stage_ranks)), dtype=dtype)
    for kind, row in times.items():
        duration[KIND_LETTERS.index(kind)] = row
    if costs.backward is None:
        duration[_BACKWARD] = duration[_INPUT] + duration[_WEIGHT]
    sizes = np.array(spread_sizes(size_bytes, len(stage_ranks), has_link=link is not None), dtype=np.int64)
    occupancy, latency = np.zeros((2, len(stage_ranks)), dtype=dtype), np.full((2, len(stage_ranks)), -np.inf, dtype=dtype)
    owner = np.asarray(stage_ranks)
    met = np.flatnonzero(owner[1:] != owner[:-1])  # the boundaries between ranks
    for direction, (source, stage) in enumerate(((met, met + 1), (met + 1, met))):
        if link is None:
            latency[direction, stage] = costs.latency
        elif isinstance(link, Link):
            occupancy[direction, stage], latency[direction, stage] = sizes[met] * link.beta_s_per_byte, link.alpha_s
        else:
            used = [_find_link(link, *pair) for pair in zip(owner[source].tolist(), owner[stage].tolist(), strict=True)]
            occupancy[direction, stage] = sizes[met] * np.array([each.beta_s_per_byte for each in used])
            latency[direction, stage] = [each.alpha_s for each in used]
    return Prices(duration, occupancy, latency)


def stack_prices(each: Sequence[Prices]) -> Prices:
    """Puts K prices side by side, along a new last axis."""
    return Prices(
        *(np.stack([getattr(one, name) for one in each], axis=-1).astype(np.float64) for name in ("duration", "occupancy", "latency"))
    )


def spread_sizes(size_bytes: Sizes, num_stages: int, *, has_link: bool) -> list[int]:
    """Returns the size in bytes for each boundary between two stages.

    Args:
        size_bytes: one for all, or one each.
        num_stages: how many stages there are.
        has_link: whether somebody says what a byte costs.

    Raises:
        ArgumentError: a size breaks its rule, or there are too many or too few.
    """
    given: Any = [size_bytes] * max(num_stages - 1, 0) if is_integer(size_bytes) else size_bytes
    if not (is_list(given) or isinstance(given, np.ndarray)):
        raise ArgumentError(f"size_bytes must be an integer, or a list of them, got {say(given)}. Say how many bytes a stage hands on.")
    sizes = list(given)
    if len(sizes) != num_stages - 1:
        raise ArgumentError(f"size_bytes must be one number, or one for each of {num_stages - 1} boundaries, got {len(sizes)}. Count them.")
    if not all(_is_size(size) for size in sizes):
        raise ArgumentError(f"size_bytes must be from 0 to 2**53, got {say(size_bytes)}. Say how many bytes a stage hands on.")
    if any(sizes) and not has_link:
        raise ArgumentError(f"size_bytes must be left out where no link is given, got {say(size_bytes)}. Add link=Link(...).")
    return [int(size) for size in sizes]


def _is_size(size: Any) -> bool:
    return is_integer(size) and bool(0 <= size <= _MOST_BYTES)


def _find_link(link: Mapping[tuple[int, int], Link], source: int, rank: int) -> Link:
    if (source, rank) not in link:
        raise ArgumentError(
            f"link must have one for every pair of ranks that talk, got none for {source} -> {rank}. Add link[{source}, {rank}]."
        )
    return link[source, rank]


def _list_times(given: Any, num_stages: int) -> list[Any]:
    """Returns a time for each stage."""
    return list(given) if isinstance(given, Sequence) else [given] * num_stages
