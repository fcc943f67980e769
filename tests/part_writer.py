"""A rank's part written by hand, for tests of its readers."""

from __future__ import annotations

from pathlib import Path

from ringsim.traces.events import ANY_SOURCE, ERROR, OK, OP_CODES
from ringsim.traces.recorder import Recorder

GROUPS = ("world", "other")


class Writer:
    """One rank controlled by hand: it posts, waits for and finishes operations on command."""

    def __init__(self, directory: Path, rank: int, size: int, max_records: int = 1 << 21) -> None:
        self.recorder = Recorder(directory, rank, size, max_records=max_records)
        # the ranks number their groups in different orders
        for name in GROUPS if rank % 2 else reversed(GROUPS):
            self.recorder.group(name, range(size))
        self.groups = [self.recorder.group(name, range(size)) for name in GROUPS]
        self.payload = self.recorder.payload("float32", [2], 8)
        self.open: list[tuple[int, bool]] = []  # slot, whether it is a recv from any source

    def post(self, op: str, group: int, peer: int, tag: int) -> int:
        slot = self.recorder.make_post(OP_CODES[op])(self.groups[group], peer, tag, self.payload)
        assert slot is not None
        self.open.append((slot, peer == ANY_SOURCE))
        return slot

    def act(self, what: str, which: int, source: int = 0) -> None:
        """Begins to wait for one of the open operations, or finishes it, or makes it fail."""
        if not self.open:
            return
        slot, from_any = self.open[which % len(self.open)]
        self.recorder.wait(slot)
        if what == "wait":
            return
        if what == "finish" and from_any:
            self.recorder.amend(slot, peer=source)
        self.recorder.complete(slot, OK if what == "finish" else ERROR)
        self.open.remove((slot, from_any))
