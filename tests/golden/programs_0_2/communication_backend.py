"""Workers of lesson 08 with a backend that is an object.

Copied from version 0.2.0, to run unchanged: do not edit."""

import warnings

import torch

import ringsim
from ringsim import comm as dist
from ringsim.comm.backend import TorchBackend


class Modest(TorchBackend):
    """Torch, which has forgotten some things."""

    name = "modest"

    def supports(self, op):
        return not op.startswith(("broadcast", "reduce_scatter", "all_gather"))


def broadcast_three_times():
    rank = ringsim.current_ring().rank
    results = [torch.randn(1000) for _ in range(3)] if rank else [torch.linspace(0, 1, 1000)] * 3
    dist.broadcast(results[0], 0)
    dist.set_backend(Modest())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for result in results[1:]:
            with ringsim.span("built"):
                dist.broadcast(result, 0)
    return all(torch.equal(results[0], other) for other in results), [str(warning.message) for warning in caught]


def halves():
    size = ringsim.current_ring().world_size
    parts, mine = list(torch.ones(12_000).chunk(size)), torch.empty(12_000 // size)
    by_torch = torch.ones(12_000)
    dist.all_reduce(by_torch)
    dist.set_backend(Modest())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ringsim.span("reduce-scatter"):
            dist.reduce_scatter(mine, parts)
        with ringsim.span("all-gather"):
            dist.all_gather(parts, mine)
    return torch.equal(torch.cat(parts), by_torch)
