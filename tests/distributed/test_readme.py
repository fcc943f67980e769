"""The first programs that a reader of README.md, then docs/using.md, sees do as these say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
FIRST, SECOND, *OTHERS = (
    program
    for page in (ROOT / "README.md", ROOT / "docs" / "using.md")
    for program in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
)
PIPELINE = next(block for block in OTHERS if "train_step_pipeline" in block)
SIMULATED = next(block for block in OTHERS if "ringsim.simulate(" in block)


def run(*programs: str) -> dict[str, Any]:
    """Runs programs as one script (``test_launch`` starts real ones), and returns its variables."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec("\n".join(programs), variables)
    return variables


def test_the_programs_on_real_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(FIRST.splitlines()) == 3
    call = "ringsim.trace(worker, world_size=4)"
    assert call in FIRST
    # two steps of training are enough
    first = run(FIRST.replace(call, "trace = ringsim.trace(worker, world_size=4, args=(2,))"))[
        "trace"
    ]
    assert first.world_size == 4
    assert re.findall(r"^\[rank 0\] step +\d of 2 ", capsys.readouterr().out, re.MULTILINE)
    second = run(SECOND)["trace"]
    # After three rounds a rank holds what started three ranks before it, plus one a round; each of
    # four ranks sent three messages.
    assert second.results == [float((rank - 3) % 4 + 3) for rank in range(4)]
    assert (len(second.messages.src), second.unmatched) == (12, [])
    trained = run("import ringsim, torch", PIPELINE)["trace"]
    assert len(set(trained.results)) == 1
    # it knows nothing yet: 50 tokens, all as likely, whose logarithm is 3.9
    assert 3 < trained.results[0] < 5
    assert trained.peak_activations().peaks == (4, 3, 2, 1)


def test_a_thousand_simulated_ranks_pass_on_what_they_have() -> None:
    virtual = run("import ringsim, torch", SIMULATED)["virtual"]
    assert virtual.results == [999.0, *map(float, range(999))]
    assert len(virtual.messages) == 1000
