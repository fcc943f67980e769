"""Schedules against those of torch.distributed.pipelining, where its own are right (those of 1F1B and ZB-H1 differ in its text form).

torch 2.13's ``Schedule1F1B`` writes the last rank's row without its first forward and with one too many at the end, though it does not run
that row; so 1F1B is held against closed forms only. Its interleaved schedules want equal rounds, DualPipeV two microbatches a rank.
"""

from __future__ import annotations

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _simulate_comms_compute, _validate_schedule

from ringsim.schedules import SCHEDULE_NAMES, make_schedule
from ringsim.schedules.closed_forms import dualpipe_v_overlapped_idle
from ringsim.schedules.lowering import lower
from ringsim.schedules.schedule import Schedule, from_csv, parse_action, to_csv

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
    for num_ranks in range(1, 7):
        for num_microbatches in range(1, 15):
            if allowed(name, num_ranks, num_microbatches):
                rows = get_schedule_ops(theirs, num_ranks, num_microbatches, num_stages_per_rank=num_chunks)
                text = "\n".join(",".join("" if action is None else str(action) for action in row) for row in rows)
                schedule = make_schedule(name, num_ranks, num_microbatches, num_chunks)
                assert from_csv(text, name=name) == schedule, (num_ranks, num_microbatches)


def read_by_torch(schedule: Schedule) -> dict[int, list[_Action | None]]:
    """Reads a schedule's CSV as torch does."""
    return {rank: [_Action.from_str(cell) for cell in line.split(",")] for rank, line in enumerate(to_csv(schedule).splitlines())}


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_torch_accepts_every_schedule(name: str) -> None:
    for num_ranks, num_microbatches in [(1, 1), (2, 3), (3, 2), (4, 8), (5, 12)]:
        schedule = make_schedule(name, num_ranks, num_microbatches)
        rows = read_by_torch(schedule)
        owners = _validate_schedule(rows, num_ranks, schedule.num_stages, num_microbatches)
        assert tuple(owners[stage] for stage in range(schedule.num_stages)) == schedule.stage_ranks
        with_messages = _add_send_recv(rows, schedule.stage_ranks.__getitem__, schedule.num_stages)
        _simulate_comms_compute(with_messages, schedule.stage_ranks.__getitem__, schedule.num_stages)
        ours = {str(action) for row in lower(schedule).actions for action in row}
        assert ours == {str(action) for row in with_messages.values() for action in row}


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
