"""Records the runs of lessons 00, 01, 02, 09 and 11 into runs.zip, for `RINGSIM_REPLAY=1`.

    python notebooks/data/runs.py [directory]      writes runs.zip

The default directory is that of this file. Each lesson runs from top to bottom in a new kernel, and then the suggested experiments run.
Every run gives different times, so you run this by hand when a cell that starts ranks has changed, and commit the result.
"""

from __future__ import annotations

import ast
import contextlib
import io
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from patients import anonymous  # type: ignore[import-not-found]  # next to this file

import ringsim
from ringsim import magics
from ringsim.errors import RingError
from ringsim.launch.recorded_cells import name_run, write_run
from ringsim.launch.sessions import Session

HERE = Path(__file__).resolve().parent
LESSONS = {
    "00_four_processes": "",
    "01_ring": "for number in range(1, 9): ringsim.trace(pass_once, world_size=number)",
    "02_send_recv_deadlock": "import itertools\nfor order in itertools.product('SR', repeat=4): run_in_order(''.join(order))",
    "09_diagnose": "",
    "11_slow_link": "",
}


def record(directory: Path) -> None:
    """Runs the lessons, and in their kernels `keep_runs`."""
    archive = directory / "runs.zip"
    archive.unlink(missing_ok=True)
    for lesson, more in LESSONS.items():
        notebook = nbformat.read(HERE.parent / f"{lesson}.ipynb", as_version=4)
        notebook.cells.append(nbformat.v4.new_code_cell(more))
        client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(HERE.parent)}})
        with client.setup_kernel():
            assert client.kc is not None
            client.kc.execute(f"import sys; sys.path.append({str(HERE)!r})\nimport runs; runs.keep_runs({str(archive)!r})", silent=True)
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index)
        print(f"{lesson}: {archive.stat().st_size} bytes so far")


def keep_runs(archive: str) -> None:
    """Makes this kernel record the runs of its cells."""
    trace, run_cell, run = ringsim.trace, magics._run_cell, Session.run

    def keep_trace(worker: Any, *, world_size: int, args: Any = (), kwargs: Any = None) -> ringsim.Trace:
        return keep(
            archive, name_run(worker, world_size, args, kwargs), lambda: trace(worker, world_size=world_size, args=args, kwargs=kwargs)
        )

    def keep_cell(kept: Any, line: str, cell: str) -> ringsim.Trace:
        options = magics._make_parser().parse_args(line.split())
        ranks = options.ranks or magics._NUM_RANKS
        left = (lambda: read_variables(kept.shell.user_ns["ranks"])) if options.keep else list
        return keep(archive, name_run(cell, ranks), lambda: run_cell(kept, line, cell), left)

    def keep_call(ranks: Session, worker: Any, *args: Any, **kwargs: Any) -> ringsim.Trace:
        return keep(archive, name_run(worker, len(ranks), args, kwargs), lambda: run(ranks, worker, *args, **kwargs))

    vars(ringsim)["trace"], vars(magics)["_run_cell"] = keep_trace, keep_cell
    Session.run = keep_call  # type: ignore[assignment]


def read_variables(ranks: Session) -> list[dict[str, Any]]:
    """Returns the numbers and texts among each rank's variables."""
    views = [ranks[rank] for rank in range(len(ranks))]
    found = [{name: getattr(view, name) for name in dir(view)} for view in views]
    return [{name: value for name, value in each.items() if isinstance(value, int | float | str)} for each in found]


def keep(
    archive: str,
    name: str,
    run: Callable[[], ringsim.Trace],
    left: Callable[[], list[dict[str, Any]]] = list,
) -> ringsim.Trace:
    """Runs a function, and keeps the record, with the variables that it left, unless there already is one."""
    shown, failure = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(shown):
            trace = run()
    except RingError as error:
        failure, trace = error, error.trace
    print(shown.getvalue(), end="")
    assert ast.literal_eval(repr(trace.results)) == trace.results, "plain results only"
    with zipfile.ZipFile(archive, "a", zipfile.ZIP_DEFLATED) as runs:
        if f"{name}.json" not in runs.namelist():
            write_run(runs, name, anonymous(trace), shown.getvalue(), failure, left())
    if failure is not None:
        raise failure
    return trace


if __name__ == "__main__":
    record(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
