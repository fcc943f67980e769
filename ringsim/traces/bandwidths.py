"""Tables of bandwidths, and the lines fitted to them.

A table lists the bandwidth of each link at each size, and the source of the numbers. Each row is
for one pattern, edge and size. S is ``size_bytes``, and t is ``latency_us``::

    pattern      S                        t
    pingpong     the message              half the time of a round trip
    oneway       the message              the time per message in a stream from src to dst, with
                                          several messages in flight
    exchange     the message, each way    until src has sent a message and received one
    shift        the message              until dst has received src's message and sent its own;
                                          every rank sends to its successor
    all_reduce   the buffer               until the slowest rank has the sum; src and dst are -1
                                          because the whole group takes part

algbw is S / t, and busbw is algbw times the factor in ``ringsim.traces.collectives`` (nccl-tests'
definitions). 1 GB is 10**9 bytes. Latency and algbw are medians of n repetitions; p10 and p90 are
percentiles. A saved table is one JSON file that contains nothing executable.

Many transports send small messages by one method and large messages by a different method. At the
size at which the method changes, the time jumps up or down, and no single alpha-beta line fits both
sides. ``find_regimes`` finds these breaks::

    time |                    .-'
         |                 .-'        the right line, extended to the left, misses the left points,
         |   .-'                      and the left line misses the right points: this is a break
         | .-'
         +------------|--------- size

If only the *slope* changes (a cache becomes too small), the two lines meet. Neither line misses the
next point by much, so there is no break.

Two neighbouring sizes have a break between them in either of two cases:

- Both sides have at least three sizes. Each side's fit, extended to the nearest size of the other
  side, misses the time measured there by more than a quarter, by more than three times the fit's
  error at its own points, and by more than the range from p10 to p90 there. If several places
  qualify, the break is the place at which the two fits leave the smallest residuals.
- The larger message is faster by more than a quarter, and its p90 is below the smaller message's
  p10.

The search is then repeated on each side.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import numpy.typing as npt

from ringsim.errors import escape_line
from ringsim.link import Link, fit_link
from ringsim.traces.display import Bundle, Images, Style, bundle
from ringsim.traces.documents import (
    OBJECT,
    Forms,
    JsonObject,
    StrPath,
    are_all,
    check_metadata,
    parse_json,
    read_file,
    reading,
    saving,
    write_whole,
)
from ringsim.traces.events import Ints, readable
from ringsim.traces.units import bytes_text, time_text

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

FORMAT = 1
MAX_FILE_BYTES = 64 * 2**20
ONE_GPU = "sockets, one GPU"  # the path between two ranks that share a GPU
# not backends, but the rates of a raw socket and of a copy in memory
CEILINGS = ("tcp", "memcpy")
KINDS = ("measured", "published", "simulated")
COLUMNS: dict[str, str] = {
    "pattern": "U",
    "src": "<i4",  # -1: no single edge
    "dst": "<i4",
    "size_bytes": "<i8",
    "latency_us": "<f8",
    "algbw_gb_per_s": "<f8",
    "busbw_gb_per_s": "<f8",
    "p10_latency_us": "<f8",
    "p90_latency_us": "<f8",
    "p10_algbw_gb_per_s": "<f8",
    "p90_algbw_gb_per_s": "<f8",
    "n": "<i8",
    "backend": "U",
    "kind": "U",
}
# the limits for times (us) and rates (GB/s) other than 0 in a file, so that squares neither vanish
# nor overflow
SMALLEST = 1e-12
LARGEST = 1e18
MOST_BYTES = 2**53  # the largest message; every size up to this is exact as a float
_LARGEST_LOAD = 1e9


@dataclass(frozen=True, eq=False, repr=False)
class Bandwidths:
    """Measured, published or simulated bandwidths, with one row per pattern, edge and size.

    Bandwidths are displayed as a chart in a notebook, and as a table in a terminal.

    Args:
        columns: numpy arrays of equal length, named and typed as in ``COLUMNS``; unknown numbers
            are NaN.
        metadata: the source of the numbers (machine, versions, date, interface, load, ...); must be
            plain data for JSON.

    Example:
        >>> row = {
        ...     "pattern": "pingpong",
        ...     "src": 0,
        ...     "dst": 1,
        ...     "backend": "gloo",
        ...     "kind": "measured",
        ...     "n": 30,
        ... }
        >>> table = make_bandwidths(
        ...     [
        ...         {**row, "size_bytes": size, "latency_us": 10 + size / 1000}
        ...         for size in (1000, 2000, 4000)
        ...     ],
        ...     {},
        ... )
        >>> len(table), round(table.fits["pingpong", "gloo", 0, 1].alpha_s * 1e6, 6)
        (3, 10.0)
    """

    columns: Mapping[str, Ints]
    metadata: JsonObject = field(default_factory=dict)

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.columns["size_bytes"])

    def select(self, where: Ints) -> Bandwidths:
        """Returns the rows selected by ``where`` (a mask or indices), with the same metadata."""
        return Bandwidths(
            {name: column[where] for name, column in self.columns.items()}, self.metadata
        )

    @cached_property
    def fits(self) -> dict[tuple[str, str, int, int], Link]:
        """The line fitted to the medians of each (pattern, backend, src, dst).

        Series with fewer than two sizes have no line. A line's errors show how well it fits.
        """
        found = {}
        columns = self.columns
        usable = (columns["latency_us"] > 0) & ~np.isin(columns["backend"], CEILINGS)
        for key in self.series():
            mine = usable & self.where(*key)
            if len(np.unique(columns["size_bytes"][mine])) >= 2:
                found[key] = fit_link(
                    columns["size_bytes"][mine], columns["latency_us"][mine] * 1e-6
                )
        return found

    def series(self) -> list[tuple[str, str, int, int]]:
        """Returns the (pattern, backend, src, dst) of each series, in order of first appearance."""
        names = ("pattern", "backend", "src", "dst")
        return list(
            dict.fromkeys(zip(*(self.columns[name].tolist() for name in names), strict=True))
        )

    def where(self, pattern: str, backend: str, src: int, dst: int) -> Ints:
        """Returns a mask of the rows in one series, given in the form that ``series`` returns."""
        columns = self.columns
        mask: Ints = (
            (columns["pattern"] == pattern)
            & (columns["backend"] == backend)
            & (columns["src"] == src)
            & (columns["dst"] == dst)
        )
        return mask

    def to_pandas(self) -> pd.DataFrame:
        """Returns a new pandas DataFrame with the columns in ``COLUMNS``."""
        import pandas as pd

        return pd.DataFrame(
            {
                name: self.columns[name].astype(object if dtype == "U" else dtype)
                for name, dtype in COLUMNS.items()
            }
        )

    def save(self, path: StrPath) -> None:
        """Saves the table as a JSON file, completely or not at all.

        Read the file with ``ringsim.traces.bandwidths.load``.

        Args:
            path: the file to write; an existing file is replaced.

        Raises:
            TraceFileError: the file cannot be written, or ringsim could not read it back.
        """
        columns = {
            name: [None if value != value else value for value in self.columns[name].tolist()]
            for name in COLUMNS
        }
        value = {
            "format": FORMAT,
            "what": "ringsim bandwidths",
            "metadata": self.metadata,
            "columns": columns,
        }
        with saving("a table", path):
            check_metadata(self.metadata, _FORMS)
            text = json.dumps(value, indent=1, allow_nan=False)
        write_whole(path, lambda file: file.write(text.encode() + b"\n"), "a table")

    def plot(
        self, *, published: bool = True, ax: Axes | None = None, **look: Unpack[Style]
    ) -> Axes:
        """Draws bandwidth and latency against size.

        Args:
            published: whether to add published NCCL figures if NCCL was not measured.
            ax: the axes to draw on; by default, those of a new figure.
            **look: the style of the new figure; see ``Style``.

        Returns:
            The axes.
        """
        from ringsim.plot.charts import plot_bandwidth

        return plot_bandwidth(self, published=published, ax=ax, **look)

    def describe(self) -> str:
        """Returns a one-sentence description of the table, as a text alternative to the picture.

        The sentence lists the highest bandwidth of each series.
        """
        if not len(self):
            return "Bandwidths: nothing was measured."
        sizes = self.columns["size_bytes"]
        parts = []
        for pattern, backend, src, dst in self.series():
            where = self.where(pattern, backend, src, dst)
            best = np.nanmax(self.columns["algbw_gb_per_s"][where], initial=0)
            edge = f" {src} to {dst}" if src >= 0 else ""
            parts.append(f"{backend} {pattern}{edge} up to {best:.3g} GB/s")
        return (
            f"Bandwidth against message size, {bytes_text(int(sizes.min()))} to "
            f"{bytes_text(int(sizes.max()))}: {'; '.join(parts)}."
        )

    def __repr__(self) -> str:
        """Returns the table as text, with one line per row, followed by the fits."""
        header = ("latency", "p10", "p90", "algbw", "busbw", "n")
        lines = [
            f"{'pattern':11} {'backend':8} {'edge':>6} {'size':>9}"
            + "".join(map("{:>{}}".format, header, (11, 11, 11, 9, 9, 7)))
        ]
        for row in zip(*(self.columns[name].tolist() for name in COLUMNS), strict=True):
            pattern, src, dst, size, latency, algbw, busbw, p10, p90, _, _, n, backend, _ = row
            texts = " ".join(f"{_time(one):>10}" for one in (latency, p10, p90))
            lines.append(
                f"{pattern:11} {backend:8} {_edge(src, dst):>6} {bytes_text(size):>9} {texts} "
                f"{_rate(algbw):>8} {_rate(busbw):>8} {n:>6}"
            )
        lines.append("bandwidths in GB/s, 1 GB = 10**9 bytes")
        for (pattern, backend, src, dst), link in self.fits.items():
            lines.append(f"fit {pattern} {backend} {_edge(src, dst)}: {_fit_text(link)}")
        lines += [f"path {edge}: {path}" for edge, path in self.metadata.get("paths", {}).items()]
        lines += [f"note: {escape_line(note)}" for note in self.metadata.get("notes", ())]
        return "\n".join(lines)

    def __eq__(self, other: object) -> bool:
        """Returns whether rows and metadata are equal; NaN equals NaN."""
        if not isinstance(other, Bandwidths):
            return NotImplemented
        # as JSON, NaN equals NaN
        said, theirs = (json.dumps(one.metadata, sort_keys=True) for one in (self, other))
        return said == theirs and all(
            np.array_equal(self.columns[name], other.columns[name], equal_nan=dtype == "<f8")
            for name, dtype in COLUMNS.items()
        )

    __hash__ = None  # type: ignore[assignment]  # compared by content, which is mutable

    def _repr_mimebundle_(self, **_: Any) -> Bundle:
        """Returns the chart and the table for Jupyter to show."""
        return bundle(repr(self), self.describe(), self._draw)

    def _draw(self) -> Images:
        from ringsim.plot.charts import bandwidth_images

        return bandwidth_images(self)


def make_bandwidths(rows: Iterable[Mapping[str, Any]], metadata: JsonObject) -> Bandwidths:
    """Creates a table from rows.

    Args:
        rows: the values in each row, keyed by the names in ``COLUMNS``. ``pattern``,
            ``size_bytes``, ``backend`` and ``kind`` are required. If ``algbw_gb_per_s`` is missing,
            it is computed from ``latency_us``. Missing values of ``src`` and ``dst`` become -1,
            missing values of ``n`` become 0, and all other missing values become NaN.
        metadata: the source of the numbers.

    Returns:
        The table.

    Example:
        >>> row = {
        ...     "pattern": "pingpong",
        ...     "size_bytes": 1000,
        ...     "latency_us": 2.0,
        ...     "backend": "tcp",
        ...     "kind": "measured",
        ... }
        >>> make_bandwidths([row], {}).columns["algbw_gb_per_s"].tolist()
        [0.5]
    """
    absent = {"src": -1, "dst": -1, "n": 0}
    full = []
    for row in rows:
        latency_us = row.get("latency_us", math.nan)
        algbw = row["size_bytes"] / latency_us * 1e-3 if latency_us > 0 else math.nan
        full.append({**absent, "algbw_gb_per_s": algbw, **row})
    columns = {}
    for name, dtype in COLUMNS.items():
        values = [
            row[name] if dtype == "U" or name == "size_bytes" else row.get(name, math.nan)
            for row in full
        ]
        columns[name] = np.array(values, dtype=object).astype(dtype)
    return Bandwidths(columns, metadata)


def load(path: StrPath) -> Bandwidths:
    """Reads a table written by ``Bandwidths.save``.

    Args:
        path: the file to read.

    Returns:
        The table.

    Raises:
        TraceFileError: the file is missing or damaged, does not contain a table, or was written by
            a later version of ringsim.
    """
    data = read_file(path, "the table of bandwidths", MAX_FILE_BYTES)
    with reading("a table of bandwidths", path, "Measure the bandwidths again."):
        value = parse_json(data)
        if not isinstance(value, dict) or value.get("what") != "ringsim bandwidths":
            raise ValueError("it is not a table of bandwidths")
        if value["format"] != FORMAT:
            raise ValueError(
                f"it has format {value['format']!r}, and this version reads format {FORMAT}. "
                "A later version of ringsim may read it"
            )
        metadata = readable(value["metadata"])
        check_metadata(metadata, _FORMS)
        return Bandwidths(_read_columns(value["columns"]), metadata)


_FORMS: Forms = {
    "paths": OBJECT,
    "load": (
        lambda value: (
            are_all(value, (int, float)) and all(abs(one) < _LARGEST_LOAD for one in value)
        ),
        "a list of numbers",
    ),
}


def _read_columns(value: Any) -> dict[str, Ints]:
    if not isinstance(value, dict) or set(value) != set(COLUMNS):
        raise ValueError("it does not have the columns of a table of bandwidths")
    columns: dict[str, Ints] = {}
    for name, dtype in COLUMNS.items():
        entries = value[name]
        wanted = str if dtype == "U" else (int, float, type(None)) if dtype == "<f8" else int
        if not isinstance(entries, list) or not all(
            isinstance(one, wanted) and not isinstance(one, bool) for one in entries
        ):
            raise ValueError(f"the column {name} has values of the wrong type")
        given = [math.nan if one is None else readable(one) for one in entries]
        columns[name] = np.array(given, dtype=dtype)
    if len({len(column) for column in columns.values()}) != 1:
        raise ValueError("the columns have different lengths")
    if not set(columns["kind"].tolist()) <= set(KINDS):
        raise ValueError(f"a row has a kind other than {', '.join(KINDS)}")
    limits = {name: (SMALLEST, LARGEST) for name, dtype in COLUMNS.items() if dtype == "<f8"}
    limits |= {"size_bytes": (0, MOST_BYTES), "n": (0, math.inf)}
    for name, (low, high) in limits.items():
        known = columns[name][columns[name] != 0]
        if ((known < low) | (known > high)).any():
            raise ValueError(
                f"the column {name} contains a number outside the range {low:g} to {high:g}"
            )
    return columns


def _edge(src: int, dst: int) -> str:
    return f"{src}->{dst}" if src >= 0 else "all"


def _time(microseconds: float) -> str:
    return time_text(microseconds * 1e3) if math.isfinite(microseconds) else "-"


def _rate(gb_per_s: float) -> str:
    return f"{gb_per_s:.3g}" if math.isfinite(gb_per_s) else "-"


def _fit_text(link: Link) -> str:
    latency = f"alpha {link.alpha_s * 1e6:.3g} µs (± {link.alpha_error_s * 1e6:.2g})"
    slope = f"beta {link.beta_s_per_byte * 1e9:.3g} ns/B (± {link.beta_error_s_per_byte * 1e9:.2g})"
    half = (
        f"n½ {bytes_text(link.n_half_bytes)}"
        if math.isfinite(link.n_half_bytes)
        else "n½ larger than any size"
    )
    return f"{latency}, {slope}, {link.bandwidth_gb_per_s:.3g} GB/s, {half}"


LEAST_SIZES = 3
LEAST_MISS = 0.25  # as a share of the measured time
# as a multiple of the root mean square of the relative errors at a side's own points
LEAST_SCATTERS = 3.0

Floats = npt.NDArray[np.float64]
Numbers = Sequence[float] | npt.NDArray[Any]


@dataclass(frozen=True)
class Regime:
    """A range of sizes that one line fits.

    Args:
        first: the index of the smallest size.
        last: the index of the largest size.
        link: the line, or None if the range has only one size.
    """

    first: int
    last: int
    link: Link | None


def find_regimes(
    sizes_bytes: Numbers,
    times_s: Numbers,
    *,
    p10_s: Numbers | None = None,
    p90_s: Numbers | None = None,
) -> list[Regime]:
    """Splits measured times into regimes at breaks, which the module docstring defines.

    Args:
        sizes_bytes: the distinct sizes, ascending; shape (n,).
        times_s: the median time for each size, in seconds; must be positive; shape (n,).
        p10_s: the 10th percentiles; by default, the medians.
        p90_s: the 90th percentiles; by default, the medians.

    Returns:
        The regimes from small to large sizes. If there is no break, the list has one regime; if
        there are no sizes, it is empty.

    Example:
        >>> sizes = [2**power for power in range(10, 20)]
        >>> times = [20e-6 + size / 1e9 if size < 2**15 else 120e-6 + size / 4e9 for size in sizes]
        >>> [
        ...     (sizes[regime.first], sizes[regime.last], round(regime.link.alpha_s * 1e6))
        ...     for regime in find_regimes(sizes, times)
        ... ]
        [(1024, 16384, 20), (32768, 524288, 120)]
    """
    low, high = (times_s if each is None else each for each in (p10_s, p90_s))
    points = np.array([sizes_bytes, times_s, low, high], dtype=np.float64)
    sizes, times = points[:2]
    if not len(sizes):
        return []
    marks = [0, *_breaks(points), len(sizes)]
    # If there are three regimes, the first break to be found may be a compromise that no longer
    # holds once the neighbouring breaks are known.
    for at in marks[1:-1]:
        place = marks.index(at)
        before, after = marks[place - 1], marks[place + 1]
        near, here = points[:, before:after], at - before
        if not _falls(near, here) and _jump(near, here) is None:
            del marks[place]
    return [
        Regime(
            start,
            end - 1,
            fit_link(sizes[start:end], times[start:end]) if end - start > 1 else None,
        )
        for start, end in pairwise(marks)
    ]


def _breaks(points: Floats) -> list[int]:
    """Returns the index of each size that begins a regime, except the first one.

    The rows of ``points`` are the sizes, the times, p10 and p90.
    """
    places = range(1, points.shape[1])
    at = next((place for place in places if _falls(points, place)), None)
    if at is None:
        jumps = [(left, place) for place in places if (left := _jump(points, place)) is not None]
        if not jumps:
            return []
        _, at = min(jumps)
    return [*_breaks(points[:, :at]), at, *(at + further for further in _breaks(points[:, at:]))]


def _falls(points: Floats, at: int) -> bool:
    """Returns whether the size at this index clearly takes less time than the previous size."""
    _, times, low, high = points
    return bool(times[at] < times[at - 1] * (1 - LEAST_MISS) and high[at] < low[at - 1])


def _jump(points: Floats, at: int) -> float | None:
    """Returns the residuals of the two sides' fits, or None unless each misses the other side."""
    sizes, times, low, high = points
    if not LEAST_SIZES <= at <= len(sizes) - LEAST_SIZES:
        return None
    left = 0.0
    for side, beyond in ((slice(None, at), at), (slice(at, None), at - 1)):
        # A line that may start below 0 can follow a change of slope; for scattered times, a line
        # that may not is necessary.
        link = fit_link(sizes[side], times[side])
        for line in (_line(sizes[side], times[side]), (link.alpha_s, link.beta_s_per_byte)):
            misses = (line[0] + line[1] * sizes) / times - 1  # positive if the line is too high
            own, miss = misses[side], misses[beyond]
            explained = max(LEAST_MISS, LEAST_SCATTERS * float(np.sqrt(np.mean(own**2))))
            if abs(miss) <= explained or low[beyond] <= (1 + miss) * times[beyond] <= high[beyond]:
                return None
        left += float((own**2).sum())
    return left


def _line(sizes: Floats, times: Floats) -> tuple[float, float]:
    """Returns the alpha and beta of the line with the smallest relative errors.

    Unlike the line from ``fit_link``, this line may start below 0, as it must after a change of
    slope.
    """
    scale = sizes[-1]
    found, _, _, _ = np.linalg.lstsq(
        np.stack([1 / times, sizes / scale / times], axis=1), np.ones(len(sizes)), rcond=None
    )
    return found[0], found[1] / scale
