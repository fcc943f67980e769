"""The line of an event: where the user's program called what posted it.

The line is that of the innermost frame that belongs neither to ringsim, nor to the
communication library, nor to Python. If a thread has no such frame, the line is that of the code
that handed it the operation; a worker of ringsim's own has none. If the frame is a thin wrapper's,
its caller's line is kept, too.
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
SPEAKER: Final = -3  # the file of the library whose functions name the operations

THIN: Final = 3  # lines in the body of a thin wrapper, at most
_RINGSIM: Final = str(Path(__file__).resolve().parent.parent) + os.sep
# programs to look at
_AS_USERS: Final = tuple(
    os.path.join(_RINGSIM, *name) for name in (("cli", "demo.py"), ("check", "patients.py"))
)
_PYTHON: Final = os.path.dirname(os.__file__) + os.sep
_PACKAGES: Final = "-packages" + os.sep  # in the names of site-packages and dist-packages
# its `deprecated` stands between torch's own frames
DECORATOR: Final = os.sep + "typing_extensions.py"
_INSTALLED: Final = tuple(
    os.path.join(_PYTHON, name) + os.sep for name in ("site-packages", "dist-packages")
)


class CallSites:
    """Finds the user's line.

    The innermost frame outside ringsim, the communication library and Python's own modules.
    ``places`` remembers the user's instructions, for Python finds the line of a frame by reading
    its function's table from the start, which in a function of 300 lines takes 9 us. The key is
    ``id(code) + frame.f_lasti``, the address of the instruction up to a constant: a code object
    holds its instructions, so no two have one key while both live.

    Args:
        number: gives a user's file its number.

    Attributes:
        places: file and line joined, by instruction; of a thin wrapper, by its own and its
            caller's.
        find_handed_over: returns where the user handed over what the calling thread runs, NONE
            if that is not known.
    """

    def __init__(self, number: Callable[[str], int]) -> None:
        self.places: dict[int | tuple[int, int], int] = {}
        self.find_handed_over: Callable[[], int] = lambda: NONE
        self._number = number
        self._kinds: dict[str, int] = {}
        self._alive: list[CodeType] = []  # whose instructions are keys
        # of Python, of torch.compile
        self._libraries: tuple[str, ...] = ("<frozen ", "<eval_with_key>")
        self._speaker = ""

    def declare_library(self, directory: str, speaker: str) -> None:
        """Counts the files under ``directory`` as the library's.

        Also ``speaker`` as the one whose functions name operations.
        """
        self._kinds.clear()
        self.places.clear()
        self._libraries, self._speaker = (*self._libraries, directory + os.sep), speaker

    def kind(self, filename: str) -> int:
        """Returns the number of a user's file; OURS, LIBRARY or SPEAKER for others."""
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
        """Returns where the user called what posts an operation.

        Also the record's last column, which the functions between tell, and these.

        Args:
            posted: the last column.
            posted_as: better ones, by the name of the speaking function.
        """
        way: list[CodeType] = []
        try:
            frame = sys._getframe(3)
        except ValueError:  # a thread that begins in the library: no frame is the user's
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

        Of a thin wrapper, with that of its caller, for the wrapper's line alone says little.
        """
        key: int | tuple[int, int] = _instruction(frame)
        if key not in self.places and _is_thin(frame.f_code):
            caller = self.find(frame.f_back)
            behind = caller or frame.f_back
            key = _instruction(frame), 0 if behind is None else _instruction(behind)
            if key not in self.places and behind is not None:
                self._alive.append(behind.f_code)
                name, others = frame.f_code.co_filename, behind.f_code.co_filename
                # a package that calls back says little, too
                if caller is not None and (_PACKAGES not in others or _PACKAGES in name):
                    file = self._number(f"{others}:{behind.f_lineno}{CALLS}{name}")
        if key not in self.places:
            self._alive.append(frame.f_code)  # first: the key is good only while it lives
            self.places[key] = _join(file, frame)
        return self.places[key]

    def find(self, frame: FrameType | None) -> FrameType | None:
        """Returns the user's innermost frame from ``frame`` outward, None if there is none."""
        while frame is not None and self.kind(frame.f_code.co_filename) < 0:
            frame = frame.f_back
        return frame

    def place(self, frame: FrameType) -> int:
        """Returns the place of the user's code that ``frame`` is, or was called by."""
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
    """Returns whether a function merely passes its arguments on: its body is short."""
    takes = code.co_argcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    body = {line for *_, line in code.co_lines() if line} - {code.co_firstlineno}
    return bool(takes) and code.co_name.isidentifier() and len(body) <= THIN


def _join(file: int, frame: FrameType) -> int:
    """Returns the columns file and line as one number."""
    return frame.f_lineno << 32 | file & 0xFFFFFFFF
