"""What the collectives of ``ProcessGroup`` carry: which argument counts, as whose operation.

Sizes follow the definition of nccl-tests: S is the whole buffer that the bandwidth is reckoned with, on every rank the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch.distributed import ReduceOp

from ringsim.traces.events import NONE, OP_CODES


class Collective(NamedTuple):
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

_ALL_GATHER_COALESCED: Final = Collective(OP_CODES["all_gather_coalesced"], 0, _OUTPUTS)
_ALL_GATHER_SINGLE: Final = Collective(OP_CODES["all_gather_into_tensor"], 0, _OUTPUTS)
_REDUCE_SCATTER_SINGLE: Final = Collective(OP_CODES["reduce_scatter_tensor"], 1, _INPUTS, reduces=2)
_ALL_TO_ALL_SINGLE: Final = Collective(OP_CODES["all_to_all_single"], 1, _INPUTS)

COLLECTIVES: Final[dict[str, Collective]] = {
    "broadcast": Collective(OP_CODES["broadcast"], 0, _TENSORS, root=1, raw=True),
    "allreduce": Collective(OP_CODES["all_reduce"], 0, _TENSORS, reduces=1, raw=True),
    "allreduce_coalesced": Collective(OP_CODES["all_reduce_coalesced"], 0, _TENSORS, reduces=1),
    "reduce": Collective(OP_CODES["reduce"], 0, _TENSORS, root=1, reduces=1, raw=True),
    "allgather": Collective(OP_CODES["all_gather"], 0, _OUTPUTS),
    "_allgather_base": _ALL_GATHER_SINGLE,
    "all_gather_single": _ALL_GATHER_SINGLE,
    "allgather_coalesced": _ALL_GATHER_COALESCED,
    "allgather_into_tensor_coalesced": _ALL_GATHER_COALESCED,
    "all_gather_single_coalesced": _ALL_GATHER_COALESCED,
    "gather": Collective(OP_CODES["gather"], 1, _INPUTS, shards=True, root=2),
    "scatter": Collective(OP_CODES["scatter"], 0, ("output_tensors", "output_tensor"), shards=True, root=2, raw=True),
    "reduce_scatter": Collective(OP_CODES["reduce_scatter"], 1, _INPUTS, reduces=2),
    "_reduce_scatter_base": _REDUCE_SCATTER_SINGLE,
    "reduce_scatter_single": _REDUCE_SCATTER_SINGLE,
    "reduce_scatter_tensor_coalesced": _REDUCE_SCATTER_SINGLE,
    "reduce_scatter_single_coalesced": _REDUCE_SCATTER_SINGLE,
    "alltoall": Collective(OP_CODES["all_to_all"], 1, _INPUTS),
    "alltoall_base": _ALL_TO_ALL_SINGLE,
    "all_to_all_single": _ALL_TO_ALL_SINGLE,
    "barrier": Collective(OP_CODES["barrier"]),
    "monitored_barrier": Collective(OP_CODES["monitored_barrier"]),
}


def find_tensors(collective: Collective, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors, nested lists made flat, that a call's size is reckoned from.

    Args:
        collective: which call.
        args: its positional arguments, without the group.
        kwargs: its keyword arguments.
    """
    if collective.argument == NONE:
        return []
    if len(args) > collective.argument:
        return list(_flatten(args[collective.argument]))
    return list(_flatten([kwargs[name] for name in collective.names if name in kwargs]))


def find_unfit(collective: Collective, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Returns a tensor with which a call would silently do nothing, or go wrong: one without data, or with gaps where Gloo sees none."""
    try:
        tensors = find_tensors(collective, args, kwargs)
        if collective.op == OP_CODES["scatter"]:
            tensors += [tensor for argument in args[1:2] for tensor in _flatten(argument)]  # what the root sends
        return next((tensor for tensor in tensors if tensor.is_meta or (collective.raw and has_gaps(tensor))), None)
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


def find_root(collective: Collective, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the group rank of a call's root, NONE if it has none."""
    if collective.root == NONE:
        return NONE
    value = args[collective.root] if len(args) > collective.root else kwargs.get("opts", kwargs.get("root", 0))
    return int(getattr(value, "rootRank", value))


def find_reduction(collective: Collective, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns how a call reduces, such as "SUM"; empty if it does not."""
    if collective.reduces == NONE:
        return ""
    values = [*args[collective.reduces :], *kwargs.values()]
    reductions = [getattr(value, "reduceOp", value) for value in values]
    given = next((op for op in reductions if isinstance(op, ReduceOp | ReduceOp.RedOpType)), ReduceOp.SUM)
    return str(getattr(given, "op", given)).rpartition(".")[2]


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
