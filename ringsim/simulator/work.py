"""Defines the handles, groups and tensors of operations that simulated ranks post.

A rank that waits for an operation gives way to the other ranks until the operation is done.
`ringsim.simulator.point_to_point` completes messages, and `ringsim.simulator.collective_ops`
completes collectives.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import Work

from ringsim.comm.calls import Members, check_dense
from ringsim.comm.torch_private import in_backward, outside_modes, run_after_backward
from ringsim.errors import ArgumentError, RunTimeout
from ringsim.simulator.clock import Clock, Rank
from ringsim.traces.events import ERROR, NONE, OK, OP_NAMES, Payload
from ringsim.traces.recorder import Recorder

NEVER = math.inf


class Team(Members):
    """The ranks of a process group, as one object that they all share.

    Attributes:
        group_name: the name in the trace, such as "world", "ring:2>3" or "1".
        limit: the timeout of each operation, if the program set one.
        meetings: the state that ``ringsim.simulator.collective_ops`` keeps for the group.
    """

    ranks: tuple[int, ...]

    def __init__(self, clock: Clock, name: str, ranks: tuple[int, ...], number: int) -> None:
        self.clock = clock
        self.group_name = name
        self.ranks = ranks
        self.number = number
        self.places = {rank: place for place, rank in enumerate(ranks)}
        self.limit: timedelta | None = None
        self.meetings: Any = None

    def rank(self) -> int:
        """Returns the calling rank's position in the group, or -1 if the rank is not a member."""
        return self.places.get(self.clock.current.number, -1)

    def check(self, what: str, tensor: Any) -> torch.Tensor:
        """Checks that the simulator can carry a tensor, and returns it detached from its graph."""
        return check_dense(what, tensor, "in a simulation", meta=True)


# -- tensors


class PayloadKind(NamedTuple):
    """The payload shared by operations on tensors of one dtype and shape.

    Attributes:
        number: the number of the payload in the trace.
        payload: the description of the payload in the trace.
        size_bytes: the size of the payload.
    """

    number: int
    payload: Payload
    size_bytes: int


RESIZE = "Resize it after wait()"


def check_storage(tensor: torch.Tensor) -> int:
    """Checks that a tensor's storage still holds all of its bytes, and returns their number.

    Otherwise torch would read and write beyond the end of the storage.
    """
    if lost := find_lost_memory(tensor):
        raise ArgumentError(f"{lost}. {RESIZE}.")
    return tensor.nbytes


def find_lost_memory(tensor: torch.Tensor) -> str:
    """Says that a tensor's storage is too small, or returns "" if it is not."""
    needed: Any = tensor.nbytes
    try:
        there = tensor.untyped_storage().nbytes()
    except NotImplementedError:
        # a subclass without its own memory, which defines its own way of copying
        return ""
    if not tensor.is_contiguous():
        last = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        needed = (last + 1) * tensor.itemsize
    if offset := tensor.storage_offset():
        needed += offset * tensor.itemsize
    if needed <= there or not tensor.nbytes:
        return ""
    return (
        "a tensor lost its memory before its operation finished: its storage has "
        f"{there:,} bytes, but the tensor needs {needed:,}"
    )


def copy_tensor(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a tensor into another with as many elements. Both may be without data.

    The calling rank's torch modes have no effect.
    """
    with outside_modes():
        if source.is_meta or target.is_meta:
            if source.is_meta and target.is_meta:
                return
            raise ArgumentError(
                "only one side of the message has data: the sender's tensor is on "
                f"{source.device}, the receiver's on {target.device}. "
                "Create both tensors on the same device."
            )
        size_bytes, room = check_storage(source), check_storage(target)
        if size_bytes != room:
            raise ArgumentError(
                "a tensor changed its size before its operation finished: the sender's has "
                f"{size_bytes:,} bytes, the receiver's {room:,}. "
                "Resize it after wait()."
            )
        if source.requires_grad or target.requires_grad:
            source, target = source.detach(), target.detach()
        try:
            target.copy_(source)
        except RuntimeError:
            # shapes differ, or the target is an inference tensor, which is writable only in
            # inference mode
            with torch.inference_mode():
                target.copy_(source.reshape(target.shape))


def describe_payload(payload: Payload) -> str:
    """Returns a description of a payload in words."""
    words = (
        f"{payload.dtype}{list(payload.shape)} ({payload.size_bytes:,} bytes)"
        if payload.dtype
        else "nothing"
    )
    return f"{words}, {payload.reduction}" if payload.reduction else words


class SimulatedWork(Work):
    """The handle of a posted operation, which ``isend`` and collectives return.

    Attributes:
        slots: the slots of the operation's record, and of other records that its wait completes;
            empty if the record is complete or if the operation is not recorded.
        done_s: the time at which the operation is done, or ``NEVER`` if unknown.
        waiting: whether to wake the rank at that time.
        awaited: whether the rank has started to wait, so that the record contains the time of the
            wait.
        error: the error that the wait raises, or None.
        peer: the global rank of the other side, or of the root; negative if there is none.
        tag: the tag of a message, or -1 if there is none.
        channel: the channel of a message, or None for other operations.
    """

    # these stay class attributes until they change, because most operations never change them
    peer = tag = NONE
    done_s, waiting, awaited = NEVER, False, False
    error: Exception | None = None
    future: Any = None
    channel: Any = None

    def __init__(
        self, op: int, rank: Rank, slots: tuple[int, ...], group: Team, kind: PayloadKind
    ) -> None:
        super().__init__()
        self.op, self.rank, self.slots, self.group, self.kind = op, rank, slots, group, kind

    def wait(self, timeout: Any = None) -> bool:
        """Blocks until the operation is done, and returns True.

        The wait takes at most ``timeout`` (in seconds, or as a ``timedelta``) of virtual time.

        Raises:
            RunTimeout: the operation timed out. If it is a message, its two ranks lose their
                connection in the group, as on Gloo.
        """
        clock = self.rank.clock
        if clock.measures:
            clock.pay()
        if self.done_s <= clock.now and self.error is None:
            self._close_done()
            if self.future is not None:
                self._fulfil()
            return True
        self.awaited = True
        for slot in self.slots:
            self.rank.recorder.wait(slot)
        if self.done_s > clock.now:
            self._block(timeout or self.group.limit)
        self.close_record(OK if self.error is None else ERROR)
        if self.future is not None:
            self._fulfil()
        if self.error is not None:
            raise self.error
        return True

    synchronize = block_current_stream = wait  # type: ignore[assignment]

    def _block(self, timeout: Any) -> None:
        clock = self.rank.clock
        limit_s = (
            NEVER
            if timeout is None or clock.halt_poll is not None  # the order takes no time
            else timeout.total_seconds()
            if isinstance(timeout, timedelta)
            else float(timeout)
        )
        end_s = clock.now + limit_s
        try:
            while self.done_s > clock.now:
                if self.done_s <= end_s and self.done_s < NEVER:
                    clock.sleep_until(self.done_s)
                    continue
                if clock.now >= end_s:
                    break
                self.waiting = True
                if end_s < NEVER:
                    clock.at(end_s, self.rank)
                try:
                    clock.pause()
                finally:
                    clock.cancel(end_s, self.rank)
        except BaseException as error:
            self.close_record(ERROR)
            broken = error
        else:
            if self.done_s <= clock.now:
                return
            self.waiting = False
            self.close_record(ERROR)
            if self.channel is not None:  # as Gloo does
                self.channel.connection.is_open = False
            raise RunTimeout(
                f"the operation did not finish within {limit_s:g} s of virtual time "
                f"(rank {self.rank.number}, "
                f"{self.describe()}). Raise the limit, or look for the missing operation."
            )
        # outside `except`, so that the context of an injected error is the error that the program
        # is already handling
        raise broken

    def describe(self) -> str:
        """Returns a description of the operation in words."""
        return f'{OP_NAMES[self.op]} of group "{self.group.group_name}"'

    def complete(self, time_s: float) -> None:
        """Sets the time at which the operation is done, and wakes a waiting rank then."""
        self.done_s = time_s
        if self.future is not None:
            self.rank.clock.at(time_s, self._bring_future)
        if self.waiting:
            self.waiting = False
            self.rank.clock.at(time_s, self.rank)

    def is_completed(self) -> bool:
        """Returns whether the operation is done, and if so, records this.

        If the operation is not done, the other ranks run for a moment.
        """
        clock = self.rank.clock
        if self.done_s > clock.now or clock.halt_poll is not None:
            clock.poll(self)
        if self.done_s > clock.now:
            return False
        if self.error is None:  # an error is left for the wait to raise
            self._close_done()
        return True

    def is_success(self) -> bool:
        """Returns whether the operation has finished without an error."""
        return self.done_s <= self.rank.clock.now and self.error is None

    def exception(self) -> Exception | None:
        """Returns the operation's error, or None."""
        return self.error

    def result(self) -> list[torch.Tensor]:
        """Waits for the result, and returns the tensors that hold it."""
        self.wait()
        return self._results()

    # -- its future

    def get_future(self) -> Any:
        """Returns a future for the result, which the rank's own thread completes.

        At the end of a backward pass, C++ waits for the futures of gradients, and no rank can give
        way there. The rank therefore waits a moment earlier, in its own callback.
        """
        if self.future is None:
            self.future = torch.futures.Future()
            self.future.operation = self
            if self.done_s <= self.rank.clock.now:
                self._fulfil()
            elif self.done_s < NEVER:
                self.rank.clock.at(self.done_s, self._bring_future)
            if not self.future.done() and in_backward():
                run_after_backward(self._wait_for_future)
        return self.future

    def _wait_for_future(self) -> None:
        """Waits for the operation, and closes the future after an error, so that C++ can return."""
        try:
            self.wait()
        except BaseException as error:
            if not self.future.done():
                self.future.set_exception(RuntimeError(str(error)))
            raise

    def _bring_future(self) -> None:
        """Has the rank's own thread complete the future, so that callbacks run there."""
        self.rank.errands.append(self._fulfil)
        self.rank.clock.at(self.rank.clock.now, self.rank)

    def _fulfil(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
            return
        if self.awaited:
            self.close_record(OK)
        else:
            self._close_done()
        self.future.set_result(self._results())

    def _results(self) -> list[torch.Tensor]:
        return []

    # -- its record

    def _close_done(self) -> None:
        """Records that the operation was already done when its rank waited for it."""
        slots, self.slots = self.slots, ()
        for slot in slots:
            self.rank.recorder.complete_at_once(slot)

    def close_record(self, status: int) -> None:
        """Records, only once, that the operation is done or has failed."""
        slots, self.slots = self.slots, ()
        for slot in slots:
            self.rank.recorder.complete(slot, status)

    def complete_record(self, recorder: Recorder, slot: int) -> bool:
        """Makes the wait for this operation complete one more record.

        The result is False if the program has already waited for the operation.
        """
        if not self.slots or recorder is not self.rank.recorder:
            return False
        self.slots += (slot,)
        return True

    def refuse(self, kind: str, message: str) -> None:
        """Records that the operation is invalid and was refused."""
        if self.slots:
            self.rank.recorder.complete(self.slots[0], ERROR)
            self.rank.recorder.notice(
                kind, message, self.group.number, self.peer, self.tag, self.kind.number
            )

    def place_of_call(self) -> str:
        """Returns the line that posted the operation, such as " at ring.py:7", or "" if unknown."""
        return self.rank.recorder.place_of(self.slots[0]) if self.slots else ""
