"""Follows what one other rank of this machine posts, and holds it against what this rank posts."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Any, Final, NamedTuple

from ringsim.traces.events import ANY_SOURCE, COLLECTIVE, ERROR, NONE, OP_CODES, OP_KINDS, OP_NAMES, RECV, Payload
from ringsim.traces.parts import COLUMNS, WORDS, Neighbour
from ringsim.traces.recorder import Recorder

__all__ = ["NEVER", "PAYLOAD", "Channel", "Difference", "Follower", "describe_payload", "disagreement"]

_STATE, _GROUP, PAYLOAD, _PEER, _TAG, _FILE, _LINE, _WAIT = (
    COLUMNS[name] for name in ("op", "group", "payload", "peer", "tag", "file", "line", "wait_ns")
)
_KINDS: Final = tuple(int(kind) for kind in OP_KINDS)
NEVER: Final = 1 << 62  # more operations than there will be: the other side's are not compared any more
_FEW: Final = 4096  # channels that are kept though nothing is open on them
# Spellings of one and the same collective, and those of which every rank may carry another size.
_SAME: Final = {
    OP_CODES["all_gather_single"]: OP_CODES["all_gather"],
    OP_CODES["all_gather_into_tensor"]: OP_CODES["all_gather"],
    OP_CODES["reduce_scatter_single"]: OP_CODES["reduce_scatter"],
    OP_CODES["reduce_scatter_tensor"]: OP_CODES["reduce_scatter"],
}
_NEW_GROUP: Final = OP_CODES["new_group"]
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


class Difference(NamedTuple):
    """What was found at the other side."""

    what: str
    theirs: Payload
    op: str
    rank: int
    root: int
    place: str


class Channel:
    """The messages of one direction between two ranks, on one group under one tag; or the collectives of a group.

    Attributes:
        follower: reads what the other rank posts.
        ahead: how many this rank has posted that the other rank will compare.
        theirs: where the records of those begin that the other rank has posted and this rank has not; None once it was forgotten.
        agreed: the payloads that were compared last, this rank's number and the other's.
    """

    __slots__ = ("agreed", "ahead", "follower", "theirs")

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.ahead = 0
        self.theirs: deque[int] | None = deque()
        self.agreed = (NONE, NONE)

    def take(self, at: int) -> None:
        """Counts an operation of the other rank."""
        if self.ahead:
            self.ahead -= 1
        elif self.theirs is not None:
            self.theirs.append(at)

    def give_up(self) -> None:
        """Compares nothing any more: which operations belong together is not known."""
        self.ahead = NEVER
        if self.theirs:
            self.theirs.clear()


class Follower:
    """Reads what another rank posts, and holds it against what this one posts.

    Each of the two compares only what the other has posted already, so of two sides at least one compares.

    Attributes:
        neighbour: the other rank's part.
        lock: whoever reads, or uses a channel, holds it.
        read: ``read()`` takes in what the other rank has posted since the last time.
    """

    def __init__(
        self, neighbour: Neighbour, recorder: Recorder, numbers: dict[tuple[str, tuple[int, ...]], int], note: Callable[[int], None]
    ) -> None:
        self.neighbour, self.lock = neighbour, Lock()
        self._recorder, self._numbers, self._note = recorder, numbers, note
        self._tries = 0
        self._groups: dict[int, int | None] = {}  # the other's number of a group: the common one; None where it is not compared
        self._channels: dict[Any, Channel] = {}  # by (common group, tag, whether this rank sends); by common group for collectives
        self._theirs: dict[tuple[int, int, int], Channel | None] = {}  # the same by (the other's group, tag, kind of its operation)
        self._many = _FEW
        self.read = self._make_read()

    def channel(self, key: Any) -> Channel:
        """Returns a channel, by (common group, tag, whether this rank sends), or by common group."""
        return self._channels.get(key) or self._channels.setdefault(key, Channel(self))

    def list_groups(self, common: int | None) -> list[int]:
        """Lists the other's numbers of a group."""
        return [number for number, known in self._groups.items() if known == common]

    def forget_idle(self) -> bool:
        """Lets go of channels on which nothing is open, where there are many; False where there are few."""
        if len(self._channels) < self._many:
            return False
        for key, channel in list(self._channels.items()):
            if not channel.ahead and not channel.theirs:
                channel.theirs = None
                del self._channels[key]
        self._theirs.clear()
        self._many = max(_FEW, 2 * len(self._channels))
        return True

    def find_difference(self, payload: int, number: int, at: int) -> Difference | None:
        """Compares this rank's payload with the other's payload ``number``, of the record at ``at``."""
        theirs = self.neighbour.payload(number)
        what = disagreement(describe_payload(self._recorder, payload), theirs) if theirs and payload >= 0 else ""
        return self._describe(what, theirs, at) if theirs and what else None

    def compare_collective(self, group: int, op: int, payload: int, root: int) -> Difference | None:
        """Counts a collective of this rank; returns how the other side differs, None where it does not, or comes later."""
        with self.lock:
            self.read()
            channel = self.channel(group)
            if not channel.theirs:
                channel.ahead += 1
                return None
            view, at = self.neighbour.view, channel.theirs[0]
            code, theirs, what = view[at + _STATE] & 0xFFFF, self.neighbour.payload(view[at + PAYLOAD]), ""
            if theirs is None or payload < 0:
                pass  # what cannot be described is torch's business
            elif _SAME.get(code, code) != _SAME.get(op, op):
                what = "operation"
            elif view[at + _PEER] != root:
                what = "root"
            elif op == _NEW_GROUP:
                what = "members" if tuple(describe_payload(self._recorder, payload).shape) != tuple(theirs.shape) else ""
            elif op not in _UNEVEN:
                what = disagreement(describe_payload(self._recorder, payload), theirs)
                what = "" if what == "shape" and op != code else what
                mine = describe_payload(self._recorder, payload).strides
                if not what and mine != theirs.strides:
                    what = "order of elements in memory"
            if theirs and what:
                return self._describe(what, theirs, at)
            channel.theirs.popleft()
            return None

    def _describe(self, what: str, theirs: Payload, at: int) -> Difference:
        neighbour, view = self.neighbour, self.neighbour.view
        file = neighbour.entry("file", view[at + _FILE]).get("name", "")
        place = f" at {os.path.basename(file)}:{view[at + _LINE]}" if file else ""
        return Difference(what, theirs, OP_NAMES[view[at + _STATE] & 0xFFFF], neighbour.rank, view[at + _PEER], place)

    def _make_read(self) -> Callable[[], None]:
        neighbour, me, channels, extend, meet = self.neighbour, self._recorder.rank, self._theirs, self._extend, self._meet_channel
        view, at = neighbour.view, 0

        def read() -> None:
            nonlocal view, at
            while True:
                try:
                    state = view[at + _STATE]
                except IndexError:
                    if not extend():
                        return
                    view = neighbour.view
                    continue
                if not state:
                    if view[at] != NONE:  # not written yet, rather than left empty on purpose
                        return
                    at += WORDS
                    continue
                kind, peer = _KINDS[state & 0xFFFF], view[at + _PEER]
                # What failed before it was waited for never reached the library.
                if (
                    kind <= COLLECTIVE
                    and (peer in (me, ANY_SOURCE) or kind == COLLECTIVE)
                    and not (state >> 16 == ERROR and view[at + _WAIT] == NONE and view[at + _WAIT + 1] == NONE)
                ):
                    key = view[at + _GROUP], view[at + _TAG], kind
                    try:
                        channel = channels[key]
                    except KeyError:
                        channel = meet(*key)
                    if channel is not None:
                        if peer == ANY_SOURCE and kind == RECV:
                            channel.give_up()
                        else:
                            channel.take(at)
                at += WORDS

        return read

    def _extend(self) -> bool:
        """Sees more of the other rank's records, where there are more; one that does not record is looked for ever more rarely."""
        neighbour = self.neighbour
        if len(neighbour.view):
            return neighbour.extend()
        self._tries += 1
        if self._tries & self._tries - 1:
            return False
        found = neighbour.open()
        if neighbour.elsewhere:
            self._note(neighbour.rank)
        return found

    def _meet_channel(self, group: int, tag: int, kind: int) -> Channel | None:
        """Finds the channel of an operation of the other rank; None where it is not compared."""
        if group not in self._groups:
            entry = self.neighbour.entry("group", group)
            fresh = entry.get("fresh") and self._recorder.rank in entry["ranks"]
            name = (entry["name"], tuple(entry["ranks"])) if fresh else None
            self._groups[group] = None if name is None else self._numbers.setdefault(name, len(self._numbers))
        number = self._groups[group]
        channel = None
        if number is not None:
            channel = self.channel(number if kind == COLLECTIVE else (number, tag, kind == RECV))
        self._theirs[group, tag, kind] = channel
        return channel


def describe_payload(recorder: Recorder, number: int) -> Payload:
    """Returns one of this rank's own payloads."""
    return recorder.payloads[number]
