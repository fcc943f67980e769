"""Every row of the table in docs/faults.md is run on real ranks, and must end as the document says."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import NamedTuple

import fault_programs_groups
import fault_programs_messages
import fault_programs_tensors
import pytest
from fault_programs import FAULTS, Fault

import ringsim
from ringsim import errors
from ringsim.traces.events import OK, Events
from ringsim.traces.value import Trace

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("nothing_left_behind")]

PROGRAMS = (fault_programs_groups, fault_programs_messages, fault_programs_tensors)  # importing them fills FAULTS
DOCUMENT = Path(__file__).parents[2] / "docs" / "faults.md"
RIGHT = ("fine", "cannot be seen")  # such a program ends well
LATE = ("late_sender", "late_receiver", "straggler")  # on a loaded machine somebody always waits
LIMIT_S = 60  # of a run; nothing here comes near it


class Row(NamedTuple):
    """What the document says of one fault: a kind of finding, or one of RIGHT; the ranks it may name; the errors that may be raised."""

    kind: str
    ranks: tuple[set[int], ...]
    errors: tuple[str, ...]


def read_rows() -> dict[str, Row]:
    """Returns the rows of the document's table by their number."""
    rows = {}
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"\d+[a-z]?", cells[0]):
            number, _, _, kind, ranks, error, _ = cells
            assert number not in rows, f"row {number} is there twice"
            named = tuple({int(rank) for rank in some.split(",") if rank} for some in ranks.split(" or "))
            rows[number] = Row(kind, named, tuple(error.split(" or ")))
    return rows


ROWS = read_rows()


@pytest.fixture(scope="module", autouse=True)
def warm(nothing_left_behind: None) -> None:
    """The first run loads torch: none of those that a limit must end."""
    ringsim.trace(time.monotonic, world_size=2)


def test_every_row_has_a_program_and_every_program_a_row() -> None:
    assert ROWS.keys() == FAULTS.keys()
    assert {int(re.sub("[a-z]", "", row)) for row in ROWS} == set(range(1, 72))


@pytest.mark.parametrize("number", list(ROWS))
def test_a_fault_ends_as_the_document_says(number: str) -> None:
    row, fault = ROWS[number], FAULTS[number]
    error, trace = run(fault)
    assert ("none" if error is None else type(error).__name__) in row.errors, error
    if row.kind in RIGHT:
        assert trace is not None
        assert [finding.kind for finding in trace.explain().findings if finding.kind not in LATE] == []
        return
    diagnosis = trace.explain() if error is None and trace is not None else error.diagnosis  # type: ignore[union-attr]
    first = diagnosis.findings[0]
    assert first.kind == row.kind, str(diagnosis)
    assert set(first.ranks) in row.ranks, str(diagnosis)
    named = {operation.line for operation in first.operations}
    assert named <= fault.lines
    said = {int(digits) for digits in re.findall(r"(?:\.py:|line )(\d+)", f"{error}\n{first}")}
    assert fault.lines - named <= said
    if trace is not None:
        again = trace.explain().findings[0]
        assert again.kind == first.kind
        assert set(again.ranks) in row.ranks
        if fault.within_s is not None and len(trace.events):
            assert trace.metadata["end_ns"] / 1e9 - last_event_s(trace.events) < fault.within_s


def run(fault: Fault) -> tuple[errors.RingError | errors.Interrupted | None, Trace | None]:
    """Runs a program; returns the error it ended with, if any, and what was recorded."""
    options = {"limit_s": LIMIT_S, **fault.options}
    try:
        trace = ringsim.trace(fault.worker, world_size=fault.size, args=fault.args(), **options)
    except (errors.RingError, errors.Interrupted) as error:
        return error, error.trace
    assert set(trace.results) <= {None, True}
    return None, trace


def last_event_s(events: Events) -> float:
    """Returns when the last operation was posted, waited for or done, in seconds from the start of the run."""
    done = events.done_ns[events.status == OK]  # others are ended by the verdict
    return float(max(events.post_ns.max(), events.wait_ns.max(), done.max(initial=0))) / 1e9
