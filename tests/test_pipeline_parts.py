"""Tests of parts that runs on a CPU do not cover: headers, NCCL's handles, sums, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated_runs import run

import ringsim
from ringsim.errors import ArgumentError, MessageMismatch
from ringsim.pipeline import can_finish, messages, steady_use
from ringsim.pipeline.messages import HEADER_SIZE, BufferSpec, Header, Route
from ringsim.pipeline.sharing import gather_over_ring, sum_over
from ringsim.plot.charts import MeasuredUse, plot_inner_iterations


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=HEADER_SIZE, max_size=HEADER_SIZE))
def test_what_is_no_header_is_refused(numbers: list[int]) -> None:
    with pytest.raises(MessageMismatch, match="expected a header, got the numbers"):
        Header.unpack(torch.tensor(numbers))


@pytest.mark.parametrize("payload", [((1,) * 9, torch.float32), ((1,), torch.quint8)])
def test_what_no_header_can_name_is_refused(payload: Any) -> None:
    with pytest.raises(ArgumentError, match="at most 8 dimensions and one of the dtypes float32"):
        Header("activation", 0, BufferSpec(*payload)).pack()


@pytest.mark.parametrize("first", ["sent", "received"])
def test_a_batch_with_one_handle_is_waited_for_whoever_asks_first(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL returns one handle per batch, and fills the buffers during the wait."""

    def start(both: Sequence[Any]) -> list[Any]:
        return [SimpleNamespace(wait=lambda: both[1].fill_(7))]

    monkeypatch.setattr(messages.dist, "P2POp", lambda _, tensor, *__: tensor)
    monkeypatch.setattr(messages.dist, "batch_isend_irecv", start)
    sent, received = Route(1, None, torch.device("cpu")).iswap(torch.zeros(2), 0)
    if first == "sent":
        sent.wait()
    assert received.wait().tolist() == [7.0, 7.0]


def test_what_ranks_share_is_in_the_order_of_their_places() -> None:
    """A sum is bitwise equal on every rank, although the order of addition matters.

    For example, 1e16 + 1 - 1e16 is 0, but 1e16 - 1e16 + 1 is 1.
    """

    def share() -> tuple[list[float], float]:
        ring = ringsim.current_ring()
        value = torch.tensor([1e16, 1.0, -1e16][ring.rank], dtype=torch.float64)
        values = [float(each) for each in gather_over_ring(ring, value)]
        return values, float(sum_over(ring, [0, 1, 2], value))

    assert run(share, 3) == [([1e16, 1.0, -1e16], 0.0)] * 3


def test_the_picture_of_inner_iterations_shows_the_forms_and_the_points() -> None:
    own = mpl.figure.Figure().add_subplot()
    measured = [MeasuredUse(4, False, 0.9), MeasuredUse(2, True, 0.45)]
    ax = plot_inner_iterations(4, measured, ax=own)
    assert ax is own
    lines = {line.get_linestyle(): line.get_ydata().tolist() for line in ax.get_lines()}
    for style, async_comm in (("-", False), ("--", True)):
        assert lines[style] == [float(steady_use(4, turns, async_comm)) for turns in range(1, 9)]
    drawn = [tuple(point) for points in ax.collections for point in points.get_offsets().tolist()]
    stuck = [(turns, 0) for turns in range(1, 9) if not can_finish(4, turns)] + [(8, 0)]
    assert sorted(drawn) == sorted([*stuck, (4, 0.9), (2, 0.45)])
    words = " ".join(text.get_text() for text in ax.texts)
    assert "5 or more (asynchronous: 8) jam the ring" in words
