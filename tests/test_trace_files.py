"""A trace as a file: the same trace comes back, damage gives one clear error, and saving is all or nothing."""

from __future__ import annotations

import io
import json
import os
import stat
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from random_traces import traces
from test_trace_parts import two_ranks

import ringsim
from ringsim.errors import TraceFileError
from ringsim.traces import files
from ringsim.traces.events import COLUMN_DTYPES, OP_CODES, Group, Payload, Tables, make_events
from ringsim.traces.files import load, save
from ringsim.traces.value import Trace

TABLES = Tables((Group("world", (0, 1)),), (Payload("float32", (2,), 8),), ("compute",), ("ring.py",))


def small() -> Trace:
    columns = {
        "rank": [0, 0, 1],
        "op": [OP_CODES["isend"], OP_CODES["span"], OP_CODES["irecv"]],
        "peer": [1, -1, 0],
        "group": [0, -1, 0],
        "payload": [0, -1, 0],
        "label": [-1, 0, -1],
        "post_ns": [10, 20, 15],
        "wait_ns": [12, -1, 16],
        "done_ns": [30, 25, -1],
        "status": [2, 2, 1],
    }
    return Trace(
        make_events(columns, TABLES), {"format": 1, "world_size": 2, "notes": ["ä note"]}, results=[object(), 2], output=["a", "b"]
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.ringtrace"
    small().save(path)
    return path


# --- saving -----------------------------------------------------------------------------------------------------------------------------


def test_a_trace_comes_back_without_results_and_output(path: Path) -> None:
    trace = load(path)
    assert trace == small()
    assert (trace.results, trace.output) == ([], [])
    assert ringsim.load(str(path)) == trace


@given(traces)
def test_every_trace_comes_back(trace: Trace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        trace.save(f"{directory}/run.ringtrace")
        back = load(f"{directory}/run.ringtrace")
    assert back == trace
    assert {name: getattr(back.events, name).dtype for name in COLUMN_DTYPES} == COLUMN_DTYPES


def test_more_than_one_row_group_comes_back(tmp_path: Path) -> None:
    count = 1_200_000
    rng = np.random.default_rng(0)
    done = np.where(rng.random(count) < 0.1, -1, np.arange(count))
    columns = {"rank": np.zeros(count), "op": np.full(count, OP_CODES["mark"]), "post_ns": np.arange(count), "done_ns": done}
    trace = Trace(make_events(columns), {})
    trace.save(tmp_path / "big.ringtrace")
    assert load(tmp_path / "big.ringtrace") == trace


def test_the_same_trace_gives_the_same_bytes(path: Path) -> None:
    first = path.read_bytes()
    load(path).save(path)
    assert path.read_bytes() == first


def test_other_tools_can_read_it(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ["meta.json", "events.parquet"]
        assert archive.testzip() is None
        meta = json.loads(archive.read("meta.json"))
        table = pq.read_table(io.BytesIO(archive.read("events.parquet"))).to_pydict()
    assert meta["tables"]["groups"] == [{"name": "world", "ranks": [0, 1]}]
    assert (table["post_ns"], table["wait_ns"], table["done_ns"]) == ([10, 20, 15], [12, None, 16], [30, 25, None])


def test_results_and_output_are_not_in_the_file(tmp_path: Path) -> None:
    secret = "only the notebook knows"
    Trace(small().events, {}, results=[secret], output=[secret]).save(tmp_path / "x")
    assert secret.encode() not in (tmp_path / "x").read_bytes()


def test_a_saved_file_has_ordinary_permissions(path: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_saving_replaces_a_file_and_keeps_a_link(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "latest.ringtrace"
    link.symlink_to(path)
    other = Trace(small().events, {"world_size": 7})
    other.save(link)
    assert link.is_symlink()
    assert load(path) == other


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_save_leaves_what_was_there(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    before = path.read_bytes()

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(files.os, step, fail)
    with pytest.raises(TraceFileError if isinstance(error, OSError) else KeyboardInterrupt):
        Trace(small().events, {"world_size": 7}).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none/run.ringtrace", "No such file or directory"),
        ("run.ringtrace/inside", "Not a directory"),
        (".", "this is no file"),
        ("null\0character", "null byte"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_place_that_cannot_be_written(path: Path, tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(TraceFileError, match=says) as caught:
        small().save(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]


def test_a_device_is_not_replaced() -> None:
    with pytest.raises(TraceFileError, match="/dev/null: this is no file"):
        small().save("/dev/null")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("metadata", [{"x": object()}, {"x": float("nan")}, {"world_size": 1}, {"world_size": "two"}, {"notes": "no list"}])
def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path, metadata: dict[str, Any]) -> None:
    with pytest.raises(TraceFileError, match="A trace must be plain data to be saved, got"):
        Trace(small().events, metadata).save(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


# --- recovery from parts ----------------------------------------------------------------------------------------------------------------


def recovered(path: Path) -> Trace:
    trace = load(path)
    assert len(trace.events) == 4
    assert len(trace.messages) == 1
    assert (
        trace.metadata["notes"][-1] == f"put together from what the ranks left in {path.name}.parts: the run ended before it wrote its file"
    )
    assert trace.metadata["notes"][-1] in trace.summary()
    return trace


def test_parts_stand_in_for_a_missing_or_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "run.ringtrace"
    (tmp_path / "run.ringtrace.parts").mkdir()
    two_ranks(tmp_path / "run.ringtrace.parts")
    missing = recovered(path)
    small().save(path)
    path.write_bytes(path.read_bytes()[:-1])
    assert recovered(path) == missing
    small().save(path)
    assert load(path) == small()


def test_a_recovered_trace_can_be_saved(tmp_path: Path) -> None:
    path = tmp_path / "run.ringtrace"
    (tmp_path / "run.ringtrace.parts").mkdir()
    two_ranks(tmp_path / "run.ringtrace.parts")
    trace = load(path)
    save(trace, path)
    assert load(path) == trace


def test_empty_parts_are_no_help(tmp_path: Path) -> None:
    (tmp_path / "run.ringtrace.parts").mkdir()
    with pytest.raises(TraceFileError, match=r"must exist, got .* could not be read either: no rank left anything"):
        load(tmp_path / "run.ringtrace")
