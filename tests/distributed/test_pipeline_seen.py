"""Real steps, seen in their traces: each action where its schedule has it, the peaks of the closed form, pictures that name the step."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn

import ringsim
from ringsim.pipeline import make_schedule, train_step_pipeline
from ringsim.pipeline.training import eval_step_pipeline
from ringsim.schedules import SCHEDULE_NAMES
from ringsim.schedules.closed_forms import Step
from ringsim.traces.steps import count_steps, find_step

NAMES = [name for name in SCHEDULE_NAMES if name != "afab"]  # another name of gpipe
NUM_MICROBATCHES = 8


def steps(names: list[str]) -> None:
    """One training step with each schedule, then one without gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    inputs, targets = [torch.ones(2, 4)] * NUM_MICROBATCHES, [torch.zeros(2, dtype=torch.int64)] * NUM_MICROBATCHES
    for name in names:
        train_step_pipeline(model, inputs, targets, schedule=name)
    eval_step_pipeline(model, inputs, targets)


@pytest.fixture(scope="module", params=[1, 2, 4])
def trace(request: pytest.FixtureRequest) -> ringsim.Trace:
    return ringsim.trace(steps, world_size=request.param, args=(NAMES,))


def test_each_action_is_where_its_schedule_has_it(trace: ringsim.Trace) -> None:
    assert count_steps(trace.events) == len(NAMES) + 1
    for number, name in enumerate(NAMES):
        actions, schedule = find_step(trace, number), make_schedule(name, trace.world_size, NUM_MICROBATCHES)
        assert actions.schedule == name
        assert [actions.list_actions(rank) for rank in range(trace.world_size)] == list(schedule.actions)
        assert actions.find_known() == Step(name, trace.world_size, NUM_MICROBATCHES, schedule.num_stages // trace.world_size)


def test_peaks_are_those_of_the_closed_form(trace: ringsim.Trace) -> None:
    """They follow from the order alone, whatever the times."""
    for number, name in enumerate(NAMES):
        peaks = trace.peak_activations(number)
        assert peaks.bounds is not None, name
        assert peaks.peaks == peaks.bounds, name


def test_bubbles_are_parts_of_the_step(trace: ringsim.Trace) -> None:
    for number in range(len(NAMES)):
        bubble = trace.bubble(number)
        assert bubble.closed_form is not None
        assert 0 < bubble.of_total < 1
        assert bubble.of_ideal == pytest.approx(bubble.of_total / (1 - bubble.of_total))
        assert all(0 <= span_idle <= idle for span_idle, idle in zip(bubble.span_idle, bubble.idle, strict=True))


def test_forward_passes_alone_are_a_step_too(trace: ringsim.Trace) -> None:
    actions = find_step(trace)  # the last
    assert set(actions.kind) == {"F"}
    assert len(actions) == trace.world_size * NUM_MICROBATCHES
    assert trace.bubble().closed_form is None


def test_every_send_and_recv_knows_its_stage_and_microbatch(trace: ringsim.Trace) -> None:
    messages, events = trace.messages, trace.events
    in_a_stage = events.stage[messages.send] >= 0  # the others are what ranks agree on before a step, and the loss after it
    sent, received = messages.send[in_a_stage], messages.recv[in_a_stage]
    assert (len(sent) > 0) == (trace.world_size > 1)
    assert (events.microbatch[sent] == events.microbatch[received]).all()
    assert (abs(events.stage[sent] - events.stage[received]) == 1).all()


def test_pictures_name_the_step_that_they_show(trace: ringsim.Trace) -> None:
    for number in (0, NAMES.index("zb_v")):
        title = trace.plot_timeline(step=number).get_title(loc="left")
        assert f"{trace.world_size} rank" in title
        assert "closed form" in title
    plt.close("all")
