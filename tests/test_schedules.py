"""Schedules: drawn here as staircases, read and written as text, against torch's own; their closed forms against the evaluator.

torch 2.13's ``Schedule1F1B`` writes the last rank's row without its first forward and with one too many at the end, though it does not run
that row; so 1F1B is held against closed forms only. Its interleaved schedules want equal rounds, DualPipeV two microbatches a rank.
"""

from __future__ import annotations

import doctest
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _simulate_comms_compute, _validate_schedule

from ringsim.errors import ArgumentError, RingError, ScheduleError
from ringsim.schedules import SCHEDULE_NAMES, make_schedule
from ringsim.schedules.closed_forms import (
    Step,
    bubble_of_ideal,
    bubble_of_total,
    dualpipe_v_overlapped_idle,
    gpipe_makespan,
    idle,
    makespan,
    messages,
    one_f_one_b_bound,
    peak_live,
    span_idle,
)
from ringsim.schedules.costs import Costs
from ringsim.schedules.engine import Evaluation, evaluate
from ringsim.schedules.lowering import lower
from ringsim.schedules.schedule import (
    COMPUTE_KINDS,
    RECV_KINDS,
    SEND_KINDS,
    Action,
    Schedule,
    from_csv,
    from_text,
    parse_action,
    to_csv,
    to_text,
)

ALL = [(name, None) for name in SCHEDULE_NAMES] + [("interleaved_1f1b", 1), ("interleaved_1f1b", 3), ("looped_bfs", 3)]
# What each rank does at each unit of time, where F, I and W take one unit each, and B two; digits are microbatches, -- the rest of a B.
DRAWN = {
    ("gpipe", 3, 3): """
        F0 F1 F2 .. .. .. .. .. .. B0 -- B1 -- B2 --
        .. F0 F1 F2 .. .. .. B0 -- B1 -- B2 -- .. ..
        .. .. F0 F1 F2 B0 -- B1 -- B2 -- .. .. .. ..
    """,
    ("1f1b", 3, 4): """
        F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
        .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..
        .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..
    """,
    ("zb_h1", 3, 4): """
        F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
        .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """,
    ("zb_h2", 2, 4): """
        F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 ..
        .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """,
}
# The rows of schedules whose ranks have several stages, by a paper's figure or the steps of its text; the chunk of a rank as a prime.
ROWS = {
    ("interleaved_1f1b", 2, 4, 2): """
        F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3
        F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3
    """,
    ("looped_bfs", 2, 3, 2): """
        F0 F1 F2 F0' F1' F2' B2' B1' B0' B2 B1 B0
        F0 F1 F2 F0' F1' F2' B2' B1' B0' B2 B1 B0
    """,
    ("zb_v", 2, 3, None): """
        F0 F1 F2 F0' I0' W0' F1' I1' W1' I0 W0 F2' I2' W2' I1 W1 I2 W2
        F0 F0' F1 F1' I0' W0' F2 I0 W0 F2' I1' W1' I1 I2' I2 W1 W2' W2
    """,
    ("dualpipe_v", 2, 4, None): """
        F0 F1 F2 F0' I0' W0' F1' F3 B1' F2' B0 B2' F3' B1 B3' I2 W2 I3 W3
        F0 F0' F1 F1' F2 B0' F2' B0 F3 B1' F3' B1 B2' B2 I3' I3 W3' W3
    """,
}


def draw(schedule: Schedule) -> list[str]:
    """Draws a schedule with one stage a rank, by the clock of the evaluator."""
    evaluation = evaluate(schedule, Costs())
    rows = []
    for rank in range(schedule.num_ranks):
        units = [".."] * int(evaluation.makespan)
        for action, start, end in evaluation.get_computations(rank):
            units[int(start) : int(end)] = [f"{action.kind}{action.microbatch}", "--"][: int(end - start)]
        rows.append(" ".join(units))
    return rows


@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_staircase(case: tuple[str, int, int]) -> None:
    assert draw(make_schedule(*case)) == [line.strip() for line in DRAWN[case].strip().splitlines()]


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_rows_of_two_chunks(case: tuple[str, int, int, int | None]) -> None:
    schedule = make_schedule(*case)
    assert schedule.stage_ranks == ((0, 1, 0, 1) if case[3] else (0, 1, 1, 0))
    for rank, line in enumerate(ROWS[case].strip().splitlines()):
        chunks = schedule.stages_of(rank)
        shown = [f"{kind}{microbatch}{chr(39) * chunks.index(stage)}" for stage, kind, microbatch in schedule.actions[rank]]
        assert " ".join(shown) == line.strip()


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (("1f2b", 2, 2), ScheduleError, "a schedule must be one of .*1f1b.*, got '1f2b'"),
        (("zb_v", 2, 2, 3), ScheduleError, "num_chunks of zb_v must be 2, got 3. Leave it out, or take interleaved_1f1b or looped_bfs."),
        (("1f1b", 2, 2, 2), ScheduleError, "num_chunks of 1f1b must be 1, got 2"),
        (("gpipe", 2, 0), ArgumentError, "num_microbatches must be 1 or more, got 0"),
        (("looped_bfs", 2, 2, 0), ArgumentError, "num_chunks must be 1 or more, got 0"),
        (("dualpipe_v", -2, 1), ArgumentError, "num_ranks must be 1 or more, got -2"),
    ],
)
def test_refused(args: tuple[str, int, int], error: type[RingError], message: str) -> None:
    with pytest.raises(error, match=message):
        make_schedule(*args)


COUNTS = st.integers(0, 10**6)
KINDS = (*COMPUTE_KINDS, *SEND_KINDS, *RECV_KINDS)


@given(COUNTS, st.sampled_from(KINDS), COUNTS)
def test_text_gives_the_action_back(stage: int, kind: str, microbatch: int) -> None:
    action = Action(stage, kind, microbatch)
    assert parse_action(str(action)) == action
    assert action.is_compute == (kind in "FBIW")


@pytest.mark.parametrize("text", ["", "F0", "2F", "2BW0", "-1F0", "2f0", "2F0 ", "2F0\n", "2F0,2F1", "٢F0", "1UNSHARD", "1F" + "0" * 5000])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="an action must be a stage"):
        parse_action(text)


@pytest.mark.parametrize(
    ("one", "other"), [("1SEND_F3", "2RECV_F3"), ("1RECV_F3", "0SEND_F3"), ("1SEND_B3", "0RECV_B3"), ("1RECV_B3", "2SEND_B3")]
)
def test_forwards_go_up_and_gradients_come_down(one: str, other: str) -> None:
    assert str(parse_action(one).other_side) == other
    assert parse_action(other).other_side == parse_action(one)


def test_a_computation_has_no_other_side() -> None:
    with pytest.raises(ArgumentError, match="must be a send or a recv, got 1F0"):
        _ = Action(1, "F", 0).other_side


SCHEDULES = st.builds(make_schedule, st.sampled_from(SCHEDULE_NAMES), st.integers(1, 5), st.integers(1, 6))


@given(SCHEDULES, st.booleans())
def test_read_back_as_written(schedule: Schedule, with_messages: bool) -> None:
    schedule = lower(schedule) if with_messages else schedule
    assert from_text(to_text(schedule), name=schedule.name) == schedule
    assert from_csv(to_csv(schedule), name=schedule.name) == schedule


def test_pauses_and_overlapped_pairs_of_torch() -> None:
    schedule = from_csv("0UNSHARD,0F0,0F1,,(0F2;0B0)OVERLAP_F_B\r\n,1F0, 1B0 ,1REDUCE_GRAD\r\n")
    assert [" ".join(map(str, row)) for row in schedule.actions] == ["0F0 0F1 0F2 0B0", "1F0 1B0"]
    assert (schedule.num_microbatches, schedule.stage_ranks) == (3, (0, 1))
    assert from_text("  rank 0:  0F0  0B0\n\n rank 1: 1F0 1B0\n", name="gpipe") == make_schedule("gpipe", 2, 1)  # so do spaces in text


def test_a_rank_may_have_nothing_to_do() -> None:
    schedule = Schedule("own", 1, (0, 2), ((Action(0, "F", 0), Action(0, "B", 0)), (), (Action(1, "F", 0), Action(1, "B", 0))))
    assert from_text(to_text(schedule)) == schedule
    assert from_csv(to_csv(schedule)) == schedule


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (from_csv, "0F0,0B0\n1F0,1X0", r"an action must be .* got '1X0'. .*\(row 2, column 2\)"),
        (from_csv, "0F0,,0BW0", r"got '0BW0'.*\(row 1, column 3\)"),
        (from_csv, "0F0,(0F1;oops)OVERLAP_F_B", r"got 'oops'.*\(row 1, column 2\)"),
        (from_csv, "0F0,0B0\n1F0,0F1", r"a stage must be on one rank, got 0F1 on rank 1 where stage 0 is on rank 0 \(row 2, column 2\)"),
        (from_csv, "0F0,0B0\n2F0,2B0", "stages must be numbered from 0 without gaps, got 2 and no stage 1"),
        (from_csv, "999999999F0", "got 999999999 and no stage 0"),
        (from_csv, ",,\n,,", "at least one action, got none"),
        (from_csv, '0F0,"0B0', "must be CSV, got text that is not"),
        (from_text, "", "at least one action, got none"),
        (from_text, "rank 0: 0F0 0B0\nrank 2: 1F0 1B0", r"a line must begin with 'rank 1:', got 'rank 2: 1F0 1B0' \(line 2\)"),
        (from_text, "0F0 0B0", r"a line must begin with 'rank 0:', got '0F0 0B0' \(line 1\)"),
        (from_text, "rank 0: 0F0 0B0\nrank 1: 1F0 1Q0", r"got '1Q0'.*\(row 2, column 2\)"),
    ],
)
def test_text_that_is_no_schedule(read: Callable[[str], Schedule], text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        read(text)


@given(st.text(alphabet="0123FBIW(;)OVERLAP_SENDRC, \n\"'", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (from_csv, from_text):
        try:
            schedule = read(text)
        except ScheduleError:
            continue
        assert schedule.num_stages > 0
        assert from_csv(to_csv(schedule)).actions == schedule.actions


SAME = [
    ("GPipe", "gpipe", 1),
    ("Interleaved1F1B", "interleaved_1f1b", 2),
    ("Interleaved1F1B", "interleaved_1f1b", 3),
    ("LoopedBFS", "looped_bfs", 2),
    ("LoopedBFS", "looped_bfs", 3),
    ("ZBVZeroBubble", "zb_v", 2),
    ("DualPipeV", "dualpipe_v", 2),
]


def allowed(name: str, num_ranks: int, num_microbatches: int) -> bool:
    """Whether torch makes the schedule for so many microbatches."""
    if name == "interleaved_1f1b":
        return num_microbatches % max(1, num_microbatches // num_ranks) == 0
    return name != "dualpipe_v" or num_microbatches >= 2 * num_ranks


@pytest.mark.parametrize(("theirs", "name", "num_chunks"), SAME)
def test_order_is_that_of_torch(theirs: str, name: str, num_chunks: int) -> None:
    for num_ranks in (1, 2, 3, 4, 6):
        for num_microbatches in (1, 2, 3, 4, 6, 8, 9, 13):
            if allowed(name, num_ranks, num_microbatches):
                rows = get_schedule_ops(theirs, num_ranks, num_microbatches, num_stages_per_rank=num_chunks)
                text = "\n".join(",".join("" if action is None else str(action) for action in row) for row in rows)
                schedule = make_schedule(name, num_ranks, num_microbatches, num_chunks)
                assert from_csv(text, name=name) == schedule, (num_ranks, num_microbatches)


def channels(rows: Sequence[Sequence[Action]], stage_ranks: Sequence[int]) -> dict[tuple[int, int], list[Action]]:
    """Lists, for each rank that receives from another, its receives in order."""
    found: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if action.kind in RECV_KINDS:
                found.setdefault((stage_ranks[action.other_side.stage], rank), []).append(action)
    return found


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_torch_accepts_every_schedule_and_lowers_it_alike(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for p, m in [(1, 1), (2, 3), (3, 2), (4, 8), (5, 12)]:
        schedule = make_schedule(name, p, m)
        owner_of = schedule.stage_ranks.__getitem__
        rows = {rank: [_Action.from_str(cell) for cell in line.split(",")] for rank, line in enumerate(to_csv(schedule).splitlines())}
        owners = _validate_schedule(rows, p, schedule.num_stages, m)
        assert tuple(owners[stage] for stage in range(schedule.num_stages)) == schedule.stage_ranks
        lowered = _add_send_recv(rows, owner_of, schedule.num_stages)
        theirs = [[parse_action(str(action)) for action in lowered[rank]] for rank in range(p)]
        ours = lower(schedule)
        assert channels(theirs, schedule.stage_ranks) == channels(ours.actions, schedule.stage_ranks)
        for mine, other in zip(ours.actions, theirs, strict=True):
            assert [action for action in mine if action.kind not in RECV_KINDS] == [one for one in other if one.kind not in RECV_KINDS]
        # Its dry run ends a receive only when the message is sent, wherever the receive stands: a rank that waits at once.
        at_once = lower(schedule, ahead=0)
        done = _simulate_comms_compute(
            {rank: [_Action.from_str(str(action)) for action in row] for rank, row in enumerate(at_once.actions)},
            owner_of,
            schedule.num_stages,
        )
        assert [sum(action is not None for action in done[rank]) for rank in range(p)] == [len(row) for row in at_once.actions]
        assert capsys.readouterr().out == ""  # where it is stuck, it says so and raises


@pytest.mark.parametrize(("num_ranks", "num_microbatches", "pair"), [(4, 8, 3), (2, 4, 3), (3, 9, 3), (4, 20, 3), (1, 2, 3)])
def test_overlapped_pairs_of_dualpipe_v(num_ranks: int, num_microbatches: int, pair: int) -> None:
    """A pair as one block, whose messages leave when both are done: timed here, as the evaluator knows no pairs."""
    rows = get_schedule_ops("DualPipeV", num_ranks, num_microbatches, num_stages_per_rank=2)
    blocks = [[[str(one) for one in action.sub_actions or [action]] for action in row if action is not None] for row in rows]
    last = 2 * num_ranks - 1
    done: dict[str, int] = {}
    clocks = [0] * num_ranks

    def needs(text: str) -> list[str]:
        stage, kind, microbatch = parse_action(text)
        if kind == "W":
            return [f"{stage}I{microbatch}"]
        if kind == "F":
            return [f"{stage - 1}F{microbatch}"] if stage else []
        return [f"{stage}F{microbatch}"] + ([f"{stage + 1}I{microbatch}"] if stage < last else [])

    while any(blocks):
        for rank, row in enumerate(blocks):
            while row and all(need in done for one in row[0] for need in needs(one)):
                block = row.pop(0)
                start = max([clocks[rank], *(done[need] for one in block for need in needs(one))])
                clocks[rank] = start + (pair if len(block) == 2 else {"F": 1, "B": 2, "I": 1, "W": 1}[parse_action(block[0]).kind])
                for one in block:
                    done[one] = clocks[rank]
                    done[one.replace("B", "I")] = clocks[rank]  # B makes what the stage before waits for, too
    work = 6 * num_microbatches
    assert max(clocks) - work == dualpipe_v_overlapped_idle(num_ranks, pair, backward=2, weight=1)


SECTION = (Path(__file__).parent.parent / "docs" / "pipeline.md").read_text().partition("\n## Schedules\n")[2].partition("\n## ")[0]


def test_examples_of_the_page_run() -> None:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL))
    test = doctest.DocTestParser().get_doctest(code, {}, "schedules", "docs/pipeline.md", 0)
    assert doctest.DocTestRunner().run(test) == (0, len(test.examples))
    assert len(test.examples) > 5


def test_numbers_of_the_table() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if line.startswith("| `")]
    names = [row[0].split("`")[1] for row in rows]
    assert set(names) == set(SCHEDULE_NAMES) - {"afab"}
    for name, (_, *cells) in zip(names, rows, strict=True):
        step = Step(name, 4, 8)
        share = step.stages_a_rank  # the table's unit is the time of all stages of a rank
        expected = [
            [Fraction(value, share) for value in values] for values in ([makespan(step)], [idle(step)], [span_idle(step)], peak_live(step))
        ]
        assert [[Fraction(value) for value in cell.split(", ")] for cell in cells[:4]] == expected
        assert int(cells[4]) == sum(messages(step))


TIMES = st.integers(0, 12) | st.fractions(Fraction(1, 9), 9, max_denominator=9)
LEAST = {"zb_h1": lambda p: p, "zb_h2": lambda p: 2 * p - 1, "zb_v": lambda p: 2 * p - 1, "dualpipe_v": lambda p: 2 * p}


def make(step: Step) -> Evaluation:
    """Evaluates a step with the default costs."""
    return evaluate(make_schedule(step.name, step.num_ranks, step.num_microbatches, step.num_chunks))


def test_known_points() -> None:
    """4 ranks, 8 microbatches, F = I = W = 1: typed out, by makespan and by span."""
    known = {"gpipe": (33, 9), "1f1b": (33, 9), "interleaved_1f1b": (57, 9), "looped_bfs": (57, 9), "zb_h1": (27, 3), "zb_h2": (27, 0)}
    for name, points in (known | {"zb_v": (51, 0), "dualpipe_v": (51, 3)}).items():
        step = Step(name, 4, 8)
        assert (makespan(step), span_idle(step)) == (make(step).makespan, max(make(step).span_idle)) == points
    assert makespan(Step("1f1b", 1024, 8192)) == 3 * (1024 + 8192 - 1)  # a large step costs nothing


@pytest.mark.parametrize(("name", "num_chunks"), ALL)
def test_every_form_is_what_the_evaluator_finds(name: str, num_chunks: int | None) -> None:
    for p, m in product((1, 2, 3, 4, 6), (1, 2, 3, 4, 5, 6, 7, 8, 11, 13)):
        step = Step(name, p, m, num_chunks)
        evaluation = make(step)
        counted = [sum(message.source == rank for message in evaluation.messages) for rank in range(p)]
        assert list(messages(step)) == counted, step
        if name not in ("zb_v", "dualpipe_v"):
            assert peak_live(step) == evaluation.peak_live, step
        if m < LEAST.get(name, lambda p: 1)(p):
            with pytest.raises(ScheduleError, match="for its closed form"):
                makespan(step)
            continue
        assert makespan(step) == evaluation.makespan, step
        assert set(evaluation.idle) == {idle(step)}, step
        assert max(evaluation.span_idle) == span_idle(step), step
        assert peak_live(step) == evaluation.peak_live, step


@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 5), st.integers(0, 6), st.tuples(TIMES, TIMES, TIMES))
def test_any_costs(name: str, p: int, more: int, times: tuple[int | Fraction, ...]) -> None:
    m = LEAST.get(name, lambda p: 1)(p) + more
    costs = Costs(*(times[:1] * 3 if name in ("zb_v", "dualpipe_v") else times))  # equal ones alone have a form there
    evaluation = evaluate(make_schedule(name, p, m), costs)
    assert makespan(Step(name, p, m), costs) == evaluation.makespan
    assert span_idle(Step(name, p, m), costs) == max(evaluation.span_idle)


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(1, 16), TIMES, TIMES, st.integers(0, 200))
def test_messages_that_take_time(name: str, p: int, m: int, forward: int | Fraction, backward: int | Fraction, latency: int) -> None:
    costs = Costs(forward=forward, backward=backward, latency=latency)
    schedule = make_schedule(name, p, m)
    assert makespan(Step(name, p, m), costs) == evaluate(schedule, costs, "buffered").makespan
    assert makespan(Step(name, p, m), costs, "rendezvous") == evaluate(lower(schedule, ahead=0), costs, "rendezvous").makespan


@given(st.integers(1, 10), st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=6), st.integers(0, 20))
def test_stages_that_differ(m: int, stages: list[tuple[int, int]], latency: int) -> None:
    forward, backward = map(list, zip(*stages, strict=True))
    costs = Costs(forward=forward, backward=backward, latency=latency)
    assert gpipe_makespan(m, forward, backward, latency) == evaluate(make_schedule("gpipe", len(stages), m), costs, "buffered").makespan
    bound = one_f_one_b_bound(m, forward, backward)
    found = evaluate(make_schedule("1f1b", len(stages), m), costs, "buffered").makespan
    assert bound <= found
    if len(set(stages)) == 1 and latency == 0:
        assert (
            gpipe_makespan(m, forward, backward) == found == makespan(Step("1f1b", len(stages), m), Costs(forward[0], backward=backward[0]))
        )


def test_both_ways_to_say_a_bubble() -> None:
    step = Step("1f1b", 4, 8)
    assert bubble_of_ideal(step) == Fraction(3, 8)  # (p-1) / m
    assert bubble_of_total(step) == Fraction(3, 11)  # (p-1) / (m+p-1)
    assert bubble_of_ideal(Step("interleaved_1f1b", 4, 8, 3)) == Fraction(3, 24)  # (p-1) / (m v)
    assert bubble_of_total(step, Costs(forward=0.5, backward=1.0)) == pytest.approx(3 / 11)
    assert bubble_of_total(Step("1f1b", 1, 8)) == 0
    assert bubble_of_ideal(step, Costs(0, 0, 0)) == 0


@pytest.mark.parametrize(
    ("step", "costs", "message"),
    [
        (Step("zb_h1", 4, 3), Costs(), "num_microbatches of zb_h1 on 4 ranks must be 4 or more for its closed form, got 3"),
        (Step("zb_v", 4, 8), Costs(forward=2), "f, i, w of zb_v must be equal for its closed form, got 2, 1, 1"),
        (Step("dualpipe_v", 2, 8), Costs(backward=3), r"must be equal for its closed form, got 1, 1, 1 \(and b = 3\)"),
        (Step("1f1b", 2, 8), Costs(forward=[1, 2]), "costs must be the same for all stages"),
        (Step("zb_h2", 2, 8), Costs(latency=1), "latency of zb_h2 must be 0 for its closed form, got 1"),
    ],
)
def test_no_formula(step: Step, costs: Costs, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        makespan(step, costs)


def test_steps_are_checked() -> None:
    with pytest.raises(ScheduleError, match="a schedule must be one of"):
        Step("own", 2, 2)
    with pytest.raises(ScheduleError, match="num_chunks of zb_v must be 2, got 1"):
        Step("zb_v", 2, 2, 1)
    with pytest.raises(ArgumentError, match="num_ranks must be 1 or more, got 0"):
        Step("gpipe", 0, 2)
    with pytest.raises(ArgumentError, match="semantics must be one of rendezvous, buffered, got 'grouped'"):
        makespan(Step("gpipe", 2, 2), semantics="grouped")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="one time a stage each, got 2 and 1"):
        gpipe_makespan(2, [1, 2], [1])
    with pytest.raises(ArgumentError, match="must be 1 or more, got 0"):
        one_f_one_b_bound(0, [1], [1])
