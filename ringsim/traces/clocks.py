"""Clocks of several machines.

The ranks compare them while they run, which makes the times of their events comparable. A clock
(CLOCK_MONOTONIC, of one boot and one time namespace) counts from a moment of its own, and no two
are equally fast. A file keeps what each clock showed. Reading adds the offset that the clock had at
that moment: linear between two comparisons with the reference, which is rank 0's clock, and
constant before the first and after the last. Saving takes it away again.

``metadata["clocks"]`` has an entry for each clock, the reference first; without it, all ranks had
one::

    {"ranks": [2, 3], "how": "store", "samples": [[time_ns, offset_ns, uncertainty_ns], ...]}

The uncertainty of a comparison is half the time that the quickest question and the quickest answer
took. It grows with the time since, or until, the nearest one: two clocks differ in speed by
``DRIFT_PPM`` at most, and while they run, their difference in speed changes by ``WANDER_PPM`` at
most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from ringsim.traces.documents import are_all
from ringsim.traces.events import NONE, Events, Ints

__all__ = [
    "Clock",
    "align",
    "align_run",
    "are_clocks",
    "count_from",
    "find_clocks",
    "find_start",
    "list_clocks",
    "reference_ns",
    "shift_ns",
    "unalign",
    "uncertainty_ns",
]

DRIFT_PPM: Final = 100.0  # two quartz crystals of 50 ppm each
WANDER_PPM: Final = 1.0  # a crystal whose temperature changes by a few degrees
# comparisons less than this apart become one: a difference in speed does not show between them
CLOSE_NS: Final = 10**9
TIMES: Final = ("post_ns", "wait_ns", "done_ns")
REFERENCE, STORE, UNKNOWN = "reference", "store", "not compared"

Sample = Sequence[int]  # time_ns, offset_ns, uncertainty_ns


class Clock(NamedTuple):
    """One clock of a run, against rank 0's.

    Attributes:
        ranks: that it timed.
        host: where they ran.
        offset_ns: what is added to its times, at the first comparison, beyond what is added to
            those of rank 0's clock.
        uncertainty_ns: the most by which a time of this run may be wrong against rank 0's clock;
            None if it was not compared.
        drift_ppm: how much faster rank 0's clock was, in millionths, between the first comparison
            and the last; 0 if there was one.
        how: "reference", "store" (compared over the process group's store) or "not compared".
    """

    ranks: tuple[int, ...]
    host: str
    offset_ns: int
    uncertainty_ns: int | None
    drift_ppm: float
    how: str


def list_clocks(
    events: Events, entries: Sequence[Mapping[str, Any]], hosts: Sequence[str]
) -> list[Clock]:
    """Returns the clocks of a run, see ``Trace.clocks``."""
    raw = unalign(events, entries)
    clocks = []
    for entry in entries:
        samples, ranks = np.array(entry["samples"], dtype=np.int64), tuple(entry["ranks"])
        shown = np.concatenate([getattr(raw, name)[np.isin(raw.rank, ranks)] for name in TIMES])
        # between two comparisons the uncertainty is greatest in the middle
        middles = (samples[1:, 0] + samples[:-1, 0]) // 2
        times = np.concatenate([shown[shown != NONE], samples[:, 0]])
        times = np.concatenate([middles, [times.min(), times.max()]])
        uncertainty = (
            int(uncertainty_ns(entry["samples"], times).max()) if entry["how"] == STORE else 0
        )
        span_ns, change_ns = samples[-1, :2] - samples[0, :2]
        clocks.append(
            Clock(
                ranks,
                hosts[ranks[0]],
                int(samples[0, 1]) - entries[0]["samples"][0][1],
                None if entry["how"] == UNKNOWN else uncertainty,
                1e6 * float(change_ns) / float(max(span_ns, 1)),
                entry["how"],
            )
        )
    return clocks


# -- what the ranks wrote down


def find_clocks(metas: Mapping[int, Mapping[str, Any]], start_ns: int) -> list[dict[str, Any]]:
    """Returns the entries of ``metadata["clocks"]``, nothing for one clock.

    Args:
        metas: what each rank wrote of itself: "clock", which names its clock; and one rank of each
            clock "clock_number", 0 for rank 0's clock, and under "clock 0", "clock 1", ... its
            comparisons: the number of the clock that it asked, a lower one; the time on its own
            clock; what is to be added there; and the distance of the limits between which that is,
            in ns.
        start_ns: on the ranks' clocks, from which the times of the events count.

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
    meta: Mapping[str, Any], start_ns: int, found: Mapping[int, list[list[int]]]
) -> list[list[int]]:
    """Returns a clock's comparisons with the reference.

    From those with clocks of which that is known.
    """
    samples: list[list[int]] = []
    said = [value for key, value in meta.items() if key.startswith("clock ")]
    good = [
        one
        for one in said
        if are_all(one, int)
        and len(one) == 4
        and all(abs(number) < 2**61 for number in one)
        and one[3] >= 0
    ]
    for asked, time_ns, offset_ns, apart_ns in sorted(good, key=lambda one: one[1]):
        if asked in found:
            at_ns = np.array([time_ns + offset_ns - start_ns])
            more = (
                int(shift_ns(found[asked], at_ns)[0]),
                0 if asked == 0 else int(uncertainty_ns(found[asked], at_ns)[0]),
            )
            sample = [time_ns - start_ns, offset_ns + more[0], -(-apart_ns // 2) + more[1]]
            if not samples or sample[0] - samples[-1][0] >= CLOSE_NS:
                samples.append(sample)
            else:
                samples[-1] = _combine(samples[-1], sample)
    return samples if are_clocks([{"ranks": [0], "how": STORE, "samples": samples}]) else []


def _combine(before: Sample, after: Sample) -> list[int]:
    """Returns what two comparisons leave possible together.

    The better one, if they contradict each other.

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
    """Returns whether this can be ``metadata["clocks"]``.

    Numbers in limits, times that ascend, and no clock twice as fast as another.
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
            2 * abs(after[1] - one[1]) > after[0] - one[0] or after[0] == one[0]
            for one, after in pairwise(samples)
        ):
            return False
        ranks += mine
    return len(ranks) == len(set(ranks))


# -- times


def shift_ns(samples: Sequence[Sample], times: Ints) -> Ints:
    """Returns what is to be added to times of a clock.

    Example:
        >>> shift_ns([[0, 100, 5], [1000, 110, 5]], np.array([-50, 0, 500, 2000])).tolist()
        [100, 100, 105, 110]
    """
    first, offset, _ = samples[0]
    known = np.array(samples, dtype=np.int64)
    # Only differences become floats: their digits suffice, and the same times shifted as a whole
    # give the same.
    shift: Ints = offset + np.rint(
        np.interp(times - first, known[:, 0] - first, known[:, 1] - offset)
    ).astype(np.int64)
    return shift


def uncertainty_ns(samples: Sequence[Sample], times: Ints) -> Ints:
    """Returns by how much what ``shift_ns`` returns may be wrong.

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
    # Faster by WANDER_PPM until this moment and slower by it after, against the mean: no other
    # course is further off.
    inside = (
        2 * (times - before).clip(0) * ((after - times).clip(0) / np.maximum(after - before, 1))
    )
    known_ns = np.interp(times - known[0, 0], known[:, 0] - known[0, 0], known[:, 2])
    bound: Ints = np.ceil(known_ns + 1e-6 * (DRIFT_PPM * outside + WANDER_PPM * inside)).astype(
        np.int64
    )
    return bound


def align(events: Events, clocks: Sequence[Mapping[str, Any]]) -> Events:
    """Returns events of which the times are the reference's, from those that each clock showed."""
    return _shift(events, clocks, shift_ns)


def unalign(events: Events, clocks: Sequence[Mapping[str, Any]]) -> Events:
    """Returns what each clock showed; ``align`` makes of that the same events again."""
    return _shift(events, clocks, _shift_back)


def reference_ns(clocks: Sequence[Mapping[str, Any]], rank: int, time_ns: int) -> int:
    """Returns a time of a rank as rank 0's clock shows it."""
    samples = next((entry["samples"] for entry in clocks if rank in entry["ranks"]), [[0, 0, 0]])
    return time_ns + int(shift_ns(samples, np.array([time_ns]))[0])


def _shift_back(samples: Sequence[Sample], times: Ints) -> Ints:
    """Returns what is to be added to times that ``shift_ns`` was added to."""
    shown = times + shift_ns(
        [[time_ns + offset_ns, -offset_ns, 0] for time_ns, offset_ns, _ in samples], times
    )
    for step in (1, -2):  # rounding may have gone the other way
        shown = np.where(shown + shift_ns(samples, shown) == times, shown, shown + step)
    return np.asarray(shown - times)


def _shift(events: Events, clocks: Sequence[Mapping[str, Any]], find: Any) -> Events:
    if not clocks:
        return events
    columns = {name: getattr(events, name).copy() for name in TIMES}
    for entry in clocks:
        for rank in entry["ranks"]:
            first, last = np.searchsorted(events.rank, [rank, rank + 1])
            for values in columns.values():
                mine = values[first:last]
                values[first:last] = np.where(
                    mine == NONE, NONE, mine + find(entry["samples"], mine)
                )
    return replace(events, **columns)


def align_run(
    events: Events, clocks: Sequence[Mapping[str, Any]], start_ns: int | None
) -> tuple[Events, list[dict[str, Any]], int]:
    """Aligns the events of a run just read, and lets their times count from its start.

    Args:
        events: as the clocks showed them.
        clocks: with offsets that make them the reference's times.
        start_ns: of the run, on the reference; the first event becomes the start if it is
            earlier, or this is None.

    Returns:
        The events; the clocks, with which ``unalign`` gives times from 0 on; and the start.
    """
    ranks, places = np.unique(events.rank, return_index=True)
    firsts = np.minimum.reduceat(events.post_ns, places) if len(events) else places
    base_ns, moved, start_ns = find_start(
        dict(zip(ranks.tolist(), firsts.tolist(), strict=True)), clocks, start_ns
    )
    return align(count_from(events, base_ns), moved), moved, start_ns


def find_start(
    firsts: Mapping[int, int], clocks: Sequence[Mapping[str, Any]], start_ns: int | None
) -> tuple[int, list[dict[str, Any]], int]:
    """Finds from where the times of a run count, see ``align_run``.

    Args:
        firsts: by rank, when its first event was posted, as its clock showed it.
        clocks: with offsets that make them the reference's times.
        start_ns: of the run, on the reference, or None.

    Returns:
        What is to be taken from what the clocks showed; the clocks, with which ``align`` then gives
        times from 0 on; and the start.
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
    """Returns events whose times count from ``base_ns``; an earlier one becomes 0."""
    columns: dict[str, Any] = {}
    for name in TIMES:
        values = getattr(events, name)
        columns[name] = np.where(values == NONE, NONE, np.maximum(values - base_ns, 0))
    return replace(events, **columns)
