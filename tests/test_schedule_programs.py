"""Programs of sends and receives on a clock: matching messages, and ranks that wait forever."""

from __future__ import annotations

import pytest

from ringsim.schedules.programs import (
    Compute,
    Delivery,
    Instruction,
    Receive,
    Run,
    Send,
    Wait,
    run_programs,
)


def blocking(*posts: Instruction) -> list[Instruction]:
    """Writes a program of blocking sends and receives: each post is followed by its wait."""
    program: list[Instruction] = []
    for post in posts:
        program.append(post)
        if not isinstance(post, Compute):
            program.append(Wait(len(program) - 1))
    return program


def test_a_message_travels_when_both_sides_are_posted() -> None:
    #           0    1    2    3    4    5    6    7
    # rank 0    ==== compute 2, send --------- arrives at 5 + 2
    # rank 1    =================== compute 5, receive ----
    programs = [[Compute(2), Send(1), Wait(1)], [Compute(5), Receive(0), Wait(1)]]
    run = run_programs(programs, latency=2)
    assert run == Run(
        times=(((0, 2), (2, 2), (2, 7)), ((0, 5), (5, 5), (5, 7))),
        messages=(Delivery(0, 1, 1, 1, posted=2, arrived=7),),
        blocked=(),
    )
    buffered = run_programs(programs, latency=2, semantics="buffered")
    assert buffered.times == (((0, 2), (2, 2), (2, 2)), ((0, 5), (5, 5), (5, 5)))
    assert buffered.messages == (Delivery(0, 1, 1, 1, posted=2, arrived=5),)


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
    # one of them receives first, which is the usual remedy
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
