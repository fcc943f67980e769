"""The collectives on MPI, one function per family.

Each collective becomes one nonblocking MPI operation and a final step for its result. Data that is
only moved is sent as bytes, regardless of its dtype. MPI performs the reductions. If MPI lacks the
type, the data is gathered, and torch reduces it in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ringsim.comm.calls import (
    Call,
    Tensors,
    for_receiving,
    for_sending,
    is_plain,
    name_of_reduction,
)
from ringsim.comm.reductions import check_reduction, find_refusal, reduce_parts
from ringsim.errors import ArgumentError
from ringsim.traces.events import NONE

# The names of MPI's types and operations, which must not be looked up before MPI is needed.
_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    **{
        getattr(torch, f"{kind}{bits}"): f"{kind}{bits}_t".upper()
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
}
_OPS = {"AVG": "SUM", "PRODUCT": "PROD"}  # the others have torch's names


class Started(NamedTuple):
    """An operation that MPI has begun.

    The tuple contains the request, the objects that must stay alive until the operation is done,
    and a function that stores the result.
    """

    request: Any
    keep: Any = None
    finish: Callable[[], Any] | None = None


def start(mpi: Any, comm: Any, call: Call) -> Started:
    """Begins a collective.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: the communicator of the group.
        call: the call, with the tensors that this rank contributes and fills.

    Raises:
        ArgumentError: torch does not support the reduction for this dtype.
    """
    if call.op is not None:
        check_reduction(call.op)
        dtype = call.given[0].dtype
        if refusal := find_refusal(dtype, name_of_reduction(call.op)):
            raise ArgumentError(
                f"op must be a reduction that {dtype} supports, got {call.op} ({refusal}). "
                "Convert the tensor, or choose a different reduction."
            )
    return _STARTERS.get(call.collective.family, _move)(mpi, comm, call)


# -- the families of collectives: each returns a request and a final step


def _move(mpi: Any, comm: Any, call: Call) -> Started:
    """Begins a collective that only moves data."""
    count, family = call.group.size(), call.collective.family
    if family == "all_gather" and _gathers_in_place(call):
        whole = as_bytes(call.taken[0])
        return Started(comm.Iallgather(mpi.IN_PLACE, as_mpi(mpi, whole, count)), whole)
    given, (taken, finish) = _flatten(call.given), _to_fill(call)
    match family:
        case "all_gather":
            request = comm.Iallgather(as_mpi(mpi, given), as_mpi(mpi, taken, count))
        case "gather":
            request = comm.Igather(
                as_mpi(mpi, given), as_mpi(mpi, taken, count) if call.outputs else None, call.root
            )
        case "scatter":
            request = comm.Iscatter(
                as_mpi(mpi, given, count) if call.inputs else None, as_mpi(mpi, taken), call.root
            )
        case "all_to_all":
            request = comm.Ialltoallv(
                _in_pieces(mpi, given, call.inputs), _in_pieces(mpi, taken, call.outputs)
            )
        case _:
            request = comm.Ibarrier()
    return Started(request, (given, taken), finish)


def _gathers_in_place(call: Call) -> bool:
    """Returns whether the input tensor is already at its place in the output, as with FSDP."""
    if len(call.taken) != 1 or len(call.given) != 1:
        return False
    whole, mine = call.taken[0], call.given[0]
    if not is_plain(whole) or not is_plain(mine):
        return False
    return mine.data_ptr() == whole.data_ptr() + call.group.rank() * mine.nbytes


def _broadcast(mpi: Any, comm: Any, call: Call) -> Started:
    tensor, is_root = call.taken[0], call.group.rank() == call.root
    data = for_sending(tensor) if is_root else for_receiving(tensor)
    finish = None if is_root or data is tensor else lambda: tensor.copy_(data)
    return Started(comm.Ibcast(as_mpi(mpi, as_bytes(data)), call.root), data, finish)


def _reduce(mpi: Any, comm: Any, call: Call) -> Started:
    """Begins all_reduce, or reduce, in which only the root needs the result."""
    everywhere = call.root == NONE
    wanted = everywhere or call.group.rank() == call.root
    mine = _join_numbers(call.given)
    outputs = [_real(tensor) for tensor in call.taken] if wanted else []
    root = () if everywhere else (call.root,)
    if numbers := _as_numbers(mpi, mine):
        rows = torch.empty((int(wanted), len(mine)), dtype=mine.dtype)
        receive = _as_numbers(mpi, rows) if wanted else None
        begin = comm.Iallreduce if everywhere else comm.Ireduce
        request = begin(numbers, receive, _op_of(mpi, call), *root)
    else:
        rows = torch.empty((call.group.size() if wanted else 0, len(mine)), dtype=mine.dtype)
        receive = as_mpi(mpi, as_bytes(rows), call.group.size()) if wanted else None
        begin = comm.Iallgather if everywhere else comm.Igather
        request = begin(as_mpi(mpi, as_bytes(mine)), receive, *root)
    return Started(request, (mine, rows), lambda: _complete_reduction(call, rows, outputs))


def _reduce_scatter(mpi: Any, comm: Any, call: Call) -> Started:
    parts, output = [_real(each) for each in call.inputs], _real(call.outputs[0])
    mine, counts = _join_numbers(parts), [part.numel() for part in parts]
    if numbers := _as_numbers(mpi, mine):
        rows = torch.empty((1, output.numel()), dtype=mine.dtype)
        request = comm.Ireduce_scatter(numbers, _as_numbers(mpi, rows), counts, _op_of(mpi, call))
    else:
        rows = torch.empty((call.group.size(), output.numel()), dtype=mine.dtype)
        request = comm.Ialltoallv(
            _in_pieces(mpi, as_bytes(mine), parts), as_mpi(mpi, as_bytes(rows), len(rows))
        )
    return Started(request, (mine, rows, counts), lambda: _complete_reduction(call, rows, [output]))


def _complete_reduction(call: Call, rows: torch.Tensor, outputs: Tensors) -> None:
    """Fills the outputs from MPI's reduced result (a single row) or every rank's contribution.

    In the second case, torch reduces the parts.
    """
    if not outputs:
        return
    if rows.dtype not in _TYPES:
        total = reduce_parts(list(rows), call.op)
    else:
        total = rows[0]
        if name_of_reduction(call.op) == "AVG":
            total.div_(call.group.size())
    pieces = total.split([output.numel() for output in outputs])
    for output, piece in zip(outputs, pieces, strict=True):
        output.copy_(piece.view_as(output))


# by family; `_move` begins the others
_STARTERS: dict[str, Callable[[Any, Any, Call], Started]] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
}


# -- tensors in MPI's form


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a complex tensor as pairs of real numbers for summing, or any other tensor as is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _join_numbers(tensors: Tensors) -> torch.Tensor:
    """Returns a copy of several tensors' numbers, concatenated."""
    return torch.cat([for_sending(_real(tensor)).reshape(-1) for tensor in tensors])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a plain tensor, with shape (bytes,), in the same memory."""
    # one element may have any stride
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def as_mpi(mpi: Any, data: torch.Tensor, parts: int = 1) -> list[Any]:
    """Returns bytes in MPI's form, as ``parts`` equal pieces, one per rank."""
    return [mpi.buffer.fromaddress(data.data_ptr(), len(data)), len(data) // parts, mpi.BYTE]


def _in_pieces(mpi: Any, data: torch.Tensor, pieces: Tensors) -> list[Any]:
    """Returns bytes in MPI's form, in pieces of different sizes, one per rank."""
    buffer, _, kind = as_mpi(mpi, data)
    return [buffer, [piece.nbytes for piece in pieces], kind]


def _as_numbers(mpi: Any, tensor: torch.Tensor) -> list[Any] | None:
    """Returns a plain tensor in MPI's form for reductions, or None if MPI lacks the dtype."""
    if tensor.dtype not in _TYPES:
        return None
    return [
        mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes),
        tensor.numel(),
        getattr(mpi, _TYPES[tensor.dtype]),
    ]


def _op_of(mpi: Any, call: Call) -> Any:
    name = name_of_reduction(call.op)
    return getattr(mpi, _OPS.get(name, name))


def _flatten(tensors: Tensors) -> torch.Tensor:
    """Returns the concatenated bytes of several tensors, with shape (bytes,).

    A single plain tensor is not copied.
    """
    if len(tensors) == 1:
        return as_bytes(for_sending(tensors[0]))
    return torch.cat(
        [torch.empty(0, dtype=torch.uint8), *(as_bytes(for_sending(tensor)) for tensor in tensors)]
    )


def _to_fill(call: Call) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Returns bytes to fill, of shape (bytes,), and a function that copies them to the outputs.

    The function is None if the bytes are the output's own memory.
    """
    taken = call.taken
    # MPI must not write into the memory of the inputs
    storages = {each.untyped_storage().data_ptr() for each in call.given}
    if (
        len(taken) == 1
        and is_plain(taken[0])
        and taken[0].untyped_storage().data_ptr() not in storages
    ):
        return as_bytes(taken[0]), None
    sizes = [tensor.nbytes for tensor in taken]
    flat = torch.empty(sum(sizes), dtype=torch.uint8)

    def bring() -> None:
        for tensor, piece in zip(taken, flat.split(sizes), strict=True):
            plain = torch.empty(tensor.shape, dtype=tensor.dtype)
            as_bytes(plain).copy_(piece)
            tensor.copy_(plain)

    return flat, bring
