"""The interactive page.

What it holds is the trace, it needs nothing from outside, and no name gets out of its data.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from random_traces import traces
from synthetic import Story, pipeline
from test_hostile_names import ATTACK, Tags, hostile_file

import ringsim
from ringsim import Trace, topologies
from ringsim.errors import ArgumentError, TraceFileError
from ringsim.traces.events import NONE
from ringsim.view import html
from ringsim.view.html import pack, to_html


def unpack(packed: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads what the page reads, as it does."""
    data = gzip.decompress(packed)
    (length,) = struct.unpack_from("<I", data)
    head = json.loads(data[4 : 4 + length])
    size, at, columns = sum(head["counts"]), 4 + length, {}
    for column in head["columns"]:
        columns[column["name"]] = np.frombuffer(data, "<" + column["type"], size, at)
        at += columns[column["name"]].nbytes
    assert at == len(data)
    return head, columns


@given(traces)
def test_the_page_holds_the_trace(trace: Trace) -> None:
    head, columns = unpack(pack(trace))
    events = trace.events
    for name in (
        "group",
        "peer",
        "tag",
        "payload",
        "stage",
        "microbatch",
        "file",
        "line",
        "op",
        "status",
        "label",
    ):
        assert columns[name].tolist() == getattr(events, name).tolist()
    # JavaScript's numbers are floats
    inexact = (
        0 if max(events.post_ns.max(initial=0), events.done_ns.max(initial=0)) < 2**52 else 4096
    )
    rank = np.repeat(np.arange(len(head["counts"])), head["counts"])
    assert rank.tolist() == events.rank.tolist()
    for number in range(len(head["counts"])):
        post = np.cumsum(columns["post"][rank == number].astype(np.float64))
        np.testing.assert_allclose(
            post,
            events.post_ns[rank == number].astype(np.float64),
            rtol=1e-12 * (inexact > 0),
            atol=inexact,
        )
    for name in ("wait", "done"):
        times = getattr(events, f"{name}_ns")
        assert (columns[name] < 0).tolist() == (times == NONE).tolist()
        after = np.maximum(times - events.post_ns, 0)[times != NONE]
        np.testing.assert_allclose(
            columns[name][times != NONE],
            after.astype(np.float64),
            rtol=1e-12 * (inexact > 0),
            atol=inexact,
        )
    here = np.arange(len(events))
    assert (here + columns["partner"])[trace.messages.send].tolist() == trace.messages.recv.tolist()
    assert np.count_nonzero(columns["partner"]) == 2 * len(trace.messages)


def test_an_event_takes_few_bytes() -> None:
    rng = np.random.default_rng(0)
    story = Story(8)
    for rank in range(8):
        at = 0.0
        for _ in range(500):
            took = rng.exponential(1.0, 3)
            story.op(
                rank,
                "isend",
                (at, at + took[0], at + took[:2].sum()),
                peer=(rank + 1) % 8,
                group="world",
                tag=0,
                size_bytes=4096,
            )
            at += took.sum()
    trace = story.trace()
    assert len(base64.b64encode(pack(trace))) / len(trace.events) < 15


def test_of_very_many_names_the_numbers_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "MOST_LABELS", 2)
    story = Story(1)
    for number in range(3):
        story.op(0, "span", (number, -1, number + 0.5), label=f"compute 0.{number} s")
    head, columns = unpack(pack(story.trace()))
    assert (head["labels"], columns["label"].tolist()) == (["compute … s"], [0, 0, 0])


def test_findings_point_to_their_operations() -> None:
    story = Story(2)
    story.op(1, "recv", (1, 1, -1), peer=0, group="world", tag=0, size_bytes=4)
    story.op(0, "recv", (2, 2, -1), peer=1, group="world", tag=0, size_bytes=4)
    trace = story.trace()
    head, _ = unpack(pack(trace))
    assert [(one["kind"], sorted(one["events"])) for one in head["findings"]] == [
        ("deadlock", [0, 1])
    ]


def test_rows_know_their_hosts_whatever_those_are_called() -> None:
    def worker() -> None:
        pass

    outer = ringsim.Link(alpha_s=1e-6, beta_s_per_byte=1e-9)
    trace = ringsim.simulate(worker, world_size=5, topology=topologies.Hosts(2, outer, outer))
    assert unpack(pack(trace))[0]["hosts"] == [0, 0, 1, 1, 2]
    for hosts, numbers in ((["</script>", 7, None], [0, 1, -1, -1, -1]), (["one"], None)):
        ranks = [{"rank": rank, "host": host} for rank, host in enumerate(hosts)]
        assert (
            unpack(pack(Trace(trace.events, {"world_size": 5, "ranks": ranks})))[0]["hosts"]
            == numbers
        )


def test_the_page_may_run_nothing_but_its_own_program(tmp_path: Path) -> None:
    pipeline(4).to_html(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    for name, text in (
        ("script", page.rpartition("<script>")[2]),
        ("style", page.partition("<style>")[2]),
    ):
        body = text.partition(f"</{name}>")[0]
        named = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{named}'" in policy[1]
    assert policy[1].startswith("default-src 'none';")
    assert not re.search(r"https?://|(?:src|href)=\"(?!data:)", page)


def test_no_name_gets_out_of_the_data(tmp_path: Path) -> None:
    ringsim.load(hostile_file(tmp_path / "hostile.ringtrace", "pipeline")).to_html(
        tmp_path / "run.html"
    )
    page = (tmp_path / "run.html").read_text()
    plain = Tags(page)
    pipeline(2).to_html(tmp_path / "harmless.html")
    harmless = Tags((tmp_path / "harmless.html").read_text())
    assert {name for name, _ in plain.found} == {name for name, _ in harmless.found}
    assert [
        attrs for name, attrs in plain.found if any(key.startswith("on") for key in attrs)
    ] == []
    data = re.search(r'application/x-ringsim">([^<]*)<', page)
    assert data is not None
    head, _ = unpack(base64.b64decode(data[1]))
    assert not any(character < " " for group in head["groups"] for character in group)
    assert ATTACK[:20] in head["groups"][0]


def test_mistakes_are_told(tmp_path: Path) -> None:
    trace = pipeline(2)
    for several in ([], [trace] * 9):
        with pytest.raises(ArgumentError, match=rf"traces must be 1 to 8, got {len(several)}"):
            to_html(several, tmp_path / "run.html")
    with pytest.raises(TraceFileError):
        to_html(trace, tmp_path / "nowhere" / "run.html")
