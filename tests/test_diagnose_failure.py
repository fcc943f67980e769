"""The exception that made a rank fail: chains of exceptions, raised here; and verdict files."""

from __future__ import annotations

import json
import linecache
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic import Story

import ringsim
from ringsim.diagnose.failure import (
    OWN,
    PEER,
    WAIT,
    Verdict,
    describe_end,
    error_of_kind,
    find_cause,
    impose,
    note_failed_threads,
    raise_verdict,
    read_verdict,
    report_death,
    report_exception,
    write_verdict,
)
from ringsim.errors import Deadlock
from ringsim.traces.findings import KINDS
from ringsim.traces.recorder import Recorder

LOST = "[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4182"
TIMED_OUT = "[../unbound_buffer.cc:78] Timed out waiting 300ms for recv operation to complete"


def compiled(name: str) -> Callable[..., Any]:
    """Returns a function that raises its argument, in a file of the given name."""
    space: dict[str, Any] = {}
    exec(compile("def fail(error):\n    raise error\n", name, "exec"), space)
    function: Callable[..., Any] = space["fail"]
    return function


fail_inside = compiled(str(Path(ringsim.__file__).parent / "comm" / "torch_hooks.py"))
fail_outside = compiled("/home/me/torch/ringsim_course.py")


def verdict() -> Exception:
    return impose("deadlock", "ranks wait for each other")


def caught(call: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as info:  # noqa: PT011
        call()
    return info.value


def test_every_kind_of_finding_has_a_heading_in_the_page() -> None:
    page = (Path(__file__).parent.parent / "docs" / "reference" / "findings.md").read_text()
    assert sorted(re.findall(r"^### (\w+)$", page, re.MULTILINE)) == sorted(KINDS)


@pytest.mark.parametrize(
    ("fail", "error", "echo"),
    [
        (fail_inside, RuntimeError(LOST), PEER),
        (fail_inside, RuntimeError(TIMED_OUT), WAIT),
        (fail_inside, RuntimeError("shapes differ"), OWN),
        (fail_inside, RuntimeError("Caught RuntimeError in process 0.\nBroken pipe"), OWN),
        (fail_inside, ConnectionResetError(LOST), OWN),
        (fail_outside, RuntimeError(LOST), OWN),
        (fail_inside, verdict(), PEER),
        (fail_inside, error_of_kind("deadlock")("of a run of its own"), OWN),
        (fail_inside, ExceptionGroup("two threads", [verdict(), ValueError("b")]), OWN),
    ],
)
def test_an_echo_is_told_by_where_it_was_raised(
    fail: Callable[..., Any], error: Exception, echo: str
) -> None:
    cause = find_cause(caught(lambda: fail(error)))
    assert (cause.error, cause.echo, cause.pending) == (error, echo, False)
    assert (describe_end(report_exception(0, cause.error))["state"] == "unknown") is (echo != OWN)


def wrap(error: Exception, *, later: Exception | None = None, hides: bool = False) -> None:
    try:
        fail_inside(error)
    except Exception as lost:
        if later is not None:
            fail_inside(later)
        raise RuntimeError("step failed") from (None if hides else lost)


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize(("text", "echo"), [(LOST, PEER), (TIMED_OUT, WAIT), ("nan loss", OWN)])
def test_what_is_made_of_an_echo_is_one(text: str, echo: str, hides: bool) -> None:
    report = report_exception(0, caught(lambda: wrap(RuntimeError(text), hides=hides)))
    assert (report.text, report.echo) == ("step failed", echo)
    assert ("nan loss" in report.after) is (echo == OWN and not hides)


def test_an_operation_that_fails_after_a_time_out_was_caught_fails_by_itself() -> None:
    closed = RuntimeError("Application timeout caused pair closure")
    cause = find_cause(caught(lambda: wrap(RuntimeError(TIMED_OUT), later=closed)))
    assert (cause.error, cause.echo) == (closed, OWN)
    assert find_cause(caught(lambda: wrap(RuntimeError(LOST), later=closed))).echo == PEER


def waits_and_raises_again() -> None:
    try:
        raise ValueError("root cause")
    except ValueError:
        fail_inside(verdict())
        raise


def test_what_a_wait_holds_up_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    error = caught(waits_and_raises_again)
    report = report_exception(1, error)
    assert (report.error, report.text, report.echo) == ("ValueError", "root cause", OWN)
    about = describe_end(report)["about"]
    assert "root cause" in about
    assert "and then got stuck in a wait during cleanup (" in about
    assert ", in waits_and_raises_again)" in about
    # without the source, it may have been handled
    monkeypatch.setattr(linecache, "getlines", lambda *_: [])
    assert find_cause(error).echo == PEER


def test_a_generator_that_is_closed_has_not_failed() -> None:
    def values() -> Iterator[int]:
        try:
            yield 1
        finally:
            fail_inside(verdict())

    def close() -> None:
        generator = values()
        next(generator)
        generator.close()  # type: ignore[attr-defined]

    cause = find_cause(caught(close))
    assert (type(cause.error), cause.echo, cause.pending) == (Deadlock, PEER, False)


def test_a_cause_is_found_in_a_circle() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert find_cause(first).error is first


@pytest.mark.parametrize(
    "name", ["<frozen runpy>", "/venv/site-packages/typing_extensions.py", torch.__file__]
)
def test_frames_of_ringsim_and_torch_are_not_the_users(name: str) -> None:
    """A deprecated function of torch is called through typing_extensions."""
    place = report_exception(0, caught(lambda: compiled(name)(ValueError()))).where
    assert place.startswith(f"{__file__}, line ")


def test_an_error_has_the_place_of_the_users_line() -> None:
    place = report_exception(0, caught(lambda: json.loads("{"))).where
    assert place.startswith(f"{__file__}, line ")
    ours = error_of_kind.__code__.co_filename
    frames = [(linecache.__file__, 3, "f"), ("t.py", 7, "step"), (ours, 9, "main")]
    written = "".join(f'  File "{file}", line {line} in {name}\n' for file, line, name in frames)
    report = report_death(1, -6, 0, "what(): size", f"Fatal Python error: Aborted\n\n{written}")
    assert (report.where, report.printed) == ("t.py, line 7, in step", "what(): size")
    assert ("in f" in report.traceback, "main" in report.traceback) == (True, False)
    assert describe_end(report)["state"] == "failed"


def test_the_error_carries_the_diagnosis_that_the_watcher_made(tmp_path: Path) -> None:
    story = Story(3)
    for rank, peer in ((0, 1), (1, 0), (2, 0)):
        about = {"peer": peer, "tag": 3, "group": "world", "size_bytes": 32, "file": 0, "line": 41}
        story.op(rank, "recv", (0, 0, -1), **about)
    diagnosis = replace(story.trace(complete=False).explain(), trace=None)
    assert diagnosis.findings[0].consequences
    assert diagnosis.edges
    write_verdict(tmp_path, Verdict((0, 1), diagnosis, 5))
    assert read_verdict(tmp_path) == Verdict((0, 1), diagnosis, 5)
    with pytest.raises(Deadlock) as raised:
        raise_verdict(tmp_path, 1)
    assert raised.value.diagnosis == diagnosis
    assert str(raised.value) == str(diagnosis)
    assert isinstance(raised.value, RuntimeError)  # like torch's error
    raise_verdict(tmp_path, 2)  # it does not concern that rank


def test_what_ends_a_thread_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for a way to end it, and what merely follows from others."""
    monkeypatch.setattr(threading, "excepthook", print)
    recorder = Recorder(None, 0, 1, now=time.monotonic_ns, who=threading.get_ident)
    stop = note_failed_threads(recorder)
    for error in (SystemExit(3), verdict(), ValueError("no more batches")):
        thread = threading.Thread(target=fail_outside, args=(error,))
        thread.start()
        thread.join()
    stop()
    assert threading.excepthook is print
    (label,) = recorder.labels.values()
    assert label.startswith("! thread_failed: raised ValueError: no more batches (")
