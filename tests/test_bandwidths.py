"""Tables of bandwidths, the breaks of a fit, and the factors of nccl-tests."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_file import OPS
from trace_mutations import DATA, ODD_VALUES, Choose, change_meta, flip

from ringsim.errors import TraceFileError
from ringsim.traces.bandwidths import (
    COLUMNS,
    LARGEST,
    MOST_BYTES,
    SMALLEST,
    Bandwidths,
    find_regimes,
    load,
    make_bandwidths,
)
from ringsim.traces.collectives import (
    algbw_gb_per_s,
    bus_factor,
    busbw_gb_per_s,
    count_rounds,
    make_rounds,
)
from ringsim.traces.events import readable

ROW = {"pattern": "pingpong", "src": 0, "dst": 1, "backend": "gloo", "kind": "measured", "n": 30}


def line(alpha_us: float, us_per_byte: float, **changes: Any) -> list[dict[str, Any]]:
    return [
        {**ROW, "size_bytes": size, "latency_us": alpha_us + us_per_byte * size, **changes}
        for size in (8, 1024, 65536)
    ]


@pytest.fixture
def table() -> Bandwidths:
    rows = [
        *line(40, 1e-3),
        *line(20, 2e-3, src=1, dst=0),
        *line(5, 1e-4, backend="tcp"),
        *line(7, 5e-3, backend="nccl", kind="published"),
    ]
    return make_bandwidths(
        rows, {"source": "measured", "machine": {"cpu": "a clock"}, "notes": ["it rained"]}
    )


def test_the_columns_are_exactly_these_and_what_is_left_out_is_unknown(table: Bandwidths) -> None:
    frame = table.to_pandas()
    assert " ".join(frame.columns) == (
        "pattern src dst size_bytes latency_us algbw_gb_per_s busbw_gb_per_s p10_latency_us "
        "p90_latency_us p10_algbw_gb_per_s p90_algbw_gb_per_s n backend kind"
    )
    assert (frame["pattern"].tolist(), frame["size_bytes"].dtype) == (["pingpong"] * 12, np.int64)
    assert make_bandwidths([], {}).to_pandas().empty
    bare = {"pattern": "oneway", "size_bytes": 4000, "latency_us": 2.0, "backend": "gloo"}
    (row,) = make_bandwidths([bare | {"kind": "measured"}], {}).to_pandas().to_dict("records")
    assert row.items() >= {"src": -1, "dst": -1, "n": 0, "algbw_gb_per_s": 2.0}.items()
    assert math.isnan(row["p90_latency_us"])


def test_series_can_be_picked_and_have_fits_but_ceilings(table: Bandwidths) -> None:
    there, back, ceiling, published = table.series()
    assert (there, back) == (("pingpong", "gloo", 0, 1), ("pingpong", "gloo", 1, 0))
    assert (ceiling[1], published[1]) == ("tcp", "nccl")
    picked = table.select(table.where(*ceiling))
    assert picked.columns["latency_us"].tolist() == pytest.approx([5.0008, 5.1024, 11.5536])
    assert picked.metadata == table.metadata
    assert set(table.fits) == {there, back, published}
    link = table.fits[back]
    assert (link.alpha_s, link.beta_s_per_byte) == pytest.approx((20e-6, 2e-9))
    assert make_bandwidths(line(1, 1)[:1], {}).fits == {}, "a series with one size has no fit"


def test_it_reads_as_a_table_with_its_fits_and_as_a_sentence(table: Bandwidths) -> None:
    known = {"p10_latency_us": 39.0, "p90_latency_us": 140.5, "busbw_gb_per_s": 0.25}
    rows = [{**one, **known} for one in line(40, 1e-3)[1:2]]
    short = make_bandwidths(rows, {"notes": ["it rained"], "paths": {"0>1": "p2p"}})
    heads, numbers, *rest = repr(short).splitlines()
    assert heads.split() == "pattern backend edge size latency p10 p90 algbw busbw n".split()
    said = "pingpong gloo 0->1 1 KiB 41 µs 39 µs 140 µs 0.025 0.25 30"
    assert (numbers.split(), len(numbers)) == (said.split(), len(heads))
    assert rest == ["bandwidths in GB/s, 1 GB = 10**9 bytes", "path 0>1: p2p", "note: it rained"]
    assert "fit pingpong gloo 0->1: alpha 40 µs (± " in repr(table)
    assert "1 GB/s, n½ 39.1 KiB" in repr(table)
    assert table.describe() == (
        "Bandwidth against message size, 8 B to 64 KiB: gloo pingpong 0 to 1 up to 0.621 GB/s; "
        "gloo pingpong 1 to 0 up to 0.434 GB/s; tcp pingpong 0 to 1 up to 5.67 GB/s; nccl pingpong "
        "0 to 1 up to 0.196 GB/s."
    )
    assert make_bandwidths([], {}).describe() == "Bandwidths: nothing was measured."


# -- files

# characters that no reader can accept are escaped on loading
words = st.text(min_size=1, max_size=9).map(readable)
floats = st.floats(SMALLEST, LARGEST) | st.sampled_from([0.0, math.nan])
values: dict[str, st.SearchStrategy[Any]] = {
    "U": words,
    "<i4": st.integers(-1, 9),
    "<i8": st.integers(0, MOST_BYTES),
    "<f8": floats,
}
kinds = st.sampled_from(["measured", "published", "simulated"])
rows = st.fixed_dictionaries(
    {name: values[dtype] for name, dtype in COLUMNS.items()} | {"kind": kinds}
)


@given(
    st.lists(rows, max_size=6),
    st.dictionaries(words, words | st.integers() | st.lists(words), max_size=3),
)
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory,
    given_rows: list[dict[str, Any]],
    metadata: dict[str, Any],
) -> None:
    file = tmp_path_factory.getbasetemp() / "table.json"
    table = make_bandwidths(given_rows, metadata)
    table.save(file)
    assert load(file) == table
    assert load(file) != make_bandwidths([*given_rows, {**ROW, "size_bytes": 1}], metadata)


def put(entry: str, value: Any, *, within: str | None = None) -> Any:
    """Changes one entry of the document, or of an object in it."""
    return lambda whole: {
        **whole,
        **({entry: value} if within is None else {within: {**whole[within], entry: value}}),
    }


def column(name: str, value: Any, count: int = 12) -> Any:
    return put(name, [value] * count, within="columns")


DAMAGE: list[tuple[Any, str]] = [
    (lambda whole: [1], "it is not a table of bandwidths"),
    (put("what", "a poem"), "it is not a table of bandwidths"),
    (put("format", 2), "it has format 2, and this version reads format 1. A later version"),
    (put("metadata", []), "the metadata is not an object"),
    (put("columns", {}), "does not have the columns of a table"),
    (column("n", 30, 11), "different lengths"),
    (column("n", True), "column n has values of the wrong type"),
    (column("n", 10**30), "Python int too large|too big"),
    (column("size_bytes", 2**60), "size_bytes contains a number outside the range 0 to"),
    (column("latency_us", 1e-300), "latency_us contains a number outside"),
    (column("latency_us", math.nan), "NaN is not valid JSON"),
    (column("kind", "guessed"), "a kind other than measured, published, simulated"),
    (put("metadata", {"notes": 7}), "notes is not a list of sentences"),
    (put("metadata", {"paths": []}), "paths is not an object"),
    (put("metadata", {"load": ["a", 1]}), "load is not a list of numbers"),
]


def test_damage_is_found(table: Bandwidths, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    table.save(file)
    whole = file.read_text()
    damaged = [(json.dumps(change(json.loads(whole))), message) for change, message in DAMAGE]
    damaged += [("", "Expecting value"), ("[" * 100_000, "recursion|cannot read")]
    damaged += [(whole[:length], "as a table") for length in range(0, len(whole) - 2, 97)]
    for text, message in damaged:
        file.write_text(text)
        with pytest.raises(TraceFileError, match=message):
            load(file)


def test_files_that_cannot_be_read_or_written(table: Bandwidths, tmp_path: Path) -> None:
    empty = make_bandwidths([], {"when": object()})
    unread = make_bandwidths([], {"notes": None})
    for use, name, message in (
        (load, "none.json", "cannot open the table"),
        (table.save, "no/table.json", "cannot write a table to"),
        (table.save, ".", "cannot write a table to"),
        (empty.save, "table.json", "cannot save a table to"),
        (unread.save, "table.json", "notes is not a list of sentences"),
    ):
        with pytest.raises(TraceFileError, match=message):
            use(tmp_path / name)
    assert list(tmp_path.iterdir()) == [], "no partial file may remain"


WHOLE = (DATA / "bandwidth-gloo.json").read_bytes()


def change_metadata(data: bytes, choose: Choose) -> bytes:
    document = json.loads(data)
    metadata = json.dumps(document["metadata"]).encode()
    document["metadata"] = json.loads(change_meta(metadata, choose))
    return json.dumps(document).encode()


def change_rows(data: bytes, choose: Choose) -> bytes:
    """Puts other values of the right kind into some rows."""
    document = json.loads(data)
    columns: dict[str, list[Any]] = document["columns"]
    for _ in range(choose(1, 6)):
        name = sorted(columns)[choose(0, len(columns) - 1)]
        kind = type(columns[name][0])
        fitting = [one for one in ODD_VALUES if type(one) is kind]
        fitting += [5e-324, 1e-300] * (kind is float)
        value, row = fitting[choose(0, len(fitting) - 1)], choose(0, len(columns[name]) - 1)
        if choose(0, 3):
            columns[name][row] = value
        else:
            columns[name] = [value] * len(columns[name])
    return json.dumps(document).encode()


WAYS = ([flip], [change_meta], [change_metadata], [change_rows], [change_rows, change_metadata])


def damage_table(data: bytes, choose: Choose) -> bytes:
    for change in WAYS[choose(0, len(WAYS) - 1)]:
        data = change(data, choose)
    return data


# -- breaks of a fit

SIZES = [2**power for power in range(3, 29)]
NO_NOISE = [1.0] * len(SIZES)


def times(alpha_s: float = 40e-6, gb_per_s: float = 3, factors: Any = NO_NOISE) -> list[float]:
    """The times of a link over all sizes, each multiplied by its factor."""
    lasts = alpha_s + np.array(SIZES) / gb_per_s * 1e-9
    return (lasts * factors).tolist()


def bounds(times: list[float], **bands: list[float]) -> list[tuple[int, int]]:
    found = find_regimes(SIZES[: len(times)], times, **bands)
    return [(regime.first, regime.last) for regime in found]


def noise(seed: int, width: float) -> Any:
    return np.exp(np.random.default_rng(seed).uniform(-width, width, len(SIZES)))


@given(st.floats(1e-6, 1e-3), st.floats(0.1, 500), st.integers(3, 23), st.integers(0, 10**6))
def test_noise_is_no_break_and_a_jump_is_found_where_it_is(
    alpha_s: float, gb_per_s: float, at: int, seed: int
) -> None:
    """The time from one size on is multiplied by three (both alpha and beta)."""
    assert bounds(times(alpha_s, gb_per_s, noise(seed, 0.05))) == [(0, 25)]
    jump = np.where(np.arange(len(SIZES)) < at, 1, 3)
    assert bounds(times(factors=noise(seed, 0.03) * jump)) == [(0, at - 1), (at, 25)]


JUMP = times(factors=[1] * 10 + [3] * 16)
FALL = [100e-6] * 4 + [50e-6] * 2
# too small from 1 MiB on
CACHE = [10e-6 + min(size, 2**20) / 12e9 + max(size - 2**20, 0) / 4e9 for size in SIZES]


def spread(times: list[float], low: float, high: float) -> dict[str, list[float]]:
    return {"p10_s": [low * one for one in times], "p90_s": [high * one for one in times]}


REGIMES: dict[str, tuple[list[float], dict[str, list[float]], list[tuple[int, int]]]] = {
    "two breaks": (times(factors=[1] * 8 + [3] * 8 + [9] * 10), {}, [(0, 7), (8, 15), (16, 25)]),
    "a change of slope alone is no break": (CACHE, {}, [(0, 25)]),
    "a fall": (FALL, {}, [(0, 3), (4, 5)]),
    "a fall by less than a quarter": ([100e-6] * 4 + [90e-6] * 2, {}, [(0, 5)]),
    "the medians fall, the messages do not": (FALL, spread([1e-4] * 6, 0.4, 2), [(0, 5)]),
    "a jump beyond the spread": (JUMP, spread(JUMP, 0.9, 1.2), [(0, 9), (10, 25)]),
    "a jump within the spread": (JUMP, spread(JUMP, 0.2, 5), [(0, 25)]),
    "nothing": ([], {}, []),
}


@pytest.mark.parametrize("what", REGIMES)
def test_where_a_fit_breaks(what: str) -> None:
    given_times, bands, expected = REGIMES[what]
    assert bounds(given_times, **bands) == expected


def test_the_lines_are_those_of_both_sides() -> None:
    both = find_regimes(SIZES, [*times(20e-6, 1.5)[:13], *times(150e-6, 5)[13:]])
    assert SIZES[both[0].last] == 2**15
    for regime, line in zip(both, ((20e-6, 1.5), (150e-6, 5)), strict=True):
        assert regime.link is not None
        assert (regime.link.alpha_s, regime.link.bandwidth_gb_per_s) == pytest.approx(line)
    (alone,), (two,) = find_regimes([8], [1e-6]), find_regimes([0, 1000], [1e-6, 2e-6])
    assert (alone.first, alone.last, alone.link) == (0, 0, None)
    assert two.link is not None
    assert two.link.bandwidth_gb_per_s == pytest.approx(1)


# -- the factors of nccl-tests

WITHOUT_FACTOR = ("new_group", "span", "mark", "barrier", "monitored_barrier", "my_own_collective")


def test_every_operation_of_a_trace_has_a_factor_and_unknown_ones_end_nothing() -> None:
    # DeepSpeed 0.19.8 calls exit(0) for operations that are missing in its bandwidth table.
    for op in WITHOUT_FACTOR:
        assert math.isnan(bus_factor(op, 4)), op
        assert math.isnan(busbw_gb_per_s(op, 8, 1.0, 4)), op
    for op in {*OPS}.difference(WITHOUT_FACTOR):
        assert all(0 < bus_factor(op, ranks) < 2 for ranks in (2, 3, 8)), op
    # a buffer that is passed on as a whole counts once
    for op in ("send", "irecv", "batch_isend", "broadcast", "reduce"):
        assert {bus_factor(op, ranks) for ranks in (1, 2, 3, 8)} == {1.0}
    # DeepSpeed 0.19.8 doubles the size for all_reduce.
    assert algbw_gb_per_s(8_000_000, 1000.0) == 8.0
    for op, ranks in (("all_reduce", 2), ("send", 64)):
        assert busbw_gb_per_s(op, 8_000_000, 1000.0, ranks) == 8.0
    for size_bytes, duration_us in ((0, 5.0), (8, 0.0), (8, math.nan)):
        assert math.isnan(algbw_gb_per_s(size_bytes, duration_us))


# -- the messages of collectives

ROUNDS = (
    "all_reduce all_gather reduce_scatter all_to_all broadcast reduce gather scatter barrier"
).split()


@pytest.mark.parametrize("op", ROUNDS)
@given(size=st.integers(1, 9), data=st.data())
def test_rounds_move_what_a_collective_must(op: str, size: int, data: st.DataObject) -> None:
    root, share = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 50))
    rounds = list(make_rounds(op, size, root, share * size))
    count, amount = count_rounds(op, size, share * size)
    assert len(rounds) == count
    messages = [message for messages in rounds for message in messages]
    assert {bytes_ for _, _, bytes_ in messages} <= {amount}
    assert all(source != to for source, to, _ in messages)
    if op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        sent = [sum(one[2] for one in messages if one[0] == rank) for rank in range(size)]
        assert sent == [round(share * size * bus_factor(op, size))] * size
    elif op in ("broadcast", "reduce"):
        backwards = [[(to, source, _) for source, to, _ in one] for one in rounds[::-1]]
        have = {root}
        for given_on in rounds if op == "broadcast" else backwards:
            assert {source for source, _, _ in given_on} <= have
            have |= {to for _, to, _ in given_on}
        assert have == set(range(size))
        assert count == math.ceil(math.log2(size))
    elif op == "barrier":
        knows = [{rank} for rank in range(size)]
        for given_on in rounds:
            known = [set(one) for one in knows]
            for source, to, _ in given_on:
                knows[to] |= known[source]
        assert all(one == set(range(size)) for one in knows)
