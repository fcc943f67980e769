"""Finds the line in the user's program that posted an event.

The line belongs to the innermost frame outside ringsim, the communication library and Python. If a
thread has no such frame, ringsim uses the line that handed the operation to the thread. Events
posted by ringsim's own workers have no line. If the frame is a thin wrapper, the caller's line is
also recorded.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from types import CodeType, FrameType

from ringsim.traces.events import CALLS, NONE

OURS = -1  # a file of ringsim
LIBRARY = -2  # a file of torch, or of Python's own modules
SPEAKER = -3  # the library file whose functions give operations their names

THIN = 3  # the most lines in the body of a thin wrapper
RINGSIM = os.path.dirname(os.path.dirname(__file__)) + os.sep
# files of ringsim that count as user code
_AS_USERS = tuple(
    os.path.join(RINGSIM, *name) for name in (("cli", "demo.py"), ("check", "patients.py"))
)
PYTHON = os.path.dirname(os.__file__) + os.sep
_PACKAGES = "-packages" + os.sep  # part of the names site-packages and dist-packages
LIBRARIES = (
    RINGSIM,
    PYTHON,
    _PACKAGES,
)  # parts of the names of files that are not the user's
# the `deprecated` decorator in this file appears between torch's own frames
DECORATOR = os.sep + "typing_extensions.py"
_INSTALLED = tuple(
    os.path.join(PYTHON, name) + os.sep for name in ("site-packages", "dist-packages")
)


def warn_user(message: str, category: type[Warning], libraries: tuple[str, ...]) -> None:
    """Warns at the innermost line that is in no file of ``libraries``, which are directories."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(libraries):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


class CallSites:
    """Finds the line in the user's program that made a call.

    The line belongs to the innermost frame outside ringsim, the communication library and Python's
    own modules. To find it, Python reads the line table of the frame's function from the start,
    which takes 9 us in a function of 300 lines, so ``places`` caches the result for each
    instruction. The key ``id(code) + frame.f_lasti`` is the address of the instruction up to a
    constant. A code object contains its instructions, so two live code objects never share a key.

    Args:
        number: the function that returns the number of a user's file.

    Attributes:
        places: the file and the line, packed into one number, for each instruction; the key for a
            thin wrapper is its own instruction and its caller's.
        find_handed_over: the function that returns the place where the user handed the calling
            thread its work, or NONE if unknown.
    """

    def __init__(self, number: Callable[[str], int]) -> None:
        self.places: dict[int | tuple[int, int], int] = {}
        self.find_handed_over: Callable[[], int] = lambda: NONE
        self._number = number
        self._kinds: dict[str, int] = {}
        self._alive: list[CodeType] = []  # keeps the code objects alive whose instructions are keys
        # files of Python and of torch.compile
        self._libraries: tuple[str, ...] = ("<frozen ", "<eval_with_key>")
        self._speaker = ""

    def declare_library(self, directory: str, speaker: str) -> None:
        """Declares that the files under ``directory`` belong to the communication library.

        ``speaker`` is the library file whose functions give operations their names.
        """
        self._kinds.clear()
        self.places.clear()
        self._libraries, self._speaker = (*self._libraries, directory + os.sep), speaker

    def kind(self, filename: str) -> int:
        """Returns a user file's number, or OURS, LIBRARY or SPEAKER for any other file."""
        found = self._kinds.get(filename)
        if found is None:
            found = self._kinds[filename] = self._classify(filename)
        return found

    def _classify(self, filename: str) -> int:
        if filename == self._speaker:
            return SPEAKER
        if filename.startswith(RINGSIM) and filename not in _AS_USERS:
            return OURS
        of_python = filename.startswith(PYTHON) and not filename.startswith(_INSTALLED)
        if of_python or filename.startswith(self._libraries) or filename.endswith(DECORATOR):
            return LIBRARY
        return self._number(filename)

    def locate(
        self, posted: int, posted_as: Mapping[str, int]
    ) -> tuple[int, tuple[int, tuple[CodeType, ...]]]:
        """Returns the location of the user's call that posts an operation.

        Also returns the functions between that call and the recorder, and the last column of the
        record, which depends on these functions.

        Args:
            posted: the default for the last column.
            posted_as: more precise values for the last column, by the name of the library function
                that the user called.
        """
        way: list[CodeType] = []
        try:
            frame = sys._getframe(3)
        except ValueError:  # the thread began in the library and has no user frame
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
        """Returns the source location of a user frame.

        The place of a thin wrapper includes its caller's line, because the wrapper's own line is
        not informative.
        """
        key: int | tuple[int, int] = _instruction(frame)
        if key not in self.places and _is_thin(frame.f_code):
            caller = self.find(frame.f_back)
            behind = caller or frame.f_back
            key = _instruction(frame), 0 if behind is None else _instruction(behind)
            if key not in self.places and behind is not None:
                self._alive.append(behind.f_code)
                name, others = frame.f_code.co_filename, behind.f_code.co_filename
                # the line of a package that calls the user back is not informative either
                if caller is not None and (_PACKAGES not in others or _PACKAGES in name):
                    file = self._number(f"{others}:{behind.f_lineno}{CALLS}{name}")
        if key not in self.places:
            self._alive.append(frame.f_code)  # first, because a dead code object's key is invalid
            self.places[key] = _join(file, frame)
        return self.places[key]

    def find(self, frame: FrameType | None) -> FrameType | None:
        """Returns the first user frame found by searching outwards from ``frame``, or None."""
        while frame is not None and self.kind(frame.f_code.co_filename) < 0:
            frame = frame.f_back
        return frame

    def place(self, frame: FrameType) -> int:
        """Returns the location of the innermost user code at or around ``frame``."""
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
    """Returns whether a function is a thin wrapper, with arguments and a short body."""
    takes = code.co_argcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    body = {line for *_, line in code.co_lines() if line} - {code.co_firstlineno}
    return bool(takes) and code.co_name.isidentifier() and len(body) <= THIN


def _join(file: int, frame: FrameType) -> int:
    """Returns the columns ``file`` and ``line``, packed into one number."""
    return frame.f_lineno << 32 | file & 0xFFFFFFFF
