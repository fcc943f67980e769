"""What is no trace of ours, foreign, hostile or damaged at random, gives one clear error: never another one, never execution."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
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
from test_trace_files import small

import ringsim
from ringsim.errors import TraceFileError
from ringsim.traces import files
from ringsim.traces.files import load
from ringsim.traces.value import Trace


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.ringtrace"
    small().save(path)
    return path


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
    for module in ("files", "events", "parts", "value", "matching"):
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
