"""Collectives on tensors, built from other collectives where the backend has one that does, else from ``isend`` and ``irecv``.

Every member calls, in the same order, as with the native operation. All messages of an operation are posted before it waits for any, so
no order of ranks can block; with ``async_op`` the handle does the rest in ``wait``. Outside the group they do nothing and return None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from ringsim.comm.backend import Backend
from ringsim.comm.handle import Handle
from ringsim.comm.member import Member
from ringsim.comm.reductions import check_reduction, reduce_parts
from ringsim.errors import ArgumentError

__all__ = [
    "all_gather",
    "all_gather_coalesced",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "gather_single",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
]

_SUM: Any = ReduceOp.SUM
Tensors = Sequence[torch.Tensor]


def broadcast(
    backend: Backend,
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Handle | None:
    """``broadcast``: the source sends to each."""
    member = Member(backend, group, "broadcast")
    if member.rank < 0:
        return None
    member.check_tensor(tensor, "tensor")
    root = member.root(src, group_src, "src")
    if member.rank == root:
        return member.end([member.send(tensor, rank) for rank in member.others], _nothing, [tensor], async_op)
    work, place = member.recv_into(tensor, root)
    return member.end([work], place, [tensor], async_op)


def all_reduce(backend: Backend, tensor: torch.Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Handle | None:
    """``all_reduce``: everyone shows its tensor to everyone, and adds up."""
    member = Member(backend, group, "all_reduce")
    if member.rank < 0:
        return None
    member.check_tensor(tensor, "tensor")
    check_reduction(op)
    works, parts = member.share(tensor)
    return member.end(works, lambda: tensor.copy_(reduce_parts(parts, op)), [tensor], async_op)


def all_reduce_coalesced(backend: Backend, tensors: Tensors, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Handle | None:
    """``all_reduce_coalesced``: one after the other."""
    member = Member(backend, group, "all_reduce_coalesced")
    if member.rank < 0:
        return None
    native = member.native("all_reduce")
    if native is None:
        return member.end([all_reduce(backend, tensor, op, group, True) for tensor in tensors], _nothing, tensors, async_op)
    buffers = [tensor.contiguous() for tensor in tensors]  # Gloo adds up strided tensors wrongly (torch 2.13)

    def finish() -> None:
        for tensor, buffer in zip(tensors, buffers, strict=True):
            tensor.copy_(buffer)

    return member.end([native[1](buffer, op, group, True) for buffer in buffers], finish, tensors, async_op)


def reduce(
    backend: Backend,
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Handle | None:
    """``reduce``: everyone sends to the destination, which adds up. Elsewhere ``tensor`` stays as it is."""
    member = Member(backend, group, "reduce")
    if member.rank < 0:
        return None
    member.check_tensor(tensor, "tensor")
    check_reduction(op)
    root = member.root(dst, group_dst, "dst")
    if member.rank != root:
        return member.end([member.send(tensor, root)], _nothing, [tensor], async_op)
    own = tensor.detach().contiguous()
    parts = [own if rank == root else torch.empty_like(own) for rank in range(member.size)]
    works = [member.recv(parts[rank], rank) for rank in member.others]
    return member.end(works, lambda: tensor.copy_(reduce_parts(parts, op)), [tensor], async_op)


def all_gather(backend: Backend, tensor_list: Tensors, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Handle | None:
    """``all_gather``: everyone sends to everyone; through one large tensor where the backend has that."""
    member = Member(backend, group, "all_gather")
    if member.rank < 0:
        return None
    member.check_tensor(tensor, "tensor")
    outputs = member.check_tensors(tensor_list, "tensor_list", tensor.dtype)
    member.check_tensor(outputs[member.rank], "tensor_list", tensor)
    native = member.native("all_gather_single", "all_gather_into_tensor")
    if native and len({output.shape for output in outputs}) == 1:
        flat = torch.empty(member.size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        work = native[1](flat, tensor.detach().reshape(-1), group, True)
        return member.end([work], lambda: _spread(flat, outputs), outputs, async_op)
    works, finish = member.exchange([tensor] * member.size, outputs)
    return member.end(works, finish, outputs, async_op)


def all_gather_single(
    backend: Backend, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Handle | None:
    """``all_gather_single`` and ``all_gather_into_tensor``: ``all_gather`` into parts of the output."""
    member = Member(backend, group, "all_gather_single")
    if member.rank < 0:
        return None
    _check_shards(member, output_tensor, input_tensor, "output_tensor", "input_tensor")
    works, parts = member.share(input_tensor)
    return member.end(works, lambda: _join(parts, output_tensor), [output_tensor], async_op)


def all_gather_coalesced(
    backend: Backend, output_tensor_lists: Sequence[Tensors], input_tensor_list: Tensors, group: Any = None, async_op: bool = False
) -> Handle | None:
    """``all_gather_coalesced``: one after the other. ``output_tensor_lists[rank][i]`` takes input i of a rank, as in torch."""
    member = Member(backend, group, "all_gather_coalesced")
    if member.rank < 0:
        return None
    native = member.native("all_gather")
    works, results = [], []
    for place, tensor in enumerate(input_tensor_list):
        outputs = [outputs[place] for outputs in member.check_list(output_tensor_lists, "output_tensor_lists")]
        works.append(native[1](outputs, tensor, group, True) if native else all_gather(backend, outputs, tensor, group, True))
        results += outputs
    return member.end(works, _nothing, results, async_op)


def gather(
    backend: Backend,
    tensor: torch.Tensor,
    gather_list: Tensors | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Handle | None:
    """``gather``: everyone sends to the destination."""
    member = Member(backend, group, "gather")
    if member.rank < 0:
        return None
    member.check_tensor(tensor, "tensor")
    root = member.root(dst, group_dst, "dst", default=0)
    if member.rank != root:
        return member.end([member.send(tensor, root)], _nothing, [], async_op)
    outputs = member.check_tensors(gather_list, "gather_list", tensor.dtype)
    member.check_tensor(outputs[root], "gather_list", tensor)
    received = [member.recv_into(outputs[rank], rank) for rank in member.others]
    own = tensor.detach().clone()

    def finish() -> None:
        for _, place in received:
            place()
        outputs[root].copy_(own)

    return member.end([work for work, _ in received], finish, outputs, async_op)


def gather_single(
    backend: Backend,
    tensor: torch.Tensor,
    gather_tensor: torch.Tensor | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Handle | None:
    """``gather_single`` and ``gather_into_tensor`` (torch 2.15): as ``gather``, into parts of one tensor."""
    member = Member(backend, group, "gather_single")
    if member.rank < 0:
        return None
    root = member.root(dst, group_dst, "dst", default=0)
    own = tensor.detach().contiguous()
    parts = [torch.empty_like(own) for _ in member.ranks]
    if member.rank == root:
        if gather_tensor is None:
            raise ArgumentError("gather_tensor must be given on the destination rank, got None (gather_single). Make one for all parts.")
        _check_shards(member, gather_tensor, tensor, "gather_tensor", "tensor")
    finish = _nothing if member.rank != root or gather_tensor is None else lambda: _join(parts, gather_tensor)
    native = member.native("gather")
    if native:
        works = [native[1](own, parts if member.rank == root else None, None, group, True, root)]
    elif member.rank == root:
        parts[root] = own.clone()
        works = [member.recv(parts[rank], rank) for rank in member.others]
    else:
        works = [member.send(own, root)]
    return member.end(works, finish, [] if gather_tensor is None else [gather_tensor], async_op)


def scatter(
    backend: Backend,
    tensor: torch.Tensor,
    scatter_list: Tensors | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Handle | None:
    """``scatter``: the source sends to each."""
    member = Member(backend, group, "scatter")
    if member.rank < 0:
        return None
    member.check_tensor(tensor, "tensor")
    root = member.root(src, group_src, "src", default=0)
    if member.rank != root:
        work, place = member.recv_into(tensor, root)
        return member.end([work], place, [tensor], async_op)
    inputs = member.check_tensors(scatter_list, "scatter_list", tensor.dtype)
    member.check_tensor(inputs[root], "scatter_list", tensor)
    works = [member.send(inputs[rank], rank) for rank in member.others]
    return member.end(works, lambda: tensor.copy_(inputs[root]), [tensor], async_op)


def reduce_scatter(
    backend: Backend, output: torch.Tensor, input_list: Tensors, op: Any = _SUM, group: Any = None, async_op: bool = False
) -> Handle | None:
    """``reduce_scatter``: everyone sends to each its part, which adds up."""
    member = Member(backend, group, "reduce_scatter")
    if member.rank < 0:
        return None
    member.check_tensor(output, "output")
    inputs = member.check_tensors(input_list, "input_list", output.dtype)
    member.check_tensor(inputs[member.rank], "input_list", output)
    return _reduce_parts_of_all(member, output, inputs, op, async_op)


def reduce_scatter_single(
    backend: Backend,
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch's name
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
) -> Handle | None:
    """``reduce_scatter_single`` and ``reduce_scatter_tensor``: from ``reduce_scatter``, else as that is."""
    member = Member(backend, group, "reduce_scatter_single")
    if member.rank < 0:
        return None
    _check_shards(member, input, output, "input", "output")
    parts = [part.view_as(output) for part in input.detach().reshape(-1).chunk(member.size)] if output.numel() else [output] * member.size
    native = member.native("reduce_scatter")
    if native:
        buffer = torch.empty_like(output, memory_format=torch.contiguous_format)
        return member.end([native[1](buffer, parts, op, group, True)], lambda: output.copy_(buffer), [output], async_op)
    return _reduce_parts_of_all(member, output, parts, op, async_op)


def _reduce_parts_of_all(member: Member, output: torch.Tensor, inputs: Tensors, op: Any, async_op: bool) -> Handle | None:
    """By messages: the members that have nothing for me send zeros, too."""
    check_reduction(op)
    incoming = [torch.empty_like(inputs[member.rank], memory_format=torch.contiguous_format) for _ in range(member.size)]
    works, place = member.exchange(inputs, incoming)

    def finish() -> None:
        place()
        output.copy_(reduce_parts(incoming, op))

    return member.end(works, finish, [output], async_op)


def all_to_all(
    backend: Backend, output_tensor_list: Tensors, input_tensor_list: Tensors, group: Any = None, async_op: bool = False
) -> Handle | None:
    """``all_to_all``: a message for every pair of ranks."""
    member = Member(backend, group, "all_to_all")
    if member.rank < 0:
        return None
    outputs = member.check_tensors(output_tensor_list, "output_tensor_list")
    inputs = member.check_tensors(input_tensor_list, "input_tensor_list", outputs[0].dtype)
    member.check_tensor(inputs[member.rank], "input_tensor_list", outputs[member.rank])
    works, finish = member.exchange(inputs, outputs)
    return member.end(works, finish, outputs, async_op)


def all_to_all_single(
    backend: Backend,
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch's name
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Handle | None:
    """``all_to_all_single``: ``all_to_all`` of parts along the first dimension."""
    member = Member(backend, group, "all_to_all_single")
    if member.rank < 0:
        return None
    inputs = member.check_tensors(_split(member, input, input_split_sizes, "input_split_sizes"), "input")
    outputs = member.check_tensors(_split(member, output, output_split_sizes, "output_split_sizes"), "output", input.dtype)
    member.check_tensor(inputs[member.rank], "input", outputs[member.rank])
    works, finish = member.exchange(inputs, outputs)
    return member.end(works, finish, [output], async_op)


def _split(member: Member, tensor: torch.Tensor, sizes: Sequence[int] | None, name: str) -> Tensors:
    """Cuts a tensor along its first dimension, one piece for each rank."""
    member.check_tensor(tensor, name.partition("_")[0])
    rows = len(tensor)
    if not sizes:
        if rows % member.size:
            raise ArgumentError(
                f"{name} must be given where {member.size} ranks do not divide {rows} rows, got None. Say who gets how many."
            )
        sizes = [rows // member.size] * member.size
    if len(sizes) != member.size or sum(sizes) != rows:
        raise ArgumentError(f"{name} must be {member.size} numbers that add up to {rows}, got {list(sizes)}. Count the rows.")
    return torch.split(tensor, list(sizes))


def _check_shards(member: Member, whole: torch.Tensor, shard: torch.Tensor, whole_name: str, shard_name: str) -> None:
    member.check_tensor(whole, whole_name)
    member.check_tensor(shard, shard_name)
    if whole.numel() != member.size * shard.numel() or whole.dtype != shard.dtype:
        raise ArgumentError(
            f"{whole_name} must be {member.size} times as large as {shard_name} and of its dtype, got {tuple(whole.shape)} {whole.dtype} "
            f"and {tuple(shard.shape)} {shard.dtype} ({member.op}). Make it so."
        )


def _join(parts: Tensors, output: torch.Tensor) -> None:
    """Puts the parts of all ranks one after the other into ``output``, whatever its shape."""
    output.copy_(torch.cat([part.reshape(-1) for part in parts]).view(output.shape))


def _spread(flat: torch.Tensor, outputs: Tensors) -> None:
    """Puts the equal pieces of ``flat`` into ``outputs``, in order."""
    for place, output in enumerate(outputs):
        count = output.numel()
        output.copy_(flat[place * count : (place + 1) * count].view(output.shape))


def _nothing() -> None:
    """Everything is in its place already."""
