"""A torch process group over MPI, based on mpi4py.

Every operation is started without blocking and waited for with a time limit. An operation makes
progress only while a thread of this process is inside MPI, in a wait or in another call.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from ringsim.comm.calls import Call, Tensors, check_dense, for_receiving, for_sending
from ringsim.comm.handles import Handle
from ringsim.comm.message_group import MessageGroup, to_seconds
from ringsim.comm.mpi_collectives import Started, as_bytes, as_mpi, start
from ringsim.comm.python_group import DEFAULT_TIMEOUT
from ringsim.errors import ArgumentError, MessageMismatch, RingError, RunTimeout

# tests of a request with only a yield in between, before sleeping
_YIELDS = 200
_ASK = 256  # tests between two checks of whether the wait can still end
_FIRST_SLEEP_S = 20e-6
_LAST_SLEEP_S = 1e-3
# from this number on, each new operation looks for handles that were never waited for
_MANY_UNDER_WAY = 64
LEAVE_S = 5.0  # the time that ending a group waits for sends that have not been received


class MpiWork(Handle):
    """An operation that MPI has begun.

    The operation makes progress only while a thread of this process is inside MPI, in a wait or in
    another call.

    Args:
        group: the group of the operation.
        started: the operation that MPI has begun.
        what: the operation and its peer, for errors.
        size_bytes: for a recv, the expected size of the message.
        results: the tensors that will hold the result.
    """

    def __init__(
        self,
        group: MpiGroup,
        started: Started,
        what: str,
        *,
        size_bytes: int | None = None,
        results: Tensors = (),
    ) -> None:
        super().__init__((), started.finish, results)
        self.group = group
        self._request, self._keep = started.request, started.keep
        self._what, self._size_bytes = what, size_bytes
        self._testing = threading.Lock()
        # keeps the buffers of MPI alive even if the program drops the handle
        group.job.under_way[self] = None

    @property
    def receives(self) -> bool:
        """Whether this is a recv."""
        return self._size_bytes is not None

    def is_completed(self) -> bool:
        """Returns whether the operation is done or has failed; does not block."""
        try:
            return self._test()
        except RingError:
            return True

    def abandon(self) -> None:
        """Abandons an operation that will not be waited for.

        A recv is cancelled; other operations are left to MPI.
        """
        with self._testing:
            if not self._over and self.receives:
                self._request.Cancel()
                self._request.Wait()
                what = f"{self._what} was still in flight when the process group was destroyed"
                self._error = RingError(
                    f"{what}: no message arrived. Wait for the message before you destroy the "
                    "group."
                )
                self._end()

    def _wait(self, timeout: Any) -> None:
        """Waits until the operation is done on this rank.

        Raises:
            RunTimeout: the time limit, by default the group's, has passed. The operation continues,
                and can be waited for again.
            MessageMismatch: the message and the tensor differ in size.
            RingError: MPI reports a different error.
        """
        limit_s = to_seconds(timeout or self.group.timeout)
        begin, looks, sleep_s = time.monotonic(), 0, _FIRST_SLEEP_S
        while not self._test():
            looks += 1
            if self._recorder is not None and looks % _ASK == 0:
                self._recorder.on_failure()  # a watcher may know that the wait cannot end
            if looks <= _YIELDS:
                os.sched_yield()
                continue
            if time.monotonic() - begin >= limit_s:
                raise RunTimeout(
                    f"{self._what} timed out after {limit_s:g} s. Check what the other ranks are "
                    "doing, or allow more time."
                )
            time.sleep(sleep_s)
            sleep_s = min(sleep_s * 1.5, _LAST_SLEEP_S)

    def _test(self) -> bool:
        """Tests the request, stores the result if the request is done, and returns whether it is.

        The call into MPI also lets every other operation of this process make progress.
        """
        with self._testing:
            if not self._over and not self._take_over():
                return False
        if self._error is not None:
            raise self._error
        return True

    def _take_over(self) -> bool:
        """Tests the request, and stores the result if the request is done.

        Returns whether the operation is done or has failed.
        """
        status = None if self._size_bytes is None else self.group.job.mpi.Status()
        try:
            if not self._request.Test(status):
                return False
            if status is not None:
                self._source = status.Get_source()
                size_bytes = status.Get_count(self.group.job.mpi.BYTE)
                if size_bytes != self._size_bytes:
                    sender = self.group.members.ranks[self._source]
                    self._error = self._mismatch(
                        f"a message of {size_bytes} bytes from rank {sender}"
                    )
        except self.group.job.mpi.Exception as error:
            self._error = self._explain(error)
            self._error.__cause__ = error
        try:
            if self._error is None:
                self._bring()
        finally:
            self._end()
        return True

    def _end(self) -> None:
        """Releases the operation's resources."""
        self._request = self._finish = self._keep = None
        self._over = True
        self.group.job.under_way.pop(self, None)

    def _mismatch(self, message: str) -> MessageMismatch:
        return MessageMismatch(
            f"{self._what} received {message} into a tensor of {self._size_bytes} bytes. Compare "
            "dtype and shape on both sides."
        )

    def _explain(self, error: Any) -> RingError:
        if error.Get_error_class() == self.group.job.mpi.ERR_TRUNCATE:
            return self._mismatch("a longer message")
        return RingError(
            f"{self._what} failed in MPI: {error}. Check what the other ranks are doing."
        )


@dataclass(eq=False)
class MpiJob:
    """This process's use of MPI, from ``init_process_group`` to ``destroy_process_group``."""

    mpi: Any  # the module ``mpi4py.MPI``
    control: Any  # a communicator of all ranks for ringsim's own messages
    store: Any  # a store that all ranks share
    numbers: Iterator[int]  # the numbers of future groups
    # operations that may not be done yet, in the order of posting
    under_way: dict[MpiWork, None]
    leave: Callable[[], None]  # undoes the changes to the process

    def settle(self, group: MpiGroup | None = None) -> None:
        """Cancels recvs that were never waited for, and gives such sends a few seconds to finish.

        Args:
            group: the group of the operations, or None for all groups.
        """
        for work in list(self.under_way):
            if group is not None and work.group is not group:
                continue
            try:
                work.wait(0.001 if work.receives else LEAVE_S)
            except RunTimeout:
                work.abandon()
            except RingError:
                pass  # the program has seen the error, or never waited


class MpiGroup(MessageGroup):
    """A torch process group of the ranks that share an MPI communicator.

    The group sends CPU tensors of every dtype, contiguous or not, as bytes. As on Gloo, a rank
    cannot send to itself.

    Args:
        job: this process's use of MPI.
        comm: the communicator.
        ranks: the global ranks of the members, in the group's order.
        number: the unique number of the group, the same on all members; 0 for the group of all
            ranks.
        timeout: the time limit for one operation on the group.
    """

    def __init__(
        self,
        job: MpiJob,
        comm: Any,
        ranks: Sequence[int],
        number: int,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), backend_name="mpi", timeout=timeout)
        self.job, self.comm, self._ranks, self._number = job, comm, tuple(ranks), number

    def check_tensor(self, what: str, tensor: Any) -> torch.Tensor:
        """Returns a tensor that MPI can send."""
        return check_dense(what, tensor, "with the mpi backend")

    # -- operations

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> MpiWork:
        """Begins to send."""
        plain = for_sending(tensor)
        buffer = as_mpi(self.job.mpi, as_bytes(plain))
        what = f"isend to rank {self._ranks[dst]}, tag {tag}"
        with self._explaining(what):
            request = self.comm.Isend(buffer, dst, self._check_tag(tag))
        return self._under_way(Started(request, plain), what, [tensor])

    def irecv(self, tensor: torch.Tensor, src: int | None, tag: int) -> MpiWork:
        """Begins to receive, from any rank if no source is given."""
        stage = for_receiving(tensor)
        buffer = as_mpi(self.job.mpi, as_bytes(stage))
        what = f"irecv from {'any rank' if src is None else f'rank {self._ranks[src]}'}, tag {tag}"
        place = self.job.mpi.ANY_SOURCE if src is None else src
        with self._explaining(what):
            request = self.comm.Irecv(buffer, place, self._check_tag(tag))
        finish = None if stage is tensor else lambda: tensor.copy_(stage)
        return self._under_way(Started(request, stage, finish), what, [tensor], tensor.nbytes)

    def start(self, call: Call) -> MpiWork:
        """Begins a collective."""
        with self._explaining(call.name):
            started = start(self.job.mpi, self.comm, call)
        return self._under_way(started, call.name, call.results)

    def _check_tag(self, tag: int) -> int:
        highest = self.comm.Get_attr(self.job.mpi.TAG_UB)
        if not 0 <= tag <= highest:
            raise ArgumentError(
                f"tag must be from 0 to {highest} with this MPI library, got {tag} "
                f"({self.members.here()}). Choose a different tag."
            )
        return tag

    @contextmanager
    def _explaining(self, what: str) -> Iterator[None]:
        """Raises RingError in place of an MPI error."""
        try:
            yield
        except self.job.mpi.Exception as error:
            raise RingError(f"{what} failed in MPI: {error} ({self.members.here()}).") from error

    def _under_way(
        self,
        started: Started,
        what: str,
        results: Tensors,
        size_bytes: int | None = None,
    ) -> MpiWork:
        about = f"{what} ({self.members.here()})"
        work = MpiWork(self, started, about, size_bytes=size_bytes, results=results)
        if len(self.job.under_way) >= _MANY_UNDER_WAY:
            for each in list(self.job.under_way):
                each.is_completed()  # releases completed operations
        return work

    def about(self) -> dict[str, str]:
        """Returns the backend and the name and version of the MPI library."""
        version = str(self.job.mpi.Get_library_version())
        return {"backend": "mpi", "mpi_library": version.splitlines()[0].strip("\0 ")}

    # -- ringsim's own operations

    def complete(self, request: Any, what: str, keep: Any = None) -> None:
        """Waits for one of ringsim's own operations, for at most the group's time limit."""
        MpiWork(self, Started(request, keep), what).wait()

    # -- groups

    def make_group(self, ranks: Sequence[int], timeout: timedelta) -> MpiGroup | None:
        """Creates a group from the given ranks; call this method on all ranks, in the same order.

        Args:
            ranks: the global ranks of the members, in the group's order.
            timeout: the time limit for each operation on the group.

        Returns:
            The group, or None on a rank outside the group.

        Raises:
            ArgumentError: the processes pass different ranks.
            RunTimeout: not all ranks have called this method in time.
        """
        number = self._agree(tuple(ranks))
        comm = self.job.control.Create(self.job.control.Get_group().Incl(list(ranks)))
        if comm == self.job.mpi.COMM_NULL:
            return None
        return MpiGroup(self.job, comm, ranks, number, timeout)

    def _agree(self, ranks: tuple[int, ...]) -> int:
        """Checks that all ranks request a group with the same members, and returns its number.

        Raises:
            ArgumentError: the processes request different groups.
            RunTimeout: not all ranks have called this method in time.
        """
        mine = hashlib.blake2b(repr(ranks).encode(), digest_size=8).digest()
        everything = bytearray(8 * self.size())
        request = self.job.control.Iallgather(mine, everything)
        self.complete(request, f"new_group ({self.members.here()})", (mine, everything))
        places = range(self.size())
        others = [rank for rank in places if everything[8 * rank : 8 * rank + 8] != mine]
        number = next(self.job.numbers)
        if others:
            raise ArgumentError(
                f"the processes passed different ranks to new_group: {list(ranks)} here "
                f"({self.members.here()}), but a different list on rank {others[0]}. Call "
                "new_group for every group on every rank, in the same order."
            )
        return number

    def shutdown(self) -> None:
        """Ends the group; ending the group of all ranks ends the job.

        Sends that were never waited for get a few seconds to be received; recvs are cancelled.
        """
        if self.comm == self.job.mpi.COMM_NULL:
            return
        self.job.settle(self if self._number else None)
        self.comm.Free()
        if not self._number:
            self.job.leave()
            self.job.control.Free()
