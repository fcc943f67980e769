"""Tests of the programs of tests/distributed/faults.md on simulated ranks.

They end as documented for real ranks, with the same findings.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

import ringsim
from ringsim import errors, simulate

sys.path.append(str(Path(__file__).parent / "distributed"))
from fault_programs import FAULTS
from fault_rows import ELSEWHERE, OTHERWISE, ROWS, judge

LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)
NUMBERS = [number for number in ROWS if number not in ELSEWHERE]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_fault_ends_as_the_document_says(number: str) -> None:
    fault, error, trace = FAULTS[number], None, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mistake of some programs
        try:
            trace = simulate(fault.worker, world_size=fault.size, args=fault.args(), link=LINK)
        except errors.RingError as raised:
            error, trace = raised, raised.trace
    judge(number, OTHERWISE.get(number, ROWS[number]), error, trace)
