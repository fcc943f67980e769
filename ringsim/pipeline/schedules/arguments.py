"""What every generator of schedules asks of its arguments."""

from __future__ import annotations

from ringsim.errors import ArgumentError

__all__ = ["check_counts"]


def check_counts(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> None:
    """Raises ArgumentError for a count that is less than 1."""
    counts = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    for name, value in counts.items():
        if value < 1:
            raise ArgumentError(f"{name} must be 1 or more, got {value}. Say how many the pipeline has.")
