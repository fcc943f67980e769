"""Performs the collectives of simulated ranks, and determines how long they take.

The n-th collective of a group on one rank matches the n-th collective of the group on every other
rank. When the last rank has called it, the data moves, and the collective takes as long as a common
algorithm would take over the given links. S is the size in the trace, and N is the number of ranks:

| collective | algorithm |
|---|---|
| all_reduce | a ring: 2 (N - 1) steps of S / N, from each rank to the next one |
| all_reduce, if this is faster | a tree: a reduce, and then a broadcast |
| reduce_scatter, all_gather | a ring: N - 1 steps of S / N |
| all_to_all | N - 1 steps of S / N; in step k, each rank sends to the rank k places on |
| broadcast, reduce | log2 N steps of S, as in a tree |
| gather, scatter | N - 1 parts of S / N, one after another, and one latency |
| barrier | log2 N steps of 0 bytes |

So a small all_reduce over many ranks uses a tree, which has few latencies, and a large all_reduce
uses the ring, which moves the fewest bytes. The trace's metadata counts both under ``algorithms``.

If each pair of ranks has its own link, a collective competes only with other collectives of its
group, which wait for its last byte. A formula then determines its time: each step takes as long as
the slowest link from a member to the next one.

On shared links, the bytes compete with messages and other collectives. If all steps use the same
routes, they form one flow per route, so that a ring of N ranks needs N flows instead of
2 N (N - 1). If no link is shared, this takes the same time.

If ranks share cores and Gloo's costs are known, collectives follow Gloo's algorithms instead; see
`ringsim.simulator.gloo`.

Source:
    R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 19 (2005): the algorithms.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringsim.comm.calls import Call
from ringsim.comm.reductions import find_refusal, reduce_parts
from ringsim.comm.torch_private import outside_modes
from ringsim.diagnose.mismatches import disagreement
from ringsim.errors import ArgumentError, MessageMismatch, Refused, name_ranks
from ringsim.link import Link
from ringsim.simulator.clock import Rank
from ringsim.simulator.gloo import GlooCollective
from ringsim.simulator.links import Links, SharedCores, SharedLinks
from ringsim.simulator.work import (
    RESIZE,
    PayloadKind,
    SimulatedWork,
    Team,
    describe_payload,
    find_lost_memory,
)
from ringsim.traces.collectives import COLLECTIVES, make_rounds, same_collective
from ringsim.traces.events import OP_CODES

_RING, _TREE = "all_reduce: ring", "all_reduce: tree"
_UNEVEN = ("all_to_all", "all_to_all_single")  # sizes may differ from rank to rank
_Way = tuple[int, int, float]  # from and to (places in the group), and bytes
_Round = tuple[Sequence[_Way], int]  # the ways, and the number of latencies


class _Fault(Exception):
    """A problem of all members: the type of their errors, the problem, and the remedy."""


class _Choice(NamedTuple):
    """The algorithm of a collective.

    Attributes:
        how: the name of the algorithm.
        alone_s: the time that the algorithm takes on links that carry nothing else.
        busy_s: the time for which the algorithm's bytes occupy the links.
    """

    how: str
    alone_s: float
    busy_s: float


class Part(SimulatedWork):
    """One rank's part in a collective, as described by ``call``."""

    def __init__(self, rank: Rank, slots: tuple[int, ...], kind: PayloadKind, call: Call) -> None:
        self.call, self.name, self.root = call, call.recorded_name, call.root
        group: Any = call.group
        super().__init__(OP_CODES[self.name], rank, slots, group, kind)
        self.place = group.places[rank.number]

    def _results(self) -> list[Tensor]:
        return list(self.call.results)


# -- meeting


class Meetings:
    """The collectives of one group that some members have not called yet."""

    def __init__(self, size: int) -> None:
        self.calls = [0] * size  # the number of collectives that each member has called, by place
        # the parts posted so far, in order, by number of the collective
        self.open: dict[int, list[Part]] = {}
        # when the last collective's bytes have left, if the group has its own links
        self.free_s = 0.0
        # the distinct links from each member to the next one, found when needed
        self.links: set[Link] = set()
        self.choices: dict[tuple[str, int], _Choice] = {}  # by name and size
        # how often each algorithm was chosen, for collectives that have a choice
        self.algorithms: Counter[str] = Counter()


def meet(part: Part, links: Links) -> None:
    """Adds a rank's part to its collective. The last part starts the collective.

    Raises:
        MessageMismatch: another rank has called a different collective at this point.
    """
    group = part.group
    if group.meetings is None:
        group.meetings = Meetings(group.size())
    meetings: Meetings = group.meetings
    number = meetings.calls[part.place]
    met = meetings.open.get(number)
    if met is None:
        met = meetings.open[number] = []
    else:
        for other in met if part.name in _UNEVEN else met[:1]:
            _compare(part, other)
    meetings.calls[part.place] = number + 1
    met.append(part)
    if len(met) < len(meetings.calls):
        return
    del meetings.open[number]
    met.sort(key=lambda each: each.place)
    try:
        _check_reduction(met)
        _move(met)
    except _Fault as fault:
        kind, problem, remedy = fault.args
        for each in met:  # takes no time; the waits of the ranks raise the error
            where = f"{each.rank.here()}, {each.name}, group {group.group_name}"
            each.error = kind(f"{problem} ({where}). {remedy}.")
            each.complete(each.rank.clock.now)
    else:
        _begin(met, links)


def _compare(mine: Part, theirs: Part) -> None:
    """Raises MessageMismatch if the calls of two ranks do not match."""
    uneven = mine.name in _UNEVEN
    if (
        mine.name == theirs.name
        and mine.kind is theirs.kind
        and mine.root == theirs.root
        and not uneven
    ):
        return
    aspect = ""  # the property that differs, unless the words make it clear
    if not same_collective(mine.name, theirs.name):
        words = f"{mine.name} here and {theirs.name}"
    elif mine.root != theirs.root:
        words = f"root {mine.root} here and root {theirs.root}"
    elif uneven:
        words = _unfit(mine, theirs) or _unfit(theirs, mine)
        if not words:
            return
    else:
        payloads = mine.kind.payload, theirs.kind.payload
        what = disagreement(*payloads)
        if not what or (what == "shape" and mine.name != theirs.name):
            return
        aspect = f" in {what}"
        words = f"{describe_payload(payloads[0])} here and {describe_payload(payloads[1])}"
    message = (
        f"the collectives of a group do not match{aspect}: {words} in "
        f"rank {theirs.rank.number}'s "
        f"{theirs.name}{theirs.place_of_call()} ({mine.rank.here()}, {mine.name}, group "
        f"{mine.group.group_name}). Make matching calls in the same order on all ranks."
    )
    mine.refuse("collective_mismatch", message)
    raise MessageMismatch(message)


def _unfit(one: Part, other: Part) -> str:
    """Returns the mismatch between one rank's send and another's receive in an all_to_all.

    Sizes may differ from pair to pair. The result is "" if the two sides match.
    """
    given, taken = one.call.inputs[other.place], other.call.outputs[one.place]
    if given.nbytes != taken.nbytes:
        numbers = one.rank.number, other.rank.number
        return ("{:,} bytes sent from rank {} to rank {}, which expects {:,},").format(
            given.nbytes, *numbers, taken.nbytes
        )
    return (
        ""
        if given.dtype == taken.dtype or not given.nbytes
        else f"{given.dtype} sent and {taken.dtype} expected"
    )


def _check_reduction(parts: Sequence[Part]) -> None:
    """Raises _Fault if torch does not support the reduction for the tensors."""
    payload = parts[0].kind.payload
    if payload.reduction:
        refusal = find_refusal(parts[0].call.given[0].dtype, payload.reduction)
        if refusal:
            words = f"torch does not support {payload.reduction} for {payload.dtype}: {refusal}"
            raise _Fault(Refused, words, "Convert the tensors, or choose a different op")


def _move(parts: Sequence[Part]) -> None:
    """Moves the data, if the tensors hold any.

    Raises:
        _Fault: there is a problem with the tensors.
    """
    are_meta = {tensor.is_meta for part in parts for tensor in part.call.tensors}
    if False not in are_meta:
        return
    if True in are_meta:
        without, others = (
            name_ranks(
                [
                    part.rank.number
                    for part in parts
                    if any(tensor.is_meta is is_meta for tensor in part.call.tensors)
                ]
            )
            for is_meta in (True, False)
        )
        words = (
            "some tensors of the collective have data and others do not: meta tensors on "
            f"{without}, and tensors with data on {others}"
        )
        raise _Fault(ArgumentError, words, "Use the same device on all ranks")
    for part in parts:
        for tensor in part.call.tensors:
            if lost := find_lost_memory(tensor):
                raise _Fault(ArgumentError, lost, RESIZE)
    try:
        # tensors created in inference mode can only be changed in inference mode
        with torch.inference_mode(), outside_modes():
            _PERFORM[parts[0].call.collective.family]([part.call for part in parts])
    except RuntimeError as error:
        words = f"torch cannot write to the tensors of the collective: {error}"
        raise _Fault(ArgumentError, words, "Use tensor.clone()") from None


# -- moving the data, given the calls by place. All inputs are read before any output is written,
# because a rank's tensors may share memory.


def _broadcast(calls: Sequence[Call]) -> None:
    root = calls[0].root
    for place, call in enumerate(calls):
        if place != root:
            call.taken[0].copy_(calls[root].given[0])


def _all_reduce(calls: Sequence[Call]) -> None:
    totals = [
        reduce_parts(list(column), calls[0].op)
        for column in zip(*(call.given for call in calls), strict=True)
    ]
    for call in calls:
        for output, total in zip(call.taken, totals, strict=True):
            output.copy_(total)


def _reduce(calls: Sequence[Call]) -> None:
    calls[calls[0].root].taken[0].copy_(
        reduce_parts([call.given[0] for call in calls], calls[0].op)
    )


def _reduce_scatter(calls: Sequence[Call]) -> None:
    if all(call.cut_given for call in calls):  # in one step, not part by part
        totals = reduce_parts([call.given[0].reshape(-1) for call in calls], calls[0].op).chunk(
            len(calls)
        )
    else:
        totals = tuple(
            reduce_parts([each.inputs[place].reshape(-1) for each in calls], calls[0].op)
            for place in range(len(calls))
        )
    _deliver(calls, zip(totals, strict=True))


def _all_gather(calls: Sequence[Call]) -> None:
    if all(call.cut_taken for call in calls):
        everything = torch.cat([call.given[0].reshape(-1) for call in calls])
        for call in calls:
            call.taken[0].copy_(everything.view_as(call.taken[0]))
        return
    _deliver(calls, [[tensor.clone() for call in calls for tensor in call.given]] * len(calls))


def _gather(calls: Sequence[Call]) -> None:
    root = calls[0].root
    values = [call.given[0] for call in calls]
    values[root] = values[root].clone()
    _deliver([calls[root]], [values])


def _scatter(calls: Sequence[Call]) -> None:
    root = calls[0].root
    own = calls[root].given[root].clone()
    for place, (call, piece) in enumerate(zip(calls, calls[root].given, strict=True)):
        if place != root:
            call.taken[0].copy_(piece)
    calls[root].taken[0].copy_(own)


def _all_to_all(calls: Sequence[Call]) -> None:
    kept = [[piece.clone() for piece in call.inputs] for call in calls]
    _deliver(calls, zip(*kept, strict=True))


def _deliver(calls: Sequence[Call], rows: Iterable[Iterable[Tensor]]) -> None:
    """Copies each row of tensors to the outputs of one member."""
    for call, row in zip(calls, rows, strict=True):
        for output, value in zip(call.outputs, row, strict=True):
            output.copy_(value.reshape(output.shape))


_PERFORM: dict[str, Callable[[Sequence[Call]], None]] = {
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}


# -- time


def _begin(parts: Sequence[Part], links: Links) -> None:
    """Starts a collective that all members have called, and completes it when it is done."""
    first, now_s = parts[0], parts[0].rank.clock.now
    size_bytes = max(part.kind.size_bytes for part in parts)
    if len(parts) == 1:
        _complete(parts, now_s)
        return
    if isinstance(links, SharedCores) and links.gloo is not None:
        GlooCollective(first.name, parts, max(first.root, 0), size_bytes, links)
        return
    choice = _choose(first.name, size_bytes, first.group, links)
    if isinstance(links, SharedLinks) and size_bytes > 0:
        _go_through(parts, links, _list_rounds(parts, choice.how, size_bytes))
    else:  # over links that only this group uses
        meetings = first.group.meetings
        start_s = max(now_s, meetings.free_s)
        meetings.free_s = start_s + choice.busy_s
        _complete(parts, start_s + choice.alone_s)


def _complete(parts: Sequence[Part], time_s: float) -> None:
    """Sets the time at which all parts are done, and schedules the waiting ranks to wake then."""
    for part in parts:
        part.complete(time_s)


def _choose(name: str, size_bytes: int, group: Team, links: Links) -> _Choice:
    """Returns the algorithm for a collective, and its time.

    An all_reduce uses the faster of two algorithms, and counts the choice. All other collectives
    have only one algorithm.
    """
    ranks, meetings = group.ranks, group.meetings
    choice: _Choice | None = meetings.choices.get((name, size_bytes))
    if choice is None:
        if not meetings.links:
            pairs = zip(ranks, (*ranks[1:], ranks[0]), strict=True)
            meetings.links = {links.link_of(rank, succ) for rank, succ in pairs}
        hows = (_RING, _TREE) if COLLECTIVES[name].family == "all_reduce" else (name,)
        choices = [_weigh(how, len(ranks), size_bytes, meetings.links) for how in hows]
        choice = min(choices, key=lambda one: one.alone_s)  # the ring if both times are equal
        meetings.choices[name, size_bytes] = choice
    if choice.how != name:
        meetings.algorithms[choice.how] += 1
    return choice


def _weigh(how: str, count: int, size_bytes: int, links: Iterable[Link]) -> _Choice:
    """Returns the time that an algorithm takes on otherwise idle links."""
    latencies, moved_bytes = _count_steps(how, count, size_bytes)
    busy_s = [moved_bytes * link.beta_s_per_byte for link in links]
    alone_s = [latencies * link.alpha_s + moved_bytes * link.beta_s_per_byte for link in links]
    return _Choice(how, max(alone_s), max(busy_s))


def _count_steps(how: str, count: int, size_bytes: int) -> tuple[int, float]:
    """Returns the number of consecutive latencies and the bytes that each link carries."""
    hops, others = (count - 1).bit_length(), (count - 1) * size_bytes / count
    if how == _RING:
        return 2 * (count - 1), 2 * others
    if how == _TREE:
        return 2 * hops, 2 * hops * size_bytes
    if how in ("broadcast", "reduce"):
        return hops, hops * size_bytes
    if how in ("gather", "scatter"):
        return 1, others
    if how in ("barrier", "monitored_barrier"):
        return hops, 0
    return count - 1, others


def _go_through(parts: Sequence[Part], links: SharedLinks, rounds: Iterator[_Round]) -> None:
    """Carries the first round now, and each later round once the previous one has arrived."""
    group = parts[0].group
    under_way = 0

    def arrive(time_s: float) -> None:
        nonlocal under_way
        under_way -= 1
        if not under_way:
            go_on(time_s)

    def go_on(time_s: float) -> None:
        nonlocal under_way
        ways, latencies = next(rounds, ([], 0))
        under_way = len(ways)
        for source, to, amount in ways:
            src, dst = group.ranks[source], group.ranks[to]
            links.carry(src, dst, amount, arrive, group.number, latencies)
        if not ways:
            _complete(parts, time_s)

    go_on(parts[0].rank.clock.now)


def _list_rounds(parts: Sequence[Part], how: str, size_bytes: int) -> Iterator[_Round]:
    """Yields the rounds of a collective, for `_go_through`."""
    count, root = len(parts), parts[0].root
    if how == _RING or how.startswith(("all_gather", "reduce_scatter")):
        latencies, moved_bytes = _count_steps(how, count, size_bytes)
        yield [(place, (place + 1) % count, moved_bytes) for place in range(count)], latencies
        return
    one_by_one = how in ("gather", "scatter")
    rounds = (
        make_rounds(name, count, max(root, 0), size_bytes)
        for name in (("reduce", "broadcast") if how == _TREE else (how,))
    )
    for number, messages in enumerate(itertools.chain.from_iterable(rounds)):
        ways = [
            (source, to, parts[source].call.inputs[to].nbytes if how in _UNEVEN else amount)
            for source, to, amount in messages
        ]
        yield ways, int(not one_by_one or number == count - 2)
