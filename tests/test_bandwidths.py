"""Tables of bandwidths: rows, fits, files."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.errors import TraceFileError
from ringsim.traces import lazy
from ringsim.traces.bandwidths import COLUMNS, LARGEST, MOST_BYTES, SMALLEST, Bandwidths, load, make_bandwidths
from ringsim.traces.events import readable

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


def test_each_edge_has_its_fit_and_ceilings_have_none(table: Bandwidths) -> None:
    assert set(table.fits) == {("pingpong", "gloo", 0, 1), ("pingpong", "gloo", 1, 0), ("pingpong", "nccl", 0, 1)}
    link = table.fits["pingpong", "gloo", 1, 0]
    assert link.alpha_s == pytest.approx(20e-6)
    assert link.beta_s_per_byte == pytest.approx(2e-9)


def test_a_series_of_one_size_has_no_fit() -> None:
    assert make_bandwidths(line(1, 1)[:1], {}).fits == {}


def test_rows_can_be_picked(table: Bandwidths) -> None:
    picked = table.select(table.where("pingpong", "tcp", 0, 1))
    assert picked.columns["latency_us"].tolist() == pytest.approx([5.0008, 5.1024, 11.5536])
    assert picked.metadata == table.metadata
    assert table.series() == [("pingpong", "gloo", 0, 1), ("pingpong", "gloo", 1, 0), ("pingpong", "tcp", 0, 1), ("pingpong", "nccl", 0, 1)]


def test_it_reads_as_a_table() -> None:
    rows = [{**one, "p10_latency_us": 39.0, "p90_latency_us": 140.5, "busbw_gb_per_s": 0.25} for one in line(40, 1e-3)[1:2]]
    assert repr(make_bandwidths(rows, {"notes": ["it rained"], "paths": {"0>1": "p2p"}})).splitlines() == [
        "pattern     backend    edge      size    latency        p10        p90    algbw    busbw      n",
        "pingpong    gloo       0->1     1 KiB      41 µs      39 µs     140 µs    0.025     0.25     30",
        "bandwidths in GB/s, 1 GB = 10**9 bytes",
        "path 0>1: p2p",
        "note: it rained",
    ]


def test_the_fit_stands_below_the_table(table: Bandwidths) -> None:
    assert "fit pingpong gloo 0->1: alpha 40 µs (± " in repr(table)
    assert "1 GB/s, n½ 39.1 KiB" in repr(table)


def test_one_sentence_says_what_the_picture_shows(table: Bandwidths) -> None:
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


def damage(value: dict[str, Any], **changes: Any) -> str:
    return json.dumps({**value, **changes})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: "", "Expecting value"),
        (lambda value: "[1]", "it is no table of bandwidths"),
        (lambda value: damage(value, what="a poem"), "it is no table of bandwidths"),
        (lambda value: damage(value, format=2), "its format is 2, and this version reads 1. Install a later ringsim"),
        (lambda value: damage(value, metadata=[]), "its metadata is no object"),
        (lambda value: damage(value, columns={}), "the columns are not those of a table"),
        (lambda value: damage(value, columns={**value["columns"], "n": value["columns"]["n"][:-1]}), "differ in length"),
        (lambda value: damage(value, columns={**value["columns"], "n": ["many"] * 12}), "column n holds something else"),
        (lambda value: damage(value, columns={**value["columns"], "n": [True] * 12}), "column n holds something else"),
        (lambda value: damage(value, columns={**value["columns"], "n": [10**30] * 12}), "where Python int too large|too big"),
        (lambda value: damage(value, columns={**value["columns"], "size_bytes": [-1] * 12}), "is negative"),
        (lambda value: damage(value, columns={**value["columns"], "size_bytes": [2**60] * 12}), "a size is more than"),
        (lambda value: damage(value, columns={**value["columns"], "latency_us": [1e-300] * 12}), "latency_us holds a number outside"),
        (lambda value: damage(value, columns={**value["columns"], "latency_us": [-1.0] * 12}), "latency_us holds a number outside"),
        (lambda value: json.dumps(value).replace("null", "NaN", 1), "NaN is not JSON"),
        (lambda value: damage(value, metadata={"notes": 7}), "notes is not a list of sentences"),
        (lambda value: damage(value, metadata={"paths": []}), "its paths are no object"),
        (lambda value: damage(value, metadata={"load": ["a", 1]}), "its load is no list of numbers"),
        (lambda value: damage(value, columns={**value["columns"], "kind": ["guessed"] * 12}), "none of measured, published, simulated"),
        (lambda value: "[" * 100_000, "recursion|where"),
    ],
)
def test_damage_is_found(table: Bandwidths, tmp_path: Path, change: Any, message: str) -> None:
    file = tmp_path / "table.json"
    table.save(file)
    file.write_text(change(json.loads(file.read_text())))
    with pytest.raises(TraceFileError, match=message):
        load(file)


def test_every_truncation_is_found(table: Bandwidths, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    table.save(file)
    data = file.read_bytes()
    for length in range(0, len(data) - 2, 97):
        file.write_bytes(data[:length])
        with pytest.raises(TraceFileError):
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
