"""A schedule as columns: what each computation is, and the message that it waits for.

With the order of every rank fixed, a step is a graph that nobody's speed can change, and its time the longest way through it. A computation
starts when the one before it on its rank has ended and its message has arrived; a message starts when three things have happened::

    sender    ..[ made ]--post--.
                                 >-- start --- occupancy ---|-- latency --> arrives      [ the computation ] on the receiver
    link      ..the message before it has left              ^ the link is free again
    receiver  ..[ posted_after ]--post (rendezvous only)

A message has no row of its own: a computation needs at most one, so it has the number of the computation that waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from ringsim.pipeline.actions import Action
from ringsim.pipeline.schedule import Schedule
from ringsim.traces.events import Ints

__all__ = ["FORWARD", "KIND_LETTERS", "Operations"]

KIND_LETTERS: Final = ("F", "B", "I", "W")
FORWARD: Final = 0


@dataclass(frozen=True, eq=False)
class Operations:
    """The computations of a schedule, rank after rank, each rank's in its order: numpy arrays of one length n.

    Attributes:
        name: what the schedule is called.
        num_microbatches: how many microbatches the step is cut into.
        stage_ranks: for each stage, the rank that has it.
        first: where each rank begins, and n; shape (ranks + 1,).
        stage: of which stage.
        kind: its place in ``KIND_LETTERS``.
        microbatch: on which microbatch.
        sent_after: the computation, on the sender, after which its message is sent; -1 for a computation without a message.
        posted_after: the computation, on its own rank, after which its receive is posted; -1: before the first.
        queued_after: whose message has the link before this one's; -1 for a link's first message, and without a message.
    """

    name: str
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    first: Ints
    stage: Ints
    kind: Ints
    microbatch: Ints
    sent_after: Ints
    posted_after: Ints
    queued_after: Ints

    def __len__(self) -> int:
        """Returns the number of computations."""
        return len(self.stage)

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.first) - 1

    @property
    def num_stages(self) -> int:
        """How many stages there are, over all ranks."""
        return len(self.stage_ranks)

    @cached_property
    def rank(self) -> Ints:
        """Which rank computes, int32, shape (n,)."""
        return np.repeat(np.arange(self.num_ranks, dtype=np.int32), np.diff(self.first))

    @cached_property
    def before(self) -> Ints:
        """The computation before each one on its rank, -1 for a rank's first; int32, shape (n,)."""
        before = np.arange(-1, len(self) - 1, dtype=np.int32)
        before[self.first[:-1][np.diff(self.first) > 0]] = -1
        return before

    @cached_property
    def direction(self) -> Ints:
        """Which way the message of each computation goes: 0 an activation, 1 a gradient; int8, shape (n,)."""
        direction: Ints = (self.kind != FORWARD).astype(np.int8)
        return direction

    def rank_of(self, operation: int) -> int:
        """Returns the rank that computes an operation."""
        return int(np.searchsorted(self.first, operation, side="right")) - 1

    def action(self, operation: int) -> Action:
        """Returns what an operation is."""
        return Action(int(self.stage[operation]), KIND_LETTERS[self.kind[operation]], int(self.microbatch[operation]))

    def source(self, operation: int) -> int:
        """Returns the rank that sends an operation's message."""
        step = -1 if self.kind[operation] == FORWARD else 1
        return self.stage_ranks[int(self.stage[operation]) + step]

    def to_schedule(self) -> Schedule:
        """Returns the schedule without its sends and receives."""
        kinds = [KIND_LETTERS[kind] for kind in self.kind.tolist()]
        actions = list(map(Action, self.stage.tolist(), kinds, self.microbatch.tolist()))
        rows = tuple(tuple(actions[begin:end]) for begin, end in zip(self.first[:-1].tolist(), self.first[1:].tolist(), strict=True))
        return Schedule(self.name, self.num_microbatches, self.stage_ranks, rows)
