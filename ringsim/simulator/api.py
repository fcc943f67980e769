"""``ringsim.simulate``: a worker on a virtual clock."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from ringsim.charging import check_costs
from ringsim.errors import ArgumentError, RingError, check_duration, check_worker, say
from ringsim.faults import Injection, check_injections
from ringsim.launch.api import check_seed
from ringsim.launch.job import pack_call
from ringsim.link import Link, check_links
from ringsim.provenance import __version__
from ringsim.simulator.run import Run, Settings
from ringsim.simulator.semantics import read_semantics
from ringsim.state import get_state
from ringsim.topologies import Topology
from ringsim.traces.value import Trace

__all__ = ["simulate"]

_WORLD_SIZE_MAX: Final = 1_000_000


def simulate(
    worker: Callable[..., Any],
    *,
    world_size: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    link: Link | Mapping[tuple[int, int], Link] | None = None,
    semantics: str = "rendezvous",
    compute: Any = None,
    topology: Topology | None = None,
    seed: int = 0,
    inject: Iterable[Injection] = (),
    record: bool = True,
) -> Trace:
    """Runs a function on simulated ranks, on a virtual clock.

    The function is that of ``ringsim.trace``: it finds itself with ``ringsim.current_ring()``, talks with ``ringsim.comm``, and computes
    for real. But all ranks live in this process, take turns, and their messages take as long as a model says. So there may be thousands
    of them, and the same call gives the same trace, to the last byte.

    Computing takes no time, apart from ``ringsim.compute`` and what ``compute`` charges for. ``torch.distributed`` itself knows nothing of
    simulated ranks: take the same names from ``ringsim.comm``.

    Args:
        worker: the function.
        world_size: number of ranks, 1 or more.
        args: positional arguments of the worker; each rank gets a copy.
        kwargs: keyword arguments, likewise.
        link: what a message costs: one for all pairs of ranks, or one for each ordered pair (src, dst) that talks. A busy link delays the
            next message.
        semantics: when messages leave. "rendezvous": a send waits for its recv, as on Gloo. "buffered(65536)": up to so many bytes it does
            not, as on MPI; "buffered": never. "grouped": a rank's messages on a group go one after the other, and those of
            ``batch_isend_irecv`` together, as on NCCL.
        compute: what computing costs: ``ringsim.FlopCosts``, or what ``ringsim.calibrate`` found, which also has what posting a message
            costs; "measured": what it takes here, which no other run repeats, and the trace says so.
        topology: which links there are, instead of ``link``, where pairs of ranks share some: see ``ringsim.topologies``.
        seed: rank r seeds torch, numpy and random with ``seed + r``.
        inject: what goes wrong: ``Slow``, ``Degrade``, ``Fail``, ``Jitter``.
        record: whether to record the operations. Without, it is faster, and the trace has results only.

    Returns:
        The trace: ``results`` and ``output`` by rank, events, pictures.

    Raises:
        ArgumentError: an argument breaks its rule.
        RankFailed: a rank raised. The message shows the first failure; ``error.trace`` is what was recorded until then.
        Deadlock, PeerExited, MessageMismatch: ranks can never go on; ``error.diagnosis`` says why.
        RingError: it was called by a simulated rank.

    Example:
        >>> import torch
        >>> import ringsim
        >>> from ringsim import comm as dist
        >>> def worker():
        ...     ring = ringsim.current_ring()
        ...     token = torch.tensor([float(ring.rank)])
        ...     sending = dist.isend(token.clone(), ring.succ, group=ring.succ_group)
        ...     dist.recv(token, ring.pred, group=ring.pred_group)
        ...     sending.wait()
        ...     return token.item()
        >>> trace = simulate(worker, world_size=3, link=ringsim.Link(alpha_s=1e-3, beta_s_per_byte=1e-9))
        >>> trace.results, trace.makespan_s
        ([2.0, 0.0, 1.0], 0.001000004)
    """
    check_worker(worker)
    if get_state().clock is not None:
        raise RingError("simulate must be called outside of simulated ranks, got a call from one. Simulate one after the other.")
    if not _is_integer(world_size) or not 1 <= world_size <= _WORLD_SIZE_MAX:
        raise ArgumentError(
            f"world_size must be an integer from 1 to {_WORLD_SIZE_MAX:,}, got {say(world_size)}. Say how many ranks there are."
        )
    check_seed(seed, world_size)
    if not isinstance(record, bool):
        raise ArgumentError(f"record must be True or False, got {say(record)}. Say whether to record the operations.")
    when = read_semantics(semantics)
    if link is not None:
        check_links(link, world_size)
        for each in [link] if isinstance(link, Link) else link.values():
            check_duration("alpha_s of link", each.alpha_s)
    measures = isinstance(compute, str) and compute == "measured"
    costs = None if measures else compute
    check_costs(costs)
    injections = check_injections(inject, world_size)
    packed = pack_call(worker, args, kwargs, seed).call
    assert packed is not None

    def call() -> Any:
        function, values, named = pickle.loads(packed)
        return function(*values, **named)

    constants: dict[str, Any] = {"semantics": semantics, "seed": seed}
    if isinstance(link, Link):
        constants["links"] = {"all": _write_link(link)}
    elif link is not None:
        constants["links"] = {f"{src}>{dst}": _write_link(each) for (src, dst), each in link.items()}
    for name, value in (("topology", topology), ("compute", costs)):
        if value is not None:
            constants[name] = repr(value)
    if measures:
        constants["compute"] = "measured"
    if injections:
        constants["inject"] = [repr(each) for each in injections]
    metadata = {
        "format": 1,
        "source": "simulated",
        "world_size": world_size,
        "backend": f"virtual clock, {semantics}",
        "comm_device": "cpu",
        "constants": constants,
        "versions": {"ringsim": __version__},
    }
    return Run(call, Settings(world_size, link, topology, when, costs, measures, seed, injections, record, metadata)).finish()


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _write_link(link: Link) -> dict[str, float]:
    return {"alpha_s": link.alpha_s, "beta_s_per_byte": link.beta_s_per_byte}
