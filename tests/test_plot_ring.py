"""Pictures of ranks: the ring with its groups, the matrix of many ranks, and who waits for whom."""

from __future__ import annotations

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
from pictures import assert_apart, assert_within, drawn, legend, overlap, title, words
from synthetic import Story

from ringsim import Trace
from ringsim.plot import style
from ringsim.plot.ring import (
    CLOSING_COLOUR,
    MOST_CHORD_LABELS,
    THINNEST,
    arc,
    arrow,
    beside,
    bytes_matrix,
    communication_graph,
    plot_ring,
)
from ringsim.plot.waitfor import plot_waitfor
from ringsim.traces.findings import Diagnosis, Edge, Finding, Operation

NOW = (0.0, 0.0, 1.0)


def ring_trace(world_size: int, *, both_ways: bool = False, closing: bool = True) -> Trace:
    """Each rank sends (rank + 1) KiB to its successor.

    With ``both_ways`` it gets half of it back.
    """
    story = Story(world_size)
    for rank in range(world_size - (not closing) if world_size > 1 else 0):
        succ = (rank + 1) % world_size
        story.message(rank, succ, NOW, NOW, 1024 * (rank + 1))
        if both_ways:
            story.message(succ, rank, NOW, NOW, 512 * (rank + 1), group=f"ring:{rank}>{succ}")
    return story.trace()


def patches(ax: Axes, prefix: str) -> dict[str, Any]:
    return drawn(ax.patches, prefix)


def ends(one: Any) -> tuple[np.ndarray, np.ndarray, float]:
    """Where the arrow begins, its tip, and its width at the beginning."""
    corners = one.get_xy()[:-1]  # the last closes the polygon
    return (
        (corners[0] + corners[-1]) / 2,
        corners[len(corners) // 2],
        float(np.hypot(*(corners[0] - corners[-1]))),
    )


@pytest.mark.parametrize("world_size", [2, 3, 16])
def test_ranks_go_clockwise_and_each_arrow_leads_from_its_sender_to_its_receiver(
    world_size: int,
) -> None:
    ax = plot_ring(ring_trace(world_size, both_ways=True))
    nodes, arrows = patches(ax, "rank-"), patches(ax, "forward-") | patches(ax, "backward-")
    assert (len(nodes), len(arrows), len(patches(ax, "group-"))) == (
        world_size,
        2 * world_size,
        world_size,
    )
    for rank in range(world_size):
        angle = 2 * np.pi * rank / world_size
        assert nodes[f"rank-{rank}"].center == pytest.approx(
            (np.sin(angle), np.cos(angle)), abs=1e-9
        )
    for name, one in arrows.items():
        pred, succ = (int(rank) for rank in name.split("ring:")[1].split(">"))
        start, tip, _ = ends(one)
        for point, rank in zip(
            (start, tip), (pred, succ) if name.startswith("forward") else (succ, pred), strict=True
        ):
            distance = {
                other: np.hypot(*(point - np.array(node.center))) for other, node in nodes.items()
            }
            assert min(distance, key=distance.__getitem__) == f"rank-{rank}"
            assert distance[f"rank-{rank}"] >= nodes[f"rank-{rank}"].radius, "nothing under a node"


def test_arrows_are_as_wide_as_their_bytes_and_can_be_seen() -> None:
    arrows = patches(plot_ring(ring_trace(4)), "forward-")
    widths = [ends(arrows[f"forward-ring:{rank}>{(rank + 1) % 4}"])[2] for rank in range(4)]
    assert widths == pytest.approx([widths[3] * (rank + 1) / 4 for rank in range(4)], rel=1e-3)
    story = Story(3)
    story.message(0, 1, NOW, NOW, 4)
    story.message(1, 2, NOW, NOW, 1 << 30)
    assert ends(patches(plot_ring(story.trace()), "forward-")["forward-ring:0>1"])[
        2
    ] == pytest.approx(THINNEST)
    path = arc(0.0, 1.0)
    corners = arrow(path, 0.05, head=0.1)
    assert corners[len(corners) // 2].tolist() == path[-1].tolist()
    assert np.hypot(*(corners[0] - corners[-1])) == pytest.approx(0.05)
    assert np.hypot(*beside(path, 0.1).T) == pytest.approx(np.full(len(path), 1.1), abs=2e-3), (
        "the left of clockwise is outside"
    )


def test_groups_built_and_messages_sent_are_told_apart() -> None:
    ax = plot_ring(ring_trace(4, closing=False))
    solid = [
        name
        for name, tube in patches(ax, "group-").items()
        if tube.get_linestyle() in ("solid", "-")
    ]
    assert sorted(solid) == ["group-ring:0>1", "group-ring:1>2", "group-ring:2>3"]
    assert "ring:3>0\nnothing sent" in words(ax)
    assert "4 pair groups built, 3 used" in words(ax)
    some = Story(4, ring=False)  # a ring over some of the ranks
    some.ring_groups = [[f"ring:{a}>{b}", [a, b]] for a, b in ((0, 2), (2, 0), (1, 3), (3, 1))]
    assert len(patches(plot_ring(some.trace()), "group-")) == 4


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 12, 16])
def test_neighbouring_groups_never_look_alike_and_no_words_overlap(world_size: int) -> None:
    ax = plot_ring(ring_trace(world_size, both_ways=world_size % 2 == 0))
    assert_apart(assert_within(ax))
    arrows = patches(ax, "forward-")
    if world_size == 1:
        assert (list(patches(ax, "rank-")), patches(ax, "group-")) == (["rank-0"], {})
        assert "no edges" in title(ax)
    elif world_size == 2:
        right, left = (
            patches(ax, f"group-ring:{name}").popitem()[1].get_xy().mean(axis=0)[0]
            for name in ("0>1", "1>0")
        )
        assert left < -0.4 < 0.4 < right
    else:
        colours = [
            arrows[f"forward-ring:{rank}>{(rank + 1) % world_size}"].get_facecolor()
            for rank in range(world_size)
        ]
        assert all(colours[rank] != colours[rank - 1] for rank in range(world_size))
        assert plt.matplotlib.colors.to_hex(colours[-1]).upper() == CLOSING_COLOUR
        assert colours[-1] not in colours[:-1]


def test_messages_outside_the_ring_cross_it_and_what_is_not_drawn_is_said() -> None:
    story = Story(4)
    story.message(0, 2, NOW, NOW, group="world")
    story.message(0, 1, NOW, NOW, group="world")  # neighbours, but not on their pair group
    story.op(0, "isend", (0, 0, -1), peer=1, group="ring:0>1", size_bytes=8)
    story.op(0, "all_reduce", (0, 0, 1), group="world", size_bytes=8)
    ax = plot_ring(story.trace())
    across = patches(ax, "outside-")
    assert sorted(across) == ["outside-0-1-world", "outside-0-2-world"]
    assert all(np.hypot(*path.get_xy().T).max() < 1 for path in across.values()), (
        "inside the circle"
    )
    assert not patches(ax, "forward-")
    assert "none on the ring" in title(ax)
    assert words(ax).count("nothing sent") == 4
    assert "Not drawn: 1 send that never finished.\nNot drawn: 1 collective operation." in words(ax)
    many = Story(8, ring=False)
    for src, dst in combinations(range(8), 2):
        many.message(src, dst, NOW, NOW, 1024 * (8 * src + dst), group="world")
    ax = plot_ring(many.trace())
    assert len(patches(ax, "outside-")) == 28
    assert f"all 28 are drawn, the {MOST_CHORD_LABELS} widest are labelled" in words(ax)


def test_a_message_that_arrived_was_sent_also_where_the_sender_never_waited() -> None:
    """Lesson 00's failing run said "nothing sent" of an edge.

    Yet the timeline showed its message arriving.
    """
    story = Story(3)
    story.message(0, 1, (0, -1, -1), (0, 1, 2), 8, group="ring:0>1")
    story.message(1, 2, (0, -1, -1), (0, 1, -1), 8, group="ring:1>2")  # neither side got done
    graph = communication_graph(story.trace())
    assert graph.edges[0, 1, "ring:0>1"] == {"lane": "forward", "messages": 1, "size_bytes": 8}
    assert graph.edges[1, 2, "ring:1>2"]["messages"] == 0
    assert graph.graph["unfinished"] == 1


@given(
    st.integers(1, 6),
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans(), st.integers(0, 3)),
        max_size=30,
    ),
)
def test_the_graph_counts_every_finished_send_once(
    world_size: int, sends: list[tuple[int, int, bool, int]]
) -> None:
    story = Story(world_size)
    for src, dst, finished, size in sends:
        src, dst = src % world_size, dst % world_size
        neighbours = world_size > 1 and (src + 1) % world_size == dst
        group = f"ring:{src}>{dst}" if neighbours and size % 2 else "world"
        story.op(
            src, "isend", (0, 0, 1 if finished else -1), peer=dst, group=group, size_bytes=4 * size
        )
    graph = communication_graph(story.trace())
    edges = [data for *_, data in graph.edges(data=True)]
    assert sum(data["messages"] for data in edges) == sum(finished for _, _, finished, _ in sends)
    assert sum(data["size_bytes"] for data in edges) == sum(
        4 * size for _, _, finished, size in sends if finished
    )
    assert graph.graph["unfinished"] == sum(not finished for _, _, finished, _ in sends)
    assert len(graph) == world_size


def test_above_sixteen_ranks_a_matrix_is_drawn_that_keeps_every_byte() -> None:
    assert not plot_ring(ring_trace(16, closing=False)).images
    ax = plot_ring(ring_trace(17, closing=False))
    (picture,) = ax.images
    assert not patches(ax, "rank-")
    assert (ax.get_ylabel(), picture.colorbar.ax.get_ylabel()) == ("sending rank", "bytes sent")
    ax.figure.canvas.draw()
    assert any("KiB" in label.get_text() for label in picture.colorbar.ax.get_yticklabels())
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "rank 0 on top"
    graph = communication_graph(ring_trace(33, both_ways=True))
    for most_cells in (5, 8, 64):
        cells, shared = bytes_matrix(graph, most_cells)
        assert len(cells) <= most_cells
        assert len(cells) * shared >= 33
        assert cells[cells >= 0].sum() == sum(
            data["size_bytes"] for *_, data in graph.edges(data=True)
        )


@pytest.mark.parametrize("world_size", [4, 18])
def test_links_between_hosts_are_marked(world_size: int) -> None:
    trace = ring_trace(world_size)
    trace.metadata["ranks"] = [
        {"rank": rank, "host": f"node{2 * rank // world_size}"} for rank in range(world_size)
    ]
    ax = plot_ring(trace)
    if world_size == 4:
        marked = [name for name, tube in patches(ax, "group-").items() if tube.get_linewidth() == 2]
        assert sorted(marked) == ["group-ring:1>2", "group-ring:3>0"]
        assert words(ax).count("node1") == 2
        assert "from host to host" in legend(ax)
    else:
        assert [line.get_ydata()[0] for line in ax.lines if line.get_gid() == "hosts"] == [8.5, 0]


# -- who waits for whom

ROTATED = {size: [(rank, (rank + 1) % size) for rank in range(size)] for size in range(2, 13)}
NAMES = ("a.py", "pipeline_training.py", "a_file_with_a_name_that_nobody_would_want_to_type.py")
BLOCKED = ("blocked",) * 12


def diagnosis(
    size: int,
    waits: list[tuple[int, int]],
    *,
    name: str = NAMES[1],
    states: tuple[str, ...] = BLOCKED,
) -> Diagnosis:
    edges = tuple(
        Edge(a, b, Operation(a, "recv", b, 0, "world", file=name, line=123), in_cycle=index < 2)
        for index, (a, b) in enumerate(waits)
    )
    finding = Finding("deadlock", tuple(range(min(size, 2))), (), "ranks wait for each other.")
    return Diagnosis((finding,), size, edges, states[:size])


def labels_of(ax: Axes) -> dict[str, Bbox]:
    """Every label that is written, by its words."""
    return {
        text.get_text(): text.get_window_extent() for text in ax.texts if "→" in text.get_text()
    }


def assert_readable(ax: Axes) -> None:
    """No label covers a label, a node or other words; what is not labelled is said to be."""
    labels = labels_of(ax)
    taken = [patch.get_window_extent() for patch in patches(ax, "rank-").values()]
    taken += [text.get_window_extent() for text in ax.texts if "→" not in text.get_text()]
    assert_apart([*labels.values()], 1)
    for one, box in labels.items():
        assert all(overlap(box, other) < 1 for other in taken), f"{one!r} covers something"
        assert ax.figure.bbox.x0 <= box.x0 < box.x1 <= ax.figure.bbox.x1
    missing = [
        text.get_text() for text in ax.texts if text.get_text().startswith("No room was left")
    ]
    assert len(labels) + (int(missing[0].split()[6]) if missing else 0) == len(
        patches(ax, "waits-")
    )


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize(
    "waits",
    [*(ROTATED[size] for size in (2, 3, 4, 6)), [(0, 1), (1, 0), (2, 0)],
     [(0, 2), (2, 0), (1, 3), (3, 1)]],
)  # fmt: skip
def test_few_ranks_have_all_their_labels(waits: list[tuple[int, int]], name: str) -> None:
    """Two opposite arrows had their labels one over the other, and so had a ring of three."""
    ax = plot_waitfor(diagnosis(max(rank for rank, _ in waits) + 1, waits, name=name))
    assert_readable(ax)
    assert {label.split(":")[0] for label in labels_of(ax)} == {
        f"{rank} → {peer}" for rank, peer in waits
    }


@given(st.data())
def test_labels_never_cover_each_other(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 12))
    pairs = st.tuples(st.integers(0, size - 1), st.integers(1, size - 1)).map(
        lambda pair: (pair[0], sum(pair) % size)
    )
    waits = data.draw(st.lists(pairs, unique=True, min_size=1, max_size=16))
    states = tuple(
        data.draw(
            st.lists(
                st.sampled_from(["blocked", "exited", "stopped", "running"]),
                min_size=size,
                max_size=size,
            )
        )
    )
    with style.drawing():
        assert_readable(
            plot_waitfor(
                diagnosis(size, waits, name=data.draw(st.sampled_from(NAMES)), states=states)
            )
        )
    plt.close("all")


def test_nodes_do_not_touch_and_many_waits_for_one_rank_are_one_arrow() -> None:
    for size in (2, 3, 12):
        for one, other in combinations(
            patches(plot_waitfor(diagnosis(size, ROTATED[size])), "rank-").values(), 2
        ):
            assert np.hypot(*np.subtract(one.center, other.center)) > one.radius + other.radius
    ax = plot_waitfor(diagnosis(2, [(0, 1), (0, 1), (0, 1), (1, 0)]))
    assert sorted(patches(ax, "waits-")) == ["waits-0-1", "waits-1-0"]
    assert "0 → 1: recv, tag 0 and 2 more\npipeline_training.py:123" in labels_of(ax)
    assert_readable(plot_waitfor(diagnosis(3, ROTATED[3]), ax=Figure(figsize=(9, 3)).add_subplot()))
    assert len(patches(plot_waitfor(diagnosis(1, [])), "rank-")) == 1
