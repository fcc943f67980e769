"""Reductions on MPI: by MPI where it has the type, else in torch, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.distributed import ReduceOp

from ringsim.errors import ArgumentError

# The names of MPI's types and operations, which must not be looked up before MPI is wanted.
_TYPES: Final = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
}
_OPS: Final = {
    ReduceOp.SUM: "SUM",
    ReduceOp.AVG: "SUM",
    ReduceOp.PRODUCT: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.BAND: "BAND",
    ReduceOp.BOR: "BOR",
    ReduceOp.BXOR: "BXOR",
}
_IN_TORCH: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "SUM": torch.add,
    "PROD": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_BITWISE: Final = ("BAND", "BOR", "BXOR")


class Reduction(NamedTuple):
    """How to reduce tensors of one dtype.

    Attributes:
        name: what MPI calls the operation.
        type_name: what MPI calls the type, None where it has none and torch does the sums.
        averages: whether the sum is divided by the number of ranks.
    """

    name: str
    type_name: str | None
    averages: bool

    def finish(self, total: torch.Tensor, count: int) -> None:
        """Turns a sum of ``count`` tensors into what was asked for, in place."""
        if self.averages:
            total.div_(count)

    def reduce_in_order(self, parts: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """Returns ``parts[0] op parts[1] op ...``, from left to right, in the parts' dtype.

        Example:
            >>> plan_reduction(torch.bfloat16, ReduceOp.SUM).reduce_in_order([torch.ones(2, dtype=torch.bfloat16)] * 3)
            tensor([3., 3.], dtype=torch.bfloat16)
        """
        total = parts[0].clone()
        for part in parts[1:]:
            torch_op = _IN_TORCH[self.name]
            total = torch_op(total, part)
        self.finish(total, len(parts))
        return total


def plan_reduction(dtype: torch.dtype, op: Any) -> Reduction:
    """Returns how to reduce a dtype by an operation of torch's.

    Args:
        dtype: the tensors' dtype; a complex one is summed as pairs of real numbers, by who calls.
        op: a ``torch.distributed.ReduceOp``.

    Raises:
        ArgumentError: nobody can: bits of floats, the mean of integers, the least of complex numbers, any sum of 8-bit floats.
    """
    name = next((name for known, name in _OPS.items() if op == known), None)
    if name is None:
        rule = ", ".join(str(known).rpartition(".")[2] for known in _OPS)
        raise ArgumentError(f"op must be one of {rule} with the mpi backend, got {op!r}. Choose one of them.")
    averages = op == ReduceOp.AVG
    is_number = dtype.is_floating_point or dtype.is_complex
    refused = (
        (is_number and name in _BITWISE)
        or (averages and not is_number)
        or (dtype.is_complex and name != "SUM")
        or (dtype.is_floating_point and dtype.itemsize == 1)
    )
    if refused:
        raise ArgumentError(f"op must be one that {dtype} has, got {op} (mpi backend). Convert the tensor, or choose another operation.")
    return Reduction(name, _TYPES.get(dtype), averages)
