"""Records collectives issued from C++.

DistributedDataParallel, functional collectives and DTensor issue such collectives. They do not call
the methods of Python's ``ProcessGroup``, but go through torch's dispatcher, as the operators
``c10d::allreduce_``, ``c10d::broadcast_`` and so on. Their dispatch key ``BackendSelect`` is
unused: a function registered there is called first, and then forwards the call to the original
function. Functions are registered only once per process, and forward calls directly while nothing
is recorded, because neither registering nor removing is safe while another thread is in an
operator.

An operation that cannot be read is forwarded without a record, because DistributedDataParallel's
reducer does not survive an error here.

The program waits for such a collective in C++, and Python usually cannot see that wait. So one
thread per group also waits for the collectives, one after the other, and records when each was
done. The thread also waits for collectives that torch's own Python code starts and may forget, as
it does under ``Join``. A callback on their futures would run Python in Gloo's own thread, and delay
every later operation.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup, Work
from torch.library import Library

from ringsim.comm.bootstrap import leave_thread
from ringsim.comm.calls import METHODS, Reading, Tensors, find_tensors
from ringsim.comm.torch_private import Hook, keys_below_backend_select, tree_leaves
from ringsim.state import start_thread
from ringsim.traces.events import ERROR, NONE, OK
from ringsim.traces.frames import current_frames
from ringsim.traces.recorder import Recorder

# torch's shortest limit; a call into C++ that does not wait has returned by then
RETURN_S = 0.001
LOOK_S = 0.003  # the time between checks of whether a call that waits has returned
NOTICED_S = 0.5  # the time that C++ may wait without a record of the wait
JOIN_S = 2.0  # the time to wait for operations in flight when recording ends


class Issued(NamedTuple):
    """A collective that passes through the dispatcher.

    Attributes:
        reading: the rules for this kind of collective.
        group: the group.
        args: the other arguments.
        tensors: the tensors from which the size is computed.
        made: the tensors that the collective fills.
        root: the group rank of the root, or NONE if there is none.
        hand_on: a function that runs the collective; its result must be returned.
    """

    reading: Reading
    group: ProcessGroup
    args: tuple[Any, ...]
    tensors: Tensors
    made: Tensors
    root: int
    hand_on: Callable[[], Any]


class Dispatcher:
    """The functions registered with torch's dispatcher, and their listeners.

    Attributes:
        listener: a function that gets each collective and runs it; None while nothing is recorded.
        on_wait: a function that returns the context manager in which the program waits for the
            functional collective that fills a tensor.
        complete: whether all collectives are seen; False if this version of torch has a different
            dispatcher.
        recorded_elsewhere: a thread-local object; ``now`` is true while the caller records the
            collective itself.
    """

    listener: Callable[[Issued], Any] | None = None
    on_wait: Callable[[torch.Tensor], AbstractContextManager[None]] | None = None

    def __init__(self) -> None:
        self.recorded_elsewhere = threading.local()
        self._libraries = [Library(name, "IMPL") for name in ("c10d", "_c10d_functional")]
        below = keys_below_backend_select()
        self.complete = below is not None
        if below is None:
            return
        for method, reading in METHODS.items():
            name = f"{method}_" if hasattr(torch.ops.c10d, f"{method}_") else method
            operator = getattr(torch.ops.c10d, name, None)
            if operator is not None and method != "monitored_barrier":  # only called by Python
                kernel = self._make_kernel(operator.default, reading, below)
                self._libraries[0].impl(name, kernel, "BackendSelect", with_keyset=True)
        wait = getattr(torch.ops._c10d_functional, "wait_tensor", None)
        if wait is not None:
            kernel = self._make_wait(wait.default, below)
            self._libraries[1].impl("wait_tensor", kernel, "BackendSelect", with_keyset=True)

    def _make_kernel(self, operator: Any, reading: Reading, below: Any) -> Hook:
        names = [argument.name for argument in operator._schema.arguments]
        group_at = names.index("process_group")
        root_at = names.index("root_rank") if "root_rank" in names else None
        elsewhere, hand_on = self.recorded_elsewhere, operator.redispatch

        def kernel(keys: Any, *args: Any) -> Any:
            listener = self.listener
            if listener is None or getattr(elsewhere, "now", False):
                return hand_on(keys & below, *args)
            try:
                others = args[:group_at] + args[group_at + 1 :]
                tensors = find_tensors(reading, args[:group_at], {})
                real = all(map(_holds_data, tensors))
                root = NONE if root_at is None else int(args[root_at])
                group = ProcessGroup.unbox(args[group_at])
            except Exception:
                real = False
            if not real:
                return hand_on(keys & below, *args)
            go_on = functools.partial(hand_on, keys & below, *args)
            return listener(
                Issued(reading, group, others, tensors, tree_leaves(args[0]), root, go_on)
            )

        return kernel

    def _make_wait(self, operator: Any, below: Any) -> Hook:
        hand_on = operator.redispatch

        def kernel(keys: Any, tensor: torch.Tensor) -> Any:
            on_wait = self.on_wait
            if on_wait is None or not _holds_data(tensor):
                return hand_on(keys & below, tensor)
            with on_wait(tensor):
                return hand_on(keys & below, tensor)

        return kernel


def _holds_data(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has data; compilers pass tensors that have only a shape."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta


@functools.cache
def get_dispatcher() -> Dispatcher:
    """Returns this process's dispatcher; the first call registers it."""
    return Dispatcher()


@dataclass(slots=True)
class _Call:
    """A call into C++ that issues collectives: the thread, the place and the latest collective."""

    thread: int
    frame: tuple[int, int]
    blocks: int
    latest: int = NONE


class _UnderWay(NamedTuple):
    """A collective that no Python code is waiting for.

    The tuple contains the slot of its record, the addresses that the collective fills, and the call
    that issued it.
    """

    work: Work
    slot: int
    places: list[int]
    issued_ns: int
    call: _Call


_Queue = queue.SimpleQueue[_UnderWay | None]


class LateWaits:
    """Tracks the collectives that the program waits for in C++, to record when these waits end.

    One thread per group waits for the group's collectives, one after the other. If ringsim sees the
    program wait, it records the program's own wait instead.

    DistributedDataParallel waits after it has issued its last bucket. So if the collective's thread
    returns from C++ after the collective is done, and has issued no other collective by then, the
    wait counts from the time at which the collective was issued.

    Args:
        recorder: the recorder of the collectives.
        wait: a function that waits for a handle without a record, optionally with a limit.
        pending: the handles that Python may also wait for, with their records. Handles that are
            done are removed.
    """

    def __init__(self, recorder: Recorder, wait: Hook, pending: dict[Work, int]) -> None:
        self._recorder, self._wait, self._pending = recorder, wait, pending
        self._queues: dict[int, _Queue] = {}  # by group
        self._threads: list[threading.Thread] = []
        self._slots: dict[int, int] = {}  # by the address that a collective fills
        # slots of unfinished collectives; the thread that removes a slot completes its record
        self._open: dict[int, bool] = {}
        # the number of record_function blocks entered, by thread
        self._blocks: defaultdict[int, int] = defaultdict(int)
        self._calls: dict[int, _Call] = {}  # the latest call of each thread

    def add(
        self,
        work: Work,
        slot: int,
        group: int,
        made: Tensors = (),
        frame: FrameType | None = None,
    ) -> None:
        """Tracks a collective until it is done, and records when that happens.

        Args:
            work: the handle of the collective.
            slot: the slot of its record.
            group: the number of the collective's group.
            made: the tensors that the collective fills.
            frame: the frame of the Python function that called into C++, if there is one.
        """
        if group not in self._queues:
            self._queues[group] = queue.SimpleQueue()
            self._threads.append(
                start_thread(f"late-waits-{group}", self._run, self._queues[group])
            )
        places = [tensor.data_ptr() for tensor in made]
        self._open[slot] = True
        self._slots.update(dict.fromkeys(places, slot))
        ident = threading.get_ident()
        place, blocks, call = _where(frame), self._blocks[ident], self._calls.get(ident)
        if call is None or (call.frame, call.blocks) != (place, blocks):
            call = self._calls[ident] = _Call(ident, place, blocks)
        call.latest = slot
        self._queues[group].put(_UnderWay(work, slot, places, time.monotonic_ns(), call))

    def wait_for_tensor(self, tensor: torch.Tensor) -> AbstractContextManager[None]:
        """Like ``wait_for``, for the collective that fills ``tensor``."""
        slot = self._slots.get(tensor.data_ptr())
        return self.wait_for(() if slot is None else (slot,))

    @contextmanager
    def wait_for(self, slots: Sequence[int]) -> Iterator[None]:
        """Records that the program waits for these collectives in the block.

        Collectives that are already done are left out.
        """
        begun = [slot for slot in slots if slot in self._open]
        for slot in begun:
            self._recorder.wait(slot)
        yield
        for slot in begun:
            if not self._complete(slot):
                self._recorder.amend(slot, done_ns=NONE)  # the wait began too late to end before it

    def _complete(self, slot: int, status: int = OK) -> bool:
        """Completes a record unless another thread already has; returns whether this call did."""
        mine = self._open.pop(slot, False)
        if mine:
            self._recorder.complete(slot, status)
        return mine

    def enter_block(self) -> None:
        """Records that the calling thread has returned from C++.

        This is needed because Python reuses frames; DistributedDataParallel's forward pass is a
        block.
        """
        self._blocks[threading.get_ident()] += 1

    def stop(self) -> None:
        """Stops the threads once all added collectives are done, or after a time limit."""
        for each in self._queues.values():
            each.put(None)
        end_s = time.monotonic() + JOIN_S
        for thread in self._threads:
            leave_thread(thread, max(end_s - time.monotonic(), 0.0))

    def _run(self, items: _Queue) -> None:
        # Collectives that ended while their threads were in C++, and may have been waited for there
        left: list[_UnderWay] = []
        while (item := self._next(items, left)) is not None:
            left = [one for one in left if one.call.thread != item.call.thread]
            try:
                in_cpp = self._wait_for(item)
            except Exception:
                self._complete(item.slot, ERROR)
                continue
            finally:
                for place in item.places:
                    if self._slots.get(place) == item.slot:
                        self._slots.pop(place, None)
            self._pending.pop(item.work, None)
            if self._complete(item.slot) and in_cpp:
                left.append(item)

    def _next(
        self,
        items: _Queue,
        left: list[_UnderWay],
    ) -> _UnderWay | None:
        """Returns the next collective, or None if there are no more.

        Meanwhile, it determines whether the program waited for the collectives in ``left``, and
        removes them.
        """
        while any(one.call.latest == one.slot for one in left):
            try:
                came = [items.get(timeout=LOOK_S)]
            except queue.Empty:
                came = []
            for one in [*left]:
                if not self._is_in(one.call):
                    if one.call.latest == one.slot:
                        self._recorder.amend(one.slot, wait_ns=one.issued_ns)
                    left.remove(one)
            if came:
                return came[0]
        return items.get()

    def _wait_for(self, item: _UnderWay) -> bool:
        """Waits for a collective; returns whether its thread stayed in C++ meanwhile.

        After a while, such a thread counts as waiting.
        """
        in_cpp = False
        for limit_s in (RETURN_S, NOTICED_S):
            try:
                self._wait(item.work, timedelta(seconds=limit_s))
                return in_cpp or self._is_in(item.call)
            except Exception:  # the limit, or an error that the wait below raises again
                in_cpp = self._is_in(item.call)
        if in_cpp:
            self._recorder.wait(item.slot)
        try:
            self._wait(item.work)
        except Exception:
            if not in_cpp:
                self._recorder.wait(item.slot)  # it failed during a wait, so it was not rejected
            raise
        return in_cpp

    def _is_in(self, call: _Call) -> bool:
        """Returns whether the thread has stayed in C++ since the call.

        Python functions called by C++ do not count as a return.
        """
        frame = current_frames().get(call.thread)
        while frame is not None and _where(frame) != call.frame:
            frame = frame.f_back
        return frame is not None and self._blocks[call.thread] == call.blocks


def _where(frame: FrameType | None) -> tuple[int, int]:
    """Returns a frame's call and current instruction without keeping the frame alive."""
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)
