"""Fixtures for tests on real ranks."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_server import RankServer

from ringsim.launch.ranks import get_launcher

REMOVED_WITHIN_S = 10.0


@pytest.fixture(scope="module")
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Puts all files of a module's runs into one directory, which must be empty at the end."""
    directory = tmp_path_factory.mktemp("runs")
    end_parked_ranks()  # because their directory is elsewhere
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(directory))
        yield
        end_parked_ranks()
    deadline = time.monotonic() + REMOVED_WITHIN_S
    while (left := left_in(directory)) and time.monotonic() < deadline:
        time.sleep(0.01)  # the fork server may still be removing a directory
    assert left == []


def end_parked_ranks() -> None:
    """Ends ranks that wait for a call, but not the fork server, which takes seconds to start."""
    launcher = get_launcher()
    with launcher._lock:
        parked, launcher._parked = launcher._parked, None
    if parked is not None:
        parked.close()


def left_in(directory: Path) -> list[str]:
    """Returns the entries of a directory, except for a cache that torch creates on first use."""
    return [path.name for path in directory.iterdir() if not path.name.startswith("torchinductor_")]


@pytest.fixture(scope="session")
def server() -> Iterator[RankServer]:
    """Yields a server that forks ranks, which tests start like a user's program."""
    with RankServer() as running:
        yield running
