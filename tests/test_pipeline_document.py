"""docs/pipeline.md: what it shows runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

TEXT = (Path(__file__).parent.parent / "docs" / "pipeline.md").read_text()


def test_another_model_is_added_as_the_document_says(capsys: pytest.CaptureFixture[str]) -> None:
    section = TEXT.split("## Another model\n")[1].split("\n## ")[0]
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(block, names)
    assert names["report"], str(names["report"])
    assert capsys.readouterr().out.startswith("13 gradients equal those of one process")
    boundaries = names["boundary_shapes"](names["model"], names["partition"], names["tokens"], adapter=names["adapter"])
    assert [boundary.shape for boundary in boundaries] == [(2, 9, 16)] * 2


def test_first_example_runs_as_one_rank() -> None:
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0], names)
    loss, report = names["worker"]()
    assert 3 < loss < 6
    assert report.startswith("65 gradients equal those of one process")
