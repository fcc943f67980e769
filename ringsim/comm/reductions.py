"""Reduces tensors with torch, in the order of the ranks, so that all ranks get the same bits.

Sums and products of floats may differ from a library's results in the last bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ReduceOp

from ringsim.comm.calls import Tensors, name_of_reduction
from ringsim.errors import ArgumentError

_Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_STEPS: dict[str, _Step] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_OF_COMPLEX = ("SUM", "AVG")  # torch.distributed sums complex numbers as pairs of real ones


def check_reduction(op: Any) -> _Step:
    """Returns the two-argument function that a reduction applies repeatedly.

    Raises ArgumentError unless the reduction is one of torch's eight plain reductions.
    """
    step = (
        _STEPS.get(name_of_reduction(op)) if isinstance(op, ReduceOp | ReduceOp.RedOpType) else None
    )
    if step is None:
        words = f"op must be one of {', '.join(_STEPS)} for a reduction by ringsim.comm, got {op}"
        raise ArgumentError(f"{words}. Choose one of these reductions, or use a different backend.")
    return step


@functools.cache
def find_refusal(dtype: torch.dtype, how: str) -> str:
    """Returns the reason why torch cannot apply a reduction to a dtype, or "" if it can.

    The function tries the reduction with one number.

    Args:
        dtype: the dtype of the tensors.
        how: the name of the reduction in ``ReduceOp``.

    Example:
        >>> find_refusal(torch.int64, "SUM"), find_refusal(torch.int64, "AVG")
        ('', "result type Float can't be cast to the desired output type Long")
    """
    if dtype.is_complex and how not in _OF_COMPLEX:
        return f"torch reduces complex numbers only with {' and '.join(_OF_COMPLEX)}"
    number = torch.zeros(1, dtype=dtype, device="cpu")
    try:
        total = check_reduction(getattr(ReduceOp, how))(number, number)
        if how == "AVG":
            total.div_(1)
    except RuntimeError as error:
        return str(error)
    return ""


def reduce_parts(parts: Tensors, op: Any) -> torch.Tensor:
    """Reduces tensors of the same shape.

    The function combines the first tensor with the second, the result with the third, and so on. A
    sum of floats depends on the order: a ring or a tree gives a result with different last bits.
    Other results are exact.

    Args:
        parts: the tensors, one per rank, in order.
        op: a reduction of ``ReduceOp``; AVG divides the sum by the number of tensors, and rounds
            integers towards zero.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        ArgumentError: the reduction is not one of torch's eight plain reductions.

    Example:
        >>> reduce_parts([torch.tensor([1, 5]), torch.tensor([3, 4])], ReduceOp.MAX).tolist()
        [3, 5]
    """
    step = check_reduction(op)
    result = parts[0].clone()
    for part in parts[1:]:
        result = step(result, part)
    if op == ReduceOp.AVG:
        whole = not (result.is_floating_point() or result.is_complex())
        result = torch.div(result, len(parts), rounding_mode="trunc" if whole else None)
    return result
