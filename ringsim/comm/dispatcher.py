"""Shows the collectives that C++ issues to the recorder.

Those of DistributedDataParallel, of functional collectives, of DTensor. They never call the methods
of Python's ``ProcessGroup``, but go through torch's dispatcher, as operators ``c10d::allreduce_``,
``c10d::broadcast_`` and so on. Its key ``BackendSelect`` is free for them: what is registered there
is called first, and hands on to what would have been called without it. That is done once in the
life of a process, and while nothing is recorded a call is handed on at once: neither registering
nor removing is safe while another thread is in an operator.

An operation that cannot be read is handed on without a record: DistributedDataParallel's reducer
does not survive an error here.

The program waits for such a collective in C++, mostly unseen. So a thread for each group waits as
well, for one after the other, and writes down when each was done. It also does so for collectives
that torch's own Python code starts and may forget, as under its ``Join``. A callback on their
futures would take the interpreter in Gloo's own thread, and delay every operation behind it.
"""

from __future__ import annotations

import functools
import queue
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch.distributed import ProcessGroup, Work

from ringsim.comm.bootstrap import leave_thread
from ringsim.comm.calls import METHODS, Reading, find_tensors
from ringsim.comm.torch_private import Hook, keys_below_backend_select, tree_leaves
from ringsim.traces.events import ERROR, NONE, OK
from ringsim.traces.recorder import Recorder

__all__ = ["Dispatcher", "Issued", "LateWaits", "get_dispatcher"]

# the least limit that torch knows; by then a call into C++ that does not wait has come back
RETURN_S: Final = 0.001
LOOK_S: Final = 0.003  # how often to look whether one has that does
NOTICED_S: Final = 0.5  # C++ may wait for so long unseen
JOIN_S: Final = 2.0  # what is still in flight when recording ends gets this long
_DONE: Final = object()


class Issued(NamedTuple):
    """A collective on its way through the dispatcher.

    Attributes:
        reading: which one it is.
        group: where.
        args: the others.
        tensors: those that its size is reckoned from.
        made: those that it fills.
        root: the group rank of its root, NONE if it has none.
        hand_on: does it; what it returns is to be returned.
    """

    reading: Reading
    group: ProcessGroup
    args: tuple[Any, ...]
    tensors: list[torch.Tensor]
    made: list[torch.Tensor]
    root: int
    hand_on: Callable[[], Any]


class Dispatcher:
    """The functions registered with torch's dispatcher, and who is shown what comes by.

    Attributes:
        listener: is called with each collective, and does it; None while nothing is recorded.
        on_wait: is called with a tensor when the program begins to wait for the functional
            collective that makes it; what it returns is called when the program has waited.
        complete: whether all collectives come by: False in a version of torch that has another
            dispatcher.
        recorded_elsewhere: by thread, ``now`` is whether what comes by is recorded by whoever
            called it.
    """

    def __init__(self) -> None:
        self.listener: Callable[[Issued], Any] | None = None
        self.on_wait: Callable[[torch.Tensor], Callable[[], None]] | None = None
        self.recorded_elsewhere = threading.local()
        self._libraries = [
            torch.library.Library(name, "IMPL") for name in ("c10d", "_c10d_functional")
        ]
        below = keys_below_backend_select()
        self.complete = below is not None
        if below is None:
            return
        for method, reading in METHODS.items():
            name = f"{method}_" if hasattr(torch.ops.c10d, f"{method}_") else method
            operator = getattr(torch.ops.c10d, name, None)
            if operator is not None and method != "monitored_barrier":  # which only Python calls
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
            has_waited = on_wait(tensor)
            result = hand_on(keys & below, tensor)
            has_waited()
            return result

        return kernel


def _holds_data(tensor: torch.Tensor) -> bool:
    """Tells a tensor from one that only has a shape, as compilers pass through here."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta


@functools.cache
def get_dispatcher() -> Dispatcher:
    """Returns the one of this process; the first call registers it."""
    return Dispatcher()


@dataclass(slots=True)
class _Call:
    """A call into C++ that issues collectives: of which thread, from where, and the latest one."""

    thread: int
    frame: tuple[int, int]
    blocks: int
    latest: int = NONE


class _UnderWay(NamedTuple):
    """A collective that no Python code waits for.

    Its record, the places that it fills, and the call that issued it.
    """

    work: Work
    slot: int
    places: list[int]
    issued_ns: int
    call: _Call


class LateWaits:
    """Waits for collectives that the program waits for in C++, and writes down when each was done.

    Those of one group are waited for one after the other, by a thread of their own. Where the
    program is seen to have waited, it is not left to that thread.

    DistributedDataParallel waits when it has issued its last bucket. So a collective counts as
    waited for from when it was issued if its thread comes back from C++ after it was done, and has
    issued no other one by then.

    Args:
        recorder: where they are recorded.
        wait: waits for a handle, unseen; may be given a limit.
        pending: handles that Python may wait for as well, with their records. One that is done is
            taken out.
    """

    def __init__(self, recorder: Recorder, wait: Hook, pending: dict[Work, int]) -> None:
        self._recorder, self._wait, self._pending = recorder, wait, pending
        self._queues: dict[int, queue.SimpleQueue[_UnderWay | None]] = {}  # by group
        self._threads: list[threading.Thread] = []
        self._slots: dict[int, int] = {}  # by the address of what a collective fills
        # slots of what is not done; who takes one out completes it
        self._open: dict[int, None] = {}
        # by thread, how many blocks of record_function it has entered
        self._blocks: defaultdict[int, int] = defaultdict(int)
        self._calls: dict[int, _Call] = {}  # the latest of each thread

    def add(
        self,
        work: Work,
        slot: int,
        group: int,
        made: Sequence[torch.Tensor] = (),
        frame: FrameType | None = None,
    ) -> None:
        """Writes down when a collective is done, in the record at ``slot``.

        Args:
            work: its handle.
            slot: its record.
            group: the number of its group.
            made: the tensors that it fills.
            frame: of the Python function that called into C++, where there is one.
        """
        if group not in self._queues:
            self._queues[group] = queue.SimpleQueue()
            name = f"ringsim-late-waits-{group}"
            thread = threading.Thread(
                target=self._run, args=(self._queues[group],), name=name, daemon=True
            )
            self._threads.append(thread)
            thread.start()
        places = [tensor.data_ptr() for tensor in made]
        self._open[slot] = None
        self._slots.update(dict.fromkeys(places, slot))
        ident = threading.get_ident()
        place, blocks, call = _where(frame), self._blocks[ident], self._calls.get(ident)
        if call is None or (call.frame, call.blocks) != (place, blocks):
            call = self._calls[ident] = _Call(ident, place, blocks)
        call.latest = slot
        self._queues[group].put(_UnderWay(work, slot, places, time.monotonic_ns(), call))

    def begin_tensor(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Like ``begin``, for what fills ``tensor``."""
        slot = self._slots.get(tensor.data_ptr())
        return self.begin(() if slot is None else (slot,))

    def begin(self, slots: Sequence[int]) -> Callable[[], None]:
        """Writes down that the program begins to wait for those collectives that are not done.

        Returns:
            A function to be called when the program has waited.
        """
        begun = [slot for slot in slots if slot in self._open]
        for slot in begun:
            self._recorder.wait(slot)
        return functools.partial(self._end, begun)

    def _end(self, slots: list[int]) -> None:
        for slot in slots:
            if not self._complete(slot):
                self._recorder.amend(slot, done_ns=NONE)  # not before the wait, which came too late

    def _complete(self, slot: int, status: int = OK) -> bool:
        """Completes a record, unless another thread does."""
        mine = self._open.pop(slot, _DONE) is not _DONE
        if mine:
            self._recorder.complete(slot, status)
        return mine

    def enter_block(self) -> None:
        """Notes that the thread is back from C++.

        Python uses frames again, and DistributedDataParallel's forward pass is a block.
        """
        self._blocks[threading.get_ident()] += 1

    def stop(self) -> None:
        """Ends when what was added is done, or has had its time."""
        for each in self._queues.values():
            each.put(None)
        end_s = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(end_s - time.monotonic(), 0.0))
            leave_thread(thread)

    def _run(self, items: queue.SimpleQueue[_UnderWay | None]) -> None:
        # Those that were done while their threads were in C++: perhaps what these waited for.
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
        items: queue.SimpleQueue[_UnderWay | None],
        left: list[_UnderWay],
    ) -> _UnderWay | None:
        """Returns the next collective, None at the end.

        Meanwhile it finds out whether those in ``left`` were waited for, and takes them out.
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
        """Waits for a collective; returns whether its thread stayed in C++.

        There it counts as waiting after a while.
        """
        in_cpp = False
        for limit_s in (RETURN_S, NOTICED_S):
            try:
                self._wait(item.work, timedelta(seconds=limit_s))
                return in_cpp or self._is_in(item.call)
            except Exception:  # the limit, or what the wait below raises again
                in_cpp = self._is_in(item.call)
        if in_cpp:
            self._recorder.wait(item.slot)
        try:
            self._wait(item.work)
        except Exception:
            if not in_cpp:
                self._recorder.wait(item.slot)  # it broke while somebody waited: it was not refused
            raise
        return in_cpp

    def _is_in(self, call: _Call) -> bool:
        """Whether the thread has not come back from C++ since.

        Functions in Python that C++ calls do not count.
        """
        frame = sys._current_frames().get(call.thread)
        while frame is not None and _where(frame) != call.frame:
            frame = frame.f_back
        return frame is not None and self._blocks[call.thread] == call.blocks


def _where(frame: FrameType | None) -> tuple[int, int]:
    """Returns at which instruction of which call a thread is.

    Does not keep alive what it holds.
    """
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)
