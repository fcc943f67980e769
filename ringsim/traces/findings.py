"""The plain values that make up a diagnosis: operations, findings, and the diagnosis itself."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from ringsim.traces.display import Style, image_html, shows_images
from ringsim.traces.documents import JsonObject
from ringsim.traces.events import ANY_SOURCE, CALLS, COLLECTIVE, NONE, OP_CODES, OP_KINDS, SEND
from ringsim.traces.units import count, time_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# the kinds of findings in runs that finished
SLOW_KINDS = ("link", "slow_link", "late_sender", "late_receiver", "straggler")
KINDS = (
    "deadlock",
    "peer_exited",
    "rank_failed",
    "rendezvous_failed",
    "group_order_mismatch",
    "race",
    "tag_mismatch",
    "group_mismatch",
    "message_mismatch",
    "invalid_argument",
    "collective_mismatch",
    "missing_participant",
    "leaked_request",
    "buffer_hazard",
    "stalled",
    "lost",
    *SLOW_KINDS,
)


@dataclass(frozen=True)
class Operation:
    """One operation on one rank.

    An operation prints as ``recv from 0 (ring:0>1, tag 3, float32[8], 32 bytes) at ring.py:41``.

    Attributes:
        rank: the rank that posted the operation.
        op: the operation's name in torch.
        peer: the global rank of the other side, or the root of a collective; -1 if the operation
            has neither, or -2 for "from any source".
        tag: the tag of the message, or -1 if the operation has no tag.
        group: the name of the process group.
        size_bytes: the size of the payload, or -1 if unknown.
        dtype: the payload's dtype, such as "float32", or "" if the operation has no payload.
        shape: the shape of the payload.
        file: the user's source file, or "" if unknown.
        line: the line in that file, or -1 if unknown.
        status: "in_flight", "ok" or "error".
        waited_s: how long the rank has been blocked in the operation, in seconds.

    Example:
        >>> print(
        ...     Operation(
        ...         rank=1,
        ...         op="recv",
        ...         peer=0,
        ...         tag=3,
        ...         group="world",
        ...         size_bytes=32,
        ...         dtype="float32",
        ...         shape=(8,),
        ...     )
        ... )
        recv from 0 (world, tag 3, float32[8], 32 bytes)
    """

    rank: int
    op: str
    peer: int = NONE
    tag: int = NONE
    group: str = ""
    size_bytes: int = NONE
    dtype: str = ""
    shape: tuple[int, ...] = ()
    file: str = ""
    line: int = NONE
    status: str = "in_flight"
    waited_s: float = 0.0

    @property
    def kind(self) -> int:
        """SEND, RECV or COLLECTIVE, as in ``ringsim.traces.events``."""
        return int(OP_KINDS[OP_CODES[self.op]])

    @property
    def place(self) -> str:
        """The file and line of the call, without directories, or "" if unknown.

        The value looks like "ring.py:41", or "train.py:40 > ring.py:5" for a call in a thin
        wrapper.
        """
        names = CALLS.join(name.rpartition(os.sep)[2] for name in self.file.split(CALLS))
        return f"{names}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        """Returns a description of the operation."""
        if self.kind == COLLECTIVE:
            words = self.op
        else:
            peer = (
                "any rank"
                if self.peer == ANY_SOURCE
                else str(self.peer)
                if self.peer >= 0
                else "no rank in the group"
            )
            words = f"{self.op} {'to' if self.kind == SEND else 'from'} {peer}"
        about = [
            f"group {self.group}" if self.group.isdigit() else self.group,
            f"tag {self.tag}" if self.tag >= 0 else "",
            payload_text(self),
        ]
        if self.dtype and self.size_bytes >= 0 and self.op != "new_group":
            about.append(count(self.size_bytes, "byte"))
        if any(about):
            words += f" ({', '.join(filter(None, about))})"
        return f"{words} at {self.place}" if self.place else words


def payload_text(operation: Operation) -> str:
    """Formats an operation's payload, such as "float32[2,3]", or returns "" if there is none."""
    return f"{operation.dtype}[{','.join(map(str, operation.shape))}]" if operation.dtype else ""


def kind_text(kind: str) -> str:
    """Returns a kind from ``KINDS`` in words, such as "message mismatch"."""
    return kind.replace("_", " ")


# how a rank ended, if its state and error do not already show it
EXIT_CODE = "exit_code"  # its process exited before the worker returned
LEFT_BLOCK = "left_block"  # it left the recorded block, and may still be running
LOST = "lost"  # its host no longer responds
IN_VAIN = "in_vain"  # its error was held up by a wait that could not end
IN_THREAD = "in_thread"  # the error ended one of its threads, but not the rank


class End(NamedTuple):
    """How a rank ended, as far as ringsim knows.

    Attributes:
        state: "exited", "failed" or "killed"; or, if the rank had not ended, "running", "blocked",
            "stopped" or "unknown".
        about: the rest of a sentence about the rank, such as "raised ValueError: no such layer".
        at_ns: the time of the end, in ns from the start of the run, or None if unknown.
        error: the name of the exception's type, or "" if there was none.
        how: one of the constants above, or "" if none applies.
    """

    state: str
    about: str = ""
    at_ns: int | None = None
    error: str = ""
    how: str = ""


@dataclass(frozen=True)
class Finding:
    """One cause of a failed or slow run.

    Attributes:
        kind: one of ``KINDS``.
        ranks: the ranks involved. The culprit (the rank that exited, failed, was busy or was late)
            comes first, followed by the ranks that wait for it. In a cycle, each rank waits for the
            next. If no rank is to blame, the ranks are in ascending order.
        operations: the operations that serve as evidence.
        message: a headline, followed by an indented line for each piece of evidence.
        hint: advice or further observations, one per line, or "" if there is no hint.
        consequences: the findings that follow from this finding.
        end: how the first rank in ``ranks`` ended if that is the cause, or None.

    Example:
        >>> print(Finding("peer_exited", (0, 1), (), "rank 0 has left.", "Send first on rank 0."))
        rank 0 has left.
          Hint: Send first on rank 0.
    """

    kind: str
    ranks: tuple[int, ...]
    operations: tuple[Operation, ...]
    message: str
    hint: str = ""
    consequences: tuple[Finding, ...] = ()
    end: End | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """Returns the message, the hints, and the messages of the consequences."""
        hints = "".join(f"\n  Hint: {line}" for line in self.hint.splitlines())
        echoes = ["As a result, " + one.message.replace("\n", "\n  ") for one in self.consequences]
        return f"{self.message}{hints}{lines_text(echoes)}"


_SHOWN = 8  # the most lines of evidence or consequences


def lines_text(lines: Sequence[str]) -> str:
    """Returns lines indented below a headline; if there are many lines, returns only the first few.

    Example:
        >>> print("deadlock:" + lines_text(["rank 0 waits", "rank 1 waits"]))
        deadlock:
          rank 0 waits
          rank 1 waits
    """
    more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "".join(f"\n  {line}" for line in [*lines[:_SHOWN], *more])


@dataclass(frozen=True)
class Edge:
    """An edge in the graph of waits: one rank waits for another rank.

    Attributes:
        rank: the rank that waits.
        peer: the rank that ``rank`` waits for.
        operation: the operation in which ``rank`` waits, or None if unknown.
        in_cycle: whether the edge is part of the cycle.
    """

    rank: int
    peer: int
    operation: Operation | None
    in_cycle: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """The findings about a run, starting with the root cause.

    Printing a diagnosis shows the findings as text; a notebook also shows a picture.

    Attributes:
        findings: the causes, each with its effects in ``consequences``; empty if nothing is wrong.
        world_size: the number of ranks.
        edges: the waits between ranks.
        states: the state of each rank, such as "running", "blocked" or "exited"; empty if unknown.
        trace: the recorded trace, from which the picture is drawn.
        notes: observations that are not faults, such as the total waiting time and its main cause,
            and errors that the program recovered from.

    Example:
        >>> print(Diagnosis((), world_size=4))
        Nothing wrong was found in this run of 4 ranks.
    """

    findings: tuple[Finding, ...]
    world_size: int
    edges: tuple[Edge, ...] = ()
    states: tuple[str, ...] = ()
    trace: Any = field(default=None, repr=False, compare=False)
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of the root cause, or "" if nothing is wrong."""
        return self.findings[0].kind if self.findings else ""

    def __str__(self) -> str:
        """Returns the findings as text, followed by the notes."""
        lines = [f"{kind_text(finding.kind)}: {finding}" for finding in self.findings]
        if not lines:
            part = "part of a " if self.trace is not None and "part" in self.trace.metadata else ""
            lines = [
                (
                    f"Nothing wrong was found in this {part}run of {self.world_size} "
                    f"rank{'' if self.world_size == 1 else 's'}."
                )
            ]
        return "\n".join([*lines, *self.notes])

    def plot(self, ax: Axes | None = None, **look: Unpack[Style]) -> Axes:
        """Draws the graph of waits, with the last moments of the timeline below it.

        Args:
            ax: the axes to draw on; if given, only the graph is drawn.
            **look: the style of the new figure; see ``Style``.

        Returns:
            The axes.
        """
        from ringsim.plot.waitfor import plot_waitfor

        return plot_waitfor(self, ax=ax, **look)

    def _repr_mimebundle_(self, **_: Any) -> JsonObject:
        """Returns the text and the picture for Jupyter; without matplotlib, only the text."""
        data = {"text/plain": str(self)}
        if shows_images():
            data["text/html"] = (
                f'<pre style="white-space: pre-wrap; word-break: normal">{html.escape(str(self))}'
                f"</pre>{self.picture_html()}"
            )
        return data

    def picture_html(self) -> str:
        """Returns the picture as an HTML element, or "" if matplotlib is missing."""
        try:
            from ringsim.plot.waitfor import waitfor_images
        except ImportError:
            return ""
        return image_html(
            waitfor_images(self), self.findings[0].message if self.findings else str(self)
        )


def waited_text(operation: Operation) -> str:
    """Returns a phrase with the time waited in an operation, such as " for 312 ms", or "" for 0."""
    return f" for {time_text(operation.waited_s * 1e9)}" if operation.waited_s > 0 else ""
