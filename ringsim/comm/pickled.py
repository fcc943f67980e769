"""Python objects as the bytes that travel in their place."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

__all__ = ["pack", "unpack"]


def pack(value: Any, weights_only: bool) -> bytes:
    """Returns an object as bytes: pickled, or with ``weights_only`` as ``torch.save`` writes it."""
    if not weights_only:
        return pickle.dumps(value)
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpack(packed: bytes, weights_only: bool) -> Any:
    """Returns the object that ``pack`` packed.

    Example:
        >>> unpack(pack({"step": 3}, weights_only=False), weights_only=False)
        {'step': 3}
    """
    return torch.load(io.BytesIO(packed), weights_only=True) if weights_only else pickle.loads(packed)
