"""Lists of operations run in order: against drawn orders of the ranks, typed-out cases, and what Gloo was seen to do in the token ring."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.errors import ArgumentError
from ringsim.schedules.costs import Time
from ringsim.schedules.engine import Compute, Message, Operation, Receive, Run, Semantics, Send, Wait, run_programs

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


def test_times_stay_exact() -> None:
    run = run_programs([[Compute(Fraction(1, 3)), Compute(Fraction(2, 3))]])
    assert run.times[0][-1][1] == 1
    assert isinstance(run.times[0][-1][1], Fraction)


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


def test_refuses_unknown_semantics() -> None:
    with pytest.raises(ArgumentError, match="semantics must be one of rendezvous, buffered, got 'eager'"):
        run_programs([], semantics="eager")  # type: ignore[arg-type]


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


# The token ring of generation: which settings come to an end on Gloo was found on real ranks.


def token_ring(num_stages: int, num_inner: int, *, together_: bool) -> Programs:
    """Writes two batches of three tokens: what a stage made in one job leaves when its next job starts."""
    jobs = [(token, inner) for _ in range(2) for token in range(3) for inner in range(num_inner)]
    programs: Programs = []
    for rank in range(num_stages):
        program: list[Operation] = []
        for last, job in zip([None, *jobs], [*jobs, None], strict=True):
            sends = last is not None and not (rank == num_stages - 1 and last[0] == 2)
            receives = job is not None and not (rank == 0 and job[0] == 0)
            posts: list[Operation] = [Send((rank + 1) % num_stages)] * sends + [Receive((rank - 1) % num_stages)] * receives
            if rank == 0:
                posts.reverse()  # the first stage receives first
            written = together(*posts) if together_ else blocking(*posts)
            program += [Wait(each.position + len(program)) if isinstance(each, Wait) else each for each in written]
            program.append(Compute(1))
        programs.append(program)
    return programs


@pytest.mark.parametrize(("num_stages", "num_inner"), [(n, t) for n, t in product(range(2, 6), range(1, 12)) if t <= 2 * n + 1])
def test_token_ring_ends_where_it_does_on_gloo(num_stages: int, num_inner: int) -> None:
    one_by_one = run_programs(token_ring(num_stages, num_inner, together_=False))
    assert (not one_by_one.blocked) == (2 <= num_inner <= num_stages)
    at_once = run_programs(token_ring(num_stages, num_inner, together_=True))
    assert (not at_once.blocked) == (num_inner <= 2 * num_stages - 1)
    assert bool(one_by_one.cycle) == bool(one_by_one.blocked)
