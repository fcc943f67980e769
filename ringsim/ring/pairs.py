"""The pairs of neighbours in a ring, and their groups' names.

This module does not need torch, so that the code that starts and simulates ranks can use it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Pair = tuple[int, int]


def all_pairs(ranks: Sequence[int]) -> list[Pair]:
    """Returns the pairs of a ring in order, or an empty list for a ring of one rank.

    Example:
        >>> all_pairs([2, 3, 5])
        [(2, 3), (3, 5), (5, 2)]
    """
    return list(itertools.pairwise([*ranks, ranks[0]])) if len(ranks) > 1 else []


def pair_name(pair: Pair) -> str:
    """Returns the name of a pair's group, with the predecessor first.

    Example:
        >>> pair_name((2, 3)), pair_name((3, 0))
        ('ring:2>3', 'ring:3>0')
    """
    return f"ring:{pair[0]}>{pair[1]}"


def list_groups(pairs: Sequence[Pair]) -> list[list[object]]:
    """Returns the names and ranks of pairs' groups, as a trace's metadata lists them.

    Example:
        >>> list_groups(all_pairs(range(2)))
        [['ring:0>1', [0, 1]], ['ring:1>0', [1, 0]]]
    """
    return [[pair_name(pair), list(pair)] for pair in pairs]
