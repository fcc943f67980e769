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

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ringsim.comm.collectives import describe
from ringsim.comm.follower import disagreement
from ringsim.comm.mpi_buffers import check_alike, check_count
from ringsim.comm.reductions import check_reduction, find_refusal, reduce_parts
from ringsim.diagnose.verdict import name_ranks
from ringsim.diagnose.waitfor import same_collective
from ringsim.errors import ArgumentError, MessageMismatch
from ringsim.exchange.rounds import make_rounds
from ringsim.link import Link
from ringsim.simulator.links import Carrier, SharedLinks
from ringsim.simulator.matching import Operation, SimulatedGroup, check_storage, check_tensor, check_tensors
from ringsim.simulator.rank import RankCore
from ringsim.simulator.recording import Kind
from ringsim.traces.events import NONE, OP_CODES, Payload

if TYPE_CHECKING:
    from ringsim.simulator.rank import RankCore

__all__ = ["Collectives", "Part", "ReductionRefused", "SimulatedFuture", "attend", "begin_collective"]


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


_SUM: Final = ReduceOp.SUM
Parts = Sequence[Part]


class Collectives(RankCore):
    """The collectives of ``torch.distributed``; see there for the arguments.

    Every rank of the group calls them, in the same order. They block until all have; with ``async_op=True`` they return a handle. Outside
    the group they do nothing. Reductions are taken in the order of the ranks. What is given is read before anything is written: the
    tensors of a rank may share memory.
    """

    def broadcast(
        self, tensor: Tensor, src: int | None = None, group: Any = None, async_op: bool = False, group_src: int | None = None
    ) -> Part | None:
        """Gives all ranks the root's tensor."""
        found = self._enter("broadcast", group)
        if found is None:
            return None
        values, root = check_tensor("tensor", tensor), found.place_of("src", src, group_src)

        def perform(parts: Parts) -> None:
            for part in parts:
                if part.place != root:
                    part.outputs[0].copy_(parts[root].inputs[0])

        return self._collect("broadcast", found, [values], [values], perform, async_op, root=root)

    def all_reduce(self, tensor: Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Part | None:
        """Reduces everybody's tensor in place, with the result on all ranks."""
        found = self._enter("all_reduce", group)
        if found is None:
            return None
        return self._reduce_everywhere("all_reduce", found, [check_tensor("tensor", tensor)], op, async_op)

    def all_reduce_coalesced(self, tensors: Any, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Part | None:
        """Reduces several tensors of one dtype at once, in place, with the results on all ranks."""
        found = self._enter("all_reduce_coalesced", group)
        if found is None:
            return None
        values = check_tensors("tensors", tensors if isinstance(tensors, list | tuple) else [tensors])
        if not values:
            raise ArgumentError(f"tensors must be at least one, got an empty list ({self.here()}). Leave the call out on all ranks.")
        check_alike("tensors", values, values[0], same_shape=False)
        return self._reduce_everywhere("all_reduce_coalesced", found, values, op, async_op)

    def _reduce_everywhere(self, name: str, group: SimulatedGroup, tensors: list[Tensor], op: Any, async_op: bool) -> Part | None:
        check_reduction(op)

        def perform(parts: Parts) -> None:
            totals = [reduce_parts([part.inputs[index] for part in parts], op) for index in range(len(tensors))]
            for part in parts:
                for output, total in zip(part.outputs, totals, strict=True):
                    output.copy_(total)

        return self._collect(name, group, tensors, tensors, perform, async_op, reduction=op)

    def reduce(
        self,
        tensor: Tensor,
        dst: int | None = None,
        op: Any = _SUM,
        group: Any = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Part | None:
        """Reduces everybody's tensor into the root's; those of other ranks stay as they are."""
        found = self._enter("reduce", group)
        if found is None:
            return None
        values, root = check_tensor("tensor", tensor), found.place_of("dst", dst, group_dst)
        check_reduction(op)

        def perform(parts: Parts) -> None:
            parts[root].outputs[0].copy_(reduce_parts([part.inputs[0] for part in parts], op))

        return self._collect("reduce", found, [values], [values], perform, async_op, root=root, reduction=op)

    def reduce_scatter(self, output: Tensor, input_list: Any, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Part | None:
        """Reduces everybody's list of tensors, and gives each rank the one of its place. The tensors may differ in size."""
        found = self._enter("reduce_scatter", group)
        if found is None:
            return None
        result, inputs = check_tensor("output", output), check_tensors("input_list", input_list)
        check_count("input_list", inputs, found.size())
        check_alike("input_list", inputs, result, same_shape=False)
        mine = inputs[found.rank()]
        if mine.numel() != result.numel():
            raise ArgumentError(
                f"output must be as large as input_list[{found.rank()}], {mine.numel()} elements, got {result.numel()} ({self.here()}). "
                "Make it so."
            )
        check_reduction(op)

        def perform(parts: Parts) -> None:
            totals = [reduce_parts([each.inputs[place] for each in parts], op) for place in range(len(parts))]
            for part, total in zip(parts, totals, strict=True):
                part.outputs[0].copy_(total.view_as(part.outputs[0]))

        return self._collect("reduce_scatter", found, inputs, [result], perform, async_op, reduction=op)

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's name
        op: Any = _SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Part | None:
        """Reduces everybody's tensor, and gives each rank its part of it."""
        found = self._enter("reduce_scatter_tensor", group)
        return None if found is None else self._reduce_to_parts("reduce_scatter_tensor", found, output, input, op, async_op)

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's name
        op: Any = _SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Part | None:
        """The newer name of ``reduce_scatter_tensor``."""
        found = self._enter("reduce_scatter_single", group)
        return None if found is None else self._reduce_to_parts("reduce_scatter_single", found, output, input, op, async_op)

    def _reduce_to_parts(self, name: str, found: SimulatedGroup, output: Tensor, given: Tensor, op: Any, async_op: bool) -> Part | None:
        result, values = check_tensor("output", output), check_tensor("input", given)
        check_alike("output", [result], values, same_shape=False)
        self._check_parts("input", values, "output", result, found)
        check_reduction(op)

        def perform(parts: Parts) -> None:
            total = reduce_parts([part.inputs[0].reshape(-1) for part in parts], op)
            for part, piece in zip(parts, total.chunk(len(parts)), strict=True):
                part.outputs[0].copy_(piece.view_as(part.outputs[0]))

        return self._collect(name, found, [values], [result], perform, async_op, reduction=op)

    def all_gather(self, tensor_list: Any, tensor: Tensor, group: Any = None, async_op: bool = False) -> Part | None:
        """Fills each rank's list with everybody's tensor, by rank."""
        found = self._enter("all_gather", group)
        if found is None:
            return None
        values, outputs = check_tensor("tensor", tensor), check_tensors("tensor_list", tensor_list)
        check_count("tensor_list", outputs, found.size())
        check_alike("tensor_list", outputs, values)
        return self._collect("all_gather", found, [values], outputs, _gather_everywhere, async_op, carried=outputs)

    def all_gather_coalesced(
        self, output_tensor_lists: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
    ) -> Part | None:
        """Fills the list of each rank with everybody's list of tensors."""
        found = self._enter("all_gather_coalesced", group)
        if found is None:
            return None
        inputs = check_tensors("input_tensor_list", input_tensor_list)
        check_count("output_tensor_lists", output_tensor_lists, found.size())
        outputs: list[Tensor] = []
        for place, each in enumerate(output_tensor_lists):
            row = check_tensors(f"output_tensor_lists[{place}]", each)
            check_count(f"output_tensor_lists[{place}]", row, len(inputs))
            for output, values in zip(row, inputs, strict=True):
                check_alike(f"output_tensor_lists[{place}]", [output], values)
            outputs += row
        return self._collect("all_gather_coalesced", found, inputs, outputs, _gather_everywhere, async_op, carried=outputs)

    def all_gather_into_tensor(self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> Part | None:
        """Fills each rank's output with everybody's input behind each other, by rank."""
        found = self._enter("all_gather_into_tensor", group)
        return None if found is None else self._gather_into("all_gather_into_tensor", found, output_tensor, input_tensor, async_op)

    def all_gather_single(self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> Part | None:
        """The newer name of ``all_gather_into_tensor``."""
        found = self._enter("all_gather_single", group)
        return None if found is None else self._gather_into("all_gather_single", found, output_tensor, input_tensor, async_op)

    def _gather_into(self, name: str, found: SimulatedGroup, output_tensor: Tensor, input_tensor: Tensor, async_op: bool) -> Part | None:
        values, output = check_tensor("input_tensor", input_tensor), check_tensor("output_tensor", output_tensor)
        check_alike("output_tensor", [output], values, same_shape=False)
        self._check_parts("output_tensor", output, "input_tensor", values, found)

        def perform(parts: Parts) -> None:
            whole = torch.cat([part.inputs[0].reshape(-1) for part in parts])
            for part in parts:
                part.outputs[0].copy_(whole.view_as(part.outputs[0]))

        return self._collect(name, found, [values], [output], perform, async_op, carried=[output])

    def gather(
        self,
        tensor: Tensor,
        gather_list: Any = None,
        dst: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Part | None:
        """Fills the root's list with everybody's tensor, by rank. The root is rank 0 where none is given."""
        found = self._enter("gather", group)
        if found is None:
            return None
        values, root = check_tensor("tensor", tensor), self._root(found, "dst", dst, group_dst)
        outputs = self._list_at_root("gather_list", gather_list, values, found, root)

        def perform(parts: Parts) -> None:
            values = [part.inputs[0] for part in parts]
            values[root] = values[root].clone()  # the list may share its memory
            for output, value in zip(parts[root].outputs, values, strict=True):
                output.copy_(value)

        return self._collect("gather", found, [values], outputs, perform, async_op, copies=found.size(), root=root)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: Any = None,
        src: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Part | None:
        """Gives each rank its tensor of the root's list. The root is rank 0 where none is given."""
        found = self._enter("scatter", group)
        if found is None:
            return None
        values, root = check_tensor("tensor", tensor), self._root(found, "src", src, group_src)
        inputs = self._list_at_root("scatter_list", scatter_list, values, found, root)

        def perform(parts: Parts) -> None:
            own = parts[root].inputs[root].clone()  # its place may share the memory of other pieces
            for part, piece in zip(parts, parts[root].inputs, strict=True):
                if part.place != root:
                    part.outputs[0].copy_(piece)
            parts[root].outputs[0].copy_(own)

        return self._collect("scatter", found, inputs, [values], perform, async_op, copies=found.size(), root=root, carried=[values])

    def all_to_all(self, output_tensor_list: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False) -> Part | None:
        """Sends each rank its tensor of the inputs, and fills the outputs with what comes from each. Sizes may differ."""
        found = self._enter("all_to_all", group)
        if found is None:
            return None
        inputs, outputs = check_tensors("input_tensor_list", input_tensor_list), check_tensors("output_tensor_list", output_tensor_list)
        check_count("input_tensor_list", inputs, found.size())
        check_count("output_tensor_list", outputs, found.size())
        check_alike("tensors", [*inputs, *outputs], inputs[0], same_shape=False)
        return self._collect("all_to_all", found, inputs, outputs, _exchange, async_op)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's name
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Part | None:
        """Sends a piece of the input, cut along its first dimension, to each rank, and joins what comes from each."""
        found = self._enter("all_to_all_single", group)
        if found is None:
            return None
        values, result = check_tensor("input", input), check_tensor("output", output)
        check_alike("output", [result], values, same_shape=False)
        pieces = values.split(self._cut("input", values, input_split_sizes, found))
        places = result.split(self._cut("output", result, output_split_sizes, found))
        return self._collect("all_to_all_single", found, pieces, places, _exchange, async_op, carried=[values], results=[result])

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None) -> Part | None:
        """Blocks until every rank of the group has come here."""
        found = self._enter("barrier", group)
        if found is None:
            return None
        return self._collect("barrier", found, [], [], _nothing, async_op, timeout=timeout)

    def monitored_barrier(self, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Blocks until every rank of the group has come here; where one never does, the simulation says which."""
        found = self._enter("monitored_barrier", group)
        if found is not None:
            self._collect("monitored_barrier", found, [], [], _nothing, False, timeout=timeout)

    # -- what the collectives share

    def _collect(
        self,
        name: str,
        group: SimulatedGroup,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        perform: Callable[[Parts], None],
        async_op: bool,
        *,
        copies: int = 1,
        root: int = NONE,
        reduction: Any = None,
        carried: Sequence[Tensor] | None = None,
        results: Sequence[Tensor] | None = None,
        timeout: Any = None,
    ) -> Part | None:
        """Begins a collective; waits for it unless ``async_op``.

        Args:
            name: of the operation.
            group: where.
            inputs: what this rank gives.
            outputs: what it gets.
            perform: moves the data, once all have come.
            async_op: whether to return the handle.
            copies: how many times the tensors count for the size.
            root: group rank of the root.
            reduction: how it reduces.
            carried: what its size is reckoned from, where that is not the inputs.
            results: what the handle returns, where that is not the outputs.
            timeout: limit of the wait.
        """
        if self.hooked:
            self._before_operation()
        how = "" if reduction is None else str(getattr(reduction, "op", reduction)).rpartition(".")[2]
        payload = Payload(*describe(list(inputs if carried is None else carried), copies), how)
        kind = Kind(self.tape.number_payload(payload), payload)
        slot = -1
        if self.records:
            peer = NONE if root == NONE else group.ranks[root]
            slot = self.tape.post(self.clock.now, self.number, OP_CODES[name], group.number, peer, NONE, kind.number, sys._getframe(1))
        part = Part(OP_CODES[name], self, slot, group, kind, name, group.rank(), inputs, outputs, outputs if results is None else results)
        part.root = root
        self.clock.polls = 0
        attend(part, self.world.carrier, perform)
        if async_op:
            return part
        part.wait(timeout)
        return None

    def _list_at_root(self, what: str, tensors: Any, like: Tensor, group: SimulatedGroup, root: int) -> list[Tensor]:
        """Returns the list that only the root has, checked; on other ranks an empty one."""
        if group.rank() != root:
            if tensors:
                raise ArgumentError(f"{what} must be left out on all ranks but the root, got {len(tensors)} tensors ({self.here()}).")
            return []
        outputs = check_tensors(what, tensors)
        check_count(what, outputs, group.size())
        check_alike(what, outputs, like)
        return outputs


def _gather_everywhere(parts: Parts) -> None:
    values = [tensor.clone() for part in parts for tensor in part.inputs]  # outputs may share memory with inputs
    for part in parts:
        for output, value in zip(part.outputs, values, strict=True):
            output.copy_(value)


def _exchange(parts: Parts) -> None:
    kept = [[piece.clone() for piece in part.inputs] for part in parts]  # outputs may share memory with inputs
    for part in parts:
        for output, row in zip(part.outputs, kept, strict=True):
            output.copy_(row[part.place].view_as(output))


def _nothing(parts: Parts) -> None:
    """Nothing is moved."""
