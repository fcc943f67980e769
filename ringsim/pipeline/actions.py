"""What a rank of a pipeline does, one action at a time, in the text form of torch: ``2F0`` is the forward pass of microbatch 0 on stage 2.

The kinds::

    F       forward                            SEND_F  the output goes to the next stage       RECV_F  the input comes from the one before
    B       backward, all of it                SEND_B  the gradient goes to the stage before   RECV_B  the gradient comes from the next one
    I       backward, the input's gradient     B = I + W: the input's gradient is what the stage before waits for; the weights'
    W       backward, the weights' gradients   gradients can wait until the rank would be idle

An action names its own stage only, for the other side follows from the kind::

    stage 0         0F0 0SEND_F0 ------->                                ------> 0RECV_B0 0B0
    stage 1                     1RECV_F0 1F0 1SEND_F0 ...  1B0 1SEND_B0 /
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from ringsim.errors import ArgumentError, ScheduleError

__all__ = ["COMPUTE_KINDS", "RECV_KINDS", "SEND_KINDS", "Action", "parse_action"]

COMPUTE_KINDS: Final = ("F", "B", "I", "W")
SEND_KINDS: Final = ("SEND_F", "SEND_B")
RECV_KINDS: Final = ("RECV_F", "RECV_B")

_TEXT: Final = re.compile(rf"(\d{{1,9}})({'|'.join((*COMPUTE_KINDS, *SEND_KINDS, *RECV_KINDS))})(\d{{1,9}})", re.ASCII)
# Of a message: the kind of the other side, and how many stages away that is.
_OTHER_SIDE: Final = {"SEND_F": ("RECV_F", 1), "RECV_F": ("SEND_F", -1), "SEND_B": ("RECV_B", -1), "RECV_B": ("SEND_B", 1)}


class Action(NamedTuple):
    """One thing that a rank does for one microbatch on one stage.

    Attributes:
        stage: index of the stage, from 0.
        kind: one of ``F``, ``B``, ``I``, ``W``, ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B``.
        microbatch: index of the microbatch, from 0.

    Example:
        >>> action = Action(1, "SEND_F", 0)
        >>> str(action), action.is_compute, str(action.other_side)
        ('1SEND_F0', False, '2RECV_F0')
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def is_compute(self) -> bool:
        """Whether the rank computes, rather than sends or receives."""
        return self.kind in COMPUTE_KINDS

    @property
    def other_side(self) -> Action:
        """The action that meets this send or recv.

        Raises:
            ArgumentError: this action is no message.
        """
        if self.kind not in _OTHER_SIDE:
            raise ArgumentError(f"an action with another side must be a send or a recv, got {self}. Look at is_compute first.")
        kind, distance = _OTHER_SIDE[self.kind]
        return Action(self.stage + distance, kind, self.microbatch)


def parse_action(text: str) -> Action:
    """Reads one action.

    Args:
        text: the action as torch writes it: stage, kind, microbatch.

    Returns:
        The action; ``str()`` of it gives the text back.

    Raises:
        ScheduleError: the text is none.

    Example:
        >>> parse_action("1SEND_F0")
        Action(stage=1, kind='SEND_F', microbatch=0)

    Source:
        ``torch/distributed/pipelining/schedules.py``, ``_Action``: the text form.
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ScheduleError(
            f"an action must be a stage, one of {', '.join((*COMPUTE_KINDS, *SEND_KINDS, *RECV_KINDS))}, and a microbatch, got {text!r}. "
            "Write for example 2F0 or 1SEND_F0."
        )
    stage, kind, microbatch = found.groups()
    return Action(int(stage), kind, int(microbatch))
