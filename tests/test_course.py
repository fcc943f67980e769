"""The pages for instructors agree with the lessons, and quote the verdicts of the checks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat

from ringsim.check import grading

ROOT = Path(__file__).parent.parent
PAGES = ("docs/how-to/course.md", "docs/reference/lessons.md")
PAGE = "\n".join((ROOT / page).read_text() for page in PAGES)
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_the_table_has_each_lesson_with_its_time_what_it_needs_and_its_exercises() -> None:
    rows = re.findall(
        r"^\| \[\d\d\]\(\.\./\.\./notebooks/(\S+)\) \| ([\w, ]+) \| (\d+) \| (.+?) \| ",
        PAGE,
        re.MULTILINE,
    )
    assert [name for name, *_ in rows] == [lesson.name for lesson in LESSONS]
    points = 0
    for lesson, (_, needs, minutes, checks) in zip(LESSONS, rows, strict=True):
        notebook = nbformat.read(lesson, as_version=4)
        exercises = [exercise.check for exercise in grading.find_exercises(notebook).values()]
        (first,) = re.findall(
            r"^This lesson takes about (\d+) minutes\.(?: Do lessons? ([\d, and]+?) first)?",
            notebook.cells[0].source,
            re.MULTILINE,
        )
        assert (minutes, re.findall(r"\d\d", needs)) == (first[0], re.findall(r"\d\d", first[1])), (
            lesson
        )
        assert re.findall(r"`(\w+)`", checks) == exercises, lesson
        points += len(exercises)
    assert f"counts the points of exercises, {points} in all" in PAGE
    assert f"| {len(LESSONS)} lessons, {points} exercises |" in PAGE


def test_each_lesson_has_a_question_and_a_wrong_answer_that_the_tests_know() -> None:
    numbers = [lesson.name[:2] for lesson in LESSONS]
    assert (
        re.findall(
            r"^\*\*(\d\d)\.\*\* .+\n<details><summary>Answer</summary>.+</details>$",
            PAGE,
            re.MULTILINE,
        )
        == numbers
    )
    said = re.findall(r'^\| (\d\d) \| "(.+?)"(?: \(hint\))? \| .+ \| .+ \|$', PAGE, re.MULTILINE)
    assert sorted({number for number, _ in said}) == numbers
    trees = [ast.parse(path.read_text()) for path in (ROOT / "tests").glob("test_check_*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    tests = "\n".join(str(node.value) for node in nodes)  # long strings are split
    assert [words for _, words in said if words not in tests] == []
