"""``ringsim.session``: ranks that stay, and run one call after the other."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import shutil
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

import numpy as np

from ringsim.diagnose.failure import interrupted_once
from ringsim.errors import (
    ArgumentError,
    Interrupted,
    RingError,
    check_seed,
    check_worker,
    is_number,
    name_ranks,
)
from ringsim.launch.api import make_kind
from ringsim.launch.job import CHECKS, Job, pack_call
from ringsim.launch.namespace import Reference, assign, list_names, look, pack, run_cell
from ringsim.launch.protocol import DO, JOIN, STOP
from ringsim.launch.ranks import RankSet, get_launcher
from ringsim.launch.run import Run, RunOptions
from ringsim.launch.system import measure_memory
from ringsim.state import OUR_THREADS
from ringsim.traces.cells import name_cells
from ringsim.traces.clocks import count_from
from ringsim.traces.events import OP_CODES, Tables, make_events
from ringsim.traces.run_parts import join_events
from ringsim.traces.units import bytes_text, count
from ringsim.traces.value import Trace

_ANSWER_S = 30.0  # for an idle rank to look at a variable
_STOP_S = 0.5  # for a rank to stop its program


def session(
    *,
    world_size: int,
    timeout_s: float = 30,
    limit_s: float | None = None,
    seed: int = 0,
    check: str = "basic",
    idle_s: float = 3600,
    live: bool = False,
) -> Session:
    """Starts ranks that stay: each call finds the variables that earlier calls left.

    Functions that the ranks cannot import, such as those of a notebook or script, run in one
    namespace per rank. The caller's variables that a function uses are sent when they are new or
    have changed. If a call fails, hangs or is interrupted, the session goes on: the error lists
    what was lost, and all process groups are made again.

    Each rank is a process of about 50 MB, which serves only this session. The session ends with its
    ``with`` block, by ``close``, with the program, or after ``idle_s``.

    Args:
        world_size: the number of ranks, at least 1.
        timeout_s: the limit for each blocked operation, in seconds.
        limit_s: the limit for each call, in seconds, or None for no limit.
        seed: the seed; rank r seeds torch, numpy and random with ``seed + r`` when it starts.
        check: the mistakes that raise an error before torch sees them, as in ``ringsim.trace``.
        idle_s: the time without a call after which the session ends by itself, in seconds.
        live: whether to show each call while it runs, as in ``ringsim.trace``.

    Returns:
        The session, for a ``with`` block; its ranks end with the block.

    Raises:
        ArgumentError: an argument is invalid.

    Example:
        >>> import ringsim
        >>> def count(start):
        ...     global total
        ...     total = globals().get("total", start) + ringsim.current_ring().rank
        ...     return total
        >>> with ringsim.session(world_size=2) as ranks:
        ...     [ranks.run(count, 40).results, ranks.run(count, 0).results, ranks[1].total]
        [[40, 41], [40, 42], 42]
    """
    if check not in CHECKS:
        raise ArgumentError(f"check must be one of {', '.join(map(repr, CHECKS))}, got {check!r}.")
    kind = replace(make_kind(world_size, "cpu", timeout_s, ring=True), stays=True)
    if not is_number(idle_s) or not idle_s > 0:
        raise ArgumentError(f"idle_s must be a positive number of seconds, got {idle_s!r}.")
    seed = check_seed(seed, kind.world_size)
    ranks = get_launcher().get_fresh(kind)
    return Session(ranks, seed, check, RunOptions(limit_s=limit_s, live=live), idle_s)


class Session:
    """Ranks that stay until the session is closed; see ``ringsim.session``."""

    def __init__(
        self, rank_set: RankSet, seed: int, check: str, options: RunOptions, idle_s: float
    ) -> None:
        self._rank_set, self._seed, self._check, self._options = rank_set, seed, check, options
        self._calls: list[_Call] = []
        self._epoch = 0  # how often the groups were made again
        self._end = weakref.finalize(self, _close, rank_set, os.getpid())
        self._idle = idle_s, f"the session of {self.world_size} ranks"
        self._wait_for_call()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the ranks; their variables are gone. A second call does nothing."""
        self._timer.cancel()
        self._end()

    def _wait_for_call(self) -> None:
        """Ends the session if no call comes."""
        idle_s, name = self._idle
        self._timer = threading.Timer(idle_s, _end_idle, [self._end, name, idle_s])
        self._timer.name, self._timer.daemon = f"{OUR_THREADS}idle", True
        self._timer.start()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._rank_set.kind.world_size

    def __len__(self) -> int:
        return self.world_size

    def _ipython_key_completions_(self) -> list[int]:
        return list(range(self.world_size))

    @property
    def is_open(self) -> bool:
        """Whether the ranks still run."""
        return self._end.alive

    def describe(self) -> str:
        """Returns a few lines: the numbers of ranks and calls, and each rank's memory."""
        lines = [f"{count(self.world_size, 'rank')}, {count(len(self._calls), 'call')}"]
        for rank, pid in enumerate(self._do(range(self.world_size), os.getpid)):
            used_bytes = measure_memory(pid)
            memory = "" if used_bytes is None else f", {bytes_text(used_bytes)}"
            lines.append(f"rank {rank}: process {pid}{memory}")
        return "\n".join(lines)

    def __getitem__(self, index: int | tuple[int, ...]) -> RankView:
        ranks = index if isinstance(index, tuple) else (index,)
        for rank in ranks:
            if rank not in range(self.world_size):
                raise IndexError(
                    f"a rank must be an integer from 0 to {self.world_size - 1}, got {rank!r}."
                )
        return RankView(self, ranks)

    # -- calls

    def run(self, worker: Callable[..., Any], *args: Any, **kwargs: Any) -> Trace:
        """Calls a function on every rank, and records every message.

        Args:
            worker: the function; it may use and set global variables, which stay on the rank.
            args: its positional arguments, the same on every rank.
            kwargs: its keyword arguments.

        Returns:
            The trace, as from ``ringsim.trace``.

        Raises:
            RingError: the errors of ``ringsim.trace``. The session lives on.
            Interrupted: Ctrl-C stopped the call.
        """
        return self[tuple(range(self.world_size))].run(worker, *args, **kwargs)

    def run_cell(
        self,
        source: str,
        filename: str,
        variables: Mapping[str, Any],
        *,
        ranks: Sequence[int] | None = None,
        **options: Any,
    ) -> Trace:
        """Runs the code of a notebook cell in the ranks' namespace.

        The value of the last line is the result.

        Args:
            source: the text of the cell.
            filename: the file name for tracebacks, which ``linecache`` knows.
            variables: the notebook's variables that the cell uses. A rank takes over those that are
                new or have changed since an earlier call.
            ranks: the ranks that run the cell, or None for all.
            options: ``limit_s`` and ``live``, if they differ from the session's.

        Returns:
            The trace.

        Raises:
            ArgumentError: a variable cannot be sent to the ranks.
            RingError: the errors of ``run``.
        """
        job = pack_call(
            run_cell,
            (source, filename),
            None,
            self._seed,
            pack=functools.partial(pack, variables=variables),
        )
        name = name_cells([filename]).get(filename, "cell")
        only = None if ranks is None else tuple(ranks)
        shown = replace(self._options, show_hidden=True, **options)
        return self._call(name, replace(job, only=only), shown)

    def _run_on(self, ranks: tuple[int, ...], worker: Any, args: Any, kwargs: Any) -> Trace:
        check_worker(worker)
        job = pack_call(worker, args, kwargs, self._seed, pack)
        name = getattr(worker, "__name__", type(worker).__name__)
        return self._call(name, replace(job, only=ranks), self._options)

    def _call(self, name: str, job: Job, options: RunOptions) -> Trace:
        self._check_open()
        self._timer.cancel()
        self._replace_dead()
        directory = self._rank_set.begin_call()
        job = replace(job, check=self._check, directory=str(directory), epoch=self._epoch)
        run = _SessionRun(self._rank_set, job, options)
        trace = None
        with interrupted_once():
            try:
                trace = run.finish()
                if not all(one.left and one.left.has_groups for one in run.ranks):
                    self._renew()
                return trace
            except BaseException as error:
                run.stop_ranks()
                dead = [one.rank for one in run.ranks if one.left is None]
                self._renew(dead)
                if isinstance(error, RingError | Interrupted):
                    trace = error.trace
                    error.args = (f"{error}\n  The session goes on{_lost(run, dead)}.",)
                raise
            finally:
                if trace is not None:
                    self._calls.append(_Call(name, run.start_ns, trace))
                shutil.rmtree(directory, ignore_errors=True)
                self._wait_for_call()

    def _replace_dead(self) -> None:
        """Replaces the ranks that have died since the last call."""
        dead = [rank for rank, one in enumerate(self._rank_set.channels) if _has_ended(one)]
        if dead:
            self._renew(dead)
            warnings.warn(
                f"{name_ranks(dead)} of the session died between two calls and started again, "
                "without variables.",
                stacklevel=4,
            )

    def _renew(self, dead: Collection[int] = ()) -> None:
        """Replaces the dead ranks; all ranks make their groups again, in the background."""
        self._epoch += 1
        (self._rank_set.home / "port").unlink(missing_ok=True)
        for rank, channel in enumerate(self._rank_set.channels):
            if rank in dead:
                self._rank_set.replace(rank)
            else:
                with contextlib.suppress(OSError):  # the next call replaces it
                    channel.send(JOIN)

    def trace(self) -> Trace:
        """Returns all calls so far as one trace, in which each is a step with its name.

        Raises:
            RingError: there was no call yet.
        """
        if not self._calls:
            raise RingError("no call of this session has a trace yet. Call ranks.run first.")
        return _join(self._calls, self.world_size)

    def _check_open(self) -> None:
        if not self._end.alive:
            raise RingError("the session is closed. Start another one with ringsim.session.")

    # -- variables

    def push(self, **variables: Any) -> None:
        """Sets variables on every rank.

        Example:
            >>> import ringsim
            >>> with ringsim.session(world_size=2) as ranks:
            ...     ranks.push(rate=0.5)
            ...     ranks.pull("rate")
            [0.5, 0.5]
        """
        self._do(range(self.world_size), assign, variables)

    def pull(self, name: str) -> list[Any]:
        """Returns a variable's value on each rank, by rank; see ``RankView``."""
        return self._look(range(self.world_size), name)

    def _look(self, ranks: Sequence[int], name: str) -> list[Any]:
        found = self._do(ranks, look, name, False)
        for place, (rank, one) in enumerate(zip(ranks, found, strict=True)):
            if isinstance(one, Reference):
                found[place] = replace(one, fetch=functools.partial(self._fetch, rank, name))
        return found

    def _fetch(self, rank: int, name: str) -> Any:
        return self._do([rank], look, name, True)[0]

    def _do(self, ranks: Sequence[int], function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls a function of ``namespace`` on idle ranks, and returns its results."""
        self._check_open()
        message = DO, pack((function, args))
        channels = [self._rank_set.channels[rank] for rank in ranks]
        for channel in channels:
            with contextlib.suppress(OSError):  # no answer will come
                channel.send(message)
        answers = [_receive(channel, DO) for channel in channels]
        results = [(returned, pickle.loads(value)) for returned, value in answers]
        for returned, value in results:
            if not returned:
                raise value
        return [value for _, value in results]


class _Call(NamedTuple):
    """A call that has ended: its name, its start on CLOCK_MONOTONIC, and its trace."""

    name: str
    start_ns: int
    trace: Trace


def _join(calls: Sequence[_Call], world_size: int) -> Trace:
    """Returns several calls as one trace."""
    parts, ranks = [], range(world_size)
    for call in calls:
        start_ns = call.start_ns - calls[0].start_ns
        step = {"op": OP_CODES["span"], "post_ns": start_ns, "wait_ns": start_ns, "label": 0}
        step["done_ns"] = start_ns + call.trace.metadata["end_ns"]
        columns = {name: [value] * world_size for name, value in step.items()}
        tables = Tables(labels=(f"step {call.name}",))
        parts.append(make_events({"rank": ranks, **columns}, tables))
        parts.append(count_from(call.trace.events, -start_ns))
    metadata = {**calls[0].trace.metadata, "end_ns": max(step["done_ns"], 0), "ends": []}
    metadata["complete"] = all(call.trace.metadata["complete"] for call in calls)
    output = ["".join(call.trace.output[rank] for call in calls) for rank in ranks]
    results = calls[-1].trace.results
    events = join_events(parts)
    events = events.select(np.argsort(events.rank, kind="stable"))
    return Trace(events, metadata, results=results, output=output)


def _lost(run: _SessionRun, dead: Sequence[int]) -> str:
    """Returns the parts of the ranks' state that a failed call has lost, for its error."""
    kept = {one.rank: one.left for one in run.ranks if one.left is not None}
    lost = f"; {name_ranks(dead)} started again, without variables" if dead else ""
    halves = [rank for rank, left in kept.items() if left.begun != left.done]
    if halves:
        lost += f"; an optimizer step is half done on {name_ranks(halves)}"
    if len({left.done for left in kept.values()}) > 1:
        steps = ", ".join(f"{left.done} on rank {rank}" for rank, left in kept.items())
        lost += f"; the ranks made different numbers of optimizer steps ({steps})"
    return lost


def _close(rank_set: RankSet, pid: int) -> None:
    if os.getpid() == pid:  # not in a process that was forked since
        rank_set.close()


def _end_idle(end: Callable[[], Any], name: str, idle_s: float) -> None:
    end()
    if sys.stderr is not None:  # it was closed when Python started
        sys.stderr.write(f"ringsim: {name} ended after {idle_s:g} s without a call.\n")


def _has_ended(channel: Connection) -> bool:
    """Returns whether the other side of a channel, which should be silent, is gone."""
    with contextlib.suppress(EOFError, OSError):
        while channel.poll():
            channel.recv()
        return False
    return True


def _receive(channel: Connection, what: str) -> Any:
    """Returns the next message of this kind."""
    with contextlib.suppress(EOFError, OSError):
        while channel.poll(_ANSWER_S):
            kind, value = channel.recv()
            if kind == what:
                return value
    raise RingError("a rank has died or does not answer. The next call replaces it.")


class RankView:
    """Some ranks of a session; the attributes of a single rank are its variables.

    A variable of more than 1 MB, and one that cannot be sent, is a ``Reference``.
    """

    def __init__(self, session: Session, ranks: tuple[int, ...]) -> None:
        self._session, self._ranks = session, ranks

    def __repr__(self) -> str:
        return f"<{name_ranks(self._ranks)} of {self._session.world_size}>"

    def run(self, worker: Callable[..., Any], *args: Any, **kwargs: Any) -> Trace:
        """Calls a function on these ranks; see ``Session.run``. The others have no result."""
        return self._session._run_on(self._ranks, worker, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or len(self._ranks) != 1:
            raise AttributeError(name)
        return self._session._look(self._ranks, name)[0]

    def __dir__(self) -> Collection[str]:
        """Lists the variables, for completion."""
        (names,) = self._session._do(self._ranks[:1], list_names)
        return ["run", *names]


class _SessionRun(Run):
    """A call of a session: its end is not the end of the ranks."""

    def stop_ranks(self) -> None:
        """Stops the program on ranks that still run it; a rank that does not stop is killed."""
        for one in self.ranks:
            if one.left is None:
                one.tell(STOP)
        self.wait_until_idle(_STOP_S)
        for one in self.ranks:
            if one.left is None and one.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)

    def dismiss(self) -> None:
        """Waits until every rank is ready for the next call."""
        self.wait_until_idle(_ANSWER_S)
