"""A simulated schedule as a trace: what the ranks of a pipeline record, read by everything that reads traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ringsim
from ringsim import Link, simulate_schedule
from ringsim.errors import ArgumentError
from ringsim.schedules import SCHEDULE_NAMES, closed_forms, make_schedule
from ringsim.schedules.costs import Costs
from ringsim.simulator import critical_path
from ringsim.simulator.schedules import ScheduleRun
from ringsim.traces.steps import find_step


def simulate(name: str = "1f1b", p: int = 3, m: int = 5, **given: object) -> ScheduleRun:
    settings = {"link": Link(alpha_s=0.125, beta_s_per_byte=0.25), "size_bytes": 2, **given}
    return simulate_schedule(name, Costs(1, 0.5, 1.5), num_ranks=p, num_microbatches=m, **settings)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_trace_holds_the_schedule_and_its_times(name: str) -> None:
    run = simulate(name)
    trace, schedule = run.trace(), make_schedule(name, 3, 5)
    step = find_step(trace)
    assert [step.list_actions(rank) for rank in range(3)] == list(schedule.actions)
    assert step.schedule == schedule.name
    assert np.array_equal(step.end, run.ends * 1e9)
    assert np.array_equal(step.start, run.starts * 1e9)
    assert trace.makespan_s >= run.makespan  # a send may arrive after the last computation
    assert trace.bubble().of_total == pytest.approx(run.bubble)
    known = closed_forms.Step(name, 3, 5)
    assert len(trace.messages) == sum(closed_forms.messages(known))
    assert trace.unmatched == []
    assert trace.metadata["source"] == "simulated"
    assert (trace.events.size_bytes[trace.messages.send] == 2).all()


def test_trace_is_the_same_byte_for_byte_and_keeps_in_a_file(tmp_path: Path) -> None:
    paths = [tmp_path / "one.ringtrace", tmp_path / "two.ringtrace"]
    for path in paths:
        simulate().trace().save(path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    loaded = ringsim.load(paths[0])
    assert loaded == simulate().trace()
    assert loaded.metadata["constants"] == {
        "semantics": "rendezvous", "ahead": 1, "forward": 1.0, "input": 0.5, "weight": 1.5, "backward": None, "latency": 0.0,
        "links": {"all": {"alpha_s": 0.125, "beta_s_per_byte": 0.25}}, "size_bytes": [2, 2],
    }  # fmt: skip


def test_part_of_a_trace() -> None:
    run = simulate("1f1b", p=6, m=9)
    whole = run.trace()
    some = run.trace(ranks=[2, 3])
    assert set(some.events.rank.tolist()) == {2, 3}
    assert {(int(src), int(dst)) for src, dst in zip(some.messages.src, some.messages.dst, strict=True)} == {(2, 3), (3, 2)}
    assert (len(some.messages), some.unmatched) == (18, [])
    assert np.array_equal(find_step(some).end, find_step(whole).end[np.isin(find_step(whole).rank, [2, 3])])
    assert some.metadata["notes"] == ["only ranks 2, 3"]
    assert find_step(some).schedule == "part of 1f1b"  # no closed form is meant for it
    early = run.trace(between=(0.0, 4.0))
    step, every = find_step(early), find_step(whole)
    assert np.array_equal(step.end, every.end[every.start <= 4e9])
    assert early.unmatched == []
    assert 0 < len(early.messages) < len(whole.messages)
    with pytest.raises(ArgumentError, match="ranks must be from 0 to 5, got 6"):
        run.trace(ranks=[6])


def test_too_many_events_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(critical_path, "MOST_EVENTS", 100)
    run = simulate("1f1b", p=4, m=20)
    with pytest.raises(ArgumentError, match=r"a trace must have 100 events or fewer, got 400. Ask for a part"):
        run.trace()
    assert len(run.trace(ranks=[0]).events) == 41


def test_sizes_that_nobody_said_are_unknown() -> None:
    trace = simulate_schedule("1f1b", num_ranks=2, num_microbatches=2).trace()
    assert (trace.events.size_bytes == -1).all()
    assert trace.peak_activations().peaks == trace.peak_activations().bounds == (2, 1)
