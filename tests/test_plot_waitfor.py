"""Tests of pictures of waiting ranks: arrows, nodes, and labels that cover nothing."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from pictures import assert_apart, drawn, overlap, words

from ringsim.traces.findings import Diagnosis, Edge, Finding, Operation


def patches(ax: Axes, prefix: str) -> dict[str, Any]:
    return drawn(ax.patches, prefix)


ROTATED = {size: [(rank, (rank + 1) % size) for rank in range(size)] for size in range(2, 13)}
NAMES = ("a.py", "pipeline_training.py", "a_file_with_a_name_that_nobody_would_want_to_type.py")


def diagnosis(
    size: int, waits: list[tuple[int, int]], name: str = NAMES[1], states: tuple[str, ...] = (),
) -> Diagnosis:  # fmt: skip
    edges = tuple(
        Edge(a, b, Operation(a, "recv", b, 0, "world", file=name, line=123), in_cycle=index < 2)
        for index, (a, b) in enumerate(waits)
    )
    finding = Finding("deadlock", tuple(range(min(size, 2))), (), "ranks wait for each other.")
    return Diagnosis((finding,), size, edges, states or ("blocked",) * size)


def labels_of(ax: Axes) -> dict[str, Bbox]:
    """Returns all written labels, by their text."""
    return {text.get_text(): text.get_window_extent() for text in ax.texts if "→" in str(text)}


def assert_readable(ax: Axes) -> None:
    """Labels cover no other label, node or text; a note counts the omitted ones."""
    labels = labels_of(ax)
    taken = [patch.get_window_extent() for patch in patches(ax, "rank-").values()]
    taken += [text.get_window_extent() for text in ax.texts if "→" not in str(text)]
    assert_apart([*labels.values()], 1)
    for one, box in labels.items():
        assert all(overlap(box, other) < 1 for other in taken), f"{one!r} covers a text or a node"
        assert ax.figure.bbox.x0 <= box.x0 < box.x1 <= ax.figure.bbox.x1
    missing = re.findall(r"^Not labelled, for lack of room: (\d+) arrow", words(ax), re.MULTILINE)
    assert len(labels) + sum(map(int, missing)) == len(patches(ax, "waits-"))


CROSSED = [(0, 2), (2, 0), (1, 3), (3, 1)]


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("waits", [ROTATED[2], ROTATED[3], ROTATED[6], CROSSED])
def test_few_ranks_have_all_their_labels(waits: list[tuple[int, int]], name: str) -> None:
    """The labels of two opposite arrows, and of a ring of three, were on top of each other."""
    ax = diagnosis(max(rank for rank, _ in waits) + 1, waits, name).plot()
    assert_readable(ax)
    ends = [label.split(":")[0].split(" → ") for label in labels_of(ax)]
    assert {(int(src), int(dst)) for src, dst in ends} == set(waits)


@given(st.data())
def test_labels_never_cover_each_other(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 12))
    ranks, states = st.integers(0, size - 1), ["blocked", "exited", "stopped", "running"]
    pairs = st.tuples(ranks, ranks).filter(lambda pair: pair[0] != pair[1])
    waits = data.draw(st.lists(pairs, unique=True, min_size=1, max_size=16))
    each = st.lists(st.sampled_from(states), min_size=size, max_size=size)
    name = data.draw(st.sampled_from(NAMES))
    assert_readable(diagnosis(size, waits, name, tuple(data.draw(each))).plot())
    plt.close("all")


def test_nodes_do_not_touch_and_many_waits_for_one_rank_are_one_arrow() -> None:
    for size in (2, 3, 12):
        nodes = patches(diagnosis(size, ROTATED[size]).plot(), "rank-").values()
        for one, other in combinations(nodes, 2):
            assert np.hypot(*np.subtract(one.center, other.center)) > one.radius + other.radius
    ax = diagnosis(2, [(0, 1), (0, 1), (0, 1), (1, 0)]).plot()
    assert sorted(patches(ax, "waits-")) == ["waits-0-1", "waits-1-0"]
    assert "0 → 1: recv, tag 0 and 2 more\npipeline_training.py:123" in labels_of(ax)
    assert_readable(diagnosis(3, ROTATED[3]).plot(ax=Figure(figsize=(9, 3)).add_subplot()))
    assert len(patches(diagnosis(1, []).plot(), "rank-")) == 1
