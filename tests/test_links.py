"""Measuring links, as far as it needs no ranks: the plan, the arithmetic of each pattern, and the rows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringsim
from ringsim.errors import ArgumentError
from ringsim.links import worker
from ringsim.links.api import _gpus, _take_gpu_times
from ringsim.links.plan import SIZES, STREAM, Block, is_steady, make_plan, make_rows, samples_of, step_ns, timed_ranks
from ringsim.traces.events import OP_CODES, Tables, make_events


def test_the_sizes_go_from_8_bytes_to_256_mib() -> None:
    assert (SIZES[0], SIZES[-1], len(SIZES)) == (8, 256 * 2**20, 26)
    assert {after / before for before, after in itertools.pairwise(SIZES)} == {2.0}


def test_a_plan_goes_by_size_then_pattern_then_edge() -> None:
    plan = make_plan((0, 1, 2), [64, 8], ["pingpong", "shift", "all_reduce"], "gloo")
    assert [f"{block.size_bytes} {block.backend} {block.pattern} {block.src}>{block.dst}" for block in plan.blocks] == [
        f"{size} {what}"
        for size in (8, 64)
        for what in (
            "gloo pingpong 0>1",
            "gloo pingpong 1>2",
            "gloo pingpong 2>0",
            "gloo shift -1>-1",
            "gloo all_reduce -1>-1",
            "tcp pingpong 0>1",
            "memcpy copy -1>-1",
        )
    ]


def test_sizes_may_come_from_numpy() -> None:
    plan = make_plan((0, 1), 2 ** np.arange(3, 5), "oneway", "gloo", edge=(0, 1), ceilings=False)
    assert [block.size_bytes for block in plan.blocks] == [8, 16]


def test_a_ring_of_one_has_no_links_and_a_gpu_no_sockets() -> None:
    assert [block.backend for block in make_plan((0,), [8], "pingpong", "gloo").blocks] == ["memcpy"]
    assert {block.backend for block in make_plan((0, 1), [8], "pingpong", "nccl").blocks} == {"nccl", "memcpy"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"pattern": "pong"}, "pattern must be one of pingpong, oneway, exchange, shift, all_reduce"),
        ({"pattern": []}, "pattern must be one of"),
        ({"sizes": []}, "sizes must be whole numbers of bytes"),
        ({"sizes": [0]}, "sizes must be whole numbers of bytes"),
        ({"sizes": [2**30 + 1]}, "sizes must be whole numbers of bytes"),
        ({"sizes": [8.0]}, "sizes must be whole numbers of bytes"),
        ({"sizes": "8K"}, "sizes must be whole numbers of bytes"),
        ({"sizes": [True]}, "sizes must be whole numbers of bytes"),
        ({"sizes": 3.5}, "sizes must be whole numbers of bytes"),
        ({"pattern": "all_reduce", "sizes": [10]}, "multiples of 4"),
        ({"edge": (1, 0)}, "edge must be"),
        ({"edge": (0, 2)}, "edge must be"),
        ({"edge": 0}, "edge must be"),
        ({"limit_s": 0}, "limit_s must be a positive number"),
        ({"limit_s": True}, "limit_s must be a positive number"),
        ({"sizes": [2**30], "world_size": 1000}, "sizes must leave half of the memory"),
        ({"comm_device": "tpu"}, 'comm_device must be "cpu"'),
        ({"world_size": 0}, "world_size must be an integer from 1"),
        ({"timeout_s": -1}, "timeout_s must be a positive number"),
    ],
)
def test_what_cannot_be_measured_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ringsim.bandwidth(**{"world_size": 3, "sizes": [8], **asked})


@given(
    st.sampled_from(["gloo", "tcp"]), st.sampled_from(["pingpong", "copy"]), st.integers(-1, 9), st.integers(-1, 9), st.integers(1, 2**30)
)
def test_a_block_and_its_label_say_the_same(backend: str, pattern: str, src: int, dst: int, size: int) -> None:
    block = Block(backend, pattern, src, dst, size)
    assert Block.from_label(block.label) == block


def test_what_a_step_is_divided_by() -> None:
    post, done = np.array([0, 1000]), np.array([800, 1400])
    for pattern, parts in {"pingpong": 2, "oneway": STREAM, "exchange": 1, "shift": 1, "all_reduce": 1}.items():
        assert step_ns(Block("gloo", pattern, 0, 1, 8), post, done).tolist() == [800 / parts, 400 / parts], pattern


def test_small_copies_come_in_dozens() -> None:
    for size, copies in ((8, 64), (2**20, 1)):
        block = Block("memcpy", "copy", -1, -1, size)
        assert (block.copies, step_ns(block, np.array([0]), np.array([6400])).tolist()) == (copies, [6400 / copies])


def test_who_tells_the_time() -> None:
    told = {pattern: timed_ranks(Block("gloo", pattern, 1, 2, 8), (0, 1, 2)) for pattern in ("pingpong", "oneway", "exchange")}
    assert told == {"pingpong": [1], "oneway": [2], "exchange": [1]}
    assert timed_ranks(Block("gloo", "shift", -1, -1, 8), (0, 1, 2)) == [0, 1, 2]
    assert timed_ranks(Block("memcpy", "copy", -1, -1, 8), (0, 1, 2)) == [0]


@pytest.mark.parametrize("n", [20, 100, 1000])
def test_steady_means_that_the_median_is_known_to_2_5_percent(n: int) -> None:
    # The order statistics n/2 -+ 0.98 sqrt(n) of a uniform spread over [1 - w, 1 + w] lie about 2 * 0.98 * w / sqrt(n) on either side of
    # its median; so the largest w that is steady grows with sqrt(n).
    def spread(w: float) -> Any:
        return 1 + w * np.linspace(-1, 1, n)

    limit = 0.025 * n**0.5 / (2 * 0.98)
    assert is_steady(spread(0.7 * limit))
    assert not is_steady(spread(1.3 * limit))


def test_one_slow_repetition_among_many_does_not_matter() -> None:
    assert is_steady(np.array([1.0] * 30 + [1000.0]))
    assert not is_steady(np.array([1.0] * 15 + [1000.0] * 15))


def events_of(label: str, spans: list[tuple[int, int, int]]) -> Any:
    """Spans (rank, post_ns, done_ns) with a label, and one of something else before them."""
    ranks, posts, dones = zip(*spans, strict=True)
    return make_events(
        {
            "rank": [0, *ranks],
            "op": [OP_CODES["span"]] * (len(spans) + 1),
            "label": [0, *[1] * len(spans)],
            "post_ns": [0, *posts],
            "done_ns": [9, *dones],
        },
        Tables(labels=("compute", label)),
    )


def test_a_row_holds_medians_and_percentiles() -> None:
    steps = [(0, 1000 * number, 1000 * number + 200 + 20 * number) for number in range(11)]
    samples = samples_of(events_of("bandwidth gloo pingpong 0 1 4000", steps))
    (row,) = make_rows(samples, (0, 1))
    times_us = [(200 + 20 * number) / 2 / 1e3 for number in range(11)]  # 0.1 to 0.2
    assert (row["pattern"], row["src"], row["dst"], row["size_bytes"], row["n"]) == ("pingpong", 0, 1, 4000, 11)
    assert (row["backend"], row["kind"]) == ("gloo", "measured")
    assert row["latency_us"] == pytest.approx(times_us[5])
    assert (row["p10_latency_us"], row["p90_latency_us"]) == (pytest.approx(times_us[1]), pytest.approx(times_us[9]))
    assert row["algbw_gb_per_s"] == pytest.approx(4000 / 0.15e-6 / 1e9)
    assert row["busbw_gb_per_s"] == row["algbw_gb_per_s"]
    assert row["p10_algbw_gb_per_s"] == pytest.approx(4000 / times_us[9] / 1e3)
    assert row["p90_algbw_gb_per_s"] == pytest.approx(4000 / times_us[1] / 1e3)


def test_all_reduce_has_nccl_tests_bus_factor() -> None:
    events = events_of("bandwidth gloo all_reduce -1 -1 1000", [(rank, 0, 100 + 50 * rank) for rank in range(4)])
    (row,) = make_rows(samples_of(events), (0, 1, 2, 3))
    assert row["latency_us"] == pytest.approx(0.25)
    assert row["algbw_gb_per_s"] == pytest.approx(4.0)
    assert row["busbw_gb_per_s"] == pytest.approx(4.0 * 2 * 3 / 4)


def test_a_shift_gives_a_row_for_each_edge() -> None:
    steps = [(rank, 0, 100 * (rank + 1)) for rank in range(3)]
    rows = make_rows(samples_of(events_of("bandwidth gloo shift -1 -1 1000", steps)), (0, 1, 2))
    assert [(row["src"], row["dst"], row["latency_us"]) for row in rows] == [(0, 1, 0.2), (1, 2, 0.3), (2, 0, 0.1)]


def test_what_was_not_measured_has_no_row() -> None:
    events = events_of("bandwidth gloo all_reduce -1 -1 1000", [(rank, 0, 100) for rank in range(3)])
    assert make_rows(samples_of(events), (0, 1, 2, 3)) == []
    assert samples_of(events_of("something else", [(0, 0, 1)])) == {}


# -- between GPUs, with a pretended CUDA


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
