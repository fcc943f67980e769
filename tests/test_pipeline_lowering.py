"""Sends and receives in schedules: typed-out rows, what must hold of every schedule, and torch's own lowering and dry run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, product

import pytest

from ringsim.errors import ArgumentError, ScheduleError
from ringsim.schedules import SCHEDULE_NAMES, make_schedule
from ringsim.schedules.costs import Costs
from ringsim.schedules.engine import evaluate, validate
from ringsim.schedules.lowering import get_recv, get_send, lower
from ringsim.schedules.schedule import RECV_KINDS, SEND_KINDS, Action, Schedule, parse_action

GRID = [(name, p, m) for name in SCHEDULE_NAMES for p, m in product((1, 2, 3, 4, 5, 8), (1, 2, 3, 5, 8, 16))]


def of_rows(stage_ranks: tuple[int, ...], *rows: str) -> Schedule:
    """Reads a schedule of rows of actions, as many microbatches as they name."""
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    return Schedule("typed", 1 + max(action.microbatch for row in actions for action in row), stage_ranks, actions)


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
    schedule = of_rows((0, 1), "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert rows_of(lower(schedule, ahead=ahead)) == rows


def test_nothing_is_sent_within_a_rank() -> None:
    one_rank = of_rows((0, 0), "0F0 1F0 1B0 0B0")
    assert lower(one_rank) == one_rank
    vee = of_rows((0, 1, 1, 0), "0F0 3F0 3I0 0I0 3W0 0W0", "1F0 2F0 2I0 1I0 2W0 1W0")
    assert rows_of(lower(vee, ahead=0)) == [
        "0F0 0SEND_F0 3RECV_F0 3F0 3I0 3SEND_B0 0RECV_B0 0I0 3W0 0W0",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2I0 1I0 1SEND_B0 2W0 1W0",
    ]


def test_a_message_that_is_needed_later_is_received_in_its_order() -> None:
    # Rank 0 sends 0SEND_F0, 0SEND_F1; rank 1 needs the second one first.
    crossed = of_rows((0, 1), "0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0")
    assert rows_of(lower(crossed, ahead=0))[1] == "1RECV_F0 1RECV_F1 1F1 1B1 1SEND_B1 1F0 1B0 1SEND_B0"
    validate(crossed)


def test_a_lowered_schedule_stays() -> None:
    lowered = lower(make_schedule("1f1b", 3, 4), ahead=0)
    assert lower(lowered) is lowered


@pytest.mark.parametrize(("name", "p", "m"), GRID)
def test_every_message_once_in_order_and_in_time(name: str, p: int, m: int) -> None:
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


@pytest.mark.parametrize(("name", "p", "m"), [(name, p, m) for name, p, m in GRID if p in (2, 3, 5) and m in (1, 3, 8)])
def test_posting_a_receive_earlier_never_costs_time(name: str, p: int, m: int) -> None:
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
        (of_rows((0, 1), "0F0 0B0", "1B0"), r"0SEND_F0 must be for a computation of stage 1, got none \(rank 0, after 0F0\)"),
        (of_rows((0, 1), "0F0", "1F0 1B0"), r"1SEND_B0 must be for a computation of stage 0, got none \(rank 1, after 1B0\)"),
        (of_rows((0, 1), "0B0", "1F0 1B0"), r"1F0 must have a 0SEND_F0 to wait for, got none \(rank 1\)"),
        (of_rows((0, 1), "0F0 0B0", "1F0 1B0 1I0"), r"1SEND_B0 must happen once, got it again \(rank 1, after 1I0\)"),
        (of_rows((0, 1), "0F0 0B0 0I0", "1F0 1B0"), r"0RECV_B0 must happen once, got it again for 0I0 \(rank 0\)"),
    ],
)
def test_refuses_messages_that_cannot_meet(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        lower(schedule)


def test_refuses_a_receive_after_its_use() -> None:
    with pytest.raises(ArgumentError, match="ahead must be 0 or more, got -1"):
        lower(make_schedule("gpipe", 2, 2), ahead=-1)


# torch: its own orders where they are right (its 1F1B is not), lowered by it, against ours.

TORCH_NAMES = {
    "gpipe": ("GPipe", None),
    "interleaved_1f1b": ("Interleaved1F1B", 2),
    "looped_bfs": ("LoopedBFS", 2),
    "zb_v": ("ZBVZeroBubble", 2),
    "dualpipe_v": ("DualPipeV", 2),
}
TORCH_GRID = [(name, p, m) for name in TORCH_NAMES for p, m in product((2, 3, 4), (1, 2, 3, 4, 6, 8, 9))]


def lower_by_torch(name: str, p: int, m: int, stage_ranks: tuple[int, ...]) -> Schedule | None:
    """Lets torch make and lower a schedule; None where it refuses to. Pairs of a forward and a backward count as one after the other."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
    from torch.distributed.pipelining.schedules import _add_send_recv

    torch_name, stages_a_rank = TORCH_NAMES[name]
    try:
        rows = get_schedule_ops(torch_name, p, m, stages_a_rank)
    except ValueError:
        return None
    computations = {
        rank: [
            part for action in row if action is not None for part in action.sub_actions or (action,) if part.microbatch_index is not None
        ]
        for rank, row in enumerate(rows)
    }
    lowered = _add_send_recv(computations, lambda stage: stage_ranks[stage], len(stage_ranks))
    actions = tuple(tuple(parse_action(str(action)) for action in lowered[rank]) for rank in range(p))
    return Schedule(f"torch's {name}", m, stage_ranks, actions)


@pytest.mark.parametrize(("name", "p", "m"), TORCH_GRID)
def test_lowers_as_torch_does(name: str, p: int, m: int) -> None:
    schedule = make_schedule(name, p, m)
    theirs = lower_by_torch(name, p, m, schedule.stage_ranks)
    if theirs is None:
        assert (name == "dualpipe_v" and m < 2 * p) or (name == "interleaved_1f1b" and m % max(1, m // p)), "torch refuses no other"
        return
    validate(theirs)
    ours = lower(schedule)
    without_recvs = [[[action for action in row if action.kind not in RECV_KINDS] for row in each.actions] for each in (ours, theirs)]
    assert without_recvs[0] == without_recvs[1]
    assert channels(ours) == channels(theirs)
    costs = Costs(forward=5, input=4, weight=3, latency=2)
    assert evaluate(ours, costs, "buffered").makespan == evaluate(theirs, costs, "buffered").makespan


@pytest.mark.parametrize(("name", "p", "m"), [*TORCH_GRID, *(("1f1b", p, m) for p, m in product((2, 3, 4), (1, 4, 9)))])
def test_torch_can_run_it_dry(name: str, p: int, m: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Its dry run ends a receive only when the message is sent, wherever the receive stands: a rank that waits at once, not at the use."""
    from torch.distributed.pipelining.schedules import _Action, _simulate_comms_compute

    schedule = lower(make_schedule(name, p, m), ahead=0)
    rows = {rank: [_Action.from_str(str(action)) for action in row] for rank, row in enumerate(schedule.actions)}
    done = _simulate_comms_compute(rows, lambda stage: schedule.stage_ranks[stage], schedule.num_stages)
    assert [sum(action is not None for action in done[rank]) for rank in range(p)] == [len(row) for row in schedule.actions]
    assert capsys.readouterr().out == ""  # where it is stuck, it says so and raises


def test_order_of_a_channel_is_checked() -> None:
    swapped = lower(make_schedule("gpipe", 2, 2), ahead=9)
    rows = [list(row) for row in swapped.actions]
    rows[1][0], rows[1][1] = rows[1][1], rows[1][0]
    with pytest.raises(ScheduleError, match=r"0SEND_F0 must meet 1RECV_F0, got 1RECV_F1 \(rank 0, position 3, to rank 1\)"):
        validate(replace(swapped, actions=tuple(map(tuple, rows))))
