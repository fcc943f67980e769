"""Which stage, link or message size to improve, and what the step would gain: what the critical path spends on each, and a simulation.

A step's time is the longest of many ways through it, so it falls by no more than what the critical path spends on a thing, and by less once
another way has become the longest. How much really is found by simulating it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ringsim.pipeline.programs import Time
from ringsim.simulator.critical_path import CriticalPath
from ringsim.simulator.operations import FORWARD, Operations
from ringsim.simulator.prices import Prices

__all__ = ["Lever", "Sensitivity", "improve", "list_levers"]


@dataclass(frozen=True)
class Lever:
    """One thing that could be improved.

    Attributes:
        what: ``stage 3``, ``link 2>3`` or ``message size``.
        on_path: how long the critical path spends on it, in the unit of the costs.
        gain: by how much the step is shorter when it is improved, simulated.
        bound: by how much at most, from ``on_path``.
    """

    what: str
    on_path: float
    gain: float
    bound: float


@dataclass(frozen=True, repr=False)
class Sensitivity:
    """What improving single things would bring, the best first.

    Attributes:
        by: how much each is improved: 0.1 makes it 10 % faster.
        makespan: how long the step takes as it is.
        levers: what was tried.
    """

    by: float
    makespan: float
    levers: tuple[Lever, ...]

    def __repr__(self) -> str:
        """Returns a table."""
        lines = [f"Improved by {self.by:.0%}:    gain    of the step   at most"]
        for lever in self.levers:
            share = lever.gain / self.makespan if self.makespan else 0.0
            lines.append(f"  {lever.what:<16} {lever.gain:>9.4g} {share:>12.2%} {lever.bound:>9.4g}")
        return "\n".join(lines)


def list_levers(path: CriticalPath, prices: Prices) -> dict[str, float]:
    """Says how long the critical path spends on each stage, link and on the size of messages, the longest first.

    Args:
        path: the critical path.
        prices: without K.

    Returns:
        Times by name, as in ``Lever.what``; what the path does not touch is left out.
    """
    spent: dict[str, Time] = {}
    for hop in path.hops:
        stage, kind, _ = hop.action
        if hop.source < 0:
            spent[f"stage {stage}"] = spent.get(f"stage {stage}", 0) + (hop.end - hop.start)
            continue
        link = f"link {hop.source}>{hop.rank}"
        spent[link] = spent.get(link, 0) + (hop.end - hop.start)
        receiver, direction = (stage + 1, 0) if kind == "SEND_F" else (stage - 1, 1)
        if prices.occupancy[direction, receiver] > 0:
            spent["message size"] = spent.get("message size", 0) + prices.occupancy[direction, receiver]
    ordered = sorted(spent.items(), key=lambda item: (-float(item[1]), item[0]))
    return {what: float(time) for what, time in ordered if time > 0}


def improve(what: str, by: float, operations: Operations, prices: Prices) -> Prices:
    """Returns prices with one thing cheaper.

    Args:
        what: as in ``Lever.what``.
        by: which part of its cost is saved, from 0 to 1.
        operations: the schedule.
        prices: without K.
    """
    factor = 1 - by
    duration, occupancy, latency = (table.astype(float) for table in (prices.duration, prices.occupancy, prices.latency))
    if what == "message size":
        return replace(prices, duration=duration, occupancy=occupancy * factor, latency=latency)
    noun, _, name = what.partition(" ")
    if noun == "stage":
        duration[:, int(name)] *= factor
        return replace(prices, duration=duration, occupancy=occupancy, latency=latency)
    source, rank = map(int, name.split(">"))
    owner = operations.stage_ranks
    for direction, step in ((FORWARD, -1), (1, 1)):
        for stage in range(len(owner)):
            if 0 <= stage + step < len(owner) and (owner[stage + step], owner[stage]) == (source, rank):
                occupancy[direction, stage] *= factor
                latency[direction, stage] *= factor
    return replace(prices, duration=duration, occupancy=occupancy, latency=latency)
