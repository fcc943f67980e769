"""Point-to-point messages in processes of its own, as torch's first tutorial of distributed programs starts them."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, size):
    """Blocking messages, then an all-reduce in a group."""
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor=tensor, dst=1)
    else:
        dist.recv(tensor=tensor, src=0)
    group = dist.new_group([0, 1])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    print("Rank ", rank, " has data ", tensor[0])


def init_process(rank, size, fn, backend="gloo"):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = os.environ.get("TUTORIAL_PORT", "29500")
    dist.init_process_group(backend, rank=rank, world_size=size)
    fn(rank, size)


if __name__ == "__main__":
    mp.spawn(init_process, args=(2, run), nprocs=2)
