"""The prediction over the measurement: what is drawn is what was compared."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from stage_traces import trace_of
from synthetic import Story

from ringsim.errors import ArgumentError
from ringsim.plot.schedule_run import BOUNDS, overlay_png, plot_overlay
from ringsim.predict.comparison import Comparison, compare
from ringsim.schedules import make_schedule
from ringsim.schedules.costs import Costs
from ringsim.schedules.engine import evaluate
from ringsim.traces.events import SPAN
from ringsim.traces.value import Trace

mpl.use("Agg")


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    plt.close("all")


def steps(*scales: float) -> Trace:
    """Recorded 1F1B steps, one for each scale of time, their computations alone."""
    schedule = make_schedule("1f1b", 3, 4)
    trace = trace_of(*[evaluate(schedule, Costs(forward=scale, backward=2 * scale)) for scale in scales])
    return Trace(trace.events.select(trace.events.kind == SPAN), trace.metadata)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare(steps(1.1, 1.0, 0.97), steps(1.0, 0.9, 1.0))


def predicted(ax: Axes) -> list[int]:
    """How many boxes there are of each look."""
    found = {str(each.get_gid()): len(each.get_paths()) for each in ax.collections if isinstance(each, PolyCollection)}
    return [found.get(f"predicted-{number}", 0) for number in range(len(BOUNDS) + 1)]


@pytest.mark.parametrize("step", [0, 1, 2])
def test_colours_say_how_far_off_each_end_is(comparison: Comparison, step: int) -> None:
    real, virtual = ((1.1, 1.0), (1.0, 0.9), (0.97, 1.0))[step]
    ends = np.array([end for rank in range(3) for _, _, end in evaluate(make_schedule("1f1b", 3, 4)).get_computations(rank)], dtype=float)
    off = ends * (virtual / real - 1) / ends.max()
    bounds = [-np.inf, *BOUNDS, np.inf]
    wanted = [int(((off >= low) & (off < high)).sum()) for low, high in pairwise(bounds)]
    assert sum(wanted) == 24
    assert predicted(comparison.plot(step=step)) == wanted


def test_words_say_the_error_of_the_step_and_of_all(comparison: Comparison) -> None:
    ax = plot_overlay(comparison, step=1)
    assert ax.get_title(loc="left") == "Predicted 32.4 ms, measured 36 ms: 10.0 % too short"
    said = [text.get_text() for text in ax.texts]
    assert any(words.startswith("1F1B, 3 ranks; step 2 of 3: all of them off by 7.4 % on average, 10.0 % at most") for words in said)
    assert [float(np.asarray(line.get_xdata())[0]) for line in ax.lines[-2:]] == pytest.approx([36, 32.4])


def test_step_of_median_length_is_drawn_where_none_is_named(comparison: Comparison) -> None:
    assert plot_overlay(comparison).get_title(loc="left") == plot_overlay(comparison, step=1).get_title(loc="left")


def test_run_without_steps_is_drawn_by_its_spans() -> None:
    def run(end_ms: float) -> Trace:
        story = Story(2)
        for rank in range(2):
            story.span(rank, "work", 0, end_ms)
        return story.trace()

    ax = plot_overlay(compare(run(2.0), run(2.04)))
    assert ax.get_title(loc="left") == "Predicted 2.04 ms, measured 2 ms: 2.0 % too long"
    assert predicted(ax) == [0, 0, 0, 2, 0]


def test_what_cannot_be_drawn(comparison: Comparison) -> None:
    with pytest.raises(ArgumentError, match="step must be from 0 to 2, got 3"):
        plot_overlay(comparison, step=3)
    story = Story(2)
    story.message(0, 1, (1, 1, 2), (1, 1, 2))
    with pytest.raises(ArgumentError, match="must have spans to be drawn"):
        plot_overlay(compare(story.trace(), story.trace()))


def test_picture_is_the_same_byte_for_byte(comparison: Comparison) -> None:
    assert overlay_png(comparison) == overlay_png(comparison)
    data, about = comparison._repr_mimebundle_()
    assert data["text/plain"] == repr(comparison)
    alt = about["image/png"]["alt"]
    assert alt.startswith("A measured run and its prediction; median step: measured ")
    assert alt.endswith(".")
    assert "\n" not in alt
    assert "image/png" in data


def test_picture_goes_where_it_is_told(comparison: Comparison) -> None:
    _, ax = plt.subplots()
    assert comparison.plot(ax=ax) is ax
