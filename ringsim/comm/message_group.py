"""The base class for backends in Python, which need only send and receive messages.

A subclass defines the two methods ``isend`` and ``irecv``. Collectives are built from messages,
unless the subclass also defines ``start``. Operations are recorded here, when they are posted,
because patching the class ``ProcessGroup`` does not affect subclasses written in Python.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from ringsim.comm.building import FALLBACK_TAG, build, warn_once
from ringsim.comm.calls import (
    READINGS,
    Call,
    Members,
    Tensors,
    describe,
    name_of_reduction,
    read_call,
)
from ringsim.comm.handles import Handle
from ringsim.comm.numbering import COLLECTIVE_NAMES, RECV_NAMES, SEND_NAMES, name_and_ranks
from ringsim.comm.python_group import PythonGroup
from ringsim.errors import ArgumentError, RunTimeout, name_ranks
from ringsim.state import get_state
from ringsim.traces.events import ANY_SOURCE, ERROR, NONE, OP_CODES
from ringsim.traces.recorder import Post, Recorder

Begun = tuple[Recorder, int] | None  # the recorder of an operation, and its slot


class MessageGroup(PythonGroup):
    """A process group that builds all other operations from messages between its ranks.

    Register a function that creates your group with ``torch.distributed.Backend.register_backend``.
    The constructor takes the arguments of ``PythonGroup``.

    Example:
        A group of one rank, which needs no messages:

        >>> class Alone(MessageGroup):
        ...     def isend(self, tensor, dst, tag):
        ...         raise ValueError("there is no other rank")
        ...
        ...     def irecv(self, tensor, src, tag):
        ...         raise ValueError("there is no other rank")
        >>> Alone(0, 1, backend_name="alone").size()
        1
    """

    _members: Members | None = None
    _recorder: Recorder | None = None
    _posts: dict[str, Post] = {}  # noqa: RUF012 - replaced whole with each recorder

    # -- methods of a backend

    @abstractmethod
    def isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        """Begins to send a tensor, which need not be contiguous; does not block.

        Args:
            tensor: the tensor to send, of any shape; it does not change until the handle is
                complete.
            dst: the receiver's rank in the group.
            tag: the tag, which matches the receiver's.

        Returns:
            A handle.
        """

    @abstractmethod
    def irecv(self, tensor: Tensor, src: int | None, tag: int) -> Work:
        """Begins to receive into a tensor, which need not be contiguous; does not block.

        Messages with the same source and tag must arrive in the order in which they were sent.

        Args:
            tensor: the tensor to receive into, as large as the sent tensor; it must be filled when
                the handle's ``wait`` returns.
            src: the sender's rank in the group, or None for any rank.
            tag: the tag, which must match the sender's.

        Returns:
            A handle, whose method ``_source_rank`` returns the sender's rank in the group.
        """

    def check_tensor(self, what: str, tensor: Any) -> Tensor:
        """Returns a tensor that the backend supports, or raises an error.

        Args:
            what: the name of the argument.
            tensor: the argument.
        """
        detached: Tensor = tensor.detach()
        return detached

    def start(self, call: Call) -> Work:
        """Begins a collective; the default implementation builds it from messages.

        Args:
            call: the checked call, with the tensors that this rank gives and gets.
        """
        warn_once(call.name, self.name())
        return build(self, call)

    # -- operations based on these methods

    @property
    def members(self) -> Members:
        """The ranks of the group."""
        if self._members is None:
            name, ranks = name_and_ranks(self)
            self._members = Members(ranks, self.rank(), name, self.check_tensor)
        return self._members

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self._members = None

    def begin_message(self, sends: bool, place: int | None, tensors: Any, tag: int) -> Work:
        """Begins a send or a recv, and records it."""
        members = self.members
        tensor = members.check("tensor", tensors[0])
        if place is not None and not 0 <= place < self.size():
            what = "dst" if sends else "src"
            raise ArgumentError(
                f"{what} must be a rank of the group, from 0 to {self.size() - 1}, got {place} "
                f"({members.here()}). Count ranks from 0."
            )
        peer = ANY_SOURCE if place is None else members.ranks[place]
        begun = self._post("isend" if sends else "irecv", members, peer, tag, [tensor])

        def begin() -> Work:
            return self.isend(tensor, place or 0, tag) if sends else self.irecv(tensor, place, tag)

        return _begin(begin, begun, [tensor], () if sends else members.ranks)

    def begin_collective(
        self, name: str, arguments: Mapping[str, Any], carried: Sequence[Tensor] | None = None
    ) -> Work:
        """Begins a collective, and records the collective or the messages that it is built from."""
        members = self.members
        call = read_call(name, READINGS[name].bind((), arguments), members)
        if type(self).start is MessageGroup.start:
            return self.start(call)
        peer = NONE if call.root == NONE else members.ranks[call.root]
        how = "" if call.op is None else name_of_reduction(call.op)
        tensors = carried or call.carried
        begun = self._post(call.recorded_name, members, peer, NONE, tensors, call.copies, how)
        return _begin(lambda: self.start(call), begun, call.results)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Blocks until every rank in the group has called this method.

        Each rank reports to the first rank, which answers all ranks.

        Args:
            timeout: the limit, a timedelta or seconds, or None for the group's limit.
            wait_all_ranks: whether the first rank names all missing ranks, instead of only one.

        Raises:
            RunTimeout: a rank did not call the method in time.
        """
        limit_s = to_seconds(timeout or self.timeout)
        begun = self._post("monitored_barrier", self.members, NONE, NONE, [])
        meeting = Handle((), lambda: self._meet(limit_s, wait_all_ranks))
        _begin(lambda: meeting, begun, ()).wait()

    def _meet(self, limit_s: float, wait_all_ranks: bool) -> None:
        """Raises RunTimeout if a rank does not arrive in time."""
        if missing := self._find_missing(limit_s, wait_all_ranks):
            raise RunTimeout(
                f"monitored_barrier timed out after {limit_s:g} s while waiting for "
                f"{name_ranks([*missing])} ({self.members.here()}). Check what each missing "
                "rank was doing."
            ) from next(iter(missing.values()))

    def _find_missing(self, limit_s: float, wait_all_ranks: bool) -> dict[int, Exception]:
        """Returns the global ranks that did not arrive in time, with the corresponding errors.

        The first rank waits for all others, and the others wait for the first.
        """
        deadline_s, others = time.monotonic() + limit_s, range(1, self.size())

        def word(begin: Callable[[Tensor, int, int], Work], place: int) -> tuple[int, Work]:
            return place, begin(torch.zeros(1, dtype=torch.int32), place, FALLBACK_TAG)

        if self.rank() == 0:
            words = [word(self.irecv, place) for place in others]
        else:
            words = [word(self.isend, 0), word(self.irecv, 0)]
        missing: dict[int, Exception] = {}
        for place, work in words:
            try:
                work.wait(timedelta(seconds=max(deadline_s - time.monotonic(), 0.001)))
            except (RuntimeError, OSError) as error:
                missing[self.members.ranks[place]] = error
                if not wait_all_ranks:
                    break
        if self.rank() == 0 and not missing:
            for _, work in [word(self.isend, place) for place in others]:
                work.wait()
        return missing

    # -- the record

    def about(self) -> dict[str, str]:
        """Returns metadata for traces that contain this group's operations."""
        return {}

    def _post(
        self,
        name: str,
        members: Members,
        peer: int,
        tag: int,
        tensors: Tensors,
        copies: int = 1,
        how: str = "",
    ) -> Begun:
        """Records the start of an operation; returns None if no recording is active."""
        recorder = get_state().recorder
        if recorder is None:
            return None
        if recorder is not self._recorder:
            self._recorder, self._posts = recorder, {}
            for key, value in self.about().items():
                recorder.set_meta(key, value)
        post = self._posts.get(name)
        if post is None:
            spoken = {"isend": SEND_NAMES, "irecv": RECV_NAMES}.get(name, COLLECTIVE_NAMES)
            post = self._posts[name] = recorder.make_post(OP_CODES[name], spoken)
        payload = recorder.payload(*describe(tensors, copies), reduction=how)
        slot = post(recorder.group(members.group_name, members.ranks), peer, tag, payload)
        return None if slot is None else (recorder, slot)


def _begin(
    begin: Callable[[], Work], begun: Begun, results: Tensors, ranks: Sequence[int] = ()
) -> Handle:
    """Begins an operation, and completes its record when the operation ends."""
    try:
        work = begin()
    except BaseException:
        if begun is not None:
            recorder, slot = begun
            recorder.complete(slot, ERROR)
        raise
    handle = work if isinstance(work, Handle) else Handle([work], results=results)
    if begun is not None:
        handle.record(*begun, ranks)
    return handle


def to_seconds(timeout: timedelta | float) -> float:
    """Returns a timeout in seconds."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
