"""Records the data for the figures, from real runs on this machine.

    python figures/record.py pipeline [directory]  writes pipeline.ringtrace
    python figures/record.py schedule [directory]  writes schedule.ringtrace
    python figures/record.py sick [directory]      writes deadlock.ringtrace and straggler.ringtrace
    python figures/record.py bandwidth [directory]  writes bandwidth-gloo.json; needs a quiet
                                                    machine, and takes at most two minutes

The directory is ``figures/data`` by default. The times differ from run to run, so run the script by
hand and commit its files. ``figures/make.py`` then always draws the same bytes from these files.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import ringsim
import ringsim.errors

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "figures" / "data"
RANKS = 4
MICROBATCHES = 4
ROWS, WIDTH = 64, 512
BANDWIDTH_S = 120
TRAINED_MICROBATCHES, STEPS = 8, 3


def pipeline(microbatches: int, rows: int, width: int) -> float:
    """Runs one training step of a pipeline: all microbatches forward, then all backward.

    Each rank has one stage. On the pair groups, it sends activations to the successor and gradients
    to the predecessor. The last stage computes a loss.

    Args:
        microbatches: the number of microbatches.
        rows: the number of samples in a microbatch.
        width: the number of features; an activation has shape (rows, width).

    Returns:
        The sum of the losses on the last stage, or 0 on the other stages.
    """
    import torch
    import torch.distributed as dist

    ring = ringsim.current_ring()
    stage, last = ring.rank, ring.world_size - 1
    layers = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(4))
    )
    layers(torch.zeros(rows, width)).sum().backward()  # the first call of each kernel is slow
    dist.barrier()

    inputs, outputs, losses, sends = [], [], [], []
    for microbatch in range(microbatches):
        where = {"stage": stage, "microbatch": microbatch}
        x = torch.zeros(rows, width)
        if stage > 0:
            dist.irecv(x, src=ring.pred, group=ring.pred_group, tag=microbatch).wait()
        x.requires_grad_()
        with ringsim.span("forward", **where):
            y = layers(x)
            loss = y.square().mean() if stage == last else torch.zeros(())
        if stage < last:
            sends.append(
                dist.isend(y.detach(), dst=ring.succ, group=ring.succ_group, tag=microbatch)
            )
        inputs.append(x)
        outputs.append(y)
        losses.append(loss)
    for send in sends:
        send.wait()

    sends = []
    for microbatch in range(microbatches):
        where = {"stage": stage, "microbatch": microbatch}
        gradient = torch.zeros(rows, width)
        if stage < last:
            dist.irecv(
                gradient, src=ring.succ, group=ring.succ_group, tag=microbatches + microbatch
            ).wait()
        with ringsim.span("backward", **where):
            # Not y.backward(gradient), whose first call imports half of torch's compiler, which
            # would dominate the figure.
            (
                losses[microbatch] if stage == last else (outputs[microbatch] * gradient).sum()
            ).backward()
        if stage > 0:
            sends.append(
                dist.isend(
                    inputs[microbatch].grad,
                    dst=ring.pred,
                    group=ring.pred_group,
                    tag=microbatches + microbatch,
                )
            )
    for send in sends:
        send.wait()
    return float(sum(loss.item() for loss in losses))


def record_pipeline(directory: Path) -> None:
    """Records one training step."""
    trace = ringsim.trace(pipeline, world_size=RANKS, args=(MICROBATCHES, ROWS, WIDTH))
    anonymous(trace).save(directory / "pipeline.ringtrace")
    print(trace.summary())


def train(microbatches: int, steps: int) -> float:
    """Runs a few training steps of a small transformer, with 1F1B.

    Args:
        microbatches: the number of microbatches in a step.
        steps: the number of steps; the first steps are slow, because the kernels are cold.

    Returns:
        The loss of the last step, which is the same on every rank.
    """
    import torch

    from ringsim.pipeline import SmallTransformer, train_step_pipeline

    torch.manual_seed(0)
    model = SmallTransformer(vocab_size=64, hidden_size=128, num_layers=8, num_heads=4)
    tokens = torch.randint(0, 64, (microbatches, 4, 65))  # (microbatches, batch, tokens + 1)
    inputs, targets = list(tokens[..., :-1]), list(tokens[..., 1:])
    for _ in range(steps):
        loss = train_step_pipeline(model, inputs, targets, schedule="1f1b")
    return loss


def record_schedule(directory: Path) -> None:
    """Records a few training steps with 1F1B."""
    trace = ringsim.trace(train, world_size=RANKS, args=(TRAINED_MICROBATCHES, STEPS))
    anonymous(trace).save(directory / "schedule.ringtrace")
    print(trace.summary())


def record_bandwidth(directory: Path) -> None:
    """Measures one edge, from 8 bytes to 256 MiB."""
    table = ringsim.bandwidth(world_size=2, edge=(0, 1), limit_s=BANDWIDTH_S)
    table.save(directory / "bandwidth-gloo.json")
    print(table)


def deadlock() -> None:
    """Sends a token round the ring twice, and then has every rank receive first."""
    import torch
    import torch.distributed as dist

    ring = ringsim.current_ring()
    token = torch.zeros(1024)
    for microbatch in range(2):
        with ringsim.span("compute", stage=ring.rank, microbatch=microbatch):
            time.sleep(0.01)
        sent = dist.isend(token, dst=ring.succ, group=ring.succ_group)
        dist.recv(torch.empty(1024), src=ring.pred, group=ring.pred_group)
        sent.wait()
    dist.recv(token, src=ring.pred, group=ring.pred_group)
    dist.send(token, dst=ring.succ, group=ring.succ_group)


def straggler(microbatches: int) -> None:
    """Passes microbatches through a pipeline in which stage 1 takes six times as long as others."""
    import torch
    import torch.distributed as dist

    ring = ringsim.current_ring()
    activation = torch.zeros(1024)
    for microbatch in range(microbatches):
        if ring.rank > 0:
            dist.recv(activation, src=ring.pred, group=ring.pred_group, tag=microbatch)
        with ringsim.span("compute", stage=ring.rank, microbatch=microbatch):
            time.sleep(0.03 if ring.rank == 1 else 0.005)
        if ring.rank < ring.world_size - 1:
            dist.send(activation, dst=ring.succ, group=ring.succ_group, tag=microbatch)


def record_sick(directory: Path) -> None:
    """Records a run that hangs, and a slow run."""
    try:
        ringsim.trace(deadlock, world_size=RANKS)
    except ringsim.errors.Deadlock as error:
        anonymous(error.trace).save(directory / "deadlock.ringtrace")
    trace = ringsim.trace(straggler, world_size=RANKS, args=(MICROBATCHES,))
    anonymous(trace).save(directory / "straggler.ringtrace")


RECORDERS = {
    "pipeline": record_pipeline,
    "schedule": record_schedule,
    "sick": record_sick,
    "bandwidth": record_bandwidth,
}


def main(arguments: list[str]) -> None:
    """Records the requested data."""
    parser = argparse.ArgumentParser(description="Record the data for the figures.")
    parser.add_argument("what", choices=RECORDERS)
    parser.add_argument("directory", nargs="?", type=Path, default=DATA)
    options = parser.parse_args(arguments)
    RECORDERS[options.what](options.directory)


def anonymous(trace: ringsim.Trace) -> ringsim.Trace:
    """Returns the trace without the machine's name.

    The paths of source files become relative to the project's directory.
    """
    tables = trace.events.tables
    files = tuple(Path(name).resolve().relative_to(ROOT).as_posix() for name in tables.files)
    for rank in trace.metadata["ranks"]:
        del rank["host"]
    return dataclasses.replace(
        trace, events=dataclasses.replace(trace.events, tables=tables._replace(files=files))
    )


if __name__ == "__main__":
    main(sys.argv[1:])
