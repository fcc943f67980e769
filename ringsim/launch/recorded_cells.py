"""Replays recorded runs in the cells of the lessons.

If ``RINGSIM_REPLAY`` is set, no rank is started. The records are in an archive next to the lessons,
made by ``notebooks/data/runs.py``. A run is identified by the text of its function or cell, the
number of ranks and the arguments. Any other run raises an error.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from ringsim import errors
from ringsim.traces.files import load
from ringsim.traces.value import Trace

_NOTE = "recorded on the named machine: RINGSIM_REPLAY is set, so nothing runs here."


def is_replaying() -> bool:
    """Returns whether recorded runs are shown instead of new runs."""
    return os.environ.get("RINGSIM_REPLAY", "0") not in ("", "0")


def refuse(what: str) -> NoReturn:
    """Raises RingError because this operation is unavailable in a replay."""
    raise errors.RingError(
        f"{what}: RINGSIM_REPLAY is set, so nothing runs. Unset it, install torch, and restart the "
        "kernel."
    )


def name_run(
    what: Callable[..., Any] | str,
    world_size: int | None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    r"""Returns a name that identifies a run.

    Args:
        what: the function, or the text of a cell.
        world_size: the number of ranks.
        args: the positional arguments of the function.
        kwargs: the function's keyword arguments.

    Returns:
        A short text that depends only on these three arguments.

    Example:
        >>> name_run("print(ring.rank)", 4) == name_run("print(ring.rank)\n", 4) != name_run(
        ...     "print(ring.rank)", 3
        ... )
        True
    """
    text = what if isinstance(what, str) else inspect.getsource(what)
    return hashlib.sha256(
        repr((text.strip(), world_size, tuple(args), dict(kwargs or {}))).encode()
    ).hexdigest()[:16]


def write_run(
    archive: zipfile.ZipFile,
    name: str,
    trace: Trace,
    shown: str,
    error: errors.RingError | None,
    variables: Sequence[Mapping[str, Any]],
) -> None:
    """Adds a run to an archive.

    The record contains its trace, its ranks' results and output, the shown text, the error that
    ended it, and the variables that it left on the ranks of a session.
    """
    failed = error and [type(error).__name__, str(error), getattr(error, "rank", None)]
    told = {
        "results": repr(trace.results),
        "output": trace.output,
        "shown": shown,
        "error": failed,
        "variables": variables,
    }
    with tempfile.TemporaryDirectory() as directory:
        trace.save(file := Path(directory, f"{name}.ringtrace"), source=True)
        archive.write(file, file.name)
    archive.writestr(f"{name}.json", json.dumps(told))


class RecordedRanks(list[SimpleNamespace]):
    """The ranks of a session in a replay, each with the variables that a recorded cell left."""

    def run(self, worker: Callable[..., Any], *args: Any, **kwargs: Any) -> Trace:
        """Shows a recorded call, like ``ringsim.trace``."""
        return replay(name_run(worker, len(self), args, kwargs), {})


def replay(name: str, space: dict[str, Any]) -> Trace:
    """Shows a recorded run, with the original output of the run.

    Args:
        name: the name of the run, from ``name_run``.
        space: the notebook's variables, in which the run sets ``ranks``.

    Returns:
        The trace, with results and output.

    Raises:
        RingError: no record exists, or the recorded run failed. In the latter case, this is the
            run's own error, with the trace and the diagnosis.
    """
    with (
        as_file(files("ringsim") / "lessons" / "data" / "runs.zip") as path,
        zipfile.ZipFile(path) as archive,
    ):
        if f"{name}.json" not in archive.namelist():
            refuse("cannot replay a call that is not in an unchanged cell of a lesson")
        told = json.loads(archive.read(f"{name}.json"))
        with tempfile.TemporaryDirectory() as directory:
            trace = load(archive.extract(f"{name}.ringtrace", directory))
    trace.metadata["source"] = "replayed, measured"
    trace.metadata["notes"].append(_NOTE)
    trace.results[:], trace.output[:] = ast.literal_eval(told["results"]), told["output"]
    space["ranks"] = RecordedRanks(SimpleNamespace(**each) for each in told["variables"])
    # shown once
    warnings.warn(
        "RINGSIM_REPLAY is set: recorded runs are shown, and nothing runs.",
        stacklevel=1,
    )
    sys.stdout.write(told["shown"])
    if told["error"] is not None:
        kind, message, rank = told["error"]
        more = {} if rank is None else {"rank": rank}
        raise getattr(errors, kind)(message, trace=trace, diagnosis=trace.explain(), **more)
    return trace
