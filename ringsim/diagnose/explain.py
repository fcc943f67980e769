"""``trace.explain()``: finds the causes of a failed or slow run in its trace.

For a run that finished, it reports slow links between hosts, and ranks that kept others waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from ringsim.diagnose.failure import LOST_PEERS, ranks_by_text
from ringsim.diagnose.host_links import find_links
from ringsim.diagnose.lateness import Activity, describe_waiting, find_lateness
from ringsim.diagnose.mismatches import (
    find_collective_mismatches,
    find_failed_threads,
    find_leaks,
    find_message_mismatches,
    find_missing,
    find_notices,
    find_order_mismatches,
    find_races,
    is_recorded_whole,
)
from ringsim.diagnose.parting import tell_partings
from ringsim.diagnose.snapshot import (
    ABLE,
    Snapshot,
    is_on_nccl,
    leave_out_queued,
    operation_of,
    read_end_ns,
    read_ends,
    snapshot_of_events,
    until,
)
from ringsim.diagnose.verdict import blame_threads, judge, waits_text
from ringsim.diagnose.waitfor import hindering
from ringsim.errors import name_ranks
from ringsim.traces.events import IN_FLIGHT, NONE, Events
from ringsim.traces.findings import (
    IN_VAIN,
    LEFT_BLOCK,
    LOST,
    Diagnosis,
    Edge,
    End,
    Finding,
    Operation,
    lines_text,
)
from ringsim.traces.units import count, time_text

if TYPE_CHECKING:
    from ringsim.traces.value import Trace

# ringsim's errors for which the trace also has a finding
_OUR_ERRORS = ("ArgumentError", "MessageMismatch", "RendezvousFailed", "RingError")
_MOST_WAITS = 4
_HELD_HINT = (
    "The trace does not prove this: other threads of these ranks continued and might have posted "
    "the missing operation."
)
_QUEUED = (
    "Not proved: an operation posted behind an unfinished one counts as not posted, because NCCL "
    "runs them in order unless batch_isend_irecv posts them together. Other work on the GPU may "
    "also delay an operation."
)
_AT_WORK = (*ABLE, "stopped")


def explain(trace: Trace) -> Diagnosis:
    """Explains why a run failed, or why it was slow.

    Everything is read from the trace, so the answer is the same for a fresh run and for an old
    file.

    Args:
        trace: any trace.

    Returns:
        The findings, root causes first: refused or mismatched operations, failures and stuck ranks,
        then harmless mistakes. If nothing went wrong, the findings are slow links, and ranks that
        kept others waiting. If there are no findings, a note reports the total waiting time.

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
        >>> print(explain(Trace(events, {"world_size": 2})))
        deadlock: ranks 0 and 1 wait for each other.
          rank 0 waits in recv from 1 (tag 0)
          rank 1 waits in recv from 0 (tag 0)
          Hint: Send first on one rank, or post with batch_isend_irecv: all ranks receive before they send.
    """  # noqa: E501
    if "part" in trace.metadata:  # the reason may be in a part that was left out
        return Diagnosis(
            find_notices(trace.events) or (*find_links(trace), *find_lateness(trace)),
            trace.world_size,
            trace=trace,
        )
    whole, end_ns, size = trace, read_end_ns(trace.metadata), trace.world_size
    if end_ns is not None and "given_up_ns" in trace.metadata:
        trace = replace(trace, events=until(trace.events, end_ns))
    events, told = trace.events, read_ends(trace.metadata, size)
    ends = {rank: end for rank, end in told.items() if end.state != "unknown"}
    # the cause of these ends is read from the operations that they waited for, if any
    lost = {rank: end for rank, end in told.items() if rank not in ends and end.about}
    snapshot, judged = _judge(trace, ends, end_ns)
    found, retried = _find_caught(trace)
    caught = [one for one in found if one.kind not in LOST_PEERS]
    notes = [one.message for one in found if one.kind in LOST_PEERS]
    went_well = trace.metadata.get("complete") is True and all(
        end.state == "exited" for end in ends.values()
    )
    causes, more = _find_causes(trace, snapshot, may_be_harmless=went_well and not judged.findings)
    findings = _gathered(_under(_distinct(causes), [_renamed(one) for one in judged.findings]))
    findings, edges = findings + more, judged.edges
    if not judged.findings and not causes:
        findings += _find_leavers(snapshot)
    if retried and all((one.kind, set(one.ranks)) in _names(retried) for one in findings):
        findings = retried
    if not findings:
        findings, edges = _find_stall(trace, snapshot, lost)
    findings = [*blame_threads(findings, find_failed_threads(events))]
    # A rank that left a recorded block may have completed its work later.
    findings += [one for one in caught if (one.kind, set(one.ranks)) not in _names(causes)]
    # the operations of these ranks have ended
    woken = {rank for one in (*found, *retried) for rank in one.ranks}
    findings += _find_untidy(trace, {rank: ends[rank] for rank in ends.keys() - woken})
    if not findings:
        # a slow link may cause the waiting
        findings += [*find_links(trace), *find_lateness(trace)]
    if not findings and size > 1:
        notes.insert(0, describe_waiting(trace))
    if edges and is_on_nccl(trace):
        notes.append(_QUEUED)
    return tell_partings(
        Diagnosis(tuple(findings), size, edges, judged.states, whole, tuple(notes)), events
    )


def _judge(trace: Trace, ends: Mapping[int, End], end_ns: int | None) -> tuple[Snapshot, Diagnosis]:
    """Returns the open operations at the end of a run, and their diagnosis."""
    events = trace.events
    if is_on_nccl(trace):
        events = leave_out_queued(events)
        # A rank may return while its GPU still waits.
        waits = set(events.rank[(events.status == IN_FLIGHT) & (events.wait_ns != NONE)].tolist())
        ends = {
            rank: end for rank, end in ends.items() if end.state != "exited" or rank not in waits
        }
    snapshot = snapshot_of_events(events, trace.world_size, ends, end_ns=end_ns)
    judged = judge(snapshot)
    # At the end of a simulated run, no message was in flight; for real ranks, the watcher records
    # whether that is so.
    rests = trace.metadata.get("at_rest") is True or trace.metadata.get("source") == "simulated"
    if rests and not judged.findings:
        snapshot = snapshot.settle()
        judged = judge(snapshot)
    return snapshot, judged


def _find_causes(
    trace: Trace, snapshot: Snapshot, *, may_be_harmless: bool
) -> tuple[list[Finding], list[Finding]]:
    """Finds operations that were refused or mismatched.

    Returns the findings that may cause others, and other mismatched messages. A refused operation
    may be harmless, if the program caught the error.
    """
    messages = find_message_mismatches(trace)
    calls = find_collective_mismatches(trace.events.select(is_recorded_whole(trace)))
    others = [*messages[:1], *calls, *find_order_mismatches(snapshot)]
    notices = [
        one
        for one in find_notices(trace.events)
        if others or not may_be_harmless or one.kind != "invalid_argument"
    ]
    return [*notices, *others], list(messages[1:])


def _find_untidy(trace: Trace, ends: Mapping[int, End]) -> list[Finding]:
    """Finds races, and operations that were unfinished when their ranks returned."""
    returned = {
        rank for rank, end in ends.items() if end.state == "exited" and end.how != LEFT_BLOCK
    }
    findings = [one for one in find_leaks(trace) if one.ranks[0] in returned]
    if len(returned) == trace.world_size:
        findings = [*find_missing(trace.events), *findings]
    # with NCCL, messages complete long after the thread has continued
    if not is_on_nccl(trace):
        findings += find_races(trace)
    return findings


def _names(findings: Iterable[Finding]) -> list[tuple[str, set[int]]]:
    return [(one.kind, set(one.ranks)) for one in findings]


def _find_caught(trace: Trace) -> tuple[list[Finding], list[Finding]]:
    """Returns findings whose errors the program caught, and findings about retried operations.

    The metadata may come from an untrusted file.
    """
    said = trace.metadata.get("caught")
    found: list[Finding] = []
    retried: list[Finding] = []
    for entry in said if isinstance(said, list) else ():
        try:
            kind, message = str(entry["kind"]), str(entry["message"])
            hint = str(entry.get("hint", ""))
            ranks = tuple(int(rank) for rank in entry["ranks"] if 0 <= int(rank) < trace.world_size)
            at_ns = int(entry.get("at_ns", -1))
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
            continue
        times = [_count_retries(trace.events, rank, at_ns) for rank in ranks]
        if trace.metadata.get("complete") is True or not all(times):
            message += "\n  the program caught the error and continued"
            found.append(Finding(kind, ranks, (), message, hint))
        elif (kind, set(ranks)) not in _names(retried):
            message += (
                f"\n  the program caught the error and tried again {count(max(times), 'time')} "
                "before the run was ended"
            )
            retried.append(Finding(kind, ranks, (), message, hint))
    return found, retried


def _count_retries(events: Events, rank: int, at_ns: int) -> int:
    """Counts the retries of the operation that a rank waited for at a given time.

    The count is 0 if the rank has done anything else since.
    """
    mine = np.flatnonzero((events.rank == rank) & events.communicates)
    columns = (events.op, events.peer, events.tag, events.file, events.line)
    what = list(zip(*(column[mine].tolist() for column in columns), strict=True))
    open_then = (
        (events.wait_ns != NONE)
        & (events.wait_ns <= at_ns)
        & ((events.done_ns == NONE) | (events.done_ns > at_ns))
    )
    awaited = {*compress(what, open_then[mine])}
    since = [*compress(what, events.post_ns[mine] > at_ns)]
    again = [index for index, one in enumerate(since) if one in awaited]
    # A program that retries may do other work in each round, such as creating a group.
    return len(again) if again and since[-1] in since[: again[-1] + 1] else 0


def _distinct(causes: Iterable[Finding]) -> list[Finding]:
    """Drops findings that repeat an earlier finding of the same kind on some of the same ranks."""
    kept: list[Finding] = []
    for one in causes:
        if not any(one.kind == other.kind and set(one.ranks) & set(other.ranks) for other in kept):
            kept.append(one)
    return kept


def _under(causes: list[Finding], judged: Sequence[Finding]) -> list[Finding]:
    """Folds each finding into a cause that involves one of its ranks, if there is one."""
    alone = []
    for one in judged:
        place = next(
            (index for index, cause in enumerate(causes) if set(cause.ranks) & set(one.ranks)), None
        )
        if place is None:
            alone.append(one)
            continue
        cause, echoes = causes[place], one.consequences
        # operations that its rank posted on the way out are consequences
        if one.end is not None and one.end.how == IN_VAIN:
            echoes = (replace(cause, consequences=()), *cause.consequences, *echoes)
            causes[place] = replace(one, consequences=echoes)
            continue
        restates = one.end is not None and one.end.error in _OUR_ERRORS
        if one.kind != cause.kind and not restates:
            echoes = (replace(one, consequences=(), hint=""), *echoes)
        causes[place] = replace(cause, consequences=(*cause.consequences, *echoes))
    return [*causes, *alone]


def _renamed(finding: Finding) -> Finding:
    """Returns a finding, marking it as a failed rendezvous if its error is RendezvousFailed."""
    failed = finding.end is not None and finding.end.error == "RendezvousFailed"
    return replace(finding, kind="rendezvous_failed") if failed else finding


def _gathered(findings: Sequence[Finding]) -> list[Finding]:
    """Merges the findings of all ranks that raised MessageMismatch into one finding."""
    raised = [one for one in findings if one.end and one.end.error == "MessageMismatch"]
    if not raised:
        return list(findings)
    first, ranks = raised[0], tuple(sorted({rank for one in raised for rank in one.ranks}))
    together = replace(
        first,
        kind="message_mismatch",
        ranks=ranks,
        message=f"{name_ranks(ranks)} {first.end.about if first.end else ''}.",
        consequences=tuple(echo for one in raised for echo in one.consequences),
    )
    return [together if one is first else one for one in findings if one not in raised[1:]]


def _find_leavers(snapshot: Snapshot) -> list[Finding]:
    """Finds ranks that exited in the middle of their worker.

    Their exit ended the run, although no rank waited for them.
    """
    return [
        Finding(
            "rank_failed",
            (rank,),
            (),
            f"rank {rank} {view.end.about}, which ended the run.",
            "Return from the worker instead of exiting.",
        )
        for rank, view in enumerate(snapshot.ranks)
        if view.left_early
    ]


def _find_stall(
    trace: Trace, snapshot: Snapshot, lost: Mapping[int, End]
) -> tuple[list[Finding], tuple[Edge, ...]]:
    """Describes the ranks of a run that was ended from outside.

    If no rank waited, the findings are the errors of ``lost``.
    """
    if trace.metadata.get("complete") is True:
        return [], ()
    gone = [rank for rank, end in lost.items() if end.how == LOST]
    if not gone and (held := _find_held(trace.events, snapshot)) is not None:
        return [held], ()
    waits = [one for view in snapshot.ranks for one in view.awaited]
    seen = [
        rank
        for rank, view in enumerate(snapshot.ranks)
        if view.state in _AT_WORK and view.end.about
    ]
    if not waits and (lost or not seen):
        return [
            Finding("rank_failed", (rank,), (), f"rank {rank} {end.about}.", end=end)
            for rank, end in lost.items()
        ], ()
    edges = tuple(
        Edge(one.operation.rank, peer, one.operation)
        for one in waits
        for peer in hindering(snapshot, one)
    )
    operations = tuple(one.operation for one in waits)
    if gone:
        return [_name_lost({rank: lost[rank].about for rank in gone}, operations)], edges
    wanted = {edge.peer for edge in edges}
    found = _name_busy(trace, snapshot, operations, wanted, seen, lost)
    if is_on_nccl(trace):
        missing = {
            edge.peer: f"rank {edge.peer} has not posted its side of rank {edge.rank}'s "
            f"{edge.operation}"
            for edge in edges
            if not snapshot.ranks[edge.peer].awaited
        }
        found = replace(found, message=f"{found.message}{lines_text([*missing.values()])}")
    return [found], edges


def _name_lost(gone: Mapping[int, str], operations: tuple[Operation, ...]) -> Finding:
    """Returns the finding for ranks on silent hosts, given a description of each rank."""
    told = [f"{name_ranks(ranks)} {about}" for about, ranks in ranks_by_text(gone).items()]
    ranks = tuple(dict.fromkeys([*gone, *(one.rank for one in operations)]))
    hint = "Check the machine and its network."
    return Finding("lost", ranks, operations, f"{'; '.join(told)}.{waits_text(operations)}", hint)


def _name_busy(
    trace: Trace,
    snapshot: Snapshot,
    operations: tuple[Operation, ...],
    wanted: set[int],
    seen: Sequence[int],
    lost: Mapping[int, End],
) -> Finding:
    """Returns the finding for a run in which some ranks might have continued.

    Args:
        trace: the trace of the run.
        snapshot: the snapshot of the run's end.
        operations: the operations in which ranks waited.
        wanted: the ranks that they waited for.
        seen: the ranks whose activity is known.
        lost: the errors of ranks that waited for others.
    """
    blocked = list(dict.fromkeys(one.rank for one in operations))
    others = sorted({*wanted, *seen} - set(blocked), key=lambda rank: (rank not in wanted, rank))
    able = [rank for rank in others if snapshot.ranks[rank].state in _AT_WORK]
    busy = lines_text([_tell_busy(trace, snapshot, rank) for rank in able])
    if not blocked:
        message = f"no rank waited for another when the run was ended.{busy}"
        hint = "Check what the ranks are doing, or give the run more time."
        return Finding("stalled", tuple(seen), (), message, hint)
    then = [f"then rank {rank} {lost[rank].about}" for rank in blocked if rank in lost]
    message = (
        f"{name_ranks(blocked)} still waited when the run was ended."
        f"{waits_text(operations)}{busy}{lines_text(then)}"
    )
    hint = (
        "Check the ranks that the others waited for, or give the run more time: these ranks might "
        "still have answered."
    )
    culprits = [rank for rank in able if rank in wanted]
    return Finding("stalled", (*culprits, *blocked), operations, message, hint)


def _find_held(events: Events, snapshot: Snapshot) -> Finding | None:
    """Returns the finding for ranks that are stuck unless their other threads help.

    Returns None if there are no such ranks.
    """
    views = list(snapshot.ranks)
    able = []
    for rank, view in enumerate(views):
        waits = [one for one in view.posted if one.awaited]
        if waits and view.state in (*ABLE, "blocked"):
            thread = max(waits, key=lambda one: one.operation.waited_s).thread
            posted = tuple(
                replace(one, awaited=one.awaited and one.thread == thread) for one in view.posted
            )
            views[rank] = replace(view, state="blocked", end=End("blocked"), posted=posted)
            if view.state in ABLE or any(one.thread != thread for one in waits):
                able.append(rank)
    first = next(iter(judge(Snapshot(tuple(views))).findings), None)
    if first is None:
        return None
    able = [rank for rank in able if rank in first.ranks]
    message = f"{first.message}\n  meanwhile, other threads of {name_ranks(able)} continued"
    for rank in able[:_MOST_WAITS]:
        last = np.flatnonzero((events.rank == rank) & events.communicates)[-1]
        message += f"\n  rank {rank}'s last operation was {operation_of(events, int(last))}"
    return replace(
        first, kind="stalled", message=message, hint=f"{first.hint}\n{_HELD_HINT}".strip()
    )


def _tell_busy(trace: Trace, snapshot: Snapshot, rank: int) -> str:
    """Describes the activity of a rank that did not wait.

    For example, "rank 2 was still computing stage 1 (for 12 s, computing at train.py:41)".
    """
    events, view = trace.events, snapshot.ranks[rank]
    recorded = [about.get("rank") for about in trace.metadata.get("ranks") or ()]
    if recorded and rank not in recorded:
        return f"rank {rank} was not recorded"
    last_ns = int(events.last_ns[events.rank == rank].max(initial=0))
    end_ns = read_end_ns(trace.metadata) or 0
    since = f"for {time_text(end_ns - last_ns)}" if end_ns > last_ns else ""
    about = view.end.about
    if view.state == "stopped":
        words, details = about or "is stopped by a signal", ["SIGSTOP or a similar signal", since]
    else:
        activity, now_ns = Activity(events, trace.world_size), max(last_ns, end_ns)
        last = rank, now_ns - 1, now_ns
        span = activity.in_span(*last)
        doing = span or about or activity.doing(*last)  # without a span, the line is more precise
        words, details = f"was {doing}", [since, about if span else ""]
    details = list(filter(None, details))
    return f"rank {rank} {words}" + (f" ({', '.join(details)})" if details else "")
