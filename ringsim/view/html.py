"""Writes the view as one self-contained HTML file: the program, its style and the traces.

Each trace is encoded as a JSON head, followed by columns of numbers, each as narrow as its values
allow.

Times are stored as differences: ``post`` from the rank's previous ``post``, and ``wait`` and
``done`` from ``post``. Most differences fit into two or four bytes and resemble each other, so that
gzip needs 5 to 10 bytes per event. The data is encoded as base64, so that no name in it can be
taken for markup.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from ringsim.diagnose.snapshot import read_end_ns, reopen
from ringsim.errors import ArgumentError, escape, escape_line
from ringsim.launch.live import LiveTrace
from ringsim.plot.bars import time_range
from ringsim.provenance import footer
from ringsim.traces.display import image_html
from ringsim.traces.documents import JsonObject, StrPath, write_whole
from ringsim.traces.events import (
    CALLS,
    ERROR,
    IN_FLIGHT,
    KIND_NAMES,
    MARK,
    NONE,
    OP_CODES,
    OP_KINDS,
    OP_NAMES,
    Events,
    Ints,
)
from ringsim.traces.findings import Finding, Operation
from ringsim.traces.looks import LOOKS, find_meanings, read_table, readable_ink
from ringsim.traces.matching import CollectiveCalls
from ringsim.traces.sources import list_functions
from ringsim.traces.units import count, span_text
from ringsim.traces.value import Trace
from ringsim.view.facts import (
    find_extents,
    find_lags,
    find_oddness,
    find_path,
    find_stages,
    find_steps,
)

PROGRAM = (
    "columns.js",
    "program.js",
    "pyramid.js",
    "timeline.js",
    "waits.js",
    "ring.js",
    "panels.js",
    "steps.js",
    "code.js",
    "main.js",
    "live.js",
)  # followed by page.js, widget.js or explorer.js, and by choices.js before the latter two
Traces = Trace | Sequence[Trace]
MOST_RUNS = 8
# the page includes a picture only of traces with at most this many events
MOST_PICTURED = 100_000


def to_html(
    traces: Traces,
    path: StrPath,
    names: Sequence[str] = (),
    *,
    source: bool = False,
) -> None:
    """Writes traces as an interactive page, in a single file that you can open from disk.

    The page also works offline and in a sandboxed frame. The page's content policy contains the
    hashes of the page's own script and style, and allows no others.

    Args:
        traces: a trace, or up to 8 traces to draw on one axis, aligned at their first operations.
            Before a trace from ``what_if``, its recorded run is also drawn.
        path: the file to write; an existing file is replaced.
        names: the names of the traces, if there are several.
        source: whether the page contains the traces' source code.

    Raises:
        ArgumentError: there are no traces, or too many.
        TraceFileError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> from ringsim.traces.events import OP_CODES, make_events
        >>> from ringsim.traces.value import Trace
        >>> trace = Trace(
        ...     make_events({"rank": [0], "op": [OP_CODES["barrier"]], "post_ns": [5]}),
        ...     {"world_size": 1},
        ... )
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     to_html(trace, f"{directory}/run.html")
        ...     Path(directory, "run.html").read_text()[:15]
        '<!DOCTYPE html>'
    """
    several = check_runs(traces)
    about = [escape_line(name) for name in names]
    about = about or list(dict.fromkeys(count(trace.world_size, "rank") for trace in several))
    title = "ringsim: " + ", ".join(about)
    data = pack_all(several, names, source=source)
    write_page(path, title, page_body(title, several), data, "page.js")


def check_runs(traces: Traces) -> tuple[Trace, ...]:
    """Returns one or more traces as a tuple, with the recorded run before a predicted one.

    Raises:
        ArgumentError: there are no traces, or too many.
    """
    several = tuple(traces) if isinstance(traces, Sequence) else (traces,)
    if len(several) == 1 and several[0].recorded is not None:
        several = (several[0].recorded, *several)
    if not 1 <= len(several) <= MOST_RUNS:
        raise ArgumentError(
            f"the number of traces must be from 1 to {MOST_RUNS}, got {len(several)}. Choose up to "
            f"{MOST_RUNS} traces to compare."
        )
    return several


def page_body(title: str, traces: Iterable[Trace]) -> str:
    """Returns the HTML of an empty view.

    It includes pictures of the traces, for printing and for browsers that run no scripts.
    """
    return (
        part("page.html")
        .replace("{title}", html.escape(title))
        .replace("{picture}", "".join(map(draw_still, traces)))
    )


def write_page(path: StrPath, title: str, body: str, data: Iterable[bytes], *entry: str) -> None:
    """Writes a page with a body, data and the program; the program's last files are ``entry``."""
    text = page_text(title, body, data, *entry)
    write_whole(Path(path), lambda file: file.write(text.encode()), "a page")


def page_text(title: str, body: str, data: Iterable[bytes], *entry: str, more: str = "") -> str:
    """Returns the HTML of a page; see ``write_page``. ``more`` extends its content policy."""
    program, look = part(*PROGRAM, *entry), part("style.css")
    policy = (
        f"default-src 'none'; script-src {_hash(program)}; style-src {_hash(look)}; "
        f"img-src data:{more}"
    )
    scripts = "".join(
        f'<script type="application/x-ringsim">{base64.b64encode(one).decode("ascii")}</script>\n'
        for one in data
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{look}</style>\n</head>\n<body>\n"
        f"<main>\n{body}</main>\n{scripts}<script>{program}</script>\n</body>\n</html>\n"
    )


@cache
def part(*names: str) -> str:
    """Returns the concatenated content of files in ``page/``, after the colours that they use."""
    here = files("ringsim.view") / "page"
    text = "\n".join((here / name).read_text("utf-8") for name in names)
    if names[0].endswith(".js"):
        colours = {colour for look in LOOKS.values() for colour in (look.light, look.dark)}
        inks = {colour: readable_ink(colour) for colour in sorted(colours)}
        tables = f"const LOOKS = {json.dumps(read_table())}, INKS = {json.dumps(inks)};"
        return f'"use strict";\n{tables}\n{text}'
    return _variables() + text if names[0].endswith(".css") else text


def _variables() -> str:
    """Returns the colours of all meanings as variables of the style, for each theme."""
    light, dark = (
        " ".join(f"--{name}: {getattr(look, theme)};" for name, look in LOOKS.items())
        for theme in ("light", "dark")
    )
    return f'.ringsim {{ {light} }}\n.ringsim[data-theme="dark"] {{ {dark} }}\n'


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def draw_still(trace: Trace) -> str:
    """Returns a still picture, for printing and for browsers that run no scripts.

    The result is "" if matplotlib is missing or the trace has too many events.
    """
    if len(trace.events) > MOST_PICTURED:
        return ""
    try:
        from ringsim.plot.timeline import trace_images
    except ImportError:
        return ""
    return image_html(trace_images(trace, themed=False), trace.describe())


# the most distinct span names; if there are more, the numbers in the names are left out
MOST_LABELS = 4096
_WIDTHS = ("<i1", "<i2", "<i4")
_UNCHANGED = "thread", "group", "peer", "tag", "payload", "stage", "microbatch", "file", "line"
_LEVEL = 6  # gzip's level; higher levels take three times as long to save one percent


def join(head: JsonObject, parts: Iterable[bytes]) -> bytes:
    r"""Concatenates the length of a head (uint32), the head as JSON, and the parts.

    Each part begins at a multiple of 8 bytes.

    Example:
        >>> join({"title": "1 rank"}, [b"ring", b"sim"])[4:]
        b'{"title":"1 rank"}  ring\x00\x00\x00\x00sim\x00\x00\x00\x00\x00'
    """
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 4) % 8)
    whole = [struct.pack("<I", len(text)) + text]
    return b"".join([*whole, *(part.ljust((len(part) + 7) // 8 * 8, b"\0") for part in parts)])


def pack(data: bytes) -> bytes:
    """Returns the data compressed with gzip; the result depends only on the data."""
    return gzip.compress(data, _LEVEL, mtime=0)


def pack_all(
    traces: Sequence[Trace], names: Sequence[str] = (), *, source: bool = False
) -> list[bytes]:
    """Returns traces encoded for the view, on one axis, with their first operations aligned."""
    named = [*names, *[""] * (len(traces) - len(names))]
    each = zip(traces, align(traces), named, precede(traces), strict=True)
    return [
        pack(encode(trace, later_ns, name, first=first, source=source))
        for trace, later_ns, name, first in each
    ]


def precede(traces: Sequence[Trace]) -> list[Trace | None]:
    """Returns the run with which each of some traces is compared: the first of two, or None."""
    return [None, traces[0]] if len(traces) == 2 else [None] * len(traces)


def align(traces: Sequence[Trace]) -> list[int]:
    """Returns the shift, in ns, that aligns each trace's first operation with the latest one."""
    begins_ns = [find_begin_ns(trace) for trace in traces]
    return [max(begins_ns) - begin_ns for begin_ns in begins_ns]


def find_begin_ns(trace: Trace) -> int:
    """Returns the post time of a trace's first operation or span, or 0 if there is none."""
    posts = trace.events.post_ns[trace.events.kind != MARK]
    return int(posts.min()) if len(posts) else 0


def encode(
    trace: Trace,
    later_ns: int = 0,
    name: str = "",
    *,
    first: Trace | None = None,
    source: bool = False,
) -> bytes:
    """Returns a trace encoded for the view, uncompressed, with all times shifted by ``later_ns``.

    The result consists of the head, followed by the columns of events and of tables, in
    little-endian order. The head contains the source code if ``source`` is True. One table compares
    the trace with the run ``first``.
    """
    diagnosis = trace.explain()
    events = reopen(trace.events, trace.metadata)
    if events is not trace.events:  # otherwise its messages are known
        trace = replace(trace, events=events)
    labels, label = _stems(events)
    hosts = trace.host_numbers
    calls = CollectiveCalls.of(events, trace.apart)
    progress = trace.progress if isinstance(trace, LiveTrace) else ""
    # the first event of a run that continues changes, but its axis does not
    begin_ns = 0 if progress else find_begin_ns(trace)
    steps, bubbles, live = find_steps(events, begin_ns)
    tables = {
        "bubbles": bubbles,
        "live": live,
        "program": find_extents(events, begin_ns),
        "path": find_path(trace, calls, begin_ns),
        "lags": find_lags(first, trace, (find_begin_ns(first), begin_ns)) if first else [],
    }
    columns = _columns(trace, calls, label, later_ns)
    for table, values in tables.items():
        columns |= {f"{table} {number}": column for number, column in enumerate(values)}
    columns = {name: _narrow(values) for name, values in columns.items()}
    # operations in flight are drawn as stuck until the end
    is_open = progress or (events.status == IN_FLIGHT).any()
    read_ns = read_end_ns(trace.metadata) if is_open else 0
    first_ns, last_ns = time_range(events)
    end_ns = max(read_ns or 0, last_ns)
    head = {
        "progress": progress,
        "title": f"{escape_line(name)}: {_title(trace)}" if name else _title(trace),
        "source": footer(trace.metadata),
        "predicted": trace.metadata.get("source") == "predicted",
        "summary": trace.summary(),
        "begin": begin_ns,
        "start": begin_ns + later_ns,
        "first": first_ns - begin_ns,
        "end": min(end_ns - begin_ns, 2**53),
        "marks": np.flatnonzero(events.program_marks).tolist(),
        "stages": find_stages(events, trace.world_size),
        "odd": find_oddness(trace),
        "steps": steps,
        "counts": np.bincount(events.rank, minlength=trace.world_size).tolist(),
        "hosts": hosts.tolist() if hosts.max(initial=0) > 0 else None,
        "ops": [[name, KIND_NAMES[OP_KINDS[code]]] for code, name in enumerate(OP_NAMES)],
        "groups": [escape_line(group.name) for group in events.tables.groups],
        "members": [list(group.ranks) for group in events.tables.groups],
        "payloads": [
            [one.dtype, list(one.shape), one.size_bytes] for one in events.tables.payloads
        ],
        "labels": labels,
        "meanings": find_meanings(labels),
        "files": [escape_line(name) for name in events.tables.files],
        "functions": _functions(trace),
        "sources": {
            escape_line(name): escape(text) for name, text in trace.sources.items() if source
        },
        "error": ERROR,
        "name": escape_line(name),
        "findings": [_finding(events, one) for one in diagnosis.findings],
        "notes": [escape(note) for note in diagnosis.notes],
        "columns": [
            {"name": name, "type": values.dtype.str[1:], "size": len(values)}
            for name, values in columns.items()
        ],
    }
    return join(head, (values.tobytes() for values in columns.values()))


def _functions(trace: Trace) -> dict[str, str]:
    """Returns the function around each place in the user's code, by the number of the file."""
    events, names = trace.events, dict[str, str]()
    for number, called in enumerate(events.tables.files):
        functions = list_functions(trace.sources.get(called.rpartition(CALLS)[2], ""))
        for line in np.unique(events.line[events.file == number]).tolist() if functions else ():
            around = [name for name, lines in functions if line in lines]
            names |= {f"{number}:{line}": escape_line(name) for name in around[-1:]}
    return names


def _title(trace: Trace) -> str:
    parts = [count(trace.world_size, "rank"), escape_line(trace.metadata.get("source", ""))]
    return ", ".join(filter(None, parts))


def _columns(trace: Trace, calls: CollectiveCalls, label: Ints, later_ns: int) -> dict[str, Ints]:
    events, messages = trace.events, trace.messages
    first = np.flatnonzero(np.diff(events.rank, prepend=NONE))
    post = np.diff(events.post_ns, prepend=0)
    post[first] = events.post_ns[first] + later_ns
    # the distance to the other side in the list of events, or 0 if there is none
    partner = np.zeros(len(events), dtype=np.int64)
    ahead = messages.recv - messages.send
    partner[messages.send], partner[messages.recv] = ahead, -ahead
    call = np.full(len(events), NONE)
    call[calls.event] = calls.call
    return {
        "post": post,
        "wait": _after(events.wait_ns, events.post_ns),
        "done": _after(events.done_ns, events.post_ns),
        "op": events.op,
        "status": events.status,
        "partner": partner,
        "call": call,
        "label": label,
        **{name: getattr(events, name) for name in _UNCHANGED},
    }


def _after(times: Ints, post: Ints) -> Ints:
    """Returns times relative to ``post``, or -1 for times that are missing."""
    return np.where(times == NONE, NONE, np.maximum(times - post, 0))


def _narrow(values: Ints) -> Ints:
    """Returns integers in the narrowest type that can hold them.

    Integers that do not fit into 32 bits become floats, like all numbers in JavaScript.
    """
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    for width in _WIDTHS:
        if np.iinfo(width).min <= low and high <= np.iinfo(width).max:
            return values.astype(width)
    return values.astype("<f8")


def _stems(events: Events) -> tuple[list[str], Ints]:
    """Returns the names of spans and the column that refers to the names by number.

    If there are too many names, the numbers in them are left out.
    """
    names = [escape_line(name) for name in events.tables.labels]
    if len(names) <= MOST_LABELS:
        return list(map(span_text, names)), events.label
    stems = [re.sub(r"\d+(\.\d+)?", "…", name) for name in names]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(stems))}
    if len(numbers) > MOST_LABELS:  # names without a pattern
        numbers = {"…": 0}
    of_label = np.array([numbers.get(name, 0) for name in stems] + [NONE], dtype=np.int32)
    return list(numbers), of_label[events.label]


def _finding(events: Events, finding: Finding) -> JsonObject:
    """Returns a finding as JSON values, with the indices of its operations among the events."""
    return {
        "kind": finding.kind,
        "ranks": list(finding.ranks),
        "text": str(finding),
        "events": [index for one in finding.operations if (index := find(events, one)) is not None],
    }


def find(events: Events, operation: Operation) -> int | None:
    """Returns the index of the event that belongs to an operation, or None if no event does.

    If several events fit, prefers the event in flight for an operation in flight, and otherwise the
    event whose blocked time is closest.
    """
    files = [number for number, name in enumerate(events.tables.files) if name == operation.file]
    alike = np.flatnonzero(
        (events.rank == operation.rank) & (events.line == operation.line)
        & (events.op == OP_CODES.get(operation.op, NONE)) & np.isin(events.file, files or [NONE])
    )  # fmt: skip
    if len(alike) == 0:
        return None
    if (
        operation.status == "in_flight"
        and (waiting := alike[events.status[alike] == IN_FLIGHT]).size
    ):
        return int(waiting[-1])
    blocked_s = (events.done_ns[alike] - events.wait_ns[alike]) * 1e-9
    return int(alike[np.argmin(np.abs(blocked_s - operation.waited_s))])
