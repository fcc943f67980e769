"""The line of an event: the place where the user's program made the call that posted it.

The line belongs to the innermost frame outside ringsim, the communication library and Python. If a
thread has no such frame, the line is in the code that handed it the operation; ringsim's own
workers have none. If the frame is a thin wrapper, the line of its caller is also recorded.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

from ringsim.traces.events import CALLS, NONE

OURS: Final = -1  # a file of ringsim
LIBRARY: Final = -2  # a file of torch, or of Python's own modules
SPEAKER: Final = -3  # the library file whose functions give operations their names

THIN: Final = 3  # lines in the body of a thin wrapper, at most
_RINGSIM: Final = str(Path(__file__).resolve().parent.parent) + os.sep
# files of ringsim that count as user code
_AS_USERS: Final = tuple(
    os.path.join(_RINGSIM, *name) for name in (("cli", "demo.py"), ("check", "patients.py"))
)
_PYTHON: Final = os.path.dirname(os.__file__) + os.sep
_PACKAGES: Final = "-packages" + os.sep  # part of the names site-packages and dist-packages
# its `deprecated` appears between torch's own frames
DECORATOR: Final = os.sep + "typing_extensions.py"
_INSTALLED: Final = tuple(
    os.path.join(_PYTHON, name) + os.sep for name in ("site-packages", "dist-packages")
)


class CallSites:
    """Finds the user's line.

    The line belongs to the innermost frame outside ringsim, the communication library and Python's
    own modules. ``places`` caches the user's instructions, because Python finds the line of a frame
    by reading its function's table from the start, which takes 9 us in a function of 300 lines. The
    key is ``id(code) + frame.f_lasti``, the address of the instruction up to a constant: a code
    object holds its instructions, so two live code objects never share a key.

    Args:
        number: returns the number of a user's file.

    Attributes:
        places: file and line in one number, by instruction; for a thin wrapper, by its own and its
            caller's instruction.
        find_handed_over: returns the place where the user handed over the work of the calling
            thread, or NONE if unknown.
    """

    def __init__(self, number: Callable[[str], int]) -> None:
        self.places: dict[int | tuple[int, int], int] = {}
        self.find_handed_over: Callable[[], int] = lambda: NONE
        self._number = number
        self._kinds: dict[str, int] = {}
        self._alive: list[CodeType] = []  # the code objects whose instructions are keys
        # files of Python and of torch.compile
        self._libraries: tuple[str, ...] = ("<frozen ", "<eval_with_key>")
        self._speaker = ""

    def declare_library(self, directory: str, speaker: str) -> None:
        """Counts the files under ``directory`` as the library's.

        ``speaker`` is the file whose functions give operations their names.
        """
        self._kinds.clear()
        self.places.clear()
        self._libraries, self._speaker = (*self._libraries, directory + os.sep), speaker

    def kind(self, filename: str) -> int:
        """Returns the number of a user's file, or OURS, LIBRARY or SPEAKER for other files."""
        found = self._kinds.get(filename)
        if found is None:
            found = self._kinds[filename] = self._classify(filename)
        return found

    def _classify(self, filename: str) -> int:
        if filename == self._speaker:
            return SPEAKER
        if filename.startswith(_RINGSIM) and filename not in _AS_USERS:
            return OURS
        of_python = filename.startswith(_PYTHON) and not filename.startswith(_INSTALLED)
        if of_python or filename.startswith(self._libraries) or filename.endswith(DECORATOR):
            return LIBRARY
        return self._number(filename)

    def locate(
        self, posted: int, posted_as: Mapping[str, int]
    ) -> tuple[int, tuple[int, tuple[CodeType, ...]]]:
        """Returns the place where the user made the call that posts an operation.

        Also returns the last column of the record, which depends on the functions in between, and
        these functions.

        Args:
            posted: the default for the last column.
            posted_as: more precise values, by the name of the library function called.
        """
        way: list[CodeType] = []
        try:
            frame = sys._getframe(3)
        except ValueError:  # a thread that begins in the library has no user frame
            frame = sys._getframe(2)
        while (file := self.kind(frame.f_code.co_filename)) < 0:
            if file == SPEAKER:
                posted = posted_as.get(frame.f_code.co_name, posted)
            if frame.f_back is None:
                return self.find_handed_over(), (posted, ())
            way.append(frame.f_code)
            frame = frame.f_back
        return self._name(file, frame), (posted, tuple(way))

    def _name(self, file: int, frame: FrameType) -> int:
        """Returns the place of a user's frame.

        A thin wrapper's place includes its caller's, because its own line is not informative.
        """
        key: int | tuple[int, int] = _instruction(frame)
        if key not in self.places and _is_thin(frame.f_code):
            caller = self.find(frame.f_back)
            behind = caller or frame.f_back
            key = _instruction(frame), 0 if behind is None else _instruction(behind)
            if key not in self.places and behind is not None:
                self._alive.append(behind.f_code)
                name, others = frame.f_code.co_filename, behind.f_code.co_filename
                # the line of a package that calls back is not informative either
                if caller is not None and (_PACKAGES not in others or _PACKAGES in name):
                    file = self._number(f"{others}:{behind.f_lineno}{CALLS}{name}")
        if key not in self.places:
            self._alive.append(frame.f_code)  # first: the key is valid only while it lives
            self.places[key] = _join(file, frame)
        return self.places[key]

    def find(self, frame: FrameType | None) -> FrameType | None:
        """Returns the innermost user frame from ``frame`` outwards, or None if there is none."""
        while frame is not None and self.kind(frame.f_code.co_filename) < 0:
            frame = frame.f_back
        return frame

    def place(self, frame: FrameType) -> int:
        """Returns the place of the user's code that ``frame`` belongs to or was called by."""
        found = self.find(frame)
        return (
            self.find_handed_over()
            if found is None
            else self._name(self.kind(found.f_code.co_filename), found)
        )


def _instruction(frame: FrameType) -> int:
    return id(frame.f_code) + frame.f_lasti


@functools.lru_cache(maxsize=1024)
def _is_thin(code: CodeType) -> bool:
    """Returns whether a function only passes its arguments on: it takes some and is short."""
    takes = code.co_argcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    body = {line for *_, line in code.co_lines() if line} - {code.co_firstlineno}
    return bool(takes) and code.co_name.isidentifier() and len(body) <= THIN


def _join(file: int, frame: FrameType) -> int:
    """Returns the columns file and line as one number."""
    return frame.f_lineno << 32 | file & 0xFFFFFFFF
