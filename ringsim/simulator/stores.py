"""Makes torch's stores work on the virtual clock, where waiting ranks must give way.

torch gives each group a store, and a program may create its own stores (``TCPStore``,
``FileStore``). If a rank waited for a key in C++, it would wait forever, because the rank that
should set the key could not run in the meantime. So the waiting methods of ``Store`` first wait for
their keys here, where a rank gives way to the others, and only then call C++.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from ringsim.simulator.clock import Clock

_WAITING = ("get", "multi_get", "wait")
_AT_ONCE = timedelta(milliseconds=1)  # 0 means no limit
_WRITING = ("add", "append", "compare_set", "multi_set", "set")


def let_stores_give_way(clock: Clock) -> None:
    """Makes every store give way until the process ends."""
    waiting: list[Any] = []

    def make_wait(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wait(store: Any, keys: str | Sequence[str], *limit: timedelta) -> Any:
            clock.check_thread()
            names = [keys] if isinstance(keys, str) else list(keys)
            seconds = [each.total_seconds() for each in limit]
            if not store.check(names) and not _come(clock, store, names, seconds, waiting):
                return call(store, names, _AT_ONCE)  # raises the error for an expired limit
            return call(store, keys, *limit)

        return wait

    def make_write(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def write(*args: Any) -> Any:
            clock.check_thread()
            result = call(*args)
            clock.at(clock.now, *waiting)
            waiting.clear()
            return result

        return write

    for name in _WAITING:
        setattr(Store, name, make_wait(getattr(Store, name)))
    for name in _WRITING:
        setattr(Store, name, make_write(getattr(Store, name)))


def _come(
    clock: Clock, store: Any, keys: list[str], limits: list[float], waiting: list[Any]
) -> bool:
    """Gives way until the keys are in a store. Returns False if a time limit expires first."""
    rank, ends_s = clock.current, [clock.now + limit for limit in limits]
    for end_s in ends_s:
        clock.at(end_s, rank)
    while not (there := bool(store.check(keys))) and all(clock.now < end_s for end_s in ends_s):
        waiting.append(rank)
        clock.pause()
    for end_s in ends_s:
        clock.cancel(end_s, rank)
    return there
