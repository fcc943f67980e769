"""The table of collectives, torch's side: how a call is read, checked and brought into one form for every backend.

``read_call`` turns a call of a function of ``torch.distributed`` into a ``Call``: what this rank gives, what it gets, who the root is, how
values are reduced. Checks stand here and nowhere else. All tensors that are one in the call (``all_gather_into_tensor``,
``all_to_all_single``, ...) become one tensor a rank, so that a backend has to know nine families only::

    family           inputs                  outputs                    what happens
    broadcast        [tensor]                [tensor]                   outputs <- the root's inputs
    reduce           [tensor]                [tensor]                   the root's outputs <- all inputs, reduced
    all_reduce       tensors                 the same tensors           outputs <- all inputs, reduced
    all_gather       k tensors               k for each rank, by rank   outputs <- the inputs of all
    gather           [tensor]                one a rank, at the root    outputs <- the inputs of all
    scatter          one a rank, at the root [tensor]                   outputs <- this rank's of the root's inputs
    reduce_scatter   one a rank              [tensor]                   outputs <- this rank's of all inputs, reduced
    all_to_all       one a rank              one a rank                 outputs[i] <- this rank's of rank i's inputs
    barrier          none                    none

``METHODS`` says how to read the methods of ``ProcessGroup`` instead: there torch's own calls are recorded. Sizes follow nccl-tests: S is
the whole buffer that the bandwidth is computed from, the same on every rank.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch.distributed import ReduceOp

from ringsim.errors import ArgumentError
from ringsim.traces.collectives import COLLECTIVES, Collective
from ringsim.traces.events import NONE, OP_CODES

__all__ = [
    "METHODS",
    "READERS",
    "Call",
    "Members",
    "Reading",
    "check_batch",
    "check_dense",
    "describe",
    "find_reduction",
    "find_root",
    "find_tensors",
    "find_unfit",
    "for_receiving",
    "for_sending",
    "has_gaps",
    "name_of_reduction",
    "read_call",
    "shorten",
    "to_index",
]

_SUM: Final[Any] = ReduceOp.SUM


class Members(ABC):
    """The ranks of a group, for backends whose groups are not torch's. It is what users pass as ``group=``.

    Attributes:
        kind: whose groups these are, for errors.
        ranks: the members, global ranks, in the group's order.
        places: the place of each member, by its global rank.
        group_name: "world", "ring:2>3", ...; the same on all members.
    """

    __slots__ = ()
    kind: ClassVar[str] = "another backend"
    ranks: Sequence[int]
    places: Mapping[int, int]
    group_name: str

    def __getattr__(self, name: str) -> Any:
        """Says what to do instead to torch's own functions, which look for the methods of ``ProcessGroup``."""
        raise AttributeError(
            f'the group of a call of torch.distributed must be one of torch\'s own, got group "{self.group_name}" of {self.kind}, '
            f"which has no {name}. Use the functions of ringsim.comm: from ringsim import comm as dist."
        )

    @abstractmethod
    def rank(self) -> int:
        """Returns this rank's place in the group, -1 outside."""

    def size(self) -> int:
        """Returns how many ranks are in the group."""
        return len(self.ranks)

    def check(self, what: str, tensor: Any) -> torch.Tensor:
        """Returns a tensor that the backend can carry, detached from its history; raises ArgumentError for anything else."""
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{what} must be a torch.Tensor, got {type(tensor).__name__}. Make it one: torch.tensor(value).")
        return tensor.detach()

    def place_of(self, what: str, global_rank: Any, group_rank: Any) -> int:
        """Returns the rank within the group that one of the two means.

        Args:
            what: "dst" or "src", for the error.
            global_rank: a global rank, or None.
            group_rank: a rank within the group, or None.

        Raises:
            ArgumentError: both or none are given, or the group has no such rank.
        """
        if (global_rank is None) == (group_rank is None):
            given = "none" if global_rank is None else f"{global_rank} and {group_rank}"
            raise ArgumentError(f"{what} or group_{what} must be given, one of the two, got {given} ({self.here()}). Give one.")
        if global_rank is None:
            place = to_index(f"group_{what}", group_rank)
            if not 0 <= place < len(self.ranks):
                raise ArgumentError(
                    f"group_{what} must be a rank of the group, from 0 to {len(self.ranks) - 1}, got {place} ({self.here()}). "
                    f"Its global ranks are {shorten(self.ranks)}."
                )
            return place
        rank = to_index(what, global_rank)
        if rank not in self.places:
            raise ArgumentError(
                f"{what} must be a global rank of the group, one of {shorten(self.ranks)}, got {rank} ({self.here()}). "
                f"To count within the group, use group_{what}."
            )
        return self.places[rank]

    def here(self) -> str:
        """Returns which rank this is, for errors."""
        return f'rank {self.rank()} of {len(self.ranks)} of group "{self.group_name}"'


class OpaqueGroup(Members):
    """The members of a group of which a backend says no more than who is in it.

    Args:
        given: the group as the backend knows it.
        ranks: global ranks of its members.
        rank: this rank's place in it.
    """

    __slots__ = ("_rank", "given", "group_name", "places", "ranks")

    def __init__(self, given: Any, ranks: Sequence[int], rank: int) -> None:
        self.given = given
        self.ranks = ranks
        self.places = {each: place for place, each in enumerate(ranks)}
        self.group_name = "world" if given is None else str(getattr(given, "group_name", ""))
        self._rank = rank

    def rank(self) -> int:
        """Returns this rank's place in the group."""
        return self._rank


def shorten(ranks: Sequence[int]) -> str:
    """Returns ranks in words: all of them, or the first of many.

    Example:
        >>> shorten([0, 2]), shorten(range(100))
        ('[0, 2]', '[0, 1, 2, 3, 4, 5, 6, 7] and 92 more')
    """
    return f"{list(ranks[:8])} and {len(ranks) - 8} more" if len(ranks) > 16 else str(list(ranks))


def to_index(what: str, value: Any) -> int:
    """Returns an argument as an integer.

    Raises:
        ArgumentError: it is none.
    """
    try:
        return index(value)
    except TypeError:
        raise ArgumentError(f"{what} must be an integer, got {value!r}. Give a rank's number.") from None


@dataclass
class Call:
    """One rank's call of a collective, read and checked.

    Attributes:
        name: as it was called.
        group: where. Ranks below are ranks within it.
        given: the tensors that this rank gives, as in the table above, or all of them as one.
        taken: those that it gets, likewise.
        carried: the tensors that the size is computed from.
        copies: how many times they count: the group size where they are one rank's share.
        results: the tensors of the user that hold the result.
        root: the root, NONE where there is none.
        op: how values are reduced, None where they are not.
        whole: "given" or "taken" where that is one tensor with an equal part for each rank; else empty.
        bring: copies what was written to ``outputs`` to where it belongs, once they were asked for; None where it is there.
        async_op: whether the caller gets a handle.
        timeout: limit of a barrier, None for the group's.
    """

    name: str
    group: Members
    given: Sequence[torch.Tensor]
    taken: Sequence[torch.Tensor]
    carried: Sequence[torch.Tensor] = ()
    copies: int = 1
    results: Sequence[torch.Tensor] = ()
    root: int = NONE
    op: Any = None
    whole: str = ""
    bring: Callable[[], Any] | None = None
    async_op: bool = False
    timeout: Any = None

    @property
    def collective(self) -> Collective:
        """What kind of collective it is."""
        return COLLECTIVES[self.name]

    @property
    def recorded_name(self) -> str:
        """What it is called in a trace, which knows no newer spelling of a gather."""
        return self.name if self.name in OP_CODES else self.collective.name

    @cached_property
    def inputs(self) -> Sequence[torch.Tensor]:
        """What this rank gives, as in the table above."""
        return _cut_evenly(self.given[0], self.group.size()) if self.whole == "given" else self.given

    @cached_property
    def outputs(self) -> Sequence[torch.Tensor]:
        """What this rank gets, as in the table above; once it is filled, ``bring`` is called where there is one."""
        if self.whole != "taken":
            return self.taken
        whole = self.taken[0]
        if whole.is_contiguous():
            return _cut_evenly(whole, self.group.size())
        stage = torch.empty_like(whole, memory_format=torch.contiguous_format)
        self.bring = lambda: whole.copy_(stage)
        return _cut_evenly(stage, self.group.size())


def read_call(name: str, group: Members, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Reads and checks a call of a collective of torch.distributed.

    Args:
        name: of the function.
        group: its group, in which this rank is.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        ArgumentError: an argument breaks its rule.
    """
    place = _PLACES[name]
    if len(args) > place:
        args = (*args[:place], group, *args[place + 1 :])
    else:
        kwargs = {**kwargs, "group": group}
    return READERS[name](name, *args, **kwargs)


def group_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the argument ``group`` of a call."""
    place = _PLACES[name]
    return args[place] if len(args) > place else kwargs.get("group")


# Readers take the arguments of torch's function, with ``Members`` as the group.


def _read_broadcast(name: str, tensor: Any, src: Any = None, group: Any = None, async_op: bool = False, group_src: Any = None) -> Call:
    values = [group.check("tensor", tensor)]
    return Call(name, group, values, values, values, results=[tensor], root=group.place_of("src", src, group_src), async_op=async_op)


def _read_all_reduce(name: str, tensor: Any, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Call:
    values = [group.check("tensor", tensor)]
    return Call(name, group, values, values, values, results=[tensor], op=op, async_op=async_op)


def _read_all_reduce_coalesced(name: str, tensors: Any, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Call:
    values = check_tensors(group, "tensors", [tensors] if isinstance(tensors, torch.Tensor) else tensors)
    if not values:
        raise ArgumentError(f"tensors must be at least one, got an empty list ({group.here()}). Leave the call out on all ranks.")
    check_alike("tensors", values, values[0], same_shape=False)
    return Call(name, group, values, values, values, results=values, op=op, async_op=async_op)


def _read_reduce(
    name: str, tensor: Any, dst: Any = None, op: Any = _SUM, group: Any = None, async_op: bool = False, group_dst: Any = None
) -> Call:
    values = [group.check("tensor", tensor)]
    return Call(name, group, values, values, values, results=[tensor], root=group.place_of("dst", dst, group_dst), op=op, async_op=async_op)


def _read_all_gather(name: str, tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Call:
    value, outputs = group.check("tensor", tensor), check_tensors(group, "tensor_list", tensor_list, group.size())
    check_alike("tensor_list", outputs, value)
    return Call(name, group, [value], outputs, outputs, results=outputs, async_op=async_op)


def _read_all_gather_coalesced(
    name: str, output_tensor_lists: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
) -> Call:
    inputs = check_tensors(group, "input_tensor_list", input_tensor_list)
    outputs: list[torch.Tensor] = []
    for place, each in enumerate(check_list(group, "output_tensor_lists", output_tensor_lists, group.size())):
        row = check_tensors(group, f"output_tensor_lists[{place}]", each, len(inputs))
        for output, value in zip(row, inputs, strict=True):
            check_alike(f"output_tensor_lists[{place}]", [output], value)
        outputs += row
    return Call(name, group, inputs, outputs, outputs, results=outputs, async_op=async_op)


def _read_all_gather_single(name: str, output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Call:
    value, whole = group.check("input_tensor", input_tensor), group.check("output_tensor", output_tensor)
    _check_whole(group, "output_tensor", whole, "input_tensor", value)
    return Call(name, group, [value], [whole], [whole], results=[output_tensor], whole="taken", async_op=async_op)


def _read_gather(
    name: str,
    tensor: Any,
    gather_list: Any = None,
    dst: Any = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: Any = None,
) -> Call:
    value, root = group.check("tensor", tensor), root_of(group, "dst", dst, group_dst)
    outputs = _list_at_root(group, "gather_list", gather_list, value, root)
    return Call(name, group, [value], outputs, [value], group.size(), outputs, root, async_op=async_op)


def _read_gather_single(
    name: str,
    tensor: Any,
    gather_tensor: Any = None,
    dst: Any = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: Any = None,
) -> Call:
    value, root = group.check("tensor", tensor), root_of(group, "dst", dst, group_dst)
    if group.rank() != root:
        return Call(name, group, [value], (), [value], group.size(), (), root, async_op=async_op)
    whole = group.check("gather_tensor", gather_tensor)
    _check_whole(group, "gather_tensor", whole, "tensor", value)
    return Call(name, group, [value], [whole], [value], group.size(), [gather_tensor], root, whole="taken", async_op=async_op)


def _read_scatter(
    name: str,
    tensor: Any,
    scatter_list: Any = None,
    src: Any = None,
    group: Any = None,
    async_op: bool = False,
    group_src: Any = None,
) -> Call:
    value, root = group.check("tensor", tensor), root_of(group, "src", src, group_src)
    inputs = _list_at_root(group, "scatter_list", scatter_list, value, root)
    return Call(name, group, inputs, [value], [value], group.size(), [tensor], root, async_op=async_op)


def _read_reduce_scatter(name: str, output: Any, input_list: Any, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Call:
    result, inputs = group.check("output", output), check_tensors(group, "input_list", input_list, group.size())
    check_alike("input_list", inputs, result, same_shape=False)
    mine = inputs[group.rank()]
    if mine.numel() != result.numel():
        raise ArgumentError(
            f"output must be as large as input_list[{group.rank()}], {mine.numel()} elements, got {result.numel()} "
            f"({group.here()}). Make it so."
        )
    return Call(name, group, inputs, [result], inputs, results=[output], op=op, async_op=async_op)


def _read_reduce_scatter_single(
    name: str,
    output: Any,
    input: Any,  # noqa: A002 - torch's name
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
) -> Call:
    result, whole = group.check("output", output), group.check("input", input)
    _check_whole(group, "input", whole, "output", result)
    return Call(name, group, [whole], [result], [whole], results=[output], op=op, whole="given", async_op=async_op)


def _read_all_to_all(name: str, output_tensor_list: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False) -> Call:
    inputs = check_tensors(group, "input_tensor_list", input_tensor_list, group.size())
    outputs = check_tensors(group, "output_tensor_list", output_tensor_list, group.size())
    check_alike("input_tensor_list", inputs, inputs[0], same_shape=False)
    check_alike("output_tensor_list", outputs, inputs[0], same_shape=False)
    _check_own(group, "output_tensor_list", outputs, inputs)
    return Call(name, group, inputs, outputs, inputs, results=outputs, async_op=async_op)


def _read_all_to_all_single(
    name: str,
    output: Any,
    input: Any,  # noqa: A002 - torch's name
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Call:
    whole, result = group.check("input", input), group.check("output", output)
    check_alike("output", [result], whole, same_shape=False)
    inputs = whole.split(_row_counts(group, "input", whole, input_split_sizes))
    outputs = result.split(_row_counts(group, "output", result, output_split_sizes))
    _check_own(group, "output", outputs, inputs)
    return Call(name, group, inputs, outputs, [whole], results=[output], async_op=async_op)


def _read_barrier(name: str, group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None) -> Call:
    del device_ids  # there are no GPUs to tell apart
    return Call(name, group, (), (), async_op=async_op, timeout=timeout)


READERS: Final[dict[str, Callable[..., Call]]] = {
    "broadcast": _read_broadcast,
    "all_reduce": _read_all_reduce,
    "all_reduce_coalesced": _read_all_reduce_coalesced,
    "reduce": _read_reduce,
    "all_gather": _read_all_gather,
    "all_gather_coalesced": _read_all_gather_coalesced,
    "all_gather_into_tensor": _read_all_gather_single,
    "all_gather_single": _read_all_gather_single,
    "gather": _read_gather,
    "gather_into_tensor": _read_gather_single,
    "gather_single": _read_gather_single,
    "scatter": _read_scatter,
    "reduce_scatter": _read_reduce_scatter,
    "reduce_scatter_tensor": _read_reduce_scatter_single,
    "reduce_scatter_single": _read_reduce_scatter_single,
    "all_to_all": _read_all_to_all,
    "all_to_all_single": _read_all_to_all_single,
    "barrier": _read_barrier,
}
_PLACES: Final = {  # of the argument `group` in torch's function
    name: list(inspect.signature(reader).parameters).index("group") - 1 for name, reader in READERS.items()
}


# -- checks


def check_dense(what: str, tensor: Any, where: str, *, meta: bool = False) -> torch.Tensor:
    """Returns a dense tensor on the CPU, detached from its history.

    Args:
        what: what the tensor is called, for the error.
        tensor: the argument.
        where: what needs it so, for the error.
        meta: whether it may be on the meta device as well.

    Raises:
        ArgumentError: it is no tensor, or another kind of tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{what} must be a torch.Tensor, got {type(tensor).__name__}. Make it one: torch.tensor(value).")
    if not (tensor.is_cpu or (meta and tensor.is_meta)) or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = f"a {tensor.layout} tensor on {tensor.device}" + (" (quantized)" if tensor.is_quantized else "")
        device = "the CPU or the meta device" if meta else "the CPU"
        raise ArgumentError(f"{what} must be a dense tensor on {device} {where}, got {kind}. Convert it: tensor.cpu().to_dense().")
    return tensor.detach() if tensor.requires_grad or type(tensor) is not torch.Tensor else tensor


def check_list(group: Members, what: str, values: Any, count: int | None = None) -> list[Any]:
    """Returns an argument as a list, of ``count`` entries where that is given.

    Raises:
        ArgumentError: it is none, or of another length.
    """
    if not isinstance(values, list | tuple):
        raise ArgumentError(f"{what} must be a list, got {type(values).__name__} ({group.here()}). Put the values into a list.")
    if count is not None and len(values) != count:
        raise ArgumentError(
            f"{what} must have {count} entries, got {len(values)} ({group.here()}). Fill it up: one for each rank, in order."
        )
    return list(values)


def check_tensors(group: Members, what: str, tensors: Any, count: int | None = None) -> list[torch.Tensor]:
    """Returns a list of tensors that the backend can carry; see ``check_list`` and ``Members.check``."""
    return [group.check(f"{what}[{place}]", tensor) for place, tensor in enumerate(check_list(group, what, tensors, count))]


def check_alike(what: str, tensors: Sequence[torch.Tensor], like: torch.Tensor, *, same_shape: bool = True) -> None:
    """Raises unless all tensors have the dtype of another, and its shape.

    Raises:
        ArgumentError: one has not.
    """
    for place, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype or (same_shape and tensor.shape != like.shape):
            rule = f"{like.dtype} of shape {tuple(like.shape)}" if same_shape else f"{like.dtype}"
            got = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if same_shape else f"{tensor.dtype}"
            raise ArgumentError(f"{what}[{place}] must be {rule} as the other tensor of the call, got {got}. Make them alike.")


def check_batch(p2p_op_list: Any, here: str) -> list[tuple[str, Any]]:
    """Returns the messages of a batch, each with the name of its function, "isend" or "irecv".

    Args:
        p2p_op_list: the argument.
        here: which rank this is, for errors.

    Raises:
        ArgumentError: it is no list of ``P2POp`` of one group.
    """
    if not isinstance(p2p_op_list, list) or not p2p_op_list:
        raise ArgumentError(f"p2p_op_list must be a list of at least one P2POp, got {p2p_op_list!r} ({here}). Use ringsim.comm.P2POp.")
    for each in p2p_op_list:
        if getattr(getattr(each, "op", None), "__name__", "") not in ("isend", "irecv"):
            raise ArgumentError(f"p2p_op_list must hold P2POps of isend and irecv, got {each!r} ({here}). Use ringsim.comm.P2POp.")
        if each.group is not p2p_op_list[0].group:
            raise ArgumentError(f"all P2POps of a batch must have one group, got two ({here}). Make a batch for each group.")
    return [(each.op.__name__, each) for each in p2p_op_list]


def root_of(group: Members, what: str, global_rank: Any, group_rank: Any) -> int:
    """Returns the root of an operation that has rank 0 of all ranks where none is given, as torch has it."""
    return group.place_of(what, 0 if global_rank is None and group_rank is None else global_rank, group_rank)


def _list_at_root(group: Members, what: str, tensors: Any, like: torch.Tensor, root: int) -> list[torch.Tensor]:
    """Returns the list that only the root has, checked; on other ranks an empty one."""
    if group.rank() == root:
        found = check_tensors(group, what, tensors, group.size())
        check_alike(what, found, like)
        return found
    if tensors:
        raise ArgumentError(f"{what} must be left out on all ranks but the root, got {len(tensors)} tensors ({group.here()}). Pass None.")
    return []


def _check_whole(group: Members, what: str, whole: torch.Tensor, other: str, part: torch.Tensor) -> None:
    check_alike(what, [whole], part, same_shape=False)
    if whole.numel() != part.numel() * group.size():
        raise ArgumentError(
            f"{what} must have {group.size()} times the {part.numel()} elements of {other}, got {whole.numel()} "
            f"({group.here()}). Make it so large."
        )


def _check_own(group: Members, what: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Checks the two ends of what a rank gives to itself."""
    given, got = inputs[group.rank()].numel(), outputs[group.rank()].numel()
    if given != got:
        raise ArgumentError(
            f"{what} must have a place for the {given} elements that this rank gives itself, got one for {got} ({group.here()}). "
            "Make both the same."
        )


def _row_counts(group: Members, what: str, tensor: torch.Tensor, sizes: Any) -> list[int]:
    """Returns how many rows of a tensor belong to each rank: the counts that are given, or equal parts."""
    if tensor.dim() == 0:
        raise ArgumentError(f"{what} must have a first dimension to be cut along, got a number ({group.here()}). Reshape it to (1,).")
    length, count = tensor.shape[0], group.size()
    if not sizes:
        if length % count:
            raise ArgumentError(
                f"the first dimension of {what} must be a multiple of the {count} ranks, got {length} ({group.here()}). "
                f"Give {what}_split_sizes."
            )
        return [length // count] * count
    rows = [int(size) for size in sizes]
    if len(rows) != count or min(rows) < 0 or sum(rows) != length:
        raise ArgumentError(
            f"{what}_split_sizes must be {count} lengths that add up to {length}, got {rows} ({group.here()}). Count them again."
        )
    return rows


# -- tensors in parts, and as they lie in memory


def _cut_evenly(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Returns a tensor's elements as equal parts, one a rank."""
    return list(tensor.reshape(count, tensor.numel() // count))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in memory one after the other, as they travel."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def for_sending(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself where it is plain, else a copy that is."""
    return tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def for_receiving(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself where it is plain, else a plain one to receive into, whose elements are then copied."""
    return tensor if is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


# -- the methods of ProcessGroup


class Reading(NamedTuple):
    """How to read one method of ``ProcessGroup``.

    Attributes:
        op: its code, where the frames tell no better one.
        argument: position of the argument that S is reckoned from, NONE if it carries nothing.
        names: of that argument, for calls by keyword; torch's overloads differ.
        shards: whether that argument is one rank's shard, so that S is the group size times as much.
        root: position of the root rank (or of the options that hold it), NONE if there is no root.
        reduces: position of the reduction (or of the options that hold it), NONE if nothing is reduced.
        raw: whether Gloo takes the tensors' memory as it is, whatever their strides: gaps and other orders give garbage.
    """

    op: int
    argument: int = NONE
    names: tuple[str, ...] = ()
    shards: bool = False
    root: int = NONE
    reduces: int = NONE
    raw: bool = False


_OUTPUTS: Final = ("output_tensors", "output", "output_lists", "outputs")
_INPUTS: Final = ("input_tensors", "input_tensor", "input", "inputs", "inputTensor")
_TENSORS: Final = ("tensors", "tensor")

_ALL_GATHER_COALESCED: Final = Reading(OP_CODES["all_gather_coalesced"], 0, _OUTPUTS)
_ALL_GATHER_SINGLE: Final = Reading(OP_CODES["all_gather_into_tensor"], 0, _OUTPUTS)
_REDUCE_SCATTER_SINGLE: Final = Reading(OP_CODES["reduce_scatter_tensor"], 1, _INPUTS, reduces=2)
_ALL_TO_ALL_SINGLE: Final = Reading(OP_CODES["all_to_all_single"], 1, _INPUTS)

METHODS: Final[dict[str, Reading]] = {
    "broadcast": Reading(OP_CODES["broadcast"], 0, _TENSORS, root=1, raw=True),
    "allreduce": Reading(OP_CODES["all_reduce"], 0, _TENSORS, reduces=1, raw=True),
    "allreduce_coalesced": Reading(OP_CODES["all_reduce_coalesced"], 0, _TENSORS, reduces=1),
    "reduce": Reading(OP_CODES["reduce"], 0, _TENSORS, root=1, reduces=1, raw=True),
    "allgather": Reading(OP_CODES["all_gather"], 0, _OUTPUTS),
    "_allgather_base": _ALL_GATHER_SINGLE,
    "all_gather_single": _ALL_GATHER_SINGLE,
    "allgather_coalesced": _ALL_GATHER_COALESCED,
    "allgather_into_tensor_coalesced": _ALL_GATHER_COALESCED,
    "all_gather_single_coalesced": _ALL_GATHER_COALESCED,
    "gather": Reading(OP_CODES["gather"], 1, _INPUTS, shards=True, root=2),
    "scatter": Reading(OP_CODES["scatter"], 0, ("output_tensors", "output_tensor"), shards=True, root=2, raw=True),
    "reduce_scatter": Reading(OP_CODES["reduce_scatter"], 1, _INPUTS, reduces=2),
    "_reduce_scatter_base": _REDUCE_SCATTER_SINGLE,
    "reduce_scatter_single": _REDUCE_SCATTER_SINGLE,
    "reduce_scatter_tensor_coalesced": _REDUCE_SCATTER_SINGLE,
    "reduce_scatter_single_coalesced": _REDUCE_SCATTER_SINGLE,
    "alltoall": Reading(OP_CODES["all_to_all"], 1, _INPUTS),
    "alltoall_base": _ALL_TO_ALL_SINGLE,
    "all_to_all_single": _ALL_TO_ALL_SINGLE,
    "barrier": Reading(OP_CODES["barrier"]),
    "monitored_barrier": Reading(OP_CODES["monitored_barrier"]),
}


def find_tensors(reading: Reading, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors, nested lists made flat, that a call's size is reckoned from.

    Args:
        reading: how its method is read.
        args: its positional arguments, without the group.
        kwargs: its keyword arguments.
    """
    if reading.argument == NONE:
        return []
    if len(args) > reading.argument:
        return list(_flatten(args[reading.argument]))
    return list(_flatten([kwargs[name] for name in reading.names if name in kwargs]))


def find_unfit(reading: Reading, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Returns a tensor with which a call would silently do nothing, or go wrong: one without data, or with gaps where Gloo sees none."""
    try:
        tensors = find_tensors(reading, args, kwargs)
        if reading.op == OP_CODES["scatter"]:
            tensors += [tensor for argument in args[1:2] for tensor in _flatten(argument)]  # what the root sends
        return next((tensor for tensor in tensors if tensor.is_meta or (reading.raw and has_gaps(tensor))), None)
    except Exception:
        return None  # arguments that make no sense: torch will say so


def has_gaps(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor do not lie side by side in memory, in whatever order.

    Example:
        >>> has_gaps(torch.zeros(4, 4)[:, :2]), has_gaps(torch.zeros(3, 4).t())
        (True, False)
    """
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return False
    next_stride = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != next_stride:
                return True
            next_stride *= size
    return False


def _flatten(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for item in value:
            yield from _flatten(item)


def find_root(reading: Reading, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the group rank of a call's root, NONE if it has none."""
    if reading.root == NONE:
        return NONE
    value = args[reading.root] if len(args) > reading.root else kwargs.get("opts", kwargs.get("root", 0))
    return int(getattr(value, "rootRank", value))


def find_reduction(reading: Reading, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns how a call reduces, such as "SUM"; empty if it does not."""
    if reading.reduces == NONE:
        return ""
    values = [*args[reading.reduces :], *kwargs.values()]
    reductions = [getattr(value, "reduceOp", value) for value in values]
    given = next((op for op in reductions if isinstance(op, ReduceOp | ReduceOp.RedOpType)), ReduceOp.SUM)
    return name_of_reduction(given)


def name_of_reduction(op: Any) -> str:
    """Returns what torch calls a reduction.

    Example:
        >>> name_of_reduction(ReduceOp.MAX)
        'MAX'
    """
    return str(getattr(op, "op", op)).rpartition(".")[2]


def describe(tensors: list[torch.Tensor], copies: int) -> tuple[str, tuple[int, ...], int]:
    """Returns dtype, shape and size in bytes of what an operation carries.

    Args:
        tensors: its tensors; the shape of several equal ones is (number, *shape), of several different ones (elements,).
        copies: how many times the tensors count: the group size where they are one rank's shard.

    Example:
        >>> describe([torch.zeros(2, 3), torch.zeros(2, 3)], 1), describe([torch.zeros(4)], 3), describe([], 1)
        (('float32', (2, 2, 3), 48), ('float32', (3, 4), 48), ('', (), 0))
    """
    if not tensors:
        return "", (), 0
    shapes = {tuple(tensor.shape) for tensor in tensors}
    count = len(tensors) * copies
    if len(shapes) > 1:
        shape: tuple[int, ...] = (copies * sum(tensor.numel() for tensor in tensors),)
    else:
        shape = (count, *shapes.pop()) if count > 1 else shapes.pop()
    size_bytes = copies * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return str(tensors[0].dtype).removeprefix("torch."), shape, size_bytes
