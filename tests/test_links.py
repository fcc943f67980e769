"""Measuring links, as far as it needs no ranks.

The plan, the arithmetic of each pattern, the rows, and links on a virtual clock.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringsim
from ringsim import Link
from ringsim.cli import main
from ringsim.errors import ArgumentError, Interrupted, RingError
from ringsim.links import worker
from ringsim.links.api import _gpus
from ringsim.links.plan import (
    SIZES,
    STREAM,
    Block,
    is_steady,
    make_plan,
    make_rows,
    samples_of,
    step_ns,
    steps_wanted,
    timed_ranks,
)
from ringsim.topologies import FullBisection, RingLinks
from ringsim.traces.bandwidths import load
from ringsim.traces.events import OP_CODES, Tables, make_events

LINK, SLOW = Link(alpha_s=10e-6, beta_s_per_byte=8e-11), Link(50e-6, 8e-10)


def test_the_sizes_go_from_8_bytes_to_256_mib() -> None:
    assert (SIZES[0], SIZES[-1], len(SIZES)) == (8, 256 * 2**20, 26)
    assert {after / before for before, after in itertools.pairwise(SIZES)} == {2.0}


def test_a_plan_goes_by_size_then_pattern_then_edge() -> None:
    plan = make_plan((0, 1, 2), [64, 8], ["pingpong", "shift", "all_reduce"], "gloo")
    patterns = [
        "gloo pingpong 0>1",
        "gloo pingpong 1>2",
        "gloo pingpong 2>0",
        "gloo shift -1>-1",
        "gloo all_reduce -1>-1",
    ]
    ceilings = ["tcp pingpong 0>1", "memcpy copy -1>-1"]
    assert [
        f"{block.size_bytes} {block.backend} {block.pattern} {block.src}>{block.dst}"
        for block in plan.blocks
    ] == [f"{size} {what}" for size in (8, 64) for what in patterns + ceilings]
    plan = make_plan((0, 1), 2 ** np.arange(3, 5), "oneway", "gloo", edge=(0, 1), ceilings=False)
    assert [block.size_bytes for block in plan.blocks] == [8, 16], "sizes may come from numpy"
    assert [block.backend for block in make_plan((0,), [8], "pingpong", "gloo").blocks] == [
        "memcpy"
    ], "a ring of one has no links"
    assert {block.backend for block in make_plan((0, 1), [8], "pingpong", "nccl").blocks} == {
        "nccl",
        "memcpy",
    }, "a GPU has no sockets"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"pattern": "pong"},
            "pattern must be one of pingpong, oneway, exchange, shift, all_reduce",
        ),
        ({"pattern": []}, "pattern must be one of"),
        *(
            ({"sizes": sizes}, "sizes must be whole numbers of bytes")
            for sizes in ([], [0], [2**30 + 1], [8.0], "8K", [True], 3.5)
        ),
        ({"pattern": "all_reduce", "sizes": [10]}, "multiples of 4"),
        *(({"edge": edge}, "edge must be") for edge in ((1, 0), (0, 2), 0)),
        *(({"limit_s": limit_s}, "limit_s must be a positive number") for limit_s in (0, True)),
        ({"sizes": [2**30], "world_size": 1000}, "sizes must leave half of the memory"),
        ({"comm_device": "tpu"}, 'comm_device must be "cpu"'),
        (
            {"comm_device": "gpu", "world_size": 500},
            'at most the number of GPUs .* got 500 with .*comm_device="cpu"',
        ),
        ({"world_size": 0}, "world_size must be an integer from 1"),
        ({"timeout_s": -1}, "timeout_s must be a positive number"),
        ({"link": "fast"}, "link must be a Link"),
        ({"link": LINK, "topology": RingLinks(LINK)}, "exactly one of link and topology"),
        ({"link": LINK, "comm_device": "gpu"}, "comm_device must be left out"),
        ({"link": LINK, "world_size": 0}, "world_size must be an integer from 1"),
        ({"link": LINK, "edge": (0, 5)}, "edge must be"),
        ({"link": LINK, "pattern": "star"}, "pattern must be one of"),
    ],
)
def test_what_cannot_be_measured_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ringsim.bandwidth(**{"world_size": 3, "sizes": [8], **asked})


def test_ctrl_c_before_anything_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise Interrupted("the run was interrupted after 0.1 s.")

    monkeypatch.setattr("ringsim.links.api.run", interrupted)
    with pytest.raises(Interrupted):
        ringsim.bandwidth(sizes=[8])


@given(
    st.sampled_from(["gloo", "tcp"]),
    st.sampled_from(["pingpong", "copy"]),
    st.integers(-1, 9),
    st.integers(-1, 9),
    st.integers(1, 2**30),
)
def test_a_block_and_its_label_say_the_same(
    backend: str, pattern: str, src: int, dst: int, size: int
) -> None:
    block = Block(backend, pattern, src, dst, size)
    assert Block.from_label(block.label) == block


COPY = ("memcpy", "copy", -1, -1)


@pytest.mark.parametrize(
    ("block", "parts", "tellers"),
    [
        (Block("gloo", "pingpong", 1, 2, 8), 2, [1]),
        (Block("gloo", "oneway", 1, 2, 8), STREAM, [2]),
        (Block("gloo", "exchange", 1, 2, 8), 1, [1]),
        (Block("gloo", "shift", -1, -1, 8), 1, [0, 1, 2]),
        (Block("gloo", "all_reduce", -1, -1, 8), 1, [0, 1, 2]),
        (Block(*COPY, 8), 64, [0]),  # small copies come in dozens
        (Block(*COPY, 2**20), 1, [0]),
    ],
)
def test_what_a_step_is_divided_by_and_who_tells_its_time(
    block: Block, parts: int, tellers: list[int]
) -> None:
    assert step_ns(block, np.array([0, 1000]), np.array([800, 1400])).tolist() == [
        800 / parts,
        400 / parts,
    ]
    assert timed_ranks(block, (0, 1, 2)) == tellers


@pytest.mark.parametrize("n", [20, 100, 1000])
def test_steady_means_that_the_median_is_known_to_2_5_percent(n: int) -> None:
    # The order statistics n/2 -+ 0.98 sqrt(n) of a uniform spread over [1 - w, 1 + w] lie about 2 *
    # 0.98 * w / sqrt(n) on either side of its median; so the largest w that is steady grows with
    # sqrt(n).
    limit, spread = 0.025 * n**0.5 / (2 * 0.98), np.linspace(-1, 1, n)
    assert [is_steady(1 + part * limit * spread) for part in (0.7, 1.3)] == [True, False]


def test_one_slow_repetition_among_many_does_not_matter() -> None:
    assert is_steady(np.array([1.0] * 30 + [1000.0]))
    assert not is_steady(np.array([1.0] * 15 + [1000.0] * 15))


def test_steps_that_wait_for_a_core_do_not_take_the_time_of_the_sizes_that_follow() -> None:
    block, found, share_s = Block("gloo", "pingpong", 0, 1, 8), np.zeros(0), 3.0
    # the mean is seven times the median, which stays uncertain
    times = np.random.default_rng(0).lognormal(np.log(200e3), 2, 5000)
    fresh = times[:3]
    while count := steps_wanted(block, found, share_s, fresh):
        fresh = times[len(found) : len(found) + count]
        found = np.concatenate([found, fresh])
    assert 0.5 * share_s < found.sum() * 2e-9 < 1.3 * share_s


def samples(label: str, spans: list[tuple[int, int, int]]) -> Any:
    """Of spans (rank, post_ns, done_ns) with a label, and one of something else before them."""
    rank, post_ns, done_ns = zip((0, 0, 9), *spans, strict=True)
    columns = {
        "rank": rank,
        "op": [OP_CODES["span"]] * len(rank),
        "label": [0, *[1] * len(spans)],
        "post_ns": post_ns,
        "done_ns": done_ns,
    }
    return samples_of(make_events(columns, Tables(labels=("compute", label))))


def test_a_row_holds_medians_and_percentiles() -> None:
    steps = [(0, 1000 * number, 1000 * number + 200 + 20 * number) for number in range(11)]
    (row,) = make_rows(samples("bandwidth gloo pingpong 0 1 4000", steps), (0, 1))
    times_us = [(200 + 20 * number) / 2 / 1e3 for number in range(11)]  # 0.1 to 0.2
    rates = [4000 / times_us[number] / 1e3 for number in (5, 9, 1)]
    bandwidths = {
        "algbw_gb_per_s": rates[0],
        "busbw_gb_per_s": rates[0],
        "p10_algbw_gb_per_s": rates[1],
        "p90_algbw_gb_per_s": rates[2],
    }
    times = {
        "latency_us": times_us[5],
        "p10_latency_us": times_us[1],
        "p90_latency_us": times_us[9],
    }
    about = {
        "pattern": "pingpong",
        "src": 0,
        "dst": 1,
        "size_bytes": 4000,
        "n": 11,
        "backend": "gloo",
        "kind": "measured",
    }
    assert row == about | {
        name: pytest.approx(value) for name, value in (times | bandwidths).items()
    }


def test_rows_of_whole_groups() -> None:
    four = samples(
        "bandwidth gloo all_reduce -1 -1 1000", [(rank, 0, 100 + 50 * rank) for rank in range(4)]
    )
    (row,) = make_rows(four, (0, 1, 2, 3))
    found = [row["latency_us"], row["algbw_gb_per_s"], row["busbw_gb_per_s"]]
    assert found == pytest.approx([0.25, 4.0, 4.0 * 2 * 3 / 4]), (
        "the slowest rank counts, with nccl-tests' bus factor"
    )
    rows = make_rows(
        samples(
            "bandwidth gloo shift -1 -1 1000", [(rank, 0, 100 * (rank + 1)) for rank in range(3)]
        ),
        (0, 1, 2),
    )
    assert [(row["src"], row["dst"], row["latency_us"]) for row in rows] == [
        (0, 1, 0.2),
        (1, 2, 0.3),
        (2, 0, 0.1),
    ]
    three = samples("bandwidth gloo all_reduce -1 -1 1000", [(rank, 0, 100) for rank in range(3)])
    assert make_rows(three, (0, 1, 2, 3)) == [], "what was not measured has no row"
    assert samples("something else", [(0, 0, 1)]) == {}


# -- on a virtual clock

FEW_SIZES = [8, 4096, 2**20]
TIMES_US = [1e6 * LINK.time_s(size) for size in FEW_SIZES]
SLOW_TIMES_US = [1e6 * SLOW.time_s(size) for size in FEW_SIZES]
RANK_2_IS_FAR = {
    (a, b): SLOW if 2 in (a, b) else LINK for a in range(3) for b in range(3) if a != b
}


def times_us(table: Any, pattern: str, src: int, dst: int) -> Any:
    found: list[float] = table.columns["latency_us"][
        table.where(pattern, "link", src, dst)
    ].tolist()
    return pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize("pattern", ["pingpong", "exchange", "shift"])
@pytest.mark.parametrize(
    "links", [{"link": LINK}, {"topology": RingLinks(LINK)}, {"topology": FullBisection(LINK)}]
)
def test_the_fit_gives_back_the_link(pattern: str, links: dict[str, Any]) -> None:
    """Both ways and all at once: in a ring nobody meets anybody."""
    table = ringsim.bandwidth(4, FEW_SIZES, pattern, **links)
    assert sorted(table.fits) == [(pattern, "link", rank, (rank + 1) % 4) for rank in range(4)]
    assert times_us(table, pattern, 1, 2) == TIMES_US
    for link in table.fits.values():
        assert (link.alpha_s, link.beta_s_per_byte) == pytest.approx(
            (LINK.alpha_s, LINK.beta_s_per_byte), rel=1e-9
        )


def test_streams_and_all_reduces_take_their_closed_forms() -> None:
    """A stream shows what a message keeps the link busy: the latency is paid once."""
    table = ringsim.bandwidth(2, FEW_SIZES, "oneway", edge=(0, 1), link=LINK)
    assert times_us(table, "oneway", 0, 1) == [
        1e6 * (LINK.alpha_s / STREAM + size * LINK.beta_s_per_byte) for size in FEW_SIZES
    ]
    table = ringsim.bandwidth(4, [4096, 1 << 24], "all_reduce", link=LINK)
    tree, ring = 4 * LINK.time_s(4096), 6 * LINK.time_s(1 << 22)  # of little a tree, of much a ring
    assert times_us(table, "all_reduce", -1, -1) == [1e6 * tree, 1e6 * ring]
    table = ringsim.bandwidth(2, [8], link=Link(0.0, 0.0))
    assert times_us(table, "pingpong", 0, 1) == [0.0]
    assert np.isnan(table.columns["algbw_gb_per_s"]).all(), (
        "a link that takes no time has no bandwidth"
    )


def test_edges_differ_where_their_links_do() -> None:
    table = ringsim.bandwidth(3, FEW_SIZES, link=RANK_2_IS_FAR)
    assert times_us(table, "pingpong", 0, 1) == TIMES_US
    assert times_us(table, "pingpong", 1, 2) == SLOW_TIMES_US


def test_simulated_ranks_measure_the_links_of_their_own_run_and_no_others() -> None:
    def run(size: int, *args: Any, **kwargs: Any) -> Any:
        links = RANK_2_IS_FAR if size == 3 else LINK
        return ringsim.simulate(
            lambda: ringsim.bandwidth(*args, **kwargs), world_size=size, link=links
        ).results

    tables = run(3, sizes=FEW_SIZES, edge=(2, 0))
    assert times_us(tables[0], "pingpong", 2, 0) == SLOW_TIMES_US
    assert tables[0] == tables[1] == tables[2]
    assert tables[0].metadata["source"] == "simulated"
    with pytest.raises(RingError, match="simulate must be called outside of simulated ranks"):
        run(2, sizes=[8], link=LINK)
    with pytest.raises(RingError, match="world_size must be 2 or left out"):
        run(2, 3, [8])


def test_the_table_says_that_it_is_simulated_and_is_the_same_in_each_run(tmp_path: Path) -> None:
    table = ringsim.bandwidth(2, FEW_SIZES, link=LINK)
    assert set(table.columns["kind"].tolist()) == {table.metadata["source"]} == {"simulated"}
    assert table.metadata["constants"]["links"] == {
        "all": {"alpha_s": 10e-6, "beta_s_per_byte": 8e-11}
    }
    table.save(tmp_path / "table.json")
    assert load(tmp_path / "table.json") == table == ringsim.bandwidth(2, FEW_SIZES, link=LINK)


def test_the_command_writes_table_and_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def bandwidth(ranks: Any, sizes: Any, pattern: Any, device: Any, **more: Any) -> Any:
        asked.update(more, ranks=ranks, sizes=sizes, pattern=pattern, device=device)
        return measure(ranks, sizes, pattern, edge=more["edge"], link=LINK)

    measure = ringsim.bandwidth
    monkeypatch.setattr(ringsim, "bandwidth", bandwidth)
    monkeypatch.chdir(tmp_path)
    edge = ["--pattern", "exchange", "--edge", "1,0", "--limit", "5", "--no-ceilings"]
    assert (
        main(
            [
                "bandwidth",
                "--sizes",
                "8,1KiB,64k",
                *edge,
                "-o",
                "links.json",
                "-o",
                "links.csv",
                "-o",
                "links.png",
            ]
        )
        == 0
    )
    limits = {"limit_s": 5.0, "ceilings": False, "edge": (1, 0)}
    assert asked == {
        "ranks": None,
        "sizes": [8, 1024, 65536],
        "pattern": ["exchange"],
        "device": "cpu",
        **limits,
    }
    assert "fit exchange link 1->0: alpha " in capsys.readouterr().out
    assert (tmp_path / "links.png").read_bytes()[:4] == b"\x89PNG"
    assert set(load(tmp_path / "links.json").fits) == {("exchange", "link", 1, 0)}
    assert len((tmp_path / "links.csv").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    "wrong", [["--sizes", "8,many"], ["--edge", "01"], ["-o", "links.pdf"], ["--edge", "0,3"]]
)
def test_the_command_refuses_what_it_does_not_know(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["bandwidth", *wrong])
    except SystemExit as refused:  # by argparse
        code = refused.code
    assert code == 2
    assert wrong[1].rpartition(",")[2].strip("0") in capsys.readouterr().err


# -- between GPUs, with a pretended CUDA


def pretend(
    monkeypatch: pytest.MonkeyPatch, count: int, peers: set[tuple[int, int]] | None = None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda one, other: (one, other) in (peers or set())
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"GPU {number}")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"uuid {number}")
    )
    for name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("count", "ranks", "advice"),
    [(0, 1, 'Ask for comm_device="cpu"'), (1, 2, "Ask for world_size=1, which measures copies")],
)
def test_two_ranks_never_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch, count: int, ranks: int, advice: str
) -> None:
    pretend(monkeypatch, count)
    with pytest.raises(ArgumentError, match=f"got {ranks} with {count}: NCCL refuses.*{advice}"):
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
    assert worker.paths_between((0, 1), [worker.place_of(0), worker.place_of(1)]) == {
        "0>1": "host-staged",
        "1>0": "host-staged",
    }


class Event:
    """Stands in for a CUDA event.

    The GPU's clock is the number of steps that were queued, in ms.
    """

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
