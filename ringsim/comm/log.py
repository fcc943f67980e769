"""The log of ``ringsim.comm``: which operations ran how long with which bandwidth, computed from what the recorder wrote.

On means recorded: ``configure(enabled=True)`` starts the recorder, or shares the one at work, and there is no second stopwatch. The log has
the operations that were selected when they were called: all of them (``prof_all``), those of some names (``prof_ops``), or one call
(``prof=True``). The name of a selected operation stands in the column ``label`` of its record, where it is not the operation's own::

    ringsim.comm.all_reduce(t, log_name="gradients")
      |- label "gradients" is in force          call()
      |- torch.distributed.all_reduce(t)        the hooks write a record: post, wait, done, group, payload, label
      |- label is no more
    ringsim.comm.log_summary()                  records -> rows

Nothing is synchronised, and no operation is blocked that would not be blocked without the log. On NCCL an operation is done when the GPU
is, as far as CUDA events tell when the log is read, and blocked while the program's stream is; the lines of ``verbose`` are written before
that, with the times of the host.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Token
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from ringsim.comm.log_records import Connection, Records, Segment, begin_records, end_records, read_segment
from ringsim.comm.log_settings import read_settings
from ringsim.costs import algbw_gb_per_s, busbw_gb_per_s
from ringsim.state import change_state, get_state
from ringsim.traces.events import OK, OP_CODES, OP_NAMES, Group
from ringsim.traces.recorder import CallSites, Recorder, label_in_force
from ringsim.traces.units import bytes_text, time_text

__all__ = [
    "LogOptions",
    "call",
    "configure",
    "enter_label",
    "interrupt_log",
    "pause_log",
    "reset_log",
    "resume_log",
    "write_lines",
]

_LOGGER: Final = logging.getLogger("ringsim.comm")
_OPEN: Final = (1 << 63) - 1  # the end of a period that has not ended


@dataclass(frozen=True)
class LogOptions:
    """What is logged, and what has been.

    Attributes:
        prof_all: whether all operations are selected.
        prof_ops: names of operations, or of the log, that are selected.
        verbose: whether a line is written through ``logging`` for each selected operation.
        debug: whether the name of the function that calls is added to the name in the log.
        records: where the operations are recorded now, None while the log is stopped.
        periods: when all operations were selected, of what is recorded there: from and to, as counts of records.
        kept: what was recorded before, elsewhere.
        plain: whether nothing needs to be done for an operation that is called without ``prof`` and ``log_name``, and whose record
            tells its name: all are selected, and none is written about; or none is selected.
        idle: whether none is selected.
    """

    prof_all: bool = True
    prof_ops: frozenset[str] = frozenset()
    verbose: bool = False
    debug: bool = False
    records: Records | None = None
    periods: tuple[tuple[int, int], ...] = ()
    kept: tuple[Segment, ...] = ()
    plain: bool = field(init=False)
    idle: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "idle", not self.prof_all and not self.prof_ops)
        object.__setattr__(self, "plain", self.idle or (self.prof_all and not (self.verbose or self.debug)))

    def selects(self, op: str, name: str, prof: bool) -> bool:
        """Returns whether an operation is to be logged: all are, its name is listed, or this call asks for it."""
        return self.prof_all or prof or op in self.prof_ops or name in self.prof_ops

    @property
    def met(self) -> frozenset[Connection]:
        """The connections of the segments that are kept."""
        return frozenset().union(*(segment.met for segment in self.kept))


def call(
    op: str, function: Callable[..., Any], args: tuple[Any, ...], prof: bool = False, log_name: str | None = None, debug: str | None = None
) -> Any:
    """Runs an operation of ``ringsim.comm`` while there is a log; it is logged if it is selected.

    Args:
        op: its name, as torch spells it.
        function: the backend's function.
        args: its arguments.
        prof: whether this call is selected, whatever the settings say.
        log_name: what the log calls it; None for the name of the operation.
        debug: the name of the caller, for ``configure(debug=True)``; None to find it.

    Returns:
        What the function returns, handles included.
    """
    log = get_state().log
    if log is None or log.records is None:
        return function(*args)
    name = log_name or op
    if not log.selects(op, name, prof):
        return function(*args)
    if log.plain and not prof and name == op and op in OP_CODES:
        return function(*args)  # its record says it all
    recorder = log.records.recorder
    before = recorder.bookmark() if log.verbose else 0
    label = enter_label(log, name, debug)
    try:
        return function(*args)
    finally:
        label_in_force.reset(label)
        if log.verbose:
            write_lines(recorder, before)


def enter_label(log: LogOptions, name: str, debug: str | None) -> Token[int]:
    """Puts a name in force for the operations that are posted from now on; returns what takes it back.

    Args:
        log: the log, which records.
        name: what it calls them.
        debug: the name of the caller, None to find it where the log wants it.
    """
    assert log.records is not None
    recorder = log.records.recorder
    if log.debug:
        name = f"{name} in {debug or _find_caller(recorder.sites)}"
    return label_in_force.set(recorder.label(name))


def _find_caller(sites: CallSites) -> str:
    """Returns the name of the innermost function that is the user's."""
    frame = sites.find(sys._getframe(1))
    return "an unknown function" if frame is None else frame.f_code.co_name


def write_lines(recorder: Recorder, before: int) -> None:
    """Writes a line for each operation that this thread has posted since ``before`` (a bookmark), through logger "ringsim.comm"."""
    for record in recorder.records_since(before):
        op, status = OP_NAMES[record["op"]], int(record["status"])
        name = recorder.labels[record["label"]] if record["label"] >= 0 else op
        group = recorder.groups[record["group"]] if record["group"] >= 0 else Group("", (0,))
        size_bytes = recorder.payloads[record["payload"]].size_bytes if record["payload"] >= 0 else 0
        words: list[str] = [f"{name}: {op}" if name != op else op, group.name, bytes_text(size_bytes)]
        if status == OK:
            took_ns = int(record["done_ns"] - record["post_ns"])
            algbw = algbw_gb_per_s(size_bytes, took_ns * 1e-3)
            busbw = busbw_gb_per_s(op, size_bytes, took_ns * 1e-3, len(group.ranks))
            words += [time_text(took_ns), *([f"algbw {algbw:.3f} GB/s, busbw {busbw:.3f} GB/s"] if algbw == algbw else [])]
        else:
            words.append("posted" if status < OK else "failed")
        _LOGGER.info("%s", ", ".join(words))


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Iterable[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Starts or stops the log of this rank, and says what is logged. What is None stays as it is.

    Any rank calls it at any time; it does not block. What was logged stays until ``reset_log``; stopping and starting again adds to it.

    Args:
        deepspeed_config: a DeepSpeed configuration, or its dictionary; its ``comms_logger`` section gives the values below.
        enabled: True starts the log, False stops it: while it is stopped, nothing of it is left in the way of an operation.
        prof_all: whether all operations are logged, those included that do not come through ``ringsim.comm``; at first True.
        prof_ops: if not all: the names of those that are, of operations (``"all_reduce"``) or as given by ``log_name``; at first none.
        verbose: whether to write a line for each operation through ``logging``, logger ``ringsim.comm``, level INFO.
        debug: whether names in the log say which function called.

    Raises:
        ArgumentError: a value is of the wrong kind.

    Example:
        >>> configure(enabled=True, prof_all=False, prof_ops=["all_reduce"])
        >>> get_state().log.prof_ops
        frozenset({'all_reduce'})
        >>> configure(enabled=False, prof_all=True, prof_ops=[])
        >>> get_state().log is None
        True

    Source:
        DeepSpeed, ``deepspeed.comm.configure``: names and order of the arguments.
    """
    settings = read_settings(deepspeed_config, enabled, prof_all, prof_ops, verbose, debug)
    state = get_state()
    log = state.log or state.stopped_log or LogOptions()
    enabled = settings.pop("enabled", state.log is not None)
    log = replace(log, **settings)
    if enabled and log.records is None:
        resume_log(log)
    elif enabled:
        change_state(log=replace(log, periods=_change_period(log)))
    else:
        change_state(log=log if log.records else None, stopped_log=log)
        interrupt_log()


def _change_period(log: LogOptions) -> tuple[tuple[int, int], ...]:
    """Returns the periods in which all operations are selected, with one that is open if they are from now on."""
    now = 0 if log.records is None else log.records.recorder.count
    periods = tuple((begin, min(end, now)) for begin, end in log.periods)
    return (*periods, (now, _OPEN)) if log.prof_all else periods


def resume_log(log: LogOptions | None) -> None:
    """Starts a log that ``interrupt_log`` gave; with None does nothing."""
    if log is not None:
        log = replace(log, records=begin_records(), periods=())
        change_state(log=replace(log, periods=_change_period(log)), stopped_log=None)


def interrupt_log() -> LogOptions | None:
    """Stops the log, keeping what it has, so that another recorder may come or go. Returns it; None if there was none."""
    log = get_state().log
    if log is None or log.records is None:
        return None
    segment = read_segment(log.records, log.periods, log.met)
    stopped = replace(log, records=None, periods=(), kept=(*log.kept, segment))
    change_state(log=None, stopped_log=stopped)
    end_records(log.records)
    return stopped


def reset_log() -> None:
    """Forgets what this rank has logged. The log goes on, or stays stopped. It does not block.

    An operation that is posted now and still to be waited for is forgotten, too.

    Example:
        >>> reset_log()
    """
    log, stopped = get_state().log, get_state().stopped_log
    if log is not None and log.records is not None:
        records = replace(log.records, first=log.records.recorder.count)
        change_state(log=replace(log, records=records, periods=_change_period(replace(log, periods=())), kept=_without_events(log.kept)))
    elif stopped is not None:
        change_state(stopped_log=replace(stopped, kept=_without_events(stopped.kept)))


@contextmanager
def pause_log() -> Iterator[None]:
    """Leaves out of the log what this rank does within a with block; the recorder goes on."""
    log = get_state().log
    if log is None:
        yield
        return
    paused = replace(log, periods=_change_period(replace(log, prof_all=False)))
    change_state(log=None, stopped_log=paused)
    try:
        yield
    finally:
        change_state(log=replace(paused, periods=_change_period(paused)), stopped_log=None)


def _without_events(kept: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Empties segments: which connections have been made is still true."""
    return tuple(Segment(each.events.select(np.zeros(0, dtype=np.int64)), each.first[:0], each.met) for each in kept)
