"""Memory: places that are copied and compared as one, and tensors, looked at without a question to torch.

This is the one module that exists twice. Where ringsim was compiled, Python loads what was made of ``memory.pyx`` and not this file: to
copy by address, and to call a C function of torch, has no spelling in Python. Both do the same, but for `Layout`, which here knows nothing
of any tensor, so that torch is asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise

import torch

__all__ = ["Layout", "Regions"]


class Regions:
    """Some places in memory, which are kept, put back and compared together.

    Args:
        views: the places: contiguous bytes that may be written, 16 at most.

    Raises:
        ValueError: there are more.

    Example:
        >>> one, other = bytearray(b"spam"), bytearray(b"eggs")
        >>> regions = Regions([memoryview(one), memoryview(other)[1:]])
        >>> kept = regions.copy()
        >>> one[0], other[0] = b"SE"
        >>> regions.match(kept)
        False
        >>> regions.write(kept)
        >>> one, other
        (bytearray(b'spam'), bytearray(b'Eggs'))
    """

    _MOST = 16

    def __init__(self, views: Iterable[memoryview]) -> None:
        self._views = tuple(views)
        if len(self._views) > self._MOST:
            raise ValueError(f"views must be at most {self._MOST}, got {len(self._views)}.")
        ends = list(accumulate(map(len, self._views), initial=0))
        self._parts = [slice(*ends) for ends in pairwise(ends)]  # of what is kept

    def copy(self) -> bytearray:
        """Returns what is there."""
        return bytearray().join(self._views)

    def read(self, kept: bytearray) -> None:
        """Writes what is there over what `copy` returned."""
        kept[:] = self.copy()

    def write(self, kept: bytearray) -> None:
        """Puts back what `copy` returned, or `read` wrote."""
        words = memoryview(kept)
        for view, part in zip(self._views, self._parts, strict=True):
            view[:] = words[part]

    def match(self, kept: bytearray) -> bool:
        """Tells whether the same is there as in what `copy` returned."""
        return self.copy() == kept


class Layout:
    """What the dense tensors of one dtype and shape have in common that lie in the memory of the CPU; here it tells nothing of any."""

    def learn(self, tensor: torch.Tensor) -> None:
        """Takes dtype and shape from a tensor, the first one of its kind."""

    def fits(self, tensor: torch.Tensor) -> bool:
        """Tells whether this is a plain ``torch.Tensor`` of this dtype and shape on the CPU; False where that is not known either."""
        return False

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Copies the bytes of a tensor into another one where both fit and are contiguous; else tells so by False."""
        return False
