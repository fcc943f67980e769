"""Schedules: drawn here as staircases, complete, in an order that works, with few microbatches too."""

from __future__ import annotations

import pytest

from ringsim.errors import ArgumentError, RingError, ScheduleError
from ringsim.schedules import SCHEDULE_NAMES, make_schedule
from ringsim.schedules.costs import Costs
from ringsim.schedules.engine import evaluate, validate
from ringsim.schedules.schedule import Action, Schedule

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
    for rank, line in enumerate(ROWS[case].strip().splitlines()):
        chunks = schedule.stages_of(rank)
        shown = [f"{kind}{microbatch}{chr(39) * chunks.index(stage)}" for stage, kind, microbatch in schedule.actions[rank]]
        assert " ".join(shown) == line.strip()


@pytest.mark.parametrize(("name", "num_chunks"), ALL)
def test_every_schedule_works_for_any_number_of_microbatches(name: str, num_chunks: int | None) -> None:
    for num_ranks in range(1, 6):
        for num_microbatches in range(1, 12):
            schedule = make_schedule(name, num_ranks, num_microbatches, num_chunks)
            assert schedule.num_ranks == num_ranks
            assert schedule.num_microbatches == num_microbatches
            assert not schedule.lowered
            validate(schedule)


@pytest.mark.parametrize(("name", "num_chunks"), ALL)
def test_every_action_comes_once(name: str, num_chunks: int | None) -> None:
    """Without the validation: counted here."""
    schedule = make_schedule(name, 4, 9, num_chunks)
    actions = [action for row in schedule.actions for action in row]
    assert len(set(actions)) == len(actions)
    for stage, rank in enumerate(schedule.stage_ranks):
        assert stage in schedule.stages_of(rank)
        for microbatch in range(9):
            kinds = "".join(kind for kind in "FBIW" if Action(stage, kind, microbatch) in schedule.actions[rank])
            assert kinds in ("FB", "FIW")
    assert len(actions) == sum(3 if Action(stage, "I", j) in actions else 2 for stage in range(schedule.num_stages) for j in range(9))


@pytest.mark.parametrize(
    ("name", "stage_ranks"),
    [("1f1b", (0, 1, 2)), ("interleaved_1f1b", (0, 1, 2, 0, 1, 2)), ("looped_bfs", (0, 1, 2, 0, 1, 2)), ("zb_v", (0, 1, 2, 2, 1, 0))],
)
def test_placement(name: str, stage_ranks: tuple[int, ...]) -> None:
    assert make_schedule(name, 3, 2).stage_ranks == stage_ranks


def test_afab_is_gpipe() -> None:
    assert make_schedule("afab", 3, 4) == make_schedule("gpipe", 3, 4)


def test_all_forwards_come_before_all_backwards_in_gpipe() -> None:
    for row in make_schedule("gpipe", 4, 5).actions:
        assert "".join(action.kind for action in row) == "FFFFFBBBBB"


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (("1f2b", 2, 2), ScheduleError, "a schedule must be one of .*1f1b.*, got '1f2b'"),
        (("zb_v", 2, 2, 3), ScheduleError, "num_chunks of zb_v must be 2, got 3. Leave it out, or take interleaved_1f1b or looped_bfs."),
        (("1f1b", 2, 2, 2), ScheduleError, "num_chunks of 1f1b must be 1, got 2"),
        (("1f1b", 0, 2), ArgumentError, "num_ranks must be 1 or more, got 0"),
        (("gpipe", 2, 0), ArgumentError, "num_microbatches must be 1 or more, got 0"),
        (("looped_bfs", 2, 2, 0), ArgumentError, "num_chunks must be 1 or more, got 0"),
        (("zb_h1", 2, -1), ArgumentError, "num_microbatches must be 1 or more, got -1"),
        (("dualpipe_v", -2, 1), ArgumentError, "num_ranks must be 1 or more, got -2"),
    ],
)
def test_refused(args: tuple[str, int, int], error: type[RingError], message: str) -> None:
    with pytest.raises(error, match=message):
        make_schedule(*args)
