"""Describes where the ranks of an unfinished run stand: what is posted, matched and blocked."""

from __future__ import annotations

from collections.abc import Mapping

from ringsim.traces.units import count
from ringsim.traces.value import Trace


def say_standing(trace: Trace, states: Mapping[int, str]) -> str:
    """Returns a line for each rank in ``states``, and for each operation that is not done.

    Args:
        trace: the trace so far.
        states: a phrase for some ranks.
    """
    lines = [f"rank {rank} {state}" for rank, state in states.items()]
    lines += [
        f"{event}, {'posted' if event.wait_ns is None else 'blocked'}"
        for event in trace
        if event.status != "ok"
    ]
    return "\n".join([*lines, f"matched: {count(len(trace.messages), 'message')}"])
