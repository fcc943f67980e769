"""Findings that blame ranks for an error, as opposed to findings of slow ranks and links.

A busy machine slows ranks down, so tests of correct programs ignore findings of slowness.
"""

from __future__ import annotations

from ringsim import Trace

SLOW_KINDS = ("link", "slow_link", "late_sender", "late_receiver", "straggler")


def accused(trace: Trace) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the kind and the ranks of each finding that is not about slowness."""
    findings = trace.explain().findings
    return [(one.kind, one.ranks) for one in findings if one.kind not in SLOW_KINDS]
