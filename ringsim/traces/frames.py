"""Reads the current frames of this process's threads without causing a deadlock.

Before Python 3.12, ``sys._current_frames`` creates objects while it holds a lock inside the
interpreter. This may start the garbage collector, and a finalizer may then let a different thread
run. If that thread needs the same lock, because it starts a thread or ends, the whole process
hangs, signal handlers included.

Source: https://github.com/python/cpython/issues/106883
"""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

_PAUSE = threading.RLock()  # so that no thread resumes the collector too early


def current_frames() -> dict[int, FrameType]:
    """Returns the innermost frame of each thread, keyed by the thread's identifier.

    If this Python version needs it, the garbage collector is paused in the meantime.
    """
    if sys.version_info >= (3, 12):
        return sys._current_frames()
    with _PAUSE:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()
