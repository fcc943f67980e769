"""``ringsim.session``: ranks that stay, and run one call after the other."""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from ringsim.diagnose.failure import interrupted_once, ranks_by_text
from ringsim.errors import (
    Interrupted,
    RingError,
    check_limit,
    check_seed,
    check_worker,
    name_ranks,
)
from ringsim.launch.api import make_kind
from ringsim.launch.job import pack_call, refuse_unknown
from ringsim.launch.kept import RealRanks, SimulatedRanks, list_lost
from ringsim.launch.namespace import Reference, assign, list_names, look, pack, run_source
from ringsim.launch.run import RunOptions
from ringsim.launch.system import measure_memory
from ringsim.link import GivenLinks, check_links
from ringsim.state import OUR_THREADS
from ringsim.traces.cells import name_cells
from ringsim.traces.clocks import count_from
from ringsim.traces.events import OP_CODES, Tables, make_events
from ringsim.traces.run_parts import join_events
from ringsim.traces.units import bytes_text, count
from ringsim.traces.value import Trace


def session(
    *,
    world_size: int,
    link: GivenLinks | None = None,
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

    With a link, the ranks are simulated, as by ``ringsim.simulate``: they share one process and a
    virtual clock, which goes on from call to call, while each trace begins at 0 s. An interrupt or
    ``limit_s`` ends this process, and so loses the variables of all ranks.

    Args:
        world_size: the number of ranks, at least 1.
        link: the cost of a message for simulated ranks, as in ``ringsim.simulate``, or None for
            real ranks.
        timeout_s: the limit for each blocked operation of real ranks, in seconds.
        limit_s: the limit for each call, in seconds, or None for no limit.
        seed: the seed; rank r seeds torch, numpy and random with ``seed + r`` when it starts.
        check: the mistakes that raise an error before torch sees them, as in ``ringsim.trace``; for
            real ranks.
        idle_s: the time without a call after which the session ends by itself, in seconds.
        live: whether to show each call of real ranks while it runs, as in ``ringsim.trace``.

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

        >>> with ringsim.session(world_size=2, link=ringsim.Link(1e-3, 1e-9)) as ranks:
        ...     ranks.run(count, 40).results
        ...     [ranks.run(ringsim.compute, 2).makespan_s for _ in range(2)]
        [40, 41]
        [2.0, 2.0]
    """
    refuse_unknown(check)
    kind = replace(make_kind(world_size, "cpu", timeout_s, ring=True), stays=True)
    check_limit("idle_s", idle_s)
    seed = check_seed(seed, kind.world_size)
    if link is not None:
        check_links(link, kind.world_size)
    size = kind.world_size
    ranks = RealRanks(kind) if link is None else SimulatedRanks(size, link, seed)
    return Session(ranks, size, seed, check, RunOptions(limit_s=limit_s, live=live), idle_s)


class Session(AbstractContextManager["Session"]):
    """Ranks that stay until the session is closed; see ``ringsim.session``.

    Attributes:
        world_size: the number of ranks.
    """

    def __init__(
        self,
        ranks: RealRanks | SimulatedRanks,
        world_size: int,
        seed: int,
        check: str,
        options: RunOptions,
        idle_s: float,
    ) -> None:
        self._ranks, self._seed, self._check, self._options = ranks, seed, check, options
        self.world_size, self._idle_s = world_size, idle_s
        self._all = tuple(range(world_size))
        self._calls: list[tuple[str, Trace]] = []
        self._end = weakref.finalize(self, _close, ranks, os.getpid())
        self._wait_for_call()

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the ranks; their variables are gone. A second call does nothing."""
        self._timer.cancel()
        self._end()

    def _wait_for_call(self) -> None:
        """Ends the session if no call comes."""
        arguments = self._end, self.world_size, self._idle_s
        self._timer = threading.Timer(self._idle_s, _end_idle, arguments)
        self._timer.name, self._timer.daemon = f"{OUR_THREADS}idle", True
        self._timer.start()

    def __len__(self) -> int:
        return self.world_size

    def _ipython_key_completions_(self) -> Sequence[int]:
        return self._all

    @property
    def is_open(self) -> bool:
        """Whether the ranks still run."""
        return self._end.alive

    @property
    def is_simulated(self) -> bool:
        """Whether the ranks are simulated."""
        return isinstance(self._ranks, SimulatedRanks)

    def describe(self) -> str:
        """Returns a few lines: the numbers of ranks and calls, and each process's memory."""
        lines = [f"{count(self.world_size, 'rank')}, {count(len(self._calls), 'call')}"]
        pids = dict(enumerate(map(str, self._do(self._all, os.getpid))))
        for pid, ranks in ranks_by_text(pids).items():
            used_bytes = measure_memory(pid)
            memory = "" if used_bytes is None else f", {bytes_text(used_bytes)}"
            lines.append(f"{name_ranks(ranks)}: process {pid}{memory}")
        return "\n".join(lines)

    def __getitem__(self, index: int | tuple[int, ...]) -> RankView:
        ranks = index if isinstance(index, tuple) else (index,)
        for rank in ranks:
            if rank not in self._all:
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
        return self[self._all].run(worker, *args, **kwargs)

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
        name = name_cells([filename]).get(filename, "cell")
        shown = replace(self._options, show_hidden=True, **options)
        return self._call(
            name, ranks or self._all, run_source, (source, filename), {}, variables, shown
        )

    def _call(
        self,
        name: str | None,
        ranks: Sequence[int],
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        variables: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Trace:
        """Calls a function on some ranks; only a call with a name is a part of ``trace``."""
        if not self.is_open:
            raise RingError("the session is closed. Start another one with ringsim.session.")
        job = pack_call(
            function, args, kwargs, self._seed, functools.partial(pack, variables=variables)
        )
        job = replace(job, check=self._check, only=tuple(ranks))
        self._timer.cancel()
        trace = None
        with interrupted_once():
            try:
                trace = self._ranks.run(job, options or self._options)
                return trace
            except (RingError, Interrupted) as error:
                trace = error.trace
                lost = list_lost(self._ranks.steps, self.world_size)
                error.args = (f"{error}\n  The session goes on{lost}.",)
                raise
            finally:
                if trace is not None and name is not None:
                    self._calls.append((name, trace))
                self._wait_for_call()

    def trace(self) -> Trace:
        """Returns all calls so far as one trace, without the time between them.

        Each call is a step with its name.

        Raises:
            RingError: there was no call yet.
        """
        if not self._calls:
            raise RingError("no call of this session has a trace yet. Call ranks.run first.")
        return _join(self._calls, self.world_size)

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
        self._do(self._all, assign, **variables)

    def pull(self, name: str) -> list[Any]:
        """Returns a variable's value on each rank, by rank; see ``RankView``."""
        return self._look(self._all, name)

    def _look(self, ranks: Sequence[int], name: str) -> list[Any]:
        values = []
        for rank, found in zip(ranks, self._do(ranks, look, name), strict=True):
            if not found:
                raise AttributeError(f"rank {rank} has no variable {name!r}")
            values += found
            if isinstance(found[0], Reference):
                found[0].fetch = functools.partial(self._do, [rank], look, name, math.inf)
        return values

    def _do(
        self, ranks: Sequence[int], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Calls a function that uses no groups on some ranks, and returns its results."""
        options = replace(self._options, live=False)
        results = self._call(None, ranks, function, args, kwargs, options=options).results
        return [results[rank] for rank in ranks]


def _join(calls: Sequence[tuple[str, Trace]], world_size: int) -> Trace:
    """Returns several calls as one trace."""
    parts, end_ns, traces = [], 0, [trace for _, trace in calls]
    for name, trace in calls:
        begin_ns, end_ns = end_ns, end_ns + trace.metadata["end_ns"]
        times = {"post_ns": begin_ns, "wait_ns": begin_ns, "done_ns": end_ns}
        columns = {"rank": range(world_size), "op": OP_CODES["span"], "label": 0, **times}
        parts.append(make_events(columns, Tables(labels=(f"step {name}",))))
        parts.append(count_from(trace.events, -begin_ns))
    events = join_events(parts)
    events = events.select(np.argsort(events.rank, kind="stable"))
    metadata = {**traces[0].metadata, "end_ns": end_ns, "ends": []}
    metadata["complete"] = all(trace.metadata["complete"] for trace in traces)
    output = list(map("".join, zip(*(trace.output for trace in traces), strict=True)))
    return Trace(events, metadata, results=traces[-1].results, output=output)


def _close(ranks: RealRanks | SimulatedRanks, pid: int) -> None:
    if os.getpid() == pid:  # not in a process that was forked since
        ranks.close()


def _end_idle(end: Callable[[], Any], world_size: int, idle_s: float) -> None:
    try:
        if sys.stderr is not None:  # it was closed when Python started
            sys.stderr.write(
                f"ringsim: the session of {world_size} ranks ended after {idle_s:g} s without a "
                "call.\n"
            )
    finally:
        end()


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
        check_worker(worker)
        name = getattr(worker, "__name__", type(worker).__name__)
        return self._session._call(name, self._ranks, worker, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_ipython_", "_repr_")) or len(self._ranks) != 1:
            raise AttributeError(name)
        return self._session._look(self._ranks, name)[0]

    def __dir__(self) -> Collection[str]:
        """Lists the variables, for completion."""
        (names,) = self._session._do(self._ranks[:1], list_names)
        return ["run", *names]
