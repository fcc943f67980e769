"""Rules of the collectives that move data, against the same in one process."""

from __future__ import annotations

import time
from typing import Any

import torch
from conformance import make, rule, same, strided

ASYNC = {"blocking": False, "async": True}


def done(handle: Any, async_op: bool) -> None:
    """Waits, where there is something to wait for."""
    assert (handle is not None) is async_op
    if async_op:
        handle.wait()


@rule(each=ASYNC)
def broadcast_gives_all_the_roots_tensor(dist: Any, rank: int, size: int, async_op: bool) -> None:
    for root in range(size):
        tensor = make(rank, salt=root)
        done(dist.broadcast(tensor, root, async_op=async_op), async_op)
        same(tensor, make(root, salt=root))


@rule(each=ASYNC)
def all_gather_gives_all_everything(dist: Any, rank: int, size: int, async_op: bool) -> None:
    tensors = [torch.empty(2, 3) for _ in range(size)]
    done(dist.all_gather(tensors, make(rank, (2, 3)), async_op=async_op), async_op)
    for each, tensor in enumerate(tensors):
        same(tensor, make(each, (2, 3)))


@rule(each=ASYNC)
def all_gather_into_tensor_joins(dist: Any, rank: int, size: int, async_op: bool) -> None:
    output = torch.empty(2 * size, 3)
    done(dist.all_gather_into_tensor(output, make(rank, (2, 3)), async_op=async_op), async_op)
    same(output, torch.cat([make(each, (2, 3)) for each in range(size)]))


@rule()
def all_gather_into_tensor_stacks(dist: Any, rank: int, size: int) -> None:
    output = torch.empty(size, 2, 3)
    dist.all_gather_into_tensor(output, make(rank, (2, 3)))
    same(output, torch.stack([make(each, (2, 3)) for each in range(size)]))


@rule()
def all_gather_coalesced_gives_all_every_list(dist: Any, rank: int, size: int) -> None:
    shapes = [(6,), (2, 2)]
    outputs = [[torch.empty(shape) for shape in shapes] for _ in range(size)]
    dist.all_gather_coalesced(outputs, [make(rank, shape, salt=salt) for salt, shape in enumerate(shapes)])
    for each, tensors in enumerate(outputs):
        for salt, (shape, tensor) in enumerate(zip(shapes, tensors, strict=True)):
            same(tensor, make(each, shape, salt=salt))


@rule(each=ASYNC)
def gather_gives_the_root_everything(dist: Any, rank: int, size: int, async_op: bool) -> None:
    for root in range(size):
        tensors = [torch.empty(6) for _ in range(size)] if rank == root else None
        done(dist.gather(make(rank), tensors, root, async_op=async_op), async_op)
        for each, tensor in enumerate(tensors or ()):
            same(tensor, make(each))


@rule(each=ASYNC)
def scatter_gives_each_its_tensor(dist: Any, rank: int, size: int, async_op: bool) -> None:
    for root in range(size):
        tensor = torch.empty(6)
        inputs = [make(root, salt=each) for each in range(size)] if rank == root else None
        done(dist.scatter(tensor, inputs, root, async_op=async_op), async_op)
        same(tensor, make(root, salt=rank))


@rule()
def the_root_is_rank_0_by_default(dist: Any, rank: int, size: int) -> None:
    tensors = [torch.empty(6) for _ in range(size)] if rank == 0 else None
    dist.gather(make(rank), tensors)
    tensor = torch.empty(6)
    dist.scatter(tensor, tensors)
    same(tensor, make(rank))


@rule(each=ASYNC)
def all_to_all_turns_the_lists(dist: Any, rank: int, size: int, async_op: bool) -> None:
    outputs = [torch.empty(6) for _ in range(size)]
    inputs = [make(rank, salt=each) for each in range(size)]
    done(dist.all_to_all(outputs, inputs, async_op=async_op), async_op)
    for each, tensor in enumerate(outputs):
        same(tensor, make(each, salt=rank))


@rule()
def all_to_all_takes_different_sizes(dist: Any, rank: int, size: int) -> None:
    outputs = [torch.empty(each) for each in range(size)]
    dist.all_to_all(outputs, [make(rank, (rank,), salt=each) for each in range(size)])
    for each, tensor in enumerate(outputs):
        same(tensor, make(each, (each,), salt=rank))


@rule(each=ASYNC)
def all_to_all_single_turns_equal_parts(dist: Any, rank: int, size: int, async_op: bool) -> None:
    output = torch.empty(2 * size, 3)
    done(dist.all_to_all_single(output, make(rank, (2 * size, 3)), async_op=async_op), async_op)
    same(output, torch.cat([make(each, (2 * size, 3))[2 * rank : 2 * rank + 2] for each in range(size)]))


@rule()
def all_to_all_single_turns_parts_of_any_size(dist: Any, rank: int, size: int) -> None:
    # Rank r sends (r + each) % 3 rows to rank `each`: some get nothing.
    sizes = [[(sender + receiver) % 3 for receiver in range(size)] for sender in range(size)]
    inputs = [make(sender, (sum(sizes[sender]), 2)) for sender in range(size)]
    received = [sizes[sender][rank] for sender in range(size)]
    output = torch.empty(sum(received), 2)
    dist.all_to_all_single(output, inputs[rank], received, sizes[rank])
    same(output, torch.cat([torch.split(inputs[sender], sizes[sender])[rank] for sender in range(size)]))


@rule()
def nobody_leaves_a_barrier_before_the_last_has_come(dist: Any, rank: int, size: int) -> None:
    time.sleep(0.02 * rank)
    came = time.monotonic()
    dist.barrier()
    times = torch.tensor([came, time.monotonic()], dtype=torch.float64)
    everybodys = [torch.empty(2, dtype=torch.float64) for _ in range(size)]
    dist.all_gather(everybodys, times)
    assert min(each[1].item() for each in everybodys) >= max(each[0].item() for each in everybodys)


@rule()
def monitored_barrier_lets_all_pass(dist: Any, rank: int, size: int) -> None:
    for _ in range(2):
        dist.monitored_barrier()


@rule()
def empty_tensors_are_collected(dist: Any, rank: int, size: int) -> None:
    def empty() -> torch.Tensor:
        return torch.empty(0, 3)

    tensors = [empty() for _ in range(size)]
    dist.broadcast(empty(), 0)
    dist.all_gather(tensors, empty())
    dist.all_gather_into_tensor(empty(), empty())
    dist.all_to_all_single(empty(), empty())
    same(tensors[-1], empty())


@rule()
def broadcast_takes_strided_tensors(dist: Any, rank: int, size: int) -> None:
    tensor = strided(make(rank))
    dist.broadcast(tensor, size - 1)
    same(tensor.clone(), make(size - 1))


@rule()
def all_reduce_takes_strided_tensors(dist: Any, rank: int, size: int) -> None:
    tensor = strided(make(rank))
    dist.all_reduce(tensor)
    same(tensor.clone(), sum(make(each) for each in range(size)))


@rule()
def reduce_takes_strided_tensors(dist: Any, rank: int, size: int) -> None:
    tensor = strided(make(rank))
    dist.reduce(tensor, 0)
    if rank == 0:
        same(tensor.clone(), sum(make(each) for each in range(size)))


@rule()
def all_gather_takes_strided_tensors(dist: Any, rank: int, size: int) -> None:
    tensors = [strided(torch.zeros(6)) for _ in range(size)]
    dist.all_gather(tensors, strided(make(rank)))
    for each, tensor in enumerate(tensors):
        same(tensor.clone(), make(each))


@rule()
def gather_and_scatter_take_strided_tensors(dist: Any, rank: int, size: int) -> None:
    tensors = [strided(torch.zeros(6)) for _ in range(size)] if rank == 0 else None
    dist.gather(strided(make(rank)), tensors)
    tensor = strided(torch.zeros(6))
    dist.scatter(tensor, tensors)
    same(tensor.clone(), make(rank))


@rule()
def tensors_with_gradients_are_carried(dist: Any, rank: int, size: int) -> None:
    weights = make(rank).requires_grad_()
    tensors = [torch.empty(6) for _ in range(size)]
    dist.all_gather(tensors, weights * 2)
    same(tensors[-1], make(size - 1) * 2)
    assert not tensors[-1].requires_grad
