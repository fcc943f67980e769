"""What the tests on real ranks share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
from rank_server import RankServer

from ringsim.launch.ranks import get_launcher


@pytest.fixture(scope="module")
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The files of all runs of a module go into one directory, which must be empty at the end."""
    directory = tmp_path_factory.mktemp("runs")
    get_launcher().close()  # parked ranks have their directory elsewhere
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(directory))
        yield
        get_launcher().close()
    left = [path.name for path in directory.iterdir()]
    # a cache that torch makes when it is first needed
    assert [name for name in left if not name.startswith("torchinductor_")] == []


@pytest.fixture(scope="session")
def server() -> Iterator[RankServer]:
    """Forks ranks that a test starts as a user's program would be."""
    with RankServer() as running:
        yield running
