"""A program that passes a message around all ranks.

Under torchrun the last rank first fails once, and the others wait until their agents restart them.
If others also failed, an agent might restart the last rank for them, and not count this restart.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
if "TORCHELASTIC_RESTART_COUNT" in os.environ and not Path("failed").exists():
    Path("failed").touch()
    if rank == size - 1:
        raise SystemExit("no")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("restarted"))
    signal.pause()
sent = dist.isend(torch.ones(4), (rank + 1) % size)
dist.recv(torch.zeros(4), (rank - 1) % size)
sent.wait()
dist.barrier()
dist.destroy_process_group()
