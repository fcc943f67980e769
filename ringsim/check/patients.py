"""Generates patients for the lesson on diagnosis: pipelines with one fault each.

A patient is drawn from a name, so that each student gets a different one.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import ringsim
from ringsim.errors import ArgumentError, RingError, say
from ringsim.faults import Injection, Jitter, Slow
from ringsim.link import Link
from ringsim.traces.value import Trace

_WIDTH = 128
_FORWARD_S = 0.004
_UP = 100  # added to the tags of gradients
_LINK = Link(alpha_s=50e-6, beta_s_per_byte=1e-9)
FAULTS = (
    "straggler",
    "deadlock",
    "peer_exited",
    "rank_failed",
    "tag_mismatch",
    "group_mismatch",
    "message_mismatch",
)


class Case(NamedTuple):
    """A pipeline and its fault.

    Attributes:
        kind: the fault, one of ``ringsim.traces.findings.KINDS``.
        rank: the faulty rank; for faults between two ranks, the rank that sends.
        microbatch: the microbatch whose forward pass has the fault.
        world_size: the number of stages.
        microbatches: the number of microbatches.
        rows: the number of rows in an activation.
        trains: whether backward passes follow the forward passes.
        inject: the variation of computing times, and the slow rank.
    """

    kind: str
    rank: int
    microbatch: int
    world_size: int
    microbatches: int
    rows: int
    trains: bool
    inject: tuple[Injection, ...]


def patient(name: str) -> Trace:
    """Returns the trace of a faulty pipeline, to diagnose with ``check.diagnose``.

    The run uses a virtual clock and is always the same for a given name.

    Args:
        name: any text of your own, such as your name; add a number or a date for a different
            patient.

    Raises:
        ArgumentError: the name is not a string or is empty.

    Example:
        >>> from ringsim.check import diagnose
        >>> trace = patient("Ada")
        >>> diagnose(trace, kind="", ranks=(), event=None).passed
        False
        >>> trace == patient("Ada"), trace == patient("Grace")
        (True, False)
    """
    given: object = name
    if not isinstance(given, str) or not given.strip():
        raise ArgumentError(f"name must be a non-empty string, got {say(name)}. Pass your name.")
    case = draw(given.strip())
    try:
        trace = ringsim.simulate(
            _work, world_size=case.world_size, args=(case,), link=_LINK, inject=case.inject
        )
    except RingError as error:
        if error.trace is None:
            raise
        trace = error.trace
    whole: Trace = trace.redact()  # the same on every machine
    return whole


def draw(name: str) -> Case:
    """Draws a patient's pipeline and its fault."""
    random = Random(name.encode(errors="surrogatepass"))
    kind = random.choice(FAULTS)
    world_size, microbatches = random.randint(3, 7), random.randint(4, 9)
    rank = random.randrange(world_size if kind in ("straggler", "rank_failed") else world_size - 1)
    if kind == "straggler":  # a slow rank shows only in a long run
        microbatches += world_size
    vary = Jitter(fraction=0.2, seed=random.randrange(2**31))
    return Case(
        kind=kind, rank=0 if kind == "peer_exited" else rank,
        microbatch=random.randrange(1, microbatches), world_size=world_size,
        microbatches=microbatches, rows=2 * random.randint(2, 8), trains=random.random() < 0.5,
        inject=(vary, Slow(rank, factor=random.randint(6, 10))) if kind == "straggler" else (vary,),
    )  # fmt: skip


def _work(case: Case) -> None:
    """Runs a rank: forward passes, with an empty reply to each activation, and backward passes."""
    import torch  # here, so that the checks can be loaded without it

    from ringsim import comm as dist

    ring = ringsim.current_ring()
    tensor, nothing = torch.zeros(case.rows, _WIDTH), torch.zeros(0)
    last = ring.world_size - 1
    for microbatch in range(case.microbatches):
        fault = case.kind if microbatch == case.microbatch else ""
        mine = fault if ring.rank == case.rank else ""
        if mine == "peer_exited":
            return
        if ring.rank > 0:
            hasty = fault == "deadlock" and ring.pred == case.rank
            if hasty:
                dist.send(nothing, ring.pred, group=ring.pred_group, tag=microbatch)
            dist.recv(tensor, ring.pred, group=ring.pred_group, tag=microbatch)
            if not hasty:
                dist.send(nothing, ring.pred, group=ring.pred_group, tag=microbatch)
        _compute("forward", microbatch, _FORWARD_S)
        if mine == "rank_failed":
            raise KeyError(f"layer {microbatch}")
        if ring.rank < last:
            given = tensor[: case.rows // 2] if mine == "message_mismatch" else tensor
            tag = microbatch + (mine == "tag_mismatch")
            dist.send(
                given,
                ring.succ,
                group=None if mine == "group_mismatch" else ring.succ_group,
                tag=tag,
            )
            dist.recv(nothing, ring.succ, group=ring.succ_group, tag=microbatch)
    for microbatch in reversed(range(case.microbatches if case.trains else 0)):
        if ring.rank < last:
            dist.recv(tensor, ring.succ, group=ring.succ_group, tag=_UP + microbatch)
        _compute("backward", microbatch, 2 * _FORWARD_S)
        if ring.rank > 0:
            dist.send(tensor, ring.pred, group=ring.pred_group, tag=_UP + microbatch)


def _compute(name: str, microbatch: int, seconds: float) -> None:
    """Spends the time that a stage's layers would take."""
    with ringsim.span(name, stage=ringsim.current_ring().rank, microbatch=microbatch):
        ringsim.compute(seconds)
