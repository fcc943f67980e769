"""The page answers four common questions with at most one action each."""

from __future__ import annotations

import pytest
import torch
from test_view_browser import Open, browser, open_page, pytestmark, two_that_meet  # noqa: F401

import ringsim
from ringsim import Link
from ringsim import comm as dist
from ringsim.errors import Deadlock

LINK = Link(10e-6, 8e-11)
SLOW = 27


def pass_on(rounds: int) -> None:
    """Passes a tensor around the ring; one rank computes for longer than the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    data = torch.zeros(1024)
    for _ in range(rounds):
        ringsim.compute(0.003 if rank == SLOW else 0.001)
        handles = [
            dist.isend(data, (rank + 1) % size),
            dist.irecv(torch.empty_like(data), (rank - 1) % size),
        ]
        for handle in handles:
            handle.wait()


def send_first() -> None:
    """Sends to the next rank before it receives, on all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.send(torch.zeros(8), (rank + 1) % size)
    dist.recv(torch.zeros(8), (rank - 1) % size)


def test_the_straggler_among_64_ranks_is_named_and_shown(open_page: Open) -> None:  # noqa: F811
    view = open_page(ringsim.simulate(pass_on, world_size=64, args=(4,), link=LINK))
    assert f"for rank {SLOW}" in view.text("panel"), "without any action"
    odd = view.get("timeline.runs[0].head.odd")
    assert odd.index(max(odd)) == SLOW, "the strip below shows the same rank"


def test_one_action_says_why_a_rank_waits(open_page: Open) -> None:  # noqa: F811
    view = open_page(two_that_meet())
    view.page.mouse.move(*view.at(3))
    assert "because rank 0 was late to send" in view.text("tip")


def test_two_runs_are_compared_without_an_action(open_page: Open) -> None:  # noqa: F811
    runs = [ringsim.simulate(pass_on, world_size=size, args=(4,), link=LINK) for size in (4, 32)]
    view = open_page(*runs)
    assert "A: 0.ringtrace: 4 ranks" in view.text("source")
    assert view.get("timeline.rows.slice(0, 2).map(({ run }) => timeline.runs.indexOf(run))") == [
        0,
        1,
    ]


def test_one_action_shows_the_lines_that_deadlock(open_page: Open) -> None:  # noqa: F811
    with pytest.raises(Deadlock) as caught:
        ringsim.simulate(send_first, world_size=3, link=LINK)
    view = open_page(caught.value.trace)
    view.tab("code")
    view.until("document.querySelectorAll('.code .waits title').length === 3")
    said = view.page.locator(".code .waits title").all_text_contents()
    assert all("test_view_tasks.py:" in one for one in said)
    assert said[0].startswith("rank 0 waits at test_view_tasks.py:")
    assert " for rank 1 at test_view_tasks.py:" in said[0]
