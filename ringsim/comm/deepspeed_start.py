"""DeepSpeed's way to begin: ``init_distributed``, and its functions about where this process runs, on top of ``ringsim.environment``.

Where torch's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) are not all set, these functions set them, as DeepSpeed's
do: programs written for it read ``LOCAL_RANK`` afterwards. Nothing else of ringsim changes the environment unasked.

Source:
    DeepSpeed, ``deepspeed/comm/comm.py``: names, arguments, and which variables are set.
"""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from ringsim.comm.log import configure
from ringsim.comm.torch_backend import TORCH
from ringsim.environment import Discovery, discover
from ringsim.errors import ArgumentError, RendezvousFailed, RingError
from ringsim.rendezvous import build_default_group, meet
from ringsim.roll_call import Card
from ringsim.state import get_state

__all__ = [
    "in_aml",
    "in_aws_sm",
    "in_dlts",
    "init_distributed",
    "mpi_discovery",
    "patch_aml_env_for_torch_nccl_backend",
    "patch_aws_sm_env_for_torch_nccl_backend",
]

TORCH_DISTRIBUTED_DEFAULT_PORT: Final = 29500
_LOGGER: Final = logging.getLogger("ringsim.comm")
_FIVE: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT: Final = timedelta(minutes=10)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = _TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Joins this process to the others in the default process group. Harmless where there is one already.

    Every process calls it, and each is blocked until all have. Afterwards torch's five variables are set in the environment.

    Args:
        dist_backend: what torch calls it, "gloo" or "nccl"; None for NCCL where there are GPUs, else Gloo.
        auto_mpi_discovery: whether MPI may be asked where no launcher says who this process is.
        distributed_port: where rank 0 listens, unless the launcher or MASTER_PORT says so; 29500 stands for "no wish".
        verbose: whether to say, through ``logging``, what was found.
        timeout: limit for finding each other, and of every operation.
        init_method: a URL for ``torch.distributed.init_process_group``; None to find the others by the environment.
        dist_init_required: False to raise instead, where there is no process group.
        config: a DeepSpeed configuration, or its dictionary; its section "comms_logger" goes to ``configure``.
        rank: this process's number, -1 to find it.
        world_size: how many there are, -1 to find it.

    Raises:
        ArgumentError: an argument breaks its rule.
        RendezvousFailed: the processes did not find each other.
        RingError: nothing says who this process is, or ``dist_init_required`` is False and there is no process group.

    Example:
        >>> init_distributed("gloo", rank=0, world_size=1, verbose=False)
        >>> dist.get_world_size()
        1
        >>> dist.destroy_process_group()
    """
    if config is not None:
        configure(config)
    backend = get_state().backend or TORCH
    if backend.is_initialized():
        return
    if dist_init_required is False:
        raise RingError(
            "the process group must exist where dist_init_required is False, got none. Call init_process_group first, or leave it out."
        )
    if not isinstance(timeout, timedelta):
        raise ArgumentError(f"timeout must be a datetime.timedelta, got {timeout!r}. Write timedelta(minutes=10).")
    if backend is not TORCH:
        backend.init_process_group(dist_backend, timeout=timeout)
        return
    name = dist_backend or ("nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo")
    if init_method is not None:
        dist.init_process_group(name, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size)
        return
    wishes: dict[str, Any] = {key: value for key, value in (("rank", rank), ("world_size", world_size)) if value >= 0}
    if distributed_port != TORCH_DISTRIBUTED_DEFAULT_PORT and "MASTER_PORT" not in os.environ:
        wishes["port"] = distributed_port
    found = discover(**wishes, ask_mpi=auto_mpi_discovery)
    found.export()
    if verbose:
        _LOGGER.info("init_distributed: %s", found)
    _join(name, found, timeout)


def _join(name: str, found: Discovery, timeout: timedelta) -> None:
    """Meets the others at rank 0, which listens on its own address alone, and builds the default group."""
    card = Card(found.world_size, "gpu" if name == "nccl" else "cpu", tuple(range(found.world_size)))
    rendezvous = meet(found.head_ip, found.port, found.rank, found.world_size, card, timeout.total_seconds())
    failure = None
    try:
        build_default_group(rendezvous, found.rank, found.world_size, name, timeout)
    except (RuntimeError, ValueError) as error:
        failure = error
    try:
        why = None if failure is None else f"rank {found.rank} must build its process group, got {failure}"
        rendezvous.roll.finish(time.monotonic() + timeout.total_seconds(), why)
    except RendezvousFailed as error:
        raise error from failure


def mpi_discovery(distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True) -> None:
    """Sets torch's five variables from what MPI's launcher says, or else MPI itself.

    Every process that ``mpirun`` has started calls it; it blocks only where MPI itself must be asked (mpi4py).

    Args:
        distributed_port: where rank 0 is to listen.
        verbose: whether to say, through ``logging``, what was found.

    Raises:
        RingError: no launcher started this process, or it disagrees with the process group that exists.

    Example:
        >>> mpi_discovery()  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        ...
        ringsim.errors.RingError: head_ip, world_size, rank and local_rank must come from a launcher or from arguments ...
    """
    found = discover(port=distributed_port, environ={name: value for name, value in os.environ.items() if name not in _FIVE})
    backend = get_state().backend or TORCH
    if backend.is_initialized() and (backend.get_rank(), backend.get_world_size()) != (found.rank, found.world_size):
        raise RingError(
            f"MPI must number the ranks as the process group does, got rank {found.rank} of {found.world_size} from {found.rule} "
            f"(rank {backend.get_rank()} of {backend.get_world_size()}). Leave mpi_discovery out: there is a process group."
        )
    _set(found, verbose)


def in_aml() -> bool:
    """Returns whether this process runs in Azure ML.

    Example:
        >>> in_aml()
        False
    """
    return "AZUREML_EXPERIMENT_ID" in os.environ


def in_aws_sm() -> bool:
    """Returns whether this process runs in Amazon SageMaker.

    Example:
        >>> in_aws_sm()
        False
    """
    return "SM_TRAINING_ENV" in os.environ


def in_dlts() -> bool:
    """Returns whether this process runs in a DLTS cluster.

    Example:
        >>> in_dlts()
        False
    """
    return "DLTS_JOB_ID" in os.environ


def patch_aml_env_for_torch_nccl_backend(master_port: int = 6105, verbose: bool = True) -> None:
    """Sets torch's five variables, and ``NCCL_SOCKET_IFNAME``, from those of Azure ML. It does not block.

    Args:
        master_port: where rank 0 listens, where there are several machines and MASTER_PORT is not set.
        verbose: whether to say, through ``logging``, what was found.

    Raises:
        RingError: this is not Azure ML, or its variables are set by half.
    """
    kept = {"MASTER_PORT": os.environ["MASTER_PORT"]} if "MASTER_PORT" in os.environ else {}
    found = _find("azureml", "AZUREML_EXPERIMENT_ID")
    single = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(found.world_size)
    _set(found, verbose)
    if not single:
        os.environ["MASTER_PORT"] = kept.get("MASTER_PORT", str(master_port))
    before = os.environ.get("NCCL_SOCKET_IFNAME")
    os.environ["NCCL_SOCKET_IFNAME"] = "^docker0,lo"
    if verbose:
        _LOGGER.info("NCCL_SOCKET_IFNAME: %s before, now %s", before or "not set", os.environ["NCCL_SOCKET_IFNAME"])


def patch_aws_sm_env_for_torch_nccl_backend(verbose: bool = True) -> None:
    """Sets torch's five variables from those of SageMaker; an address and port that are set already stay. It does not block.

    Args:
        verbose: whether to say, through ``logging``, what was found.

    Raises:
        RingError: this is not SageMaker, or its variables are set by half.
    """
    kept = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ}
    _set(_find("sagemaker", "SM_TRAINING_ENV"), False)
    os.environ.update(kept)
    if verbose:
        _LOGGER.info("set from sagemaker: %s", ", ".join(f"{name}={os.environ[name]}" for name in _FIVE))


def _find(rule: str, variable: str) -> Discovery:
    """Discovers who this process is by one launcher's own variables."""
    if variable not in os.environ or "OMPI_COMM_WORLD_RANK" not in os.environ:
        raise RingError(
            f"{variable} and OMPI_COMM_WORLD_RANK must be set, got {'one' if variable in os.environ else 'none'} of them "
            f"(environment, {rule}). Call this in a job of that service, or init_distributed, which finds out where it is."
        )
    return discover(environ={name: value for name, value in os.environ.items() if name not in _FIVE})


def _set(found: Discovery, verbose: bool) -> None:
    variables = found.export()
    if verbose:
        _LOGGER.info("set from %s: %s", found.rule, ", ".join(f"{name}={value}" for name, value in variables.items()))
