"""The programs of docs/faults.md on simulated ranks: they end as the document says of real ones, with the same findings."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

import pytest

import ringsim
from ringsim import comm, errors
from ringsim.simulator.api import simulate

sys.path.append(str(Path(__file__).parent / "distributed"))
import fault_programs_groups
import fault_programs_messages
import fault_programs_tensors
from fault_programs import FAULTS
from test_faults_table import LATE, RIGHT, ROWS, Row

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)
ALIVE, TIME, MEET = (
    "processes and signals are not simulated",
    "only a limit in real time ends it",
    "simulated ranks need no rendezvous: the ring is there",
)
ELSEWHERE: dict[str, str] = {  # rows that are not run, and why
    **dict.fromkeys(("6b", "7b", "19"), TIME),
    **dict.fromkeys(("13a", "13b"), "tensors with gaps travel well here"),
    "14": "the same argument is refused, and the finding is that a rank raised",
    **dict.fromkeys(("20", "21", "22", "69"), ALIVE),
    **dict.fromkeys(("30", "31a", "31b", "32a", "32b", "34", "35", "36", "37a", "37b", "38", "39a", "39b", "40", "54"), MEET),
    "53b": "simulated ranks have joined before they begin",
    **dict.fromkeys(("63", "64", "67b"), "check='full' belongs to real ranks"),
    "60": "tensors without data travel here, as sizes",
    "68": "a wait that has ended at its limit leaves the operation, and the group, as they are",
    "70": "a rank has one thread",
}
OTHERWISE: dict[str, Row] = {  # rows that end a little differently, see docs/simulation.md
    "46b": Row("invalid_argument", ({0},), ("ArgumentError",)),
    "51a": Row("invalid_argument", ({0},), ("ArgumentError",)),
    "51b": Row("invalid_argument", ({0},), ("ArgumentError",)),
    "53c": Row("rank_failed", ({0}, {1}), ("RingError",)),
    "59": Row("fine", (), ("none",)),
    "61": Row("rank_failed", ({0},), ("ArgumentError",)),
}
NUMBERS = [number for number in ROWS if number not in ELSEWHERE]


@pytest.fixture(autouse=True)
def on_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs call torch.distributed by the name of a module, which is that of ringsim.comm here."""
    for module in (fault_programs_groups, fault_programs_messages, fault_programs_tensors):
        monkeypatch.setattr(module, "dist", comm)
    monkeypatch.setattr(fault_programs_groups, "my_rank", comm.get_rank)  # nobody sets RANK here


@pytest.mark.timeout(20)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_fault_ends_as_the_document_says(number: str) -> None:
    row, fault = OTHERWISE.get(number, ROWS[number]), FAULTS[number]
    error: errors.RingError | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some programs are wrong in that way
        try:
            trace = simulate(fault.worker, world_size=fault.size, args=fault.args(), link=LINK)
        except errors.RingError as raised:
            error = raised
    assert ("none" if error is None else type(error).__name__) in row.errors, error
    if row.kind in RIGHT:
        assert [finding.kind for finding in trace.explain().findings if finding.kind not in LATE] == []
        return
    diagnosis = trace.explain() if error is None else error.diagnosis
    first = diagnosis.findings[0]
    assert first.kind == row.kind, str(diagnosis)
    assert set(first.ranks) in row.ranks, str(diagnosis)
    named = {operation.line for operation in first.operations}
    assert named <= fault.lines
    said = {int(digits) for digits in re.findall(r"(?:\.py:|line )(\d+)", f"{error}\n{first}")}
    assert fault.lines - named <= said


def test_every_exception_names_a_row_and_its_reason() -> None:
    assert set(ELSEWHERE) | set(OTHERWISE) <= set(ROWS)
    assert not set(ELSEWHERE) & set(OTHERWISE)
    assert all(ELSEWHERE.values())
