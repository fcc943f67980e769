"""Damage to real trace files, controlled by the choices of a test, a soak or a fuzzer.

The module also calls every reader of a trace on the damaged file. The caller provides a function
``choose(low, high)`` that returns a whole number: hypothesis, a random number generator, or a
fuzzer that watches which lines its choices reach.
"""

from __future__ import annotations

import copy
import io
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from matplotlib.figure import Figure
from trace_file import COLUMNS, put_together, take_apart, write_columns

from ringsim import Trace, load
from ringsim.errors import RingError

Choose = Callable[[int, int], int]

DATA = Path(__file__).parent.parent / "figures" / "data"
ODD_NUMBERS = (
    *(0, 1, 2, 3, 7, -1, -2, 100, 999_999, 10**30),
    *(2**31 - 1, -(2**31), 2**32, 2**62, 2**63 - 1, -(2**63)),
)
ODD_VALUES: tuple[Any, ...] = (
    *(*ODD_NUMBERS, None, True, False, 0.5, -0.0, 1e308),
    *("", "nccl", "measured", "x" * 2000, "\0", "\ud800", "a\nb", "$\\frac{", "{0}", "%s"),
    *([], {}, [[]], [{}], [None], {"": None}, [["ring:0>1", [0, 1]]], [["ring:0>1", [0]]]),
    *([0, 0], [-1], [10**30], [[0, 1]], [["x"]]),
    *({"rank": 0}, [{"rank": 0}], [{"rank": []}], {"ranks": [0]}, {"cpu": [], "cores": {}}),
)


class Whole(NamedTuple):
    """A real file, split into its members."""

    meta: bytes
    events: bytes
    columns: dict[str, Any]  # the columns as lists of numbers, -1 for null


def real_files() -> list[Whole]:
    """Returns the files that the figures are drawn from, which real ranks recorded."""
    wholes = []
    for path in sorted(DATA.glob("*.ringtrace")):
        events = load(path).events
        columns = {name: getattr(events, name).tolist() for name in COLUMNS}
        wholes.append(Whole(*take_apart(path), columns))
    return wholes


# --- damage ---------------------------------------------------------------------------------------


ODD_TOKENS: Final = (
    *(b"9" * 400, b"9" * 5000, b"-1", b"1e999", b"9223372036854775808"),
    *(b"null", b'""', b"[]", b"[" * 100_000, b'"\\u202e\\n"'),
)


def flip(data: bytes, choose: Choose) -> bytes:
    """Changes, removes or doubles a few bytes.

    It may also replace a number or a word by another one of the file, or by an odd one.
    """
    damaged = bytearray(data)
    for _ in range(choose(1, choose(1, 4))):
        place = choose(0, len(damaged) - 1)
        what = choose(0, 8)
        if what >= 5 and (tokens := list(re.finditer(rb'-?\d+|"[^"]*"', bytes(damaged)))):
            start, end = tokens[choose(0, len(tokens) - 1)].span()
            damaged[start:end] = (
                ODD_TOKENS[choose(0, len(ODD_TOKENS) - 1)]
                if what == 5
                else tokens[choose(0, len(tokens) - 1)][0]
            )
        elif what == 0:
            del damaged[place : place + choose(1, 16)]
        elif what == 1:
            damaged[place:place] = damaged[place : place + choose(1, 64)]
        else:
            damaged[place] = choose(0, 255)
        damaged = damaged or bytearray(b"\0")
    return bytes(damaged)


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Returns every (container, key) of a JSON document."""
    for key in (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    ):
        found.append((value, key))
        _places(value[key], found)
    return found


def change_meta(meta: bytes, choose: Choose) -> bytes:
    """Puts odd values into meta.json, removes entries, doubles them, or swaps them."""
    document = json.loads(meta)
    for _ in range(choose(1, 3)):
        places = _places(document, [])
        if not places:
            break
        container, key = places[choose(0, len(places) - 1)]
        what = choose(0, 5)
        if what == 0:
            del container[key]
        elif what == 1 and isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        elif what == 2:
            other, at = places[choose(0, len(places) - 1)]
            container[key] = copy.deepcopy(other[at])
        else:  # also a copy, because the next change may affect it
            container[key] = copy.deepcopy(ODD_VALUES[choose(0, len(ODD_VALUES) - 1)])
    return json.dumps(document).encode()


def change_columns(columns: dict[str, Any], choose: Choose) -> bytes:
    """Puts odd numbers into some rows, removes rows, or moves them."""
    changed = {name: list(values) for name, values in columns.items()}
    names = list(COLUMNS)
    for _ in range(choose(1, 6)):
        count = len(changed["rank"])
        if not count:
            break
        name, row = names[choose(0, len(names) - 1)], choose(0, count - 1)
        what = choose(0, 7)
        if what == 0:
            for values in changed.values():
                del values[row]
        elif what == 1:
            changed[name][row] = changed[name][choose(0, count - 1)]
        elif what == 2:
            changed[name] = [changed[name][row]] * count
        else:
            info = np.iinfo(COLUMNS[name])
            changed[name][row] = min(
                max(ODD_NUMBERS[choose(0, len(ODD_NUMBERS) - 1)], info.min), info.max
            )
    return write_columns(changed)


def with_rows(meta: bytes, events: bytes) -> tuple[bytes, bytes]:
    """Sets the number of rows in meta.json to that of the other member."""
    document = json.loads(meta)
    document["events"] = pq.ParquetFile(io.BytesIO(events)).metadata.num_rows
    return json.dumps(document).encode(), events


def mutate(wholes: list[Whole], choose: Choose) -> bytes:
    """Makes a damaged file.

    The damage is in the bytes of the file or of a member, or in the values of one member or both.
    """
    whole = wholes[choose(0, len(wholes) - 1)]
    meta, events, what = whole.meta, whole.events, choose(0, 5)
    if what == 0:
        return flip(put_together(meta, events), choose)
    meta = (
        flip(meta, choose) if what == 1 else change_meta(meta, choose) if what in (3, 5) else meta
    )
    if what == 2:
        events = flip(events, choose)
    elif what in (4, 5):
        meta, events = with_rows(meta, change_columns(whole.columns, choose))
    return put_together(meta, events)


# --- reading a trace ------------------------------------------------------------------------------


def read_in_full(trace: Trace, *, draw: bool) -> None:
    """Uses all content of a trace.

    It may also draw the trace, which takes a hundred times as long.
    """
    assert trace.summary()
    assert trace.describe()
    assert len(trace.to_pandas()) == len(trace.events)
    assert len(trace.to_pandas("messages")) == len(trace.messages)
    assert trace.makespan_s >= 0
    diagnosis = trace.explain()
    assert str(diagnosis)
    if draw:
        for picture in (trace.plot_ring, trace.plot_timeline, trace.plot_bandwidth, diagnosis.plot):
            picture(ax=Figure().add_subplot())


def load_damaged(data: bytes, *, draw: bool) -> bool:
    """Loads a damaged file and reads it in full; returns whether it loaded.

    Any error that is not a ringsim error propagates.
    """
    # a separate directory would take half of the time
    with tempfile.NamedTemporaryFile(suffix=".ringtrace") as file:
        file.write(data)
        file.flush()
        try:
            trace = load(file.name)
        except RingError as error:
            if "\n" in str(error):
                raise AssertionError(str(error)) from error
            return False
    read_in_full(trace, draw=draw)
    return True
