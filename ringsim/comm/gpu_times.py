"""Measures when GPU operations began to block the program's stream, and when they ended.

The times come from CUDA events. On NCCL, ``wait()`` returns as soon as the stream has been told to
wait, long before the GPU is done. So one event is recorded on the stream before the wait, and one
after it. CUDA measures the time between two events, not the time of one event. So some events, the
*anchors*, are tied to the host's clock: they are recorded on a separate stream, on which nothing is
queued, between two readings of that clock::

    host     read |-| read    wait() returns                               read |-| read
    GPU            anchor ....... other kernels .... begin ===== end .........  anchor
                 first operation                                         the record is read

Times between two anchors are interpolated, so clock drift does no harm. Nothing waits for the GPU:
an operation whose events have not passed when the record is read is in flight.
Events are queried only when the record is read, because a query while any thread captures a CUDA
graph can spoil the capture.

Source:
    NVIDIA, "CUDA Runtime API", sections on events and stream capture: elapsed time is a float of
    milliseconds, queries are unsafe during a capture. github.com/pytorch/pytorch/issues/104487: a
    capture spoiled by a query.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from ringsim.comm.torch_private import gpu_backend
from ringsim.traces.events import IN_FLIGHT, OK
from ringsim.traces.units import count

MAX_KEPT = 1 << 15  # operations whose events are still to be read: two events each
# valid until the record is read, and permanently if the rank is killed before
NOT_READ = (
    "With NCCL, wait() returns once the work is queued. Without CUDA events, done is not the "
    "time at which the GPU finished."
)
NO_EVENT = "blocked the stream before an event could be recorded"
_TRIES = 4  # the most precise of this many anchors is used
# An anchor passes within microseconds. If several processes share a GPU, each process gets time
# slices of about 2 ms, and the anchor passes in this process's slice.
_TIE_NS = 10_000_000
_CAPTURED = "had been captured in a CUDA graph"
_TOO_MANY = f"had {MAX_KEPT:,} later ones behind them, all of which were still unread"
_REFUSED = "got no event from CUDA"
_UNTIED = "could not be tied to the host's clock because the GPU was busy"
_NOT_QUERIED = "could not be queried when the record was read"


class Begun(NamedTuple):
    """The start of an operation: the GPU, and the event or the reason why the event is missing."""

    gpu: torch.device
    event: torch.cuda.Event | str


class _Anchor(NamedTuple):
    event: torch.cuda.Event
    host_ns: int
    within_ns: int


class _Kept(NamedTuple):
    """An operation's events, the slots of its records, and the time at which wait() returned."""

    begin: torch.cuda.Event
    end: torch.cuda.Event
    slots: list[int]
    waited_ns: int


@dataclass
class GpuTimes:
    """Times operations with CUDA events, and writes the times into the operations' records.

    Any thread may call ``begin`` and then ``end`` around code that blocks its stream. These methods
    do not block, and no method raises an error.

    Args:
        amend: the recorder's method ``amend(slot, wait_ns=..., done_ns=..., status=...)``.
        rank: the rank of the operations, for the sentences that ``read`` returns.
        now: the host's clock, in ns.
    """

    amend: Callable[..., None]
    rank: int
    now: Callable[[], int] = time.monotonic_ns
    _clocks: dict[torch.device, _GpuClock] = field(default_factory=dict)

    def begin(self, gpu: torch.device) -> Begun:
        """Records that the program's stream is about to block; returns the argument for ``end``."""
        return Begun(gpu, self._find_clock(gpu).record())

    def end(self, begun: Begun, slots: list[int]) -> None:
        """Records that the operations in these slots no longer block the program's stream."""
        clock, begin, waited_ns = self._find_clock(begun.gpu), begun.event, self.now()
        end = begin if isinstance(begin, str) else clock.record()
        if isinstance(begin, str) or isinstance(end, str):
            clock.missed[str(end)] += len(slots)
        else:
            clock.kept.append(_Kept(begin, end, slots, waited_ns))
            if len(clock.kept) > MAX_KEPT:  # a hang needs the latest ones
                with contextlib.suppress(IndexError):  # another thread has just read them
                    clock.missed[_TOO_MANY] += len(clock.kept.popleft().slots)

    def read(self) -> list[str]:
        """Writes the times of events that have passed into the operations' records.

        Operations whose events have not passed are in flight, until the record is read again. This
        method queries the GPUs without waiting for them. Call it when the record is read and the
        program is not capturing a graph.

        Returns:
            Sentences that describe the times of the operations.
        """
        words = []
        for gpu, clock in list(self._clocks.items()):
            self._read_one(clock)
            times = f"On rank {self.rank}, {gpu}"
            if clock.read:
                words.append(
                    f"{times}: the times of {count(clock.read, 'operation')} come from CUDA "
                    f"events, within {clock.within_ns:,} ns of the host's clock. wait is the time "
                    "at which the stream reached the operation, and done is the time at which "
                    "the stream passed it."
                )
            if clock.open:
                words.append(
                    f"{times}: {count(clock.open, 'operation')} had not ended when the record was "
                    "read. wait is the time at which wait() returned, and done is missing."
                )
            left = sum(len(each.slots) for each in list(clock.kept)) - clock.open
            for why, missed in (clock.missed + Counter({_NOT_QUERIED: left})).items():
                words.append(
                    f"{times}: {count(missed, 'operation')} {why}. The records keep the host's "
                    "times, so done is the time at which wait() returned."
                )
        return words

    def _find_clock(self, gpu: torch.device) -> _GpuClock:
        return self._clocks.get(gpu) or self._clocks.setdefault(gpu, _GpuClock(gpu, self.now))

    def _read_one(self, clock: _GpuClock) -> None:
        taken: list[_Kept] = []
        with contextlib.suppress(IndexError):  # other threads may add or take some
            taken.extend(clock.kept.popleft() for _ in range(len(clock.kept)))
        clock.open = 0
        try:
            with torch.cuda.device(clock.gpu):
                start, end = clock.anchor, None
                if start is not None and not torch.cuda.is_current_stream_capturing():
                    passed = [each.end.query() for each in taken]
                    self._settle(clock, taken, passed)
                    end = clock.tie()
                if start is None or end is None:
                    clock.kept.extendleft(reversed(taken))
                    return
                done = list(itertools.compress(taken, passed))
                events = [event for each in done for event in (each.begin, each.end)]
                places_ns, rounding_ns = _place(start.event, [*events, end.event])
        except RuntimeError:  # a GPU error: the program's own operations report it
            clock.kept.extendleft(reversed(taken))
            return
        clock.kept.extendleft(
            each for each, has in zip(reversed(taken), reversed(passed), strict=True) if not has
        )
        span_ns = places_ns.pop()
        scale = (end.host_ns - start.host_ns) / span_ns if span_ns > 0 else 1.0
        times = [start.host_ns + round(place_ns * scale) for place_ns in places_ns]
        for each, wait_ns, done_ns in zip(done, times[::2], times[1::2], strict=True):
            for slot in each.slots:
                self.amend(slot, wait_ns=wait_ns, done_ns=done_ns)
            clock.read += len(each.slots)
        clock.anchor = end
        if done:
            # Rounding shifts each event, and also the anchor at the end.
            clock.within_ns = max(
                clock.within_ns, max(start.within_ns, end.within_ns) + 2 * rounding_ns
            )

    def _settle(self, clock: _GpuClock, taken: list[_Kept], passed: list[bool]) -> None:
        """Records whether operations are in flight; an earlier reading may have said otherwise."""
        for each, has in zip(taken, passed, strict=True):
            for slot in each.slots:
                if has:
                    self.amend(slot, done_ns=each.waited_ns, status=OK)
                else:
                    # the same for all operations of a batch
                    self.amend(slot, wait_ns=each.waited_ns, status=IN_FLIGHT)
            clock.open += 0 if has else len(each.slots)


class _GpuClock:
    """The state of one GPU.

    Attributes:
        gpu: the GPU.
        kept: the events still to be read.
        anchor: the latest anchor, from which the times of these events are measured.
        within_ns: the error bound of the times read so far.
        read: the number of operations whose times are known.
        open: the number of operations that had not ended at the latest reading.
        missed: the number of operations whose times will never be known, by reason.
    """

    anchor: _Anchor | None = None
    within_ns = read = open = 0
    _stream: torch.cuda.Stream | None = None

    def __init__(self, gpu: torch.device, now: Callable[[], int]) -> None:
        self.gpu = gpu
        self.kept: deque[_Kept] = deque()
        self.missed: Counter[str] = Counter()
        self._now = now

    def record(self) -> torch.cuda.Event | str:
        """Records an event on the program's stream; returns the event or the reason it failed."""
        try:
            # by number, because looking up the device takes longer than recording an event
            with torch.cuda.device(self.gpu.index):
                if torch.cuda.is_current_stream_capturing():
                    return _CAPTURED
                # the only query of the GPU while the program runs
                if self._stream is None:
                    self._stream = torch.cuda.Stream()
                    self.anchor = self.tie()
                if self.anchor is None:
                    return _UNTIED
                event = torch.cuda.Event(enable_timing=True)
                event.record(torch.cuda.current_stream(self.gpu.index))
        except RuntimeError:  # the program's own operations report the error
            return _REFUSED
        return event

    def tie(self) -> _Anchor | None:
        """Returns an anchor, or None if the stream for anchors is busy.

        The stream may be busy because torch's pool can give the same stream to other users.
        """
        anchors: list[_Anchor] = []
        deadline = self._now() + _TIE_NS
        for _ in range(_TRIES):
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._stream)  # the first record creates the event, which takes longer
            before = self._now()
            event.record(self._stream)
            while not event.query():
                if self._now() > deadline:
                    return min(anchors, key=attrgetter("within_ns"), default=None)
            after = self._now()
            anchors.append(_Anchor(event, (before + after) // 2, (after - before + 1) // 2))
        return min(anchors, key=attrgetter("within_ns"))


def _place(start: torch.cuda.Event, events: Iterable[torch.cuda.Event]) -> tuple[list[int], int]:
    """Returns each event's time after ``start`` in ns, and the rounding error of the last time.

    The times are added from event to event, because elapsed times are 24-bit floats: they are
    exact to the ns below 16 ms, but after an hour only to 0.2 ms.
    """
    places, place_ns, rounding_ns = [], 0, 0.0
    for event in events:
        step_ns = start.elapsed_time(event) * 1e6
        place_ns += round(step_ns)
        rounding_ns += abs(step_ns) / (1 << 24) if abs(step_ns) >= 1 << 24 else 0
        places.append(place_ns)
        start = event
    return places, round(rounding_ns)


def is_nccl(group: ProcessGroup) -> bool:
    """Returns whether a group uses NCCL on GPUs, regardless of its backend for host tensors."""
    return "nccl" in gpu_backend(group)


def find_gpu(value: Any) -> torch.device | None:
    """Returns the GPU that holds the first GPU tensor, or None if there is no such tensor.

    The function searches lists and tuples at any depth.
    """
    if isinstance(value, torch.Tensor):
        return value.device if value.is_cuda else None
    return (
        next(filter(None, map(find_gpu, value)), None) if isinstance(value, list | tuple) else None
    )
