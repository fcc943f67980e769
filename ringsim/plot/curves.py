"""A table of bandwidths as curves: one for each pattern, backend and edge, cut where a single alpha-beta line does not hold."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from ringsim.plot.style import BLUE, GREEN, MUTED, ORANGE, PURPLE
from ringsim.traces.bandwidths import CEILINGS, Bandwidths, Regime, find_regimes

__all__ = ["Curve", "Pen", "make_curves", "pen"]

Dashes = tuple[float, tuple[float, ...]] | str


@dataclass(frozen=True)
class Pen:
    """How a backend is drawn in every chart; its name stands beside its line, for those who see no colour.

    Args:
        name: what the chart calls it.
        colour: of lines, as "#RRGGBB".
        ink: of words, dark enough to be read on white.
        line: matplotlib's line style.
    """

    name: str
    colour: str
    ink: str
    line: Dashes = "-"


PENS: Final = {
    "gloo": Pen("Gloo", BLUE, BLUE),
    "nccl": Pen("NCCL", ORANGE, "#8A5A00"),
    "mpi": Pen("MPI", GREEN, "#006B4E"),
    "tcp": Pen("TCP, no torch", MUTED, MUTED, (0, (6, 1.5, 1.2, 1.5))),
    "memcpy": Pen("memory copy", MUTED, MUTED, (0, (1.2, 1.6))),
}


def pen(backend: str) -> Pen:
    """Returns how a backend is drawn, also one that is the user's own."""
    return PENS.get(backend, Pen(backend or "unknown backend", PURPLE, "#8C4A74"))


@dataclass(frozen=True, eq=False)
class Curve:
    """What one link gave, over the sizes of the messages: numpy arrays of one length, sizes ascending.

    Attributes:
        pattern: how the messages went ("pingpong", ...).
        backend: what carried them.
        kind: "measured", "simulated" or "published".
        src: global rank of the sender; -1 where all ranks take part.
        dst: the receiver's; likewise.
        size_bytes: sizes in bytes.
        latency_us: median time of one message.
        gb_per_s: median bus bandwidth in GB/s.
        latency_band_us: p10 and p90 of the time, shape (2, n).
        band_gb_per_s: p10 and p90 of the bus bandwidth, shape (2, n).
        n: how many messages each median is of.
    """

    pattern: str
    backend: str
    kind: str
    src: int
    dst: int
    size_bytes: Any
    latency_us: Any
    gb_per_s: Any
    latency_band_us: Any
    band_gb_per_s: Any
    n: Any

    @property
    def is_ceiling(self) -> bool:
        """Whether it is a reference line and not a backend."""
        return self.backend in CEILINGS

    @property
    def name(self) -> str:
        """Backend, pattern and edge, for notes."""
        edge = f" {self.src} -> {self.dst}" if self.src >= 0 and self.dst >= 0 else ""
        return f"{pen(self.backend).name} {self.pattern}{edge}{'' if self.kind == 'measured' else f', {self.kind}'}"

    @property
    def label(self) -> str:
        """The backend, and the pattern where it is not the usual one, for titles."""
        return pen(self.backend).name if self.pattern == "pingpong" else f"{pen(self.backend).name} {self.pattern}"

    @property
    def bus_factor(self) -> float:
        """How many algorithm bandwidths the bus bandwidth is; 1 for a message."""
        return float(np.round(np.median(self.gb_per_s * self.latency_us / self.size_bytes * 1e3), 4))

    @cached_property
    def regimes(self) -> list[Regime]:
        """Ranges of sizes with one line each; the lines give seconds."""
        low, high = np.where(np.isnan(self.latency_band_us), self.latency_us, self.latency_band_us) * 1e-6
        return find_regimes(self.size_bytes, self.latency_us * 1e-6, p10_s=low, p90_s=high)


def make_curves(table: Bandwidths) -> list[Curve]:
    """Makes the curves of a table, in the order of the table; what is 0 is left out, for a logarithmic axis has no place for it.

    Args:
        table: what was measured.

    Returns:
        The curves.
    """
    curves = []
    drawable = (table.columns["size_bytes"] > 0) & (table.columns["latency_us"] > 0) & (table.columns["algbw_gb_per_s"] != 0)
    for key in table.series():
        mine = table.select(drawable & table.where(*key)).columns
        for kind in dict.fromkeys(mine["kind"].tolist()):
            rows = np.flatnonzero(mine["kind"] == kind)
            _, first = np.unique(mine["size_bytes"][rows], return_index=True)
            column = {name: values[rows[first]] for name, values in mine.items()}
            pattern, backend, src, dst = key
            if src >= 0:  # a message, for which both bandwidths are the same: either may be missing
                column["busbw_gb_per_s"] = column["algbw_gb_per_s"]
            factor = column["busbw_gb_per_s"] / column["algbw_gb_per_s"]
            curves.append(
                Curve(
                    pattern, backend, kind, src, dst, column["size_bytes"], column["latency_us"], column["busbw_gb_per_s"],
                    np.stack([column["p10_latency_us"], column["p90_latency_us"]]),
                    np.stack([column["p10_algbw_gb_per_s"], column["p90_algbw_gb_per_s"]]) * factor, column["n"],
                )
            )  # fmt: skip
    return curves
