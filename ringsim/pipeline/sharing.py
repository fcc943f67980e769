"""Exchanges values between ranks at the end of a step.

Ranks share the loss, the gradients of tied parameters and the norm of all gradients. Replicas
average their gradients. Within a ring, all messages use the pair groups, so a ring needs no group
that contains all of its ranks.

Stages on several ranks may use the same parameter, for example a weight that the embedding and the
head share. Each stage computes the gradient of its own use of such a tied parameter, and the
parameter's gradient is the sum::

    rank 0, embedding:  g0 --.
                              +--> g0 + g1 on both ranks, so both optimizers do the same
    rank 1, head:       g1 --'

Gradients are clipped by the norm of the whole model's gradients, although no single rank has all of
them.

With data parallelism, a world contains several rings. Each ring has the whole model and its own
share of the batch::

    ring 0:  rank 0 -> rank 1  each ring runs a step on its microbatches, then
             |         |       the ranks of one column, which have the same stages, average their
                               gradients
    ring 1:  rank 2 -> rank 3
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, vector_to_parameters

from ringsim import comm as dist
from ringsim.errors import ArgumentError
from ringsim.pipeline.messages import SHARED_TAG, BufferSpec, Route, find_ring, place_in
from ringsim.pipeline.stage import Stage, find_holders
from ringsim.ring import Ring, current_ring


def pass_back(ring: Ring, value: Tensor, owner: int) -> Tensor:
    """Passes a value from the rank at a given position in the ring to all other ranks.

    All ranks must pass values of the same shape and dtype. Every rank of the ring must call this
    function, which blocks until the neighbours have called it. The value travels backwards around
    the ring, like the gradients, because the last stage, which has the loss, finishes first::

        rank 0 <--- rank 1 <--- rank 2 <--- rank 3, the owner

    Example:
        >>> pass_back(
        ...     Ring(rank=0, world_size=1, pred=0, succ=0, ranks=(0,)), torch.tensor(2.5), owner=0
        ... )
        tensor(2.5000)
    """
    if ring.rank != ring.ranks[owner]:
        value = Route.to_succ(ring).irecv(BufferSpec.of(value), SHARED_TAG).wait()
    if ring.pred != ring.ranks[owner]:
        Route.to_pred(ring).isend(value, SHARED_TAG).wait()
    return value


def pass_object_back(ring: Ring, value: Any, owner: int) -> Any:
    """Passes an object from the rank at a given position in the ring to all other ranks.

    This function works like `pass_back`, but pickles the object.

    Example:
        >>> pass_object_back(
        ...     Ring(rank=0, world_size=1, pred=0, succ=0, ranks=(0,)), {"steps": 3}, owner=0
        ... )
        {'steps': 3}
    """
    passed = [value]
    if ring.rank != ring.ranks[owner]:
        dist.recv_object_list(passed, ring.succ, group=ring.succ_group)
    if ring.pred != ring.ranks[owner]:
        dist.send_object_list(passed, ring.pred, group=ring.pred_group)
    return passed[0]


def gather_over_ring(ring: Ring, value: Tensor) -> list[Tensor]:
    """Returns all ranks' values, in ring order.

    The values must have the same shape and dtype. Every rank of the ring must call this function,
    which blocks until all ranks have. In N - 1 rounds, each rank sends to its successor the value
    that it received in the previous round.

    Example:
        >>> gather_over_ring(
        ...     Ring(rank=0, world_size=1, pred=0, succ=0, ranks=(0,)), torch.tensor(2.5)
        ... )
        [tensor(2.5000)]
    """
    own, size = place_in(ring), len(ring.ranks)
    values = {own: value}
    for distance in range(1, size):
        sent = Route.to_succ(ring).isend(values[(own - distance + 1) % size], SHARED_TAG)
        received = Route.to_pred(ring).irecv(BufferSpec.of(value), SHARED_TAG)
        values[(own - distance) % size] = received.wait()
        sent.wait()
    return [values[place].to(value.device) for place in range(size)]


def sum_over(ring: Ring, places: Sequence[int], value: Tensor) -> Tensor:
    """Adds up the values of the ranks at the given positions in the ring.

    Each of these ranks must call this function, which blocks until all of them have. The sum is
    identical to the last bit on each rank, because all ranks add in the order of the places.

    Example:
        >>> sum_over(Ring(rank=0, world_size=1, pred=0, succ=0, ranks=(0,)), [0], torch.tensor(2.5))
        tensor(2.5000)
    """
    own = place_in(ring)
    swaps = {
        place: Route.over_edge(ring, min(own, place), max(own, place)).iswap(value, SHARED_TAG)
        for place in places
        if place != own
    }
    shares = {own: value}
    for place, (sent, received) in swaps.items():
        sent.wait()
        shares[place] = received.wait().to(value.device)
    total = shares[places[0]].clone()
    for place in places[1:]:
        total += shares[place]
    return total


@contextmanager
def tied_gradients(
    ring: Ring, stages: Sequence[Stage], stage_ranks: Sequence[int]
) -> Iterator[None]:
    """Adds up the gradients of tied parameters after the passes of a step.

    Run the passes of the step in this ``with`` block. Every rank that holds a tied parameter must
    enter the block, and leaving the block waits until all of these ranks leave it. Gradients from
    before the block are not added again. ``stage_ranks`` gives, for each stage, the place of its
    rank in the ring.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> ring = Ring(rank=0, world_size=1, pred=0, succ=0, ranks=(0,))
        >>> with tied_gradients(ring, stages=[], stage_ranks=[]):
        ...     layer(torch.ones(1)).backward()
        >>> layer.weight.grad
        tensor([[1.]])
    """
    own = place_in(ring)
    # in the same order on every rank
    shared = [
        (parameter, sorted(places), parameter.grad)
        for parameter, places in find_holders(stages, stage_ranks).items()
        if len(places) > 1 and own in places and parameter.requires_grad
    ]
    for parameter, _, _ in shared:
        parameter.grad = None
    try:
        yield
        for parameter, places, _ in shared:
            share = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = sum_over(ring, places, share)
    finally:
        for parameter, _, before in shared:
            if before is not None:
                parameter.grad = before if parameter.grad is None else before + parameter.grad


def clip_grad_norm_pipeline(model: nn.Module, max_norm: float) -> float:
    """Scales all ranks' gradients so that their joint norm is at most ``max_norm``.

    Every rank of the ring must call this function after a step and before its optimizer. The
    function blocks until all ranks have called it. If you average gradients over several rings,
    average them before you clip them.

    Args:
        model: the whole model; the parameters that other ranks train have no gradient here.
        max_norm: the largest allowed norm, which must be positive.

    Returns:
        The norm before clipping, which is the same on every rank and in a single process. A tied
        parameter counts once. If the norm is NaN, all gradients become NaN, as in torch.

    Raises:
        ArgumentError: ``max_norm`` is not positive.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> model.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> (
        ...     clip_grad_norm_pipeline(model, max_norm=1.0),
        ...     [round(each, 3) for each in model.weight.grad.flatten().tolist()],
        ... )
        (5.0, [0.6, 0.8])

    Source:
        ``torch.nn.utils.clip_grad_norm_``: the rule.
    """
    if not max_norm > 0:
        raise ArgumentError(
            f"max_norm must be positive, got {max_norm}. To clip nothing, omit the call."
        )
    squares = torch.zeros(len(list(model.parameters())), dtype=torch.float64)
    for index, parameter in enumerate(model.parameters()):
        if parameter.grad is not None:
            squares[index] = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64) ** 2
    # All holders of a tied parameter have the same gradient for it, so only the largest of their
    # squares counts.
    squares = torch.stack(gather_over_ring(find_ring(), squares)).amax(dim=0)
    norm = squares.sum().sqrt()
    clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return float(norm)


def share_overflow(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    """Makes every rank's ``GradScaler`` skip a step if gradients overflow on any rank.

    Every scaler then also lowers its scale, so scalers that begin with the same scale keep the same
    scale. Every rank of the ring must call this function after each step, before
    ``scaler.unscale_`` or ``scaler.step``. The function blocks until all ranks have called it. If
    you average gradients over several rings, call it before you average.

    Args:
        model: the whole model; the parameters that other ranks train have no gradient here.
        scaler: this rank's scaler, created with the same arguments on every rank.

    Example:
        >>> model, scaler = nn.Linear(1, 1, bias=False), torch.amp.GradScaler("cpu", init_scale=4.0)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> scaler.scale(model(torch.full((1,), 1e38)).sum()).backward()
        >>> share_overflow(model, scaler)
        >>> scaler.step(optimizer), scaler.update(), scaler.get_scale()
        (None, None, 2.0)
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # a scaler gets its scale on first use, and until now only the last stage has used its scaler
    scaler.scale(parameters[0].new_ones(()))
    # for an empty stage, because a scaler needs a gradient
    if all(parameter.grad is None for parameter in parameters):
        parameters[0].grad = torch.zeros_like(parameters[0])
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    overflowed = torch.tensor(not all(bool(gradient.isfinite().all()) for gradient in gradients))
    if any(gather_over_ring(find_ring(), overflowed)):
        # the scaler finds the infinity, and the gradients of this step are not used
        gradients[0].fill_(math.inf)


def new_replica_group(rings: Sequence[Sequence[int]]) -> Any:
    """Creates a process group from this rank and the ranks at the same position in other rings.

    Every rank of the world must call this function once, with the same rings. It blocks like
    ``new_group``.

    Args:
        rings: the global ranks of each ring in order, as for the argument ``ring_ranks`` of
            ``initialize_distributed``. All rings must have the same length.

    Returns:
        The group to pass to `average_gradients`, or None on a rank outside all rings.

    Raises:
        ValueError: the lengths of the rings differ.
        RingError: this rank has no ring.

    Example:
        See `average_gradients`.
    """
    mine, limit = None, timedelta(seconds=current_ring().timeout_s)
    for column in zip(*rings, strict=True):
        group = dist.new_group(list(column), timeout=limit)
        if dist.get_rank() in column:
            mine = group
    return mine


def average_gradients(model: nn.Module, group: Any) -> None:
    """Averages gradients over this rank and the other ranks that hold the same stages.

    Every rank of every ring must call this function after a step, before clipping gradients. The
    function blocks until all ranks of the group have called it. It does not average the rings'
    losses.

    Args:
        model: the whole model. If only some replicas have a gradient, it counts as 0 on the other
            replicas. If no replica has a gradient, it stays None.
        group: the group from `new_replica_group`.

    Example:
        >>> import ringsim
        >>> def worker():
        ...     group = new_replica_group([[0], [1]])  # two pipelines of one rank each
        ...     model = nn.Linear(1, 1, bias=False)
        ...     model.weight.grad = torch.full((1, 1), float(ringsim.current_ring().rank))
        ...     average_gradients(model, group)
        ...     return model.weight.grad.item()
        >>> ringsim.trace(worker, world_size=2).results
        [0.5, 0.5]
    """
    size = dist.get_world_size(group)
    parameters = list(model.parameters())
    have_gradient = [parameter.grad is not None for parameter in parameters]
    used = torch.tensor(have_gradient, dtype=torch.int32, device=current_ring().device)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter, is_used in zip(parameters, used.tolist(), strict=True):
        if not is_used:
            continue
        if parameter.grad is None:  # only other replicas ran this expert or this layer
            parameter.grad = torch.zeros_like(parameter)
        by_kind.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter.grad)
    for gradients in by_kind.values():  # one message for all gradients of a kind
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=group)
        vector_to_parameters(flat / size, gradients)
