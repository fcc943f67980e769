"""Trace files load unchanged; others give one clear error, execute nothing, use little memory."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
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
from trace_file import COLUMNS, NONE, load_columns, make_trace, put_together, take_apart

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


def test_saving_replaces_a_file_and_keeps_a_link(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "latest.ringtrace"
    link.symlink_to(path)
    other = Trace(small().events, {"world_size": 7})
    other.save(link)
    assert link.is_symlink()
    assert load(path) == other


@pytest.mark.parametrize(
    ("step", "error", "raised"),
    [("fsync", OSError(28, "No space"), TraceFileError), ("replace", *[KeyboardInterrupt] * 2)],
)
def test_a_failed_save_leaves_what_was_there(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: Any, raised: Any
) -> None:
    before = path.read_bytes()

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(raised):
        Trace(small().events, {"world_size": 7}).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "metadata", "says"),
    [
        ("none/run.ringtrace", {}, "No such file or directory"),
        ("run.ringtrace/inside", {}, "Not a directory"),
        ("/dev/null", {}, "/dev/null: it is not a regular file"),
        ("null\0character", {}, "null byte"),
        ("x", {"x": object()}, "cannot save a trace to"),
        ("x", {"x": float("nan")}, "cannot save a trace to"),
        ("x", {"world_size": 1}, "cannot save a trace to"),
        ("x", {"notes": None}, "cannot save a trace to"),
        ("x", {"part": 1}, "cannot save a trace to"),
    ],
)
def test_what_cannot_be_written_or_read_again_is_not_saved(
    path: Path, tmp_path: Path, name: str, metadata: dict[str, Any], says: str
) -> None:
    with pytest.raises(TraceFileError, match=says) as caught:
        Trace(small().events, metadata).save(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]
    assert Path("/dev/null").is_char_device()


def test_a_file_has_limits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, trace = path.read_bytes(), small()
    monkeypatch.setattr("ringsim.traces.files.MAX_FILE_BYTES", len(before))
    says = f"does not fit into a trace file of at most {len(before)} bytes. Save only part"
    with pytest.raises(TraceFileError, match=says):
        trace.save(path)
    assert path.read_bytes() == before
    monkeypatch.setattr("ringsim.traces.files.MAX_META_BYTES", 100)
    refused(path, "meta.json is longer than 100 bytes")
    monkeypatch.setattr("ringsim.traces.files.MAX_FILE_BYTES", 100)
    refused(path, "a trace file can have at most 100")


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
    rf"it has format 2, and ringsim {ringsim.__version__} reads formats up to 1. Install ringsim "
    r"'0.9.0' or later: pip install --upgrade"
)
NOT_PAIRS = ([["ring:0>1"]], [3], 7, "ab", [[0, [0, 1]]], {})
NOT_SOURCES = (["x"], "x", {"train.py": 3}, {"a.py": "x" * 600_000, "b.py": "x" * 400_001})
NOT_RANKS = (7, "ab", ["ab"], [{"rank": []}], {})
HOSTILE: list[tuple[Callable[[Any, Any], Any], str]] = [
    (put("op", [2, 0, 999], "u2"), "column op contains a number outside"),
    (put("group", [0, -1, 1], "i4"), "column group"),
    (put("peer", [9, -1, 0], "i4"), "column peer"),
    (put("post_ns", [10, 20, -5], "i8"), "column post_ns"),
    (put("rank", [0, 1, 0], "i4"), "not ordered by rank"),
    (put("tag", [0, 0, 0], "i8"), "does not have the columns"),
    (lambda meta, columns: columns.pop("tag"), "does not have the columns"),
    (say(events=4), "has 3 rows, but meta.json states 4"),
    (say(events=10**12), "does not specify a number of events"),
    (say(tables=None), "names are not in the four tables"),
    (say("tables", labels=[3]), "a name is not a string"),
    (say("tables", groups=[["world", [0]]]), "a group is not an object"),
    (say("tables", "payloads", 0, shape=[1.5]), "a payload's shape"),
    (say("tables", "payloads", 0, size_bytes=10**30), "a payload's size"),
    (say(metadata=None), "metadata is not an object"),
    (say("metadata", world_size=10**9), "world_size is not a number of ranks"),
    (say("metadata", notes=[{}]), "notes is not a list"),
    (say("metadata", part={"of": [], "apart": [3]}), "apart does not exist"),
    (say(format=True), "does not specify a format"),
    (say(format=2, needs="0.9.0", tables="another form"), LATER),
    *((say(sources=value), "sources is not an object") for value in NOT_SOURCES),
    *((say("metadata", ring_groups=value), "not a list of pairs") for value in NOT_PAIRS),
    *((say("metadata", ranks=value), "ranks is not a list of objects") for value in NOT_RANKS),
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
    refused(path, "the stated size of .* does not match its content")


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (7,)


def test_something_else_is_refused(tmp_path: Path) -> None:
    bomb, path = pickle.dumps(Bomb()), tmp_path / "run.ringtrace"
    metas = [b"", b"[]", b"{}", b"[" * 100_000, b"9" * 10_000, b'{"format": NaN}', b'"\xff"', bomb]
    contents = [b"", b"no trace at all\n" * 9, b'{"traceEvents": []}' * 9, bomb * 9]
    contents += [put_together(meta, b"") for meta in metas]
    contents.append(put_together(b'{"format": 1, "events": 0}', bomb))
    for content in contents:
        path.write_bytes(content)
        refused(path, "cannot read .* as a trace: ")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", b"a")
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


@given(st.data())
def test_of_a_file_cut_flipped_or_spliced_anywhere_nothing_wrong_is_loaded(
    data: st.DataObject,
) -> None:
    """Damage may hit data without meaning, such as the date of a member."""
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
            Path(directory, "x").write_bytes(one)
            with suppress(TraceFileError):
                assert load(f"{directory}/x") == small()


# -- errors found by fuzzing: each of these files once raised one of Python's own errors


def test_a_group_of_thousands_of_digits_and_an_end_before_the_begin_are_drawn(path: Path) -> None:
    rewrite(path, say("metadata", ring_groups=[["ring:" + "9" * 5000 + ">1", [0, 1]]]))
    load(path).plot_ring(ax=Figure().add_subplot())
    times = ((900, 50, 10), (1000, 2000, 5))
    trace = make_trace(({"rank": 0, "op": "isend", "times": one} for one in times), world_size=2)
    assert trace.waits.blocked_ns.tolist() == [0, 0]
    trace.plot_timeline(ax=Figure().add_subplot())


def test_what_no_reader_can_take_is_written_out(path: Path) -> None:
    """Half a character breaks pandas, fonts and terminals; an escape controls a terminal."""
    labels = ["a\ud800b", "red \x1b[31m", "null\0", "C1 \x9b2J", "tab\tline\nend"]
    marks = [{"rank": 0, "op": "mark", "label": label} for label in labels]
    make_trace(marks, notes=["bell \a"]).save(path)
    trace = load(path)
    expected = ["a\\ud800b", "red \\x1b[31m", "null\\x00", "C1 \\x9b2J", "tab\\tline\\nend"]
    assert list(trace.to_pandas()["label"]) == list(trace.events.tables.labels) == expected
    assert trace.metadata["notes"] == ["bell \\x07"]


def test_a_small_file_cannot_ask_for_much_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parquet can repeat one number ten million times in a few bytes."""
    count = 50_000
    trace = load_columns({"rank": np.zeros(count), "op": np.ones(count)}, {}, world_size=1)
    trace.save(path)
    assert path.stat().st_size * 4 < count
    assert len(load(path)) == count, "a few events must always be allowed"
    monkeypatch.setattr("ringsim.traces.files.FREE_EVENTS", 1000)
    for use in (load, trace.save):
        with pytest.raises(TraceFileError, match=r"50000 events in \d+ bytes, more than 4 per"):
            use(path)

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
        ("12 GB/s, 1/2/3, forward / backward, students, /x",) * 2,
    ],
)
def test_a_redacted_trace_names_no_directory_host_or_user(text: str, left: str) -> None:
    directory = "/home/student/my project"
    called = (f"{directory}/train.py:40 > {directory}/lib/send.py", "cell [3]")
    rows = [
        {"rank": 0, "op": "span", "label": text, "group": text, "file": file} for file in called
    ]

    def about(host: str, text: str) -> dict[str, Any]:
        ends = [{"rank": 0, "about": text}]
        return {"ranks": [{"rank": 0, "host": host}], "ends": ends, text: [text]}

    metadata = {"world_size": 2, **about("node7.lab", text)}
    shared = Trace(make_trace(rows).events, metadata, results=[text], output=[text]).redact()
    assert shared.metadata == {"world_size": 2, **about("host0", left)}
    tables, word = shared.events.tables, left.replace("\n", "\\n")
    assert (tables.labels, tables.groups[0].name) == ((word,), word)
    assert tables.files == ("train.py:40 > send.py", "cell [3]")
    assert (shared.results, shared.output) == ([], [])
