"""Measures the errors of `trace.what_if()`, on ten programs on real ranks.

For each program, the script records several runs, and as many runs in which rank 1 computes three
times as long (`ringsim.Slow`). It prints

* the error of the replay without changes, relative to the run that is replayed;
* the error of predictions: of the slow runs from the others, and of the others from the slow runs,
  relative to the median of the runs that are predicted;
* the difference of single runs from their median, which no prediction can beat.

The last line predicts GPipe with `isend` from GPipe with `send`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from paired import where
from prediction_programs import KINDS

import ringsim
from ringsim import Slow, Trace
from ringsim import comm as dist
from ringsim.pipeline import make_schedule

FACTOR: Final = 3.0
SIZE_BYTES: Final = 65536


def ping_pong(rounds: int, size_bytes: int) -> None:
    """Sends a message back and forth; rank 1 computes before it answers."""
    data, peer = torch.zeros(size_bytes // 4), 1 - dist.get_rank()
    for _ in range(rounds):
        if peer:
            dist.send(data, peer)
            dist.recv(data, peer)
        else:
            dist.recv(data, peer)
            ringsim.compute(0.002)
            dist.send(data, peer)


def hand_written(name: str, op: str, rounds: int, size_bytes: int) -> None:
    """Runs a schedule with four microbatches; ``op`` sends the data."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    schedule = make_schedule(name, last + 1, 4)
    sent = []
    for _ in range(rounds):
        for action in schedule.actions[rank]:
            forward = action.kind == "F"
            source, to = (rank - 1, rank + 1) if forward else (rank + 1, rank - 1)
            data = torch.zeros(size_bytes // 4)
            if 0 <= source <= last:
                dist.recv(data, source, tag=forward)
            ringsim.compute(0.002 if forward else 0.004)
            if 0 <= to <= last:
                sent.append(getattr(dist, op)(data, to, tag=forward))
    if op == "isend":
        for handle in sent:
            handle.wait()


def reduce_gradients(rounds: int, size_bytes: int) -> None:
    """Computes, and adds up gradients."""
    for _ in range(rounds):
        ringsim.compute(0.005)
        dist.all_reduce(torch.zeros(size_bytes // 4))


def ddp_steps(rounds: int, size_bytes: int) -> None:
    """Trains with DDP; the forward also sleeps."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(size_bytes // 1024, 256))
    for _ in range(rounds):
        ringsim.compute(0.005)
        model(torch.zeros(8, size_bytes // 1024)).sum().backward()


Program = Callable[[int, int], None]
PROGRAMS: Final[dict[str, tuple[int, Program]]] = {
    "ping-pong": (2, ping_pong),
    "generation ring": (4, KINDS["generation ring"]),
    "1F1B, `rehearse`": (4, KINDS["even pipeline"]),
    "GPipe, `rehearse`, unequal stages": (4, KINDS["uneven pipeline"]),
    "1F1B by hand, `isend`": (4, partial(hand_written, "1f1b", "isend")),
    "halo exchange, `batch_isend_irecv`": (4, KINDS["halo exchange"]),
    "trees of messages": (4, KINDS["scatter and gather trees"]),
    "master and workers": (4, KINDS["master and workers"]),
    "`all_reduce` after computing": (4, reduce_gradients),
    "DDP steps": (2, ddp_steps),
}


def record(name: str, program: Program, ranks: int, rounds: int, **options: Any) -> Trace:
    """Records a program."""
    trace = ringsim.trace(
        program, world_size=ranks, args=(rounds, SIZE_BYTES), limit_s=120, **options
    )
    print(f"  {name}: {trace.makespan_s * 1e3:.0f} ms", flush=True)
    return trace


def find_errors(predicted: list[Trace], real: list[Trace]) -> np.ndarray[Any, Any]:
    """Returns the errors of predictions relative to the median run."""
    median_s = np.median([trace.makespan_s for trace in real])
    return np.array([trace.makespan_s / median_s - 1 for trace in predicted])


def say(errors: np.ndarray[Any, Any]) -> str:
    """Returns the median of errors, and the one that is furthest from 0."""
    return f"{np.median(errors):+.1%} ({errors[np.abs(errors).argmax()]:+.1%})".replace("%", " %")


def main() -> None:
    """Records the programs, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--runs", type=int, default=3, help="runs of each program")
    parser.add_argument("--rounds", type=int, default=20, help="rounds in each run")
    options = parser.parse_args()
    rows = []
    for name, (ranks, program) in PROGRAMS.items():
        fast, slow = [], []
        for _ in range(options.runs):
            fast.append(record(name, program, ranks, options.rounds))
            slow.append(
                record(name, program, ranks, options.rounds, inject=[Slow(1, factor=FACTOR)])
            )
        replays = [t.what_if().makespan_s / t.makespan_s - 1 for t in (*fast, *slow)]
        slower = find_errors([t.what_if(ranks={1: FACTOR}) for t in fast], slow)
        faster = find_errors([t.what_if(ranks={1: 1 / FACTOR}) for t in slow], fast)
        spread = np.abs([*find_errors(fast, fast), *find_errors(slow, slow)]).mean()
        times = [np.median([t.makespan_s for t in runs]) * 1e3 for runs in (fast, slow)]
        rows.append(
            f"| {name} | {ranks} | {times[0]:.0f} ms | {say(np.array(replays))} "
            f"| {times[1]:.0f} ms | {say(slower)} | {say(faster)} | {spread:.1%} |"
        )
    sends, isends = (
        [
            record(op, partial(hand_written, "gpipe", op), 4, options.rounds)
            for _ in range(options.runs)
        ]
        for op in ("send", "isend")
    )
    errors = find_errors([t.what_if(sends="isend") for t in sends], isends)
    print("\n".join(rows))
    print(
        f"isend from send: {say(errors)}, {sends[0].makespan_s:.3f} s, {isends[0].makespan_s:.3f}"
    )
    print(where())


if __name__ == "__main__":
    main()
