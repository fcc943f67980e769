"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

from ringsim.errors import TraceFileError

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["write_whole"]


def write_whole(path: str | PathLike[str], write: Callable[[BinaryIO], None]) -> None:
    """Writes a file beside its final place and then renames it: a reader never sees half of it, and a failure leaves what was there.

    Args:
        path: where to; an existing file is replaced, what a symbolic link points to as well.
        write: writes the content to the file that it is given.

    Raises:
        TraceFileError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     write_whole(f"{directory}/one", lambda file: print(file.write(b"hello")))
        ...     print(os.listdir(directory))
        5
        ['one']
    """
    try:
        if "\0" in os.fsdecode(path):
            raise OSError("embedded null byte")
        target = os.path.realpath(path)  # a symbolic link stays, what it points to is replaced
        if os.path.exists(target) and not os.path.isfile(target):
            raise OSError("this is no file")
        temporary = os.path.join(os.path.dirname(target), f".ringsim-{secrets.token_hex(6)}.tmp")
        try:
            with open(temporary, "xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise
    except OSError as error:
        reason = error.strerror or error
        raise TraceFileError(f"The path of a trace must be writable, got {path}: {reason}. Make the directory, or choose one.") from error
