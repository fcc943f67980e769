"""A part of a trace has the selected events, and no matches that the whole trace does not have."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from random_traces import WORLD_SIZE, traces
from synthetic import Story, pipeline, trace_of
from trace_file import COLUMNS, OPS

import ringsim
from ringsim import Trace
from ringsim.errors import ArgumentError, TraceFileError
from ringsim.pipeline import Costs, evaluate
from ringsim.schedules import make_schedule

SLOW = {"link", "slow_link", "late_sender", "late_receiver", "straggler"}
conditions = st.fixed_dictionaries(
    {},
    optional={
        "ranks": st.sets(st.integers(0, WORLD_SIZE - 1)),
        "between_s": st.tuples(st.sampled_from([0, 5e-7]), st.sampled_from([6e-7, 1.0, 1e10])),
        "ops": st.sets(st.sampled_from(OPS)).map(set(OPS).__sub__),
    },
)


def ids(trace: Trace, index: Any = slice(None)) -> list[tuple[int, int]]:
    return list(
        zip(trace.events.rank[index].tolist(), trace.events.seq[index].tolist(), strict=True)
    )


def pairs(trace: Trace) -> set[Any]:
    return set(zip(ids(trace, trace.messages.send), ids(trace, trace.messages.recv), strict=True))


def calls(trace: Trace) -> set[Any]:
    """Returns the collectives of one call: the k-th of each rank on a group, except those apart."""
    turn: dict[Any, int] = defaultdict(int)
    found: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    apart = set(trace.apart.tolist())
    for place, event in enumerate(trace):
        refused = event.status == "error" and event.wait_ns is None
        group = int(trace.events.group[place])
        if event.kind == "collective" and group >= 0 and not refused and place not in apart:
            found[group, turn[event.rank, group]].append((event.rank, event.seq))
            turn[event.rank, group] += 1
    return {tuple(members) for members in found.values()}


@example(pipeline(), {"ranks": [1, 2]}, {"between_s": (0, 0.012)})
@given(traces, conditions, conditions)
def test_a_part_is_what_meets_all_conditions_and_matches_as_the_whole_does(
    trace: Trace, first: Any, then: Any
) -> None:
    part, other = trace.filter(**first).filter(**then), trace.filter(**then).filter(**first)
    there = set(ids(part))
    assert there == set(ids(trace.filter(**first))) & set(ids(trace.filter(**then)))
    assert ids(part) == [one for one in ids(trace) if one in there], "events must keep their order"
    for name in COLUMNS:
        assert np.array_equal(getattr(part.events, name), getattr(other.events, name))
    assert part.apart.tolist() == other.apart.tolist()
    assert pairs(part) == {pair for pair in pairs(trace) if set(pair) <= there}
    assert calls(part) == {call for call in calls(trace) if set(call) <= there}
    alone = set(ids(trace, trace.messages.unmatched))
    assert set(ids(part, part.messages.unmatched)) == alone & there


@given(traces)
def test_a_part_of_everything_is_the_trace(trace: Trace) -> None:
    every = trace.filter(ranks=range(WORLD_SIZE), between_s=(0, 1e10), ops=OPS)
    assert every == trace == trace.filter()


def test_a_part_is_saved_loaded_drawn_and_explained(tmp_path: Path) -> None:
    whole = pipeline()
    for part in (
        ranks := whole.filter(ranks=[1, 2]),
        whole.filter(ops=["isend", "irecv"]),
        whole.filter(between_s=(0.01, 0.02)),
        one := whole.filter(ranks=3),
    ):
        part.save(tmp_path / "part.ringtrace")
        again = ringsim.load(tmp_path / "part.ringtrace")
        assert again == part
        assert (pairs(again), again.unmatched) == (pairs(part), [])
        assert {finding.kind for finding in again.explain().findings} <= SLOW
    for name in ("perfetto", "chrome", "html"):
        getattr(ranks, f"to_{name}")(tmp_path / name)
    assert set(ranks._repr_mimebundle_()[0]) == {"text/plain", "text/html", "image/png"}
    assert "part          ranks 1, 2; " in ranks.summary()
    assert re.search(r"\d+ operations whose other side is left out\n", ranks.summary())
    assert one.describe().startswith("Part of a trace of 4 ranks")


def test_a_step_of_some_ranks_is_drawn() -> None:
    """Version 0.2.0 raised IndexError: it numbered operations as in the whole part."""
    link = ringsim.Link(alpha_s=1e-4, beta_s_per_byte=0)
    costs = Costs(forward=1e-3, backward=2e-3)
    step = ringsim.simulate_schedule(make_schedule("1f1b", 4, 4), costs, link=link)
    part = step.trace().filter(ranks=[0, 1])
    assert part.plot_timeline().get_title(loc="left").startswith("1F1B, 2 ranks, 4 microbatches")


def test_a_step_is_a_part() -> None:
    whole = trace_of(*[evaluate(make_schedule("1f1b", 3, 4))] * 3)
    step = whole.step(1)
    assert ("3 steps," in whole.summary(), "1 step," in step.summary()) == (True, True)
    assert (step.apart.tolist(), step.unmatched) == ([], [])
    assert step.bubble() == whole.bubble(1)
    assert pairs(step) == pairs(whole.filter(steps=[1, 2]).step(0))
    with pytest.raises(ArgumentError, match="steps must be an integer from 0 to 2, got 3"):
        whole.step(3)
    assert {event.group for event in pipeline().filter(groups="ring:0>1")} == {"ring:0>1"}


def test_what_is_still_in_flight_is_in_a_part_and_is_not_blamed_there() -> None:
    story = Story(2)
    story.op(0, "irecv", (1, 2, -1), peer=1, group="world", tag=0)
    story.op(0, "isend", (1, 2, 3), peer=1, group="world", tag=0)
    assert [event.op for event in story.trace().filter(between_s=(0.005, 0.006))] == ["irecv"]
    story.op(1, "irecv", (1, 2, -1), peer=0, group="world", tag=1)
    stuck = story.trace(complete=False, ends=[{"rank": 1, "state": "exited"}])
    assert stuck.explain().findings
    part = stuck.filter(ranks=0).explain()  # the reason of a wait may be in another part
    assert str(part) == "Nothing wrong was found in this part of a run of 2 ranks."


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        ({"ranks": 4}, "ranks must be an integer from 0 to 3, got 4"),
        ({"ranks": "01"}, "ranks must be an integer from 0 to 3, got '0'"),
        ({"ranks": 1.0}, "ranks must be an integer from 0 to 3, got 1.0"),
        ({"steps": 0}, "steps=0: this trace has no steps"),
        ({"between_s": 3}, "between_s must be two times in seconds"),
        ({"between_s": (2, 1)}, r"between_s must be two times .*, got \(2, 1\)"),
        ({"ops": "isned"}, "ops must be in this trace, got 'isned'. Choose from 'span', 'mark', "),
        ({"groups": ["world", 3]}, "groups must be in this trace, got 3. Choose from 'world', "),
    ],
)
def test_what_is_not_in_the_trace_cannot_be_asked_for(condition: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        pipeline().filter(**condition)


@example(pipeline(), {"ranks": [1, 2], "between_s": (0, 0.012)}, {})
@example(pipeline(), {"between_s": (0, 0.012)}, {"ranks": [0, 1]})
@given(traces, conditions, conditions)
def test_a_part_that_is_read_is_what_filter_gives(
    trace: Trace, conditions: Any, before: Any
) -> None:
    conditions.pop("ops", None)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ringsim.traces.files.GROUP_ROWS", 3)
        file = Path(directory, "x")
        trace.filter(**before).save(file)
        part, wanted = ringsim.load(file, **conditions), ringsim.load(file).filter(**conditions)
    assert ids(part) == ids(wanted)
    assert pairs(part) == pairs(wanted)
    assert calls(part) <= calls(wanted), "no call may be complete only in the part"
    assert set(wanted.apart.tolist()) <= set(part.apart.tolist())
    assert set(part.messages.unmatched.tolist()) <= set(wanted.messages.unmatched.tolist())


def test_a_rank_is_read_without_the_pages_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringsim.traces.files.GROUP_ROWS", 10)
    run = ringsim.simulate_schedule("1f1b", num_ranks=4, num_microbatches=6).trace()
    run.save(file := tmp_path / "run.ringtrace")
    assert ringsim.load(file) == run
    whole = file.read_bytes()
    assert ringsim.load(file, ranks=3) == run.filter(ranks=3)
    start = whole.index(b"PAR1") + 10  # in the first page, which belongs to rank 0
    file.write_bytes(whole[:start] + b"\xff\xff" + whole[start + 2 :])
    assert ringsim.load(file, ranks=3) == run.filter(ranks=3)
    for ranks in (0, None):
        with pytest.raises(TraceFileError, match="as a trace: "):
            ringsim.load(file, ranks=ranks)
    with pytest.raises(ArgumentError, match="ranks must be an integer from 0 to 3, got 4"):
        ringsim.load(file, ranks=4)
