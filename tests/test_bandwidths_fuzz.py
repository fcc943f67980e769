"""A real table of bandwidths, damaged in every way: what reads it gives an answer or one of ringsim's own errors, and never another one."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from trace_mutations import DATA, ODD_VALUES, Choose, change_meta, flip

from ringsim.errors import RingError
from ringsim.traces.bandwidths import Bandwidths, load

WHOLE = (DATA / "bandwidth-gloo.json").read_bytes()


def chooser(data: st.DataObject) -> Choose:
    return lambda low, high: data.draw(st.integers(low, high))


def read_in_full(table: Bandwidths, path: Path, *, draw: bool) -> None:
    """Asks a table for everything that it can say; and draws it, which takes a hundred times as long."""
    assert table.describe()
    assert repr(table)
    assert len(table.to_pandas()) == len(table)
    assert set(table.fits) <= set(table.series())
    table.save(path)
    assert load(path) == table
    if draw:
        table.plot(ax=Figure().add_subplot())


def load_damaged(data: bytes, *, draw: bool) -> bool:
    """Loads a damaged file and reads it in full; whether it loaded. Any error but one of ringsim's own comes out of here."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "damaged.json")
        path.write_bytes(data)
        try:
            table = load(path)
        except RingError as error:
            said = str(error)
            table = None
        if table is None:
            assert "\n" not in said
            return False
        read_in_full(table, path, draw=draw)
        return True


def test_what_is_not_damaged_is_read() -> None:
    assert load_damaged(WHOLE, draw=True)


@given(st.data())
def test_bytes(data: st.DataObject) -> None:
    load_damaged(flip(WHOLE, chooser(data)), draw=False)


@given(st.data())
def test_values(data: st.DataObject) -> None:
    load_damaged(change_meta(WHOLE, chooser(data)), draw=False)


@given(st.data())
def test_metadata(data: st.DataObject) -> None:
    document = json.loads(WHOLE)
    document["metadata"] = json.loads(change_meta(json.dumps(document["metadata"]).encode(), chooser(data)))
    load_damaged(json.dumps(document).encode(), draw=False)


@given(st.data())
def test_numbers(data: st.DataObject) -> None:
    load_damaged(changed_rows(chooser(data)), draw=False)


@settings(max_examples=15)
@given(st.data())
def test_numbers_and_metadata_drawn(data: st.DataObject) -> None:
    document = json.loads(changed_rows(chooser(data)))
    document["metadata"] = json.loads(change_meta(json.dumps(document["metadata"]).encode(), chooser(data)))
    load_damaged(json.dumps(document).encode(), draw=True)


def changed_rows(choose: Choose) -> bytes:
    """Puts other values of the right kind into some rows."""
    document = json.loads(WHOLE)
    columns: dict[str, list[Any]] = document["columns"]
    for _ in range(choose(1, 6)):
        name = sorted(columns)[choose(0, len(columns) - 1)]
        kind = type(columns[name][0])
        fitting = [one for one in ODD_VALUES if isinstance(one, kind) and not isinstance(one, bool)] + [5e-324, 1e-300] * (kind is float)
        value, row = fitting[choose(0, len(fitting) - 1)], choose(0, len(columns[name]) - 1)
        if choose(0, 3):
            columns[name][row] = value
        else:
            columns[name] = [value] * len(columns[name])
    return json.dumps(document).encode()
