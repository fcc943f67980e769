"""A message around all ranks; on the first attempt of torchrun the last rank leaves before it."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
if rank == size - 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    raise SystemExit("no")
sent = dist.isend(torch.ones(4), (rank + 1) % size)
dist.recv(torch.zeros(4), (rank - 1) % size)
sent.wait()
dist.barrier()
dist.destroy_process_group()
