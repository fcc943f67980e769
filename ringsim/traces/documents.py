"""Files that others may have written, and their JSON.

They are read within limits and checked, and written whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, Final

from ringsim.errors import RingError, TraceFileError


def write_whole(
    path: str | os.PathLike[str], write: Callable[[BinaryIO], Any], what: str = "a trace"
) -> None:
    """Writes a file next to its final place and then renames it.

    A reader never sees half of it, and a failure leaves what was there.

    Args:
        path: where to write it; an existing file, or what a symbolic link points to, is replaced.
        write: writes the content to the open file.
        what: what the file is, for the error message.

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
        raise TraceFileError(
            f"The path of {what} must be writable, got {path}: {reason}. "
            "Make the directory, or choose one."
        ) from error


def are_all(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Returns whether a value is a list of which all entries are of one kind."""
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


# of an entry: a test, and what it should be
Forms = Mapping[str, tuple[Callable[[Any], bool], str]]
_SENTENCES: Final = (lambda value: are_all(value, str), "a list of sentences")
OBJECT: Final = (lambda value: isinstance(value, dict), "an object")
_FORMS: Final[Forms] = dict.fromkeys(
    ("notes", "not_recorded", "not_checked"), _SENTENCES
) | dict.fromkeys(("machine", "versions"), OBJECT)


def check_metadata(metadata: Any, forms: Forms) -> None:
    """Raises ValueError unless metadata have the form in which they are read.

    Also those entries of them that are read again.
    """
    if not isinstance(metadata, dict):
        raise ValueError("the metadata is not an object")
    for key, (is_such, form) in {**_FORMS, **forms}.items():
        if key in metadata and not is_such(metadata[key]):
            raise ValueError(f"{key} is not {form}")


@contextlib.contextmanager
def saving(what: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns what is not plain data within the block into a TraceFileError.

    The error begins with ``what``. A writer makes the checks of the reader here, so that it never
    writes a file that cannot be read.
    """
    try:
        yield
    except (TypeError, ValueError, RecursionError) as error:
        raise TraceFileError(
            f"{what} must be plain data to be saved, got one where {error} "
            f"({os.fsdecode(path)}). Change its metadata, then save."
        ) from error


def parse_json(data: bytes) -> Any:
    """Returns the value of a JSON document.

    Raises ValueError if it is none: Python's reader takes NaN and Infinity for numbers.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(data.decode("utf-8"), parse_constant=refuse)


def open_file(path: str | os.PathLike[str], what: str) -> BinaryIO:
    """Opens a file to read.

    Raises TraceFileError, which begins with ``what``, if that cannot be done.
    """
    try:
        return open(path, "rb")
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        rule = "exist" if isinstance(error, FileNotFoundError) else "be readable"
        raise TraceFileError(
            f"{what} must {rule}, got {os.fsdecode(path)}: "
            f"{getattr(error, 'strerror', None) or error}. Check the path."
        ) from error


def read_file(path: str | os.PathLike[str], what: str, most: int) -> bytes:
    """Returns a file's content.

    Raises TraceFileError, which begins with ``what``, if it cannot be read or has more than
    ``most`` bytes.
    """
    with open_file(path, what) as file:
        try:
            about = os.fstat(file.fileno())
            # room is made for all of it
            data = file.read(min(about.st_size if stat.S_ISREG(about.st_mode) else most, most) + 1)
        except (OSError, MemoryError) as error:
            reason = (
                getattr(error, "strerror", None) or str(error) or "more than there is memory for"
            )
            raise TraceFileError(
                f"{what} must be readable, got {os.fsdecode(path)}: {reason}. Check the path."
            ) from error
    if len(data) > most:
        raise TraceFileError(
            f"{what} must be at most {most} bytes, got more ({os.fsdecode(path)}). Take another, "
            "or a part of the run."
        )
    return data


# what damaged or hostile data may raise inside json, zipfile and pyarrow
DAMAGE: Final = (
    *(ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError),
    *(MemoryError, EOFError, OSError, struct.error, zipfile.BadZipFile, zlib.error),
)


@contextlib.contextmanager
def reading(rule: str, path: str | os.PathLike[str], remedy: str) -> Iterator[None]:
    """Turns what damaged data raises within the block into a TraceFileError.

    Example:
        >>> try:
        ...     with reading("A list must be JSON", "list.json", "Write it again."):
        ...         int("x")
        ... except TraceFileError as error:
        ...     print(error)
        A list must be JSON, got list.json: invalid literal for int() with base 10: 'x'. Write it again.
    """  # noqa: E501
    try:
        yield
    except RingError:
        raise  # says it better, or speaks of an argument
    except DAMAGE as error:
        said = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
        raise TraceFileError(f"{rule}, got {os.fsdecode(path)}: {said}. {remedy}") from error
