"""The costs of a schedule's actions, in any unit. Ints and Fractions stay exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ringsim.errors import ArgumentError, is_list, is_number, say
from ringsim.schedules.schedule import Action

Time = int | float | Fraction
_NAMES = {"F": "forward", "I": "input", "W": "weight", "B": "backward"}
_LONGEST = 1e100  # in any unit; the sum of a hundred million of them is still finite


@dataclass(frozen=True)
class Costs:
    """The time that one action of each kind takes.

    A time is either one number for all stages, or a sequence with one number per stage. Times are
    per stage, not per rank: a rank with two stages performs each action twice.

    Attributes:
        forward: the time of ``F``.
        input: the time of ``I``.
        weight: the time of ``W``.
        backward: the time of ``B``, or None for the sum of ``input`` and ``weight``.
        latency: the time of a message from one rank to another.
        overlap: how much of the shorter of two actions in ``OVERLAP_F_B`` is hidden behind the
            longer one: 1 if both run at full speed at the same time, and 0 if a rank has a single
            stream and runs one after the other, as the executor does.

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
    overlap: Time = 0

    def check(self, num_stages: int) -> None:
        """Checks that each stage has a valid time for each kind of action.

        Args:
            num_stages: the number of stages over all ranks.

        Raises:
            ArgumentError: a value is not a time, or a list has the wrong length.
        """
        if not is_number(self.overlap) or not 0 <= self.overlap <= 1:
            raise ArgumentError(
                f"overlap must be from 0 to 1, got {say(self.overlap)}. Use 1 for ranks that run "
                "two actions at the same time, and 0 for ranks with one stream."
            )
        for kind, name in (*_NAMES.items(), ("latency", "latency")):
            given = getattr(self, name)
            if given is None and kind == "B":
                continue
            by_stage = is_list(given) and kind in _NAMES
            if by_stage and len(given) != num_stages:
                raise ArgumentError(
                    f"the length of {name} must be the number of stages, {num_stages}, got "
                    f"{len(given)}. Pass a single number, or one per stage."
                )
            for stage, time in enumerate(given if by_stage else [given]):
                which = f"stage {stage}" if by_stage else "every stage"
                where = f"{kind} of {which}" if kind in _NAMES else kind
                if not is_number(time) or not 0 <= time <= _LONGEST:
                    raise ArgumentError(
                        f"a time must be from 0 to {_LONGEST:g}, got {say(time)} ({where}). Pass "
                        "a non-negative number in a suitable unit."
                    )

    def get_duration(self, action: Action) -> Time:
        """Returns the duration of a computation.

        Args:
            action: a computation.

        Returns:
            The computation's duration.

        Raises:
            ArgumentError: the times are given per stage, but no time is given for this stage.
        """
        if action.kind == "B" and self.backward is None:
            return sum(self.get_duration(action._replace(kind=kind)) for kind in "IW")
        name = _NAMES[action.kind]
        cost: Time | Sequence[Time] = getattr(self, name)
        if not isinstance(cost, Sequence):
            return cost
        if action.stage >= len(cost):
            raise ArgumentError(
                f"{name} is a list of length {len(cost)}, which contains no time for stage "
                f"{action.stage}. Pass a single number, or one per stage."
            )
        return cost[action.stage]

    def get_hidden(self, first: Action, second: Action) -> Time:
        """Returns the time for which two actions that overlap run at the same time, at most."""
        return self.overlap * min(self.get_duration(first), self.get_duration(second))
