"""Workers of docs, through ringsim.comm.

Copied from version 0.2.0, to run unchanged: do not edit."""

import torch

import ringsim
from ringsim import comm as dist
from ringsim.pipeline import SmallTransformer, gradient_report, train_step_pipeline

# -- docs/simulation.md


def pass_round():
    ring = ringsim.current_ring()
    token = torch.zeros(256)
    if ring.rank > 0:
        dist.recv(token, ring.pred, group=ring.pred_group)
    ringsim.compute(0.001)                                  # a millisecond of work: real ranks sleep, the virtual clock advances
    dist.send(token + 1, ring.succ, group=ring.succ_group)
    if ring.rank == 0:
        dist.recv(token, ring.pred, group=ring.pred_group)
    return token[0].item()


# -- docs/using.md


def pass_on():
    ring = ringsim.current_ring()
    token = torch.full((1024,), float(ring.rank))
    arriving = torch.empty_like(token)
    recv = dist.irecv(arriving, ring.pred, group=ring.pred_group)
    dist.isend(token, ring.succ, group=ring.succ_group).wait()
    recv.wait()
    return arriving[0].item()


# -- docs/pipeline.md


def worker():                                            # on every rank
    torch.manual_seed(0)                                 # the same model everywhere
    model = SmallTransformer(vocab_size=50, num_layers=5)
    tokens = [torch.randint(50, (2, 9)) for _ in range(4)]
    inputs, targets = [t[:, :-1] for t in tokens], [t[:, 1:] for t in tokens]
    loss = train_step_pipeline(model, inputs, targets, schedule="1f1b")
    return loss, str(gradient_report(model, inputs, targets))
