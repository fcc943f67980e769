"""The conformance suite on simulated ranks, with one run for each world size."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

import ringsim
from ringsim import comm, simulate
from ringsim.errors import RingError

sys.path.append(str(Path(__file__).parent / "distributed"))
import conformance

SKIPS = {
    **dict.fromkeys(
        ("strided_tensors_are_sent", "strided_tensors_are_received"),
        "a message must be contiguous, as on Gloo: see test_simulated_ranks",
    ),
    **dict.fromkeys(
        (f"{name}[strided]" for name in ("broadcast", "all_reduce", "reduce", "scatter")),
        (
            "gaps are refused, which Gloo would take as part of the tensor: see "
            "test_simulated_collectives"
        ),
    ),
    **dict.fromkeys(
        (f"a_wait_ends_at_its_limit[{unit}]" for unit in ("seconds", "timedelta")),
        "the limit is virtual time, and the rule looks at the real clock: see test_simulated_times",
    ),
}
LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)


def keep_the_rules(directory: str) -> None:
    """Runs the rules on one rank."""
    conformance.run_rules(comm, directory, SKIPS)


@pytest.mark.parametrize("world_size", conformance.WORLD_SIZES)
def test_simulated_ranks_keep_the_rules(tmp_path: Path, world_size: int) -> None:
    def run() -> str:
        try:
            with warnings.catch_warnings():
                # on ranks outside the group, an operation warns that it does nothing
                warnings.simplefilter("ignore")
                simulate(keep_the_rules, world_size=world_size, args=(str(tmp_path),), link=LINK)
        except RingError as error:
            return str(error)
        return ""

    conformance.check_job(tmp_path, world_size, SKIPS, run)
