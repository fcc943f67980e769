"""Measures the cost of recording a step of DistributedDataParallel.

The script alternately runs the same step with recording, without it, and without it again.

    python benchmarks/ddp_step.py [--ranks 2] [--rounds 60]

With recording, a step may take at most 1.05 times as long as without it. The model has eight linear
layers of 512 x 512, 32 samples per rank, and buckets of 1 MiB.
"""

from __future__ import annotations

import argparse
import sys
import time

from paired import against_itself, ratio_interval, where

import ringsim

GOAL_RATIO = 1.05


def steps(rounds: int) -> dict[str, list[float]]:
    """Returns the times of alternating steps in ms, which include waits for other ranks."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from ringsim.comm.torch_hooks import install, uninstall
    from ringsim.state import get_state

    recorder = get_state().recorder
    assert recorder is not None
    model = DistributedDataParallel(
        nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]), bucket_cap_mb=1
    )
    batch = torch.randn(32, 512)
    times: dict[str, list[float]] = {"off": [], "on": [], "off again": []}
    uninstall(recorder)
    for turn in range(-5, rounds):
        for mode, found in times.items():
            if mode == "on":
                install(recorder)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(3):
                model.zero_grad()
                model(batch).square().sum().backward()
            if turn >= 0:
                found.append((time.perf_counter() - start) / 3 * 1e3)
            if mode == "on":
                uninstall(recorder)
    install(recorder)
    return times


def main() -> None:
    """Measures the steps, and prints the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    times = ringsim.trace(steps, world_size=options.ranks, args=(options.rounds,)).results[0]
    baseline = [
        time for pair in zip(times["off"], times["off again"], strict=True) for time in pair
    ]
    ratio, low, high = ratio_interval(times["on"], times["off"])
    print(
        f"a step of DistributedDataParallel on {options.ranks} ranks, in {options.rounds} turns "
        f"({where()})"
    )
    print(
        f"  {sorted(times['off'])[options.rounds // 2]:.2f} ms without recording; {ratio:.3f} "
        f"times as long with it ({low:.3f} .. {high:.3f})"
    )
    print(f"  goal: at most {GOAL_RATIO}; {against_itself(baseline)}")


if __name__ == "__main__":
    sys.exit(main())
