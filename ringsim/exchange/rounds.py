"""Collectives as rounds of messages, for tools and clocks that know only messages.

The algorithms are the plain ones, and the bytes those of ``ringsim.costs``: a ring for all_reduce, all_gather and reduce_scatter, pairs in
turn for all_to_all, a binomial tree for broadcast and reduce, the root with each in turn for gather and scatter, dissemination for a
barrier. In a round each rank waits for what it sends and receives before the next begins.

Source:
    R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19 (2005)
"""

from __future__ import annotations

from collections.abc import Iterator

from ringsim.errors import TraceFileError

__all__ = ["count_rounds", "make_rounds"]

Message = tuple[int, int, int]  # from, to: places in the group; bytes


def make_rounds(op: str, size: int, root: int, size_bytes: int) -> Iterator[list[Message]]:
    """Yields the rounds of one collective.

    Args:
        op: as torch spells it.
        size: number of ranks in the group.
        root: place of the root in the group; anything where the operation has none.
        size_bytes: S, as ``ringsim.costs`` counts it.

    Yields:
        The messages of a round: from, to (places in the group), bytes.

    Raises:
        TraceFileError: there is no such operation.

    Example:
        >>> list(make_rounds("broadcast", 4, 1, 100))
        [[(1, 2, 100)], [(1, 3, 100), (2, 0, 100)]]
        >>> sum(len(messages) for messages in make_rounds("all_reduce", 4, -1, 100))
        24
    """
    share, ring = max(-(-size_bytes // size), 1), range(size)
    if size == 1:
        return
    if op.startswith("all_reduce"):
        yield from ([(rank, (rank + 1) % size, share) for rank in ring] for _ in range(2 * (size - 1)))
    elif op.startswith(("all_gather", "reduce_scatter")):
        yield from ([(rank, (rank + 1) % size, share) for rank in ring] for _ in range(size - 1))
    elif op.startswith("all_to_all"):
        yield from ([(rank, (rank + step) % size, share) for rank in ring] for step in range(1, size))
    elif op == "broadcast":
        yield from _tree(size, root, max(size_bytes, 1))
    elif op == "reduce":
        yield from (
            [(to, source, amount) for source, to, amount in messages] for messages in [*_tree(size, root, max(size_bytes, 1))][::-1]
        )
    elif op == "gather":
        yield from ([(rank, root, share)] for rank in ring if rank != root)
    elif op == "scatter":
        yield from ([(root, rank, share)] for rank in ring if rank != root)
    elif op in ("barrier", "monitored_barrier"):
        yield from ([(rank, (rank + 2**step) % size, 1) for rank in ring] for step in range((size - 1).bit_length()))
    else:
        raise TraceFileError(f"A collective must be one that messages are known for, got {op!r}. Leave it out of the trace.")


def count_rounds(op: str, size: int, size_bytes: int) -> tuple[int, int]:
    """Returns how many rounds a collective has, and how many bytes each message of them.

    Example:
        >>> count_rounds("all_reduce", 4, 100), count_rounds("barrier", 5, 0)
        ((6, 25), (3, 1))
    """
    if size == 1:
        return 0, 0
    messages = next(make_rounds(op, size, 0, size_bytes))
    if op.startswith("all_reduce"):
        return 2 * (size - 1), messages[0][2]
    if op in ("broadcast", "reduce", "barrier", "monitored_barrier"):
        return (size - 1).bit_length(), messages[0][2]
    return size - 1, messages[0][2]


def _tree(size: int, root: int, size_bytes: int) -> Iterator[list[Message]]:
    """Yields the rounds in which those that have it send it on, each time to as many others."""
    have = 1
    while have < size:
        yield [((root + place) % size, (root + place + have) % size, size_bytes) for place in range(min(have, size - have))]
        have *= 2
