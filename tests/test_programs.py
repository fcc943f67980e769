"""Programs recovered from traces, and programs run on the virtual clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_traces import traces
from test_exchange_viewers import small
from trace_mutations import DATA, read_in_full

import ringsim
from ringsim import Trace, simulate_schedule
from ringsim.prediction.programs import ProgramStep, make_programs, replay
from ringsim.traces.events import Group

LINK = ringsim.Link(alpha_s=1e-3, beta_s_per_byte=1e-6)


def run_again(trace: Trace, link: ringsim.Link = LINK) -> Trace:
    return replay(make_programs(trace), link)


@pytest.mark.parametrize("file", ["small", *sorted(path.stem for path in DATA.glob("*.ringtrace"))])
def test_a_trace_runs_again(file: str) -> None:
    trace = small() if file == "small" else ringsim.load(DATA / f"{file}.ringtrace")
    again = run_again(trace)
    read_in_full(again, draw=False)
    assert again.unmatched == []
    assert (again.world_size, again.metadata["source"]) == (trace.world_size, "simulated")
    assert again.makespan_s >= sum(step.work_ns for step in make_programs(trace)[0]) * 1e-9


@given(trace=traces)
def test_any_trace_runs_again_or_is_refused(trace: Trace) -> None:
    try:
        again = run_again(trace)
    except ValueError as error:
        assert "outside -9223372036854775808 to" in str(error)  # noqa: PT017  # beyond 292 years
    else:
        read_in_full(again, draw=False)


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "num_chunks"),
    [("1f1b", 4, None), ("interleaved_1f1b", 2, 2), ("zb_h1", 4, None)],
)
def test_a_simulated_step_takes_as_long_again_and_on_another_link_as_long_as_there(
    schedule: str, num_ranks: int, num_chunks: int | None
) -> None:
    options: dict[str, Any] = {"num_ranks": num_ranks, "num_chunks": num_chunks}
    options |= {"num_microbatches": 8, "size_bytes": 1000, "semantics": "buffered"}
    links = [ringsim.Link(0.05, 1e-4), ringsim.Link(0.01, 0)]
    runs = [simulate_schedule(schedule, link=link, **options) for link in links]
    before = runs[0].trace()
    for link, run in zip(links, runs, strict=True):
        again = run_again(before, link)
        assert again.makespan_s == pytest.approx(float(run.makespan), abs=1e-6)
        assert len(again.messages) == len(run.trace().messages)


@st.composite
def programs(draw: st.DrawFn) -> list[list[ProgramStep]]:
    """Draws programs of three ranks, which run in order except for delayed waits.

    Every message has both sides.
    """
    ranks: list[list[ProgramStep]] = [[], [], []]
    front: list[tuple[int, ...]] = [(), (), ()]
    loose: list[list[int]] = [[], [], []]

    def add(rank: int, step: ProgramStep) -> None:
        ranks[rank].append(step)
        if step.kind == "work":
            front[rank] = (len(ranks[rank]) - 1,)
        else:
            loose[rank].append(len(ranks[rank]) - 1)

    for _ in range(draw(st.integers(1, 12))):
        src, dst = draw(st.permutations([0, 1, 2]))[:2]
        for rank in (0, 1, 2):
            if draw(st.booleans()):
                if draw(st.booleans()):
                    front[rank], loose[rank] = (*front[rank], *loose[rank]), []
                work_ns = draw(st.integers(1, 4)) * 10**6
                add(rank, ProgramStep("work", front[rank], work_ns=work_ns, label="work"))
        size, tag = draw(st.integers(1, 3)) * 1000, draw(st.integers(0, 1))
        add(src, ProgramStep("send", front[src], peer=dst, tag=tag, size_bytes=size))
        add(dst, ProgramStep("recv", front[dst], peer=src, tag=tag, size_bytes=size))
    return ranks


@given(found=programs())
def test_any_program_runs_as_it_ran(found: list[list[ProgramStep]]) -> None:
    run = replay(
        [
            [*program, ProgramStep("work", tuple(range(len(program))), work_ns=10**6, label="end")]
            for program in found
        ],
        LINK,
    )
    again = run_again(run)
    ends = [
        trace.to_pandas().query("kind == 'span'").groupby("rank")["done_ns"].max().tolist()
        for trace in (run, again)
    ]
    assert ends[1] == pytest.approx(ends[0], abs=10)
    assert len(again.messages) == len(run.messages)


def test_a_thread_does_one_thing_at_a_time() -> None:
    works = [ProgramStep("work", work_ns=100), ProgramStep("work", work_ns=50)]
    other = ProgramStep("work", work_ns=30, thread=1)
    last = ProgramStep("work", (2,), work_ns=1)
    frame = replay([[*works, other, last]], LINK).to_pandas()
    spans = frame.sort_values(["post_ns", "done_ns"])[["thread", "post_ns", "done_ns"]]
    expected = [(1, 0, 30), (0, 0, 100), (0, 100, 150), (0, 150, 151)]
    assert [tuple(row) for row in spans.to_numpy().tolist()] == expected


def test_messages_with_one_tag_on_two_groups_do_not_meet() -> None:
    first, second = Group("first", (0, 1)), Group("second", (0, 1))
    sends = [
        ProgramStep("send", peer=1, group=first, size_bytes=1000),
        ProgramStep("send", (0,), peer=1, group=second, size_bytes=2000),
    ]
    recvs = [ProgramStep("recv", peer=0, group=second), ProgramStep("recv", peer=0, group=first)]
    trace = replay([sends, recvs], LINK)
    assert trace.events.done_ns[2:].tolist() == [4_000_000, 2_000_000]
    assert trace.unmatched == []


def test_a_rank_that_waits_for_ever_is_in_flight() -> None:
    late = [ProgramStep("recv", peer=0), ProgramStep("send", (0,), peer=0)]
    trace = replay([[ProgramStep("recv", peer=1)], late], LINK)
    assert [one.status for one in trace.unmatched] == ["in_flight", "in_flight"]
    assert "wait" in str(trace.explain())
