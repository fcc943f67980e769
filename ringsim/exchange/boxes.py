"""Slices of files that ringsim did not write: each process becomes a rank, each slice a span, each instant a mark."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from ringsim.exchange.rows import Rows
from ringsim.traces.events import IN_FLIGHT, NONE, OK
from ringsim.traces.value import Trace

__all__ = ["Boxes"]


class Boxes:
    """Slices gathered lane by lane; what began last on a lane ends first.

    Args:
        source: the format that they come from, for the metadata.

    Example:
        >>> boxes = Boxes("Perfetto")
        >>> boxes.begin("lane", "outer", 100)
        >>> boxes.begin("lane", "inner", 200)
        >>> boxes.end("lane", 300)
        >>> trace = boxes.trace({"lane": 4711})
        >>> trace.events.tables.labels, trace.events.done_ns.tolist()
        (('outer', 'inner'), [-1, 200])
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self.lanes: dict[Hashable, list[tuple[str, str, int, int]]] = {}  # (op, name, begin, end or NONE)
        self._open: dict[Hashable, list[int]] = {}

    def begin(self, lane: Hashable, name: str, start_ns: int) -> None:
        """Begins a slice."""
        slices = self.lanes.setdefault(lane, [])
        self._open.setdefault(lane, []).append(len(slices))
        slices.append(("span", name, start_ns, NONE))

    def end(self, lane: Hashable, end_ns: int) -> None:
        """Ends the slice that began last; nothing where none is open, as at the start of a cut file."""
        if not self._open.get(lane):
            return
        slices = self.lanes[lane]
        index = self._open[lane].pop()
        slices[index] = (*slices[index][:3], end_ns)

    def whole(self, lane: Hashable, name: str, start_ns: int, end_ns: int) -> None:
        """Adds a slice whose end is known."""
        self.lanes.setdefault(lane, []).append(("span", name, start_ns, end_ns))

    def mark(self, lane: Hashable, name: str, time_ns: int) -> None:
        """Adds an instant."""
        self.lanes.setdefault(lane, []).append(("mark", name, time_ns, NONE))

    def trace(self, processes: Mapping[Hashable, int]) -> Trace:
        """Returns the trace.

        Args:
            processes: the process of each lane; ranks are numbered in their order.

        Raises:
            ValueError: there is nothing, or nothing that can be events.
        """
        if not self.lanes:
            raise ValueError("it holds no slices")
        ranks = {process: rank for rank, process in enumerate(sorted(set(processes.values())))}
        threads: dict[int, int] = {}
        rows = Rows()
        for lane, slices in self.lanes.items():
            rank = ranks[processes[lane]]
            threads[rank] = thread = threads.get(rank, -1) + 1
            for op, name, start, end in slices:
                status = IN_FLIGHT if op == "span" and end == NONE else OK
                rows.add(rank, op, start, thread=thread, label=name, done_ns=end, status=status)
        notes = [f"imported from {self._source}: each process is a rank, each slice a span; no messages are known"]
        return rows.trace({"world_size": len(ranks), "source": "imported", "notes": notes})
