"""Loads runs from trace files and from the files of torch.profiler."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, overload

from ringsim.exchange.profiler import PROFILES, read_profiler
from ringsim.traces import files

if TYPE_CHECKING:
    from os import PathLike

    from ringsim.traces.filtering import Numbers, Stretch
    from ringsim.traces.value import Trace


def is_profile(path: str | PathLike[str]) -> bool:
    """Returns whether a path names a file of torch.profiler or a directory of such files."""
    name = os.fsdecode(path).rstrip(os.sep)
    is_folder = os.path.isdir(name) and not name.endswith(".parts")
    return name.endswith(PROFILES) or (is_folder and any(Path(name).glob("*.json*")))


# the overloads overlap, because a str is also an iterable of str
@overload
def load(  # type: ignore[overload-overlap]
    path: str | PathLike[str], *, ranks: Numbers | None = None, between_s: Stretch | None = None
) -> Trace: ...
@overload
def load(
    path: Iterable[str | PathLike[str]],
    *,
    ranks: Numbers | None = None,
    between_s: Stretch | None = None,
) -> list[Trace]: ...
def load(
    path: str | PathLike[str] | Iterable[str | PathLike[str]],
    *,
    ranks: Numbers | None = None,
    between_s: Stretch | None = None,
) -> Trace | list[Trace]:
    """Reads a trace file, part of the run that it contains, or several files from different runs.

    If you pass ``ranks`` or ``between_s``, only that part of the file is read. The result is the
    same as that of ``Trace.filter``, with one difference. ``load`` does not read the other side of
    some operations, so it cannot know whether that side was ever posted. It therefore never counts
    these operations as unmatched, but always as operations whose other side is left out.

    A run that is killed before it can write its file leaves its parts next to the file, in
    ``<path>.parts``. If the file is missing or damaged, ``load`` recovers the trace from the parts
    and adds a note to the metadata.

    A directory of ``torch.profiler`` files, one per rank, is one run. ``load`` also reads a single
    such file, as a run in which the other ranks are missing; see
    ``ringsim.exchange.read_profiler``, which also reads a list of files from one run.

    Args:
        path: a trace file, a directory of parts, a torch.profiler file (``.json`` or ``.json.gz``)
            or a directory of torch.profiler files; or a list of several, one per run.
        ranks: the rank or ranks to read; by default, all ranks.
        between_s: the begin and end of a time range, in seconds from the start of the run; by
            default, the whole run.

    Returns:
        The trace, without results and output, which trace files do not contain. For several files,
        a list of traces in the same order.

    Raises:
        TraceFileError: a file is missing or damaged, is not a trace, or was written by a later
            version of ringsim.
        ArgumentError: the run has no such rank, or ``between_s`` is not a time range.

    Example:
        >>> from ringsim.errors import TraceFileError
        >>> try:
        ...     load("no/such.ringtrace")
        ... except TraceFileError as error:
        ...     print(error)
        cannot open the trace file no/such.ringtrace: No such file or directory. Check the path.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        return [load(one, ranks=ranks, between_s=between_s) for one in path]
    if is_profile(path):
        return read_profiler(path).filter(ranks=ranks, between_s=between_s)
    return files.load(path, ranks=ranks, between_s=between_s)
