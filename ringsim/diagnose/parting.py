"""Finds the collective at which the ranks of a group took different paths.

A missing or extra collective often shows only later: the k-th collective of a group on one rank is
matched with the k-th on the others, regardless of their lines. A rank that left out a collective
continues with the next one, until two collectives do not match::

    rank 0  all_reduce:20  all_reduce:21  all_reduce:23  barrier:30  as collective 4, rank 0 calls
                                                                     barrier:
    rank 1  all_reduce:20  all_reduce:23  barrier:30                 the lines differ from
                                                                     collective 2 on

Lines may differ legitimately, as in ``if rank == 0: ... else: ...``. A difference counts only if
one of the ranks has also called a collective from the other's line.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ringsim.diagnose.failure import ranks_by_text
from ringsim.diagnose.snapshot import operation_of
from ringsim.errors import name_ranks
from ringsim.traces.events import COLLECTIVE, NONE, Events, Ints
from ringsim.traces.findings import Diagnosis, Finding, Operation
from ringsim.traces.matching import refused

# kinds of findings about ranks on different paths
_AMONG = ("collective_mismatch", "missing_participant", "deadlock", "stalled")


def tell_partings(diagnosis: Diagnosis, events: Events) -> Diagnosis:
    """Adds a hint about the first collective that the ranks called from different lines.

    Only differences before the finding count.

    Args:
        diagnosis: the findings.
        events: the recorded events up to that time.
    """
    findings = []
    for finding in diagnosis.findings:
        said = _find_parting(finding, events) if finding.kind in _AMONG else ""
        hint = "\n".join(filter(None, [said, finding.hint]))
        findings.append(replace(finding, hint=hint))
    return replace(diagnosis, findings=tuple(findings))


def _find_parting(finding: Finding, events: Events) -> str:
    groups = dict.fromkeys(
        one.group
        for one in finding.operations
        if one.kind == COLLECTIVE and one.op != "new_group" and one.group
    )
    named = {one.rank: one.place for one in finding.operations}
    for name in groups:
        calls = _calls_of(events, name)
        place = _first_difference(events, calls)
        if place is None:
            continue
        there = [operation_of(events, one[place]) for one in calls if len(one) > place]
        # otherwise, the finding already lists these places
        if any(named.get(one.rank, one.place) != one.place for one in there):
            differs = f"their lines first differ in collective {place + 1} of group {name}"
            return f"Compare the paths that the ranks took: {differs} ({_places(there)})."
    return ""


def _calls_of(events: Events, group: str) -> list[Ints]:
    """Returns the indices of each rank's collectives on a group, in order."""
    numbers = [number for number, one in enumerate(events.tables.groups) if one.name == group]
    some = np.flatnonzero(
        (events.kind == COLLECTIVE) & np.isin(events.group, numbers) & ~refused(events)
    )
    return np.split(some, np.flatnonzero(np.diff(events.rank[some])) + 1)


def _first_difference(events: Events, calls: list[Ints]) -> int | None:
    """Returns the first place where a rank's line differs from the first rank's line, or None."""
    line = events.file.astype(np.int64) << 32 | events.line
    found = []
    for theirs in calls[1:]:
        both = min(len(calls[0]), len(theirs))
        mine, other = line[calls[0]], line[theirs]
        known = (events.file[calls[0][:both]] != NONE) & (events.file[theirs[:both]] != NONE)
        shared = np.isin(mine[:both], other) | np.isin(other[:both], mine)
        found += np.flatnonzero((mine[:both] != other[:both]) & known & shared)[:1].tolist()
    return min(found, default=None)


def _places(operations: list[Operation]) -> str:
    """Returns "rank 0 at train.py:243, ranks 1 and 2 at train.py:242"."""
    alike = ranks_by_text({one.rank: one.place for one in operations})
    return ", ".join(f"{name_ranks(ranks)} at {place}" for place, ranks in alike.items())
