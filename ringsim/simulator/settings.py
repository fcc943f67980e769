"""Defines the checked arguments of ``ringsim.simulate``, in a form that processes exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringsim.faults import Injection
from ringsim.link import GivenLinks, Link
from ringsim.provenance import __version__
from ringsim.topologies import Topology


@dataclass(frozen=True)
class Settings:
    """The arguments of ``ringsim.simulate``, which describes their meaning."""

    world_size: int
    link: GivenLinks | None
    topology: Topology | None
    semantics: str
    compute: Any
    seed: int
    inject: Sequence[Injection]
    record: bool
    stacks: str

    @property
    def measures(self) -> bool:
        """Whether computing takes as long as it does on this machine."""
        return isinstance(self.compute, str) and self.compute == "measured"

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of every trace from the run."""
        return {
            "format": 1,
            "source": "simulated",
            "world_size": self.world_size,
            "backend": f"virtual clock, {self.semantics}",
            "comm_device": "cpu",
            "constants": self._list_constants(),
            "versions": {"ringsim": __version__},
        }

    def _list_constants(self) -> dict[str, Any]:
        constants: dict[str, Any] = {"semantics": self.semantics, "seed": self.seed}
        if self.link is not None:
            constants["links"] = write_links(self.link)
        if self.topology is not None:
            constants["topology"] = repr(self.topology)
        if self.compute is not None:
            constants["compute"] = "measured" if self.measures else repr(self.compute)
        if self.inject:
            constants["inject"] = [repr(each) for each in self.inject]
        return constants


def write_links(given: GivenLinks) -> dict[str, dict[str, float]]:
    """Returns a link, or the links between ranks, for the metadata of a trace."""
    if isinstance(given, Link):
        return {"all": {"alpha_s": given.alpha_s, "beta_s_per_byte": given.beta_s_per_byte}}
    return {f"{src}>{dst}": write_links(link)["all"] for (src, dst), link in given.items()}
