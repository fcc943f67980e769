"""The conformance suite on simulated ranks: one run for each world size."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

import ringsim
from ringsim import comm
from ringsim.errors import RingError
from ringsim.simulator.api import simulate

sys.path.append(str(Path(__file__).parent / "distributed"))
import conformance

SKIPS = {
    **dict.fromkeys(
        (f"a_wait_ends_at_its_limit[{unit}]" for unit in ("seconds", "timedelta")),
        "the limit is virtual time, and the rule looks at the real clock: see test_simulated_waits",
    ),
}
LINK = ringsim.Link(alpha_s=1e-5, beta_s_per_byte=1e-10)


def keep_the_rules(directory: str) -> None:
    """Runs the rules on one rank."""
    conformance.run_rules(comm, directory, SKIPS)


class Job:
    """One run of the suite for each world size, when it is asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.found: dict[int, tuple[dict[str, str], str]] = {}

    def verdict(self, world_size: int, name: str) -> str:
        """Returns what is wrong with a rule, "" if nothing."""
        if world_size not in self.found:
            directory = self.directory / str(world_size)
            directory.mkdir()
            ended = ""
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # outside of a group an operation says that it does nothing
                    simulate(keep_the_rules, world_size=world_size, args=(str(directory),), link=LINK)
            except RingError as error:
                ended = str(error)
            self.found[world_size] = conformance.read_verdicts(directory, world_size), ended
        verdicts, ended = self.found[world_size]
        return verdicts.get(name, f"{conformance.NOT_REACHED}: {ended}")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("simulator"))


@pytest.mark.parametrize(("world_size", "name"), conformance.cases(SKIPS))
def test_simulated_ranks_keep_the_rule(job: Job, world_size: int, name: str) -> None:
    assert job.verdict(world_size, name) == ""


def test_every_exception_names_a_rule_and_its_reason() -> None:
    assert set(SKIPS) <= set(conformance.load_rules())
    assert all(SKIPS.values())
