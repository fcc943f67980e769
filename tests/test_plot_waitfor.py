"""The picture of who waits for whom: every label can be read, whatever waits for what."""

from __future__ import annotations

from itertools import combinations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from matplotlib.transforms import Bbox

from ringsim.plot import style
from ringsim.plot.waitfor import plot_waitfor, waitfor_png
from ringsim.traces.findings import Diagnosis, Edge, Finding, Operation

ROTATED = {size: [(rank, (rank + 1) % size) for rank in range(size)] for size in range(2, 13)}
NAMES = ("a.py", "pipeline_training.py", "a_file_with_a_name_that_nobody_would_want_to_type.py")


@pytest.fixture(autouse=True)
def no_figures_left():
    yield
    plt.close("all")


def diagnosis(size: int, waits: list[tuple[int, int]], *, name: str = NAMES[1], states: tuple[str, ...] = ()) -> Diagnosis:
    edges = tuple(
        Edge(a, b, Operation(a, "recv", b, 0, "world", file=name, line=123), in_cycle=index < 2) for index, (a, b) in enumerate(waits)
    )
    finding = Finding("deadlock", tuple(range(min(size, 2))), (), "ranks wait for each other.")
    return Diagnosis((finding,), size, edges, states or ("blocked",) * size)


def labels_of(ax: Axes) -> dict[str, Bbox]:
    """Every label that is written, by its words."""
    return {text.get_text(): text.get_window_extent() for text in ax.texts if "→" in text.get_text()}


def overlap(one: Bbox, other: Bbox) -> float:
    """By how many pixels two boxes lie over each other; 0 and less where they do not."""
    return min(min(one.x1, other.x1) - max(one.x0, other.x0), min(one.y1, other.y1) - max(one.y0, other.y0))


def assert_readable(ax: Axes) -> None:
    ax.figure.canvas.draw()
    labels = labels_of(ax)
    nodes = [patch.get_window_extent() for patch in ax.patches if isinstance(patch, Circle) and (patch.get_gid() or "").startswith("rank-")]
    words = [text.get_window_extent() for text in ax.texts if "→" not in text.get_text()]
    for (one, box), (other, its) in combinations(labels.items(), 2):
        assert overlap(box, its) < 1, f"{one!r} over {other!r}"
    for one, box in labels.items():
        assert all(overlap(box, node) < 1 for node in nodes), f"{one!r} over a node"
        assert all(overlap(box, other) < 1 for other in words), f"{one!r} over words"
        assert ax.figure.bbox.x0 <= box.x0
        assert box.x1 <= ax.figure.bbox.x1
    missing = [text.get_text() for text in ax.texts if text.get_text().startswith("No room was left")]
    arrows = [patch for patch in ax.patches if (patch.get_gid() or "").startswith("waits-")]
    said = int(missing[0].split()[6]) if missing else 0
    assert len(labels) + said == len(arrows), "what is not labelled is said to be"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("size", "waits"),
    [
        (2, [(0, 1), (1, 0)]),
        (3, ROTATED[3]),
        (3, [(0, 1), (1, 0), (2, 0)]),
        (3, [(0, 1), (1, 0), (2, 1)]),
        (4, ROTATED[4]),
        (4, [(0, 2), (2, 0), (1, 3), (3, 1)]),
        (6, ROTATED[6]),
    ],
)
def test_few_ranks_have_all_their_labels(size: int, waits: list[tuple[int, int]], name: str) -> None:
    """Two opposite arrows had their labels one over the other, and so had a ring of three."""
    ax = plot_waitfor(diagnosis(size, waits, name=name))
    assert_readable(ax)
    assert {label.split(":")[0] for label in labels_of(ax)} == {f"{rank} → {peer}" for rank, peer in waits}


@given(st.data())
def test_labels_never_cover_each_other(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 12))
    pairs = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)).filter(lambda pair: pair[0] != pair[1])
    waits = data.draw(st.lists(pairs, unique=True, min_size=1, max_size=16))
    states = tuple(data.draw(st.lists(st.sampled_from(["blocked", "exited", "stopped", "running"]), min_size=size, max_size=size)))
    with style.drawing():
        assert_readable(plot_waitfor(diagnosis(size, waits, name=data.draw(st.sampled_from(NAMES)), states=states)))
    plt.close("all")


@pytest.mark.parametrize("size", [2, 3, 12])
def test_nodes_do_not_touch(size: int) -> None:
    ax = plot_waitfor(diagnosis(size, ROTATED[size]))
    nodes = [patch for patch in ax.patches if isinstance(patch, Circle)]
    for one, other in combinations(nodes, 2):
        assert np.hypot(*np.subtract(one.center, other.center)) > one.radius + other.radius


def test_many_waits_of_one_rank_for_another_are_one_arrow() -> None:
    ax = plot_waitfor(diagnosis(2, [(0, 1), (0, 1), (0, 1), (1, 0)]))
    arrows = [patch.get_gid() for patch in ax.patches if (patch.get_gid() or "").startswith("waits-")]
    assert sorted(arrows) == ["waits-0-1", "waits-1-0"]
    assert "0 → 1: recv, tag 0 and 2 more\npipeline_training.py:123" in labels_of(ax)


def test_axes_of_another_size_are_labelled_as_well() -> None:
    figure = Figure(figsize=(9, 3))
    ax = plot_waitfor(diagnosis(3, ROTATED[3]), ax=figure.add_subplot())
    assert_readable(ax)


def test_one_rank_alone() -> None:
    assert waitfor_png(diagnosis(1, []))[1:4] == b"PNG"
