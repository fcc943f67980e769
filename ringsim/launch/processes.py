"""What the system says of the ranks' processes: whether one is stopped, and how much it has computed."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

__all__ = ["Process", "look_at"]

_CALLED: Final = {"T": "stopped", "t": "stopped", "S": "asleep"}  # in all other states it computes
_EXITING: Final = 0x4  # PF_EXITING in Linux's include/linux/sched.h


class Process(NamedTuple):
    """A process at one moment.

    Attributes:
        state: R runs or would like to, S sleeps, D waits for a disk, T is stopped by a signal, t by a debugger, Z has ended, X is about to.
        ticks: CPU time that it has used so far, in the system's ticks.
    """

    state: str
    ticks: int

    @property
    def doing(self) -> str:
        """What it does in a word: "computing", "asleep" or "stopped"."""
        return _CALLED.get(self.state, "computing")


def look_at(pid: int) -> Process | None:
    """Returns what the system says of a process (Linux), None where there is none, or nobody says.

    Example:
        >>> look_at(2**22 + 1) is None
        True
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()  # the name before it may hold anything
    except OSError:
        return None
    state = "X" if int(words[6]) & _EXITING and words[0] != b"Z" else words[0].decode()  # it closes its connections before it is a Z
    # A rank whose threads compute while its first one sleeps is seen by its ticks.
    return Process(state, int(words[11]) + int(words[12]))


def has_proc() -> bool:
    """Whether this system tells such things at all."""
    return os.path.exists("/proc/self/stat")
