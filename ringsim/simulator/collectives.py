"""The handle of a rank's part in a simulated collective.

When a collective is done: what a common algorithm takes over the links that there are.

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

Brings the parts of all ranks in a collective together.

The n-th collective of a group on one rank belongs to the n-th on every other. It begins when the last member has come, and is done on all
at the same time; ``collective_times`` says when. What cannot be carried out is an error on all of them.

The collectives of a simulated rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import torch

from ringsim.comm.built import find_refusal
from ringsim.comm.follower import disagreement
from ringsim.diagnose.verdict import name_ranks
from ringsim.errors import ArgumentError, MessageMismatch
from ringsim.link import Link
from ringsim.simulator.links import Carrier, SharedLinks
from ringsim.simulator.matching import Operation, SimulatedGroup, check_storage
from ringsim.simulator.recording import Kind
from ringsim.traces.collectives import make_rounds, same_collective

if TYPE_CHECKING:
    from ringsim.simulator.rank import RankCore

__all__ = ["Part", "ReductionRefused", "SimulatedFuture", "attend", "begin_collective"]


class Part(Operation):
    """A rank's part in a collective.

    Args:
        op: its code.
        rank: whose it is.
        slot: of its record, -1 where it has none.
        group: where.
        kind: of what it carries.
        name: of the collective.
        place: of the rank in the group.
        inputs: tensors that it gives.
        outputs: tensors that it gets.
        results: the tensors that hold the result.

    Attributes:
        root: group rank of the root, -1 for none.
    """

    def __init__(
        self,
        op: int,
        rank: RankCore,
        slot: int,
        group: SimulatedGroup,
        kind: Kind,
        name: str,
        place: int,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(op, rank, slot, group, kind)
        self.root = -1
        self.peer = self.tag = -1
        self.name = name
        self.place = place
        self.inputs = inputs
        self.outputs = outputs
        self.results = results

    def describe(self) -> str:
        """Returns the operation in words."""
        return f'{self.name} of group "{self.group.group_name}"'

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors that hold the result, once it is there."""
        self.wait()
        return list(self.results)

    def get_future(self) -> SimulatedFuture:
        """Returns a future of the result."""
        return SimulatedFuture(self)


class SimulatedFuture:
    """Stands for the result of an operation, as ``torch.futures.Future`` does: that one would block all ranks.

    Args:
        handle: of the operation.
    """

    def __init__(self, handle: Part) -> None:
        self._handle = handle

    def wait(self) -> list[torch.Tensor]:
        """Blocks until the result is there, and returns it."""
        return self._handle.result()

    def value(self) -> list[torch.Tensor]:
        """Returns the result, which must be there."""
        return self._handle.result()

    def done(self) -> bool:
        """Returns whether the result is there."""
        return self._handle.is_completed()


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


Perform = Callable[[Sequence[Part]], None]  # given the parts by place, moves the data
_Fault = tuple[type[ArgumentError], str, str]  # kind of error; what is wrong; what to do
_UNEVEN = ("all_to_all", "all_to_all_single")  # of which every rank may carry another size


class ReductionRefused(ArgumentError, RuntimeError):
    """Torch does not reduce such tensors in such a way; a ``RuntimeError``, too, as on real ranks."""


def attend(part: Part, carrier: Carrier, perform: Perform) -> None:
    """Adds a rank's part to the collective it belongs to; the last one to come carries it out.

    Args:
        part: what the rank has just posted.
        carrier: carries what it moves.
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
    fault = _find_fault(parts) or _move(parts, perform)
    if fault is None:
        begin_collective(parts, carrier)
        return
    kind, words, advice = fault
    for each in parts:  # it takes no time, and their waits raise
        where = f"{each.rank.here()}, {each.name}, group {group.group_name}"
        each.error = kind(f"{words} ({where}). {advice}.")
        each.complete(each.rank.clock.now)


def _find_fault(parts: Sequence[Part]) -> _Fault | None:
    """Returns what is wrong with a reduction, None where nothing is."""
    payload = parts[0].kind.payload
    refusal = find_refusal(parts[0].inputs[0].dtype, payload.reduction) if payload.reduction else ""
    if not refusal:
        return None
    words = f"op must be one that torch has for {payload.dtype}, got {payload.reduction}: {refusal}"
    return ReductionRefused, words, "Convert the tensors, or choose another operation"


def _move(parts: Sequence[Part], perform: Perform) -> _Fault | None:
    """Moves the data, where there is any; returns what is wrong with the tensors, None where nothing is."""
    without = [part.rank.number for part in parts if any(tensor.is_meta for tensor in (*part.inputs, *part.outputs))]
    if without:
        others = [part.rank.number for part in parts if any(not tensor.is_meta for tensor in (*part.inputs, *part.outputs))]
        if not others:
            return None
        rule = "the tensors of a collective must have data on all ranks, or on none"
        return ArgumentError, f"{rule}, got meta tensors on {name_ranks(without)} and others on {name_ranks(others)}", "Use one device"
    try:
        for part in parts:
            for tensor in (*part.inputs, *part.outputs):
                check_storage(part.name, tensor)
        with torch.inference_mode():  # tensors that were made in it may be changed nowhere else
            perform(parts)
    except ArgumentError as error:
        return ArgumentError, str(error).rpartition(" Resize")[0].rstrip("."), "Resize it after wait()"
    except RuntimeError as error:
        return ArgumentError, f"the tensors of a collective must be some that torch can write into, got: {error}", "Use tensor.clone()"
    return None


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
