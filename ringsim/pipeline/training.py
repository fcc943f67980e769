"""Runs a training step on a ring.

A step consists of the forward and backward passes of all microbatches, in the order of a schedule.

::

    every rank has the whole model and all microbatches; it uses
        its stages' layers        partition_model, build_stages
        its list of actions       make_schedule, lower
    and runs                      Executor.run: compute, send, receive
    then the ranks share          the gradients of tied parameters, the loss
    and its own parameters have their gradients, as in a single process

`pipeline_state_dict` returns the trained pipeline as a single model again. It returns the whole
model on every rank or, for a checkpoint in shards, each rank's part.

::

    rank 0: layers 0, 1 new, the rest unchanged ----.
                                                     +--> tensor by tensor, from the rank that
    rank 1: layers 2, 3 new, the rest unchanged ----'     trains it, into every rank's own model
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as recompute

from ringsim.errors import ArgumentError, ScheduleError
from ringsim.pipeline.adapters import Adapter
from ringsim.pipeline.executor import Executor, StageRun
from ringsim.pipeline.mailbox import Mailbox
from ringsim.pipeline.messages import BufferSpec, Header, find_ring, place_in
from ringsim.pipeline.partition import partition_model
from ringsim.pipeline.sharing import pass_back, pass_object_back, tied_gradients
from ringsim.pipeline.stage import (
    Stage,
    build_stages,
    check_owned,
    count_stage_flops,
    find_holders,
)
from ringsim.ring import Ring
from ringsim.schedules import make_schedule
from ringsim.schedules.engine import validate
from ringsim.schedules.lowering import lower, lower_in_step
from ringsim.schedules.schedule import Schedule
from ringsim.traces.units import count

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy of a microbatch, ignoring positions whose target is -100.

    Args:
        logits: the logits, shape (batch, seq, vocabulary). Half-precision logits are converted to
            float32.
        targets: the token ids, shape (batch, seq), already aligned: a position's target is the
            token that its logits should predict.

    Returns:
        The loss, a scalar tensor.

    Example:
        >>> float(cross_entropy(torch.zeros(1, 2, 4), torch.tensor([[3, -100]])))  # log 4
        1.3862943649291992
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100)


_WEIGHTS: dict[str, Callable[[Tensor], int]] = {
    "samples": len,
    "tokens": lambda target: int((target != -100).sum()),
}


def weighted_loss(
    targets: Sequence[Tensor],
    weights: str | Callable[[Tensor], float] = "samples",
    loss_fn: Loss = cross_entropy,
) -> Loss:
    """Returns a loss function for microbatches that differ in size.

    A step gives every microbatch the same weight. With this loss, every sample (or token) has the
    same weight instead, so the step is equivalent to a step on the whole batch. The loss sends no
    messages. Pass it as ``loss_fn`` to a step and to the reports.

    Args:
        targets: the targets of all microbatches of the step, as passed to the step.
        weights: "samples"; "tokens", which counts the targets other than -100; or a function that
            returns a non-negative weight for a microbatch's target. The weight must be the number
            by which ``loss_fn`` divides to compute its mean.
        loss_fn: a function that returns a microbatch's mean loss from logits and target. It is not
            called for a weight of 0.

    Returns:
        A function that returns ``loss_fn`` times the microbatch's weight, divided by the mean
        weight.

    Raises:
        ArgumentError: ``weights`` is invalid, a weight is negative or not finite, or all weights
            are 0.

    Example:
        >>> model, x, y = nn.Linear(2, 3), torch.randn(5, 2), torch.tensor([0, 1, 2, 0, 1])
        >>> targets = y.split(2)  # 2, 2 and 1
        >>> loss = train_step_pipeline(
        ...     nn.Sequential(model), x.split(2), targets, loss_fn=weighted_loss(targets)
        ... )
        >>> abs(loss - cross_entropy(model(x), y).item()) < 1e-6
        True
    """
    weigh = _WEIGHTS.get(weights) if isinstance(weights, str) else weights
    if weigh is None:
        raise ArgumentError(
            f'weights must be "samples", "tokens" or a function, got {weights!r}. Use one of these.'
        )
    found = [float(weigh(target)) for target in targets]
    if not all(0 <= each < math.inf for each in found) or not sum(found) > 0:
        raise ArgumentError(
            f"weights must be non-negative and not all 0, got {found}. Skip a step whose weights "
            "are all 0."
        )
    mean = sum(found) / len(found)

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        weight = float(weigh(target))
        # the mean of zero elements is NaN
        return loss_fn(logits, target) * (weight / mean) if weight else (logits * 0).sum()

    return loss


def train_step_pipeline(
    model: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    *,
    schedule: str | Schedule = "1f1b",
    partition: str | Sequence[int] | Sequence[range] = "count",
    attention_masks: Sequence[Tensor] | None = None,
    loss_fn: Loss = cross_entropy,
    checkpoint: bool = False,
    dropout_seed: int | None = None,
    adapter: Adapter | None = None,
) -> float:
    """Runs one step's forward and backward passes on the ranks of the ring.

    Every rank of the ring must call this function with the same arguments. It blocks until all
    ranks have finished the step. Each rank computes its own stages and accumulates gradients into
    the parameters of these stages, which are the model's own parameters. These are the gradients of

        the sum over microbatches of  loss_fn(model(input), target) / number of microbatches

    You call the optimizer yourself. You can pass all of the model's parameters to it, because the
    parameters that other ranks train have no gradient here.

    If there is no ring but ``torch.distributed`` is initialised, the function creates a ring. If
    ``torch.distributed`` is not initialised either, this process is the only rank.

    Args:
        model: the whole model, the same on every rank, in training or evaluation mode.
        inputs: one tensor per microbatch: token ids, shape (batch, seq), or any other input of the
            first layer. Shapes may differ.
        targets: one tensor per microbatch, for the loss: token ids, shape (batch, seq), already
            aligned. Positions whose target is -100 are ignored.
        schedule: a schedule, or a name for `make_schedule`. The schedule's rank *i* is the rank at
            position *i* in the ring.
        partition: "count", "parameters", the number of layers in each stage, or ranges from
            `partition_model`.
        attention_masks: one tensor per microbatch, with 1 for a token and 0 for padding, shape
            (batch, seq), or None if there is no padding.
        loss_fn: ``loss_fn(logits, target)`` returns a microbatch's mean loss, a scalar.
        checkpoint: whether stages discard their inner activations and recompute them for the
            backward pass.
        dropout_seed: a seed that makes dropout the same for any schedule and number of ranks, or
            None if dropout need not be repeatable. Use a different seed for each step.
        adapter: the adapter for a kind of model that ringsim does not know.

    Returns:
        The mean of the microbatches' losses, which is the same on every rank, or NaN for a model on
        device "meta", which has no loss.

    Raises:
        ArgumentError: the lists differ in length or are empty, the partition does not fit the
            model, or one of the model's trained parameters belongs to no stage.
        ScheduleError: the schedule is not a complete step, or has a different number of ranks or
            microbatches.
        MessageMismatch: the arguments differ between ranks.

    Example:
        >>> import ringsim
        >>> def worker(schedule):
        ...     torch.manual_seed(0)  # the same model on every rank
        ...     model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        ...     inputs, targets = [torch.ones(2, 3)] * 4, [torch.zeros(2, dtype=torch.int64)] * 4
        ...     loss = train_step_pipeline(model, inputs, targets, schedule=schedule)
        ...     return round(loss, 4), [
        ...         parameter.grad is not None for parameter in model.parameters()
        ...     ]
        >>> ringsim.trace(worker, world_size=2, args=("1f1b",)).results
        [(0.7093, [True, True, False, False]), (0.7093, [False, False, True, True])]
    """
    microbatches = _Microbatches(
        inputs, targets, attention_masks, loss_fn, checkpoint, dropout_seed
    )
    with torch.enable_grad():
        return _run_step(model, microbatches, schedule, partition, adapter)


def eval_step_pipeline(
    model: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    *,
    schedule: str | Schedule = "1f1b",
    partition: str | Sequence[int] | Sequence[range] = "count",
    attention_masks: Sequence[Tensor] | None = None,
    loss_fn: Loss = cross_entropy,
    adapter: Adapter | None = None,
) -> float:
    """Runs only the forward passes of a step, without gradients, and returns the loss.

    Every rank of the ring must call this function with the same arguments. It blocks until all
    ranks are done. To turn off dropout, call ``model.eval()`` first.

    Args:
        model: the whole model.
        inputs: one tensor per microbatch, as for `train_step_pipeline`.
        targets: one tensor per microbatch, as for `train_step_pipeline`.
        schedule: the schedule, which determines the rank of each stage.
        partition: the layers of each stage, as for `train_step_pipeline`.
        attention_masks: one tensor per microbatch, or None if there is no padding.
        loss_fn: a function that returns a microbatch's mean loss.
        adapter: the adapter for a kind of model that ringsim does not know.

    Returns:
        The mean of the microbatches' losses, which is the same on every rank.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
        >>> nn.init.zeros_(model[1].weight), nn.init.zeros_(model[1].bias)
        (...)
        >>> round(eval_step_pipeline(model, [torch.ones(1, 2)], [torch.tensor([3])]), 3)  # log 4
        1.386
    """
    with torch.no_grad():
        return _run_step(
            model,
            _Microbatches(inputs, targets, attention_masks, loss_fn),
            schedule,
            partition,
            adapter,
        )


def train_step_pipeline_afab(
    model: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    device: torch.device | str,
    dtype: torch.dtype,
) -> float:
    """Runs one step of a causal language model with all forwards before all backwards.

    This order is called AFAB or GPipe. The function works like `train_step_pipeline` with the
    schedule "afab". Every rank must call it, and it blocks until all ranks have finished the step.

    Args:
        model: the whole model, on every rank: a ``LlamaForCausalLM``, or any other model that has
            an adapter.
        inputs: the token ids, one tensor of shape (batch, seq) per microbatch.
        targets: the token ids to predict, with the same shapes as the inputs, already aligned.
            Positions whose target is -100 are ignored.
        device: the device of this rank and its model. The microbatches are moved to this device.
        dtype: the dtype of the model's parameters and of the hidden states.

    Returns:
        The loss, which is the same on every rank.

    Raises:
        ArgumentError: the model has a different device or dtype.

    Example:
        >>> from ringsim.pipeline import SmallTransformer
        >>> torch.manual_seed(0)
        <torch._C.Generator object at ...>
        >>> model = SmallTransformer(vocab_size=8, hidden_size=16, num_layers=1, num_heads=2)
        >>> tokens = torch.tensor([[1, 2, 3, 4]])
        >>> loss = train_step_pipeline_afab(
        ...     model, [tokens[:, :-1]], [tokens[:, 1:]], torch.device("cpu"), torch.float32
        ... )
        >>> 1 < loss < 4
        True
    """
    wanted = torch.empty(0, device=device).device  # "cuda" is the current GPU
    devices = {parameter.device for parameter in model.parameters()}
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if devices != {wanted} or dtype not in dtypes:
        got = f"{', '.join(map(str, dtypes))} on {', '.join(map(str, devices))}"
        raise ArgumentError(
            f"the model's parameters must be {dtype} on {wanted}, got {got}. Call "
            "model.to(device, dtype) first."
        )
    return train_step_pipeline(
        model,
        [each.to(device) for each in inputs],
        [each.to(device) for each in targets],
        schedule="afab",
    )


def check_microbatches(**tensors: Sequence[Tensor] | None) -> None:
    """Raises ArgumentError unless all lists have the same length, which is at least 1."""
    counts = {name: len(each) for name, each in tensors.items() if each is not None}
    if len(set(counts.values())) > 1 or 0 in counts.values():
        got = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise ArgumentError(
            "a step needs non-empty lists of the same length, with one tensor per microbatch, got "
            f"{got}. Split the batch into microbatches."
        )


@dataclass(frozen=True)
class _Microbatches:
    """The data and settings of a step."""

    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    masks: Sequence[Tensor] | None
    loss_fn: Loss
    checkpoint: bool = False
    dropout_seed: int | None = None

    def __post_init__(self) -> None:
        check_microbatches(inputs=self.inputs, targets=self.targets, attention_masks=self.masks)

    @property
    def alike(self) -> bool:
        """Whether all inputs have the same shape and dtype."""
        return len({(each.shape, each.dtype) for each in self.inputs}) == 1

    def run_of(self, stage: Stage) -> StageRun:
        """Returns the functions that run a stage on a microbatch.

        The functions compute the output or, on the last stage, the microbatch's share of the loss.
        """

        def compute(x: Tensor, microbatch: int) -> Tensor:
            if self.dropout_seed is not None:
                stage.seed = self.dropout_seed, microbatch
            # a layer may change its input in place, but needs the original input when it runs again
            if self.checkpoint:
                x = x.clone()
            return stage(x, None if self.masks is None else self.masks[microbatch])

        def run(x: Tensor, microbatch: int) -> Tensor:
            y: Tensor = (
                recompute(compute, x, microbatch, use_reentrant=False)
                if self.checkpoint
                else compute(x, microbatch)
            )
            # Dividing before the backward pass computes the gradients of the mean.
            return (
                self.loss_fn(y, self.targets[microbatch]) / len(self.inputs) if stage.is_last else y
            )

        return StageRun(
            run,
            list(stage.parameters()),
            lambda x: count_stage_flops(stage, x, recomputed=self.checkpoint),
        )


def _run_step(
    model: nn.Module,
    microbatches: _Microbatches,
    schedule: str | Schedule,
    partition: str | Sequence[int] | Sequence[range],
    adapter: Adapter | None,
) -> float:
    """Runs a step, with its backward passes only if gradients are enabled.

    See `train_step_pipeline`.
    """
    ring = find_ring()
    own, num_ranks = place_in(ring), len(ring.ranks)
    forward_only = not torch.is_grad_enabled()
    lowered = _prepare(
        schedule,
        num_ranks,
        len(microbatches.inputs),
        forward_only=forward_only,
        in_step=ring.in_order,
    )
    ranges = partition_model(model, lowered.num_stages, by=partition, adapter=adapter)
    stages = build_stages(model, ranges, adapter=adapter)
    if not forward_only:
        check_owned(model, stages)
    runs = {index: microbatches.run_of(stages[index]) for index in lowered.stages_of(own)}
    mailbox = Mailbox(ring, lowered, _greeting(lowered, ranges), alike=microbatches.alike)
    executor = Executor(lowered, runs, microbatches.inputs, mailbox)
    with nullcontext() if forward_only else tied_gradients(ring, stages, lowered.stage_ranks):
        executor.run(own)
    return float(pass_back(ring, _sum_up(executor.losses.values()), owner=lowered.stage_ranks[-1]))


def _sum_up(losses: Collection[Tensor]) -> Tensor:
    """Returns the sum of the losses on the CPU.

    The sum is 0 if there are no losses, and NaN if they are on device "meta" and have no value.
    """
    if not losses:
        return torch.zeros((), dtype=torch.float64)
    total = torch.stack(list(losses)).double().sum()
    return torch.full((), math.nan, dtype=torch.float64) if total.is_meta else total.cpu()


def _greeting(schedule: Schedule, ranges: Sequence[range]) -> Header:
    """Returns a header with the values that must be the same on all ranks."""
    rows = [" ".join(map(str, row)) for row in schedule.actions]
    order, cut = (
        zlib.crc32(repr(part).encode()) for part in ((schedule.stage_ranks, rows), ranges)
    )
    return Header(
        "greeting", schedule.num_microbatches, BufferSpec((cut,), torch.float32), digest=order
    )


@lru_cache(maxsize=16)  # a training loop uses the same schedule in every step
def _prepare(
    schedule: str | Schedule,
    num_ranks: int,
    num_microbatches: int,
    *,
    forward_only: bool,
    in_step: bool,
) -> Schedule:
    """Checks a schedule, and returns it (or only its forwards) with sends and receives."""
    if isinstance(schedule, str):
        schedule = make_schedule(schedule, num_ranks, num_microbatches)
    elif (schedule.num_ranks, schedule.num_microbatches) != (num_ranks, num_microbatches):
        raise ScheduleError(
            f"the schedule must have {count(num_ranks, 'rank')} and "
            f"{count(num_microbatches, 'microbatch')}, got {schedule.name} with "
            f"{count(schedule.num_ranks, 'rank')} and "
            f"{count(schedule.num_microbatches, 'microbatch')}. Create a schedule for this ring "
            "and batch."
        )
    else:
        validate(schedule)
    if forward_only:
        forwards = tuple(
            tuple(action for action in row if action.kind == "F") for row in schedule.actions
        )
        schedule = replace(schedule, actions=forwards)
    return lower_in_step(schedule) if in_step else lower(schedule)


def pipeline_state_dict(
    model: nn.Module,
    *,
    gather: bool = True,
    schedule: str | Schedule = "1f1b",
    partition: str | Sequence[int] | Sequence[range] = "count",
    adapter: Adapter | None = None,
) -> dict[str, Any]:
    """Returns the trained model's ``state_dict``, with the model's own keys.

    Each rank has trained only its own stages. Every rank of the ring must call this function with
    the same schedule, partition and adapter as its steps. It blocks until all ranks have called it.
    The function copies the tensors of other ranks into this rank's model, one at a time, so it
    needs no memory for a second copy. Afterwards, every rank has the whole trained model, including
    its modules' extra state.

    Args:
        model: the whole model, of which each rank has trained its own stages.
        gather: whether to collect the tensors of other ranks. With False, the function sends no
            messages and does not change the model; the result contains only this rank's tensors,
            for use with ``torch.distributed.checkpoint``. Loading into the result changes the
            model.
        schedule: the schedule of the steps, which determines the rank of each stage.
        partition: the partition of the steps.
        adapter: the adapter of the steps.

    Returns:
        The result of ``model.state_dict()`` or, with ``gather=False``, this rank's part of it,
        including tied parameters.

    Raises:
        ArgumentError: the partition does not fit the model, or one of the model's trained
            parameters belongs to no stage.

    Example:
        >>> import ringsim
        >>> def worker():
        ...     rank = ringsim.current_ring().rank
        ...     model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        ...     nn.init.constant_(model[rank].weight, 10 + rank)  # a stand-in for training
        ...     return list(pipeline_state_dict(model, gather=False)), [
        ...         each.item() for each in pipeline_state_dict(model).values()
        ...     ]
        >>> ringsim.trace(worker, world_size=2).results
        [(['0.weight'], [10.0, 11.0]), (['1.weight'], [10.0, 11.0])]
    """
    ring = find_ring()
    own = place_in(ring)
    if isinstance(schedule, str):
        schedule = make_schedule(schedule, len(ring.ranks), 1)
    ranges = partition_model(model, schedule.num_stages, by=partition, adapter=adapter)
    stages = build_stages(model, ranges, adapter=adapter)
    check_owned(model, stages)
    places = find_holders(
        stages,
        schedule.stage_ranks,
        lambda stage: (*stage.parameters(), *stage.buffers(), *stage.modules()),
    )
    parts = _find_parts(model)
    if not gather:
        return {
            key: value
            for key, value in model.state_dict().items()
            if own in places.get(parts.get(key), {own})
        }
    for part in dict.fromkeys(each for each in parts.values() if each in places):
        _copy_trained(ring, part, owner=min(places[part]), is_mine=own in places[part])
    return model.state_dict()


def _find_parts(model: nn.Module) -> dict[str, Tensor | nn.Module]:
    """Returns the tensor for each key in the model's ``state_dict``.

    For an extra state, the value is the module.
    """
    parts: dict[str, Tensor | nn.Module] = {
        key: value
        for key, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            parts[f"{name}._extra_state".removeprefix(".")] = module
    return parts


def _copy_trained(ring: Ring, part: Tensor | nn.Module, owner: int, *, is_mine: bool) -> None:
    """Copies a tensor, or a module's extra state, from the rank at a given position in the ring.

    Every rank of the ring must call this function.
    """
    if isinstance(part, nn.Module):
        state = pass_object_back(ring, part.get_extra_state(), owner)
        if not is_mine:
            part.set_extra_state(state)
    else:
        trained = pass_back(ring, part.detach(), owner)
        if not is_mine:
            part.detach().copy_(trained)
