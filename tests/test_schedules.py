"""Schedules drawn here as staircases, read and written as text, and compared with torch's.

Their closed forms are compared with the evaluator. torch 2.13's ``Schedule1F1B`` writes the last
rank's row without its first forward and with an extra one at the end, though it does not run that
row; so 1F1B is compared only with closed forms. torch's interleaved schedules need equal rounds,
its DualPipeV two microbatches per rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _simulate_comms_compute,
    _validate_schedule,
)

from ringsim import simulate_schedule
from ringsim.errors import ArgumentError, Deadlock, ScheduleError
from ringsim.pipeline import closed_forms as forms
from ringsim.schedules import (
    SCHEDULE_NAMES,
    Action,
    Costs,
    Schedule,
    evaluate,
    from_csv,
    from_text,
    lower,
    lower_in_step,
    make_schedule,
    parse_action,
    to_csv,
    to_text,
    validate,
)

Step, makespan = forms.Step, forms.makespan
ALL = [(name, None) for name in SCHEDULE_NAMES] + [
    ("interleaved_1f1b", 1),
    ("interleaved_1f1b", 3),
    ("looped_bfs", 3),
]
CLOSED = "for the closed form of"
# Schedules that torch lacks: each rank at each unit of time, where F, I and W take one unit, and B
# two; digits are microbatches, -- the rest of a B.
DRAWN = {
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


def typed(stage_ranks: str, num_microbatches: int, *rows: str) -> Schedule:
    """Makes a schedule from rows of actions and the rank of each stage."""
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    return Schedule("typed", num_microbatches, tuple(map(int, stage_ranks.split())), actions)


def read_table(table: str) -> list[tuple[Schedule, str]]:
    """Reads schedules, "ranks of the stages | microbatches | row / row", each above its error."""
    lines = [line.strip() for line in table.strip().splitlines()]
    found = []
    for case, words in zip(lines[::2], lines[1::2], strict=True):
        stage_ranks, count, rows = case.split("|")
        found.append((typed(stage_ranks, int(count), *rows.split("/")), words))
    return found


@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_staircase(case: tuple[str, int, int]) -> None:
    schedule = make_schedule(*case)
    assert [[str(action)[1:] for action in row] for row in schedule.actions] == [
        [word for word in line.split() if word.isalnum()] for line in DRAWN[case].split("\n")[1:-1]
    ]


# -- as text

SCHEDULES = st.builds(
    make_schedule, st.sampled_from(SCHEDULE_NAMES), st.integers(1, 5), st.integers(1, 6)
)


def test_other_text_is_refused() -> None:
    others = ("", "F0", "2F", "-1F0", "2f0", "2F0\n", "2F0,2F1", "٢F0", "1UNSHARD")
    for text in (*others, "1F" + "0" * 5000):
        with pytest.raises(ScheduleError, match="an action must consist of a stage"):
            parse_action(text)


def test_forwards_go_up_and_gradients_come_down() -> None:
    for pair in ("1SEND_F3 2RECV_F3", "1SEND_B3 0RECV_B3"):
        one, other = map(parse_action, pair.split())
        assert (one.other_side, other.other_side) == (other, one)


@given(SCHEDULES, st.booleans())
def test_read_back_as_written(schedule: Schedule, with_messages: bool) -> None:
    schedule = lower(schedule) if with_messages else schedule
    assert from_text(to_text(schedule), name=schedule.name) == schedule
    assert from_csv(to_csv(schedule), name=schedule.name) == schedule


def test_pauses_and_shards_of_torch_and_ranks_without_work() -> None:
    schedule = from_csv("0UNSHARD,0F0,0F1,,0F2,0B0\r\n,1F0, 1B0 ,1REDUCE_GRAD\r\n")
    assert schedule.actions == typed("0 1", 3, "0F0 0F1 0F2 0B0", "1F0 1B0").actions
    assert (schedule.num_microbatches, schedule.stage_ranks) == (3, (0, 1))
    spaced = from_text("  rank 0:  0F0  0B0\n\n rank 1: 1F0 1B0\n", name="gpipe")
    assert spaced == make_schedule("gpipe", 2, 1)
    idle = replace(typed("0 2", 1, "0F0 0B0", "", "1F0 1B0"), name="own")
    assert from_text(to_text(idle)) == from_csv(to_csv(idle)) == idle


@given(st.text(alphabet="0123FBIW(;)OVERLAP_SENDRC, \n\"'", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (from_csv, from_text):
        try:
            schedule = read(text)
        except ScheduleError:
            continue
        assert schedule.num_stages > 0
        assert from_csv(to_csv(schedule)).actions == schedule.actions


# -- compared with torch's

SAME = [
    ("GPipe", "gpipe", 1),
    ("Interleaved1F1B", "interleaved_1f1b", 2),
    ("Interleaved1F1B", "interleaved_1f1b", 3),
    ("LoopedBFS", "looped_bfs", 2),
    ("LoopedBFS", "looped_bfs", 3),
    ("ZBVZeroBubble", "zb_v", 2),
    ("DualPipeV", "dualpipe_v", 2),
]


def torch_makes(name: str, num_ranks: int, num_microbatches: int) -> bool:
    """Returns whether torch can make the schedule for this number of microbatches."""
    if name == "interleaved_1f1b":
        return num_microbatches % max(1, num_microbatches // num_ranks) == 0
    return name != "dualpipe_v" or num_microbatches >= 2 * num_ranks


@pytest.mark.parametrize(("theirs", "name", "num_chunks"), SAME)
def test_order_is_that_of_torch(theirs: str, name: str, num_chunks: int) -> None:
    for p, m in product((1, 2, 3, 4), (1, 2, 3, 4, 6, 8, 13)):
        if torch_makes(name, p, m):
            rows = get_schedule_ops(theirs, p, m, num_stages_per_rank=num_chunks)
            cells = [["" if action is None else str(action) for action in row] for row in rows]
            theirs_read = from_csv("\n".join(map(",".join, cells)), name=name)
            ours = make_schedule(name, p, m, num_chunks)
            assert (theirs_read, to_csv(theirs_read)) == (ours, to_csv(ours)), (p, m)


def receives(rows: Sequence[Sequence[Action]]) -> dict[tuple[int, str], list[Action]]:
    """Lists, for each rank, its receives from each stage in order."""
    found: dict[tuple[int, str], list[Action]] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if action.kind.startswith("RECV"):
                found.setdefault((rank, action.other_side.stage), []).append(action)
    return found


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_torch_accepts_every_schedule_and_lowers_it_alike(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for p, m in [(1, 1), (2, 3), (3, 2), (4, 8), (5, 12)]:
        schedule = make_schedule(name, p, m)
        owner_of = schedule.stage_ranks.__getitem__
        lines = to_csv(schedule).splitlines()
        rows = {rank: [*map(_Action.from_str, line.split(","))] for rank, line in enumerate(lines)}
        owners = _validate_schedule(rows, p, schedule.num_stages, m)
        assert tuple(owners[stage] for stage in range(schedule.num_stages)) == schedule.stage_ranks
        lowered = _add_send_recv(rows, owner_of, schedule.num_stages)
        theirs = [
            [
                parse_action(str(one))
                for each in lowered[rank]
                for one in each.sub_actions or (each,)
            ]
            for rank in range(p)
        ]
        ours = lower(schedule, overlap=True)
        assert receives(theirs) == receives(ours.actions)
        for mine, other in zip(ours.actions, theirs, strict=True):
            assert [one for one in mine if not one.kind.startswith("RECV")] == [
                one for one in other if not one.kind.startswith("RECV")
            ]
        # Its dry run ends a receive only when the message is sent, wherever the receive is placed,
        # like a rank that waits immediately.
        at_once = lower(schedule, ahead=0).actions
        texts = {rank: [*map(_Action.from_str, map(str, row))] for rank, row in enumerate(at_once)}
        done = _simulate_comms_compute(texts, owner_of, schedule.num_stages)
        counts = [sum(action is not None for action in done[rank]) for rank in range(p)]
        assert counts == [*map(len, at_once)]
        assert capsys.readouterr().out == ""  # if it is stuck, it prints that and raises


# -- closed forms


def test_numbers_of_the_table() -> None:
    page = (Path(__file__).parent.parent / "docs" / "explanation" / "pipelines.md").read_text()
    section = page.partition("\n## Schedules\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .*?`(\w+)`.*?\| (.*) \|$", section, re.MULTILINE)
    assert {name for name, _ in rows} == set(SCHEDULE_NAMES) - {"afab"}
    for name, line in rows:
        cells, step = line.split(" | "), Step(name, 4, 8)
        share = step.stages_a_rank  # the table's unit is the time of all stages of a rank
        times = [makespan(step)], [forms.idle(step)], [forms.span_idle(step)], forms.peak_live(step)
        expected = [[Fraction(value, share) for value in values] for values in times]
        assert [[Fraction(value) for value in cell.split(", ")] for cell in cells[:4]] == expected
        assert int(cells[4]) == sum(forms.messages(step))


TIMES = st.integers(0, 12) | st.fractions(Fraction(1, 9), 9, max_denominator=9)


def fewest(name: str, p: int) -> int:
    """Returns the least number of microbatches for which a schedule has its closed form."""
    return {"zb_h1": p, "zb_h2": 2 * p - 1, "zb_v": 2 * p - 1, "dualpipe_v": 2 * p}.get(name, 1)


@pytest.mark.parametrize(("name", "num_chunks"), ALL)
def test_every_form_is_what_the_evaluator_finds(name: str, num_chunks: int | None) -> None:
    for p, m in product((1, 2, 3, 4, 6), (1, 2, 3, 4, 5, 6, 7, 8, 11, 13)):
        step = Step(name, p, m, num_chunks)
        found = evaluate(make_schedule(name, p, m, num_chunks))
        sources = [message.source for message in found.messages]
        assert list(forms.messages(step)) == [*map(sources.count, range(p))], step
        if name not in ("zb_v", "dualpipe_v"):
            assert forms.peak_live(step) == found.peak_live, step
        if m < fewest(name, p):
            with pytest.raises(ScheduleError, match=rf"{CLOSED} {name} on {p} ranks?, got {m}\."):
                makespan(step)
            continue
        assert makespan(step) == found.makespan, step
        assert set(found.idle) == {forms.idle(step)}, step
        assert max(found.span_idle) == forms.span_idle(step), step
        assert forms.peak_live(step) == found.peak_live, step


@given(
    st.sampled_from(SCHEDULE_NAMES),
    st.integers(1, 5),
    st.integers(0, 6),
    st.tuples(TIMES, TIMES, TIMES),
)
def test_any_costs(name: str, p: int, more: int, times: tuple[int | Fraction, ...]) -> None:
    m = fewest(name, p) + more
    # a closed form exists only if all are equal
    costs = Costs(*(times[:1] * 3 if name in ("zb_v", "dualpipe_v") else times))
    evaluation = evaluate(make_schedule(name, p, m), costs)
    assert makespan(Step(name, p, m), costs) == evaluation.makespan
    assert forms.span_idle(Step(name, p, m), costs) == max(evaluation.span_idle)


@given(
    st.sampled_from(["gpipe", "1f1b"]),
    st.integers(1, 8),
    st.integers(1, 16),
    st.builds(Costs, forward=TIMES, backward=TIMES, latency=st.integers(0, 200)),
)
@example("1f1b", 4, 5, Costs(latency=7))  # where each case of the closed form begins
@example("1f1b", 2, 6, Costs(latency=7))
@example("1f1b", 4, 1, Costs(latency=7))
@example("gpipe", 4, 5, Costs(latency=7))
def test_messages_that_take_time(name: str, p: int, m: int, costs: Costs) -> None:
    step, schedule = Step(name, p, m), make_schedule(name, p, m)
    assert makespan(step, costs) == evaluate(schedule, costs, "buffered").makespan
    at_once = evaluate(lower(schedule, ahead=0), costs, "rendezvous")
    assert makespan(step, costs, "rendezvous") == at_once.makespan
    # posting a receive earlier never costs time, and at the very start it delays no message
    times = [evaluate(lower(schedule, ahead=ahead), costs).makespan for ahead in (0, 1, 2, 1000)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == makespan(step, costs)


@given(
    st.integers(1, 10),
    st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=6),
    st.integers(0, 20),
)
def test_stages_that_differ(m: int, stages: list[tuple[int, int]], latency: int) -> None:
    forward, backward = map(list, zip(*stages, strict=True))
    costs = Costs(forward=forward, backward=backward, latency=latency)
    gpipe, one_f_one_b = (
        evaluate(make_schedule(name, len(stages), m), costs, "buffered").makespan
        for name in ("gpipe", "1f1b")
    )
    assert forms.gpipe_makespan(m, forward, backward, latency) == gpipe
    assert forms.one_f_one_b_bound(m, forward, backward) <= one_f_one_b
    if len(set(stages)) == 1 and latency == 0:
        alike = Costs(forward[0], backward=backward[0])
        assert gpipe == one_f_one_b == makespan(Step("1f1b", len(stages), m), alike)


def test_a_step_without_gaps_or_work_has_no_bubble() -> None:
    assert forms.bubble_of_total(Step("1f1b", 1, 8)) == 0
    assert forms.bubble_of_ideal(Step("1f1b", 4, 8), Costs(0, 0, 0)) == 0


# -- lowered to messages

# ranks of the stages, computations | receives posted ahead | with messages
LOWERED = """
0 1 | 0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1 | 0
    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
0 1 | 0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1 | 1
    0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1
    1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
0 1 | 0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1 | 9
    0RECV_B0 0RECV_B1 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0B1
    1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1
0 1 1 0 | 0F0 3F0 3I0 0I0 3W0 0W0 / 1F0 2F0 2I0 1I0 2W0 1W0 | 0
    0F0 0SEND_F0 3RECV_F0 3F0 3I0 3SEND_B0 0RECV_B0 0I0 3W0 0W0
    1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2I0 1I0 1SEND_B0 2W0 1W0
0 1 | 0F0 0F1 0B1 0B0 / 1F1 1B1 1F0 1B0 | 0
    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B1 0RECV_B0 0B0
    1RECV_F0 1RECV_F1 1F1 1B1 1SEND_B1 1F0 1B0 1SEND_B0
"""  # in the last, rank 1 needs the second message first


def test_messages_are_written_down_where_they_are_posted() -> None:
    lines = LOWERED.strip().splitlines()
    for case, *rows in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        stage_ranks, computations, ahead = case.split("|")
        microbatches = 1 + ("0F1" in computations)
        schedule = typed(stage_ranks, microbatches, *computations.split("/"))
        lowered = lower(schedule, ahead=int(ahead))
        assert [" ".join(map(str, row)) for row in lowered.actions] == [*map(str.strip, rows)]
        assert lower(lowered) == lower_in_step(lowered) == lowered
        validate(lowered)
    within_a_rank = typed("0 0", 1, "0F0 1F0 1B0 0B0")
    assert lower(within_a_rank).actions == within_a_rank.actions


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_posting_a_receive_earlier_never_costs_time(name: str) -> None:
    costs = Costs(forward=3, input=3, weight=2, latency=2)
    for p, m in product((2, 3, 5), (1, 3, 8)):
        schedule = make_schedule(name, p, m)
        times = [evaluate(lower(schedule, ahead=k), costs).makespan for k in (0, 1, 2, 1000)]
        assert times == sorted(times, reverse=True)
        # if posted at the very start, no receive delays a message
        assert times[-1] == evaluate(schedule, costs, "buffered").makespan
        if name == "gpipe" and m > 1:
            # one computation ahead is enough if it lasts longer than the message
            assert times[0] > times[1] == times[-1]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_pair_posts_in_one_order(name: str) -> None:
    for p, m in product((1, 2, 3, 4, 6), (1, 2, 3, 5, 8)):
        schedule = make_schedule(name, p, m)
        in_step = lower_in_step(schedule)
        rows = [tuple(action for action in row if action.is_compute) for row in in_step.actions]
        assert rows == list(schedule.actions)
        posts: dict[tuple[int, int], list[Action]] = {}
        for rank, row in enumerate(in_step.actions):
            for action in row:
                if not action.is_compute:
                    other = action.other_side
                    sent = other if action.kind.startswith("RECV") else action
                    posts.setdefault((rank, schedule.stage_ranks[other.stage]), []).append(sent)
        assert all(posts[peer, rank] == messages for (rank, peer), messages in posts.items())
        validate(in_step)
        # no time if messages take none
        assert evaluate(in_step).makespan == evaluate(schedule).makespan
        costs = Costs(latency=3)
        assert evaluate(in_step, costs).makespan >= evaluate(schedule, costs, "buffered").makespan


# -- refused schedules

BROKEN = read_table("""
0 | 0 |
    num_microbatches must be at least 1, got 0
0 2 | 1 | 0F0 0B0 /
    the rank of stage 1 must be non-negative and below 2, got 2
0 | 1 | 0F0 1F0 0B0
    the stage of 1F0 must be non-negative and below 1, got 1 (rank 0, position 1)
0 1 | 1 | 0F0 0B0 1F0 / 1B0
    1F0 is on rank 0, but stage 1 is on rank 1 (rank 0, position 2)
0 | 1 | 0F0 0B0 0F1 0B1
    the microbatch of 0F1 must be non-negative and below 1, got 1 (rank 0, position 2)
0 | 1 | 0F0 0B0 0B0
    the schedule lists 0B0 twice (rank 0, position 2)
0 | 1 | 0F0 0I0 0W0 0B0
    the schedule lists 0B0 after 0I0, but B already contains I and W (rank 0, position 3)
0 0 | 1 | 0F0 0SEND_F0 1F0 1B0 0B0
    the other side of 0SEND_F0 would be stage 1, which is also on rank 0 (rank 0, position 1)
0 1 | 1 | 0F0 0SEND_B0 / 1F0
    the other side of 0SEND_B0 would be stage -1, which does not exist (rank 0, position 1)
0 | 1 | 0B0 0F0
    0B0 needs 0F0, which comes later or is missing (rank 0, position 0)
0 | 1 | 0F0 0W0 0I0
    0W0 needs 0I0, which comes later or is missing (rank 0, position 1)
0 0 | 1 | 1F0 0F0 1B0 0B0
    1F0 needs 0F0, which comes later or is missing (rank 0, position 0)
0 0 | 1 | 0F0 1F0 0B0 1B0
    0B0 needs 1B0 or 1I0, which comes later or is missing (rank 0, position 2)
0 1 | 1 | 0SEND_F0 0F0 0RECV_B0 0B0 / 1RECV_F0 1F0 1B0 1SEND_B0
    0SEND_F0 needs 0F0, which comes later or is missing (rank 0, position 0)
0 1 | 1 | 0F0 0SEND_F0 0RECV_B0 0B0 / 1F0 1RECV_F0 1B0 1SEND_B0
    1F0 needs 1RECV_F0, which comes later or is missing (rank 1, position 0)
0 1 | 1 | 0F0 0SEND_F0 0RECV_B0 0B0 / 1RECV_F0 1F0 1B0
    0RECV_B0 needs 1SEND_B0 on the other side, but meets nothing (rank 0, position 2, from rank 1)
""")
BROKEN.append((Schedule("x", 1, (0,), ((Action(0, "G", 0),),)), "got 0G0 (rank 0, position 0)"))
INCOMPLETE = read_table("""
0 1 | 2 | 0F0 0F1 0B0 0B1 / 1F0 1B0
    stage 1 has no forward pass for microbatch 1 (rank 1). Add 1F1
0 | 1 | 0F0
    stage 0 has no backward pass for microbatch 0 (rank 0). Add 0B0, or 0I0 and 0W0
0 | 1 | 0F0 0I0
    stage 0 does not compute its weights' gradients for microbatch 0 (rank 0). Add 0W0 after 0I0
""")
PARTS = read_table("""
0 1 | 1 | 0F0 0SEND_F0 /
    0SEND_F0 needs 1RECV_F0 on the other side, but meets nothing
0 1 | 2 | 0F0 0F1 0SEND_F0 0SEND_F1 / 1RECV_F1 1RECV_F0 1F0 1F1
    0SEND_F0 needs 1RECV_F0 on the other side, but meets 1RECV_F1
""")  # parts of a step, for which only the timing finds the error
NEVER_MEET = read_table("""
0 1 | 1 | 0F0 0B0 / 1B0
    0SEND_F0 sends a message that stage 1 does not need (rank 0, after 0F0)
0 1 | 1 | 0B0 / 1F0 1B0
    1F0 needs 0SEND_F0, which is missing (rank 1)
0 1 | 1 | 0F0 0B0 / 1F0 1B0 1I0
    two computations produce the data for 1SEND_B0; the second is 1I0 (rank 1)
0 1 | 1 | 0F0 0B0 0I0 / 1F0 1B0
    two computations need 0RECV_B0; the second is 0I0 (rank 0)
""")


@pytest.mark.parametrize(
    ("calls", "cases"),
    [
        ([validate], [*BROKEN, *INCOMPLETE]),
        ([evaluate, simulate_schedule], [*BROKEN, *PARTS]),
        ([lower], NEVER_MEET),
    ],
)
def test_a_schedule_that_breaks_a_rule_is_refused(
    calls: list[Callable[[Schedule], object]], cases: list[tuple[Schedule, str]]
) -> None:
    for call in calls:
        for schedule, words in cases:
            with pytest.raises(ScheduleError) as refused:
                call(schedule)
            assert words in str(refused.value)


# Each rank's own order is fine, but rank 0 needs the gradient of microbatch 1 before it sends
# microbatch 0, and rank 1 the other way around.
CIRCLE = typed("0 1", 2, "0F1 0B1 0F0 0B0", "1F0 1B0 1F1 1B1")


@pytest.mark.parametrize("semantics", ["rendezvous", "buffered"])
def test_says_who_waits_for_whom(semantics: forms.Semantics) -> None:
    with pytest.raises(ScheduleError) as refused:
        validate(CIRCLE)
    assert str(refused.value) == (
        "the schedule cannot finish, because ranks wait for each other: rank 0 waits in 0B1 for "
        "1SEND_B1 on rank 1; rank 1 waits in 1F0 for 0SEND_F0 on rank 0. Move one of the awaited "
        "actions earlier. The first action that waits is 0B1 (rank 0, position 1)."
    )
    one_f_one_b = make_schedule("1f1b", 4, 4)
    turned = tuple(map(parse_action, "0F3 0B3 0F0 0B0 0F1 0B1 0F2 0B2".split()))
    # ranks 2 and 3 also wait, but not in the cycle
    larger = replace(one_f_one_b, actions=(turned, *one_f_one_b.actions[1:]))
    what_ifs = partial(simulate_schedule, costs=[Costs(), Costs()])
    for schedule, first in ((CIRCLE, "0B1"), (lower(CIRCLE), "0B1"), (larger, "0B3")):
        for time in (evaluate, simulate_schedule, what_ifs):
            with pytest.raises(Deadlock, match=f"rank 0 waits in {first} for 1SEND_B") as stuck:
                time(schedule, semantics=semantics)
            assert stuck.value.diagnosis == ((0, parse_action(first)), (1, parse_action("1F0")))


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v"]
)
def test_every_action_is_missed(name: str) -> None:
    for schedule in (make_schedule(name, 2, 3), lower(make_schedule(name, 2, 3))):
        for rank, row in enumerate(schedule.actions):
            for position in range(len(row)):
                shorter = (*row[:position], *row[position + 1 :])
                actions = (*schedule.actions[:rank], shorter, *schedule.actions[rank + 1 :])
                with pytest.raises(ScheduleError):
                    validate(replace(schedule, actions=actions))


MAKE = make_schedule
UNKNOWN: list[tuple[Callable[[], object], str]] = [
    (lambda: MAKE("1f2b", 2, 2), "a schedule must be one of gpipe, afab, 1f1b, "),
    (lambda: MAKE("zb_v", 2, 2, 3), "must be 2 for zb_v, got 3. Omit it, or use interleaved"),
    (lambda: MAKE("1f1b", 2, 2, 2), "num_chunks must be 1 for 1f1b, got 2"),
    (lambda: Step("own", 2, 2), "a schedule must be one of"),
    (
        lambda: makespan(Step("zb_h1", 4, 3)),
        f"num_microbatches must be at least 4 {CLOSED} zb_h1 on 4 ranks, got 3",
    ),
    (
        lambda: makespan(Step("zb_v", 4, 8), Costs(2)),
        f"f, i and w must be equal {CLOSED} zb_v, and b must be i + w, got 2, 1, 1 (and b = 2)",
    ),
    (lambda: makespan(Step("dualpipe_v", 2, 8), Costs(backward=3)), "got 1, 1, 1 (and b = 3)"),
    (lambda: makespan(Step("1f1b", 2, 8), Costs([1, 2])), "costs must be the same for all stages"),
    (
        lambda: makespan(Step("zb_h2", 2, 8), Costs(latency=1)),
        f"latency must be 0 {CLOSED} zb_h2, got 1",
    ),
    (
        lambda: lower_in_step(CIRCLE),
        "no rank can perform its next action: 0B1 on rank 0, 1F0 on rank 1",
    ),
    (
        lambda: simulate_schedule(typed("0 1", 1, "0F0 0SEND_F0", "1RECV_F0")),
        "1RECV_F0 receives a message that no computation needs",
    ),
]
JUNK: list[tuple[Callable[[], object], str]] = [
    (lambda: MAKE("gpipe", 2, 0), "num_microbatches must be a positive integer, got 0"),
    (lambda: MAKE("looped_bfs", 2, 2, 0), "num_chunks must be a positive integer, got 0"),
    (lambda: MAKE("dualpipe_v", -2, 1), "num_ranks must be a positive integer, got -2"),
    (lambda: Step("gpipe", 0, 2), "num_ranks must be a positive integer, got 0"),
    (
        lambda: makespan(Step("gpipe", 2, 2), semantics="grouped"),
        "one of rendezvous, buffered, got",
    ),
    (
        lambda: evaluate(CIRCLE, semantics="eager"),
        "one of rendezvous, buffered, grouped, paired, got 'eager'",
    ),
    (
        lambda: evaluate(MAKE("gpipe", 3, 1), Costs([1, 2])),
        "the length of forward must be the number of stages, 3, got 2",
    ),
    (
        lambda: evaluate(CIRCLE, Costs(latency=-1)),
        "a time must be from 0 to 1e+100, got -1 (latency)",
    ),
    (lambda: lower(CIRCLE, ahead=-1), "ahead must be a non-negative integer, got -1"),
    (lambda: forms.one_f_one_b_bound(0, [1], [1]), "must be a positive integer, got 0"),
]
UNREADABLE = [
    ("0F0,0B0\n1F0,1X0", "got '1X0'. Write, for example, 2F0 or 1SEND_F0. (row 2, column 2)"),
    ("0F0,(0F1;0SEND_F0)OVERLAP_F_B", "got '(0F1;0SEND_F0)OVERLAP_F_B'. Write, for example, 2F0"),
    ("9" * 5000 + "F0", f"got '{'9' * 199}..."),
    ("0F0,0B0\n1F0,0F1", "0F1 is on rank 1, but stage 0 is on rank 0 (row 2, column 2)"),
    ("0F0,0B0\n2F0,2B0", "numbered from 0 without gaps, got stage 2 but no stage 1"),
    ("999999999F0", "got stage 999999999 but no stage 0"),
    (",,\n,,", "the schedule contains no actions"),
    ('0F0,"0B0', "cannot read the schedule as CSV"),
    ("", "the schedule contains no actions"),
    ("rank 0: 0F0 0B0\nrank 2: 1F0", "begin with 'rank 1:', got 'rank 2: 1F0' (line 2)"),
    ("rank: 0F0 0B0", "a line must begin with 'rank 0:', got 'rank: 0F0 0B0' (line 1)"),
    (
        "rank 0: 0F0 0B0\nrank 1: 1F0 1Q0",
        "got '1Q0'. Write, for example, 2F0 or 1SEND_F0. (row 2, column 2)",
    ),
]


@pytest.mark.parametrize(("error", "cases"), [(ScheduleError, UNKNOWN), (ArgumentError, JUNK)])
def test_what_cannot_be_is_refused(
    error: type[Exception], cases: list[tuple[Callable[[], object], str]]
) -> None:
    for call, words in cases:
        with pytest.raises(error, match=re.escape(words)):
            call()


@pytest.mark.parametrize(("text", "words"), UNREADABLE)
def test_what_cannot_be_read_says_where(text: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(words)):
        (from_text if text.startswith("rank") else from_csv)(text)
