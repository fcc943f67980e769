"""Brings the parts of all ranks in a collective together, and says how long it takes.

The n-th collective of a group on one rank belongs to the n-th on every other. It begins when the last member has come, and is done on all
at the same time, after as long as a common algorithm would take over links that nobody else uses at the moment. S is the size in the trace:

| collective | time over N ranks |
|---|---|
| all_reduce | 2 (N - 1) steps of S / N, as in a ring |
| reduce_scatter, all_gather, all_to_all | N - 1 steps of S / N |
| gather, scatter | the bytes of N - 1 parts of S / N, one after the other, and one latency |
| broadcast, reduce | log2 N steps of S, as in a tree |
| barrier | log2 N steps of 0 bytes |

A step takes as long as the slowest link from a member to the next one.

Source:
    R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19 (2005): the algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ringsim.comm.follower import disagreement
from ringsim.diagnose.waitfor import same_collective
from ringsim.errors import MessageMismatch
from ringsim.link import Link
from ringsim.simulator.carriers import Carrier
from ringsim.simulator.groups import SimulatedGroup
from ringsim.simulator.handles import Part

__all__ = ["attend", "duration_s"]

Perform = Callable[[Sequence[Part]], None]  # given the parts by place, moves the data
_UNEVEN = ("all_to_all", "all_to_all_single")  # of which every rank may carry another size


def attend(part: Part, carrier: Carrier, perform: Perform) -> None:
    """Adds a rank's part to the collective it belongs to; the last one to come carries it out.

    Args:
        part: what the rank has just posted.
        carrier: says what links cost.
        perform: moves the data.

    Raises:
        MessageMismatch: another rank has called something else in its place.
    """
    group = part.group
    size = group.size()
    if not group.calls:
        group.calls = [0] * size
    number = group.calls[part.place]
    met: list[Part] = group.meetings.get(number, [])
    if met:
        _compare(part, met[0])
    group.calls[part.place] = number + 1
    if len(met) + 1 < size:
        met.append(part)
        group.meetings[number] = met
        return
    group.meetings.pop(number, None)
    parts = sorted([*met, part], key=lambda each: each.place)
    if not any(tensor.is_meta for each in parts for tensor in (*each.inputs, *each.outputs)):
        with torch.inference_mode():  # tensors that were made in it may be changed nowhere else
            perform(parts)
    hub = part.rank.hub
    done_s = hub.now + duration_s(part.name, part.kind.size_bytes, group, carrier)
    for each in parts:
        each.complete(done_s)


def duration_s(name: str, size_bytes: int, group: SimulatedGroup, carrier: Carrier) -> float:
    """Returns how long a collective takes once all have come, in seconds.

    Args:
        name: of the collective.
        size_bytes: S, as the trace has it.
        group: who takes part.
        carrier: says what links cost.
    """
    count = group.size()
    if count == 1:
        return 0.0
    links = _links(group, carrier)
    each, hops = size_bytes / count, (count - 1).bit_length()
    if name.startswith("all_reduce"):
        return 2 * (count - 1) * _slowest(links, each)
    if name in ("broadcast", "reduce"):
        return hops * _slowest(links, size_bytes)
    if name in ("gather", "scatter"):
        return max(link.alpha_s + (count - 1) * each * link.beta_s_per_byte for link in links)
    if name in ("barrier", "monitored_barrier"):
        return hops * _slowest(links, 0)
    return (count - 1) * _slowest(links, each)


def _slowest(links: Sequence[Link], size_bytes: float) -> float:
    return max(link.time_s(size_bytes) for link in links)


def _links(group: SimulatedGroup, carrier: Carrier) -> tuple[Link, ...]:
    """Returns the different links from each member to the next one."""
    ranks = group.ranks
    if not group.links:
        group.links = tuple(dict.fromkeys(carrier.link_of(rank, ranks[(place + 1) % len(ranks)]) for place, rank in enumerate(ranks)))
    return group.links


def _compare(mine: Part, theirs: Part) -> None:
    """Compares what two ranks call.

    Raises:
        MessageMismatch: they do not belong together.
    """
    if not same_collective(mine.name, theirs.name):
        words = f"one operation, got {mine.name} here and {theirs.name}"
    elif mine.root != theirs.root:
        words = f"one root, got root {mine.root} here and root {theirs.root}"
    else:
        payloads = mine.kind.payload, theirs.kind.payload
        what = "" if mine.name in _UNEVEN else disagreement(*payloads)
        if not what or (what == "shape" and mine.name != theirs.name):
            return
        words = f"one {what}, got {_describe(*payloads[0])} here and {_describe(*payloads[1])}"
    rank = mine.rank
    message = (
        f"all ranks of a group must call the same collectives in the same order, with {words} in rank {theirs.rank.number}'s "
        f"{theirs.name}{theirs.rank.place_of(theirs.slot)} ({rank.here()}, {mine.name}, group {mine.group.group_name}). "
        "Make the calls alike."
    )
    rank.note("collective_mismatch", message, mine)
    raise MessageMismatch(message)


def _describe(dtype: str, shape: tuple[int, ...], size_bytes: int, reduction: str) -> str:
    words = f"{dtype}{list(shape)} ({size_bytes:,} bytes)" if dtype else "nothing"
    return f"{words}, {reduction}" if reduction else words
