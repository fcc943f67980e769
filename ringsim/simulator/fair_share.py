"""Fair shares of links: how fast flows go that cross each other, so that none can go faster without taking from a slower one.

Progressive filling: all flows speed up together until a link is full. Those on it stay at that speed; the others go on. ::

    link A, 10 bytes/s:  flow 1, flow 2            flow 2 is held at 2 by link B, so flow 1 gets the other 8 of A
    link B,  4 bytes/s:          flow 2, flow 3    flow 3 is held at 2

Speeds are *paces* here, seconds for each byte, as the beta of a link is: a flow that is alone has exactly the pace of its slowest link.

Source:
    D. Bertsekas, R. Gallager, "Data Networks", 2nd edition (1992), section 6.5.2: max-min fairness and its algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

__all__ = ["fair_paces"]

LinkName = TypeVar("LinkName", bound=Hashable)


def fair_paces(routes: Sequence[Sequence[LinkName]], paces: Mapping[LinkName, float]) -> list[float]:
    """Shares links among flows, max-min fairly.

    Args:
        routes: the links of each flow, none twice.
        paces: seconds for each byte, for each link; 0 for a link that is never full.

    Returns:
        Seconds for each byte, for each flow; 0 where none of its links is ever full.

    Example:
        >>> fair_paces([["A"], ["A", "B"], ["B"]], {"A": 1 / 10, "B": 1 / 4})
        [0.125, 0.5, 0.5]
    """
    found = [0.0] * len(routes)
    moving: dict[LinkName, dict[int, None]] = {}  # the flows of each link that still speed up; no sets, whose order may differ by run
    for flow, route in enumerate(routes):
        for link in route:
            if paces[link] > 0:
                moving.setdefault(link, {})[flow] = None
    left = {link: 1 / paces[link] for link in moving}  # bytes per second that nobody has yet
    # Each link's pace if it were the next one full. At first without the way through 1 / pace, so that one flow alone gets the very pace.
    offers = {link: len(flows) * paces[link] for link, flows in moving.items()}
    pace = math.inf
    while moving:
        pace = min(pace, max(offers.values()))  # rounding alone could make it rise again
        touched: dict[LinkName, None] = {}
        for link in [link for link, offer in offers.items() if offer >= pace]:
            for flow in moving.pop(link, ()):
                found[flow] = pace
                for other in routes[flow]:
                    if other in moving:
                        del moving[other][flow]
                        left[other] -= 1 / pace
                        touched[other] = None
                        if not moving[other]:
                            del moving[other], offers[other]
            offers.pop(link, None)
        for link in touched:
            if link in moving:
                offers[link] = len(moving[link]) / left[link] if left[link] > 0 else math.inf
    return found
