"""Rules of dtypes: what travels arrives to the last bit."""

from __future__ import annotations

from typing import Any

import torch
from conformance import make, rule, same

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.complex64, torch.complex128, torch.bool),
    )
}


@rule(least=2, each=DTYPES)
def messages_carry(dist: Any, rank: int, size: int, dtype: torch.dtype) -> None:
    received = torch.empty(6, dtype=dtype)
    receiving = dist.irecv(received, (rank - 1) % size)
    dist.isend(make(rank, dtype=dtype), (rank + 1) % size).wait()
    receiving.wait()
    same(received, make((rank - 1) % size, dtype=dtype))


@rule(each=DTYPES)
def broadcast_carries(dist: Any, rank: int, size: int, dtype: torch.dtype) -> None:
    tensor = make(rank, dtype=dtype)
    dist.broadcast(tensor, size - 1)
    same(tensor, make(size - 1, dtype=dtype))


@rule(each=DTYPES)
def all_gather_carries(dist: Any, rank: int, size: int, dtype: torch.dtype) -> None:
    tensors = [torch.empty(6, dtype=dtype) for _ in range(size)]
    dist.all_gather(tensors, make(rank, dtype=dtype))
    for each, tensor in enumerate(tensors):
        same(tensor, make(each, dtype=dtype))


@rule(each=DTYPES)
def all_gather_into_tensor_carries(dist: Any, rank: int, size: int, dtype: torch.dtype) -> None:
    output = torch.empty(6 * size, dtype=dtype)
    dist.all_gather_into_tensor(output, make(rank, dtype=dtype))
    same(output, torch.cat([make(each, dtype=dtype) for each in range(size)]))


@rule(each=DTYPES)
def gather_carries(dist: Any, rank: int, size: int, dtype: torch.dtype) -> None:
    tensors = [torch.empty(6, dtype=dtype) for _ in range(size)] if rank == 0 else None
    dist.gather(make(rank, dtype=dtype), tensors, 0)
    for each, tensor in enumerate(tensors or ()):
        same(tensor, make(each, dtype=dtype))


@rule(each=DTYPES)
def scatter_carries(dist: Any, rank: int, size: int, dtype: torch.dtype) -> None:
    tensor = torch.empty(6, dtype=dtype)
    dist.scatter(tensor, [make(each, dtype=dtype) for each in range(size)] if rank == 0 else None, 0)
    same(tensor, make(rank, dtype=dtype))


@rule(each=DTYPES)
def all_to_all_single_carries(dist: Any, rank: int, size: int, dtype: torch.dtype) -> None:
    output = torch.empty(2 * size, dtype=dtype)
    dist.all_to_all_single(output, make(rank, (2 * size,), dtype))
    same(output, torch.cat([make(each, (2 * size,), dtype)[2 * rank : 2 * rank + 2] for each in range(size)]))
