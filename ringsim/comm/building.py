"""Collectives built from messages, for groups or versions of torch that lack them.

All messages of a collective are posted before the first is waited for, so the ranks cannot block
each other, and ``async_op`` needs no extra work. Reductions are computed in the order of the ranks.
"""

from __future__ import annotations

import functools

import torch
from torch.distributed import ProcessGroup

from ringsim.comm.calls import Call, Tensors, for_receiving, for_sending
from ringsim.comm.handles import Handle
from ringsim.comm.reductions import check_reduction, reduce_parts
from ringsim.comm.torch_private import OF_TORCH
from ringsim.traces.sites import RINGSIM, warn_user

FALLBACK_TAG = 31_717  # below 2**15, which every MPI can carry


@functools.cache
def warn_once(op: str, backend_name: str) -> None:
    """Warns at the user's line, once per backend, that an operation is built from messages."""
    message = (
        f"the backend {backend_name!r} does not support {op}, so ringsim.comm builds it from "
        "messages, which is slower"
    )
    warn_user(message, RuntimeWarning, (RINGSIM, OF_TORCH))


def build(group: ProcessGroup, call: Call) -> Handle:
    """Begins a collective that is built from messages.

    Args:
        group: the group of the messages.
        call: the collective.

    Returns:
        The handle, whose wait stores the results.

    Raises:
        ArgumentError: the reduction is not one of torch's eight plain reductions.
    """
    if call.op is not None:
        check_reduction(call.op)
    me, size = group.rank(), group.size()
    others = [place for place in range(size) if place != me]
    incoming = [_places_for(call, place) for place in range(size)]
    landed = [
        (place, for_sending(tensor).clone())
        for tensor, place in zip(_gifts_to(call, me), incoming[me], strict=True)
    ]
    works = []
    for other in others:
        for place in incoming[other]:
            buffer = for_receiving(place)
            works.append(group.recv([_flat(buffer)], other, FALLBACK_TAG))
            if buffer is not place:
                landed.append((place, buffer))
    for other in others:
        works += [
            group.send([_flat(for_sending(tensor))], other, FALLBACK_TAG)
            for tensor in _gifts_to(call, other)
        ]

    def finish() -> None:
        for place, value in landed:
            place.copy_(value.view_as(place))
        if call.op is not None:
            # empty if this rank is not the root
            for output, parts in zip(call.outputs, zip(*incoming, strict=True), strict=False):
                output.copy_(reduce_parts(parts, call.op).view_as(output))

    return Handle(works, finish, call.results)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a flat view of a plain tensor's numbers, with each complex number as a pair."""
    flat = tensor.view(-1)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _gifts_to(call: Call, rank: int) -> Tensors:
    """Returns the tensors that this rank contributes to a rank in the group, possibly itself."""
    match call.collective.family:
        case "broadcast":
            return call.inputs if call.group.rank() == call.root else ()
        case "reduce" | "gather":
            return call.inputs if rank == call.root else ()
        case "scatter":
            return (call.inputs[rank],) if call.group.rank() == call.root else ()
        case "all_reduce" | "all_gather":
            return call.inputs
        case "reduce_scatter" | "all_to_all":
            return (call.inputs[rank],)
    return (torch.zeros(1, dtype=torch.int32),)  # a barrier


def _places_for(call: Call, rank: int) -> Tensors:
    """Returns the tensors that receive the data from a rank in the group.

    For reductions, these tensors are buffers.
    """
    match call.collective.family:
        case "broadcast" | "scatter":
            return call.outputs if rank == call.root else ()
        case "gather" | "all_gather":
            count = len(call.inputs)
            return call.outputs[rank * count : (rank + 1) * count]
        case "all_to_all":
            return (call.outputs[rank],)
        case "reduce":
            return _empty(call.outputs) if call.group.rank() == call.root else ()
        case "all_reduce" | "reduce_scatter":
            return _empty(call.outputs)
    return (torch.zeros(1, dtype=torch.int32),)


def _empty(tensors: Tensors) -> list[torch.Tensor]:
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
