"""The check for the lesson on diagnosis: the fault in a trace, its ranks, and an event."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ringsim.check.examination import CheckResult, Wrong, shown
from ringsim.traces.events import OP_CODES, Tables, make_events
from ringsim.traces.findings import KINDS, SLOW_KINDS, Diagnosis, Finding
from ringsim.traces.run_parts import join_events
from ringsim.traces.units import count
from ringsim.traces.value import Trace

_SIGNS = {
    "deadlock": (
        "if it were, ranks would wait for each other in a cycle, so that no wait could end before "
        "another one had ended"
    ),
    "peer_exited": (
        "if it were, a rank would be waiting for a rank that has ended and has nothing left in "
        "flight"
    ),
    "rank_failed": (
        "if it were, a rank would have raised an error unrelated to its last operation"
    ),
    "tag_mismatch": (
        "if it were, a send and a recv in flight between two ranks would differ only in their tags"
    ),
    "group_mismatch": (
        "if it were, a send and a recv in flight between two ranks would differ only in their "
        "groups"
    ),
    "message_mismatch": (
        "if it were, the two sides of one message, with the same tag, would differ in size, dtype "
        "or shape"
    ),
    "link": (
        "if it were, a message between two hosts would have taken seconds after both sides were "
        "posted, while other messages took far less time"
    ),
    "slow_link": (
        "if it were, every message between two hosts would take several times as long as a message "
        "of the same size between other hosts"
    ),
    "straggler": (
        "if it were, one rank would be busy nearly all the time, and all others would wait for it "
        "again and again"
    ),
    "late_sender": (
        "if it were, a recv would wait a long time for a send that is posted late, and no single "
        "rank would cause most of the waiting"
    ),
    "late_receiver": (
        "if it were, a send would wait a long time for a recv that is posted late, and no single "
        "rank would cause most of the waiting"
    ),
}
_UNFINISHED_HINT = (
    "Look at the operations that never completed: table = trace.to_pandas(); "
    'table[table["status"] != "ok"]. Which rank is the peer of each operation? Where do the two '
    "sides of the message agree, and where do they differ?"
)
_FINISHED_HINT = (
    "Look at the timeline: which row has the fewest gaps, and which rows contain the waits? "
    "trace.plot_timeline() draws a large timeline."
)
_EVENT_HINT = (
    "An event is a row of trace.to_pandas(); its number is in the index, on the left. If the run "
    "got stuck, choose an operation between two of the ranks you named that never completed. If a "
    "rank failed, choose its last event, or an operation that waits for that rank. If the run was "
    "slow, choose a span of the slow rank, or an operation whose peer is that rank."
)


@dataclass(frozen=True, eq=False, repr=False)
class _Marked(CheckResult):
    """A verdict that marks events of the answer in the timeline, which the student has seen."""

    events: tuple[int, ...] = ()

    def _show_run(self, trace: Trace) -> None:
        if self.events:
            marked = trace.events.select(np.array(self.events))
            columns = {"rank": marked.rank, "post_ns": marked.post_ns, "label": 0 * marked.rank}
            columns["op"] = columns["label"] + OP_CODES["mark"]
            marks = make_events(columns, Tables(labels=("your answer",)))
            replace(trace, events=join_events([trace.events, marks])).plot_timeline()


def diagnose(trace: Trace, kind: str, ranks: int | Iterable[int], event: int | None) -> CheckResult:
    """Checks a diagnosis of a trace: the fault, its ranks, and an event that shows it.

    The answer is compared with ``trace.explain()``. Only the root cause counts, not its
    consequences.

    Args:
        trace: the trace of a run that got stuck, failed, or was slow.
        kind: the name of the fault, one of ``ringsim.traces.findings.KINDS``: "deadlock",
            "tag_mismatch", "straggler", ...
        ranks: the ranks involved in the fault: all ranks in the cycle, both sides of the message,
            or the slow rank.
        event: an event that shows the fault, as its row number in ``trace.to_pandas()``.

    Returns:
        The verdict. Its hint helps you find the answer without giving it away. In a notebook, the
        timeline below it marks your ranks and your event.

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
        The fault is not straggler, which occurs in runs that finish: here, some operations never completed.
    """  # noqa: E501
    diagnosis = trace.explain()
    passed, hint = True, ""
    named = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    try:
        _judge(trace, diagnosis, kind, named, event)
        reason = f"Right: {diagnosis.findings[0].message}"
    except Wrong as wrong:
        passed, reason, hint = False, wrong.reason, wrong.hint
    is_first = np.diff(trace.events.rank, prepend=-1) > 0
    marked = np.flatnonzero(is_first & np.isin(trace.events.rank, named)).tolist()
    if isinstance(event, int) and 0 <= event < len(trace):
        marked.append(event)
    size = trace.world_size
    return _Marked("diagnose", passed, reason, hint, None, size, trace, events=tuple(marked))


def _judge(
    trace: Trace, diagnosis: Diagnosis, kind: str, ranks: tuple[int, ...], event: int | None
) -> None:
    if not diagnosis.findings:
        raise Wrong(
            "No fault was found in this trace.",
            "Use the trace of a run that got stuck, failed, or was slow.",
        )
    cause = diagnosis.findings[0]
    hint = _FINISHED_HINT if cause.kind in SLOW_KINDS else _UNFINISHED_HINT
    if kind not in KINDS:
        raise Wrong(
            f"kind must be the name of a fault, got {shown(repr(kind))}.",
            f"Use one of these names: {', '.join(KINDS)}.",
        )
    if kind != cause.kind:
        raise Wrong(_reject(kind, cause), hint)
    named = set(ranks)
    due = {cause.ranks[0]} if kind == "straggler" else set(cause.ranks)
    if named != due:
        found = shown(", ".join(map(str, sorted(named))) or "none")
        raise Wrong(
            f"The fault is {kind}, but you named the wrong ranks: {found}. The fault involves "
            f"{count(len(due), 'rank')}.",
            hint,
        )
    if not _shows(trace, event, cause):
        raise Wrong(
            f"The kind and the ranks are right, but event {shown(event)} does not show the fault.",
            _EVENT_HINT,
        )


def _reject(kind: str, cause: Finding) -> str:
    """Returns the reason why a kind is wrong, without revealing the right kind."""
    if kind in SLOW_KINDS and cause.kind not in SLOW_KINDS:
        return (
            f"The fault is not {kind}, which occurs in runs that finish: here, some operations "
            "never completed."
        )
    if cause.kind in SLOW_KINDS and kind not in SLOW_KINDS:
        return (
            f"The fault is not {kind}, which keeps a run from finishing: this run was slow, but "
            "finished."
        )
    return f"The fault is not {kind}: {_SIGNS.get(kind, 'nothing of this kind was recorded')}."


def _shows(trace: Trace, event: Any, cause: Finding) -> bool:
    """Returns whether an event is evidence of a fault."""
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
    if cause.kind == "rank_failed":  # the error may have nothing to do with an operation
        is_last = event == np.flatnonzero(trace.events.rank == rank)[-1]
        return (rank in concerned and is_last) or (never_done and peer in concerned)
    return never_done and rank in concerned and (peer in concerned or peer is None)
