"""The editions of a lesson: students get no solutions, but notebooks that run and can be graded."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

from ringsim.check import editions, grading
from ringsim.cli import main
from ringsim.errors import ArgumentError

LESSONS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)


def read(lesson: Path) -> Any:
    return nbformat.read(lesson, as_version=4)


def names_in(cell: Any) -> set[str]:
    """Returns all names that a code cell defines or uses."""
    tree = ast.parse(TransformerManager().transform_cell(cell.source))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return defined | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def defined_by(cell: Any) -> set[str]:
    """Returns the names that a code cell defines."""
    names: dict[str, Any] = {}
    body = ast.parse(cell.source).body
    exec(
        compile(
            ast.Module([one for one in body if not isinstance(one, ast.Expr)], []), "<cell>", "exec"
        ),
        names,
    )
    return names.keys() - {"__builtins__"}


@each_lesson
def test_a_lesson_runs_without_its_solutions(lesson: Path) -> None:
    code = [cell for cell in read(lesson).cells if cell.cell_type == "code"]
    for cell in code:
        if "solution" in editions.tags_of(cell):
            assert all(name.endswith("_solution") for name in defined_by(cell)), (
                "another cell may need this name"
            )
            first = cell.source.splitlines()[0]
            assert first.startswith(("# ", "def ")), (
                "a folded cell shows its first line, which must not be the answer"
            )
        else:
            assert [name for name in names_in(cell) if name.endswith("_solution")] == [], cell.id


@each_lesson
def test_students_get_no_answers_and_instructors_everything(lesson: Path) -> None:
    source = read(lesson)
    student, instructor, slides = (
        editions.make_edition(source, edition) for edition in editions.EDITIONS
    )
    assert instructor == source == read(lesson)
    text = "\n".join(cell.source for cell in student.cells)
    assert "_solution" not in text
    assert "collapsed cell below" not in text
    assert (
        text.count("<details>")
        == text.count("<details><summary>Hint ")
        == text.count("</details>")
        > 0
    )
    assert "".join(cell.source for cell in source.cells).count("<summary>Hint ") == text.count(
        "<summary>Hint "
    )
    assert grading.find_exercises(student) == grading.find_exercises(source) != {}
    assert slides.metadata["rise"] == {"theme": "white"}
    shown = [cell.metadata["slideshow"]["slide_type"] for cell in slides.cells]
    assert shown[0] == "slide"
    assert shown.count("notes") == len(grading.find_exercises(source)), "the hints of each exercise"
    assert shown.count("slide") >= 5
    for notebook in (student, slides):
        assert all(cell.source for cell in notebook.cells)
        nbformat.validate(notebook)


def test_there_are_three_editions() -> None:
    with pytest.raises(
        ArgumentError, match="edition must be one of student, instructor, slides, got 'teacher'"
    ):
        editions.make_edition({"cells": []}, "teacher")


def test_the_students_edition_runs_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["lessons", "--edition", "instructor"]) == main(["lessons"]) == 0
    assert "to open the lessons, run: ringsim lab ringsim-lessons\n" in capsys.readouterr().out
    everything, handed_out = (
        {str(file.relative_to(directory)) for file in directory.rglob("*.*")}
        for directory in (tmp_path / "ringsim-lessons-instructor", tmp_path / "ringsim-lessons")
    )
    assert {Path(name).suffix for name in everything - handed_out} == {".py"}, (
        "programs that have the answers"
    )
    notebook = read(tmp_path / "ringsim-lessons" / LESSONS[0].name)
    assert json.dumps(notebook) == json.dumps(editions.make_edition(read(LESSONS[0]), "student"))
    # an exception ends it
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    verdicts = [
        output.data["text/plain"].splitlines()[0]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.get("data", {}).get("text/plain", "").startswith("check.")
    ]
    assert verdicts[0] == "check.prediction: not yet"
    assert verdicts[1].startswith("check.hello: not yet (")
    assert len(verdicts) == 2
