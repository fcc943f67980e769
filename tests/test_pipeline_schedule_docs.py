"""The page on schedules: its examples run, and the numbers of its table are those of the closed forms."""

from __future__ import annotations

import doctest
import re
from fractions import Fraction
from pathlib import Path

from ringsim.schedules import SCHEDULE_NAMES
from ringsim.schedules.closed_forms import Step, idle, makespan, messages, peak_live, span_idle

SECTION = (Path(__file__).parent.parent / "docs" / "pipeline.md").read_text().partition("\n## Schedules\n")[2].partition("\n## ")[0]


def test_examples_of_the_page_run() -> None:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL))
    test = doctest.DocTestParser().get_doctest(code, {}, "schedules", "docs/pipeline.md", 0)
    assert doctest.DocTestRunner().run(test) == (0, len(test.examples))
    assert len(test.examples) > 5


def test_numbers_of_the_table() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if line.startswith("| `")]
    names = [row[0].split("`")[1] for row in rows]
    assert set(names) == set(SCHEDULE_NAMES) - {"afab"}
    for name, (_, *cells) in zip(names, rows, strict=True):
        step = Step(name, 4, 8)
        share = step.stages_a_rank  # the table's unit is the time of all stages of a rank
        expected = [
            [Fraction(value, share) for value in values] for values in ([makespan(step)], [idle(step)], [span_idle(step)], peak_live(step))
        ]
        assert [[Fraction(value) for value in cell.split(", ")] for cell in cells[:4]] == expected
        assert int(cells[4]) == sum(messages(step))
