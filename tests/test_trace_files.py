"""Tests of trace files.

A saved trace loads unchanged, and saving is all or nothing. Foreign, hostile or randomly damaged
files give one clear error; they never raise another error, execute code or use much memory.
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
from synthetic import pipeline
from trace_file import COLUMNS, NONE, load_columns, make_trace, take_apart

import ringsim
from ringsim import Trace, load
from ringsim.errors import TraceFileError


def small() -> Trace:
    on_world = {"group": "world", "size_bytes": 8}
    trace = make_trace(
        [
            {"rank": 0, "op": "isend", "peer": 1, **on_world, "times": (10, 12, 30)},
            {"rank": 0, "op": "span", "label": "compute", "times": (20, NONE, 25)},
            {"rank": 1, "op": "irecv", "peer": 0, **on_world, "times": (15, 16, NONE), "status": 1},
        ],
        groups={"world": (0, 1)},
        format=1,
        world_size=2,
        notes=["ä note"],
    )
    return Trace(trace.events, trace.metadata, ["a secret", object()], ["a secret"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.ringtrace"
    small().save(path)
    return path


# -- saving


def test_no_thread_of_arrow_is_at_work(tmp_path: Path) -> None:
    code = (
        "import os, sys, pyarrow, pyarrow.parquet, ringsim, ringsim.cli; "
        "pyarrow.set_cpu_count(8); before = len(os.listdir('/proc/self/task')); "
        "ringsim.load(sys.argv[1]).save(sys.argv[1]); ringsim.load(sys.argv[1], ranks=1); "
        "ringsim.cli.main(['show', sys.argv[1]]); "
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    small().save(tmp_path / "run.ringtrace")
    words = [sys.executable, "-c", code, str(tmp_path / "run.ringtrace")]
    more = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert int(more.split()[-1]) == 0, (
        "no Arrow thread may remain, because it can abort the ending interpreter"
    )


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
    assert {name: getattr(back.events, name).dtype for name in COLUMNS} == COLUMNS


def test_more_than_one_row_group_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringsim.traces.files.GROUP_ROWS", 7)
    (trace := pipeline()).save(tmp_path / "long.ringtrace")
    _, rows = take_apart(tmp_path / "long.ringtrace")
    assert pq.ParquetFile(io.BytesIO(rows)).num_row_groups > 5
    assert load(tmp_path / "long.ringtrace") == trace


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

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(TraceFileError if isinstance(error, OSError) else KeyboardInterrupt):
        Trace(small().events, {"world_size": 7}).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none/run.ringtrace", "No such file or directory"),
        ("run.ringtrace/inside", "Not a directory"),
        (".", "it is not a regular file"),
        ("/dev/null", "/dev/null: it is not a regular file"),
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
    """Version 0.2.0 exported metadata that it could not import, such as ``{"notes": None}``."""
    trace = Trace(small().events, metadata)
    with pytest.raises(TraceFileError, match="cannot save a trace to"):
        getattr(trace, method)(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_what_is_too_long_to_be_read_is_not_saved(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, trace = path.read_bytes(), small()
    monkeypatch.setattr("ringsim.traces.files.MAX_FILE_BYTES", len(before))
    with pytest.raises(
        TraceFileError,
        match=f"a trace file must have at most {len(before)} bytes, got more. Save a part",
    ):
        trace.save(path)
    assert path.read_bytes() == before


# -- files that are not traces


def rewrite(
    path: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any], **zip_options: Any
) -> None:
    """Rewrites the file, with correct checksums, after ``change(meta, columns)``."""
    text, rows = take_apart(path)
    meta, table = json.loads(text), pq.read_table(io.BytesIO(rows))
    columns = {name: table[name] for name in table.column_names}
    change(meta, columns)
    sink = io.BytesIO()
    kinds = {name: column.type for name, column in columns.items()}
    nullable = ("wait_ns", "done_ns")
    schema = pa.schema([pa.field(name, kind, name in nullable) for name, kind in kinds.items()])
    pq.write_table(pa.table(columns, schema=schema), sink)
    with zipfile.ZipFile(path, "w", **zip_options) as archive:
        archive.writestr("meta.json", json.dumps(meta))
        archive.writestr("events.parquet", sink.getvalue())


def refused(path: Path, says: str) -> None:
    with pytest.raises(TraceFileError, match=says) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def say(*where: Any, **changes: Any) -> Callable[[Any, Any], Any]:
    """Changes entries of meta.json, or of an object in it; None removes an entry."""

    def change(meta: Any, columns: Any) -> None:
        for name in where:
            meta = meta[name]
        meta.update(changes)
        for name in [name for name, value in changes.items() if value is None]:
            del meta[name]

    return change


def put(name: str, values: list[int], dtype: str) -> Callable[[Any, Any], Any]:
    """Puts other values into a column."""
    column = pa.chunked_array([pa.array(values, pa.from_numpy_dtype(np.dtype(dtype)))])
    return lambda meta, columns: columns.update({name: column})


LATER = (
    rf"its format is 2, and ringsim {ringsim.__version__} reads formats up to 1. Install ringsim "
    r"'0.9.0' or later: pip install --upgrade"
)
HOSTILE: list[tuple[Callable[[Any, Any], Any], str]] = [
    (put("op", [2, 0, 999], "u2"), "column op contains a number outside"),
    (put("group", [0, -1, 1], "i4"), "column group"),
    (put("label", [-2, 0, -1], "i4"), "column label"),
    (put("rank", [0, 0, 2], "i4"), "column rank"),
    (put("peer", [9, -1, 0], "i4"), "column peer"),
    (put("status", [2, 2, 0], "u1"), "column status"),
    (put("post_ns", [10, 20, -5], "i8"), "column post_ns"),
    (put("rank", [0, 1, 0], "i4"), "not ordered by rank"),
    (put("seq", [1, 0, 0], "i8"), "not ordered by rank"),
    (put("tag", [0, 0, 0], "i8"), "columns of events.parquet"),
    (put("extra", [0, 0, 0], "i8"), "columns of events.parquet"),
    (lambda meta, columns: columns.pop("tag"), "columns of events.parquet"),
    (say(events=4), "has 3 rows, but meta.json gives 4"),
    (say(events="3"), "does not give a number of events"),
    (say(events=10**12), "does not give a number of events"),
    (say(tables=None), "tables of names"),
    (say("tables", labels=[3]), "a name is not a string"),
    (say("tables", groups=[["world", [0]]]), "a group is not an object"),
    (say("tables", "payloads", 0, shape=[1.5]), "the shape of a payload"),
    (say("tables", "payloads", 0, size_bytes=10**30), "the size of a payload"),
    (say(metadata=None), "metadata is not an object"),
    (say("metadata", world_size=10**9), "world_size is not a number of ranks"),
    (say("metadata", notes=[{}]), "notes is not a list"),
    (say("metadata", part={"of": [], "apart": [3]}), "apart does not exist"),
    (say(format=None), "does not give a format"),
    (say(format=True), "does not give a format"),
    (say(format=2, needs="0.9.0", tables="another form"), LATER),
    *(
        (say("metadata", ring_groups=value), "ring_groups is not a list of pairs")
        for value in ([["ring:0>1"]], [3], 7, "ab", [[0, [0, 1]]], {})
    ),
    *(
        (say("metadata", ranks=value), "ranks is not a list of objects")
        for value in (7, "ab", ["ab"], [{"rank": []}], {})
    ),
]


def test_wrong_numbers_with_right_checksums(path: Path) -> None:
    rewrite(path, lambda meta, columns: None)
    assert load(path) == small()
    whole = path.read_bytes()
    for change, says in HOSTILE:
        path.write_bytes(whole)
        rewrite(path, change)
        refused(path, says)
    path.write_bytes(whole)
    rewrite(path, lambda meta, columns: None, compression=zipfile.ZIP_DEFLATED)
    refused(path, "the size of meta.json does not match the content|the size of events.parquet")


@pytest.mark.parametrize("limit", ["MAX_META_BYTES", "MAX_FILE_BYTES"])
def test_a_file_has_limits(path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(f"ringsim.traces.files.{limit}", 100)
    refused(path, "meta.json is longer than 100 bytes|must have at most 100 bytes")


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (7,)


def zip_of(**members: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for name, content in members.items():
            archive.writestr(name.replace("_", "."), content)
    return sink.getvalue()


FOREIGN = [
    *(b"", b"no trace at all\n" * 9, b'{"traceEvents": []}' * 9, pickle.dumps(Bomb()) * 9),
    *(zip_of(), zip_of(meta_json=b"{}"), zip_of(a_txt=b"a", b_txt=b"b")),
    zip_of(meta_json=b"{}", events_parquet=b"", more_txt=b""),
    zip_of(meta_json=b'{"format": 1, "events": 0}', events_parquet=pickle.dumps(Bomb())),
    *(
        zip_of(meta_json=meta, events_parquet=b"")
        for meta in (
            *(b"", b"[]", b"[" * 100_000, b"9" * 10_000, b'{"format": NaN}'),
            *(b'{"format": "\xff"}', pickle.dumps(Bomb())),
        )
    ),
]


def test_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.ringtrace"
    for content in FOREIGN:
        path.write_bytes(content)
        refused(path, "cannot read .* as a trace: ")
    refused(tmp_path / "none", "cannot open .*: No such file or directory. Check the path")
    refused(tmp_path, "cannot open .*: Is a directory")
    refused(tmp_path / ("x" * 300), "cannot open .*: File name too long")
    for name in ("", ".", "/", "null\0character"):
        with pytest.raises(TraceFileError, match="cannot open the trace file"):
            load(name)


def test_nothing_that_reads_a_trace_can_execute_one() -> None:
    for name in ("files", "documents", "events", "parts", "value", "matching"):
        source = Path(ringsim.__file__).with_name("traces") / f"{name}.py"
        nodes = list(ast.walk(ast.parse(source.read_text())))
        imports = [node.names for node in nodes if isinstance(node, ast.Import)]
        assert not {node.id for node in nodes if isinstance(node, ast.Name)} & {
            *("eval", "exec", "compile", "__import__")
        }
        assert not {alias.name for names in imports for alias in names} & {
            *("pickle", "marshal", "shelve", "cloudpickle")
        }


# -- damage


def survives(damaged: bytes) -> None:
    """Checks that loading raises a TraceFileError, or returns the same trace.

    The trace is the same if the damage hit data without meaning, such as the date of a member.
    """
    with tempfile.NamedTemporaryFile() as file:
        file.write(damaged)
        file.flush()
        try:
            assert load(file.name) == small()
        except TraceFileError as error:
            assert "\n" not in str(error)  # noqa: PT017


def test_flipped_in_the_directory_of_the_zip(path: Path) -> None:
    whole = path.read_bytes()
    for place in range(len(whole) - 220, len(whole)):
        for bits in (0x01, 0xFF):
            survives(whole[:place] + bytes([whole[place] ^ bits]) + whole[place + 1 :])


@given(st.data())
def test_cut_flipped_and_spliced_anywhere(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        small().save(f"{directory}/x")
        whole = Path(directory, "x").read_bytes()
    places = st.integers(0, len(whole))
    damaged = bytearray(whole)
    for place, bits in data.draw(st.lists(st.tuples(places, st.integers(1, 255)), max_size=8)):
        damaged[place % len(whole)] ^= bits
    cut, resume = data.draw(places), data.draw(places)
    spliced = whole[:cut] + data.draw(st.binary(max_size=64)) + whole[resume:]
    for one in (bytes(damaged), whole[:cut], spliced):
        survives(one)


# -- errors found by fuzzing: each of these files once raised one of Python's own errors


def test_a_group_of_the_ring_whose_ranks_have_thousands_of_digits(path: Path) -> None:
    rewrite(path, say("metadata", ring_groups=[["ring:" + "9" * 5000 + ">1", [0, 1]]]))
    load(path).plot_ring(ax=Figure().add_subplot())


def test_what_no_reader_can_take_is_written_out(path: Path) -> None:
    """Half a character breaks pandas, fonts and terminals.

    An escape sequence controls a terminal.
    """
    labels = ["a\ud800b", "red \x1b[31m", "null\0", "C1 \x9b2J", "tab\tline\nend"]
    marks = [{"rank": 0, "op": "mark", "label": label} for label in labels]
    make_trace(marks, notes=["bell \a"]).save(path)
    trace = load(path)
    expected = ["a\\ud800b", "red \\x1b[31m", "null\\x00", "C1 \\x9b2J", "tab\\tline\\nend"]
    assert list(trace.to_pandas()["label"]) == list(trace.events.tables.labels) == expected
    assert trace.metadata["notes"] == ["bell \\x07"]


def test_what_ends_before_it_began_takes_no_time() -> None:
    times = ((900, 50, 10), (1000, 2000, 5))
    trace = make_trace(({"rank": 0, "op": "isend", "times": one} for one in times), world_size=2)
    assert trace.waits.blocked_ns.tolist() == [0, 0]
    trace.plot_timeline(ax=Figure().add_subplot())


def test_a_small_file_cannot_ask_for_much_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parquet can repeat one number ten million times in a few bytes.

    A file of 4 MB could hold a hundred million events, which need 8 GB of memory.
    """
    count = 50_000
    trace = load_columns({"rank": np.zeros(count), "op": np.ones(count)}, {}, world_size=1)
    trace.save(path)
    assert path.stat().st_size * 4 < count
    assert len(load(path)) == count, "a few events must always be allowed"
    monkeypatch.setattr("ringsim.traces.files.FREE_EVENTS", 1000)
    for use in (load, trace.save):
        says = r"50000 events in [0-9]+ bytes, more than 4 per byte"
        with pytest.raises(TraceFileError, match=says):
            use(path)


def test_no_memory_is_an_error_of_ours(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("malloc of size 10 failed")

    monkeypatch.setattr(json, "loads", fail)
    refused(path, "malloc of size 10 failed")


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
    directory = "/home/student/my project"
    called = (f"{directory}/train.py:40 > {directory}/lib/send.py", "cell [3]")
    rows = [
        {"rank": 0, "op": "span", "label": text, "group": text, "file": file} for file in called
    ]
    metadata = {
        "world_size": 2,
        "ranks": [{"rank": 0, "host": "node7.lab"}],
        "ends": [{"rank": 0, "about": text}],
        text: [text],
    }
    events = make_trace(rows).events
    shared = Trace(events, metadata, results=[text], output=[text]).redact()
    assert shared.metadata == {
        "world_size": 2,
        "ranks": [{"rank": 0, "host": "host0"}],
        "ends": [{"rank": 0, "about": left}],
        left: [left],
    }
    tables = shared.events.tables
    assert (tables.labels, tables.groups[0].name, tables.files) == (
        (word := left.replace("\n", "\\n"),),
        word,
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
