"""What others measured with NCCL and wrote down in public: reference figures for charts drawn where no GPU is.

Every figure has its source, a public discussion that anybody can open. Most sources give one number, the bandwidth that large messages
come to; few give times of single sizes. Nothing in between is filled in::

    link                       small messages       large messages
    NVLink 4, H100             3 us                 180 GB/s measured, 370 GB/s to be expected (line rate 450)
    NVLink 3, A100, 12 links   -                    230 GB/s (line rate 300)
    NVLink 3, A100, 4 links    9.8 us               72 GB/s (line rate 100)
    InfiniBand HDR, 200 Gbit/s -                    24 GB/s (line rate 25)
    network, A40               31-34 us             -

``sendrecv_perf`` of nccl-tests sends and receives at once on every rank, so its figures compare with the pattern "exchange" rather than
with "pingpong".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["FIGURES", "LINE_RATES", "LineRate", "PublishedFigure"]


@dataclass(frozen=True)
class PublishedFigure:
    """One number that somebody published, either the time of a size or the bandwidth that large messages come to.

    Args:
        link: what connected the GPUs, and which GPUs.
        date: when it was written, "YYYY-MM-DD".
        source: where, in short.
        url: where, to be opened.
        size_bytes: size of the message; None where the source says "large", or nothing.
        latency_us: the time of such a message; None where the source gives a bandwidth.
        bandwidth_gb_per_s: one way, in GB/s (10**9 bytes/s); None where the source gives a time.
        remark: what else has to be known to read it.

    Example:
        >>> figure = PublishedFigure("NVLink", "2025-07-14", "nccl-tests #331", "https://example.org", size_bytes=8, latency_us=9.85)
        >>> figure.latency_us, figure.bandwidth_gb_per_s
        (9.85, None)
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
    """What the wires of a link can carry by specification: an upper limit that no program reaches.

    Args:
        link: what it is.
        one_way_gb_per_s: in one direction.
        both_ways_gb_per_s: in both together, the number that advertisements give.
        source: where it is said, in short.
        url: where, to be opened.
    """

    link: str
    one_way_gb_per_s: float
    both_ways_gb_per_s: float
    source: str
    url: str


_TESTS: Final = "https://github.com/NVIDIA/nccl-tests/issues/"
_NCCL: Final = "https://github.com/NVIDIA/nccl/issues/"
_A40: Final = "network, A40"
_A100_4: Final = "NVLink 3, A100, 4 links"
_H100: Final = "NVLink 4, H100"
_A40_TIMES_US: Final = {256: 34.24, 512: 34.24, 1024: 34.24, 2048: 31.58, 4096: 30.74, 8192: 31.76}
_A100_TIMES_US: Final = {8: 9.85, 16: 9.76}

FIGURES: Final[tuple[PublishedFigure, ...]] = (
    PublishedFigure(
        _H100, "2024-05-06", "nccl-tests #212", f"{_TESTS}212", bandwidth_gb_per_s=370.0,
        remark="what NCCL's maintainer says is to be expected of 450 GB/s",
    ),
    PublishedFigure(_H100, "2024-11-19", "nccl-tests #268", f"{_TESTS}268", bandwidth_gb_per_s=180.0, remark="two GPUs, to 4 GiB"),
    PublishedFigure(_H100, "2024-10-18", "nccl #1487", f"{_NCCL}1487", size_bytes=1000, latency_us=3.0, remark="about, by nccl-tests"),
    PublishedFigure(
        "NVLink 3, A100, 12 links", "2023-07-05", "nccl-tests #149", f"{_TESTS}149", bandwidth_gb_per_s=230.0,
        remark="what NCCL's maintainer says is to be expected beyond 1 GiB",
    ),
    *(
        PublishedFigure(_A100_4, "2025-07-14", "nccl-tests #331", f"{_TESTS}331", size, time_us, remark="sendrecv_perf, NCCL 2.22.3")
        for size, time_us in _A100_TIMES_US.items()
    ),
    PublishedFigure(
        _A100_4, "2025-07-14", "nccl-tests #331", f"{_TESTS}331", bandwidth_gb_per_s=72.0, remark="sendrecv_perf, NCCL 2.22.3; 71 to 73"
    ),
    PublishedFigure(
        "InfiniBand HDR, 200 Gbit/s", "2022-11-17", "nccl-tests #119", f"{_TESTS}119", bandwidth_gb_per_s=24.0,
        remark="what NCCL's maintainer takes for the peak of one adapter",
    ),
    *(
        PublishedFigure(_A40, "2024-11-21", "nccl-tests #214", f"{_TESTS}214", size, time_us, remark="sendrecv_perf between two machines")
        for size, time_us in _A40_TIMES_US.items()
    ),
)  # fmt: skip

LINE_RATES: Final[tuple[LineRate, ...]] = (
    LineRate("NVLink 4, H100", 450.0, 900.0, "nccl #1264", f"{_NCCL}1264"),
    LineRate("NVLink 3, A100, 12 links", 300.0, 600.0, "nccl-tests #149", f"{_TESTS}149"),
    LineRate("NVLink 3, A100, 4 links", 100.0, 200.0, "nccl-tests #331", f"{_TESTS}331"),
)
