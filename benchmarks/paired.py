"""Functions that the benchmarks share.

They compute ratios of medians with bootstrap intervals, and describe the machine.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime

from ringsim import provenance

NOISE_LIMIT = 0.02  # a baseline that differs from itself by more makes a run inconclusive


def ratio_interval(
    ours: Sequence[float], peers: Sequence[float], draws: int = 2000
) -> tuple[float, float, float]:
    """Returns the ratio of two medians, and its 95 % bootstrap interval."""

    def draw() -> float:
        return statistics.median(random.choices(ours, k=len(ours))) / statistics.median(
            random.choices(peers, k=len(peers))
        )

    ratios = sorted(draw() for _ in range(draws))
    return (
        statistics.median(ours) / statistics.median(peers),
        ratios[int(0.025 * draws)],
        ratios[int(0.975 * draws)],
    )


def against_itself(baseline: Sequence[float]) -> str:
    """Compares every other value of a baseline with the rest.

    Returns a text that includes the ratio, and whether the run is conclusive.
    """
    if len(baseline) < 4:
        return "too few runs to compare the baseline with itself"
    ratio = statistics.median(baseline[::2]) / statistics.median(baseline[1::2])
    verdict = (
        "fine"
        if abs(ratio - 1) <= NOISE_LIMIT
        else f"above {NOISE_LIMIT:.0%}: INCONCLUSIVE, the machine is too noisy"
    )
    return f"baseline compared with itself: {ratio:.3f} ({verdict})"


def where() -> str:
    """Returns a line that describes the machine, the versions, the date and the load."""
    machine, versions = provenance.machine(), provenance.versions()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    day = datetime.now(UTC).date().isoformat()
    return (
        f"{machine['cpu']}, {machine['cores']} cores, torch {versions['torch']}, {day}, load "
        f"average {load}"
    )
