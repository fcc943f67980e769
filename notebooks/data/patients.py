"""Five pipelines, each with one fault, and the recording of their traces for lesson 09.

    python notebooks/data/patients.py [directory]      writes patient_1.ringtrace to patient_5.ringtrace

The default directory is that of this file. Every run gives different times, so you run this by hand
and commit the result. This file shows the faults; in the lesson, students find them in the traces.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ringsim

HERE = Path(__file__).resolve().parent
RANKS = 4
MICROBATCHES = 6
ROWS, WIDTH = 8, 128


def compute(name: str, microbatch: int, seconds: float) -> None:
    """Sleeps in place of the layers of a stage."""
    with ringsim.span(name, stage=ringsim.current_ring().rank, microbatch=microbatch):
        time.sleep(seconds)


def patient_1() -> None:
    """Runs only forwards."""
    ring = ringsim.current_ring()
    activation = torch.zeros(ROWS, WIDTH)
    for microbatch in range(MICROBATCHES):
        if ring.rank > 0:
            dist.recv(activation, ring.pred, group=ring.pred_group, tag=microbatch)
        compute("forward", microbatch, 0.004 if ring.rank != 2 else 0.02)
        if ring.rank < RANKS - 1:
            dist.send(activation, ring.succ, group=ring.succ_group, tag=microbatch)


def patient_2() -> None:
    """Runs all forwards, then all backwards."""
    ring = ringsim.current_ring()
    tensor = torch.zeros(ROWS, WIDTH)
    for microbatch in range(MICROBATCHES):
        if ring.rank > 0:
            dist.recv(tensor, ring.pred, group=ring.pred_group, tag=microbatch)
        compute("forward", microbatch, 0.004)
        if ring.rank < RANKS - 1:
            dist.send(tensor, ring.succ, group=ring.succ_group, tag=microbatch)
    for microbatch in reversed(range(MICROBATCHES)):
        if ring.rank < RANKS - 1:
            dist.recv(tensor, ring.succ, group=ring.succ_group, tag=100 + microbatch)
        compute("backward", microbatch, 0.008)
        if ring.rank > 0:
            tag = 100 + microbatch if ring.rank != 3 or microbatch != 2 else 102 + microbatch
            dist.send(tensor, ring.pred, group=ring.pred_group, tag=tag)


def patient_3() -> None:
    """Runs only forwards; the last microbatch has half as many rows."""
    ring = ringsim.current_ring()
    for microbatch in range(MICROBATCHES):
        rows = ROWS // 2 if microbatch == MICROBATCHES - 1 and ring.rank < 2 else ROWS
        activation = torch.zeros(rows, WIDTH)
        if ring.rank > 0:
            dist.recv(activation, ring.pred, group=ring.pred_group, tag=microbatch)
        compute("forward", microbatch, 0.004)
        if ring.rank < RANKS - 1:
            dist.send(activation, ring.succ, group=ring.succ_group, tag=microbatch)


def patient_4() -> None:
    """Alternates forwards and backwards, and waits for each send."""
    ring = ringsim.current_ring()
    tensor = torch.zeros(ROWS, WIDTH)
    warm_up = min(RANKS - 1 - ring.rank, MICROBATCHES)

    def forward(microbatch: int) -> None:
        if ring.rank > 0:
            dist.recv(tensor, ring.pred, group=ring.pred_group, tag=microbatch)
        compute("forward", microbatch, 0.004)
        if ring.rank < RANKS - 1:
            dist.send(tensor, ring.succ, group=ring.succ_group, tag=microbatch)

    def backward(microbatch: int) -> None:
        if ring.rank < RANKS - 1:
            dist.recv(tensor, ring.succ, group=ring.succ_group, tag=100 + microbatch)
        compute("backward", microbatch, 0.008)
        if ring.rank > 0:
            dist.send(tensor, ring.pred, group=ring.pred_group, tag=100 + microbatch)

    for microbatch in range(warm_up):
        forward(microbatch)
    for microbatch in range(warm_up, MICROBATCHES):
        forward(microbatch)
        backward(microbatch - warm_up)
    for microbatch in range(MICROBATCHES - warm_up, MICROBATCHES):
        backward(microbatch)


def patient_5() -> None:
    """Runs only forwards, with batches that stage 0 reads."""
    ring = ringsim.current_ring()
    activation = torch.zeros(ROWS, WIDTH)
    for microbatch in range(MICROBATCHES - (ring.rank == 0)):
        if ring.rank > 0:
            dist.recv(activation, ring.pred, group=ring.pred_group, tag=microbatch)
        compute("forward", microbatch, 0.004)
        if ring.rank < RANKS - 1:
            dist.send(activation, ring.succ, group=ring.succ_group, tag=microbatch)


PATIENTS = (patient_1, patient_2, patient_3, patient_4, patient_5)


def record(directory: Path) -> None:
    """Records all five runs, whether they fail or not."""
    for patient in PATIENTS:
        try:
            trace = ringsim.trace(patient, world_size=RANKS)
        except ringsim.errors.RingError as error:
            trace = error.trace
        anonymous(trace).save(directory / f"{patient.__name__}.ringtrace")
        print(f"{patient.__name__}: {trace.explain()}")


def anonymous(trace: ringsim.Trace) -> ringsim.Trace:
    """Returns the trace without the machine's name, and with only the name of this file."""
    directory = f"{HERE}{os.sep}"
    tables = trace.events.tables
    tables = tables._replace(
        files=tuple(name.replace(directory, "") for name in tables.files),
        labels=tuple(label.replace(directory, "") for label in tables.labels),
    )
    metadata = json.loads(json.dumps(trace.metadata).replace(directory, ""))
    for rank in metadata["ranks"]:
        del rank["host"]
    return dataclasses.replace(trace, events=dataclasses.replace(trace.events, tables=tables), metadata=metadata)


if __name__ == "__main__":
    record(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
