"""The examples in the docstrings run, module by module."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
from test_layers import FLOOR, MODULES, room_of


def _parameters() -> list[object]:
    with_examples = [module for module, path in MODULES.items() if ">>> " in path.read_text()]
    return [
        pytest.param(module, marks=() if module != "ringsim" and starts_no_ranks(room_of(module)) else pytest.mark.distributed)
        for module in with_examples
    ]


def starts_no_ranks(room: str) -> bool:
    """Tells whether the examples of a room run in one process."""
    return FLOOR[room] <= FLOOR["topologies"] or room in {"diagnose", "compute_costs", "simulator", "exchange", "plot"}


@pytest.mark.parametrize("module", _parameters())
def test_examples_run(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)  # examples may save files
    failed, tried = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert tried, "the examples of this module are never run"
    assert not failed, capsys.readouterr().out
