"""Fixtures and hooks for all tests.

They order the tests, set seeds, clean the environment, reset the rank state, and look for processes
left behind.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import cloudpickle
import hypothesis
import numpy as np
import pytest
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider
from hypothesis.internal.constants_ast import Constants
from processes import RANK_VARIABLES, descendants, read

from ringsim.errors import Interrupted, RingError
from ringsim.state import RankState, change_state, get_state
from ringsim.traces.findings import Diagnosis

pytest_plugins = ["verdicts"]  # for its fixture

# A property is tried on the same few examples in every run, and on many new ones in `make soak`.
# There are no deadlines, because ranks share the cores.
IGNORED = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
hypothesis.settings.register_profile(
    "soak", max_examples=600, deadline=None, suppress_health_check=IGNORED
)
hypothesis.settings.register_profile(
    "ringsim",
    hypothesis.settings.get_profile("soak"),
    max_examples=25,
    derandomize=True,
    database=None,
)
hypothesis.settings.load_profile("ringsim")


class SameConstants(HypothesisProvider):
    """Draws no constants from loaded modules, because those depend on the tests before."""

    _local_constants = Constants()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hypothesis-profile") != "soak":
        AVAILABLE_PROVIDERS["hypothesis"] = SameConstants


# A shell that starts the tests in the background may make them ignore Ctrl-C, and every process
# that a test starts would inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Long tests for which similar shorter ones exist; `make test-long` runs them. A line is a test, one
# of its cases ("test[case]"), or all its cases except the first ("test[").
LONG = frozenset((Path(__file__).parent / "long.txt").read_text().split("\n"))
LEFT_BEHIND_AFTER_S = 60.0  # a process that is ending gets this long to do so
# The names of the fork server, fresh ranks and browsers, which may stay for the next call or the
# next test.
WAITING = ("ringsim-server", "ringsim-parked", "ringsim-idle", "chrom")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs quick tests first, then those on real ranks, then the lessons.

    A bug that breaks everything then shows early. Workers are pickled by value, as from a notebook,
    so that no rank imports pytest.
    """
    for module in {getattr(item, "module", None) for item in items} - {None}:
        cloudpickle.register_pickle_by_value(module)
    seen: set[str] = set()
    for item in items:
        if "distributed" in item.path.parts:
            item.add_marker("distributed")
            # These run one after the other, while another process runs the rest. MPI jobs have
            # their own group, because they share nothing with other ranks.
            item.add_marker(pytest.mark.xdist_group("mpi" if "mpi" in item.path.stem else "ranks"))
        elif "notebook" in item.path.stem:
            item.add_marker("notebooks")
        if (
            item.get_closest_marker("soak")
            and item.config.getoption("--hypothesis-profile") != "soak"
        ):
            item.add_marker(pytest.mark.skip(reason="takes long: make soak"))
        name = item.nodeid.removeprefix("tests/")
        test = name.partition("[")[0]
        if not LONG.isdisjoint({name, test} | ({f"{test}["} & seen)):
            item.add_marker("long")
        seen.add(f"{test}[")
        if item.get_closest_marker("long") and item.config.getoption("markexpr") != "long":
            item.add_marker(pytest.mark.skip(reason="takes long: make test-long"))
    items.sort(
        key=lambda item: (
            2
            if item.get_closest_marker("notebooks")
            else 1
            if item.get_closest_marker("distributed")
            else 0
        )
    )


@pytest.fixture(scope="session", autouse=True)
def empty_diagnoses() -> Iterator[list[str]]:
    """Collects errors of runs whose diagnosis has no finding.

    Such an error reports that nothing is wrong.
    """
    found: list[str] = []

    def set_attribute(self: BaseException, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "diagnosis" and isinstance(value, Diagnosis) and not value.findings:
            found.append(f"{type(self).__name__}: {self}")

    with pytest.MonkeyPatch.context() as patch:
        for error in (RingError, Interrupted):
            patch.setattr(error, "__setattr__", set_attribute)
        yield found


@pytest.fixture(autouse=True)
def every_diagnosis_finds_something(empty_diagnoses: list[str]) -> Iterator[None]:
    yield
    found = [empty_diagnoses.pop() for _ in list(empty_diagnoses)]
    assert not found, "an error must not have a diagnosis without findings"


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(autouse=True)
def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
        # with tensors this small, several threads mostly wait for each other
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(RANK_VARIABLES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MPLBACKEND", "agg")  # no window


@pytest.fixture(autouse=True)
def fresh_state(clean_environment: None) -> Iterator[None]:
    """Gives each test the default rank state, and restores it afterwards.

    There is no ring and no recorder, and ``print`` is the built-in one.
    """
    yield
    if get_state().ring is not None:
        from ringsim import destroy_distributed

        destroy_distributed()
    undo_print = get_state().undo_print
    if undo_print is not None:
        undo_print()
    change_state(**{field.name: field.default for field in fields(RankState) if field.init})


@pytest.fixture(autouse=True)
def no_process_left(fresh_state: None) -> Iterator[None]:
    """Fails a test that leaves a process behind.

    Processes of ringsim that wait for the next call may stay.
    """
    before = busy_processes()
    yield
    deadline = time.monotonic() + LEFT_BEHIND_AFTER_S
    while (left := busy_processes().keys() - before.keys()) and time.monotonic() < deadline:
        time.sleep(0.01)
    if left:
        pytest.fail("processes left behind: " + "; ".join(describe(pid) for pid in sorted(left)))


def busy_processes() -> dict[int, str]:
    """Returns the descendants of this process, except those that only wait for the next call."""
    multiprocessing.active_children()  # reaps those that have ended
    return {
        pid: name for pid, name in descendants(os.getpid()).items() if not name.startswith(WAITING)
    }


def describe(pid: int) -> str:
    command = read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()
    return f"{pid} ({command[:120] or 'a zombie: not waited for'})"
