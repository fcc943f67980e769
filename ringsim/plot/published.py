"""Published NCCL measurements from other machines; each source is a public discussion."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import NamedTuple


class PublishedFigure(NamedTuple):
    """A published number.

    The number is either the time for a message of one size, or the one-way bandwidth (10**9
    bytes/s) of large messages. ``link`` names the connection and the GPUs, and ``date`` has the
    form "YYYY-MM-DD". ``size_bytes`` is None if the source gives no size.
    """

    link: str
    date: str
    source: str
    url: str
    size_bytes: int | None = None
    latency_us: float | None = None
    bandwidth_gb_per_s: float | None = None
    remark: str = ""


class LineRate(NamedTuple):
    """The specified capacity of a link, both in one direction and in both directions together.

    No program reaches this limit.
    """

    link: str
    one_way_gb_per_s: float
    both_ways_gb_per_s: float
    source: str
    url: str


_DATA = json.loads((files("ringsim") / "data/published.json").read_text("utf-8"))
LINE_RATES = tuple(LineRate(**row) for row in _DATA["line_rates"])
FIGURES = tuple(PublishedFigure(**row) for row in _DATA["figures"])
