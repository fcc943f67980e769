"""Represents a schedule as columns, and its costs as arrays by stage.

If the order of every rank is fixed, a step is a graph, and its length is the longest path. A
computation starts when the previous computation on its rank has ended and its message has arrived.
A message starts when three things have happened::

    sender    ..[ made ]--post--.
                                 >-- start --- occupancy ---|-- latency --> arrives   [ the computation ] on the receiver
    link      ..the previous message has left               ^ the link is free again
    receiver  ..[ posted_after ]--post (rendezvous only)

A computation needs at most one message, so messages have no rows of their own. The computation that
waits for a message identifies the message.

Two sets of arguments determine the cost of a message::

    Costs.latency        arrives after latency; the link is never busy
    link=, size_bytes=   keeps the link busy for size * beta and arrives alpha later; seconds
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ringsim.errors import ArgumentError, ScheduleError, is_integer, is_list, say
from ringsim.link import GivenLinks, check_links
from ringsim.schedules.costs import Costs
from ringsim.schedules.lowering import get_recv, lower_checked
from ringsim.schedules.programs import Semantics, read_semantics
from ringsim.schedules.schedule import (
    COMPUTE_KINDS,
    RECV_KINDS,
    SEND_KINDS,
    Action,
    PhasedRows,
    Schedule,
)
from ringsim.simulator.links import find_link
from ringsim.traces.events import Ints

_KINDS = (*COMPUTE_KINDS, *SEND_KINDS, *RECV_KINDS)
FORWARD = 0  # the index of F in COMPUTE_KINDS
_F, _B, _I, _W, _SEND_F, _SEND_B, _RECV_F, _RECV_B = range(8)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}


@dataclass(frozen=True, eq=False)
class Columns:
    """The computations of a schedule, rank by rank, in each rank's order.

    The columns are NumPy arrays of length n.

    Attributes:
        name: the name of the schedule.
        stage_ranks: the rank of each stage.
        first: the index of each rank's first computation, followed by n; shape (ranks + 1,).
        stage: the stage of each computation.
        kind: the kind of each computation, as an index into ``COMPUTE_KINDS``.
        microbatch: the microbatch of each computation.
        overlaps: whether each computation overlaps with the next one.
        sent_after: for each computation, the sender's computation after which the message is sent,
            or -1 if the computation needs no message.
        posted_after: for each computation, the computation on the same rank after which the receive
            is posted, or -1 if the receive is posted at the start.
        queued_after: for each computation, the one whose message uses the link just before, or -1
            if the message is the first on its link, or if there is no message.
        in_order: None if messages are not carried out in order. Otherwise, three arrays. For each
            computation, the first two hold the ones whose messages must be done before the send and
            before the receive of its message begin, or -1 if there are none. The third holds
            whether the send waits for the receive.
    """

    name: str
    stage_ranks: tuple[int, ...]
    first: Ints
    stage: Ints
    kind: Ints
    microbatch: Ints
    overlaps: Ints
    sent_after: Ints
    posted_after: Ints
    queued_after: Ints
    in_order: tuple[Ints, Ints, Ints] | None = None

    def __len__(self) -> int:
        """Returns the number of computations."""
        return len(self.stage)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.first) - 1

    @property
    def num_stages(self) -> int:
        """The number of stages over all ranks."""
        return len(self.stage_ranks)

    @cached_property
    def rank(self) -> Ints:
        """The rank of each computation, int32, shape (n,)."""
        return np.repeat(np.arange(self.num_ranks, dtype=np.int32), np.diff(self.first))

    @cached_property
    def before(self) -> Ints:
        """The previous computation on the same rank, or -1 for the first, int32, shape (n,)."""
        before = np.arange(-1, len(self) - 1, dtype=np.int32)
        before[self.first[:-1][np.diff(self.first) > 0]] = -1
        return before

    @cached_property
    def direction(self) -> Ints:
        """The direction of each computation's message.

        The direction is 0 for an activation and 1 for a gradient, int8, shape (n,).
        """
        direction: Ints = (self.kind != FORWARD).astype(np.int8)
        return direction

    def action(self, operation: int) -> Action:
        """Returns a computation as an action."""
        return Action(
            int(self.stage[operation]),
            COMPUTE_KINDS[self.kind[operation]],
            int(self.microbatch[operation]),
        )

    def find_hidden(self, durations: Ints, overlap: Ints) -> Ints:
        """Returns the time by which each computation may start before the previous one ends.

        ``durations`` and the result have the shape (n,), or (n, K) for K sets of costs.
        """
        hidden: Ints = overlap * np.minimum(durations, durations[self.before])
        hidden[~np.append(self.overlaps, False)[self.before]] = 0
        return hidden

    def sources(self, operations: Ints) -> Ints:
        """Returns the ranks that send the computations' messages, or -1 if there is no message."""
        after = self.sent_after[operations]
        sources: Ints = np.where(after >= 0, self.rank[after], -1)
        return sources


def columns_of(schedule: Schedule, ahead: int = 1, *, overlap: bool = False) -> Columns:
    """Returns a schedule as columns, expanding phases directly into arrays.

    Args:
        schedule: any schedule, lowered or not; it may cover only part of a step.
        ahead: the number of computations between the post of a receive and its use, as in `lower`.
            It is ignored for a lowered schedule, which contains its receives.
        overlap: whether two actions in ``OVERLAP_F_B`` overlap.

    Returns:
        The computations, with the positions of their messages.

    Raises:
        ScheduleError: an action belongs to a different rank, occurs twice, precedes an action that
            it needs, or is a send or receive without a match.

    Example:
        >>> from ringsim.schedules import one_f_one_b
        >>> columns = columns_of(one_f_one_b(num_ranks=2, num_microbatches=2))
        >>> [str(columns.action(number)) for number in range(len(columns))]
        ['0F0', '0F1', '0B0', '0B1', '1F0', '1B0', '1F1', '1B1']
        >>> columns.sent_after.tolist(), columns.posted_after.tolist()
        ([-1, -1, 5, 7, 0, -1, 1, -1], [-1, -1, 0, 1, -1, -1, 4, -1])
    """
    # the phases of ringsim's own schedules are known to follow the rules
    if not isinstance(schedule.actions, PhasedRows):
        lower_checked(schedule)
    actions = _read_actions(schedule, overlap)
    computes = actions.kind <= _W
    # for each action, the last computation up to and including the action
    number = np.cumsum(computes, dtype=np.int32) - np.int32(1)
    begins = np.searchsorted(actions.rank[computes], np.arange(schedule.num_ranks + 1))
    needing, send, receive = _find_messages(schedule, actions)
    rank, of = actions.rank[needing], number[needing]
    # by channel (from rank, to rank), in sending order, because actions are sorted by rank
    order = np.lexsort((send, rank))
    # whether each message is the first in its channel
    new = np.ones(len(order), dtype=bool)
    new[1:] = (np.diff(rank[order]) != 0) | (np.diff(actions.rank[send[order]]) != 0)
    if receive is None:
        posted = of.copy()
        # a receive precedes the later receives of its channel
        for some in np.split(order, np.flatnonzero(new)[1:]):
            posted[some] = np.minimum.accumulate(posted[some][::-1])[::-1]
        posted -= min(ahead, len(number)) + 1  # a receive cannot be posted before the start
        posted -= actions.overlaps[posted]  # before both of two that overlap
    else:
        posted = number[receive]
    sent_after, posted_after, queued_after = np.full((3, computes.sum()), -1, dtype=np.int32)
    sent_after[of] = number[send] + actions.overlaps[send]
    posted_after[of] = np.where(posted >= begins[rank], posted, -1)
    follows = ~new[1:]
    queued_after[of[order[1:][follows]]] = of[order[:-1][follows]]
    stage, microbatch = (
        each[computes].astype(np.int32) for each in (actions.stage, actions.microbatch)
    )
    return Columns(
        schedule.name, schedule.stage_ranks, begins, stage, actions.kind[computes], microbatch,
        actions.overlaps[computes], sent_after, posted_after, queued_after,
    )  # fmt: skip


def put_in_order(
    columns: Columns, lowered: Schedule, semantics: Semantics, sizes: Sequence[int]
) -> Columns:
    """Adds the order in which communicators carry out the messages of a lowered schedule.

    A small send is done when its turn comes, so no message must be done after it.
    """
    in_order, limit = read_semantics(semantics)
    actions = map(columns.action, range(len(columns)))
    place = {get_recv(action, lowered.stage_ranks): index for index, action in enumerate(actions)}
    behind, waits = np.full((2, len(columns)), -1), np.ones(len(columns), dtype=bool)
    last: dict[object, int] = {}
    for rank, row in enumerate(lowered.actions):
        for action in row:
            if action.is_compute:
                continue
            other, receives = action.other_side, action.kind in RECV_KINDS
            here = place[action if receives else other]
            queue = (rank, in_order == "paired" and lowered.stage_ranks[other.stage])
            behind[int(receives), here] = last.get(queue, -1)
            waits[here] = sizes[min(action.stage, other.stage)] > limit
            if receives or waits[here]:
                last[queue] = here
    return replace(columns, in_order=(*behind, waits))


class _Actions(NamedTuple):
    """All actions of a schedule as columns, rank by rank, including sends and receives."""

    stage: Ints
    kind: Ints
    microbatch: Ints
    overlaps: Ints
    rank: Ints


def _read_actions(schedule: Schedule, overlap: bool) -> _Actions:
    if isinstance(schedule.actions, PhasedRows):
        rows = [row.columns() for row in schedule.actions.rows]
        counts = [len(row[0]) for row in rows]
        stage, kind, microbatch, overlaps = map(np.concatenate, zip(*rows, strict=True))
    else:
        counts = [*map(len, schedule.actions)]
        actions = [*chain.from_iterable(schedule.actions)]
        kind = np.array([_CODES[action.kind] for action in actions], dtype=np.int8)
        stage, microbatch = np.array(
            [[action.stage for action in actions], [action.microbatch for action in actions]],
            dtype=np.int64,
        )
        overlaps = np.array([action.overlaps for action in actions], dtype=bool)
    rank = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return _Actions(stage, kind, microbatch, overlaps & overlap, rank)


def _find_messages(schedule: Schedule, actions: _Actions) -> tuple[Ints, Ints, Ints | None]:
    """Returns the computations that need a message, and their sends and receives.

    The receives are None if the schedule is not lowered. Then the sends are computations.
    """
    stage, kind, microbatch = actions[:3]
    # The index of each action, or -1 if it is missing. Two extra stages ensure that lookups with
    # stages -1 and S find nothing.
    size = len(_KINDS), schedule.num_stages + 2, schedule.num_microbatches
    place = np.full(size, -1, dtype=np.int32)
    place[kind, stage, microbatch] = np.arange(len(stage), dtype=np.int32)
    owner = np.array([*schedule.stage_ranks, -1, -1], dtype=np.int32)
    # its own stage if it needs no other stage
    source = stage - (kind == _F) + ((kind == _B) | (kind == _I))
    needing = np.flatnonzero((owner[source] >= 0) & (owner[source] != actions.rank))
    forward, source, microbatch = kind[needing] == _F, source[needing], microbatch[needing]
    if not schedule.lowered:
        made = place[np.where(forward, _F, _B), source, microbatch]
        # a gradient comes from B or from I
        split = np.where(forward, -1, place[_I, source, microbatch])
        return needing, np.maximum(made, split), None
    receive = place[np.where(forward, _RECV_F, _RECV_B), stage[needing], microbatch]
    unneeded = np.setdiff1d(np.flatnonzero(kind > _SEND_B), receive)
    if len(unneeded):
        action = [*chain.from_iterable(schedule.actions)][unneeded[0]]
        raise ScheduleError(
            f"{action} receives a message that no computation needs (rank "
            f"{actions.rank[unneeded[0]]}). Remove the receive and its send."
        )
    return needing, place[np.where(forward, _SEND_F, _SEND_B), source, microbatch], receive


Sizes = int | Sequence[int]
_MOST_BYTES = 2**53  # floats represent every size up to this one exactly


class Prices(NamedTuple):
    """The times of computations and messages, by stage.

    S is the number of stages. For K sets of costs, the arrays have an extra last axis of length K.
    They hold Fractions if any cost is a Fraction, and float64 otherwise.

    Attributes:
        duration: the time of a computation, by index in ``COMPUTE_KINDS`` and by stage, shape (4,
            S).
        occupancy: the time for which a message occupies its link, by direction (activations,
            gradients) and by receiving stage, shape (2, S).
        latency: the time that the message then travels, shape (2, S), or -inf if the stage receives
            no message from another rank.
        overlap: how much of the shorter of two computations that overlap is hidden, shape (1,).
    """

    duration: Ints
    occupancy: Ints
    latency: Ints
    overlap: Ints

    @property
    def is_exact(self) -> bool:
        """Whether the times are Fractions."""
        return self.duration.dtype == object

    def map(self, change: Callable[[Ints], Ints]) -> Prices:
        """Returns the prices with a change applied to each array."""
        return Prices(*map(change, self))


def make_prices(
    stage_ranks: Sequence[int], costs: Costs, link: GivenLinks | None, sizes: Sequence[int]
) -> Prices:
    """Checks one set of costs and returns it as arrays by stage.

    The arguments are the same as for `simulate_schedule`, except that ``sizes`` come from
    `spread_sizes`.

    Example:
        >>> from ringsim.link import Link
        >>> prices = make_prices((0, 1), Costs(), Link(alpha_s=0.5, beta_s_per_byte=0.25), [8])
        >>> prices.duration[1].tolist(), prices.occupancy.tolist(), prices.latency.tolist()
        ([2.0, 2.0], [[0.0, 2.0], [2.0, 0.0]], [[-inf, 0.5], [0.5, -inf]])
    """
    num_stages = len(stage_ranks)
    costs.check(num_stages)
    if link is not None:
        check_links(link)
        if costs.latency != 0:
            raise ArgumentError(
                f"latency must be 0 if link is given, got {costs.latency}. Set the link's alpha_s "
                "instead."
            )
    durations = [
        [costs.get_duration(Action(stage, kind, 0)) for stage in range(num_stages)]
        for kind in COMPUTE_KINDS
    ]
    numbers = chain(*durations, [costs.latency, costs.overlap])
    exact = any(isinstance(number, Fraction) for number in numbers)
    dtype: Any = object if exact else np.float64
    occupancy = np.zeros((2, num_stages), dtype=dtype)
    latency = np.full((2, num_stages), -np.inf, dtype=dtype)
    owner = np.asarray(stage_ranks)
    met = np.flatnonzero(owner[1:] != owner[:-1])  # the boundaries between ranks
    for direction, (source, stage) in enumerate(((met, met + 1), (met + 1, met))):
        if link is None:
            latency[direction, stage] = costs.latency
            continue
        pairs = zip(owner[source].tolist(), owner[stage].tolist(), strict=True)
        used = [find_link(link, *pair) for pair in pairs]
        occupancy[direction, stage] = np.array(sizes, dtype=np.int64)[met] * np.array(
            [each.beta_s_per_byte for each in used]
        )
        latency[direction, stage] = [each.alpha_s for each in used]
    duration = np.array(durations, dtype=dtype).reshape(len(COMPUTE_KINDS), num_stages)
    return Prices(duration, occupancy, latency, np.array([costs.overlap], dtype=dtype))


def spread_sizes(size_bytes: Sizes, num_stages: int, *, has_link: bool) -> list[int]:
    """Checks message sizes, and returns the size in bytes at each boundary between stages.

    Sizes require a link, which determines the cost of a byte.
    """
    given: Any = [size_bytes] * max(num_stages - 1, 0) if is_integer(size_bytes) else size_bytes
    if not (is_list(given) or isinstance(given, np.ndarray)):
        raise ArgumentError(
            f"size_bytes must be an integer or a list of integers, got {say(given)}. Pass the size "
            "of an activation in bytes."
        )
    sizes = list(given)
    if len(sizes) != num_stages - 1:
        raise ArgumentError(
            "the length of size_bytes must be the number of boundaries between stages, "
            f"{num_stages - 1}, got {len(sizes)}. Pass a single number, or one per boundary."
        )
    if not all(is_integer(size) and 0 <= size <= _MOST_BYTES for size in sizes):
        raise ArgumentError(
            f"size_bytes must be from 0 to 2**53, got {say(size_bytes)}. Pass the size of an "
            "activation in bytes."
        )
    if any(sizes) and not has_link:
        raise ArgumentError(
            f"size_bytes requires a link, got {say(size_bytes)} without a link. Add link=Link(...)."
        )
    return [int(size) for size in sizes]
