"""Tests that the frozen results do not change; golden/freeze.py can rewrite their files."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "golden"))
import freeze


@pytest.mark.parametrize("file", freeze.FILES)
def test_users_get_what_they_got(file: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from torch, for names to be removed
        now, kept = freeze.FILES[file](), (freeze.HERE / file).read_text()
    if file.startswith(("names/", "faults/")):
        # additional data is allowed
        assert [line for line in kept.splitlines() if line not in set(now.splitlines())] == []
    else:
        assert now == kept


def test_nothing_is_kept_that_nobody_checks() -> None:
    there = {file.relative_to(freeze.HERE).as_posix() for file in freeze.HERE.rglob("*.txt")}
    assert there == set(freeze.FILES)
