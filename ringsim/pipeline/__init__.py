"""Splits models into stages, and trains and runs them on the ring.

A training step cuts a model into stages. A schedule lists the actions of each rank, and an executor
runs the actions, sending activations forward and gradients back::

    partition -> stages ------.
                              +---> executor, on real ranks ---> gradients in the user's own parameters
    schedule (plain data) ----+---> evaluator, on a clock -----> times, deadlocks
                              '---> closed forms --------------> makespan, bubble, peak activations, messages

Models and stages::

    partition_model           cut a model's layers into contiguous ranges, one for each stage
    by_count                  cut layers into ranges of equal length
    by_weight                 cut weighted layers so that the heaviest stage is as light as possible
    get_stage_layers          the layers of one range
    Stage                     the part of a model that one stage runs
    build_stages              all stages of a model
    tied_parameters           parameters that more than one stage uses
    adapter_of                the adapter of a model
    Adapter                   the parts of a model: embedding, layers, head
    Announced                 the properties of a microbatch that every rank knows
    SmallTransformer          a small, readable transformer

Schedules::

    make_schedule             a schedule by its name
    gpipe                     all forwards, then all backwards (AFAB)
    one_f_one_b               1F1B: forwards and backwards alternate
    interleaved_1f1b          1F1B with several stages per rank
    looped_bfs                all microbatches of a chunk first (breadth first)
    zb_h1                     zero bubble, with the memory of 1F1B
    zb_h2                     zero bubble, with twice the memory
    zb_v                      zero bubble, stages placed in a V
    dualpipe_v                DualPipe, stages placed in a V
    Schedule                  a list of actions for each rank
    Action                    an item in such a list
    parse_action              an action from text, such as 2F0
    to_text                   a schedule as text
    from_text                 a schedule from text
    to_csv                    a schedule as torch's CSV
    from_csv                  a schedule from torch's CSV
    validate                  check that a schedule is a complete step that can finish
    lower                     insert sends and receives into a schedule
    evaluate                  compute the time of each action, without ranks
    Evaluation                the result of `evaluate`: times, bubbles, live activations
    Costs                     the costs of a schedule's actions
    flop_costs                the costs of a model's actions, from the shapes of its layers
    rehearse                  run a schedule on ranks that sleep instead of computing
    plot_schedule             a picture of a schedule, or of an evaluation

The closed forms of known schedules are in ``ringsim.schedules.closed_forms``.

Training::

    train_step_pipeline       one training step on the ring, with any schedule
    train_step_pipeline_afab  a training step of a causal language model with AFAB
    eval_step_pipeline        only the loss, without gradients
    clip_grad_norm_pipeline   gradient clipping over all stages
    pipeline_state_dict       the whole trained model, or one rank's part of it
    new_replica_group         the group of ranks with the same stage in several pipelines
    average_gradients         the mean of the gradients in such a group
    cross_entropy             the default loss
    weighted_loss             a loss for microbatches of different sizes
    share_overflow            report an overflow to the GradScalers of all stages
    forward_stage             the forward pass of one stage
    backward_stage            the backward pass of one stage
    backward_input            the first half of a backward pass: the gradient of the input
    backward_weight           the second half: the gradients of the parameters
    send_activation           send to the next stage
    recv_activation           receive from the previous stage
    send_gradient             send to the previous stage
    recv_gradient             receive from the next stage

Checks::

    gradient_report           compare every gradient with a single process
    compare_gradients         compare any two sets of gradients
    GradientReport            the result of both functions
    single_process_step       the loss and gradients of one process
    check_single_rank         compare the stages, in one process, with the model
    check_gradient_flow       find parameters that a backward pass did not reach
    boundary_shapes           the tensors that cross each boundary
    compare_losses            compare the loss of each step with a single process

Generation::

    generate                  continue prompts, on the token ring
    can_finish                whether a token ring can finish
    steady_use                the share of time in which a stage works

Names are imported on first use, so ``import ringsim.pipeline`` does not import torch, and schedules
work without torch.

Example:
    >>> from ringsim.pipeline import by_count
    >>> by_count(num_layers=5, num_stages=2)
    [range(0, 3), range(3, 5)]
"""  # noqa: E501

from importlib import import_module
from typing import TYPE_CHECKING, Any

# The table of contents: public name -> the module that defines it.
_CONTENTS = {
    name: f"ringsim.{module}"
    for module, names in {
        "pipeline.adapters": "Adapter Announced adapter_of",
        "pipeline.executor": "rehearse",
        "pipeline.generation": "generate",
        "pipeline.messages": "recv_activation recv_gradient send_activation send_gradient",
        "pipeline.partition": "get_stage_layers partition_model",
        "pipeline.reports": "GradientReport boundary_shapes check_gradient_flow check_single_rank "
        "compare_gradients compare_losses "
        "gradient_report single_process_step",
        "pipeline.sharing": (
            "average_gradients clip_grad_norm_pipeline new_replica_group share_overflow"
        ),
        "pipeline.stage": (
            "Stage backward_input backward_stage backward_weight build_stages flop_costs "
            "forward_stage tied_parameters"
        ),
        "pipeline.training": "cross_entropy eval_step_pipeline pipeline_state_dict "
        "train_step_pipeline "
        "train_step_pipeline_afab "
        "weighted_loss",
        "pipeline.transformer": "SmallTransformer",
        "plot.pipeline_step": "plot_schedule",
        "schedules": "make_schedule",
        "schedules.costs": "Costs",
        "schedules.engine": "Evaluation evaluate validate",
        "schedules.generation": "can_finish steady_use",
        "schedules.lowering": "lower",
        "schedules.partition": "by_count by_weight",
        "schedules.phases": (
            "dualpipe_v gpipe interleaved_1f1b looped_bfs one_f_one_b zb_h1 zb_h2 zb_v"
        ),
        "schedules.schedule": "Action Schedule from_csv from_text parse_action to_csv to_text",
    }.items()
    for name in names.split()
}
__all__ = sorted(_CONTENTS)

if TYPE_CHECKING:  # the same table, for type checkers and editors
    from ringsim.pipeline.adapters import Adapter as Adapter
    from ringsim.pipeline.adapters import Announced as Announced
    from ringsim.pipeline.adapters import adapter_of as adapter_of
    from ringsim.pipeline.executor import rehearse as rehearse
    from ringsim.pipeline.generation import generate as generate
    from ringsim.pipeline.messages import recv_activation as recv_activation
    from ringsim.pipeline.messages import recv_gradient as recv_gradient
    from ringsim.pipeline.messages import send_activation as send_activation
    from ringsim.pipeline.messages import send_gradient as send_gradient
    from ringsim.pipeline.partition import get_stage_layers as get_stage_layers
    from ringsim.pipeline.partition import partition_model as partition_model
    from ringsim.pipeline.reports import GradientReport as GradientReport
    from ringsim.pipeline.reports import boundary_shapes as boundary_shapes
    from ringsim.pipeline.reports import check_gradient_flow as check_gradient_flow
    from ringsim.pipeline.reports import check_single_rank as check_single_rank
    from ringsim.pipeline.reports import compare_gradients as compare_gradients
    from ringsim.pipeline.reports import compare_losses as compare_losses
    from ringsim.pipeline.reports import gradient_report as gradient_report
    from ringsim.pipeline.reports import single_process_step as single_process_step
    from ringsim.pipeline.sharing import average_gradients as average_gradients
    from ringsim.pipeline.sharing import clip_grad_norm_pipeline as clip_grad_norm_pipeline
    from ringsim.pipeline.sharing import new_replica_group as new_replica_group
    from ringsim.pipeline.sharing import share_overflow as share_overflow
    from ringsim.pipeline.stage import Stage as Stage
    from ringsim.pipeline.stage import backward_input as backward_input
    from ringsim.pipeline.stage import backward_stage as backward_stage
    from ringsim.pipeline.stage import backward_weight as backward_weight
    from ringsim.pipeline.stage import build_stages as build_stages
    from ringsim.pipeline.stage import flop_costs as flop_costs
    from ringsim.pipeline.stage import forward_stage as forward_stage
    from ringsim.pipeline.stage import tied_parameters as tied_parameters
    from ringsim.pipeline.training import cross_entropy as cross_entropy
    from ringsim.pipeline.training import eval_step_pipeline as eval_step_pipeline
    from ringsim.pipeline.training import pipeline_state_dict as pipeline_state_dict
    from ringsim.pipeline.training import train_step_pipeline as train_step_pipeline
    from ringsim.pipeline.training import train_step_pipeline_afab as train_step_pipeline_afab
    from ringsim.pipeline.training import weighted_loss as weighted_loss
    from ringsim.pipeline.transformer import SmallTransformer as SmallTransformer
    from ringsim.plot.pipeline_step import plot_schedule as plot_schedule
    from ringsim.schedules import make_schedule as make_schedule
    from ringsim.schedules.costs import Costs as Costs
    from ringsim.schedules.engine import Evaluation as Evaluation
    from ringsim.schedules.engine import evaluate as evaluate
    from ringsim.schedules.engine import validate as validate
    from ringsim.schedules.generation import can_finish as can_finish
    from ringsim.schedules.generation import steady_use as steady_use
    from ringsim.schedules.lowering import lower as lower
    from ringsim.schedules.partition import by_count as by_count
    from ringsim.schedules.partition import by_weight as by_weight
    from ringsim.schedules.phases import dualpipe_v as dualpipe_v
    from ringsim.schedules.phases import gpipe as gpipe
    from ringsim.schedules.phases import interleaved_1f1b as interleaved_1f1b
    from ringsim.schedules.phases import looped_bfs as looped_bfs
    from ringsim.schedules.phases import one_f_one_b as one_f_one_b
    from ringsim.schedules.phases import zb_h1 as zb_h1
    from ringsim.schedules.phases import zb_h2 as zb_h2
    from ringsim.schedules.phases import zb_v as zb_v
    from ringsim.schedules.schedule import Action as Action
    from ringsim.schedules.schedule import Schedule as Schedule
    from ringsim.schedules.schedule import from_csv as from_csv
    from ringsim.schedules.schedule import from_text as from_text
    from ringsim.schedules.schedule import parse_action as parse_action
    from ringsim.schedules.schedule import to_csv as to_csv
    from ringsim.schedules.schedule import to_text as to_text
else:  # hidden from type checkers, so that they report misspelt names

    def __getattr__(name: str) -> Any:
        """Imports a public name from its module on first use."""
        module = _CONTENTS.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(module), name)
        globals()[name] = value  # the next use costs nothing
        return value


def __dir__() -> list[str]:
    """Lists the public names, for completion."""
    return sorted(__all__)
