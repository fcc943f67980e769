"""How the roll-call of ``initialize_distributed`` grows with the ranks: SIMULATED, for worlds that no machine here can start.

    python benchmarks/store_scale.py [--ranks 1000 10000]

On ringsim's virtual clock, rank 0 stands for the store: it serves one operation after the other, each for ``--serve-us`` (44,000 small
ones a second were measured), and a question and its answer take ``--trip-us``. Every other rank does the operations of
``comm/bootstrap.py``. Those of Gloo, which are far more, and what rank 0 itself does are not in it.
"""

from __future__ import annotations

import argparse
import time

import torch

import ringsim
from ringsim import comm as dist

# Operations of a rank: until it has counted itself in, the wait for the verdict, the same once its groups are built, and leaving.
OPERATIONS = 5 + 2 + 2 + 2 + 1


def worker(serve_s: float) -> None:
    """A rank; rank 0 is the store, which finds a question of every rank whenever it has served all."""
    token, others = torch.zeros(1), range(1, dist.get_world_size())
    for _ in range(OPERATIONS):
        for asker in others if dist.get_rank() == 0 else ():
            dist.recv(token, asker)
            ringsim.compute(serve_s)
            dist.send(token, asker)
        if dist.get_rank():
            dist.send(token, 0)
            dist.recv(token, 0)


def main() -> None:
    """Prints a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--serve-us", type=float, default=23.0)
    parser.add_argument("--trip-us", type=float, default=57.0)
    options = parser.parse_args()
    link = ringsim.Link(alpha_s=(options.trip_us - options.serve_us) / 2e6, beta_s_per_byte=0)
    for ranks in options.ranks:
        begin_s = time.perf_counter()
        trace = ringsim.simulate(
            worker, world_size=ranks, args=(1e-6 * options.serve_us,), link=link, semantics="buffered(65536)", record=False
        )
        print(
            f"simulated, {ranks:,} ranks: roll-call {trace.makespan_s:.2f} s, {OPERATIONS} operations a rank, "
            f"{OPERATIONS * (ranks - 1):,} at the store (simulating took {time.perf_counter() - begin_s:.0f} s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
