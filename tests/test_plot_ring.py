"""Tests of pictures of messages: the ring with its groups, and the matrix of many ranks."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from pictures import assert_apart, assert_within, drawn, legend, title, words
from synthetic import Story

from ringsim import Trace

NOW = (0.0, 0.0, 1.0)


def ring_trace(world_size: int, *, both_ways: bool = False, closing: bool = True) -> Trace:
    """Each rank sends (rank + 1) KiB to its successor.

    With ``both_ways`` it gets half of the bytes back.
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
    """Returns the start, the tip and the width of an arrow."""
    corners = one.get_xy()[:-1]  # the last point closes the polygon
    sides = corners[0], corners[-1]
    return (
        np.mean(sides, axis=0),
        corners[len(corners) // 2],
        float(np.hypot(*(sides[0] - sides[1]))),
    )


def test_ranks_go_clockwise_and_each_arrow_leads_from_its_sender_to_its_receiver() -> None:
    world_size = 5
    ax = ring_trace(world_size, both_ways=True).plot_ring()
    nodes, arrows = patches(ax, "rank-"), patches(ax, "forward-") | patches(ax, "backward-")
    assert (len(nodes), len(arrows)) == (world_size, 2 * world_size)
    assert len(patches(ax, "group-")) == world_size
    angles = 2 * np.pi * np.arange(world_size) / world_size
    centres = np.array([nodes[f"rank-{rank}"].center for rank in range(world_size)])
    assert centres == pytest.approx(np.stack([np.sin(angles), np.cos(angles)], axis=1), abs=1e-9)
    for name, one in arrows.items():
        pred, succ = (int(rank) for rank in name.split("ring:")[1].split(">"))
        start, tip, _ = ends(one)
        way = (pred, succ) if name.startswith("forward") else (succ, pred)
        for point, rank in zip((start, tip), way, strict=True):
            distances = np.hypot(*(point - centres).T)
            assert distances.argmin() == rank
            assert distances[rank] >= nodes[f"rank-{rank}"].radius, "arrows must end outside nodes"


def test_arrows_are_as_wide_as_their_bytes_and_can_be_seen() -> None:
    arrows = patches(ring_trace(4).plot_ring(), "forward-")
    widths = [ends(arrows[f"forward-ring:{rank}>{(rank + 1) % 4}"])[2] for rank in range(4)]
    assert widths == pytest.approx([widths[3] * (rank + 1) / 4 for rank in range(4)], rel=1e-3)
    story = Story(3)
    story.message(0, 1, NOW, NOW, 4)
    story.message(1, 2, NOW, NOW, 1 << 30)
    thin, wide = (ends(one)[2] for one in patches(story.trace().plot_ring(), "forward-").values())
    assert wide / 10 < thin < wide / 5


def test_groups_built_and_messages_sent_are_told_apart() -> None:
    ax = ring_trace(4, closing=False).plot_ring()
    tubes = patches(ax, "group-")
    solid = [name for name, tube in tubes.items() if tube.get_linestyle() in ("solid", "-")]
    assert sorted(solid) == ["group-ring:0>1", "group-ring:1>2", "group-ring:2>3"]
    assert "ring:3>0\nnothing sent" in words(ax)
    assert "4 pair groups created, 3 used" in words(ax)
    some = Story(4, ring=False)  # a ring of only some ranks
    some.ring_groups = [[f"ring:{a}>{b}", [a, b]] for a, b in ((0, 2), (2, 0), (1, 3), (3, 1))]
    assert len(patches(some.trace().plot_ring(), "group-")) == 4


@pytest.mark.parametrize("world_size", [16, 1, 2, 3, 7])
def test_neighbouring_groups_never_look_alike_and_no_words_overlap(world_size: int) -> None:
    ax = ring_trace(world_size, both_ways=world_size % 2 == 0).plot_ring()
    assert_apart(assert_within(ax))
    arrows = patches(ax, "forward-")
    if world_size == 1:
        assert (list(patches(ax, "rank-")), patches(ax, "group-")) == (["rank-0"], {})
        assert "no edges" in title(ax)
    elif world_size > 2:
        names = [f"forward-ring:{rank}>{(rank + 1) % world_size}" for rank in range(world_size)]
        colours = [arrows[name].get_facecolor() for name in names]
        assert all(one != other for one, other in pairwise(colours))
        assert colours[-1] not in colours[:-1], "the closing edge must have another colour"


def test_messages_outside_the_ring_cross_it_and_what_is_not_drawn_is_said() -> None:
    story = Story(4)
    story.message(0, 2, NOW, NOW, group="world")
    story.message(0, 1, NOW, NOW, group="world")  # neighbours, but not on their pair group
    story.op(0, "isend", (0, 0, -1), peer=1, group="ring:0>1", size_bytes=8)
    story.op(0, "all_reduce", (0, 0, 1), group="world", size_bytes=8)
    ax = story.trace().plot_ring()
    across = patches(ax, "outside-")
    assert sorted(across) == ["outside-0-1-world", "outside-0-2-world"]
    assert all(np.hypot(*path.get_xy().T).max() < 1 for path in across.values()), "in the circle"
    assert not patches(ax, "forward-")
    assert title(ax) == "4 ranks: 2 messages, 8 KiB, none on the ring"
    assert words(ax).count("nothing sent") == 4
    assert "Not drawn: 1 send that never finished.\nNot drawn: 1 collective operation." in words(ax)
    many = Story(8, ring=False)
    for src, dst in combinations(range(8), 2):
        many.message(src, dst, NOW, NOW, 1024 * (8 * src + dst), group="world")
    ax = many.trace().plot_ring()
    assert len(patches(ax, "outside-")) == 28
    assert re.search("All 28 arrows .* only the 12 widest are labelled", words(ax))


def test_a_message_that_arrived_was_sent_also_where_the_sender_never_waited() -> None:
    """The failing run of lesson 00 showed "nothing sent" at an edge whose message arrived."""
    story = Story(3)
    story.message(0, 1, (0, -1, -1), (0, 1, 2), 8, group="ring:0>1")
    story.message(1, 2, (0, -1, -1), (0, 1, -1), 8, group="ring:1>2")  # neither side finished
    ax = story.trace().plot_ring()
    assert list(patches(ax, "forward-")) == ["forward-ring:0>1"]
    assert "Not drawn: 1 send that never finished." in words(ax)
    assert title(ax) == "3 ranks sent 1 message, 8 B"


def test_above_sixteen_ranks_a_matrix_is_drawn_that_keeps_every_byte() -> None:
    assert not ring_trace(16, closing=False).plot_ring().images
    ax = ring_trace(17, closing=False).plot_ring()
    (picture,) = ax.images
    assert not patches(ax, "rank-")
    assert (ax.get_ylabel(), picture.colorbar.ax.get_ylabel()) == ("sending rank", "bytes sent")
    ax.figure.canvas.draw()
    assert any("KiB" in label.get_text() for label in picture.colorbar.ax.get_yticklabels())
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "rank 0 must be on top"
    assert "1 x 1" not in words(ax)
    for size, shared in ((17, 1), (257, 2)):
        cells = ring_trace(size).plot_ring().images[0].get_array()
        ranks = np.minimum(shared, size - shared * np.arange(len(cells)))
        assert (cells * np.outer(ranks, ranks)).sum() == 1024 * size * (size + 1) // 2


def test_links_between_hosts_are_marked() -> None:
    few, many = ring_trace(4), ring_trace(18)
    for trace, per_host in ((few, 2), (many, 9)):
        hosts = [f"node{rank // per_host}" for rank in range(2 * per_host)]
        about = [{"rank": rank, "host": host} for rank, host in enumerate(hosts)]
        trace.metadata["ranks"] = about
    ax = few.plot_ring()
    marked = [name for name, tube in patches(ax, "group-").items() if tube.get_linewidth() == 2]
    assert sorted(marked) == ["group-ring:1>2", "group-ring:3>0"]
    assert words(ax).count("node1") == 2
    assert "from host to host" in legend(ax)
    lines = [line for line in many.plot_ring().lines if line.get_gid() == "hosts"]
    assert [line.get_ydata()[0] for line in lines] == [8.5, 0]
