"""What the actions of a schedule cost, in any unit: ints and Fractions stay exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from ringsim.errors import ArgumentError, is_list, is_number, say
from ringsim.schedules.schedule import Action

__all__ = ["Costs", "Time"]

Time = int | float | Fraction
_NAMES: Final = {"F": "forward", "I": "input", "W": "weight", "B": "backward"}
_LONGEST: Final = 1e100  # in any unit: a hundred million of them added up are still a number


@dataclass(frozen=True)
class Costs:
    """The time of one action of each kind.

    One number for all stages, or a sequence with one number a stage. The times are those of a
    stage, not of a rank: a rank with two stages does each action twice.

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

    def check(self, num_stages: int) -> None:
        """Checks that each stage has one time of each kind.

        Args:
            num_stages: how many stages there are, over all ranks.

        Raises:
            ArgumentError: a value is not a time, or a list has too many or too few.
        """
        for kind, name in (*_NAMES.items(), ("latency", "latency")):
            given = getattr(self, name)
            if given is None and kind == "B":
                continue
            by_stage = is_list(given) and kind in _NAMES
            if by_stage and len(given) != num_stages:
                raise ArgumentError(
                    f"{name} must have one time for each stage, got {len(given)} for "
                    f"{num_stages}. Pass one number, or one a stage."
                )
            for stage, time in enumerate(given if by_stage else [given]):
                which = f"stage {stage}" if by_stage else "every stage"
                where = f"{kind} of {which}" if kind in _NAMES else kind
                if not is_number(time) or not 0 <= time <= _LONGEST:
                    raise ArgumentError(
                        f"a time must be a number from 0, got {say(time)} ({where}). Say how "
                        f"long it takes, {_LONGEST:g} at most."
                    )

    def get_duration(self, action: Action) -> Time:
        """Returns how long a computation takes.

        Args:
            action: a computation.

        Returns:
            Its time.

        Raises:
            ArgumentError: the times are given by stage, and this stage has none.
        """
        if action.kind == "B" and self.backward is None:
            return self.get_duration(action._replace(kind="I")) + self.get_duration(
                action._replace(kind="W")
            )
        name = _NAMES[action.kind]
        cost: Time | Sequence[Time] = getattr(self, name)
        if not isinstance(cost, Sequence):
            return cost
        if action.stage >= len(cost):
            raise ArgumentError(
                f"{name} must have one time for each stage, got {len(cost)} (stage "
                f"{action.stage}). Pass one number, or one per stage."
            )
        return cost[action.stage]
