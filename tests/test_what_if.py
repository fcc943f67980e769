"""Predictions with changes: replays of the recorded order, next to the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_traces import traces
from trace_mutations import read_in_full
from what_if_programs import Programs, draw_programs, follow, make_asynchronous

import ringsim
from ringsim import Link, Slow, Trace
from ringsim.errors import RingError

LINK = Link(alpha_s=50e-6, beta_s_per_byte=1e-9)
FAST = Link(alpha_s=5e-6, beta_s_per_byte=4e-10)


def run(programs: Programs, **options: Any) -> Trace:
    """Returns a run on the virtual clock, labelled as if it had been measured."""
    options = {"link": LINK} | options
    trace = ringsim.simulate(follow, world_size=len(programs), args=(programs,), **options)
    return replace(trace, metadata={**trace.metadata, "source": "measured"})


def check_same(found: Trace, expected: Trace) -> None:
    """Asserts that two runs have the same events, at the same times up to rounding."""
    for name in ("rank", "op", "peer", "tag", "line", "status"):
        assert getattr(found.events, name).tolist() == getattr(expected.events, name).tolist()
    for name in ("post_ns", "wait_ns", "done_ns"):
        off = np.abs(getattr(found.events, name) - getattr(expected.events, name))
        assert off.max() <= 200, f"{name} of {expected[int(off.argmax())]} is off"


@pytest.mark.parametrize("seed", range(8))
def test_changes_have_the_effect_that_they_have_in_the_simulator(seed: int) -> None:
    programs = draw_programs(seed)
    recorded = run(programs)
    check_same(recorded.what_if(), recorded)
    slow = run(programs, inject=[Slow(1, 3)])
    check_same(recorded.what_if(ranks={1: 3}), slow)
    check_same(slow.what_if(ranks={1: 1 / 3}), recorded)
    check_same(recorded.what_if(link=FAST), run(programs, link=FAST))
    if seed < 4:
        waited_later = run(make_asynchronous(programs))
        check_same(recorded.what_if(sends="isend"), waited_later)


@given(trace=traces, finished=st.booleans())
def test_any_trace_is_predicted_or_refused(trace: Trace, finished: bool) -> None:
    if finished:  # most random traces are refused, because operations have no end
        events, kept = trace.events, {"world_size": trace.world_size}
        done_ns = np.maximum(events.done_ns, events.wait_ns)
        events = replace(events, status=np.full_like(events.status, 2), done_ns=done_ns)
        trace = replace(trace, events=events, metadata=kept)
    try:
        predicted = trace.what_if(ranks={0: 2.5}, link=LINK, sends="isend")
    except RingError:
        return
    assert predicted.recorded is trace
    read_in_full(predicted, draw=False)
