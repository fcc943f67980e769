"""A call in a thread of its own, for what may take too long or must go on beside something else."""

from __future__ import annotations

import _thread
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["BackgroundCall"]

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """Runs a call in a thread that can be left behind, also when the process ends: torch has calls that no limit reaches.

    Args:
        call: what to run.

    Example:
        >>> BackgroundCall(lambda: 6 * 7).result(limit_s=10)
        42
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._values: list[T] = []
        self._errors: list[Exception] = []
        self._running = _thread.allocate_lock()
        self._running.acquire()
        # threading.Thread would wait here until the new thread runs: with many ranks on few cores, that is a turn of all of them.
        _thread.start_new_thread(self._run, ())

    def result(self, limit_s: float) -> T:
        """Waits for the call and returns what it returned.

        Args:
            limit_s: how long to wait, in seconds; the call goes on afterwards.

        Returns:
            The call's value.

        Raises:
            TimeoutError: it has not returned by then.
            Exception: whatever the call raised.
        """
        if self._running.acquire(timeout=max(limit_s, 0.0)):
            self._running.release()
        if self._errors:
            raise self._errors[0]
        if not self._values:
            raise TimeoutError(f"no answer within {limit_s:.1f} s")
        return self._values[0]

    def _run(self) -> None:
        try:
            self._values.append(self._call())
        except Exception as error:
            self._errors.append(error)
        finally:
            self._running.release()
