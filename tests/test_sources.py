"""Traces keep the user's source code for the page; files contain it only on request."""

from __future__ import annotations

import os
import runpy
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_view import read, unpack, write
from trace_file import take_apart

import ringsim
from ringsim import Trace
from ringsim.traces.sources import attach_sources

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-9)
HERE = Path(__file__)


def send_next(tensor: torch.Tensor) -> None:  # a thin wrapper: its caller's line counts, too
    dist.send(tensor, (dist.get_rank() + 1) % dist.get_world_size())


def all_send_first() -> None:
    send_next(torch.zeros(4))


def stuck() -> Trace:
    with pytest.raises(ringsim.errors.Deadlock) as caught:
        ringsim.simulate(all_send_first, world_size=3, link=LINK)
    trace: Trace = caught.value.trace
    return trace


def test_code_is_the_users_and_is_saved_only_on_request(tmp_path: Path) -> None:
    trace, path = stuck(), tmp_path / "run.ringtrace"
    code = {str(HERE): HERE.read_text()}
    assert trace.sources == code
    assert trace.filter(ranks=0).sources == code
    trace.save(path, source=True)
    again = ringsim.load(path)
    assert again.sources == ringsim.load(path, ranks=1).sources == code
    assert again == trace
    assert trace.redact().sources == {}
    again.save(path)
    assert b"a thin wrapper" not in take_apart(path)[0]
    assert ringsim.load(path).sources == {}
    trace.sources["other.py"] = "x" * 1_000_000
    with pytest.raises(ringsim.errors.TraceFileError, match="sources is not an object"):
        trace.save(path, source=True)


def test_the_page_has_the_code_only_on_request_and_notebooks_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, sent = stuck(), list[bytes]()
    assert unpack(write(trace))[0]["sources"] == {}
    trace.to_html(tmp_path / "run.html", source=True)
    page = (tmp_path / "run.html").read_text()
    assert unpack(read(page))[0]["sources"] == trace.sources
    view = trace.view()
    monkeypatch.setattr(view.widget, "send", lambda message, buffers: sent.extend(buffers))
    view.show(trace)
    assert unpack(sent[0])[0]["sources"] == trace.sources
    trace.sources[str(HERE)] = "x = '</script>\u202e\x1b'\n"
    view.show(trace)
    assert unpack(sent[1])[0]["sources"] == {str(HERE): "x = '</script>\\u202e\\x1b'\n"}


def test_the_page_names_functions_whose_code_is_known(tmp_path: Path) -> None:
    trace, path = stuck(), tmp_path / "run.ringtrace"
    (file, *_), (line, *_) = trace.events.file, trace.events.line
    assert trace.events.tables.files[file].endswith(f" > {HERE}"), "a wrapper and its caller"
    assert unpack(write(trace))[0]["functions"] == {f"{file}:{line}": "send_next"}
    trace.save(path)
    trace.sources[str(HERE)] = "%matplotlib inline\n"
    for unknown in (trace, trace.redact(), ringsim.load(path)):
        assert unpack(write(unknown))[0]["functions"] == {}


PROGRAM = """
    import torch.distributed as dist

    def worker():
        dist.barrier()

    def large():
        dist.barrier()
    """


@pytest.mark.parametrize(
    ("name", "more", "metadata", "note"),
    [
        ("program.py", "", {}, ""),
        ("program.py", "", {"start_unix_ns": 2**63 - 1}, ""),
        ("program.py", "", {"start_unix_ns": 10**18}, "program.py was left out, because it chang"),
        ("program.py", "#" * 200_000, {}, "program.py was left out, because it chang"),
        ("site-packages/program.py", "", {}, None),
        ("program.cfg", "", {}, None),
    ],
)
def test_code_has_limits(
    tmp_path: Path, name: str, more: str, metadata: dict[str, Any], note: str | None
) -> None:
    """Code is left out if it is large, not the user's own, or newer than the run."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(PROGRAM) + more)
    worker = runpy.run_path(os.fspath(path))["worker"]
    run = ringsim.simulate(worker, world_size=2, link=LINK)
    notes = [one for one in run.metadata["notes"] if "source code" in one]
    assert bool(run.sources) == (not more and note is not None)
    assert [bool(more)] == [bool(one) for one in notes or [""]]
    trace = attach_sources(Trace(run.events, {"notes": [], **metadata}))
    assert list(trace.sources) == ([str(path)] if note == "" else [])
    assert [note in one for one in trace.metadata["notes"]] == ([True] if note else [])
