"""The handle of an operation on MPI: waits with a limit, and without taking the processor from the ranks that work."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch

from ringsim.errors import ArgumentError, MessageMismatch, RingError, RunTimeout
from ringsim.state import get_state
from ringsim.traces.events import ERROR
from ringsim.traces.recorder import Recorder

_YIELDS: Final = 200  # looks at a request with nothing but a step aside between them, before sleeping
_FIRST_SLEEP_S: Final = 20e-6
_LAST_SLEEP_S: Final = 1e-3


class MpiHandle:
    """An operation that MPI has begun. It moves on while some thread of this process is inside MPI: in a wait, or in another call.

    Args:
        mpi: the module ``mpi4py.MPI``.
        request: mpi4py's request.
        what: the operation and its peer, for errors.
        timeout_s: the limit of ``wait()``, in seconds, where it is given none.
        keep: what must live until the operation is done: tensors whose memory MPI reads or writes.
        finish: brings the result to its place, when the request is done.
        size_bytes: for a message that is received, the size that it must have.
        ranks: for a message that is received, the global rank of each rank of the group.
        results: the tensors that hold the result, once it is there.
        under_way: holds the handle until it is done, so that what MPI reads or writes does not go away with a handle that was dropped.
    """

    __slots__ = (
        "_error",
        "_finish",
        "_keep",
        "_lock",
        "_mpi",
        "_over",
        "_ranks",
        "_recorder",
        "_request",
        "_results",
        "_size_bytes",
        "_slots",
        "_source",
        "_timeout_s",
        "_under_way",
        "_what",
    )

    def __init__(
        self,
        mpi: Any,
        request: Any,
        what: str,
        timeout_s: float,
        *,
        keep: Any = None,
        finish: Callable[[], None] | None = None,
        size_bytes: int | None = None,
        ranks: tuple[int, ...] = (),
        results: Sequence[torch.Tensor] = (),
        under_way: dict[MpiHandle, None] | None = None,
    ) -> None:
        self._mpi = mpi
        self._request = request
        self._what = what
        self._timeout_s = timeout_s
        self._keep = keep
        self._finish = finish
        self._size_bytes = size_bytes
        self._ranks = ranks
        self._results = list(results)
        self._under_way = under_way
        if under_way is not None:
            under_way[self] = None
        self._source = -1
        self._error: RingError | None = None
        self._over = False
        self._lock = threading.Lock()
        self._recorder: Recorder | None = None
        self._slots: list[int] = []

    @property
    def receives(self) -> bool:
        """Whether this is a message that is received."""
        return self._size_bytes is not None

    def record(self, recorder: Recorder, slot: int) -> None:
        """Has the wait written down at ``slot`` of ``recorder``."""
        self._recorder, self._slots = recorder, [slot]

    def complete_record(self, recorder: Recorder, slot: int) -> bool:
        """Has the wait complete the record at ``slot`` too; False where nobody is going to wait, or another recorder is told."""
        if self._recorder is not recorder:
            return False
        self._slots.append(slot)
        return True

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Waits until the operation is done, on this rank; a second wait returns at once.

        Args:
            timeout: the limit, in seconds or as a timedelta; None, or 0, for the group's.

        Returns:
            True.

        Raises:
            RunTimeout: the limit is over. The operation goes on, and can be waited for again.
            MessageMismatch: the message has another size than the tensor.
            RingError: MPI reports something else.
        """
        limit_s = to_seconds(timeout) or self._timeout_s
        recorder, slots = self._recorder, self._slots
        if recorder is None or recorder is not get_state().recorder:
            return self._wait(limit_s)
        for slot in slots:
            recorder.wait(slot)
        try:
            self._wait(limit_s)
        except BaseException:
            for slot in slots:
                recorder.complete(slot, ERROR)
            raise
        if self._source >= 0:
            recorder.amend(slots[0], peer=self._ranks[self._source])
        for slot in slots:
            recorder.complete(slot)
        self._recorder = None
        return True

    def is_completed(self) -> bool:
        """Returns whether the operation is done, well or not; does not block."""
        try:
            return self._test()
        except RingError:
            return True

    def source_rank(self) -> int:
        """Returns the group rank that a received message came from, -1 before it has come."""
        return self._source

    _source_rank = source_rank  # as torch spells it

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors that hold the result; waits for it."""
        self.wait()
        return self._results

    def get_future(self) -> Any:
        """Returns a ``torch.futures.Future`` of ``result()``; a thread waits for it."""
        future: Any = torch.futures.Future()  # its set_exception is typed to take a result

        def complete() -> None:
            try:
                future.set_result(self.result())
            except BaseException as error:  # it belongs to who asks the future
                future.set_exception(error)

        threading.Thread(target=complete, name="ringsim-future", daemon=True).start()
        return future

    def abandon(self) -> None:
        """Gives up an operation that nobody will wait for: a recv is taken back, the rest is left to MPI."""
        with self._lock:
            if not self._over and self.receives:
                self._request.Cancel()
                self._request.Wait()
                what = f"{self._what} must be done before the process group is destroyed"
                self._error = RingError(f"{what}, got neither a message nor a wait. Wait for it first.")
                self._end()

    def _wait(self, limit_s: float) -> bool:
        if self._test():
            return True
        begin = time.monotonic()
        for _ in range(_YIELDS):
            os.sched_yield()
            if self._test():
                return True
        sleep_s = _FIRST_SLEEP_S
        while time.monotonic() - begin < limit_s:
            time.sleep(sleep_s)
            if self._test():
                return True
            sleep_s = min(sleep_s * 1.5, _LAST_SLEEP_S)
        raise RunTimeout(
            f"{self._what} must be answered within {limit_s:g} s, got no answer. See what the other ranks do, or allow more time."
        )

    def _test(self) -> bool:
        """Asks MPI, which also moves every other operation of this process on; takes over what is done."""
        if not self._over:
            with self._lock:
                if not self._take_over():
                    return False
        if self._error is not None:
            raise self._error
        return True

    def _take_over(self) -> bool:
        """Asks MPI, and brings the result to its place if it is there; returns whether the operation is over, well or not."""
        if self._over:  # another thread was first
            return True
        status = None if self._size_bytes is None else self._mpi.Status()
        try:
            if not self._request.Test(status):
                return False
            if status is not None:
                self._receive(status.Get_source(), status.Get_count(self._mpi.BYTE))
        except self._mpi.Exception as error:
            self._error = self._explain(error)
            self._error.__cause__ = error
        try:
            if self._finish is not None and self._error is None:
                self._finish()
        finally:
            self._end()
        return True

    def _end(self) -> None:
        """Lets go of what the operation needed."""
        self._request = self._finish = self._keep = None
        self._over = True
        if self._under_way is not None:
            self._under_way.pop(self, None)

    def _receive(self, source: int, size_bytes: int) -> None:
        self._source = source
        if size_bytes != self._size_bytes:
            self._error = MessageMismatch(
                f"the tensor of {self._what} must be as large as the message, got {self._size_bytes} bytes for a message of {size_bytes} "
                f"bytes from rank {self._ranks[source]}. Compare dtype and shape on both sides."
            )

    def _explain(self, error: Any) -> RingError:
        if error.Get_error_class() == self._mpi.ERR_TRUNCATE:
            return MessageMismatch(
                f"the tensor of {self._what} must be as large as the message, got {self._size_bytes} bytes for a longer one. "
                "Compare dtype and shape on both sides."
            )
        return RingError(f"{self._what} must be carried by MPI, got its error {error}. See what the other ranks do.")


def to_seconds(timeout: timedelta | float | None) -> float:
    """Returns a limit in seconds, 0 where there is none.

    Raises:
        ArgumentError: it is no time, or negative.
    """
    if timeout is None:
        return 0.0
    seconds: Any = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise ArgumentError(f"timeout must be a number of seconds or a timedelta, 0 or more, got {timeout!r}. Or leave it out.")
    return float(seconds)
