"""Tables of bandwidths: what they say, what is saved and read back, regimes, the factors of nccl-tests, and links on a virtual clock."""

from __future__ import annotations

import base64
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from trace_mutations import DATA, ODD_VALUES, Choose, change_meta, flip

import ringsim
from ringsim.errors import ArgumentError, RingError, TraceFileError
from ringsim.link import Link
from ringsim.links.plan import STREAM
from ringsim.topologies import FullBisection, RingLinks
from ringsim.traces import lazy
from ringsim.traces.bandwidths import COLUMNS, LARGEST, MOST_BYTES, SMALLEST, Bandwidths, find_regimes, load, make_bandwidths
from ringsim.traces.collectives import algbw_gb_per_s, bus_factor, busbw_gb_per_s
from ringsim.traces.events import OP_NAMES, readable

ROW = {"pattern": "pingpong", "src": 0, "dst": 1, "backend": "gloo", "kind": "measured", "n": 30}


def line(alpha_us: float, us_per_byte: float, **changes: Any) -> list[dict[str, Any]]:
    return [{**ROW, "size_bytes": size, "latency_us": alpha_us + us_per_byte * size, **changes} for size in (8, 1024, 65536)]


@pytest.fixture
def table() -> Bandwidths:
    rows = [*line(40, 1e-3), *line(20, 2e-3, src=1, dst=0), *line(5, 1e-4, backend="tcp"), *line(7, 5e-3, backend="nccl", kind="published")]
    return make_bandwidths(rows, {"source": "measured", "machine": {"cpu": "a clock"}, "notes": ["it rained"]})


def test_the_columns_are_exactly_these(table: Bandwidths) -> None:
    frame = table.to_pandas()
    assert ", ".join(frame.columns) == (
        "pattern, src, dst, size_bytes, latency_us, algbw_gb_per_s, busbw_gb_per_s, p10_latency_us, p90_latency_us, "
        "p10_algbw_gb_per_s, p90_algbw_gb_per_s, n, backend, kind"
    )
    assert frame["pattern"].tolist() == ["pingpong"] * 12
    assert frame["size_bytes"].dtype == np.int64
    assert isinstance(make_bandwidths([], {}).to_pandas(), pd.DataFrame)


def test_what_is_left_out_is_unknown() -> None:
    table = make_bandwidths([{"pattern": "oneway", "size_bytes": 4000, "latency_us": 2.0, "backend": "gloo", "kind": "measured"}], {})
    assert {name: column.tolist()[0] for name, column in table.columns.items() if name in ("src", "dst", "n", "algbw_gb_per_s")} == {
        "src": -1, "dst": -1, "n": 0, "algbw_gb_per_s": 2.0,
    }  # fmt: skip
    assert math.isnan(table.columns["p90_latency_us"][0])


def test_series_can_be_picked_and_have_fits_but_ceilings(table: Bandwidths) -> None:
    assert table.series() == [("pingpong", "gloo", 0, 1), ("pingpong", "gloo", 1, 0), ("pingpong", "tcp", 0, 1), ("pingpong", "nccl", 0, 1)]
    picked = table.select(table.where("pingpong", "tcp", 0, 1))
    assert picked.columns["latency_us"].tolist() == pytest.approx([5.0008, 5.1024, 11.5536])
    assert picked.metadata == table.metadata
    assert set(table.fits) == {("pingpong", "gloo", 0, 1), ("pingpong", "gloo", 1, 0), ("pingpong", "nccl", 0, 1)}
    link = table.fits["pingpong", "gloo", 1, 0]
    assert (link.alpha_s, link.beta_s_per_byte) == pytest.approx((20e-6, 2e-9))
    assert make_bandwidths(line(1, 1)[:1], {}).fits == {}, "a series of one size"


def test_it_reads_as_a_table() -> None:
    rows = [{**one, "p10_latency_us": 39.0, "p90_latency_us": 140.5, "busbw_gb_per_s": 0.25} for one in line(40, 1e-3)[1:2]]
    assert repr(make_bandwidths(rows, {"notes": ["it rained"], "paths": {"0>1": "p2p"}})).splitlines() == [
        "pattern     backend    edge      size    latency        p10        p90    algbw    busbw      n",
        "pingpong    gloo       0->1     1 KiB      41 µs      39 µs     140 µs    0.025     0.25     30",
        "bandwidths in GB/s, 1 GB = 10**9 bytes",
        "path 0>1: p2p",
        "note: it rained",
    ]


def test_the_fit_stands_below_the_table_and_a_sentence_says_what_the_picture_shows(table: Bandwidths) -> None:
    assert "fit pingpong gloo 0->1: alpha 40 µs (± " in repr(table)
    assert "1 GB/s, n½ 39.1 KiB" in repr(table)
    assert table.describe() == (
        "Bandwidth against message size, 8 B to 64 KiB: gloo pingpong 0 to 1 up to 0.621 GB/s; gloo pingpong 1 to 0 up to 0.434 GB/s; "
        "tcp pingpong 0 to 1 up to 5.67 GB/s; nccl pingpong 0 to 1 up to 0.196 GB/s."
    )
    assert make_bandwidths([], {}).describe() == "Bandwidths: nothing was measured."


def test_a_notebook_gets_picture_text_and_alternative_text(table: Bandwidths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "resolve", lambda name: lambda shown: b"chart" if name == "bandwidth_png" and shown is table else b"")
    data, metadata = table._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]) == b"chart"
    assert data["text/plain"] == repr(table)
    assert metadata == {"image/png": {"alt": table.describe()}}


words = st.text(min_size=1, max_size=9).map(readable)  # what no reader can take is written out when it is loaded
floats = st.floats(SMALLEST, LARGEST) | st.sampled_from([0.0, math.nan])
rows = st.fixed_dictionaries(
    {
        name: {"U": words, "<i4": st.integers(-1, 9), "<i8": st.integers(0, MOST_BYTES), "<f8": floats}[dtype]
        for name, dtype in COLUMNS.items()
    }
    | {"kind": st.sampled_from(["measured", "published", "simulated"])}
)


@given(st.lists(rows, max_size=6), st.dictionaries(words, words | st.integers() | st.lists(words), max_size=3))
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, given_rows: list[dict[str, Any]], metadata: dict[str, Any]
) -> None:
    file = tmp_path_factory.getbasetemp() / "table.json"
    table = make_bandwidths(given_rows, metadata)
    table.save(file)
    assert load(file) == table
    assert load(file) != make_bandwidths([*given_rows, {**ROW, "size_bytes": 1}], metadata)


def columns(**changes: Any) -> Any:
    return lambda value: {**value, "columns": {**value["columns"], **{name: [one] * 12 for name, one in changes.items()}}}


DAMAGE: list[tuple[Any, str]] = [
    (lambda value: [1], "it is no table of bandwidths"),
    (lambda value: {**value, "what": "a poem"}, "it is no table of bandwidths"),
    (lambda value: {**value, "format": 2}, "its format is 2, and this version reads 1. Install a later ringsim"),
    (lambda value: {**value, "metadata": []}, "the metadata is not an object"),
    (lambda value: {**value, "columns": {}}, "the columns are not those of a table"),
    (lambda value: {**value, "columns": {**value["columns"], "n": value["columns"]["n"][:-1]}}, "differ in length"),
    (columns(n="many"), "column n holds something else"),
    (columns(n=True), "column n holds something else"),
    (columns(n=10**30), "where Python int too large|too big"),
    (columns(size_bytes=-1), "size_bytes holds a number outside 0 to"),
    (columns(size_bytes=2**60), "size_bytes holds a number outside 0 to"),
    (columns(latency_us=1e-300), "latency_us holds a number outside"),
    (columns(latency_us=-1.0), "latency_us holds a number outside"),
    (columns(latency_us=math.nan), "NaN is not JSON"),
    (columns(kind="guessed"), "none of measured, published, simulated"),
    (lambda value: {**value, "metadata": {"notes": 7}}, "notes is not a list of sentences"),
    (lambda value: {**value, "metadata": {"paths": []}}, "paths is not an object"),
    (lambda value: {**value, "metadata": {"load": ["a", 1]}}, "load is not a list of numbers"),
]


def test_damage_is_found(table: Bandwidths, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    table.save(file)
    whole = file.read_text()
    truncated = [(whole[:length], "where") for length in range(0, len(whole) - 2, 97)]
    for text, message in [
        *((json.dumps(change(json.loads(whole))), message) for change, message in DAMAGE),
        *(("", "Expecting value"), ("[" * 100_000, "recursion|where")),
        *truncated,
    ]:
        file.write_text(text)
        with pytest.raises(TraceFileError, match=message):
            load(file)


def test_files_that_cannot_be_read_or_written(table: Bandwidths, tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="must exist"):
        load(tmp_path / "none.json")
    with pytest.raises(TraceFileError, match="must be readable"):
        load(tmp_path)
    with pytest.raises(TraceFileError, match="must be writable"):
        table.save(tmp_path / "no" / "table.json")
    with pytest.raises(TraceFileError, match="must be writable"):
        table.save(tmp_path)
    with pytest.raises(TraceFileError, match="must be plain data"):
        make_bandwidths([], {"when": object()}).save(tmp_path / "table.json")
    assert list(tmp_path.iterdir()) == [], "nothing half-written is left"


SIZES = [2**power for power in range(3, 29)]


def alpha_beta(size: float, alpha_s: float, gb_per_s: float) -> float:
    return alpha_s + size / gb_per_s * 1e-9


def bounds(times: list[float], **bands: list[float]) -> list[tuple[int, int]]:
    return [(regime.first, regime.last) for regime in find_regimes(SIZES[: len(times)], times, **bands)]


@given(st.floats(1e-6, 1e-3), st.floats(0.1, 500), st.integers(0, 10**6))
def test_one_line_with_noise_has_no_break(alpha_s: float, gb_per_s: float, seed: int) -> None:
    noise = np.exp(np.random.default_rng(seed).uniform(-0.05, 0.05, len(SIZES)))
    times = [alpha_beta(size, alpha_s, gb_per_s) * factor for size, factor in zip(SIZES, noise, strict=True)]
    assert bounds(times) == [(0, len(SIZES) - 1)]


@given(st.integers(3, len(SIZES) - 3), st.integers(0, 10**6))
def test_a_jump_is_found_where_it_is(at: int, seed: int) -> None:
    """Three times the time from one size on, alpha and beta alike: both continuations miss by a factor."""
    noise = np.exp(np.random.default_rng(seed).uniform(-0.03, 0.03, len(SIZES)))
    times = [
        alpha_beta(size, 40e-6, 3) * (3 if index >= at else 1) * factor
        for index, (size, factor) in enumerate(zip(SIZES, noise, strict=True))
    ]
    assert bounds(times) == [(0, at - 1), (at, len(SIZES) - 1)]


def test_the_lines_are_those_of_both_sides() -> None:
    times = [alpha_beta(size, 20e-6, 1.5) if size < 2**16 else alpha_beta(size, 150e-6, 5) for size in SIZES]
    small, large = find_regimes(SIZES, times)
    assert SIZES[small.last] == 2**15
    assert (small.link.alpha_s, small.link.bandwidth_gb_per_s) == pytest.approx((20e-6, 1.5))
    assert (large.link.alpha_s, large.link.bandwidth_gb_per_s) == pytest.approx((150e-6, 5))


def test_two_breaks() -> None:
    factors = [1] * 8 + [3] * 8 + [9] * 10
    times = [alpha_beta(size, 40e-6, 3) * factor for size, factor in zip(SIZES, factors, strict=True)]
    assert bounds(times) == [(0, 7), (8, 15), (16, 25)]


def test_a_change_of_slope_alone_is_no_break() -> None:
    """A cache that is too small from 1 MiB on: 12 GB/s below, 4 GB/s for every byte beyond."""
    times = [alpha_beta(min(size, 2**20), 10e-6, 12) + max(size - 2**20, 0) / 4e9 for size in SIZES]
    assert bounds(times) == [(0, len(SIZES) - 1)]


def test_a_fall_is_a_break_where_the_bands_are_apart() -> None:
    times = [100e-6] * 4 + [50e-6] * 2
    assert bounds(times) == [(0, 3), (4, 5)]
    assert bounds(times, p10_s=[40e-6] * 6, p90_s=[200e-6] * 6) == [(0, 5)], "the medians fall, the messages do not"
    assert bounds([100e-6] * 4 + [90e-6] * 2) == [(0, 5)], "by less than a quarter"


def test_a_jump_within_the_spread_of_the_times_is_none() -> None:
    times = [alpha_beta(size, 40e-6, 3) * (3 if index >= 10 else 1) for index, size in enumerate(SIZES)]
    narrow = {"p10_s": [0.9 * time for time in times], "p90_s": [1.2 * time for time in times]}
    wide = {"p10_s": [time / 5 for time in times], "p90_s": [5 * time for time in times]}
    assert bounds(times, **narrow) == [(0, 9), (10, 25)]
    assert bounds(times, **wide) == [(0, 25)]


def test_few_sizes() -> None:
    assert find_regimes([], []) == []
    (alone,) = find_regimes([8], [1e-6])
    assert (alone.first, alone.last, alone.link) == (0, 0, None)
    (two,) = find_regimes([0, 1000], [1e-6, 2e-6])
    assert two.link.bandwidth_gb_per_s == pytest.approx(1)


def test_sizes_must_ascend() -> None:
    with pytest.raises(ArgumentError, match=r"sizes_bytes must ascend, got \[8.0, 8.0\]"):
        find_regimes([8, 8], [1e-6, 2e-6])
    with pytest.raises(ArgumentError, match="lists of one length, got 2 sizes and 1 times"):
        find_regimes([8, 16], [1e-6])


WHOLE = (DATA / "bandwidth-gloo.json").read_bytes()


def load_damaged(data: bytes, *, draw: bool) -> None:
    """Loads a damaged file, and asks the table for everything that it can say. Any error but one of ringsim's own comes out of here."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "damaged.json")
        path.write_bytes(data)
        try:
            table = load(path)
        except RingError:
            return
        assert table.describe()
        assert repr(table)
        assert len(table.to_pandas()) == len(table)
        assert set(table.fits) <= set(table.series())
        table.save(path)
        assert load(path) == table
        if draw:
            table.plot(ax=Figure().add_subplot())


def change_metadata(data: bytes, choose: Choose) -> bytes:
    document = json.loads(data)
    document["metadata"] = json.loads(change_meta(json.dumps(document["metadata"]).encode(), choose))
    return json.dumps(document).encode()


@settings(max_examples=2 * settings.default.max_examples)
@given(st.data(), st.booleans())
def test_random_damage(data: st.DataObject, draw: bool) -> None:
    def choose(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    what = choose(0, 4)
    damaged = flip(WHOLE, choose) if what == 0 else change_meta(WHOLE, choose) if what == 1 else WHOLE
    damaged = changed_rows(choose) if what > 2 else damaged
    load_damaged(change_metadata(damaged, choose) if what in (2, 4) else damaged, draw=draw)


def changed_rows(choose: Choose) -> bytes:
    """Puts other values of the right kind into some rows."""
    document = json.loads(WHOLE)
    columns: dict[str, list[Any]] = document["columns"]
    for _ in range(choose(1, 6)):
        name = sorted(columns)[choose(0, len(columns) - 1)]
        kind = type(columns[name][0])
        fitting = [one for one in ODD_VALUES if isinstance(one, kind) and not isinstance(one, bool)] + [5e-324, 1e-300] * (kind is float)
        value, row = fitting[choose(0, len(fitting) - 1)], choose(0, len(columns[name]) - 1)
        if choose(0, 3):
            columns[name][row] = value
        else:
            columns[name] = [value] * len(columns[name])
    return json.dumps(document).encode()


LINK = Link(alpha_s=10e-6, beta_s_per_byte=8e-11)
FEW_SIZES = [8, 4096, 2**20]


def times_us(table: Any, pattern: str, src: int, dst: int) -> list[float]:
    found: list[float] = table.columns["latency_us"][table.where(pattern, "link", src, dst)].tolist()
    return found


@pytest.mark.parametrize("pattern", ["pingpong", "exchange", "shift"])
def test_the_fit_gives_back_the_link(pattern: str) -> None:
    table = ringsim.bandwidth(4, FEW_SIZES, pattern, link=LINK)
    assert sorted(table.fits) == [(pattern, "link", rank, (rank + 1) % 4) for rank in range(4)]
    for link in table.fits.values():
        assert link.alpha_s == pytest.approx(LINK.alpha_s, rel=1e-9)
        assert link.beta_s_per_byte == pytest.approx(LINK.beta_s_per_byte, rel=1e-9)


def test_a_stream_shows_what_a_message_keeps_the_link_busy() -> None:
    table = ringsim.bandwidth(2, FEW_SIZES, "oneway", edge=(0, 1), link=LINK)
    expected = [1e6 * (LINK.alpha_s / STREAM + size * LINK.beta_s_per_byte) for size in FEW_SIZES]  # the latency is paid once
    assert times_us(table, "oneway", 0, 1) == pytest.approx(expected, rel=1e-9)


def test_an_all_reduce_takes_its_closed_form() -> None:
    table = ringsim.bandwidth(4, [4096], "all_reduce", link=LINK)
    assert times_us(table, "all_reduce", -1, -1) == pytest.approx(
        [1e6 * (6 * LINK.alpha_s + 6 / 4 * 4096 * LINK.beta_s_per_byte)], rel=1e-9
    )


def test_edges_differ_where_their_links_do() -> None:
    slow = Link(50e-6, 8e-10)
    table = ringsim.bandwidth(3, FEW_SIZES, link={(a, b): slow if 2 in (a, b) else LINK for a in range(3) for b in range(3) if a != b})
    assert times_us(table, "pingpong", 0, 1) == pytest.approx([1e6 * LINK.time_s(size) for size in FEW_SIZES], rel=1e-9)
    assert times_us(table, "pingpong", 1, 2) == pytest.approx([1e6 * slow.time_s(size) for size in FEW_SIZES], rel=1e-9)


@pytest.mark.parametrize("topology", [RingLinks(LINK), FullBisection(LINK)])
def test_both_ways_and_all_at_once_meet_nobody_in_a_ring(topology: Any) -> None:
    table = ringsim.bandwidth(4, FEW_SIZES, ["exchange", "shift"], topology=topology)
    for pattern in ("exchange", "shift"):
        assert times_us(table, pattern, 1, 2) == pytest.approx([1e6 * LINK.time_s(size) for size in FEW_SIZES], rel=1e-9)


def test_the_table_says_that_it_is_simulated_and_is_the_same_in_each_run(tmp_path: Path) -> None:
    table = ringsim.bandwidth(2, FEW_SIZES, link=LINK)
    assert set(table.columns["kind"].tolist()) == {"simulated"}
    assert table.metadata["source"] == "simulated"
    assert table.metadata["constants"]["links"] == {"all": {"alpha_s": 10e-6, "beta_s_per_byte": 8e-11}}
    assert table == ringsim.bandwidth(2, FEW_SIZES, link=LINK)
    table.save(tmp_path / "table.json")
    assert load(tmp_path / "table.json") == table


def test_a_link_that_takes_no_time_has_no_bandwidth() -> None:
    table = ringsim.bandwidth(2, [8], link=Link(0.0, 0.0))
    assert times_us(table, "pingpong", 0, 1) == [0.0]
    assert table.columns["algbw_gb_per_s"].tolist() != table.columns["algbw_gb_per_s"].tolist()  # NaN


def test_simulated_ranks_measure_the_links_of_their_own_run() -> None:
    def worker() -> Any:
        return ringsim.bandwidth(sizes=FEW_SIZES, edge=(2, 0))

    slow = Link(50e-6, 8e-10)
    links = {(a, b): slow if 2 in (a, b) else LINK for a in range(3) for b in range(3) if a != b}
    tables = ringsim.simulate(worker, world_size=3, link=links).results
    assert times_us(tables[0], "pingpong", 2, 0) == pytest.approx([1e6 * slow.time_s(size) for size in FEW_SIZES], rel=1e-9)
    assert tables[0] == tables[1] == tables[2]
    assert tables[0].metadata["source"] == "simulated"


def test_simulated_ranks_measure_no_others() -> None:
    with pytest.raises(RingError, match="simulate must be called outside of simulated ranks"):
        ringsim.simulate(lambda: ringsim.bandwidth(sizes=[8], link=LINK), world_size=2, link=LINK)
    with pytest.raises(RingError, match="world_size must be 2 or left out"):
        ringsim.simulate(lambda: ringsim.bandwidth(3, [8]), world_size=2, link=LINK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"link": "fast"}, "link must be a Link"),
        ({"link": LINK, "topology": RingLinks(LINK)}, "exactly one of link and topology"),
        ({"link": LINK, "comm_device": "gpu"}, "comm_device must be left out"),
        ({"link": LINK, "world_size": 0}, "world_size must be an integer from 1"),
        ({"link": LINK, "edge": (0, 5)}, "edge must be"),
        ({"link": LINK, "pattern": "star"}, "pattern must be one of"),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ringsim.bandwidth(**{"sizes": [8], **arguments})


WITHOUT_FACTOR = {"new_group", "span", "mark", "barrier", "monitored_barrier"}


def bytes_over_the_busiest_link(op: str, ranks: int, size_bytes: int) -> int:
    """Counts what rank 0 sends when each operation goes round a ring, shard by shard."""
    shard = size_bytes // ranks
    sent = 0
    for _ in range(ranks - 1):  # reduce-scatter, or all-gather: each round a rank passes one shard on
        sent += shard
    if op == "all_reduce":  # the one, then the other
        for _ in range(ranks - 1):
            sent += shard
    return sent


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_bus_factor_is_the_traffic_of_a_ring(op: str, ranks: int) -> None:
    size_bytes = 840 * ranks
    assert bus_factor(op, ranks) * size_bytes == pytest.approx(bytes_over_the_busiest_link(op, ranks, size_bytes))


@pytest.mark.parametrize("op", sorted(set(OP_NAMES) - WITHOUT_FACTOR))
def test_every_operation_of_a_trace_has_a_factor(op: str) -> None:
    assert all(0 < bus_factor(op, ranks) < 2 for ranks in (2, 3, 8))


@pytest.mark.parametrize("op", ["send", "irecv", "batch_isend", "broadcast", "reduce"])
def test_a_buffer_that_is_sent_on_whole_counts_once(op: str) -> None:
    assert {bus_factor(op, ranks) for ranks in (1, 2, 3, 8)} == {1.0}


@pytest.mark.parametrize("op", [*sorted(WITHOUT_FACTOR), "my_own_collective"])
def test_unknown_operation_has_none_and_ends_nothing(op: str) -> None:
    # DeepSpeed 0.19.8 calls exit(0) for operations that its bandwidth table has not.
    assert math.isnan(bus_factor(op, 4))
    assert math.isnan(busbw_gb_per_s(op, 8, 1.0, 4))


def test_algbw_is_size_over_time() -> None:
    # DeepSpeed 0.19.8 doubles the size for all_reduce.
    assert algbw_gb_per_s(8_000_000, 1000.0) == 8.0
    assert busbw_gb_per_s("all_reduce", 8_000_000, 1000.0, 2) == 8.0
    assert busbw_gb_per_s("send", 8_000_000, 1000.0, 64) == 8.0


@pytest.mark.parametrize(("size_bytes", "duration_us"), [(0, 5.0), (8, 0.0), (8, math.nan)])
def test_no_bandwidth_without_bytes_or_time(size_bytes: int, duration_us: float) -> None:
    assert math.isnan(algbw_gb_per_s(size_bytes, duration_us))


def test_group_size_must_be_positive() -> None:
    with pytest.raises(ArgumentError, match="group_size must be 1 or more, got 0"):
        bus_factor("all_reduce", 0)
