"""The ring's picture: where ranks are, which groups are tubes, how wide the arrows are, and what the words say."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from synthetic import Story, pipeline

from ringsim.plot.ring import CLOSING_COLOUR, MOST_CHORD_LABELS, THINNEST, bytes_matrix, communication_graph, plot_ring
from ringsim.traces.value import Trace

NOW = (0.0, 0.0, 1.0)


@pytest.fixture(autouse=True)
def no_figures_left():
    yield
    plt.close("all")


def ring_trace(world_size: int, *, both_ways: bool = False, closing: bool = True) -> Trace:
    """Each rank sends (rank + 1) KiB to its successor, and with ``both_ways`` gets half of it back."""
    story = Story(world_size)
    for rank in range(world_size if closing else world_size - 1):
        succ = (rank + 1) % world_size
        if world_size > 1:
            story.message(rank, succ, NOW, NOW, 1024 * (rank + 1))
            if both_ways:
                story.message(succ, rank, NOW, NOW, 512 * (rank + 1), group=f"ring:{rank}>{succ}")
    return story.trace(ranks=[{"rank": rank, "pid": 100 + rank} for rank in range(world_size)])


def patches(ax: Axes, prefix: str) -> dict[str, Any]:
    return {patch.get_gid(): patch for patch in ax.patches if (patch.get_gid() or "").startswith(prefix)}


def tip(arrow: Any) -> np.ndarray:
    corners = arrow.get_xy()[:-1]  # the last closes the polygon
    return corners[len(corners) // 2]


def shaft(arrow: Any) -> tuple[np.ndarray, float]:
    """Where the arrow begins, and its width there."""
    corners = arrow.get_xy()[:-1]
    return (corners[0] + corners[-1]) / 2, float(np.hypot(*(corners[0] - corners[-1])))


def words(ax: Axes) -> str:
    return "\n".join(text.get_text() for text in ax.texts)


@pytest.mark.parametrize("world_size", [2, 3, 4, 16])
def test_ranks_go_clockwise_from_the_top(world_size: int) -> None:
    nodes = patches(plot_ring(ring_trace(world_size)), "rank-")
    assert len(nodes) == world_size
    for rank in range(world_size):
        angle = 2 * np.pi * rank / world_size
        assert nodes[f"rank-{rank}"].center == pytest.approx((np.sin(angle), np.cos(angle)), abs=1e-9)


@pytest.mark.parametrize("world_size", [2, 3, 4, 16])
def test_each_arrow_leads_from_its_sender_to_its_receiver(world_size: int) -> None:
    ax = plot_ring(ring_trace(world_size, both_ways=True))
    nodes, arrows = patches(ax, "rank-"), patches(ax, "forward-") | patches(ax, "backward-")
    assert len(arrows) == 2 * world_size
    for name, arrow in arrows.items():
        pred, succ = (int(rank) for rank in name.split("ring:")[1].split(">"))
        src, dst = (pred, succ) if name.startswith("forward") else (succ, pred)
        for point, rank in ((shaft(arrow)[0], src), (tip(arrow), dst)):
            distance = {other: np.hypot(*(point - np.array(node.center))) for other, node in nodes.items()}
            assert min(distance, key=distance.__getitem__) == f"rank-{rank}"
            assert distance[f"rank-{rank}"] >= nodes[f"rank-{rank}"].radius  # nothing under a node


def test_arrows_are_as_wide_as_their_bytes() -> None:
    arrows = patches(plot_ring(ring_trace(4)), "forward-")
    widths = [shaft(arrows[f"forward-ring:{rank}>{(rank + 1) % 4}"])[1] for rank in range(4)]
    assert widths == pytest.approx([widths[3] * (rank + 1) / 4 for rank in range(4)], rel=1e-3)


def test_an_arrow_of_few_bytes_can_still_be_seen() -> None:
    story = Story(3)
    story.message(0, 1, NOW, NOW, 4)
    story.message(1, 2, NOW, NOW, 1 << 30)
    assert shaft(patches(plot_ring(story.trace()), "forward-")["forward-ring:0>1"])[1] == pytest.approx(THINNEST)


def test_groups_built_and_messages_sent_are_told_apart() -> None:
    ax = plot_ring(ring_trace(4, closing=False))
    tubes = patches(ax, "group-")
    assert len(tubes) == 4
    solid = [name for name, tube in tubes.items() if tube.get_linestyle() in ("solid", "-")]
    assert sorted(solid) == ["group-ring:0>1", "group-ring:1>2", "group-ring:2>3"]
    assert "ring:3>0\nnothing sent" in words(ax)
    assert "4 pair groups built, 3 used" in words(ax)


def test_the_closing_edge_has_a_colour_of_its_own() -> None:
    arrows = patches(plot_ring(ring_trace(4)), "forward-")
    colours = {name: arrow.get_facecolor() for name, arrow in arrows.items()}
    closing = colours.pop("forward-ring:3>0")
    assert plt.matplotlib.colors.to_hex(closing).upper() == CLOSING_COLOUR
    assert closing not in colours.values()


@pytest.mark.parametrize("world_size", [5, 8, 16])
def test_neighbouring_groups_never_look_alike(world_size: int) -> None:
    arrows = patches(plot_ring(ring_trace(world_size)), "forward-")
    colours = [arrows[f"forward-ring:{rank}>{(rank + 1) % world_size}"].get_facecolor() for rank in range(world_size)]
    assert all(colours[rank] != colours[rank - 1] for rank in range(world_size))


def test_one_rank_is_a_node_without_edges_and_says_so() -> None:
    ax = plot_ring(ring_trace(1))
    assert list(patches(ax, "rank-")) == ["rank-0"]
    assert not patches(ax, "group-")
    assert "no edges" in ax.get_title(loc="left")


def test_two_ranks_have_two_parallel_tubes() -> None:
    ax = plot_ring(ring_trace(2))
    right, left = (patches(ax, "group-")[f"group-ring:{name}"].get_xy().mean(axis=0)[0] for name in ("0>1", "1>0"))
    assert right > 0.4
    assert left < -0.4
    assert len(patches(ax, "forward-")) == 2


def test_messages_outside_the_ring_cross_it() -> None:
    story = Story(4)
    story.message(0, 2, NOW, NOW, group="world")
    story.message(0, 1, NOW, NOW, group="world")  # neighbours, but not on their pair group
    ax = plot_ring(story.trace())
    assert sorted(patches(ax, "outside-")) == ["outside-0-1-world", "outside-0-2-world"]
    assert not patches(ax, "forward-")
    assert "none on the ring" in ax.get_title(loc="left")
    assert words(ax).count("nothing sent") == 4
    for path in patches(ax, "outside-").values():
        assert np.hypot(*path.get_xy().T).max() < 1  # inside the circle


def test_every_crossing_arrow_is_drawn_and_missing_labels_are_said() -> None:
    story = Story(8, ring=False)
    for src, dst in combinations(range(8), 2):
        story.message(src, dst, NOW, NOW, 1024 * (8 * src + dst), group="world")
    ax = plot_ring(story.trace())
    assert len(patches(ax, "outside-")) == 28
    assert f"all 28 are drawn, the {MOST_CHORD_LABELS} widest are labelled" in words(ax)


def test_what_is_not_drawn_is_said() -> None:
    story = Story(3)
    story.op(0, "isend", (0, 0, -1), peer=1, group="ring:0>1", size_bytes=8)
    story.op(0, "all_reduce", (0, 0, 1), group="world", size_bytes=8)
    ax = plot_ring(story.trace())
    assert "Not drawn: 1 send that never finished." in words(ax)
    assert "Not drawn: 1 collective operation." in words(ax)
    assert not patches(ax, "forward-")


def test_a_message_that_arrived_was_sent_also_where_the_sender_never_waited() -> None:
    """Lesson 00's failing run said "nothing sent" of an edge whose message the timeline showed arriving."""
    story = Story(3)
    story.message(0, 1, (0, -1, -1), (0, 1, 2), 8, group="ring:0>1")
    story.message(1, 2, (0, -1, -1), (0, 1, -1), 8, group="ring:1>2")  # neither side got done
    graph = communication_graph(story.trace())
    assert graph.edges[0, 1, "ring:0>1"] == {"lane": "forward", "messages": 1, "size_bytes": 8}
    assert graph.edges[1, 2, "ring:1>2"]["messages"] == 0
    assert graph.graph["unfinished"] == 1


@pytest.mark.parametrize(("world_size", "is_matrix"), [(16, False), (17, True)])
def test_above_sixteen_ranks_a_matrix_is_drawn(world_size: int, is_matrix: bool) -> None:
    ax = plot_ring(ring_trace(world_size, closing=False))
    assert bool(ax.images) == is_matrix
    assert bool(patches(ax, "rank-")) != is_matrix
    if is_matrix:
        assert ax.get_ylabel() == "sending rank"
        assert ax.images[0].colorbar.ax.get_ylabel() == "bytes sent"
        ax.figure.canvas.draw()
        assert any("KiB" in label.get_text() for label in ax.images[0].colorbar.ax.get_yticklabels())
        assert ax.get_ylim()[0] > ax.get_ylim()[1]  # rank 0 on top


@pytest.mark.parametrize("most_cells", [5, 8, 64])
def test_the_matrix_keeps_every_byte(most_cells: int) -> None:
    graph = communication_graph(ring_trace(33, both_ways=True))
    cells, shared = bytes_matrix(graph, most_cells)
    assert len(cells) <= most_cells
    assert len(cells) * shared >= 33
    assert cells[cells >= 0].sum() == sum(data["size_bytes"] for *_, data in graph.edges(data=True))


@pytest.mark.parametrize("world_size", range(1, 17))
@pytest.mark.parametrize("both_ways", [False, True])
def test_no_words_overlap_and_none_is_cut_off(world_size: int, both_ways: bool) -> None:
    ax = plot_ring(ring_trace(world_size, both_ways=both_ways))
    ax.figure.canvas.draw()
    legend = ax.get_legend()
    boxes = [text.get_window_extent() for text in [*ax.texts, *(legend.get_texts() if legend else [])]]
    canvas = ax.figure.bbox
    for box in boxes:
        assert canvas.x0 <= box.x0
        assert box.x1 <= canvas.x1
        assert canvas.y0 <= box.y0
        assert box.y1 <= canvas.y1
    for one, other in combinations(boxes, 2):
        wide = min(one.x1, other.x1) - max(one.x0, other.x0)
        high = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert min(wide, high) < 1.5, "pixels of overlap"


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans(), st.integers(0, 3)), max_size=30))
def test_the_graph_counts_every_finished_send_once(world_size: int, sends: list[tuple[int, int, bool, int]]) -> None:
    story = Story(world_size)
    for src, dst, finished, size in sends:
        src, dst = src % world_size, dst % world_size
        neighbours = world_size > 1 and (src + 1) % world_size == dst
        group = f"ring:{src}>{dst}" if neighbours and size % 2 else "world"
        story.op(src, "isend", (0, 0, 1 if finished else -1), peer=dst, group=group, size_bytes=4 * size)
    graph = communication_graph(story.trace())
    edges = [data for *_, data in graph.edges(data=True)]
    assert sum(data["messages"] for data in edges) == sum(finished for _, _, finished, _ in sends)
    assert sum(data["size_bytes"] for data in edges) == sum(4 * size for _, _, finished, size in sends if finished)
    assert graph.graph["unfinished"] == sum(not finished for _, _, finished, _ in sends)
    assert len(graph) == world_size


def test_a_ring_over_some_of_the_ranks() -> None:
    story = Story(4, ring=False)
    story.ring_groups = [["ring:0>2", [0, 2]], ["ring:2>0", [0, 2]], ["ring:1>3", [1, 3]], ["ring:3>1", [1, 3]]]
    assert len(patches(plot_ring(story.trace()), "group-")) == 4


def test_it_draws_on_axes_that_it_is_given() -> None:
    _, (left, right) = plt.subplots(1, 2)
    assert plot_ring(pipeline(3), ax=right) is right
    assert len(plt.get_fignums()) == 1
    assert not left.patches
