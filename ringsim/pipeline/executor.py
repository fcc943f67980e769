"""Runs a schedule on ranks, each of which performs its own list of actions in order.

These are the actions of one stage and microbatch on its rank::

    RECV_F  post the receive of x         RECV_B  post the receive of the gradient of y
    F       x -> stage -> y; keep (x, y)  B       (x, y), gradient of y -> gradients; forget (x, y)
    SEND_F  begin to send y               SEND_B  begin to send the gradient of x

Sends and receives do not block: a computation waits for its receive, and the end of the step waits
for the sends. Messages therefore travel while the ranks compute. Two stages on the same rank pass
tensors directly.

In a trace, the step and each computation are spans, which ``ringsim.traces.steps`` reads. A span
such as "step 1f1b" contains the spans "forward", "backward", "input_grad" and "weight_grad", each
with its stage and microbatch.

``rehearse`` runs a step without a model, using given computation times and message sizes. The order
of computations and messages is the same as in a real step::

    rank 0   compute  isend ->            compute  isend ->
    rank 1   irecv, wait      compute     irecv, wait ...

On real ranks, a rehearsal shows the cost of messages, because sleeping ranks do not compete for
cores. You can run the same function on the virtual clock and compare the two runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ringsim.compute_costs import charge, compute, stretched
from ringsim.errors import ArgumentError, check_duration, check_integer, say
from ringsim.pipeline.flops import Flops
from ringsim.pipeline.mailbox import Mailbox, about, find_boundary
from ringsim.pipeline.messages import BufferSpec, Transfer, find_ring, find_routes, place_in
from ringsim.pipeline.stage import backward_input, backward_stage, backward_weight, forward_stage
from ringsim.schedules.costs import Costs
from ringsim.schedules.lowering import get_recv, lower, lower_in_step
from ringsim.schedules.schedule import Action, Schedule
from ringsim.state import get_state
from ringsim.traces.spans import span
from ringsim.traces.steps import KINDS, STEP

_SPANS = {kind: name for name, kind in KINDS.items()}


@dataclass(frozen=True)
class StageRun:
    """The parts of a stage that the executor needs.

    Attributes:
        run: ``run(x, microbatch) -> y`` returns the output for a microbatch or, on the last stage,
            the microbatch's share of the loss.
        parameters: the parameters to which ``W`` actions add gradients.
        flops: ``flops(x)`` returns the arithmetic of a microbatch with this input; it is used only
            on a virtual clock that charges for arithmetic.
    """

    run: Callable[[Tensor, int], Tensor]
    parameters: Sequence[nn.Parameter]
    flops: Callable[[Tensor], Flops]


class Executor:
    """Runs one rank's part of a step.

    Args:
        schedule: the schedule, with its sends and receives, from `lower`.
        stages: this rank's stages, by number.
        inputs: the inputs of the first stage, one per microbatch.
        mailbox: the mailbox that carries the messages.

    Example:
        This example runs two stages on one rank:

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
        ... )
        >>> executor.run(rank=0)
        >>> executor.losses, weight.grad  # 2 * 2 * 3, and its derivative with respect to weight
        ({0: tensor(12.)}, tensor(12.))
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, StageRun],
        inputs: Sequence[Tensor],
        mailbox: Mailbox,
    ) -> None:
        self.losses: dict[int, Tensor] = {}  # the last stage's losses, by microbatch
        self._schedule = schedule
        self._stages = stages
        self._mailbox = mailbox
        self._device = inputs[0].device
        # (stage, microbatch) -> (x, y, gradient of y), from F to B or W
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor | None]] = {}
        # results for a send, or for a different stage on this rank
        self._ready: dict[Action, Tensor | None] = {}
        for microbatch, x in enumerate(inputs):
            self._ready[Action(-1, "SEND_F", microbatch)] = x
            self._ready[Action(schedule.num_stages, "SEND_B", microbatch)] = None
        self._perform: Mapping[str, Callable[[Action], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward,
            "W": self._weight_half,
            "SEND_F": self._send,
            "SEND_B": self._send,
            "RECV_F": mailbox.post,
            "RECV_B": mailbox.post,
        }

    def run(self, rank: int) -> None:
        """Runs the actions of a rank.

        Every rank of the ring must call this method, which blocks until this rank's part is done.
        """
        with span(f"step {self._schedule.name}"):
            for action in self._schedule.actions[rank]:
                self._perform[action.kind](action)
            self._mailbox.finish()

    def _forward(self, action: Action) -> None:
        stage, _, microbatch = action
        x = self._get(Action(stage, "RECV_F", microbatch))
        run = self._stages[stage].run
        with self._computing(action, x):
            if stage == 0:  # the caller's tensor, which requires no gradient
                y = run(x, microbatch)
            else:
                y = forward_stage(lambda x: run(x, microbatch), x)
        if stage == self._schedule.num_stages - 1:
            self.losses[microbatch] = y.detach()
        else:
            self._ready[Action(stage, "SEND_F", microbatch)] = y.detach()
        if torch.is_grad_enabled():
            self._kept[stage, microbatch] = (x, y, None)

    def _backward(self, action: Action) -> None:
        """Runs a whole backward pass, or its first half, and keeps the gradient of ``x``."""
        stage, kind, microbatch = action
        grad = self._get(Action(stage, "RECV_B", microbatch))
        x, y, _ = self._kept.pop((stage, microbatch))
        with self._computing(action, x):
            if kind == "B":
                found = backward_stage(x, y, grad)
            else:
                found = backward_input(x, y, grad)
                self._kept[stage, microbatch] = (x, y, grad)
            # no result depends on x, but the previous stage still waits for a gradient
            if found is None and stage > 0 and x.is_floating_point():
                found = torch.zeros_like(x)
        if stage > 0:
            self._ready[Action(stage, "SEND_B", microbatch)] = found

    def _weight_half(self, action: Action) -> None:
        stage, _, microbatch = action
        x, y, grad = self._kept.pop((stage, microbatch))
        with self._computing(action, x):
            backward_weight(y, grad, self._stages[stage].parameters)

    @contextmanager
    def _computing(self, action: Action, x: Tensor) -> Iterator[None]:
        """Records a computation as a span, and charges for it on a virtual clock."""
        stage, kind, microbatch = action
        with span(_SPANS[kind], stage=stage, microbatch=microbatch), stretched():
            yield
            charge(kind, stage, microbatch, lambda: self._stages[stage].flops(x))

    def _send(self, action: Action) -> None:
        tensor = self._ready.pop(action)
        if tensor is not None:
            self._mailbox.send(action, tensor)

    def _get(self, recv: Action) -> Any:
        """Returns a stage's input or gradient, from this rank or from a message.

        A gradient is None if there is none.
        """
        if recv.other_side in self._ready:
            return self._ready.pop(recv.other_side)
        received = self._mailbox.take(recv)
        return None if received is None else received.to(self._device)


def rehearse(
    schedule: Schedule, costs: Costs, *, size_bytes: int = 0, steps: int = 1, ahead: int = 1
) -> None:
    """Runs pipeline steps without a model: ranks sleep instead of computing, and send zeros.

    Every rank of the ring must call this function with the same arguments. The function blocks
    until this rank's part is done. The trace looks like the trace of a training step.

    Args:
        schedule: the schedule to rehearse, for as many ranks as the ring has; a schedule with sends
            and receives is used unchanged.
        costs: the times of the computations, in seconds; ``latency`` must be 0, because the
            messages are real.
        size_bytes: the size of each activation and each gradient, or 0 to send no messages.
        steps: the number of steps, which run one after another.
        ahead: the number of computations between the post of a receive and its use, as for
            ``lower``. It has no effect on NCCL or with "grouped" semantics, because they require
            the same order on both sides (``lower_in_step``).

    Raises:
        ArgumentError: an argument is invalid, or the schedule has a different number of ranks.
        ScheduleError: a send in the schedule has no matching receive, or a receive has no matching
            send.

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
    check_integer("size_bytes", size_bytes, 0, "Pass the size of an activation in bytes.")
    check_integer("steps", steps, 1, "Pass the number of steps.")
    ring = find_ring()
    if schedule.num_ranks != len(ring.ranks):
        raise ArgumentError(
            f"schedule must have as many ranks as the ring, {len(ring.ranks)}, got "
            f"{schedule.num_ranks}. Create a schedule with num_ranks={len(ring.ranks)}."
        )
    lowered = lower_in_step(schedule) if ring.in_order else lower(schedule, ahead=ahead)
    place, routes = place_in(ring), find_routes(ring, lowered.stage_ranks)
    is_real = get_state().clock is None
    # on a virtual clock, the zeros need not be copied
    payload = BufferSpec((size_bytes,), torch.uint8, has_data=is_real)
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
            f"schedule must be a Schedule and costs must be Costs, got {say(schedule)} and "
            f"{say(costs)}. For example, pass make_schedule('1f1b', 4, 8) and "
            "Costs(forward=0.001)."
        )
    costs.check(schedule.num_stages)
    for field in fields(costs):
        given = getattr(costs, field.name)
        for time in given if isinstance(given, Sequence) else [given or 0]:
            check_duration(field.name, time)
    if costs.latency != 0:
        raise ArgumentError(
            f"latency must be 0 because the messages are real, got {costs.latency}. "
            "Omit latency from the costs."
        )
