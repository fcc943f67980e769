"""The checks of what students read from traces: faults, slow links, and times of messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verdicts import LINK, make_tests, verdict

import ringsim
from ringsim import Link, Trace, check
from ringsim import comm as dist
from ringsim.check import examination, patients
from ringsim.errors import ArgumentError

Answer = Callable[..., Any]
DATA = Path(__file__).parent.parent / "notebooks" / "data"
# The fault of each: kind, ranks, and the events that show it, as (rank, op, peer, tag). For the
# straggler these are only some of the events.
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
    rank, op, peer, tag = operation
    table = trace.to_pandas().fillna({"peer": -1, "tag": -1})
    found = table.query(f"rank == {rank} and op == '{op}' and peer == {peer} and tag == {tag}")
    return [*map(int, found.index[(found["status"] == "ok") == trace.metadata["complete"]])]


@pytest.mark.parametrize("name", PATIENTS)
def test_diagnose_knows_what_each_patient_is_ill_with(name: str) -> None:
    kind, ranks, evidence = PATIENTS[name]
    trace = load(name)
    for operation in evidence:
        events = rows(trace, operation)
        assert events, operation
        for event in events:
            result = check.diagnose(trace, kind, ranks, event)
            assert repr(result).startswith("check.diagnose: passed (4 ranks)\n  Right: ")


@pytest.mark.parametrize("name", PATIENTS)
def test_diagnose_takes_no_other_kind_ranks_or_event(name: str) -> None:
    kind, ranks, evidence = PATIENTS[name]
    trace = load(name)
    right = {index for operation in evidence for index in rows(trace, operation)}
    event = min(right)
    for other in {other for other, _, _ in PATIENTS.values()} - {kind}:
        result = check.diagnose(trace, other, ranks, event)
        assert not result.passed
        assert kind not in f"{result.reason} {result.hint}", "the answer is not given away"
    for wrong in ((), (0,), 3, (0, 1, 2, 3), [9]):
        assert "The fault involves " in check.diagnose(trace, kind, wrong, event).reason
    if kind != "straggler":  # many events show a straggler
        every = range(len(trace.events))
        assert {e for e in every if check.diagnose(trace, kind, ranks, e).passed} == right


WRONGLY_READ: list[tuple[str, Any, Any, str]] = [
    ("", (), None, "kind must be the name of a fault, got ''."),
    ("straggler", (2, 3), 0, "The fault is not straggler, which occurs in runs that finish: "),
    ("tag_mismatch", (2, 3), 0, "The fault is not tag_mismatch: if it were, a send and a recv"),
    ("race", (2, 3), 0, "The fault is not race: nothing of this kind was recorded."),
    ("deadlock", (1, 2), 0, "you named the wrong ranks: 1, 2. The fault involves 2 ranks."),
    ("deadlock", (3, 2), 0, "The kind and the ranks are right, but event 0 does not show"),
    ("deadlock", (2, 3), None, "event None does not show the fault."),
    ("deadlock", (2, 3), -1, "event -1 does not show the fault."),
]


@pytest.mark.parametrize(("kind", "ranks", "event", "reason"), WRONGLY_READ)
def test_diagnose_says_what_is_wrong(kind: str, ranks: Any, event: Any, reason: str) -> None:
    result = check.diagnose(load("patient_4"), kind, ranks, event)
    assert reason in result.reason
    assert result.hint
    assert result.trace is not None
    assert repr(result).startswith("check.diagnose: not yet (4 ranks)\n")


@pytest.mark.parametrize(
    ("ranks", "event", "marked"), [((), None, 0), (9, 999, 0), ((1, 2), 22, 1)]
)
def test_a_wrong_diagnosis_marks_the_answer_in_one_picture(
    ranks: Any, event: int | None, marked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 0.3.0, each wrong answer drew the ring and the timeline again."""
    displayed: list[Any] = []
    monkeypatch.setattr("IPython.display.display", lambda what, **_: displayed.append(what))
    monkeypatch.setattr(Trace, "plot_timeline", lambda trace: displayed.append(trace))
    trace = load("patient_4")
    check.diagnose(trace, "race", ranks, event)._ipython_display_()
    text, *drawn = displayed
    assert "not yet" in text["text/plain"]
    assert len(drawn) == marked
    for picture in drawn:
        answer = [one for one in picture if one.label == "your answer"]
        assert sorted(one.rank for one in answer) == sorted([1, 2, trace[22].rank])
        assert len(picture) == len(trace) + len(answer)


def test_diagnose_tells_runs_that_finished_from_those_that_did_not() -> None:
    assert (
        check.diagnose(load("patient_1"), "deadlock", (0, 1), 0).reason
        == "The fault is not deadlock, which keeps a run from finishing: this run was slow, but "
        "finished."
    )


def send_late() -> None:
    if dist.get_rank() == 0:
        ringsim.compute(0.05)
        dist.send(torch.zeros(1), 1)
    else:
        dist.recv(torch.zeros(1), 0)


def test_a_late_sender_is_shown_by_the_wait_and_a_healthy_run_by_nothing() -> None:
    trace = ringsim.simulate(send_late, world_size=2, link=LINK)
    finding = trace.explain().findings[0]
    assert finding.kind == "late_sender"
    (recv,) = rows(trace, (1, "recv", 0, 0))
    assert check.diagnose(trace, "late_sender", finding.ranks, recv).passed
    healthy = ringsim.simulate(lambda: None, world_size=1, link=LINK)
    result = check.diagnose(healthy, "deadlock", 0, 0)
    assert result.reason == "No fault was found in this trace."


@pytest.mark.parametrize("path", sorted(DATA.glob("*.ringtrace")), ids=lambda path: path.stem)
def test_the_traces_are_real_small_and_say_nothing_private(path: Path) -> None:
    on_hosts = path.stem in ("hosts_dealt", "hosts_grouped", "hosts_reordered")
    assert on_hosts or path.stem in PATIENTS
    assert path.stat().st_size < 15_000
    trace = ringsim.load(path)
    assert trace.metadata["source"] == "measured"
    assert set(trace.events.tables.files) == {"hosts.py" if on_hosts else "patients.py"}
    assert set(trace.hosts) == ({"host0", "host1", "host2"} if on_hosts else {""})
    texts = f"{trace.metadata.get('ends')} {trace.events.tables.labels} {trace.explain()}"
    assert "/" not in texts.replace("/dev/null", "")


# -- slow_link: the two hosts of a slow link


def by_link(messages: Any, hosts: list[str], least: int = 64 * 1024) -> Any:
    """Returns the messages between hosts with their bandwidths, grouped by pairs of hosts."""
    first, second = (messages[end].map(hosts.__getitem__) for end in ("src", "dst"))
    rate = messages["size_bytes"] / messages["transfer_ns"]
    pairs = [tuple(sorted(pair)) for pair in zip(first, second, strict=True)]
    table = messages.assign(link=pairs, rate=rate)
    return table[(first != second) & (table["size_bytes"] >= least)].groupby("link")


def by_median(messages: Any, hosts: list[str], **least: int) -> Any:
    return by_link(messages, hosts, **least)["rate"].median().idxmin()


def reversed_pair(messages: Any, hosts: list[str]) -> Any:
    return list(by_median(messages, hosts))[::-1]


def by_total(messages: Any, hosts: list[str]) -> Any:
    return by_link(messages, hosts)["transfer_ns"].sum().idxmax()


def by_sums(messages: Any, hosts: list[str]) -> Any:
    links = by_link(messages, hosts)
    return (links["size_bytes"].sum() / links["transfer_ns"].sum()).idxmin()


def with_waits(messages: Any, hosts: list[str]) -> Any:
    waited = messages["recv_done_ns"] - messages["recv_post_ns"]
    return by_median(messages.assign(transfer_ns=waited), hosts)


def within_hosts_too(messages: Any, hosts: list[str]) -> Any:
    rate = messages["size_bytes"] / messages["transfer_ns"]
    worst = rate[messages["size_bytes"] >= 64 * 1024].idxmin()
    return hosts[messages["src"][worst]], hosts[messages["dst"][worst]]


def test_the_recorded_hosts_have_the_slow_link_that_the_lesson_tells_of() -> None:
    for name in ("hosts_dealt", "hosts_grouped"):
        trace = load(name)
        assert by_median(trace.to_pandas("messages"), trace.hosts) == ("host1", "host2")


# -- alphabeta: a line through the times of messages


def fit_medians(sizes: Any, times: Any, mean: Any = np.median, weigh: bool = True) -> Any:
    each = np.unique(sizes)
    middle = np.array([mean(times[sizes == size]) for size in each])
    beta, alpha = np.polyfit(each, middle, 1, w=1 / middle if weigh else None)
    return alpha, beta


weighted = fit_medians
unweighted = partial(fit_medians, weigh=False)
of_means = partial(fit_medians, mean=np.mean)


def as_a_link(sizes: Any, times: Any) -> Link:
    return Link(*weighted(sizes, times))


def both_ends(sizes: Any, times: Any) -> list[float]:
    first, last = (np.median(times[sizes == size]) for size in (sizes.min(), sizes.max()))
    return [first, (last - first) / sizes.max()]


# -- mesh_order: the order of a mesh's dimensions


Counts = dict[str, int]


def count_crossing(sizes: Counts, sent: Counts, per_host: int, order: tuple[str, ...]) -> float:
    """Returns the bytes per rank that cross between hosts, by the closed form.

    In a ring of n ranks whose neighbours are k apart, a host has per_host / k ranks in a row.
    """
    crossing, apart = 0.0, 1
    for name in reversed(order):
        if sizes[name] * apart > per_host:
            crossing += sent[name] * min(1, apart / per_host)
        apart *= sizes[name]
    return crossing


def by_counting(sizes: Counts, sent: Counts, per_host: int) -> Any:
    return min(itertools.permutations(sizes), key=partial(count_crossing, sizes, sent, per_host))


def by_amount(sizes: Counts, sent: Counts, per_host: int) -> Any:
    return sorted(sizes, key=lambda name: sent[name])


def by_all_amounts(sizes: Counts, sent: Counts, per_host: int) -> Any:
    return sorted(sizes, key=lambda name: sent[name] * sizes[name])


def largest_outside(sizes: Counts, sent: Counts, per_host: int) -> Any:
    return sorted(sizes, key=lambda name: -sizes[name])


NO_NAMES, NOT_THERE = "must be the names of two hosts, got ", "the slow link is not between "
NO_ORDER = " ranks on a host, your answer must be an order, got "
TOO_MUCH = "GB from host to host, but "
NO_LINE = "Your answer must be two non-negative numbers, alpha and beta, got "
RIGHT: dict[Answer, list[Answer]] = {
    check.slow_link: [by_median, reversed_pair],
    check.mesh_order: [by_counting, lambda *case: list(by_counting(*case))],
    check.alphabeta: [weighted, as_a_link, both_ends],
}
# answers, with words of the reason and of the hint
WRONG: dict[Answer, list[tuple[Any, ...]]] = {
    check.slow_link: [
        (lambda *_: None, f"{NO_NAMES}None", "Return the names"),
        (lambda *_: ("host1", "host2"), f"{NO_NAMES}('host1', 'host2')", "Return the names"),
        (by_total, NOT_THERE, "Divide the size of each message by that message's own time"),
        (by_sums, NOT_THERE, "but not a median"),
        (with_waits, NOT_THERE, "late_sender_ns is not part of it"),
        (partial(by_median, least=0), NOT_THERE, "Compare messages of 64 KiB and more"),
        (within_hosts_too, "the slow link is not within ", "leave out messages within one host"),
        (lambda messages, hosts: messages["rate"], "KeyError"),
    ],
    check.mesh_order: [
        (by_amount, "the order dp, pp, tp sends 512.0 GB from host to host, but 259.2 GB would"),
        (by_all_amounts, TOO_MUCH, "Try every order"),
        (largest_outside, TOO_MUCH, "np.roll(hosts, 1, axis)"),
        (lambda sizes, *_: [*sizes], TOO_MUCH, "divide by per_host"),
        (lambda *case: by_counting(*case)[::-1], TOO_MUCH),
        (lambda sizes, sent, _: by_counting(sizes, sent, 8), TOO_MUCH),
        (lambda sizes, *_: [*sizes][1:], f"{NO_ORDER}('pp', 'tp').", "Return all keys of sizes"),
        (lambda *_: "dp pp tp", f"{NO_ORDER}'dp pp tp'.", "in a list"),
        (lambda *_: None, f"{NO_ORDER}None."),
        (lambda sizes, *_: sizes["cp"], "KeyError"),
    ],
    check.alphabeta: [
        (unweighted, "alpha must be ", "Divide each error by the time"),
        (of_means, " must be ", "First take the median"),
        (lambda *data: weighted(*data)[::-1], "alpha must be ", "return alpha, beta"),
        (lambda *data: 1e6 * np.array(weighted(*data)), "alpha must be ", "not 40"),
        (lambda *_: (1.0, float("nan")), NO_LINE, "Return two numbers"),
        (lambda *_: None, f"{NO_LINE}None", "Return two numbers"),
        (lambda sizes, times: times[10**6], "IndexError", "two numpy arrays"),
    ],
}

_passes, _fails = make_tests(RIGHT, WRONG)
test_a_right_answer_passes = pytest.mark.usefixtures("on_the_clock")(_passes)
test_a_wrong_answer_is_told_why = pytest.mark.usefixtures("on_the_clock")(_fails)


def only_for_made_up_links(sizes: Any, times: Any) -> tuple[float, float]:
    """Returns right numbers, except for the messages of real ranks, which are fewer."""
    return weighted(sizes, times) if len(sizes) > 60 else (80e-6, 2.5e-10)


@pytest.mark.usefixtures("on_the_clock")
def test_a_line_is_judged_by_the_medians_of_real_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = verdict(check.alphabeta, only_for_made_up_links).reason
    assert "message of 8 B took a median of 10 µs, but your line gives 80 µs." in reason
    simulated = examination.run

    def run(job: Any, kind: Any, options: Any) -> Trace:
        trace = simulated(job, kind, options)
        if kind.world_size == 2:  # as if each message had taken less time than the previous one
            events = trace.events
            events.done_ns[:] += 10**9
            took_ns = np.geomspace(10**8, 10**4, len(events))
            events.post_ns[:] = events.done_ns - took_ns.astype(np.int64)
        return trace

    monkeypatch.setattr(examination, "run", run)
    result = verdict(check.alphabeta, only_for_made_up_links)
    assert result.passed, result
    assert "real messages were too irregular to judge, because the machine is" in result.reason


# -- prediction: a prediction next to the result


@pytest.mark.parametrize(
    ("guess", "found", "verdict", "reason"),
    [
        (60, 63.25, "passed", "You predicted 60 ms, and it was 63.2 ms."),
        (30, 63.25, "not yet", "You predicted 30 ms, and it was 63.2 ms."),
        ("ends", "ends", "passed", "You predicted ends, and it was ends."),
        ("many", 4, "not yet", "You predicted many, and it was 4."),
        (None, 4, "not yet", "Write your prediction first."),
    ],
)
def test_a_prediction_is_compared(guess: Any, found: Any, verdict: str, reason: str) -> None:
    result = check.prediction(guess, found, unit="ms")
    assert (result.verdict, result.reason) == (verdict, reason)
    assert bool(result.hint) is (verdict != "passed")


# -- new patients


@given(st.text().filter(str.strip))
def test_a_fresh_patient_has_what_was_drawn_and_nothing_else(name: str) -> None:
    case, trace = patients.draw(name.strip()), check.patient(name)
    is_alone = case.kind in ("straggler", "rank_failed")
    ranks = (case.rank,) if is_alone else (case.rank, case.rank + 1)
    diagnose = partial(check.diagnose, trace)
    concerned = np.flatnonzero(np.isin(trace.events.rank, ranks))[::-1].tolist()
    shown = next(event for event in concerned if diagnose(case.kind, ranks, event).passed)
    passed = {kind for kind in patients.FAULTS if diagnose(kind, ranks, shown).passed}
    assert passed == {case.kind}
    another = (*ranks, (ranks[-1] + 1) % case.world_size)
    assert not diagnose(case.kind, another, shown).passed


def test_no_two_students_have_the_same_patient_and_all_faults_occur() -> None:
    names = [f"student {number}" for number in range(200)]
    drawn = [*map(patients.draw, names)]
    assert {case.kind for case in drawn} == set(patients.FAULTS)
    assert len({*drawn}) == len(names)
    assert len({check.patient(name).events.post_ns.tobytes() for name in names[:20]}) == 20
    assert check.patient(" Ada ") == check.patient("Ada")
    for junk in ("", " ", 3, None):
        with pytest.raises(ArgumentError, match="name must be a non-empty string"):
            check.patient(junk)  # type: ignore[arg-type]
