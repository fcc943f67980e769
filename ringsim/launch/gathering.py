"""Transfers the parts on other hosts to rank 0, over the store.

The parts are sent in chunks, a few at a time; each chunk is checked, and deleted after it is read.

::

    rank 0, leaving the block               a rank on another host that has left it, a thread
    -------------------------               -------------------------------------------------
    soon/4                    ------------> the first rank there looks more often
    wants/4 = [4, 5, 6, 7]    ------------>
                              <------------ files/4 = [["rank-4.events", 36864], ...]
    reads, checks, deletes    <------------ chunk/4/0 ... chunk/4/7; a further one for each that is
                              deleted
    receipt/4                 ------------> removes its parts

A failing process does not wait for rank 0, and an ending process waits only briefly, because others
may wait for its end. If its part fits into the window, it leaves the part in the store without
being asked. A process with a larger part waits longer. Rank 0 asks one rank per directory for the
parts of all ranks there, including dead ranks, one host after the other, so the store never holds
more than ``WINDOW`` chunks. The data are trusted no more than a file: they are written next to rank
0's own parts, and read in the same way. The program's process groups are not used, so this works
with any backend, and after ranks have died.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringsim.comm.bootstrap import BackgroundCall
from ringsim.launch.block import BlockStore, Patience, find_place, lasts, never, place_of
from ringsim.state import OUR_THREADS
from ringsim.traces.parts import FILE_NAME, PartReader

CHUNK_BYTES = 1 << 18
WINDOW = 8
# hosts that are notified shortly before their turn: before that, their ranks rarely look
AHEAD = 64
STOPPED_S = 5.0  # a rank without a message for this long has stopped
# time that an ending process waits to be asked for its parts, if it can leave them in the store
ENDING_S = 2.0
# the same time if it cannot, because rank 0 may leave the block later and ask others first
LATE_S = 60.0
# time that a sender waits until rank 0 also has the parts of all others
GATHERED_S = 600.0
ANSWER_S = 30.0  # time that a sender waits for the next message from rank 0
MAX_FILE_BYTES = 1 << 28  # more than any recorder writes


# -- a rank on another host


@dataclass(frozen=True)
class Offer:
    """The parts that a rank offers to rank 0 after it has left the block.

    Attributes:
        keys: the keys of the block.
        rank: this rank.
        directory: the directory of the parts.
        place: the location as returned by ``place_of`` on entry, because rank 0 may have removed
            the directory since.
        path: the path of the trace, for a message about joining the parts by hand.
        failed: whether an error has ended the block on this rank; this process may then be ended at
            any moment.
    """

    keys: BlockStore
    rank: int
    directory: Path
    place: Mapping[str, Any]
    path: Path
    failed: bool

    def make(self) -> None:
        """Sends this host's parts to rank 0 from a thread, unless rank 0 can see the files.

        The process stays alive until the thread ends.
        """
        try:
            rank_0 = BackgroundCall(lambda: find_place(self.keys, 0, never)).result(STOPPED_S)
        except TimeoutError:
            self._tell_where()
            return
        if rank_0.get("id") != self.place["id"]:
            threading.Thread(target=self.give, name=f"{OUR_THREADS}parts").start()

    def give(self) -> None:
        """Sends the requested parts to rank 0, or prints their location if rank 0 requests none."""
        giving = BackgroundCall(self._hand_over)
        with contextlib.suppress(RuntimeError):  # the store is gone with rank 0
            while time.monotonic() - self.keys.asked_s < STOPPED_S:
                with contextlib.suppress(TimeoutError):
                    if giving.result(STOPPED_S):
                        return
                    break
        self._tell_where()

    def _hand_over(self) -> bool:
        """Sends the requested parts to rank 0; returns whether rank 0 has every part it needs."""
        keys, rank = self.keys, self.rank
        fits = _fits(_list(self.directory, [rank]))
        unasked = self.failed and fits
        rank_0 = find_place(keys, 0, never if unasked else threading.main_thread().is_alive)
        # rank 0 may enter after this rank has failed
        if rank_0.get("id") == self.place["id"] or not (rank_0 or unasked):
            return True
        if unasked:
            return send(keys, rank, self.directory, [rank], asked=False)
        patience = _while_at_work(ENDING_S if self.failed or fits else LATE_S)
        here = _ranks_in(self.directory)
        if rank == min(
            here, default=rank
        ):  # this rank is asked first, so the others need not look often
            keys.waiting //= len(here) or 1
            keys.wait(f"soon/{rank}", patience)
            keys.waiting = AHEAD
        asked = keys.take(f"wants/{rank}", patience)
        ranks = [rank] if asked is None else asked
        return not ranks or send(keys, rank, self.directory, ranks, asked=asked is not None)

    def _tell_where(self) -> None:
        if self.rank > min(_ranks_in(self.directory), default=self.rank):
            return  # one rank per host prints it
        sys.stderr.write(
            f"[rank {self.rank}] ringsim: rank 0 did not fetch the parts of a recording from "
            f"{socket.gethostname()}. They are in {self.directory}. Join them with the parts from "
            f"the other hosts: ringsim merge {self.path} DIRECTORY ...\n"
        )


def _ranks_in(directory: Path) -> list[int]:
    """Returns the ranks whose parts are in a directory."""
    names = map(FILE_NAME.fullmatch, os.listdir(directory)) if directory.exists() else ()
    return sorted({int(name[1]) for name in names if name})


def _while_at_work(then_s: float) -> Patience:
    """A patience that lasts while the program runs, and for some time afterwards."""
    over: list[Patience] = []

    def patience() -> bool:
        if not over and not threading.main_thread().is_alive():
            over.append(lasts(then_s))
        return not over or over[0]()

    return patience


def _list(directory: Path, ranks: Sequence[int]) -> list[tuple[Path, int]]:
    """Returns the files that hold the given ranks' parts, and the sizes of these files."""
    paths = [directory / f"rank-{rank}.{kind}" for rank in ranks for kind in ("events", "names")]
    return [(path, path.stat().st_size) for path in paths if path.exists()]


def _fits(files: Sequence[tuple[Path, int]]) -> bool:
    return sum(-(-size // CHUNK_BYTES) for _, size in files) <= WINDOW


def send(
    keys: BlockStore, rank: int, directory: Path, ranks: Sequence[int], *, asked: bool
) -> bool:
    """Sends the given ranks' parts.

    Returns whether rank 0 has all parts or, if it has not asked, whether the store has them.
    """
    files = _list(directory, ranks)
    fits = asked or _fits(files)
    keys.put(f"files/{rank}", [(path.name, size) for path, size in files] if fits else None)
    if not fits:
        return False
    number = 0
    for path, size in files:
        with path.open("rb") as file:
            for at in range(0, size, CHUNK_BYTES):
                if number >= WINDOW and not keys.wait(
                    f"chunk/{rank}/{number - WINDOW}", lasts(ANSWER_S), there=False
                ):
                    return False
                keys.put(f"chunk/{rank}/{number}", file.read(min(CHUNK_BYTES, size - at)))
                number += 1
    if not asked:
        return True
    receipt = keys.take(f"receipt/{rank}", lasts(GATHERED_S))
    if receipt == "whole":
        shutil.rmtree(directory, ignore_errors=True)
    return receipt in ("whole", "kept")


# -- rank 0


class Gathering:
    """Fetches the parts that rank 0 cannot see, at the end of a block.

    Args:
        keys: the keys of the block.
        directory: the directory of rank 0's own parts, to which the other parts are added.
        world_size: the number of ranks.

    Attributes:
        missing: notes on the parts that did not arrive.
    """

    def __init__(self, keys: BlockStore, directory: Path, world_size: int) -> None:
        self._keys, self._directory = keys, directory
        places = {rank: find_place(keys, rank, never) for rank in range(1, world_size)}
        self._places = {rank: place for rank, place in places.items() if place}
        self._senders: dict[int, bool] = {}  # whether their requested parts arrived
        self._unread: list[str] = []
        self._fetched: list[Path] = []
        self.missing: list[str] = []

    def fetch(self, left: Sequence[int], patience: Patience) -> None:
        """Fetches all parts that are on other hosts.

        Args:
            left: the ranks that have left the block. One rank per directory is asked, and the next
                rank only for parts that the first did not have.
            patience: a function that returns whether to continue.
        """
        here, groups = place_of(self._directory)["id"], dict[str, list[int]]()
        for rank, place in self._places.items():
            if place["id"] != here:
                if self._sees(rank, place):  # a shared directory
                    self._tell(f"wants/{rank}", [])
                else:
                    groups.setdefault(place["id"], []).append(rank)
        first = [ranks[0] for ranks in groups.values()]
        for turn, ranks in enumerate(groups.values()):
            for rank in first[turn + AHEAD : turn + AHEAD + 1] if turn else first[: AHEAD + 1]:
                self._keys.put(f"soon/{rank}", "")
            wanted = {*ranks}
            there = {rank: self._keys.has(f"files/{rank}") for rank in ranks if rank in left}
            # first the ranks that did not wait to be asked
            for rank in sorted(there, key=lambda rank: not there[rank]):
                if there[rank]:
                    wanted -= self.fetch_from(rank, wanted)
                elif not wanted or not patience():
                    self._tell(f"wants/{rank}", [])
                else:
                    self._keys.put(f"wants/{rank}", sorted(wanted))
                    came = self.fetch_from(rank, wanted)
                    self._senders[rank] = bool(came)
                    wanted -= came
            if wanted:
                place = self._places[ranks[0]]
                self.missing.append(
                    f"the parts of ranks {sorted(wanted)} did not arrive from host "
                    f"{place['host']}. They are in {place['directory']} on that host; use ringsim "
                    "merge to join them with the parts from the other hosts"
                )

    def _sees(self, rank: int, place: Mapping[str, Any]) -> bool:
        part = PartReader(self._directory, rank)
        part.read_names()
        return (part.meta.get("pid"), part.meta.get("start_ns")) == (
            place["pid"],
            place["start_ns"],
        )

    def fetch_from(self, rank: int, ranks: Collection[int]) -> set[int]:
        """Receives parts from one rank; returns the ranks whose parts arrived."""
        files = _read_list(self._keys.take(f"files/{rank}", lasts(STOPPED_S)), ranks)
        if files is None:
            return set()
        number = 0
        for name, size in files.items():
            arriving, path = self._directory / f"{name}.arriving", self._directory / name
            with open(
                arriving, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)
            ) as file:
                for at in range(0, size, CHUNK_BYTES):
                    key = f"chunk/{rank}/{number}"
                    data = self._keys.read_bytes(key, lasts(STOPPED_S))
                    self._keys.delete(key)
                    if data is None or len(data) > CHUNK_BYTES:
                        return set()
                    file.seek(at)
                    file.write(data)
                    number += 1
            # never write into an existing file, which may still be open
            arriving.replace(path)
            self._fetched.append(path)
        return {one for one in ranks if {f"rank-{one}.names", f"rank-{one}.events"} <= files.keys()}

    def _tell(self, key: str, value: Any) -> None:
        self._keys.put(key, value)
        self._unread.append(key)

    def acknowledge(self, *, whole: bool, keep: bool) -> None:
        """Notifies the senders that the trace is written, and waits for their confirmation.

        The store may end with this process.

        Args:
            whole: whether nothing is missing, so that the parts may be removed.
            keep: whether the received parts are still needed here.
        """
        for rank, came in self._senders.items():
            if came:
                self._tell(f"receipt/{rank}", "whole" if whole else "kept")
            else:  # it may be dead, or slow
                self._keys.put(f"receipt/{rank}", "whole" if whole else "none")
        for path in () if keep else self._fetched:
            path.unlink(missing_ok=True)
        patience = lasts(STOPPED_S)
        for key in self._unread:
            self._keys.wait(key, patience, there=False)


def _read_list(said: Any, ranks: Collection[int]) -> dict[str, int] | None:
    """Returns the names and sizes of the files that a rank offers.

    Returns None if the rank offers a file that it must not send.
    """
    if not isinstance(said, list):
        return None
    files: dict[str, int] = {}
    for entry in said:
        name, size = entry if isinstance(entry, list) and len(entry) == 2 else ("", 0)
        match = FILE_NAME.fullmatch(name) if isinstance(name, str) else None
        if (
            match is None
            or int(match[1]) not in ranks
            or type(size) is not int
            or not 0 <= size <= MAX_FILE_BYTES
        ):
            return None
        files[name] = size
    return files
