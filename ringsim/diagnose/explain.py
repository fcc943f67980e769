"""``trace.explain()``: why a run ended as it did, or what made it slow, from its trace alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ringsim.diagnose.finding import Diagnosis
from ringsim.diagnose.verdict import judge
from ringsim.diagnose.world_of_events import read_ends, world_of_events

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

__all__ = ["explain"]


def explain(trace: Trace) -> Diagnosis:
    """x."""
    world = world_of_events(trace.events, trace.world_size, read_ends(trace.metadata, trace.world_size))
    return replace(judge(world), trace=trace)
