"""Handles written in Python, which operations on Python groups return."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed import Work

from ringsim.comm.torch_private import (
    in_backward,
    outside_modes,
    run_after_backward,
    source_rank,
)
from ringsim.state import get_state, start_thread
from ringsim.traces.events import ERROR, OK
from ringsim.traces.recorder import Recorder


class Handle(Work):
    """A handle for several operations in flight and a final step that follows them.

    Args:
        works: the handles of the operations; None is ignored.
        finish: a function to call once after the operations, for example to copy or add results.
        results: the tensors that hold the result.

    Example:
        >>> done = Handle([], lambda: print("finished"))
        >>> done.wait(), done.is_completed()
        finished
        (True, True)
    """

    _over = _waited = False
    _future: Any = None
    _error: BaseException | None = None
    _source = -1
    _recorder: Recorder | None = None
    _sources: Sequence[int] = ()

    def __init__(
        self,
        works: Iterable[Any] = (),
        finish: Callable[[], Any] | None = None,
        results: Iterable[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self._works = [work for work in works if work is not None]
        self._finish, self._results = finish, list(results)
        self._lock = threading.RLock()
        # the records that the wait completes, beginning with the operation's own
        self._slots: list[int] = []

    # -- its record

    def record(self, recorder: Recorder, slot: int, ranks: Sequence[int] = ()) -> None:
        """Makes ``wait`` update the record at ``slot``.

        Args:
            recorder: the recorder of the operation.
            slot: the slot of its record.
            ranks: for a recv, the global rank of each rank in the group.
        """
        self._recorder, self._slots, self._sources = recorder, [slot], ranks

    def complete_record(self, recorder: Recorder, slot: int) -> bool:
        """Makes ``wait`` also complete the record at ``slot``.

        Returns False if the wait is over.
        """
        with self._lock:
            if self._waited or self._recorder not in (None, recorder):
                return False
            self._recorder = recorder
            self._slots.append(slot)
            return True

    # -- waiting

    def wait(self, timeout: Any = None) -> bool:
        """Blocks until the operations are complete and the results are in place.

        Later calls return immediately.

        Args:
            timeout: the limit for each operation, in the form that the operation's backend accepts
                (for torch, a ``timedelta``); None for the group's own limit.

        Returns:
            True.
        """
        with self._lock:
            recorder: Any = self._recorder if self._recorder is get_state().recorder else None
            slots = [] if recorder is None else self._slots
            for slot in slots:
                recorder.wait(slot)
            status = ERROR
            try:
                self._wait(timeout)
                status = OK
            finally:
                if slots and self._sources and self._source_rank() >= 0:
                    recorder.amend(slots[0], peer=self._sources[self._source_rank()])
                for slot in slots:
                    recorder.complete(slot, status)
            self._recorder, self._waited = None, True
        return True

    synchronize = block_current_stream = wait  # type: ignore[assignment]

    def _wait(self, timeout: Any) -> None:
        while self._works:
            self._works[0].wait(timeout) if timeout else self._works[0].wait()
            self._source = source_rank(self._works[0])
            del self._works[0]  # a second wait for a Gloo message would break the connection
        if not self._over:
            self._over = True
            self._bring()

    def _bring(self) -> None:
        """Runs the final step outside the calling thread's modes.

        It runs in inference mode, because tensors created in that mode may only be changed there.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            with torch.inference_mode(), outside_modes():
                finish()

    def is_completed(self) -> bool:
        """Returns whether the results are in place; a Gloo message completes only in ``wait``."""
        if not self._over and all(work.is_completed() for work in self._works):
            self.wait()
        return self._over

    def is_success(self) -> bool:
        """Returns whether the operation is complete and has not failed."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Returns the operation's error, or None if there is none."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Waits and returns the tensors that hold the result."""
        self.wait()
        return self._results

    def source_rank(self) -> int:
        """Returns the group rank of a message's sender, or -1 before the message arrives."""
        return self._source

    def _source_rank(self) -> int:
        return self.source_rank()

    # -- the methods of a future, which torch's coalesced functions return

    def done(self) -> bool:
        """Like ``is_completed``, under the name that futures use."""
        return self.is_completed()

    def value(self) -> list[torch.Tensor]:
        """Like ``result``, under the name that futures use."""
        return self.result()

    # -- its future

    def get_future(self) -> Any:
        """Returns a ``torch.futures.Future`` of the result.

        C++ waits for the futures of gradients at the end of a backward pass, so within a backward
        pass a callback on the same thread waits just before that. Otherwise, a new thread waits.
        """
        if self._future is None:
            self._future = torch.futures.Future()
            if self._over:
                self._fulfil()
            elif in_backward():
                run_after_backward(self._fulfil_or_raise)
            else:
                start_thread("future", self._fulfil)
        return self._future

    def _fulfil_or_raise(self) -> None:
        """Waits, then completes the future; an error also ends the backward pass."""
        self._fulfil()
        if self._error is not None:
            raise self._error

    def _fulfil(self) -> None:
        """Waits and completes the future."""
        try:
            result = self.result()
        except BaseException as error:
            self._error = error
            self._future.set_exception(error)
            return
        self._future.set_result(result)
