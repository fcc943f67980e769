"""When a message leaves, and when a send is done: three ways, by name.

| name | like | a send |
|---|---|---|
| ``rendezvous`` | Gloo | waits for its recv, at every size |
| ``buffered(65536)``, ``buffered`` | MPI | up to so many bytes, or at any size, leaves and is done at once; a larger one waits |
| ``grouped`` | NCCL | waits for its recv, and for all that its rank has posted on the group before; a batch counts as one |
"""

from __future__ import annotations

import re
import sys
from typing import Final, NamedTuple

from ringsim.errors import ArgumentError, say

__all__ = ["Semantics", "read_semantics"]

_BUFFERED: Final = re.compile(r"buffered(?:\((\d+)\))?")


class Semantics(NamedTuple):
    """When messages leave.

    Attributes:
        limit_bytes: messages up to this size do not wait for their recv; -1: all do.
        in_order: whether a rank's operations on a group are carried out one after the other.
    """

    limit_bytes: int
    in_order: bool


def read_semantics(name: object) -> Semantics:
    """Returns what a name says.

    Args:
        name: "rendezvous", "buffered", "buffered(65536)" or "grouped".

    Raises:
        ArgumentError: it is none of these.

    Example:
        >>> read_semantics("rendezvous"), read_semantics("buffered(4096)").limit_bytes
        (Semantics(limit_bytes=-1, in_order=False), 4096)
    """
    found = _BUFFERED.fullmatch(name) if isinstance(name, str) else None
    if found is not None:
        return Semantics(min(int(found[1] or sys.maxsize), sys.maxsize), in_order=False)  # no message is larger
    if not isinstance(name, str) or name not in ("rendezvous", "grouped"):
        known = '"rendezvous" (Gloo), "buffered" or "buffered(65536)" (MPI), or "grouped" (NCCL)'
        raise ArgumentError(f"semantics must be {known}, got {say(name)}. Take one of these.")
    return Semantics(-1, in_order=name == "grouped")
