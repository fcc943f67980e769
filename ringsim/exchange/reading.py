"""Reads untrusted files from other tools, within limits; every failure raises TraceFileError."""

from __future__ import annotations

import itertools
import math
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ringsim.errors import TraceFileError, name_ranks
from ringsim.traces.documents import read_file, reading
from ringsim.traces.events import Payload
from ringsim.traces.units import count

if TYPE_CHECKING:
    from os import PathLike

T = TypeVar("T", bound=Hashable)

MAX_BYTES = 2**30  # the size of one file, unpacked
# A trace of very regular steps compresses to a thirtieth of its size, repeated zeros to a
# thousandth. A small file that unpacks to gigabytes was made to fill the reader's memory.
FREE_BYTES = 16 * 2**20
MAX_RATIO = 100


def importing(path: str | PathLike[str], what: str) -> AbstractContextManager[None]:
    """Converts errors caused by damaged data within the block to TraceFileError.

    ``what`` names the kind of file that was expected.
    """
    return reading(what, path, "Export the file again.")


def read_bytes(path: str | PathLike[str]) -> bytes:
    """Returns a file's content, decompressed if the file is gzipped.

    Raises TraceFileError if the file cannot be read or is larger than 1 GiB.
    """
    data = read_file(path, "the file", MAX_BYTES)
    if data[:2] == b"\x1f\x8b":
        with importing(path, "a gzip file"):
            unpacking = zlib.decompressobj(wbits=31)
            most = min(MAX_BYTES, max(FREE_BYTES, MAX_RATIO * len(data)))
            data = unpacking.decompress(data, most + 1)
            if most < len(data) <= MAX_BYTES:
                raise ValueError(f"it unpacks to more than {MAX_RATIO} times its size")
            if not unpacking.eof and len(data) <= MAX_BYTES:
                raise ValueError("it is truncated")
    if len(data) > MAX_BYTES:
        raise TraceFileError(
            f"cannot import {os.fsdecode(path)}: it is larger than {MAX_BYTES} bytes. Export "
            "only part of the run."
        )
    return data


def list_files(
    paths: str | PathLike[str] | Sequence[str | PathLike[str]], fits: Callable[[Path], Any]
) -> list[str | PathLike[str]]:
    """Returns the files of a run, one per rank, from a list of files or a directory.

    If ``paths`` is a directory, only the files that ``fits`` accepts are returned.
    """
    if not isinstance(paths, str | os.PathLike):
        several = list(paths)
    elif os.path.isdir(paths):
        several = [path for path in sorted(Path(paths).iterdir()) if fits(path)]
    else:
        several = [paths]
    if not several:
        raise TraceFileError(
            f"found no files to import in {paths!r}. Name the files, or the directory that "
            "contains them."
        )
    return several


def name_missing(what: str, ranks: Iterable[int], size: int) -> list[str]:
    """Returns a list with one note that names the ranks that lack ``what``, or an empty list."""
    missing = sorted(set(range(size)) - set(ranks))
    if not missing:
        return []
    return [f"no {what} from {name_ranks(missing)}"]


def find_first(numbers: Iterable[tuple[T, int, int]]) -> dict[T, int]:
    """Returns each group's first sequence number that the files of all ranks contain.

    ``numbers`` holds the group, rank and sequence number of each collective, in order.

    Example:
        >>> find_first([("world", 0, 7), ("world", 0, 8), ("world", 1, 8)])
        {'world': 8}
    """
    firsts = defaultdict[T, dict[int, int]](dict)
    for group, rank, number in numbers:
        firsts[group].setdefault(rank, number)
    return {group: max(mine.values()) for group, mine in firsts.items()}


def list_left_out(numbers: Mapping[str, int]) -> list[str]:
    """Returns a note for each reason to leave out operations, given their number by reason."""
    return [f"left out: {count(number, 'operation')} {why}" for why, number in numbers.items()]


def make_payload(dtype: str, shapes: Sequence[Sequence[Any]], copies: int = 1) -> Payload:
    """Returns the payload that consists of ``copies`` of tensors with these shapes.

    Args:
        dtype: torch's name for the dtype, from which the size of an element follows.
        shapes: the shape of each tensor.
        copies: the number of times that the operation carries the tensors.

    Example:
        >>> for dtype in ("float32", "float8_e5m2", "bool"):
        ...     print(*make_payload(dtype, [[2, 3]])[:3])
        float32 (2, 3) 24
        float8_e5m2 (2, 3) 6
        bool (2, 3) 6
        >>> make_payload("float32", [[2], [3]], copies=2).shape
        (10,)
    """
    lengths = [tuple(map(int, shape)) for shape in shapes]
    if min(itertools.chain(*lengths), default=0) < 0:
        raise ValueError(f"one of the shapes {lengths} has a negative length"[:200])
    items = copies * sum(map(math.prod, lengths))
    bits = re.search(r"\d+", dtype)
    size_bytes = items * (int(bits[0]) // 8 if bits else 1)
    return Payload(dtype, lengths[0] if len(lengths) == copies == 1 else (items,), size_bytes)


def to_ns(microseconds: Any) -> int:
    """Converts a time from the format's unit (fractional µs) to whole ns."""
    if isinstance(microseconds, int | float):
        return round(microseconds * 1000)
    raise ValueError(f"the time {str(microseconds)[:40]!r} is not a number")
