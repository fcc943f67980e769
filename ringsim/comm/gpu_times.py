"""When operations on a GPU began to block the program's stream, and when they were done.

CUDA events, tied to the host's clock. On NCCL ``wait()`` returns once the stream has been told to
wait, long before the GPU is done. So one event is recorded on the stream before it, and one after.
CUDA tells the time between two events, not the time of one; some are therefore tied to the host's
clock, the *anchors*, recorded on a stream of their own, where nothing is queued, between two looks
at that clock::

    host     look |-| look    wait() returns                               look |-| look
    GPU            anchor ....... other kernels .... begin ===== end .........  anchor
                 first operation                                         the record is read

Times between two anchors are interpolated, so clocks that drift apart do no harm. Nothing waits for
the GPU. Events are queried only when the record is read: a query while any thread captures a CUDA
graph can spoil the capture.

Source:
    NVIDIA, "CUDA Runtime API", sections on events and stream capture: elapsed time is a float of
    milliseconds, queries are unsafe during a capture. github.com/pytorch/pytorch/issues/104487: a
    capture that was spoilt so.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import torch
from torch.distributed import ProcessGroup

from ringsim.comm.torch_private import gpu_backend

MAX_KEPT: Final = 1 << 15  # operations whose events wait to be read: two events each
# True until the record is read, and for good if the rank is killed before.
NOT_READ: Final = (
    "On NCCL, wait() returns once the work is queued: without the CUDA events, done is not when "
    "the GPU was done."
)
NO_EVENT: Final = "blocked the stream before an event could be recorded"
_TRIES: Final = 4  # the narrowest of so many anchors is taken
# An anchor passes within microseconds. Where several processes share a GPU they take turns of about
# 2 ms, and it passes in this process's turn.
_TIE_NS: Final = 10_000_000
_CAPTURED: Final = "were captured in a CUDA graph"
_TOO_MANY: Final = f"came while {MAX_KEPT:,} others were to be read"
_REFUSED: Final = "got no event from CUDA"
_UNTIED: Final = "could not be tied to the host's clock, for the GPU was busy"
_NOT_PASSED: Final = "had not passed, or could not be asked, when the record was read"


class Begun(NamedTuple):
    """The start of an operation: its GPU, and the event there, or why there is none."""

    gpu: torch.device
    event: torch.cuda.Event | str


class _Anchor(NamedTuple):
    event: torch.cuda.Event
    host_ns: int
    within_ns: int


def _width(anchor: _Anchor) -> int:
    return anchor.within_ns


class _Kept(NamedTuple):
    """An operation's events, and the slots of its records."""

    begin: torch.cuda.Event
    end: torch.cuda.Event
    slots: list[int]


class GpuTimes:
    """Writes the times of CUDA events into the records of operations.

    Any thread may call ``begin`` and then ``end``, around what blocks its stream. Neither blocks,
    and no method raises.

    Args:
        amend: ``amend(slot, wait_ns=..., done_ns=...)`` writes them down: that of the recorder.
        rank: whose operations they are, for what ``read`` says.
        now: the host's clock, ns.
    """

    def __init__(
        self, amend: Callable[..., None], rank: int, now: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._amend = amend
        self._rank = rank
        self._now = now
        self._clocks: dict[torch.device, _GpuClock] = {}

    def begin(self, gpu: torch.device) -> Begun:
        """Records that the program's stream is about to be blocked.

        Returns what ``end`` must be given.
        """
        clock = self._find_clock(gpu)
        return Begun(gpu, _TOO_MANY if len(clock.kept) >= MAX_KEPT else clock.record())

    def end(self, begun: Begun, slots: list[int]) -> None:
        """Records that the operations with these slots no longer block the program's stream."""
        clock, begin = self._find_clock(begun.gpu), begun.event
        end = begin if isinstance(begin, str) else clock.record()
        if isinstance(begin, str) or isinstance(end, str):
            clock.missed[str(end)] += len(slots)
        else:
            clock.kept.append(_Kept(begin, end, slots))

    def read(self) -> list[str]:
        """Writes the times of events that have passed into their records.

        Says in words which times the operations have. Queries the GPUs and waits for none. Call it
        when the record is read and the program is not capturing a graph.
        """
        words = []
        for gpu, clock in list(self._clocks.items()):
            self._read_one(clock)
            times = f"On rank {self._rank}, {gpu}"
            if clock.read:
                words.append(
                    f"{times}: {_count(clock.read)} got the times of CUDA events, within "
                    f"{clock.within_ns:,} ns of the host's clock: "
                    "wait is when the stream came to the operation, done when it got past."
                )
            late = Counter({_NOT_PASSED: sum(len(each.slots) for each in list(clock.kept))})
            for why, count in (clock.missed + late).items():
                words.append(
                    f"{times}: {_count(count)} kept the host's times, done is when wait() "
                    f"returned: they {why}."
                )
        return words

    def _find_clock(self, gpu: torch.device) -> _GpuClock:
        return self._clocks.get(gpu) or self._clocks.setdefault(gpu, _GpuClock(gpu, self._now))

    def _read_one(self, clock: _GpuClock) -> None:
        # other threads may be adding more
        taken = [clock.kept.popleft() for _ in range(len(clock.kept))]
        try:
            with torch.cuda.device(clock.gpu):
                start, end = clock.anchor, None
                if start is not None and not torch.cuda.is_current_stream_capturing():
                    passed = [each.end.query() for each in taken]
                    end = clock.tie()
                if start is None or end is None:
                    clock.kept.extendleft(reversed(taken))
                    return
                done = list(itertools.compress(taken, passed))
                events = [event for each in done for event in (each.begin, each.end)]
                places_ns, rounding_ns = _place(start.event, [*events, end.event])
        except RuntimeError:  # a GPU in trouble: the program hears of it from its own operations
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
                self._amend(slot, wait_ns=wait_ns, done_ns=done_ns)
            clock.read += len(each.slots)
        clock.anchor = end
        if done:
            # Rounding moves an event, and once more the anchor at the end of the line.
            clock.within_ns = max(
                clock.within_ns, max(start.within_ns, end.within_ns) + 2 * rounding_ns
            )


class _GpuClock:
    """The state of one GPU.

    Attributes:
        gpu: which.
        kept: events still to be read.
        anchor: the last one, from which these count.
        within_ns: how far a time that was read may be off.
        read: how many operations have got their times.
        missed: how many never will, by reason.
    """

    def __init__(self, gpu: torch.device, now: Callable[[], int]) -> None:
        self.gpu = gpu
        self.kept: deque[_Kept] = deque()
        self.anchor: _Anchor | None = None
        self.within_ns = 0
        self.read = 0
        self.missed: Counter[str] = Counter()
        self._now = now
        self._stream: torch.cuda.Stream | None = None

    def record(self) -> torch.cuda.Event | str:
        """Records an event on the program's stream. Returns it, or why there is none."""
        try:
            # with its number: looking it up takes longer than recording an event
            with torch.cuda.device(self.gpu.index):
                if torch.cuda.is_current_stream_capturing():
                    return _CAPTURED
                # the one time at which the GPU is asked while the program runs
                if self._stream is None:
                    self._stream = torch.cuda.Stream()
                    self.anchor = self.tie()
                if self.anchor is None:
                    return _UNTIED
                event = torch.cuda.Event(enable_timing=True)
                event.record(torch.cuda.current_stream(self.gpu.index))
        except RuntimeError:  # the program hears of it from its own operations
            return _REFUSED
        return event

    def tie(self) -> _Anchor | None:
        """Makes an anchor.

        None if its stream is busy: others may have got the same one from torch's pool.
        """
        anchors: list[_Anchor] = []
        deadline = self._now() + _TIE_NS
        for _ in range(_TRIES):
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._stream)  # makes it, which takes longer than to record it again
            before = self._now()
            event.record(self._stream)
            while not event.query():
                if self._now() > deadline:
                    return min(anchors, key=_width, default=None)
            after = self._now()
            anchors.append(_Anchor(event, (before + after) // 2, (after - before + 1) // 2))
        return min(anchors, key=_width)


def _count(operations: int) -> str:
    return f"{operations:,} operation{'' if operations == 1 else 's'}"


def _place(start: torch.cuda.Event, events: Iterable[torch.cuda.Event]) -> tuple[list[int], int]:
    """Returns how many ns after ``start`` each event passed.

    Also how far rounding may have moved the last one. It goes from event to event, since elapsed
    times are floats of 24 bits: exact to the ns below 16 ms, but an hour only to 0.2 ms.
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
    """Returns whether a group's operations on GPUs are NCCL's.

    Independent of the backend for tensors of the host.
    """
    return "nccl" in gpu_backend(group)


def find_gpu(value: Any) -> torch.device | None:
    """Returns the GPU of the first tensor on one, in lists and tuples of any depth too.

    None if there is none.
    """
    if isinstance(value, torch.Tensor):
        return value.device if value.is_cuda else None
    return (
        next(filter(None, map(find_gpu, value)), None) if isinstance(value, list | tuple) else None
    )
