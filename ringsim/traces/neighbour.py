"""The part of another rank of the same machine, read while that rank writes it: its records as numbers, and what its numbers mean.

``ringsim.traces.parts`` reads the parts of all ranks once; this reads one from inside another rank, in the middle of its operations.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import time
from pathlib import Path
from typing import Any, Final

from ringsim.traces.events import RECORD, Payload
from ringsim.traces.tables import read_payload

__all__ = ["COLUMNS", "WORDS", "Neighbour"]

WORDS: Final = RECORD.itemsize // 4  # of 4 bytes, in a record
# Where a record has its columns, counted in these words; of op and status, which share one, status is the upper half.
COLUMNS: Final = {name: offset // 4 for name, (_, offset, *_) in (RECORD.fields or {}).items() if name != "status"}


class Neighbour:
    """Another rank's part.

    Args:
        directory: where the ranks write their parts.
        rank: whose part.

    Attributes:
        view: its records as words of 4 bytes; what they mean stands in ``COLUMNS``. Zero from where the rank has not written yet.
        elsewhere: whether the rank runs on another machine, so that its records cannot be read while it writes them.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.rank = rank
        self.view: memoryview = memoryview(b"").cast("i")
        self.elsewhere = False
        self._events_path = directory / f"rank-{rank}.events"
        self._names_path = self._events_path.with_suffix(".names")
        self._file = self._names = -1
        self._rest = b""  # of the names: a line whose end is not there yet
        self._meta: dict[str, Any] = {}
        self._tables: dict[str, dict[int, dict[str, Any]]] = {}

    def __del__(self) -> None:
        """Lets go of the files."""
        for file in (self._file, self._names):
            if file >= 0:
                os.close(file)

    def open(self) -> bool:
        """Begins to read; False where there is nothing to be read, or not yet."""
        if self._file >= 0:
            return True
        if self.elsewhere:
            return False
        try:
            file = os.open(self._events_path, os.O_RDONLY)
            self._names = os.open(self._names_path, os.O_RDONLY)
        except OSError:
            return False
        self._read_names()
        if self._is_writing():
            self._file = file
            self.extend()
            return True
        self.elsewhere = self._meta.get("host", socket.gethostname()) != socket.gethostname()
        os.close(file)
        os.close(self._names)
        self._names, self._rest, self._meta, self._tables = -1, b"", {}, {}
        return False

    def _is_writing(self) -> bool:
        """Whether the process that began this part lives, here: what an earlier run left is not to be taken for the present."""
        pid, start_ns = self._meta.get("pid"), self._meta.get("start_ns")
        if not isinstance(start_ns, int) or self._meta.get("host") != socket.gethostname():
            return False
        try:
            born_ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
            asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
        except (OSError, ValueError, IndexError, AttributeError):  # the process is gone; or this is not Linux
            return False
        return born_ticks * 10**9 // os.sysconf("SC_CLK_TCK") - asleep_ns <= start_ns

    def starved_s(self) -> float:
        """Returns how long the rank's first thread has waited for a processor in its life, in seconds; 0 where the system does not tell.

        Each wait counts when it is over: one that still lasts is not in it.
        """
        try:
            _, waited_ns, _ = Path(f"/proc/{self._meta.get('pid')}/schedstat").read_text().split()
            return int(waited_ns) / 1e9
        except (OSError, ValueError):
            return 0.0

    def extend(self) -> bool:
        """Sees more of the file, where it has grown; False where it has not."""
        length = os.fstat(self._file).st_size // RECORD.itemsize * RECORD.itemsize
        if length <= self.view.nbytes:
            return False
        self.view = memoryview(mmap.mmap(self._file, length, access=mmap.ACCESS_READ)).cast("i")
        return True

    def entry(self, table: str, number: int) -> dict[str, Any]:
        """Returns what the rank wrote down of one of its numbers; empty where it wrote nothing."""
        entries = self._tables.setdefault(table, {})
        if number not in entries and self._names >= 0:
            self._read_names()
        return entries.get(number, {})

    def payload(self, number: int) -> Payload | None:
        """Returns one of the rank's payloads, None where it has no name."""
        try:
            return read_payload(self.entry("payload", number))
        except ValueError:
            return None

    def _read_names(self) -> None:
        pieces = [self._rest]
        while piece := os.read(self._names, 1 << 16):
            pieces.append(piece)
        *lines, self._rest = b"".join(pieces).split(b"\n")
        for line in lines:
            entry = json.loads(line)
            if entry["table"] == "meta":
                self._meta[entry["key"]] = entry["value"]
            else:
                self._tables.setdefault(entry["table"], {})[entry["id"]] = entry
