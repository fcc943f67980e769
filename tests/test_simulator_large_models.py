"""Models that fit on no machine: pipelines of simulated ranks, on tensors without data, against the simulation of their schedule alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import large_layers

import ringsim
from ringsim.errors import ArgumentError
from ringsim.link import Link
from ringsim.pipeline import SmallTransformer, build_stages, flop_costs, train_step_pipeline
from ringsim.topologies import FullBisection, Hosts

LINK = Link(alpha_s=10e-6, beta_s_per_byte=1 / 50e9)
SPEED = ringsim.FlopCosts(flops_per_s=4e14)
TOKENS = 4096


def step(layers: int, microbatches: int, schedule: str) -> float:
    """A worker: one step, on tensors without data."""
    ids = [torch.zeros(1, TOKENS, dtype=torch.int64, device="meta") for _ in range(microbatches)]
    return train_step_pipeline(large_layers(layers), ids, ids, schedule=schedule)


def alone(layers: int, num_ranks: int, microbatches: int, schedule: str) -> Any:
    """The same step by its schedule, where no rank runs."""
    each = layers // num_ranks
    stages = build_stages(large_layers(layers), [range(each * stage, each * (stage + 1)) for stage in range(num_ranks)])
    costs = flop_costs(stages, SPEED, sequences=1, tokens=TOKENS)
    size = 2 * TOKENS * 8192  # bytes of an activation in bfloat16
    return ringsim.simulate_schedule(schedule, costs, num_ranks=num_ranks, num_microbatches=microbatches, link=LINK, size_bytes=size)


def test_layers_are_run_once_for_each_shape_and_replayed() -> None:
    """A layer with a hook is run every time: the trace is the same, and every parameter has its gradient."""
    pytest.importorskip("transformers")

    def worker(hooked: bool) -> tuple[int, bool]:
        calls: list[int] = []
        model = large_layers(6)
        for layer in model.model.layers if hooked else ():
            layer.register_forward_hook(lambda *_: calls.append(1))
        ids = [torch.zeros(1, length, dtype=torch.int64, device="meta") for length in (64, 64, 96)]
        loss = train_step_pipeline(model, ids, ids, schedule="zb_h1", checkpoint=True)
        own = model.model.layers[:3] if ringsim.current_ring().rank == 0 else model.model.layers[3:]
        assert loss != loss  # NaN: nobody knows it
        return len(calls), all(parameter.grad is not None and parameter.grad.is_meta for layer in own for parameter in layer.parameters())

    replayed, run = (ringsim.simulate(worker, world_size=2, args=(hooked,), link=LINK, compute=SPEED) for hooked in (False, True))
    assert replayed.to_pandas().equals(run.to_pandas())
    assert [calls for calls, _ in replayed.results] == [0, 0]
    assert min(calls for calls, _ in run.results) > 3 * 3  # each layer of the stage with each microbatch, and again for the backward pass
    assert all(complete for _, complete in replayed.results + run.results)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_workers_take_what_their_schedule_says(schedule: str) -> None:
    pytest.importorskip("transformers")
    ranks, microbatches = 4, 6
    trace = ringsim.simulate(step, world_size=ranks, args=(4, microbatches, schedule), link=LINK, compute=SPEED)
    assert all(loss != loss for loss in trace.results)  # NaN: nobody knows it
    expected_s = alone(4, ranks, microbatches, schedule).makespan
    # What the schedule does not know: a greeting before the first message, and the loss, which goes back from the last rank to the first.
    assert trace.makespan_s - expected_s == pytest.approx(ranks * LINK.alpha_s, rel=1e-3)


def test_a_link_that_all_ranks_of_a_host_share_is_slower_than_one_each() -> None:
    def worker() -> None:
        ring = ringsim.current_ring()
        from ringsim import comm as dist

        outgoing, incoming = (torch.empty(10**6, dtype=torch.uint8, device="meta") for _ in range(2))
        away = (ring.rank + 2) % 4  # on the other host
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, outgoing, away), dist.P2POp(dist.irecv, incoming, away)]):
            work.wait()

    apart = ringsim.simulate(worker, world_size=4, topology=FullBisection(LINK)).makespan_s
    together = ringsim.simulate(worker, world_size=4, topology=Hosts(2, inner=LINK, outer=LINK)).makespan_s
    assert apart == pytest.approx(LINK.time_s(10**6), rel=1e-4)
    assert together == pytest.approx(LINK.time_s(2 * 10**6), rel=1e-4)  # two leave each host, and two come in


@pytest.mark.parametrize("compute", ["fast", 4e14, {"F": 1.0}])
def test_what_is_no_table_of_costs_is_refused(compute: Any) -> None:
    with pytest.raises(ArgumentError, match="compute must be a table of costs"):
        ringsim.simulate(step, world_size=2, args=(2, 1, "gpipe"), link=LINK, compute=compute)


def test_a_slow_rank_computes_more_slowly_and_jitter_repeats() -> None:
    def worker() -> None:
        model = SmallTransformer(vocab_size=11, hidden_size=32, num_layers=4).to("meta")
        ids = [torch.zeros(1, 8, dtype=torch.int64, device="meta")] * 4
        train_step_pipeline(model, ids, ids)

    table = ringsim.FlopCosts(flops_per_s=1e9)
    plain, slow, jitter, again = (
        ringsim.simulate(worker, world_size=2, link=LINK, compute=table, inject=inject)
        for inject in ([], [ringsim.Slow(1, 3)], [ringsim.Jitter(0.2, 5)], [ringsim.Jitter(0.2, 5)])
    )
    assert slow.makespan_s > 2 * plain.makespan_s
    assert jitter.makespan_s != plain.makespan_s
    assert jitter.makespan_s == again.makespan_s
