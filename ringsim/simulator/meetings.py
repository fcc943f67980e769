"""Brings the parts of all ranks in a collective together.

The n-th collective of a group on one rank belongs to the n-th on every other. It begins when the last member has come, and is done on all
at the same time; ``collective_times`` says when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ringsim.comm.follower import disagreement
from ringsim.diagnose.waitfor import same_collective
from ringsim.errors import MessageMismatch
from ringsim.simulator.carriers import Carrier
from ringsim.simulator.collective_times import begin_collective
from ringsim.simulator.parts import Part

__all__ = ["attend"]

Perform = Callable[[Sequence[Part]], None]  # given the parts by place, moves the data
_UNEVEN = ("all_to_all", "all_to_all_single")  # of which every rank may carry another size


def attend(part: Part, carrier: Carrier, perform: Perform) -> None:
    """Adds a rank's part to the collective it belongs to; the last one to come carries it out.

    Args:
        part: what the rank has just posted.
        carrier: carries what it moves.
        perform: moves the data.

    Raises:
        MessageMismatch: another rank has called something else in its place.
    """
    group = part.group
    size = group.size()
    if not group.calls:
        group.calls = [0] * size
    number = group.calls[part.place]
    met: list[Part] = group.meetings.get(number, [])
    if met:
        _compare(part, met[0])
    group.calls[part.place] = number + 1
    if len(met) + 1 < size:
        met.append(part)
        group.meetings[number] = met
        return
    group.meetings.pop(number, None)
    parts = sorted([*met, part], key=lambda each: each.place)
    if not any(tensor.is_meta for each in parts for tensor in (*each.inputs, *each.outputs)):
        with torch.inference_mode():  # tensors that were made in it may be changed nowhere else
            perform(parts)
    begin_collective(parts, carrier)


def _compare(mine: Part, theirs: Part) -> None:
    """Compares what two ranks call.

    Raises:
        MessageMismatch: they do not belong together.
    """
    if not same_collective(mine.name, theirs.name):
        words = f"one operation, got {mine.name} here and {theirs.name}"
    elif mine.root != theirs.root:
        words = f"one root, got root {mine.root} here and root {theirs.root}"
    else:
        payloads = mine.kind.payload, theirs.kind.payload
        what = "" if mine.name in _UNEVEN else disagreement(*payloads)
        if not what or (what == "shape" and mine.name != theirs.name):
            return
        words = f"one {what}, got {_describe(*payloads[0])} here and {_describe(*payloads[1])}"
    rank = mine.rank
    message = (
        f"all ranks of a group must call the same collectives in the same order, with {words} in rank {theirs.rank.number}'s "
        f"{theirs.name}{theirs.rank.place_of(theirs.slot)} ({rank.here()}, {mine.name}, group {mine.group.group_name}). "
        "Make the calls alike."
    )
    rank.note("collective_mismatch", message, mine)
    raise MessageMismatch(message)


def _describe(dtype: str, shape: tuple[int, ...], size_bytes: int, reduction: str) -> str:
    words = f"{dtype}{list(shape)} ({size_bytes:,} bytes)" if dtype else "nothing"
    return f"{words}, {reduction}" if reduction else words
