"""Published NCCL measurements from other machines; each source is a public discussion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class PublishedFigure:
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


@dataclass(frozen=True)
class LineRate:
    """The specified capacity of a link, both in one direction and in both directions together.

    No program reaches this limit.
    """

    link: str
    one_way_gb_per_s: float
    both_ways_gb_per_s: float
    source: str
    url: str


_H100, _A100, _A100_4 = "NVLink 4, H100", "NVLink 3, A100, 12 links", "NVLink 3, A100, 4 links"
_A40_TIMES_US: Final = {256: 34.24, 512: 34.24, 1024: 34.24, 2048: 31.58, 4096: 30.74, 8192: 31.76}


def _cite(project: str, number: int) -> tuple[str, str]:
    """Returns a discussion's short name and URL."""
    return f"{project} #{number}", f"https://github.com/NVIDIA/{project}/issues/{number}"


LINE_RATES: Final = (
    LineRate(_H100, 450.0, 900.0, *_cite("nccl", 1264)),
    LineRate(_A100, 300.0, 600.0, *_cite("nccl-tests", 149)),
    LineRate(_A100_4, 100.0, 200.0, *_cite("nccl-tests", 331)),
)

# The link, the place and date of publication, the bandwidth of large messages or the times of
# single sizes, and a remark.
_PUBLISHED: Final[tuple[tuple[str, str, int, str, float | dict[int, float], str], ...]] = (
    (
        _H100,
        "nccl-tests",
        212,
        "2024-05-06",
        370.0,
        "expected by NCCL's maintainer, out of 450 GB/s",
    ),
    (_H100, "nccl-tests", 268, "2024-11-19", 180.0, "two GPUs, up to 4 GiB"),
    (_H100, "nccl", 1487, "2024-10-18", {1000: 3.0}, "approximate, from nccl-tests"),
    (
        _A100,
        "nccl-tests",
        149,
        "2023-07-05",
        230.0,
        "expected by NCCL's maintainer beyond 1 GiB",
    ),
    (_A100_4, "nccl-tests", 331, "2025-07-14", {8: 9.85, 16: 9.76}, "sendrecv_perf, NCCL 2.22.3"),
    (_A100_4, "nccl-tests", 331, "2025-07-14", 72.0, "sendrecv_perf, NCCL 2.22.3; 71 to 73"),
    (
        "InfiniBand HDR, 200 Gbit/s",
        "nccl-tests",
        119,
        "2022-11-17",
        24.0,
        "peak of one adapter, according to NCCL's maintainer",
    ),
    (
        "network, A40",
        "nccl-tests",
        214,
        "2024-11-21",
        _A40_TIMES_US,
        "sendrecv_perf between two machines",
    ),
)

FIGURES: Final = tuple(
    PublishedFigure(
        link,
        date,
        *_cite(project, number),
        size,
        time_us,
        rate,
        remark,
    )
    for link, project, number, date, said, remark in _PUBLISHED
    for size, time_us, rate in (
        [(*time, None) for time in said.items()] if isinstance(said, dict) else [(None, None, said)]
    )
)
