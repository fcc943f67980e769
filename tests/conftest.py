"""What every test gets: an order, a seed, a clean environment, a rank state of its own, and a look for processes left behind."""

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

import hypothesis
import numpy as np
import pytest

from ringsim.state import RankState, change_state, get_state

# Two cores are shared by many ranks: how long one example takes says nothing.
hypothesis.settings.register_profile("ringsim", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("ringsim")

# A shell that starts the tests in the background may have Ctrl-C ignored, which every process that a test starts would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Set by launchers and schedulers, and read by torch.distributed, by Gloo or by ringsim: a test must not see the caller's.
RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_", "SLURM_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "GLOO_", "NCCL_", "TORCH_DISTRIBUTED_", "RINGSIM_"),
)
LEFT_BEHIND_AFTER_S = 2.0  # a process that is ending gets this long to do so
WAITING = ("ringsim-server", "ringsim-parked")  # what the fork server and fresh ranks call themselves: they may stay for the next call


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests come first, then those on real ranks, then the lessons: what breaks everything breaks early."""
    for item in items:
        if "distributed" in item.path.parts:
            item.add_marker("distributed")
        elif "notebook" in item.path.stem:
            item.add_marker("notebooks")
    items.sort(key=lambda item: 2 if item.get_closest_marker("notebooks") else 1 if item.get_closest_marker("distributed") else 0)


@pytest.fixture(autouse=True)
def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(RANK_VARIABLES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MPLBACKEND", "agg")  # no window


@pytest.fixture(autouse=True)
def fresh_state(clean_environment: None) -> Iterator[None]:
    """The rank state is the default one before and after a test: no ring, no recorder, the real ``print``."""
    yield
    if get_state().ring is not None:
        from ringsim.ring import destroy_distributed

        destroy_distributed()
    undo_print = get_state().undo_print
    if undo_print is not None:
        undo_print()
    change_state(**{field.name: field.default for field in fields(RankState) if field.init})


@pytest.fixture(autouse=True)
def no_process_left(fresh_state: None) -> Iterator[None]:
    """Fails a test that leaves a child process behind, other than those of ringsim that wait for the next call."""
    before = busy_processes()
    yield
    deadline = time.monotonic() + LEFT_BEHIND_AFTER_S
    while (left := busy_processes() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    if left:
        pytest.fail("processes left behind: " + "; ".join(_describe(pid) for pid in sorted(left)))


def busy_processes() -> set[int]:
    """Returns the ids of the child processes that do not just wait for the next call."""
    return {pid for pid in child_processes() if not _read(pid, "comm").startswith(WAITING)}


def child_processes() -> set[int]:
    """Returns the ids of this process's children and of theirs (Linux; elsewhere those that multiprocessing knows)."""
    known = {child.pid for child in multiprocessing.active_children() if child.pid}  # the call also reaps those that ended
    if not Path("/proc/self/stat").exists():
        return known
    parents = {int(entry.name): _parent(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def _read(pid: int, file: str) -> str:
    """Returns a file of /proc/pid, "" for a process that has just gone."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text()
    except OSError:
        return ""


def _parent(pid: int) -> int:
    after_name = _read(pid, "stat").rpartition(")")[2].split()
    return int(after_name[1]) if after_name else 0


def _describe(pid: int) -> str:
    command = _read(pid, "cmdline").replace("\0", " ").strip()
    return f"{pid} ({command[:120] or 'a zombie: not waited for'})"
