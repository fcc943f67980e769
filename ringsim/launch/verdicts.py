"""A verdict: what the watcher found out, on its way to the ranks that wait in vain.

It is written to the run's directory before anybody is woken, so that a rank whose wait is cut short finds there what to raise::

    watcher                                    rank that waits
    -------                                    ---------------
    writes verdict.json
    wakes --------------------------------->   its connections are shut, wait() raises
                                               reads verdict.json, raises Deadlock at the user's line

A rank that ends because the other side of its message disagrees leaves word there in the same way: what it ends is not its own wait alone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from ringsim.errors import ArgumentError, Deadlock, MessageMismatch, PeerExited, RankFailed, RendezvousFailed, RingError
from ringsim.traces.findings import Diagnosis, Edge, Finding, Operation

__all__ = [
    "Verdict",
    "clear_verdict",
    "error_of_kind",
    "has_verdict",
    "impose",
    "pass_on",
    "raise_verdict",
    "read_verdict",
    "read_woken",
    "write_verdict",
]

_ERRORS: Final[dict[str, type[RingError]]] = {
    "peer_exited": PeerExited,
    "missing_participant": PeerExited,
    "rank_failed": RankFailed,
    "rendezvous_failed": RendezvousFailed,
    "group_order_mismatch": RendezvousFailed,
    "message_mismatch": MessageMismatch,
    "collective_mismatch": MessageMismatch,
    "invalid_argument": ArgumentError,
}
_FILE: Final = "verdict.json"
_PASSED_ON: Final = " ended with an error that explains this: "  # of a rank whose peer has left word why it ended


@dataclass(frozen=True)
class Verdict:
    """What the watcher found out.

    Attributes:
        ranks: those that can never go on.
        diagnosis: why.
        at_ns: at which moment that was so (CLOCK_MONOTONIC).
        at_rest: whether that took a moment at which nothing was on its way: what was posted does not prove it alone.
    """

    ranks: tuple[int, ...]
    diagnosis: Diagnosis
    at_ns: int
    at_rest: bool = False

    @property
    def error(self) -> RingError:
        """The error that a run ends with."""
        return error_of_kind(self.diagnosis.kind)(str(self.diagnosis), diagnosis=self.diagnosis)


def error_of_kind(kind: str) -> type[RingError]:
    """Returns the type of error that a finding of a kind ends a run with.

    Example:
        >>> error_of_kind("tag_mismatch").__name__, error_of_kind("missing_participant").__name__
        ('Deadlock', 'PeerExited')
    """
    return _ERRORS.get(kind, Deadlock)


def impose(kind: str, text: str) -> RingError:
    """Returns what a rank shall raise because of what has become of others, marked as such."""
    error = error_of_kind(kind)(text)
    error.imposed = error.__suppress_context__ = True  # what it cuts short is not what its traceback shall show
    return error


def write_verdict(directory: Path, verdict: Verdict) -> None:
    """Writes a verdict down, whole or not at all."""
    diagnosis = verdict.diagnosis
    _write(directory, diagnosis.kind, verdict.ranks, str(diagnosis), verdict.at_ns, asdict(replace(diagnosis, trace=None)))


def pass_on(directory: Path, rank: int, world_size: int, error: BaseException) -> None:
    """Leaves word of what ends a rank, where it explains why the waits of others break: of a message, one side alone sees the mismatch.

    A verdict that is there already stands.

    Args:
        directory: of the run's parts.
        rank: who ends.
        world_size: number of ranks.
        error: why.
    """
    if isinstance(error, MessageMismatch) and not has_verdict(directory):
        others = [other for other in range(world_size) if other != rank]
        _write(directory, "message_mismatch", others, f"rank {rank} of {world_size}{_PASSED_ON}{error}", time.monotonic_ns())


def _write(directory: Path, kind: str, ranks: Sequence[int], text: str, at_ns: int, diagnosis: dict[str, Any] | None = None) -> None:
    said = {"kind": kind, "ranks": ranks, "text": text, "at_ns": at_ns, "diagnosis": diagnosis}
    unfinished = directory / f"{_FILE}.unfinished-{os.getpid()}"
    unfinished.write_text(json.dumps(said, default=int))
    unfinished.replace(directory / _FILE)


def clear_verdict(directory: Path) -> None:
    """Takes away the verdict of an earlier run in the same directory."""
    (directory / _FILE).unlink(missing_ok=True)


def has_verdict(directory: Path) -> bool:
    """Tells whether somebody has written a verdict."""
    return (directory / _FILE).exists()


def read_woken(directory: Path) -> tuple[list[int], int] | None:
    """Returns the ranks that a watcher woke, and when (CLOCK_MONOTONIC); None where it woke none."""
    try:
        said = json.loads((directory / _FILE).read_bytes())
    except OSError:
        return None
    return (said["ranks"], said["at_ns"]) if said["diagnosis"] else None


def read_verdict(directory: Path, rank: int) -> RingError | None:
    """Returns the error that a rank shall raise, None where nobody has said so.

    Args:
        directory: of the run's parts.
        rank: who asks.
    """
    try:
        said = json.loads((directory / _FILE).read_bytes())
    except OSError:
        return None
    if rank not in said["ranks"]:
        return None  # it suffers from what became of others
    error = impose(said["kind"], said["text"])
    error.diagnosis = said["diagnosis"] and _read_diagnosis(said["diagnosis"])
    return error


def _read_diagnosis(said: dict[str, Any]) -> Diagnosis:
    edges = (Edge(**{**edge, "operation": edge["operation"] and _read_operation(edge["operation"])}) for edge in said["edges"])
    return Diagnosis(tuple(map(_read_finding, said["findings"])), said["world_size"], tuple(edges), tuple(said["states"]))


def _read_finding(said: dict[str, Any]) -> Finding:
    operations, echoes = map(_read_operation, said["operations"]), map(_read_finding, said["consequences"])
    return Finding(**{**said, "ranks": tuple(said["ranks"]), "operations": tuple(operations), "consequences": tuple(echoes)})


def _read_operation(said: dict[str, Any]) -> Operation:
    return Operation(**{**said, "shape": tuple(said["shape"])})


def raise_verdict(directory: Path, rank: int) -> None:
    """Raises what a rank shall raise now that its wait has failed; returns where that is the wait's own business.

    Raises:
        RingError: a verdict concerns this rank.
    """
    error = read_verdict(directory, rank)
    if error is not None:
        raise error
