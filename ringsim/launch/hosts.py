"""Watches runs on several hosts.

One rank per host reports to rank 0, over the store, whether a rank on its host can continue.

::

    the rank that watches a host                   rank 0, where ranks of several hosts are recorded
    ----------------------------                   -------------------------------------------------
    every second, and when it stands
    still: beat/<host>                ----------->  none for 5 s: the host is lost, or the link to
                                                    it is down
    [number, state, last answer,      ----------->  if all hosts stand still:
     duration of the last beat]
                                      <-----------  ask/<host>
    the parts of its ranks            ----------->  joins them, checks that all still stand, and
                                                    explains

A host *stands still* while each of its ranks waits in recorded operations or is gone, and nothing
happens there. Rank 0 prints its findings and stores them in the trace. It ends no rank, because
silence proves nothing: the program's own time limits end the ranks, and the message names them.

Rank 0 is in one of three states::

    state      leads to   when
    -----      --------   ----
    moves      stands     all hosts stand still, and none is silent
    stands     explained  STILL_S later, if the hosts are in the same state after their parts arrive
    explained  moves      a host continues, or falls silent
    stands     moves      a host continues, or falls silent
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ringsim.comm.bootstrap import leave_thread
from ringsim.comm.torch_private import default_timeout_s
from ringsim.diagnose.failure import indent, ranks_by_text
from ringsim.diagnose.host_links import STALL_BYTES_PER_S
from ringsim.diagnose.snapshot import Snapshot, read_ends, snapshot_of_events
from ringsim.diagnose.verdict import waits_text
from ringsim.diagnose.waitfor import analyse, hindering
from ringsim.errors import TraceFileError, name_ranks
from ringsim.launch.block import BlockStore, find_place, never, place_of
from ringsim.launch.gathering import Gathering, send
from ringsim.launch.protocol import Ends
from ringsim.state import start_thread
from ringsim.traces.documents import are_all
from ringsim.traces.events import IN_FLIGHT, NONE
from ringsim.traces.findings import LOST
from ringsim.traces.recorder import Recorder
from ringsim.traces.run_parts import read_run
from ringsim.traces.value import Trace

LOOK_S = 0.2  # time between two looks at the ranks of this host
BEAT_S = 1.0  # time between two beats, unless the host begins to stand still
# time that a host stands still before it reports so, and that all do before their parts are read
STILL_S = 0.5
LOST_S = 5.0
OVER = -1  # the number of the last beat of a host that leaves
# a beat that takes longer to send was held up, and so was a message without progress for longer
SLOW_S = 2.0
_COPIED = (".events", ".names", "run.json")


class Beat(NamedTuple):
    """A host's periodic report."""

    number: int = 0  # counts up; ``OVER`` as it leaves
    state: int = 0  # a number for the state of its ranks, 0 while one of them can continue
    answered: int = 0  # the last question that it has answered
    took_s: float = 0.0  # the longest time of a store operation since the previous beat

    def put(self, keys: BlockStore, place: str) -> None:
        """Writes the beat to the store."""
        keys.put(f"beat/{_key(place)}", self)


@dataclass
class Host:
    """Rank 0's view of another host."""

    place: str  # the ``id`` of the directory of its parts
    name: str
    ranks: list[int]
    heard_s: float  # time of the last beat, or of its entry into the block
    beat: Beat
    is_silent: bool = False


@dataclass
class _Doubt:
    """Messages about a standstill that does not prove a deadlock.

    ``lasts`` is printed when the standstill has lasted, and ``over`` when it has ended ("" for no
    message). The standstill may be harmless for ``may_take_s``.
    """

    lasts: str
    over: str = ""
    may_take_s: float = 0.0
    told: bool = False


class HostWatch(ABC):
    """A thread that polls the ranks on this host; the base class of both roles.

    Every rank of the block has a role, from its creation to ``stop``.

    Args:
        keys: the keys of the block.
        recorder: this rank's recorder.
        stands: a function that returns a text for the state of this host's ranks if all stand
            still, or "" if some continue, or None if another rank watches.

    Attributes:
        said: the printed findings, on rank 0.
    """

    def __init__(
        self, keys: BlockStore, recorder: Recorder, stands: Callable[[], str | None]
    ) -> None:
        self._given, self._directory, self._stands = keys, recorder.directory, stands
        self._world_size, self.said = recorder.world_size, list[str]()
        self._place = place_of(self._directory)
        self._stopped = threading.Event()
        self._thread = start_thread("hosts", self._run)

    def stop(self) -> None:
        """Stops the thread; waits for a delayed beat when the process ends."""
        self._stopped.set()
        leave_thread(self._thread, BEAT_S)

    @cached_property
    def _block_keys(self) -> BlockStore:
        # a separate connection, because a wait on a connection blocks all other calls on it
        return self._given.clone()

    @cached_property
    def _keys(self) -> BlockStore:
        return self._block_keys.within("hosts")

    def _run(self) -> None:
        # the store has gone, with rank 0; or the disk is full
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            while not self._stopped.wait(LOOK_S):
                if (stands := self._stands()) is not None:
                    self._look(stands)

    @abstractmethod
    def _look(self, stands: str) -> None:
        """Polls once."""


class Witness(HostWatch):
    """The role of a rank that may watch a host other than rank 0's host."""

    _beat, _beat_s = Beat(), 0.0  # the last beat and its time
    # the state while it stands still, its beginning, and whether a beat has reported it
    _stood, _stood_s, _told = "", 0.0, False

    def _look(self, stands: str) -> None:
        """Sends a beat if one is due, and answers a question."""
        began_s = time.monotonic()
        if stands != self._stood:
            self._stood, self._stood_s, self._told = stands, began_s, False
        comes_to_a_stand = stands and not self._told and began_s - self._stood_s >= STILL_S
        if began_s - self._beat_s >= BEAT_S or comes_to_a_stand:
            self._beat_s, self._told = began_s, True
            self._put(number=self._beat.number + 1, state=_key(stands))
            self._beat = self._beat._replace(took_s=0.0)
        elif not (stands and self._told):  # rank 0 does not ask
            return
        question = f"ask/{_key(self._place['id'])}"
        wanted = self._keys.has(question)  # waits for an answer, which the beat did not
        took_s = round(max(self._beat.took_s, time.monotonic() - began_s), 1)
        self._beat = self._beat._replace(took_s=took_s)
        if not wanted:
            return
        asked = self._keys.take(question, never)
        if are_all(asked, int) and len(asked) > 1:  # the number of the question, and the ranks
            number, *ranks = asked
            send(_copies(self._keys, number), ranks[0], self._directory, ranks, asked=True)
            self._put(answered=number, state=_key(self._stands() or ""))

    def _run(self) -> None:
        super()._run()
        with contextlib.suppress(RuntimeError):  # the store has gone
            if self._beat.number:
                self._put(number=OVER, state=0)

    def _put(self, **changes: int) -> None:
        self._beat = self._beat._replace(**changes)
        self._beat.put(self._keys, self._place["id"])


class Judge(HostWatch):
    """The role of rank 0.

    Attributes:
        hosts: the other hosts, by place.
    """

    # the states of all hosts while all stand still, and the beginning
    _state: Sequence[Any] = ()
    _since_s = _look_s = 0.0
    _doubt: _Doubt | None = None  # about this state
    _explained = False
    _question = 0  # the number of the last one

    def __init__(self, *role: Any) -> None:
        self.hosts: dict[str, Host] = {}
        self._places: dict[int, dict[str, Any]] = {}
        limit_s = default_timeout_s()
        limit = "" if limit_s is None else f" of {limit_s:g} s"
        self._until = (
            f"ringsim does not end ranks for this reason, but the process group's timeout{limit} "
            "does (timeout= in init_process_group)"
        )
        super().__init__(*role)

    def find_lost(self, ranks: Sequence[int]) -> Ends:
        """Returns the ends of ranks on silent hosts, as a trace stores them for ``explain``.

        The method first waits until it is clear which hosts are silent.
        """
        asked_s = time.monotonic()
        hosts = [
            host
            for host in self.hosts.values()
            if {*host.ranks} <= {*ranks} and host.beat.number != OVER
        ]
        while self._thread.is_alive() and any(
            host.heard_s < asked_s and not host.is_silent for host in hosts
        ):
            time.sleep(0.01)
        return [
            {
                "rank": rank,
                "state": "unknown",
                "about": (
                    f"went silent: nothing has arrived from host {host.name} for {LOST_S:.0f} s"
                ),
                "error": "",
                "how": LOST,
            }
            for host in hosts
            if host.is_silent
            for rank in host.ranks
        ]

    def _look(self, stands: str) -> None:
        now_s = time.monotonic()
        if not stands and now_s - self._look_s < BEAT_S and not self._state:
            return  # this host continues
        self._look_s = now_s
        self._find_hosts(now_s)
        for host in self.hosts.values():
            self._hear(host, now_s)
        states = [host.beat.state for host in self.hosts.values()]
        silent = any(host.is_silent for host in self.hosts.values())
        all_stand = stands and all(states) and (states or self._absent) and not silent
        state = (stands, *states) if all_stand else ()
        still_s, doubt = now_s - self._since_s, self._doubt
        if state != self._state:
            if doubt and doubt.over and not silent and still_s >= SLOW_S + doubt.may_take_s:
                self._say(f"{doubt.over} for about {still_s:.0f} s; then the link recovered")
            self._state, self._since_s = state, now_s
            self._doubt, self._explained = None, False
        elif state and not self._explained and still_s >= STILL_S:
            self._explained = self._explain(stands)
        elif doubt and not doubt.told and still_s >= LOST_S + doubt.may_take_s:
            doubt.told = True
            self._say(f"{doubt.lasts}\n  {self._until}")

    def _find_hosts(self, now_s: float) -> None:
        """Finds the ranks that have entered the block since the last poll, and their hosts."""
        for rank in self._absent:
            place = find_place(self._block_keys, rank, never)
            if not place:
                continue
            self._places[rank] = place
            if place["id"] != self._place["id"]:
                # it must also send a first beat
                host = Host(place["id"], place["host"], [], now_s, Beat())
                self.hosts.setdefault(place["id"], host).ranks.append(rank)

    def _hear(self, host: Host, now_s: float) -> None:
        """Reads a host's last beat; reports when a long silence begins and ends."""
        beat = _read_beat(self._keys, host.place)
        if beat is not None and beat != host.beat:
            silent_s = max(beat.took_s, now_s - host.heard_s if host.is_silent else 0.0)
            host.beat, host.heard_s, host.is_silent = beat, now_s, False
            if silent_s >= SLOW_S:
                self._say(
                    f"nothing arrived from host {host.name} at {self._place['host']} for "
                    f"{silent_s:.1f} s; then the link recovered"
                )
        elif host.beat.number != OVER and now_s - host.heard_s >= LOST_S and not host.is_silent:
            host.is_silent = True
            self._say(
                f"nothing has arrived from host {host.name} ({_ranks_text(host.ranks)}) for "
                f"{LOST_S:.0f} s: the host is lost or cut off. {self._until}"
            )

    def _explain(self, stands: str) -> bool:
        """Joins the parts of all hosts and explains the standstill, if it still lasts.

        Returns whether it still lasts.
        """
        self._question += 1
        with tempfile.TemporaryDirectory(prefix="ringsim-") as name:
            copy = Path(name, "copy")
            if not self._fetch_parts(copy) or not self._still_stand() or self._stands() != stands:
                return False
            with contextlib.suppress(TraceFileError):
                events, metadata = read_run(copy)
                last_ns = max(events.post_ns.max(), events.wait_ns.max(), events.done_ns.max())
                # the waiting time is unknown, because the clocks differ
                waits = (events.status == IN_FLIGHT) & (events.wait_ns != NONE)
                events = replace(events, wait_ns=np.where(waits, last_ns, events.wait_ns))
                self._judge(Trace(events, {**metadata, "end_ns": 0}))
        return True

    def _fetch_parts(self, copy: Path) -> bool:
        """Copies the parts of all hosts into a directory; returns whether all arrived."""
        copies = _copies(self._keys, self._question)
        shutil.copytree(
            self._directory,
            copy,
            ignore=lambda _, names: [one for one in names if not one.endswith(_COPIED)],
        )
        gathering = Gathering(copies, copy, 1)
        for host in self.hosts.values():
            self._keys.put(f"ask/{_key(host.place)}", [self._question, *host.ranks])
            came = gathering.fetch_from(host.ranks[0], host.ranks)
            copies.put(f"receipt/{host.ranks[0]}", "kept")
            if not came:
                return False
        return True

    def _still_stand(self) -> bool:
        """Returns whether each host reports the same state before and after its answer."""
        deadline_s = time.monotonic() + LOST_S
        for host in self.hosts.values():
            while (beat := _read_beat(self._keys, host.place)) is None or (
                beat.answered != self._question
            ):
                if self._stopped.wait(LOOK_S / 10) or time.monotonic() > deadline_s:
                    return False
            if beat.state != host.beat.state:
                return False
        return True

    def _judge(self, trace: Trace) -> None:
        """Reports stuck ranks.

        If the ranks can continue, it keeps a message for the case that nothing moves for much
        longer.
        """
        ends = read_ends(trace.metadata, trace.world_size)
        snapshot = snapshot_of_events(trace.events, trace.world_size, ends)
        if analyse(snapshot) is None:
            bytes_under_way = trace.events.size_bytes[trace.events.status == IN_FLIGHT]
            may_take_s = int(bytes_under_way.clip(0).sum()) / STALL_BYTES_PER_S
            self._doubt = self._find_doubt(snapshot, may_take_s)
            return
        hosts = {rank: place["host"] for rank, place in sorted(self._places.items())}
        ranks = ranks_by_text(hosts)
        where = "; ".join(f"{_ranks_text(some)} on {host}" for host, some in ranks.items())
        self._say(
            f"nothing moves on any host ({where}). This does not prove that ranks are stuck: other "
            "threads may help.\n"
            f"{indent(str(trace.explain()))}\n"
            f"  {self._until}"
        )

    def _find_doubt(self, snapshot: Snapshot, may_take_s: float) -> _Doubt | None:
        """Returns a possible fault: missing ranks, or a link without any progress."""
        awaited = [one for rank in snapshot.ranks for one in rank.awaited]
        absent = self._absent
        wait = [one.operation for one in awaited if {*hindering(snapshot, one)} & {*absent}]
        if wait:
            who = f"{name_ranks(absent)} {'has' if len(absent) == 1 else 'have'}"
            return _Doubt(
                f"{who} not entered the recorded block (late, or lost while starting), and other "
                f"ranks are waiting.{waits_text(wait)}"
            )
        waits = [one.operation for one in awaited if one.matched]
        links = {pair for one in waits if (pair := self._link(one.rank, one.peer))}
        if not links:
            return None
        link = "on the link between hosts " + ", and ".join(sorted(links))
        lasts = (
            f"nothing moves {link}, although both sides have posted their "
            f"operations.{waits_text(waits)}"
        )
        return _Doubt(lasts, f"nothing moved {link}", may_take_s)

    def _link(self, one: int, other: int) -> str:
        """Returns the names of two ranks' hosts, or "" if the host is shared or unknown."""
        first, second = self._places.get(one), self._places.get(other)
        if not first or not second or first["id"] == second["id"]:
            return ""
        return " and ".join(sorted([first["host"], second["host"]]))

    @property
    def _absent(self) -> list[int]:
        """The ranks that have not entered the block."""
        return [rank for rank in range(self._world_size) if rank not in self._places]

    def _say(self, sentence: str) -> None:
        self.said.append(sentence)
        sys.stderr.write(f"[rank 0] ringsim: {sentence}\n")
        sys.stderr.flush()


def _copies(keys: BlockStore, number: int) -> BlockStore:
    """Returns the keys for the parts that rank 0 reads at a standstill."""
    return keys.within(f"copy/{number}")


def stay_unwatched(keys: BlockStore, directory: Path) -> None:
    """Reports to rank 0 that this host is not watched, so that rank 0 ignores its silence."""
    Beat(number=OVER).put(keys.within("hosts"), place_of(directory)["id"])


def _key(text: str) -> int:
    """Returns a number for a text, or 0 if the text is empty."""
    return zlib.crc32(text.encode())


def _read_beat(keys: BlockStore, place: str) -> Beat | None:
    said = keys.read(f"beat/{_key(place)}", never)
    return Beat(*said) if are_all(said, (int, float)) and len(said) == len(Beat()) else None


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
