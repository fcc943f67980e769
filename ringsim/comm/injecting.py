"""Injects the ``inject=`` faults into torch's operations on a real rank.

Failures are injected before the recorder, and slow links after it.

::

    program -> [raises in place of operation n] -> recorder -> [sleeps at the end of the wait] -> Gloo

So the trace does not contain the operation replaced by a failure, but it does contain messages on
slow links, with the time that they took.
"""  # noqa: E501

from __future__ import annotations

import functools
import itertools
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work

from ringsim.comm.calls import METHODS, Tensors
from ringsim.comm.numbering import name_and_ranks
from ringsim.comm.python_group import PythonGroup
from ringsim.comm.torch_hooks import find_handle_types, install, put
from ringsim.comm.torch_private import Hook, Replacements
from ringsim.faults import Injection, degraded_by, fails_at, make_failure
from ringsim.state import get_state
from ringsim.traces.events import NONE, OP_KINDS, SEND, Group
from ringsim.traces.parts import PartReader
from ringsim.traces.recorder import Recorder

_OPERATIONS = ("send", "recv", "recv_anysource", *METHODS)
_Channel = tuple[int, Group, int]  # source, group, tag


def install_with(inject: Sequence[Injection], recorder: Recorder, check: str) -> None:
    """Installs the hooks for ``recorder``, as ``torch_hooks.install`` does, and injects faults.

    The recorder must have started before the first operation of any rank, and must write to the
    same directory as the recorders of the other ranks.

    Args:
        inject: the injections of all ranks; only this rank's injections apply.
        recorder: the recorder of the events.
        check: see ``torch_hooks.install``.
    """
    factors = {src: degraded_by(inject, src, recorder.rank) for src in range(recorder.world_size)}
    slow = {src: factor for src, factor in factors.items() if factor > 1}
    behind = _SlowLinks(recorder, slow).make_replacements() if slow else {}
    originals = put(behind)
    install(recorder, check)
    hooks = recorder.hooks

    def undo() -> None:
        hooks.undo()
        put(originals)

    recorder.hooks = hooks._replace(undo=undo)
    at_op = fails_at(inject, recorder.rank)
    if at_op is not None:
        replaced = put(_make_failing(at_op, recorder))
        # the hooks themselves restore torch's own methods of ProcessGroup
        originals |= {place: call for place, call in replaced.items() if place[0] is PythonGroup}


def _make_failing(at_op: int, recorder: Recorder) -> Replacements:
    """Creates methods that raise an error in place of one operation and all later ones."""
    claim = itertools.count().__next__

    def make(call: Hook) -> Hook:
        @functools.wraps(call)
        def operation(*args: Any, **kwargs: Any) -> Any:
            if claim() >= at_op:
                raise make_failure(recorder.rank, at_op, recorder.world_size)
            return call(*args, **kwargs)

        return operation

    return {
        (owner, name): make(vars(owner)[name])
        for owner in (ProcessGroup, PythonGroup)  # groups on MPI are PythonGroups
        for name in _OPERATIONS
        if name in vars(owner)
    }


def blank_messages() -> None:
    """Makes every later message from this rank carry zeros, whatever its tensor contains.

    The effect cannot be undone, so do not use this function on ranks that are reused.
    """
    clock = get_state().clock
    if clock is not None:
        clock.current.blank = True
        return
    call: Hook = ProcessGroup.send

    @functools.wraps(call)
    def send(group: ProcessGroup, tensors: Tensors, rank: int, tag: int) -> Any:
        return call(group, [torch.zeros_like(tensor) for tensor in tensors], rank, tag)

    put({(ProcessGroup, "send"): send})


class _SlowLinks:
    """Delays messages that arrive at this rank over slow links.

    A message that would take a time t after both sides were posted takes ``factor`` * t instead.
    The arrival is observed only in the wait. If the program begins to wait late, t is the shortest
    time observed for a message of that size.

    Args:
        recorder: this rank's recorder; the records of the other ranks are read for the times at
            which they posted their sends.
        factors: the slowdown factors for messages, by source.
    """

    def __init__(self, recorder: Recorder, factors: dict[int, float]) -> None:
        self._factors, self._recorder = factors, recorder
        self._sends = {
            src: _Sends(PartReader(recorder.directory, src), recorder.rank) for src in factors
        }
        self._received: dict[_Channel, int] = {}  # the number of the last message
        # channel, number, when, bytes
        self._posted: dict[Work, tuple[_Channel, int, int, int]] = {}
        self._least_ns: dict[tuple[int, int], int] = {}  # by source and bytes

    def make_replacements(self) -> Replacements:
        """Creates the replacements for torch's methods."""
        return {
            (ProcessGroup, "recv"): self._make_recv(ProcessGroup.recv),
            **{(kind, "wait"): self._make_wait(kind.wait) for kind in find_handle_types(Work)},
        }

    def _make_recv(self, call: Hook) -> Hook:
        @functools.wraps(call)
        def recv(group: ProcessGroup, tensors: Tensors, rank: int, tag: int) -> Any:
            name, ranks = name_and_ranks(group)
            src = ranks[rank]
            if src not in self._factors:
                return call(group, tensors, rank, tag)
            channel = (src, Group(name, tuple(ranks), self._recorder.world), tag)
            posted_ns = time.monotonic_ns()
            work = call(group, tensors, rank, tag)
            place = self._received[channel] = self._received.get(channel, NONE) + 1
            self._posted[work] = (channel, place, posted_ns, tensors[0].nbytes)
            return work

        return recv

    def _make_wait(self, call: Hook) -> Hook:
        @functools.wraps(call)
        def wait(work: Work, *timeout: Any) -> Any:
            posted = self._posted.pop(work, None)
            begun_ns = time.monotonic_ns()
            result = call(work, *timeout)
            if posted is not None:
                self._hold_back(*posted, begun_ns, time.monotonic_ns())
            return result

        return wait

    def _hold_back(
        self,
        channel: _Channel,
        place: int,
        posted_ns: int,
        size_bytes: int,
        begun_ns: int,
        done_ns: int,
    ) -> None:
        """Sleeps until a message would have arrived over the slow link."""
        src = channel[0]
        ready_ns = max(posted_ns, self._sends[src].find_post_ns(channel, place))
        took_ns, key = done_ns - max(ready_ns, begun_ns), (src, size_bytes)
        if begun_ns <= ready_ns:
            self._least_ns[key] = min(took_ns, self._least_ns.get(key, took_ns))
        else:
            took_ns = self._least_ns.get(key, took_ns)
        time.sleep(max(0.0, ready_ns + self._factors[src] * took_ns - done_ns) * 1e-9)


@dataclass
class _Sends:
    """The times at which another rank posted its sends to this rank, read from that rank's records.

    Args:
        part: the records of the other rank.
        me: this rank.
    """

    part: PartReader
    me: int
    # slot and post_ns, ascending
    _posts: dict[_Channel, list[tuple[int, int]]] = field(default_factory=dict)

    def find_post_ns(self, channel: _Channel, place: int) -> int:
        """Returns the post time of send number ``place`` on a channel; the send must have arrived.

        The time is 0 if the send cannot be found.
        """
        part, batch = self.part, self.part.advance()
        mine = (OP_KINDS[batch.records["op"]] == SEND) & (batch.records["peer"] == self.me)
        for slot, record in zip(batch.slots[mine].tolist(), batch.records[mine], strict=True):
            group = part.names["group"].get(int(record["group"]))
            if group is not None:
                posts = self._posts.setdefault((part.rank, group, int(record["tag"])), [])
                send = slot, int(record["post_ns"])
                at = bisect_left(posts, send)
                if posts[at : at + 1] != [send]:  # a record is read again when it is done
                    posts.insert(at, send)
        posts = self._posts.get(channel, [])
        return posts[place][1] if place < len(posts) else 0
