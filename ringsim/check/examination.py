"""Code that the checks share: running a student's function, the verdict, and common rules.

A check passes a judge to ``examine``. The judge runs the answer through an ``Examination``, raises
``Wrong`` if the answer is wrong, and otherwise returns one sentence.
"""

from __future__ import annotations

import html
import os
import random
import re
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from ringsim.diagnose.mismatches import find_leaks
from ringsim.errors import Deadlock, PeerExited, RendezvousFailed, RingError, RunTimeout
from ringsim.launch.api import make_kind
from ringsim.launch.job import pack_call
from ringsim.launch.run import RunOptions, run
from ringsim.launch.system import look_at
from ringsim.ring.pairs import pair_name
from ringsim.traces.events import RECV, SEND, Ints
from ringsim.traces.findings import Diagnosis
from ringsim.traces.looks import LOOKS, readable_ink
from ringsim.traces.sites import RINGSIM
from ringsim.traces.units import capitalise, count
from ringsim.traces.value import Trace

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ringsim.pipeline.reports import GradientRow

# Limits of a run. A busy machine alone reaches neither, and a deadlock is found earlier.
CPU_S = 20.0  # CPU time of all ranks together: right answers take less than a tenth
ASLEEP_S = 20.0  # time in which all ranks sleep and none waits for a core
# for all runs of a check together, on any machine, without the time to kill ranks and to draw
LIMIT_S = 120.0
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in \S+\n\s+(?P<source>.+)')
ALONE_HINT = (
    "A ring of one rank has no groups (both are None) and no rank to send to: "
    "range(ring.world_size - 1) is empty there."
)
RAISED_HINT = (
    "Each pair group has only two ranks: use ring.succ with ring.succ_group, and ring.pred with "
    "ring.pred_group. In a ring of one rank there are no groups, and nothing to send."
)
_GROUP_HINT = (
    "Pass the group in every call: dist.isend(..., ring.succ, group=ring.succ_group), "
    "dist.recv(..., ring.pred, group=ring.pred_group)."
)
_ERROR_HINT = (
    "Run your function with ringsim.trace to see the whole error, and read the error from its last "
    "line upwards."
)
_STUCK_HINT = (
    "Follow the arrows in the picture: each arrow points from a rank to the rank that it waits for."
)
_SENTENCE = re.compile(r"(?<=[.?:]) (?=[A-Z])")
_SIGNS = {
    "passed": ("\N{CHECK MARK}", LOOKS["passed"].light),
    "not yet": ("\N{BALLOT X}", LOOKS["not_yet"].light),
    "undecided": ("?", LOOKS["undecided"].light),
}
_MOTIONS = {
    "send": ("sent to", "go to", "successor", "predecessor", 1),
    "recv": ("received from", "come from", "predecessor", "successor", -1),
}
Answer = Callable[..., Any]  # a student's function
Numbers = tuple[tuple[int, ...], list[float]]  # the shape and the numbers of a tensor
VOCABULARY = 11
WIDTH = 6


@dataclass(frozen=True, eq=False, repr=False)
class CheckResult:
    """The verdict on one answer.

    The verdict is passed, not yet, or undecided, and counts as true only if the answer passed. It
    is undecided if the check stopped an answer that may be right, because the answer slept or the
    machine was busy.

    In a notebook, the verdict is displayed as text, followed by a picture of the failed run or of
    the ranks that waited for each other. In a terminal, only the text is displayed.

    Attributes:
        check: the name of the check.
        passed: whether the answer is right.
        reason: the reason, in one sentence.
        hint: advice on what to try next; empty if the answer passed.
        seed: the seed of the sizes and data, or None if nothing was drawn. Pass the seed to the
            check to draw the same sizes and data again.
        world_size: the number of ranks in the run that ``reason`` describes, or None if there was
            no such run.
        trace: the trace of that run, or None if there was no such run.
        diagnosis: the waits between ranks in that run, or None if these waits are not the reason.
        undecided: whether the answer neither passed nor failed.

    Example:
        >>> result = CheckResult(
        ...     "ring",
        ...     False,
        ...     "Rank 0 of 3 sent nothing.",
        ...     "Send to ring.succ.",
        ...     seed=5,
        ...     world_size=3,
        ... )
        >>> result
        check.ring: not yet (3 ranks, seed 5)
          Rank 0 of 3 sent nothing.
          Hint: Send to ring.succ.
        >>> bool(result)
        False
    """

    check: str
    passed: bool
    reason: str
    hint: str
    seed: int | None = None
    world_size: int | None = None
    trace: Trace | None = None
    diagnosis: Diagnosis | None = None
    undecided: ClassVar[bool] = False

    @property
    def verdict(self) -> str:
        """The verdict in words: passed, not yet or undecided."""
        return "passed" if self.passed else "undecided" if self.undecided else "not yet"

    def __bool__(self) -> bool:
        """Returns whether the answer passed."""
        return self.passed

    def as_dict(self) -> dict[str, Any]:
        """Returns the verdict as plain data for JSON, without the trace.

        Example:
            >>> CheckResult("hello", True, "It holds.", "", seed=7).as_dict()
            {'check': 'hello', 'verdict': 'passed', 'passed': True, 'reason': 'It holds.', 'hint': '', 'seed': 7, 'world_size': None}
        """  # noqa: E501
        return {
            name: getattr(self, name)
            for name in ("check", "verdict", "passed", "reason", "hint", "seed", "world_size")
        }

    def __repr__(self) -> str:
        """Returns the verdict as text."""
        about = [] if self.seed is None else [f"seed {self.seed}"]
        if self.world_size is not None and not (self.passed and about):
            about.insert(0, count(self.world_size, "rank"))
        runs = f" ({', '.join(about)})" if about else ""
        texts = [self.reason]
        if self.hints:
            texts.append(f"Hint: {self.hints[0]}")
        if len(self.hints) > 1:
            texts.append(f"({count(len(self.hints) - 1, 'more hint')}: .hints)")
        lines = [f"check.{self.check}: {self.verdict}{runs}"]
        for each in "\n".join(texts).splitlines():
            lines += textwrap.wrap(each, 110, break_long_words=False, break_on_hyphens=False)
        return "\n  ".join(lines)

    @property
    def hints(self) -> tuple[str, ...]:
        """The hint, as sentences that become increasingly specific."""
        return tuple(_SENTENCE.split(self.hint)) if self.hint else ()

    def _ipython_display_(self) -> None:
        """Shows the text and then the picture.

        With both in one output, a notebook would show only the picture.
        """
        from IPython.display import display

        waits = self.diagnosis.picture_html() if self.diagnosis is not None else ""
        display({"text/plain": repr(self), "text/html": self._html() + waits}, raw=True)
        if self.trace is not None and not waits and not self.passed:
            self._show_run(self.trace)

    def _show_run(self, trace: Trace) -> None:
        from IPython.display import display

        display(trace)

    def _html(self) -> str:
        """Returns the verdict with a coloured sign; the hints open one after another."""
        sign, colour = _SIGNS[self.verdict]
        hints = ""
        for number, hint in reversed(list(enumerate(self.hints))):
            summary = "Another hint" if number else "A hint"
            hints = f"<details><summary>{summary}</summary>{html.escape(hint)}{hints}</details>"
        seed = "" if self.seed is None else f" (seed {self.seed})"
        return (
            f'<div style="border-left: 4px solid {colour}; padding: 2px 12px; word-break: '
            'normal; overflow-wrap: normal">'
            f'<b><span style="background: {colour}; color: {readable_ink(colour)}; '
            f'padding: 0 5px; border-radius: 3px">{sign}</span> check.{html.escape(self.check)}: '
            f"{self.verdict}</b>{seed}"
            f'<div style="white-space: pre-line">{html.escape(self.reason)}</div>{hints}</div>'
        )


class Undecided(CheckResult):
    """The verdict on an answer that neither passed nor failed."""

    undecided = True


@dataclass(eq=False)
class Wrong(Exception):
    """The answer is wrong; see ``CheckResult`` for the attributes.

    The trace is needed only if it is not the trace of the run under examination.
    """

    reason: str
    hint: str
    trace: Trace | None = None
    world_size: int | None = None
    diagnosis: Diagnosis | None = None
    undecided: bool = False


class _Effort:
    """The resources used by a run's ranks, from the system's counters (Linux only)."""

    def __init__(self) -> None:
        self._ticks: dict[int, int] = {}
        self._looked = time.monotonic()
        self.asleep_s = 0.0

    @property
    def cpu_s(self) -> float:
        """The CPU time of all ranks, in seconds."""
        return sum(self._ticks.values()) / os.sysconf("SC_CLK_TCK")

    def allows(self, pids: Collection[int]) -> bool:
        """Updates the counters of the running ranks; returns whether they may continue."""
        found = {pid: process for pid in pids if (process := look_at(pid)) is not None}
        self._ticks.update((pid, process.ticks) for pid, process in found.items())
        passed_s, self._looked = time.monotonic() - self._looked, time.monotonic()
        if found and all(process.doing != "computing" for process in found.values()):
            # after a late look, count only a short time: earlier activity is unknown
            self.asleep_s += min(passed_s, 0.1)
        return self.cpu_s <= CPU_S and self.asleep_s <= ASLEEP_S


class Examination:
    """One answer under examination.

    It holds the student's ``function``, a generator ``random`` for sizes and data, and the
    ``trace`` of the run that is judged.
    """

    def __init__(self, function: Answer, seed: int) -> None:
        self.function = function
        self.random = random.Random(seed)
        self.trace: Trace | None = None
        self._deadline = time.monotonic() + LIMIT_S

    def run(
        self,
        on_rank: Answer,
        world_size: int,
        *args: Any,
        things: str = "",
        hint: str = "",
    ) -> Trace:
        """Runs ``on_rank(function, *args)`` on new ranks and returns the trace.

        The trace contains the ranks' output, which is not shown.

        Args:
            on_rank: the function that each rank calls, with the student's function.
            world_size: the number of ranks.
            args: further arguments for ``on_rank``.
            things: the name of the messages, which must go only to the successor, even if the run
                does not end; empty if messages may go anywhere.
            hint: the hint if the function raises an error.

        Raises:
            Wrong: the run failed or took too long, or ``things`` went to another rank.
        """
        left_s, effort = max(self._deadline - time.monotonic(), 0.5), _Effort()
        try:
            job = pack_call(on_rank, (self.function, *args), {}, seed=0)
            kind = make_kind(world_size, "cpu", 2 * LIMIT_S, ring=True)
            options = RunOptions(limit_s=left_s, show=False, allows=effort.allows)
            self.trace = trace = run(job, kind, options)
        except RingError as error:
            self.trace = trace = error.trace
            timed_out = isinstance(error, RunTimeout)
            stuck = (
                isinstance(error, Deadlock | PeerExited)
                and trace is not None
                and error.diagnosis is not None
            )
            if things and trace is not None and (stuck or timed_out):
                judge_way(trace, things)
            if stuck:
                raise _stuck(trace, error.diagnosis) from None
            if timed_out:
                raise _unended(world_size, effort) from None
            raise self.failed(error, world_size, hint) from None
        for leak in find_leaks(trace):
            raise Wrong(capitalise(leak.message), leak.hint)
        if things:
            judge_way(trace, things)
        return trace

    def judge_content(
        self,
        judge: Callable[[Trace], None],
        on_rank: Answer,
        *args: Any,
    ) -> None:
        """Runs the answer again on 2 ranks, with messages that contain only zeros.

        Raises ``Wrong`` if the answer is still right.
        """
        judged = self.trace
        try:
            judge(self.run(_on_blank_rank, 2, on_rank, *args))
        except Wrong as wrong:
            if wrong.undecided:
                raise
            self.trace = judged
            return
        self.trace = None  # it would look right
        raise Wrong(
            "With 2 ranks, your answer is the same even if every message contains only zeros, so "
            "your numbers bypass the messages.",
            "A rank may learn about the other ranks only from the messages that it receives.",
            world_size=2,
        )

    def ask(
        self, cases: Sequence[Any], read: Callable[[Any], Any], *, hint: str = "", own: bool = True
    ) -> Iterator[tuple[Any, Any]]:
        """Calls ``function(*case)`` on a separate rank that can be stopped.

        Yields each case with its answer, converted by ``read``; an answer that ``read`` cannot
        convert becomes a short text. If the work must be the student's ``own``, the function may
        not call ringsim.
        """
        ((answers, called),) = self.run(_answer_on_rank, 1, cases, read, hint=hint).results
        self.trace = None  # it would show nothing
        if own and called:
            raise Wrong(
                f"Your answer calls ringsim's {called[0]}, but must do this work itself.",
                "Write the code yourself instead of calling this function.",
            )
        return zip(cases, answers, strict=True)

    def failed(self, error: RingError, world_size: int, hint: str) -> Wrong:
        """Returns the verdict for an error, with the student's own line."""
        text = str(error)
        first = text.splitlines()[0].rstrip(".")
        own_file = getattr(getattr(self.function, "__code__", None), "co_filename", None)
        # frames in ringsim itself do not help a student
        frames = [frame for frame in _FRAME.finditer(text) if not frame["file"].startswith(RINGSIM)]
        theirs = [frame for frame in frames if frame["file"] == own_file] or frames
        where = f" (line {theirs[-1]['line']}: {shown(theirs[-1]['source'])})" if theirs else ""
        never_ran = isinstance(error, RendezvousFailed) or (
            type(error) is RingError and error.trace is None
        )
        reason = f"{capitalise(first)}{where}."
        return Wrong(
            reason,
            "" if never_ran else hint or _ERROR_HINT,
            world_size=world_size,
            undecided=never_ran,
        )


def examine(
    name: str,
    function: Any,
    judge: Callable[[Examination], str],
    seed: int | None,
) -> CheckResult:
    """Submits an answer to a judge and returns the verdict.

    The judge returns a sentence if the answer is right, and raises ``Wrong`` otherwise. The verdict
    shows the examination's trace.
    """
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    examination = Examination(function, seed)
    try:
        if not callable(function):
            hint = f"Pass the function itself, check.{name}(my_function), not its result."
            raise Wrong(f"Your answer must be a function, got {shown(function)}.", hint)
        sentence = judge(examination)
    except Wrong as wrong:
        result = Undecided if wrong.undecided else CheckResult
        trace = examination.trace if wrong.trace is None else wrong.trace
        world_size = wrong.world_size
        if world_size is None and trace is not None:
            world_size = trace.world_size
        return result(
            name, False, wrong.reason, wrong.hint, seed, world_size, trace, wrong.diagnosis
        )
    return CheckResult(name, True, sentence, "", seed, trace=examination.trace)


def _on_blank_rank(function: Answer, on_rank: Answer, *args: Any) -> Any:
    from ringsim.comm.injecting import blank_messages  # on the rank, because it loads torch

    blank_messages()
    return on_rank(function, *args)


def _answer_on_rank(
    function: Answer, cases: Sequence[Any], read: Callable[[Any], Any]
) -> tuple[list[Any], list[str]]:
    """Returns the answers, and the ringsim functions that the student's function called.

    Creating an instance of a ringsim class is not a call.
    """
    answers: list[Any] = []
    called: list[str] = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code, caller = frame.f_code, frame.f_back
        if (
            event != "call"
            or not code.co_filename.startswith(RINGSIM)
            or code.co_name.startswith(("_", "<"))
        ):
            return
        if code is getattr(function, "__code__", None) or (
            caller is not None and not caller.f_code.co_filename.startswith(RINGSIM)
        ):
            called.append(code.co_qualname)

    sys.setprofile(watch)
    try:
        for case in cases:
            answer = function(*case)
            try:
                answers.append(read(answer))
            except Exception:  # students may return anything
                answers.append(repr(answer) if isinstance(answer, str) else shown(answer))
    finally:
        sys.setprofile(None)
    return answers, called


def refuse_text(answer: Any) -> Any:
    """Returns an answer, but raises TypeError for a string, which would pass for a list."""
    if isinstance(answer, str):
        raise TypeError
    return answer


def _stuck(trace: Trace, diagnosis: Diagnosis) -> Wrong:
    """Returns the verdict for a deadlocked run, with the ranks that waited for each other."""
    cause = diagnosis.findings[0]
    return Wrong(
        f"In a ring of {count(trace.world_size, 'rank')}, {cause.message}",
        " ".join(cause.hint.split()) or _STUCK_HINT,
        diagnosis=diagnosis,
        undecided=bool(trace.metadata.get("at_rest")),  # ranks at rest are no proof
    )


def _unended(world_size: int, effort: _Effort) -> Wrong:
    """Returns the verdict for a run that was stopped, with the limit that it reached.

    A stopped answer is certainly wrong only if it computes forever.
    """
    computed = effort.cpu_s > CPU_S
    if computed:
        why = f" within {CPU_S:g} s of CPU time."
        hint = "Look for a loop that never ends."
    elif effort.asleep_s > ASLEEP_S:
        why = (
            f": for {ASLEEP_S:g} s, no rank did anything, but this does not prove that the answer "
            "is wrong."
        )
        hint = "Look for a sleep(), and for a loop that keeps checking whether something happened."
    else:
        why = f" in time and got only {effort.cpu_s:.1f} s of CPU time: the machine is busy."
        hint = "Try again when the machine is less busy."
    reason = f"A run with {count(world_size, 'rank')} did not end{why}"
    return Wrong(reason, hint, world_size=world_size, undecided=not computed)


def plain_number(answer: Any) -> float | str:
    """Returns an answer as a number, even if it is a one-element array or tensor.

    Other answers become a short text.
    """
    if isinstance(answer, str | bytes | bool):
        return shown(repr(answer))
    try:
        return float(answer)
    except Exception:  # students may return anything, with their own __float__
        return shown(answer)


def plain_tensor(answer: Any) -> Numbers | str:
    """Returns a tensor's shape and numbers, or a short text for other answers."""
    import torch  # here, so that a process that only starts ranks does not load it

    if not isinstance(answer, torch.Tensor):
        return shown(answer)
    try:
        return tuple(answer.shape), answer.flatten().tolist()
    except Exception:  # it may be sparse, nested, or without data
        return "a tensor whose numbers cannot be read"


def listed(numbers: Iterable[int]) -> str:
    """Lists numbers in order, for use in a sentence.

    Example:
        >>> listed([3, 1, 2])
        '1, 2 and 3'
    """
    *most, last = map(str, sorted(numbers))
    return f"{', '.join(most)} and {last}"


def shown(value: Any) -> str:
    """Returns a value as a short text, for use in a sentence.

    Example:
        >>> shown(None), shown(3.0), shown([1] * 1000)
        ('None', '3', '[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,...')
    """
    try:
        if isinstance(value, float):
            text = f"{value:.15g}"
        else:
            text = value if isinstance(value, str) else repr(value)
    except Exception:  # as above
        text = f"a {type(value).__name__}"
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:60].rstrip()}..."


def judge_way(trace: Trace, things: str) -> None:
    """Raises ``Wrong`` unless every message goes to the successor, on the group of that edge.

    This also judges runs that did not end.
    """
    size = trace.world_size
    for event in trace:
        if event.kind not in ("send", "recv", "collective"):
            continue
        rank, peer, op = event.rank, event.peer, event.op
        who = f"Rank {rank} of {size}"
        if size == 1:
            raise Wrong(f"A single rank has no other rank to talk to, but called {op}.", ALONE_HINT)
        if event.kind == "collective":
            raise Wrong(
                f"{who} called {op}, but only messages between neighbours are allowed.",
                f"You need only sends and recvs: pass {things} on to your successor, and use the "
                f"{things} that arrive.",
            )
        verb, motion, role, opposite, step = _MOTIONS[event.kind]
        due, other = (rank + step) % size, (rank - step) % size
        edge = pair_name((rank, due) if event.kind == "send" else (due, rank))
        if peer != due:
            found = "any rank" if peer is None else f"rank {peer}"
            if peer == other:
                found += f", its {opposite}"
            reason = f"{who} {verb} {found}, but {things} must {motion} its {role}, rank {due}."
            hint = (
                "Send to ring.succ on ring.succ_group, and receive from ring.pred on "
                f"ring.pred_group: {things} travel clockwise in the picture."
            )
            raise Wrong(reason, hint)
        if event.group != edge:
            reason = (
                f'{who} {verb} rank {peer} on the group "{event.group or "none"}", but must use '
                f'its {role} group "{edge}".'
            )
            raise Wrong(reason, _GROUP_HINT)


class Side(NamedTuple):
    """One rank's sends, or its recvs.

    Attributes:
        rank: the rank.
        who: the rank in words, with the number of ranks.
        is_send: whether the operations are sends.
        verb: the verb "send" or "receive".
        done: the verb in the past tense.
        to: the direction, such as "to its successor".
        peer: the successor or the predecessor.
        events: the indices of the operations, ascending.
    """

    rank: int
    who: str
    is_send: bool
    verb: str
    done: str
    to: str
    peer: int
    events: Ints

    def judge(self, number: int, what: str, hint: str) -> None:
        """Raises ``Wrong`` unless there are ``number`` operations, which ``what`` describes."""
        if len(self.events) != number:
            raise self.wrong(what, len(self.events), hint)

    def wrong(self, due: str, found: object, hint: str) -> Wrong:
        """Returns the verdict for a rank that sent or received something else than it must."""
        return Wrong(f"{self.who} must {self.verb} {due}, but {self.done} {found or 'none'}.", hint)


def sides(trace: Trace) -> Iterator[Side]:
    """Yields the sends and then the recvs of each rank."""
    events, size = trace.events, trace.world_size
    for rank in range(size):
        who = f"Rank {rank} of {size}"
        sent, received = (
            np.flatnonzero((events.rank == rank) & (events.kind == kind)) for kind in (SEND, RECV)
        )
        pred, succ = (rank - 1) % size, (rank + 1) % size
        yield Side(rank, who, True, "send", "sent", "to its successor", succ, sent)
        yield Side(rank, who, False, "receive", "received", "from its predecessor", pred, received)


def judge_rings(
    examination: Examination,
    on_rank: Answer,
    things: str,
    sizes: Iterable[int],
    judge_side: Callable[[Trace, Side], None],
    judge_results: Callable[[Trace], None],
    hint: str = RAISED_HINT,
) -> None:
    """Judges an answer that passes things around rings of several sizes.

    ``judge_side`` judges the sends and the recvs of each rank, and ``judge_results`` the results,
    which must depend on the content of the messages.
    """
    for world_size in sizes:
        secret = examination.random.randrange(10**9)
        trace = examination.run(on_rank, world_size, secret, things=things, hint=hint)
        for side in sides(trace):
            judge_side(trace, side)
        judge_unmatched(trace)
        judge_results(trace)
    examination.judge_content(judge_results, on_rank, secret)


def judge_rounds(
    examination: Examination,
    on_rank: Answer,
    thing: str,
    hint: str,
    judge_results: Callable[[Trace], None],
) -> str:
    """Judges an answer that passes things once around rings of several sizes.

    Every rank must send N - 1 things to its successor and receive as many from its predecessor.

    Returns:
        The sizes, for use in a sentence.
    """

    def judge_side(trace: Trace, side: Side) -> None:
        number = trace.world_size - 1
        side.judge(number, f"{count(number, thing)} {side.to}", hint)

    sizes = [3, 2, examination.random.choice([4, 5, 6]), 1]
    judge_rings(examination, on_rank, f"{thing}s", sizes, judge_side, judge_results)
    return f"in rings of {listed(sizes)} ranks"


def judge_unmatched(trace: Trace, hint: str = "Use the same tag on both sides, or no tag.") -> None:
    """Raises ``Wrong`` unless every send met its recv."""
    if trace.unmatched:
        operation = repr(trace.unmatched[0]).replace(": ", "'s ", 1)
        raise Wrong(f"Every send needs a recv, but {operation}.", hint)


class Task(NamedTuple):
    """A six-layer model from token ids to logits, and the model's data, in float64.

    It is the same on every rank.
    """

    model: nn.Sequential
    inputs: list[Tensor]
    targets: list[Tensor]


def make_task(secret: int, num_microbatches: int) -> Task:
    """Creates the model and the data on each rank, with microbatches of shape (2, 5)."""
    import torch  # here, so that a process that only starts ranks does not load it
    from torch import nn

    torch.manual_seed(secret)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY)
    ).double()
    tokens = [torch.randint(VOCABULARY, (2, 6)) for _ in range(num_microbatches)]
    return Task(model, [each[:, :-1] for each in tokens], [each[:, 1:] for each in tokens])


def find_wrong(
    task: Task, named: Mapping[str, nn.Parameter], mine: Iterable[nn.Parameter]
) -> GradientRow | None:
    """Compares the gradients after a step with those of a single process, without messages.

    Args:
        task: the model and the data before the step.
        named: all parameters of the model after the step, by name.
        mine: the parameters that must have a gradient; the others must have none.

    Returns:
        The worst row of the report, or None if all gradients are equal. Its verdict is one of the
        report's, or "zeros" for a gradient of only zeros.
    """
    from ringsim.pipeline.reports import compare_gradients, single_process_step, tolerance_of

    expected = single_process_step(*task).gradients
    held = {id(parameter) for parameter in mine}
    due = {
        name: expected[name] if id(parameter) in held else None for name, parameter in named.items()
    }
    grads = {name: parameter.grad for name, parameter in named.items()}
    found = {name: None if grad is None else grad.to_dense() for name, grad in grads.items()}
    report = compare_gradients(found, due, tolerance=tolerance_of(task.model))
    if not report.wrong:
        return None
    row = report.wrong[0]
    gradient = found[row.parameter]
    return row if gradient is None or gradient.any() else row._replace(verdict="zeros")
