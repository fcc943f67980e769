"""Tests of predictions from measurements on real ranks, on any machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ringsim
from ringsim.pipeline import Costs, make_schedule, rehearse

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def _calibrating() -> None:
    for size_bytes in (1024, 262144):
        for ahead in (0, 1):
            costs = Costs(forward=0.002, backward=0.004)
            rehearse(make_schedule("1f1b", 2, 6), costs, size_bytes=size_bytes, ahead=ahead)


def test_prediction_of_more_ranks_is_compared_operation_by_operation() -> None:
    calibration = ringsim.calibrate(ringsim.trace(_calibrating, world_size=2))
    assert calibration.sizes_bytes == (1024, 262144)
    times_s = calibration.sleep_s, calibration.around_s, calibration.receiving_s
    assert min(calibration.link.alpha_s, *times_s) > 0
    args = (make_schedule("zb_h1", 3, 4), Costs(forward=0.003, input=0.002, weight=0.002))
    run: Any = {"world_size": 3, "args": args, "kwargs": {"size_bytes": 65536, "steps": 3}}
    real = ringsim.trace(rehearse, **run)
    virtual = ringsim.simulate(rehearse, topology=calibration.topology, compute=calibration, **run)
    comparison = ringsim.compare(real, virtual)
    steps = 3 * 3  # spans of whole steps are not compared
    assert len(comparison.real_index) == len(real.to_pandas().query("kind != 'mark'")) - steps
    assert comparison.steps.count == 3
    assert comparison.nominal_s is not None
    assert comparison.no_communication_s is not None
    # The costs that a prediction leaves out can only make it shorter.
    assert comparison.nominal_s < comparison.no_communication_s < comparison.virtual_steps_s.min()
    assert comparison.nominal_s < comparison.real_steps_s.min()
    assert np.isfinite(comparison.lag_s).all()
