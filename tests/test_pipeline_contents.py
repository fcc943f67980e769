"""The public names of ringsim.pipeline: where the contents say, documented, seen by type checkers, light; docs/pipeline.md runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

import ringsim.pipeline

CONTENTS: dict[str, str] = ringsim.pipeline._CONTENTS
SEED_NAMES = {
    *("partition_model", "get_stage_layers", "forward_stage", "backward_stage", "send_activation", "recv_activation"),
    *("send_gradient", "recv_gradient", "rehearse", "train_step_pipeline", "train_step_pipeline_afab"),
}
WITHOUT_TORCH = {name for name, module in CONTENTS.items() if module.startswith("ringsim.schedules")}


def test_names_of_the_seed_are_there() -> None:
    assert set(ringsim.pipeline.__all__) >= SEED_NAMES
    assert dir(ringsim.pipeline) == sorted(CONTENTS)
    for name, module in CONTENTS.items():
        assert getattr(ringsim.pipeline, name).__module__ == module
        assert name in importlib.import_module(module).__all__
    with pytest.raises(AttributeError, match="no attribute 'partiton_model'"):
        _ = ringsim.pipeline.partiton_model


def test_docstring_lists_the_contents() -> None:
    listed = re.findall(r"^    (\w+)  +\S", ringsim.pipeline.__doc__ or "", re.MULTILINE)
    assert sorted(set(listed) & set(CONTENTS)) == sorted(CONTENTS)


def test_type_checkers_see_the_contents() -> None:
    block = next(node for node in ast.parse(Path(ringsim.pipeline.__file__).read_text()).body if isinstance(node, ast.If))
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        (alias,) = node.names
        assert alias.asname == alias.name  # the form that re-exports
        seen[alias.name] = node.module
    assert seen == CONTENTS


def test_what_is_imported_is_light() -> None:
    assert {"make_schedule", "by_count", "validate"} <= WITHOUT_TORCH
    names = ", ".join(sorted(WITHOUT_TORCH))
    code = (
        f"import sys; sys.modules['torch'] = None; from ringsim.pipeline import {names}; del sys.modules['torch'];"
        "sys.modules['transformers'] = None; from ringsim.pipeline import *; SmallTransformer(5, 4, 1, 1)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)


@pytest.mark.parametrize("name", sorted(CONTENTS))
def test_docstring_says_what_it_takes_and_gives(name: str) -> None:
    value: Any = getattr(ringsim.pipeline, name)
    text = inspect.getdoc(value) or ""
    assert re.search(r"^Example:$", text, re.MULTILINE), f"{name} needs an example"
    signature = inspect.signature(value)
    parameters = [parameter for parameter in signature.parameters if parameter != "self"]
    if parameters and not inspect.isabstract(value):
        assert re.search(r"^(Args|Attributes):$", text, re.MULTILINE), f"{name} needs Args"
        assert [parameter for parameter in parameters if not re.search(rf"\b{parameter}\b", text)] == []
    if inspect.isfunction(value) and signature.return_annotation not in (None, "None"):
        assert re.search(r"^(Returns|Yields):$|^Returns\b", text, re.MULTILINE), f"{name} needs Returns"
    if inspect.isfunction(value) and re.search(r"^\s+raise \w", inspect.getsource(value), re.MULTILINE):
        assert re.search(r"^Raises:$", text, re.MULTILINE), f"{name} needs Raises"


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


ROOT = Path(__file__).parent.parent
SECTION = (ROOT / "docs" / "pipeline.md").read_text().partition("\n## A step as a picture\n")[2].partition("\n## ")[0]


def test_examples_of_the_page_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL))
    test = doctest.DocTestParser().get_doctest(code, {}, "seen", "docs/pipeline.md", 0)
    assert doctest.DocTestRunner().run(test) == (0, len(test.examples))
    assert len(test.examples) > 5
    plt.close("all")
