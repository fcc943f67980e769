"""A calibration on the virtual clock: what it costs there is what is found in the trace again."""

from __future__ import annotations

import pytest
import torch

import ringsim
from ringsim import comm as dist
from ringsim.compute_costs import charge
from ringsim.errors import ArgumentError
from ringsim.link import Link
from ringsim.pipeline.executor import rehearse
from ringsim.pipeline.flops import Flops
from ringsim.predict.calibration import Calibration, calibrate
from ringsim.schedules import make_schedule
from ringsim.schedules.costs import Costs
from ringsim.simulator.api import simulate
from ringsim.traces.value import Trace

CALIBRATION = Calibration(
    link=Link(alpha_s=50e-6, beta_s_per_byte=0.5e-9),
    sending=Link(alpha_s=20e-6, beta_s_per_byte=0.1e-9),
    sending_early_s=15e-6,
    receiving_s=10e-6,
    sleep_s=70e-6,
    around_s=30e-6,
    cores=2,
    costs=Costs(forward=(0.001, 0.002), input=0.0, weight=0.0, backward=(0.003, 0.004)),
    num_messages=32,
    sizes_bytes=(1024, 262144),
)


def _talk_then_wait() -> None:
    """Rank 0 computes 1 ms and sends; rank 1 has posted its receive long before."""
    ring = ringsim.current_ring()
    if ring.rank == 0:
        ringsim.compute(0.001)
        sending = dist.isend(torch.zeros(1000, dtype=torch.uint8), ring.succ, group=ring.succ_group)
        ringsim.mark("posted")
        assert sending is not None
        sending.wait()
    else:
        receiving = dist.irecv(torch.empty(1000, dtype=torch.uint8), ring.pred, group=ring.pred_group)
        ringsim.mark("posted")
        assert receiving is not None
        receiving.wait()


def test_sleeping_posting_and_travelling_take_what_the_calibration_says() -> None:
    trace = simulate(_talk_then_wait, world_size=2, link=CALIBRATION.link, compute=CALIBRATION)
    frame = trace.to_pandas().set_index(["rank", "op"])
    assert frame.loc[(0, "span"), "done_ns"] == 1_100_000  # 70 + 30 us longer than asked
    assert frame.loc[(0, "isend"), "post_ns"] == 1_100_000
    assert frame.loc[(0, "mark"), "post_ns"] == 1_120_100  # 20 us, and 0.1 us for 1000 bytes
    assert frame.loc[(1, "mark"), "post_ns"] == 10_000
    assert frame.loc[(1, "irecv"), "done_ns"] == 1_150_500  # the message is on its way while it is still posted: 50 us and 0.5 us


def test_constants_go_round() -> None:
    def worker() -> None:
        for size_bytes in (1024, 262144):
            rehearse(make_schedule("1f1b", 2, 8), Costs(forward=0.005, backward=0.010), size_bytes=size_bytes, ahead=0)

    trace = simulate(worker, world_size=2, link=CALIBRATION.link, compute=CALIBRATION)
    found = calibrate(Trace(trace.events, {**trace.metadata, "source": "measured"}))
    assert found.link.alpha_s == pytest.approx(CALIBRATION.link.alpha_s, rel=1e-3)
    assert found.link.beta_s_per_byte == pytest.approx(CALIBRATION.link.beta_s_per_byte, rel=1e-3)
    assert found.sending.alpha_s == pytest.approx(CALIBRATION.sending.alpha_s, rel=1e-3)
    assert found.sending.beta_s_per_byte == pytest.approx(CALIBRATION.sending.beta_s_per_byte, rel=1e-3)
    assert found.sending_early_s == pytest.approx(CALIBRATION.sending_early_s, rel=1e-3)
    assert found.receiving_s == pytest.approx(CALIBRATION.receiving_s, rel=1e-3)
    assert found.sleep_s == pytest.approx(CALIBRATION.sleep_s + CALIBRATION.around_s, rel=1e-3)  # in the trace it is all one
    assert found.costs is not None
    assert found.costs.forward == pytest.approx((0.0051, 0.0051))


def test_stages_take_the_times_that_were_measured() -> None:
    def worker() -> None:
        for stage in range(2):
            charge("F", stage, 0, lambda: Flops(1, 1, 1))
            charge("B", stage, 0, lambda: Flops(1, 1, 1))
        ringsim.mark("end")

    trace = simulate(worker, world_size=1, compute=CALIBRATION, link=CALIBRATION.link)
    assert trace.to_pandas()["post_ns"].tolist() == [10_000_000]


def test_stage_that_was_not_measured_is_refused() -> None:
    def worker() -> None:
        charge("F", 2, 0, lambda: Flops(1, 1, 1))

    with pytest.raises(ArgumentError, match="forward must have one time for each stage, got 2"):
        simulate(worker, world_size=1, compute=CALIBRATION, link=CALIBRATION.link)
