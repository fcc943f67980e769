"""Schedules: drawn here as staircases, read and written as text, against torch's own.

Their closed forms against the evaluator. torch 2.13's ``Schedule1F1B`` writes the last rank's row
without its first forward and with one too many at the end, though it does not run that row; so 1F1B
is held against closed forms only. Its interleaved schedules want equal rounds, DualPipeV two
microbatches a rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _simulate_comms_compute,
    _validate_schedule,
)

from ringsim import simulate_schedule
from ringsim.errors import ArgumentError, Deadlock, RingError
from ringsim.pipeline import (
    Action,
    Costs,
    Evaluation,
    Schedule,
    evaluate,
    from_csv,
    from_text,
    lower,
    parse_action,
    to_csv,
    to_text,
    validate,
)
from ringsim.schedules import SCHEDULE_NAMES, ScheduleError, make_schedule
from ringsim.schedules.closed_forms import (
    Step,
    bubble_of_ideal,
    bubble_of_total,
    gpipe_makespan,
    idle,
    makespan,
    messages,
    one_f_one_b_bound,
    peak_live,
    span_idle,
)
from ringsim.schedules.engine import (
    Compute,
    Message,
    Operation,
    Receive,
    Run,
    Semantics,
    Send,
    Wait,
    run_programs,
)
from ringsim.schedules.lowering import lower_in_step
from ringsim.schedules.schedule import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS

ALL = [(name, None) for name in SCHEDULE_NAMES] + [
    ("interleaved_1f1b", 1),
    ("interleaved_1f1b", 3),
    ("looped_bfs", 3),
]
# What torch does not have: each rank at each unit of time, where F, I and W take one unit each, and
# B two; digits are microbatches, -- the rest of a B.
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


def typed(stage_ranks: tuple[int, ...], num_microbatches: int, *rows: str) -> Schedule:
    """Reads a schedule of rows of actions."""
    return Schedule(
        "typed",
        num_microbatches,
        stage_ranks,
        tuple(tuple(map(parse_action, row.split())) for row in rows),
    )


@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_staircase(case: tuple[str, int, int]) -> None:
    drawn = [
        [word for word in line.split() if word.isalnum()]
        for line in DRAWN[case].strip().splitlines()
    ]
    assert [
        [f"{kind}{microbatch}" for _, kind, microbatch in row]
        for row in make_schedule(*case).actions
    ] == drawn


COUNTS = st.integers(0, 10**6)
KINDS = (*COMPUTE_KINDS, *SEND_KINDS, *RECV_KINDS)


@given(COUNTS, st.sampled_from(KINDS), COUNTS)
def test_text_gives_the_action_back(stage: int, kind: str, microbatch: int) -> None:
    action = Action(stage, kind, microbatch)
    assert parse_action(str(action)) == action
    assert action.is_compute == (kind in "FBIW")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F0",
        "2F",
        "2BW0",
        "-1F0",
        "2f0",
        "2F0 ",
        "2F0\n",
        "2F0,2F1",
        "٢F0",
        "1UNSHARD",
        "1F" + "0" * 5000,
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="an action must be a stage"):
        parse_action(text)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1SEND_F3", "2RECV_F3"),
        ("1RECV_F3", "0SEND_F3"),
        ("1SEND_B3", "0RECV_B3"),
        ("1RECV_B3", "2SEND_B3"),
    ],
)
def test_forwards_go_up_and_gradients_come_down(one: str, other: str) -> None:
    assert str(parse_action(one).other_side) == other
    assert parse_action(other).other_side == parse_action(one)


SCHEDULES = st.builds(
    make_schedule, st.sampled_from(SCHEDULE_NAMES), st.integers(1, 5), st.integers(1, 6)
)


@given(SCHEDULES, st.booleans())
def test_read_back_as_written(schedule: Schedule, with_messages: bool) -> None:
    schedule = lower(schedule) if with_messages else schedule
    assert from_text(to_text(schedule), name=schedule.name) == schedule
    assert from_csv(to_csv(schedule), name=schedule.name) == schedule


def test_pauses_and_shards_of_torch() -> None:
    schedule = from_csv("0UNSHARD,0F0,0F1,,0F2,0B0\r\n,1F0, 1B0 ,1REDUCE_GRAD\r\n")
    assert [" ".join(map(str, row)) for row in schedule.actions] == ["0F0 0F1 0F2 0B0", "1F0 1B0"]
    assert (schedule.num_microbatches, schedule.stage_ranks) == (3, (0, 1))
    # so do spaces in text
    assert from_text("  rank 0:  0F0  0B0\n\n rank 1: 1F0 1B0\n", name="gpipe") == make_schedule(
        "gpipe", 2, 1
    )


def test_a_rank_may_have_nothing_to_do() -> None:
    schedule = Schedule(
        "own",
        1,
        (0, 2),
        ((Action(0, "F", 0), Action(0, "B", 0)), (), (Action(1, "F", 0), Action(1, "B", 0))),
    )
    assert from_text(to_text(schedule)) == schedule
    assert from_csv(to_csv(schedule)) == schedule


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
    for num_ranks in (1, 2, 3, 4):
        for num_microbatches in (1, 2, 3, 4, 6, 8, 13):
            if allowed(name, num_ranks, num_microbatches):
                rows = get_schedule_ops(
                    theirs, num_ranks, num_microbatches, num_stages_per_rank=num_chunks
                )
                text = "\n".join(
                    ",".join("" if action is None else str(action) for action in row)
                    for row in rows
                )
                # ours takes them one after the other
                text = re.sub(r"\((\w+);(\w+)\)OVERLAP_F_B", r"\1,\2", text)
                schedule = make_schedule(name, num_ranks, num_microbatches, num_chunks)
                assert from_csv(text, name=name) == schedule, (num_ranks, num_microbatches)


def channels(
    rows: Sequence[Sequence[Action]], stage_ranks: Sequence[int]
) -> dict[tuple[int, int], list[Action]]:
    """Lists, for each rank that receives from another, its receives in order."""
    found: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if action.kind in RECV_KINDS:
                found.setdefault((stage_ranks[action.other_side.stage], rank), []).append(action)
    return found


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_torch_accepts_every_schedule_and_lowers_it_alike(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for p, m in [(1, 1), (2, 3), (3, 2), (4, 8), (5, 12)]:
        schedule = make_schedule(name, p, m)
        owner_of = schedule.stage_ranks.__getitem__
        rows = {
            rank: [_Action.from_str(cell) for cell in line.split(",")]
            for rank, line in enumerate(to_csv(schedule).splitlines())
        }
        owners = _validate_schedule(rows, p, schedule.num_stages, m)
        assert tuple(owners[stage] for stage in range(schedule.num_stages)) == schedule.stage_ranks
        lowered = _add_send_recv(rows, owner_of, schedule.num_stages)
        theirs = [[parse_action(str(action)) for action in lowered[rank]] for rank in range(p)]
        ours = lower(schedule)
        assert channels(theirs, schedule.stage_ranks) == channels(
            ours.actions, schedule.stage_ranks
        )
        for mine, other in zip(ours.actions, theirs, strict=True):
            assert [action for action in mine if action.kind not in RECV_KINDS] == [
                one for one in other if one.kind not in RECV_KINDS
            ]
        # Its dry run ends a receive only when the message is sent, wherever the receive stands: a
        # rank that waits at once.
        at_once = lower(schedule, ahead=0)
        done = _simulate_comms_compute(
            {
                rank: [_Action.from_str(str(action)) for action in row]
                for rank, row in enumerate(at_once.actions)
            },
            owner_of,
            schedule.num_stages,
        )
        assert [sum(action is not None for action in done[rank]) for rank in range(p)] == [
            len(row) for row in at_once.actions
        ]
        assert capsys.readouterr().out == ""  # where it is stuck, it says so and raises


SECTION = (
    (Path(__file__).parent.parent / "docs" / "pipeline.md")
    .read_text()
    .partition("\n## Schedules\n")[2]
    .partition("\n## ")[0]
)


def test_numbers_of_the_table() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in SECTION.splitlines()
        if line.startswith("| `")
    ]
    names = [row[0].split("`")[1] for row in rows]
    assert set(names) == set(SCHEDULE_NAMES) - {"afab"}
    for name, (_, *cells) in zip(names, rows, strict=True):
        step = Step(name, 4, 8)
        share = step.stages_a_rank  # the table's unit is the time of all stages of a rank
        expected = [
            [Fraction(value, share) for value in values]
            for values in ([makespan(step)], [idle(step)], [span_idle(step)], peak_live(step))
        ]
        assert [[Fraction(value) for value in cell.split(", ")] for cell in cells[:4]] == expected
        assert int(cells[4]) == sum(messages(step))


TIMES = st.integers(0, 12) | st.fractions(Fraction(1, 9), 9, max_denominator=9)
LEAST = {
    "zb_h1": lambda p: p,
    "zb_h2": lambda p: 2 * p - 1,
    "zb_v": lambda p: 2 * p - 1,
    "dualpipe_v": lambda p: 2 * p,
}


def make(step: Step) -> Evaluation:
    """Evaluates a step with the default costs."""
    return evaluate(
        make_schedule(step.name, step.num_ranks, step.num_microbatches, step.num_chunks)
    )


@pytest.mark.parametrize(("name", "num_chunks"), ALL)
def test_every_form_is_what_the_evaluator_finds(name: str, num_chunks: int | None) -> None:
    for p, m in product((1, 2, 3, 4, 6), (1, 2, 3, 4, 5, 6, 7, 8, 11, 13)):
        step = Step(name, p, m, num_chunks)
        evaluation = make(step)
        counted = [
            sum(message.source == rank for message in evaluation.messages) for rank in range(p)
        ]
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


@given(
    st.sampled_from(SCHEDULE_NAMES),
    st.integers(1, 5),
    st.integers(0, 6),
    st.tuples(TIMES, TIMES, TIMES),
)
def test_any_costs(name: str, p: int, more: int, times: tuple[int | Fraction, ...]) -> None:
    m = LEAST.get(name, lambda p: 1)(p) + more
    # equal ones alone have a form there
    costs = Costs(*(times[:1] * 3 if name in ("zb_v", "dualpipe_v") else times))
    evaluation = evaluate(make_schedule(name, p, m), costs)
    assert makespan(Step(name, p, m), costs) == evaluation.makespan
    assert span_idle(Step(name, p, m), costs) == max(evaluation.span_idle)


@given(
    st.sampled_from(["gpipe", "1f1b"]),
    st.integers(1, 8),
    st.integers(1, 16),
    TIMES,
    TIMES,
    st.integers(0, 200),
)
def test_messages_that_take_time(
    name: str, p: int, m: int, forward: int | Fraction, backward: int | Fraction, latency: int
) -> None:
    costs = Costs(forward=forward, backward=backward, latency=latency)
    schedule = make_schedule(name, p, m)
    assert makespan(Step(name, p, m), costs) == evaluate(schedule, costs, "buffered").makespan
    assert (
        makespan(Step(name, p, m), costs, "rendezvous")
        == evaluate(lower(schedule, ahead=0), costs, "rendezvous").makespan
    )


@given(
    st.integers(1, 10),
    st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=6),
    st.integers(0, 20),
)
def test_stages_that_differ(m: int, stages: list[tuple[int, int]], latency: int) -> None:
    forward, backward = map(list, zip(*stages, strict=True))
    costs = Costs(forward=forward, backward=backward, latency=latency)
    assert (
        gpipe_makespan(m, forward, backward, latency)
        == evaluate(make_schedule("gpipe", len(stages), m), costs, "buffered").makespan
    )
    bound = one_f_one_b_bound(m, forward, backward)
    found = evaluate(make_schedule("1f1b", len(stages), m), costs, "buffered").makespan
    assert bound <= found
    if len(set(stages)) == 1 and latency == 0:
        assert (
            gpipe_makespan(m, forward, backward)
            == found
            == makespan(Step("1f1b", len(stages), m), Costs(forward[0], backward=backward[0]))
        )


def test_both_ways_to_say_a_bubble() -> None:
    step = Step("1f1b", 4, 8)
    assert bubble_of_ideal(step) == Fraction(3, 8)  # (p-1) / m
    assert bubble_of_total(step) == Fraction(3, 11)  # (p-1) / (m+p-1)
    assert bubble_of_ideal(Step("interleaved_1f1b", 4, 8, 3)) == Fraction(3, 24)  # (p-1) / (m v)
    assert bubble_of_total(step, Costs(forward=0.5, backward=1.0)) == pytest.approx(3 / 11)
    assert bubble_of_total(Step("1f1b", 1, 8)) == 0
    assert bubble_of_ideal(step, Costs(0, 0, 0)) == 0


# -- evaluated, lowered to messages, checked and refused


def blocking(*posts: Operation) -> list[Operation]:
    """Writes each post with its wait.

    A program of blocking sends and receives, and computations between them.
    """
    program: list[Operation] = []
    for post in posts:
        program.append(post)
        if not isinstance(post, Compute):
            program.append(Wait(len(program) - 1))
    return program


def test_a_message_travels_when_both_sides_are_posted() -> None:
    #           0    1    2    3    4    5    6    7
    # rank 0    ==== compute 2, send --------- arrives at 5 + 2
    # rank 1    =================== compute 5, receive ----
    programs = [[Compute(2), *blocking(Send(1))], [Compute(5), *blocking(Receive(0))]]
    programs[0][-1], programs[1][-1] = Wait(1), Wait(1)
    run = run_programs(programs, latency=2)
    assert run == Run(
        times=(((0, 2), (2, 2), (2, 7)), ((0, 5), (5, 5), (5, 7))),
        messages=(Message(0, 1, 1, 1, posted=2, arrived=7),),
        blocked=(),
    )
    buffered = run_programs(programs, latency=2, semantics="buffered")
    assert buffered.times == (((0, 2), (2, 2), (2, 2)), ((0, 5), (5, 5), (5, 5)))
    assert buffered.messages == (Message(0, 1, 1, 1, posted=2, arrived=5),)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_everybody_sends_first(num_ranks: int) -> None:
    programs = [
        blocking(Send((rank + 1) % num_ranks), Receive((rank - 1) % num_ranks))
        for rank in range(num_ranks)
    ]
    run = run_programs(programs)
    assert [(stuck.rank, stuck.position, stuck.post, stuck.peer) for stuck in run.cycle] == [
        (rank, 1, 0, (rank + 1) % num_ranks) for rank in range(num_ranks)
    ]
    assert run_programs(programs, semantics="buffered").blocked == ()
    # one of them receives first: the usual cure
    programs[0] = blocking(Receive(num_ranks - 1), Send(1))
    assert run_programs(programs).blocked == ()


def test_a_partner_that_has_ended_makes_no_circle() -> None:
    run = run_programs(
        [blocking(Receive(1)), blocking(Receive(0, tag=7)), blocking(Send(0, tag=1), Compute(1))]
    )
    assert [stuck.rank for stuck in run.blocked] == [0, 1, 2]
    assert [stuck.rank for stuck in run.cycle] == [0, 1]
    alone = run_programs([blocking(Receive(1)), [Compute(1)]])
    assert ([stuck.rank for stuck in alone.blocked], alone.cycle) == ([0], ())


ONE_F_ONE_B = typed((0, 1), 2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


@pytest.mark.parametrize(
    ("schedule", "ahead", "rows"),
    [
        (
            ONE_F_ONE_B,
            0,
            [
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
                "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
            ],
        ),
        (
            ONE_F_ONE_B,
            1,
            [
                "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1",
                "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
            ],
        ),
        (
            ONE_F_ONE_B,
            9,
            [
                "0RECV_B0 0RECV_B1 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0B1",
                "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
            ],
        ),
        # within a rank nothing is sent
        (typed((0, 0), 1, "0F0 1F0 1B0 0B0"), 1, ["0F0 1F0 1B0 0B0"]),
        (
            typed((0, 1, 1, 0), 1, "0F0 3F0 3I0 0I0 3W0 0W0", "1F0 2F0 2I0 1I0 2W0 1W0"),
            0,
            [
                "0F0 0SEND_F0 3RECV_F0 3F0 3I0 3SEND_B0 0RECV_B0 0I0 3W0 0W0",
                "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2I0 1I0 1SEND_B0 2W0 1W0",
            ],
        ),
        # rank 1 needs the second message first
        (
            typed((0, 1), 2, "0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0"),
            0,
            [
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B1 0RECV_B0 0B0",
                "1RECV_F0 1RECV_F1 1F1 1B1 1SEND_B1 1F0 1B0 1SEND_B0",
            ],
        ),
    ],
)
def test_messages_are_written_down_where_they_are_posted(
    schedule: Schedule, ahead: int, rows: list[str]
) -> None:
    lowered = lower(schedule, ahead=ahead)
    assert [" ".join(map(str, row)) for row in lowered.actions] == rows
    assert lower(lowered) == lower_in_step(lowered) == lowered
    validate(lowered)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_posting_a_receive_earlier_never_costs_time(name: str) -> None:
    for p, m in product((2, 3, 5), (1, 3, 8)):
        schedule = make_schedule(name, p, m)
        costs = Costs(forward=3, input=3, weight=2, latency=2)
        times = [
            evaluate(lower(schedule, ahead=ahead), costs).makespan for ahead in (0, 1, 2, 1000)
        ]
        assert times == sorted(times, reverse=True)
        # posted at the very start, no receive holds a message up
        assert times[-1] == evaluate(schedule, costs, "buffered").makespan
        if name == "gpipe" and m > 1:
            # one computation ahead is enough where it lasts longer than the message
            assert times[0] > times[1] == times[-1]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_pair_posts_in_one_order(name: str) -> None:
    for p, m in product((1, 2, 3, 4, 6), (1, 2, 3, 5, 8)):
        schedule = make_schedule(name, p, m)
        in_step = lower_in_step(schedule)
        assert (
            tuple(tuple(action for action in row if action.is_compute) for row in in_step.actions)
            == schedule.actions
        )
        posts: dict[tuple[int, int], list[Action]] = {}
        for rank, row in enumerate(in_step.actions):
            for action in row:
                if not action.is_compute:
                    peer = schedule.stage_ranks[action.other_side.stage]
                    posts.setdefault((rank, peer), []).append(
                        action.other_side if action.kind in RECV_KINDS else action
                    )
        assert all(posts[peer, rank] == messages for (rank, peer), messages in posts.items())
        validate(in_step)
        # no time where messages take none
        assert evaluate(in_step).makespan == evaluate(schedule).makespan
        costs = Costs(latency=3)
        assert evaluate(in_step, costs).makespan >= evaluate(schedule, costs, "buffered").makespan


BROKEN = [
    # places
    (typed((0,), 0, ""), "num_microbatches must be 1 or more, got 0"),
    (typed((0, 2), 1, "0F0 0B0", ""), "stage 1 must be on a rank below 2, got 2"),
    (
        typed((0,), 1, "0F0 1F0 0B0"),
        r"1F0 must be of a stage below 1, got 1 \(rank 0, position 1\)",
    ),
    (
        typed((0, 1), 1, "0F0 0B0 1F0", "1B0"),
        r"1F0 must be done by rank 1, which has stage 1, got rank 0 \(rank 0, position 2\)",
    ),
    (
        typed((0,), 1, "0F0 0B0 0F1 0B1"),
        r"0F1 must be of a microbatch below 1, got 1 \(rank 0, position 2\)",
    ),
    (
        typed((0,), 1, "0F0 0B0 0B0"),
        r"0B0 must be done once, got a second one \(rank 0, position 2\)",
    ),
    (
        typed((0,), 1, "0F0 0I0 0W0 0B0"),
        r"0B0 must be the only gradient of its input, got I before it \(rank 0, position 3\)",
    ),
    (
        Schedule("x", 1, (0,), ((Action(0, "G", 0),),)),
        r"an action must be one of F, B, I, W, .*, got 0G0 \(rank 0, position 0\)",
    ),
    (
        typed((0, 0), 1, "0F0 0SEND_F0 1F0 1B0 0B0"),
        "0SEND_F0 must go between two ranks, got stage 1 on rank 0 too",
    ),
    (
        typed((0, 1), 1, "0F0 0SEND_B0", "1F0"),
        "0SEND_B0 must go between two ranks, got stage -1 that does not exist",
    ),
    # in order
    (
        typed((0,), 1, "0B0 0F0"),
        r"0B0 must come after 0F0, got it before or without \(rank 0, position 0\)",
    ),
    (
        typed((0,), 1, "0F0 0W0 0I0"),
        r"0W0 must come after 0I0, got it before or without \(rank 0, position 1\)",
    ),
    (
        typed((0,), 1, "0F0 0B0 0W0"),
        r"0W0 must come after 0I0, got it before or without \(rank 0, position 2\)",
    ),
    (
        typed((0, 0), 1, "1F0 0F0 1B0 0B0"),
        r"1F0 must come after 0F0, got it before or without \(rank 0, position 0\)",
    ),
    (
        typed((0, 0), 1, "0F0 1F0 0B0 1B0"),
        r"0B0 must come after 1B0 or 1I0, got it before or without \(rank 0, position 2\)",
    ),
    # with messages
    (
        typed((0, 1), 1, "0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
        r"0SEND_F0 must come after 0F0, got it before .*position 0",
    ),
    (
        typed((0, 1), 1, "0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1RECV_F0 1B0 1SEND_B0"),
        r"1F0 must come after 1RECV_F0, got .*\(rank 1, position 0",
    ),
    (
        typed((0, 1), 1, "0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0"),
        r"0RECV_B0 must meet 1SEND_B0, got nothing .*2, from rank 1\)",
    ),
    (
        typed((0, 1), 2, "0F0 0F1 0SEND_F0 0SEND_F1 0B0 0B1", "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1B1"),
        r"0B0 must come after 0RECV_B0, got it before or without \(rank 0, position 4\)",
    ),
]
INCOMPLETE = [
    (
        typed((0, 1), 2, "0F0 0F1 0B0 0B1", "1F0 1B0"),
        r"stage 1 must do the forward pass of microbatch 1, got none \(rank 1\). Add 1F1",
    ),
    (
        typed((0,), 1, "0F0"),
        (
            r"stage 0 must do the backward pass of microbatch 0, got none "
            r"\(rank 0\). Add 0B0, or 0I0 and 0W0"
        ),
    ),
    (
        typed((0,), 1, "0F0 0I0"),
        (
            r"stage 0 must make the weights' gradients of microbatch 0, got none \(rank 0\). Add "
            r"0W0 after 0I0"
        ),
    ),
]
PARTS = [  # of a step, which only what times them sees
    (typed((0, 1), 1, "0F0 0SEND_F0", ""), "0SEND_F0 must meet 1RECV_F0, got nothing"),
    (
        typed((0, 1), 2, "0F0 0F1 0SEND_F0 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1"),
        "0SEND_F0 must meet 1RECV_F0, got 1RECV_F1",
    ),
]


@pytest.mark.parametrize(("schedule", "message"), [*BROKEN, *INCOMPLETE])
def test_a_schedule_that_breaks_a_rule_is_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate(schedule)


@pytest.mark.parametrize(("schedule", "message"), [*BROKEN, *PARTS])
def test_both_evaluators_refuse_the_same(schedule: Schedule, message: str) -> None:
    for run in (evaluate, simulate_schedule):
        with pytest.raises(ScheduleError, match=message):
            run(schedule)


# Each rank's own order is fine, but rank 0 wants the gradient of microbatch 1 before it gives
# microbatch 0 away, and rank 1 the other way.
CIRCLE = typed((0, 1), 2, "0F1 0B1 0F0 0B0", "1F0 1B0 1F1 1B1")


@pytest.mark.parametrize("semantics", ["rendezvous", "buffered"])
def test_says_who_waits_for_whom(semantics: Semantics) -> None:
    with pytest.raises(ScheduleError) as refused:
        validate(CIRCLE)
    assert str(refused.value) == (
        "a schedule must let every rank go on, got a circle: rank 0 waits in 0B1 for 1SEND_B1 of "
        "rank 1; rank 1 waits in 1F0 for 0SEND_F0 "
        "of rank 0. Do what one of them waits for earlier. The first is 0B1 (rank 0, position 1)."
    )
    rows = list(make_schedule("1f1b", 4, 4).actions)
    # ranks 2 and 3 wait too, but not in the circle
    rows[0] = tuple(map(parse_action, "0F3 0B3 0F0 0B0 0F1 0B1 0F2 0B2".split()))
    larger = replace(make_schedule("1f1b", 4, 4), actions=tuple(rows))
    for schedule, first in ((CIRCLE, "0B1"), (lower(CIRCLE), "0B1"), (larger, "0B3")):
        with pytest.raises(Deadlock) as stuck:
            evaluate(schedule, semantics=semantics)
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


MAKE, STEP = make_schedule, Step
REFUSED: list[tuple[type[RingError], Callable[[], object], str]] = [
    # to make
    (ScheduleError, lambda: MAKE("1f2b", 2, 2), "a schedule must be one of .*1f1b.*, got '1f2b'"),
    (
        ScheduleError,
        lambda: MAKE("zb_v", 2, 2, 3),
        "num_chunks of zb_v must be 2, got 3. Leave it out, or take interleaved_1f1b",
    ),
    (ScheduleError, lambda: MAKE("1f1b", 2, 2, 2), "num_chunks of 1f1b must be 1, got 2"),
    (
        ArgumentError,
        lambda: MAKE("gpipe", 2, 0),
        "num_microbatches must be an integer from 1, got 0",
    ),
    (
        ArgumentError,
        lambda: MAKE("looped_bfs", 2, 2, 0),
        "num_chunks must be an integer from 1, got 0",
    ),
    (
        ArgumentError,
        lambda: MAKE("dualpipe_v", -2, 1),
        "num_ranks must be an integer from 1, got -2",
    ),
    # to read
    (
        ScheduleError,
        lambda: from_csv("0F0,0B0\n1F0,1X0"),
        r"an action must be .* got '1X0'. .*\(row 2, column 2\)",
    ),
    (ScheduleError, lambda: from_csv("0F0,,0BW0"), r"got '0BW0'.*\(row 1, column 3\)"),
    (
        ScheduleError,
        lambda: from_csv("0F0,(0F1;0B0)OVERLAP_F_B"),
        r"got '\(0F1;0B0\)OVERLAP_F_B' \(row 1, column 2\)",
    ),
    (ScheduleError, lambda: from_csv("9" * 5000 + "F0"), r"got '9{199}\.\.\."),
    (
        ScheduleError,
        lambda: from_csv("0F0,0B0\n1F0,0F1"),
        r"got 0F1 on rank 1 where stage 0 is on rank 0 \(row 2, column 2\)",
    ),
    (
        ScheduleError,
        lambda: from_csv("0F0,0B0\n2F0,2B0"),
        "stages must be numbered from 0 without gaps, got 2 and no stage 1",
    ),
    (ScheduleError, lambda: from_csv("999999999F0"), "got 999999999 and no stage 0"),
    (ScheduleError, lambda: from_csv(",,\n,,"), "at least one action, got none"),
    (ScheduleError, lambda: from_csv('0F0,"0B0'), "must be CSV, got text that is not"),
    (ScheduleError, lambda: from_text(""), "at least one action, got none"),
    (
        ScheduleError,
        lambda: from_text("rank 0: 0F0 0B0\nrank 2: 1F0 1B0"),
        r"begin with 'rank 1:', got 'rank 2: 1F0 1B0' \(line 2\)",
    ),
    (
        ScheduleError,
        lambda: from_text("0F0 0B0"),
        r"a line must begin with 'rank 0:', got '0F0 0B0' \(line 1\)",
    ),
    (
        ScheduleError,
        lambda: from_text("rank 0: 0F0 0B0\nrank 1: 1F0 1Q0"),
        r"got '1Q0'.*\(row 2, column 2\)",
    ),
    (ArgumentError, lambda: Action(1, "F", 0).other_side, "must be a send or a recv, got 1F0"),
    # for a formula
    (ScheduleError, lambda: STEP("own", 2, 2), "a schedule must be one of"),
    (ScheduleError, lambda: STEP("zb_v", 2, 2, 1), "num_chunks of zb_v must be 2, got 1"),
    (ArgumentError, lambda: STEP("gpipe", 0, 2), "num_ranks must be an integer from 1, got 0"),
    (
        ScheduleError,
        lambda: makespan(STEP("zb_h1", 4, 3)),
        "of zb_h1 on 4 ranks must be 4 or more for its closed form, got 3",
    ),
    (
        ScheduleError,
        lambda: makespan(STEP("zb_v", 4, 8), Costs(2)),
        "f, i, w of zb_v must be equal for its closed form, got 2, 1, 1",
    ),
    (
        ScheduleError,
        lambda: makespan(STEP("dualpipe_v", 2, 8), Costs(backward=3)),
        r"for its closed form, got 1, 1, 1 \(and b = 3\)",
    ),
    (
        ScheduleError,
        lambda: makespan(STEP("1f1b", 2, 8), Costs([1, 2])),
        "costs must be the same for all stages",
    ),
    (
        ScheduleError,
        lambda: makespan(STEP("zb_h2", 2, 8), Costs(latency=1)),
        "latency of zb_h2 must be 0 for its closed form, got 1",
    ),
    (
        ArgumentError,
        lambda: makespan(STEP("gpipe", 2, 2), semantics="grouped"),
        "one of rendezvous, buffered, got 'grouped'",
    ),
    (ArgumentError, lambda: gpipe_makespan(2, [1, 2], [1]), "one time a stage each, got 2 and 1"),
    (ArgumentError, lambda: one_f_one_b_bound(0, [1], [1]), "must be an integer from 1, got 0"),
    # to evaluate
    (
        ArgumentError,
        lambda: evaluate(MAKE("gpipe", 3, 1), Costs([1, 2])),
        r"forward must have one time for each stage, got 2 \(stage 2\)",
    ),
    (
        ArgumentError,
        lambda: Costs().get_duration(parse_action("0SEND_F0")),
        "must be a computation, got 0SEND_F0",
    ),
    (
        ArgumentError,
        lambda: run_programs([[Send(0)]]),
        r"peer must be another rank below 1, got 0 \(rank 0, position 0\)",
    ),
    (
        ArgumentError,
        lambda: run_programs([[Receive(2)], []]),
        r"peer must be another rank below 2, got 2",
    ),
    (
        ArgumentError,
        lambda: run_programs([[Compute(1), Wait(0)]]),
        r"for an earlier post, got position 0 \(rank 0, position 1\)",
    ),
    (ArgumentError, lambda: run_programs([[Wait(0)]]), r"a wait must be for an earlier post"),
    # to lower
    (
        ArgumentError,
        lambda: lower(MAKE("gpipe", 2, 2), ahead=-1),
        "ahead must be an integer from 0, got -1",
    ),
    (
        ScheduleError,
        lambda: lower_in_step(CIRCLE),
        "got none that can: 0B1 on rank 0, 1F0 on rank 1",
    ),
    (
        ScheduleError,
        lambda: simulate_schedule(typed((0, 1), 1, "0F0 0SEND_F0", "1RECV_F0")),
        "1RECV_F0 must be for a computation, got",
    ),
]


@pytest.mark.parametrize(("error", "call", "message"), REFUSED)
def test_what_cannot_be_is_refused(
    error: type[RingError], call: Callable[[], object], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            typed((0, 1), 1, "0F0 0B0", "1B0"),
            r"0SEND_F0 must be for a computation of stage 1, got none \(rank 0, after 0F0\)",
        ),
        (
            typed((0, 1), 1, "0F0", "1F0 1B0"),
            r"1SEND_B0 must be for a computation of stage 0, got none \(rank 1, after 1B0\)",
        ),
        (
            typed((0, 1), 1, "0B0", "1F0 1B0"),
            r"1F0 must have a 0SEND_F0 to wait for, got none \(rank 1\)",
        ),
        (
            typed((0, 1), 1, "0F0 0B0", "1F0 1B0 1I0"),
            r"1SEND_B0 must happen once, got it again \(rank 1, after 1I0\)",
        ),
        (
            typed((0, 1), 1, "0F0 0B0 0I0", "1F0 1B0"),
            r"0RECV_B0 must happen once, got it again for 0I0 \(rank 0\)",
        ),
    ],
)
def test_messages_that_cannot_meet_are_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        lower(schedule)
    with pytest.raises(ScheduleError):
        simulate_schedule(schedule)
