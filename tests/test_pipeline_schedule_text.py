"""Schedules as text and CSV: read back as written, torch's form, errors that say where."""

from __future__ import annotations

import csv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.errors import ScheduleError
from ringsim.schedules import SCHEDULE_NAMES, make_schedule
from ringsim.schedules.lowering import lower
from ringsim.schedules.schedule import Action, Schedule, from_csv, from_text, to_csv, to_text

SCHEDULES = st.builds(make_schedule, st.sampled_from(SCHEDULE_NAMES), st.integers(1, 5), st.integers(1, 6))


@given(SCHEDULES, st.booleans())
def test_read_back_as_written(schedule: Schedule, with_messages: bool) -> None:
    schedule = lower(schedule) if with_messages else schedule
    assert from_text(to_text(schedule), name=schedule.name) == schedule
    assert from_csv(to_csv(schedule), name=schedule.name) == schedule


def test_text_is_for_people() -> None:
    assert to_text(make_schedule("1f1b", 3, 2)).splitlines() == [
        "rank 0: 0F0 0F1 0B0 0B1",
        "rank 1: 1F0 1F1 1B0 1B1",
        "rank 2: 2F0 2B0 2F1 2B1",
    ]


def test_empty_lines_and_indents_do_not_matter() -> None:
    text = """
        rank 0:  0F0  0B0

        rank 1: 1F0 1B0
    """
    assert from_text(text, name="gpipe") == make_schedule("gpipe", 2, 1)


def test_pauses_and_overlapped_pairs_of_torch() -> None:
    schedule = from_csv("0UNSHARD,0F0,0F1,,(0F2;0B0)OVERLAP_F_B\r\n,1F0, 1B0 ,1REDUCE_GRAD\r\n")
    assert [" ".join(map(str, row)) for row in schedule.actions] == ["0F0 0F1 0F2 0B0", "1F0 1B0"]
    assert schedule.num_microbatches == 3
    assert schedule.stage_ranks == (0, 1)


def test_a_rank_may_have_nothing_to_do() -> None:
    schedule = Schedule("own", 1, (0, 2), ((Action(0, "F", 0), Action(0, "B", 0)), (), (Action(1, "F", 0), Action(1, "B", 0))))
    assert from_text(to_text(schedule)) == schedule
    assert from_csv(to_csv(schedule)) == schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0", r"an action must be .* got '1X0'. .*\(row 2, column 2\)"),
        ("0F0,,0BW0", r"got '0BW0'.*\(row 1, column 3\)"),
        ("0F0,(0F1;oops)OVERLAP_F_B", r"got 'oops'.*\(row 1, column 2\)"),
        ("0F0,0B0\n1F0,0F1", r"a stage must be on one rank, got 0F1 on rank 1 where stage 0 is on rank 0 \(row 2, column 2\)"),
        ("0F0,0B0\n2F0,2B0", r"stages must be numbered from 0 without gaps, got 2 and no stage 1"),
        ("999999999F0", r"got 999999999 and no stage 0"),
        ("", r"at least one action, got none"),
        (",,\n,,", r"at least one action, got none"),
        ('0F0,"0B0', r"must be CSV, got text that is not"),
    ],
)
def test_csv_that_is_no_schedule(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        from_csv(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0: 0F0 0B0\nrank 2: 1F0 1B0", r"a line must begin with 'rank 1:', got 'rank 2: 1F0 1B0' \(line 2\)"),
        ("0F0 0B0", r"a line must begin with 'rank 0:', got '0F0 0B0' \(line 1\)"),
        ("rank 0: 0F0 0B0\nrank 1: 1F0 1Q0", r"got '1Q0'.*\(row 2, column 2\)"),
    ],
)
def test_text_that_is_no_schedule(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        from_text(text)


@given(st.text(alphabet="0123FBIW(;)OVERLAP_SENDRC, \n\"'", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (from_csv, from_text):
        try:
            schedule = read(text)
        except ScheduleError:
            continue
        assert schedule.num_stages > 0
        assert from_csv(to_csv(schedule)).actions == schedule.actions


def test_rows_are_plain_csv() -> None:
    assert list(csv.reader(to_csv(make_schedule("gpipe", 2, 2)).splitlines())) == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1F1", "1B0", "1B1"],
    ]
