"""Schedules evaluated, lowered to messages, checked and refused: times by hand, in drawn programs, and on two streams."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, product

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim import simulate_schedule
from ringsim.errors import ArgumentError, Deadlock, ScheduleError
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
    validate,
)
from ringsim.schedules.lowering import get_recv, get_send, lower, lower_in_step
from ringsim.schedules.schedule import RECV_KINDS, SEND_KINDS, Action, Schedule, parse_action

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


SIZES = list(product((1, 2, 3, 4, 6), (1, 2, 3, 5, 8, 13)))  # ranks, microbatches


def typed(stage_ranks: tuple[int, ...], num_microbatches: int, *rows: str) -> Schedule:
    """Reads a schedule of rows of actions."""
    return Schedule("typed", num_microbatches, stage_ranks, tuple(tuple(map(parse_action, row.split())) for row in rows))


def rows_of(schedule: Schedule) -> list[str]:
    """Writes the rows as text."""
    return [" ".join(map(str, row)) for row in schedule.actions]


def channels(schedule: Schedule) -> dict[tuple[int, int], list[Action]]:
    """Lists, for each rank that receives from another, its receives in order."""
    found = defaultdict(list)
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.kind in RECV_KINDS:
                found[schedule.stage_ranks[action.other_side.stage], rank].append(action)
    return found


@pytest.mark.parametrize(
    ("ahead", "rows"),
    [
        (0, ["0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"]),
        (1, ["0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1", "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"]),
        (9, ["0RECV_B0 0RECV_B1 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0B1", "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"]),
    ],
)
def test_one_f_one_b_on_two_ranks(ahead: int, rows: list[str]) -> None:
    schedule = typed((0, 1), 2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert rows_of(lower(schedule, ahead=ahead)) == rows


def test_nothing_is_sent_within_a_rank() -> None:
    one_rank = typed((0, 0), 1, "0F0 1F0 1B0 0B0")
    assert lower(one_rank) == one_rank
    vee = typed((0, 1, 1, 0), 1, "0F0 3F0 3I0 0I0 3W0 0W0", "1F0 2F0 2I0 1I0 2W0 1W0")
    assert rows_of(lower(vee, ahead=0)) == [
        "0F0 0SEND_F0 3RECV_F0 3F0 3I0 3SEND_B0 0RECV_B0 0I0 3W0 0W0",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2I0 1I0 1SEND_B0 2W0 1W0",
    ]


def test_a_message_that_is_needed_later_is_received_in_its_order() -> None:
    # Rank 0 sends 0SEND_F0, 0SEND_F1; rank 1 needs the second one first.
    crossed = typed((0, 1), 2, "0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0")
    assert rows_of(lower(crossed, ahead=0))[1] == "1RECV_F0 1RECV_F1 1F1 1B1 1SEND_B1 1F0 1B0 1SEND_B0"
    validate(crossed)


def test_a_lowered_schedule_stays() -> None:
    lowered = lower(make_schedule("1f1b", 3, 4), ahead=0)
    assert lower(lowered) is lowered
    assert lower_in_step(lowered) is lowered


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_message_once_in_order_and_in_time(name: str) -> None:
    for p, m in SIZES:
        schedule = make_schedule(name, p, m)
        for ahead in (0, 1):
            lowered = lower(schedule, ahead=ahead)
            assert tuple(tuple(action for action in row if action.is_compute) for row in lowered.actions) == schedule.actions
            sends = defaultdict(list)
            for rank, row in enumerate(lowered.actions):
                for before, action in pairwise(row):
                    if action.kind in SEND_KINDS:
                        assert get_send(before, schedule.stage_ranks) == action  # a send stands after what makes its payload
                        sends[rank, schedule.stage_ranks[action.other_side.stage]].append(action.other_side)
                for action in row:
                    recv = get_recv(action, schedule.stage_ranks)
                    assert recv is None or row.index(recv) < row.index(action)
            assert sends == channels(lowered)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_posting_a_receive_earlier_never_costs_time(name: str) -> None:
    for p, m in product((2, 3, 5), (1, 3, 8)):
        schedule = make_schedule(name, p, m)
        costs = Costs(forward=3, input=3, weight=2, latency=2)
        times = [evaluate(lower(schedule, ahead=ahead), costs).makespan for ahead in (0, 1, 2, 1000)]
        assert times == sorted(times, reverse=True)
        assert times[-1] == evaluate(schedule, costs, "buffered").makespan  # posted at the very start, no receive holds a message up
        if name == "gpipe" and m > 1:
            assert times[0] > times[1] == times[-1]  # one computation ahead is enough where it lasts longer than the message


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (typed((0, 1), 1, "0F0 0B0", "1B0"), r"0SEND_F0 must be for a computation of stage 1, got none \(rank 0, after 0F0\)"),
        (typed((0, 1), 1, "0F0", "1F0 1B0"), r"1SEND_B0 must be for a computation of stage 0, got none \(rank 1, after 1B0\)"),
        (typed((0, 1), 1, "0B0", "1F0 1B0"), r"1F0 must have a 0SEND_F0 to wait for, got none \(rank 1\)"),
        (typed((0, 1), 1, "0F0 0B0", "1F0 1B0 1I0"), r"1SEND_B0 must happen once, got it again \(rank 1, after 1I0\)"),
        (typed((0, 1), 1, "0F0 0B0 0I0", "1F0 1B0"), r"0RECV_B0 must happen once, got it again for 0I0 \(rank 0\)"),
    ],
)
def test_refuses_messages_that_cannot_meet(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        lower(schedule)
    with pytest.raises(ScheduleError):
        simulate_schedule(schedule)


def test_refuses_a_receive_after_its_use() -> None:
    with pytest.raises(ArgumentError, match="ahead must be 0 or more, got -1"):
        lower(make_schedule("gpipe", 2, 2), ahead=-1)


def test_order_of_a_channel_is_checked() -> None:
    swapped = lower(make_schedule("gpipe", 2, 2), ahead=9)
    rows = [list(row) for row in swapped.actions]
    rows[1][0], rows[1][1] = rows[1][1], rows[1][0]
    with pytest.raises(ScheduleError, match=r"0SEND_F0 must meet 1RECV_F0, got 1RECV_F1 \(rank 0, position 3, to rank 1\)"):
        validate(replace(swapped, actions=tuple(map(tuple, rows))))


def run_with_streams(schedule: Schedule) -> Run:
    """Runs a lowered schedule whose ranks leave the messages of each pair to a stream.

    A rank posts an action to the stream and goes on. The stream does what was posted in order, each to its end, with the peer's stream for
    this pair, and says that it is done; a computation waits for its receive to be done, and the end of the step for the sends.
    """
    num_ranks, ranks = schedule.num_ranks, schedule.stage_ranks
    pairs = [(rank, peer) for rank, peer in product(range(num_ranks), repeat=2) if rank != peer]
    streams = {pair: num_ranks + index for index, pair in enumerate(pairs)}
    programs: list[list[Operation]] = [[] for _ in range(num_ranks + len(pairs))]

    def wait_for(rank: int, message: Action) -> None:
        programs[rank].append(Receive(streams[rank, ranks[message.other_side.stage]], ("done", message)))
        programs[rank].append(Wait(len(programs[rank]) - 1))

    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.is_compute:
                recv = get_recv(action, ranks)
                if recv is not None:
                    wait_for(rank, recv)
                programs[rank].append(Compute(1))
                continue
            peer = ranks[action.other_side.stage]
            programs[rank].append(Send(streams[rank, peer], ("post", action)))
            stream = programs[streams[rank, peer]]
            for operation in (Receive(rank, ("post", action)), (Send if action.kind in SEND_KINDS else Receive)(streams[peer, rank])):
                stream += [operation, Wait(len(stream))]
            stream.append(Send(rank, ("done", action)))
        for action in row:
            if action.kind in SEND_KINDS:
                wait_for(rank, action)
    return run_programs(programs)


@pytest.mark.parametrize("ahead", [0, 1])
def test_other_orders_stand_still_there(ahead: int) -> None:
    run = run_with_streams(lower(make_schedule("1f1b", 2, 2), ahead=ahead))
    assert {blocked.rank for blocked in run.blocked} == {0, 1, 2, 3}
    assert [blocked.rank for blocked in run.cycle] == [2, 3]  # the two streams, each for the other


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_pair_posts_in_one_order(name: str) -> None:
    for p, m in SIZES:
        schedule = make_schedule(name, p, m)
        in_step = lower_in_step(schedule)
        assert tuple(tuple(action for action in row if action.is_compute) for row in in_step.actions) == schedule.actions
        posts: dict[tuple[int, int], list[Action]] = {}
        for rank, row in enumerate(in_step.actions):
            for action in row:
                if not action.is_compute:
                    peer = schedule.stage_ranks[action.other_side.stage]
                    posts.setdefault((rank, peer), []).append(action.other_side if action.kind in RECV_KINDS else action)
        assert all(posts[peer, rank] == messages for (rank, peer), messages in posts.items())
        validate(in_step)
        assert run_with_streams(in_step).blocked == ()


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_costs_no_time_where_messages_take_none(name: str) -> None:
    for p, m in product((1, 2, 3, 4, 6), (3, 8)):
        schedule = make_schedule(name, p, m)
        assert evaluate(lower_in_step(schedule)).makespan == evaluate(schedule).makespan
        costs = Costs(latency=3)
        assert evaluate(lower_in_step(schedule), costs).makespan >= evaluate(schedule, costs, "buffered").makespan


def test_says_where_nobody_can_go_on() -> None:
    rows = ("0F1 0B1 0F0 0B0", "1F0 1B0 1F1 1B1")
    circle = Schedule("circle", 2, (0, 1), tuple(tuple(map(parse_action, row.split())) for row in rows))
    with pytest.raises(ScheduleError, match="got none that can: 0B1 on rank 0, 1F0 on rank 1"):
        lower_in_step(circle)


BROKEN = [
    # places
    (typed((0,), 0, ""), "num_microbatches must be 1 or more, got 0"),
    (typed((0, 2), 1, "0F0 0B0", ""), "stage 1 must be on a rank below 2, got 2"),
    (typed((0,), 1, "0F0 1F0 0B0"), r"1F0 must be of a stage below 1, got 1 \(rank 0, position 1\)"),
    (typed((0, 1), 1, "0F0 0B0 1F0", "1B0"), r"1F0 must be done by rank 1, which has stage 1, got rank 0 \(rank 0, position 2\)"),
    (typed((0,), 1, "0F0 0B0 0F1 0B1"), r"0F1 must be of a microbatch below 1, got 1 \(rank 0, position 2\)"),
    (typed((0,), 1, "0F0 0B0 0B0"), r"0B0 must be done once, got a second one \(rank 0, position 2\)"),
    (typed((0,), 1, "0F0 0I0 0W0 0B0"), r"0B0 must be the only gradient of its input, got I before it \(rank 0, position 3\)"),
    (Schedule("x", 1, (0,), ((Action(0, "G", 0),),)), r"an action must be one of F, B, I, W, .*, got 0G0 \(rank 0, position 0\)"),
    (typed((0, 0), 1, "0F0 0SEND_F0 1F0 1B0 0B0"), "0SEND_F0 must go between two ranks, got stage 1 on rank 0 too"),
    (typed((0, 1), 1, "0F0 0SEND_B0", "1F0"), "0SEND_B0 must go between two ranks, got stage -1 that does not exist"),
    # in order
    (typed((0,), 1, "0B0 0F0"), r"0B0 must come after 0F0, got it before or without \(rank 0, position 0\)"),
    (typed((0,), 1, "0F0 0W0 0I0"), r"0W0 must come after 0I0, got it before or without \(rank 0, position 1\)"),
    (typed((0,), 1, "0F0 0B0 0W0"), r"0W0 must come after 0I0, got it before or without \(rank 0, position 2\)"),
    (typed((0, 0), 1, "1F0 0F0 1B0 0B0"), r"1F0 must come after 0F0, got it before or without \(rank 0, position 0\)"),
    (typed((0, 0), 1, "0F0 1F0 0B0 1B0"), r"0B0 must come after 1B0 or 1I0, got it before or without \(rank 0, position 2\)"),
    # with messages
    (
        typed((0, 1), 1, "0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
        r"0SEND_F0 must come after 0F0, got it before .*position 0",
    ),
    (
        typed((0, 1), 1, "0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1RECV_F0 1B0 1SEND_B0"),
        r"1F0 must come after 1RECV_F0, got .*\(rank 1, position 0",
    ),
    (typed((0, 1), 1, "0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0"), r"0RECV_B0 must meet 1SEND_B0, got nothing .*2, from rank 1\)"),
    (
        typed((0, 1), 2, "0F0 0F1 0SEND_F0 0SEND_F1 0B0 0B1", "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1B1"),
        r"0B0 must come after 0RECV_B0, got it before or without \(rank 0, position 4\)",
    ),
]
INCOMPLETE = [
    (typed((0, 1), 2, "0F0 0F1 0B0 0B1", "1F0 1B0"), r"stage 1 must do the forward pass of microbatch 1, got none \(rank 1\). Add 1F1"),
    (typed((0,), 1, "0F0"), r"stage 0 must do the backward pass of microbatch 0, got none \(rank 0\). Add 0B0, or 0I0 and 0W0"),
    (typed((0,), 1, "0F0 0I0"), r"stage 0 must make the weights' gradients of microbatch 0, got none \(rank 0\). Add 0W0 after 0I0"),
]
PARTS = [  # of a step, which only what times them sees
    (typed((0, 1), 1, "0F0 0SEND_F0", ""), "0SEND_F0 must meet 1RECV_F0, got nothing"),
    (typed((0, 1), 2, "0F0 0F1 0SEND_F0 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1"), "0SEND_F0 must meet 1RECV_F0, got 1RECV_F1"),
]


@pytest.mark.parametrize(("schedule", "message"), [*BROKEN, *INCOMPLETE])
def test_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate(schedule)


@pytest.mark.parametrize(("schedule", "message"), [*BROKEN, *PARTS])
def test_both_evaluators_refuse_the_same(schedule: Schedule, message: str) -> None:
    for run in (evaluate, simulate_schedule):
        with pytest.raises(ScheduleError, match=message):
            run(schedule)


def test_a_message_that_no_computation_needs_has_no_price() -> None:
    with pytest.raises(ScheduleError, match="1RECV_F0 must be for a computation, got none that needs it"):
        simulate_schedule(typed((0, 1), 1, "0F0 0SEND_F0", "1RECV_F0"))


# Each rank's own order is fine, but rank 0 wants the gradient of microbatch 1 before it gives microbatch 0 away, and rank 1 the other way.
CIRCLE = typed((0, 1), 2, "0F1 0B1 0F0 0B0", "1F0 1B0 1F1 1B1")


def test_says_who_waits_for_whom() -> None:
    with pytest.raises(ScheduleError) as refused:
        validate(CIRCLE)
    assert str(refused.value) == (
        "a schedule must let every rank go on, got a circle: rank 0 waits in 0B1 for 1SEND_B1 of rank 1; rank 1 waits in 1F0 for 0SEND_F0 "
        "of rank 0. Do what one of them waits for earlier. The first is 0B1 (rank 0, position 1)."
    )


@pytest.mark.parametrize("semantics", ["rendezvous", "buffered"])
def test_the_evaluator_finds_the_circle(semantics: str) -> None:
    for schedule in (CIRCLE, lower(CIRCLE)):
        with pytest.raises(Deadlock) as stuck:
            evaluate(schedule, semantics=semantics)  # type: ignore[arg-type]
        assert stuck.value.diagnosis == ((0, Action(0, "B", 1)), (1, Action(1, "F", 0)))


def test_a_circle_of_three_leaves_the_fourth_out() -> None:
    schedule = make_schedule("1f1b", 4, 4)
    rows = list(schedule.actions)
    rows[0] = tuple(map(parse_action, "0F3 0B3 0F0 0B0 0F1 0B1 0F2 0B2".split()))
    with pytest.raises(Deadlock) as stuck:
        evaluate(replace(schedule, actions=tuple(rows)))
    assert stuck.value.diagnosis == ((0, parse_action("0B3")), (1, parse_action("1F0")))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v"])
def test_every_action_is_missed(name: str) -> None:
    for schedule in (make_schedule(name, 2, 3), lower(make_schedule(name, 2, 3))):
        for rank, row in enumerate(schedule.actions):
            for position in range(len(row)):
                shorter = (*row[:position], *row[position + 1 :])
                actions = (*schedule.actions[:rank], shorter, *schedule.actions[rank + 1 :])
                with pytest.raises(ScheduleError):
                    validate(replace(schedule, actions=actions))


@st.composite
def shuffled(draw: st.DrawFn) -> Schedule:
    """Draws a schedule whose rows were changed by a few swaps of neighbours, or shuffled."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"]))
    schedule = make_schedule(name, draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    rows = [list(row) for row in schedule.actions]
    if draw(st.booleans()):
        rows = [draw(st.permutations(row)) for row in rows]
    for _ in range(draw(st.integers(0, 6))):
        row = rows[draw(st.integers(0, len(rows) - 1))]
        place = draw(st.integers(0, len(row) - 2))
        row[place], row[place + 1] = row[place + 1], row[place]
    return replace(schedule, actions=tuple(map(tuple, rows)))


def has_an_order(schedule: Schedule) -> bool:
    """Says whether all computations can be put into one order: an arrow from each to what needs it, and along the rows, and no circle."""
    everything = {action for row in schedule.actions for action in row}
    graph = nx.DiGraph()
    for row in schedule.actions:
        graph.add_edges_from(pairwise(row))
    for stage, kind, microbatch in everything:
        before = {"F": [(stage - 1, "F")], "W": [(stage, "I")]}.get(kind, [(stage, "F"), (stage + 1, "B"), (stage + 1, "I")])
        for place, made_by in before:
            if Action(place, made_by, microbatch) in everything:
                graph.add_edge(Action(place, made_by, microbatch), Action(stage, kind, microbatch))
    return nx.is_directed_acyclic_graph(graph)


@given(shuffled(), st.sampled_from([0, 1, 3]))
def test_valid_means_that_there_is_an_order(schedule: Schedule, ahead: int) -> None:
    def is_valid(schedule: Schedule) -> bool:
        try:
            validate(schedule)
        except ScheduleError:
            return False
        return True

    assert is_valid(schedule) == has_an_order(schedule) == is_valid(lower(schedule, ahead=ahead))
