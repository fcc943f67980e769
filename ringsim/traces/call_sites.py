"""Which source file a stack frame belongs to: the user's, ringsim's, the communication library's, or Python's.

The line of an event is the user's: the recorder walks outward from the operation, past every frame that is not the user's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

OURS: Final = -1  # ringsim itself
LIBRARY: Final = -2  # torch, Python's own modules
SPEAKER: Final = -3  # the library file whose functions name the operations

_RINGSIM: Final = str(Path(__file__).resolve().parent.parent) + os.sep
_DEMONSTRATIONS: Final = (_RINGSIM + "cli/demo_programs.py",)  # they stand for the program of a user
_PYTHON: Final = os.path.dirname(os.__file__) + os.sep
_DECORATOR: Final = os.sep + "typing_extensions.py"  # its `deprecated` stands between torch's own frames
_INSTALLED: Final = tuple(os.path.join(_PYTHON, name) + os.sep for name in ("site-packages", "dist-packages"))


class CallSites(dict[str, int]):
    """Says of each source file what it is: its number if it is the user's, else OURS, LIBRARY or SPEAKER.

    ``places`` says the same of the user's instructions that were met before, with the line: Python finds the line of a frame by reading
    its function's table from the start, which in a function of 300 lines takes 9 us. The key is ``id(code) + frame.f_lasti``, the address
    of the instruction but for a constant: a code object holds its instructions, so no two have the same key while both live.

    Args:
        number: gives a file name its number.
    """

    def __init__(self, number: Callable[[str], int]) -> None:
        super().__init__()
        self._number = number
        self.places: dict[int, tuple[int, int]] = {}
        self._alive: list[CodeType] = []  # those in `places`
        self._libraries: tuple[str, ...] = ("<frozen ",)

    def declare_library(self, directory: str, speaker: str) -> None:
        """Counts the files under ``directory`` as the library's, and ``speaker``, one of them, as the one that names operations."""
        self.clear()
        self.places.clear()
        self._libraries = (*self._libraries, directory + os.sep)
        self[speaker] = SPEAKER

    def learn(self, filename: str) -> int:
        """Returns what a file is, and remembers it; afterwards ``sites[filename]`` says the same."""
        of_python = filename.startswith(_PYTHON) and not filename.startswith(_INSTALLED)
        if filename.startswith(_RINGSIM) and filename not in _DEMONSTRATIONS:
            kind = OURS
        elif of_python or filename.startswith(self._libraries) or filename.endswith(_DECORATOR):
            kind = LIBRARY
        else:
            kind = self._number(filename)
        self[filename] = kind
        return kind

    def learn_place(self, frame: FrameType) -> tuple[int, int]:
        """Returns file number and line of a frame of the user's, and remembers them."""
        code = frame.f_code
        place = self[code.co_filename], frame.f_lineno
        self._alive.append(code)  # first, for the key is good only while it lives
        self.places[id(code) + frame.f_lasti] = place
        return place

    def find_stand_in(self, frame: FrameType) -> tuple[int, int]:
        """Returns file number and line where no frame is the user's: the innermost outside the library, else ``frame`` itself."""
        innermost, outward = frame, frame.f_back
        while outward is not None:
            if self.get(outward.f_code.co_filename) == OURS:
                frame = outward
                break
            outward = outward.f_back
        else:
            frame = innermost
        return self._number(frame.f_code.co_filename), frame.f_lineno
