"""What to change: looks for an operation that nearly fits what a rank waits for in vain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from ringsim.diagnose.snapshot import GONE, Posted, Snapshot
from ringsim.diagnose.waitfor import Hindrance
from ringsim.traces.events import ANY_SOURCE, COLLECTIVE, RECV, SEND
from ringsim.traces.findings import Operation
from ringsim.traces.value import count

__all__ = ["Counterpart", "advise", "advise_in_collective", "find_counterpart", "mismatch_text"]

_SENDS_FIRST: Final = (
    "A send returns only once the other side has posted its recv, at any size: all of them send before they receive. Let one of them "
    "receive first, or post with isend or batch_isend_irecv."
)
_RECVS_FIRST: Final = "All of them receive before they send. Let one of them send first, or post with batch_isend_irecv."
_MIXED: Final = "Post with isend and irecv, or batch_isend_irecv, before waiting for any of them; or change the order on one rank."
_BLOCKING: Final = ("send", "recv")  # how blocking operations begin
_TAKEN: Final = (
    "A recv from any rank is open under the same tag, and what is waited for here went to it, or it got another message. Give it a tag of "
    "its own, or post as many recvs as there are sends."
)


class Counterpart(NamedTuple):
    """What the other side posted instead: the operation, the kind of the mismatch, what to do."""

    posted: Posted
    kind: str
    hint: str


def find_counterpart(snapshot: Snapshot, hindrance: Hindrance) -> Counterpart | None:
    """Looks for an unmatched operation that would be the other side, had it the same tag, or the same group.

    An operation that is posted but not awaited may be meant for later: it counts only if nothing has ever met under either tag and group,
    so that neither is known to be right. The nearest is returned: awaited before merely posted, another tag before another group.
    """
    mine = hindrance.posted
    operation = mine.operation
    if operation.kind == COLLECTIVE or mine.matched or mine.taken:
        return None
    found = []
    for peer in hindrance.peers if operation.peer == ANY_SOURCE else (operation.peer,):
        for theirs in snapshot.ranks[peer].posted:
            other = theirs.operation
            unused = mine.index == theirs.index == 0 and ANY_SOURCE not in (operation.peer, other.peer)
            if theirs.matched or theirs.taken or not _faces(mine, theirs):
                continue
            if not (theirs.awaited or unused or snapshot.ranks[peer].state in GONE):
                continue
            same_tag, same_group = other.tag == operation.tag, theirs.group == mine.group
            if same_group and not same_tag:
                hint = f"Give both the same tag: {operation.tag} or {other.tag}."
                if _has_both_tags(snapshot, operation, other):
                    hint = "Receive in the order in which the other side sends: a send of Gloo is not buffered, so tags cannot overtake."
                found.append(Counterpart(theirs, "tag_mismatch", hint + _doubt(mine, theirs)))
            elif same_tag and not same_group:
                hint = f"Use one group on both sides: {_group_name(mine)} or {_group_name(theirs)}."
                found.append(Counterpart(theirs, "group_mismatch", hint + _doubt(mine, theirs)))
    return min(found, key=lambda one: (not one.posted.awaited, one.kind == "group_mismatch"), default=None)


def _faces(mine: Posted, theirs: Posted) -> bool:
    """Tells whether one is a send and the other a recv that would take it, given the same tag and group."""
    send, recv = (mine, theirs) if mine.operation.kind == SEND else (theirs, mine)
    if (send.operation.kind, recv.operation.kind) != (SEND, RECV) or send.operation.peer != recv.operation.rank:
        return False
    source = send.operation.rank
    return recv.operation.peer == source or (recv.operation.peer == ANY_SOURCE and source in recv.group.ranks)


def _doubt(mine: Posted, theirs: Posted) -> str:
    """Says what else two operations that miss each other may mean; nothing if both are awaited."""
    if theirs.awaited:
        return ""
    send = mine.operation if mine.operation.kind == SEND else theirs.operation
    return f"\nIf they are not meant for each other: rank {send.peer} lacks a recv for the send, and rank {send.rank} a send for the recv."


def mismatch_text(mine: Operation, theirs: Operation, kind: str) -> str:
    """Says how the two sides of a message miss each other."""
    send, recv = (mine, theirs) if mine.kind == SEND else (theirs, mine)
    differ = f"tag {send.tag} is not tag {recv.tag}" if kind == "tag_mismatch" else f"group {send.group} is not group {recv.group}"
    return f"rank {send.rank}'s {send} and rank {recv.rank}'s {recv} never meet: {differ}."


def advise(snapshot: Snapshot, links: Sequence[Hindrance]) -> str:
    """Returns advice for ranks that wait, in one line or more."""
    operations = [link.posted.operation for link in links]
    if any(link.posted.taken for link in links):
        return _TAKEN
    if tried := [line for link in links if (line := _tried(snapshot, link))]:
        return "\n".join(tried[:2])
    lines = [line for link in links[:4] if (line := _peer_hint(snapshot, link, awaited=True))]
    gone = [link for link in links if any(snapshot.ranks[peer].state in GONE for peer in link.peers)]
    if any(snapshot.ranks[peer].state == "killed" for link in gone for peer in link.peers):
        lines.append("Find out what ended it: somebody's kill, too little memory, or a crash in C++; what it printed last may tell.")
    elif early := sorted({peer for link in gone for peer in link.peers if snapshot.ranks[peer].left_early}):
        what = "ended in the middle of its worker: let it do what the others wait for, and then return."
        lines += [f"Rank {rank} {what}" for rank in early[:2]]
    elif gone:
        lines += [_counted(link) for link in gone[:2] if link.posted.operation.kind != COLLECTIVE and link.posted.operation.peer >= 0]
        if any(one.peer == ANY_SOURCE for one in operations):
            lines.append("Receive as many messages as are sent: nobody is left to send another.")
    elif not lines:
        lines = _change_order(links) + [line for link in links if (line := _peer_hint(snapshot, link, awaited=False))][:2]
    return "\n".join(lines)


def _change_order(links: Sequence[Hindrance]) -> list[str]:
    """Returns advice for ranks that wait for each other; for those that post before they wait, what is not posted yet."""
    operations = [link.posted.operation for link in links]
    lacking = [link for link in links if link.posted.operation.peer >= 0]
    if lacking and not all(one.op.startswith(_BLOCKING) for one in operations):
        return [
            f"{_counted_words(link)}: let it post the {_other_side(link)} before it waits, or leave this one out." for link in lacking[:2]
        ]
    if all(one.kind == SEND for one in operations):
        return [_SENDS_FIRST]
    return [_RECVS_FIRST] if all(one.kind == RECV for one in operations) else [_MIXED]


def advise_in_collective(snapshot: Snapshot, links: Sequence[Hindrance]) -> tuple[str, str]:
    """Looks for a message in a circle that passes through a collective; returns what the first one lacks, a sentence, and what to do."""
    for link, following in zip(links, [*links[1:], links[0]], strict=True):
        mine, other = link.posted.operation, following.posted.operation
        if mine.kind == COLLECTIVE or link.posted.matched:
            continue
        if link.posted.taken:
            return "", _TAKEN
        if tried := _tried(snapshot, link):
            return "", tried
        if mine.peer == ANY_SOURCE:
            missing, who = f"Nobody has posted a send for the {mine.op} of rank {mine.rank}.", "the rank that it is for"
        else:
            missing, who = f"{_counted_words(link)}.", f"rank {mine.peer}"
        before = f"{other.op}{f' at {other.place}' if other.place else ''}"
        cure = f"Let {who} post the {_other_side(link)} before its {before}, or leave this {mine.op} of rank {mine.rank} out."
        late = next((one.posted.operation.op for one in links if one.posted.operation.kind == COLLECTIVE and mine.rank in one.peers), "")
        if late:
            cure += f"\nIf the {mine.op} belongs behind the {late}, let rank {mine.rank} call that first, too."
        return missing, cure
    return "", ""


def _tried(snapshot: Snapshot, link: Hindrance) -> str:
    """Says that the other side of a message was refused and its rank went on all the same; empty if it was not."""
    mine = link.posted.operation
    if mine.kind == COLLECTIVE or mine.peer < 0:
        return ""
    for one in snapshot.ranks[mine.peer].refused:
        other, same = one.operation, (one.group, one.index) == (link.posted.group, link.posted.index)
        if same and other.kind != mine.kind and (other.peer, other.tag) == (mine.rank, mine.tag):
            return f"Rank {other.rank} tried: its {other} raised an error, so it was not posted. Mend what that says instead of going on."
    return ""


def _counted(link: Hindrance) -> str:
    """Says how many operations the peer has posted, and which are missing."""
    if link.posted.matched:
        return f"The message was on its way when rank {link.posted.operation.peer} ended."
    return f"{_counted_words(link)}: add the missing {_other_side(link)}, or leave this one out."


def _counted_words(link: Hindrance) -> str:
    operation, posted, noun = link.posted.operation, link.posted, _other_side(link)
    times = f"no {noun}" if posted.counterparts == 0 else f"only {count(posted.counterparts, noun)}"
    return (
        f"Rank {operation.peer} posted {times} for it ({_group_name(posted)}, tag {operation.tag}), and this is {operation.op} number "
        f"{posted.index + 1} of rank {operation.rank}"
    )


def _other_side(link: Hindrance) -> str:
    return "recv" if link.posted.operation.kind == SEND else "send"


def _peer_hint(snapshot: Snapshot, link: Hindrance, *, awaited: bool) -> str:
    """Says which other rank waits in, or has posted, what fits: the peer may be the wrong one."""
    mine = link.posted.operation
    if mine.kind == COLLECTIVE or mine.peer == ANY_SOURCE or link.posted.matched or link.posted.taken:
        return ""
    for rank, view in enumerate(snapshot.ranks):
        for theirs in view.awaited if awaited else view.posted:
            other = theirs.operation
            opposite = other.kind != COLLECTIVE and other.kind != mine.kind and other.peer == mine.rank
            if rank not in (mine.rank, mine.peer) and opposite and other.tag == mine.tag and not theirs.matched:
                words = "waits in" if awaited else "has posted"
                return f"Rank {rank} {words} {other}: should the {mine.op} of rank {mine.rank} go there? Its peer is {mine.peer}."
    return ""


def _has_both_tags(snapshot: Snapshot, mine: Operation, theirs: Operation) -> bool:
    """Tells whether a side has posted the other tag, too, so that the order differs rather than the tag."""
    return any(
        one.operation.kind == side.kind and one.operation.peer == side.peer and one.operation.tag == wanted.tag
        for side, wanted in ((mine, theirs), (theirs, mine))
        for one in snapshot.ranks[side.rank].posted
    )


def _group_name(posted: Posted) -> str:
    return f"group {posted.group.name}" if posted.group.name else "the group"
