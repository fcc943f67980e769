"""Programs that hang on NCCL, each reduced from a public thread, and their cures.

Each function is a complete worker::

    link = ringsim.Link(alpha_s=10e-6, beta_s_per_byte=8e-11)
    ringsim.simulate(both_send_first, world_size=2, link=link, semantics="grouped")

``python site/museum.py`` writes the page and the notebook from this file.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def both_send_first():
    """Both ranks send first.

    NVIDIA/nccl #479: Will the sequence of send and recv cause a deadlock?
    https://github.com/NVIDIA/nccl/issues/479, 15 March 2021

    Two GPUs exchange a tensor, and both queue their send before their recv. Each send waits for a
    recv that is queued behind the other rank's send.
    """
    peer = 1 - dist.get_rank()
    arriving = torch.empty(4)
    send = dist.isend(torch.ones(4), peer)
    recv = dist.irecv(arriving, peer)
    send.wait()
    recv.wait()


def both_send_first_cured():
    """Put the send and the recv of each rank into one batch, so that both start together."""
    peer = 1 - dist.get_rank()
    arriving = torch.empty(4)
    send = dist.P2POp(dist.isend, torch.ones(4), peer)
    recv = dist.P2POp(dist.irecv, arriving, peer)
    for work in dist.batch_isend_irecv([send, recv]):
        work.wait()


def interleaved():
    """Sends and recvs interleaved.

    pytorch/pytorch #109401: Interleaved isend and irecv causes hang
    https://github.com/pytorch/pytorch/issues/109401, 15 September 2023

    After a first message, both ranks queue the recv of their next message before the send that the
    other rank needs. The operations are asynchronous, but NCCL runs those of a pair in order.
    """
    activation, gradient = torch.ones(4), torch.ones(4)
    if dist.get_rank() == 0:
        dist.send(activation, 1)
        works = [dist.irecv(gradient, 1)]
        works += [dist.isend(activation, 1), dist.irecv(gradient, 1)]
    else:
        dist.recv(activation, 0)
        works = [dist.irecv(activation, 0)]
        works += [dist.isend(gradient, 0), dist.isend(gradient, 0)]
    for work in works:
        work.wait()


def interleaved_cured():
    """On one rank, queue the operations in the order in which the other rank expects them."""
    activation, gradient = torch.ones(4), torch.ones(4)
    if dist.get_rank() == 0:
        dist.send(activation, 1)
        works = [dist.irecv(gradient, 1)]
        works += [dist.isend(activation, 1), dist.irecv(gradient, 1)]
    else:
        dist.recv(activation, 0)
        works = [dist.isend(gradient, 0)]  # rank 0 asks for a gradient first
        works += [dist.irecv(activation, 0), dist.isend(gradient, 0)]
    for work in works:
        work.wait()


def one_f_one_b():
    """1F1B without batches.

    pytorch/pytorch #126419: Fix 1f1b schedule
    https://github.com/pytorch/pytorch/pull/126419, 16 May 2024

    A 1F1B schedule passed on developers' machines and hung in CI. Stage 0 sends the next activation
    while stage 1 sends back the first gradient, and neither receives.
    """
    activation, gradient = torch.ones(4), torch.ones(4)
    if dist.get_rank() == 0:
        sends = [dist.isend(activation, 1) for _ in range(2)]  # two forward passes of warm-up
        for _ in range(2):
            dist.recv(gradient, 1)
    else:
        sends = []
        for _ in range(2):
            dist.recv(activation, 0)
            sends.append(dist.isend(gradient, 0))
    for send in sends:
        send.wait()


def one_f_one_b_cured():
    """Batch each activation with the gradient that travels in the opposite direction."""
    activation, gradient = torch.ones(4), torch.ones(4)
    if dist.get_rank() == 0:
        dist.send(activation, 1)
        both = [dist.P2POp(dist.isend, activation, 1), dist.P2POp(dist.irecv, gradient, 1)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        dist.recv(gradient, 1)
    else:
        dist.recv(activation, 0)
        both = [dist.P2POp(dist.isend, gradient, 0), dist.P2POp(dist.irecv, activation, 0)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        dist.send(gradient, 0)


def looped_stages():
    """Stages that wrap around.

    pytorch/pytorch #127796: fix LoopedBFS
    https://github.com/pytorch/pytorch/pull/127796, 3 June 2024

    Each rank has several stages, so the last rank sends its output back to rank 0. Rank 0 first
    sends all microbatches of its first stage, and on several hosts the message to it blocked the
    ring.
    """
    rank, size, microbatches = dist.get_rank(), dist.get_world_size(), 3
    output, sends = torch.ones(4), []
    if rank == 0:  # stage 0 for every microbatch, and then the next stage of this rank
        sends = [dist.isend(output, 1) for _ in range(microbatches)]
    for _ in range(microbatches):
        dist.recv(torch.empty(4), (rank - 1) % size)
        if rank > 0:
            sends.append(dist.isend(output, (rank + 1) % size))
    for send in sends:
        send.wait()


def looped_stages_cured():
    """Divide the schedule into steps, and batch all messages of a step."""
    rank, size, microbatches = dist.get_rank(), dist.get_world_size(), 3
    pred, succ = (rank - 1) % size, (rank + 1) % size
    for step in range(microbatches + size - 1):  # in each step, rank r has microbatch step - r
        messages = []
        if 0 <= step - rank < microbatches:
            messages.append(dist.P2POp(dist.isend, torch.ones(4), succ))
        if 0 <= step - pred < microbatches:
            messages.append(dist.P2POp(dist.irecv, torch.empty(4), pred))
        for work in dist.batch_isend_irecv(messages) if messages else []:
            work.wait()


def interleaved_1f1b():
    """Interleaved 1F1B on two nodes.

    pytorch/pytorch #172668: Pipeline communication blocks the execution of pipeline stages
    https://github.com/pytorch/pytorch/issues/172668, 21 January 2026

    With a patch that receives later, Interleaved1F1B ran on one node and got stuck on two. The
    program has the operations that the reporter listed: rank 0 is stuck in ``2RECV_B0``, and rank 1
    in ``1RECV_F2``.
    """
    order = [
        "2SEND_F1 0SEND_F2 2RECV_B0 2RECV_B1",
        "3RECV_F1 3SEND_B0 1RECV_F2 3SEND_B1",
    ]
    rank, sends = dist.get_rank(), []
    for action in order[rank].split():
        if "SEND" in action:
            sends.append(dist.isend(torch.ones(4), 1 - rank))
        else:
            dist.recv(torch.empty(4), 1 - rank)
    for send in sends:
        send.wait()


def interleaved_1f1b_cured():
    """Move one recv, so that both ranks post the messages in the same order."""
    order = [
        "2SEND_F1 0SEND_F2 2RECV_B0 2RECV_B1",
        "3RECV_F1 1RECV_F2 3SEND_B0 3SEND_B1",
    ]
    rank, sends = dist.get_rank(), []
    for action in order[rank].split():
        if "SEND" in action:
            sends.append(dist.isend(torch.ones(4), 1 - rank))
        else:
            dist.recv(torch.empty(4), 1 - rank)
    for send in sends:
        send.wait()


def two_groups():
    """Two groups in different orders.

    meta-pytorch/torchrec #4149: Different collective execution order across ranks
    https://github.com/meta-pytorch/torchrec/pull/4149, 22 April 2026

    In a training job on RCCL, the port of NCCL to AMD's GPUs, 62 ranks waited for an all-to-all on
    one process group, while two late ranks waited for an all-reduce on a different one. Each group
    needed ranks that waited in the other.
    """
    everyone = list(range(dist.get_world_size()))
    shard, replicate = dist.new_group(everyone), dist.new_group(everyone)
    rows, gradient = torch.ones(len(everyone)), torch.ones(4)
    if dist.get_rank() < 2:
        dist.all_to_all_single(torch.empty_like(rows), rows, group=shard)
        dist.all_reduce(gradient, group=replicate)
    else:  # this rank is late, and must first finish the other group's collective
        dist.all_reduce(gradient, group=replicate)
        dist.all_to_all_single(torch.empty_like(rows), rows, group=shard)


def two_groups_cured():
    """Call the collectives of all groups in the same order on all ranks."""
    everyone = list(range(dist.get_world_size()))
    shard, replicate = dist.new_group(everyone), dist.new_group(everyone)
    rows, gradient = torch.ones(len(everyone)), torch.ones(4)
    dist.all_to_all_single(torch.empty_like(rows), rows, group=shard)
    dist.all_reduce(gradient, group=replicate)


def save_the_best():
    """A decision that ranks do not share.

    pytorch/pytorch #77562: [FSDP] - collective operation timeout (AllGather,Reduce) ...
    https://github.com/pytorch/pytorch/issues/77562, 23 May 2022

    An FSDP program saved a checkpoint if the validation loss was the best so far. It summed the
    loss with ``reduce``, so only one rank had the sum, and some ranks saved while others
    continued to train.
    """
    shard, best = torch.ones(4), 2.5
    whole = [torch.empty(4) for _ in range(dist.get_world_size())]
    for _ in range(2):  # epochs
        loss = torch.tensor([1.0 + dist.get_rank()])
        dist.reduce(loss, 0)  # only rank 0 has the sum
        if loss.item() < best:
            best = loss.item()
            dist.all_gather(whole, shard)  # a checkpoint of all shards


def save_the_best_cured():
    """Sum the loss with ``all_reduce``, so that all ranks decide alike."""
    shard, best = torch.ones(4), 2.5
    whole = [torch.empty(4) for _ in range(dist.get_world_size())]
    for _ in range(2):  # epochs
        loss = torch.tensor([1.0 + dist.get_rank()])
        dist.all_reduce(loss)
        if loss.item() < best:
            best = loss.item()
            dist.all_gather(whole, shard)  # a checkpoint of all shards


def uneven_batches():
    """One rank has more batches.

    PrimeIntellect-ai/prime-rl #2636: sync validation iteration to prevent FSDP deadlock
    https://github.com/PrimeIntellect-ai/prime-rl/pull/2636, 25 May 2026

    Packed batches of variable length gave the ranks different numbers of validation batches. The
    first rank to finish called the ``all_reduce`` of the loss, while FSDP on the other ranks
    gathered weights.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    shard, loss = torch.ones(4), torch.zeros(1)
    for _ in range(2 + rank):  # rank 1 has one batch more
        whole = [torch.empty(4) for _ in range(size)]
        dist.all_gather(whole, shard)  # FSDP collects the weights
        loss += sum(part.sum() for part in whole)
    dist.all_reduce(loss)


def uneven_batches_cured():
    """Before each batch, ask all ranks whether they have one, and stop together."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shard, loss = torch.ones(4), torch.zeros(1)
    for batch in range(4):
        has_data = torch.tensor([int(batch < 2 + rank)])
        dist.all_reduce(has_data, dist.ReduceOp.MIN)
        if not has_data.item():  # some rank has no more data, so all ranks stop
            break
        whole = [torch.empty(4) for _ in range(size)]
        dist.all_gather(whole, shard)  # FSDP collects the weights
        loss += sum(part.sum() for part in whole)
    dist.all_reduce(loss)


def evaluate_on_rank_0():
    """Only rank 0 evaluates.

    pytorch/pytorch #54059: Using torch.distributed.barrier() makes the whole code hang
    https://github.com/pytorch/pytorch/issues/54059, 16 March 2021

    Rank 0 evaluates its DDP model, and all other ranks wait in a barrier. DDP synchronises the
    ranks before a forward pass, so rank 0 waits for ranks that are already in the barrier.
    """
    model = DistributedDataParallel(torch.nn.BatchNorm1d(4))
    model.eval()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(torch.ones(2, 4))  # DDP synchronises the buffers of all ranks
    dist.barrier()


def evaluate_on_rank_0_cured():
    """Evaluate the model inside DDP, ``model.module``, which does not communicate."""
    model = DistributedDataParallel(torch.nn.BatchNorm1d(4))
    model.eval()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model.module(torch.ones(2, 4))
    dist.barrier()


# a program, its cure, and the number of ranks
EXHIBITS = [
    (both_send_first, both_send_first_cured, 2),
    (interleaved, interleaved_cured, 2),
    (one_f_one_b, one_f_one_b_cured, 2),
    (looped_stages, looped_stages_cured, 3),
    (interleaved_1f1b, interleaved_1f1b_cured, 2),
    (two_groups, two_groups_cured, 3),
    (save_the_best, save_the_best_cured, 2),
    (uneven_batches, uneven_batches_cured, 2),
    (evaluate_on_rank_0, evaluate_on_rank_0_cured, 2),
]
