"""Cases of a recorded block that programs do not show by themselves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rank_server import RankServer
from test_recording import join

import ringsim
from ringsim.launch import block, clocks, merging
from ringsim.traces.clocks import find_clocks


def raise_together(directory: str, rank: int) -> None:
    """Both ranks raise; rank 1 announces its end some time after recording it."""
    path, put = join(directory, rank, 2), block.BlockStore.put

    def put_late(self: block.BlockStore, key: str, data: bytes) -> None:
        if key == "left/1":
            time.sleep(0.7)
        put(self, key, data)

    merging.WAIT_AFTER_ERROR_S = 60.0  # only of this process
    block.BlockStore.put = put_late
    with ringsim.trace(path):
        dist.barrier()
        raise ValueError("boom")


def test_rank_0_waits_for_a_rank_that_is_about_to_leave(server: RankServer, tmp_path: Path) -> None:
    """0.2.0 waited only 0.1 s for a rank that had recorded its end."""
    ended = server.run(raise_together, [(str(tmp_path), rank) for rank in range(2)])
    assert [(each.how, each.value) for each in ended] == [("raised", "boom")] * 2
    trace = ringsim.load(tmp_path / "run.ringtrace")
    assert [note for note in trace.metadata["notes"] if "had not left" in note] == []
    assert [end["rank"] for end in trace.metadata["ends"]] == [0, 1]


class Part:
    """The records of a recorder."""

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
    """Only one clock may ask rank 0, and each may ask one other; rank 3 has rank 0's clock."""
    monkeypatch.setattr(clocks, "MOST_ASKERS", 1)
    monkeypatch.setattr(clocks, "FAN_OUT", 1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parts, compared = [Part(rank) for rank in range(5)], []
    for part, name in zip(parts, "abcad", strict=True):
        monkeypatch.setattr(clocks, "name_clock", lambda name=name: name)
        one = clocks.ClockComparison(store, part, lambda _: "a")
        compared.append(one)
        while ("clock_number" if name == "a" else "clock 0") not in part.meta:
            one._threads["compare"].join(0.001)
    for rank in order:
        compared[rank].stop(failed=False)
    assert not any(thread.is_alive() for one in compared for thread in one._threads.values())
    metas = {part.rank: part.meta for part in parts}
    assert [metas[rank]["clock_number"] for rank in range(5)] == [0, 1, 2, 0, 3]
    asked = [metas[rank]["clock 0"][0] for rank in (1, 2, 4)]
    assert asked == [0, 1, 2], "each clock must ask the previous one"
    assert ("clock 1" in metas[1]) == (order[0] == 4), "clock 1 is missing only if it left first"
    found = find_clocks(metas, 0)
    hows = [([0, 3], "reference"), ([1], "store"), ([2], "store"), ([4], "store")]
    assert [(one["ranks"], one["how"]) for one in found] == hows
    for entry in found[1:]:
        for _, offset_ns, uncertainty_ns in entry["samples"]:
            assert abs(offset_ns) <= uncertainty_ns
