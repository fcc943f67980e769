"""A trace as a file: the same trace comes back, damage gives one clear error, and saving is all or nothing."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import stat
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
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
    assert (trace.results, trace.output) == (None, None)
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


# --- loading what is no trace -----------------------------------------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None], **zip_options: Any) -> None:
    """Writes the file anew, with right checksums, after ``change(meta, columns)``."""
    with zipfile.ZipFile(path) as archive:
        meta = json.loads(archive.read("meta.json"))
        table = pq.read_table(io.BytesIO(archive.read("events.parquet")))
    columns = {name: table[name] for name in table.column_names}
    change(meta, columns)
    sink = io.BytesIO()
    schema = pa.schema([pa.field(name, column.type, nullable=name in ("wait_ns", "done_ns")) for name, column in columns.items()])
    pq.write_table(pa.table(columns, schema=schema), sink)
    with zipfile.ZipFile(path, "w", **zip_options) as archive:
        archive.writestr("meta.json", json.dumps(meta))
        archive.writestr("events.parquet", sink.getvalue())


def refused(path: Path, says: str) -> None:
    with pytest.raises(TraceFileError, match=says) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rewriting_without_a_change_loads(path: Path) -> None:
    rewrite(path, lambda meta, columns: None)
    assert load(path) == small()


def column(values: list[int], dtype: str) -> Any:
    return pa.chunked_array([pa.array(values, pa.from_numpy_dtype(np.dtype(dtype)))])


HOSTILE: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "operation unknown": (lambda meta, columns: columns.update(op=column([2, 0, 999], "u2")), "column op holds a number outside"),
    "group outside its table": (lambda meta, columns: columns.update(group=column([0, -1, 1], "i4")), "column group"),
    "label below its table": (lambda meta, columns: columns.update(label=column([-2, 0, -1], "i4")), "column label"),
    "rank outside the world": (lambda meta, columns: columns.update(rank=column([0, 0, 2], "i4")), "column rank"),
    "peer outside the world": (lambda meta, columns: columns.update(peer=column([9, -1, 0], "i4")), "column peer"),
    "status of an empty slot": (lambda meta, columns: columns.update(status=column([2, 2, 0], "u1")), "column status"),
    "negative time": (lambda meta, columns: columns.update(post_ns=column([10, 20, -5], "i8")), "column post_ns"),
    "ranks in disorder": (lambda meta, columns: columns.update(rank=column([0, 1, 0], "i4")), "not in the order"),
    "posting in disorder": (lambda meta, columns: columns.update(seq=column([1, 0, 0], "i8")), "not in the order"),
    "column of another type": (lambda meta, columns: columns.update(tag=column([0, 0, 0], "i8")), "columns of events.parquet"),
    "column too many": (lambda meta, columns: columns.update(extra=column([0, 0, 0], "i8")), "columns of events.parquet"),
    "column missing": (lambda meta, columns: columns.pop("tag"), "columns of events.parquet"),
    "rows that meta.json does not state": (lambda meta, columns: meta.update(events=4), "has 3 rows, meta.json states 4"),
    "no number of rows": (lambda meta, columns: meta.update(events="3"), "states no number of events"),
    "more rows than the limit": (lambda meta, columns: meta.update(events=10**12), "states no number of events"),
    "no tables": (lambda meta, columns: meta.pop("tables"), "tables of names"),
    "table of another form": (lambda meta, columns: meta["tables"].update(labels=[3]), "a name is not a string"),
    "group of another form": (lambda meta, columns: meta["tables"].update(groups=[["world", [0]]]), "a group is not an object"),
    "shape of another form": (lambda meta, columns: meta["tables"]["payloads"][0].update(shape=[1.5]), "the shape of a payload"),
    "size of another form": (lambda meta, columns: meta["tables"]["payloads"][0].update(size_bytes=10**30), "the size of a payload"),
    "no metadata": (lambda meta, columns: meta.pop("metadata"), "metadata is not an object"),
    "world of another form": (lambda meta, columns: meta["metadata"].update(world_size=10**9), "world_size is not a number of ranks"),
    "notes of another form": (lambda meta, columns: meta["metadata"].update(notes=[{}]), "notes is not a list"),
    "no format": (lambda meta, columns: meta.pop("format"), "names no format"),
    "format of another form": (lambda meta, columns: meta.update(format=True), "names no format"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_wrong_number_with_right_checksums(path: Path, case: str) -> None:
    change, says = HOSTILE[case]
    rewrite(path, change)
    refused(path, says)


def test_a_file_of_a_later_version_says_which_is_needed(path: Path) -> None:
    rewrite(path, lambda meta, columns: (meta.update(format=2, needs="0.9.0", tables="another form"), columns.pop("tag")))
    refused(path, rf"must be at most 1 for ringsim {ringsim.__version__}, got 2 .*It needs ringsim '0.9.0' or later: pip install --upgrade")


def test_compressed_members_are_refused(path: Path) -> None:
    rewrite(path, lambda meta, columns: None, compression=zipfile.ZIP_DEFLATED)
    refused(path, "the size of meta.json is not what the file holds|the size of events.parquet")


def test_meta_json_has_a_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_META_BYTES", 100)
    refused(path, "meta.json is longer than 100 bytes")


def test_a_file_has_a_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 100)
    refused(path, "must be at most 100 bytes")


def zip_of(**members: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for name, content in members.items():
            archive.writestr(name.replace("_", "."), content)
    return sink.getvalue()


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (7,)


FOREIGN = {
    "empty": b"",
    "text": b"no trace at all\n" * 9,
    "json": b'{"traceEvents": []}' * 9,
    "pickle": pickle.dumps(Bomb()) * 9,
    "zip of nothing": zip_of(),
    "zip of one": zip_of(meta_json=b"{}"),
    "zip of others": zip_of(a_txt=b"a", b_txt=b"b"),
    "zip of three": zip_of(meta_json=b"{}", events_parquet=b"", more_txt=b""),
    "zip of two with nothing in them": zip_of(meta_json=b"", events_parquet=b""),
    "zip with a list": zip_of(meta_json=b"[]", events_parquet=b""),
    "zip with deep lists": zip_of(meta_json=b"[" * 100_000, events_parquet=b""),
    "zip with a long number": zip_of(meta_json=b"9" * 10_000, events_parquet=b""),
    "zip with NaN": zip_of(meta_json=b'{"format": NaN}', events_parquet=b""),
    "zip with bytes that are no text": zip_of(meta_json=b'{"format": "\xff"}', events_parquet=b""),
    "zip with a pickle": zip_of(meta_json=pickle.dumps(Bomb()), events_parquet=pickle.dumps(Bomb())),
    "zip of a future array file": zip_of(meta_json=b'{"format": 1, "events": 0}', events_parquet=pickle.dumps(Bomb())),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_something_else_is_refused(tmp_path: Path, case: str) -> None:
    path = tmp_path / "run.ringtrace"
    path.write_bytes(FOREIGN[case])
    refused(path, "must be one that ringsim saved, got")


def test_no_file_and_no_reading(tmp_path: Path) -> None:
    refused(tmp_path / "none.ringtrace", "must exist, got .*: No such file or directory. Check the path")
    refused(tmp_path, "must be readable, got .*: Is a directory")
    refused(tmp_path / ("x" * 300), "must be readable, got .*: File name too long")
    for name in ("", ".", "/", "null\0character"):
        with pytest.raises(TraceFileError, match="A trace file must"):
            load(name)


def test_nothing_that_reads_a_trace_can_execute_one() -> None:
    for module in ("files", "tables", "parts", "value", "frames", "matching", "waits", "summary"):
        tree = ast.parse(Path(files.__file__).with_name(f"{module}.py").read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not names & {"eval", "exec", "compile", "__import__"}, module
        assert not imported & {"pickle", "marshal", "shelve", "cloudpickle"}, module


# --- random damage ----------------------------------------------------------------------------------------------------------------------


def _real_file() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        small().save(f"{directory}/x")
        return Path(f"{directory}/x").read_bytes()


WHOLE = _real_file()


def load_or_error(damaged: bytes) -> Trace | TraceFileError:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "x")
        path.write_bytes(damaged)
        try:
            return load(path)
        except TraceFileError as error:
            return error


def survives(damaged: bytes) -> None:
    """Only a TraceFileError comes out, or the same trace (the damage hit something that says nothing, as the date of a member)."""
    found = load_or_error(damaged)
    assert "\n" not in str(found) if isinstance(found, TraceFileError) else found == small()


@given(st.integers(0, len(WHOLE) - 1))
def test_truncated_at_any_byte(length: int) -> None:
    survives(WHOLE[:length])


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(1, 255)), min_size=1, max_size=8))
def test_flipped_anywhere(flips: list[tuple[int, int]]) -> None:
    damaged = bytearray(WHOLE)
    for place, bits in flips:
        damaged[place] ^= bits
    survives(bytes(damaged))


@given(st.integers(0, len(WHOLE)), st.integers(0, len(WHOLE)), st.binary(max_size=64))
def test_spliced(cut: int, resume: int, between: bytes) -> None:
    survives(WHOLE[:cut] + between + WHOLE[resume:])


@pytest.mark.parametrize("place", range(len(WHOLE) - 220, len(WHOLE)))
def test_flipped_in_the_directory_of_the_zip(place: int) -> None:
    for bits in (0x01, 0x80, 0xFF):
        damaged = bytearray(WHOLE)
        damaged[place] ^= bits
        survives(bytes(damaged))


def _members() -> tuple[bytes, bytes]:
    with zipfile.ZipFile(io.BytesIO(WHOLE)) as archive:
        return archive.read("meta.json"), archive.read("events.parquet")


META, EVENTS = _members()


@given(st.data())
def test_damaged_inside_with_right_checksums(data: st.DataObject) -> None:
    """A hostile file: the checksums agree, so the parsers themselves meet the damage. Any error must be ours."""
    meta, events = bytearray(META), bytearray(EVENTS)
    for member in (meta, events):
        for _ in range(data.draw(st.integers(0, 4))):
            member[data.draw(st.integers(0, len(member) - 1))] = data.draw(st.integers(0, 255))
    found = load_or_error(zip_of(meta_json=bytes(meta), events_parquet=bytes(events)))
    if isinstance(found, TraceFileError):
        assert "\n" not in str(found)
    else:
        assert found.summary()
        assert found.describe()
        assert len(found.to_pandas()) == 3


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
    path.write_bytes(WHOLE[:-30])
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
    refused(tmp_path / "run.ringtrace", "must exist.*parts could not be read either: no rank left anything|could not be read either")
