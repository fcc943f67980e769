"""Describes rank failures, and finds the failure that caused the others.

When a rank fails, its connections close and its peers fail as well. The user needs to see the first
failure, with a line of their own code; the other failures are only listed. Within one rank,
exceptions are chained by ``__cause__`` and ``__context__``. Oldest first, a chain has one of three
forms::

    connection lost -> step failed             an echo: another rank's failure caused it, whatever
                                               the program raised then
    nan loss -> step failed                    it failed by itself
    nan loss -> connection lost, or a verdict  it failed, and a ``finally`` on the way out was stuck
                                               in a wait: the first error is the cause

An error from torch and an error from the user may have the same text; the place that raised them
tells them apart.

A watcher writes its verdict to the run's directory before it wakes a rank, so the rank finds the
error to raise there::

    watcher                                   rank that waits
    -------                                   ---------------
    writes verdict.json
    wakes --------------------------------->  its connections are shut, wait() raises
                                              reads verdict.json, raises Deadlock at the user's line
"""

from __future__ import annotations

import ast
import contextlib
import json
import linecache
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ringsim import errors
from ringsim.errors import (
    ArgumentError,
    Deadlock,
    MessageMismatch,
    PeerExited,
    RankFailed,
    RendezvousFailed,
    RingError,
    name_ranks,
)
from ringsim.traces.cells import name_cells, rename_places
from ringsim.traces.events import THREAD_FAILED
from ringsim.traces.findings import EXIT_CODE, IN_VAIN, Diagnosis, Edge, End, Finding, Operation
from ringsim.traces.recorder import LOST_PEER, Recorder
from ringsim.traces.sites import DECORATOR, PYTHON, RINGSIM

OWN = ""
PEER = "peer"  # a wait of this rank ended because others failed or are stuck
WAIT = "wait"  # a wait reached its limit: its diagnosis is more precise than the error
_WAITED = "and then got stuck in a wait during cleanup"
# after a rank has failed, the others have this long to fail or finish by themselves
GRACE_S = 0.5
# Gloo's words for a timeout, for messages and for collectives
_TIMED_OUT = ("Timed out waiting", "Operation timed out!")
# the beginning of an error that torch passes on from another process or thread
_PASSED_ON = "Caught "
# errors of ringsim that replace torch's own errors, and end a run in the same way
_OF_TORCH = ("Refused", "RunTimeout")
# the signals of a process that crashes by itself
_CRASHES = (
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
)
# findings that a program may recover from
LOST_PEERS = ("peer_exited", "missing_participant")
_ERRORS: dict[str, type[RingError]] = {
    "peer_exited": PeerExited,
    "missing_participant": PeerExited,
    "rank_failed": RankFailed,
    "rendezvous_failed": RendezvousFailed,
    "group_order_mismatch": RendezvousFailed,
    "message_mismatch": MessageMismatch,
    "collective_mismatch": MessageMismatch,
    "invalid_argument": ArgumentError,
}
_FILE = "verdict.json"


class Cause(NamedTuple):
    """The cause of a rank's failure."""

    error: BaseException  # the exception to report
    echo: str = OWN  # PEER or WAIT if it follows from one of them, else OWN
    after: BaseException | None = None  # the exception that led to it
    # whether it was passing through a ``finally`` that then got stuck in a wait
    pending: bool = False


def find_cause(error: BaseException) -> Cause:
    """Returns the cause of a rank's failure, given its worker's exception.

    Example:
        >>> def fail():
        ...     try:
        ...         raise KeyError("w")
        ...     except KeyError as missing:
        ...         raise ValueError("no such layer") from missing
        >>> try:
        ...     fail()
        ... except ValueError as error:
        ...     find_cause(error)
        Cause(error=ValueError('no such layer'), echo='', after=KeyError('w'), pending=False)
    """
    chain, own = list_chain(error), Cause(error, after=_root(error))
    place = next(
        (
            index
            for index, one in enumerate(chain)
            if _echo_of(one) or isinstance(one, MessageMismatch)
        ),
        None,
    )
    if place is None:
        return own
    before = chain[place - 1] if place else None
    if before is not None and _was_on_its_way(before, chain[place:]):
        return Cause(before, after=_root(before), pending=True)
    echo = _echo_of(chain[place])
    if echo == OWN:
        return own
    if echo == WAIT and any(_raised_inside(one) and _echo_of(one) == OWN for one in chain[place:]):
        return own  # the timeout was caught; something else went wrong with the next operation
    return Cause(
        error, echo, after=before if before is not None and not _raised_inside(before) else None
    )


def text_of(error: BaseException) -> str:
    """Returns an exception's message in printable characters."""
    try:
        text = str(error)
    except Exception:
        text = "<exception str() failed>"  # Python's own words
    return errors.escape(text)


def is_internal(filename: str) -> bool:
    """Returns whether a file belongs to ringsim, torch, torch's decorators, or Python's startup.

    Example:
        >>> is_internal(__file__), is_internal("/home/me/torch/train.py")
        (True, False)
    """
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return filename.endswith(DECORATOR) or filename.startswith(
        ("<frozen ", RINGSIM, f"{os.path.dirname(torch or __file__)}{os.sep}")
    )


def list_chain(error: BaseException | None, *, hidden: bool = True) -> list[BaseException]:
    """Returns an exception and the exceptions that led to it, oldest first.

    With ``hidden``, the chain includes exceptions that a traceback hides.
    """
    chain: list[BaseException] = []
    # the chain may be a cycle
    while error is not None and not any(error is other for other in chain):
        chain.append(error)
        stops = error.__cause__ is not None or (error.__suppress_context__ and not hidden)
        error = error.__cause__ if stops else error.__context__
    return chain[::-1]


def _root(error: BaseException) -> BaseException | None:
    """Returns the first exception that a traceback shows before an error, or None."""
    first = list_chain(error, hidden=False)[0]
    return None if first is error else first


def _echo_of(error: BaseException) -> str:
    """Classifies a single exception as ``PEER``, ``WAIT`` or ``OWN``."""
    if isinstance(error, BaseExceptionGroup):
        kinds = [_echo_of(list_chain(one)[0]) for one in error.exceptions]
        return kinds[0] if all(kinds) else OWN
    if isinstance(error, RingError):
        return PEER if error.imposed else WAIT if isinstance(error, errors.RunTimeout) else OWN
    text = text_of(error)
    of_torch = isinstance(error, RuntimeError) and (
        type(error).__module__.startswith("torch.") or _raised_inside(error)
    )
    if not of_torch or text.startswith(_PASSED_ON):
        return OWN
    if any(words in text for words in LOST_PEER):
        return PEER
    return WAIT if any(words in text for words in _TIMED_OUT) else OWN


def _raised_inside(error: BaseException) -> bool:
    """Returns whether an exception was raised by ringsim's or torch's code."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and is_internal(frames[-1].f_code.co_filename)


def _was_on_its_way(error: BaseException, later: list[BaseException]) -> bool:
    """Returns whether later exceptions were raised while this one passed through a ``finally``.

    An ``__exit__`` counts as a ``finally``.
    """
    caught = error.__traceback__
    if caught is None or isinstance(error, GeneratorExit):  # it only closes a generator
        return False
    frames = [pair for one in later for pair in traceback.walk_tb(one.__traceback__)]
    line = next((line for frame, line in frames if frame is caught.tb_frame), None)
    return line is not None and not _is_kept(
        caught.tb_frame.f_code.co_filename, caught.tb_lineno, line
    )


def _is_kept(filename: str, raised_at: int, line: int) -> bool:
    """Returns whether a line is in an ``except`` clause that handles a different line's error.

    Returns True if the source is not available.
    """
    source = "".join(linecache.getlines(filename))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return True
    for node in ast.walk(tree):
        if isinstance(node, ast.Try | ast.TryStar) and node.body[0].lineno <= raised_at <= (
            node.body[-1].end_lineno or 0
        ):
            for handler in node.handlers:  # a handler that raises nothing has handled it
                raises = any(isinstance(part, ast.Raise) for part in ast.walk(handler))
                if handler.lineno <= line <= (handler.end_lineno or 0) and not raises:
                    return True
    return not source


@dataclass(frozen=True)
class Report:
    """The failure of one rank.

    Attributes:
        rank: the rank.
        error: the name of the exception's type, or "" if the process died without one.
        text: the exception's message, or a description of the process's death, such as "was ended
            by signal 9 (SIGKILL)".
        where: "file, line n, in function" of the user's own line, or "" if there is none.
        traceback: the user's part of the traceback, with source lines.
        at_ns: the time of the failure, on CLOCK_MONOTONIC.
        of_ringsim: whether ``error`` is one of ringsim's own errors.
        echo: ``PEER`` or ``WAIT`` if this failure is a consequence, otherwise ``OWN``.
        after: the exception that led to this one, such as "ValueError: nan loss (train.py, line 7,
            in step)", or "".
        waited: the place of the wait that held up the exception on its way out, or "".
        frames: the user's lines at which a wait ended, or the lines of the error if no wait ended.
        exit_code: the exit code of the process or of ``sys.exit`` (negative for a signal), or None
            if unknown.
        printed: the rank's last output.
    """

    rank: int
    error: str
    text: str
    where: str
    traceback: str
    at_ns: int
    of_ringsim: bool = False
    echo: str = OWN
    after: str = ""
    waited: str = ""
    frames: str = ""
    exit_code: int | None = None
    printed: str = ""

    @property
    def is_consequence(self) -> bool:
        """Whether this failure is the echo of another rank's failure."""
        return self.echo == PEER


def report_exception(rank: int, error: BaseException, at_ns: int | None = None) -> Report:
    """Describes a worker's failure, with the stack frames of the user's own code.

    ``at_ns`` is the current time by default.
    """
    cause = find_cause(error)
    summary, where = _summarize(cause.error)
    waits = map(_summarize, filter(_echo_of, list_chain(error)))
    frames = next((wait.stack for wait, line in waits if line), summary.stack)
    of_ringsim = isinstance(cause.error, errors.RingError)
    exit_code = int(bool(cause.error.code)) if isinstance(cause.error, SystemExit) else None
    return Report(
        rank=rank,
        error=type(cause.error).__name__,
        text=text_of(cause.error),
        where=where,
        traceback=errors.escape("".join(summary.format(chain=True)).rstrip()),
        at_ns=time.monotonic_ns() if at_ns is None else at_ns,
        of_ringsim=of_ringsim,
        echo=cause.echo,
        after=_name(cause.after)
        if cause.after is not None and not (of_ringsim and cause.echo == OWN)
        else "",
        waited=_users_place(error) if cause.pending else "",
        frames=errors.escape("".join(frames.format()).rstrip()),
        exit_code=exit_code,
    )


def _name(error: BaseException) -> str:
    text, where = text_of(error).partition("\n")[0], _users_place(error)
    return type(error).__name__ + (f": {text}" if text else "") + (f" ({where})" if where else "")


def _users_place(error: BaseException) -> str:
    """Returns "file, line n, in function" for the user's innermost line, or "" if there is none."""
    return _summarize(error)[1]


def _summarize(error: BaseException) -> tuple[traceback.TracebackException, str]:
    """Returns an exception's traceback without ringsim's and torch's frames, and its place."""
    summary = traceback.TracebackException.from_exception(error, limit=None)
    return summary, _keep_users_frames(summary)


def _keep_users_frames(summary: traceback.TracebackException) -> str:
    """Drops ringsim's and torch's frames from a traceback if other frames remain.

    Returns the place of the user's innermost frame.
    """
    theirs = [frame for frame in summary.stack if not is_internal(frame.filename)]
    if theirs:
        summary.stack = traceback.StackSummary.from_list(theirs)
    for chained in (summary.__cause__, summary.__context__):
        if chained is not None:
            _keep_users_frames(chained)
    return _innermost(theirs)


def _innermost(frames: Sequence[traceback.FrameSummary]) -> str:
    """Returns "file, line n, in function" for the last frame outside Python's standard library."""
    place = next(
        (frame for frame in reversed(frames) if not frame.filename.startswith(PYTHON)),
        frames[-1] if frames else None,
    )
    if place is None:
        return ""
    return errors.escape(f"{place.filename}, line {place.lineno}, in {place.name}")


def rename_files(report: Report, names: Mapping[str, str]) -> Report:
    """Returns the report with renamed files, for example for the cells of a notebook."""

    def renamed(text: str) -> str:
        for filename, name in names.items():
            text = text.replace(f'File "{filename}", line', f"{name}, line")
            text = text.replace(f"{filename}, line", f"{name}, line")
        return rename_places(text, names)

    parts = ("where", "after", "waited", "traceback", "frames", "text")
    said: dict[str, Any] = {part: renamed(getattr(report, part)) for part in parts}
    return replace(report, **said)


def report_death(
    rank: int, exit_code: int | None, at_ns: int, output: str, crash: str = ""
) -> Report:
    """Describes the death of a process that raised no exception.

    Args:
        rank: the rank of the process.
        exit_code: the exit code as in ``subprocess`` (negative for a signal), or None if unknown.
        at_ns: the time when the process was reaped.
        output: the rank's output; the last line is often a message from C++.
        crash: the output of Python's ``faulthandler``, innermost frame first.
    """
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', crash)
    stack = traceback.StackSummary.from_list(
        [
            (file, int(line), name, None)
            for file, line, name in reversed(frames)
            if not is_internal(file)
        ]
    )
    last: list[str] = []
    if exit_code is None:
        text = "is gone"
    elif exit_code < 0:
        text = f"was ended by signal {-exit_code} ({signal.Signals(-exit_code).name})"
        last = [line for line in output.splitlines() if line.strip()][-3:]
    else:
        text = f"exited with code {exit_code} before the worker returned"
    lines = errors.escape("".join(stack.format()).rstrip())
    return Report(
        rank=rank,
        error="",
        text=text,
        where=_innermost(stack),
        traceback=lines,
        at_ns=at_ns,
        exit_code=exit_code,
        printed=errors.escape("\n".join(last)),
    )


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """Allows Ctrl-C to interrupt the block only once.

    Further interrupts have no effect while the block cleans up and saves its records.
    """

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        signal.default_int_handler(number, frame)

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def call_to_end(function: Callable[[], Any]) -> Any:
    """Calls a worker or a script; ``sys.exit(0)`` counts as returning None.

    Example:
        >>> call_to_end(sys.exit) is None
        True
    """
    try:
        return function()
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        return None


def describe_end(report: Report) -> dict[str, Any]:
    """Returns an entry on how a rank ended, for a trace's metadata, which ``explain`` reads.

    The state is "unknown" if the cause follows from the rank's waits.

    Example:
        >>> end = describe_end(report_death(2, -9, at_ns=0, output=""))
        >>> end["state"], end["about"]
        ('killed', 'was ended by signal 9 (SIGKILL)')
        >>> describe_end(
        ...     Report(1, "ValueError", "no such layer", "train.py, line 7, in step", "", at_ns=0)
        ... )["about"]
        'raised ValueError: no such layer (train.py, line 7, in step)'
        >>> [describe_end(report_exception(1, SystemExit(code)))["state"] for code in (0, 7)]
        ['exited', 'failed']
    """
    how = ""
    code = report.exit_code
    state = "exited" if code == 0 else "failed"
    if report.error == "SystemExit":
        about = f"called sys.exit({report.text})"
    elif report.error:
        text = report.text.partition("\n")[0]
        about = f"raised {report.error}{f': {text}' if text else ''}"
    else:
        about = report.text
        if code is not None and code < 0:
            state = "failed" if -code in _CRASHES else "killed"
        elif code is not None:
            how = EXIT_CODE
    about += f" ({report.where})" if report.where else ""
    about += f", after {report.after}" if report.after else ""
    if report.waited:
        about += f", {_WAITED} ({report.waited})"
        how = IN_VAIN
    return {
        "rank": report.rank,
        "state": "unknown" if report.echo != OWN else state,
        "about": about,
        "error": report.error,
        "how": how,
    }


def note_failed_threads(
    recorder: Recorder, tell: Callable[[], object] = lambda: None
) -> Callable[[], None]:
    """Starts recording errors that end threads, because other ranks may wait for these threads.

    If an uncaught verdict ends a thread, it calls ``tell``. Returns a function that stops the
    recording.
    """
    hand_on = threading.excepthook

    def note(end: threading.ExceptHookArgs) -> None:
        if isinstance(end.exc_value, Exception):
            report = report_exception(recorder.rank, end.exc_value)
            if report.echo == OWN:
                with contextlib.suppress(ValueError):  # the recording is just ending
                    recorder.notice(THREAD_FAILED, describe_end(report)["about"])
        if getattr(end.exc_value, "imposed", False):
            tell()
        hand_on(end)

    def stop() -> None:
        if threading.excepthook is note:
            threading.excepthook = hand_on

    threading.excepthook = note
    return stop


def describe_unfinished(rank: int, doing: str, place: tuple[str, int] | None) -> dict[str, Any]:
    """Returns an unfinished rank's activity as an entry for a trace's metadata.

    ``explain`` reads the entry. The place is a file and a line.

    Example:
        >>> describe_unfinished(1, "computing", ("/home/me/train.py", 7))
        {'rank': 1, 'state': 'running', 'about': 'computing at train.py:7', 'error': ''}
    """
    state, about = "running", f"{doing} at {place_text(place)}" if place else doing
    if doing == "stopped":
        state, about = "stopped", "is stopped by a signal"
    return {"rank": rank, "state": state, "about": about, "error": ""}


def place_text(place: tuple[str, int]) -> str:
    """Returns a file and line as "train.py:7", or with the name of a notebook cell.

    Example:
        >>> place_text(("/home/me/train.py", 7))
        'train.py:7'
    """
    name, line = place
    return f"{name_cells([name]).get(name, os.path.basename(name))}:{line}"


def make_error(
    reports: Sequence[Report], world_size: int, stopped: Sequence[int]
) -> errors.RingError:
    """Creates the one error that a failed run raises.

    Args:
        reports: the reports of the ranks that failed by themselves.
        world_size: the number of ranks in the run.
        stopped: the ranks that ringsim ended because another rank had failed.
    """
    # the earliest failure that is not an echo caused the others
    first = min(reports, key=lambda report: (report.is_consequence, report.at_ns))
    who = f"rank {first.rank} of {world_size}"
    if first.of_ringsim:
        text = first.text if who in first.text else f"{first.text} ({who})"
    else:
        text = (
            f"{who} raised {first.error}: {first.text}"
            if first.error
            else f"{who} failed: {describe_death(first)}"
        )
    if first.traceback and (first.where or not first.of_ringsim):
        text += "\n" + indent(first.traceback)
    if first.waited:
        text += f"\n  {_WAITED}: {first.waited}"
    failed, lost = dict[int, str](), dict[int, str]()
    for one in reports:
        if one is not first and one.is_consequence:
            lost[one.rank] = one.where or one.error
        elif one is not first:
            failed[one.rank] = one.error or f"its process {one.text}"
    told = {
        "also failed": _tell(failed),
        "lost a peer as a result": _tell(lost),
        "stopped as a result": name_ranks(sorted(stopped)) if stopped else "",
    }
    text += "".join(f"\n  {what}: {ranks}" for what, ranks in told.items() if ranks)
    kind = RankFailed
    if first.of_ringsim and first.error not in _OF_TORCH:
        kind = getattr(errors, first.error, RankFailed)
    made: RingError = kind(text, rank=first.rank) if issubclass(kind, RankFailed) else kind(text)
    return made


def describe_death(report: Report) -> str:
    """Describes a process that died without an exception, with its last output."""
    last = f". Its last output was:\n{indent(report.printed)}" if report.printed else ""
    return f"its process {report.text}{last}"


def _tell(texts: Mapping[int, str]) -> str:
    """Returns "ranks 0 and 2 (ValueError); rank 3 (KeyError)", from a text for each rank."""
    alike = ranks_by_text(texts)
    return "; ".join(f"{name_ranks(ranks)} ({text})" for text, ranks in alike.items())


def ranks_by_text(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Groups ranks by their texts.

    Example:
        >>> ranks_by_text({0: "ValueError", 3: "KeyError", 2: "ValueError"})
        {'ValueError': [0, 2], 'KeyError': [3]}
    """
    alike: dict[str, list[int]] = {}
    for rank, text in texts.items():
        alike.setdefault(text, []).append(rank)
    return alike


def raised_where(report: Report) -> str:
    """Returns the lines of a rank's program at which its wait ended, innermost last."""
    after = f"\n    after it had raised {report.after}" if report.after else ""
    return f"\n  rank {report.rank}:\n{indent(report.frames)}{after}" if report.where else ""


def indent(text: str) -> str:
    """Returns a text with each line indented by two spaces."""
    return "\n".join(f"  {line}" for line in text.splitlines())


@dataclass(frozen=True)
class Verdict:
    """A watcher's verdict.

    Attributes:
        ranks: the ranks that can never continue, or that have mismatched operations.
        diagnosis: the diagnosis.
        at_ns: the time of the observation, on CLOCK_MONOTONIC.
        proved: whether the posted operations prove the verdict. They do not in a stall: nothing has
            moved for long, but something still might.
        about: the places where threads wait outside operations, by rank.
    """

    ranks: tuple[int, ...]
    diagnosis: Diagnosis
    at_ns: int
    proved: bool = True
    about: dict[int, str] = field(default_factory=dict)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The waiting ranks, which must be woken."""
        states = self.diagnosis.states
        return tuple(rank for rank in self.ranks if not states or states[rank] == "blocked")

    @property
    def ends(self) -> list[dict[str, Any]]:
        """The states of the blocked ranks, as metadata entries for ``explain``."""
        blocked = sorted({*self.waiting, *self.about})
        return [
            {"rank": rank, "state": "blocked", "about": self.about.get(rank, ""), "error": ""}
            for rank in blocked
        ]

    @property
    def error(self) -> RingError:
        """The error that each of these ranks raises."""
        error = impose(self.diagnosis.kind, str(self.diagnosis))
        error.diagnosis = self.diagnosis
        return error


def error_of_kind(kind: str) -> type[RingError]:
    """Returns the error type for a run that ends with a finding of the given kind.

    Example:
        >>> error_of_kind("tag_mismatch").__name__, error_of_kind("missing_participant").__name__
        ('Deadlock', 'PeerExited')
    """
    return _ERRORS.get(kind, Deadlock)


def impose(kind: str, text: str) -> RingError:
    """Returns an error that is marked as caused by other ranks."""
    error = error_of_kind(kind)(text)
    # its traceback does not show the interrupted wait
    error.imposed = error.__suppress_context__ = True
    return error


_VALUES: dict[str, Any] = {
    kind.__name__: kind for kind in (Verdict, Diagnosis, Finding, Operation, Edge)
}


def write_verdict(directory: Path, verdict: Verdict) -> None:
    """Writes a verdict to the directory of the run's parts, atomically."""

    def encode(value: Any) -> Any:
        name = type(value).__name__
        return {"type": name, **vars(value)} if name in _VALUES else int(value)

    said = replace(verdict, diagnosis=replace(verdict.diagnosis, trace=None))
    unfinished = directory / f"{_FILE}.unfinished-{os.getpid()}"
    unfinished.write_text(json.dumps(said, default=encode))
    unfinished.replace(directory / _FILE)


def clear_verdict(directory: Path) -> None:
    """Removes the verdict of an earlier run in the same directory."""
    (directory / _FILE).unlink(missing_ok=True)


def read_verdict(directory: Path) -> Verdict | None:
    """Returns the verdict of a run, or None if there is none."""

    def decode(said: dict[str, Any]) -> Any:
        if "type" not in said:
            return {int(rank): text for rank, text in said.items()}
        kind = _VALUES[said.pop("type")]
        values = {
            name: tuple(value) if isinstance(value, list) else value for name, value in said.items()
        }
        if values.get("end"):
            values["end"] = End(*values["end"])
        return kind(**values)

    try:
        verdict: Verdict = json.loads((directory / _FILE).read_bytes(), object_hook=decode)
    except OSError:
        return None
    return verdict


def raise_verdict(directory: Path, rank: int) -> None:
    """Raises the verdict's error on a rank after its wait has failed.

    Returns if there is no verdict, or if it concerns only other ranks.
    """
    verdict = read_verdict(directory)
    if verdict is not None and rank in verdict.ranks:
        raise verdict.error
