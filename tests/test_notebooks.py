"""The lessons: they have the parts that a lesson has, and run from top to bottom in a real kernel."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import pytest
from kernels import descendants, gone, until
from nbclient import NotebookClient

LESSONS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
CELL_S = 30  # for one cell; on two quiet cores none takes more than five
PARTS = (
    r"^# Lesson \d\d: ",
    r"\*\*You will be able to\*\*",
    r"^\*\*Predict\.\*\* ",
    r"^\*\*See\.\*\* ",
    r"^\*\*Explain\.\*\* ",
    r"^## Exercise",
    r"<details><summary>Hint 1</summary>",
    r"^## Transfer question",
    r"^## Glossary",
)
Cell = dict[str, Any]

pytestmark = pytest.mark.timeout(240)


def cells(lesson: Path, kind: str) -> list[Cell]:
    return [cell for cell in json.loads(lesson.read_text())["cells"] if cell["cell_type"] == kind]


def source(cell: Cell) -> str:
    return "".join(cell["source"])


def tagged(lesson: Path, tag: str) -> list[str]:
    return [cell["id"] for cell in cells(lesson, "code") if tag in cell["metadata"].get("tags", [])]


# -- as they stand in the repository


def test_the_lessons_are_there() -> None:
    assert [lesson.stem for lesson in LESSONS[:2]] == ["00_four_processes", "01_ring"]


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_lesson_has_all_parts(lesson: Path) -> None:
    text = "\n".join(source(cell) for cell in cells(lesson, "markdown"))
    assert [part for part in PARTS if not re.search(part, text, re.MULTILINE)] == []
    assert text.count("<details>") == text.count("</details>")


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_lesson_carries_no_leftovers(lesson: Path) -> None:
    notebook = json.loads(lesson.read_text())
    assert notebook["metadata"] == {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook["cells"]:
        assert set(cell["metadata"]) <= {"tags", "jupyter"}
        assert set(cell["metadata"].get("tags", [])) <= {"exercise", "solution"}
        folded = cell["metadata"].get("jupyter") == {"source_hidden": True}
        assert folded is ("solution" in cell["metadata"].get("tags", [])), "solutions are folded, and nothing else is"


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_words_of_the_glossary_occur(lesson: Path) -> None:
    *chapters, glossary = (source(cell) for cell in cells(lesson, "markdown"))
    text = " ".join(chapters + [source(cell) for cell in cells(lesson, "code")]).lower()
    words = [word for line in re.findall(r"^\| \*\*(.+?)\*\* \|", glossary, re.MULTILINE) for word in line.split(", ")]
    assert words
    assert [word for word in words if word not in text] == []


# -- run in a kernel


@cache
def executed(lesson: Path) -> tuple[dict[str, Cell], frozenset[int]]:
    """Runs a lesson; returns its code cells with their outputs, and the processes that its kernel had started."""
    notebook = nbformat.read(lesson, as_version=4)
    client = NotebookClient(notebook, timeout=CELL_S, resources={"metadata": {"path": str(lesson.parent)}})
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        pid = client.km.provisioner.pid
        started = frozenset({pid, *descendants(pid)})
    return {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}, started


def outputs(lesson: Path) -> Iterator[tuple[str, Cell]]:
    for name, cell in executed(lesson)[0].items():
        for output in cell["outputs"]:
            yield name, output


def verdict(lesson: Path, cell: str) -> str:
    """The text that a check showed under a cell."""
    shown = [output["data"]["text/plain"] for name, output in outputs(lesson) if name == cell and "data" in output]
    (text,) = [text for text in shown if text.startswith("check.")]
    return str(text)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_lesson_runs_and_leaves_nothing_behind(lesson: Path) -> None:
    _, started = executed(lesson)  # a cell that raises raises here
    assert len(started) > 1, "the kernel started no rank"
    assert until(lambda: all(gone(pid) for pid in started), 3.0)
    assert [name for name, output in outputs(lesson) if output["output_type"] == "error"] == []
    warnings = [output["text"] for _, output in outputs(lesson) if output["output_type"] == "stream" and output["name"] == "stderr"]
    assert warnings == []


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_every_picture_can_be_read_aloud(lesson: Path) -> None:
    pictures = [(name, output) for name, output in outputs(lesson) if "image/png" in output.get("data", {})]
    assert pictures
    for name, output in pictures:
        assert output["metadata"]["image/png"]["alt"].endswith("."), name
        assert output["data"]["text/plain"].startswith("Trace of "), name
    drawn = [name for name, output in outputs(lesson) if {"image/svg+xml", "application/javascript"} & set(output.get("data", {}))]
    assert drawn == [], "a front end that does not trust the notebook would not show these"


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_solutions_pass_and_skeletons_do_not(lesson: Path) -> None:
    exercises, solutions = tagged(lesson, "exercise"), tagged(lesson, "solution")
    assert len(exercises) == len(solutions) > 0
    for exercise, solution in zip(exercises, solutions, strict=True):
        untouched, solved = verdict(lesson, exercise), verdict(lesson, solution)
        assert untouched.split(":")[0] == solved.split(":")[0], "the same check"
        assert ": not yet (" in untouched
        assert "Hint: " in untouched
        assert ": passed (" in solved


def test_lesson_01_shows_what_it_claims() -> None:
    lesson = LESSONS[1]
    texts: dict[str, str] = {}
    for name, output in outputs(lesson):
        texts[name] = texts.get(name, "") + output.get("text", "") + output.get("data", {}).get("text/plain", "")
    assert "as in the text: True" in texts["claims-ringsim"]
    assert [line.split("->")[1].strip() for line in texts["claims-names"].splitlines() if "->" in line] == [
        "same members",
        "same members",
        "different",
        "different",
    ]
    assert texts["traffic-run"].count(" world ") == 4
    assert {"ring:0>1", "ring:1>0"} <= set(texts["claims-two"].split())
    shown = [line for line in texts["claims-output-run"].splitlines() if line.startswith("[rank ")]
    assert sorted(shown) == ["[rank 0] plain, from rank 0", "[rank 2] forced, from rank 2"]  # ranks speak in any order
    assert "Timed out waiting 1000ms for send" in texts["rendezvous-run"]
