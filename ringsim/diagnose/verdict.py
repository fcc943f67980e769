"""Converts the analysis of stuck ranks to findings.

A finding contains the kind of the mistake, its evidence and a hint. Every stuck rank waits,
directly or through other ranks, for a cycle of ranks that wait for each other or for a rank that is
gone. These cycles and ranks are the root causes, with one finding each. Ranks that wait behind a
root cause are folded into its finding. A hint comes from an operation that nearly matches the
awaited one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import NamedTuple, TypeVar

from ringsim.diagnose.snapshot import BLOCKING, GONE, OpenOperation, Snapshot
from ringsim.diagnose.waitfor import Hindrance, Stuck, analyse, find_cycle, meets
from ringsim.errors import name_ranks
from ringsim.traces.events import ANY_SOURCE, COLLECTIVE, RECV, SEND
from ringsim.traces.findings import (
    IN_THREAD,
    Diagnosis,
    Edge,
    End,
    Finding,
    Operation,
    lines_text,
    waited_text,
)
from ringsim.traces.units import count

T = TypeVar("T")

SAME_GROUPS = (
    "Call new_group on every rank for every group, in the same order, even for groups that do not "
    "include the rank."
)
_MOST_WAITS = 4  # or ranks that are listed
_STATE_WORDS = {  # of ranks that did not fail
    "blocked": "waits for another of its threads",
    "exited": "has exited",
    "killed": "has died",
    "running": "is not waiting for anything",
    "stopped": "is stopped by a signal",
    "unknown": "is in an unknown state",
}


def judge(snapshot: Snapshot, stuck: Stuck | None = None) -> Diagnosis:
    """Explains why ranks can never continue.

    ``stuck`` is the result of ``analyse``, or None to call ``analyse`` here. Failures come first,
    earliest first, then cycles, then ranks that exited too early. There are no findings if all
    ranks can continue and none failed.

    Example:
        >>> from ringsim.diagnose.snapshot import OpenOperation, RankSnapshot
        >>> from ringsim.traces.events import Group
        >>> def receives(rank, peer):
        ...     operation = Operation(rank=rank, op="recv", peer=peer, tag=0)
        ...     return RankSnapshot(
        ...         "blocked", (OpenOperation(operation, Group("world", (0, 1)), awaited=True),)
        ...     )
        >>> print(judge(Snapshot((receives(0, 1), receives(1, 0)))))
        deadlock: ranks 0 and 1 wait for each other.
          rank 0 waits in recv from 1 (tag 0)
          rank 1 waits in recv from 0 (tag 0)
          Hint: Send first on one rank, or post with batch_isend_irecv: all ranks receive before they send.
    """  # noqa: E501
    stuck = stuck or analyse(snapshot) or Stuck((), (), ())
    states = tuple(view.state for view in snapshot.ranks)
    # if ranks are stuck, a rank that was killed counts only if they wait for it
    failed = ("failed",) if stuck.ranks else ("failed", "killed")
    failures = [
        (_ended(snapshot, rank), _failure(snapshot, rank))
        for rank, state in enumerate(states)
        if state in failed
    ]
    cycles = _cycles(stuck)
    roots = [_cycle_finding(snapshot, stuck, cycle) for cycle in cycles]
    in_cycles = {rank for cycle in cycles for rank in cycle}
    for gone, waits in _waits_for_gone(snapshot, stuck).items():
        if any(one.rank not in in_cycles for one in waits):
            killed = [_ended(snapshot, rank) for rank in gone if states[rank] == "killed"]
            found = _gone_finding(snapshot, gone, waits)
            if killed and min(killed)[0] < math.inf:
                failures.append((min(killed), found))
            else:
                roots.append(found)
    roots = [*(finding for _, finding in sorted(failures, key=lambda pair: pair[0])), *roots]
    findings = _fold(stuck, [_with_threads(snapshot, root) for root in roots])
    on_cycle = {pair for cycle in cycles for pair in _pairs(cycle)}
    edges = tuple(
        Edge(one.rank, peer, one.operation, (one.rank, peer) in on_cycle)
        for one in stuck.hindrances
        for peer in one.peers
    )
    return Diagnosis(findings, len(snapshot.ranks), edges, states)


def blame_threads(findings: Sequence[Finding], failed: Mapping[int, str]) -> tuple[Finding, ...]:
    """Folds findings under the failed thread that caused them.

    ``failed`` describes, by rank, the error that ended one of the rank's threads.

    Example:
        >>> waits = Finding(
        ...     "peer_exited",
        ...     (0, 1),
        ...     (),
        ...     "rank 1 waits for rank 0, which can no longer answer.",
        ... )
        >>> print(
        ...     blame_threads(
        ...         [waits], {0: "raised ValueError: no more batches (train.py, line 7, in sends)"}
        ...     )[0]
        ... )
        a thread of rank 0 raised ValueError: no more batches (train.py, line 7, in sends).
          As a result, rank 1 waits for rank 0, which can no longer answer.
    """
    blamed, left = [], list(findings)
    for rank, about in failed.items():
        its = [
            one
            for one in left
            if one.kind == "stalled"
            or rank in one.ranks
            or any(rank == each.peer for each in one.operations)
        ]
        if its:
            echoes = tuple(
                echo for one in its for echo in (replace(one, consequences=()), *one.consequences)
            )
            blamed.append(
                Finding(
                    "rank_failed",
                    (rank,),
                    (),
                    f"a thread of rank {rank} {about}.",
                    consequences=echoes,
                    end=End("failed", about, how=IN_THREAD),
                )
            )
            left = [one for one in left if one not in its]
    return (*blamed, *left)


def wait_text(operation: Operation) -> str:
    """Returns "rank 1 waits in recv from 0 (...) at ring.py:7"."""
    return f"rank {operation.rank} waits{waited_text(operation)} in {operation}"


def waits_text(operations: Sequence[Operation]) -> str:
    """Returns an indented line for each wait, as evidence of a finding."""
    return lines_text([wait_text(one) for one in operations])


def acts_text(operations: Sequence[Operation], verb: str = "posted") -> str:
    """Returns an indented line for each operation, as evidence of a finding."""
    return lines_text([f"rank {one.rank} {verb} {one}" for one in operations])


def waiting_text(ranks: Sequence[int]) -> str:
    """Returns "rank 2 waits", or "ranks 0 and 1 wait"."""
    return f"{name_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _ended(snapshot: Snapshot, rank: int) -> tuple[float, bool]:
    """Returns a key that sorts ranks by the time when they ended.

    If the times are unknown, failures come first.
    """
    view = snapshot.ranks[rank]
    return (math.inf if view.end.at_ns is None else view.end.at_ns, view.state != "failed")


def _pairs(cycle: Sequence[T]) -> Iterator[tuple[T, T]]:
    """Yields each member of a cycle with the member that it waits for."""
    return pairwise((*cycle, cycle[0]))


def _cycles(stuck: Stuck) -> list[tuple[int, ...]]:
    left = list(stuck.hindrances)
    cycles = []
    cycle = stuck.cycle
    while cycle:
        cycles.append(cycle)
        left = [one for one in left if not set(cycle) & {one.rank, *one.peers}]
        cycle = find_cycle(left)
    return cycles


def _waits_for_gone(snapshot: Snapshot, stuck: Stuck) -> dict[tuple[int, ...], list[Hindrance]]:
    """Returns the waits for ranks that are not stuck but will never answer, by awaited rank.

    Such a rank has exited or died, or has posted a different collective.
    """
    found: dict[tuple[int, ...], list[Hindrance]] = {}
    inside = set(stuck.ranks)
    for one in stuck.hindrances:
        gone = tuple(peer for peer in one.peers if peer not in inside)
        failed = any(snapshot.ranks[peer].state == "failed" for peer in gone)
        if gone and not failed:  # a failure is its own root cause
            found.setdefault(gone, []).append(one)
    return found


def _cycle_finding(snapshot: Snapshot, stuck: Stuck, cycle: tuple[int, ...]) -> Finding:
    """Returns the finding for a cycle.

    The finding is a mismatch if two of its ranks use different tags or groups, else a deadlock.
    """
    links = [
        next(one for one in stuck.hindrances if one.rank == rank and peer in one.peers)
        for rank, peer in _pairs(cycle)
    ]
    missed = [found for link in links if (found := find_counterpart(snapshot, link)) is not None]
    if missed:
        return _mismatch_finding(missed)
    operations = tuple(link.operation for link in links)
    collective = next((link for link in links if link.operation.kind == COLLECTIVE), None)
    if collective is not None:
        return _collective_finding(snapshot, stuck, collective, links)
    message, hint = f"{name_ranks(cycle)} wait for each other.", advise(snapshot, links)
    if len(cycle) == 1:
        message = f"{name_ranks(cycle)} waits for a message from or to itself."
        hint = "Copy the tensor instead: a rank cannot exchange messages with itself."
    return Finding("deadlock", cycle, operations, f"{message}{waits_text(operations)}", hint)


def _mismatch_finding(missed: Sequence[Counterpart]) -> Finding:
    """Returns the finding for operations that do not match.

    The clearest pair comes first, followed by other pairs of the same kind.
    """
    found = min(missed, key=lambda one: not one.posted.awaited)
    # by ranks, because both ranks of a pair may wait
    pairs: dict[tuple[int, ...], tuple[Operation, ...]] = {}
    for one in [found, *missed]:
        near, far = one.awaited, one.posted.operation
        if one.kind == found.kind:
            pairs.setdefault(tuple(sorted((near.rank, far.rank))), (near, far))
    send, recv = both = _sides(found.awaited, found.posted.operation)
    sent, received = f"on group {send.group}", f"on group {recv.group}"
    if found.kind == "tag_mismatch":
        sent, received = f"with tag {send.tag}", f"with tag {recv.tag}"
    message = (
        f"rank {send.rank} sends {sent}, but rank {recv.rank} receives {received}.{acts_text(both)}"
    )
    if len(pairs) > 1:
        message += f"\n  and {count(len(pairs) - 1, 'more pair')} of ranks"
    ranks = tuple(sorted({*chain.from_iterable(pairs)}))
    operations = tuple(chain.from_iterable(pairs.values()))
    return Finding(found.kind, ranks, operations, message, found.hint)


def _collective_finding(
    snapshot: Snapshot, stuck: Stuck, link: Hindrance, links: Sequence[Hindrance]
) -> Finding:
    """Returns the finding for a cycle through a collective.

    The members call different collectives, or one of them waits elsewhere.
    """
    if (wrong := _mismatched_call(link)) is not None:
        return wrong
    mine, cycle = link.operation, tuple(one.rank for one in links)
    operations = tuple(one.operation for one in links)
    kept = tuple(
        one.operation
        for one in stuck.hindrances
        if one.rank in link.peers and one.operation is not mine
    )
    elsewhere = next(
        (one for one in kept if one.kind == COLLECTIVE and one.group != mine.group), None
    )
    if elsewhere is not None or len(cycle) > 2:
        kind, ranks, waits = "deadlock", cycle, waits_text(operations)
    else:
        kind, ranks = "collective_mismatch", tuple(sorted({mine.rank, *link.peers}))
        waits = waits_text((mine, *kept[:_MOST_WAITS]))
    missing, cure = advise_in_collective(snapshot, links)
    needs = (
        f"Call {mine.op} on {name_ranks(link.peers)} before any call that waits: {mine.op} needs "
        f"every member of {_group_text(mine)}."
    )
    hint = cure or needs
    if (
        elsewhere is not None
        and elsewhere.op == mine.op == "new_group"
        and elsewhere.shape == mine.shape
    ):
        hint = (
            "Create the same groups on all members of this group first, or leave out "
            "use_local_synchronization: torch names such a group after the number of groups that "
            "each member belongs to."
        )
    message = f"{name_ranks(cycle)} wait for each other.{waits}{missing}"
    return Finding(kind, ranks, operations, message, hint)


def _mismatched_call(link: Hindrance) -> Finding | None:
    """Returns the finding for ranks that call a different collective or create a different group.

    Returns None if there is no such rank.
    """
    mine = link.operation
    wrong = [one for one in link.posted.entered if one.rank in link.peers and not meets(mine, one)]
    if not wrong:
        return None
    ranks = tuple(sorted({mine.rank, *(one.rank for one in wrong)}))
    number, calls = link.posted.index + 1, acts_text((mine, *wrong), "calls")
    if mine.op == "new_group":
        message = f"the ranks create different groups as group number {number}.{calls}"
        return Finding("group_order_mismatch", ranks, (mine, *wrong), message, SAME_GROUPS)
    message = (
        f"the ranks call different operations as collective {number} of {_group_text(mine)}.{calls}"
    )
    hint = "Call the same collectives in the same order on all ranks of a group."
    return Finding("collective_mismatch", ranks, (mine, *wrong), message, hint)


def _gone_finding(snapshot: Snapshot, gone: tuple[int, ...], waits: Sequence[Hindrance]) -> Finding:
    """Returns the finding for ranks that wait directly for ranks that are gone."""
    operations = tuple(one.operation for one in waits)
    mine, blocked = operations[0], sorted({one.rank for one in waits})
    ranks, waiting = tuple(dict.fromkeys([*gone, *blocked])), waiting_text(blocked)
    views = [snapshot.ranks[rank] for rank in gone]
    ends = "".join(
        f"\n  rank {rank} {view.end.about or _STATE_WORDS[view.state]}"
        for rank, view in zip(gone, views, strict=True)
    )
    waited = f"{waits_text(operations)}{ends}"
    last = _last_text(snapshot, gone)
    for one in waits:
        if (wrong := _mismatched_call(one)) is not None:
            return wrong
        if (found := find_counterpart(snapshot, one)) is not None:
            finding = _mismatch_finding([found])
            return replace(finding, message=f"{finding.message}{ends}")
    states = {view.state for view in views}
    if states == {"blocked"}:
        message = f"{waiting} for {name_ranks(gone)}, and none of them can continue.{waited}"
        hint = (
            "Find the thread that should wake the rank, and find out why that thread ended or is "
            "waiting."
        )
        return Finding("deadlock", ranks, operations, message, hint)
    if states == {"exited"} and all(one.kind == COLLECTIVE for one in operations):
        number = f" (collective {waits[0].posted.index + 1} of {_group_text(mine)})"
        if mine.op == "new_group":
            number = ""
        message = (
            f"{waiting} in {mine.op}{number}, but {name_ranks(gone)} exited without calling "
            f"it.{waited}{last}"
        )
        hint = (
            f"Call {mine.op} on {name_ranks(gone)}, or use a smaller group: {mine.op} needs every "
            f"member of {_group_text(mine)}."
        )
        return Finding("missing_participant", ranks, operations, message, hint)
    message = f"{waiting} for {name_ranks(gone)}, which can no longer answer.{waited}{last}"
    return Finding("peer_exited", ranks, operations, message, advise(snapshot, waits))


def _last_text(snapshot: Snapshot, gone: Sequence[int]) -> str:
    """Returns an indented line with the last operation of each rank that is gone."""
    said = ""
    for rank in gone[:_MOST_WAITS]:
        if (last := snapshot.ranks[rank].last) is not None:
            said += f"\n  rank {rank}'s last operation was {last}"
        elif snapshot.ranks[rank].state == "exited":
            said += f"\n  rank {rank} posted no operation"
    return said


def _with_threads(snapshot: Snapshot, root: Finding) -> Finding:
    """Adds the places where threads of the finding's ranks wait outside operations."""
    said = "".join(
        f"\n  meanwhile, rank {rank} {view.end.about}"
        for rank in root.ranks
        if (view := snapshot.ranks[rank]).awaited and view.end.about
    )
    return replace(root, message=f"{root.message}{said}")


def _failure(snapshot: Snapshot, rank: int) -> Finding:
    view = snapshot.ranks[rank]
    last = "" if view.end.error else _last_text(snapshot, [rank])  # an error names its line
    waits = tuple(one.operation for one in view.posted if one.awaited)
    message = f"rank {rank} {view.end.about or 'has failed'}.{last}"
    return Finding("rank_failed", (rank,), waits, message, end=view.end)


def _fold(stuck: Stuck, roots: Sequence[Finding]) -> tuple[Finding, ...]:
    """Folds each remaining stuck rank under the root cause that it waits for.

    A rank may wait directly or through other ranks.
    """
    behind: dict[int, int] = {}
    for index, root in enumerate(roots):
        for rank in root.ranks:
            behind.setdefault(rank, index)
    folded: list[list[Finding]] = [[] for _ in roots]
    moved = True
    while moved:
        moved = False
        for one in stuck.hindrances:
            found = next((behind[peer] for peer in one.peers if peer in behind), None)
            if found is not None and one.rank not in behind:
                behind[one.rank] = found

                folded[found].append(_echo(one, roots[found]))
                moved = True
    return tuple(
        replace(root, consequences=tuple(echoes))
        for root, echoes in zip(roots, folded, strict=True)
    )


def _echo(one: Hindrance, root: Finding) -> Finding:
    operation = one.operation
    if operation.kind == COLLECTIVE:
        kind = "missing_participant"
    else:
        kind = "peer_exited" if root.kind in ("rank_failed", "peer_exited") else "deadlock"
    return Finding(kind, (one.rank,), (operation,), f"{wait_text(operation)}.")


def _group_text(operation: Operation) -> str:
    if operation.op == "new_group":
        return f"the new group, {list(operation.shape)}"
    return f"group {operation.group}" if operation.group else "its group"


_SENDS_FIRST = (
    "Receive first on one rank, or post with isend or batch_isend_irecv: all ranks send before "
    "they receive, and a send returns only after its recv is posted (with Gloo at any size, with "
    "MPI if the message is large)."
)
_RECVS_FIRST = (
    "Send first on one rank, or post with batch_isend_irecv: all ranks receive before they send."
)
_MIXED = (
    "Post all operations with isend and irecv, or with batch_isend_irecv, before the first wait. "
    "Or change the order on one rank."
)
_TAKEN = (
    "Give the recv from any rank its own tag, or post as many recvs as sends: with the same tag, "
    "that recv took this message or received a different one."
)


_IN_ORDER = (
    "Receive in the order in which the other side sends: Gloo does not buffer a send, so a message "
    "cannot overtake another message that has a different tag."
)


class Counterpart(NamedTuple):
    """A near match for an awaited operation, with the kind of the mismatch and a hint."""

    awaited: Operation
    posted: OpenOperation
    kind: str
    hint: str


def find_counterpart(snapshot: Snapshot, hindrance: Hindrance) -> Counterpart | None:
    """Returns the nearest unmatched operation that differs only in its tag or its group.

    An operation that is posted but not awaited may belong to a later message. It counts only if no
    message has matched under either tag and group, so that neither is known to be right. Awaited
    operations are nearer than posted ones, and a different tag is nearer than a different group.
    """
    mine = hindrance.posted
    operation = mine.operation
    if operation.kind == COLLECTIVE or mine.matched or mine.taken:
        return None
    found = []
    for peer in hindrance.peers if operation.peer == ANY_SOURCE else (operation.peer,):
        for theirs in snapshot.ranks[peer].posted:
            other = theirs.operation
            unused = mine.index == theirs.index == 0 and min(operation.peer, other.peer) >= 0
            same_tag, same_group = other.tag == operation.tag, theirs.group == mine.group
            if (
                theirs.matched
                or theirs.taken
                or not _faces(mine, theirs)
                or not (theirs.awaited or unused or snapshot.ranks[peer].state in GONE)
                or same_tag == same_group
            ):
                continue
            if same_tag:
                kind, hint = (
                    "group_mismatch",
                    (
                        f"Use the same group on both sides: {_group_name(mine)} or "
                        f"{_group_name(theirs)}."
                    ),
                )
            elif _has_both_tags(snapshot, operation, other):
                kind, hint = "tag_mismatch", _IN_ORDER
            else:
                kind = "tag_mismatch"
                hint = f"Give both sides the same tag: {operation.tag} or {other.tag}."
            if not theirs.awaited:
                send, _ = _sides(operation, other)
                hint += (
                    "\nIf the two operations do not belong together, add a recv on rank "
                    f"{send.peer} for the send, and a send on rank {send.rank} for the recv."
                )
            found.append(Counterpart(operation, theirs, kind, hint))
    return min(
        found, key=lambda one: (not one.posted.awaited, one.kind == "group_mismatch"), default=None
    )


def _sides(mine: Operation, theirs: Operation) -> tuple[Operation, Operation]:
    """Returns the two sides of a message, the send first."""
    return (mine, theirs) if mine.kind == SEND else (theirs, mine)


def _faces(mine: OpenOperation, theirs: OpenOperation) -> bool:
    """Returns whether a send and a recv match except for tag and group."""
    send, recv = _sides(mine.operation, theirs.operation)
    group = (mine if recv is mine.operation else theirs).group
    return (send.kind, recv.kind, send.peer) == (SEND, RECV, recv.rank) and (
        recv.peer == send.rank or (recv.peer == ANY_SOURCE and send.rank in group.ranks)
    )


def advise(snapshot: Snapshot, links: Sequence[Hindrance]) -> str:
    """Returns hints for ranks that wait, one per line."""
    if any(link.posted.taken for link in links):
        return _TAKEN
    if tried := [line for link in links if (line := _tried(snapshot, link))]:
        return "\n".join(tried[:2])
    lines = [line for link in links[:4] if (line := _peer_hint(snapshot, link, awaited=True))]
    views = {peer: snapshot.ranks[peer] for link in links for peer in link.peers}
    gone = {peer for peer, view in views.items() if view.state in GONE}
    if any(views[peer].state == "killed" for peer in gone):
        lines.append(
            "Find out what ended the process: a kill command, the lack of memory, or a crash in "
            "C++. Look at its last output."
        )
    elif early := sorted(peer for peer in gone if views[peer].left_early):
        lines += [
            f"Complete rank {rank}'s part before it exits: it exited in the middle of its worker."
            for rank in early[:2]
        ]
    elif gone:
        lines += [
            _counted(link)
            for link in [link for link in links if gone.intersection(link.peers)][:2]
            if link.operation.kind != COLLECTIVE and link.operation.peer >= 0
        ]
        if any(link.operation.peer == ANY_SOURCE for link in links):
            lines.append("Receive only as many messages as are sent: no rank is left to send more.")
    elif not lines:
        lines = (
            _change_order(links)
            + [line for link in links if (line := _peer_hint(snapshot, link, awaited=False))][:2]
        )
    return "\n".join(lines)


def _change_order(links: Sequence[Hindrance]) -> list[str]:
    """Returns hints for ranks that wait for each other.

    If they post before they wait, the hints name the operations not posted yet.
    """
    operations = [link.operation for link in links]
    lacking = [link for link in links if link.operation.peer >= 0]
    if lacking and not all(one.op in BLOCKING for one in operations):
        return [
            (
                f"Post the {_other_side(link)} on rank {link.operation.peer} before that "
                f"rank waits, or leave out this {link.operation.op}: {_counted_words(link)}."
            )
            for link in lacking[:2]
        ]
    if all(one.kind == SEND for one in operations):
        return [_SENDS_FIRST]
    return [_RECVS_FIRST] if all(one.kind == RECV for one in operations) else [_MIXED]


def advise_in_collective(snapshot: Snapshot, links: Sequence[Hindrance]) -> tuple[str, str]:
    """Looks for an unmatched message in a cycle that includes a collective.

    Returns an indented line about the missing side of the first such message, and a hint.
    """
    for link, following in _pairs(links):
        mine, other = link.operation, following.operation
        if mine.kind == COLLECTIVE or link.posted.matched:
            continue
        if link.posted.taken:
            return "", _TAKEN
        if tried := _tried(snapshot, link):
            return "", tried
        missing, who = f"\n  {_counted_words(link)}", f"rank {mine.peer}"
        if mine.peer == ANY_SOURCE:
            missing = f"\n  no rank posted a send for rank {mine.rank}'s {mine.op}"
            who = "the sending rank"
        before = f"{other.op}{f' at {other.place}' if other.place else ''}"
        cure = (
            f"Post the {_other_side(link)} on {who} before its {before}, or leave out this "
            f"{mine.op} on rank {mine.rank}."
        )
        for late in (one.operation for one in links if mine.rank in one.peers):
            if late.kind == COLLECTIVE:
                cure += (
                    f"\nIf the {mine.op} belongs after the {late.op}, call the {late.op} first on "
                    f"rank {mine.rank}."
                )
                break
        return missing, cure
    return "", ""


def _tried(snapshot: Snapshot, link: Hindrance) -> str:
    """Returns a hint if a message's other side was refused and its rank continued."""
    mine = link.operation
    if mine.kind == COLLECTIVE or mine.peer < 0:
        return ""
    wanted = link.posted.group, link.posted.index, mine.rank, mine.tag
    for one in snapshot.ranks[mine.peer].refused:
        other = one.operation
        if (one.group, one.index, other.peer, other.tag) == wanted and other.kind != mine.kind:
            return (
                f"Fix the error that rank {other.rank} caught: its {other} raised this error and "
                "was therefore not posted."
            )
    return ""


def _counted(link: Hindrance) -> str:
    """Returns a hint about the operation that the peer did not post."""
    if link.posted.matched:
        return f"The message was in flight when rank {link.operation.peer} ended."
    return (
        f"Add the missing {_other_side(link)}, or leave out this {link.operation.op}: "
        f"{_counted_words(link)}."
    )


def _counted_words(link: Hindrance) -> str:
    operation, posted, noun = link.operation, link.posted, _other_side(link)
    times = f"no {noun}" if posted.counterparts == 0 else f"only {count(posted.counterparts, noun)}"
    own = "recv" if noun == "send" else "send"
    tag = f", tag {operation.tag}" if operation.tag >= 0 else ""
    return (
        f"rank {operation.peer} posted {times} ({_group_name(posted)}{tag}), but "
        f"rank {operation.rank} posted {count(posted.index + 1, own)}"
    )


def _other_side(link: Hindrance) -> str:
    return "recv" if link.operation.kind == SEND else "send"


def _peer_hint(snapshot: Snapshot, link: Hindrance, *, awaited: bool) -> str:
    """Returns a hint if another rank has posted the other side, because the peer may be wrong."""
    mine = link.operation
    if mine.kind == COLLECTIVE or mine.peer == ANY_SOURCE or link.posted.matched:
        return ""
    for rank, view in enumerate(snapshot.ranks):
        for theirs in view.awaited if awaited else view.posted:
            other = theirs.operation
            if (
                rank not in (mine.rank, mine.peer)
                and other.kind not in (COLLECTIVE, mine.kind)
                and (other.peer, other.tag) == (mine.rank, mine.tag)
                and not theirs.matched
            ):
                words = "waits in" if awaited else "posted"
                return (
                    f"Check peer {mine.peer} of rank {mine.rank}'s {mine.op}: rank {rank} {words} "
                    f"{other}."
                )
    return ""


def _has_both_tags(snapshot: Snapshot, mine: Operation, theirs: Operation) -> bool:
    """Returns whether one side has also posted an operation with the other side's tag.

    In that case, the order rather than the tag is wrong.
    """
    return any(
        (one.operation.kind, one.operation.peer, one.operation.tag)
        == (side.kind, side.peer, wanted.tag)
        for side, wanted in ((mine, theirs), (theirs, mine))
        for one in snapshot.ranks[side.rank].posted
    )


def _group_name(posted: OpenOperation) -> str:
    return f"group {posted.group.name}" if posted.group.name else "the group"
