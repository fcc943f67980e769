"""A pipeline schedule as plain data: for each rank, the list of what it does, in its order.

1F1B over three ranks and four microbatches, one line a rank, time to the right::

    rank 0   0F0 0F1 0F2         0B0 0F3 0B1     0B2     0B3
    rank 1       1F0 1F1     1B0 1F2 1B1 1F3 1B2     1B3
    rank 2           2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

The value holds the order alone, without the gaps: when something happens follows from what it costs. The executor runs it, the evaluator
times it, the pictures draw it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringsim.pipeline.actions import Action

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """What each rank of a pipeline does, in order.

    Any lists make a ``Schedule``; ``validate`` says whether they can work.

    Attributes:
        name: what to call it, for example ``1f1b``.
        num_microbatches: how many microbatches a step is cut into.
        stage_ranks: for each stage, the rank that has it.
        actions: for each rank, its actions in order.

    Example:
        >>> from ringsim.pipeline.schedules import one_f_one_b
        >>> schedule = one_f_one_b(num_ranks=2, num_microbatches=2)
        >>> [" ".join(map(str, row)) for row in schedule.actions]
        ['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']
        >>> schedule.num_ranks, schedule.num_stages, schedule.stages_of(1), schedule.lowered
        (2, 2, (1,), False)
    """

    name: str
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """How many ranks the schedule is for."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into, over all ranks."""
        return len(self.stage_ranks)

    @property
    def lowered(self) -> bool:
        """Whether the sends and recvs are among the actions."""
        return any(not action.is_compute for row in self.actions for action in row)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages that a rank has, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)
