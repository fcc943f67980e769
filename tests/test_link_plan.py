"""The parts of measuring links that need no ranks: the plan, the stopping rule, and the rows.

Also the data paths between GPUs, with a simulated CUDA.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from synthetic import Story

from ringsim.errors import ArgumentError
from ringsim.measuring import worker
from ringsim.measuring.api import _gpus
from ringsim.measuring.plan import (
    PlannedRow,
    is_steady,
    make_plan,
    make_rows,
    samples_of,
    steps_wanted,
)


def test_a_plan_goes_by_size_then_pattern_then_edge() -> None:
    """So a limit cuts off the largest sizes equally on all edges."""
    plan = make_plan((0, 1, 2), [64, 8], ["pingpong", "shift", "all_reduce"], "gloo")
    blocks = ["gloo pingpong 0>1", "gloo pingpong 1>2", "gloo pingpong 2>0", "gloo shift -1>-1"]
    blocks += ["gloo all_reduce -1>-1", "tcp pingpong 0>1", "memcpy copy -1>-1"]
    assert [
        f"{block.size_bytes} {block.backend} {block.pattern} {block.src}>{block.dst}"
        for block in plan.blocks
    ] == [f"{size} {what}" for size in (8, 64) for what in blocks]
    for ranks, backend, found in (
        ((0,), "gloo", {"memcpy"}),  # a ring of one has no links
        ((0, 1), "nccl", {"nccl", "memcpy"}),  # sockets are not measured with a GPU
    ):
        blocks = make_plan(ranks, [8], "pingpong", backend).blocks
        assert {block.backend for block in blocks} == found


@pytest.mark.parametrize("n", [20, 1000])
def test_steady_means_that_the_median_is_known_to_2_5_percent(n: int) -> None:
    # The order statistics n/2 -+ 0.98 sqrt(n) of a uniform spread over [1 - w, 1 + w] lie about 2 *
    # 0.98 * w / sqrt(n) on either side of its median; so the largest w that is steady grows with
    # sqrt(n).
    limit, spread = 0.025 * n**0.5 / (2 * 0.98), np.linspace(-1, 1, n)
    assert [is_steady(1 + part * limit * spread) for part in (0.7, 1.3)] == [True, False]
    assert is_steady(np.array([1.0] * 30 + [1000.0])), "one slow repetition must not matter"


def test_steps_that_wait_for_a_core_do_not_take_the_time_of_the_sizes_that_follow() -> None:
    block, found, share_s = PlannedRow("gloo", "pingpong", 0, 1, 8), np.zeros(0), 3.0
    # the mean is seven times the median, which stays uncertain
    times = np.random.default_rng(0).lognormal(np.log(200e3), 2, 5000)
    fresh = times[:3]
    while count := steps_wanted(block, found, share_s, fresh):
        fresh = times[len(found) : len(found) + count]
        found = np.concatenate([found, fresh])
    assert 0.5 * share_s < found.sum() * 2e-9 < 1.3 * share_s


def rows_of(what: str, *times_us: tuple[int, float], size: int = 3) -> list[dict[str, Any]]:
    """Returns the rows for the timed steps of ranks, recorded next to an unrelated span."""
    story = Story(size)
    for number, (rank, time_us) in enumerate([(0, 1.0), *times_us]):
        begin = float(number)
        label = f"bandwidth {what}" if number else "compute"
        story.span(rank, label, begin, begin + time_us * 1e-3)
    return make_rows(samples_of(story.trace().events), range(size))


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("gloo pingpong 0 1 8", 2),
        ("gloo oneway 1 0 8", 8),  # timed by the receiver
        ("gloo exchange 0 1 8", 1),
        ("memcpy copy -1 -1 8", 64),  # small copies are made in dozens
        ("memcpy copy -1 -1 1048576", 1),
    ],
)
def test_a_step_is_so_many_messages(what: str, parts: int) -> None:
    (row,) = rows_of(what, (0, 8.0))
    assert row["latency_us"] == pytest.approx(8 / parts)


def test_a_row_holds_medians_and_percentiles() -> None:
    times_us = [0.2 + 0.02 * number for number in range(11)]
    (row,) = rows_of("gloo pingpong 0 1 4000", *((0, time_us) for time_us in times_us))
    p10, median, p90 = (times_us[number] / 2 for number in (1, 5, 9))
    numbers = {"latency_us": median, "algbw_gb_per_s": 4 / median, "busbw_gb_per_s": 4 / median}
    numbers |= {"p10_latency_us": p10, "p90_latency_us": p90}
    numbers |= {"p10_algbw_gb_per_s": 4 / p90, "p90_algbw_gb_per_s": 4 / p10}
    about = {"backend": "gloo", "pattern": "pingpong", "src": 0, "dst": 1, "size_bytes": 4000}
    assert row == about | {"n": 11, "kind": "measured"} | {
        name: pytest.approx(value) for name, value in numbers.items()
    }


def test_rows_of_whole_groups() -> None:
    (row,) = rows_of("gloo all_reduce -1 -1 1000", (0, 0.1), (1, 0.15), (2, 0.2))
    found = [row["latency_us"], row["algbw_gb_per_s"], row["busbw_gb_per_s"]]
    assert found == pytest.approx([0.2, 5.0, 5.0 * 2 * 2 / 3]), "the slowest rank must count"
    rows = rows_of("gloo shift -1 -1 1000", (0, 0.1), (1, 0.2), (2, 0.3))
    edges = [(row["src"], row["dst"], row["latency_us"]) for row in rows]
    assert edges == [(0, 1, 0.2), (1, 2, 0.3), (2, 0, 0.1)]
    # sizes that some rank did not measure are missing
    assert rows_of("gloo all_reduce -1 -1 1000", (0, 0.1)) == []
    assert rows_of("of something else", (0, 1.0)) == []


# -- between GPUs, with a simulated CUDA


def pretend(
    monkeypatch: pytest.MonkeyPatch, count: int, peers: set[tuple[int, int]] | None = None
) -> None:
    known: dict[str, Any] = {
        "is_available": lambda: count > 0,
        "device_count": lambda: count,
        "can_device_access_peer": lambda one, other: (one, other) in (peers or set()),
        "get_device_name": lambda number: f"GPU {number}",
        "get_device_properties": lambda number: SimpleNamespace(uuid=f"uuid {number}"),
    }
    for name, function in known.items():
        monkeypatch.setattr(torch.cuda, name, function)
    for name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("count", "ranks", "advice"),
    [(0, 1, 'Pass comm_device="cpu"'), (1, 2, "Pass world_size=1, which measures copies")],
)
def test_two_ranks_never_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch, count: int, ranks: int, advice: str
) -> None:
    pretend(monkeypatch, count)
    with pytest.raises(ArgumentError, match=f" at most {count} .*, got {ranks}.*NCCL.*{advice}"):
        worker.check_gpus(ranks)
    pretend(monkeypatch, 4)
    worker.check_gpus(4)


def test_what_lies_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 3, {(0, 1), (1, 0)})
    places = [worker.place_of(number) for number in range(3)]
    assert [place["peers"] for place in places] == [[1], [0], []]
    far = {**places[0], "host": "another", "uuid": "uuid 3"}
    paths = worker.paths_between((0, 1, 2, 3), [*places, far])
    assert paths == {"0>1": "p2p", "1>2": "host-staged", "2>3": "network", "3>0": "network"}
    assert worker.paths_between((0,), places) == {}
    shared = worker.paths_between((0, 1), [places[0], places[0]])
    assert shared == {"0>1": "sockets, one GPU", "1>0": "sockets, one GPU"}
    assert _gpus((0, 1), [{"place": place} for place in places[:2]]) == {
        "gpus": ["GPU 0", "GPU 1"], "paths": {"0>1": "p2p", "1>0": "p2p"},
    }  # fmt: skip
    assert _gpus((0, 1), [{"place": None}] * 2) == _gpus((0, 1), []) == {}
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    staged = worker.paths_between((0, 1), [worker.place_of(0), worker.place_of(1)])
    assert set(staged.values()) == {"host-staged"}


class Event:
    """A stand-in for a CUDA event.

    The GPU's clock counts the queued steps, as ms.
    """

    clock = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = float("nan")

    def record(self) -> None:
        self.at = Event.clock

    def synchronize(self) -> None:
        Event.clock += 100  # work after the last event does not count

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


def test_events_around_each_step_time_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    lengths_ms = iter([1.0, 2.5, 4.0])

    def step() -> None:
        Event.clock += next(lengths_ms)

    assert worker.time_steps(step, 3) == [1e6, 2.5e6, 4e6]
