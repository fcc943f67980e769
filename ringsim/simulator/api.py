"""Implements ``ringsim.simulate``, which runs a worker on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from ringsim.compute_costs import check_costs
from ringsim.errors import (
    ArgumentError,
    RingError,
    check_duration,
    check_limit,
    check_seed,
    check_worker,
    is_integer,
    is_one_of,
    say,
)
from ringsim.faults import Injection, check_injections
from ringsim.launch.alone import run_alone
from ringsim.link import GivenLinks, Link, check_links
from ringsim.ring.packing import pack_worker
from ringsim.simulator.settings import Settings
from ringsim.state import get_state
from ringsim.topologies import Topology
from ringsim.traces.value import Trace

_WORLD_SIZE_MAX = 1_000_000


def simulate(
    worker: Callable[..., Any],
    *,
    world_size: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    link: GivenLinks | None = None,
    semantics: str = "rendezvous",
    compute: Any = None,
    topology: Topology | None = None,
    seed: int = 0,
    inject: Iterable[Injection] = (),
    record: bool = True,
    stacks: str = "threads",
    limit_s: float | None = None,
    debug: bool = False,
) -> Trace:
    """Runs a function on simulated ranks with a virtual clock.

    You can use the same functions as with ``ringsim.trace``: they may use ``torch.distributed``
    freely, and their computations are real. However, all ranks share one process and take turns,
    and a cost model determines how long messages take. You can therefore simulate thousands of
    ranks, and the same call always returns the same trace, byte for byte.

    Computing takes no virtual time, except for ``ringsim.compute`` and the costs set by
    ``compute``.

    Args:
        worker: the function to run.
        world_size: the number of ranks, at least 1.
        args: the worker's positional arguments; each rank gets a copy.
        kwargs: the worker's keyword arguments; each rank gets a copy.
        link: the cost of a message: one link for all pairs of ranks, or a dict with a link for each
            ordered pair (src, dst) that communicates. A busy link delays the next message.
        semantics: the condition under which a message leaves. With "rendezvous", a send waits for
            its recv, as with Gloo. With "buffered(65536)", only sends of more than 65536 bytes
            wait, as with MPI; with "buffered", no send waits. With "grouped", a rank's messages on
            a group run one after another, except that the messages of one ``batch_isend_irecv`` run
            together, as with NCCL. With "paired", only messages between the same two ranks do, and
            batches, as with NCCL if no ``device_id`` was passed to ``init_process_group``. With
            "grouped(65536)" or "paired(65536)", sends of up to 65536 bytes do not wait for their
            recv when their turn comes.
        compute: the cost of computing, or None if computing takes no time. Pass
            ``ringsim.FlopCosts``, or the result of ``ringsim.calibrate``, which also sets the cost
            of posting a message and adds its warnings to the notes of the trace. Alternatively,
            pass "measured" to charge the time that computing takes on this machine. Measured times
            differ from run to run, as a note in the trace points out.
        topology: the links of a machine or cluster in which pairs of ranks share links, instead of
            ``link``; see ``ringsim.topologies``.
        seed: the base seed. Rank r seeds torch, numpy and random with ``seed + r``.
        inject: the faults to inject: ``Slow``, ``Degrade``, ``Fail``, ``Jitter``.
        record: whether to record the operations. With False, the simulation is faster, and the
            trace contains only results.
        stacks: the kind of stack that ranks use. "threads" can run every program. "greenlets" need
            less memory, do not require thousands of threads, and are up to 1.5 times as fast for
            programs that mostly exchange messages. On a greenlet, however, a rank cannot wait
            inside a backward pass or a C++ call, as DDP, FSDP2 and DTensor require; such a wait
            raises RingError. Greenlets need ``pip install 'ringsim[greenlets]'``.
        limit_s: the time limit for the whole run, in seconds of real time, or None for no limit.
        debug: whether ``breakpoint()`` in a rank brings its debugger to the caller's cell or
            terminal. Time stands still for all ranks while a rank is stopped. Besides the commands
            of pdb, ``look`` lists what each rank does, and ``op`` runs until any rank, or
            ``op 2`` until rank 2, is about to post its next operation. If the run fails,
            the error's ``locals(2)`` returns the variables of rank 2 as text.

    Returns:
        The trace, which holds the events and each rank's ``results`` and ``output``, and which can
        draw plots.

    Raises:
        ArgumentError: an argument is invalid.
        RankFailed: a rank raised an exception. The message shows the first failure, and
            ``error.trace`` holds the events recorded until then.
        Deadlock, PeerExited, MessageMismatch: some ranks can never continue; ``error.diagnosis``
            explains why.
        RunTimeout, Interrupted: the run took longer than ``limit_s``, or Ctrl-C stopped it.
        RingError: the caller is a simulated rank.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> import ringsim
        >>> def worker():
        ...     ring = ringsim.current_ring()
        ...     token = torch.tensor([float(ring.rank)])
        ...     sending = dist.isend(token.clone(), ring.succ, group=ring.succ_group)
        ...     dist.recv(token, ring.pred, group=ring.pred_group)
        ...     sending.wait()
        ...     return token.item()
        >>> trace = simulate(
        ...     worker, world_size=3, link=ringsim.Link(alpha_s=1e-3, beta_s_per_byte=1e-9)
        ... )
        >>> trace.results, trace.makespan_s
        ([2.0, 0.0, 1.0], 0.001000004)
    """
    check_worker(worker)
    settings = check_settings(
        Settings(world_size, link, topology, semantics, compute, seed, (), record, stacks), inject
    )
    if limit_s is not None:
        check_limit("limit_s", limit_s)
    function = "breakpoints:debug_here" if debug else "simulation:simulate_here"
    packed = pack_worker(worker, args, kwargs)
    trace: Trace = run_alone(
        f"ringsim.simulator.{function}", packed, settings, limit_s=limit_s
    ).end()
    return trace


def check_settings(settings: Settings, inject: Iterable[Injection]) -> Settings:
    """Checks the settings, and returns them with plain integers and the injections."""
    if get_state().clock is not None:
        raise RingError(
            "simulate cannot be called from a simulated rank. Run the simulations one after "
            "another."
        )
    size, link = settings.world_size, settings.link
    if not is_integer(size) or not 1 <= size <= _WORLD_SIZE_MAX:
        raise ArgumentError(
            f"world_size must be an integer from 1 to {_WORLD_SIZE_MAX:,}, got {say(size)}. Pass "
            "the number of ranks."
        )
    size = int(size)
    seed = check_seed(settings.seed, size)
    if not isinstance(settings.record, bool):
        raise ArgumentError(
            f"record must be True or False, got {say(settings.record)}. Pass False to leave the "
            "operations out of the trace."
        )
    if not is_one_of(settings.stacks, ("threads", "greenlets")):
        raise ArgumentError(
            f'stacks must be "threads" or "greenlets", got {say(settings.stacks)}. Omit it to use '
            "threads, which can run every program."
        )
    if settings.stacks == "greenlets" and find_spec("greenlet") is None:
        raise RingError(
            'stacks="greenlets" needs the package greenlet, which is not installed. Run '
            "pip install 'ringsim[greenlets]'."
        )
    if link is not None:
        check_links(link, size)
        for each in [link] if isinstance(link, Link) else link.values():
            check_duration("alpha_s of link", each.alpha_s)
    check_costs(None if settings.measures else settings.compute)
    injections = check_injections(inject, size)
    return replace(settings, world_size=size, seed=seed, inject=injections)
