"""Runs a schedule on ranks: each does its own list of actions, in order.

What an action does with the tensors of stage s and microbatch i, on one rank::

    RECV_F  post the receive of x         RECV_B  post the receive of the gradient of y
    F       x -> stage -> y; keep (x, y)  B       (x, y), gradient of y -> gradients; forget (x, y)
    SEND_F  begin to send y               SEND_B  begin to send the gradient of x

Neither sends nor receives block: a computation waits for its receive, and the end of the step for
the sends. So a message travels while the ranks compute. Two stages on one rank hand tensors over
directly.

In a trace, the step and each computation are spans, from which ``ringsim.traces.steps`` reads the
step: "step 1f1b" around "forward", "backward", "input_grad" and "weight_grad", each with its stage
and microbatch.

``rehearse`` does a step without a model: computing takes the time that it is given, and messages
have the size that they are given. The order of computations and messages is that of a real step::

    rank 0   compute  isend ->            compute  isend ->
    rank 1   irecv, wait      compute     irecv, wait ...

On real ranks this shows what messages cost on top of the schedule, because sleeping ranks do not
compete for cores. The same function runs on the virtual clock, and the two can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Final

import torch
from torch import Tensor, nn

from ringsim.compute_costs import charge, compute, stretched
from ringsim.errors import ArgumentError, check_duration, check_integer, say
from ringsim.pipeline.flops import Flops
from ringsim.pipeline.mailbox import Mailbox, about, find_boundary
from ringsim.pipeline.messages import Payload, Transfer, find_ring, find_routes, place_in
from ringsim.pipeline.stage import backward_input, backward_stage, backward_weight, forward_stage
from ringsim.schedules.costs import Costs
from ringsim.schedules.lowering import get_recv, lower, lower_in_step
from ringsim.schedules.schedule import Action, Schedule
from ringsim.state import get_state
from ringsim.traces.spans import span
from ringsim.traces.steps import KINDS, STEP

__all__ = ["Executor", "StageRun", "rehearse"]

_SPANS: Final = {kind: name for name, kind in KINDS.items()}


@dataclass(frozen=True)
class StageRun:
    """What the executor needs to know of a stage.

    Attributes:
        run: ``run(x, microbatch) -> y``, the output of a microbatch; on the last stage the loss, as
            it is to be differentiated.
        parameters: what the ``W`` actions add gradients to.
        flops: ``flops(x)``, how much arithmetic a microbatch with this input takes; asked on a
            virtual clock that charges for it.
    """

    run: Callable[[Tensor, int], Tensor]
    parameters: Sequence[nn.Parameter]
    flops: Callable[[Tensor], Flops]


class Executor:
    """Runs one rank's part of a step.

    Args:
        schedule: with its sends and receives, as `lower` makes it.
        stages: this rank's stages, by number.
        inputs: the microbatches, for the first stage.
        mailbox: carries the messages.
        device: where the stages compute.

    Example:
        Two stages on one rank:

        >>> from ringsim.pipeline.messages import Header
        >>> from ringsim.ring import Ring
        >>> from ringsim.schedules.lowering import lower
        >>> schedule = Schedule(
        ...     "two on one",
        ...     1,
        ...     (0, 0),
        ...     (tuple(map(Action._make, [(0, "F", 0), (1, "F", 0), (1, "B", 0), (0, "B", 0)])),),
        ... )
        >>> weight = torch.tensor(2.0, requires_grad=True)
        >>> stage = StageRun(
        ...     lambda x, microbatch: weight * x, [weight], flops=lambda x: Flops(1, 1, 1)
        ... )
        >>> ring = Ring(rank=0, world_size=1, pred=0, succ=0, ranks=(0,))
        >>> executor = Executor(
        ...     lower(schedule),
        ...     {0: stage, 1: stage},
        ...     [torch.tensor(3.0)],
        ...     Mailbox(ring, schedule, Header("greeting", 1), alike=True),
        ...     torch.device("cpu"),
        ... )
        >>> executor.run(rank=0)
        >>> executor.losses, weight.grad  # 2 * 2 * 3, and its derivative by the weight
        ({0: tensor(12.)}, tensor(12.))
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, StageRun],
        inputs: Sequence[Tensor],
        mailbox: Mailbox,
        device: torch.device,
    ) -> None:
        self.losses: dict[int, Tensor] = {}  # of the last stage, by microbatch
        self._schedule = schedule
        self._stages = stages
        self._inputs = inputs
        self._mailbox = mailbox
        self._device = device
        # (stage, microbatch) -> (x, y), from F to B or W
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        # results to be sent, or to be taken by another stage of this rank
        self._ready: dict[Action, Tensor | None] = {}
        self._gradients: dict[tuple[int, int], Tensor | None] = {}  # of y, from I to W
        self._perform: Mapping[str, Callable[[Action], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._input_half,
            "W": self._weight_half,
            "SEND_F": self._send,
            "SEND_B": self._send,
            "RECV_F": mailbox.post,
            "RECV_B": mailbox.post,
        }

    def run(self, rank: int) -> None:
        """Performs the actions of a rank.

        Every rank of the ring calls it, and it blocks until this rank's part is done.
        """
        with span(f"step {self._schedule.name}"):
            for action in self._schedule.actions[rank]:
                self._perform[action.kind](action)
            self._mailbox.finish()

    def _forward(self, action: Action) -> None:
        stage, _, microbatch = action
        x = self._inputs[microbatch] if stage == 0 else self._get_input(stage, microbatch)
        run = self._stages[stage].run
        with self._computing(action, x):
            if stage == 0:  # the user's own tensor, which needs no gradient
                y = run(x, microbatch)
            else:
                y = forward_stage(lambda x: run(x, microbatch), x)
        if stage == self._schedule.num_stages - 1:
            self.losses[microbatch] = y.detach()
        else:
            self._ready[Action(stage, "SEND_F", microbatch)] = y.detach()
        if torch.is_grad_enabled():
            self._kept[stage, microbatch] = (x, y)

    def _backward(self, action: Action) -> None:
        stage, _, microbatch = action
        grad = self._get_gradient(stage, microbatch)
        x, y = self._kept.pop((stage, microbatch))
        with self._computing(action, x):
            self._pass_back(stage, microbatch, x, backward_stage(x, y, grad))

    def _input_half(self, action: Action) -> None:
        stage, _, microbatch = action
        grad = self._gradients[stage, microbatch] = self._get_gradient(stage, microbatch)
        x, y = self._kept[stage, microbatch]
        with self._computing(action, x):
            self._pass_back(stage, microbatch, x, backward_input(x, y, grad))

    def _weight_half(self, action: Action) -> None:
        stage, _, microbatch = action
        x, y = self._kept.pop((stage, microbatch))
        with self._computing(action, x):
            backward_weight(
                y, self._gradients.pop((stage, microbatch)), self._stages[stage].parameters
            )

    @contextmanager
    def _computing(self, action: Action, x: Tensor) -> Iterator[None]:
        """Records a computation on an input as a span, and charges for it."""
        stage, kind, microbatch = action
        with span(_SPANS[kind], stage=stage, microbatch=microbatch), stretched():
            yield
            charge(kind, stage, microbatch, lambda: self._stages[stage].flops(x))

    def _send(self, action: Action) -> None:
        tensor = self._ready.pop(action)
        if tensor is not None:
            self._mailbox.send(action, tensor)

    def _get_input(self, stage: int, microbatch: int) -> Tensor:
        """Returns the output of the previous stage, from this rank or by message."""
        made_here = self._ready.pop(Action(stage - 1, "SEND_F", microbatch), None)
        x = made_here if made_here is not None else self._take(Action(stage, "RECV_F", microbatch))
        assert x is not None  # only gradients can be missing
        return x

    def _get_gradient(self, stage: int, microbatch: int) -> Tensor | None:
        """Returns the gradient of a stage's output, from the next stage.

        None on the last stage, and if there is none.
        """
        if stage == self._schedule.num_stages - 1:
            return None
        answer = Action(stage + 1, "SEND_B", microbatch)
        if answer in self._ready:
            return self._ready.pop(answer)
        return self._take(Action(stage, "RECV_B", microbatch))

    def _pass_back(self, stage: int, microbatch: int, x: Tensor, grad: Tensor | None) -> None:
        """Makes the gradient of ``x`` ready for the previous stage."""
        if stage == 0:
            return
        # nothing depends on x, but the previous stage waits for a gradient
        if grad is None and x.is_floating_point():
            grad = torch.zeros_like(x)
        self._ready[Action(stage, "SEND_B", microbatch)] = grad

    def _take(self, recv: Action) -> Tensor | None:
        received = self._mailbox.take(recv)
        return None if received is None else received.to(self._device)


def rehearse(
    schedule: Schedule, costs: Costs, *, size_bytes: int = 0, steps: int = 1, ahead: int = 1
) -> None:
    """Does the steps of a pipeline without a model: sleeps instead of computing, and sends zeros.

    Every rank of the ring calls it with the same arguments, and it blocks until this rank's part is
    done. The ring must have as many ranks as the schedule. The trace is like that of a training
    step.

    Args:
        schedule: what to rehearse; one that is lowered already is taken as it is.
        costs: of the computations, in seconds; ``latency`` stays 0, because the messages are real.
        size_bytes: of each activation and each gradient; with 0 nothing is sent.
        steps: how many steps, one after the other.
        ahead: how many computations before its use a receive is posted, as in ``lower``. It has no
            effect on NCCL and with the semantics "grouped", where both sides need one order
            (``lower_in_step``).

    Raises:
        ArgumentError: a value breaks its rule, or the schedule is for another number of ranks.
        ScheduleError: the schedule sends something that nobody receives, or the other way round.

    Example:
        >>> import ringsim
        >>> from ringsim.pipeline import Costs, gpipe
        >>> costs = Costs(forward=0.001, backward=0.002)
        >>> trace = ringsim.trace(
        ...     rehearse, world_size=2, args=(gpipe(2, 4), costs), kwargs={"size_bytes": 1024}
        ... )
        >>> len(trace.messages), trace.bubble().of_total > 1 / 5
        (8, True)
    """
    _check(schedule, costs)
    check_integer("size_bytes", size_bytes, 0, "Say how large an activation is.")
    check_integer("steps", steps, 1, "Say how many.")
    ring = find_ring()
    if schedule.num_ranks != len(ring.ranks):
        raise ArgumentError(
            f"schedule must be for the {len(ring.ranks)} ranks of the ring, got one for "
            f"{schedule.num_ranks}. Make another one."
        )
    lowered = lower_in_step(schedule) if ring.in_order else lower(schedule, ahead=ahead)
    place, routes = place_in(ring), find_routes(ring, lowered.stage_ranks)
    is_real = get_state().clock is None
    # on a virtual clock they need not be copied
    payload = Payload((size_bytes,), torch.uint8, has_data=is_real)
    zeros = torch.zeros(size_bytes, dtype=torch.uint8, device="cpu" if is_real else "meta")
    for _ in range(steps):
        with span(f"{STEP}{schedule.name}"):
            posted: dict[Action, Transfer] = {}
            for action in lowered.actions[place]:
                if action.is_compute:
                    recv = get_recv(action, lowered.stage_ranks)
                    if recv is not None:
                        posted.pop(recv).wait()
                    with span(
                        _SPANS[action.kind], stage=action.stage, microbatch=action.microbatch
                    ):
                        compute(float(costs.get_duration(action)))
                else:
                    route = routes[find_boundary(action)]
                    with about(action):
                        posted[action] = (
                            route.isend(zeros)
                            if action.kind.startswith("SEND")
                            else route.irecv(payload)
                        )
            for each in posted.values():
                each.wait()


def _check(schedule: object, costs: object) -> None:
    if not isinstance(schedule, Schedule) or not isinstance(costs, Costs):
        raise ArgumentError(
            f"schedule and costs must be a schedule and Costs, got {say(schedule)} and "
            f"{say(costs)}. Make them: make_schedule('1f1b', 4, 8), Costs(forward=0.001)."
        )
    costs.check(schedule.num_stages)
    for field in fields(costs):
        given = getattr(costs, field.name)
        for time in given if isinstance(given, Sequence) else [given or 0]:
            check_duration(field.name, time)
    if costs.latency != 0:
        raise ArgumentError(
            f"latency must be 0, got {costs.latency}: the messages are real. Leave it out."
        )
