"""Injects what ``inject=`` asks for into the operations of torch on a real rank: failures in front of the recorder, slow links behind it.

::

    program -> [raises in place of operation n] -> recorder -> [sleeps at the end of the wait] -> Gloo

So an operation in whose place the rank fails is not in the trace, and a message on a slow link is there with the time that it was slow.
"""

from __future__ import annotations

import functools
import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.distributed import ProcessGroup, Work

from ringsim.comm.collectives import METHODS
from ringsim.comm.torch_hooks import find_handle_types, install, name_and_ranks
from ringsim.faults import Injection, degraded_by, fails_at, make_failure
from ringsim.traces.events import NONE, OP_KINDS, SEND
from ringsim.traces.parts import PartReader
from ringsim.traces.recorder import Recorder

__all__ = ["install_with"]

_OPERATIONS: Final = ("send", "recv", "recv_anysource", *METHODS)
_Channel = tuple[int, str, tuple[int, ...], int]  # source, name and ranks of the group, tag


def install_with(inject: Sequence[Injection], recorder: Recorder, check: str) -> None:
    """Shows this process's operations to ``recorder``, as ``torch_hooks.install`` does, with injections.

    The recorder must have recorded from before the first operation of any rank, and beside those of the other ranks.

    Args:
        inject: of all ranks; those of this one count.
        recorder: writes the events.
        check: see ``torch_hooks.install``.
    """
    sources = {src: degraded_by(inject, src, recorder.rank) for src in range(recorder.world_size)}
    slow = {src: factor for src, factor in sources.items() if factor > 1}
    behind = _SlowLinks(recorder, slow).make_replacements() if slow else {}
    originals = {place: vars(place[0])[place[1]] for place in behind}
    _put(behind)
    install(recorder, check)
    undo_hooks = recorder.undo_hooks

    def undo() -> None:
        undo_hooks()
        _put(originals)

    recorder.undo_hooks = undo
    at_op = fails_at(inject, recorder.rank)
    if at_op is not None:
        _put(_make_failing(at_op, recorder))  # taken back by the hooks, which put torch's own into the same places


def _put(methods: dict[tuple[Any, str], Callable[..., Any]]) -> None:
    for (owner, name), method in methods.items():
        setattr(owner, name, method)


def _make_failing(at_op: int, recorder: Recorder) -> dict[tuple[Any, str], Callable[..., Any]]:
    """Makes methods that raise in place of one operation, and those after it."""
    claim = itertools.count().__next__

    def make(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def operation(*args: Any, **kwargs: Any) -> Any:
            if claim() >= at_op:
                raise make_failure(recorder.rank, at_op, recorder.world_size)
            return call(*args, **kwargs)

        return operation

    return {(ProcessGroup, name): make(vars(ProcessGroup)[name]) for name in _OPERATIONS if name in vars(ProcessGroup)}


class _SlowLinks:
    """Makes the messages that come to this rank over some links late.

    A message takes from when both sides are posted until it is there. A program that begins to wait later does not see when it came: then
    the least time counts that a message of this size took before, or else what the wait took.

    Args:
        recorder: of this rank.
        factors: by source, how many times as long its messages take.
    """

    def __init__(self, recorder: Recorder, factors: dict[int, float]) -> None:
        self._factors = factors
        self._sends = {src: _Sends(PartReader(recorder.directory, src), recorder.rank) for src in factors}
        self._received: dict[_Channel, int] = {}  # how many recvs were posted
        self._posted: dict[Work, tuple[_Channel, int, int, int]] = {}  # the channel, the place in it, when, how many bytes
        self._least_ns: dict[tuple[int, int], int] = {}  # by source and size

    def make_replacements(self) -> dict[tuple[Any, str], Callable[..., Any]]:
        """Makes what comes in the place of torch's methods."""
        waits: dict[tuple[Any, str], Callable[..., Any]] = {(kind, "wait"): self._make_wait(kind.wait) for kind in find_handle_types(Work)}
        return {**waits, (ProcessGroup, "recv"): self._make_recv(ProcessGroup.recv)}

    def _make_recv(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def recv(group: ProcessGroup, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
            name, ranks = name_and_ranks(group)
            src = ranks[rank]
            if src not in self._factors:
                return call(group, tensors, rank, tag)
            channel = (src, name, tuple(ranks), tag)
            posted_ns = time.monotonic_ns()
            work = call(group, tensors, rank, tag)
            place = self._received[channel] = self._received.get(channel, NONE) + 1
            self._posted[work] = channel, place, posted_ns, tensors[0].numel() * tensors[0].element_size()
            return work

        return recv

    def _make_wait(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wait(work: Work, *timeout: Any) -> Any:
            posted = self._posted.pop(work, None)
            begun_ns = time.monotonic_ns()
            result = call(work, *timeout)
            if posted is not None:
                self._hold_back(*posted, begun_ns, time.monotonic_ns())
            return result

        return wait

    def _hold_back(self, channel: _Channel, place: int, posted_ns: int, size_bytes: int, begun_ns: int, done_ns: int) -> None:
        """Sleeps until a message would have come over the slow link."""
        src = channel[0]
        ready_ns = max(posted_ns, self._sends[src].find_post_ns(channel, place))
        took_ns, key = done_ns - max(ready_ns, begun_ns), (src, size_bytes)
        if begun_ns <= ready_ns:
            self._least_ns[key] = min(took_ns, self._least_ns.get(key, took_ns))
        else:
            took_ns = self._least_ns.get(key, took_ns)
        time.sleep(max(0.0, ready_ns + self._factors[src] * took_ns - done_ns) * 1e-9)


class _Sends:
    """When another rank posted its sends to this one, read from what it records.

    Args:
        part: the other rank's.
        me: this rank.
    """

    def __init__(self, part: PartReader, me: int) -> None:
        self._part = part
        self._me = me
        self._posts: dict[_Channel, list[tuple[int, int]]] = {}  # slot and post_ns, ascending

    def find_post_ns(self, channel: _Channel, place: int) -> int:
        """Returns when the send number ``place`` of a channel was posted, which has arrived; 0 where it cannot be found."""
        self._read()
        posts = self._posts.get(channel, [])
        return posts[place][1] if place < len(posts) else 0

    def _read(self) -> None:
        """Takes in what was posted since the last time."""
        batch = self._part.advance()
        mine = (OP_KINDS[batch.records["op"]] == SEND) & (batch.records["peer"] == self._me)
        for slot, record in zip(batch.slots[mine].tolist(), batch.records[mine], strict=True):
            group = self._part.names["group"].get(int(record["group"]))
            if group is None:
                continue
            posts = self._posts.setdefault((self._part.rank, group.name, group.ranks, int(record["tag"])), [])
            send = slot, int(record["post_ns"])
            place = bisect_left(posts, send)
            if posts[place : place + 1] != [send]:  # it comes again when it is done
                posts.insert(place, send)
