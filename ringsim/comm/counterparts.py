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

from collections.abc import Callable, Sequence
from typing import Any

from ringsim.comm.follower import PAYLOAD, Channel, Difference, Follower, describe_payload
from ringsim.comm.recount import count_operations, was_refused
from ringsim.errors import MessageMismatch, RendezvousFailed
from ringsim.traces.events import COLLECTIVE, NONE, OP_CODES, OP_NAMES, RECV, SEND, Payload
from ringsim.traces.parts import Neighbour
from ringsim.traces.recorder import Recorder

__all__ = ["Counterparts"]


class Counterparts:
    """Follows what the other ranks of this machine post.

    Args:
        recorder: writes this rank's own records, beside theirs.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._numbers: dict[tuple[str, tuple[int, ...]], int] = {}  # of groups, the same for all ranks' own numbers
        self._groups: dict[int, int] = {}  # this rank's number of a group: the one in _numbers
        self._followers: dict[int, Follower] = {}
        self._partners: dict[int, list[int]] = {}  # by this rank's number of a group: whom its collectives are compared with
        self._from_any: set[tuple[int, int]] = set()  # (group, tag) of recvs from anybody
        # By whether this rank sends, then by group, other rank and tag; None where nothing is compared.
        self._known: dict[bool, dict[tuple[int, int, Any], Channel | None]] = {True: {}, False: {}}
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
        if (group, tag) not in self._from_any:
            self._from_any.add((group, tag))
            self._known[False].clear()

    def make_compare(self, sends: bool) -> Callable[[int, int, Any, int], None]:
        """Makes the function ``compare(group, peer, tag, payload)`` for sends, or for recvs; it raises where the other side disagrees."""
        known, meet, is_sure, complain = self._known[sends], self._meet_channel, self._is_sure, self._complain

        def compare(group: int, peer: int, tag: Any, payload: int) -> None:
            while True:
                try:
                    channel = known[group, peer, tag]
                except KeyError:
                    channel = meet(group, peer, tag, sends)
                if channel is None:
                    return
                follower = channel.follower
                with follower.lock:
                    follower.read()
                    theirs = channel.theirs
                    if not theirs:
                        if theirs is None:
                            continue  # forgotten between the two looks, by another thread
                        channel.ahead += 1
                        return
                    number = follower.neighbour.view[theirs[0] + PAYLOAD]
                    if channel.agreed != (payload, number):
                        difference = follower.find_difference(payload, number, theirs[0])
                        if difference is not None:
                            if is_sure(channel, group, SEND if sends else RECV, peer, tag):
                                complain(difference, sends, group, peer, tag, payload)
                            continue
                        channel.agreed = payload, number
                    theirs.popleft()
                    return

        return compare

    def _meet_channel(self, group: int, peer: int, tag: Any, sends: bool) -> Channel | None:
        """Finds a channel at its first message, or its first in a while; None where its messages are not compared."""
        number = self._groups.get(group)
        channel = None
        if number is not None and (sends or (group, tag) not in self._from_any):
            follower = self._followers.get(peer) or self._follow(peer)
            with follower.lock:
                if follower.forget_idle():  # a program may use a new tag for every message
                    self._known[True].clear()
                    self._known[False].clear()
                channel = follower.channel((number, tag, sends))
        self._known[sends][group, peer, tag] = channel
        return channel

    def forget(self, group: int, peer: int, tag: Any, sends: bool) -> None:
        """Compares nothing on a channel any more, for the library refused what was compared: the counts differ from now on."""
        channel = self._known[sends].get((group, peer, tag))
        if channel is not None:
            channel.give_up()

    def compare_collective(self, group: int, op: int, payload: int, root: int) -> None:
        """Compares a collective with those of the ranks around this one in the group.

        Args:
            group: this rank's number of the group.
            op: code of the operation.
            payload: this rank's number of what it carries.
            root: global rank of the root, NONE for none.

        Raises:
            MessageMismatch: another rank has posted another collective in its place.
            RendezvousFailed: another rank makes another group in its place.
        """
        number = self._groups.get(group)
        if number is None:
            return
        for peer in self._partners[group]:
            follower = self._followers.get(peer) or self._follow(peer)
            while (difference := follower.compare_collective(number, op, payload, root)) is not None:
                with follower.lock:
                    sure = self._is_sure(follower.channel(number), group, COLLECTIVE, None, None)
                if sure:
                    self._complain_collective(difference, group, op, payload, root)

    def _is_sure(self, channel: Channel, group: int, kind: int, peer: int | None, tag: Any) -> bool:
        """Tells whether the next operation of the other rank on a channel is this rank's last one; where it is not, mends the channel."""
        if not channel.theirs:
            return False
        follower, common = channel.follower, self._groups[group]
        if was_refused(follower.neighbour, channel.theirs[0], kind):
            channel.theirs.popleft()
            return False
        me = Neighbour(self._recorder.directory, self._recorder.rank)
        my_groups = [number for number, known in self._groups.items() if known == common]
        other_kind = {SEND: RECV, RECV: SEND, COLLECTIVE: COLLECTIVE}[kind]
        from_peer = None if peer is None else me.rank
        same = me.open() and count_operations(me, my_groups, kind, peer, tag) == count_operations(
            follower.neighbour, follower.list_groups(common), other_kind, from_peer, tag, channel.theirs[0]
        )
        if not same:
            channel.give_up()
        return same

    def _follow(self, peer: int) -> Follower:
        neighbour = Neighbour(self._recorder.directory, peer)
        follower = self._followers[peer] = Follower(neighbour, self._recorder, self._numbers, self._note_elsewhere)
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

    def _complain(self, found: Difference, sends: bool, group: int, peer: int, tag: Any, payload: int) -> None:
        recorder = self._recorder
        mine = describe_payload(recorder, payload)
        where = f"rank {recorder.rank} of {recorder.world_size}, {'send to' if sends else 'recv from'} {peer}, tag {tag}"
        where += f", group {recorder.groups[group].name}"
        message = (
            f"the two sides of a message must agree on its {found.what}, got {self._describe(mine)} here and "
            f"{self._describe(found.theirs)} in rank {found.rank}'s {found.op}{found.place} ({where}). "
            "Make both tensors alike, or send them in the order in which they are received."
        )
        recorder.notice("message_mismatch", message, group, peer, tag, payload)
        raise MessageMismatch(message)

    def _complain_collective(self, found: Difference, group: int, op: int, payload: int, root: int) -> None:
        recorder = self._recorder
        mine = describe_payload(recorder, payload)
        if op == OP_CODES["new_group"]:
            message = (
                f"all ranks must make the same groups in the same order, got {list(mine.shape)} here and {list(found.theirs.shape)} in "
                f"rank {found.rank}'s new_group{found.place} (rank {recorder.rank} of {recorder.world_size}). "
                "Call new_group for every group on every rank, in one order, also for groups that the rank is not in."
            )
            recorder.notice("group_order_mismatch", message, group, NONE, NONE, payload)
            raise RendezvousFailed(message)
        if found.what == "operation":
            words = f"{OP_NAMES[op]} here and {found.op}"
        elif found.what == "root":
            words = f"root {root} here and root {found.root}"
        else:
            words = f"{self._describe(mine)} here and {self._describe(found.theirs)}"
        message = (
            f"all ranks of a group must call the same collectives in the same order, with one {found.what}, got {words} in rank "
            f"{found.rank}'s {found.op}{found.place} (rank {recorder.rank} of {recorder.world_size}, {OP_NAMES[op]}, "
            f"group {recorder.groups[group].name}). Make the calls alike."
        )
        recorder.notice("collective_mismatch", message, group, root, NONE, payload)
        raise MessageMismatch(message)
