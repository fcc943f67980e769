"""Findings that accuse somebody, and those that only say that somebody was slow.

A busy machine makes ranks slow: tests of programs that are right leave such findings out.
"""

from __future__ import annotations

from ringsim import Trace

SLOW_KINDS = ("link", "slow_link", "late_sender", "late_receiver", "straggler")


def accused(trace: Trace) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the kind and the ranks of each finding that accuses somebody."""
    findings = trace.explain().findings
    return [(one.kind, one.ranks) for one in findings if one.kind not in SLOW_KINDS]
