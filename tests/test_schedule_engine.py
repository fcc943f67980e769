"""The exact evaluator: programs against drawn orders of ranks and typed-out cases; times of schedules, drawn and as longest paths."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.errors import ArgumentError
from ringsim.schedules import SCHEDULE_NAMES, make_schedule
from ringsim.schedules.costs import Costs, Time
from ringsim.schedules.engine import (
    Compute,
    Evaluation,
    Message,
    Operation,
    Receive,
    Run,
    Semantics,
    Send,
    TimedMessage,
    Wait,
    evaluate,
    run_programs,
)
from ringsim.schedules.lowering import lower
from ringsim.schedules.schedule import Action, Schedule, parse_action

Programs = list[list[Operation]]


def blocking(*posts: Operation) -> list[Operation]:
    """Writes each post with its wait: a program of blocking sends and receives, and computations between them."""
    program: list[Operation] = []
    for post in posts:
        program.append(post)
        if not isinstance(post, Compute):
            program.append(Wait(len(program) - 1))
    return program


def together(*posts: Operation) -> list[Operation]:
    """Writes all posts, then the waits for all of them."""
    return [*posts, *(Wait(position) for position in range(len(posts)))]


def test_a_message_travels_when_both_sides_are_posted() -> None:
    #           0    1    2    3    4    5    6    7
    # rank 0    ==== compute 2, send --------- arrives at 5 + 2
    # rank 1    =================== compute 5, receive ----
    programs = [[Compute(2), *blocking(Send(1))], [Compute(5), *blocking(Receive(0))]]
    programs[0][-1], programs[1][-1] = Wait(1), Wait(1)
    run = run_programs(programs, latency=2)
    assert run == Run(
        times=(((0, 2), (2, 2), (2, 7)), ((0, 5), (5, 5), (5, 7))), messages=(Message(0, 1, 1, 1, posted=2, arrived=7),), blocked=()
    )
    buffered = run_programs(programs, latency=2, semantics="buffered")
    assert buffered.times == (((0, 2), (2, 2), (2, 2)), ((0, 5), (5, 5), (5, 5)))
    assert buffered.messages == (Message(0, 1, 1, 1, posted=2, arrived=5),)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_everybody_sends_first(num_ranks: int) -> None:
    programs = [blocking(Send((rank + 1) % num_ranks), Receive((rank - 1) % num_ranks)) for rank in range(num_ranks)]
    run = run_programs(programs)
    assert [(stuck.rank, stuck.position, stuck.post, stuck.peer) for stuck in run.cycle] == [
        (rank, 1, 0, (rank + 1) % num_ranks) for rank in range(num_ranks)
    ]
    assert run_programs(programs, semantics="buffered").blocked == ()
    programs[0] = blocking(Receive(num_ranks - 1), Send(1))  # one of them receives first: the usual cure
    assert run_programs(programs).blocked == ()


def test_a_partner_that_has_ended_makes_no_circle() -> None:
    run = run_programs([blocking(Receive(1)), blocking(Receive(0, tag=7)), blocking(Send(0, tag=1), Compute(1))])
    assert [stuck.rank for stuck in run.blocked] == [0, 1, 2]
    assert [stuck.rank for stuck in run.cycle] == [0, 1]
    alone = run_programs([blocking(Receive(1)), [Compute(1)]])
    assert ([stuck.rank for stuck in alone.blocked], alone.cycle) == ([0], ())


def test_tags_and_order_decide_who_meets() -> None:
    crossed = [together(Send(1, tag="a"), Send(1, tag="b")), together(Receive(0, tag="b"), Receive(0, tag="a"))]
    assert {(message.send, message.receive) for message in run_programs(crossed).messages} == {(0, 1), (1, 0)}
    in_order = [together(Send(1), Send(1)), together(Receive(0), Receive(0))]
    assert {(message.send, message.receive) for message in run_programs(in_order).messages} == {(0, 0), (1, 1)}
    one_by_one = [blocking(Send(1, tag="a"), Send(1, tag="b")), blocking(Receive(0, tag="b"), Receive(0, tag="a"))]
    assert [stuck.rank for stuck in run_programs(one_by_one).cycle] == [0, 1]


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ([[Send(0)]], r"peer must be another rank below 1, got 0 \(rank 0, position 0\)"),
        ([[Receive(2)], []], r"peer must be another rank below 2, got 2"),
        ([[Compute(1), Wait(0)]], r"a wait must be for an earlier post, got position 0 \(rank 0, position 1\)"),
        ([[Wait(0)]], r"a wait must be for an earlier post"),
    ],
)
def test_refuses_what_is_no_program(programs: Programs, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        run_programs(programs)


# Drawn programs, against ranks that take turns in a drawn order.


def take_turns(programs: Programs, latency: Time, semantics: Semantics, turns: random.Random) -> list[list[tuple[Time, Time]]]:
    """Does one operation of a drawn rank after the other until none can be done; finds the other side of a message by counting."""
    times: list[list[tuple[Time, Time]]] = [[] for _ in programs]

    def other_side(rank: int, position: int) -> tuple[int, int] | None:
        post = programs[rank][position]
        assert isinstance(post, Send | Receive)
        nth = programs[rank][:position].count(post)
        wanted = (Receive if isinstance(post, Send) else Send)(rank, post.tag)
        places = [place for place, other in enumerate(programs[post.peer]) if other == wanted]
        return (post.peer, places[nth]) if nth < len(places) else None

    def try_one(rank: int) -> bool:
        if len(times[rank]) == len(programs[rank]):
            return False
        operation = programs[rank][len(times[rank])]
        start = times[rank][-1][1] if times[rank] else 0
        end = start
        if isinstance(operation, Compute):
            end = start + operation.duration
        elif isinstance(operation, Wait):
            post, own = programs[rank][operation.position], times[rank][operation.position][0]
            other = other_side(rank, operation.position)
            if semantics == "rendezvous" or isinstance(post, Receive):
                if other is None or other[1] >= len(times[other[0]]):
                    return False
                there = times[other[0]][other[1]][0]
                end = max(start, own + latency, there + latency) if semantics == "rendezvous" else max(start, own, there + latency)
        times[rank].append((start, end))
        return True

    while True:
        ranks = list(range(len(programs)))
        turns.shuffle(ranks)
        moved = [try_one(rank) for rank in ranks]
        if not any(moved):
            return times


@st.composite
def programs_of_ranks(draw: st.DrawFn) -> Programs:
    """Draws programs with messages that mostly have both sides, in drawn places, some of them waited for in drawn places."""
    num_ranks = draw(st.integers(2, 4))
    programs: Programs = [[] for _ in range(num_ranks)]
    for _ in range(draw(st.integers(0, 8))):
        source = draw(st.integers(0, num_ranks - 1))
        rank = draw(st.sampled_from([rank for rank in range(num_ranks) if rank != source]))
        tag = draw(st.integers(0, 1))
        for owner, post in ((source, Send(rank, tag)), (rank, Receive(source, tag))):
            if draw(st.integers(0, 20)) == 0:
                continue  # forgotten
            programs[owner].append(post)
            if draw(st.booleans()):
                programs[owner].append(Wait(len(programs[owner]) - 1))
            if draw(st.booleans()):
                programs[owner].append(Compute(draw(st.integers(0, 5))))
    for program in programs:
        posts = [position for position, operation in enumerate(program) if isinstance(operation, Send | Receive)]
        program += [Wait(position) for position in draw(st.permutations(posts))]
    return programs


@given(programs_of_ranks(), st.integers(0, 3), st.sampled_from(["rendezvous", "buffered"]), st.randoms(use_true_random=False))
def test_the_order_of_the_ranks_does_not_matter(programs: Programs, latency: int, semantics: Semantics, turns: random.Random) -> None:
    run = run_programs(programs, latency=latency, semantics=semantics)
    assert [list(row) for row in run.times] == take_turns(programs, latency, semantics, turns)
    stuck = [rank for rank, row in enumerate(run.times) if len(row) < len(programs[rank])]
    assert [blocked.rank for blocked in run.blocked] == stuck
    for blocked, following in zip(run.cycle, (*run.cycle[1:], *run.cycle[:1]), strict=True):
        assert blocked.peer == following.rank


CASES = [*((name, None) for name in SCHEDULE_NAMES), ("interleaved_1f1b", 1), ("interleaved_1f1b", 3), ("looped_bfs", 3)]


def draw(evaluation: Evaluation) -> list[str]:
    """Draws one character a unit of time: the microbatch of a forward, = in a backward, . where nothing is done."""
    rows = []
    for rank in range(evaluation.schedule.num_ranks):
        units = ["."] * int(evaluation.makespan)
        for action, start, end in evaluation.get_computations(rank):
            units[int(start) : int(end)] = ([str(action.microbatch)] if action.kind == "F" else ["="]) * int(end - start)
        rows.append("".join(units))
    return rows


@pytest.mark.parametrize(
    ("name", "ahead", "semantics", "drawing"),
    [
        # A receive that blocks: a message starts when its receiver has nothing else to do.
        ("gpipe", 0, "rendezvous", ["012............==.==.==", "..0.1.2.....==.==.==...", "....0.1.2======........"]),
        # Posted one computation ahead, it travels meanwhile: the fill and the drain pay once each.
        ("gpipe", 1, "rendezvous", ["012..........======", "..012.....======...", "....012======......"]),
        ("gpipe", 1, "buffered", ["012..........======", "..012.....======...", "....012======......"]),
        # 1F1B pays for every microbatch, whoever waits for whom.
        ("1f1b", 0, "rendezvous", ["012........==...==..==", "..0.1...==.2.==..==...", "....0==.1==..2==......"]),
        ("1f1b", 1, "rendezvous", ["012........==.==...==", "..01....==2==...==...", "....0==1==..2==......"]),
        ("1f1b", 1, "buffered", ["012........==.==...==", "..01....==2==...==...", "....0==1==..2==......"]),
    ],
)
def test_messages_that_take_time(name: str, ahead: int, semantics: Semantics, drawing: list[str]) -> None:
    assert draw(evaluate(lower(make_schedule(name, 3, 3), ahead=ahead), Costs(latency=1), semantics)) == drawing


def test_times_of_messages() -> None:
    #           0    1    2    3    4    5    6    7    8    9
    # rank 0    0F0  .    .    .    .    .    .    .    0B0 ---      0B0 needs the gradient, which travels from 6 to 8
    # rank 1    .    .    .    1F0  1B0 --- ...                      1F0 waits for the activation, which travels from 1 to 3
    evaluation = evaluate(make_schedule("1f1b", 2, 1), Costs(latency=2))
    forward, backward = parse_action("0SEND_F0"), parse_action("1SEND_B0")
    assert evaluation.messages == (TimedMessage(backward, 1, 0, 6, 8), TimedMessage(forward, 0, 1, 1, 3))
    assert {str(action): (start, end) for row in evaluation.actions for action, start, end in row} == {
        "0F0": (0, 1),
        "0SEND_F0": (1, 3),
        "0RECV_B0": (0, 8),
        "0B0": (8, 10),
        "1RECV_F0": (0, 3),
        "1F0": (3, 4),
        "1B0": (4, 6),
        "1SEND_B0": (6, 8),
    }
    assert (evaluation.makespan, evaluation.busy, evaluation.idle, evaluation.span_idle) == (10, (3, 3), (7, 7), (7, 0))


def test_live_activations_over_time() -> None:
    evaluation = evaluate(make_schedule("1f1b", 2, 3))
    assert draw(evaluation) == ["01..==2==.==", ".0==1==2==.."]
    assert evaluation.list_live(0) == [(0, 1), (1, 2), (6, 1), (6, 2), (9, 1), (12, 0)]
    assert evaluation.peak_live == (2, 1)
    split = evaluate(Schedule("split", 1, (0,), (tuple(map(parse_action, "0F0 0I0 0W0".split())),)), Costs(1, 2, 4))
    assert split.list_live(0) == [(0, 1), (7, 0)]  # held until the weights have their gradients


def test_costs_by_stage_and_of_a_whole_backward() -> None:
    costs = Costs(forward=[1, 2], input=(3, 4), weight=5, backward=None)
    assert [costs.get_duration(Action(1, kind, 0)) for kind in "FIWB"] == [2, 4, 5, 9]
    assert Costs(backward=[7, 8]).get_duration(Action(1, "B", 0)) == 8
    with pytest.raises(ArgumentError, match=r"forward must have one time for each stage, got 2 \(stage 2\)"):
        evaluate(make_schedule("gpipe", 3, 1), costs)
    with pytest.raises(ArgumentError, match="an action with a duration must be a computation, got 0SEND_F0"):
        costs.get_duration(parse_action("0SEND_F0"))
