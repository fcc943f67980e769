"""One rank's row of a schedule, written as phases: how many times, and what each time.

The row of rank 0 in 1F1B, for 4 ranks and 8 microbatches, is ``(3, "F"), (5, "F B"), (3, "B")``::

    3 times F       5 times F B                                            3 times B
    0F0 0F1 0F2     0F3 0B0  0F4 0B1  0F5 0B2  0F6 0B3  0F7 0B4            0B5 0B6 0B7

Which microbatch a word means need not be said: the next one, in the rank's order of forwards or of backwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ringsim.pipeline.actions import Action

__all__ = ["Phase", "Place", "one_chunk", "play"]

Phase = tuple[int, str]  # how many times, and the words: a kind, and the chunk where the rank has several orders
Place = tuple[int, int]  # stage and microbatch


def one_chunk(stage: int, num_microbatches: int) -> list[Place]:
    """Returns the places of one stage, microbatch after microbatch."""
    return [(stage, microbatch) for microbatch in range(num_microbatches)]


def play(
    phases: Iterable[Phase], forwards: Mapping[str, Iterable[Place]], backwards: Mapping[str, Iterable[Place]], num_microbatches: int
) -> tuple[Action, ...]:
    """Returns the row that phases describe.

    ``F`` takes the next forward; ``B`` and ``I`` take the next backward, whole or the input's half; ``W`` takes the oldest weights' half
    that an ``I`` has left over. A digit after the kind says of which chunk.

    Args:
        phases: how many times, and what.
        forwards: for each chunk ("" where words name none), its places in the order of their forwards.
        backwards: the same for backwards.
        num_microbatches: actions of microbatches from this one on are left out. So a schedule whose phases need many microbatches is made
            for that many, and cut: the order of what stays cannot get stuck, for microbatches do not wait for each other.

    Returns:
        The actions, in order.
    """
    sources = {"F": {chunk: iter(places) for chunk, places in forwards.items()}}
    sources["B"] = sources["I"] = {chunk: iter(places) for chunk, places in backwards.items()}
    split: list[tuple[str, Place]] = []  # chunk and place of each I whose W is still to come
    row = []
    for times, words in phases:
        for word in words.split() * times:
            kind, chunk = word[0], word[1:]
            if kind == "W":
                oldest = next(index for index, (other, _) in enumerate(split) if chunk in ("", other))
                place = split.pop(oldest)[1]
            else:
                place = next(sources[kind][chunk])
            if kind == "I":
                split.append((chunk, place))
            row.append(Action(place[0], kind, place[1]))
    return tuple(action for action in row if action.microbatch < num_microbatches)
