"""The log of ``ringsim.comm``: durations and bandwidths of operations, computed from records.

While the log is on, operations are recorded: ``configure(enabled=True)`` starts a recorder or
shares the active recorder. The log has no clock of its own. An operation is logged if it was
selected when it was called. You can select all operations (``prof_all``), certain names
(``prof_ops``), or a single call (``prof=True``). If the log uses a name other than the operation's
own, that name is the ``label`` of its record::

    ringsim.comm.all_reduce(t, log_name="gradients")
      |- label "gradients" begins               LogOptions.call
      |- torch.distributed.all_reduce(t)        the hooks write a record: post, wait, done, group, payload, label
      |- the label ends
    ringsim.comm.log_summary()                  records -> rows

The log never synchronises, and never blocks an operation that would not block without the log. On
NCCL, an operation is done when the GPU is done, according to CUDA events that are queried when the
log is read. The lines that ``verbose`` adds are written earlier, with the host's times.

``log_summary`` combines the logs of all ranks on rank 0, which sends the table back. With torch, it
uses the store of the default group. Nothing is posted on the groups being logged, and a rank that
hangs, or has performed more operations than the others, does not block the others' log::

    rank r                      store                         rank 0
      |-- set its operations -->|-----------------------------> wait for each, some seconds
      |                         |<-- set the table -------------|  compute it
      |<-- get the table -------|
      |-- add 1 to "read" ----->|-----------------------------> wait: the store may live in this process
"""  # noqa: E501

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import json
import logging
import math
import os
import shutil
import socket
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, overload

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringsim.comm import torch_hooks
from ringsim.comm.calls import describe
from ringsim.comm.deepspeed_log import write_line, write_table
from ringsim.comm.log_table import LogTable, is_operation, make_rows, name_operations
from ringsim.comm.numbering import name_and_ranks
from ringsim.comm.torch_private import default_store, tree_leaves
from ringsim.errors import ArgumentError, RingError, name_ranks
from ringsim.state import change_state, get_state
from ringsim.traces.collectives import algbw_gb_per_s, busbw_gb_per_s
from ringsim.traces.events import (
    COLUMN_DTYPES,
    NONE,
    OK,
    OP_CODES,
    OP_NAMES,
    RECV,
    SEND,
    SPAN,
    Events,
    Group,
    Ints,
    make_events,
    number_places,
    read_tables,
    write_tables,
)
from ringsim.traces.matching import number_rows
from ringsim.traces.recorder import Recorder
from ringsim.traces.run_parts import join_events, read_parts
from ringsim.traces.spans import label_in_force
from ringsim.traces.units import bytes_text, rate_text, time_text

_RULES: dict[str, tuple[Any, str]] = {  # the rules for the settings
    **dict.fromkeys(
        ("enabled", "prof_all", "verbose", "debug"),
        (lambda value: isinstance(value, bool), "True or False"),
    ),
    "prof_ops": (
        lambda value: not isinstance(value, str) and all(isinstance(each, str) for each in value),
        "a list of names",
    ),
    "style": (lambda value: value in ("ringsim", "deepspeed"), '"ringsim" or "deepspeed"'),
}
_LOGGER = logging.getLogger("ringsim.comm")
# the log's own recorder may start before the world size is known
_ANY_WORLD = 1 << 16
_WAIT_S = 30.0  # the time that rank 0 waits for the logs of the others
_MARGIN_S = 10.0  # the other ranks wait this much longer, because rank 0 computes the table
_READERS_S = 5.0  # the time that rank 0 waits until the others have read the table
_ALONE = Group("", (0,))  # without a process group
_COLUMNS = [
    name
    for name in COLUMN_DTYPES
    if name not in ("thread", "stage", "microbatch", "file", "line", "seq")
]

# a rank's operations, a mask of first operations, and facts about the rank
Logged = tuple[Events, Ints, dict[str, Any]]


def read_settings(deepspeed_config: Any, **arguments: Any) -> dict[str, Any]:
    """Returns the given settings; arguments override the configuration.

    For the arguments, see ``configure``. None means that a setting is not given.

    Raises:
        ArgumentError: a value is invalid.

    Example:
        >>> config = {"comms_logger": {"enabled": True, "prof_ops": ["isend"]}}
        >>> read_settings(config, verbose=True)
        {'enabled': True, 'verbose': True, 'prof_ops': frozenset({'isend'})}
    """
    if isinstance(deepspeed_config, Mapping):
        section = deepspeed_config.get("comms_logger", {})
    else:
        section = getattr(getattr(deepspeed_config, "comms_config", None), "comms_logger", {})
    if not isinstance(section, Mapping):
        section = {name: getattr(section, name, None) for name in _RULES}
    given = {name: value for name, value in arguments.items() if value is not None}
    merged = {**section, **given}
    settings = {name: merged[name] for name in _RULES if merged.get(name) is not None}
    for name, value in settings.items():
        keeps_rule, rule = _RULES[name]
        if not keeps_rule(value):
            raise ArgumentError(
                f"{name} must be {rule}, got {value!r} (configure). Omit the argument to keep "
                "the current setting."
            )
    if "prof_ops" in settings:
        settings["prof_ops"] = frozenset(settings["prof_ops"])
    return settings


# -- recording for the log, and reading the records


@dataclass(frozen=True)
class Records:
    """The log's recorder."""

    recorder: Recorder
    # removes the log's own directory; None if it shares a recorder
    remove: Callable[[], None] | None


class Recorded(NamedTuple):
    """The operations that a rank has recorded since its log first started."""

    events: Events  # its operations, in order of posting
    logged: Ints  # bool, one per event: the others are kept to find first operations
    notes: tuple[str, ...] = ()  # notes of recorders, for example that one stopped


_NOTHING = Recorded(join_events([]), np.zeros(0, dtype=bool))


def begin_records() -> Records:
    """Starts recording for the log.

    The log shares the active recorder, or starts a recorder in a private directory, which is
    removed when the process ends.

    Raises:
        RingError: the rank is simulated with ``record=False``.
    """
    recorder, remove = get_state().recorder, None
    if recorder is None and get_state().clock is not None:
        raise RingError(
            "ringsim.comm's log needs records, but the simulation runs with record=False. "
            "Remove record=False."
        )
    if recorder is None:
        directory = tempfile.mkdtemp(prefix="ringsim-log-")
        recorder = Recorder(directory, 0, _ANY_WORLD)
        remove = weakref.finalize(recorder, _remove, directory, os.getpid())
    # a simulated rank's recorder needs no hooks in torch
    if remove or recorder.users:
        torch_hooks.install(recorder)
    return Records(recorder, remove)


def end_records(records: Records) -> None:
    """Undoes ``begin_records``."""
    if records.recorder.users:
        torch_hooks.uninstall(records.recorder)
    if records.remove is not None:
        records.recorder.close()
        records.remove()


def _remove(directory: str, pid: int) -> None:
    # a forked process must not remove its parent's directory
    if pid == os.getpid():
        shutil.rmtree(directory, ignore_errors=True)


def _read(log: LogOptions) -> Recorded:
    """Reads the log's records so far."""
    if log.records is None:
        return log.kept
    recorder = log.records.recorder
    if get_state().clock is None:
        recorder.complete_times()
        everything, facts = read_parts(
            Path(recorder.directory),
            start_ns=0,
            world_size=recorder.world_size,
            only_rank=recorder.rank,
        )
    else:
        everything, facts = recorder.read(recorder.rank), {"notes": ()}
    operations = everything.select(is_operation(everything))
    starts, selects_all = np.array(log.switches).T
    last_switch = np.searchsorted(starts, operations.seq, side="right") - 1
    # while not all operations were selected, operations with a label were
    selected = (operations.label != NONE) | (selects_all[last_switch] == 1)
    logged = selected & (operations.seq >= starts[0])
    notes = [note for note in facts["notes"] if note.startswith("Recording of rank")]
    return Recorded(
        join_events([log.kept.events, operations]),
        np.concatenate([log.kept.logged, logged]),
        tuple(dict.fromkeys([*log.kept.notes, *notes])),
    )


def _find_first(events: Events) -> Ints:
    """Returns a mask of a rank's first operation with each peer on each group.

    A group's collectives count as one peer, and so do the calls of each name under ``timed_op``.
    """
    kind = events.kind
    peer = np.where((kind == SEND) | (kind == RECV), events.peer, NONE)
    name = np.where(kind == SPAN, events.label, NONE)
    first: Ints = number_places(number_rows(events.group, peer, name)) == 0
    return first


def _read_logged() -> tuple[Events, Ints, tuple[str, ...]]:
    """Returns this rank's logged operations, a mask of first operations, and the notes."""
    events, logged, notes = _read(_find_log())
    return events.select(logged), _find_first(events)[logged], notes


def _find_log() -> LogOptions:
    """Returns this rank's log, even if it is stopped or was never configured."""
    return get_state().log or get_state().stopped_log or LogOptions()


# -- the selection of operations

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class LogOptions:
    """The log's settings and earlier contents."""

    prof_all: bool = True  # whether all operations are selected
    prof_ops: frozenset[str] = frozenset()  # selected names of operations, or names in the log
    # whether a line is written through ``logging`` for each selected operation
    verbose: bool = False
    # whether the name of the calling function is added to the name in the log
    debug: bool = False
    style: str = "ringsim"  # the format of lines and table
    # the current recorder, None while the log is stopped
    records: Records | None = None
    # record number, and whether all operations are selected from there; the log starts at the first
    switches: tuple[tuple[int, bool], ...] = ()
    # operations of earlier recorders
    kept: Recorded = _NOTHING

    def selects(self, op: str, name: str, prof: bool) -> bool:
        """Returns whether an operation is to be logged."""
        return self.prof_all or prof or op in self.prof_ops or name in self.prof_ops

    def call(
        self,
        op: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        prof: bool,
        log_name: str | None,
        debug: str | None,
    ) -> Any:
        """Runs a ``ringsim.comm`` operation, and logs it if it is selected.

        Args:
            op: torch's name of the operation.
            function: the function to call.
            args: the positional arguments of the function.
            kwargs: the keyword arguments of the function.
            prof: whether to select this call regardless of the settings.
            log_name: the name in the log, or None for ``op``.
            debug: the caller's name, for ``configure(debug=True)``; None to find it.
        """
        name = log_name or op
        plain = name == op and op in OP_CODES and not (self.verbose or self.debug)
        # if all operations are selected, a plain operation needs nothing but its record
        if (self.prof_all and plain) or not self.selects(op, name, prof):
            return function(*args, **kwargs)
        return _run_named(self, name, debug, lambda _: function(*args, **kwargs))


def _run_named(log: LogOptions, name: str, debug: str | None, run: Callable[[Recorder], R]) -> R:
    """Runs a logged call, labels its operations with ``name`` and writes their log lines."""
    assert log.records is not None
    recorder = log.records.recorder
    before = recorder.bookmark() if log.verbose else 0
    if log.debug:
        frame = recorder.sites.find(sys._getframe(1))
        caller = debug or ("an unknown function" if frame is None else frame.f_code.co_name)
        name += f" | [Caller Func: {caller}]" if log.style == "deepspeed" else f" in {caller}"
    label = label_in_force.set(recorder.label(name))
    try:
        return run(recorder)
    finally:
        label_in_force.reset(label)
        if log.verbose:
            _write_lines(log.style, recorder, before)


def _write_lines(style: str, recorder: Recorder, before: int) -> None:
    """Logs a line for each operation that this thread has posted since the bookmark ``before``.

    In DeepSpeed's style, only rank 0 logs lines.
    """
    if style == "deepspeed" and find_place()[0] != 0:
        return
    for record in recorder.records_since(before):
        op, status = OP_NAMES[record["op"]], int(record["status"])
        name = recorder.labels.get(record["label"], op)
        group = recorder.groups.get(record["group"], _ALONE)
        payload = recorder.payloads.get(record["payload"])
        size_bytes = 0 if payload is None else payload.size_bytes
        took_ns = float(record["done_ns"] - record["post_ns"]) if status == OK else math.nan
        algbw = algbw_gb_per_s(size_bytes, took_ns * 1e-3)
        busbw = busbw_gb_per_s(op, size_bytes, took_ns * 1e-3, len(group.ranks))
        if style == "deepspeed":
            _LOGGER.info("[Rank 0] %s", write_line(name, took_ns * 1e-6, size_bytes, algbw, busbw))
            continue
        words: list[str] = [
            f"{name}: {op}" if name != op else op,
            group.name,
            bytes_text(size_bytes),
        ]
        if status == OK:
            rates = (("algbw", algbw), ("busbw", busbw))
            words += [
                time_text(took_ns),
                *(f"{what} {rate_text(rate)}" for what, rate in rates if not math.isnan(rate)),
            ]
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
    """Starts or stops this rank's log and changes its settings; None keeps a setting unchanged.

    Any rank may call this function at any time; it does not block. Stopping the log keeps its
    contents, and starting it again adds to them; ``reset_log`` clears them.

    Args:
        deepspeed_config: a DeepSpeed configuration, as an object or a dictionary, whose
            ``comms_logger`` section contains the settings below; arguments override the section.
            The section's ``style`` may be "deepspeed" instead of "ringsim", for lines and a table
            in DeepSpeed's format.
        enabled: True to start the log, False to stop it. While the log is stopped, operations run
            as if there were no log.
        prof_all: whether to log every operation, including operations that are not called through
            ``ringsim.comm``. The default is True.
        prof_ops: the operations to log if ``prof_all`` is False, such as ``"all_reduce"``, or names
            given as ``log_name``. The default is an empty list.
        verbose: whether to write a line for each operation to the logger ``ringsim.comm``, at level
            INFO.
        debug: whether names in the log include the name of the calling function.

    Raises:
        ArgumentError: a value is invalid.

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
    settings = read_settings(
        deepspeed_config,
        enabled=enabled,
        prof_all=prof_all,
        prof_ops=prof_ops,
        verbose=verbose,
        debug=debug,
    )
    state = get_state()
    log = _find_log()
    enabled = settings.pop("enabled", state.log is not None)
    log = replace(log, **settings)
    if enabled and log.records is None:
        resume_log(log)
    elif enabled:
        change_state(log=_switch(log, log.prof_all))
    else:
        change_state(log=log if log.records else None, stopped_log=log)
        interrupt_log()


def _switch(log: LogOptions, selects_all: bool) -> LogOptions:
    """Selects all later operations, or only those with a label."""
    assert log.records is not None  # an invariant, here and below: the log is on
    return replace(log, switches=(*log.switches, (log.records.recorder.count, selects_all)))


def resume_log(log: LogOptions | None) -> None:
    """Restarts a log returned by ``interrupt_log``; does nothing if given None."""
    if log is not None:
        log = replace(log, records=begin_records(), switches=())
        change_state(log=_switch(log, log.prof_all), stopped_log=None)


def interrupt_log() -> LogOptions | None:
    """Stops the log but keeps its contents, so that the recorder can be replaced.

    Returns:
        The stopped log, or None if the log was not on.
    """
    log: LogOptions | None = get_state().log
    if log is None or log.records is None:
        return None
    events, logged, notes = _read(log)
    kept = logged | _find_first(events)
    stopped: LogOptions = replace(
        log, records=None, kept=Recorded(events.select(kept), logged[kept], notes)
    )
    change_state(log=None, stopped_log=stopped)
    end_records(log.records)
    return stopped


def reset_log() -> None:
    """Clears this rank's log, including operations that have not been waited for yet.

    This function neither starts nor stops the log. Any rank may call this function at any time; it
    does not block.

    Example:
        >>> reset_log()
    """
    log = _find_log()
    # the events remain, because they show which connections exist
    events = log.kept.events
    log = replace(log, switches=(), kept=Recorded(events, np.zeros(len(events), dtype=bool)))
    if get_state().log is None:
        change_state(stopped_log=log)
    else:
        change_state(log=_switch(log, log.prof_all))


@contextmanager
def pause_log() -> Iterator[None]:
    """Keeps this rank's operations in a with block out of the log; the recorder keeps running."""
    log = get_state().log
    if log is None:
        yield
        return
    paused = _switch(log, False)
    change_state(log=None, stopped_log=paused)
    try:
        yield
    finally:
        change_state(log=_switch(paused, log.prof_all), stopped_log=None)


# -- the user's own operations


def timed_op(function: Callable[P, R]) -> Callable[P, R]:
    """Logs calls to a function as if it were a ``ringsim.comm`` operation.

    Use this function as a decorator for your own collectives. While the log is on, a selected call
    (selected by ``prof_all``, by the function's name in ``prof_ops``, or by the call's own argument
    ``prof=True``) is recorded as a span with a size and a group, and the operations inside the span
    are labelled with the span's name. The call is done when the function returns; if the function
    returns an operation's handle, the call is done when the program has waited for that handle.
    Calls that are not selected run unchanged. The function keeps its name, signature, docstring and
    result.

    Args:
        function: the function to log. Its parameters ``prof``, ``log_name``, ``debug`` and
            ``group``, if any, have the same meaning as in ``ringsim.comm``. The logged size is that
            of the first argument that is a tensor or a list of tensors.

    Returns:
        The wrapped function.

    Example:
        >>> @timed_op
        ... def gossip(tensor, group=None):
        ...     "Sends a tensor to the neighbours."
        >>> gossip.__name__, gossip.__doc__, str(inspect.signature(gossip))
        ('gossip', 'Sends a tensor to the neighbours.', '(tensor, group=None)')

    Source:
        DeepSpeed, ``deepspeed.comm.timed_op``: the name. DeepSpeed's decorator does not preserve
        the function's name and signature.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def timed(*args: P.args, **kwargs: P.kwargs) -> R:
        log = get_state().log
        if log is None:
            return function(*args, **kwargs)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # which raises the right error
        bound.apply_defaults()
        given = bound.arguments
        name = given.get("log_name") or function.__name__
        if not log.selects(function.__name__, name, bool(given.get("prof", False))):
            return function(*args, **kwargs)
        return _run_named(
            log,
            name,
            given.get("debug"),
            lambda recorder: _record(recorder, given, lambda: function(*args, **kwargs)),
        )

    return timed


def _record(recorder: Recorder, given: dict[str, Any], run: Callable[[], R]) -> R:
    """Runs a selected call and records it under the current label."""
    slot = recorder.call_begin(
        label_in_force.get(),
        _number_group(recorder, given.get("group")),
        _number_payload(recorder, given),
    )
    if slot is None:
        return run()
    try:
        result = run()
    except BaseException:
        recorder.span_end(slot, failed=True)
        raise
    if hasattr(result, "complete_record"):
        left_to_wait = result.complete_record(recorder, slot)
    else:  # the hooks know torch's handles
        left_to_wait = recorder.hooks.complete_with(result, slot)
    if not left_to_wait:
        recorder.span_end(slot)
    return result


def _number_group(recorder: Recorder, group: Any) -> int:
    """Numbers a call's group; without a process group, the group contains only this rank."""
    given: Any = group or dist.group.WORLD
    return recorder.group(*(name_and_ranks(given) if dist.is_initialized() else _ALONE[:2]))


def _number_payload(recorder: Recorder, given: dict[str, Any]) -> int:
    """Numbers a call's payload: its first argument that is a tensor or contains tensors."""
    for value in given.values():
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if tensors:
            return recorder.payload(*describe(tensors, 1))
    return NONE


# -- all ranks together


def _gather(default: Store, mine: Logged, rank: int, world_size: int) -> LogTable:
    """Builds the table for all ranks; the ranks exchange their data through a store.

    Call this function on every rank. It blocks until all ranks have called it, or for slightly more
    than ``_WAIT_S``.
    """
    # the n-th summary of this rank belongs to the n-th summary of every other rank
    entered = default.add(f"ringsim/log/entered/{rank}", 1)
    store: Any = PrefixStore(f"ringsim/log/{entered}", default)
    if rank == 0:
        logs, late, readers = [mine], [], []
        deadline = time.monotonic() + _WAIT_S
        for other in range(1, world_size):
            try:
                store.wait([str(other)], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError:
                late.append(other)
                continue
            logs.append(_unpack(store.get(str(other))))
            store.delete_key(str(other))
            readers.append(f"read by {other}")
        notes = []
        if late:
            notes = [f"{name_ranks(late)} did not call log_summary within {_WAIT_S:g} s of rank 0"]
        table = _make_table(logs, world_size, notes)
        store.set("table", table.to_json())
        with contextlib.suppress(RuntimeError):  # a rank that has ended does not read
            for reader in readers:
                store.wait([reader], timedelta(seconds=_READERS_S))
            if not late:
                for key in ("table", *readers):
                    store.delete_key(key)
        return table
    store.set(str(rank), _pack(mine))
    try:
        store.wait(["table"], timedelta(seconds=_WAIT_S + _MARGIN_S))
    except RuntimeError:
        note = (
            f"rank 0 did not call log_summary within {_WAIT_S:g} s, so this table covers only "
            f"rank {rank}"
        )
        return _make_table([mine], world_size, [note])
    table = LogTable.from_json(store.get("table"))
    store.set(f"read by {rank}", "")
    return table


def _make_table(logs: list[Logged], world_size: int, notes: Iterable[str]) -> LogTable:
    """Computes the table from the logs of some ranks, in rank order."""
    events, first, facts = zip(*logs, strict=True)
    one_clock = len({each["host"] for each in facts}) == 1
    rows = make_rows(
        join_events(events),
        np.concatenate(first),
        one_clock=one_clock,
        by_tag=facts[0]["backend"] != "nccl",
    )
    noted = dict.fromkeys(note for each in facts for note in each["notes"])
    unaligned = (
        "the ranks ran on several hosts, whose clocks are not aligned, so the straggler time is "
        "unknown"
    )
    ranks = tuple(each["rank"] for each in facts)
    return LogTable(rows, world_size, ranks, (*noted, *([] if one_clock else [unaligned]), *notes))


def _pack(logged: Logged) -> bytes:
    """Returns a rank's log as bytes: number arrays and JSON, without executable content."""
    events, first, facts = logged
    columns = {name: getattr(events, name) for name in _COLUMNS}
    text = json.dumps({**facts, "tables": write_tables(events.tables._replace(files=()))})
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **columns, first=first, facts=text)
    return buffer.getvalue()


def _unpack(data: bytes) -> Logged:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        facts = json.loads(str(arrays["facts"]))
        columns = {name: arrays[name] for name in _COLUMNS}
        return make_events(columns, read_tables(facts["tables"])), arrays["first"], facts


def find_place() -> tuple[int, int]:
    """Returns the rank and the world size, or 0 and 1 if there is no process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@overload
def log_summary(show_straggler: bool = False, return_dict: Literal[False] = False) -> LogTable: ...


@overload
def log_summary(show_straggler: bool = False, *, return_dict: Literal[True]) -> dict[str, Any]: ...


def log_summary(
    show_straggler: bool = False, return_dict: bool = False
) -> LogTable | dict[str, Any]:
    """Combines the logs of all ranks; rank 0 prints the table.

    Call this function on every rank, whether the log is on or stopped; it blocks until all ranks
    have called it. With torch, it uses the store of the default group, not those of the groups
    being logged. A rank that does not call the function within half a minute is left out, and a
    note in the table names that rank. Without a process group, the table covers only this rank.

    Args:
        show_straggler: whether the printed table includes a straggler-time column; the returned
            data always includes straggler times.
        return_dict: whether to return a dictionary, as ``LogTable.to_dict`` does.

    Returns:
        The table, which is the same on every rank. ``str`` converts it to text, and ``to_pandas()``
        to a DataFrame.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from ringsim.comm.log import configure, reset_log
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> configure(enabled=True)
        >>> dist.all_reduce(torch.zeros(4))
        >>> configure(enabled=False)
        >>> summary = log_summary(return_dict=True)  # doctest: +ELLIPSIS
        Communication of 1 rank
        operation       size     n   count ...
        all_reduce      16 B     1       1 ...
        >>> summary["summary"]["all_reduce"][16][0]["count"]
        1
        >>> reset_log()
        >>> dist.destroy_process_group()

    Source:
        DeepSpeed, ``deepspeed.comm.log_summary``: name and arguments.
    """
    rank, world_size = find_place()
    events, first, notes = _read_logged()
    # the log's own recorder does not know this rank's number
    events = replace(events, rank=np.full(len(events), rank))
    facts = {
        "rank": rank,
        "host": socket.gethostname(),
        "backend": dist.get_backend() if dist.is_initialized() else "",
        "notes": notes,
    }
    mine = events, first, facts
    store = default_store() if world_size > 1 else None
    if store is not None:
        table = _gather(store, mine, rank, world_size)
    else:
        alone = [f"this version of torch hides its store, so this table covers only rank {rank}"]
        table = _make_table([mine], world_size, alone if world_size > 1 else [])
    table = replace(table, show_straggler=show_straggler)
    if rank == 0:
        text = write_table(table) if _find_log().style == "deepspeed" else table
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    return table.to_dict() if return_dict else table


def has_comm_data() -> bool:
    """Returns whether this rank has logged anything.

    Any rank may call this function at any time; it does not block.

    Example:
        >>> has_comm_data()
        False
    """
    return get_comm_operation_count() > 0


def get_comm_operation_count() -> int:
    """Returns the number of operations that this rank has logged.

    Any rank may call this function at any time; it does not block.

    Example:
        >>> get_comm_operation_count()
        0
    """
    return len(_read_logged()[0])


def get_logged_comm_ops() -> list[str]:
    """Returns the names in this rank's log, in alphabetical order.

    Any rank may call this function at any time; it does not block.

    Example:
        >>> get_logged_comm_ops()
        []
    """
    return sorted(set(name_operations(_read_logged()[0]).tolist()))
