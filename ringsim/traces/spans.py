"""Spans and marks, which label a program's timeline, and the context that spans set."""

from __future__ import annotations

from contextvars import ContextVar
from types import TracebackType
from typing import Self

from ringsim.errors import ArgumentError, read_whole
from ringsim.state import get_state
from ringsim.traces.events import NONE

# the stage (lower half) and the microbatch (upper half) of the innermost span
stage_and_microbatch: ContextVar[int] = ContextVar("ringsim_stage_and_microbatch", default=NONE)
# the label of the operations being posted (their name in the log), if the caller gave one
label_in_force: ContextVar[int] = ContextVar("ringsim_label", default=NONE)


class span:  # noqa: N801 - read as a verb: with ringsim.span("compute"):
    """Names a section of the timeline; does nothing unless the run is being recorded.

    Spans can be nested. Operations and spans inside a span inherit ``stage`` and ``microbatch``
    from the innermost enclosing span that sets them.

    Args:
        name: the name shown in the timeline.
        stage: the index of the pipeline stage that the section runs.
        microbatch: the index of the microbatch that the section processes.

    Raises:
        ArgumentError: ``name`` is not a string, or an index is not a non-negative integer.

    Example:
        >>> with span("compute", stage=1, microbatch=0):
        ...     result = 6 * 7
        >>> result
        42
    """

    __slots__ = ("_microbatch", "_name", "_outer", "_recorder", "_slot", "_stage")
    _outer: int

    def __init__(
        self, name: str, *, stage: int | None = None, microbatch: int | None = None
    ) -> None:
        self._name = _check_name("span", name)
        self._stage = _read_index("stage", stage)
        self._microbatch = _read_index("microbatch", microbatch)

    def __enter__(self) -> Self:
        self._recorder = recorder = get_state().recorder
        if recorder is not None:
            self._outer = outer = stage_and_microbatch.get()
            stage = outer & 0xFFFFFFFF if self._stage is None else self._stage
            microbatch = outer >> 32 if self._microbatch is None else self._microbatch
            stage_and_microbatch.set(microbatch << 32 | stage)
            self._slot = recorder.span_begin(self._name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._recorder is not None:
            if self._slot is not None:
                self._recorder.span_end(self._slot, failed=kind is not None)
            stage_and_microbatch.set(self._outer)


def _read_index(what: str, index: int | None) -> int | None:
    if index is None:
        return None
    return read_whole(what, index, 0, 2**31 - 1, hint="Count from 0, or omit the argument.")


def mark(name: str) -> None:
    """Marks the current moment in the timeline; does nothing unless the run is being recorded.

    Args:
        name: the name shown in the timeline.

    Raises:
        ArgumentError: ``name`` is not a string.

    Example:
        >>> mark("warm-up is over")
    """
    _check_name("mark", name)
    recorder = get_state().recorder
    if recorder is not None:
        recorder.mark(name)


def _check_name(what: str, name: str) -> str:
    if not isinstance(name, str):
        raise ArgumentError(
            f"the name of a {what} must be a string, got {name!r}. Pass a string, such as "
            f'{what}("compute").'
        )
    return name
