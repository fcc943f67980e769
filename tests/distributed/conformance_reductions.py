"""Rules of the collectives that reduce, against the same sum in one process."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from conformance import make, rule, same
from torch.distributed import ReduceOp

Fold = Callable[[Any, Any], Any]
SUM: tuple[ReduceOp, Fold] = (ReduceOp.SUM, operator.add)
NUMBERS: dict[str, tuple[ReduceOp, Fold]] = {
    "sum": SUM,
    "product": (ReduceOp.PRODUCT, operator.mul),
    "min": (ReduceOp.MIN, torch.minimum),
    "max": (ReduceOp.MAX, torch.maximum),
}
BITS: dict[str, tuple[ReduceOp, Fold]] = {
    "band": (ReduceOp.BAND, operator.and_),
    "bor": (ReduceOp.BOR, operator.or_),
    "bxor": (ReduceOp.BXOR, operator.xor),
}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int32, torch.int64, torch.uint8)
CASES = {
    **{f"{name},{str(dtype)[6:]}": (*op, dtype) for name, op in NUMBERS.items() for dtype in (*FLOATS, *INTEGERS)},
    **{f"{name},{str(dtype)[6:]}": (*op, dtype) for name, op in BITS.items() for dtype in INTEGERS},
    **{f"sum,{str(dtype)[6:]}": (*SUM, dtype) for dtype in (torch.complex64, torch.complex128, torch.int16)},
    **{f"{name},bool": (*NUMBERS[name], torch.bool) for name in ("min", "max")},
}
FEW = {name: CASES[name] for name in ("sum,float32", "max,int64", "sum,bfloat16", "product,float64", "sum,complex64")}
Case = tuple[ReduceOp, Fold, torch.dtype]


def folded(fold: Fold, tensors: list[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(fold, tensors)


def everybodys(size: int, fold: Fold, dtype: torch.dtype, shape: tuple[int, ...] = (6,), salt: int = 0) -> torch.Tensor:
    return folded(fold, [make(each, shape, dtype, salt) for each in range(size)])


@rule(each=CASES)
def all_reduce_reduces(dist: Any, rank: int, size: int, case: Case) -> None:
    op, fold, dtype = case
    tensor = make(rank, dtype=dtype)
    dist.all_reduce(tensor, op)
    same(tensor, everybodys(size, fold, dtype))


@rule(each={"float32": torch.float32, "bfloat16": torch.bfloat16})
def all_reduce_averages(dist: Any, rank: int, size: int, dtype: torch.dtype) -> None:
    tensor = make(rank, dtype=dtype) * 12
    dist.all_reduce(tensor, ReduceOp.AVG)
    same(tensor, everybodys(size, operator.add, dtype) * 12 / size)


@rule()
def all_reduce_of_any_floats_is_close(dist: Any, rank: int, size: int) -> None:
    inputs = [torch.randn(1000, generator=torch.Generator().manual_seed(each)) for each in range(size)]
    tensor = inputs[rank].clone()
    dist.all_reduce(tensor)
    torch.testing.assert_close(tensor, torch.stack(inputs).double().sum(0).float())


@rule()
def all_ranks_get_the_same_bits(dist: Any, rank: int, size: int) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    dist.all_reduce(tensor)
    copies = [torch.empty(1000) for _ in range(size)]
    dist.all_gather(copies, tensor)
    for each in copies:
        same(each, tensor)


@rule(each={"empty": (0, 3), "number": (), "cube": (2, 3, 4)})
def all_reduce_takes_every_shape(dist: Any, rank: int, size: int, shape: tuple[int, ...]) -> None:
    tensor = make(rank, shape)
    dist.all_reduce(tensor)
    same(tensor, everybodys(size, operator.add, torch.float32, shape))


@rule(each=FEW)
def all_reduce_coalesced_reduces_several(dist: Any, rank: int, size: int, case: Case) -> None:
    op, fold, dtype = case
    shapes = [(6,), (2, 2)]
    tensors = [make(rank, shape, dtype, salt) for salt, shape in enumerate(shapes)]
    dist.all_reduce_coalesced(tensors, op)
    for salt, (shape, tensor) in enumerate(zip(shapes, tensors, strict=True)):
        same(tensor, everybodys(size, fold, dtype, shape, salt))


@rule(each=FEW)
def reduce_gives_the_root_the_result(dist: Any, rank: int, size: int, case: Case) -> None:
    op, fold, dtype = case
    for root in range(size):
        tensor = make(rank, dtype=dtype)
        dist.reduce(tensor, root, op)
        if rank == root:
            same(tensor, everybodys(size, fold, dtype))


@rule(each=FEW)
def reduce_scatter_gives_each_its_part(dist: Any, rank: int, size: int, case: Case) -> None:
    op, fold, dtype = case
    output = torch.empty(6, dtype=dtype)
    dist.reduce_scatter(output, [make(rank, dtype=dtype, salt=each) for each in range(size)], op)
    same(output, everybodys(size, fold, dtype, salt=rank))


@rule(each=FEW)
def reduce_scatter_tensor_gives_each_its_part(dist: Any, rank: int, size: int, case: Case) -> None:
    op, fold, dtype = case
    shape = (2 * size, 3)
    output = torch.empty((2, 3), dtype=dtype)
    dist.reduce_scatter_tensor(output, make(rank, shape, dtype), op)
    same(output, everybodys(size, fold, dtype, shape)[2 * rank : 2 * rank + 2])
