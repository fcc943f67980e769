"""Reading archives of OTF2, those of ringsim and those that Score-P made of MPI programs; needs the package ``otf2``."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ringsim.errors import TraceFileError
from ringsim.exchange.foreign import reading
from ringsim.exchange.otf2_writing import ARCHIVE, COLLECTIVES, check_installed
from ringsim.exchange.rows import Rows
from ringsim.traces.events import ANY_SOURCE, IN_FLIGHT, NONE, OK, Group, Payload

if TYPE_CHECKING:
    from os import PathLike

    from ringsim.traces.value import Trace

__all__ = ["read_otf2"]

_OPS: Final = {name: op for op, name in reversed(COLLECTIVES.items()) if op != "new_group"}  # of two operations the plainer one
_SAME: Final = {"GATHERV": "GATHER", "SCATTERV": "SCATTER", "ALLGATHERV": "ALLGATHER", "ALLTOALLV": "ALLTOALL", "ALLTOALLW": "ALLTOALL",
                "REDUCE_SCATTER_BLOCK": "REDUCE_SCATTER"}  # fmt: skip


@dataclass
class _Place:
    """Where one location is: the regions that it has entered and not left, and what was posted in them."""

    rank: int
    thread: int
    regions: list[tuple[Any, int, dict[str, int]]] = field(default_factory=list)
    open: list[dict[str, Any]] = field(default_factory=list)  # blocking calls that end with the region


def read_otf2(directory: str | PathLike[str]) -> Trace:
    """Reads an archive of OTF2.

    Messages of MPI become sends and recvs, collectives of MPI collectives, and the other regions spans: with the archives of Score-P every
    function that it was told to measure. A message was waited for from the moment at which the region was entered in which it was over.

    The package's own library, in C, does the reading: archives of strangers are better read where nothing else is at stake.

    Args:
        directory: the archive, which holds ``traces.otf2``; or that file.

    Returns:
        The trace.

    Raises:
        ArgumentError: the package otf2 is not installed.
        TraceFileError: there is no archive, or it is damaged.

    Source:
        The OTF2 manual, see ``ringsim.exchange.otf2_writing``.
    """
    check_installed()
    import _otf2  # whose errors the package lets through as they are
    import otf2

    anchor = Path(os.fsdecode(directory))
    anchor = anchor / f"{ARCHIVE}.otf2" if anchor.is_dir() else anchor
    if not anchor.is_file():
        raise TraceFileError(f"An OTF2 archive must be there, got {anchor}. Name its directory, or the file that ends in .otf2.")
    with reading(anchor, "an OTF2 archive"):
        try:
            with otf2.reader.open(str(anchor)) as archive:
                return _Reader(archive).read()
        except (otf2.error.Error, _otf2.Error) as error:
            raise ValueError(f"otf2 says: {error}") from error


class _Reader:
    """An archive that is being read."""

    def __init__(self, archive: Any) -> None:
        import otf2

        self._otf2, self._archive, self._rows = otf2, archive, Rows()
        self._scale = 1e9 / archive.timer_resolution
        self._ranks = self._find_ranks()
        self._threads: dict[int, int] = {}
        self._places: dict[Any, _Place] = {}
        self._posted: dict[tuple[int, int], dict[str, Any]] = {}  # (rank, request): what waits to be over
        self._groups: dict[Any, Group] = {}

    def _find_ranks(self) -> dict[Any, int]:
        """Returns the rank of each process: the order of MPI where it is told, else that of the archive."""
        kinds = self._otf2.GroupType
        for group in self._archive.definitions.groups:
            if group.group_type == kinds.COMM_LOCATIONS and group.paradigm == self._otf2.Paradigm.MPI:
                return {location.group: rank for rank, location in enumerate(group.members)}
        return {group: rank for rank, group in enumerate(self._archive.definitions.location_groups)}

    def read(self) -> Trace:
        """Returns the trace."""
        for location, event in self._archive.events:
            if location.group in self._ranks:
                take = getattr(self, f"_take_{type(event).__name__}", None)
                if take is not None:
                    take(self._place(location), event, round(event.time * self._scale))
        for place in self._places.values():
            for region, since, told in place.regions:
                self._add_span(place, region, since, NONE, told)
            for posted in place.open:
                self._add(posted, NONE, NONE)
        for posted in self._posted.values():
            self._add(posted, NONE, NONE)
        source = next((str(one.value) for one in self._archive.definitions.system_tree_node_properties if one.name == "ringsim source"), "")
        notes = ["imported from OTF2"]
        return self._rows.trace({"world_size": len(self._ranks), "source": source or "measured", "notes": notes})

    def _place(self, location: Any) -> _Place:
        if location not in self._places:
            rank = self._ranks[location.group]
            thread = self._threads[rank] = self._threads.get(rank, NONE) + 1
            self._places[location] = _Place(rank, thread)
        return self._places[location]

    # -- regions

    def _take_Enter(self, place: _Place, event: Any, time: int) -> None:  # noqa: N802  # the names of OTF2's events
        told = {
            attribute.name: int(value) for attribute, value in (event.attributes or {}).items() if attribute.name in ("stage", "microbatch")
        }
        place.regions.append((event.region, time, told))

    def _take_Leave(self, place: _Place, event: Any, time: int) -> None:  # noqa: N802
        if not place.regions:
            return
        region, since, told = place.regions.pop()
        for posted in [one for one in place.open if one["depth"] > len(place.regions)]:
            place.open.remove(posted)
            self._add(posted, posted["post_ns"], time)
        self._add_span(place, region, since, time, told)

    def _add_span(self, place: _Place, region: Any, since: int, until: int, told: dict[str, int]) -> None:
        if region.paradigm == self._otf2.Paradigm.MPI:
            return
        if region.region_role == self._otf2.RegionRole.ARTIFICIAL:
            self._rows.add(place.rank, "mark", since, label=region.name, thread=place.thread, **told)
            return
        status = OK if until != NONE else IN_FLIGHT
        self._rows.add(place.rank, "span", since, label=region.name, done_ns=until, status=status, thread=place.thread, **told)

    # -- messages and collectives

    def _posted_here(self, place: _Place, time: int, op: str, **columns: Any) -> dict[str, Any]:
        told = place.regions[-1][2] if place.regions else {}
        return {"rank": place.rank, "thread": place.thread, "op": op, "post_ns": time, **told, **columns}

    def _message(self, comm: Any, peer: int, tag: int, size_bytes: int) -> dict[str, Any]:
        group = self._group(comm)
        if not 0 <= peer < len(group.ranks):
            raise ValueError(f"a message is from or to {peer} of {len(group.ranks)}")
        tag = tag - 2**32 if tag >= 2**31 else tag
        return {"group": group, "peer": group.ranks[peer], "tag": tag, "payload": Payload("", (), size_bytes)}

    def _group(self, comm: Any) -> Group:
        if comm not in self._groups:
            members = tuple(self._ranks[location.group] for location in comm.group.members)
            self._groups[comm] = Group(comm.name, members)
        return self._groups[comm]

    def _add(self, posted: dict[str, Any], wait: int, done: int) -> None:
        columns = {key: value for key, value in posted.items() if key not in ("rank", "op", "post_ns", "depth")}
        status = OK if done != NONE else IN_FLIGHT
        self._rows.add(posted["rank"], posted["op"], posted["post_ns"], wait_ns=wait, done_ns=done, status=status, **columns)

    def _over(self, place: _Place, request: int, time: int, **columns: Any) -> None:
        posted = self._posted.pop((place.rank, request), None)
        if posted is not None:
            since = place.regions[-1][1] if place.regions else time
            self._add({**posted, **columns}, max(since, posted["post_ns"]), time)

    def _take_MpiIsend(self, place: _Place, event: Any, time: int) -> None:  # noqa: N802
        columns = self._message(event.communicator, event.receiver, event.msg_tag, event.msg_length)
        self._posted[place.rank, event.request_id] = self._posted_here(place, time, "isend", **columns)

    def _take_MpiIsendComplete(self, place: _Place, event: Any, time: int) -> None:  # noqa: N802
        self._over(place, event.request_id, time)

    def _take_MpiIrecvRequest(self, place: _Place, event: Any, time: int) -> None:  # noqa: N802
        self._posted[place.rank, event.request_id] = self._posted_here(place, time, "irecv", peer=ANY_SOURCE)

    def _take_MpiIrecv(self, place: _Place, event: Any, time: int) -> None:  # noqa: N802
        self._over(place, event.request_id, time, **self._message(event.communicator, event.sender, event.msg_tag, event.msg_length))

    def _take_MpiSend(self, place: _Place, event: Any, time: int) -> None:  # noqa: N802
        columns = self._message(event.communicator, event.receiver, event.msg_tag, event.msg_length)
        since = place.regions[-1][1] if place.regions else time
        place.open.append({**self._posted_here(place, since, "send", **columns), "depth": len(place.regions)})

    def _take_MpiRecv(self, place: _Place, event: Any, time: int) -> None:  # noqa: N802
        columns = self._message(event.communicator, event.sender, event.msg_tag, event.msg_length)
        since = place.regions[-1][1] if place.regions else time
        self._add(self._posted_here(place, since, "recv", **columns), since, time)

    def _take_MpiCollectiveBegin(self, place: _Place, event: Any, time: int) -> None:  # noqa: N802
        self._posted[place.rank, NONE - place.thread] = self._posted_here(place, time, "barrier")

    def _take_MpiCollectiveEnd(self, place: _Place, event: Any, time: int) -> None:  # noqa: N802
        self._take_collective(place, event, time, NONE - place.thread)

    def _take_NonBlockingCollectiveRequest(self, place: _Place, event: Any, time: int) -> None:  # noqa: N802
        self._posted[place.rank, event.request_id] = self._posted_here(place, time, "barrier")

    def _take_NonBlockingCollectiveComplete(self, place: _Place, event: Any, time: int) -> None:  # noqa: N802
        self._take_collective(place, event, time, event.request_id)

    def _take_collective(self, place: _Place, event: Any, time: int, request: int) -> None:
        name = str(event.collective_op).rpartition(".")[2]
        op = _OPS.get(_SAME.get(name, name))
        if op is None:  # the making and freeing of communicators and windows, scans
            self._posted.pop((place.rank, request), None)
            return
        group = self._group(event.communicator)
        root = group.ranks[event.root] if 0 <= event.root < len(group.ranks) else NONE
        size = _whole(op, event.size_sent, event.size_received, len(group.ranks))
        self._over(place, request, time, op=op, group=group, peer=root, payload=Payload("", (), size))


def _whole(op: str, sent: int, received: int, ranks: int) -> int:
    """Returns the S of ``ringsim.costs`` from what one rank sends and receives."""
    if op == "gather":
        return max(sent * ranks, received)
    if op == "scatter":
        return max(sent, received * ranks)
    return max(sent, received)
