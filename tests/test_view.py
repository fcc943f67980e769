"""The interactive page contains the trace, needs nothing external, and runs only its program."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import struct
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from random_traces import traces
from synthetic import Story, pipeline

import ringsim
from ringsim import Trace, topologies
from ringsim.errors import ArgumentError, TraceFileError

SAME = "group peer tag payload stage microbatch file line op status label".split()


def unpack(packed: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a packed trace in the same way as the page."""
    data = gzip.decompress(packed)
    (length,) = struct.unpack_from("<I", data)
    head = json.loads(data[4 : 4 + length])
    at, columns = 4 + length, {}
    for name, kind, size in map(dict.values, head["columns"]):
        columns[name] = np.frombuffer(data, "<" + kind, size, at)
        at += (columns[name].nbytes + 7) // 8 * 8
    assert at == len(data)
    return head, columns


def read(page: str) -> bytes:
    """Returns the packed trace in a page."""
    (data,) = re.findall(r'application/x-ringsim">([^<]*)<', page)
    return base64.b64decode(data)


def write(trace: Trace) -> bytes:
    """Returns the packed trace in its page, which is written without its still picture."""
    with tempfile.TemporaryDirectory() as directory:
        with mock.patch("ringsim.view.html.MOST_PICTURED", -1):
            trace.to_html(f"{directory}/run.html")
        return read(Path(directory, "run.html").read_text())


@given(traces)
def test_the_page_holds_the_trace(trace: Trace) -> None:
    head, columns = unpack(write(trace))
    events = trace.events
    for name in SAME:
        assert columns[name].tolist() == getattr(events, name).tolist()
    latest = max(events.post_ns.max(initial=0), events.done_ns.max(initial=0))
    inexact = 0 if latest < 2**52 else 4096  # JavaScript's numbers are floats
    near = {"rtol": 1e-12 * (inexact > 0), "atol": inexact}
    rank = np.repeat(np.arange(len(head["counts"])), head["counts"])
    assert rank.tolist() == events.rank.tolist()
    for number in range(len(head["counts"])):
        post = np.cumsum(columns["post"][rank == number].astype(np.float64))
        np.testing.assert_allclose(post, events.post_ns[rank == number].astype(np.float64), **near)
    for name in ("wait", "done"):
        times = getattr(events, f"{name}_ns")
        assert (columns[name] < 0).tolist() == (times < 0).tolist()
        after = np.maximum(times - events.post_ns, 0)[times >= 0].astype(np.float64)
        np.testing.assert_allclose(columns[name][times >= 0], after, **near)
    partner = np.arange(len(events)) + columns["partner"]
    assert partner[trace.messages.send].tolist() == trace.messages.recv.tolist()
    assert np.count_nonzero(columns["partner"]) == 2 * len(trace.messages)


def test_of_very_many_names_the_numbers_are_left_out() -> None:
    story = Story(1)
    for number in range(4097):
        story.span(0, f"compute 0.{number} s", number, number + 0.5)
    assert unpack(write(story.trace()))[0]["labels"] == ["compute … s"]


def test_findings_point_to_their_operations() -> None:
    story = Story(2)
    for rank in (1, 0):
        more = {"peer": 1 - rank, "group": "world", "tag": 0, "size_bytes": 4}
        story.op(rank, "recv", (2 - rank, 2 - rank, -1), **more)
    (finding,) = unpack(write(story.trace()))[0]["findings"]
    assert (finding["kind"], sorted(finding["events"])) == ("deadlock", [0, 1])


def test_rows_know_their_hosts_whatever_those_are_called() -> None:
    outer = ringsim.Link(alpha_s=1e-6, beta_s_per_byte=1e-9)
    hosts = topologies.Hosts(2, outer, outer)
    trace = ringsim.simulate(lambda: None, world_size=5, topology=hosts)
    assert unpack(write(trace))[0]["hosts"] == [0, 0, 1, 1, 2]
    for names, numbers in ((["</script>", 7, None], [0, 1, -1, -1, -1]), (["one"], None)):
        ranks = [{"rank": rank, "host": host} for rank, host in enumerate(names)]
        named = Trace(trace.events, {"world_size": 5, "ranks": ranks})
        assert unpack(write(named))[0]["hosts"] == numbers


def test_the_page_may_run_nothing_but_its_own_program(tmp_path: Path) -> None:
    pipeline(4).to_html(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    for name in ("script", "style"):
        body = page.rpartition(f"<{name}>")[2].partition(f"</{name}>")[0]
        named = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{named}'" in policy
    assert policy.startswith("default-src 'none';")
    assert not re.search(r"https?://|(?:src|href)=\"(?!data:)", page)


def test_the_program_is_small_and_its_lines_are_short() -> None:
    page = Path(ringsim.__file__).parent / "view/page"
    texts = {path.name: path.read_text("utf-8") for path in page.iterdir()}
    assert sum(len(text.encode()) for text in texts.values()) < 200_000
    program = {name for name in texts if name.endswith(".js")}
    assert sum(len(texts[name].splitlines()) for name in program) <= 3000
    long = {name: max(map(len, texts[name].splitlines())) for name in program}
    assert {name for name in program if long[name] > 100} == set()


def test_mistakes_are_told(tmp_path: Path) -> None:
    trace = pipeline(2)
    for several in ([], [trace] * 9):
        with pytest.raises(ArgumentError, match=rf"traces must be from 1 to 8, got {len(several)}"):
            trace.view().show(several)
    with pytest.raises(TraceFileError):
        trace.to_html(tmp_path / "nowhere" / "run.html")
