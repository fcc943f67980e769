"""The checks of what is read from traces.

What is wrong in one, and a line through the times of messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from verdicts import verdict

import ringsim
from ringsim import Trace, check
from ringsim.check import examination
from ringsim.check.patients import FAULTS, draw
from ringsim.errors import ArgumentError
from ringsim.traces.events import OP_CODES, make_events

Answer = Callable[..., Any]
DATA = Path(__file__).parent.parent / "notebooks" / "data"
# What each is ill with: kind, ranks, and what shows it, as (rank, op, peer, tag): of the straggler
# some of it, of the others all.
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
    found = table[
        (table["rank"] == rank)
        & (table["op"] == op)
        & (table["peer"].fillna(-1) == peer)
        & (table["tag"].fillna(-1) == tag)
    ]
    stuck = found["status"] != "ok"
    return [
        int(index) for index in found[stuck if not trace.metadata["complete"] else ~stuck].index
    ]


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
        shows = {
            index
            for index in range(len(trace.events))
            if check.diagnose(trace, kind, ranks, index).passed
        }
        assert shows == right


@pytest.mark.parametrize(
    ("kind", "ranks", "event", "reason"),
    [
        ("", (), None, "The kind must be the name of a fault, got ''."),
        (
            "straggler",
            (2, 3),
            0,
            (
                "A straggler is found in runs that finished, and this one did not: some operations "
                "were never done."
            ),
        ),
        (
            "tag_mismatch",
            (2, 3),
            0,
            (
                "It is no tag_mismatch: then a send and a recv of two ranks, both in flight, "
                "differ in their tag alone."
            ),
        ),
        ("race", (2, 3), 0, "It is no race: nothing of the kind was recorded."),
        (
            "deadlock",
            (1, 2),
            0,
            "It is a deadlock, and it concerns 2 ranks, not those that you named: 1, 2.",
        ),
        ("deadlock", (3, 2), 0, "Kind and ranks are right, and event 0 does not show it."),
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
    assert (
        result.reason
        == "A deadlock keeps a run from finishing, and this one finished: it was slow."
    )


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
    result = check.diagnose(
        Trace(make_events({"rank": [], "op": []}), {"world_size": 1}), "deadlock", 0, 0
    )
    assert result.reason == "Nothing wrong was found in this trace."


@pytest.mark.parametrize("path", sorted(DATA.glob("*.ringtrace")), ids=lambda path: path.stem)
def test_the_traces_are_real_small_and_say_nothing_private(path: Path) -> None:
    on_hosts = path.stem in ("hosts_dealt", "hosts_grouped", "hosts_mended")
    assert on_hosts or path.stem in PATIENTS
    assert path.stat().st_size < 15_000
    trace = ringsim.load(path)
    assert trace.metadata["source"] == "measured"
    assert set(trace.events.tables.files) == {"hosts.py" if on_hosts else "patients.py"}
    assert set(trace.hosts) == ({"host0", "host1", "host2"} if on_hosts else {""})
    said = f"{trace.metadata.get('ends')} {trace.events.tables.labels} {trace.explain()}"
    assert "/" not in said.replace("/dev/null", "")


# -- slow_link: which two hosts have it


def large(messages: Any, hosts: list[str], least: int = 64 * 1024) -> Any:
    """Messages between hosts, with the pair of hosts and the bandwidth of each."""
    ends = [
        (hosts[src], hosts[dst]) for src, dst in zip(messages["src"], messages["dst"], strict=True)
    ]
    table = messages.assign(
        link=[tuple(sorted(pair)) for pair in ends],
        rate=messages["size_bytes"] / messages["transfer_ns"],
    )
    return table[
        np.array([first != second for first, second in ends]) & (table["size_bytes"] >= least)
    ]


def by_median(messages: Any, hosts: list[str]) -> Any:
    table = large(messages, hosts)
    return table["rate"].groupby(table["link"]).median().idxmin()


def by_total(messages: Any, hosts: list[str]) -> Any:
    table = large(messages, hosts)
    return table["transfer_ns"].groupby(table["link"]).sum().idxmax()


def by_sums(messages: Any, hosts: list[str]) -> Any:
    groups = large(messages, hosts).groupby("link")
    return (groups["size_bytes"].sum() / groups["transfer_ns"].sum()).idxmin()


def by_slowest_message(messages: Any, hosts: list[str]) -> Any:
    table = large(messages, hosts)
    return table["link"][table["rate"].idxmin()]


def with_waits(messages: Any, hosts: list[str]) -> Any:
    table = large(
        messages.assign(transfer_ns=messages["recv_done_ns"] - messages["recv_post_ns"]), hosts
    )
    return table["rate"].groupby(table["link"]).median().idxmin()


def with_tiny_messages(messages: Any, hosts: list[str]) -> Any:
    table = large(messages, hosts, least=0)
    return table["rate"].groupby(table["link"]).median().idxmin()


def within_hosts_too(messages: Any, hosts: list[str]) -> Any:
    rate = messages["size_bytes"] / messages["transfer_ns"]
    worst = rate[messages["size_bytes"] >= 64 * 1024].idxmin()
    return hosts[messages["src"][worst]], hosts[messages["dst"][worst]]


@pytest.mark.usefixtures("on_the_clock")
def test_slow_link_passes_a_right_answer() -> None:
    for seed in (1, None):
        assert verdict(check.slow_link, by_median, seed).passed
        assert verdict(
            check.slow_link, lambda messages, hosts: list(by_median(messages, hosts))[::-1], seed
        ).passed


@pytest.mark.usefixtures("on_the_clock")
@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (
            lambda messages, hosts: None,
            "must be the names of two hosts, got None",
            "Return the names",
        ),
        (
            lambda messages, hosts: ("host1", "host2"),
            "must be the names of two hosts, got ('host1', 'host2')",
            "Return the names",
        ),
        (lambda messages, hosts: sorted(set(hosts))[:2], "the slow link is not between ", ""),
        (
            lambda messages, hosts: (0, 1),
            "must be the names of two hosts, got ('0', '1')",
            "Return the names",
        ),
        (by_total, "the slow link is not between ", "Divide the size of each by its own time"),
        (by_sums, "the slow link is not between ", "A median over all"),
        (by_slowest_message, "the slow link is not between ", "A median over all"),
        (with_waits, "the slow link is not between ", "without late_sender_ns"),
        (
            with_tiny_messages,
            "the slow link is not between ",
            "Compare messages of 64 KiB and more",
        ),
        (within_hosts_too, "the slow link is not within ", "leave out messages within one"),
        (lambda messages, hosts: messages["rate"], "KeyError", ""),
    ],
)
def test_slow_link_says_what_is_wrong(answer: Answer, reason: str, hint: str) -> None:
    result = verdict(check.slow_link, answer)
    assert not result.passed
    assert reason in result.reason, result
    assert hint in result.hint


def test_the_recorded_hosts_have_the_slow_link_that_the_lesson_tells_of() -> None:
    for name in ("hosts_dealt", "hosts_grouped"):
        trace = load(name)
        assert by_median(trace.to_pandas("messages"), trace.hosts) == ("host1", "host2")


# -- alphabeta: a line through the times of messages


def medians(sizes: Any, times: Any) -> tuple[Any, Any]:
    each = np.unique(sizes)
    return each, np.array([np.median(times[sizes == size]) for size in each])


def weighted(sizes: Any, times: Any) -> tuple[float, float]:
    each, middle = medians(sizes, times)
    beta, alpha = np.polyfit(each, middle, 1, w=1 / middle)
    return alpha, beta


def by_fit_link(sizes: Any, times: Any) -> ringsim.Link:
    from ringsim.link import fit_link

    return fit_link(*medians(sizes, times))


def as_a_link(sizes: Any, times: Any) -> ringsim.Link:
    return ringsim.Link(*weighted(sizes, times))


def both_ends(sizes: Any, times: Any) -> list[float]:
    each, middle = medians(sizes, times)
    return [middle[0], (middle[-1] - middle[0]) / each[-1]]


def unweighted(sizes: Any, times: Any) -> tuple[float, float]:
    beta, alpha = np.polyfit(*medians(sizes, times), 1)
    return alpha, beta


def of_means(sizes: Any, times: Any) -> tuple[float, float]:
    each = np.unique(sizes)
    middle = np.array([times[sizes == size].mean() for size in each])
    beta, alpha = np.polyfit(each, middle, 1, w=1 / middle)
    return alpha, beta


@pytest.mark.usefixtures("on_the_clock")
@pytest.mark.parametrize("answer", [weighted, as_a_link, both_ends])
def test_alphabeta_passes_a_right_answer(answer: Answer) -> None:
    for seed in (1, None):
        result = verdict(check.alphabeta, answer, seed)
        assert result.passed, result
        assert result.trace.world_size == 2
        assert "Right for 5 links chosen at random" in result.reason


@pytest.mark.usefixtures("on_the_clock")
@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (unweighted, r"alpha must be [\d.]+ µs within 30 %, got ", "Divide each error by the time"),
        (of_means, r"(alpha|beta) must be ", "Take the median"),
        (lambda sizes, times: weighted(sizes, times)[::-1], "alpha must be ", "return alpha, beta"),
        (
            lambda sizes, times: tuple(1e6 * number for number in weighted(sizes, times)),
            "alpha must be ",
            "not 40",
        ),
        (
            by_fit_link,
            "The answer calls fit_link of ringsim, and must do that by itself.",
            "Write down what the function would do.",
        ),
        (
            lambda sizes, times: None,
            "two numbers from 0, alpha and beta, got None",
            "Return two numbers",
        ),
        (lambda sizes, times: (1.0, float("nan")), "two numbers from 0", "Return two numbers"),
        (lambda sizes, times: times[10**6], "IndexError", "two numpy arrays"),
    ],
)
def test_alphabeta_says_what_is_wrong(answer: Answer, reason: str, hint: str) -> None:
    result = verdict(check.alphabeta, answer)
    assert not result.passed
    assert re.search(reason, result.reason), result
    assert hint in result.hint


def only_for_made_up_links(sizes: Any, times: Any) -> tuple[float, float]:
    """Right, but for the messages of the real ranks, of which there are fewer."""
    return weighted(sizes, times) if len(sizes) > 60 else (80e-6, 2.5e-10)


@pytest.mark.usefixtures("on_the_clock")
def test_a_line_is_judged_by_the_medians_of_real_messages() -> None:
    result = verdict(check.alphabeta, only_for_made_up_links)
    assert not result.passed
    assert result.reason == (
        "Between two real ranks 8 B took 10 µs in the median, and the line says 80 µs."
    )


@pytest.mark.usefixtures("on_the_clock")
def test_messages_that_no_line_fits_are_not_judged_by(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = examination.run

    def run(job: Any, kind: Any, options: Any) -> Trace:
        trace = simulated(job, kind, options)
        if kind.world_size == 2:  # as if each message had taken less time than the one before
            events = trace.events
            events.done_ns[:] += 10**9
            took_ns = np.geomspace(10**8, 10**4, len(events))
            events.post_ns[:] = events.done_ns - took_ns.astype(np.int64)
        return trace

    monkeypatch.setattr(examination, "run", run)
    result = verdict(check.alphabeta, only_for_made_up_links)
    assert result.passed, result
    assert "real messages were too irregular to judge by: a busy machine" in result.reason


# -- prediction: what was said before, beside what was found


@pytest.mark.parametrize(
    ("said", "found", "verdict", "reason"),
    [
        (60, 63.25, "passed", "You said 60 ms, and it was 63.2 ms."),
        (30, 63.25, "not yet", "You said 30 ms, and it was 63.2 ms."),
        ("ends", "ends", "passed", "You said ends, and it was ends."),
        ("ends", "deadlock", "not yet", "You said ends, and it was deadlock."),
        ("many", 4, "not yet", "You said many, and it was 4."),
        (None, 4, "not yet", "Write your prediction first."),
    ],
)
def test_a_prediction_is_compared(said: Any, found: Any, verdict: str, reason: str) -> None:
    result = check.prediction(said, found, unit="ms")
    assert (result.verdict, result.reason, bool(result.hint)) == (
        verdict,
        reason,
        verdict != "passed",
    )


# -- fresh patients


@given(st.text().filter(str.strip))
def test_a_fresh_patient_has_what_was_drawn_and_nothing_else(name: str) -> None:
    case, trace = draw(name.strip()), check.patient(name)
    concerned = np.flatnonzero(np.isin(trace.events.rank, case.ranks))[::-1].tolist()
    shown = next(
        event for event in concerned if check.diagnose(trace, case.kind, case.ranks, event).passed
    )
    assert {kind for kind in FAULTS if check.diagnose(trace, kind, case.ranks, shown).passed} == {
        case.kind
    }
    assert not check.diagnose(
        trace, case.kind, (*case.ranks, (case.ranks[-1] + 1) % case.world_size), shown
    ).passed


def test_no_two_students_have_the_same_patient_and_all_faults_occur() -> None:
    names = [f"student {number}" for number in range(200)]
    assert {draw(name).kind for name in names} == set(FAULTS)
    assert len({draw(name) for name in names}) == len(names)
    assert len({check.patient(name).events.post_ns.tobytes() for name in names[:20]}) == 20
    assert check.patient(" Ada ") == check.patient("Ada")
    for junk in ("", " ", 3, None):
        with pytest.raises(ArgumentError, match="name must be a text that is not empty"):
            check.patient(junk)  # type: ignore[arg-type]
