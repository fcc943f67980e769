"""Implements the stacks of simulated ranks, on threads or on greenlets.

Threads can run every program, because torch and Python keep much of their state per thread.
Greenlets share one thread. They need less memory, and a simulation does not need thousands of
threads. Greenlets can run programs that call ``torch.distributed`` from Python, but a rank on a
greenlet cannot wait inside a backward pass, inside a C++ call, or in a mode that all ranks would
share.
"""

from __future__ import annotations

import _thread
import asyncio
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch

from ringsim.comm.torch_private import has_modes, has_saved_tensor_hooks, in_backward
from ringsim.errors import RingError


class ThreadStack:
    """A stack on its own thread, which waits for a lock.

    Args:
        live: the function to run on the stack, or None for the stack that is already running.
    """

    def __init__(self, live: Callable[[], None] | None) -> None:
        self._live = live  # None once the thread runs
        self._thread = 0
        self._baton = _thread.allocate_lock()
        self._baton.acquire()

    def check(self) -> None:
        """Raises RingError if the rank cannot wait here. A thread can wait anywhere."""

    def wake(self) -> None:
        """Makes the stack run. The first call starts it.

        Raises:
            RuntimeError: the system cannot start any more threads.
        """
        live, self._live = self._live, None
        if live is None:
            self._baton.release()
        else:
            self._thread = _thread.start_new_thread(live, ())

    def wait(self, woken: Any) -> None:
        """Blocks this stack, which must be the caller's, until it is woken. ``woken`` runs next."""
        self._baton.acquire()

    def end(self, woken: Any) -> None:
        """Ends this stack, which must be the caller's. ``woken`` runs next."""

    def find_frame(self, frames: Mapping[int, FrameType]) -> FrameType | None:
        """Returns the stack's innermost frame, given the frames of all threads."""
        return frames.get(self._thread)


class GreenletStack(ThreadStack):
    """A stack on a greenlet. All ranks share one thread.

    The caller's greenlet starts all other greenlets, because a new greenlet starts at the call
    depth of the greenlet that starts it. Each switch passes on the stack that runs next.
    """

    def __init__(self, live: Callable[[], None] | None) -> None:
        import greenlet

        def run(_: GreenletStack) -> GreenletStack | None:
            assert live is not None
            live()
            return self._next

        self._greenlet = greenlet.getcurrent() if live is None else greenlet.greenlet(run)
        self._caller = self._greenlet.parent or self._greenlet
        self._next: GreenletStack | None = None  # the stack that runs after this one has ended

    def check(self) -> None:
        """Raises RingError if the thread is in a state that the other ranks would share."""
        for name, is_in_force in _OBSTACLES.items():
            if is_in_force():
                raise RingError(
                    f"a rank on a greenlet cannot wait inside {name}, because all ranks share one "
                    'thread. Omit stacks="greenlets".'
                )

    def wake(self) -> None:
        """Does nothing, because the stack that waits or ends switches to the woken stack."""

    def wait(self, woken: Any) -> None:
        """Switches to the woken greenlet, with torch's default of recording gradients."""
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
        """Ends the calling greenlet. ``woken`` runs next."""
        self._next = woken

    def find_frame(self, frames: Mapping[int, FrameType]) -> FrameType | None:
        """Returns the greenlet's innermost frame."""
        frame: FrameType | None = self._greenlet.gr_frame
        return frame


# torch files whose functions call C++ code that waits: torch's operators, and the functions that
# DDP's constructor and forward pass call
_CALL_CPP = (
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


_OBSTACLES: dict[str, Callable[[], bool]] = {
    "a backward pass": in_backward,
    "torch's C++ code": _is_called_from_cpp,
    "torch.autocast": lambda: torch.is_autocast_enabled("cpu"),
    "a torch mode, such as a default device": has_modes,
    "hooks for saved tensors": has_saved_tensor_hooks,
    "an asyncio event loop": lambda: asyncio._get_running_loop() is not None,
}
STACKS: dict[str, type[ThreadStack]] = {"threads": ThreadStack, "greenlets": GreenletStack}
