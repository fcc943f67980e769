"""What the collectives of ``ProcessGroup`` carry: which argument counts, as whose operation.

Sizes follow the definition of nccl-tests: S is the whole buffer that the bandwidth is reckoned with, on every rank the same.

Tensors as MPI sees them: an address and a number of bytes.

What is not laid out as it would travel (strided, conjugated) is copied: before it is sent, and after it has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.distributed import ReduceOp

from ringsim.errors import ArgumentError
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


def check_tensor(what: str, tensor: Any) -> torch.Tensor:
    """Returns a tensor that MPI can carry, cut off from its history.

    Args:
        what: what the tensor is called, for the error.
        tensor: the argument.

    Raises:
        ArgumentError: it is no tensor, or not a dense one on the CPU.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{what} must be a torch.Tensor, got {type(tensor).__name__}. Make it one: torch.tensor(value).")
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = f"a {tensor.layout} tensor on {tensor.device}" + (" (quantized)" if tensor.is_quantized else "")
        raise ArgumentError(
            f"{what} must be a dense tensor on the CPU with the mpi backend, got {kind}. Convert it: tensor.cpu().to_dense()."
        )
    return tensor.detach()


def check_tensors(what: str, tensors: Any) -> list[torch.Tensor]:
    """Returns a list of tensors that MPI can carry; see ``check_tensor``."""
    if not isinstance(tensors, list | tuple):
        raise ArgumentError(f"{what} must be a list of tensors, got {type(tensors).__name__}. Put them into a list.")
    return [check_tensor(f"{what}[{place}]", tensor) for place, tensor in enumerate(tensors)]


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


def check_count(what: str, tensors: Sequence[Any], count: int) -> None:
    """Raises unless a list has one tensor for each rank of the group.

    Raises:
        ArgumentError: it has not.
    """
    if len(tensors) != count:
        raise ArgumentError(f"{what} must have one tensor for each of the {count} ranks of the group, got {len(tensors)}. Fill it up.")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes lie as they travel."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def for_sending(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself where it is plain, else a copy that is."""
    return tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def for_receiving(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Returns where to receive a tensor's bytes, and what brings them into it afterwards (None where they are there already)."""
    if is_plain(tensor):
        return tensor, None
    stage = torch.empty(tensor.shape, dtype=tensor.dtype)

    def bring() -> None:
        tensor.copy_(stage)

    return stage, bring


def size_of(tensor: torch.Tensor) -> int:
    """Returns a tensor's size in bytes."""
    return tensor.numel() * tensor.element_size()


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the bytes of several tensors behind each other, shape (bytes)."""
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([as_bytes(for_sending(tensor)) for tensor in tensors])


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copies bytes, shape (bytes), into several tensors behind each other."""
    offset = 0
    for tensor in tensors:
        size = size_of(tensor)
        stage, bring = for_receiving(tensor)
        as_bytes(stage).copy_(flat[offset : offset + size])
        if bring is not None:
            bring()
        offset += size


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a plain tensor, shape (bytes), sharing its memory."""
    return tensor.reshape(-1).view(torch.uint8)
