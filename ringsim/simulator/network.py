"""Chooses who carries the messages of a simulated run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ringsim.errors import ArgumentError, say
from ringsim.faults import Degrade, Injection, degraded_by
from ringsim.link import Link
from ringsim.simulator.carriers import Agenda, Carrier, PrivateLinks
from ringsim.simulator.cores import SharedCores
from ringsim.simulator.shared_links import SharedLinks
from ringsim.topologies import OneMachine, Topology

__all__ = ["make_carrier"]


def make_carrier(
    agenda: Agenda,
    world_size: int,
    *,
    link: Link | Mapping[tuple[int, int], Link] | None = None,
    topology: Topology | None = None,
    inject: Iterable[Injection] = (),
) -> Carrier:
    """Returns who carries the messages of a run.

    Args:
        agenda: the virtual clock.
        world_size: number of ranks.
        link: what a message costs, where each ordered pair of ranks has a link of its own: one for all, or one for each (src, dst).
        topology: which links a message passes, where pairs share some. Exactly one of ``link`` and ``topology`` is given.
        inject: what goes wrong; each `Degrade` makes the messages of a pair slower.

    Raises:
        ArgumentError: both or none are given, one is no such thing, or the topology has no place for the ranks.
    """
    if (link is None) == (topology is None):
        got = "none" if link is None else "both"
        raise ArgumentError(f"exactly one of link and topology must be given, got {got}. A topology holds its own links.")
    inject = tuple(inject)
    pairs = [(each.src, each.dst) for each in inject if isinstance(each, Degrade)]
    slower = {pair: degraded_by(inject, *pair) for pair in pairs}
    if link is not None:
        return PrivateLinks(link, slower)
    if isinstance(topology, OneMachine):
        return SharedCores(topology.link, slower, topology.cores)
    assert topology is not None
    if isinstance(topology, type) or not all(callable(getattr(topology, name, None)) for name in ("check", "route")):
        raise ArgumentError(f"topology must have the methods check and route, got {say(topology)}. Take one of ringsim.topologies.")
    return SharedLinks(agenda, topology, world_size, slower)
