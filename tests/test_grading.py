"""Grading a notebook in a separate kernel, and assignments made from lessons."""

from __future__ import annotations

import csv
import doctest
import io
import json
from pathlib import Path
from typing import Any

import nbformat
import pytest

import ringsim
from ringsim import check
from ringsim.check import grading
from ringsim.cli import main

LESSON = Path(__file__).parent.parent / "notebooks" / "09_diagnose.ipynb"
PAIRS = "def pairs(N):\n    return [(i, (i + 1) % N) for i in range(N)] if N > 1 else []\n\n\n"
CALL, MINE = "check.pair_groups(pairs)", "check.pair_groups(mine)"
FORGED = "print(check.CheckResult('pair_groups', True, '', '').as_dict())"
PATIENT = "check.diagnose(trace, kind='deadlock', ranks=0, event=0)"
# Exercises as handed out, a student's cells, and words of the reason. Only the first passes.
CELLS = {
    "right": (PAIRS + CALL, f"%time pass\n{PAIRS}{CALL}", "Right for rings"),
    "wrong": (MINE, f"def mine(N):\n    return []\n\n\n{MINE}", "A ring of 2 ranks has 2 pairs"),
    "patient": ("check.diagnose(trace, kind='')", PATIENT, "No fault"),
    "forged": ("check.pair_groups(other)", FORGED, "NameError: name 'ot"),
    "unreadable": (CALL, f"def pairs(N:\n{CALL}", "incomplete input"),
    "deadly": (CALL, f"import os\nos._exit(1)\n{CALL}", "The kernel died"),
}
BEFORE = """
from ringsim import Trace, check
from ringsim.traces.events import make_events
trace = Trace(make_events({'rank': [], 'op': []}), {'world_size': 1})
list = sorted = None
"""


def write(path: Path, sources: dict[str, str], before: str = "") -> Path:
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(before)]
    for name, source in sources.items():
        cell = nbformat.v4.new_code_cell(source, id=name)
        cell.metadata["tags"] = ["exercise"]
        notebook.cells.append(cell)
    notebook.cells.append(
        nbformat.v4.new_code_cell("raise SystemError('never run')", metadata={"tags": ["solution"]})
    )
    nbformat.write(notebook, path)
    return path


def test_a_notebook_is_graded_by_the_checks_that_were_handed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handed_out = {name: cell[0] for name, cell in CELLS.items()} | {"lost": "check.hello(f)"}
    lesson = write(tmp_path / "lesson.ipynb", handed_out)
    written = {name: cell[1] for name, cell in CELLS.items()}
    answers = write(tmp_path / "answers.ipynb", written, BEFORE)
    assert main(["grade", str(answers), "--lesson", str(lesson), "--seed", "5", "--json"]) == 0
    graded = json.loads(capsys.readouterr().out)
    rows = {row["exercise"]: row for row in graded["exercises"]}
    assert [graded[key] for key in ("points", "of", "seed")] == [1, 7, 5]
    assert list(rows) == [*CELLS, "lost"]
    for name, (*_, words) in CELLS.items():
        assert rows[name]["verdict"] == ("passed" if name == "right" else "not yet"), rows[name]
        assert words in rows[name]["reason"], rows[name]
    assert rows["lost"]["reason"] == "The notebook does not contain this cell."


def test_a_cell_that_had_to_be_interrupted_is_undecided() -> None:
    stopped = nbformat.v4.new_output("error", ename="KeyboardInterrupt", evalue="", traceback=[])
    exercise = grading.take_apart("pairs", CALL)
    judged = grading._judge(lambda source: [stopped], exercise, "while True: pass", 7)
    assert judged["verdict"] == "undecided"
    assert judged["reason"] == "The cell did not end within 400 s."


@pytest.mark.parametrize("form", ["", "--csv"])
def test_points_are_printed_for_people_and_for_tables(
    form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = {"points": 0, "of": 1}
    row = {"exercise": "pairs", "check": "ring", "verdict": "undecided", "hint": ""}
    row |= {**points, "reason": "Busy, \x1b[31m."}
    graded = {"notebook": "a.ipynb", "seed": 7, **points, "exercises": [row]}
    monkeypatch.setattr(grading, "grade", lambda *args, **kwargs: graded)
    assert main(["grade", "a.ipynb", *form.split()]) == 0
    printed = capsys.readouterr().out
    if form:
        assert [each["verdict"] for each in csv.DictReader(io.StringIO(printed))] == ["undecided"]
    else:
        line, total = printed.splitlines()
        assert line == f"{'pairs':<24} 0/1  undecided  Busy, \\x1b[31m."
        assert total == "0 of 1 points (seed 7)"


def test_what_is_no_lesson_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.ipynb").write_text("{")
    assert main(["grade", str(tmp_path / "broken.ipynb")]) == 1
    assert main(["grade", str(write(tmp_path / "empty.ipynb", {}))]) == 2
    assert "cannot read the notebook" in (said := capsys.readouterr().err)
    assert 'no cell has the tag "exercise"' in said


def test_an_assignment_has_locked_checks_and_tests_for_otter(tmp_path: Path) -> None:
    notebook, *tests = grading.write_assignment(LESSON, tmp_path)
    made = nbformat.read(notebook, as_version=4)
    nbformat.validate(made)
    assert [cell.id for cell in made.cells if "solution" in cell.metadata.get("tags", [])] == []
    graded = [cell for cell in made.cells if cell.metadata.get("nbgrader", {}).get("grade")]
    assert [test.stem for test in tests] == [
        cell.id.removesuffix("-check").replace("-", "_") for cell in graded
    ]
    about = [cell.metadata["nbgrader"] for cell in graded]
    assert {(each["locked"], each["points"]) for each in about} == {(True, 1)}
    names: dict[str, Any] = {}
    exec(tests[0].read_text(), names)
    (case,) = names["test"]["suites"][0]["cases"]
    told: dict[str, Any] = {
        "check": check,
        "patient_1": ringsim.load(LESSON.parent / "data" / "patient_1.ringtrace"),
        "answer_patient_1_answer": {"kind": "", "ranks": (), "event": 0},
    }
    runner = doctest.DocTestRunner(verbose=False)
    wrong = doctest.DocTestParser().get_doctest(case["code"], told, "otter", None, None)
    assert runner.run(wrong, out=lambda _: None).failed == 1
