"""Programs whose simulated traces are kept in traces/. The line numbers of this file are part of the data: do not edit it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import networkx as nx
import torch

import ringsim
from ringsim import comm as dist
from ringsim.pipeline import SmallTransformer, generate, train_step_pipeline
from ringsim.topologies import FullBisection, GraphLinks, Hosts, OneMachine, RingLinks

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-9)
FAST = ringsim.Link(alpha_s=1e-6, beta_s_per_byte=1e-10)


class Program(NamedTuple):
    worker: Callable[[], Any]
    world_size: int
    options: dict[str, Any]


PROGRAMS: dict[str, Program] = {}


def program(world_size: int, **options: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Adds a worker, with the arguments of ringsim.simulate."""

    def add(worker: Callable[[], Any]) -> Callable[[], Any]:
        PROGRAMS[worker.__name__] = Program(worker, world_size, {"link": LINK, **options} if "topology" not in options else options)
        return worker

    return add


def pass_tokens(rounds: int, elements: int = 1000) -> float:
    """Everyone sends to the successor and receives from the predecessor, on the pair groups."""
    ring = ringsim.current_ring()
    token = torch.full((elements,), float(ring.rank))
    for number in range(rounds):
        arriving = torch.empty_like(token)
        receiving = dist.irecv(arriving, ring.pred, group=ring.pred_group)
        sending = dist.isend(token, ring.succ, group=ring.succ_group)
        with ringsim.span("compute", stage=ring.rank, microbatch=number):
            ringsim.compute(1e-4 * (1 + ring.rank))
        sending.wait()
        receiving.wait()
        token = arriving
    return token[0].item()


@program(4)
def ring_of_tokens() -> float:
    return pass_tokens(3)


@program(4, semantics="buffered")
def ring_buffered() -> float:
    return pass_tokens(3)


@program(4, semantics="buffered(2000)")
def ring_buffered_up_to_a_limit() -> list[float]:
    return [pass_tokens(1, 500), pass_tokens(1, 501)]


@program(4, semantics="grouped")
def ring_grouped() -> float:
    return pass_tokens(2)


@program(8, topology=Hosts(4, inner=FAST, outer=LINK))
def ring_over_hosts() -> float:
    return pass_tokens(2)


def all_to_one() -> float:
    """All send to rank 0 at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(torch.full((1000 * rank,), float(rank)), 0, tag=rank)
        return 0.0
    parts = [torch.empty(1000 * src) for src in range(1, size)]
    for handle in [dist.irecv(part, src, tag=src) for src, part in enumerate(parts, 1)]:
        handle.wait()
    return sum(part[0].item() for part in parts)


@program(5, topology=FullBisection(LINK))
def incast_on_full_bisection() -> float:
    return all_to_one()


@program(6, topology=RingLinks(LINK))
def incast_on_a_ring() -> float:
    return all_to_one()


@program(5, topology=OneMachine(LINK, cores=2))
def incast_on_one_machine() -> float:
    return all_to_one()


def make_star() -> GraphLinks:
    star = nx.Graph()
    star.add_edges_from([(rank, "switch") for rank in range(4)], link=FAST)
    return GraphLinks(star)


@program(4, topology=make_star())
def incast_on_a_graph() -> float:
    return all_to_one()


@program(3, link={(src, dst): ringsim.Link(1e-5 * (1 + src), 1e-9 * (1 + dst)) for src in range(3) for dst in range(3) if src != dst})
def links_by_pair() -> float:
    total = pass_tokens(1)
    dist.barrier()
    return total


@program(2)
def messages_by_tag_and_shape() -> list[Any]:
    """Tags out of order, dtypes, scalars, empty tensors, a recv from any source."""
    if dist.get_rank() == 0:
        first = dist.isend(torch.arange(6, dtype=torch.int64).reshape(2, 3), 1, tag=1)
        second = dist.isend(torch.tensor(7.0, dtype=torch.float64), 1, tag=2)
        for handle in (first, second):
            handle.wait()
        dist.send(torch.empty(0), 1)
        ringsim.mark("all sent")
        dist.send(torch.ones(4, dtype=torch.bool), 1)
        return []
    scalar, matrix = torch.empty((), dtype=torch.float64), torch.empty((2, 3), dtype=torch.int64)
    handle = dist.irecv(scalar, 0, tag=2)
    dist.recv(matrix, 0, tag=1)
    handle.wait()
    dist.recv(torch.empty(0), 0)
    flags = torch.zeros(4, dtype=torch.bool)
    source = dist.recv(flags)
    return [scalar.item(), matrix.tolist(), flags.tolist(), source]


@program(3)
def batches() -> list[float]:
    """Both neighbours at once, three times, with one tag."""
    ring = ringsim.current_ring()
    came = []
    for number in range(3):
        mine = torch.full((256,), 10.0 * ring.rank + number)
        left, right = torch.empty(256), torch.empty(256)
        operations = [
            dist.P2POp(dist.isend, mine, ring.succ),
            dist.P2POp(dist.isend, mine, ring.pred),
            dist.P2POp(dist.irecv, left, ring.pred),
            dist.P2POp(dist.irecv, right, ring.succ),
        ]
        for handle in dist.batch_isend_irecv(operations):
            handle.wait()
        came += [left[0].item(), right[0].item()]
    return came


@program(4)
def reductions() -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    ringsim.compute(1e-4 * rank)
    summed, largest, at_two = torch.arange(8) + rank, torch.tensor([rank]), torch.tensor([rank, 1])
    dist.all_reduce(summed)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.reduce(at_two, 2)
    part = torch.empty(2, dtype=torch.int64)
    dist.reduce_scatter(part, [torch.full((2,), rank + other) for other in range(size)])
    flat = torch.empty(2, dtype=torch.int64)
    dist.reduce_scatter_tensor(flat, torch.arange(2 * size) * rank)
    several = [torch.tensor([rank]), torch.tensor([rank, rank])]
    dist.all_reduce_coalesced(several)
    return [summed.tolist(), largest.item(), at_two.tolist() if rank == 2 else [], part.tolist(), flat.tolist(), several[1].tolist()]


@program(4)
def gatherings() -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.tensor([rank, 10 * rank])
    everyone = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(everyone, mine)
    flat = torch.empty(2 * size, dtype=torch.int64)
    dist.all_gather_into_tensor(flat, mine)
    at_one = [torch.empty_like(mine) for _ in range(size)] if rank == 1 else None
    dist.gather(mine, at_one, 1)
    handed = torch.empty(2, dtype=torch.int64)
    dist.scatter(handed, [torch.tensor([other, -other]) for other in range(size)] if rank == 3 else None, 3)
    return [torch.stack(everyone).tolist(), flat.tolist(), handed.tolist()]


@program(3)
def exchanges() -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    got = [torch.empty(1) for _ in range(size)]
    dist.all_to_all(got, [torch.tensor([10.0 * rank + other]) for other in range(size)])
    single = torch.empty(size)
    dist.all_to_all_single(single, torch.arange(size) + 10.0 * rank)
    uneven = torch.empty(size * (rank + 1))
    dist.all_to_all_single(uneven, torch.arange(6.0), [rank + 1] * size, [1, 2, 3])
    token = torch.tensor([float(rank)])
    dist.broadcast(token, 2)
    dist.barrier()
    dist.monitored_barrier()
    return [torch.cat(got).tolist(), single.tolist(), uneven.tolist(), token.item()]


@program(4)
def collectives_in_groups() -> list[int]:
    """Two halves, each with a reduction under way while it computes; then the world."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = torch.tensor([rank])
    handle = dist.all_reduce(mine, group=halves[rank // 2], async_op=True)
    ringsim.compute(5e-5 * (1 + rank))
    handle.wait()
    total = torch.tensor([rank])
    dist.all_reduce(total)
    return [mine.item(), total.item()]


@program(3)
def objects() -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank})
    spoken = [["from", 1] if rank == 1 else None]
    dist.broadcast_object_list(spoken, 1)
    handed: list[Any] = [None]
    dist.scatter_object_list(handed, [f"for {other}" for other in range(size)] if rank == 0 else None, 0)
    if rank == 0:
        dist.send_object_list(["a", 2], 1)
    elif rank == 1:
        dist.recv_object_list(received := [None, None], 0)
        handed += received
    return [everyone, spoken, handed]


@program(2)
def spans_and_marks() -> None:
    for step in range(2):
        with ringsim.span("step", microbatch=step):
            with ringsim.span("forward", stage=dist.get_rank(), microbatch=step):
                ringsim.compute(2e-4)
            ringsim.mark("half")
            with ringsim.span("backward", stage=dist.get_rank(), microbatch=step):
                ringsim.compute(4e-4)
            dist.barrier()


@program(4, compute=ringsim.FlopCosts(1e9))
def generation_ring() -> list[list[int]]:
    torch.manual_seed(3)
    model = SmallTransformer(29, hidden_size=8, num_layers=4, num_heads=2, max_length=16).double()
    return generate(model, [[1, 2, 3], [7], [8, 9], [4]], 3)


def train(schedule: str, num_microbatches: int = 4) -> float:
    torch.manual_seed(0)
    model = SmallTransformer(13, hidden_size=8, num_layers=8, num_heads=2, max_length=16).double()
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(13, (2, 6), generator=generator) for _ in range(num_microbatches)]
    loss = train_step_pipeline(model, [each[:, :-1] for each in tokens], [each[:, 1:] for each in tokens], schedule=schedule)
    return round(loss, 6)


@program(4, compute=ringsim.FlopCosts(1e9))
def training_1f1b() -> float:
    return train("1f1b")


@program(2, compute=ringsim.FlopCosts(1e9), semantics="buffered")
def training_interleaved() -> float:
    return train("interleaved_1f1b")


@program(2, compute=ringsim.FlopCosts(1e9))
def training_zb_v() -> float:
    return train("zb_v")


@program(4, inject=[ringsim.Slow(1, 3), ringsim.Degrade(2, 3, 5), ringsim.Jitter(0.2, seed=4)])
def ring_with_faults() -> float:
    return pass_tokens(3)


@program(3, inject=[ringsim.Fail(1, 3)])
def rank_that_fails() -> float:
    return pass_tokens(3)


@program(3)
def all_send_first() -> None:
    ring = ringsim.current_ring()
    dist.send(torch.ones(4), ring.succ, group=ring.succ_group)
    dist.recv(torch.empty(4), ring.pred, group=ring.pred_group)


@program(2)
def wrong_dtype() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
    else:
        dist.recv(torch.empty(4, dtype=torch.int32), 0)


@program(3)
def one_leaves_before_the_barrier() -> None:
    if dist.get_rank() != 2:
        dist.barrier()


@program(2)
def left_behind() -> None:
    """Ends well, and leaves a message that nobody waited for."""
    if dist.get_rank() == 0:
        dist.isend(torch.ones(3), 1, tag=5)
    else:
        dist.irecv(torch.empty(3), 0, tag=5)
    dist.barrier()
