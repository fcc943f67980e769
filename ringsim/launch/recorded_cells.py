"""Replay: a cell of a lesson shows the run that was recorded of it.

That is where ``RINGSIM_REPLAY`` is set; no rank is started. The records lie in one archive beside
the lessons (``notebooks/data/runs.py`` makes it). A run is found by what was run: the text of the
function or cell, the number of ranks, the arguments. Of anything else there is no record, and that
is said: nothing is made up.
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
from typing import Any, Final, NoReturn

from ringsim import errors
from ringsim.traces.files import load
from ringsim.traces.value import Trace

__all__ = ["is_replaying", "name_run", "refuse", "replay", "write_run"]

_NOTE: Final = (
    "recorded on the machine that is named: RINGSIM_REPLAY is set, and nothing runs here."
)


def is_replaying() -> bool:
    """Tells whether runs are to be shown as they were recorded."""
    return os.environ.get("RINGSIM_REPLAY", "0") not in ("", "0")


def refuse(what: str) -> NoReturn:
    """Raises RingError: in a replay, this is not to be had."""
    raise errors.RingError(
        f"{what}, got RINGSIM_REPLAY, with which nothing runs. Unset it, have torch installed, "
        "and start the kernel anew."
    )


def name_run(
    what: Callable[..., Any] | str,
    world_size: int | None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    r"""Names a run by what was run.

    Args:
        what: the function, or the text of a cell.
        world_size: number of ranks.
        args: positional arguments of the function.
        kwargs: its keyword arguments.

    Returns:
        A short text, the same wherever the same is run.

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
    archive: zipfile.ZipFile, name: str, trace: Trace, shown: str, error: errors.RingError | None
) -> None:
    """Adds a run to an archive.

    Its trace, what its ranks returned and printed, what was shown of that, and the error that ended
    it.
    """
    failed = (
        [type(error).__name__, str(error), getattr(error, "rank", None)]
        if error is not None
        else None
    )
    told = {"results": repr(trace.results), "output": trace.output, "shown": shown, "error": failed}
    with tempfile.TemporaryDirectory() as directory:
        trace.save(file := Path(directory, f"{name}.ringtrace"))
        archive.write(file, file.name)
    archive.writestr(f"{name}.json", json.dumps(told))


def replay(name: str) -> Trace:
    """Shows the record of a run as the run would have shown itself.

    Args:
        name: of the run, from ``name_run``.

    Returns:
        The trace, with results and output.

    Raises:
        RingError: there is no record; or, of a run that failed, its own error, with the trace and
            the diagnosis.
    """
    with (
        as_file(files("ringsim") / "lessons" / "data" / "runs.zip") as path,
        zipfile.ZipFile(path) as archive,
    ):
        if f"{name}.json" not in archive.namelist():
            refuse("the function and its arguments must be those of a lesson's cell, unchanged")
        told = json.loads(archive.read(f"{name}.json"))
        with tempfile.TemporaryDirectory() as directory:
            trace = load(archive.extract(f"{name}.ringtrace", directory))
    trace.metadata["source"] = "replayed, measured"
    trace.metadata["notes"].append(_NOTE)
    trace.results[:], trace.output[:] = ast.literal_eval(told["results"]), told["output"]
    # shown once
    warnings.warn(
        "RINGSIM_REPLAY is set: runs are shown as they were recorded, and nothing runs.",
        stacklevel=1,
    )
    sys.stdout.write(told["shown"])
    if told["error"] is not None:
        kind, message, rank = told["error"]
        more = {} if rank is None else {"rank": rank}
        raise getattr(errors, kind)(message, trace=trace, diagnosis=trace.explain(), **more)
    return trace
