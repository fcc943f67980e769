"""What the tests on real ranks share."""

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
    """The files of all runs of a module go into one directory, which must be empty at the end."""
    directory = tmp_path_factory.mktemp("runs")
    end_parked_ranks()  # which have their directory elsewhere
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(directory))
        yield
        end_parked_ranks()
    deadline = time.monotonic() + REMOVED_WITHIN_S
    while (left := left_in(directory)) and time.monotonic() < deadline:
        time.sleep(0.01)  # the fork server removes a directory, and nobody waits for it
    assert left == []


def end_parked_ranks() -> None:
    """Ends ranks that wait for a call; what forks them stays, for it takes seconds to start."""
    launcher = get_launcher()
    with launcher._lock:
        parked, launcher._parked = launcher._parked, None
    if parked is not None:
        parked.close()


def left_in(directory: Path) -> list[str]:
    """What lies there, but for a cache that torch makes when it is first needed."""
    return [path.name for path in directory.iterdir() if not path.name.startswith("torchinductor_")]


@pytest.fixture(scope="session")
def server() -> Iterator[RankServer]:
    """Forks ranks that a test starts as a user's program would be."""
    with RankServer() as running:
        yield running
