"""What every generator of schedules asks of its arguments."""

from __future__ import annotations

from typing import Final

from ringsim.errors import ArgumentError, check_integer

__all__ = ["check_counts", "check_size"]

_MOST_FORWARDS: Final = 10**8  # of all microbatches on all stages: what a machine may hold


def check_counts(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> None:
    """Raises ArgumentError for a count that is no whole number, or less than 1."""
    counts = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    for name, value in counts.items():
        check_integer(name, value, 1, "Say how many the pipeline has.")


def check_size(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> None:
    """Raises ArgumentError for a count that breaks its rule, or a step that is too large to be held."""
    check_counts(num_ranks, num_microbatches, num_chunks)
    size = num_ranks * num_microbatches * num_chunks
    if size > _MOST_FORWARDS:
        raise ArgumentError(
            f"num_ranks and num_microbatches must make a step of {_MOST_FORWARDS:,} forward passes or fewer, got {num_ranks} and "
            f"{num_microbatches}. Take fewer."
        )
