"""Redacts traces for sharing: removes directories, host names and user names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ringsim.traces.events import CALLS
from ringsim.traces.value import Trace

_PART = r"""[^\s/\\:;,'"()<>|*?]+"""
# the directories in a path ("/home/me/src/" in "/home/me/src/train.py"), after "/", "~" or a drive
_DIRECTORIES = (
    rf"(?<![\w.:/\\-])(?:~[\w.-]*/(?:{_PART}/)*|/(?:{_PART}/)+)|\b[A-Za-z]:\\(?:{_PART}\\)*"
)
_USER = re.compile(r"(?:/home|[/\\]Users)[/\\]([\w.-]+)")


def redact(trace: Trace) -> Trace:
    """Returns the trace without directories, host names and user names; see ``Trace.redact``.

    Example:
        >>> from ringsim.traces.events import OP_CODES, Tables, make_events
        >>> tables = Tables(
        ...     labels=("read /home/student/data/a.bin",), files=("/home/student/train.py",)
        ... )
        >>> events = make_events(
        ...     {"rank": [0], "op": [OP_CODES["span"]], "label": [0], "file": [0]}, tables
        ... )
        >>> shared = redact(
        ...     Trace(
        ...         events,
        ...         {"ranks": [{"rank": 0, "host": "node7"}], "notes": ["student@node7 was slow"]},
        ...     )
        ... )
        >>> shared.events.tables.labels, shared.events.tables.files
        (('read a.bin',), ('train.py',))
        >>> shared.metadata
        {'ranks': [{'rank': 0, 'host': 'host0'}], 'notes': ['user@host0 was slow']}
    """
    tables = trace.events.tables
    directories = {
        os.path.dirname(file) for called in tables.files for file in called.split(CALLS)
    } - {"", "/"}
    known = "\n".join(
        [
            *tables.files,
            *tables.labels,
            json.dumps(trace.metadata, ensure_ascii=False).replace("\\\\", "\\"),
        ]
    )
    hosts = dict.fromkeys(str(one.get("host") or "") for one in trace.metadata.get("ranks", ()))
    named = {host: f"host{number}" for number, host in enumerate(hosts) if host}
    named |= {host.partition(".")[0]: name for host, name in reversed(named.items())}
    words = dict.fromkeys(_USER.findall(known), "user") | named
    # unlike other directories, these may contain spaces
    known_first = [
        rf"{re.escape(one)}/(?:{_PART}/)*" for one in sorted(directories, key=len, reverse=True)
    ]
    any_directory = re.compile("|".join([*known_first, _DIRECTORIES]))
    any_word = re.compile(
        rf"(?<![\w.-])(?:{'|'.join(map(re.escape, sorted(words, key=len, reverse=True)))})(?![\w-])"
    )

    def clean(text: str) -> str:
        text = any_directory.sub("", text)
        return any_word.sub(lambda found: words[found[0]], text) if words else text

    names = tables._replace(
        groups=tuple(group._replace(name=clean(group.name)) for group in tables.groups),
        labels=tuple(map(clean, tables.labels)),
        files=tuple(CALLS.join(map(clean, called.split(CALLS))) for called in tables.files),
    )
    return Trace(replace(trace.events, tables=names), _map(clean, trace.metadata))


def _map(change: Callable[[str], str], value: Any) -> Any:
    """Returns JSON data with ``change`` applied to every string."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map(change, one) for one in value]
    if isinstance(value, dict):
        return {change(key): _map(change, one) for key, one in value.items()}
    return value
