"""Slurm's short form of a list of machines, written out: ``node[01-03,07],gpu5`` names five of them."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

from ringsim.errors import RingError

__all__ = ["expand_node_list"]

_MOST = 1_000_000  # names: no cluster has more, and a misprint must not fill the memory
_NAME = re.compile(r"(?:\[[^\[\]\s]+\]|[^\[\],\s])+")  # commas within a bracket belong to it
_PART = re.compile(r"\[([^\]]*)\]|([^\[]+)")  # a bracket, or the letters before, between and after
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?", re.ASCII)


def expand_node_list(text: str) -> list[str]:
    """Writes out a list of machines as Slurm shortens it.

    A bracket holds numbers and ranges; a number keeps its leading zeros; of several brackets in a name the last one runs fastest.

    Args:
        text: what ``SLURM_STEP_NODELIST`` and its like hold.

    Returns:
        The names in the order of the list, which is the order in which Slurm numbers the nodes of a step.

    Raises:
        RingError: the text is no such list.

    Example:
        >>> expand_node_list("node[01-03,07],gpu5")
        ['node01', 'node02', 'node03', 'node07', 'gpu5']
        >>> expand_node_list("a[1-2]b[3-4]")
        ['a1b3', 'a1b4', 'a2b3', 'a2b4']

    Source:
        ``scontrol show hostnames``, which writes the same lists out (Slurm's manual page of scontrol).
    """
    names: list[str] = []
    begin = 0
    while begin <= len(text):
        name = _NAME.match(text, begin)
        if name is None or text[name.end() : name.end() + 1] not in ("", ","):
            raise _wrong(text, "names with ranges in brackets, and commas between them")
        parts = [_ranges(text, *part.groups()) for part in _PART.finditer(name.group())]
        if len(names) + math.prod(sum(each.count for each in part) for part in parts) > _MOST:
            raise _wrong(text, f"a list of at most {_MOST} names")
        names += map("".join, itertools.product(*([spelt for each in part for spelt in each.spell()] for part in parts)))
        begin = name.end() + 1
    return names


@dataclass(frozen=True)
class _Range:
    """What stands at one place of a name: letters, or the numbers from ``low`` to ``high``."""

    letters: str = ""
    low: str = ""
    high: str = ""

    @property
    def count(self) -> int:
        return int(self.high) - int(self.low) + 1 if self.low else 1

    def spell(self) -> list[str]:
        return [f"{number:0{len(self.low)}}" for number in range(int(self.low), int(self.high) + 1)] if self.low else [self.letters]


def _ranges(text: str, bracket: str | None, letters: str | None) -> list[_Range]:
    """Returns what may stand at one place of a name."""
    if bracket is None:
        return [_Range(letters=letters or "")]
    found = []
    for piece in bracket.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise _wrong(text, "numbers and ranges such as 01-03 within brackets")
        low, high = match[1], match[2] or match[1]
        if max(len(low), len(high)) > 18 or int(high) < int(low):
            raise _wrong(text, "ranges that go up")
        found.append(_Range(low=low, high=high))
    return found


def _wrong(text: str, rule: str) -> RingError:
    return RingError(
        f"a node list must be {rule}, got {text[:200]!r}. Correct the SLURM_*_NODELIST variable that says so, or pass head_ip."
    )
