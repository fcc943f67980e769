"""The lesson on diagnosis.

Name what is wrong in a trace, whom it concerns, and the event that shows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from ringsim.check.examination import CheckResult, Wrong, shown
from ringsim.traces.findings import KINDS, SLOW_KINDS, Diagnosis, Finding
from ringsim.traces.units import count
from ringsim.traces.value import Trace

__all__ = ["diagnose"]

_SIGNS: Final = {
    "deadlock": (
        "in a deadlock the waiting goes round in a circle, and each wait could end if another did"
    ),
    "peer_exited": (
        "then a rank waits for one that has ended, and that has no event in flight any more"
    ),
    "rank_failed": (
        "then a rank raised an error of its own, and its last operation had nothing to do with it"
    ),
    "tag_mismatch": (
        "then a send and a recv of two ranks, both in flight, differ in their tag alone"
    ),
    "group_mismatch": (
        "then a send and a recv of two ranks, both in flight, differ in their group alone"
    ),
    "message_mismatch": (
        "then the two sides of one message, with one tag, differ in size, dtype or shape"
    ),
    "link": (
        "then a message took seconds between two hosts, though both sides had posted, and others "
        "took far less"
    ),
    "slow_link": (
        "then every message takes several times as long between two hosts as one of its size "
        "between others"
    ),
    "straggler": (
        "then one rank is busy nearly all the time, and all the others wait for it again and again"
    ),
    "late_sender": (
        "then a recv waits long for a send that is posted late, and no rank is to blame for most "
        "of all waiting"
    ),
    "late_receiver": (
        "then a send waits long for a recv that is posted late, and no rank is to blame for most "
        "of all waiting"
    ),
}
_UNFINISHED_HINT: Final = (
    'Look at what was never done: table = trace.to_pandas(); table[table["status"] != "ok"]. Who '
    "is the peer of whom? What do the two "
    "sides of the message have in common, and what not?"
)
_FINISHED_HINT: Final = (
    "Look at the timeline: which row has the fewest gaps, and in whose rows are the waits? "
    "trace.plot_timeline() draws it large."
)
_EVENT_HINT: Final = (
    "An event is a row of trace.to_pandas(); its number is in the index, on the left. Of a run "
    "that got stuck, take an operation that was never done, of one of the ranks that you named, "
    "with another of them as its peer. Of a rank that failed, take the last thing that it did, or "
    "an operation that waits for it. Of a run that was slow, take a span of the slow rank, or an "
    "operation with it as the peer."
)


def diagnose(trace: Trace, kind: str, ranks: int | Iterable[int], event: int | None) -> CheckResult:
    """Checks what somebody reads from a trace.

    What is wrong, with whom, and where that can be seen. The answer is compared with
    ``trace.explain()``; only the root cause counts, not what follows from it.

    Args:
        trace: of a run that got stuck, failed, or was slow.
        kind: the name of the fault, one of ``ringsim.traces.findings.KINDS``: "deadlock",
            "tag_mismatch", "straggler", ...
        ranks: whom it concerns: all ranks of the circle, both sides of the message, or the one that
            is slow.
        event: the number of an event that shows it: a row of ``trace.to_pandas()``.

    Returns:
        The verdict. The hint says where to look, and does not give the answer away.

    Example:
        >>> from ringsim.traces.events import IN_FLIGHT, OP_CODES, make_events
        >>> from ringsim.traces.value import Trace
        >>> events = make_events(
        ...     {
        ...         "rank": [0, 1],
        ...         "op": [OP_CODES["recv"]] * 2,
        ...         "peer": [1, 0],
        ...         "tag": [0, 0],
        ...         "post_ns": [5, 5],
        ...         "wait_ns": [5, 5],
        ...         "status": [IN_FLIGHT] * 2,
        ...     }
        ... )
        >>> trace = Trace(events, {"world_size": 2})
        >>> diagnose(trace, "deadlock", (0, 1), event=1).passed
        True
        >>> print(diagnose(trace, "straggler", 1, event=0).reason)
        A straggler is found in runs that finished, and this one did not: some operations were never done.
    """  # noqa: E501
    diagnosis = trace.explain()
    passed, hint = True, ""
    try:
        _judge(trace, diagnosis, kind, ranks, event)
        reason = f"Right: {diagnosis.findings[0].message}"
    except Wrong as wrong:
        passed, reason, hint = False, wrong.reason, wrong.hint
    return CheckResult("diagnose", passed, reason, hint, world_size=trace.world_size, trace=trace)


def _judge(
    trace: Trace, diagnosis: Diagnosis, kind: str, ranks: int | Iterable[int], event: int | None
) -> None:
    if not diagnosis.findings:
        raise Wrong(
            "Nothing wrong was found in this trace.",
            "Take one of a run that got stuck, failed, or was slow.",
        )
    cause = diagnosis.findings[0]
    hint = _FINISHED_HINT if cause.kind in SLOW_KINDS else _UNFINISHED_HINT
    if kind not in KINDS:
        raise Wrong(
            f"The kind must be the name of a fault, got {shown(repr(kind))}.",
            f"The names are {', '.join(KINDS)}.",
        )
    if kind != cause.kind:
        raise Wrong(_reject(kind, cause), hint)
    named = {ranks} if isinstance(ranks, int) else set(ranks)
    due = {cause.ranks[0]} if kind == "straggler" else set(cause.ranks)
    if named != due:
        found = shown(", ".join(map(str, sorted(named))) or "none")
        raise Wrong(
            f"It is a {kind}, and it concerns {count(len(due), 'rank')}, not those that you "
            f"named: {found}.",
            hint,
        )
    if not _shows(trace, event, cause):
        raise Wrong(
            f"Kind and ranks are right, and event {shown(event)} does not show it.", _EVENT_HINT
        )


def _reject(kind: str, cause: Finding) -> str:
    """Says why a trace is no example of a kind, without saying of which it is one."""
    article = "An" if kind[0] in "aeiou" else "A"
    if kind in SLOW_KINDS and cause.kind not in SLOW_KINDS:
        return (
            f"{article} {kind} is found in runs that finished, and this one did not: some "
            "operations were never done."
        )
    if cause.kind in SLOW_KINDS and kind not in SLOW_KINDS:
        return f"{article} {kind} keeps a run from finishing, and this one finished: it was slow."
    return f"It is no {kind}: {_SIGNS.get(kind, 'nothing of the kind was recorded')}."


def _shows(trace: Trace, event: Any, cause: Finding) -> bool:
    """Tells whether an event is evidence of a fault."""
    if not isinstance(event, int) or not 0 <= event < len(trace):
        return False
    shown_event, concerned = trace[event], cause.ranks
    rank, peer = shown_event.rank, shown_event.peer
    if cause.kind in ("link", "slow_link"):
        return rank in concerned and peer in concerned
    if cause.kind in SLOW_KINDS:
        late = concerned[0]
        return peer == late or (rank == late and shown_event.kind == "span")
    never_done = shown_event.status != "ok"
    if cause.kind == "rank_failed":  # by an error that may have to do with no operation
        is_last = event == np.flatnonzero(trace.events.rank == rank)[-1]
        return (rank in concerned and is_last) or (never_done and peer in concerned)
    return never_done and rank in concerned and (peer in concerned or peer is None)
