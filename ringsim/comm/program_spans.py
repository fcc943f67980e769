"""Creates spans from a program's existing annotations.

These are ``record_function`` blocks, NVTX ranges, backward passes, and torch's own pipelines. Torch
itself annotates optimizer steps, data loaders, FSDP's phases and DistributedDataParallel's forward
with ``record_function``. Schedules of ``torch.distributed.pipelining`` call three methods of a
stage for each microbatch. These calls become the spans "forward", "backward", "input_grad" and
"weight_grad" within a span "step NAME", which ``Trace.bubble`` and the picture of a step use.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from functools import update_wrapper, wraps
from typing import Any

import torch
from torch.profiler import record_function

from ringsim.comm.torch_private import Hook, Replacements
from ringsim.traces.recorder import Recorder
from ringsim.traces.spans import span, stage_and_microbatch
from ringsim.traces.steps import STEP

# ringsim's names for schedules, so that their bubbles are compared with closed forms; other
# schedules are named after their class.
_SCHEDULES = {
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleInterleaved1F1B": "interleaved_1f1b",
    "ScheduleLoopedBFS": "looped_bfs",
    "ScheduleZBVZeroBubble": "zb_v",
    "ScheduleDualPipeV": "dualpipe_v",
}
# the spans of a stage's methods, whose first argument is the number of the microbatch
_CHUNKS = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "weight_grad",
}


_NO_STAGE = 0xFFFFFFFF  # the lower half of ``stage_and_microbatch`` outside stages


def make_replacements(recorder: Recorder, on_block: Callable[[], None]) -> Replacements:
    """Creates the functions that record ``record_function`` blocks, backwards and NVTX ranges.

    The blocks call ``on_block`` at the start of each block.
    """
    enter: Hook = record_function.__enter__
    leave: Hook = record_function.__exit__
    push: Hook = torch.cuda.nvtx.range_push
    pop: Hook = torch.cuda.nvtx.range_pop
    backward: Hook = torch.autograd.backward
    blocks: dict[int, int | None] = {}  # slots, by the id of the block
    ranges = threading.local()  # a thread's ranges nest

    def enter_block(self: Any) -> Any:
        on_block()
        blocks[id(self)] = recorder.span_begin(str(self.name))
        return enter(self)

    def leave_block(self: Any, kind: Any, error: Any, traceback: Any) -> Any:
        slot = blocks.pop(id(self), None)
        if slot is not None:
            recorder.span_end(slot, failed=kind is not None)
        return leave(self, kind, error, traceback)

    def record_backward(*args: Any, **kwargs: Any) -> Any:
        if stage_and_microbatch.get() & _NO_STAGE != _NO_STAGE:
            return backward(*args, **kwargs)  # a pipeline stage has its own span
        with span("torch.autograd.backward"):
            return backward(*args, **kwargs)

    def range_push(msg: Any) -> Any:
        depth = push(msg)
        ranges.__dict__.setdefault("open", []).append(recorder.span_begin(str(msg)))
        return depth

    def range_pop() -> Any:
        depth, slots = pop(), ranges.__dict__.get("open")
        slot = slots.pop() if slots else None
        if slot is not None:
            recorder.span_end(slot)
        return depth

    return {
        (record_function, "__enter__"): enter_block,
        (record_function, "__exit__"): leave_block,
        (torch.autograd, "backward"): update_wrapper(record_backward, backward),
        (torch.cuda.nvtx, "range_push"): range_push,
        (torch.cuda.nvtx, "range_pop"): range_pop,
    }


def find_pipelining() -> Any:
    """Returns the module of torch's pipeline schedules, or None if the program has not imported it.

    The module is not imported here, because the import takes a second.
    """
    return sys.modules.get("torch.distributed.pipelining.schedules")


def make_stage_replacements(schedules: Any) -> Replacements:
    """Creates the methods that record steps and computations of ``torch.distributed.pipelining``.

    Args:
        schedules: the module returned by ``find_pipelining``.
    """
    kind = sys.modules["torch.distributed.pipelining.stage"]._PipelineStageBase
    return {
        **{
            (kind, method): _make_chunk(getattr(kind, method), name)
            for method, name in _CHUNKS.items()
        },
        **{
            (each, "step"): _make_step(each.step)
            for each in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti)
        },
    }


def _make_chunk(call: Hook, name: str) -> Hook:
    signature = inspect.signature(call)

    @wraps(call)
    def run_chunk(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        stage, microbatch, *_ = given.values()
        what = name if given.get("full_backward", True) else "input_grad"
        with span(what, stage=stage.stage_index, microbatch=microbatch):
            return call(*args, **kwargs)

    return run_chunk


def _make_step(call: Hook) -> Hook:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = type(self).__name__
        with span(STEP + _SCHEDULES.get(name, name)):
            return call(self, *args, **kwargs)

    return step
