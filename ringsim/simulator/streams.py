"""The random numbers of a simulated rank: its own streams of torch, numpy and ``random``, in a process that has one of each.

A switch from one rank to another takes the states of all three generators out and puts others in: see ``generators``. Where their memory is
not found (another build of torch or Python) that is slower; what the ranks draw is the same.
"""

from __future__ import annotations

import random
from typing import Any, Final

import torch

from ringsim.simulator.generators import find_memory, put_slowly, take_slowly, try_out

__all__ = ["States", "Streams"]

_python: Final[Any] = random._inst  # whose methods the functions of `random` are


class States:
    """The states of the three generators: a copy, or where they are in force.

    Args:
        python: memory of ``random``'s: the place in its words, and the words.
        numpy: of numpy's: its words, and the place.
        ahead: of the number that numpy has drawn ahead.
        torch: of torch's: seed and place, words, numbers drawn ahead.

    Attributes:
        gauss_next: the number that ``random`` has drawn ahead, of a copy.
        last: where numpy's place is.
        tail: where torch's numbers drawn ahead are.
    """

    __slots__ = ("ahead", "gauss_next", "last", "numpy", "python", "tail", "torch")

    def __init__(self, python: memoryview, numpy: memoryview, ahead: memoryview, torch: memoryview) -> None:
        self.python = python.cast("I")
        self.numpy = numpy.cast("I")
        self.ahead = ahead.cast("q")
        self.torch = torch.cast("q")
        self.gauss_next: Any = None
        self.last = len(numpy) // 4 - 1
        self.tail = len(torch) // 8 - 3

    def copy(self) -> States:
        """Returns a copy."""
        copied = States(_copied(self.python), _copied(self.numpy), _copied(self.ahead), _copied(self.torch))
        copied.gauss_next = _python.gauss_next
        return copied

    def write(self, other: States) -> None:
        """Makes these states those of ``other``."""
        self.python[:] = other.python
        self.numpy[:] = other.numpy
        self.ahead[:] = other.ahead
        self.torch[:] = other.torch

    def match(self, other: States) -> bool:
        """Tells whether two states are the same, by a few words of which one is another whenever a number was drawn.

        These are the places, and the numbers drawn ahead. The words that are no places tell whether all 624 were made anew, by as many
        draws or by a seed. Not the first ones of ``random`` and numpy: those are the same after many a seed.
        """
        return (
            self.python[0] == other.python[0]
            and self.python[2] == other.python[2]
            and self.numpy[self.last] == other.numpy[self.last]
            and self.numpy[self.last - 1] == other.numpy[self.last - 1]
            and self.ahead[0] == other.ahead[0]
            and self.torch[0] == other.torch[0]
            and self.torch[2] == other.torch[2]
            and self.torch[self.tail] == other.torch[self.tail]
            and self.torch[self.tail + 2] == other.torch[self.tail + 2]
        )


class Streams:
    """Takes the states of the three generators out, and puts them in.

    Attributes:
        fast: whether memory is copied.

    Example:
        >>> from ringsim.simulator.generators import seed_streams
        >>> import numpy as np
        >>> import torch
        >>> streams = Streams()
        >>> seed_streams(7)
        >>> state = streams.take()
        >>> first = random.random(), np.random.normal(), torch.randn(3).sum().item()
        >>> streams.put(state)
        >>> first == (random.random(), np.random.normal(), torch.randn(3).sum().item())
        True
    """

    def __init__(self) -> None:
        outside = take_slowly()
        self.fast = False
        try:
            with torch.device("cpu"):  # whatever the caller's default device is
                memory = find_memory()
                if memory is not None:
                    self._now = States(*memory)
                    self.fast = True
                    self.fast = try_out(self)
        finally:
            put_slowly(outside)

    def take(self, state: Any = None) -> Any:
        """Returns the states as they are.

        Args:
            state: what an earlier call returned and ``put`` put in last; it is written over.
        """
        if not self.fast:
            return take_slowly()
        if state is None:
            return self._now.copy()
        if not self.hold(state):
            state.write(self._now)
            state.gauss_next = _python.gauss_next
        return state

    def hold(self, state: States) -> bool:
        """Tells whether nothing was drawn since these states were taken, or put in; where memory is copied."""
        return self._now.match(state) and bool(_python.gauss_next == state.gauss_next)

    def put(self, state: Any) -> None:
        """Makes the states what ``take`` returned."""
        if not self.fast:
            put_slowly(state)
            return
        self._now.write(state)
        _python.gauss_next = state.gauss_next


def _copied(words: memoryview) -> memoryview:
    return memoryview(bytearray(memoryview(words).cast("B")))
