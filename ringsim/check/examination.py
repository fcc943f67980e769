"""Running a student's function on fresh ranks, and putting into a sentence how a run ended."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ringsim.check.result import CheckResult
from ringsim.errors import Deadlock, PeerExited, RingError, RunTimeout
from ringsim.launch.api import make_kind
from ringsim.launch.job import pack_call
from ringsim.launch.run import RunOptions, run
from ringsim.traces.events import NONE, OK, OP_NAMES, RECV, SEND
from ringsim.traces.findings import Diagnosis
from ringsim.traces.value import Trace, count

__all__ = ["Examination", "Wrong", "examine", "plain_number", "shown"]

LIMIT_S: Final = 10.0  # for all runs of a check together; ending ranks and drawing come on top
TIMEOUT_S: Final = 5.0  # for one blocked operation: a deadlock shows before LIMIT_S, and names its lines
_PACKAGE: Final = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")  # its own lines tell a student nothing
_WAITED: Final = "Timed out waiting"  # how Gloo words it
_FRAME: Final = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in \S+\n\s+(?P<source>.+)')


class Wrong(Exception):
    """An answer does not hold: raised by whoever finds out, shown by the check.

    Args:
        reason: why, in one sentence.
        hint: what to try next.
        world_size: number of ranks of the run it is about, if any.
        trace: what was recorded of it, if anything.
        diagnosis: who waited for whom in it, where that is what is wrong.
    """

    def __init__(
        self, reason: str, hint: str, *, world_size: int | None = None, trace: Trace | None = None, diagnosis: Diagnosis | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint
        self.world_size = world_size
        self.trace = trace
        self.diagnosis = diagnosis


class Examination:
    """One answer under examination.

    Args:
        function: the student's.
        seed: what sizes and data are drawn from.

    Attributes:
        function: the student's.
        random: the source of sizes and data.
    """

    def __init__(self, function: Callable[..., Any], seed: int) -> None:
        self.function = function
        self.random = random.Random(seed)
        self._deadline = time.monotonic() + LIMIT_S

    def run(
        self,
        on_rank: Callable[..., Any],
        world_size: int,
        *args: Any,
        judge_early_end: Callable[[Trace], None] | None = None,
        hint: str = "",
    ) -> Trace:
        """Runs ``on_rank(function, *args)`` on fresh ranks; what they print is kept in the trace, not shown.

        Args:
            on_rank: what each rank does with the student's function.
            world_size: number of ranks.
            args: what else it is given.
            judge_early_end: looks at the trace of a run that did not end by itself, and may raise a ``Wrong`` that says more.
            hint: for a run in which the function raised.

        Raises:
            Wrong: the run failed, or took too long.
        """
        left_s = max(self._deadline - time.monotonic(), 0.5)
        try:
            job = pack_call(on_rank, (self.function, *args), {}, seed=0)
            return run(job, make_kind(world_size, "cpu", TIMEOUT_S, ring=True), RunOptions(limit_s=left_s, show=False))
        except RingError as error:
            trace = error.trace
            stuck = isinstance(error, RunTimeout | Deadlock | PeerExited) or _WAITED in str(error)
            if stuck and trace is not None:
                if judge_early_end is not None:
                    judge_early_end(trace)
                raise _stuck(trace) from None
            raise self._failed(error, world_size, hint) from None

    def _failed(self, error: RingError, world_size: int, hint: str) -> Wrong:
        """Says what was raised, with the student's own line."""
        text = str(error)
        first = text.splitlines()[0].rstrip(".")
        code = getattr(self.function, "__code__", None)
        frames = [frame for frame in _FRAME.finditer(text) if not frame["file"].startswith(_PACKAGE)]
        theirs = [frame for frame in frames if code is not None and frame["file"] == code.co_filename] or frames
        where = f" (line {theirs[-1]['line']}: {shown(theirs[-1]['source'])})" if theirs else ""
        hint = hint or "Run it with ringsim.trace to see the whole error, and read that from its last line upwards."
        return Wrong(f"{first[:1].upper()}{first[1:]}{where}.", hint, world_size=world_size, trace=error.trace)


def examine(name: str, function: object, judge: Callable[[Examination], tuple[str, Trace | None]], seed: int | None) -> CheckResult:
    """Puts an answer to a judge.

    Args:
        name: of the check.
        function: the student's.
        judge: runs it through the examination that it is given; returns the sentence for an answer that holds, and a trace to show;
            raises ``Wrong`` otherwise.
        seed: None to draw one.

    Returns:
        The verdict.
    """
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    if not callable(function):
        hint = f"Pass the function itself, check.{name}(my_function), not what it returns."
        return CheckResult(name, False, f"The answer must be a function, got {shown(function)}.", hint, seed)
    examination = Examination(function, seed)
    try:
        sentence, trace = judge(examination)
    except Wrong as wrong:
        return CheckResult(name, False, wrong.reason, wrong.hint, seed, wrong.world_size, wrong.trace, wrong.diagnosis)
    return CheckResult(name, True, sentence, "", seed, trace=trace)


def _stuck(trace: Trace) -> Wrong:
    """Says who waited for whom when a run had to be ended."""
    events = trace.events
    messages = (events.kind == SEND) | (events.kind == RECV)
    blocked = np.flatnonzero(messages & (events.status != OK) & (events.wait_ns != NONE))
    waits = []
    for rank in range(trace.world_size):
        of_rank = blocked[events.rank[blocked] == rank]
        if len(of_rank):
            index = of_rank[np.argmax(events.wait_ns[of_rank])]
            to = "to" if events.kind[index] == SEND else "from"
            waits.append(f"rank {rank} in {OP_NAMES[events.op[index]]} {to} rank {events.peer[index]} (line {events.line[index]})")
    if not waits:
        hint = "Look for a loop that never ends, and for an input() or a sleep(). If there is none, the machine was busy: try again."
        return Wrong(f"A run of {count(trace.world_size, 'rank')} did not end in time.", hint, world_size=trace.world_size, trace=trace)
    hint = (
        "A send ends only when the other side receives: if every rank sends first, and waits for it, nobody ever receives. "
        "Post the send with isend, receive, and then wait for the send. And every recv needs a send to meet."
    )
    reason = f"The run never ended, for these waited in vain: {', '.join(waits)}."
    return Wrong(reason, hint, world_size=trace.world_size, trace=trace)


def plain_number(answer: Any) -> float | str:
    """Returns an answer as a number, also from an array or tensor of one element; what is no number as a few words."""
    if isinstance(answer, str | bytes | bool):
        return shown(repr(answer))
    try:
        return float(answer)
    except Exception:  # whatever a student returns: __float__ may be theirs
        return shown(answer)


def shown(value: Any) -> str:
    """Returns a value in a few words, for a sentence.

    Example:
        >>> shown(None), shown(3.0), shown([1] * 1000)
        ('None', '3', '[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,...')
    """
    try:
        text = f"{value:.15g}" if isinstance(value, float) else value if isinstance(value, str) else repr(value)
    except Exception:  # as above
        text = f"a {type(value).__name__}"
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:60].rstrip()}..."
