"""Pictures of simulated schedules: the critical path lies where the hops say, and a map adds up to what ranks compute."""

from __future__ import annotations

import base64
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from ringsim import Link, simulate_schedule
from ringsim.plot import schedule_run as pictures
from ringsim.plot.schedule_run import measure_shares
from ringsim.plot.steps import ACTION_LOOKS
from ringsim.schedules.costs import Costs
from ringsim.simulator.schedules import ScheduleRun

mpl.use("Agg")
LINK = Link(alpha_s=1e-3, beta_s_per_byte=1e-6)


@pytest.fixture(autouse=True)
def _close() -> Any:
    yield
    plt.close("all")


def simulate(**given: Any) -> ScheduleRun:
    settings = {"num_ranks": 3, "num_microbatches": 4, "link": LINK, "size_bytes": 1000, **given}
    return simulate_schedule("gpipe", Costs(1e-3, 0.5e-3, 0.5e-3), **settings)


def collections(ax: Axes, name: str) -> list[Any]:
    return [each for each in ax.collections if (each.get_gid() or "") == name]


def labels(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_critical_path_lies_where_its_hops_are() -> None:
    run = simulate(size_bytes=2000, semantics="buffered")  # 30 ms, of which a rank computes for 8
    ax = run.plot()
    assert ax.get_title(loc="left") == "GPipe, 3 ranks, 4 microbatches: bubble 73 %, closed form 33 %"
    drawn = []
    for reason in ("program-order", "data", "link-busy", "receiver-late"):
        for lines in collections(ax, f"critical-path-{reason}"):
            drawn += [((x0, y0), (x1, y1), reason) for (x0, y0), (x1, y1) in lines.get_segments()]
    expected = []
    for hop, after in zip(run.critical_path.hops, [*run.critical_path.hops[1:], None], strict=True):
        begins = hop.rank if hop.source < 0 else hop.source
        ends = hop.source if hop.source >= 0 and after is not None and after.source >= 0 else hop.rank
        reason = "program-order" if hop.reason == "start" else hop.reason.replace(" ", "-")
        expected.append((hop.start * 1e3, begins, hop.end * 1e3, ends, reason))
    assert len(drawn) == len(expected) == len(run.critical_path)
    for ((x0, y0), (x1, y1), reason), (begin, begins, end, ends, why) in zip(sorted(drawn), sorted(expected), strict=True):
        assert (x0, x1, reason) == (pytest.approx(begin), pytest.approx(end), why)
        assert (round(y0), round(y1)) == (begins, ends)
    counts = run.critical_path.by_reason
    assert f"critical path: data, {counts['data']} times" in labels(ax)
    assert f"critical path: link busy, {counts['link busy']} times" in labels(ax)
    assert "message on its way" in labels(ax)


def notes(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_picture_says_what_was_put_in() -> None:
    put_in = "Simulated with: forward 1 ms; backward 1 ms; messages of 1,000 B: on the link 1 ms, latency 1 ms."
    assert put_in in notes(simulate().plot())
    costs = Costs([1, 2, 1.5], 0.5, 0.25, latency=0.125)
    run = simulate_schedule("zb_h1", costs, num_ranks=3, num_microbatches=4)
    said = "forward 1 to 2; backward: input's gradient 0.5; backward: weights' gradients 0.25; messages 0.125"
    assert f"Simulated with: {said}." in notes(run.plot())


def test_messages_that_take_no_time_have_no_lane() -> None:
    ax = simulate_schedule("1f1b", num_ranks=3, num_microbatches=4).plot()
    assert "message on its way" not in labels(ax)
    assert ax.get_xlabel() == ""  # it stands under the live activations
    own = plt.figure().add_subplot()
    assert simulate_schedule("1f1b", num_ranks=3, num_microbatches=4).plot(ax=own) is own
    assert own.get_xlabel() == "time (units)"


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_map_adds_up(name: str) -> None:
    run = simulate_schedule(name, Costs(3, 2, 1), num_ranks=6, num_microbatches=12)
    shares = measure_shares(run, rows=6, columns=37)
    assert shares.min() >= 0
    assert shares.sum(axis=-1).max() <= 1 + 1e-9
    assert (shares.sum(axis=-1).mean(axis=1) * run.makespan).tolist() == pytest.approx(run.busy.tolist())
    halves = measure_shares(run, rows=3, columns=37)
    assert np.allclose(halves, (shares[::2] + shares[1::2]) / 2)


def test_large_schedules_are_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MOST_BOXES", 20)
    run = simulate(num_ranks=4, num_microbatches=8, semantics="buffered")
    ax = run.plot()
    (image,) = ax.images
    picture = image.get_array()
    assert picture.shape == (4, 960, 3)
    assert tuple(picture[0, 5]) == pytest.approx(to_rgb(ACTION_LOOKS["F"].colour))  # rank 0 goes forward first
    assert tuple(picture[3, 5]) == pytest.approx((1, 1, 1))  # rank 3 waits
    assert ax.get_title(loc="left") == "GPipe, 4 ranks, 8 microbatches: bubble 53 %"  # 16 of 34 ms
    assert labels(ax)[:3] == ["forward", "backward", "bubble"]
    own = plt.figure().add_subplot()
    assert run.plot(ax=own) is own


@pytest.mark.parametrize("most", [20_000, 20])
def test_notebook_shows_the_same_bytes(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MOST_BOXES", most)
    data, extra = simulate()._repr_mimebundle_()
    assert data["text/plain"].startswith("gpipe, 3 ranks, 4 microbatches: ")
    assert base64.b64decode(data["image/png"])[1:4] == b"PNG"
    assert data["image/png"] == simulate()._repr_mimebundle_()[0]["image/png"]
    assert extra["image/png"]["alt"] == data["text/plain"]


def test_step_that_takes_no_time() -> None:
    ax = simulate_schedule("1f1b", Costs(0, 0, 0), num_ranks=2, num_microbatches=2).plot()
    assert ax.get_title(loc="left") == "1F1B, 2 ranks, 2 microbatches: bubble 0 %"
