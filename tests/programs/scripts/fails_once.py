"""A message around all ranks; under torchrun the last rank leaves before it, once: agents that restart others' ranks do not count that."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
if rank == size - 1 and "TORCHELASTIC_RESTART_COUNT" in os.environ and not Path("failed").exists():
    Path("failed").touch()
    raise SystemExit("no")
sent = dist.isend(torch.ones(4), (rank + 1) % size)
dist.recv(torch.zeros(4), (rank - 1) % size)
sent.wait()
dist.barrier()
dist.destroy_process_group()
