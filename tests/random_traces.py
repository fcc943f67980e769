"""Hypothesis strategies for events and traces.

Every value a column may hold, in every combination.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from ringsim import Trace
from ringsim.traces.events import ANY_SOURCE, NONE, OPS, Events, Group, Payload, Tables, make_events
from ringsim.traces.files import check_run

WORLD_SIZE = 3
INT32 = st.integers(NONE, 2**31 - 1)
TIME = st.one_of(st.integers(0, 1000), st.integers(0, 2**63 - 1))
# a file gives the others back written out
WORDS = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=8)
LENGTHS = st.lists(st.integers(0, 2**40), max_size=3).map(tuple)
ROWS = st.lists(LENGTHS, max_size=2).map(tuple)

tables = st.builds(
    Tables,
    groups=st.lists(
        st.builds(
            Group, WORDS, st.lists(st.integers(0, WORLD_SIZE - 1)).map(tuple), st.integers(0, 2)
        ),
        max_size=3,
    ).map(tuple),
    payloads=st.lists(
        st.builds(Payload, WORDS, LENGTHS, st.integers(NONE, 2**50), WORDS, ROWS, ROWS), max_size=3
    ).map(tuple),
    labels=st.lists(WORDS, max_size=3).map(tuple),
    files=st.lists(WORDS, max_size=3).map(tuple),
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


def row(names: Tables) -> st.SearchStrategy[dict[str, Any]]:
    """One event whose numbers point into ``names``."""
    return st.fixed_dictionaries(
        {
            "rank": st.integers(0, WORLD_SIZE - 1),
            "thread": st.integers(0, 3),
            "op": st.integers(0, len(OPS) - 1),
            "group": st.integers(NONE, len(names.groups) - 1),
            "peer": st.integers(ANY_SOURCE, WORLD_SIZE - 1),
            "tag": st.one_of(st.integers(-1, 2), st.integers(-(2**31), 2**31 - 1)),
            "payload": st.integers(NONE, len(names.payloads) - 1),
            "stage": INT32,
            "microbatch": INT32,
            "label": st.integers(NONE, len(names.labels) - 1),
            "file": st.integers(NONE, len(names.files) - 1),
            "line": INT32,
            "post_ns": TIME,
            "wait_ns": st.one_of(st.just(NONE), TIME),
            "done_ns": st.one_of(st.just(NONE), TIME),
            "status": st.integers(1, 3),
        }
    )


def from_rows(rows: list[dict[str, Any]], names: Tables = Tables()) -> Events:
    """Events in the order of ranks, numbered as they come."""
    rows = sorted(rows, key=lambda one: one["rank"])
    if not rows:
        return make_events({"rank": [], "op": []}, names)
    return make_events({name: [one[name] for one in rows] for name in rows[0]}, names)


events = tables.flatmap(
    lambda names: st.lists(row(names), max_size=30).map(lambda rows: from_rows(rows, names))
)


def may_be_read(trace: Trace) -> bool:
    """Whether metadata under names that ringsim uses is what ringsim would write there."""
    try:
        check_run(trace.events, trace.metadata)
    except ValueError:
        return False
    return True


ENTRIES = WORDS | st.sampled_from(["notes", "ranks", "ring_groups", "clocks", "part", "machine"])
any_traces = st.builds(
    Trace,
    events,
    st.dictionaries(ENTRIES, json_values, max_size=4).map(
        lambda more: more | {"world_size": WORLD_SIZE}
    ),
)
traces = any_traces.filter(may_be_read)
