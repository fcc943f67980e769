"""Hypothesis strategies for traces.

They generate every possible value of a column, in every combination.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from trace_file import ANY_SOURCE, NONE, OPS, load_columns

from ringsim import Trace
from ringsim.errors import TraceFileError

WORLD_SIZE = 3
INT32 = st.integers(NONE, 2**31 - 1)
TIME = st.one_of(st.integers(0, 1000), st.integers(0, 2**63 - 1))
# after loading, all other characters are escaped
WORDS = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=8)
LENGTHS = st.lists(st.integers(0, 2**40), max_size=3)
ROWS = st.lists(LENGTHS, max_size=2)
RANKS = st.lists(st.integers(0, WORLD_SIZE - 1))

tables = st.fixed_dictionaries(
    {
        "groups": st.lists(
            st.fixed_dictionaries({"name": WORDS, "ranks": RANKS, "world": st.integers(0, 2)}),
            max_size=3,
        ),
        "payloads": st.lists(
            st.fixed_dictionaries(
                {
                    "dtype": WORDS,
                    "shape": LENGTHS,
                    "size_bytes": st.integers(NONE, 2**50),
                    "reduction": WORDS,
                    "strides": ROWS,
                    "splits": ROWS,
                }
            ),
            max_size=3,
        ),
        "labels": st.lists(WORDS, max_size=3),
        "files": st.lists(WORDS, max_size=3),
    }
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


def row(names: dict[str, list[Any]]) -> st.SearchStrategy[dict[str, int]]:
    """Returns a strategy for one event whose numbers refer to ``names``."""
    numbers = {
        column: st.integers(NONE, len(names[f"{column}s"]) - 1)
        for column in ("group", "payload", "label", "file")
    }
    return st.fixed_dictionaries(
        {
            "rank": st.integers(0, WORLD_SIZE - 1),
            "thread": st.integers(0, 3),
            "op": st.integers(0, len(OPS) - 1),
            **numbers,
            "peer": st.integers(ANY_SOURCE, WORLD_SIZE - 1),
            "tag": st.one_of(st.integers(-1, 2), st.integers(-(2**31), 2**31 - 1)),
            "stage": INT32,
            "microbatch": INT32,
            "line": INT32,
            "post_ns": TIME,
            "wait_ns": st.one_of(st.just(NONE), TIME),
            "done_ns": st.one_of(st.just(NONE), TIME),
            "status": st.integers(1, 3),
        }
    )


def from_rows(
    rows: list[dict[str, int]], names: dict[str, list[Any]], metadata: dict[str, Any]
) -> Trace:
    """Returns a trace of events ordered by rank, and numbered in this order."""
    rows = sorted(rows, key=lambda one: one["rank"])
    columns = {name: [one[name] for one in rows] for name in (rows or [{"rank": 0}])[0]}
    return load_columns(columns, names, **metadata)


ENTRIES = WORDS | st.sampled_from(["notes", "ranks", "ring_groups", "clocks", "part", "machine"])
about = st.dictionaries(ENTRIES, json_values, max_size=4)
any_traces = tables.flatmap(
    lambda names: st.builds(
        from_rows,
        st.lists(row(names), max_size=30),
        st.just(names),
        about.map(lambda more: more | {"world_size": WORLD_SIZE}),
    )
)


def may_be_read(trace: Trace) -> bool:
    """Returns whether metadata with names used by ringsim has the form that ringsim writes."""
    try:
        trace.save("/dev/full")
    except TraceFileError as error:
        return "cannot save a trace" not in str(error)
    return True


traces = any_traces.filter(may_be_read)
