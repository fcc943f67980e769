"""The effect of ``inject=`` on real ranks, read from their traces, and on a virtual clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ringsim
from ringsim.errors import RankFailed

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
LINK = ringsim.Link(alpha_s=1e-4, beta_s_per_byte=1e-9)


def _compute_alike() -> None:
    for _ in range(8):
        ringsim.compute(0.002)


def _computed_ns(trace: ringsim.Trace) -> Any:
    """Returns the duration of each computation in ns, one row per rank."""
    spans = trace.to_pandas().query("kind == 'span'")
    took_ns = spans["done_ns"] - spans["post_ns"]
    return np.stack([took_ns[spans["rank"] == rank] for rank in range(trace.world_size)])


def _talk(rounds: int, numel: int) -> list[float]:
    """Both ranks send to each other alternately; returns the received messages."""
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


def _transfers(trace: ringsim.Trace, src: int) -> Any:
    """Returns the durations of a rank's messages in ns, from the post of the later side."""
    events, messages = trace.events, trace.messages
    took_ns = events.done_ns[messages.recv] - np.maximum(
        events.post_ns[messages.send], events.post_ns[messages.recv]
    )
    return took_ns[events.rank[messages.send] == src]


def _operations(trace: Any) -> list[str]:
    frame = trace.to_pandas()
    return list(
        frame[(frame["rank"] == 1) & frame["kind"].isin(["send", "recv", "collective"])]["op"]
    )


def test_slow_rank_computes_longer_and_each_draws_its_own_jitter() -> None:
    """At least as long as on a virtual clock, which has no other delays."""
    inject = [ringsim.Slow(1, 10), ringsim.Jitter(0.1, seed=11)]
    real_ns = _computed_ns(ringsim.trace(_compute_alike, world_size=3, inject=inject))
    wanted_ns = _computed_ns(
        ringsim.simulate(_compute_alike, world_size=3, link=LINK, inject=inject)
    )
    assert real_ns.shape == wanted_ns.shape == (3, 8)
    assert (real_ns >= wanted_ns - 1).all()
    factors = wanted_ns / 2e6
    assert (factors[1] > 5).all()
    assert (factors[[0, 2]] < 5).all()
    assert len({*factors.ravel()}) == 24


def _sleeps(worker: Callable[..., Any], *args: Any) -> tuple[Any, list[float]]:
    """Runs a worker; returns its result, and the requested length of each sleep in s."""
    sleep, asked = time.sleep, list[float]()

    def note(seconds: float) -> None:
        asked.append(seconds)
        sleep(seconds)

    time.sleep = note
    try:
        return worker(*args), asked
    finally:
        time.sleep = sleep


def _check_delays(trace: ringsim.Trace, slow_src: int) -> None:
    """Messages from one rank are held back by their receivers, others are not."""
    size = trace.world_size
    for src in range(size):
        took_ns, (_, slept_s) = _transfers(trace, src), trace.results[(src + 1) % size]
        if src != slow_src:
            assert slept_s == []
            continue
        assert len(slept_s) == len(took_ns)
        assert max(slept_s) > 0
        assert (took_ns >= np.array(slept_s) * 1e9 - 1).all()


def test_degraded_link_is_slow_one_way_and_carries_the_same() -> None:
    """Checks the injected sleeps of each direction."""
    inject = [ringsim.Degrade(0, 1, 30)]
    trace = ringsim.trace(
        _sleeps, world_size=2, args=(_talk, 20, 1 << 18), inject=inject, check="full"
    )
    assert [received for received, _ in trace.results] == [
        [float(number) for number in range(20)]
    ] * 2
    _check_delays(trace, slow_src=0)


def test_failing_rank_raises_in_place_of_its_operation_on_both_clocks() -> None:
    at_op = 3
    fault = ringsim.Fail(1, at_op)
    words = f"rank 1 of 2 was made to fail instead of posting operation {at_op}"
    with pytest.raises(RankFailed, match=words) as real:
        ringsim.trace(_talk, world_size=2, args=(4, 8), inject=[fault])
    with pytest.raises(RankFailed) as virtual:
        ringsim.simulate(_talk, world_size=2, args=(4, 8), link=LINK, inject=[fault])
    assert "dist." in str(real.value)  # the line of the user's program
    assert str(virtual.value).splitlines()[0] == str(real.value).splitlines()[0]
    for error in (real.value, virtual.value):
        assert error.rank == 1
        assert _operations(error.trace) == ["recv", "send", "recv", "send"][:at_op]
