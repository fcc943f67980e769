"""A 1F1B loop like picotron's.

Shapes are known beforehand, exchanges in the steady state are batched, and waits are synchronous.
"""

import torch
import torch.distributed as dist
from torch import nn

MICROBATCHES, SHAPE = 6, (2, 8)

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
before, after = (rank - 1 if rank else None), (rank + 1 if rank < size - 1 else None)
torch.manual_seed(rank)
model = nn.Linear(8, 8)


def communicate(*operations):
    """Runs several (operation, tensor, peer) together; returns the received tensor."""
    operations = [
        (what, torch.empty(SHAPE) if what is dist.irecv else tensor, peer)
        for what, tensor, peer in operations
        if peer is not None
    ]
    for work in (
        dist.batch_isend_irecv([dist.P2POp(*operation) for operation in operations])
        if operations
        else []
    ):
        work.wait()
    return next((tensor for what, tensor, _ in operations if what is dist.irecv), None)


def forward(received):
    received = torch.randn(SHAPE) if received is None else received.requires_grad_()
    output = model(received)
    return received, output if after is not None else output.square().mean() / MICROBATCHES


def backward(entered, output, gradient):
    torch.autograd.backward(output, grad_tensors=gradient)
    return entered.grad


waiting = []
warmup = min(size - rank - 1, MICROBATCHES)
steady = MICROBATCHES - warmup
for _ in range(warmup):
    waiting.append(forward(communicate((dist.irecv, None, before))))
    communicate((dist.isend, waiting[-1][1].detach(), after))
if steady:
    received = communicate((dist.irecv, None, before))
for index in range(steady):
    waiting.append(forward(received))
    gradient = communicate((dist.isend, waiting[-1][1].detach(), after), (dist.irecv, None, after))
    entered = backward(*waiting.pop(0), gradient)
    last = index == steady - 1
    received = communicate(
        (dist.isend, entered, before), *([] if last else [(dist.irecv, None, before)])
    )
for _ in range(warmup):
    entered = backward(*waiting.pop(0), communicate((dist.irecv, None, after)))
    communicate((dist.isend, entered, before))
for parameter in model.parameters():
    dist.all_reduce(parameter.grad)
dist.destroy_process_group()
