"""Describes the variables of a rank's frames as text."""

from __future__ import annotations

import reprlib
import traceback
from collections.abc import Iterable
from types import FrameType
from typing import Any

from ringsim.diagnose.failure import is_internal, list_chain
from ringsim.errors import escape_line

_MOST_FRAMES = 20
_MOST_VARIABLES = 50  # of one frame


class _ShortForms(reprlib.Repr):
    """Short forms of values; finding them never raises an error."""

    def repr1(self, value: Any, level: int) -> str:
        try:
            if hasattr(value, "shape") and hasattr(value, "dtype"):
                return f"{type(value).__name__}{list(value.shape)} {value.dtype}"
            return super().repr1(value, level)
        except BaseException as error:
            return f"<{type(value).__name__} whose repr raised {type(error).__name__}>"


_FORMS = _ShortForms()
_FORMS.maxother = _FORMS.maxstring = 100


def describe_variables(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Describes the frames of a program, each with its variables. Long values are shortened.

    Args:
        frames: frames and their lines, innermost last, as from ``traceback.walk_tb``.
    """
    users = [(frame, line) for frame, line in frames if not is_internal(frame.f_code.co_filename)]
    lines = []
    for frame, line in users[-_MOST_FRAMES:]:
        lines.append(f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}")
        for name, value in list(frame.f_locals.items())[:_MOST_VARIABLES]:
            lines.append(f"    {name} = {escape_line(_FORMS.repr(value))}")
    return "\n".join(lines)


def describe_error(error: BaseException | None) -> str:
    """Describes the frames through which an error and its causes were raised."""
    frames: dict[FrameType, int] = {}
    for one in reversed(list_chain(error)):
        for frame, line in traceback.walk_tb(one.__traceback__):
            frames.setdefault(frame, line)
    return describe_variables(frames.items())


def describe_stack(frame: FrameType) -> str:
    """Describes a frame and the frames that called it."""
    return describe_variables([*traceback.walk_stack(frame)][::-1])
