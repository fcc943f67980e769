"""Compares each operation with its other side's, before the communication library gets it.

Gloo looks at nothing: where two sides disagree, the message is garbage, or the process dies. But each rank writes down what it posts before
it posts it, in a file that the other ranks of the machine can read. So whoever posts second sees the other's record::

    rank 0   writes "send float32[4]", looks: nothing there yet ............. blocked in send
    rank 1                                   writes "recv float32[8]", looks: float32[4]!   -> raises, Gloo never sees it

The k-th send of a channel (group, source, destination, tag) belongs to the k-th recv, the k-th collective of a group on one rank to the
k-th on every other. That holds where both sides were counted from the first operation on; it is not asked of a group that was used before
the recording began. A recv from anybody is not compared, nor what follows it on the same group and tag.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, Final, NamedTuple

from ringsim.errors import MessageMismatch
from ringsim.traces.events import ANY_SOURCE, COLLECTIVE, ERROR, NONE, OP_CODES, OP_KINDS, OP_NAMES, RECV, Payload
from ringsim.traces.neighbour import COLUMNS, WORDS, Neighbour
from ringsim.traces.recorder import Recorder

__all__ = ["Counterparts", "disagreement"]

_STATE, _GROUP, _PAYLOAD, _PEER, _TAG, _FILE, _LINE, _WAIT = (
    COLUMNS[name] for name in ("op", "group", "payload", "peer", "tag", "file", "line", "wait_ns")
)
_KINDS: Final = tuple(int(kind) for kind in OP_KINDS)
_NEVER: Final = 1 << 62  # more operations than there will be: the other side's are not compared any more
# Spellings of one and the same collective, and those of which every rank may carry another size.
_SAME: Final = {
    OP_CODES["all_gather_single"]: OP_CODES["all_gather"],
    OP_CODES["all_gather_into_tensor"]: OP_CODES["all_gather"],
    OP_CODES["reduce_scatter_single"]: OP_CODES["reduce_scatter"],
    OP_CODES["reduce_scatter_tensor"]: OP_CODES["reduce_scatter"],
}
_UNEVEN: Final = (OP_CODES["all_to_all"], OP_CODES["all_to_all_single"])


def disagreement(mine: Payload, theirs: Payload) -> str:
    """Returns in what the two sides of an operation disagree: "size", "dtype", "shape", "reduction"; empty where they do not.

    One side may see the elements in a row where the other sees a shape, and dimensions of 1 do not count: both are common, and harmless.

    Example:
        >>> disagreement(Payload("float32", (2, 3), 24), Payload("float32", (3, 2), 24))
        'shape'
        >>> disagreement(Payload("float32", (2, 3), 24), Payload("float32", (6,), 24))
        ''
    """
    if mine.size_bytes != theirs.size_bytes:
        return "size"
    if mine.size_bytes == 0:
        return ""
    if mine.dtype != theirs.dtype:
        return "dtype"
    if mine.reduction != theirs.reduction:
        return "reduction"
    shape, other = (tuple(size for size in payload.shape if size != 1) for payload in (mine, theirs))
    return "shape" if shape != other and len(shape) > 1 and len(other) > 1 else ""


class _Difference(NamedTuple):
    """What was found at the other side."""

    what: str
    theirs: Payload
    op: str
    rank: int
    root: int
    place: str


class Counterparts:
    """Follows what the other ranks of this machine post.

    Args:
        recorder: writes this rank's own records, beside theirs.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._numbers: dict[tuple[str, tuple[int, ...]], int] = {}  # of groups, the same for all ranks' own numbers
        self._groups: dict[int, int] = {}  # this rank's number of a group: the one in _numbers
        self._followers: dict[int, _Follower] = {}
        self._partners: dict[int, list[int]] = {}  # by this rank's number of a group: whom its collectives are compared with
        self._from_any: set[tuple[int, int]] = set()  # (group, tag) of recvs from anybody
        self._elsewhere: set[int] = set()
        self._passed_over: set[str] = set()

    def meet_group(self, number: int, name: str, ranks: Sequence[int]) -> None:
        """Compares the operations on a group from now on. It must be fresh: no rank has used it before it was recorded."""
        self._groups[number] = self._numbers.setdefault((name, tuple(ranks)), len(self._numbers))
        me, steps = list(ranks).index(self._recorder.rank), (1 << power for power in range(len(ranks).bit_length()))
        # Gloo's rings and trees connect ranks whose places differ by a power of two; comparing with all would cost too much.
        near = {ranks[(me + step) % len(ranks)] for power in steps for step in (power, -power)}
        self._partners[number] = sorted(near - {self._recorder.rank})

    def pass_over_group(self, name: str) -> None:
        """Says in the trace that the operations on a group are not compared."""
        self._passed_over.add(name)
        self._say_what_is_not_checked()

    def meet_recv_from_any(self, group: int, tag: Any) -> None:
        """Compares no recv on this group and tag any more: which send it will get is not known."""
        self._from_any.add((group, tag))

    def make_compare(self, sends: bool) -> Callable[[int, int, Any, int], None]:
        """Makes the function ``compare(group, peer, tag, payload)`` for sends, or for recvs; it raises where the other side disagrees."""
        groups, followers, from_any, follow, complain = self._groups, self._followers, self._from_any, self._follow, self._complain

        def compare(group: int, peer: int, tag: Any, payload: int) -> None:
            number = groups.get(group)
            if number is None or (from_any and not sends and (group, tag) in from_any):
                return
            follower = followers.get(peer) or follow(peer)
            difference = follower.compare((number, tag, sends), payload)
            if difference is not None:
                complain(difference, sends, group, peer, tag, payload)

        return compare

    def forget(self, group: int, peer: int, tag: Any, sends: bool) -> None:
        """Compares nothing on a channel any more, for the library refused what was compared: the counts differ from now on."""
        number, follower = self._groups.get(group), self._followers.get(peer)
        if number is not None and follower is not None:
            follower.ahead[number, tag, sends] = _NEVER

    def compare_collective(self, group: int, op: int, payload: int, root: int) -> None:
        """Compares a collective with those of the ranks around this one in the group.

        Args:
            group: this rank's number of the group.
            op: code of the operation.
            payload: this rank's number of what it carries.
            root: global rank of the root, NONE for none.

        Raises:
            MessageMismatch: another rank has posted another collective in its place.
        """
        number = self._groups.get(group)
        if number is None:
            return
        for peer in self._partners[group]:
            follower = self._followers.get(peer) or self._follow(peer)
            difference = follower.compare_collective(number, op, payload, root)
            if difference is not None:
                self._complain_collective(difference, group, op, payload, root)

    def _follow(self, peer: int) -> _Follower:
        neighbour = Neighbour(self._recorder.directory, peer)
        follower = self._followers[peer] = _Follower(neighbour, self._recorder, self._numbers, self._note_elsewhere)
        return follower

    def _note_elsewhere(self, rank: int) -> None:
        self._elsewhere.add(rank)
        self._say_what_is_not_checked()

    def _say_what_is_not_checked(self) -> None:
        sentences = [
            f"Both sides of an operation were not compared on group {name}: it was used before the recording began, or is not Gloo's."
            for name in sorted(self._passed_over)
        ]
        sentences += [
            f"Both sides of an operation were not compared between ranks {min(rank, self._recorder.rank)} and "
            f"{max(rank, self._recorder.rank)}: they run on two machines."
            for rank in sorted(self._elsewhere)
        ]
        self._recorder.set_meta("not_checked", sentences)

    def _describe(self, payload: Payload) -> str:
        words = f"{payload.dtype}{list(payload.shape)} ({payload.size_bytes:,} bytes)" if payload.dtype else "nothing"
        return f"{words}, {payload.reduction}" if payload.reduction else words

    def _complain(self, found: _Difference, sends: bool, group: int, peer: int, tag: Any, payload: int) -> None:
        recorder = self._recorder
        mine = _payload(recorder, payload)
        where = f"rank {recorder.rank} of {recorder.world_size}, {'send to' if sends else 'recv from'} {peer}, tag {tag}"
        where += f", group {recorder.entry('group', group)['name']}"
        message = (
            f"the two sides of a message must agree on its {found.what}, got {self._describe(mine)} here and "
            f"{self._describe(found.theirs)} in rank {found.rank}'s {found.op}{found.place} ({where}). "
            "Make both tensors alike, or send them in the order in which they are received."
        )
        recorder.notice("message_mismatch", message, group, peer, tag, payload)
        raise MessageMismatch(message)

    def _complain_collective(self, found: _Difference, group: int, op: int, payload: int, root: int) -> None:
        recorder = self._recorder
        mine = _payload(recorder, payload)
        if found.what == "operation":
            words = f"{OP_NAMES[op]} here and {found.op}"
        elif found.what == "root":
            words = f"root {root} here and root {found.root}"
        else:
            words = f"{self._describe(mine)} here and {self._describe(found.theirs)}"
        message = (
            f"all ranks of a group must call the same collectives in the same order, with one {found.what}, got {words} in rank "
            f"{found.rank}'s {found.op}{found.place} (rank {recorder.rank} of {recorder.world_size}, {OP_NAMES[op]}, "
            f"group {recorder.entry('group', group)['name']}). Make the calls alike."
        )
        recorder.notice("collective_mismatch", message, group, root, NONE, payload)
        raise MessageMismatch(message)


def _payload(recorder: Recorder, number: int) -> Payload:
    entry = recorder.entry("payload", number)
    return Payload(entry["dtype"], tuple(entry["shape"]), entry["size_bytes"], entry.get("reduction", ""))


class _Follower:
    """Reads what another rank posts, and holds it against what this one posts.

    Each of the two compares only what the other has posted already, so of two sides at least one compares. ``ahead`` counts how many this
    rank has posted that the other will compare, by channel; ``theirs`` has what the other has posted and this rank has not.
    """

    def __init__(
        self, neighbour: Neighbour, recorder: Recorder, numbers: dict[tuple[str, tuple[int, ...]], int], note: Callable[[int], None]
    ) -> None:
        self._neighbour, self._recorder, self._numbers, self._note = neighbour, recorder, numbers, note
        self._me = recorder.rank
        self._lock = Lock()
        self._at = 0  # the word at which the first unread record begins
        self._tries = 0
        self._groups: dict[int, int | None] = {}  # the other's number of a group: the common one; None where it is not compared
        self._agreed: set[tuple[int, int]] = set()  # payloads, this rank's number and the other's
        self.ahead: dict[Any, int] = {}  # by (group, tag, whether this rank sends); by group for collectives
        self._theirs: dict[Any, deque[int]] = {}  # the same: where the records begin

    def compare(self, channel: tuple[int, Any, bool], payload: int) -> _Difference | None:
        """Counts a message of this rank; returns how the other side differs, None where it does not, or comes later."""
        with self._lock:
            self._read()
            waiting = self._theirs.get(channel)
            if not waiting:
                self.ahead[channel] = self.ahead.get(channel, 0) + 1
                return None
            number = self._neighbour.view[waiting[0] + _PAYLOAD]
            if (payload, number) not in self._agreed:
                theirs = self._neighbour.payload(number)
                what = disagreement(_payload(self._recorder, payload), theirs) if theirs and payload >= 0 else ""
                if theirs and what:
                    return self._describe(what, theirs, waiting[0])
                self._agreed.add((payload, number))
            waiting.popleft()
            return None

    def compare_collective(self, group: int, op: int, payload: int, root: int) -> _Difference | None:
        """The same for a collective."""
        with self._lock:
            self._read()
            waiting = self._theirs.get(group)
            if not waiting:
                self.ahead[group] = self.ahead.get(group, 0) + 1
                return None
            view, at = self._neighbour.view, waiting[0]
            code, theirs, what = view[at + _STATE] & 0xFFFF, self._neighbour.payload(view[at + _PAYLOAD]), ""
            if theirs is None or payload < 0:
                pass  # what cannot be described is torch's business
            elif _SAME.get(code, code) != _SAME.get(op, op):
                what = "operation"
            elif view[at + _PEER] != root:
                what = "root"
            elif op not in _UNEVEN:
                what = disagreement(_payload(self._recorder, payload), theirs)
                what = "" if what == "shape" and op != code else what
            if theirs and what:
                return self._describe(what, theirs, at)
            waiting.popleft()
            return None

    def _describe(self, what: str, theirs: Payload, at: int) -> _Difference:
        neighbour, view = self._neighbour, self._neighbour.view
        file = neighbour.entry("file", view[at + _FILE]).get("name", "")
        place = f" at {file}:{view[at + _LINE]}" if file else ""
        return _Difference(what, theirs, OP_NAMES[view[at + _STATE] & 0xFFFF], neighbour.rank, view[at + _PEER], place)

    def _read(self) -> None:
        """Reads what the other rank has posted since the last time."""
        neighbour, view, at, me = self._neighbour, self._neighbour.view, self._at, self._me
        while True:
            try:
                state = view[at + _STATE]
            except IndexError:
                if not self._extend():
                    break
                view = neighbour.view
                continue
            if state == 0:
                if view[at] != NONE:  # not written yet, rather than left empty on purpose
                    break
                at += WORDS
                continue
            kind = _KINDS[state & 0xFFFF]
            if kind <= COLLECTIVE:
                peer = view[at + _PEER]
                if kind == COLLECTIVE:
                    key: Any = self._group(view[at + _GROUP])
                    meant = key is not None
                elif peer == me or (peer == ANY_SOURCE and kind == RECV):
                    group = self._group(view[at + _GROUP])
                    key, meant = (group, view[at + _TAG], kind == RECV), group is not None
                else:
                    meant = False
                # What failed before it was waited for never reached the library.
                if meant and not (state >> 16 == ERROR and view[at + _WAIT] == NONE and view[at + _WAIT + 1] == NONE):
                    if peer == ANY_SOURCE:
                        self.ahead[key] = _NEVER
                    elif count := self.ahead.get(key):
                        self.ahead[key] = count - 1
                    else:
                        self._theirs.setdefault(key, deque()).append(at)
            at += WORDS
        self._at = at

    def _extend(self) -> bool:
        """Sees more of the other rank's records, where there are more; one that does not record is looked for ever more rarely."""
        neighbour = self._neighbour
        if len(neighbour.view):
            return neighbour.extend()
        self._tries += 1
        if self._tries & self._tries - 1:
            return False
        found = neighbour.open()
        if neighbour.elsewhere:
            self._note(neighbour.rank)
        return found

    def _group(self, number: int) -> int | None:
        if number not in self._groups:
            entry = self._neighbour.entry("group", number)
            fresh = entry.get("fresh") and self._me in entry["ranks"]
            key = (entry["name"], tuple(entry["ranks"])) if fresh else None
            self._groups[number] = None if key is None else self._numbers.setdefault(key, len(self._numbers))
        return self._groups[number]
