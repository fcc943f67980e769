"""Wrong programs as people write them, in tests/programs: each ends as its row of docs/faults.md says.

Those that use functions of ``torch.distributed`` alone run on simulated ranks, see test_simulated_faults, and a few of them here, too.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from fault_programs import FAULTS
from fault_rows import AS_WRITTEN, ELSEWHERE, OTHERWISE, Outcome, judge_on_ranks, run

import ringsim

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("nothing_left_behind")]

ALIKE = ("74b", "77a", "80b")  # on simulated ranks
HERE = sorted(AS_WRITTEN & {*ELSEWHERE, *OTHERWISE, *ALIKE})
AT_ONCE = 4


@pytest.fixture(scope="module")
def ended(nothing_left_behind: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Outcome]]:
    """How the programs ended, side by side: most of them wait for something."""
    early = tmp_path_factory.mktemp("early")
    (early / "sitecustomize.py").write_text("import torch._dynamo\n")  # DDP, FSDP and DTensor load it: 1 s in each of their ranks
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(early), prepend=os.pathsep)
        ringsim.trace(time.monotonic, world_size=2)  # starts what ranks are forked from
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {number: pool.submit(run, FAULTS[number]) for number in HERE}


@pytest.mark.parametrize("number", HERE)
def test_a_wrong_program_ends_as_the_document_says(number: str, ended: dict[str, Future[Outcome]]) -> None:
    judge_on_ranks(number, ended[number].result())
