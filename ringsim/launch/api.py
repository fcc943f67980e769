"""``ringsim.trace``: runs a worker on real ranks, or records ranks that are already running."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from ringsim.errors import ArgumentError, check_limit, check_seed, check_worker, is_integer
from ringsim.faults import Degrade, Injection, check_injections
from ringsim.launch.job import RankKind, pack_call, refuse_unknown, start_environment
from ringsim.launch.recorded_cells import is_replaying, name_run, refuse, replay
from ringsim.launch.run import RunOptions, run
from ringsim.traces.value import Trace

if TYPE_CHECKING:
    from ringsim.launch.recording import Recording

_DAY_S = 86_400.0
WORLD_SIZE_MAX = 1024  # real processes; use the simulator for more


@overload
def trace(worker_or_path: str | os.PathLike[str], *, check: str = ...) -> Recording: ...


@overload
def trace(
    worker_or_path: Callable[..., Any],
    *,
    world_size: int,
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    comm_device: str = ...,
    timeout_s: float = ...,
    limit_s: float | None = ...,
    seed: int = ...,
    inject: Sequence[Injection] = ...,
    ring: bool = ...,
    check: str = ...,
    backend: str | None = ...,
    live: bool = ...,
    debug: bool = ...,
) -> Trace: ...


def trace(
    worker_or_path: Callable[..., Any] | str | os.PathLike[str],
    *,
    world_size: int | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    comm_device: str = "cpu",
    timeout_s: float = 30,
    limit_s: float | None = None,
    seed: int = 0,
    inject: Sequence[Injection] = (),
    ring: bool = True,
    check: str = "basic",
    backend: str | None = None,
    live: bool = False,
    debug: bool = False,
) -> Trace | Recording:
    """Runs a function on real ranks and records every message.

    With a path instead of a function, ``trace`` records ranks that are already running.

    With a function, ``trace`` starts ``world_size`` processes, joins them in a process group and a
    ring, calls ``worker(*args, **kwargs)`` in each process, and returns when all processes have
    finished. You can define the function in a notebook cell, without an ``if __name__`` guard. In
    the function, ``ringsim.current_ring()`` returns the rank's place in the ring. On Linux,
    processes that the worker starts end with their rank, unless they lead their own session.

    With a path, ``trace`` returns a context manager for scripts whose ranks were started by another
    launcher, such as torchrun. Every rank enters the block, and rank 0 writes one file at the end
    of the block.

    Args:
        worker_or_path: the function, or the path of the trace file to write.
        world_size: the number of ranks, at least 1.
        args: the worker's positional arguments, the same on every rank.
        kwargs: the worker's keyword arguments, the same on every rank.
        comm_device: "cpu" for Gloo, "gpu" for NCCL with one rank per GPU.
        timeout_s: the limit for each blocked operation, in seconds.
        limit_s: the limit for the whole run, in seconds. None means no limit, or one hour on GPUs,
            where stuck ranks are not detected.
        seed: the seed; rank r seeds torch, numpy and random with ``seed + r``.
        inject: the faults to inject: ``ringsim.Slow``, ``Degrade``, ``Fail`` and ``Jitter``, as in
            ``ringsim.simulate``.
        ring: whether to create the process group and the ring before the worker runs. If False, the
            worker creates them.
        check: the mistakes that raise an error before torch sees them. "basic" includes invalid
            ranks, tags, groups and tensors, and messages and collectives whose sides disagree on
            size, dtype, shape, reduction or root. "full" adds buffers that are used while their
            message is in flight and handles that are never waited for, at some cost. "off" includes
            none.
        backend: "mpi" to start the ranks on this machine with ``mpirun``, with the default group
            and the ring on MPI, or None for Gloo or NCCL, depending on ``comm_device``. With MPI,
            ``limit_s`` counts from the time when ``mpirun`` has started all ranks. Stuck ranks are
            detected after one second, if the posted operations prove that they are stuck. If a rank
            sleeps or computes forever, or no proof is possible, only ``limit_s`` and ``timeout_s``
            end the run; the error lists the operations that the ranks waited for.
        live: whether to show the run while it runs: in a notebook as a widget below the cell, in a
            terminal as a page in your browser, or as one line per rank if there is no browser.
        debug: whether ``breakpoint()`` in a rank brings its debugger to the caller's cell or
            terminal. While it waits for you, time stands still for ``limit_s``, ``timeout_s`` and
            the search for stuck ranks. Other limits, such as those of groups that the worker
            creates, continue to run. An operation that exceeds ``timeout_s`` ends the run with
            ``RunTimeout``, which the worker cannot catch. If the run fails, the error's
            ``locals(2)`` returns the variables of rank 2 as text.

    Returns:
        The trace, with events, pictures, and the ``results`` and ``output`` of each rank. With a
        path, a context manager.

    Raises:
        ArgumentError: an argument is invalid, or the worker uses an object that cannot be sent to
            the ranks.
        RingError: ``mpirun`` or mpi4py is missing.
        RankFailed: a rank raised an error or died. The message shows the first failure;
            ``error.trace`` contains the events recorded up to then.
        Deadlock, PeerExited, MessageMismatch: ranks could never have continued. They raise the
            error where they wait; ``error.diagnosis`` explains the cause.
        RunTimeout, Interrupted: the run took longer than ``limit_s``, or was stopped by Ctrl-C;
            both errors contain the trace.

    Example:
        >>> import ringsim
        >>> ringsim.trace(lambda: ringsim.current_ring().succ, world_size=3).results
        [1, 2, 0]
    """
    refuse_unknown(check)
    if isinstance(worker_or_path, str | os.PathLike):
        _refuse_with_path(world_size=world_size, inject=inject, live=live, debug=debug)
        # needs torch, which a launcher of ranks does not load
        from ringsim.launch.recording import Recording

        return Recording(Path(worker_or_path), check=check)
    check_worker(worker_or_path)
    if is_replaying():
        return replay(name_run(worker_or_path, world_size, args, kwargs), {})
    kind = make_kind(world_size, comm_device, timeout_s, ring=ring, backend=backend)
    if limit_s is not None:
        check_limit("limit_s", limit_s)
    seed = check_seed(seed, kind.world_size)
    injections = check_injections(inject, kind.world_size)
    _check_for_gloo(kind, injections, check)
    job = replace(pack_call(worker_or_path, args, kwargs, seed), check=check, inject=injections)
    options = RunOptions(limit_s=limit_s, live=live)
    if debug:  # time can stand still for ringsim, but not for torch
        job, options = replace(job, debug=True), replace(options, timeout_s=kind.timeout_s)
        kind = replace(kind, timeout_s=_DAY_S)
    return run(job, kind, options)


def _check_for_gloo(kind: RankKind, injections: Sequence[Injection], check: str) -> None:
    """Refuses options that only Gloo supports."""
    option, messages = 'backend="mpi"', "MPI messages"
    if kind.comm_device == "gpu":
        option, messages = 'comm_device="gpu"', "messages between GPUs"
    elif kind.backend is None:
        return
    if any(isinstance(each, Degrade) for each in injections):
        raise ArgumentError(
            f"inject must not contain Degrade with {option}, got {list(injections)}: {messages} "
            "cannot be delayed. Degrade Gloo links, or use ringsim.simulate."
        )
    if kind.backend is not None and check == "full":
        raise ArgumentError(
            'check must be "basic" or "off" with backend="mpi", got "full": MPI buffers and '
            "handles are not checked. Check the worker with Gloo."
        )


def _refuse_with_path(**options: Any) -> None:
    """Refuses options for ranks that ringsim starts."""
    for name, value in options.items():
        if value not in (None, False, ()):
            raise ArgumentError(
                f"{name} must be omitted with a path, got {value!r}: the ranks are already "
                "running. To start ranks, pass a function instead of a path. To see running ranks, "
                "use: ringsim watch."
            )


def make_kind(
    world_size: int | None,
    comm_device: str,
    timeout_s: float,
    *,
    ring: bool,
    backend: str | None = None,
) -> RankKind:
    """Checks the ranks' properties, and that torch is installed."""
    if is_replaying():
        refuse("cannot start ranks")
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    if world_size is None or not is_integer(world_size) or not 1 <= world_size <= WORLD_SIZE_MAX:
        raise ArgumentError(
            f"world_size must be an integer from 1 to {WORLD_SIZE_MAX}, got {world_size!r}. Pass "
            "the number of ranks to start: world_size=4."
        )
    if comm_device not in ("cpu", "gpu"):
        raise ArgumentError(
            f'comm_device must be "cpu" (Gloo) or "gpu" (NCCL), got {comm_device!r}.'
        )
    if backend not in (None, "mpi"):
        raise ArgumentError(
            f'backend must be "mpi" or None, got {backend!r}. Omit it for Gloo, or for NCCL with '
            'comm_device="gpu".'
        )
    if backend is not None and comm_device != "cpu":
        raise ArgumentError(
            'comm_device must be "cpu" with backend="mpi", got "gpu". Omit one of them.'
        )
    check_limit("timeout_s", timeout_s)
    environment = start_environment()
    return RankKind(
        int(world_size), comm_device, float(timeout_s), ring, environment, backend=backend
    )


def traced(*nothing: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Trace]]:
    """Returns a decorator that runs a function on real ranks with ``trace``.

    Args:
        nothing: must be empty; the decorator receives the function separately.
        options: the options of ``trace``, such as ``world_size``; ``args`` and ``kwargs`` are the
            arguments of the decorated function.

    Returns:
        The decorator. The decorated function returns the trace.

    Raises:
        TypeError: the decorator was not called: ``@traced`` instead of ``@traced(world_size=4)``.

    Example:
        >>> import ringsim
        >>> @ringsim.traced(world_size=2)
        ... def worker(number):
        ...     return number + ringsim.current_ring().rank
        >>> worker(40).results
        [40, 41]
    """
    if nothing:
        raise TypeError(
            f"@ringsim.traced must be called with the number of ranks, got {nothing[0]!r}. Write "
            "@ringsim.traced(world_size=4)."
        )

    def decorate(worker: Callable[..., Any]) -> Callable[..., Trace]:
        check_worker(worker)

        @functools.wraps(worker)
        def run_traced(*args: Any, **kwargs: Any) -> Trace:
            return trace(worker, args=args, kwargs=kwargs, **options)

        return run_traced

    return decorate
