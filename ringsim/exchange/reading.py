"""Files that others may have written, read within limits and refused with one error."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import DecodeError

from ringsim.errors import RingError, TraceFileError
from ringsim.traces.events import name_damage, read_file

if TYPE_CHECKING:
    from os import PathLike

__all__ = [
    "count_item_bytes",
    "list_files",
    "name_missing",
    "read_bytes",
    "reading",
]

MAX_BYTES: Final = 2**30  # of one file, unpacked
# A trace of very regular steps is packed to a thirtieth, repeated zeros to a thousandth. What
# others would unpack to gigabytes was made to fill the reader's memory.
FREE_BYTES: Final = 16 * 2**20
MAX_RATIO: Final = 100
_DAMAGE: Final = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    RecursionError,
    MemoryError,
    EOFError,
    DecodeError,
    zlib.error,
)


@contextmanager
def reading(path: str | PathLike[str], what: str) -> Iterator[None]:
    """Turns what damaged data raises within the block into a TraceFileError.

    It says what the file should be.

    Example:
        >>> try:
        ...     with reading("run.json", "a Chrome trace"):
        ...         int("x")
        ... except TraceFileError as error:
        ...     print(error)
        A file to import must be a Chrome trace, got run.json: invalid literal for int() with base 10: 'x'. Export it again.
    """  # noqa: E501
    try:
        yield
    except RingError:
        raise  # says it better, or speaks of an argument
    except _DAMAGE as error:
        raise TraceFileError(
            f"A file to import must be {what}, got {os.fsdecode(path)}: {name_damage(error)}. "
            "Export it again."
        ) from error


def read_bytes(path: str | PathLike[str]) -> bytes:
    """Returns the content of a file, unpacked if it is gzipped.

    Raises TraceFileError if it cannot be read, or is larger than 1 GiB.
    """
    data = read_file(path, "A file to import", MAX_BYTES)
    if data[:2] == b"\x1f\x8b":
        with reading(path, "packed by gzip"):
            unpacking = zlib.decompressobj(wbits=31)
            most = min(MAX_BYTES, max(FREE_BYTES, MAX_RATIO * len(data)))
            data = unpacking.decompress(data, most + 1)
            if most < len(data) <= MAX_BYTES:
                raise ValueError(
                    f"it unpacks to more than {MAX_RATIO} times its size, which no trace does"
                )
            if not unpacking.eof and len(data) <= MAX_BYTES:
                raise ValueError("its end is missing")
    if len(data) > MAX_BYTES:
        raise TraceFileError(
            f"A file to import must be at most {MAX_BYTES} bytes, got more "
            f"({os.fsdecode(path)}). Export a part of the run."
        )
    return data


def list_files(
    paths: str | PathLike[str] | Sequence[str | PathLike[str]], fits: Callable[[Path], Any]
) -> list[str | PathLike[str]]:
    """Returns the files of a run, one a rank, that are named one by one or by their directory.

    There only those that ``fits`` picks.
    """
    if not isinstance(paths, str | os.PathLike):
        several = list(paths)
    elif os.path.isdir(paths):
        several = [path for path in sorted(Path(paths).iterdir()) if fits(path)]
    else:
        several = [paths]
    if not several:
        raise TraceFileError(
            f"The files to import must be one or more, got none ({paths!r}). "
            "Name them, or their directory."
        )
    return several


def name_missing(what: str, ranks: Iterable[int], size: int) -> list[str]:
    """Returns a note that ``what`` is there of ``ranks`` only; none if it is there of all."""
    missing = sorted(set(range(size)) - set(ranks))
    if not missing:
        return []
    others = " and others" if len(missing) > 8 else ""
    return [f"no {what} of rank {', '.join(map(str, missing[:8]))}{others}"]


def count_item_bytes(dtype: str) -> int:
    """Returns how many bytes a number of a dtype has, by torch's name of it.

    Example:
        >>> [count_item_bytes(dtype) for dtype in ("float32", "float8_e5m2", "bool")]
        [4, 1, 1]
    """
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1
