"""From the errors of several ranks to the one that matters.

When a rank fails, its peers fail too: their connections close. What the user needs is the first failure, on their own line; the rest is
folded into a sentence.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ringsim import errors
from ringsim.launch.cause import OWN, PEER, find_cause, is_internal, text_of
from ringsim.traces.events import readable
from ringsim.traces.parts import name_cells, rename_places

_NO_FAILURE: Final = ("", "0", "None", "False")  # what sys.exit may be given that makes the exit code 0


@dataclass(frozen=True)
class Report:
    """How one rank failed.

    Attributes:
        error: name of the exception's type, or "" where the process died without one.
        text: the exception's message, or what is known of the death.
        where: "file, line n, in function" of the user's own line, "" where there is none.
        traceback: the user's part of the traceback, with source lines.
        at_ns: when, CLOCK_MONOTONIC.
        of_ringsim: whether ``error`` is one of ringsim's own errors.
        echo: what this merely follows from, see ``ringsim.launch.cause``: ``OWN`` for nothing.
        after: the exception that led to this one, "ValueError: nan loss (train.py, line 7, in step)", or "".
        waited: where a wait ended in vain that the exception came to on its way out, or "".
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

    @property
    def is_consequence(self) -> bool:
        """Whether this is the echo of another rank's failure."""
        return self.echo == PEER


def report_exception(rank: int, error: BaseException, at_ns: int | None = None) -> Report:
    """Describes why a worker failed, with the frames of the user's own code.

    Args:
        rank: whose worker it was.
        error: what came out of it.
        at_ns: when; now, by CLOCK_MONOTONIC, where it is not given.
    """
    cause = find_cause(error)
    summary = traceback.TracebackException.from_exception(cause.error, limit=None)
    where = _keep_users_frames(summary)
    of_ringsim = isinstance(cause.error, errors.RingError)
    return Report(
        rank=rank,
        error=type(cause.error).__name__,
        text=text_of(cause.error),
        where=where,
        traceback=readable("".join(summary.format(chain=True)).rstrip()),
        at_ns=time.monotonic_ns() if at_ns is None else at_ns,
        of_ringsim=of_ringsim,
        echo=cause.echo,
        after=_name(cause.after) if cause.after is not None and not (of_ringsim and cause.echo == OWN) else "",
        waited=_users_place(error) if cause.pending else "",
    )


def _name(error: BaseException) -> str:
    """Returns an exception with its place in one line."""
    text, where = text_of(error).partition("\n")[0], _users_place(error)
    return type(error).__name__ + (f": {text}" if text else "") + (f" ({where})" if where else "")


def _users_place(error: BaseException) -> str:
    """Returns "file, line n, in function" of the user's innermost line that an exception passed through, "" where there is none."""
    return _keep_users_frames(traceback.TracebackException.from_exception(error, limit=None, lookup_lines=False))


def rename_files(report: Report, names: Mapping[str, str]) -> Report:
    """Returns the report with files called by other names, as a notebook calls its cells."""
    where, after, waited, traced = report.where, report.after, report.waited, report.traceback
    for filename, name in names.items():
        where, after, waited = (place.replace(f"{filename}, line", f"{name}, line") for place in (where, after, waited))
        traced = traced.replace(f'File "{filename}", line', f"{name}, line")
    traced, text = rename_places(traced, names), rename_places(report.text, names)
    return replace(report, where=where, after=after, waited=waited, traceback=traced, text=text)


def _keep_users_frames(summary: traceback.TracebackException) -> str:
    """Drops the frames of ringsim and torch from a traceback, where others remain; returns where the user's innermost one is."""
    theirs = [frame for frame in summary.stack if not is_internal(frame.filename)]
    if theirs:
        summary.stack = traceback.StackSummary.from_list(theirs)
    for chained in (summary.__cause__, summary.__context__):
        if chained is not None:
            _keep_users_frames(chained)
    if not theirs:
        return ""
    last = theirs[-1]
    place: str = readable(f"{last.filename}, line {last.lineno}, in {last.name}")
    return place


def report_death(rank: int, exit_code: int | None, at_ns: int, output: str) -> Report:
    """Describes the death of a process that raised nothing.

    Args:
        rank: whose process it was.
        exit_code: as ``subprocess`` has it (negative: a signal), None where nobody knows.
        at_ns: when it was reaped.
        output: what the rank had printed; a message of the C++ layer is often its last line.
    """
    if exit_code is None:
        text = "its process is gone"
    elif exit_code < 0:
        text = f"its process was ended by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    else:
        text = f"its process left with exit code {exit_code} before the worker returned"
    last = [line for line in output.splitlines() if line.strip()][-3:]
    if exit_code is not None and exit_code < 0 and last:
        text += ". It last printed:\n  " + "\n  ".join(last)
    return Report(rank=rank, error="", text=readable(text), where="", traceback="", at_ns=at_ns)


def describe_end(report: Report) -> dict[str, Any] | None:
    """Says how a rank ended, as a trace keeps it for ``explain``; None where it suffered from what others did, or did not.

    Example:
        >>> describe_end(report_death(2, -9, at_ns=0, output=""))
        {'rank': 2, 'state': 'killed', 'about': 'was ended by signal 9 (SIGKILL)', 'error': ''}
        >>> describe_end(Report(1, "ValueError", "no such layer", "train.py, line 7, in step", "", at_ns=0))["about"]
        'raised ValueError: no such layer (train.py, line 7, in step)'
        >>> [describe_end(Report(1, "SystemExit", code, "", "", at_ns=0))["state"] for code in ("0", "7")]
        ['exited', 'failed']
    """
    if report.echo != OWN:
        return None  # how it ended says nothing of why: what it waited for does
    if report.error == "SystemExit":
        state = "exited" if report.text in _NO_FAILURE else "failed"
        about = f"left with sys.exit({report.text})"
    elif report.error:
        text = report.text.partition("\n")[0]
        state, about = "failed", f"raised {report.error}{f': {text}' if text else ''}"
    else:
        about = report.text.partition(". It last")[0].removeprefix("its process ")
        state = "killed" if "signal" in about else "exited" if "exit code 0" in about else "failed"
    about += f" ({report.where})" if report.where else ""
    about += f", after {report.after}" if report.after else ""
    about += f", and waited in vain on its way out ({report.waited})" if report.waited else ""
    return {"rank": report.rank, "state": state, "about": about, "error": report.error}


def describe_unfinished(rank: int, doing: str, place: tuple[str, int] | None) -> dict[str, Any]:
    """Says what a rank did that had not ended, as a trace keeps it for ``explain``; of one that waited, the trace knows better.

    Args:
        rank: which one.
        doing: see ``Process.doing``.
        place: file and line of the user's program, where they are known.

    Example:
        >>> describe_unfinished(1, "computing", ("/home/me/train.py", 7))
        {'rank': 1, 'state': 'running', 'about': 'computing at train.py:7', 'error': ''}
    """
    if doing == "stopped":
        return {"rank": rank, "state": "stopped", "about": "is stopped by a signal", "error": ""}
    name, line = place if place is not None else ("", 0)
    name = name_cells([name]).get(name, os.path.basename(name))
    return {"rank": rank, "state": "running", "about": f"{doing} at {name}:{line}" if name else doing, "error": ""}


def first_failure(reports: Sequence[Report]) -> Report:
    """Returns the report that the others follow from: the earliest that is not an echo."""
    return min(reports, key=lambda report: (report.is_consequence, report.at_ns))


def make_error(reports: Sequence[Report], world_size: int, stopped: Sequence[int]) -> errors.RingError:
    """Makes the one error of a failed run.

    Args:
        reports: one for each rank that failed by itself.
        world_size: number of ranks of the run.
        stopped: ranks that ringsim ended because another had failed.
    """
    first = first_failure(reports)
    who = f"rank {first.rank} of {world_size}"
    if first.of_ringsim:
        text = first.text if who in first.text else f"{first.text} ({who})"
    elif first.error:
        text = f"{who} raised {first.error}: {first.text}"
    else:
        text = f"{who} failed: {first.text}"
    if first.traceback and (first.where or not first.of_ringsim):
        text += "\n" + indent(first.traceback)
    if first.waited:
        text += f"\n  and waited in vain on its way out: {first.waited}"
    text += _echoes([report for report in reports if report is not first], stopped)
    kind = getattr(errors, first.error, errors.RankFailed) if first.of_ringsim else errors.RankFailed
    if issubclass(kind, errors.RankFailed):
        return kind(text, rank=first.rank)
    made: errors.RingError = kind(text)
    return made


def raised_where(report: Report) -> str:
    """Returns the lines of a rank's program where it was when its wait ended, innermost last, without the error."""
    frames = report.traceback.partition("\nringsim.errors.")[0].removeprefix("Traceback (most recent call last):\n")
    after = f"\n    after it had raised {report.after}" if report.after else ""
    return f"\n  rank {report.rank}:\n{indent(frames)}{after}" if report.where else ""


def _echoes(others: Sequence[Report], stopped: Sequence[int]) -> str:
    """Says in a line or two what became of the other ranks."""
    lines = []
    same = [report for report in others if not report.is_consequence]
    echoes = [report for report in others if report.is_consequence]
    if same:
        lines.append("also failed: " + "; ".join(f"rank {report.rank}, {report.error or report.text}" for report in same))
    if echoes:
        where = [f"rank {report.rank} ({report.where or report.error})" for report in echoes]
        lines.append("lost their peer because of it: " + "; ".join(where))
    if stopped:
        lines.append("were stopped because of it: " + ", ".join(f"rank {rank}" for rank in stopped))
    return "".join(f"\n  {line}" for line in lines)


def indent(text: str) -> str:
    """Returns a text whose lines begin two places further to the right."""
    return "\n".join(f"  {line}" for line in text.splitlines())
