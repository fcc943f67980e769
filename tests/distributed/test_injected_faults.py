"""What ``inject=`` does to real ranks, read from their traces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ringsim
from ringsim.errors import ArgumentError, RankFailed
from ringsim.faults import jitter_of, slowed_by
from ringsim.traces.events import COLLECTIVE, SPAN

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left_behind")]


def _compute_alike() -> None:
    for _ in range(5):
        ringsim.compute(0.002)


def _talk(rounds: int, numel: int) -> list[float]:
    """Both ranks send to each other by turns; returns what was received."""
    import torch

    from ringsim import comm as dist

    ring = ringsim.current_ring()
    received = []
    for number in range(rounds):
        for src in (0, 1):
            tensor = torch.full((numel,), float(number))
            if ring.rank == src:
                dist.send(tensor, ring.succ, group=ring.succ_group)
            else:
                inbox = torch.empty(numel)
                dist.recv(inbox, ring.pred, group=ring.pred_group)
                received.append(float(inbox[-1]))
    return received


def test_slow_rank_computes_longer_and_others_do_not() -> None:
    trace = ringsim.trace(_compute_alike, world_size=3, inject=[ringsim.Slow(1, 10)])
    events = trace.events
    took = {rank: (events.done_ns - events.post_ns)[(events.rank == rank) & (events.kind == SPAN)] for rank in range(3)}
    assert [len(took[rank]) for rank in range(3)] == [5, 5, 5]
    assert took[1].min() >= 20e6
    assert np.median(took[1]) > 3 * max(np.median(took[0]), np.median(took[2]))


def test_slow_rank_trains_slowly() -> None:
    def worker() -> None:
        import torch
        from torch import nn

        from ringsim.pipeline import train_step_pipeline

        class Nap(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                ringsim.compute(0.002)
                return x * 1.0

        model = nn.Sequential(nn.Linear(8, 8), Nap(), nn.Linear(8, 8), Nap())
        train_step_pipeline(model, [torch.ones(2, 8)] * 4, [torch.zeros(2, dtype=torch.int64)] * 4, partition=[2, 2])

    frame = ringsim.trace(worker, world_size=2, inject=[ringsim.Slow(1, 10)]).to_pandas()
    forward = frame[frame.label == "forward"]
    took_s = (forward.done_ns - forward.post_ns) * 1e-9
    assert (took_s[forward["rank"] == 1] >= 0.020).all()
    assert took_s[forward["rank"] == 1].median() > 3 * took_s[forward["rank"] == 0].median()


@pytest.mark.parametrize("check", ["basic", "full", "off"])
def test_degraded_link_is_slow_one_way_and_carries_the_same(check: str) -> None:
    rounds = 20
    trace = ringsim.trace(_talk, world_size=2, args=(rounds, 1 << 18), inject=[ringsim.Degrade(0, 1, 30)], check=check)
    assert trace.results == [[float(number) for number in range(rounds)]] * 2
    events, messages = trace.events, trace.messages
    both_posted = np.maximum(events.post_ns[messages.send], events.post_ns[messages.recv])
    took = events.done_ns[messages.recv] - both_posted
    forth = events.rank[messages.send] == 0
    assert forth.sum() == rounds
    assert np.median(took[forth]) > 5 * np.median(took[~forth])


def test_degraded_link_slows_batched_messages_too() -> None:
    def worker() -> None:
        import torch
        import torch.distributed as dist

        ring = ringsim.current_ring()
        if ring.rank == 1:  # the others wait already when its first message leaves: how long one takes is known only from one seen to come
            ringsim.compute(0.2)
        for _ in range(10):
            out, inbox = torch.ones(1 << 18), torch.empty(1 << 18)
            ops = [dist.P2POp(dist.isend, out, ring.succ), dist.P2POp(dist.irecv, inbox, ring.pred)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

    trace = ringsim.trace(worker, world_size=3, inject=[ringsim.Degrade(1, 2, 30)])
    events, messages = trace.events, trace.messages
    took = events.done_ns[messages.recv] - np.maximum(events.post_ns[messages.send], events.post_ns[messages.recv])
    degraded = events.rank[messages.send] == 1
    assert np.median(took[degraded]) > 5 * np.median(took[~degraded & (events.rank[messages.send] == 2)])


def _operations(trace: ringsim.Trace, rank: int) -> list[str]:
    frame = trace.to_pandas()
    return list(frame[(frame["rank"] == rank) & frame["kind"].isin(["send", "recv", "collective"])]["op"])


@pytest.mark.parametrize("at_op", [0, 1, 3])
def test_failing_rank_raises_in_place_of_its_operation(at_op: int) -> None:
    with pytest.raises(RankFailed, match=f"rank 1 of 2 was made to fail in place of its operation {at_op}") as caught:
        ringsim.trace(_talk, world_size=2, args=(4, 8), inject=[ringsim.Fail(1, at_op)])
    assert caught.value.rank == 1
    assert "dist." in str(caught.value)  # the user's line
    assert caught.value.trace is not None
    assert _operations(caught.value.trace, rank=1) == ["recv", "send", "recv", "send"][:at_op]


@pytest.mark.parametrize("at_op", [0, 1, 3])
def test_failing_rank_raises_the_same_on_a_virtual_clock(at_op: int) -> None:
    link = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-9)
    with pytest.raises(RankFailed) as real:
        ringsim.trace(_talk, world_size=2, args=(4, 8), inject=[ringsim.Fail(1, at_op)])
    with pytest.raises(RankFailed) as virtual:
        ringsim.simulate(_talk, world_size=2, args=(4, 8), link=link, inject=[ringsim.Fail(1, at_op)])
    assert str(virtual.value).splitlines()[0] == str(real.value).splitlines()[0]
    assert virtual.value.rank == real.value.rank == 1
    assert virtual.value.trace is not None
    assert _operations(virtual.value.trace, rank=1) == ["recv", "send", "recv", "send"][:at_op]


def test_slow_ranks_and_links_mean_the_same_on_a_virtual_clock() -> None:
    link = ringsim.Link(alpha_s=1e-4, beta_s_per_byte=1e-9)
    slow = ringsim.simulate(_compute_alike, world_size=3, link=link, inject=[ringsim.Slow(1, 10)]).events
    took_ns = slow.done_ns - slow.post_ns
    assert took_ns[slow.rank == 1].tolist() == [20_000_000] * 5
    assert took_ns[slow.rank != 1].tolist() == [2_000_000] * 10
    trace = ringsim.simulate(_talk, world_size=2, args=(3, 1000), link=link, inject=[ringsim.Degrade(0, 1, 30)])
    events, messages = trace.events, trace.messages
    took_ns = events.done_ns[messages.recv] - np.maximum(events.post_ns[messages.send], events.post_ns[messages.recv])
    assert took_ns[events.rank[messages.send] == 0].tolist() == [30 * 104_000] * 3
    assert took_ns[events.rank[messages.send] == 1].tolist() == [104_000] * 3


def test_collectives_count_and_later_operations_fail_as_well() -> None:
    def worker() -> list[str]:
        import torch

        from ringsim import comm as dist

        said = []
        dist.barrier()
        for _ in range(3):
            try:
                dist.all_reduce(torch.ones(2))
            except ringsim.errors.RankFailed as error:
                said.append(str(error))
        return said

    trace = ringsim.trace(worker, world_size=1, inject=[ringsim.Fail(0, 2)])
    assert _operations(trace, rank=0) == ["barrier", "all_reduce"]
    (said,) = trace.results
    assert [words.partition(",")[0] for words in said] == ["rank 0 of 1 was made to fail in place of its operation 2"] * 2
    assert COLLECTIVE in trace.events.kind


def test_rank_that_does_less_does_not_fail() -> None:
    assert ringsim.trace(_talk, world_size=2, args=(1, 8), inject=[ringsim.Fail(0, 2)]).results == [[0.0], [0.0]]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"inject": [ringsim.Slow(2, 2)]}, "the ranks of an injection must be from 0 to 1, got Slow"),
        ({"inject": [ringsim.Degrade(0, 1, 2)], "comm_device": "gpu"}, "inject must hold no Degrade where comm_device is"),
    ],
)
def test_injection_that_cannot_be(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ArgumentError, match=what):
        ringsim.trace(_compute_alike, world_size=2, **changes)


def test_ranks_that_run_already_cannot_be_spoilt(tmp_path: Any) -> None:
    with pytest.raises(ArgumentError, match="inject must be left out when a path is given"):
        ringsim.trace(tmp_path / "x.ringtrace", inject=[ringsim.Slow(0, 2)])  # type: ignore[call-overload]


def test_each_rank_draws_its_jitter_in_the_order_of_its_computations() -> None:
    inject = [ringsim.Jitter(0.5, seed=11), ringsim.Slow(1, 2)]

    def worker() -> list[float]:
        from ringsim.compute_costs import stretch

        return [stretch(1.0) for _ in range(3)]

    results = ringsim.trace(worker, world_size=2, inject=inject).results
    for rank in range(2):
        draw = jitter_of(inject, rank)
        assert draw is not None
        assert results[rank] == [slowed_by(inject, rank) * draw() for _ in range(3)]
