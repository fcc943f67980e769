"""Clocks ask each other over a store: here of one process, so that the true offset is 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from ringsim.launch import clocks
from ringsim.traces.clocks import find_clocks


class Part:
    """What a recorder writes down."""

    world_size = 5

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.meta: dict[str, Any] = {}

    def set_meta(self, key: str, value: Any) -> None:
        self.meta[key] = value


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]])
def test_clocks_ask_rank_0_or_each_other_and_nobody_is_left_waiting(
    order: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may ask rank 0, and each one other clock; rank 3 has rank 0's clock.

    The clocks leave in two orders.
    """
    monkeypatch.setattr(clocks, "MOST_ASKERS", 1)
    monkeypatch.setattr(clocks, "FAN_OUT", 1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parts, compared = {rank: Part(rank) for rank in range(5)}, []
    for rank, name in enumerate(["a", "b", "c", "a", "d"]):
        monkeypatch.setattr(clocks, "name_clock", lambda name=name: name)
        compared.append(clocks.ClockComparison(store, parts[rank], lambda _: "a"))  # type: ignore[arg-type]
        while ("clock_number" if rank in (0, 3) else "clock 0") not in parts[rank].meta:
            compared[rank]._threads["compare"].join(0.001)
    for rank in order:
        compared[rank].stop(failed=False)
    assert not any(thread.is_alive() for one in compared for thread in one._threads.values())
    metas = {rank: part.meta for rank, part in parts.items()}
    assert [metas[rank]["clock_number"] for rank in range(5)] == [0, 1, 2, 0, 3]
    assert [metas[rank]["clock 0"][0] for rank in (1, 2, 4)] == [0, 1, 2], (
        "each asks the one before it"
    )
    assert ("clock 1" in metas[1]) == (order[0] == 4), "not where the other has left first"
    found = find_clocks(metas, 0)
    assert [(one["ranks"], one["how"]) for one in found] == [
        ([0, 3], "reference"),
        ([1], "store"),
        ([2], "store"),
        ([4], "store"),
    ]
    for entry in found[1:]:
        assert all(
            abs(offset_ns) <= uncertainty_ns for _, offset_ns, uncertainty_ns in entry["samples"]
        )
