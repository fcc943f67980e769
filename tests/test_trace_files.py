"""A trace as a file.

The same trace comes back, saving is all or nothing, and what is no trace of ours gives one clear
error. Foreign, hostile or damaged at random: never another error, never execution, never much
memory.
"""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import re
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from random_traces import traces
from test_trace_parts import two_ranks
from trace_mutations import load_damaged, put_together, real_files, write_columns

import ringsim
from ringsim import Trace, load
from ringsim.errors import TraceFileError
from ringsim.plot.bars import make_bars
from ringsim.traces import files
from ringsim.traces.events import COLUMN_DTYPES, OP_CODES, Group, Payload, Tables, make_events
from ringsim.traces.files import merge

TABLES = Tables(
    (Group("world", (0, 1)),), (Payload("float32", (2,), 8),), ("compute",), ("ring.py",)
)


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
    secrets: dict[str, Any] = {"results": ["a secret", object()], "output": ["a secret"]}
    return Trace(
        make_events(columns, TABLES), {"format": 1, "world_size": 2, "notes": ["ä note"]}, **secrets
    )


@given(trace=traces)
def test_a_run_that_comes_rank_by_rank_makes_the_same_file(trace: Trace) -> None:
    ranks = [trace.events.select(trace.events.rank == rank) for rank in range(trace.world_size)]
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        patch.setattr(files, "GROUP_ROWS", 5)
        whole, pieces = Path(directory, "whole"), Path(directory, "pieces")
        trace.save(whole)
        assert files.save_pieces(ranks, trace.metadata, pieces) == len(trace)
        assert pieces.read_bytes() == whole.read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.ringtrace"
    small().save(path)
    return path


# -- saving


def test_no_thread_of_arrow_is_at_work(tmp_path: Path) -> None:
    code = (
        "import os, sys, pyarrow, pyarrow.parquet; from ringsim.traces.files import load, "
        "read_by_rank; pyarrow.set_cpu_count(8); "
        "before = len(os.listdir('/proc/self/task')); load(sys.argv[1]).save(sys.argv[1]); "
        "load(sys.argv[1], ranks=1); "
        "[*read_by_rank(sys.argv[1])]; print(len(os.listdir('/proc/self/task')) - before)"
    )
    small().save(tmp_path / "run.ringtrace")
    words = [sys.executable, "-c", code, str(tmp_path / "run.ringtrace")]
    more = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert int(more) == 0, "one that holds a Python buffer when the interpreter ends aborts it"


def test_a_trace_comes_back_without_results_and_output(path: Path) -> None:
    trace = load(path)
    assert trace == ringsim.load(str(path)) == small()
    assert (trace.results, trace.output) == ([], [])
    first = path.read_bytes()
    assert b"secret" not in first
    trace.save(path)
    assert path.read_bytes() == first
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


@given(traces)
def test_every_trace_comes_back(trace: Trace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        trace.save(f"{directory}/run.ringtrace")
        back = load(f"{directory}/run.ringtrace")
    assert back == trace
    assert {name: getattr(back.events, name).dtype for name in COLUMN_DTYPES} == COLUMN_DTYPES


def test_more_than_one_row_group_comes_back(tmp_path: Path) -> None:
    count = 1_200_000
    done = np.where(np.random.default_rng(0).random(count) < 0.1, -1, np.arange(count))
    columns = {
        "rank": np.zeros(count),
        "op": np.full(count, OP_CODES["mark"]),
        "post_ns": np.arange(count),
        "done_ns": done,
    }
    trace = Trace(make_events(columns), {})
    trace.save(tmp_path / "big.ringtrace")
    assert load(tmp_path / "big.ringtrace") == trace


def test_other_tools_can_read_it(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ["meta.json", "events.parquet"]
        assert archive.testzip() is None
        meta = json.loads(archive.read("meta.json"))
        table = pq.read_table(io.BytesIO(archive.read("events.parquet"))).to_pydict()
    assert meta["tables"]["groups"] == [{"name": "world", "ranks": [0, 1]}]
    assert (table["post_ns"], table["wait_ns"], table["done_ns"]) == (
        [10, 20, 15],
        [12, None, 16],
        [30, 25, None],
    )


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
        ("/dev/null", "/dev/null: this is no file"),
        ("null\0character", "null byte"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_place_that_cannot_be_written(path: Path, tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(TraceFileError, match=says) as caught:
        small().save(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("method", ["save", "to_perfetto", "to_chrome"])
@pytest.mark.parametrize(
    "metadata",
    [
        {"x": object()},
        {"x": float("nan")},
        {"world_size": 1},
        {"world_size": "two"},
        {"notes": "no list"},
        {"notes": None},
        {"part": 1},
    ],
)
def test_what_could_not_be_loaded_is_not_saved(
    tmp_path: Path, metadata: dict[str, Any], method: str
) -> None:
    """Version 0.2.0 exported what it could not import, such as ``{"notes": None}``."""
    trace = Trace(small().events, metadata)
    with pytest.raises(TraceFileError, match="A trace must be plain data to be saved, got"):
        getattr(trace, method)(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_parts_stand_in_for_a_missing_or_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "run.ringtrace"
    parts = tmp_path / "run.ringtrace.parts"
    parts.mkdir()
    with pytest.raises(
        TraceFileError, match=r"must exist, got .* could not be read either: no rank left anything"
    ):
        load(path)
    two_ranks(parts)
    missing = load(path)
    assert (len(missing.events), len(missing.messages)) == (4, 1)
    note = (
        "put together from what the ranks left in run.ringtrace.parts: the run ended before it "
        "wrote its file"
    )
    assert missing.metadata["notes"][-1] == note
    assert note in missing.summary()
    missing.save(path)
    assert load(path) == missing
    path.write_bytes(path.read_bytes()[:-1])
    assert load(path) == missing
    small().save(path)
    assert load(path) == small()


@pytest.mark.parametrize("longer_first", [True, False])
def test_of_two_copies_of_a_part_the_longer_one_is_merged(
    tmp_path: Path, longer_first: bool
) -> None:
    copies = [tmp_path / name for name in ("a.parts", "b.parts")]
    for copy in copies:
        copy.mkdir()
        two_ranks(copy)
    cut = copies[1] / "rank-1.events"
    os.truncate(cut, cut.stat().st_size // 3)
    whole = merge(copies[:1])
    assert merge(copies if longer_first else copies[::-1]) == whole
    assert len(merge(copies[1:]).events) < len(whole.events)


def test_what_is_too_long_to_be_read_is_not_saved(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()
    monkeypatch.setattr(files, "MAX_FILE_BYTES", len(before))
    with pytest.raises(
        TraceFileError,
        match=f"A trace file must be at most {len(before)} bytes, got more. Save a part",
    ):
        small().save(path)
    assert path.read_bytes() == before


# -- what is no trace of ours


def rewrite(
    path: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any], **zip_options: Any
) -> None:
    """Writes the file anew, with right checksums, after ``change(meta, columns)``."""
    with zipfile.ZipFile(path) as archive:
        meta = json.loads(archive.read("meta.json"))
        table = pq.read_table(io.BytesIO(archive.read("events.parquet")))
    columns = {name: table[name] for name in table.column_names}
    change(meta, columns)
    sink = io.BytesIO()
    schema = pa.schema(
        [
            pa.field(name, column.type, nullable=name in ("wait_ns", "done_ns"))
            for name, column in columns.items()
        ]
    )
    pq.write_table(pa.table(columns, schema=schema), sink)
    with zipfile.ZipFile(path, "w", **zip_options) as archive:
        archive.writestr("meta.json", json.dumps(meta))
        archive.writestr("events.parquet", sink.getvalue())


def refused(path: Path, says: str) -> None:
    with pytest.raises(TraceFileError, match=says) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def say(*where: str, **changes: Any) -> Callable[[Any, Any], Any]:
    """Changes entries of meta.json, or of an object within it."""

    def change(meta: Any, columns: Any) -> None:
        for name in where:
            meta = meta[name]
        meta.update(changes)

    return change


def put(name: str, values: list[int], dtype: str) -> Callable[[Any, Any], Any]:
    """Puts other values into a column."""
    column = pa.chunked_array([pa.array(values, pa.from_numpy_dtype(np.dtype(dtype)))])
    return lambda meta, columns: columns.update({name: column})


HOSTILE: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "operation unknown": (put("op", [2, 0, 999], "u2"), "column op holds a number outside"),
    "group outside its table": (put("group", [0, -1, 1], "i4"), "column group"),
    "label below its table": (put("label", [-2, 0, -1], "i4"), "column label"),
    "rank outside the world": (put("rank", [0, 0, 2], "i4"), "column rank"),
    "peer outside the world": (put("peer", [9, -1, 0], "i4"), "column peer"),
    "status of an empty slot": (put("status", [2, 2, 0], "u1"), "column status"),
    "negative time": (put("post_ns", [10, 20, -5], "i8"), "column post_ns"),
    "ranks in disorder": (put("rank", [0, 1, 0], "i4"), "not in the order"),
    "posting in disorder": (put("seq", [1, 0, 0], "i8"), "not in the order"),
    "column of another type": (put("tag", [0, 0, 0], "i8"), "columns of events.parquet"),
    "column too many": (put("extra", [0, 0, 0], "i8"), "columns of events.parquet"),
    "column missing": (lambda meta, columns: columns.pop("tag"), "columns of events.parquet"),
    "rows that meta.json does not state": (say(events=4), "has 3 rows, meta.json states 4"),
    "no number of rows": (say(events="3"), "states no number of events"),
    "more rows than the limit": (say(events=10**12), "states no number of events"),
    "no tables": (lambda meta, columns: meta.pop("tables"), "tables of names"),
    "table of another form": (say("tables", labels=[3]), "a name is not a string"),
    "group of another form": (say("tables", groups=[["world", [0]]]), "a group is not an object"),
    "shape of another form": (
        lambda meta, columns: meta["tables"]["payloads"][0].update(shape=[1.5]),
        "the shape of a payload",
    ),
    "size of another form": (
        lambda meta, columns: meta["tables"]["payloads"][0].update(size_bytes=10**30),
        "the size of a payload",
    ),
    "no metadata": (lambda meta, columns: meta.pop("metadata"), "metadata is not an object"),
    "world of another form": (
        say("metadata", world_size=10**9),
        "world_size is not a number of ranks",
    ),
    "notes of another form": (say("metadata", notes=[{}]), "notes is not a list"),
    "no format": (lambda meta, columns: meta.pop("format"), "names no format"),
    "format of another form": (say(format=True), "names no format"),
    "a later version": (
        lambda meta, columns: (
            meta.update(format=2, needs="0.9.0", tables="another form"),
            columns.pop("tag"),
        ),
        (
            rf"must be at most 1 for ringsim {ringsim.__version__}, got 2 .*It needs ringsim "
            r"'0.9.0' or later: pip install --upgrade"
        ),
    ),
    **{
        f"ring_groups {value}": (
            say("metadata", ring_groups=value),
            "ring_groups is not a list of names and members",
        )
        for value in ([["ring:0>1"]], [3], 7, "ab", [[0, [0, 1]]], {})
    },
    **{
        f"ranks {value}": (
            say("metadata", ranks=value),
            "ranks is not a list of what is known of each rank",
        )
        for value in (7, "ab", ["ab"], [{"rank": []}], {})
    },
}


def test_wrong_numbers_with_right_checksums(path: Path) -> None:
    rewrite(path, lambda meta, columns: None)
    assert load(path) == small()
    whole = path.read_bytes()
    for change, says in HOSTILE.values():
        path.write_bytes(whole)
        rewrite(path, change)
        refused(path, says)
    path.write_bytes(whole)
    rewrite(path, lambda meta, columns: None, compression=zipfile.ZIP_DEFLATED)
    refused(path, "the size of meta.json is not what the file holds|the size of events.parquet")


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        ("MAX_META_BYTES", "meta.json is longer than 100 bytes"),
        ("MAX_FILE_BYTES", "must be at most 100 bytes"),
    ],
)
def test_a_file_has_limits(
    path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, says: str
) -> None:
    monkeypatch.setattr(files, limit, 100)
    refused(path, says)


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
    "zip with a pickle": zip_of(
        meta_json=pickle.dumps(Bomb()), events_parquet=pickle.dumps(Bomb())
    ),
    "zip of a future array file": zip_of(
        meta_json=b'{"format": 1, "events": 0}', events_parquet=pickle.dumps(Bomb())
    ),
}


def test_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.ringtrace"
    for content in FOREIGN.values():
        path.write_bytes(content)
        refused(path, "must be one that ringsim saved, got")
    refused(
        tmp_path / "none.ringtrace", "must exist, got .*: No such file or directory. Check the path"
    )
    refused(tmp_path, "must be readable, got .*: Is a directory")
    refused(tmp_path / ("x" * 300), "must be readable, got .*: File name too long")
    for name in ("", ".", "/", "null\0character"):
        with pytest.raises(TraceFileError, match="A trace file must"):
            load(name)


def test_nothing_that_reads_a_trace_can_execute_one() -> None:
    for module in ("files", "events", "parts", "value", "matching"):
        tree = ast.parse(Path(files.__file__).with_name(f"{module}.py").read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert not names & {"eval", "exec", "compile", "__import__"}, module
        assert not imported & {"pickle", "marshal", "shelve", "cloudpickle"}, module


# -- damage

WHOLES = real_files()


def survives(whole: bytes, damaged: bytes) -> None:
    """Only a TraceFileError comes out, or the same trace.

    Then the damage hit something that says nothing, as the date of a member.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "x")
        path.write_bytes(damaged)
        try:
            found: Trace | TraceFileError = load(path)
        except TraceFileError as error:
            found = error
    assert "\n" not in str(found) if isinstance(found, TraceFileError) else found == small(), whole


def test_flipped_in_the_directory_of_the_zip(path: Path) -> None:
    whole = path.read_bytes()
    for place in range(len(whole) - 220, len(whole)):
        for bits in (0x01, 0xFF):
            survives(whole, whole[:place] + bytes([whole[place] ^ bits]) + whole[place + 1 :])


@given(st.data())
def test_cut_flipped_and_spliced_anywhere(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        small().save(f"{directory}/x")
        whole = Path(directory, "x").read_bytes()
    damaged = bytearray(whole)
    for place, bits in data.draw(
        st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(1, 255)), max_size=8)
    ):
        damaged[place] ^= bits
    cut, resume = data.draw(st.integers(0, len(whole))), data.draw(st.integers(0, len(whole)))
    for one in (
        damaged,
        whole[:cut],
        whole[:cut] + data.draw(st.binary(max_size=64)) + whole[resume:],
    ):
        survives(whole, bytes(one))


def test_the_mutations_leave_a_file_that_loads_where_they_change_nothing(tmp_path: Path) -> None:
    for number, whole in enumerate(WHOLES):
        path = tmp_path / f"{number}.ringtrace"
        path.write_bytes(put_together(whole.meta, write_columns(whole.columns)))
        trace = ringsim.load(path)
        assert {
            name: getattr(trace.events, name).tolist() for name in COLUMN_DTYPES
        } == whole.columns
        assert load_damaged(path.read_bytes(), draw=False)


# -- what the fuzzing found: each of these came out of a file as an error of Python's own


def damaged_meta(tmp_path: Path, **metadata: Any) -> Path:
    meta = json.loads(WHOLES[0].meta)
    meta["metadata"].update(metadata)
    path = tmp_path / "x.ringtrace"
    path.write_bytes(put_together(json.dumps(meta).encode(), WHOLES[0].events))
    return path


def test_a_group_of_the_ring_whose_ranks_have_thousands_of_digits(tmp_path: Path) -> None:
    trace = ringsim.load(
        damaged_meta(tmp_path, ring_groups=[["ring:" + "9" * 5000 + ">1", [0, 1]]])
    )
    trace.plot_ring(ax=Figure().add_subplot())


def test_what_no_reader_can_take_is_written_out(tmp_path: Path) -> None:
    """Half a character breaks pandas, fonts and terminals.

    An escape sequence commands a terminal.
    """
    labels = ("a\ud800b", "red \x1b[31m", "null\0", "C1 \x9b2J", "tab\tline\nend")
    columns = {
        "rank": [0] * 5,
        "op": [OP_CODES["mark"]] * 5,
        "post_ns": [1] * 5,
        "label": [0, 1, 2, 3, 4],
    }
    Trace(
        make_events(columns, Tables(labels=labels)), {"world_size": 1, "notes": ["bell \a"]}
    ).save(tmp_path / "x.ringtrace")
    trace = ringsim.load(tmp_path / "x.ringtrace")
    expected = ["a\\ud800b", "red \\x1b[31m", "null\\x00", "C1 \\x9b2J", "tab\\tline\\nend"]
    assert list(trace.to_pandas()["label"]) == list(trace.events.tables.labels) == expected
    assert trace.metadata["notes"] == ["bell \\x07"]


def test_what_ends_before_it_began_takes_no_time() -> None:
    columns = {
        "rank": [0, 0],
        "op": [OP_CODES["isend"]] * 2,
        "post_ns": [900, 1000],
        "wait_ns": [50, 2000],
        "done_ns": [10, 5],
    }
    trace = Trace(make_events(columns), {"world_size": 2})
    bars = make_bars(trace)
    assert (bars.start_ns >= 900).all()
    assert (bars.end_ns >= bars.start_ns).all()
    trace.plot_timeline(ax=Figure().add_subplot())


def test_a_small_file_cannot_ask_for_much_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parquet says one number ten million times in a few bytes.

    A file of 4 MB could hold a hundred million events, 8 GB of memory.
    """
    count = 50_000
    columns = {
        "rank": np.zeros(count, dtype=np.int32),
        "op": np.full(count, OP_CODES["mark"]),
        "post_ns": np.zeros(count, dtype=np.int64),
    }
    trace = Trace(make_events(columns), {"world_size": 1})
    trace.save(tmp_path / "x.ringtrace")
    assert (tmp_path / "x.ringtrace").stat().st_size * files.MAX_EVENTS_PER_BYTE < count
    assert len(ringsim.load(tmp_path / "x.ringtrace").events) == count, "few events are free"
    monkeypatch.setattr(files, "FREE_EVENTS", 1000)
    for use in (
        lambda: ringsim.load(tmp_path / "x.ringtrace"),
        lambda: trace.save(tmp_path / "y.ringtrace"),
    ):
        with pytest.raises(
            TraceFileError, match=r"50000 events in [0-9]+ bytes, more than 4 a byte"
        ):
            use()


def test_no_memory_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError("malloc of size 10 failed")

    monkeypatch.setattr(files, "make_events", fail)
    with pytest.raises(TraceFileError, match="malloc of size 10 failed"):
        ringsim.load(damaged_meta(tmp_path))


def test_several_files_are_several_traces(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.ringtrace" for name in ("before", "after")]
    for number, path in enumerate(paths):
        Trace(small().events, {"world_size": 2, "number": number}).save(path)
    assert [trace.metadata["number"] for trace in load(paths)] == [0, 1]
    assert load(iter([])) == []


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/home/student/my project/run/train.py:4 failed", "train.py:4 failed"),
        (
            'File "/home/student/x/y.py", line 3\n[/opt/gloo/pair.cc:53]',
            'File "y.py", line 3\n[pair.cc:53]',
        ),
        ("read C:" r"\Users\student\data\a.bin and ~/b/c", "read a.bin and c"),
        (
            "node7.lab said: student is on node7, node71 is not; http://a.org/b/c",
            "host0 said: user is on host0, node71 is not; http://a.org/b/c",
        ),
        (
            "12 GB/s, 1/2/3, forward / backward, students, /x",
            "12 GB/s, 1/2/3, forward / backward, students, /x",
        ),
    ],
)
def test_a_redacted_trace_names_no_directory_host_or_user(
    tmp_path: Path, text: str, left: str
) -> None:
    called = (
        "/home/student/my project/train.py:40 > /home/student/my project/lib/send.py",
        "cell [3]",
    )
    events = replace(
        small().events,
        tables=TABLES._replace(labels=(text,), groups=(Group(text, (0, 1)),), files=called),
    )
    metadata = {
        "world_size": 2,
        "ranks": [{"rank": 0, "host": "node7.lab"}],
        "ends": [{"rank": 0, "about": text}],
        text: [text],
    }
    shared = Trace(events, metadata, results=[text], output=[text]).redact()
    assert shared.metadata == {
        "world_size": 2,
        "ranks": [{"rank": 0, "host": "host0"}],
        "ends": [{"rank": 0, "about": left}],
        left: [left],
    }
    tables = shared.events.tables
    assert (tables.labels, tables.groups[0].name, tables.files) == (
        (left,),
        left,
        ("train.py:40 > send.py", "cell [3]"),
    )
    assert (shared.results, shared.output) == ([], [])
    shared.save(tmp_path / "shared.ringtrace")
    data = (tmp_path / "shared.ringtrace").read_bytes()
    assert not [
        word
        for word in (b"student", b"node7.lab", b"project", b"lib")
        if re.search(rb"\b%b\b" % word, data)
    ]
