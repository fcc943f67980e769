"""What to change: looks around a rank that waits in vain for something that nearly fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from ringsim.diagnose.finding import Operation
from ringsim.diagnose.waitfor import GONE, Hindrance, Posted, World
from ringsim.traces.events import ANY_SOURCE, COLLECTIVE, RECV, SEND
from ringsim.traces.summary import count

__all__ = ["Counterpart", "advise", "find_counterpart", "mismatch_text"]

_SENDS_FIRST: Final = (
    "A send returns only once the other side has posted its recv, at any size: all of them send before they receive. Let one of them "
    "receive first, or post with isend or batch_isend_irecv."
)
_RECVS_FIRST: Final = "All of them receive before they send. Let one of them send first, or post with batch_isend_irecv."
_MIXED: Final = "Post with isend and irecv, or batch_isend_irecv, before waiting for any of them; or change the order on one rank."
_TAKEN: Final = (
    "A recv from any rank is open under the same tag, and what is waited for here went to it, or it got another message. Give it a tag of "
    "its own, or post as many recvs as there are sends."
)


class Counterpart(NamedTuple):
    """What the other side posted instead: the operation, the kind of the mismatch ("" where tag and group both differ), what to do."""

    posted: Posted
    kind: str
    hint: str


def find_counterpart(world: World, hindrance: Hindrance) -> Counterpart | None:
    """Looks for an unmatched operation of the peer that would be the other side, had it the same tag, or the same group.

    Args:
        world: the ranks.
        hindrance: a send, or a recv from one peer, that has no other side.

    Returns:
        The nearest one: another tag before another group, and both differing last. None where there is nothing of the sort.
    """
    mine = hindrance.posted
    operation = mine.operation
    if operation.kind == COLLECTIVE or operation.peer == ANY_SOURCE or mine.matched or mine.taken:
        return None
    best: Counterpart | None = None
    for theirs in world.ranks[operation.peer].posted:
        other = theirs.operation
        opposite = other.kind != COLLECTIVE and other.kind != operation.kind and other.peer == operation.rank
        if not opposite or theirs.matched or theirs.taken:
            continue
        same_tag, same_group = other.tag == operation.tag, theirs.group == mine.group
        if same_group and not same_tag:
            hint = f"Give both the same tag: {operation.tag} or {other.tag}."
            if operation.kind == other.kind or _has_both_tags(world, operation, other):
                hint = "Receive in the order in which the other side sends: a send of Gloo is not buffered, so tags cannot overtake."
            return Counterpart(theirs, "tag_mismatch", hint)
        if same_tag and not same_group:
            hint = f"Use one group on both sides: {_group_name(mine)} or {_group_name(theirs)}."
            best = Counterpart(theirs, "group_mismatch", hint)
        elif best is None:
            best = Counterpart(theirs, "", "")
    return best


def mismatch_text(mine: Operation, theirs: Operation, kind: str) -> str:
    """Says how the two sides of a message miss each other."""
    send, recv = (mine, theirs) if mine.kind == SEND else (theirs, mine)
    differ = f"tag {send.tag} is not tag {recv.tag}" if kind == "tag_mismatch" else f"group {send.group} is not group {recv.group}"
    return f"rank {send.rank}'s {send} and rank {recv.rank}'s {recv} never meet: {differ}."


def advise(world: World, links: Sequence[Hindrance]) -> str:
    """Returns what to do about ranks that wait, in a line or more."""
    operations = [link.posted.operation for link in links]
    if any(link.posted.taken for link in links):
        return _TAKEN
    lines = [line for link in links[:4] if (line := _peer_hint(world, link))]
    gone = [link for link in links if any(world.ranks[peer].state in GONE for peer in link.peers)]
    if any(world.ranks[peer].state == "killed" for link in gone for peer in link.peers):
        lines.append("Find out what ended it: somebody's kill, too little memory, or a crash in C++; what it printed last may tell.")
    elif gone:
        lines += [_counted(link) for link in gone[:2] if link.posted.operation.kind != COLLECTIVE and link.posted.operation.peer >= 0]
        if any(one.peer == ANY_SOURCE for one in operations):
            lines.append("Receive as many messages as are sent: nobody is left to send another.")
    elif not lines and all(one.kind == SEND for one in operations):
        lines.append(_SENDS_FIRST)
    elif not lines and all(one.kind == RECV for one in operations):
        lines.append(_RECVS_FIRST)
    elif not lines:
        lines.append(_MIXED)
    return "\n".join(lines)


def _counted(link: Hindrance) -> str:
    """Says how many operations the peer has posted, where some are missing."""
    operation, posted = link.posted.operation, link.posted
    if posted.matched:
        return f"The message was on its way when rank {operation.peer} ended."
    noun = "recv" if operation.kind == SEND else "send"
    times = f"no {noun}" if posted.counterparts == 0 else f"only {count(posted.counterparts, noun)}"
    return (
        f"Rank {operation.peer} posted {times} for it ({_group_name(posted)}, tag {operation.tag}), and this is {operation.op} number "
        f"{posted.index + 1} of rank {operation.rank}: add the missing {noun}, or leave this one out."
    )


def _peer_hint(world: World, link: Hindrance) -> str:
    """Says who else waits for this rank with what fits: the peer may be the wrong one."""
    mine = link.posted.operation
    if mine.kind == COLLECTIVE or mine.peer == ANY_SOURCE or link.posted.matched or link.posted.taken:
        return ""
    for rank, view in enumerate(world.ranks):
        for theirs in view.awaited:
            other = theirs.operation
            opposite = other.kind != COLLECTIVE and other.kind != mine.kind and other.peer == mine.rank
            if rank not in (mine.rank, mine.peer) and opposite and other.tag == mine.tag and not theirs.matched:
                return f"Rank {rank} waits in {other}: should the {mine.op} of rank {mine.rank} go there? Its peer is {mine.peer}."
    return ""


def _has_both_tags(world: World, mine: Operation, theirs: Operation) -> bool:
    """Tells whether one of the two sides has posted the other tag, too, so that the order differs rather than the tag."""
    return any(
        one.operation.kind == side.kind and one.operation.peer == side.peer and one.operation.tag == wanted.tag
        for side, wanted in ((mine, theirs), (theirs, mine))
        for one in world.ranks[side.rank].posted
    )


def _group_name(posted: Posted) -> str:
    return f"group {posted.group.name}" if posted.group.name else "the group"
