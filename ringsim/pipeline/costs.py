"""What the actions of a schedule cost, in any unit: ints and Fractions stay exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringsim.errors import ArgumentError
from ringsim.pipeline.actions import Action
from ringsim.pipeline.programs import Time

__all__ = ["Costs"]


@dataclass(frozen=True)
class Costs:
    """The time of one action of each kind; one number for all stages, or a sequence with one number a stage.

    A rank with two stages does an action twice, once for each: the times are those of a stage, not of a rank's whole share.

    Attributes:
        forward: of ``F``.
        input: of ``I``.
        weight: of ``W``.
        backward: of ``B``; None: ``input`` and ``weight`` together.
        latency: how long a message takes from one rank to another.

    Example:
        >>> costs = Costs(forward=(1, 1, 4), latency=3)
        >>> costs.get_duration(Action(2, "F", 0)), costs.get_duration(Action(2, "B", 0))
        (4, 2)
    """

    forward: Time | Sequence[Time] = 1
    input: Time | Sequence[Time] = 1
    weight: Time | Sequence[Time] = 1
    backward: Time | Sequence[Time] | None = None
    latency: Time = 0

    def get_duration(self, action: Action) -> Time:
        """Returns how long a computation takes.

        Args:
            action: a computation.

        Returns:
            Its time.

        Raises:
            ArgumentError: the times are given by stage, and there is none for this one, or the action is no computation.
        """
        if action.kind == "F":
            return _pick("forward", self.forward, action.stage)
        if action.kind == "I":
            return _pick("input", self.input, action.stage)
        if action.kind == "W":
            return _pick("weight", self.weight, action.stage)
        if action.kind != "B":
            raise ArgumentError(f"an action with a duration must be a computation, got {action}. Look at is_compute first.")
        if self.backward is None:
            return _pick("input", self.input, action.stage) + _pick("weight", self.weight, action.stage)
        return _pick("backward", self.backward, action.stage)


def _pick(name: str, cost: Time | Sequence[Time], stage: int) -> Time:
    """The cost of one stage."""
    if not isinstance(cost, Sequence):
        return cost
    if stage >= len(cost):
        raise ArgumentError(f"{name} must have one time for each stage, got {len(cost)} (stage {stage}). Pass one number, or one a stage.")
    return cost[stage]
