"""The watch over several hosts.

One rank of each tells rank 0, over the store, whether anybody there can go on.

::

    the rank that watches a host                   rank 0, where ranks of several hosts are recorded
    ----------------------------                   -------------------------------------------------
    every second, and once it stands
    still: beat/<host>                ----------->  none for 5 s: the host is lost, or the link to
                                                    it is down
    [number, what stands, last answer, ---------->  all hosts stand still, and go on to:
     how long the last beat took]
                                      <-----------  ask/<host>
    the parts of its ranks            ----------->  joins them, looks whether all still stand, and
                                                    explains

A host *stands* while each of its ranks waits in recorded operations or is gone, and nothing happens
there. What is found is told on rank 0 and kept in the trace. Nobody is ended: silence and stillness
prove nothing, so that is left to the program's own limits, which are named.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch.distributed.distributed_c10d import PrefixStore

from ringsim.comm.bootstrap import leave_thread
from ringsim.comm.torch_private import default_timeout_s
from ringsim.diagnose.host_links import STALL_BYTES_PER_S
from ringsim.diagnose.snapshot import read_ends, snapshot_of_events
from ringsim.diagnose.verdict import waits_text
from ringsim.diagnose.waitfor import analyse, hindering
from ringsim.errors import TraceFileError, name_ranks
from ringsim.launch.gathering import Gathering, Store, find_place, place_of, send
from ringsim.state import OUR_THREADS
from ringsim.traces.events import IN_FLIGHT, NONE, are_all
from ringsim.traces.findings import LOST
from ringsim.traces.runs import read_run
from ringsim.traces.value import Trace

LOOK_S: Final = 0.2  # between two looks at one's own ranks
BEAT_S: Final = 1.0  # between two beats, unless the host comes to a stand
# how long a host stands before it says so, and all of them before their parts are looked at
STILL_S: Final = 0.5
LOST_S: Final = 5.0
OVER: Final = -1  # the number of the last beat of a host that leaves
# a beat that takes longer to get away was held up, and so was a message on which nothing moves for
# longer
SLOW_S: Final = 2.0


@dataclass
class _Doubt:
    """What to say of a stand that proves nothing.

    Once it has lasted, once it is over ("" for nothing), and how long all may be well.
    """

    lasts: str
    over: str = ""
    may_take_s: float = 0.0
    told: bool = False


class HostWatch:
    """This rank's part in the watch over several hosts, from its creation to ``stop``.

    Every rank of the block creates one.

    Args:
        store: of the block, one of torch's.
        run_id: of the block.
        rank: this rank.
        world_size: number of ranks.
        directory: of this rank's parts.
        stands: names the state in which all ranks of this host stand still, "" where some go on,
            None where another rank watches.

    Attributes:
        said: on rank 0, what was found, in sentences.
    """

    def __init__(
        self,
        store: Any,
        run_id: str,
        rank: int,
        world_size: int,
        directory: Path,
        stands: Callable[[], str | None],
    ) -> None:
        self._given, self._run_id, self._rank, self._world_size, self._directory = (
            store,
            run_id,
            rank,
            world_size,
            directory,
        )
        self._stands, self.said = stands, list[str]()
        limit_s = default_timeout_s()
        limit = "" if limit_s is None else f" of {limit_s:g} s"
        self._until = (
            f"ringsim ends no rank for this: the process group's time-out{limit} does (timeout= of "
            "init_process_group)"
        )
        self._id = place_of(directory)["id"]
        self._places: dict[int, dict[str, Any]] = {}
        # by place: the last beat, and when it came
        self._heard: dict[str, tuple[list[Any], float]] = {}
        self._silent: dict[str, float] = {}
        # what all hosts said when all stood, and since when
        self._still: tuple[list[Any], float] = ([], 0.0)
        self._doubt: _Doubt | None = None  # about that
        self._looked = False
        # of the last beat, or question; of the last answer; and a beat took since
        self._number, self._answered, self._took_s = 0, 0, 0.0
        # when the last beat was; what stands, since when, and whether that is told
        self._beat_s, self._stood = 0.0, ("", 0.0, False)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{OUR_THREADS}hosts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends it; waits for a beat that is held up when the process ends."""
        self._stopped.set()
        self._thread.join(BEAT_S)
        leave_thread(self._thread)

    def find_lost(self, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """Returns what is to be said of ranks whose hosts are silent.

        As a trace keeps it for ``explain``; waits until that is clear.
        """
        left = {place["id"] for rank, place in self._places.items() if rank not in ranks}
        known = {
            self._places[rank]["id"] for rank in ranks if rank in self._places
        } & self._heard.keys() - left
        hosts = {host for host in known if self._heard[host][0][0] != OVER}
        asked_s = time.monotonic()
        while self._thread.is_alive() and any(
            self._heard[host][1] < asked_s and host not in self._silent for host in hosts
        ):
            time.sleep(0.01)
        ends = []
        for rank in ranks:
            place = self._places.get(rank)
            if place and place["id"] in hosts & self._silent.keys():
                host = place["host"]
                about = f"went silent: nothing has come from host {host} for {LOST_S:.0f} s"
                ends.append(
                    {"rank": rank, "state": "unknown", "about": about, "error": "", "how": LOST}
                )
        return ends

    def _run(self) -> None:
        store: Any = None
        # the store has gone, with rank 0; or the disk is full
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            while not self._stopped.wait(LOOK_S):
                stands = self._stands()
                if stands is None:
                    continue
                if store is None:
                    # a connection of its own: one that waits there blocks all others on it
                    self._given = self._given.clone()
                    store = PrefixStore("hosts", self._given)
                keys = Store(store, self._run_id)
                if self._rank == 0:
                    self._look(store, keys, stands)
                else:
                    self._beat(store, keys, stands)
            if store is not None and self._rank:
                self._put_beat(Store(store, self._run_id), OVER, "")

    # -- a rank that watches another host

    def _beat(self, store: Any, keys: Store, stands: str) -> None:
        """Says what stands, if it is time to, and answers what is asked."""
        began_s = time.monotonic()
        if stands != self._stood[0]:
            self._stood = stands, began_s, False
        _, since_s, told = self._stood
        if began_s - self._beat_s >= BEAT_S or (
            stands and not told and began_s - since_s >= STILL_S
        ):
            self._number, self._beat_s, self._stood = (
                self._number + 1,
                began_s,
                (stands, since_s, True),
            )
            self._put_beat(keys, self._number, stands)
            self._took_s = 0.0
        elif not (stands and told):  # nobody asks
            return
        wanted = keys.has(f"ask/{_key(self._id)}")  # waits for an answer, which the beat did not
        self._took_s = max(self._took_s, time.monotonic() - began_s)
        if wanted:
            asked: Any = json.loads(keys.take(f"ask/{_key(self._id)}", lambda: False) or b"null")
            if are_all(asked, int) and len(asked) > 1:  # the number of the question, and the ranks
                self._answered, *ranks = asked
                send(
                    _copies(store, self._run_id, self._answered),
                    ranks[0],
                    self._directory,
                    ranks,
                    asked=True,
                )
                self._put_beat(keys, self._number, self._stands() or "")

    def _put_beat(self, keys: Store, number: int, stands: str) -> None:
        _put_beat(
            keys,
            self._id,
            [number, zlib.crc32(stands.encode()), self._answered, round(self._took_s, 1)],
        )

    # -- rank 0

    def _look(self, store: Any, keys: Store, stands: str) -> None:
        now_s = time.monotonic()
        if not stands and now_s - self._beat_s < BEAT_S and not self._still[0]:
            return  # this host goes on
        self._beat_s = now_s
        for rank in range(self._world_size):
            if rank not in self._places and (
                place := find_place(Store(self._given, self._run_id), rank, lambda: False)
            ):
                self._places[rank] = place
        hosts: dict[str, list[int]] = {}
        for rank, place in sorted(self._places.items()):
            if place["id"] != self._id:
                hosts.setdefault(place["id"], []).append(rank)
        for host, ranks in hosts.items():
            beat = _read_beat(keys, host)
            # it has entered the block, and must say a first word, too
            known = self._heard.setdefault(host, ([0, 0, 0, 0.0], now_s))
            if beat is not None and known[0] != beat:
                self._heard[host] = beat, now_s
                self._hear_again(host, beat, now_s)
            elif known[0][0] != OVER and now_s - known[1] >= LOST_S and host not in self._silent:
                self._silent[host] = known[1]
                lost = f"host {self._name(host)} ({_say_ranks(ranks)})"
                self._say(
                    f"nothing has come from {lost} for {LOST_S:.0f} s: it is lost, or cut off. "
                    f"{self._until}"
                )
        state = [stands, *(self._heard[host][0][1] for host in hosts)]
        if not (hosts or self._absent()) or "" in state or 0 in state or self._silent:
            state = []
        still_s, doubt = now_s - self._still[1], self._doubt
        if state != self._still[0]:
            if (
                doubt is not None
                and doubt.over
                and not self._silent
                and still_s >= SLOW_S + doubt.may_take_s
            ):
                self._say(f"{doubt.over} for about {still_s:.0f} s; then it recovered")
            self._still, self._doubt, self._looked = (state, now_s), None, False
        elif state and not self._looked and still_s >= STILL_S:
            self._looked = self._explain(store, keys, stands, hosts)
        elif doubt is not None and not doubt.told and still_s >= LOST_S + doubt.may_take_s:
            doubt.told = True
            self._say(f"{doubt.lasts}. {self._until}")

    def _hear_again(self, host: str, beat: list[Any], now_s: float) -> None:
        since_s = self._silent.pop(host, None)
        silent_s = max(beat[3], 0.0 if since_s is None else now_s - since_s)
        if silent_s >= SLOW_S:
            self._say(
                f"nothing came through from host {self._name(host)} to {self._name(self._id)} "
                f"for {silent_s:.1f} s; then the link recovered"
            )

    def _explain(self, store: Any, keys: Store, stands: str, hosts: dict[str, list[int]]) -> bool:
        """Joins the parts of all hosts and says why nothing moves, if they still stand then.

        Tells whether they do.
        """
        self._number += 1
        with tempfile.TemporaryDirectory(prefix="ringsim-") as name:
            copy = Path(name, "copy")
            shutil.copytree(
                self._directory,
                copy,
                ignore=lambda _, names: [one for one in names if not one.endswith(_COPIED)],
            )
            gathering = Gathering(_copies(store, self._run_id, self._number), copy, 1)
            for host, ranks in hosts.items():
                keys.put(f"ask/{_key(host)}", json.dumps([self._number, *ranks]).encode())
                came = gathering.fetch_from(ranks[0], ranks)
                _copies(store, self._run_id, self._number).put(f"receipt/{ranks[0]}", b"kept")
                if not came:
                    return False
            deadline_s = time.monotonic() + LOST_S
            for host in hosts:
                while (beat := _read_beat(keys, host)) is None or beat[2] != self._number:
                    if self._stopped.wait(LOOK_S / 10) or time.monotonic() > deadline_s:
                        return False
                if beat[1] != self._heard[host][0][1]:
                    return False
            if self._stands() != stands:
                return False
            with contextlib.suppress(TraceFileError):
                events, metadata = read_run(copy)
                last_ns = max(events.post_ns.max(), events.wait_ns.max(), events.done_ns.max())
                # for how long nobody's clock says
                waits = (events.status == IN_FLIGHT) & (events.wait_ns != NONE)
                self._judge(
                    Trace(
                        replace(events, wait_ns=np.where(waits, last_ns, events.wait_ns)),
                        {**metadata, "end_ns": 0},
                    )
                )
        return True

    def _judge(self, trace: Trace) -> None:
        """Says why nobody can go on.

        Where somebody can, remembers what to say if nothing moves for much longer.
        """
        snapshot = snapshot_of_events(
            trace.events, trace.world_size, read_ends(trace.metadata, trace.world_size)
        )
        if analyse(snapshot) is not None:
            why = " ".join(line.strip() for line in str(trace.explain()).splitlines())
            ranks: dict[str, list[int]] = {}
            for rank, place in sorted(self._places.items()):
                ranks.setdefault(str(place["host"]), []).append(rank)
            where = "; ".join(f"{_say_ranks(some)} on {host}" for host, some in ranks.items())
            self._say(
                f"nothing moves on any host ({where}; not proved: threads of theirs may help). "
                f"{why} {self._until}"
            )
            return
        awaited = [one for rank in snapshot.ranks for one in rank.awaited]
        absent = self._absent()
        if wait := [
            one.operation
            for one in awaited
            if {*hindering(snapshot, one.operation.rank, one)} & {*absent}
        ]:
            who = f"{name_ranks(absent)} {'has' if len(absent) == 1 else 'have'}"
            self._doubt = _Doubt(
                f"{who} not entered the recorded block (late, or lost while starting), and "
                f"others wait: {waits_text(wait)}"
            )
            return
        waits = [one.operation for one in awaited if one.matched]
        ends = {
            (one.rank, one.peer)
            for one in waits
            if one.peer in self._places and one.rank in self._places
        }
        hosts = {
            tuple(sorted(str(self._places[rank]["host"]) for rank in pair))
            for pair in ends
            if self._crosses(*pair)
        }
        if waits and hosts:
            bytes_under_way = int(
                trace.events.size_bytes[trace.events.status == IN_FLIGHT].clip(0).sum()
            )
            links = ", and ".join(f"{one} and {other}" for one, other in sorted(hosts))
            link = f"on the link between hosts {links}"
            lasts = f"nothing moves {link}, though both sides have posted: {waits_text(waits)}"
            self._doubt = _Doubt(
                lasts, f"nothing moved {link}", bytes_under_way / STALL_BYTES_PER_S
            )

    def _absent(self) -> list[int]:
        """Returns the ranks that have not entered the block."""
        return [rank for rank in range(self._world_size) if rank not in self._places]

    def _crosses(self, one: int, other: int) -> bool:
        return bool(self._places[one]["id"] != self._places[other]["id"])

    def _name(self, host: str) -> str:
        return next(str(place["host"]) for place in self._places.values() if place["id"] == host)

    def _say(self, sentence: str) -> None:
        self.said.append(sentence)
        sys.stderr.write(f"[rank 0] ringsim: {sentence}\n")
        sys.stderr.flush()


_COPIED: Final = (".events", ".names", "run.json")


def _copies(store: Any, run_id: str, number: int) -> Store:
    """Returns the keys under which parts come that are looked at while their ranks stand still."""
    return Store(PrefixStore(f"copy/{number}", store), run_id)


def stay_unwatched(store: Any, run_id: str, directory: Path) -> None:
    """Tells rank 0 that nobody watches this host, so that its silence means nothing."""
    _put_beat(
        Store(PrefixStore("hosts", store), run_id), place_of(directory)["id"], [OVER, 0, 0, 0.0]
    )


def _put_beat(keys: Store, host: str, beat: list[Any]) -> None:
    keys.put(f"beat/{_key(host)}", json.dumps(beat).encode())


def _key(place: str) -> int:
    return zlib.crc32(place.encode())


def _read_beat(keys: Store, host: str) -> list[Any] | None:
    beat: Any = json.loads(keys.read(f"beat/{_key(host)}", lambda: False) or b"null")
    fits = (
        isinstance(beat, list)
        and len(beat) == 4
        and all(isinstance(number, int | float) for number in beat)
    )
    return beat if fits else None


def _say_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
