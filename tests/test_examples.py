"""The examples in the docstrings run, module by module."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
from test_layers import MODULES, PLACE

ROWS_WITHOUT_RANKS = (0, 1, 4)


def _parameters() -> list[object]:
    with_examples = [module for module, path in MODULES.items() if ">>> " in path.read_text()]
    quick = {module for module in with_examples if PLACE.get(module, (2, 0))[0] in ROWS_WITHOUT_RANKS}
    return [pytest.param(module, marks=() if module in quick else pytest.mark.distributed) for module in with_examples]


@pytest.mark.parametrize("module", _parameters())
def test_examples_run(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)  # examples may save files
    failed, tried = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert tried, "the examples of this module are never run"
    assert not failed, capsys.readouterr().out
