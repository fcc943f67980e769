"""OTF2, the archives of Score-P, which Vampir and Scalasca open.

Needs the package ``otf2`` (``pip install 'ringsim[otf2]'``). A rank is a process, a thread of it a
location. What has a length is a region that is entered and left; messages are MPI's::

    enter isend | MpiIsend | leave  ...  enter wait isend | MpiIsendComplete | leave  posted here, waited for there
    enter send  | MpiIsend | ...                          | MpiIsendComplete | leave  waited for at once

Source:
    "Open Trace Format 2 - User manual", https://perftools.pages.jsc.fz-juelich.de/cicd/otf2/
"""  # noqa: E501

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ringsim.errors import ArgumentError, TraceFileError
from ringsim.exchange.reading import Rows, reading
from ringsim.exchange.slices import Row, list_rows, make_name, on_lanes, place_nested, unfold
from ringsim.traces.events import (
    ANY_SOURCE,
    COLLECTIVE,
    IN_FLIGHT,
    MARK,
    NONE,
    OK,
    OP_NAMES,
    OPS,
    RECV,
    SEND,
    SPAN,
    Group,
    Payload,
)

if TYPE_CHECKING:
    from os import PathLike

    from ringsim.traces.value import Trace

__all__ = ["ARCHIVE", "COLLECTIVES", "check_installed", "read_otf2", "to_otf2"]

ARCHIVE: Final = "traces"
# CollectiveOp by what the names of torch's operations begin with; the first that fits.
COLLECTIVES: Final = {
    "all_reduce": "ALLREDUCE", "reduce_scatter": "REDUCE_SCATTER", "all_gather": "ALLGATHER",
    "all_to_all": "ALLTOALL", "reduce": "REDUCE",
    "gather": "GATHER", "scatter": "SCATTER", "broadcast": "BCAST", "barrier": "BARRIER",
    "monitored_barrier": "BARRIER",
    "new_group": "CREATE_HANDLE",
}  # fmt: skip

_Say = Callable[[Any, int], None] | None


@dataclass(frozen=True)
class _Stay:
    """A stay in a region: from when to when, and the events to write on entering and on leaving."""

    start_ns: int
    end_ns: float
    region: Any
    told: dict[Any, int]
    entering: _Say = None
    leaving: _Say = None


def check_installed() -> None:
    """Raises ArgumentError where the package otf2 is not installed."""
    if importlib.util.find_spec("otf2") is None:
        raise ArgumentError(
            "The package otf2 must be installed to read and write OTF2, got none. Run: pip "
            "install 'ringsim[otf2]'."
        )


def to_otf2(trace: Trace, directory: str | PathLike[str]) -> None:
    """Writes a trace as an archive of OTF2, for Vampir, Scalasca and other tools.

    Source lines, dtypes and shapes are left out, and so are sends and recvs whose group is unknown.
    ``ringsim.exchange.read_otf2`` reads it back.

    Args:
        trace: any trace.
        directory: the archive; must not exist yet.

    Raises:
        ArgumentError: the package otf2 is not installed.
        TraceFileError: the archive cannot be written, or exists already.

    Source:
        The OTF2 manual, see the module.
    """
    check_installed()
    import _otf2  # whose errors the package lets through as they are
    import otf2

    try:
        os.makedirs(directory)  # whoever else writes here would end up in the same archive
    except (OSError, ValueError) as error:
        raise TraceFileError(
            "The directory of an OTF2 archive must be new and writable, got "
            f"{os.fsdecode(directory)}: {error}. Choose another."
        ) from error
    try:
        with otf2.writer.open(
            os.fsdecode(directory), archive_name=ARCHIVE, timer_resolution=10**9
        ) as archive:
            _Archive(archive, trace).write()
    except (OSError, otf2.error.Error, _otf2.Error) as error:
        raise TraceFileError(
            f"The directory of an OTF2 archive must be writable, got {os.fsdecode(directory)}: "
            f"{error}."
        ) from error


class _Archive:
    def __init__(self, archive: Any, trace: Trace) -> None:
        import otf2

        self._otf2, self._archive, self._trace = otf2, archive, trace
        self._rows, self._tables = list_rows(trace.events), trace.events.tables
        define = archive.definitions
        machine = define.system_tree_node("machine")
        source = str(trace.metadata.get("source", "of unknown source"))
        define.system_tree_node_property(machine, "ringsim source", otf2.Type.STRING, source)
        self._processes = [
            define.location_group(f"rank {rank}", system_tree_parent=machine)
            for rank in range(trace.world_size)
        ]
        self._masters = [define.location("thread 0", group=process) for process in self._processes]
        kinds = {"paradigm": otf2.Paradigm.MPI}
        define.group(
            "ranks", group_type=otf2.GroupType.COMM_LOCATIONS, members=self._masters, **kinds
        )
        self._comms = {}
        for number, group in enumerate(self._tables.groups):
            if group.ranks and max(group.ranks) < trace.world_size:
                members = [self._masters[rank] for rank in group.ranks]
                made = define.group(
                    group.name, group_type=otf2.GroupType.COMM_GROUP, members=members, **kinds
                )
                self._comms[number] = define.comm(group.name, made)
        self._attributes = {
            name: define.attribute(name, name, otf2.Type.INT64) for name in ("stage", "microbatch")
        }

    def write(self) -> None:
        """Writes all events."""
        by_thread: dict[tuple[int, int], list[_Stay]] = {}
        for number, row in enumerate(self._rows):
            by_thread.setdefault((row.rank, row.thread), []).extend(self._stays(number, row))
        for (rank, thread), stays in by_thread.items():
            for lane, placed in on_lanes(stays, place_nested):
                self._write_lane(self._location(rank, thread, lane), placed)

    def _location(self, rank: int, thread: int, lane: int) -> Any:
        if thread == 0 and lane == 0:
            return self._masters[rank]
        name = f"thread {thread}" + (f" ({lane + 1})" if lane else "")
        return self._archive.definitions.location(name, group=self._processes[rank])

    def _write_lane(self, location: Any, stays: list[_Stay]) -> None:
        writer = self._archive.event_writer_from_location(location)
        for place, begins in unfold(
            [stay.start_ns for stay in stays], [stay.end_ns for stay in stays]
        ):
            stay = stays[place]
            if begins:
                writer.enter(stay.start_ns, stay.region, attributes=stay.told)
                if stay.entering is not None:
                    stay.entering(writer, stay.start_ns)
            else:
                if stay.leaving is not None:
                    stay.leaving(writer, int(stay.end_ns))
                writer.leave(int(stay.end_ns), stay.region)

    def _region(self, name: str, kind: int) -> Any:
        roles, paradigms = self._otf2.RegionRole, self._otf2.Paradigm
        role = {SPAN: roles.CODE, MARK: roles.ARTIFICIAL, COLLECTIVE: roles.COLL_OTHER}.get(
            kind, roles.POINT2POINT
        )
        return self._archive.definitions.region(
            name,
            region_role=role,
            paradigm=paradigms.USER if kind in (SPAN, MARK) else paradigms.MPI,
        )

    def _stays(self, number: int, row: Row) -> list[_Stay]:
        """Returns the regions that one event stands for."""
        op, kind = OPS[row.op]
        told = {
            attribute: getattr(row, name)
            for name, attribute in self._attributes.items()
            if getattr(row, name) != NONE
        }
        end = math.inf if row.done_ns == NONE else max(row.done_ns, row.post_ns)
        if kind in (SPAN, MARK):
            region = self._region(make_name(row, self._tables) or op, kind)
            return [_Stay(row.post_ns, row.post_ns if kind == MARK else end, region, told)]
        if row.group not in self._comms or (kind != COLLECTIVE and not self._is_known(row)):
            return []
        entering, leaving = self._says(number, row, kind)
        region = self._region(op, kind)
        if row.wait_ns == row.post_ns:
            return [_Stay(row.post_ns, end, region, told, entering, leaving)]
        stays = [_Stay(row.post_ns, row.post_ns, region, told, entering)]
        if row.wait_ns != NONE or end != math.inf:
            wait = row.wait_ns if row.wait_ns != NONE and row.wait_ns <= end else end
            stays.append(
                _Stay(int(wait), end, self._region(f"wait {op}", kind), told, None, leaving)
            )
        return stays

    def _is_known(self, row: Row) -> bool:
        return row.peer in self._tables.groups[row.group].ranks or (
            row.peer == ANY_SOURCE and row.done_ns == NONE
        )

    def _says(self, number: int, row: Row, kind: int) -> tuple[_Say, _Say]:
        """Returns the events to write when an operation is posted, and when it is over."""
        comm, group = self._comms[row.group], self._tables.groups[row.group]
        size = max(self._tables.payloads[row.payload].size_bytes, 0) if row.payload != NONE else 0
        peer = (
            group.ranks.index(row.peer)
            if row.peer in group.ranks
            else self._otf2.Undefined.UINT32.value
        )
        tag = row.tag % 2**32
        if kind == SEND:
            return (
                lambda writer, time: writer.mpi_isend(time, peer, comm, tag, size, number),
                lambda writer, time: writer.mpi_isend_complete(time, number),
            )
        if kind == RECV:
            return (
                lambda writer, time: writer.mpi_irecv_request(time, number),
                lambda writer, time: writer.mpi_irecv(time, peer, comm, tag, size, number),
            )
        name = OP_NAMES[row.op]
        code = getattr(
            self._otf2.CollectiveOp,
            next(
                (made for begin, made in COLLECTIVES.items() if name.startswith(begin)), "BARRIER"
            ),
        )
        sent, received = _share(name, row.rank == row.peer, size, len(group.ranks))
        return (
            lambda writer, time: writer.non_blocking_collective_request(time, number),
            lambda writer, time: writer.non_blocking_collective_complete(
                time, code, comm, peer, sent, received, number
            ),
        )


def _share(op: str, is_root: bool, size: int, ranks: int) -> tuple[int, int]:
    """Returns how many bytes one rank sends and receives in a collective.

    As MPI counts a rank's own buffers.
    """
    part = size // ranks
    if op.startswith("all_gather"):
        return part, size
    if op.startswith("reduce_scatter"):
        return size, part
    if op == "gather":
        return part, size if is_root else 0
    if op == "scatter":
        return size if is_root else 0, part
    if op == "broadcast":
        return (size, 0) if is_root else (0, size)
    if op == "reduce":
        return (size, size) if is_root else (size, 0)
    return size, size


# of two operations the plainer one
_OPS: Final = {name: op for op, name in reversed(COLLECTIVES.items()) if op != "new_group"}
_SAME: Final = {"GATHERV": "GATHER", "SCATTERV": "SCATTER", "ALLGATHERV": "ALLGATHER",
                "ALLTOALLV": "ALLTOALL", "ALLTOALLW": "ALLTOALL",
                "REDUCE_SCATTER_BLOCK": "REDUCE_SCATTER"}  # fmt: skip


@dataclass
class _Place:
    """The state of one location.

    The regions that it has entered and not left, and what was posted in them.
    """

    rank: int
    thread: int
    regions: list[tuple[Any, int, dict[str, int]]] = field(default_factory=list)
    # blocking calls that end with the region
    open: list[dict[str, Any]] = field(default_factory=list)


def read_otf2(directory: str | PathLike[str]) -> Trace:
    """Reads an archive of OTF2.

    MPI's messages become sends and recvs, its collectives collectives, and other regions spans: in
    archives of Score-P, every function that it was told to measure. A message counts as waited for
    from when the region in which it completed was entered.

    The package's own C library does the reading: read strangers' archives in a process that holds
    nothing of value.

    Args:
        directory: the archive, which holds ``traces.otf2``; or that file.

    Returns:
        The trace.

    Raises:
        ArgumentError: the package otf2 is not installed.
        TraceFileError: there is no archive, or it is damaged.

    Source:
        The OTF2 manual, see ``ringsim.exchange.otf2``.
    """
    check_installed()
    import _otf2  # whose errors the package lets through as they are
    import otf2

    anchor = Path(os.fsdecode(directory))
    anchor = anchor / f"{ARCHIVE}.otf2" if anchor.is_dir() else anchor
    if not anchor.is_file():
        raise TraceFileError(
            f"An OTF2 archive must exist, got {anchor}. Name its directory, or the file that "
            "ends in .otf2."
        )
    with reading(anchor, "an OTF2 archive"):
        try:
            with otf2.reader.open(str(anchor)) as archive:
                return _Reader(archive).read()
        except (otf2.error.Error, _otf2.Error) as error:
            raise ValueError(f"otf2 says: {error}") from error


class _Reader:
    def __init__(self, archive: Any) -> None:
        import otf2

        self._otf2, self._archive, self._rows = otf2, archive, Rows()
        self._scale = 1e9 / archive.timer_resolution
        self._ranks = self._find_ranks()
        self._threads: dict[int, int] = {}
        self._places: dict[Any, _Place] = {}
        # (rank, request): what waits to be over
        self._posted: dict[tuple[int, int], dict[str, Any]] = {}
        self._groups: dict[Any, Group] = {}

    def _find_ranks(self) -> dict[Any, int]:
        """Returns the rank of each process.

        MPI's order where the archive has it, else the archive's own.
        """
        kinds = self._otf2.GroupType
        for group in self._archive.definitions.groups:
            if (
                group.group_type == kinds.COMM_LOCATIONS
                and group.paradigm == self._otf2.Paradigm.MPI
            ):
                return {location.group: rank for rank, location in enumerate(group.members)}
        return {group: rank for rank, group in enumerate(self._archive.definitions.location_groups)}

    def read(self) -> Trace:
        """Returns the trace."""
        for location, event in self._archive.events:
            if location.group in self._ranks:
                self._take(self._place(location), event, round(event.time * self._scale))
        for place in self._places.values():
            for region, since, told in place.regions:
                self._add_span(place, region, since, NONE, told)
            for posted in place.open:
                self._add(posted, NONE, NONE)
        for posted in self._posted.values():
            self._add(posted, NONE, NONE)
        source = next(
            (
                str(one.value)
                for one in self._archive.definitions.system_tree_node_properties
                if one.name == "ringsim source"
            ),
            "",
        )
        notes = ["imported from OTF2"]
        return self._rows.trace(
            {"world_size": len(self._ranks), "source": source or "measured", "notes": notes}
        )

    def _place(self, location: Any) -> _Place:
        if location not in self._places:
            rank = self._ranks[location.group]
            thread = self._threads[rank] = self._threads.get(rank, NONE) + 1
            self._places[location] = _Place(rank, thread)
        return self._places[location]

    def _take(self, place: _Place, event: Any, time: int) -> None:
        """Takes in an event by the name that OTF2 gives its kind.

        Others are of no interest here.
        """
        since = place.regions[-1][1] if place.regions else time
        # of blocking collectives a thread has one at a time
        request = place.rank, getattr(event, "request_id", NONE - place.thread)
        match type(event).__name__:
            case "Enter":
                known = (event.attributes or {}).items()
                told = {
                    one.name: int(value)
                    for one, value in known
                    if one.name in ("stage", "microbatch")
                }
                place.regions.append((event.region, time, told))
            case "Leave" if place.regions:
                region, since, told = place.regions.pop()
                for posted in [one for one in place.open if one["depth"] > len(place.regions)]:
                    place.open.remove(posted)
                    self._add(posted, posted["post_ns"], time)
                self._add_span(place, region, since, time, told)
            case "MpiIsend":
                self._posted[request] = self._posted_here(
                    place, time, "isend", **self._message(event, event.receiver)
                )
            case "MpiIrecvRequest":
                self._posted[request] = self._posted_here(place, time, "irecv", peer=ANY_SOURCE)
            case "MpiCollectiveBegin" | "NonBlockingCollectiveRequest":
                self._posted[request] = self._posted_here(place, time, "barrier")
            case "MpiIsendComplete":
                self._over(place, request, time)
            case "MpiIrecv":
                self._over(place, request, time, **self._message(event, event.sender))
            case "MpiCollectiveEnd" | "NonBlockingCollectiveComplete":
                self._take_collective(place, event, time, request)
            case "MpiSend":
                posted = self._posted_here(
                    place, since, "send", **self._message(event, event.receiver)
                )
                place.open.append({**posted, "depth": len(place.regions)})
            case "MpiRecv":
                self._add(
                    self._posted_here(place, since, "recv", **self._message(event, event.sender)),
                    since,
                    time,
                )

    def _add_span(
        self, place: _Place, region: Any, since: int, until: int, told: dict[str, int]
    ) -> None:
        if region.paradigm == self._otf2.Paradigm.MPI:
            return
        if region.region_role == self._otf2.RegionRole.ARTIFICIAL:
            self._rows.add(
                place.rank, "mark", since, label=region.name, thread=place.thread, **told
            )
            return
        status = OK if until != NONE else IN_FLIGHT
        self._rows.add(
            place.rank,
            "span",
            since,
            label=region.name,
            done_ns=until,
            status=status,
            thread=place.thread,
            **told,
        )

    def _posted_here(self, place: _Place, time: int, op: str, **columns: Any) -> dict[str, Any]:
        told = place.regions[-1][2] if place.regions else {}
        return {
            "rank": place.rank,
            "thread": place.thread,
            "op": op,
            "post_ns": time,
            **told,
            **columns,
        }

    def _message(self, event: Any, peer: int) -> dict[str, Any]:
        group, tag = self._group(event.communicator), event.msg_tag
        if not 0 <= peer < len(group.ranks):
            raise ValueError(f"a message is from or to {peer} of {len(group.ranks)}")
        tag = tag - 2**32 if tag >= 2**31 else tag
        return {
            "group": group,
            "peer": group.ranks[peer],
            "tag": tag,
            "payload": Payload("", (), event.msg_length),
        }

    def _group(self, comm: Any) -> Group:
        if comm not in self._groups:
            members = tuple(self._ranks[location.group] for location in comm.group.members)
            self._groups[comm] = Group(comm.name, members)
        return self._groups[comm]

    def _add(self, posted: dict[str, Any], wait: int, done: int) -> None:
        columns = {
            key: value
            for key, value in posted.items()
            if key not in ("rank", "op", "post_ns", "depth")
        }
        status = OK if done != NONE else IN_FLIGHT
        self._rows.add(
            posted["rank"],
            posted["op"],
            posted["post_ns"],
            wait_ns=wait,
            done_ns=done,
            status=status,
            **columns,
        )

    def _over(self, place: _Place, request: tuple[int, int], time: int, **columns: Any) -> None:
        posted = self._posted.pop(request, None)
        if posted is not None:
            since = place.regions[-1][1] if place.regions else time
            self._add({**posted, **columns}, max(since, posted["post_ns"]), time)

    def _take_collective(
        self, place: _Place, event: Any, time: int, request: tuple[int, int]
    ) -> None:
        name = str(event.collective_op).rpartition(".")[2]
        op = _OPS.get(_SAME.get(name, name))
        if op is None:  # the making and freeing of communicators and windows, scans
            self._posted.pop(request, None)
            return
        group = self._group(event.communicator)
        root = group.ranks[event.root] if 0 <= event.root < len(group.ranks) else NONE
        size = _whole(op, event.size_sent, event.size_received, len(group.ranks))
        self._over(
            place, request, time, op=op, group=group, peer=root, payload=Payload("", (), size)
        )


def _whole(op: str, sent: int, received: int, ranks: int) -> int:
    """Returns the S of ``ringsim.traces.collectives`` from what one rank sends and receives."""
    if op == "gather":
        return max(sent * ranks, received)
    if op == "scatter":
        return max(sent, received * ranks)
    return max(sent, received)
