"""The handle of an operation that is made of several others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ringsim.state import get_state
from ringsim.traces.events import ERROR
from ringsim.traces.recorder import Recorder

__all__ = ["Handle"]


class Handle:
    """Stands for several operations that are under way, and for what is left to do once they are complete.

    Args:
        works: handles of the operations; None among them is passed over.
        finish: what is left to do then, once (copy to where the results belong, add up).
        results: the tensors that hold the result.

    Example:
        >>> done = Handle([], lambda: print("finished"))
        >>> done.wait(), done.is_completed()
        finished
        (True, True)
    """

    def __init__(self, works: Iterable[Any], finish: Callable[[], None], results: Iterable[torch.Tensor] = ()) -> None:
        self._works = [work for work in works if work is not None]
        self._finish: Callable[[], None] | None = finish
        self._results = list(results)
        self._lock = threading.RLock()
        self._recorder: Recorder | None = None
        self._slots: list[int] = []  # records, besides those of the operations, that the wait completes

    def complete_record(self, recorder: Recorder, slot: int) -> bool:
        """Has the wait complete the record at ``slot``; False where it is over."""
        with self._lock:
            if self._finish is None:
                return False
            self._recorder = recorder
            self._slots.append(slot)
            return True

    def wait(self, timeout: Any = None) -> bool:
        """Blocks until the operations are complete and the results are in place; the second time it returns at once.

        Args:
            timeout: limit for each operation, as its backend takes it (torch: a ``timedelta``); None for the group's own.

        Returns:
            True.
        """
        with self._lock:
            recorder = self._recorder if self._recorder is get_state().recorder else None
            if recorder is None:
                self._wait(timeout)
                return True
            for slot in self._slots:
                recorder.wait(slot)
            try:
                self._wait(timeout)
            except BaseException:
                for slot in self._slots:
                    recorder.complete(slot, ERROR)
                raise
            for slot in self._slots:
                recorder.complete(slot)
            self._recorder = None
        return True

    def _wait(self, timeout: Any) -> None:
        while self._works:
            self._works[0].wait() if timeout is None else self._works[0].wait(timeout)
            del self._works[0]  # a second wait for a message of Gloo would break the connection
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def is_completed(self) -> bool:
        """Returns whether the results are in place. Gloo tells of messages only in ``wait``."""
        if self._finish is not None and all(work.is_completed() for work in self._works):
            self.wait()
        return self._finish is None

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors that hold the result, once it is there."""
        self.wait()
        return self._results

    def done(self) -> bool:
        """``is_completed``, as futures spell it: torch's coalesced forms return a future."""
        return self.is_completed()

    def value(self) -> list[torch.Tensor]:
        """``result``, as futures spell it."""
        return self.result()

    def get_future(self) -> Any:
        """Returns a ``torch.futures.Future`` of the result; a thread waits for it."""
        future: Any = torch.futures.Future()

        def wait() -> None:
            try:
                future.set_result(self.result())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=wait, name="ringsim-future", daemon=True).start()
        return future
