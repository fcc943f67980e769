"""Aligns the clocks of several machines.

Ranks compare their clocks during the run, which makes the times of their events comparable. A clock
(CLOCK_MONOTONIC in one boot and one time namespace) counts from a starting point of its own, and no
two clocks run at exactly the same speed. A file stores each clock's own readings. Loading the file
adds the clock's offset from the reference, rank 0's clock. The offset is linear between two
comparisons, and constant before the first comparison and after the last. Saving subtracts the
offset again.

``metadata["clocks"]`` has one entry per clock, starting with the reference. If this key is missing,
all ranks shared one clock::

    {"ranks": [2, 3], "how": "store", "samples": [[time_ns, offset_ns, uncertainty_ns], ...]}

In a comparison, one rank asks and the other answers. The uncertainty is half the sum of the
shortest question time and the shortest answer time. Away from a comparison, it grows with time,
because the speeds of two clocks differ by at most ``DRIFT_PPM``, and because that difference
changes by at most ``WANDER_PPM`` during a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ringsim.traces.documents import JsonObject, are_all
from ringsim.traces.events import NONE, Events, Ints

DRIFT_PPM = 100.0  # two quartz crystals of 50 ppm each
WANDER_PPM = 1.0  # a crystal whose temperature changes by a few degrees
# comparisons closer than this are combined, because a difference in speed would not show
CLOSE_NS = 10**9
TIMES = ("post_ns", "wait_ns", "done_ns")
REFERENCE, STORE, KERNELS, UNKNOWN = "reference", "store", "kernels", "not compared"

Sample = Sequence[int]  # time_ns, offset_ns, uncertainty_ns
Clocks = Sequence[Mapping[str, Any]]  # the form of metadata["clocks"]


class RunClock(NamedTuple):
    """One clock of a run, compared with rank 0's clock.

    Attributes:
        ranks: the ranks that used the clock.
        host: the host of these ranks.
        offset_ns: the offset that was added to the clock's times at the first comparison, relative
            to the offset of rank 0's clock.
        uncertainty_ns: the largest possible error of any time in this run, relative to rank 0's
            clock, or None if the clocks were not compared.
        drift_ppm: how much faster rank 0's clock ran between the first and the last comparison, in
            parts per million, or 0 if there was only one comparison.
        how: "reference", "store" (compared over the process group's store), "kernels" (compared by
            the ends of the same operations on GPUs) or "not compared".
    """

    ranks: tuple[int, ...]
    host: str
    offset_ns: int
    uncertainty_ns: int | None
    drift_ppm: float
    how: str


def list_clocks(events: Events, entries: Clocks, hosts: Sequence[str]) -> list[RunClock]:
    """Returns the clocks of a run; see ``Trace.clocks``."""
    raw = unalign(events, entries)
    clocks = []
    for entry in entries:
        samples, ranks = np.array(entry["samples"], dtype=np.int64), tuple(entry["ranks"])
        shown = np.concatenate([getattr(raw, name)[np.isin(raw.rank, ranks)] for name in TIMES])
        # the uncertainty is largest in the middle between two comparisons
        middles = (samples[1:, 0] + samples[:-1, 0]) // 2
        times = np.concatenate([shown[shown != NONE], samples[:, 0]])
        times = np.concatenate([middles, [times.min(), times.max()]])
        uncertainty = (
            0 if entry["how"] == REFERENCE else int(uncertainty_ns(entry["samples"], times).max())
        )
        span_ns, change_ns = samples[-1, :2] - samples[0, :2]
        clocks.append(
            RunClock(
                ranks,
                hosts[ranks[0]],
                int(samples[0, 1]) - entries[0]["samples"][0][1],
                None if entry["how"] == UNKNOWN else uncertainty,
                1e6 * float(change_ns) / float(max(span_ns, 1)),
                entry["how"],
            )
        )
    return clocks


# -- the comparisons that the ranks recorded


def find_clocks(metas: Mapping[int, JsonObject], start_ns: int) -> Clocks:
    """Returns the entries in ``metadata["clocks"]``, or an empty list if there is only one clock.

    Args:
        metas: each rank's metadata. "clock" names the rank's clock. One rank per clock also has
            "clock_number" (0 for rank 0's clock) and the comparisons under "clock 0", "clock 1",
            and so on. A comparison lists the number of the other clock (a lower number), the time
            on the rank's own clock, the offset to add, and the width of the interval that contains
            the offset, in ns.
        start_ns: the time on the ranks' clocks from which the times of events count.

    Example:
        >>> metas = {
        ...     0: {"clock": "a", "clock_number": 0},
        ...     1: {"clock": "b", "clock_number": 1, "clock 0": [0, 9_000, -4_000, 60]},
        ... }
        >>> for entry in find_clocks(metas, 1_000):
        ...     print(entry)
        {'ranks': [0], 'how': 'reference', 'samples': [[0, 0, 0]]}
        {'ranks': [1], 'how': 'store', 'samples': [[8000, -4000, 30]]}
    """
    ranks: dict[str, list[int]] = {}
    for rank in sorted(metas):
        if isinstance(name := metas[rank].get("clock"), str):
            ranks.setdefault(name, []).append(rank)
    if len(ranks) < 2:
        return []
    numbers = {
        rank: meta["clock_number"]
        for rank, meta in metas.items()
        if type(meta.get("clock_number")) is int and "clock" in meta
    }
    found, number_of = {0: [[0, 0, 0]]}, dict[str, int]()
    for rank in sorted(numbers, key=lambda rank: (numbers[rank], rank)):
        name, number = metas[rank]["clock"], numbers[rank]
        if number not in found and (samples := _compare(metas[rank], start_ns, found)):
            found[number] = samples
        if number in found:
            number_of.setdefault(name, number)
    entries = [
        {
            "ranks": ranks[name],
            "how": UNKNOWN if name not in number_of else STORE if number_of[name] else REFERENCE,
            "samples": found[number_of.get(name, 0)],
        }
        for name in ranks
    ]
    return sorted(entries, key=lambda entry: entry["how"] != REFERENCE)


def _compare(
    meta: JsonObject, start_ns: int, found: Mapping[int, list[list[int]]]
) -> list[list[int]]:
    """Returns a clock's comparisons with the reference clock.

    They are computed from its comparisons with clocks whose own offsets are known.
    """
    samples: list[list[int]] = []
    good = [
        one
        for key, one in meta.items()
        if key.startswith("clock ")
        and are_all(one, int)
        and len(one) == 4
        and all(abs(number) < 2**61 for number in one)
        and one[3] >= 0
    ]
    for asked, time_ns, offset_ns, apart_ns in sorted(good, key=lambda one: one[1]):
        if asked in found:
            at_ns = np.array([time_ns + offset_ns - start_ns])
            shift = int(shift_ns(found[asked], at_ns)[0])
            about_ns = -(-apart_ns // 2)
            if asked != 0:
                about_ns += int(uncertainty_ns(found[asked], at_ns)[0])
            sample = [time_ns - start_ns, offset_ns + shift, about_ns]
            if not samples or sample[0] - samples[-1][0] >= CLOSE_NS:
                samples.append(sample)
            else:
                samples[-1] = _combine(samples[-1], sample)
    return samples if are_clocks([{"ranks": [0], "how": STORE, "samples": samples}]) else []


def _combine(before: Sample, after: Sample) -> list[int]:
    """Returns the single comparison that follows from two consistent comparisons.

    If the two contradict each other, returns the more exact one.

    Example:
        >>> _combine([0, 100, 50], [10_000, 180, 50]), _combine([0, 100, 50], [10_000, 300, 20])
        ([10000, 140, 11], [10000, 300, 20])
    """
    drift_ns = math.ceil(1e-6 * DRIFT_PPM * (after[0] - before[0]))
    least = max(before[1] - before[2] - drift_ns, after[1] - after[2])
    most = min(before[1] + before[2] + drift_ns, after[1] + after[2])
    return (
        [after[0], (least + most) // 2, (most - least + 1) // 2]
        if least <= most
        else [*min(before, after, key=lambda one: one[2])]
    )


def are_clocks(value: Any) -> bool:
    """Returns whether a value is valid as ``metadata["clocks"]``.

    Numbers must be within their limits, times must ascend, and no clock may run much faster or
    slower than the reference.
    """
    if not are_all(value, dict):
        return False
    ranks: list[int] = []
    for entry in value:
        samples, mine = entry.get("samples"), entry.get("ranks")
        if not (
            are_all(samples, list)
            and samples
            and are_all(mine, int)
            and mine
            and isinstance(entry.get("how"), str)
        ):
            return False
        if not all(
            are_all(one, int) and len(one) == 3 and max(map(abs, one)) < 2**62 and one[2] >= 0
            for one in samples
        ):
            return False
        if any(
            after[0] - one[0] < max(2 * abs(after[1] - one[1]), 1)
            for one, after in pairwise(samples)
        ):
            return False
        ranks += mine
    return len(ranks) == len(set(ranks))


# -- times


def shift_ns(samples: Sequence[Sample], times: Ints) -> Ints:
    """Returns the offsets to add to a clock's times.

    Example:
        >>> shift_ns([[0, 100, 5], [1000, 110, 5]], np.array([-50, 0, 500, 2000])).tolist()
        [100, 100, 105, 110]
    """
    first, offset, _ = samples[0]
    known = np.array(samples, dtype=np.int64)
    # Only differences become floats. Float precision suffices for differences, and adding a
    # constant to all times does not change the result.
    shift: Ints = offset + np.rint(
        np.interp(times - first, known[:, 0] - first, known[:, 1] - offset)
    ).astype(np.int64)
    return shift


def uncertainty_ns(samples: Sequence[Sample], times: Ints) -> Ints:
    """Returns the largest possible error in each offset that ``shift_ns`` returns.

    Example:
        >>> uncertainty_ns(
        ...     [[0, 100, 5], [10_000_000, 110, 5]], np.array([-10_000, 0, 5_000_000])
        ... ).tolist()
        [6, 5, 10]
    """
    known = np.array(samples, dtype=np.int64)
    after = np.searchsorted(known[:, 0], times).clip(1, max(len(known) - 1, 1))
    before, after = known[after - 1, 0], known[np.minimum(after, len(known) - 1), 0]
    outside = np.maximum(known[0, 0] - times, times - known[-1, 0]).clip(0)
    # In the worst case, the clock is faster than the mean by WANDER_PPM until this moment, and
    # slower by WANDER_PPM afterwards.
    inside = (
        2 * (times - before).clip(0) * ((after - times).clip(0) / np.maximum(after - before, 1))
    )
    known_ns = np.interp(times - known[0, 0], known[:, 0] - known[0, 0], known[:, 2])
    bound: Ints = np.ceil(known_ns + 1e-6 * (DRIFT_PPM * outside + WANDER_PPM * inside)).astype(
        np.int64
    )
    return bound


def align(events: Events, clocks: Clocks) -> Events:
    """Returns the events with each clock's times converted to the reference clock."""
    return _shift(events, clocks, shift_ns)


def unalign(events: Events, clocks: Clocks) -> Events:
    """Returns the events with the times that each clock showed; the inverse of ``align``."""
    return _shift(events, clocks, _shift_back)


def reference_ns(clocks: Clocks, rank: int, time_ns: int) -> int:
    """Returns a rank's time converted to rank 0's clock."""
    samples = next((entry["samples"] for entry in clocks if rank in entry["ranks"]), [[0, 0, 0]])
    return time_ns + int(shift_ns(samples, np.array([time_ns]))[0])


def _shift_back(samples: Sequence[Sample], times: Ints) -> Ints:
    """Returns the offsets that undo ``shift_ns``."""
    shown = times + shift_ns(
        [[time_ns + offset_ns, -offset_ns, 0] for time_ns, offset_ns, _ in samples], times
    )
    for step in (1, -2):  # the result may be off by one because of rounding
        shown = np.where(shown + shift_ns(samples, shown) == times, shown, shown + step)
    return np.asarray(shown - times)


def _shift(events: Events, clocks: Clocks, find: Any) -> Events:
    if not clocks:
        return events
    columns = {name: getattr(events, name).copy() for name in TIMES}
    for entry in clocks:
        for rank in entry["ranks"]:
            first, last = np.searchsorted(events.rank, [rank, rank + 1])
            for values in columns.values():
                mine = values[first:last]
                mine += np.where(mine == NONE, 0, find(entry["samples"], mine))
    return replace(events, **columns)


def align_run(events: Events, clocks: Clocks, start_ns: int | None) -> tuple[Events, Clocks, int]:
    """Aligns the events of a newly read run, and shifts their times to count from the run's start.

    Args:
        events: the events, with times as the clocks showed them.
        clocks: the clocks, with their offsets to the reference.
        start_ns: the start of the run on the reference clock, or None. The first event becomes the
            start if it is earlier or if this is None.

    Returns:
        The events, the clocks, and the start. With these clocks, ``unalign`` returns times that
        count from 0.
    """
    ranks, places = np.unique(events.rank, return_index=True)
    firsts = np.minimum.reduceat(events.post_ns, places) if len(events) else places
    base_ns, moved, start_ns = find_start(
        dict(zip(ranks.tolist(), firsts.tolist(), strict=True)), clocks, start_ns
    )
    return align(count_from(events, base_ns), moved), moved, start_ns


def find_start(
    firsts: Mapping[int, int], clocks: Clocks, start_ns: int | None
) -> tuple[int, Clocks, int]:
    """Finds the time from which a run's times count; see ``align_run``.

    Args:
        firsts: the post time of each rank's first event, as the rank's clock showed it.
        clocks: the clocks, with their offsets to the reference.
        start_ns: the start of the run on the reference clock, or None.

    Returns:
        The number to subtract from the clocks' times, the clocks, and the start. With these clocks,
        ``align`` then returns times that count from 0.
    """
    first_ns = min(
        (reference_ns(clocks, rank, post_ns) for rank, post_ns in firsts.items()),
        default=start_ns or 0,
    )
    start_ns = first_ns if start_ns is None else min(start_ns, first_ns)
    base_ns = min(firsts.values(), default=0) if clocks else start_ns
    moved = [
        {
            **entry,
            "samples": [
                [time_ns - base_ns, offset_ns + base_ns - start_ns, about]
                for time_ns, offset_ns, about in entry["samples"]
            ],
        }
        for entry in clocks
    ]
    return base_ns, moved, start_ns


def count_from(events: Events, base_ns: int) -> Events:
    """Returns the events with times that count from ``base_ns``; earlier times become 0."""
    columns: dict[str, Any] = {}
    for name in TIMES:
        values = getattr(events, name)
        columns[name] = np.where(values == NONE, NONE, np.maximum(values - base_ns, 0))
    return replace(events, **columns)
