"""The check for the lesson on layouts: the order of the dimensions of a mesh."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations
from math import prod

import numpy as np

from ringsim.check.examination import (
    Answer,
    CheckResult,
    Examination,
    Wrong,
    examine,
    refuse_text,
    shown,
)

CASES = 100  # so many that an answer that is wrong for few of them fails
Sizes = dict[str, int]
_NAMES = ("dp", "pp", "tp")
_NAMES_HINT = "Return all keys of sizes, each once, in a list, the outermost dimension first."
_ORDER_HINT = (
    "Try every order in itertools.permutations(sizes). Number the ranks with np.arange(...)."
    "reshape(...), and divide by per_host to get their hosts. Compare the hosts with "
    "np.roll(hosts, 1, axis): each difference is a link between two hosts, for sent[name] bytes."
)


def mesh_order(function: Answer, *, seed: int | None = None) -> CheckResult:
    """Checks a function that chooses the order of a mesh's dimensions.

    ``function(sizes, sent, per_host)`` receives the number of ranks in each dimension, such as
    ``{"dp": 4, "tp": 16}``, the bytes that each rank sends to the next rank of that dimension in a
    step, and the number of ranks on a host. It returns the names of the dimensions, from the
    outermost to the innermost. Ranks are numbered along the innermost dimension first, and fill one
    host after another. The check uses random sizes and bytes. Among all orders, no other may send
    fewer bytes from one host to another.

    Args:
        function: the answer.
        seed: the seed for generating the sizes and bytes, or None for a random seed.

    Returns:
        The verdict.

    Example:
        >>> print(mesh_order(lambda sizes, sent, per_host: [*sizes], seed=1).hints[0])
        Try every order in itertools.permutations(sizes).
    """
    return examine("mesh_order", function, _judge, seed)


def _judge(examination: Examination) -> str:
    draw = examination.random
    cases = [
        (
            {name: draw.choice((2, 4, 8, 16)) for name in _NAMES},
            {name: draw.randrange(1, 100) * 10**8 for name in _NAMES},
            draw.choice((4, 8)),
        )
        for _ in range(CASES)
    ]
    answers = examination.ask(cases, lambda answer: tuple(map(str, refuse_text(answer))))
    for (sizes, sent, per_host), order in answers:
        about = f"With sizes {sizes}, sent {sent} and {per_host} ranks on a host"
        crossing = {each: _crossing(sizes, sent, per_host, each) for each in permutations(sizes)}
        found, least = crossing.get(order), min(crossing.values())
        if found is None:
            raise Wrong(f"{about}, your answer must be an order, got {shown(order)}.", _NAMES_HINT)
        if found > least:
            reason = (
                f"{about}, the order {', '.join(order)} sends {found / 1e9:.1f} GB from host to "
                f"host, but {least / 1e9:.1f} GB would be enough."
            )
            raise Wrong(reason, _ORDER_HINT)
    return f"Right for {CASES} meshes."


def _crossing(sizes: Sizes, sent: Sizes, per_host: int, order: Iterable[str]) -> int:
    """Returns the bytes that cross from one host to another."""
    counts = [sizes[name] for name in order]
    hosts = np.arange(prod(counts)).reshape(counts) // per_host
    return sum(
        sent[name] * int(np.count_nonzero(hosts != np.roll(hosts, 1, axis)))
        for axis, name in enumerate(order)
    )
