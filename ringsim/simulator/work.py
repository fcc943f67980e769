"""The handle of an operation posted by a simulated rank, its group, and its tensors.

A rank that waits for an operation gives way to the others until the operation is done.
`ringsim.simulator.point_to_point` completes messages, and
`ringsim.simulator.collective_ops` completes collectives.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
from torch.distributed import Work

from ringsim.comm.calls import Members, check_dense
from ringsim.comm.torch_private import in_backward, outside_modes, run_after_backward
from ringsim.errors import ArgumentError, RunTimeout, name_ranks
from ringsim.simulator.clock import Clock, Rank
from ringsim.traces.events import ERROR, NONE, OK, Payload
from ringsim.traces.recorder import Recorder

__all__ = [
    "NEVER",
    "Kind",
    "SimulatedWork",
    "Team",
    "check_storage",
    "copy_tensor",
    "describe_payload",
]

NEVER: Final = math.inf


class Team(Members):
    """The ranks of a process group, as one object that they all share.

    Attributes:
        group_name: the name in the trace: "world", "ring:2>3", "1".
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

    def __repr__(self) -> str:
        return f'Team("{self.group_name}", {name_ranks(self.ranks)})'

    def rank(self) -> int:
        """Returns the calling rank's place in the group, or -1 outside it."""
        return self.places.get(self.clock.current.number, -1)

    def check(self, what: str, tensor: Any) -> torch.Tensor:
        """Returns a tensor that the simulator can carry, detached from its graph."""
        return check_dense(what, tensor, "in a simulation", meta=True)


# -- tensors


class Kind(NamedTuple):
    """The payload shared by operations on tensors of one dtype and shape.

    Attributes:
        number: its number in the trace.
        payload: its description in the trace.
        size_bytes: its size.
    """

    number: int
    payload: Payload
    size_bytes: int


def check_storage(tensor: torch.Tensor) -> int:
    """Returns the size of a tensor in bytes, after checking that its storage still holds them all.

    Otherwise torch would read and write beyond the end of the storage.
    """
    size_bytes: int = tensor.nbytes
    needed: Any = size_bytes
    try:
        there = tensor.untyped_storage().nbytes()
    except NotImplementedError:
        # a subclass without its own memory, which defines how it is copied
        return size_bytes
    if not tensor.is_contiguous():
        last = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        needed = (last + 1) * tensor.itemsize
    if offset := tensor.storage_offset():
        needed += offset * tensor.itemsize
    if needed > there and size_bytes:
        raise ArgumentError(
            "a tensor lost its memory before its operation finished: its storage has "
            f"{there:,} bytes, but the tensor needs {needed:,}. "
            "Resize it after wait()."
        )
    return size_bytes


def copy_tensor(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a tensor into another, regardless of the torch modes of the calling rank."""
    with outside_modes():
        _copy_data(source, target)


def _copy_data(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a tensor into another with the same number of elements; tensors may lack data."""
    if source.is_meta or target.is_meta:
        if source.is_meta and target.is_meta:
            return
        raise ArgumentError(
            f"only one side of the message has data: the sender's tensor is on {source.device}, "
            f"the receiver's on {target.device}. "
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
        # shapes differ, or the target is an inference tensor, writable in inference mode only
        with torch.inference_mode():
            target.copy_(source.reshape(target.shape))


def describe_payload(payload: Payload) -> str:
    """Returns the payload of an operation in words."""
    words = (
        f"{payload.dtype}{list(payload.shape)} ({payload.size_bytes:,} bytes)"
        if payload.dtype
        else "nothing"
    )
    return f"{words}, {payload.reduction}" if payload.reduction else words


class SimulatedWork(Work):
    """An operation that a rank has posted: the handle that ``isend`` and collectives return.

    Attributes:
        slots: the slots of its record, and of other records that its wait completes; empty if it is
            complete or not recorded.
        done_s: the time at which it is done, if known, else ``NEVER``.
        waiting: whether to wake its rank at that time.
        awaited: whether its rank has started to wait, so that the record has the time of the wait.
        error: the error that its wait raises, or None.
        peer: the global rank of the other side, or of the root; negative if there is none.
        tag: the tag of a message, or -1 if there is none.
    """

    # class attributes until they change: most operations never change them
    peer = tag = NONE
    done_s, waiting, awaited = NEVER, False, False
    error: Exception | None = None
    future: Any = None

    def __init__(
        self, op: int, rank: Rank, slots: tuple[int, ...], group: Team, kind: Kind
    ) -> None:
        super().__init__()
        self.op, self.rank, self.slots, self.group, self.kind = op, rank, slots, group, kind

    def wait(self, timeout: Any = None) -> bool:
        """Blocks until the operation is done; returns True.

        Waits for at most ``timeout`` (seconds, or a ``timedelta``) of virtual time.

        Raises:
            RunTimeout: the time limit has passed. If the operation is a message, its two ranks
                lose their connection in the group, as on Gloo.
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
            if timeout is None
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
            self.break_off()
            raise RunTimeout(
                f"the operation did not finish within {limit_s:g} s of virtual time "
                f"(rank {self.rank.number}, "
                f"{self.describe()}). Raise the limit, or look for the missing operation."
            )
        # outside of `except`: the context of an injected error is the error that the program is
        # already handling
        raise broken

    def describe(self) -> str:
        """Returns the operation in words."""
        raise NotImplementedError

    def break_off(self) -> None:
        """Closes the connection of a message whose time limit has passed.

        Other operations do nothing.
        """

    def complete(self, time_s: float) -> None:
        """Sets the time at which the operation is done; wakes its rank then if it waits."""
        self.done_s = time_s
        if self.future is not None:
            self.rank.clock.at(time_s, self._bring_future)
        if self.waiting:
            self.waiting = False
            self.rank.clock.at(time_s, self.rank)

    def is_completed(self) -> bool:
        """Returns whether the operation is done; if so, records that it is.

        If it is not, the other ranks run for a moment.
        """
        clock = self.rank.clock
        if self.done_s > clock.now:
            clock.poll()
        if self.done_s > clock.now:
            return False
        if self.error is None:  # an error is left to its wait
            self._close_done()
        return True

    def is_success(self) -> bool:
        """Returns whether the operation is done, without an error."""
        return self.done_s <= self.rank.clock.now and self.error is None

    def exception(self) -> Exception | None:
        """Returns the error of the operation, or None."""
        return self.error

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors that hold the result, after waiting for it."""
        raise NotImplementedError

    # -- its future

    def get_future(self) -> Any:
        """Returns a future of the result, which the rank's own thread completes.

        At the end of a backward pass, C++ waits for the futures of gradients, and no rank can give
        way there. So the rank waits a moment earlier, in its own callback.
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
        """Waits; if an error left the future open, C++ would wait for it forever."""
        try:
            self.wait()
        except BaseException as error:
            if not self.future.done():
                self.future.set_exception(RuntimeError(str(error)))
            raise

    def _bring_future(self) -> None:
        """Makes the rank's own thread complete the future, so that callbacks run there."""
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
        """Records once that the operation is done or has failed."""
        slots, self.slots = self.slots, ()
        for slot in slots:
            self.rank.recorder.complete(slot, status)

    def complete_record(self, recorder: Recorder, slot: int) -> bool:
        """Makes the wait for this operation complete another record as well.

        Returns False if the program has already waited for the operation.
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
