"""``with ringsim.trace(path) as recording:`` in ranks that something else started.

Each rank writes its part into ``<path>.parts``, or under ``RINGSIM_PARTS`` on its own host. At the
end of the block it announces, in the default group's store or in a file, that its part is complete;
rank 0 fetches over the store what lies on other hosts (``launch/gathering``) and merges the parts
into one file. Nothing goes through a process group: recording adds no message, and inside the block
no rank waits for another.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch.distributed as dist

from ringsim import provenance
from ringsim.comm import torch_hooks
from ringsim.comm.log import interrupt_log, resume_log
from ringsim.diagnose.failure import (
    clear_verdict,
    describe_end,
    error_of_kind,
    note_failed_threads,
    read_verdict,
    report_exception,
)
from ringsim.diagnose.parting import tell_partings
from ringsim.errors import RingError
from ringsim.launch.clocks import ClockComparison
from ringsim.launch.gathering import Gathering, Store, find_place, offer, place_of
from ringsim.launch.hosts import HostWatch, stay_unwatched
from ringsim.launch.joined import JoinedWatch, StoreBoard, store_port
from ringsim.launch.watcher import LiveRecords, has_proc, look_at
from ringsim.state import get_state
from ringsim.traces.clocks import count_from, find_start, reference_ns
from ringsim.traces.events import NONE, Events, readable
from ringsim.traces.files import load, save_pieces
from ringsim.traces.findings import LEFT_BLOCK
from ringsim.traces.parts import PartReader
from ringsim.traces.recorder import Recorder
from ringsim.traces.runs import Parts, share_tables, told_ends
from ringsim.traces.value import Trace

WAIT_S: Final = 30.0  # how long rank 0 waits for the ends of the other ranks' blocks
# the same after rank 0's own block ended with an exception: other blocks may never end
WAIT_AFTER_ERROR_S: Final = 2.0
# events of a trace that rank 0 keeps in memory; a larger one is read when somebody asks for it
MOST_KEPT: Final = 500_000
MOST_NOTES: Final = 4  # ranks that an error names
LOOK_S: Final = 0.1  # how often rank 0 then checks whether it has been told to end


class Recording:
    """Records ranks that already run, from the start of a ``with`` block to its end.

    Every rank of the default process group enters the block and leaves it, each in its own time.
    Blocks may be nested and repeated; an inner one, or one inside a run that
    ``ringsim.trace(worker)`` started, saves what was posted within it. If the block raises, the
    trace is saved all the same, and the exception goes on.

    Args:
        path: the file that rank 0 writes, usually ``*.ringtrace``; the same on every rank. An
            existing file is replaced, but where torchrun may restart the ranks: each attempt then
            has a file of its own, ``run.1.ringtrace`` after ``run.ringtrace``.
        check: which mistakes raise an error, see ``ringsim.trace``; inside another block or run,
            that one's setting holds.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> import tempfile
        >>> with Recording(Path(tempfile.mkdtemp(), "run.ringtrace")) as recording:
        ...     dist.barrier()
        >>> [str(op) for op in recording.trace.to_pandas()["op"]]
        ['barrier']
        >>> dist.destroy_process_group()
    """

    def __init__(self, path: Path | str, *, check: str = "basic") -> None:
        self._check = check
        self._given = self._path = Path(os.path.abspath(path))
        self._recorder: Recorder | None = None
        self._rank = 0
        self._attempt: int | None = None
        self._trace: Trace | None = None
        self._saved = False

    @property
    def written(self) -> Path | None:
        """The file that this rank has written."""
        return self._path if self._saved else None

    @property
    def trace(self) -> Trace:
        """The trace of all ranks; on rank 0, after the block.

        Raises:
            RingError: this is another rank, or the block has not ended.
        """
        if not self._saved:
            where = (
                f"(rank {self._rank} of {self._world_size})"
                if self._recorder
                else "(the block was not entered)"
            )
            todo = "Ask on rank 0, or load the file." if self._rank else "Ask after the with block."
            raise RingError(
                "a recording's trace must be asked for on rank 0 after the block, got a "
                f"question elsewhere {where}. {todo}"
            )
        if self._trace is None:
            self._trace = load(self._path)
        return self._trace

    def __enter__(self) -> Self:
        if not dist.is_initialized():
            raise RingError(
                "the ranks must be in a process group before they are recorded, got none. Call "
                "ringsim.initialize_distributed() or "
                "torch.distributed.init_process_group() first, or let ringsim start the ranks: "
                "ringsim.trace(worker, world_size=4)."
            )
        self._trace, self._saved = None, False
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._backend = dist.get_backend()
        self._start_ns, self._start_unix_ns = time.monotonic_ns(), time.time_ns()
        log = get_state().log
        moves = log is not None and log.records.remove is not None
        # a log with its own recorder uses that of the block instead
        moved = interrupt_log() if moves else None
        active = get_state().recorder
        self._path = self._given
        self._board = StoreBoard(self._rank)
        patience = self._world_size if self._rank else 1
        self._keys = Store(self._board.store, self._board.run_id, patience)
        self._own = active is None
        if self._own and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            self._path = number(self._given, self._agree_on_attempt(self._keys))
        self._recorder = active or self._make_recorder()
        self._place = {
            **place_of(self._recorder.directory),
            "start_ns": self._recorder.start_ns,
        }
        self._keys.put(f"at/{self._rank}", json.dumps(self._place).encode())
        self._clocks: ClockComparison | None = None
        # a store within a process blocks all while one waits
        if self._own and self._world_size > 1 and store_port() >= 0:
            self._clocks = ClockComparison(
                self._board.store,
                self._rank,
                self._world_size,
                self._recorder,
                self._find_clock_of_rank_0,
            )
        self._stop_noting = note_failed_threads(self._recorder) if self._own else None
        torch_hooks.install(self._recorder, self._check)
        resume_log(moved)
        self._watch: JoinedWatch | None = None
        if self._own and "gloo" in self._backend and has_proc():
            self._watch = self._begin_watch(self._recorder)
        self._hosts: HostWatch | None = None
        if self._watch is not None and self._world_size > 1:
            about = (
                self._board.store,
                self._board.run_id,
                self._rank,
                self._world_size,
                self._recorder.directory,
            )
            self._hosts = HostWatch(*about, self._watch.stands)
        self._first = self._recorder.count
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        with (
            hold_back_sigterm()
            if self._rank == 0
            else contextlib.nullcontext(threading.Event()) as hurry
        ):
            self._leave(recorder, error, hurry)

    def _leave(
        self, recorder: Recorder, error: BaseException | None, hurry: threading.Event
    ) -> None:
        """Ends this rank's part of the block.

        Rank 0 writes the file, at once if ``hurry`` is set.
        """
        left = tell_end(self._rank, error)
        if error is not None:
            self._say_why(recorder, error, left)
        others_do: list[dict[str, Any]] = []
        if self._watch is not None:
            if error is not None:
                others_do = self._watch.ask_others()
            self._watch.stop()
        if self._clocks is not None and self._rank:
            self._clocks.stop(failed=error is not None)
        if self._hosts is not None and self._rank:
            self._hosts.stop()
        span = [self._first, recorder.count]
        moved = interrupt_log() if self._own else None
        torch_hooks.uninstall(recorder)
        if self._stop_noting is not None:
            self._stop_noting()
            recorder.close()
        resume_log(moved)
        mismatch = self._watch.unheard() if self._watch is not None and error is None else None
        try:
            self._board.post(
                self._rank, json.dumps({"span": span, "path": str(self._path), "left": left})
            )
            if self._rank:
                offer(
                    self._keys,
                    self._rank,
                    recorder.directory,
                    self._place,
                    self._path,
                    failed=error is not None,
                )
            else:
                found = self._gather(recorder.directory, error, hurry, others_do)
                mismatch = mismatch or found
        except (RingError, RuntimeError, OSError) as failure:
            if error is None:
                raise RingError(
                    f"the parts of a recording must be mergeable, got {type(failure).__name__}: "
                    f"{failure} "
                    f"(rank {self._rank} of {self._world_size}). They are in {recorder.directory}."
                ) from failure
            # the block's own exception is more important
            error.add_note(f"ringsim could not save the trace: {failure}")
        if mismatch is not None:
            mismatch.trace = self.trace if self._saved else None
            raise mismatch

    def _gather(
        self,
        directory: Path,
        error: BaseException | None,
        hurry: threading.Event,
        others_do: list[dict[str, Any]],
    ) -> RingError | None:
        """Collects the parts of all ranks, and writes the file; on rank 0.

        Returns the error of operations whose sides disagree.
        """
        try:
            said, late = self._collect_announcements(directory, hurry, failed=error is not None)
            if self._hosts is not None:
                others_do += self._hosts.find_lost(late)
                self._hosts.stop()
        finally:
            if self._clocks is not None:
                self._clocks.stop(failed=error is not None)
        gathering = Gathering(self._keys, directory, self._world_size)
        gathering.fetch([*said], lambda: not hurry.is_set())
        whole = self._merge(directory, said, late, others_do, gathering.missing)
        if isinstance(error, RingError) and error.trace is None:
            error.trace = self.trace
            error.diagnosis = error.diagnosis and replace(error.diagnosis, trace=self.trace)
        gathering.acknowledge(whole=whole and self._own, keep=self._own)
        mismatch = None
        if error is None and self._own and not late and "gloo" in self._backend:
            mismatch = self._find_mismatch(directory)
        if self._own and whole:
            shutil.rmtree(directory, ignore_errors=True)
        return mismatch

    def _find_mismatch(self, directory: Path) -> RingError | None:
        """Returns the error of a block that all have left though an operation's sides disagree.

        Unless they have heard it.
        """
        records = LiveRecords(directory, self._world_size)
        if self._watch is not None and (verdict := read_verdict(directory)) is not None:
            records.caught.append(verdict)
        records.look(to_end=True)
        found = records.find_mismatch(range(self._world_size))
        if found is None:
            return None
        found = tell_partings(replace(found, trace=self.trace), self.trace.events)
        return error_of_kind(found.kind)(str(found), diagnosis=found)

    def _make_recorder(self) -> Recorder:
        directory = parts_of(self._path)
        recorder = Recorder(directory, self._rank, self._world_size)
        recorder.set_meta("run_id", self._board.run_id)
        claim = directory / "run_id"
        # the first rank of the block in this directory
        if not claim.exists() or claim.read_text() != self._board.run_id:
            clear_verdict(directory)
            claim.write_text(self._board.run_id)
        if self._rank == 0:
            # left by an earlier run with more ranks that was killed
            for entry in directory.iterdir():
                match = re.fullmatch(r"rank-(\d+)\.\w+", entry.name)
                if match and int(match[1]) >= self._world_size:
                    entry.unlink(missing_ok=True)
            unfinished = directory / "run.json.unfinished"
            unfinished.write_text(json.dumps({**self._describe(), "start_ns": self._start_ns}))
            unfinished.replace(directory / "run.json")
        return recorder

    def _describe(self) -> dict[str, Any]:
        """Returns what the metadata say of the run's origin."""
        job = (
            {"job": os.environ.get("TORCHELASTIC_RUN_ID", ""), "attempt": self._attempt}
            if self._attempt is not None
            else {}
        )
        return {
            **provenance.measured_run(self._world_size, self._backend, self._start_unix_ns),
            "run_id": self._board.run_id,
            **job,
        }

    def _find_clock_of_rank_0(self, patience: Callable[[], bool]) -> str | None:
        return find_place(self._keys, 0, patience).get("clock")

    def _agree_on_attempt(self, keys: Store) -> int:
        """Returns the number of this attempt of a job that is restarted, which rank 0 finds.

        The others wait until it enters.
        """
        if self._rank == 0:
            keys.put("attempt", str(find_attempt(self._given)).encode())
        deadline = time.monotonic() + WAIT_S
        found = keys.read("attempt", lambda: time.monotonic() < deadline)
        if found is None:
            raise RingError(
                f"rank 0 must enter a recorded block within {WAIT_S:.0f} s of the others where "
                "ranks may be restarted, got nothing from it "
                f"(rank {self._rank} of {self._world_size}). Let all ranks enter it at the same "
                "place."
            )
        self._attempt = int(found)
        return self._attempt

    def _begin_watch(self, recorder: Recorder) -> JoinedWatch | None:
        """Begins to watch for stuck ranks.

        On a file system without named pipes the block is recorded without a watch.
        """

        def keep_deaths(ranks: list[int]) -> None:  # in case no rank lives to write the file
            with contextlib.suppress(OSError):  # the disk may be full
                recorder.set_meta("deaths", find_ends(recorder.directory, ranks))

        try:
            watch = JoinedWatch(recorder, self._world_size, keep_deaths)
        except OSError as error:
            if self._rank == 0:
                recorder.set_meta("note", f"Nobody watched for stuck ranks: {error} (rank 0).")
            else:
                stay_unwatched(self._board.store, self._board.run_id, recorder.directory)
            return None
        recorder.on_failure = watch.on_failure
        return watch

    def _say_why(self, recorder: Recorder, error: BaseException, left: dict[str, Any]) -> None:
        """Writes into its part how this rank ends, in case rank 0 writes no file.

        One that lost a peer, or waited in vain, says whose.
        """
        ends = [left["end"]] if left["end"] is not None else []
        if left["lost"]:
            ends = find_culprits(recorder.directory, self._rank, self._world_size)
            for end in ends[:MOST_NOTES]:
                error.add_note(f"ringsim: rank {end['rank']} {end['about']}")
        if left["woken"] and (verdict := read_verdict(recorder.directory)) is not None:
            # ranks whose threads wait, and say nothing any more
            ends = [end for end in verdict.ends if end["rank"] not in verdict.waiting]
        if ends and self._own:
            with contextlib.suppress(OSError):  # the disk may be full
                recorder.set_meta("ends", ends)

    def _merge(
        self,
        directory: Path,
        said: dict[int, dict[str, Any]],
        late: list[int],
        others_do: list[dict[str, Any]],
        missing: list[str],
    ) -> bool:
        """Writes the file; returns whether the parts are complete.

        Args:
            directory: of the parts.
            said: by rank, what it announced as it left.
            late: ranks that announced nothing.
            others_do: what ranks were doing that had not left.
            missing: sentences on the parts that did not come.
        """
        parts = Parts(directory, self._world_size)
        firsts: dict[int, int] = {}
        for events in _read_inside(parts, said):
            if len(events):
                rank, post_ns = int(events.rank[0]), int(events.post_ns.min())
                firsts[rank] = min(post_ns, firsts.get(rank, post_ns))
        facts = parts.describe()
        clocks = facts.pop("clocks", [])
        # another rank may have begun before
        base_ns, moved, start_ns = find_start(firsts, clocks, self._start_ns)
        for rank, words in said.items():
            words["left"]["at_ns"] = reference_ns(clocks, rank, words["left"]["at_ns"])
        raised_ns = [words["left"]["at_ns"] for words in said.values() if words["left"]["raised"]]
        notes = [*facts["notes"], *missing, *(self._hosts.said if self._hosts is not None else ())]
        if late:
            notes.append(
                f"ranks {late} had not left the recorded block when rank 0 wrote what they had "
                "done by then."
            )
        metadata = {
            **facts,
            **self._describe(),
            "notes": notes,
            "complete": facts["complete"] and not late and not raised_ns and not missing,
            **({"clocks": moved} if moved else {}),
            **self._list_ends(directory, said, late, others_do, start_ns),
        }
        if late or raised_ns:  # ranks that still wait have waited until then
            metadata["end_ns"] = max(raised_ns if not late else [time.monotonic_ns()]) - start_ns
        inside = (count_from(events, base_ns) for events in share_tables(_read_inside(parts, said)))
        count = save_pieces(inside, metadata, self._path)
        self._saved, self._trace = True, load(self._path) if count <= MOST_KEPT else None
        return bool(facts["complete"]) and not late and not missing

    def _list_ends(
        self,
        directory: Path,
        said: dict[int, dict[str, Any]],
        late: list[int],
        others_do: list[dict[str, Any]],
        start_ns: int,
    ) -> dict[str, Any]:
        """Returns what the metadata say of how the ranks ended; see ``_merge``."""
        left = {rank: words["left"] for rank, words in said.items()}
        others = [
            *find_ends(directory, late),
            *find_told(directory, late, self._world_size),
            *(end for end in others_do if end["rank"] in late),
        ]
        ends, metadata = gather_ends(left, others, start_ns), dict[str, Any]()
        on_their_own = any(end["raised"] and not end["woken"] for end in left.values())
        woken = read_verdict(directory) if self._watch is not None and not on_their_own else None
        if woken is not None:  # what they did afterwards does not say why
            metadata["given_up_ns"] = woken.at_ns - start_ns
            stood = {end["rank"]: end for end in woken.ends}
            ends = [*stood.values(), *(end for end in ends if end["rank"] not in stood)]
        if ends:
            metadata["ends"] = ends
        return metadata

    def _collect_announcements(
        self, directory: Path, hurry: threading.Event, *, failed: bool
    ) -> tuple[dict[int, dict[str, Any]], list[int]]:
        """Returns what each rank announced, and the ranks that are dead or did not in time."""
        said: dict[int, dict[str, Any]] = {}
        late = []
        deadline = time.monotonic() + (WAIT_AFTER_ERROR_S if failed else WAIT_S)
        for rank in range(self._world_size):
            text = self._board.read(rank, 0.001)
            while (
                text is None and (left_s := deadline - time.monotonic()) > 0 and not hurry.is_set()
            ):
                # A rank that lives, and has written how it ends, is about to post.
                over = failed and is_gone(PartReader(directory, rank))
                text = self._board.read(rank, min(left_s, LOOK_S))
                if over:
                    break
            if text is None:
                late.append(rank)
                continue
            words = said[rank] = json.loads(text)
            if words["path"] != str(self._path):
                raise RingError(
                    f"the path of a recording must be the same on every rank, got {self._path} "
                    f"(rank 0) and {words['path']} "
                    f"(rank {rank} of {self._world_size}). Give an absolute path."
                )
        return said, late


def _read_inside(parts: Parts, said: Mapping[int, Mapping[str, Any]]) -> Iterator[Events]:
    """Yields what was posted within the block, some at a time: all may be more than memory holds.

    Args:
        parts: of the ranks.
        said: by rank, what it announced as it left; all that the others did counts.
    """
    for events in parts.read():
        rank = int(events.rank[0]) if len(events) else NONE
        first, last = said[rank]["span"] if rank in said else (0, math.inf)
        inside = (events.seq >= first) & (events.seq < last)
        within = events if inside.all() else events.select(inside)
        yield replace(within, seq=within.seq - first)


def parts_of(path: Path) -> Path:
    """Returns the directory of the parts of a trace file.

    Beside it, or in ``RINGSIM_PARTS``, on a disk of each host's own.
    """
    return Path(
        os.path.abspath(os.environ.get("RINGSIM_PARTS") or path.parent), f"{path.name}.parts"
    )


def number(path: Path, attempt: int) -> Path:
    """Returns the file of one attempt of a job.

    Example:
        >>> [str(number(Path("out/run.ringtrace"), attempt)) for attempt in range(3)]
        ['out/run.ringtrace', 'out/run.1.ringtrace', 'out/run.2.ringtrace']
    """
    return path.with_name(f"{path.stem}.{attempt}{path.suffix}") if attempt else path


@functools.cache  # a block that is repeated replaces the file of its own attempt
def find_attempt(path: Path) -> int:
    """Returns the first number of which no attempt has left a file, or parts."""
    tried = (number(path, attempt) for attempt in itertools.count())
    return next(
        attempt
        for attempt, file in enumerate(tried)
        if not file.exists() and not parts_of(file).exists()
    )


def tell_end(rank: int, error: BaseException | None) -> dict[str, Any]:
    """Describes how this rank leaves its block, as plain data for JSON.

    Returns:
        "at_ns": when, on CLOCK_MONOTONIC; "raised": whether an exception ended it; "woken": whether
        that is a watcher's; "lost": whether it only says that a peer is gone; "end": how the rank
        ended, as a trace keeps it for ``explain``, None if it did not fail.

    Example:
        >>> end = tell_end(1, ValueError("no such layer"))["end"]
        >>> end["state"], end["about"]
        ('failed', 'raised ValueError: no such layer')
    """
    if error is None or isinstance(error, KeyboardInterrupt):
        return {
            "at_ns": time.monotonic_ns(),
            "raised": error is not None,
            "woken": False,
            "lost": False,
            "end": None,
        }
    report = report_exception(rank, error)
    return {
        "at_ns": time.monotonic_ns(),
        "raised": True,
        "woken": isinstance(error, RingError) and error.imposed,
        "lost": report.is_consequence and not isinstance(error, RingError),
        "end": readable(describe_end(report), lines=True),
    }


def find_ends(directory: Path, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Finds out how some ranks left the block.

    From what each wrote or because its process on this machine is gone.

    Returns:
        How they ended, as a trace keeps it for ``explain``; nothing for ranks still in the block or
        on another machine.
    """
    ends = []
    for rank in ranks if has_proc() else ():
        part = PartReader(directory, rank)
        gone = is_gone(part)
        part.read_names()  # what it wrote before it was gone
        said = [end for end in part.meta.get("ends", ()) if end["rank"] == rank]
        if said:
            ends += said
        elif "end_ns" in part.meta:  # by itself, or because it lost a peer: then it says which
            ends += [] if "ends" in part.meta else [_left(rank)]
        elif gone:
            about = "died within the recorded block, by a signal or os._exit(): its process is gone"
            ends.append({"rank": rank, "state": "killed", "about": about, "error": ""})
    return ends


def is_gone(part: PartReader) -> bool:
    """Returns whether the process that wrote a part has ended; False for another machine's."""
    part.read_names()
    pid = part.meta.get("pid")
    if pid is None or part.meta.get("host") != socket.gethostname() or not has_proc():
        return False
    process = look_at(pid)
    return process is None or process.state in "ZX"


def find_told(directory: Path, ranks: Sequence[int], world_size: int) -> list[dict[str, Any]]:
    """Returns what other ranks wrote of the ends of some.

    Of one on another machine they alone may know.
    """
    metas = {}
    for rank in range(world_size):
        part = PartReader(directory, rank)
        part.read_names()
        metas[rank] = part.meta
    return [
        end for end in told_ends(metas) if end["rank"] in ranks and end.get("state") != "running"
    ]


def find_culprits(directory: Path, rank: int, world_size: int) -> list[dict[str, Any]]:
    """Returns the ends of the ranks that may have been the peer that a rank lost.

    See ``find_ends``.
    """
    ends = find_ends(directory, [other for other in range(world_size) if other != rank])
    return [end for end in ends if not _has_left(end)] or ends


def _left(rank: int) -> dict[str, Any]:
    about = "has left the recorded block"
    return {"rank": rank, "state": "exited", "about": about, "error": "", "how": LEFT_BLOCK}


def _has_left(end: Mapping[str, Any]) -> bool:
    return end.get("how") == LEFT_BLOCK


def gather_ends(
    said: Mapping[int, Mapping[str, Any]], others: Sequence[Mapping[str, Any]], start_ns: int
) -> list[dict[str, Any]]:
    """Combines what each rank said (``tell_end``) with how the others ended.

    By rank, for a trace's metadata. A rank that left without an error is listed only if another
    rank lost a peer: otherwise it may still do what others wait for.

    Example:
        >>> (end,) = gather_ends(
        ...     {
        ...         0: {"raised": True, "lost": True, "end": None},
        ...         1: {"raised": False, "lost": False, "end": None},
        ...     },
        ...     [],
        ...     0,
        ... )
        >>> end["rank"], end["state"], end["about"]
        (1, 'exited', 'has left the recorded block')
    """
    lost = any(words["lost"] for words in said.values())
    ends = [
        {**words["end"], "at_ns": words["at_ns"] - start_ns}
        for words in said.values()
        if words["end"] is not None
    ]
    if lost:
        ends += [_left(rank) for rank, words in said.items() if not words["raised"]]
    by_rank = {int(end["rank"]): end for end in ends}
    # A rank that was at work a moment ago was killed because of the others.
    for end in sorted(others, key=lambda end: bool(end["state"] == "killed")):
        if lost or not _has_left(end):
            by_rank.setdefault(int(end["rank"]), dict(end))
    return [by_rank[rank] for rank in sorted(by_rank)]


@contextmanager
def hold_back_sigterm() -> Iterator[threading.Event]:
    """Puts off a SIGTERM until the end of the block.

    Yields an event that is set when the signal comes. As soon as one rank has failed, a launcher
    such as torchrun sends it to the others: just when the trace that tells why is being written.
    """
    came = threading.Event()
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield came  # no handler may be set here, or the old one could not be restored
        return
    signal.signal(signal.SIGTERM, lambda *_: came.set())
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)
        if came.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
