"""The random numbers of a simulated rank: its own streams of torch, numpy and ``random``, in a process that has one of each.

A switch from one rank to another takes the states of all three generators out and puts others in: see ``generators``. Where their memory is
not found (another build of torch or Python) that is slower; what the ranks draw is the same.
"""

from __future__ import annotations

import random
from typing import Any, Final

import torch

from ringsim.simulator.generators import find_memory, find_signs, put_slowly, take_slowly, try_out
from ringsim.simulator.memory import Regions

__all__ = ["States", "Streams"]

_python: Final = vars(random._inst)  # of the object whose methods the functions of `random` are


class States:
    """The states of the three generators.

    Args:
        words: of their memory.
        signs: those few by which one sees that a state has changed.
        gauss_next: the number that ``random`` has drawn ahead.
    """

    __slots__ = ("gauss_next", "signs", "words")

    def __init__(self, words: bytearray, signs: bytearray, gauss_next: Any) -> None:
        self.words = words
        self.signs = signs
        self.gauss_next = gauss_next


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
                    self._words, self._signs = Regions(memory), Regions(find_signs(*memory))
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
            return States(self._words.copy(), self._signs.copy(), _python["gauss_next"])
        if not self.hold(state):
            self._words.read(state.words)
            self._signs.read(state.signs)
            state.gauss_next = _python["gauss_next"]
        return state

    def hold(self, state: States) -> bool:
        """Tells whether nothing was drawn since these states were taken, or put in; where memory is copied."""
        return self._signs.match(state.signs) and bool(_python["gauss_next"] == state.gauss_next)

    def put(self, state: Any) -> None:
        """Makes the states what ``take`` returned."""
        if not self.fast:
            put_slowly(state)
            return
        self._words.write(state.words)
        _python["gauss_next"] = state.gauss_next
