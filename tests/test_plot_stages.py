"""Steps of pipelines as pictures: boxes to scale, bubbles, phases, messages, the curve of live activations; and which picture is chosen."""

from __future__ import annotations

import io
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.markers import MarkerStyle
from stage_traces import UNIT_MS, add_step, known, trace_of
from synthetic import Story, pipeline

from ringsim.errors import ArgumentError
from ringsim.pipeline import plot_schedule
from ringsim.plot import style
from ringsim.plot.steps import microbatch_entry, picture_step, shows_step, step_picture
from ringsim.plot.timeline import plot_timeline, timeline_picture, trace_png
from ringsim.schedules import make_schedule
from ringsim.schedules.costs import Costs
from ringsim.schedules.engine import evaluate
from ringsim.schedules.schedule import from_text
from ringsim.traces.value import Trace


@pytest.fixture(autouse=True)
def no_figures_left():
    yield
    plt.close("all")


def boxes(ax: Axes, gid: str) -> list[tuple[float, float, float, float]]:
    """(left, right, top, bottom) of what is drawn under a name, sorted; y grows downwards."""
    corners = [path.vertices for group in ax.collections if group.get_gid() == gid for path in group.get_paths()]
    return sorted((c[:, 0].min(), c[:, 0].max(), c[:4, 1].min(), c[:4, 1].max()) for c in corners)


def spans(ax: Axes, gid: str, row: int) -> list[tuple[float, float]]:
    """(left, right) of the boxes of one row."""
    return [(round(box[0], 6), round(box[1], 6)) for box in boxes(ax, gid) if abs((box[2] + box[3]) / 2 - row) < 0.5]


def phases(ax: Axes, name: str) -> list[tuple[float, float, float]]:
    """(height, from, to) of the brackets of a name, sorted."""
    segments = [line for group in ax.collections if group.get_gid() == f"phase-{name}" for line in group.get_segments()]
    return sorted((line[0][1], line[0][0], line[1][0]) for line in segments)


def words(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def legend(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def curve(ax: Axes) -> Axes:
    (under,) = ax.child_axes
    return under


def test_boxes_are_to_scale_and_bubbles_fill_the_rest() -> None:
    """As drawn by hand.

    rank 0   F0 F1 .  .  B0 B0 .  B1 B1
    rank 1   .  F0 B0 B0 F1 B1 B1 .  .
    """
    ax = plot_schedule(make_schedule("1f1b", 2, 2))
    assert spans(ax, "actions-F-0", 0) == [(0, 1), (1, 2)]
    assert spans(ax, "actions-B-0", 0) == [(4, 6), (7, 9)]
    assert spans(ax, "bubbles", 0) == [(2, 4), (6, 7)]
    assert spans(ax, "actions-F-0", 1) == [(1, 2), (4, 5)]
    assert spans(ax, "actions-B-0", 1) == [(2, 4), (5, 7)]
    assert spans(ax, "bubbles", 1) == [(0, 1), (7, 9)]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # rank 0 on top


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_v", "dualpipe_v"])
def test_a_recorded_step_and_its_schedule_look_alike(name: str) -> None:
    evaluation = known(name, 4, 8)
    recorded, drawn = plot_timeline(trace_of(evaluation)), plot_schedule(evaluation)
    for kind in "FBIW":
        for chunk in (0, 1):
            measured, units = boxes(recorded, f"actions-{kind}-{chunk}"), boxes(drawn, f"actions-{kind}-{chunk}")
            assert [each for box in measured for each in box[:2]] == pytest.approx([UNIT_MS * each for box in units for each in box[:2]])
    assert recorded.get_title(loc="left") == drawn.get_title(loc="left")


def test_idle_time_is_what_the_bubbles_add_up_to() -> None:
    evaluation = known("zb_h1", 4, 8)
    ax = plot_schedule(evaluation)
    for rank, idle in enumerate(evaluation.idle):
        assert sum(end - start for start, end in spans(ax, "bubbles", rank)) == pytest.approx(float(idle))


def test_words_say_measured_and_closed_form() -> None:
    ax = plot_timeline(trace_of(known("1f1b", 4, 8)))
    assert ax.get_title(loc="left") == "1F1B, 4 ranks, 8 microbatches: bubble 27 %, closed form 27 %"
    said = words(ax)
    assert "by span 27 % (closed form 27 %), to the work 38 % (38 %); 66 ms" in said
    assert said.count("idle 27 %") == 4
    assert [name for name in said if name in ("warm-up", "steady", "cool-down")] == ["warm-up", "cool-down", "steady"]
    assert legend(ax) == ["forward", "backward", "number: microbatch", "bubble"]
    assert "measured on Example CPU" in "\n".join(said)
    assert "simulated" in "\n".join(words(plot_schedule(make_schedule("1f1b", 4, 8))))
    no_gaps = plot_schedule(make_schedule("zb_h2", 4, 8))
    assert "by span 0 % (closed form 0 %), to the work 12 % (12 %); 27 units" in words(no_gaps)
    assert "bubble" not in legend(plot_schedule(make_schedule("gpipe", 1, 2)))


def test_every_box_with_room_has_its_number() -> None:
    ax = plot_schedule(make_schedule("1f1b", 4, 8))
    numbers = sorted(text for text in words(ax) if text.isdigit())
    assert numbers == sorted(str(microbatch) for microbatch in range(8) for _ in range(2 * 4))
    for text in ax.texts:
        if text.get_text().isdigit():
            x, y = text.get_position()
            assert any(box[0] < x < box[1] and box[2] < y < box[3] for kind in "FB" for box in boxes(ax, f"actions-{kind}-0"))
    assert not [text for text in words(plot_schedule(make_schedule("1f1b", 16, 64))) if text.isdigit()]  # no room for two digits


def test_phases_lie_over_their_boxes() -> None:
    ax = plot_schedule(make_schedule("1f1b", 4, 8))
    steady = [pytest.approx((start, end), abs=0.1) for start, end in [(10, 22), (8, 23), (6, 24), (4, 25)]]
    assert [line[1:] for line in phases(ax, "steady")] == steady
    assert next(line[1:] for line in phases(ax, "warm-up")) == pytest.approx((0, 10), abs=0.1)
    assert [line[1:] for line in phases(ax, "cool-down")][3] == pytest.approx((25, 27), abs=0.1)
    assert not phases(plot_schedule(make_schedule("gpipe", 4, 8)), "steady")


def test_the_curve_has_the_peaks_and_the_bounds() -> None:
    ax = plot_timeline(trace_of(known("1f1b", 4, 8)))
    under = curve(ax)
    assert under.get_xlim() == ax.get_xlim()
    curves = {line.get_gid(): np.asarray(line.get_ydata()) for line in under.lines}
    assert [curves[f"live-{rank}"].max() for rank in range(4)] == [4, 3, 2, 1]
    assert sorted(line.get_ydata()[0] for line in under.lines if line.get_gid() == "bound") == [1, 2, 3, 4]
    assert {line.get_drawstyle() for line in under.lines if line.get_gid() != "bound"} == {"steps-post"}
    assert words(under) == ["rank 0: 4 of 4", "rank 1: 3 of 3", "rank 2: 2 of 2", "rank 3: 1 of 1"]


def test_without_a_closed_form_nothing_is_claimed() -> None:
    ax = plot_schedule(from_text("rank 0: 0F0 0F1 0B1 0B0\nrank 1: 1F0 1F1 1B1 1B0", name="mine"))
    assert ax.get_title(loc="left") == "mine, 2 ranks, 2 microbatches: bubble 33 %"
    assert not [line for line in curve(ax).lines if line.get_gid() == "bound"]
    assert words(curve(ax)) == ["rank 0: 2", "rank 1: 2"]


def test_stages_of_one_rank_are_told_apart() -> None:
    ax = plot_schedule(make_schedule("interleaved_1f1b", 2, 4))
    first, second = (next(group for group in ax.collections if group.get_gid() == f"actions-F-{chunk}") for chunk in (0, 1))
    assert second.get_facecolor().sum() > first.get_facecolor().sum()  # paler
    assert len(boxes(ax, "actions-F-0")) == len(boxes(ax, "actions-F-1")) == 2 * 4
    assert "paler: later stage of the rank" in legend(ax)
    ax.figure.canvas.draw()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0\nstages 0, 2", "rank 1\nstages 1, 3"]


def test_messages_are_thin_bars_under_the_boxes() -> None:
    ax = plot_schedule(evaluate(make_schedule("1f1b", 2, 2), Costs(latency=1)))
    assert "message on its way" in legend(ax)
    sends, recvs = boxes(ax, "messages-1"), boxes(ax, "messages-2")
    assert len(sends) == len(recvs) == 4
    assert [box[:2] for box in sends] == [box[:2] for box in recvs]
    lowest_box = max(box[3] for box in boxes(ax, "actions-F-0") if box[3] < 0.5)
    assert lowest_box < min(box[2] for box in sends if box[2] < 0.5) < min(box[2] for box in recvs if box[2] < 0.5)
    for without in (make_schedule("dualpipe_v", 2, 4), known("1f1b", 2, 2)):
        assert "message on its way" not in legend(plot_schedule(without))


def test_recorded_messages_are_those_of_the_step() -> None:
    evaluation = evaluate(make_schedule("1f1b", 2, 2), Costs(latency=1))
    for step, ax in ((step, plot_timeline(trace_of(evaluation, evaluation), step=step)) for step in (0, 1)):
        bars = [box for group in ax.collections if (group.get_gid() or "").startswith("boxes-") for box in boxes(ax, group.get_gid())]
        left, right = ax.get_xlim()
        assert len(bars) == 2 * 4, step
        assert all(left <= box[0] < box[1] <= right for box in bars)
        assert "transfer" in legend(ax)


def test_the_last_step_is_drawn_unless_another_is_asked_for() -> None:
    trace = trace_of(known("gpipe", 2, 2), known("1f1b", 2, 4))
    assert plot_timeline(trace).get_title(loc="left").startswith("1F1B, 2 ranks, 4 microbatches")
    assert plot_timeline(trace, step=0).get_title(loc="left").startswith("GPipe, 2 ranks, 2 microbatches")
    assert any(text.endswith("step 1 of 2, 18 ms") for text in words(plot_timeline(trace, step=0)))
    with pytest.raises(ArgumentError, match="step must be from 0 to 1"):
        plot_timeline(trace, step=2)


def test_other_traces_keep_their_picture() -> None:
    assert not shows_step(pipeline())
    assert not plot_timeline(pipeline()).child_axes
    with pytest.raises(ArgumentError, match="trace must have a step of a pipeline"):
        plot_timeline(pipeline(), step=0)


def test_what_is_stuck_is_shown_before_any_step() -> None:
    story = Story(2)
    add_step(story, known("1f1b", 2, 2), 1.0, (0, 1), "1f1b")
    assert shows_step(story.trace())
    story.op(0, "recv", (30, 30, -1), peer=1, group="world", tag=0, size_bytes=8)
    assert plot_timeline(story.trace()).get_title(loc="left") == "Stuck: 1 operation never finished"


def test_on_axes_of_ones_own_there_is_no_curve() -> None:
    trace = trace_of(known("1f1b", 4, 8))
    figure, ax = plt.subplots(figsize=(9, 3))
    assert plot_timeline(trace, ax=ax) is ax
    other = plt.subplots(figsize=(9, 3))[1]
    assert plot_schedule(make_schedule("1f1b", 4, 8), ax=other) is other
    assert figure.axes == [ax]
    assert not ax.child_axes
    assert len(boxes(ax, "actions-F-0")) == len(boxes(other, "actions-F-0")) == 32


def test_a_picture_says_that_ranks_shared_their_cores() -> None:
    """The example machine has 2 cores."""

    def said(trace: Trace) -> list[str]:
        return [text for text in words(plot_timeline(trace)) if "shared" in text]

    four, two = trace_of(known("1f1b", 4, 8)), trace_of(known("1f1b", 2, 8))
    assert said(four) == ["4 ranks shared 2 cores: what had to wait for a core is drawn as computing, or makes others wait."]
    assert not said(two)
    assert not said(Trace(four.events, four.metadata | {"comm_device": "gpu"}))
    assert not said(Trace(four.events, four.metadata | {"ranks": [{"rank": rank, "host": f"node{rank % 2}"} for rank in range(4)]}))
    assert said(Trace(four.events, four.metadata | {"ranks": [{"rank": rank, "host": "node0"} for rank in range(4)]}))


def test_a_notebook_gets_the_step_beside_the_ring() -> None:
    trace = trace_of(known("1f1b", 2, 2))
    assert trace_png(trace)[1:4] == b"PNG"
    assert timeline_picture(trace).height == step_picture(picture_step(trace)).height
    data, about = trace._repr_mimebundle_()
    assert "1 step, the last one of 1f1b: bubble 33 % (closed form 33 %)" in about["image/png"]["alt"]
    assert "pipeline      1 step" in data["text/plain"]


@pytest.mark.parametrize("ranks", [1, 16, 64])
def test_any_number_of_ranks_can_be_drawn(ranks: int) -> None:
    ax = plot_schedule(make_schedule("1f1b", ranks, ranks))
    assert len(boxes(ax, "actions-F-0")) == ranks * ranks
    assert bool(phases(ax, "warm-up")) == (ranks < 64)  # no room over such low rows
    assert len([line for line in curve(ax).lines if line.get_gid().startswith("live")]) == min(ranks, 4)
    assert len([line for line in curve(ax).lines if line.get_gid() == "bound"]) == min(ranks, 4)


def test_the_same_step_gives_the_same_bytes() -> None:
    def draw() -> bytes:
        file = io.BytesIO()
        figure: Any = plot_timeline(trace_of(known("zb_v", 2, 4))).figure
        figure.savefig(file, format="png", metadata={"Software": None})
        return file.getvalue()

    assert draw() == draw()


def test_the_legend_shows_a_number_where_formulas_are_off() -> None:
    """With mathtext off the marker was the two dollar signs and the digit, one over the other."""
    with style.drawing():
        shown = microbatch_entry()._marker.get_path()  # type: ignore[attr-defined]
    with mpl.rc_context({"text.parse_math": True}):
        zero = MarkerStyle("$0$").get_path()
    np.testing.assert_array_equal(shown.codes, zero.codes)
