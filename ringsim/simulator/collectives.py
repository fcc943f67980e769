"""The collectives of simulated ranks: who gives and takes what, and when they are done.

The n-th collective of a group on one rank belongs to the n-th on every other. The last rank to come moves the data and says when all are
done, by what a common algorithm takes over the links that there are; S is the size in the trace, and N the number of ranks:

| collective | how |
|---|---|
| all_reduce | 2 (N - 1) steps of S / N, each rank to the next one |
| reduce_scatter, all_gather | N - 1 such steps |
| all_to_all | N - 1 steps of S / N; in step k each rank to the one k places on |
| broadcast, reduce | log2 N steps of S, as in a tree |
| gather, scatter | the bytes of N - 1 parts of S / N, one after the other, and one latency |
| barrier | log2 N steps of 0 bytes |

Where each pair of ranks has a link of its own, a collective meets only others of its group, which wait for its last byte. The time is
then a formula: a step takes as long as the slowest link from a member to the next one.

On shared links the bytes are flows among those of messages and other collectives. Steps that take the same ways each time are one flow for
each way, so that a ring of N ranks costs N flows, not 2 N (N - 1); where no link is shared, that takes the same time.

Source:
    R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19 (2005): the algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ringsim.comm.built import check_reduction, find_refusal, reduce_parts
from ringsim.comm.collectives import check_alike, check_count, describe
from ringsim.diagnose.mismatches import disagreement
from ringsim.diagnose.verdict import name_ranks
from ringsim.errors import ArgumentError, MessageMismatch
from ringsim.link import Link
from ringsim.simulator.links import Links, SharedLinks
from ringsim.simulator.matching import Kind, Operation, SimulatedGroup, check_storage, check_tensor, check_tensors
from ringsim.traces.collectives import make_rounds, same_collective
from ringsim.traces.events import NONE, OP_CODES, Payload

if TYPE_CHECKING:
    from ringsim.simulator.rank import SimulatedRank

__all__ = ["COLLECTIVES", "Part", "ReductionRefused"]

_SUM: Final = ReduceOp.SUM
_RINGS: Final = ("all_reduce", "all_gather", "reduce_scatter")
_UNEVEN: Final = ("all_to_all", "all_to_all_single")  # of which every rank may carry another size
_Way = tuple[int, int, float]  # from, to: places in the group; bytes
_Round = tuple[list[_Way], int]  # and how many latencies it pays
_Fault = tuple[type[ArgumentError], str, str]  # kind of error; what is wrong; what to do


class ReductionRefused(ArgumentError, RuntimeError):
    """Torch does not reduce such tensors in such a way; a ``RuntimeError``, too, as on real ranks."""


class Part(Operation):
    """A rank's part in a collective.

    Args:
        rank: the rank.
        slot: of its record, None where it has none.
        group: where.
        kind: of what it carries.
        name: of the collective.
        inputs: tensors that the rank gives.
        outputs: tensors that it gets.

    Attributes:
        place: of the rank in the group.
        root: group rank of the root, NONE for none.
        reduction: how it reduces, None where it does not.
        results: the tensors that hold the result, where those are not the outputs.
    """

    root: int = NONE
    reduction: Any = None
    results: Sequence[Tensor] | None = None

    def __init__(
        self,
        rank: SimulatedRank,
        slot: int | None,
        group: SimulatedGroup,
        kind: Kind,
        name: str,
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(OP_CODES[name], rank, slot, group, kind)
        self.name, self.inputs, self.outputs = name, inputs, outputs
        self.place = group.places[rank.number]

    def describe(self) -> str:
        """Returns the operation in words."""
        return f'{self.name} of group "{self.group.group_name}"'

    def result(self) -> list[Tensor]:
        """Returns the tensors that hold the result, once it is there."""
        self.wait()
        return list(self.outputs if self.results is None else self.results)

    def get_future(self) -> _Future:
        """Returns a future of the result."""
        return _Future(self)


class _Future:
    """Stands for the result of an operation, as ``torch.futures.Future`` does: that one would block all ranks."""

    def __init__(self, part: Part) -> None:
        self._part = part

    def wait(self) -> list[Tensor]:
        """Blocks until the result is there, and returns it."""
        return self._part.result()

    def value(self) -> list[Tensor]:
        """Returns the result, which must be there."""
        return self._part.result()

    def done(self) -> bool:
        """Returns whether the result is there."""
        return self._part.is_completed()


# -- meeting


class Meetings:
    """The collectives of one group to which not all members have come.

    Args:
        size: of the group.

    Attributes:
        calls: how many collectives each member has called, by place.
        open: by the number of the collective: the parts of those that have come, in order.
        free_s: when the bytes of the last one have left, where the links are the group's own.
        links: the different links from each member to the next one, once somebody has asked.
    """

    def __init__(self, size: int) -> None:
        self.calls = [0] * size
        self.open: dict[int, list[Part]] = {}
        self.free_s = 0.0
        self.links: tuple[Link, ...] = ()


def meet(part: Part, links: Links) -> None:
    """Adds a rank's part to the collective that it belongs to; the last one to come carries it out.

    Args:
        part: what the rank has just posted.
        links: carry what it moves.

    Raises:
        MessageMismatch: another rank has called something else in its place.
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
        _compare(part, met[0])
    meetings.calls[part.place] = number + 1
    met.append(part)
    if len(met) < len(meetings.calls):
        return
    del meetings.open[number]
    met.sort(key=_place)
    fault = _find_fault(met) or _move(met)
    if fault is None:
        _begin(met, links)
        return
    kind, words, advice = fault
    for each in met:  # it takes no time, and their waits raise
        each.error = kind(f"{words} ({each.rank.here()}, {each.name}, group {group.group_name}). {advice}.")
        each.complete(each.rank.clock.now)


def _place(part: Part) -> int:
    return part.place


def _compare(mine: Part, theirs: Part) -> None:
    """Compares what two ranks call.

    Raises:
        MessageMismatch: they do not belong together.
    """
    if mine.name == theirs.name and mine.kind is theirs.kind and mine.root == theirs.root:
        return
    if not same_collective(mine.name, theirs.name):
        words = f"one operation, got {mine.name} here and {theirs.name}"
    elif mine.root != theirs.root:
        words = f"one root, got root {mine.root} here and root {theirs.root}"
    else:
        payloads = mine.kind.payload, theirs.kind.payload
        what = "" if mine.name in _UNEVEN else disagreement(*payloads)
        if not what or (what == "shape" and mine.name != theirs.name):
            return
        words = f"one {what}, got {_say(payloads[0])} here and {_say(payloads[1])}"
    message = (
        f"all ranks of a group must call the same collectives in the same order, with {words} in rank {theirs.rank.number}'s "
        f"{theirs.name}{theirs.place_of_call()} ({mine.rank.here()}, {mine.name}, group {mine.group.group_name}). Make the calls alike."
    )
    mine.refuse("collective_mismatch", message)
    raise MessageMismatch(message)


def _say(payload: Payload) -> str:
    words = f"{payload.dtype}{list(payload.shape)} ({payload.size_bytes:,} bytes)" if payload.dtype else "nothing"
    return f"{words}, {payload.reduction}" if payload.reduction else words


def _find_fault(parts: Sequence[Part]) -> _Fault | None:
    """Returns what is wrong with a reduction, None where nothing is."""
    payload = parts[0].kind.payload
    refusal = find_refusal(parts[0].inputs[0].dtype, payload.reduction) if payload.reduction else ""
    if not refusal:
        return None
    words = f"op must be one that torch has for {payload.dtype}, got {payload.reduction}: {refusal}"
    return ReductionRefused, words, "Convert the tensors, or choose another operation"


def _move(parts: Sequence[Part]) -> _Fault | None:
    """Moves the data, where there is any; returns what is wrong with the tensors, None where nothing is."""
    has_data = [[not tensor.is_meta for tensor in (*part.inputs, *part.outputs)] for part in parts]
    if not any(map(any, has_data)):
        return None
    if not all(map(all, has_data)):
        without = name_ranks([part.rank.number for part, has in zip(parts, has_data, strict=True) if not all(has)])
        others = name_ranks([part.rank.number for part, has in zip(parts, has_data, strict=True) if any(has)])
        rule = "the tensors of a collective must have data on all ranks, or on none"
        return ArgumentError, f"{rule}, got meta tensors on {without} and others on {others}", "Use one device"
    try:
        for part in parts:
            for tensor in part.inputs if part.inputs is part.outputs else (*part.inputs, *part.outputs):
                check_storage(tensor)
        with torch.inference_mode():  # tensors that were made in it may be changed nowhere else
            _PERFORM[parts[0].name](parts)
    except ArgumentError as error:
        return ArgumentError, str(error).removesuffix(". Resize it after wait()."), "Resize it after wait()"
    except RuntimeError as error:
        return ArgumentError, f"the tensors of a collective must be some that torch can write into, got: {error}", "Use tensor.clone()"
    return None


# -- moving the data. What is given is read before anything is written: the tensors of a rank may share memory.


def _broadcast(parts: Sequence[Part]) -> None:
    root = parts[0].root
    for part in parts:
        if part.place != root:
            part.outputs[0].copy_(parts[root].inputs[0])


def _reduce_everywhere(parts: Sequence[Part]) -> None:
    totals = [reduce_parts(list(column), parts[0].reduction) for column in zip(*(part.inputs for part in parts), strict=True)]
    for part in parts:
        for output, total in zip(part.outputs, totals, strict=True):
            output.copy_(total)


def _reduce_to_root(parts: Sequence[Part]) -> None:
    parts[parts[0].root].outputs[0].copy_(reduce_parts([part.inputs[0] for part in parts], parts[0].reduction))


def _reduce_lists(parts: Sequence[Part]) -> None:
    totals = [reduce_parts([each.inputs[place] for each in parts], parts[0].reduction) for place in range(len(parts))]
    for part, total in zip(parts, totals, strict=True):
        part.outputs[0].copy_(total.view_as(part.outputs[0]))


def _reduce_pieces(parts: Sequence[Part]) -> None:
    total = reduce_parts([part.inputs[0].reshape(-1) for part in parts], parts[0].reduction)
    for part, piece in zip(parts, total.chunk(len(parts)), strict=True):
        part.outputs[0].copy_(piece.view_as(part.outputs[0]))


def _gather_everywhere(parts: Sequence[Part]) -> None:
    values = [tensor.clone() for part in parts for tensor in part.inputs]
    for part in parts:
        for output, value in zip(part.outputs, values, strict=True):
            output.copy_(value)


def _gather_into(parts: Sequence[Part]) -> None:
    whole = torch.cat([part.inputs[0].reshape(-1) for part in parts])
    for part in parts:
        part.outputs[0].copy_(whole.view_as(part.outputs[0]))


def _gather_at_root(parts: Sequence[Part]) -> None:
    root = parts[0].root
    values = [part.inputs[0] for part in parts]
    values[root] = values[root].clone()
    for output, value in zip(parts[root].outputs, values, strict=True):
        output.copy_(value)


def _scatter(parts: Sequence[Part]) -> None:
    root = parts[0].root
    own = parts[root].inputs[root].clone()
    for part, piece in zip(parts, parts[root].inputs, strict=True):
        if part.place != root:
            part.outputs[0].copy_(piece)
    parts[root].outputs[0].copy_(own)


def _exchange(parts: Sequence[Part]) -> None:
    kept = [[piece.clone() for piece in part.inputs] for part in parts]
    for part in parts:
        for output, row in zip(part.outputs, kept, strict=True):
            output.copy_(row[part.place].view_as(output))


_PERFORM: Final[dict[str, Callable[[Sequence[Part]], None]]] = {
    "broadcast": _broadcast,
    "all_reduce": _reduce_everywhere,
    "all_reduce_coalesced": _reduce_everywhere,
    "reduce": _reduce_to_root,
    "reduce_scatter": _reduce_lists,
    "reduce_scatter_tensor": _reduce_pieces,
    "reduce_scatter_single": _reduce_pieces,
    "all_gather": _gather_everywhere,
    "all_gather_coalesced": _gather_everywhere,
    "all_gather_into_tensor": _gather_into,
    "all_gather_single": _gather_into,
    "gather": _gather_at_root,
    "scatter": _scatter,
    "all_to_all": _exchange,
    "all_to_all_single": _exchange,
}


# -- time


def _begin(parts: Sequence[Part], links: Links) -> None:
    """Begins a collective to which all have come; completes their parts when it is done."""
    first, now_s = parts[0], parts[0].rank.clock.now
    size_bytes = max(part.kind.size_bytes for part in parts)
    if len(parts) == 1:
        _complete(parts, now_s)
    elif isinstance(links, SharedLinks) and size_bytes > 0:
        _go_through(parts, links, _list_rounds(parts, size_bytes))
    else:
        _complete(parts, _take_turn(first.name, size_bytes, first.group, links, now_s))


def _complete(parts: Sequence[Part], time_s: float) -> None:
    for part in parts:
        part.complete(time_s)


def _take_turn(name: str, size_bytes: int, group: SimulatedGroup, links: Links, now_s: float) -> float:
    """Returns when a collective is done over links that only its group uses."""
    ranks, meetings = group.ranks, group.meetings
    if not meetings.links:
        pairs = zip(ranks, (*ranks[1:], ranks[0]), strict=True)
        meetings.links = tuple(dict.fromkeys(links.link_of(rank, succ) for rank, succ in pairs))
    latencies, moved_bytes = _count_steps(name, len(ranks), size_bytes)
    start_s = max(now_s, meetings.free_s)
    meetings.free_s = start_s + max(moved_bytes * link.beta_s_per_byte for link in meetings.links)
    end_s: float = start_s + max(latencies * link.alpha_s + moved_bytes * link.beta_s_per_byte for link in meetings.links)
    return end_s


def _count_steps(name: str, count: int, size_bytes: int) -> tuple[int, float]:
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


def _go_through(parts: Sequence[Part], links: SharedLinks, rounds: Iterator[_Round]) -> None:
    """Has each round carried when the one before has arrived, the first one now."""
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
            links.carry_part(group.number, group.ranks[source], group.ranks[to], amount, latencies, arrive)
        if not ways:
            _complete(parts, time_s)

    go_on(parts[0].rank.clock.now)


def _list_rounds(parts: Sequence[Part], size_bytes: int) -> Iterator[_Round]:
    """Yields what a collective moves, for `_go_through`."""
    name, count = parts[0].name, len(parts)
    if name.startswith(_RINGS):
        latencies, moved_bytes = _count_steps(name, count, size_bytes)
        yield [(place, (place + 1) % count, moved_bytes) for place in range(count)], latencies
        return
    one_by_one = name in ("gather", "scatter")
    for number, messages in enumerate(make_rounds(name, count, parts[0].root, size_bytes)):
        ways = [(source, to, _amount(parts, source, to, amount)) for source, to, amount in messages]
        yield ways, int(not one_by_one or number == count - 2)


def _amount(parts: Sequence[Part], source: int, to: int, amount: int) -> float:
    """Returns how many bytes go from one member to another: in an all_to_all the piece, where pieces may differ."""
    return parts[source].inputs[to].nbytes if parts[source].name in _UNEVEN else amount


# -- torch's functions, as methods of a rank. Every rank of the group calls them, in the same order. They block until all have; with
# ``async_op=True`` they return a handle. Outside the group they do nothing. Reductions are taken in the order of the ranks.


def _collect(
    rank: SimulatedRank,
    name: str,
    group: SimulatedGroup,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
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
        rank: the rank.
        name: of the operation.
        group: where.
        inputs: what this rank gives.
        outputs: what it gets.
        async_op: whether to return the handle.
        copies: how many times the tensors count for the size.
        root: group rank of the root.
        reduction: how it reduces.
        carried: what the size is counted from, where that is not the inputs.
        results: what the handle returns, where that is not the outputs.
        timeout: limit of the wait.
    """
    if rank.hooked:
        rank.before_operation()
    kind = _kind_of(rank, inputs if carried is None else carried, copies, reduction)
    slot = rank.world.posts[OP_CODES[name]](group.number, NONE if root == NONE else group.ranks[root], NONE, kind.number)
    part = Part(rank, slot, group, kind, name, inputs, outputs)
    part.root, part.reduction, part.results = root, reduction, results
    rank.clock.polls = 0
    meet(part, rank.world.links)
    if async_op:
        return part
    part.wait(timeout)
    return None


def _kind_of(rank: SimulatedRank, tensors: Sequence[Tensor], copies: int, reduction: Any) -> Kind:
    how = "" if reduction is None else str(getattr(reduction, "op", reduction)).rpartition(".")[2]
    kinds = rank.world.kinds
    if len(tensors) == 1:
        key = tensors[0].dtype, tensors[0].shape, copies, how
        kind = kinds.get(key)
        if kind is None:
            payload = Payload(*describe(list(tensors), copies), how)
            kind = kinds[key] = rank.world.make_kind(payload)
        return kind
    payload = Payload(*describe(list(tensors), copies), how)
    kind = kinds.get(payload)
    if kind is None:
        kind = kinds[payload] = rank.world.make_kind(payload)
    return kind


def broadcast(
    rank: SimulatedRank, tensor: Tensor, src: int | None = None, group: Any = None, async_op: bool = False, group_src: int | None = None
) -> Part | None:
    """Gives all ranks the root's tensor."""
    found = rank.enter("broadcast", group)
    if found is None:
        return None
    values, root = [check_tensor("tensor", tensor)], found.place_of("src", src, group_src)
    return _collect(rank, "broadcast", found, values, values, async_op, root=root)


def all_reduce(rank: SimulatedRank, tensor: Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Part | None:
    """Reduces everybody's tensor in place, with the result on all ranks."""
    found = rank.enter("all_reduce", group)
    if found is None:
        return None
    values = [check_tensor("tensor", tensor)]
    check_reduction(op)
    return _collect(rank, "all_reduce", found, values, values, async_op, reduction=op)


def all_reduce_coalesced(rank: SimulatedRank, tensors: Any, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Part | None:
    """Reduces several tensors of one dtype at once, in place, with the results on all ranks."""
    found = rank.enter("all_reduce_coalesced", group)
    if found is None:
        return None
    values = check_tensors("tensors", tensors if isinstance(tensors, list | tuple) else [tensors])
    if not values:
        raise ArgumentError(f"tensors must be at least one, got an empty list ({rank.here()}). Leave the call out on all ranks.")
    check_alike("tensors", values, values[0], same_shape=False)
    check_reduction(op)
    return _collect(rank, "all_reduce_coalesced", found, values, values, async_op, reduction=op)


def reduce(
    rank: SimulatedRank,
    tensor: Tensor,
    dst: int | None = None,
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Part | None:
    """Reduces everybody's tensor into the root's; those of other ranks stay as they are."""
    found = rank.enter("reduce", group)
    if found is None:
        return None
    values, root = [check_tensor("tensor", tensor)], found.place_of("dst", dst, group_dst)
    check_reduction(op)
    return _collect(rank, "reduce", found, values, values, async_op, root=root, reduction=op)


def reduce_scatter(
    rank: SimulatedRank, output: Tensor, input_list: Any, op: Any = _SUM, group: Any = None, async_op: bool = False
) -> Part | None:
    """Reduces everybody's list of tensors, and gives each rank the one of its place. The tensors may differ in size."""
    found = rank.enter("reduce_scatter", group)
    if found is None:
        return None
    result, inputs = check_tensor("output", output), check_tensors("input_list", input_list)
    check_count("input_list", inputs, found.size())
    check_alike("input_list", inputs, result, same_shape=False)
    mine = inputs[found.rank()]
    if mine.numel() != result.numel():
        raise ArgumentError(
            f"output must be as large as input_list[{found.rank()}], {mine.numel()} elements, got {result.numel()} ({rank.here()}). "
            "Make it so."
        )
    check_reduction(op)
    return _collect(rank, "reduce_scatter", found, inputs, [result], async_op, reduction=op)


def _reduce_to_parts(name: str, rank: SimulatedRank, output: Tensor, given: Tensor, op: Any, group: Any, async_op: bool) -> Part | None:
    found = rank.enter(name, group)
    if found is None:
        return None
    result, values = check_tensor("output", output), check_tensor("input", given)
    check_alike("output", [result], values, same_shape=False)
    rank._check_parts("input", values, "output", result, found)
    check_reduction(op)
    return _collect(rank, name, found, [values], [result], async_op, reduction=op)


def reduce_scatter_tensor(
    rank: SimulatedRank,
    output: Tensor,
    input: Tensor,  # noqa: A002 - torch's name
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
) -> Part | None:
    """Reduces everybody's tensor, and gives each rank its part of it."""
    return _reduce_to_parts("reduce_scatter_tensor", rank, output, input, op, group, async_op)


def reduce_scatter_single(
    rank: SimulatedRank,
    output: Tensor,
    input: Tensor,  # noqa: A002 - torch's name
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
) -> Part | None:
    """The newer name of ``reduce_scatter_tensor``."""
    return _reduce_to_parts("reduce_scatter_single", rank, output, input, op, group, async_op)


def all_gather(rank: SimulatedRank, tensor_list: Any, tensor: Tensor, group: Any = None, async_op: bool = False) -> Part | None:
    """Fills each rank's list with everybody's tensor, by rank."""
    found = rank.enter("all_gather", group)
    if found is None:
        return None
    values, outputs = check_tensor("tensor", tensor), check_tensors("tensor_list", tensor_list)
    check_count("tensor_list", outputs, found.size())
    check_alike("tensor_list", outputs, values)
    return _collect(rank, "all_gather", found, [values], outputs, async_op, carried=outputs)


def all_gather_coalesced(
    rank: SimulatedRank, output_tensor_lists: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
) -> Part | None:
    """Fills the list of each rank with everybody's list of tensors."""
    found = rank.enter("all_gather_coalesced", group)
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
    return _collect(rank, "all_gather_coalesced", found, inputs, outputs, async_op, carried=outputs)


def _all_gather_whole(
    name: str, rank: SimulatedRank, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool
) -> Part | None:
    found = rank.enter(name, group)
    if found is None:
        return None
    values, output = check_tensor("input_tensor", input_tensor), check_tensor("output_tensor", output_tensor)
    check_alike("output_tensor", [output], values, same_shape=False)
    rank._check_parts("output_tensor", output, "input_tensor", values, found)
    return _collect(rank, name, found, [values], [output], async_op, carried=[output])


def all_gather_into_tensor(
    rank: SimulatedRank, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Part | None:
    """Fills each rank's output with everybody's input behind each other, by rank."""
    return _all_gather_whole("all_gather_into_tensor", rank, output_tensor, input_tensor, group, async_op)


def all_gather_single(
    rank: SimulatedRank, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Part | None:
    """The newer name of ``all_gather_into_tensor``."""
    return _all_gather_whole("all_gather_single", rank, output_tensor, input_tensor, group, async_op)


def gather(
    rank: SimulatedRank,
    tensor: Tensor,
    gather_list: Any = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Part | None:
    """Fills the root's list with everybody's tensor, by rank. The root is rank 0 where none is given."""
    found = rank.enter("gather", group)
    if found is None:
        return None
    values, root = check_tensor("tensor", tensor), rank._root(found, "dst", dst, group_dst)
    outputs = _list_at_root(rank, "gather_list", gather_list, values, found, root)
    return _collect(rank, "gather", found, [values], outputs, async_op, copies=found.size(), root=root)


def scatter(
    rank: SimulatedRank,
    tensor: Tensor,
    scatter_list: Any = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Part | None:
    """Gives each rank its tensor of the root's list. The root is rank 0 where none is given."""
    found = rank.enter("scatter", group)
    if found is None:
        return None
    values, root = [check_tensor("tensor", tensor)], rank._root(found, "src", src, group_src)
    inputs = _list_at_root(rank, "scatter_list", scatter_list, values[0], found, root)
    return _collect(rank, "scatter", found, inputs, values, async_op, copies=found.size(), root=root, carried=values)


def _list_at_root(rank: SimulatedRank, what: str, tensors: Any, like: Tensor, group: SimulatedGroup, root: int) -> list[Tensor]:
    """Returns the list that only the root has, checked; on other ranks an empty one."""
    if group.rank() != root:
        if tensors:
            raise ArgumentError(f"{what} must be left out on all ranks but the root, got {len(tensors)} tensors ({rank.here()}).")
        return []
    found = check_tensors(what, tensors)
    check_count(what, found, group.size())
    check_alike(what, found, like)
    return found


def all_to_all(
    rank: SimulatedRank, output_tensor_list: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
) -> Part | None:
    """Sends each rank its tensor of the inputs, and fills the outputs with what comes from each. Sizes may differ."""
    found = rank.enter("all_to_all", group)
    if found is None:
        return None
    inputs, outputs = check_tensors("input_tensor_list", input_tensor_list), check_tensors("output_tensor_list", output_tensor_list)
    check_count("input_tensor_list", inputs, found.size())
    check_count("output_tensor_list", outputs, found.size())
    check_alike("tensors", [*inputs, *outputs], inputs[0], same_shape=False)
    return _collect(rank, "all_to_all", found, inputs, outputs, async_op)


def all_to_all_single(
    rank: SimulatedRank,
    output: Tensor,
    input: Tensor,  # noqa: A002 - torch's name
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Part | None:
    """Sends a piece of the input, cut along its first dimension, to each rank, and joins what comes from each."""
    found = rank.enter("all_to_all_single", group)
    if found is None:
        return None
    values, result = check_tensor("input", input), check_tensor("output", output)
    check_alike("output", [result], values, same_shape=False)
    pieces = values.split(rank._cut("input", values, input_split_sizes, found))
    places = result.split(rank._cut("output", result, output_split_sizes, found))
    return _collect(rank, "all_to_all_single", found, pieces, places, async_op, carried=[values], results=[result])


def barrier(
    rank: SimulatedRank,
    group: Any = None,
    async_op: bool = False,
    device_ids: Any = None,  # noqa: ARG001 - torch's signature, here and below
    timeout: Any = None,
) -> Part | None:
    """Blocks until every rank of the group has come here."""
    found = rank.enter("barrier", group)
    return None if found is None else _collect(rank, "barrier", found, (), (), async_op, timeout=timeout)


def monitored_barrier(
    rank: SimulatedRank,
    group: Any = None,
    timeout: Any = None,
    wait_all_ranks: bool = False,  # noqa: ARG001
) -> None:
    """Blocks until every rank of the group has come here; where one never does, the simulation says which."""
    found = rank.enter("monitored_barrier", group)
    if found is not None:
        _collect(rank, "monitored_barrier", found, (), (), False, timeout=timeout)


COLLECTIVES: Final = (
    *(broadcast, all_reduce, all_reduce_coalesced, reduce, reduce_scatter, reduce_scatter_tensor, reduce_scatter_single),
    *(all_gather, all_gather_coalesced, all_gather_into_tensor, all_gather_single, gather, scatter),
    *(all_to_all, all_to_all_single, barrier, monitored_barrier),
)
