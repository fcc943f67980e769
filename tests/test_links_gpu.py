"""Links between GPUs, with a pretended CUDA: who is refused, what lies between two GPUs, how steps are timed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ringsim.errors import ArgumentError
from ringsim.links import worker
from ringsim.links.api import _gpus, _take_gpu_times
from ringsim.links.plan import Block


def pretend(monkeypatch: pytest.MonkeyPatch, count: int, peers: set[tuple[int, int]] | None = None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) in (peers or set()))
    for name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("count", "ranks", "advice"), [(0, 1, 'Ask for comm_device="cpu"'), (1, 2, "Ask for world_size=1, which measures copies")]
)
def test_two_ranks_never_share_a_gpu(monkeypatch: pytest.MonkeyPatch, count: int, ranks: int, advice: str) -> None:
    pretend(monkeypatch, count)
    with pytest.raises(ArgumentError, match=f"got {ranks} with {count}: NCCL refuses") as caught:
        worker.check_gpus(ranks)
    assert advice in str(caught.value)


def test_a_gpu_for_each_rank_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 4)
    worker.check_gpus(4)


def test_what_lies_between_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 3, {(0, 1), (1, 0)})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"GPU {number}")
    places = [worker.place_of(number) for number in range(3)]
    assert [place["peers"] for place in places] == [[1], [0], []]
    elsewhere = {**places[0], "host": "another"}
    assert worker.paths_between((0, 1, 2, 3), [*places, elsewhere]) == {
        "0>1": "p2p",
        "1>2": "host-staged",
        "2>3": "network",
        "3>0": "network",
    }
    assert worker.paths_between((0,), places) == {}
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert worker.paths_between((0, 1), [worker.place_of(0), worker.place_of(1)]) == {"0>1": "host-staged", "1>0": "host-staged"}


def test_the_table_says_what_lies_between_its_gpus() -> None:
    place = {"host": "one", "name": "GPU", "peers": [1]}
    results = [{"place": {**place, "gpu": 0}}, {"place": {**place, "gpu": 1}}]
    assert _gpus((0, 1), results) == {"gpus": ["GPU", "GPU"], "paths": {"0>1": "p2p", "1>0": "host-staged"}}
    assert _gpus((0, 1), [{"place": None}] * 2) == {}
    assert _gpus((0, 1), []) == {}


class Event:
    """Stands in for a CUDA event: the GPU's clock is the number of steps that were queued, in ms."""

    clock = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = float("nan")

    def record(self) -> None:
        self.at = Event.clock

    def synchronize(self) -> None:
        Event.clock += 100  # what happens after the last event does not count

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


def test_events_around_each_step_time_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    lengths_ms = iter([1.0, 2.5, 4.0])

    def step() -> None:
        Event.clock += next(lengths_ms)

    assert worker.time_steps(step, 3) == [1e6, 2.5e6, 4e6]


def test_events_replace_what_the_record_says() -> None:
    queued, other = Block("nccl", "pingpong", 0, 1, 8), Block("memcpy", "copy", -1, -1, 8)
    samples: Any = {queued: {0: np.array([1.0])}, other: {0: np.array([2.0])}}
    _take_gpu_times(samples, [{"gpu_ns": {queued.label: [500.0, 600.0]}}, {"gpu_ns": {}}])
    assert {block: {rank: times.tolist() for rank, times in by_rank.items()} for block, by_rank in samples.items()} == {
        queued: {0: [500.0, 600.0]},
        other: {0: [2.0]},
    }
