"""Draws the picture at the beginning of each lesson: `python notebooks/data/pictures.py`.

The pictures come from recorded traces (in `figures/data` and next to this file) and from simulated runs, with the same bytes each time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # files, no window

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from PIL import Image  # a dependency of matplotlib
from torch import nn
from torch.distributed.fsdp import fully_shard

import ringsim
from ringsim import comm as dist
from ringsim import explore
from ringsim.pipeline import Costs, make_schedule, plot_schedule
from ringsim.plot.charts import plot_inner_iterations
from ringsim.plot.style import save_figure
from ringsim.topologies import Hosts
from ringsim.traces import bandwidths

DPI, COLOURS = 72, 64
HERE = Path(__file__).resolve().parent
FIGURES = HERE.parent.parent / "figures" / "data"


def recorded(name: str) -> ringsim.Trace:
    return ringsim.load(FIGURES / f"{name}.ringtrace")


def step_of(name: str) -> ringsim.Trace:
    return ringsim.simulate_schedule(name, Costs(latency=0.1), num_ranks=4, num_microbatches=8).trace()


def average() -> ringsim.Trace:
    """Simulates a step of data parallelism: all ranks compute, and then average."""

    def step() -> None:
        for _ in range(3):
            with ringsim.span("backward"):
                ringsim.compute(0.002)
            dist.all_reduce(torch.zeros(250_000))

    return ringsim.simulate(step, world_size=4, link=ringsim.Link(alpha_s=10e-6, beta_s_per_byte=1e-9))


def attend() -> ringsim.Trace:
    """Simulates attention with a causal mask on four ranks, to blocks that travel around the ring."""

    def work() -> None:
        ring = ringsim.current_ring()
        block, arriving = torch.zeros(2, 250_000)
        for step in range(4):
            if step <= ring.rank:
                with ringsim.span(f"block {ring.rank - step}"):
                    ringsim.compute(0.01 if step else 0.005)
            if step < 3:
                sent = dist.isend(block, ring.succ, group=ring.succ_group)
                dist.recv(arriving, ring.pred, group=ring.pred_group)
                assert sent is not None
                sent.wait()

    return ringsim.simulate(work, world_size=4, link=ringsim.Link(alpha_s=10e-6, beta_s_per_byte=1e-9))


def reduce_and_pass_on() -> ringsim.Trace:
    """Simulates two stages on two hosts, each with two ranks that share the work of every layer."""

    def work() -> None:
        rank = ringsim.current_ring().rank
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        x = torch.zeros(250_000)
        for microbatch in range(3):
            if rank >= 2:
                dist.recv(x, rank - 2)
            with ringsim.span("forward", microbatch=microbatch):
                for _ in range(4):
                    ringsim.compute(0.002)
                    dist.all_reduce(x, group=groups[rank // 2])
            if rank < 2:
                dist.send(x, rank + 2)

    hosts = ringsim.topologies.Hosts(2, inner=ringsim.Link(2e-6, 5e-10), outer=ringsim.Link(10e-6, 1e-9))
    return ringsim.simulate(work, world_size=4, topology=hosts)


def share_layers() -> ringsim.Trace:
    """Simulates a pipeline of four stages, each on a host whose two ranks share the layers of the stage."""

    def step() -> None:
        stage = dist.get_rank() // 2
        groups = [dist.new_group([2 * each, 2 * each + 1]) for each in range(4)]
        sent = []
        for action in make_schedule("1f1b", 4, 2).actions[stage]:
            name, way, seconds = ("forward", 2, 0.004) if action.kind == "F" else ("backward", -2, 0.008)
            before, after = dist.get_rank() - way, dist.get_rank() + way
            if 0 <= before < 8:
                dist.recv(torch.zeros(250_000), before)
            with ringsim.span(name, stage=stage, microbatch=action.microbatch):
                ringsim.compute(seconds)
                dist.all_reduce(torch.zeros(10_000_000), group=groups[stage])
            if 0 <= after < 8:
                sent.append(dist.isend(torch.zeros(250_000), after))
        for work in sent:
            assert work is not None
            work.wait()

    hosts = Hosts(2, ringsim.Link(10e-6, 1e-10), ringsim.Link(20e-6, 1e-9))
    return ringsim.simulate(step, world_size=8, topology=hosts)


def shard() -> ringsim.Trace:
    """Simulates a step with FSDP2, and counts its bytes."""

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ringsim.compute(0.001)
            y = super().forward(x)
            y.register_hook(lambda _: ringsim.compute(0.002))
            return y

    def step() -> None:
        model = nn.Sequential(*(Layer(256, 256, bias=False) for _ in range(8)))
        for part in (*model, model):
            fully_shard(part)
        optimizer = torch.optim.SGD(model.parameters())
        with ringsim.memory(model, optimizer):
            model(torch.ones(8, 256)).square().mean().backward()
            optimizer.step()

    return ringsim.simulate(step, world_size=2, link=ringsim.Link(alpha_s=10e-6, beta_s_per_byte=1e-9))


PICTURES: dict[str, Callable[[], Axes]] = {
    "00_four_processes": lambda: recorded("pipeline").plot_timeline(),
    "01_ring": lambda: explore.ring().frame(what="shift", ranks=8).traces[0].plot_ring(),
    "02_send_recv_deadlock": lambda: recorded("deadlock").explain().plot(),
    "03_bandwidth": lambda: bandwidths.load(HERE / "links.json").plot(),
    "04_stages": lambda: recorded("pipeline").plot_ring(),
    "05_gradients": lambda: recorded("schedule").plot_timeline(),
    "06_schedules": lambda: plot_schedule(make_schedule("1f1b", num_ranks=4, num_microbatches=8)),
    "07_generation_ring": lambda: plot_inner_iterations(4),
    "08_communication_layer": lambda: explore.ring().frame(what="all-reduce").traces[0].plot_timeline(),
    "09_diagnose": lambda: recorded("straggler").plot_timeline(),
    "10_prediction": lambda: ringsim.compare(step_of("gpipe"), step_of("1f1b")).plot(),
    "11_slow_link": lambda: ringsim.load(HERE / "hosts_dealt.ringtrace").plot_ring(),
    "12_data_parallel": lambda: average().plot_timeline(),
    "13_ring_attention": lambda: attend().plot_timeline(),
    "14_sharding": lambda: shard().plot_memory(),
    "15_tensors_in_parallel": lambda: reduce_and_pass_on().plot_timeline(),
    "16_which_parallelism": lambda: share_layers().plot_timeline(),
}


def main() -> int:
    """Draws all pictures."""
    for name, draw in PICTURES.items():
        ax = draw()
        figure = ax.get_figure(root=True)
        assert figure is not None
        save_figure(figure, path := HERE / f"{name}.png", dpi=DPI)
        plt.close(figure)
        Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)  # every installation has them, so they should be small
        print(name, path.stat().st_size, ax.get_title(loc="left"), sep="\t")
    return 0


if __name__ == "__main__":
    sys.exit(main())
