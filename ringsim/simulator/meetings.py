"""Brings the parts of all ranks in a collective together.

The n-th collective of a group on one rank belongs to the n-th on every other. It begins when the last member has come, and is done on all
at the same time; ``collective_times`` says when. What cannot be carried out is an error on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ringsim.comm.built import find_refusal
from ringsim.comm.follower import disagreement
from ringsim.diagnose.verdict import name_ranks
from ringsim.diagnose.waitfor import same_collective
from ringsim.errors import ArgumentError, MessageMismatch
from ringsim.simulator.carriers import Carrier
from ringsim.simulator.collective_times import begin_collective
from ringsim.simulator.moving import check_storage
from ringsim.simulator.parts import Part

__all__ = ["ReductionRefused", "attend"]

Perform = Callable[[Sequence[Part]], None]  # given the parts by place, moves the data
_Fault = tuple[type[ArgumentError], str, str]  # kind of error; what is wrong; what to do
_UNEVEN = ("all_to_all", "all_to_all_single")  # of which every rank may carry another size


class ReductionRefused(ArgumentError, RuntimeError):
    """Torch does not reduce such tensors in such a way; a ``RuntimeError``, too, as on real ranks."""


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
    fault = _find_fault(parts) or _move(parts, perform)
    if fault is None:
        begin_collective(parts, carrier)
        return
    kind, words, advice = fault
    for each in parts:  # it takes no time, and their waits raise
        where = f"{each.rank.here()}, {each.name}, group {group.group_name}"
        each.error = kind(f"{words} ({where}). {advice}.")
        each.complete(each.rank.clock.now)


def _find_fault(parts: Sequence[Part]) -> _Fault | None:
    """Returns what is wrong with a reduction, None where nothing is."""
    payload = parts[0].kind.payload
    refusal = find_refusal(parts[0].inputs[0].dtype, payload.reduction) if payload.reduction else ""
    if not refusal:
        return None
    words = f"op must be one that torch has for {payload.dtype}, got {payload.reduction}: {refusal}"
    return ReductionRefused, words, "Convert the tensors, or choose another operation"


def _move(parts: Sequence[Part], perform: Perform) -> _Fault | None:
    """Moves the data, where there is any; returns what is wrong with the tensors, None where nothing is."""
    without = [part.rank.number for part in parts if any(tensor.is_meta for tensor in (*part.inputs, *part.outputs))]
    if without:
        others = [part.rank.number for part in parts if any(not tensor.is_meta for tensor in (*part.inputs, *part.outputs))]
        if not others:
            return None
        rule = "the tensors of a collective must have data on all ranks, or on none"
        return ArgumentError, f"{rule}, got meta tensors on {name_ranks(without)} and others on {name_ranks(others)}", "Use one device"
    try:
        for part in parts:
            for tensor in (*part.inputs, *part.outputs):
                check_storage(part.name, tensor)
        with torch.inference_mode():  # tensors that were made in it may be changed nowhere else
            perform(parts)
    except ArgumentError as error:
        return ArgumentError, str(error).rpartition(" Resize")[0].rstrip("."), "Resize it after wait()"
    except RuntimeError as error:
        return ArgumentError, f"the tensors of a collective must be some that torch can write into, got: {error}", "Use tensor.clone()"
    return None


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
