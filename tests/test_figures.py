"""Tests that the committed figures match the committed traces."""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

import ringsim

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "figures"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures_make", FIGURES / "make.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


LOCKED = (ROOT / "requirements" / "lock.txt").read_text()


@pytest.mark.skipif(
    f"\nmatplotlib=={metadata.version('matplotlib')}\n" not in LOCKED,
    reason="the bytes are promised for the locked matplotlib only",
)
def test_the_figures_are_up_to_date_and_one_that_is_not_is_named(
    make: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = make.FIGURES[2]._replace(name="missing")
    monkeypatch.setattr(make, "FIGURES", (*make.FIGURES, missing))
    assert make.main(["--check"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("figures/missing.png")


def test_every_figure_is_described_and_every_trace_is_used(make: ModuleType) -> None:
    readme = (FIGURES / "README.md").read_text()
    for figure in make.FIGURES:
        assert figure.draw.__doc__
        assert f"data/{figure.data}" in readme
        for ending in figure.endings:
            assert f"`{figure.name}{ending}`" in readme
            assert (FIGURES / (figure.name + ending)).is_file()
    assert {figure.data for figure in make.FIGURES} == {
        path.name for path in (FIGURES / "data").iterdir()
    }


@pytest.mark.parametrize("path", sorted((FIGURES / "data").iterdir()), ids=lambda path: path.name)
def test_the_data_are_real_small_and_say_nothing_private(path: Path, make: ModuleType) -> None:
    assert path.stat().st_size < 100_000
    if path.name == "prediction-error.json":
        table = json.loads(path.read_text())
        assert set(table) == {"where", "turns", "rows"}
        assert "cores, torch" in table["where"], "no name of a machine or a user"
        return
    data = make.bandwidths.load(path) if path.suffix == ".json" else ringsim.load(path)
    assert data.metadata["source"] == "measured"
    assert data.metadata["machine"]["cpu"]
    if path.suffix == ".json":
        assert set(data.columns["kind"].tolist()) == {"measured"}
        assert set(data.metadata["machine"]) == {"cpu", "cores", "memory_bytes", "platform"}
    else:
        assert not data.unmatched or path.name == "deadlock.ringtrace"  # which is about just that
        assert all(not Path(name).is_absolute() for name in data.events.tables.files)
