"""The communicating functions as DeepSpeed spells them, on those of ``ringsim.comm``.

The names are torch's, but not all of the arguments: ``tensor`` where torch says ``input``, ``prof``, ``log_name`` and ``debug`` by position
too, ranks always global. ``op`` is either library's ``ReduceOp``. All ranks of a group call a collective, in the same order; a function
blocks where ``async_op`` is false, else it returns a handle.

Source:
    DeepSpeed, ``deepspeed/comm/comm.py``: names, arguments and their defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum
from typing import Any, Final

import torch
import torch.distributed as dist

from ringsim.comm.functions import FUNCTIONS
from ringsim.comm.handle import Handle
from ringsim.comm.p2p_op import P2POp
from ringsim.errors import ArgumentError

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]


class ReduceOp(Enum):
    """How values are reduced, as DeepSpeed numbers it; each member stands for the one of torch that has its name."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7
    UNUSED = 8


_SUM: Final = ReduceOp.SUM


def to_torch(op: Any) -> Any:
    """Returns torch's ``ReduceOp`` for DeepSpeed's; any other value as it is.

    Raises:
        ArgumentError: torch has none of that name.

    Example:
        >>> to_torch(ReduceOp.MAX) == dist.ReduceOp.MAX, to_torch(dist.ReduceOp.MIN) == dist.ReduceOp.MIN
        (True, True)
    """
    if not isinstance(op, ReduceOp):
        return op
    if op is ReduceOp.UNUSED:
        raise ArgumentError("op must be a reduction, got ReduceOp.UNUSED. Choose ReduceOp.SUM or another.")
    return getattr(dist.ReduceOp, op.name)


def send(tensor: Tensor, dst: int, group: Any = None, tag: int = 0, prof: bool = False, log_name: str = "send", debug: Any = None) -> Any:
    """Sends a tensor to global rank ``dst``; blocks."""
    return FUNCTIONS["send"](tensor, dst, group, tag, prof=prof, log_name=log_name, debug=debug)


def recv(
    tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, prof: bool = False, log_name: str = "recv", debug: Any = None
) -> Any:
    """Receives into a tensor from global rank ``src``, or from anybody; blocks. Returns the sender's rank."""
    return FUNCTIONS["recv"](tensor, src, group, tag, prof=prof, log_name=log_name, debug=debug)


def isend(tensor: Tensor, dst: int, group: Any = None, tag: int = 0, prof: bool = False, log_name: str = "isend", debug: Any = None) -> Any:
    """Begins to send a tensor; does not block. Returns a handle."""
    return FUNCTIONS["isend"](tensor, dst, group, tag, prof=prof, log_name=log_name, debug=debug)


def irecv(
    tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, prof: bool = False, log_name: str = "irecv", debug: Any = None
) -> Any:
    """Begins to receive into a tensor; does not block. Returns a handle."""
    return FUNCTIONS["irecv"](tensor, src, group, tag, prof=prof, log_name=log_name, debug=debug)


def batch_isend_irecv(p2p_op_list: list[Any], prof: bool = False, log_name: str = "batch_isend_irecv", debug: Any = None) -> Any:
    """Begins several sends and receives. An entry is a ``P2POp``, or has ``op`` (a name), ``tensor``, ``peer``, ``group`` and ``tag``."""
    entries = [
        each if isinstance(each, dist.P2POp) else P2POp(_message(each.op), each.tensor, each.peer, each.group, each.tag)
        for each in p2p_op_list
    ]
    return FUNCTIONS["batch_isend_irecv"](entries, prof=prof, log_name=log_name, debug=debug)


def _message(op: Any) -> Callable[..., Any]:
    """Returns the function of ``ringsim.comm`` that is meant by a name, or by one of the functions above."""
    return FUNCTIONS[op if isinstance(op, str) else op.__name__]


def broadcast(
    tensor: Tensor, src: int, group: Any = None, async_op: bool = False, prof: bool = False, log_name: str = "broadcast", debug: Any = None
) -> Any:
    """Copies the tensor of global rank ``src`` to all ranks of the group."""
    return FUNCTIONS["broadcast"](tensor, src, group, async_op, prof=prof, log_name=log_name, debug=debug)


def broadcast_object_list(
    object_list: list[Any],
    src: int,
    group: Any = None,
    device: Any = None,
    prof: bool = False,
    log_name: str = "broadcast_object_list",
    debug: Any = None,
) -> Any:
    """Copies the objects of global rank ``src`` to all ranks of the group."""
    return FUNCTIONS["broadcast_object_list"](object_list, src, group, device, prof=prof, log_name=log_name, debug=debug)


def all_gather(
    tensor_list: list[Tensor],
    tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather",
    debug: Any = None,
) -> Any:
    """Collects the tensors of all ranks in a list on each."""
    return FUNCTIONS["all_gather"](tensor_list, tensor, group, async_op, prof=prof, log_name=log_name, debug=debug)


def all_gather_object(
    object_list: list[Any], obj: Any, group: Any = None, prof: bool = False, log_name: str = "all_gather_object", debug: Any = None
) -> Any:
    """Collects one object of each rank in a list on each."""
    return FUNCTIONS["all_gather_object"](object_list, obj, group, prof=prof, log_name=log_name, debug=debug)


def all_gather_into_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather_into_tensor",
    debug: Any = None,
) -> Any:
    """Collects the tensors of all ranks, one after the other, in one tensor on each."""
    return FUNCTIONS["all_gather_into_tensor"](output_tensor, tensor, group, async_op, prof=prof, log_name=log_name, debug=debug)


def allgather_fn(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False, debug: Any = None) -> Any:
    """Does what ``all_gather_into_tensor`` does; DeepSpeed's way to say "the best all-gather there is"."""
    return FUNCTIONS["all_gather_into_tensor"](output_tensor, input_tensor, group, async_op, debug=debug)


def all_gather_coalesced(output_tensors: Tensors, input_tensors: Tensors, group: Any = None, async_op: bool = False) -> Handle | None:
    """Does ``all_gather_into_tensor`` for each pair; torch's function of this name takes lists of lists.

    Raises:
        ArgumentError: the lists differ in length.
    """
    if len(output_tensors) != len(input_tensors):
        raise ArgumentError(
            f"output_tensors must be as many as input_tensors, got {len(output_tensors)} and {len(input_tensors)} (all_gather_coalesced). "
            "Pass one output for each input."
        )
    pairs = zip(output_tensors, input_tensors, strict=True)
    works = [FUNCTIONS["all_gather_into_tensor"](output, each, group, True, log_name="all_gather_coalesced") for output, each in pairs]
    return _join(works, output_tensors, async_op)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "gather",
    debug: Any = None,
) -> Any:
    """Collects the tensors of all ranks in a list on global rank ``dst``."""
    return FUNCTIONS["gather"](tensor, gather_list, dst, group, async_op, prof=prof, log_name=log_name, debug=debug)


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int = 0,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "scatter",
    debug: Any = None,
) -> Any:
    """Hands out a list of global rank ``src``, one tensor to each rank."""
    return FUNCTIONS["scatter"](tensor, scatter_list, src, group, async_op, prof=prof, log_name=log_name, debug=debug)


def all_reduce(
    tensor: Tensor,
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: Any = None,
) -> Any:
    """Reduces the tensors of all ranks; each has the result."""
    return FUNCTIONS["all_reduce"](tensor, to_torch(op), group, async_op, prof=prof, log_name=log_name, debug=debug)


def inference_all_reduce(
    tensor: Tensor,
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: Any = None,
) -> Any:
    """Does what ``all_reduce`` does; DeepSpeed may take a faster way there, and blocks in any case."""
    return all_reduce(tensor, op, group, async_op, prof, log_name, debug)


def all_reduce_coalesced(
    tensors: Tensors,
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: Any = None,
) -> Handle | None:
    """Reduces each of several tensors, all under way together."""
    works = [all_reduce(tensor, op, group, True, prof, log_name, debug) for tensor in tensors]
    return _join(works, tensors, async_op)


def reduce(
    tensor: Tensor,
    dst: int,
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce",
    debug: Any = None,
) -> Any:
    """Reduces the tensors of all ranks; global rank ``dst`` has the result."""
    return FUNCTIONS["reduce"](tensor, dst, to_torch(op), group, async_op, prof=prof, log_name=log_name, debug=debug)


def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter",
    debug: Any = None,
) -> Any:
    """Reduces the lists of all ranks; each has one entry of the result."""
    return FUNCTIONS["reduce_scatter"](output, input_list, to_torch(op), group, async_op, prof=prof, log_name=log_name, debug=debug)


def reduce_scatter_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter_tensor",
    debug: Any = None,
) -> Any:
    """Reduces the tensors of all ranks; each has its part of the result."""
    function = FUNCTIONS["reduce_scatter_tensor"]
    return function(output_tensor, tensor, to_torch(op), group, async_op, prof=prof, log_name=log_name, debug=debug)


def reduce_scatter_fn(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    debug: Any = None,
) -> Any:
    """Does what ``reduce_scatter_tensor`` does; DeepSpeed's way to say "the best reduce-scatter there is"."""
    return reduce_scatter_tensor(output_tensor, tensor, op, group, async_op, prof, debug=debug)


def all_to_all_single(
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_to_all_single",
    debug: Any = None,
) -> Any:
    """Sends a part of the tensor to each rank, and puts together what comes."""
    function = FUNCTIONS["all_to_all_single"]
    return function(output, tensor, output_split_sizes, input_split_sizes, group, async_op, prof=prof, log_name=log_name, debug=debug)


def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_to_all",
    debug: Any = None,
) -> Any:
    """Sends one tensor of a list to each rank, and receives one from each."""
    return FUNCTIONS["all_to_all"](output_tensor_list, input_tensor_list, group, async_op, prof=prof, log_name=log_name, debug=debug)


def barrier(
    group: Any = None, async_op: bool = False, device_ids: Any = None, prof: bool = False, log_name: str = "barrier", debug: Any = None
) -> Any:
    """Waits until all ranks of the group have come here."""
    return FUNCTIONS["barrier"](group, async_op, device_ids, prof=prof, log_name=log_name, debug=debug)


def monitored_barrier(
    group: Any = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
    prof: bool = False,
    log_name: str = "monitored_barrier",
    debug: Any = None,
) -> Any:
    """Waits until all ranks of the group have come here, and says which did not."""
    return FUNCTIONS["monitored_barrier"](group, timeout, wait_all_ranks, prof=prof, log_name=log_name, debug=debug)


def _join(works: list[Any], results: Tensors, async_op: bool) -> Handle | None:
    """Returns one handle for several, or waits for them."""
    handle = Handle(works, lambda: None, results)
    if async_op:
        return handle
    handle.wait()
    return None
