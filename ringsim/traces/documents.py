"""Reads untrusted files and JSON within limits, and writes files completely or not at all."""

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
from typing import Any, BinaryIO, TypeVar

from ringsim.errors import RingError, TraceFileError

T = TypeVar("T")
StrPath = str | os.PathLike[str]
JsonObject = dict[str, Any]  # plain data for JSON


def write_whole(path: StrPath, write: Callable[[BinaryIO], T], what: str = "a trace") -> T:
    """Writes a file under a temporary name in the same directory, then renames the file.

    Readers never see an incomplete file, and a failure leaves the old file unchanged.

    Args:
        path: the file to write; an existing file, or the target of a symbolic link, is replaced.
        write: the function that writes the content to the open file.
        what: the name of the file's kind in the error message.

    Returns:
        The result of ``write``.

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
        target = os.path.realpath(path)  # a symbolic link stays, and its target is replaced
        if os.path.exists(target) and not os.path.isfile(target):
            raise OSError("it is not a regular file")
        temporary = os.path.join(os.path.dirname(target), f".ringsim-{secrets.token_hex(6)}.tmp")
        try:
            with open(temporary, "xb") as file:
                result = write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
            return result
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    except OSError as error:
        reason = error.strerror or error
        raise TraceFileError(
            f"cannot write {what} to {path}: {reason}. Create the directory, or choose a "
            "different path."
        ) from error


def are_all(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Returns whether a value is a list whose entries all have the type ``kind``."""
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


# for each entry: a test, and the form that the test expects
Forms = Mapping[str, tuple[Callable[[Any], bool], str]]
_SENTENCES = (lambda value: are_all(value, str), "a list of sentences")
OBJECT = (lambda value: isinstance(value, dict), "an object")
_FORMS: Forms = dict.fromkeys(("notes", "not_recorded", "not_checked"), _SENTENCES) | dict.fromkeys(
    ("machine", "versions"), OBJECT
)


def check_metadata(metadata: Any, forms: Forms) -> None:
    """Raises ValueError unless the metadata and each entry that ringsim reads are valid."""
    if not isinstance(metadata, dict):
        raise ValueError("the metadata is not an object")
    for key, (is_such, form) in {**_FORMS, **forms}.items():
        if key in metadata and not is_such(metadata[key]):
            raise ValueError(f"{key} is not {form}")


@contextlib.contextmanager
def saving(what: str, path: StrPath) -> Iterator[None]:
    """Raises TraceFileError if the block tries to save data that JSON cannot represent.

    Within this block, a writer makes the same checks as a reader, so that it never writes an
    unreadable file.
    """
    try:
        yield
    except (TypeError, ValueError, RecursionError) as error:
        raise TraceFileError(
            f"cannot save {what} to {os.fsdecode(path)}: {error}. "
            "Change the metadata, then save the trace again."
        ) from error


def parse_json(data: bytes) -> Any:
    """Returns the value of a JSON document.

    Raises ValueError if the document is not JSON. Unlike Python's parser, it also refuses NaN and
    Infinity.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not valid JSON")

    return json.loads(data.decode("utf-8"), parse_constant=refuse)


def open_file(path: StrPath, what: str) -> BinaryIO:
    """Opens a file for reading.

    Raises TraceFileError if the file cannot be opened. The message calls the file ``what``.
    """
    try:
        return open(path, "rb")
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise TraceFileError(
            f"cannot open {what} {os.fsdecode(path)}: "
            f"{getattr(error, 'strerror', None) or error}. Check the path."
        ) from error


def read_file(path: StrPath, what: str, most: int) -> bytes:
    """Returns a file's content.

    Raises TraceFileError if the file cannot be read or has more than ``most`` bytes. The message
    calls the file ``what``.
    """
    with open_file(path, what) as file:
        try:
            about = os.fstat(file.fileno())
            # read allocates memory for the whole size up front
            data = file.read(min(about.st_size if stat.S_ISREG(about.st_mode) else most, most) + 1)
        except (OSError, MemoryError) as error:
            reason = getattr(error, "strerror", None) or str(error) or "it does not fit into memory"
            raise TraceFileError(
                f"cannot read {what} {os.fsdecode(path)}: {reason}. Check the path."
            ) from error
    if len(data) > most:
        raise TraceFileError(
            f"cannot read {what} {os.fsdecode(path)}: it is larger than {most} bytes. Use only "
            "part of the run."
        )
    return data


# the errors that damaged or hostile data can cause inside json, zipfile and pyarrow
DAMAGE = (
    *(ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError),
    *(MemoryError, EOFError, OSError, struct.error, zipfile.BadZipFile, zlib.error),
)


@contextlib.contextmanager
def reading(what: str, path: StrPath, remedy: str) -> Iterator[None]:
    """Converts errors caused by damaged data within the block to TraceFileError.

    Example:
        >>> try:
        ...     with reading("a list", "l.json", "Write it again."):
        ...         int("x")
        ... except TraceFileError as error:
        ...     print(error)
        cannot read l.json as a list: invalid literal for int() with base 10: 'x'. Write it again.
    """
    try:
        yield
    except RingError:
        raise  # this error is more precise, or concerns an argument
    except DAMAGE as error:
        said = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
        raise TraceFileError(
            f"cannot read {os.fsdecode(path)} as {what}: {said}. {remedy}"
        ) from error
