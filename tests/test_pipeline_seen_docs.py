"""docs/pipeline.md on steps as pictures: its examples run, on the trace that its picture is drawn from."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

ROOT = Path(__file__).parent.parent
SECTION = (ROOT / "docs" / "pipeline.md").read_text().partition("\n## A step as a picture\n")[2].partition("\n## ")[0]


def test_examples_of_the_page_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL))
    test = doctest.DocTestParser().get_doctest(code, {}, "seen", "docs/pipeline.md", 0)
    assert doctest.DocTestRunner().run(test) == (0, len(test.examples))
    assert len(test.examples) > 5
    plt.close("all")
