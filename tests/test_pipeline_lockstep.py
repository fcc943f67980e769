"""Sends and receives for transports that do a pair's messages one after the other; they are modelled: a stream a pair, as NCCL has."""

from __future__ import annotations

from itertools import product

import pytest

from ringsim.errors import ScheduleError
from ringsim.schedules import SCHEDULE_NAMES, make_schedule
from ringsim.schedules.costs import Costs
from ringsim.schedules.engine import Compute, Operation, Receive, Run, Send, Wait, evaluate, run_programs, validate
from ringsim.schedules.lowering import get_recv, lower, lower_in_step
from ringsim.schedules.schedule import RECV_KINDS, SEND_KINDS, Action, Schedule, parse_action

GRID = [(name, p, m) for name in SCHEDULE_NAMES for p, m in product((1, 2, 3, 4, 6), (1, 2, 3, 5, 8, 13))]


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


@pytest.mark.parametrize(("name", "p", "m"), GRID)
def test_a_pair_posts_in_one_order(name: str, p: int, m: int) -> None:
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


@pytest.mark.parametrize(("name", "p", "m"), [(name, p, m) for name, p, m in GRID if m in (3, 8)])
def test_costs_no_time_where_messages_take_none(name: str, p: int, m: int) -> None:
    schedule = make_schedule(name, p, m)
    assert evaluate(lower_in_step(schedule)).makespan == evaluate(schedule).makespan
    costs = Costs(latency=3)
    assert evaluate(lower_in_step(schedule), costs).makespan >= evaluate(schedule, costs, "buffered").makespan


def test_a_lowered_schedule_stays() -> None:
    lowered = lower(make_schedule("1f1b", 3, 4))
    assert lower_in_step(lowered) is lowered


def test_says_where_nobody_can_go_on() -> None:
    rows = ("0F1 0B1 0F0 0B0", "1F0 1B0 1F1 1B1")
    circle = Schedule("circle", 2, (0, 1), tuple(tuple(map(parse_action, row.split())) for row in rows))
    with pytest.raises(ScheduleError, match="got none that can: 0B1 on rank 0, 1F0 on rank 1"):
        lower_in_step(circle)
