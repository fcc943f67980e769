"""The stacks of simulated ranks, on threads or on greenlets.

Threads can run every program, because torch and Python keep much of their state by thread.
Greenlets share one thread: they need less memory, and a simulation does not need thousands of
threads. They run programs that call ``torch.distributed`` from Python. On a greenlet, a rank cannot
wait inside a backward pass, inside a C++ call, or in a mode that all ranks would share.
"""

from __future__ import annotations

import _thread
import asyncio
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Final

import torch

from ringsim.comm.torch_private import has_modes, has_saved_tensor_hooks, in_backward
from ringsim.errors import RingError

__all__ = ["STACKS", "GreenletStack", "Stack", "ThreadStack"]


class ThreadStack:
    """A thread, which waits for its own lock.

    Args:
        live: the function that runs on it, or None for the stack that is already running.
    """

    def __init__(self, live: Callable[[], None] | None) -> None:
        self._live = live  # None once the thread runs
        self._thread = 0
        self._baton = _thread.allocate_lock()
        self._baton.acquire()

    def check(self) -> None:
        """Raises RingError if the rank cannot wait here; a thread can wait everywhere."""

    def wake(self) -> None:
        """Makes the stack run; the first call starts it.

        Raises:
            RuntimeError: no further thread can be started.
        """
        live, self._live = self._live, None
        if live is None:
            self._baton.release()
        else:
            self._thread = _thread.start_new_thread(live, ())

    def wait(self, woken: Any) -> None:
        """Blocks the calling stack, which is this one, until it is woken; ``woken`` runs next."""
        self._baton.acquire()

    def end(self, woken: Any) -> None:
        """Ends the calling stack, which is this one; ``woken`` runs next."""

    def find_frame(self, frames: Mapping[int, FrameType]) -> FrameType | None:
        """Returns the innermost frame, given the frames of all threads."""
        return frames.get(self._thread)


class GreenletStack(ThreadStack):
    """A greenlet on the one thread that all ranks share.

    The caller's greenlet starts all others, because a new greenlet starts at the call depth of the
    greenlet that starts it. Each switch passes the stack that runs next.
    """

    def __init__(self, live: Callable[[], None] | None) -> None:
        import greenlet

        def run(_: GreenletStack) -> GreenletStack | None:
            assert live is not None
            live()
            return self._next

        self._greenlet = greenlet.getcurrent() if live is None else greenlet.greenlet(run)
        self._caller = self._greenlet.parent or self._greenlet
        self._next: GreenletStack | None = None  # runs after this one has ended

    def check(self) -> None:
        """Raises RingError if the thread is in a state that the other ranks would share."""
        for name, is_in_force in _OBSTACLES.items():
            if is_in_force():
                raise RingError(
                    f"a rank on a greenlet cannot wait inside {name}, because all ranks share one "
                    'thread. Omit stacks="greenlets".'
                )

    def wake(self) -> None:
        """Does nothing, because the stack that waits or ends switches to the woken one."""

    def wait(self, woken: Any) -> None:
        """Switches to another greenlet; meanwhile gradients are recorded, which is the default."""
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            self._switch(woken)
        else:
            with torch.inference_mode(mode=False):
                self._switch(woken)

    def _switch(self, woken: Any) -> None:
        may_start = self._greenlet is self._caller
        while woken is not self:
            to = woken._greenlet if woken._greenlet or may_start else self._caller
            woken = to.switch(woken)

    def end(self, woken: Any) -> None:
        """Ends the calling greenlet; ``woken`` runs next."""
        self._next = woken

    def find_frame(self, frames: Mapping[int, FrameType]) -> FrameType | None:
        """Returns the innermost frame of the greenlet."""
        frame: FrameType | None = self._greenlet.gr_frame
        return frame


# torch files whose functions call C++ code that waits: its operators, and the functions that DDP's
# constructor and forward pass call
_CALL_CPP: Final = (
    "torch/_ops.py",
    "torch/distributed/utils.py",
    "torch/nn/parallel/distributed.py",
)


def _is_called_from_cpp() -> bool:
    """Returns whether torch's C++ code has called the function that waits."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("ringsim."):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.endswith(_CALL_CPP)


_OBSTACLES: Final[dict[str, Callable[[], bool]]] = {
    "a backward pass": in_backward,
    "torch's C++ code": _is_called_from_cpp,
    "torch.autocast": lambda: torch.is_autocast_enabled("cpu"),
    "a torch mode, such as a default device": has_modes,
    "hooks for saved tensors": has_saved_tensor_hooks,
    "an asyncio event loop": lambda: asyncio._get_running_loop() is not None,
}
Stack = ThreadStack
STACKS: Final[dict[str, type[ThreadStack]]] = {"threads": ThreadStack, "greenlets": GreenletStack}
