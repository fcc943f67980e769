"""The functions that write a rank's records while its operations run: the part of the recorder that has to be fast.

They are closures over one preallocated ``struct`` and one memory map. An operation costs one record written when it is posted, one number
when the program begins to wait for it, and two when it is done; nothing is allocated, locked or looked up twice.
"""

from __future__ import annotations

import itertools
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from ringsim.traces.buffer import RECORD_BYTES
from ringsim.traces.call_sites import SPEAKER, CallSites
from ringsim.traces.events import ERROR, IN_FLIGHT, NONE, OK, RECORD

_PEER, _STATUS = (RECORD.fields[name][1] for name in ("peer", "status"))  # type: ignore[index]
_NOT_YET: Final = b"\xff" * 16  # NONE for wait_ns and done_ns
_UNSET: Final[Any] = object()
_NO_OPS: Final[Mapping[str, int]] = {}

# Globals rather than variables of the closures, which Python copies at every call.
_now: Final = time.monotonic_ns
_thread_of: Final = threading.get_ident
_frame_at: Final = sys._getframe
_pack_record: Final = struct.Struct("<q16sQiiiiiiiqI").pack_into  # RECORD_FORMAT with some neighbours joined
_pack_rank: Final = struct.Struct("<i").pack_into

# The stage and the microbatch of the innermost span, joined.
meaning: Final[ContextVar[int]] = ContextVar("ringsim_meaning", default=NONE)
_meaning_of: Final = meaning.get
# The label of the operations that are posted now, where whoever calls them gave one: the name they have in the log.
label_in_force: Final[ContextVar[int]] = ContextVar("ringsim_label", default=NONE)
_label_of: Final = label_in_force.get


class HotPath(NamedTuple):
    """The functions, to be bound once by whoever shows operations to a recorder. A slot is the place of a record.

    Attributes:
        make_post: ``make_post(op, ops={}, poster=None, blocking=None, status=IN_FLIGHT)`` makes the function that begins operations of one
            kind, ``post(group, peer, tag, payload, label=None) -> slot``. It is called by a hook that the library, or the user, called;
            the line is the user's, and the label the one in force where none is given. The slot is None once recording has stopped.
            ``op`` is the operation's code; where a frame of the library's speaking file (see ``CallSites``) on the way to the user bears
            a name in ``ops``, the code there is the better one. ``poster`` and ``blocking``, which calls it, are the library's functions
            on the two commonest ways. ``status`` is the one that a record has from the beginning: ERROR for what is refused at once.
        make_wait: ``make_wait(call, take, otherwise, failed)`` makes a method ``wait(self, timeout)`` around ``call`` that records when
            it is entered and left. ``take(self, None)`` gives the slot of the handle; where it gives None, ``otherwise(self[, timeout])``
            is called instead. ``failed(self)`` is called when ``call`` raises; where it raises, the record stays as it is: the wait was
            cut short, the operation is not done.
        begin_wait: ``begin_wait(slot)``: the program begins to wait.
        finish: ``finish(slot)``: the operation is done.
        finish_at_once: ``finish_at_once(slot)``: it is done, and blocked from its posting until now.
        fail: ``fail(slot)``: it raised.
        set_times: ``set_times(slot, wait_ns, done_ns)``: of a finished one it is known better when it began to block, and when it was done.
            Neither is before the program's own call, which caused it: what says so is inexact, and is set right.
        set_peer: ``set_peer(slot, peer)``: the message from anybody came from ``peer``.
        skip: ``skip() -> slot`` takes a slot that stays empty: what is posted from now on has a later one.
        detach: ``detach()``: what is written from now on goes nowhere, not even to the records that there are.
    """

    make_post: Callable[..., Callable[..., int | None]]
    make_wait: Callable[..., Callable[..., Any]]
    begin_wait: Callable[[int], None]
    finish: Callable[[int], None]
    finish_at_once: Callable[[int], None]
    fail: Callable[[int], None]
    set_times: Callable[[int, int, int], None]
    set_peer: Callable[[int, int], None]
    skip: Callable[[], int]
    detach: Callable[[], None]


def _fit(value: Any) -> int:
    """Returns a peer or tag as it can be written down: NONE for what no column holds (the library itself will refuse it)."""
    return value if isinstance(value, int) and -(1 << 31) <= value < 1 << 31 else NONE


def make_hot_path(memory: Any, grow: Callable[[int], Any], sites: CallSites) -> HotPath:
    """Makes the functions that write records.

    A slot is a record's place counted in words of 8 bytes, so that its times are ``words[slot + 1]`` and ``words[slot + 2]``. Where
    neighbouring columns are known together they are written as one: wait_ns and done_ns, stage and microbatch, op and status.

    Args:
        memory: where the records go, a writable buffer.
        grow: given an offset in bytes, returns the buffer that has room for a record there, None where there is none.
        sites: what each source file is.
    """
    words = memoryview(memory).cast("B").cast("q")
    place_of = sites.places.get
    claim = itertools.count(step=RECORD_BYTES // 8).__next__  # atomic: every thread gets slots of its own

    def make_post(
        op: int, ops: Mapping[str, int] = _NO_OPS, poster: Any = None, blocking: Any = None, status: int = IN_FLIGHT
    ) -> Callable[..., int | None]:
        posted = op | status << 16  # the column after op
        posted_as = {name: code | status << 16 for name, code in ops.items()}
        poster_code = poster and poster.__code__
        blocking_code, blocking_depth, blocking_posted = None, 0, posted
        if blocking:
            function, blocking_depth = blocking, 4  # post, hook, poster, blocking, and then the decorators
            while hasattr(function, "__wrapped__"):
                function, blocking_depth = function.__wrapped__, blocking_depth + 1
            blocking_code, blocking_posted = function.__code__, posted_as[blocking.__name__]

        def post(group: int, peer: int, tag: int, payload: int, label: int | None = None) -> int | None:
            nonlocal memory, words
            state = posted
            frame: Any
            try:
                frame = innermost = _frame_at(2)
                code = frame.f_code
                if code is poster_code:  # the two commonest ways to come here, without a look-up
                    frame = frame.f_back
                    code = frame.f_code
                    if code is blocking_code:
                        state = blocking_posted
                        frame = _frame_at(blocking_depth)
                        code = frame.f_code
            except (ValueError, AttributeError):  # a thread that begins in the library: no frame is the user's
                frame = innermost = _frame_at(1)
                code = frame.f_code
            place = place_of(id(code) + frame.f_lasti)
            while place is None:
                try:
                    file = sites[code.co_filename]
                except KeyError:
                    file = sites.learn(code.co_filename)
                if file >= 0:
                    place = place_of(id(code) + frame.f_lasti) or sites.learn_place(frame)
                    break
                if file == SPEAKER:
                    state = posted_as.get(code.co_name, state)
                frame = frame.f_back
                if frame is None:
                    place = sites.find_stand_in(innermost)
                    break
                code = frame.f_code
            file, line = place
            slot = claim()
            if label is None:
                label = _label_of()
            about = _meaning_of()
            thread = _thread_of()
            try:
                _pack_record(memory, slot * 8, _now(), _NOT_YET, thread, group, payload, label, file, line, peer, tag, about, state)
            except struct.error:
                grown = grow(slot * 8)
                if grown is None:
                    return None
                words = memoryview(grown).cast("B").cast("q")  # before `memory`: who finds room there finds it here
                memory = grown
                values = (thread, group, payload, label, file, line, _fit(peer), _fit(tag), about, state)
                _pack_record(memory, slot * 8, _now(), _NOT_YET, *values)
            return slot

        return post

    def make_wait(
        call: Callable[..., Any], take: Callable[..., int | None], otherwise: Callable[..., Any], failed: Callable[[Any], None]
    ) -> Callable[..., Any]:
        def wait(self: Any, timeout: Any = _UNSET) -> Any:
            slot = take(self, None)
            if slot is None:
                return otherwise(self) if timeout is _UNSET else otherwise(self, timeout)
            words[slot + 1] = _now()
            try:
                result = call(self) if timeout is _UNSET else call(self, timeout)
            except BaseException:
                failed(self)
                fail(slot)
                raise
            words[slot + 2] = _now()
            memory[slot * 8 + _STATUS] = OK
            return result

        return wait

    def begin_wait(slot: int) -> None:
        words[slot + 1] = _now()

    def finish(slot: int) -> None:
        words[slot + 2] = _now()
        memory[slot * 8 + _STATUS] = OK

    def finish_at_once(slot: int) -> None:
        words[slot + 1] = words[slot]
        finish(slot)

    def fail(slot: int) -> None:
        words[slot + 2] = _now()
        memory[slot * 8 + _STATUS] = ERROR

    def set_times(slot: int, wait_ns: int, done_ns: int) -> None:
        words[slot + 1] = wait_ns = max(wait_ns, words[slot + 1])
        words[slot + 2] = max(done_ns, wait_ns, words[slot + 2])

    def set_peer(slot: int, peer: int) -> None:
        _pack_rank(memory, slot * 8 + _PEER, peer)

    def skip() -> int:
        slot = claim()
        if slot * 8 < len(memory):
            words[slot] = NONE  # a reader that follows sees that nothing will come here
        return slot

    def detach() -> None:
        nonlocal memory, words
        memory = bytearray(memory)
        words = memoryview(memory).cast("q")

    return HotPath(make_post, make_wait, begin_wait, finish, finish_at_once, fail, set_times, set_peer, skip, detach)
