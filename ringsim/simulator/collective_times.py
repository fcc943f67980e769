"""When a collective is done: what a common algorithm takes over the links that there are.

S is the size in the trace, and N the number of ranks:

| collective | how |
|---|---|
| all_reduce | 2 (N - 1) steps of S / N, each rank to the next one |
| reduce_scatter, all_gather | N - 1 such steps |
| all_to_all | N - 1 steps of S / N; in step k each rank to the one k places on |
| broadcast, reduce | log2 N steps of S, as in a tree |
| gather, scatter | the bytes of N - 1 parts of S / N, one after the other, and one latency |
| barrier | log2 N steps of 0 bytes |

Where each pair of ranks has a link of its own, nobody meets a collective but others of its group, which wait for its last byte. The time is
then a formula: a step takes as long as the slowest link from a member to the next one.

On shared links the bytes are flows among those of messages and other collectives. Steps that take the same ways each time are one flow for
each way, so that a ring of N ranks costs N flows, not 2 N (N - 1); where no link is shared, that takes the same time.

Source:
    R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19 (2005): the algorithms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ringsim.link import Link
from ringsim.simulator.carriers import Carrier
from ringsim.simulator.groups import SimulatedGroup
from ringsim.simulator.parts import Part
from ringsim.simulator.shared_links import SharedLinks
from ringsim.traces.collectives import make_rounds

__all__ = ["begin_collective"]

_RINGS: Final = ("all_reduce", "all_gather", "reduce_scatter")
_Way = tuple[int, int, float]  # from, to: places in the group; bytes
_Round = tuple[list[_Way], int]  # and how many latencies it pays


def begin_collective(parts: Sequence[Part], carrier: Carrier) -> None:
    """Begins a collective to which all have come; completes their parts when it is done.

    Args:
        parts: of all members, by place.
        carrier: carries what it moves.
    """
    group, now_s = parts[0].group, parts[0].rank.clock.now
    size_bytes = max(part.kind.size_bytes for part in parts)
    if group.size() == 1:
        _complete(parts, now_s)
    elif isinstance(carrier, SharedLinks) and size_bytes > 0:
        _go_through(parts, carrier, _list_rounds(parts, size_bytes))
    else:
        _complete(parts, _take_turn(parts[0].name, size_bytes, group, carrier, now_s))


def _complete(parts: Sequence[Part], time_s: float) -> None:
    for part in parts:
        part.complete(time_s)


def _take_turn(name: str, size_bytes: int, group: SimulatedGroup, carrier: Carrier, now_s: float) -> float:
    """Returns when a collective is done over links that only its group uses."""
    latencies, moved_bytes = _reckon(name, group.size(), size_bytes)
    links = _links(group, carrier)
    start_s = max(now_s, group.free_s)
    group.free_s = start_s + max(moved_bytes * link.beta_s_per_byte for link in links)
    return start_s + max(latencies * link.alpha_s + moved_bytes * link.beta_s_per_byte for link in links)


def _reckon(name: str, count: int, size_bytes: int) -> tuple[int, float]:
    """Returns how many latencies follow each other, and how many bytes a link takes in all."""
    hops, others = (count - 1).bit_length(), (count - 1) * size_bytes / count
    if name.startswith("all_reduce"):
        return 2 * (count - 1), 2 * others
    if name in ("broadcast", "reduce"):
        return hops, hops * size_bytes
    if name in ("gather", "scatter"):
        return 1, others
    if name in ("barrier", "monitored_barrier"):
        return hops, 0
    return count - 1, others


def _links(group: SimulatedGroup, carrier: Carrier) -> tuple[Link, ...]:
    """Returns the different links from each member to the next one."""
    ranks = group.ranks
    if not group.links:
        group.links = tuple(dict.fromkeys(carrier.link_of(rank, ranks[(place + 1) % len(ranks)]) for place, rank in enumerate(ranks)))
    return group.links


def _go_through(parts: Sequence[Part], carrier: SharedLinks, rounds: Iterator[_Round]) -> None:
    """Has each round carried when the one before has arrived, the first one now."""
    group = parts[0].group
    ranks, number = group.ranks, group.number
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
            carrier.carry_part(number, ranks[source], ranks[to], amount, latencies, arrive)
        if not ways:
            _complete(parts, time_s)

    go_on(parts[0].rank.clock.now)


def _list_rounds(parts: Sequence[Part], size_bytes: int) -> Iterator[_Round]:
    """Yields what a collective moves, for `_go_through`."""
    name, count = parts[0].name, len(parts)
    if name.startswith(_RINGS):
        latencies, moved_bytes = _reckon(name, count, size_bytes)
        yield [(place, (place + 1) % count, moved_bytes) for place in range(count)], latencies
        return
    one_by_one = name in ("gather", "scatter")
    for number, messages in enumerate(make_rounds(name, count, parts[0].root, size_bytes)):
        ways = [(source, to, _amount(parts, source, to, amount)) for source, to, amount in messages]
        yield ways, int(not one_by_one or number == count - 2)


def _amount(parts: Sequence[Part], source: int, to: int, amount: int) -> float:
    """Returns how many bytes go from one member to another: in an all_to_all the piece, where pieces may differ."""
    if not parts[source].name.startswith("all_to_all"):
        return amount
    piece = parts[source].inputs[to]
    return piece.numel() * piece.element_size()
