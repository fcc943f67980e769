"""The tables of names as JSON: in the names file of a rank, and in a saved trace.

Whatever does not have the expected form is refused with a ValueError that says why; nothing is repaired by guessing.
"""

from __future__ import annotations

import re
from typing import Any, Final

from ringsim.traces.events import NONE, Group, Payload, Tables

__all__ = ["are_all", "check_words", "no_constant", "read_group", "read_payload", "read_tables", "read_word", "readable", "write_tables"]

_INT64_MAX = 2**63 - 1
# Half a character of UTF-16, which no file, terminal or picture takes, and what commands a terminal.
_UNREADABLE: Final = re.compile("[\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f\\x7f-\\x9f\\ud800-\\udfff]")


def write_tables(tables: Tables) -> dict[str, Any]:
    """Returns the tables as JSON can say them.

    Example:
        >>> tables = Tables(groups=(Group("world", (0, 1)),), payloads=(Payload("float32", (2,), 8),))
        >>> read_tables(write_tables(tables)) == tables
        True
    """
    return {
        "groups": [{"name": group.name, "ranks": list(group.ranks)} for group in tables.groups],
        "payloads": [_write_payload(payload) for payload in tables.payloads],
        "labels": list(tables.labels),
        "files": list(tables.files),
    }


def _write_payload(payload: Payload) -> dict[str, Any]:
    entry = {"dtype": payload.dtype, "shape": list(payload.shape), "size_bytes": payload.size_bytes}
    entry |= {"reduction": payload.reduction} if payload.reduction else {}
    return {**entry, "strides": [list(strides) for strides in payload.strides]} if payload.strides else entry


def read_tables(value: Any) -> Tables:
    """Returns the tables that ``write_tables`` wrote.

    Raises:
        ValueError: ``value`` is something else.
    """
    if not isinstance(value, dict) or sorted(value) != ["files", "groups", "labels", "payloads"]:
        raise ValueError("the tables of names are not the four of a trace")
    for name, entries in value.items():
        if not isinstance(entries, list):
            raise ValueError(f"the table of {name} is not a list")
    return Tables(
        groups=tuple(map(read_group, value["groups"])),
        payloads=tuple(map(read_payload, value["payloads"])),
        labels=tuple(map(read_word, value["labels"])),
        files=tuple(map(read_word, value["files"])),
    )


def read_group(entry: Any) -> Group:
    """Returns the group in ``{"name": ..., "ranks": [...]}``; other keys are ignored.

    Raises:
        ValueError: ``entry`` is no such group.
    """
    if not isinstance(entry, dict):
        raise ValueError("a group is not an object")
    return Group(read_word(entry.get("name")), _naturals(entry.get("ranks"), "the ranks of a group"))


def read_payload(entry: Any) -> Payload:
    """Returns the payload in ``{"dtype": ..., "shape": [...], "size_bytes": ..., "reduction": ..., "strides": [[...]]}``.

    The last two may be missing; other keys are ignored.

    Raises:
        ValueError: ``entry`` is no such payload.
    """
    if not isinstance(entry, dict):
        raise ValueError("a payload is not an object")
    size_bytes = entry.get("size_bytes")
    if type(size_bytes) is not int or not NONE <= size_bytes <= _INT64_MAX:
        raise ValueError("the size of a payload is not a number of bytes")
    shape = _naturals(entry.get("shape"), "the shape of a payload")
    strides = entry.get("strides", [])
    if not isinstance(strides, list):
        raise ValueError("the strides of a payload are not a list")
    permuted = tuple(_naturals(one, "the strides of a tensor") for one in strides)
    return Payload(read_word(entry.get("dtype")), shape, size_bytes, read_word(entry.get("reduction", "")), permuted)


def readable(value: Any) -> Any:
    r"""Returns JSON in whose words what no reader can take is written out: whoever chose them may have meant harm.

    Args:
        value: what JSON can say.

    Example:
        >>> readable({"label": ["one", "red \x1b[31m"]})
        {'label': ['one', 'red \\x1b[31m']}
    """
    if isinstance(value, str):
        return _UNREADABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), value)
    if isinstance(value, list):
        return [readable(one) for one in value]
    if isinstance(value, dict):
        return {readable(key): readable(one) for key, one in value.items()}
    return value


def read_word(value: Any) -> str:
    """Returns ``value``, made ``readable``, if it is a string.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, str):
        raise ValueError("a name is not a string")
    word: str = readable(value)
    return word


def _naturals(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one <= _INT64_MAX for one in value):
        raise ValueError(f"{what} are not whole numbers from 0")
    return tuple(value)


def are_all(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Tells whether a value is a list of which all entries are of one kind."""
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


def check_words(metadata: dict[str, Any]) -> None:
    """Raises ValueError unless what metadata say in words is of the form in which it is read: notes, the machine, the versions."""
    for key in ("notes", "not_recorded", "not_checked"):
        if not are_all(metadata.get(key, []), str):
            raise ValueError(f"{key} is not a list of sentences")
    for key in ("machine", "versions"):
        if not isinstance(metadata.get(key, {}), dict):
            raise ValueError(f"{key} is not an object")


def no_constant(name: str) -> Any:
    """Raises ValueError: Python's reader of JSON takes words for numbers that are none; for its ``parse_constant``."""
    raise ValueError(f"{name} is not JSON")
