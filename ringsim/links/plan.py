"""What is to be measured: blocks, one for each pattern, edge and size, in the order in which they are measured."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from ringsim.errors import ArgumentError

__all__ = ["PATTERNS", "SIZES", "STREAM", "Block", "Plan", "make_plan"]

PATTERNS: Final = ("pingpong", "oneway", "exchange", "shift", "all_reduce")
SIZES: Final = tuple(2**power for power in range(3, 29))  # 8 B to 256 MiB
STREAM: Final = 8  # messages in flight in the pattern "oneway"
MAX_SIZE_BYTES: Final = 2**30
_WORD: Final = "bandwidth"
_LABEL: Final = re.compile(rf"{_WORD} (\w+) (\w+) (-?\d+) (-?\d+) (\d+)")


class Block(NamedTuple):
    """One pattern on one edge at one size: what gives one row of the table.

    Attributes:
        backend: "gloo", "nccl"; "tcp" and "memcpy" for the ceilings.
        pattern: one of ``PATTERNS``; "copy" for the ceiling "memcpy".
        src: global rank, -1 where there is no single edge.
        dst: likewise.
        size_bytes: of one message, or of the buffer.
    """

    backend: str
    pattern: str
    src: int
    dst: int
    size_bytes: int

    @property
    def label(self) -> str:
        """The label that its steps bear in the trace."""
        return f"{_WORD} {self.backend} {self.pattern} {self.src} {self.dst} {self.size_bytes}"

    @classmethod
    def from_label(cls, label: str) -> Self | None:
        """Returns the block that bears a label, None for one of something else.

        Example:
            >>> block = Block("gloo", "pingpong", 0, 1, 4096)
            >>> Block.from_label(block.label) == block, Block.from_label("bandwidth of a b c d")
            (True, None)
        """
        found = _LABEL.fullmatch(label)
        return cls(found[1], found[2], int(found[3]), int(found[4]), int(found[5])) if found else None

    @property
    def copies(self) -> int:
        """How many copies one step of "memcpy" makes: a single small one is shorter than the record of it."""
        return max(1, min(64, 65_536 // self.size_bytes))


@dataclass(frozen=True)
class Plan:
    """A measurement.

    Attributes:
        blocks: in order; sizes ascend, so that what a limit or an interrupt cuts off are the largest, of all edges alike.
        limit_s: how long all of it may take.
        timeout_s: limit of one blocked operation of the ranks; no block may last longer.
    """

    blocks: tuple[Block, ...]
    limit_s: float
    timeout_s: float


def make_plan(
    ranks: Sequence[int],
    sizes: Any,
    pattern: Any,
    backend: str,
    *,
    edge: Any = None,
    ceilings: bool = True,
    limit_s: Any = 60.0,
    timeout_s: float = 30.0,
) -> Plan:
    """Checks what is asked for, and puts it in order.

    Args:
        ranks: the ring's global ranks, in order.
        sizes: sizes in bytes; None for ``SIZES``.
        pattern: one of ``PATTERNS``, or several.
        backend: "gloo" or "nccl".
        edge: (src, dst), an edge of the ring; None for all.
        ceilings: whether a copy in memory and, on Gloo, TCP over loopback are measured, too.
        limit_s: see ``Plan``.
        timeout_s: see ``Plan``.

    Returns:
        The plan.

    Raises:
        ArgumentError: an argument breaks its rule.

    Example:
        >>> plan = make_plan((0, 1, 2), [8, 1024], "pingpong", "gloo", edge=(2, 0), ceilings=False)
        >>> [(block.src, block.dst, block.size_bytes) for block in plan.blocks]
        [(2, 0, 8), (2, 0, 1024)]
    """
    patterns = (pattern,) if isinstance(pattern, str) else tuple(pattern)
    if not patterns or not set(patterns) <= set(PATTERNS):
        raise ArgumentError(f"pattern must be one of {', '.join(PATTERNS)}, or a list of them, got {pattern!r}.")
    if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not limit_s > 0:
        raise ArgumentError(f"limit_s must be a positive number of seconds, got {limit_s!r}.")
    checked = _check_sizes(SIZES if sizes is None else sizes, patterns)
    edges = _edges(ranks, edge)
    blocks = []
    for size in checked:
        for name in patterns:
            if name == "all_reduce":
                blocks.append(Block(backend, name, -1, -1, size))
            elif name == "shift":  # all edges at once: one block, one row for each edge
                blocks += [Block(backend, name, -1, -1, size)] if edges else []
            else:
                blocks += [Block(backend, name, src, dst, size) for src, dst in edges]
        if ceilings:
            blocks += [Block("tcp", "pingpong", *edges[0], size)] if edges and backend == "gloo" else []
            blocks.append(Block("memcpy", "copy", -1, -1, size))
    return Plan(tuple(blocks), float(limit_s), timeout_s)


def _check_sizes(sizes: Any, patterns: tuple[str, ...]) -> list[int]:
    try:
        given = [operator.index(size) for size in sizes if not isinstance(size, bool)]
        known = len(given) == len(sizes)
    except TypeError:
        given, known = [], False
    if not given or not known or not all(1 <= size <= MAX_SIZE_BYTES for size in given):
        raise ArgumentError(
            f"sizes must be whole numbers of bytes from 1 to 2**30, one or more, got {sizes!r}. Try sizes=[8, 4096, 2**20]."
        )
    if "all_reduce" in patterns and any(size % 4 for size in given):
        raise ArgumentError(f"sizes must be multiples of 4 for all_reduce, which adds float32 numbers, got {sizes!r}.")
    return sorted(set(given))


def _edges(ranks: Sequence[int], edge: Any) -> list[tuple[int, int]]:
    """Returns the edges of a ring, or the one that is asked for."""
    edges = [(rank, ranks[(place + 1) % len(ranks)]) for place, rank in enumerate(ranks)] if len(ranks) > 1 else []
    if edge is None:
        return edges
    chosen = tuple(edge) if isinstance(edge, tuple | list) else None
    if chosen not in edges:
        raise ArgumentError(f"edge must be (src, dst), one of the ring's {edges}, got {edge!r}. Leave it out for all of them.")
    return [chosen]
