"""The check of the lesson on diagnosis, and the traces that it is asked about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ringsim
from ringsim import check
from ringsim.traces.events import OP_CODES, make_events
from ringsim.traces.value import Trace

DATA = Path(__file__).parent.parent / "notebooks" / "data"
# What each is ill with: kind, ranks, and what shows it, as (rank, op, peer, tag): of the straggler some of it, of the others all.
PATIENTS = {
    "patient_1": ("straggler", (2,), {(2, "span", -1, -1), (1, "send", 2, 0), (3, "recv", 2, 5)}),
    "patient_2": ("tag_mismatch", (2, 3), {(2, "recv", 3, 102), (3, "send", 2, 104)}),
    "patient_3": ("message_mismatch", (1, 2), {(1, "send", 2, 5), (2, "recv", 1, 5)}),
    "patient_4": ("deadlock", (2, 3), {(2, "send", 3, 1), (3, "send", 2, 100)}),
    "patient_5": ("peer_exited", (0, 1), {(1, "recv", 0, 5)}),
}


def load(name: str) -> Trace:
    return ringsim.load(DATA / f"{name}.ringtrace")


def rows(trace: Trace, operation: tuple[int, str, int, int]) -> list[int]:
    table = trace.to_pandas()
    rank, op, peer, tag = operation
    found = table[(table["rank"] == rank) & (table["op"] == op) & (table["peer"].fillna(-1) == peer) & (table["tag"].fillna(-1) == tag)]
    stuck = found["status"] != "ok"
    return [int(index) for index in found[stuck if not trace.metadata["complete"] else ~stuck].index]


@pytest.mark.parametrize("name", PATIENTS)
def test_diagnose_knows_what_each_patient_is_ill_with(name: str) -> None:
    kind, ranks, evidence = PATIENTS[name]
    trace = load(name)
    for operation in evidence:
        events = rows(trace, operation)
        assert events, operation
        for event in events:
            result = check.diagnose(trace, kind, ranks, event)
            assert result.passed, result
            assert repr(result).startswith("check.diagnose: passed (4 ranks)\n  Right: ")


@pytest.mark.parametrize("name", PATIENTS)
def test_diagnose_takes_no_other_kind_ranks_or_event(name: str) -> None:
    kind, ranks, evidence = PATIENTS[name]
    trace = load(name)
    (event, *_) = rows(trace, next(iter(evidence)))
    for other in {other for other, _, _ in PATIENTS.values()} - {kind}:
        result = check.diagnose(trace, other, ranks, event)
        assert not result.passed
        assert kind not in result.reason, "the answer is not given away"
        assert kind not in result.hint
    for wrong in ((), (0,), 3, (0, 1, 2, 3), [9]):
        assert "concerns" in check.diagnose(trace, kind, wrong, event).reason
    if kind != "straggler":  # which very many events show
        right = {index for operation in evidence for index in rows(trace, operation)}
        shows = {index for index in range(len(trace.events)) if check.diagnose(trace, kind, ranks, index).passed}
        assert shows == right


@pytest.mark.parametrize(
    ("kind", "ranks", "event", "reason"),
    [
        ("", (), None, "The kind must be the name of a fault, got ''."),
        ("dead lock", (2, 3), 0, "got 'dead lock'."),
        ("straggler", (2, 3), 0, "A straggler is found in runs that finished, and this one did not: some operations were never done."),
        (
            "tag_mismatch",
            (2, 3),
            0,
            "It is no tag_mismatch: then a send and a recv of two ranks, both in flight, differ in their tag alone.",
        ),
        ("race", (2, 3), 0, "It is no race: nothing of the kind was recorded."),
        ("deadlock", (1, 2), 0, "It is a deadlock, and it concerns 2 ranks, not those that you named: 1, 2."),
        ("deadlock", 2, 0, "not those that you named: 2."),
        ("deadlock", (3, 2), 0, "Kind and ranks are right, and event 0 does not show it."),
        ("deadlock", [2, 3], 10**6, "event 1000000 does not show it."),
        ("deadlock", (2, 3), None, "event None does not show it."),
        ("deadlock", (2, 3), -1, "event -1 does not show it."),
    ],
)
def test_diagnose_says_what_is_wrong(kind: str, ranks: Any, event: Any, reason: str) -> None:
    result = check.diagnose(load("patient_4"), kind, ranks, event)
    assert not result.passed
    assert reason in result.reason
    assert result.hint
    assert result.trace is not None
    assert repr(result).startswith("check.diagnose: not yet (4 ranks)\n")


def test_diagnose_tells_runs_that_finished_from_those_that_did_not() -> None:
    result = check.diagnose(load("patient_1"), "deadlock", (0, 1), 0)
    assert result.reason == "A deadlock keeps a run from finishing, and this one finished: it was slow."


def test_a_late_sender_is_shown_by_the_wait_and_by_what_the_sender_did() -> None:
    events = make_events(
        {
            "rank": [0, 1],
            "op": [OP_CODES["send"], OP_CODES["recv"]],
            "peer": [1, 0],
            "tag": [0, 0],
            "post_ns": [50_000_000, 0],
            "wait_ns": [50_000_000, 0],
            "done_ns": [51_000_000, 52_000_000],
        }
    )
    trace = Trace(events, {"world_size": 2})
    finding = trace.explain().findings[0]
    assert finding.kind == "late_sender"
    (recv,) = (index for index in range(2) if trace.to_pandas()["op"][index] == "recv")
    assert check.diagnose(trace, "late_sender", finding.ranks, recv).passed


def test_diagnose_of_a_healthy_trace() -> None:
    result = check.diagnose(Trace(make_events({"rank": [], "op": []}), {"world_size": 1}), "deadlock", 0, 0)
    assert result.reason == "Nothing wrong was found in this trace."


@pytest.mark.parametrize("path", sorted(DATA.glob("*.ringtrace")), ids=lambda path: path.stem)
def test_the_traces_are_real_small_and_say_nothing_private(path: Path) -> None:
    assert path.stem in PATIENTS
    assert path.stat().st_size < 10_000
    trace = ringsim.load(path)
    assert trace.metadata["source"] == "measured"
    assert set(trace.events.tables.files) == {"patients.py"}
    assert all("host" not in rank for rank in trace.metadata["ranks"])
    said = f"{trace.metadata['ends']} {trace.events.tables.labels} {trace.explain()}"
    assert "/" not in said.replace("/dev/null", "")
