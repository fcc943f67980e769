"""Grades a notebook in a separate kernel, and converts lessons to assignments.

An exercise is a cell with the tag ``exercise`` that ends with a call of a check. The grader splits
it into the answer and the call, and runs the call itself. The outputs in the notebook do not count,
and a student cannot replace the check.
"""

from __future__ import annotations

import ast
import json
import os
import random
import secrets
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from ringsim import check
from ringsim.check.editions import make_edition, tags_of
from ringsim.errors import ArgumentError, RingError

POINTS = 1  # for each exercise
CELL_S = 400.0  # the time limit of a cell, longer than a check takes on a busy machine
_CALL = "_ringsim_check"  # the name of ringsim.check in the grader's cells


class Exercise(NamedTuple):
    """One exercise, split into its parts.

    Attributes:
        name: the id of the cell.
        check: the name of the check; empty if the cell calls none.
        answer: the student's code.
        call: the call of the check, such as ``check.ring(pass_round)``.
    """

    name: str
    check: str
    answer: str
    call: str


def read_notebook(path: Path) -> Any:
    """Reads a notebook.

    Raises RingError if reading fails, or if nbclient or nbformat is not installed.
    """
    try:
        import nbclient  # noqa: F401  # if it is missing, that is reported before anything runs
        import nbformat
    except ModuleNotFoundError as error:
        raise RingError(
            f"grading needs {error.name}, which is not installed. Install it: pip install nbclient "
            "ipykernel."
        ) from None
    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:  # of many types, because a file may contain anything
        raise RingError(
            f"cannot read the notebook {path}: {error}. Save it again in Jupyter."
        ) from None


def take_apart(name: str, source: str) -> Exercise:
    r"""Splits an exercise into its parts.

    If the answer is in the call itself, its keywords become a dictionary in the student's code.

    Example:
        >>> take_apart("share", "def share(numbers):\n    return 0\n\n\ncheck.hello(share)").call
        'check.hello(share)'
        >>> take_apart("patient-1", "check.diagnose(patient, kind='')")[2:]
        ("answer_patient_1 = dict(kind='')", 'check.diagnose(patient, **answer_patient_1)')
    """
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        body = ast.parse(TransformerManager().transform_cell(source)).body
    except SyntaxError:
        body = []
    calls = [call for call in map(_find_check, body) if call is not None]
    if not calls:
        return Exercise(name, "", source, "")
    call = calls[-1]
    checked = call.func.attr
    rest = [one for one in body if _find_check(one) is None]
    if not _takes_seed(checked):
        answer = f"answer_{name.replace('-', '_')}"
        made = ast.Call(ast.Name("dict"), [], call.keywords)
        rest.append(ast.Assign([ast.Name(answer)], made, lineno=0))
        call = ast.Call(call.func, call.args, [ast.keyword(None, ast.Name(answer))])
    return Exercise(name, checked, ast.unparse(ast.Module(rest, [])), ast.unparse(call))


def _find_check(statement: ast.stmt) -> Any:
    """Returns the check call in a statement, or None."""
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name("check"), name)) as call):
            return call if name in check.__all__ else None
    return None


def _takes_seed(checked: str) -> bool:
    return "seed" in signature(getattr(check, checked)).parameters


def find_exercises(notebook: Any) -> dict[str, Exercise]:
    """Returns the exercises in a notebook by cell id, in order."""
    cells = (
        cell for cell in notebook.cells if cell.cell_type == "code" and "exercise" in tags_of(cell)
    )
    return {cell.id: take_apart(cell.id, cell.source) for cell in cells}


def grade(path: Path, *, seed: int | None = None, lesson: Path | None = None) -> dict[str, Any]:
    """Grades a notebook.

    Runs the notebook from top to bottom in a new kernel, without solution cells, and judges every
    exercise. Grade only students whom you trust, because their code runs with your permissions.
    This function blocks until the last cell has ended.

    Args:
        path: the notebook.
        seed: the seed of the sizes and data of all checks, or None for a random seed.
        lesson: the notebook as it was handed out; its check calls replace the calls in the
            student's notebook.

    Returns:
        Plain data for JSON: ``notebook``, ``seed``, ``points``, ``of``, and ``exercises``, a list
        of dictionaries with the keys ``exercise``, ``check``, ``verdict``, ``points``, ``of``,
        ``reason`` and ``hint``.

    Raises:
        RingError: a notebook cannot be read, or has no exercises.
    """
    notebook = read_notebook(path)
    calls = find_exercises(notebook if lesson is None else read_notebook(lesson))
    if not calls:
        raise ArgumentError(
            f'{path} contains no exercises: no cell has the tag "exercise". Pass the notebook of a '
            "lesson."
        )
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    judged = dict(_judge_all(notebook, calls, path.parent, seed))
    rows = [_row(exercise, judged.get(name, {})) for name, exercise in calls.items()]
    points, of = (sum(row[column] for row in rows) for column in ("points", "of"))
    return {
        "notebook": path.name,
        "seed": seed,
        "points": points,
        "of": of,
        "exercises": rows,
    }


def _row(exercise: Exercise, judged: dict[str, Any]) -> dict[str, Any]:
    verdict = judged.get("verdict", "not yet")
    return {
        "exercise": exercise.name,
        "check": exercise.check,
        "verdict": verdict,
        "points": POINTS if verdict == "passed" else 0,
        "of": POINTS,
        "reason": judged.get("reason", "The notebook does not contain this cell."),
        "hint": judged.get("hint", ""),
    }


def _judge_all(
    notebook: Any, calls: dict[str, Exercise], directory: Path, seed: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs the cells; yields the verdict, as plain data, on each exercise that it reaches."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import DeadKernelError

    cells = [cell for cell in make_edition(notebook, "student").cells if cell.cell_type == "code"]
    client = NotebookClient(
        nbformat.v4.new_notebook(metadata=notebook.metadata),
        timeout=CELL_S,
        interrupt_on_timeout=True,
        allow_errors=True,
        resources={"metadata": {"path": str(directory)}},
    )

    def run(source: str) -> list[Any]:
        cell = nbformat.v4.new_code_cell(source)
        client.nb.cells.append(cell)
        outputs: list[Any] = client.execute_cell(cell, len(client.nb.cells) - 1).outputs
        return outputs

    with client.setup_kernel(env={**os.environ, "MPLBACKEND": "agg"}):
        for cell in cells:
            exercise = calls.get(cell.id)
            try:
                if exercise is None:
                    run(cell.source)
                else:
                    yield cell.id, _judge(run, exercise, cell.source, seed)
            except DeadKernelError:
                died = "The kernel died in this cell."
                yield cell.id, {"reason": died, "hint": "Run the cell in Jupyter."}
                return


def _judge(run: Any, exercise: Exercise, source: str, seed: int) -> dict[str, Any]:
    """Runs the answer, then the check, in a kernel; returns the verdict as plain data."""
    written = take_apart(exercise.name, source)
    outputs = run(written.answer)
    if exercise.check and all(output.output_type != "error" for output in outputs):
        word = secrets.token_hex(16)  # so that students cannot forge a verdict
        seeded = f", seed={seed})" if _takes_seed(exercise.check) else ")"
        call = exercise.call.replace("check.", f"{_CALL}.", 1)[:-1] + seeded
        outputs += run(
            f"import json as _json, ringsim.check as {_CALL}\nprint('{word}' + "
            f"_json.dumps({call}.as_dict()))"
        )
        for output in outputs:
            if output.output_type == "stream" and output.text.startswith(word):
                judged: dict[str, Any] = json.loads(output.text.removeprefix(word))
                return judged
    errors = [
        f"{output.ename}: {output.evalue}" for output in outputs if output.output_type == "error"
    ]
    if errors and errors[0].startswith("KeyboardInterrupt"):
        return {
            "verdict": "undecided",
            "reason": f"The cell did not end within {CELL_S:g} s.",
            "hint": "Look for a loop that never ends.",
        }
    reason = errors[0].splitlines()[0] if errors else "The cell calls no check."
    return {
        "reason": reason,
        "hint": "Run the cell in Jupyter, and read the error from its last line upwards.",
    }


def write_assignment(lesson: Path, directory: Path) -> list[Path]:
    """Writes a lesson without its solutions as an assignment.

    The assignment is a notebook with nbgrader's metadata, and a folder of tests for otter. In the
    notebook, each exercise is a cell for the answer, followed by a locked cell with the check,
    which is worth one point.

    Args:
        lesson: the notebook.
        directory: the directory for a notebook with the same name, and for ``tests`` with one file
            per exercise.

    Returns:
        The files that were written.

    Raises:
        RingError: the lesson cannot be read.
    """
    import nbformat

    notebook, cells = make_edition(read_notebook(lesson), "student"), []
    exercises = find_exercises(notebook)
    (directory / "tests").mkdir(parents=True, exist_ok=True)
    written = [directory / lesson.name]
    for cell in notebook.cells:
        cells.append(cell)
        exercise = exercises.get(cell.id)
        if exercise is None:
            continue
        name, source = exercise.name, cell.source
        cell.source = exercise.answer
        if exercise.check != "diagnose":
            cell.source = source.rpartition("check.")[0].rstrip()
        judged = (
            f"verdict = {exercise.call}\ndisplay(verdict)\nassert verdict.passed, verdict.reason"
        )
        check_cell = nbformat.v4.new_code_cell(judged, id=f"{name}-check")
        # the cell of the answer stays as it is, without nbgrader's metadata
        check_cell.metadata["nbgrader"] = {
            "schema_version": 3,
            "grade_id": check_cell.id,
            "points": POINTS,
            "grade": True,
            "locked": True,
            "solution": False,
            "task": False,
        }
        cells.append(check_cell)
        case = {"code": f">>> {exercise.call}.passed\nTrue", "hidden": False, "locked": False}
        suite = {"cases": [case], "scored": True, "setup": "", "teardown": "", "type": "doctest"}
        test = {"name": name.replace("-", "_"), "points": POINTS, "suites": [suite]}
        written.append(directory / "tests" / f"{test['name']}.py")
        written[-1].write_text(f"OK_FORMAT = True\n\ntest = {test!r}\n")
    notebook.cells = cells
    nbformat.write(notebook, written[0])
    return written
