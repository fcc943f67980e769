"""Predictions with changes: replays of the recorded order, next to the simulator."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text
from random_traces import traces
from trace_mutations import read_in_full
from what_if_programs import Programs, draw_programs, follow, make_asynchronous

import ringsim
from ringsim import Link, Slow, Trace
from ringsim.cli import main
from ringsim.errors import ArgumentError, Deadlock, RingError
from ringsim.traces.events import OP_CODES, make_events

LINK = Link(alpha_s=50e-6, beta_s_per_byte=1e-9)
FAST = Link(alpha_s=5e-6, beta_s_per_byte=4e-10)


def run(programs: Programs, **options: Any) -> Trace:
    """Returns a run on the virtual clock, labelled as if it had been measured."""
    options = {"link": LINK} | options
    trace = ringsim.simulate(follow, world_size=len(programs), args=(programs,), **options)
    return replace(trace, metadata={**trace.metadata, "source": "measured"})


def check_same(found: Trace, expected: Trace) -> None:
    """Asserts that two runs have the same events, at the same times up to rounding."""
    for name in ("rank", "op", "peer", "tag", "line", "status"):
        assert getattr(found.events, name).tolist() == getattr(expected.events, name).tolist()
    for name in ("post_ns", "wait_ns", "done_ns"):
        off = np.abs(getattr(found.events, name) - getattr(expected.events, name))
        assert off.max() <= 200, f"{name} of {expected[int(off.argmax())]} is off"


@pytest.mark.parametrize("seed", range(8))
def test_changes_have_the_effect_that_they_have_in_the_simulator(seed: int) -> None:
    programs = draw_programs(seed)
    recorded = run(programs)
    check_same(recorded.what_if(), recorded)
    slow = run(programs, inject=[Slow(1, 3)])
    check_same(recorded.what_if(ranks={1: 3}), slow)
    check_same(slow.what_if(ranks={1: 1 / 3}), recorded)
    check_same(recorded.what_if(link=FAST), run(programs, link=FAST))
    if seed < 4:
        waited_later = run(make_asynchronous(programs))
        check_same(recorded.what_if(sends="isend"), waited_later)


def write_by_hand(times_ms: dict[int, list[tuple[str, int, int, int]]], **metadata: Any) -> Trace:
    """Returns a run of sends and recvs, as (op, peer, post, done) in ms for each rank."""
    rows = [(rank, *row) for rank, mine in times_ms.items() for row in mine]
    rank, op, peer, post, done = zip(*rows, strict=True)
    columns = {"rank": rank, "op": [OP_CODES[name] for name in op], "peer": peer}
    columns |= {"tag": [0] * len(rows), "post_ns": np.array(post) * 10**6}
    columns |= {"wait_ns": columns["post_ns"], "done_ns": np.array(done) * 10**6}
    return Trace(make_events(columns), {"world_size": len(times_ms), **metadata})


# rank 1 computes for 8 ms before it receives; then rank 0 for 4 ms
LATE = write_by_hand(
    {
        0: [("send", 1, 0, 10), ("send", 1, 14, 16)],
        1: [("recv", 0, 8, 10), ("recv", 0, 10, 16)],
    }
)


@pytest.mark.parametrize(
    ("changes", "ends_ms"),
    [
        ({}, [10, 16, 10, 16]),
        ({"ranks": {1: 0.5}}, [10, 16, 10, 16]),  # its start is not computing
        ({"ranks": {0: 2}}, [10, 20, 10, 20]),
        ({"sends": "isend"}, [10, 12, 10, 12]),
        ({"link": Link(1e-3, 0)}, [9, 14, 9, 14]),
    ],
)
def test_rules(changes: dict[str, Any], ends_ms: list[int]) -> None:
    predicted = LATE.what_if(**changes)
    assert (predicted.events.done_ns / 1e6).tolist() == ends_ms
    assert predicted.recorded is LATE


def test_a_replay_that_explains_little_is_called_doubtful() -> None:
    # rank 1 waits long after its message has arrived, and is then blocked without a cause
    events = LATE.events
    late = replace(
        events,
        wait_ns=np.array([0, 14, 8, 40]) * 10**6,
        done_ns=np.array([10, 16, 10, 60]) * 10**6,
    )
    late_run = replace(LATE, events=late)
    predicted = late_run.what_if(ranks={0: 0.5})
    assert "DOUBTFUL" in predicted.summary()
    error = "the replay itself is 33 % off"
    assert f"predicted; {error})" in predicted.summary().splitlines()[0]
    assert (
        f"% longer ({error}): " in predicted.summary()
        or f"% less ({error}): " in predicted.summary()
    )
    assert f"predicted, {error}." in predicted.describe()
    assert f"This run was predicted; {error}." in str(predicted.explain())
    comparison = ringsim.compare(late_run, predicted)
    assert error in repr(comparison).splitlines()[0]
    assert error in repr(ringsim.compare(predicted, late_run)).splitlines()[0]
    texts = [one.get_text() for one in predicted.plot_timeline().figure.findobj(Text)]
    assert any("predicted (the replay itself is 33 % off) from a run" in text for text in texts)


@pytest.mark.parametrize(
    ("trace", "changes", "message"),
    [
        (LATE, {"ranks": {2: 1}}, "a rank must be an integer from 0 to 1, got 2"),
        (LATE, {"ranks": {0: 0}}, "must be a positive number, got 0"),
        (LATE, {"ranks": {0: float("nan")}}, "must be a positive number, got nan"),
        (LATE, {"ranks": [1]}, "ranks must be a mapping, got"),
        (LATE, {"link": 3}, "link must be a Link, got 3"),
        (LATE, {"sends": "send"}, 'sends must be "isend" or None, got'),
        (LATE.what_if(), {}, "must be recorded, got a predicted one"),
        (LATE.filter(ranks=0), {}, "must be whole, got a part"),
        (replace(LATE, metadata={"source": "simulated"}), {}, "got a simulated one"),
        (replace(LATE, metadata={"complete": False}), {}, "must have finished"),
        (Trace(make_events({"rank": [], "op": []}), {"world_size": 2}), {}, "must have finished"),
    ],
)
def test_what_cannot_be_predicted(trace: Trace, changes: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        trace.what_if(**changes)


def test_a_deadlock_cannot_be_predicted() -> None:
    stuck = [[("recv", 1, 0, 8)], [("recv", 0, 0, 8)]]
    with pytest.raises(Deadlock) as caught:
        ringsim.simulate(follow, world_size=2, args=(stuck,), link=LINK)
    assert caught.value.trace is not None
    trace = replace(caught.value.trace, metadata={"world_size": 2})
    with pytest.raises(ArgumentError, match="must have finished"):
        trace.what_if()
    assert "what_if(" not in str(trace.explain())


def test_explain_offers_the_change_that_gains_most() -> None:
    work = [[("work", 0.003), ("all_reduce", 4096)] * 5 for _ in range(4)]
    assert run(work).explain().notes == run(work).explain().notes
    slow = run(work, inject=[Slow(2, 3)])
    (note,) = slow.explain().notes
    assert "If rank 2 computed for as long as the other ranks (median)" in note
    assert "% less (predicted; the replay itself is less than 1 % off)" in note
    assert note.endswith("trace.what_if(ranks={2: 0.33}).")
    gain = slow.what_if(ranks={2: 0.33}).makespan_s / slow.makespan_s
    assert f"would take {1 - gain:.0%} less".replace("%", " %") in note
    assert "what_if(" not in str(run(work).explain())  # nothing gains enough
    many = replace(slow, events=slow.events.select(np.repeat(np.arange(len(slow)), 300)))
    assert "what_if(" not in str(many.explain())
    # a master that receives from one rank after another: sends that wait for it
    wait = [[("work", 0.02), ("recv", 1, 0, 8)] * 3, [("send", 0, 0, 8), ("work", 0.02)] * 3]
    assert 'what_if(sends="isend")' in str(run(wait).explain())


def test_pictures_and_pages_show_the_recorded_run(tmp_path: Path) -> None:
    predicted = LATE.what_if(sends="isend")
    ax = predicted.plot_timeline()
    known = "the replay itself is less than 1 % off"
    for drawn in (ax, predicted.plot_ring()):
        assert drawn.get_title(loc="left").replace("\n", " ").endswith(f" (predicted; {known})")
    assert "predicted;" not in LATE.plot_timeline().get_title(loc="left")
    assert {"ghosts", "ghosts-blocked"} <= {one.get_gid() for one in ax.collections}
    assert ax.get_xlim()[1] > 16  # the recorded run is longer
    assert predicted.filter(ranks=1).recorded == LATE.filter(ranks=1)
    predicted.to_html(tmp_path / "page.html")
    heads = read_heads((tmp_path / "page.html").read_text())
    assert [(head["title"], head["predicted"]) for head in heads] == [
        ("2 ranks", False),
        ("2 ranks, predicted", True),
    ]
    assert known in heads[1]["source"]
    predicted.save(tmp_path / "run.ringtrace")
    loaded = ringsim.load(tmp_path / "run.ringtrace")
    assert loaded == predicted
    assert loaded.recorded is None
    assert ringsim.compare(LATE, loaded).predicts


def read_heads(page: str) -> list[dict[str, Any]]:
    """Returns the JSON heads of the traces in a page."""
    found = []
    for one in re.findall(r'<script type="application/x-ringsim">(.*?)</script>', page):
        data = gzip.decompress(base64.b64decode(one))
        found.append(json.loads(data[4 : 4 + int.from_bytes(data[:4], "little")]))
    return found


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "run.ringtrace", tmp_path / "predicted.ringtrace"
    LATE.save(file)
    options = ["--rank", "0=2", "--link", "1000,12", "--sends", "isend", "-o", str(out)]
    assert main(["what-if", str(file), *options]) == 0
    said = capsys.readouterr().out
    assert "if the computing of rank 0 took 2 times as long and a message took 1 ms + 0.083" in said
    assert "and blocking sends were asynchronous, this run would take" in said
    changes: Any = {"ranks": {0: 2.0}, "link": Link(1e-3, 1e-9 / 12), "sends": "isend"}
    assert ringsim.load(out) == LATE.what_if(**changes)
    assert main(["what-if", str(file), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["predicted_s"], numbers["replay_error"]) == (LATE.makespan_s, 0.0)
    for name in ("timeline.png", "page.html"):
        assert main(["what-if", str(file), "-o", str(tmp_path / name)]) == 0
        assert (tmp_path / name).exists()
    for wrong in (["--rank", "0:2"], ["--link", "1"], ["--link", "1,0"], ["-o", "run.txt"]):
        with contextlib.suppress(SystemExit):
            assert main(["what-if", str(file), *wrong]) == 2


@pytest.mark.distributed
def test_a_run_on_real_ranks() -> None:
    programs = draw_programs(3)
    recorded = ringsim.trace(follow, world_size=4, args=(programs,))
    replayed = recorded.what_if()
    for name in ("rank", "seq", "op", "peer", "label", "line"):
        assert getattr(replayed.events, name).tolist() == getattr(recorded.events, name).tolist()
    assert len(replayed.messages) == len(recorded.messages)
    assert 0.3 < replayed.makespan_s / recorded.makespan_s < 1.3
    assert recorded.what_if(ranks={0: 20}).makespan_s > replayed.makespan_s
    assert "predicted, gloo" in replayed.summary()


@given(trace=traces, finished=st.booleans())
def test_any_trace_is_predicted_or_refused(trace: Trace, finished: bool) -> None:
    if finished:  # most random traces are refused, because operations have no end
        events, kept = trace.events, {"world_size": trace.world_size}
        done_ns = np.maximum(events.done_ns, events.wait_ns)
        events = replace(events, status=np.full_like(events.status, 2), done_ns=done_ns)
        trace = replace(trace, events=events, metadata=kept)
    try:
        predicted = trace.what_if(ranks={0: 2.5}, link=LINK, sends="isend")
    except RingError:
        return
    assert predicted.recorded is trace
    read_in_full(predicted, draw=False)
