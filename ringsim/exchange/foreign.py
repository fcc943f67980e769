"""Files that others may have written: read within limits, and refused with one error."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from ringsim.errors import RingError, TraceFileError

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["parse_json", "read_bytes", "reading"]

MAX_BYTES: Final = 2**30  # of one file, unpacked
_DAMAGE: Final = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError, MemoryError, zlib.error)


@contextmanager
def reading(path: str | PathLike[str], what: str) -> Iterator[None]:
    """Turns whatever damage raises within the block into one error.

    Args:
        path: what is read.
        what: what it should be, such as "a Perfetto trace".

    Raises:
        TraceFileError: the block raised what damaged data raises.

    Example:
        >>> try:
        ...     with reading("run.json", "a Chrome trace"):
        ...         int("x")
        ... except TraceFileError as error:
        ...     print(error)
        A file to import must be a Chrome trace, got run.json: invalid literal for int() with base 10: 'x'. Export it again.
    """
    try:
        yield
    except RingError:
        raise  # says it better, or speaks of an argument
    except _DAMAGE as error:
        reason = repr((str(error).splitlines() or [""])[0][:200])[1:-1] if not str(error).isprintable() else str(error)[:200]
        raise TraceFileError(
            f"A file to import must be {what}, got {os.fsdecode(path)}: {reason or type(error).__name__}. Export it again."
        ) from error


def read_bytes(path: str | PathLike[str]) -> bytes:
    """Returns what a file holds, unpacked if it is packed by gzip.

    Raises:
        TraceFileError: it cannot be read, or is larger than 1 GiB.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        rule = "exist" if isinstance(error, FileNotFoundError) else "be readable"
        reason = getattr(error, "strerror", None) or error
        raise TraceFileError(f"A file to import must {rule}, got {os.fsdecode(path)}: {reason}. Check the path.") from error
    if data[:2] == b"\x1f\x8b":
        with reading(path, "packed by gzip"):
            unpacking = zlib.decompressobj(wbits=31)
            data = unpacking.decompress(data, MAX_BYTES + 1)
            if not unpacking.eof and len(data) <= MAX_BYTES:
                raise ValueError("its end is missing")
    if len(data) > MAX_BYTES:
        raise TraceFileError(
            f"A file to import must be at most {MAX_BYTES} bytes, got more ({os.fsdecode(path)}). Export a part of the run."
        )
    return data


def parse_json(data: bytes) -> Any:
    """Returns the value of a JSON document.

    Raises:
        ValueError: it is none.

    Example:
        >>> parse_json(b'{"one": 1}')
        {'one': 1}
    """
    return json.loads(data.decode("utf-8"), parse_constant=_no_constant)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
