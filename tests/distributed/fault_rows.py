"""The rows of the table in tests/distributed/faults.md.

Also the rows that end differently on simulated ranks, and the comparison of outcomes with a row.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import fault_programs_groups
import fault_programs_messages
import fault_programs_tensors
from accusations import accused
from fault_programs import FAULTS, Fault

import ringsim
from ringsim import Trace, errors

sys.path.append(str(Path(__file__).parents[1] / "programs"))
import wrong_collectives
import wrong_modules
import wrong_threads

# Importing them fills FAULTS.
PROGRAMS = (
    fault_programs_groups,
    fault_programs_messages,
    fault_programs_tensors,
    wrong_collectives,
    wrong_modules,
    wrong_threads,
)
# as users write them
AS_WRITTEN = {row for row, fault in FAULTS.items() if fault.worker.__module__.startswith("wrong_")}
DOCUMENT = Path(__file__).parent / "faults.md"
RIGHT = ("fine", "cannot be seen")  # such a program ends well
LIMIT_S = 60  # limit of a run; no run here comes close


class Row(NamedTuple):
    """A documented fault.

    It has a kind of finding, or one of RIGHT; the ranks it may name; and the errors that may be
    raised. The ranks are in the order of the finding, the culprit first.
    """

    kind: str
    ranks: tuple[tuple[int, ...], ...]
    errors: tuple[str, ...]


def read_rows() -> dict[str, Row]:
    """Returns the rows of the document's table by their number."""
    rows = {}
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"\d+[a-z]?", cells[0]):
            number, _, _, kind, ranks, error, _ = cells
            assert number not in rows, f"row {number} appears twice"
            named = tuple(
                tuple(int(rank) for rank in some.split(",") if rank) for some in ranks.split(" or ")
            )
            rows[number] = Row(kind, named, tuple(error.split(" or ")))
    return rows


ROWS = read_rows()
ALIVE, TIME, MEET, THREADS = (
    "a simulated rank is no process that could die or get a signal",
    "only a limit in real time ends it",
    "simulated ranks need no rendezvous: the ring is there",
    "a simulated rank has one thread",
)
ELSEWHERE: dict[str, str] = {  # rows that are not run, with the reason
    **dict.fromkeys(("6b", "7b", "19", "68b", "90a", "90c"), TIME),
    "26e": "a sleep takes no time of the virtual clock",
    **dict.fromkeys(("21", "22", "69", "89a"), ALIVE),
    **dict.fromkeys("30 31a 31b 32a 32b 34 35 36 37a 37b 38 39a 39b 40 54".split(), MEET),
    "53b": "simulated ranks have joined before they begin",
    **dict.fromkeys(("63", "64", "67b"), "check='full' belongs to real ranks"),
    "60": "tensors without data travel here, as sizes",
    **dict.fromkeys(("70", *(f"88{letter}" for letter in "abcdefgh")), THREADS),
    "81": "is_completed() is true when the message has come",
}
OTHERWISE: dict[str, Row] = {  # rows with slightly different outcomes, see faults.md
    "59": Row("fine", (), ("none",))
}


class Outcome(NamedTuple):
    """The end of a run: the error, if any, and the trace."""

    error: errors.RingError | errors.Interrupted | None
    trace: Trace | None


def run(fault: Fault) -> Outcome:
    """Runs a program on real ranks."""
    try:
        trace = ringsim.trace(
            fault.worker,
            world_size=fault.size,
            args=fault.args(),
            **{"limit_s": LIMIT_S, **fault.options},
        )
    except (errors.RingError, errors.Interrupted) as error:
        return Outcome(error, error.trace)
    assert set(trace.results) <= {None, True}
    return Outcome(None, trace)


def judge(number: str, row: Row, error: Any, trace: Trace | None) -> None:
    """Compares the end of a row's program with the row.

    It compares the error, the kind of the finding, its ranks and lines.
    """
    fault = FAULTS[number]
    assert ("none" if error is None else type(error).__name__) in row.errors, error
    if row.kind in RIGHT:
        assert trace is not None
        assert accused(trace) == []
        return
    diagnosis = trace.explain() if error is None and trace is not None else error.diagnosis
    first = diagnosis.findings[0]
    assert first.kind == row.kind, str(diagnosis)
    assert first.ranks in row.ranks, str(diagnosis)
    named = {operation.line for operation in first.operations}
    assert named <= fault.lines
    said = {int(digits) for digits in re.findall(r"(?:\.py:|line )(\d+)", f"{error}\n{first}")}
    assert fault.lines - named <= said
    if trace is not None:
        again = trace.explain().findings[0]
        assert again.kind == first.kind
        assert again.ranks in row.ranks


def judge_on_ranks(number: str, outcome: Outcome) -> None:
    """Compares the end of a run on real ranks with its row.

    Also checks the time after its last event.
    """
    error, trace = outcome
    judge(number, ROWS[number], error, trace)
    within_s = FAULTS[number].within_s
    if trace is None or within_s is None or not len(trace):
        return
    frame = trace.to_pandas()
    frame.loc[frame["status"] != "ok", "done_ns"] = 0  # the verdict ended the others
    last_ns = frame[["post_ns", "wait_ns", "done_ns"]].max().max()
    assert (trace.metadata["end_ns"] - last_ns) / 1e9 < within_s
