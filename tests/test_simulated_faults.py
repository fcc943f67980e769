"""The first programs of docs/faults.md on simulated ranks: they end as the document says of real ones, with the same findings."""

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
from test_faults_table import LATE, RIGHT, ROWS

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)
ELSEWHERE: dict[str, str] = {
    "6b": "only a limit in real time ends it",
    "7b": "the same",
    "13a": "tensors with gaps travel well here",
    "13b": "the same",
    "14": "the same",
}
# Those of messages and of tensors; in the later ones processes die, or real time passes.
NUMBERS = [number for number in ROWS if int(re.sub("[a-z]", "", number)) < 19 and number not in ELSEWHERE]


@pytest.fixture(autouse=True)
def on_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs call torch.distributed by the name of a module, which is that of ringsim.comm here."""
    for module in (fault_programs_groups, fault_programs_messages, fault_programs_tensors):
        monkeypatch.setattr(module, "dist", comm)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_fault_ends_as_the_document_says(number: str) -> None:
    row, fault = ROWS[number], FAULTS[number]
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
    assert set(ELSEWHERE) <= set(ROWS)
    assert all(ELSEWHERE.values())
