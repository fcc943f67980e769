"""``deepspeed.comm``, implemented on ringsim.

Use ``from ringsim.comm import deepspeed as dist`` instead of ``from deepspeed import comm as
dist``. Names, arguments, ``ReduceOp`` and the form of ``log_summary(return_dict=True)`` follow
DeepSpeed; ``ringsim.comm`` itself follows torch where DeepSpeed and torch differ. Both modules
share the same backends and the same log. Any name not defined in this module is taken from
``ringsim.comm``.

Operations have torch's names, but their arguments differ slightly: torch's ``input`` is called
``tensor``, the arguments ``prof``, ``log_name`` and ``debug`` may be positional, and ranks are
always global. ``op`` may be the ``ReduceOp`` of either library. All ranks in a group must call the
group's collectives in the same order. A collective blocks unless ``async_op`` is true, in which
case it returns a handle. Any rank may call the query functions (``get_...``, ``has_...``,
``in_...``) at any time; they do not block.

If torch's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) are not all set,
``init_distributed`` and similar functions set them, as in DeepSpeed, because programs written for
DeepSpeed read ``LOCAL_RANK`` afterwards. No other part of ringsim changes the environment unless
you ask it to.

Source:
    DeepSpeed, ``deepspeed/comm/comm.py`` and ``utils.py``: names, arguments and their defaults, and
    the variables that are set.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringsim.comm.backends import CurrentBackend
from ringsim.comm.backends import set_backend as _set_backend
from ringsim.comm.bootstrap import Card, build_default_group, finishing, meet
from ringsim.comm.calls import Tensors, make_signature, name_function
from ringsim.comm.deepspeed_log import describe
from ringsim.comm.functions import FUNCTIONS, MANAGING
from ringsim.comm.handles import Handle
from ringsim.comm.log import configure, find_place
from ringsim.comm.log import log_summary as _log_summary
from ringsim.environment import VARIABLES, Discovery, discover
from ringsim.errors import ArgumentError, RingError
from ringsim.state import get_state

TorchBackend = CurrentBackend  # DeepSpeed's name


class ReduceOp(Enum):
    """The reductions, numbered as in DeepSpeed.

    Each member corresponds to torch's member of the same name.
    """

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7
    UNUSED = 8


def to_torch(op: Any) -> Any:
    """Converts DeepSpeed's ``ReduceOp`` to torch's; returns any other value unchanged.

    Raises:
        ArgumentError: torch has no reduction of that name.

    Example:
        >>> (
        ...     to_torch(ReduceOp.MAX) == dist.ReduceOp.MAX,
        ...     to_torch(dist.ReduceOp.MIN) == dist.ReduceOp.MIN,
        ... )
        (True, True)
    """
    if not isinstance(op, ReduceOp):
        return op
    if op is ReduceOp.UNUSED:
        raise ArgumentError(
            "op must be a reduction, got ReduceOp.UNUSED. Choose ReduceOp.SUM or another reduction."
        )
    return getattr(dist.ReduceOp, op.name)


# -- operations


_REST = "group=None, async_op=False"
_EXTRAS = "prof=False, log_name=NAME, debug=None"  # arguments of the log


def _make_operation(
    name: str, arguments: str, native: str = "", extras: str = _EXTRAS
) -> Callable[..., Any]:
    """Creates a DeepSpeed function that calls the corresponding ``ringsim.comm`` function.

    Args:
        name: the name of the function.
        arguments: DeepSpeed's arguments, in torch's order, without the arguments of the log.
        native: torch's name, if it differs.
        extras: the arguments of the log that the function accepts.
    """
    native = native or name
    options = {"prof": False, "log_name": native, "debug": None}
    signature = make_signature(f"{arguments}, {extras}", SUM=ReduceOp.SUM, NAME=native)
    own = [each for each in signature.parameters if each not in options]

    def operation(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = options | bound.arguments
        values = [to_torch(given.pop(each)) for each in own]
        return FUNCTIONS[native](*values, **given)

    doc = (
        f"{(FUNCTIONS[native].__doc__ or native).strip().splitlines()[0]} Takes DeepSpeed's "
        f"arguments and calls torch's ``{native}``."
    )
    return name_function(operation, name, doc, signature, __name__)


send = _make_operation("send", "tensor, dst, group=None, tag=0")
recv = _make_operation("recv", "tensor, src=None, group=None, tag=0")
isend = _make_operation("isend", "tensor, dst, group=None, tag=0")
irecv = _make_operation("irecv", "tensor, src=None, group=None, tag=0")
broadcast = _make_operation("broadcast", f"tensor, src, {_REST}")
broadcast_object_list = _make_operation(
    "broadcast_object_list", "object_list, src, group=None, device=None"
)
all_gather = _make_operation("all_gather", f"tensor_list, tensor, {_REST}")
all_gather_object = _make_operation("all_gather_object", "object_list, obj, group=None")
all_gather_into_tensor = _make_operation(
    "all_gather_into_tensor", f"output_tensor, tensor, {_REST}"
)
allgather_fn = _make_operation(
    "allgather_fn", f"output_tensor, input_tensor, {_REST}", "all_gather_into_tensor", "debug=None"
)
gather = _make_operation("gather", f"tensor, gather_list=None, dst=0, {_REST}")
scatter = _make_operation("scatter", f"tensor, scatter_list=None, src=0, {_REST}")
all_reduce = _make_operation("all_reduce", f"tensor, op=SUM, {_REST}")
inference_all_reduce = _make_operation(
    "inference_all_reduce", f"tensor, op=SUM, {_REST}", "all_reduce"
)
reduce = _make_operation("reduce", f"tensor, dst, op=SUM, {_REST}")
reduce_scatter = _make_operation("reduce_scatter", f"output, input_list, op=SUM, {_REST}")
reduce_scatter_tensor = _make_operation(
    "reduce_scatter_tensor", f"output_tensor, tensor, op=SUM, {_REST}"
)
reduce_scatter_fn = _make_operation(
    "reduce_scatter_fn",
    f"output_tensor, tensor, op=SUM, {_REST}",
    "reduce_scatter_tensor",
    "prof=False, debug=None",
)
all_to_all_single = _make_operation(
    "all_to_all_single", f"output, tensor, output_split_sizes=None, input_split_sizes=None, {_REST}"
)
all_to_all = _make_operation("all_to_all", f"output_tensor_list, input_tensor_list, {_REST}")
barrier = _make_operation("barrier", f"{_REST}, device_ids=None")
monitored_barrier = _make_operation(
    "monitored_barrier", "group=None, timeout=None, wait_all_ranks=False"
)
batch_isend_irecv = _make_operation("batch_isend_irecv", "p2p_op_list")


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Handle | None:
    """Calls ``all_gather_into_tensor`` for each pair of tensors.

    Torch's function of the same name takes lists of lists instead.

    Raises:
        ValueError: the lists differ in length.
    """
    pairs = list(zip(output_tensors, input_tensors, strict=True))
    works = [
        FUNCTIONS["all_gather_into_tensor"](
            output, each, group, True, log_name="all_gather_coalesced"
        )
        for output, each in pairs
    ]
    return _wait_for_all(works, output_tensors, async_op)


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: Any = None,
) -> Handle | None:
    """Reduces several tensors in a single call."""
    works = [
        FUNCTIONS["all_reduce"](
            tensor, to_torch(op), group, True, prof=prof, log_name=log_name, debug=debug
        )
        for tensor in tensors
    ]
    return _wait_for_all(works, tensors, async_op)


def _wait_for_all(works: list[Any], results: Tensors, async_op: bool) -> Handle | None:
    """Returns a single handle for several operations, or waits for all of the operations."""
    handle = Handle(works, results=results)
    if async_op:
        return handle
    handle.wait()
    return None


# -- groups, and queries


@dataclass(frozen=True)
class ProcessGroup:
    """A group as DeepSpeed represents it; the operations themselves take torch groups.

    Attributes:
        comm_id: the name of the group.
        ranks: the members of the group.
    """

    comm_id: Any
    ranks: Sequence[int] = ()

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Returns a group member's global rank; a group of None means all ranks."""
    return get_all_ranks_from_group(group)[group_rank]


def new_group(ranks: Sequence[int] | None) -> Any:
    """Creates a process group; blocks until all ranks have called this function."""
    return MANAGING["new_group"](ranks)


def set_backend(backend: Any = None) -> None:
    """Chooses the backend for new groups, as ``ringsim.comm.set_backend`` does.

    None keeps the current backend, as in DeepSpeed.
    """
    if backend is not None:
        _set_backend(backend)


def has_reduce_scatter_tensor() -> bool:
    """Returns whether torch has ``reduce_scatter_tensor``; if not, it is built from messages."""
    return hasattr(dist, "reduce_scatter_tensor")


def has_all_gather_into_tensor() -> bool:
    """Returns whether torch has ``all_gather_into_tensor``; if not, it is built from messages."""
    return hasattr(dist, "all_gather_into_tensor")


def has_all_reduce_coalesced() -> bool:
    """Returns whether torch has ``all_reduce_coalesced``; if not, it is built from messages."""
    return hasattr(dist, "all_reduce_coalesced")


def has_coalescing_manager() -> bool:
    """Returns whether torch has a coalescing manager, which batches operations."""
    return hasattr(dist, "_coalescing_manager")


def get_world_group() -> Any:
    """Returns the group of all ranks.

    Raises:
        RingError: no process group exists yet.
    """
    _check_joined()
    return dist.group.WORLD


class Accelerator:
    """This process's GPU or CPU, with the methods that programs written for DeepSpeed use."""

    def communication_backend_name(self) -> str:
        """Returns "nccl" if GPUs are present and torch supports NCCL, else "gloo"."""
        return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"

    def device_count(self) -> int:
        """Returns the number of GPUs, or 1 if there are none."""
        return torch.cuda.device_count() or 1

    def device_name(self, device_index: int | None = None) -> str:
        """Returns torch's name for a device, such as "cpu" or "cuda:0"."""
        if not torch.cuda.is_available():
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def empty_cache(self) -> None:
        """Releases the GPU memory that torch has cached."""
        torch.cuda.empty_cache()  # does nothing without a GPU

    def set_device(self, device_index: int) -> None:
        """Selects the current GPU."""
        if torch.cuda.is_available():
            torch.cuda.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        """Waits until the GPU has finished its work."""
        if torch.cuda.is_available():
            torch.cuda.synchronize(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """Returns the size of the GPU's or the machine's memory, in bytes."""
        if torch.cuda.is_available():
            return int(torch.cuda.get_device_properties(device_index).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@cache
def get_accelerator() -> Accelerator:
    """Returns the accelerator, which programs written for DeepSpeed query for their device.

    Example:
        >>> torch.empty(
        ...     2, device=get_accelerator().device_name()
        ... ).is_cuda == torch.cuda.is_available()
        True
    """
    return Accelerator()


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Returns a group's global ranks, in the group's order; for None, returns all ranks.

    Raises:
        RingError: no process group exists yet.
    """
    _check_joined()
    return list(dist.get_process_group_ranks(group))


def get_local_rank() -> int:
    """Returns this process's number on its machine.

    The number comes from ``LOCAL_RANK``, or else from the ring, or else from the launcher.

    Raises:
        RingError: none of these sources provides the number.
    """
    variable = os.environ.get("LOCAL_RANK", "")
    if variable.isdecimal():
        return int(variable)
    ring = get_state().ring
    return discover(ask_mpi=False).local_rank if ring is None else ring.local_rank


def initialize_mesh_device(
    mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]
) -> DeviceMesh:
    """Creates a device mesh of all ranks.

    Call this function on all ranks; it blocks until all ranks have called it.

    Args:
        mesh_shape: the number of ranks in each dimension.
        mesh_dim_names: the names of the dimensions.
    """
    return init_device_mesh(
        get_accelerator().device_name(), mesh_shape, mesh_dim_names=mesh_dim_names
    )


def enable_symm_mem_for_group(group_name: str) -> None:
    """Enables symmetric memory on a group by calling torch's function of the same name."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group as enable

    enable(group_name)  # type: ignore[arg-type]  # torch's type is a NewType of str


def get_local_rank_from_launcher() -> int:
    """Returns ``LOCAL_RANK``, or Open MPI's equivalent, or 0 if neither is set."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or 0)


def get_world_rank_from_launcher() -> int:
    """Returns ``RANK``, or Open MPI's equivalent, or 0 if neither is set."""
    return int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)


def get_world_size_from_launcher() -> int:
    """Returns ``WORLD_SIZE``, or Open MPI's equivalent, or 1 if neither is set."""
    return int(os.environ.get("WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)


def _check_joined() -> None:
    if not dist.is_initialized():
        raise RingError(
            "the default process group does not exist yet. Call init_distributed first."
        )


# -- the start

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
_LOGGER = logging.getLogger("ringsim.comm")
_TIMEOUT = timedelta(minutes=10)


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
    """Creates the default process group, or does nothing if the group already exists.

    Call this function in every process; it blocks until all processes have called it. Afterwards,
    torch's five variables are set in the environment.

    Args:
        dist_backend: torch's name for the backend, "gloo" or "nccl"; "mpi" for ringsim's own
            backend; None for NCCL if GPUs are present, or else Gloo.
        auto_mpi_discovery: whether to query MPI for the rank if no launcher provides the rank.
        distributed_port: the port on which rank 0 listens, unless the launcher or MASTER_PORT sets
            a different port; 29500 means no preference.
        verbose: whether to log the discovered settings through ``logging``.
        timeout: the time limit for the rendezvous and for every operation.
        init_method: a URL for ``torch.distributed.init_process_group``; None to use the
            environment.
        dist_init_required: False to raise an error if no process group exists.
        config: a DeepSpeed configuration, as an object or a dictionary; its "comms_logger" section
            is passed to ``configure``.
        rank: this process's rank; -1 to discover it.
        world_size: the number of processes; -1 to discover it.

    Raises:
        ArgumentError: an argument is invalid.
        RendezvousFailed: the processes did not find each other.
        RingError: this process's rank could not be discovered, or ``dist_init_required`` is False
            and no process group exists.

    Example:
        >>> init_distributed("gloo", rank=0, world_size=1, verbose=False)
        >>> dist.get_world_size()
        1
        >>> dist.destroy_process_group()
    """
    if config is not None:
        configure(config)
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise RingError(
            "dist_init_required is False, but no default process group exists. Call "
            "init_process_group first, or omit dist_init_required."
        )
    if not isinstance(timeout, timedelta):
        raise ArgumentError(
            f"timeout must be a datetime.timedelta, got {timeout!r}. Use timedelta(minutes=10), "
            "for example."
        )
    backend = dist_backend or get_state().backend
    if backend == "mpi":
        _set_backend("mpi")
        MANAGING["init_process_group"]("mpi", timeout=timeout, world_size=world_size, rank=rank)
        _set(discover(rank=dist.get_rank(), world_size=dist.get_world_size()), verbose)
        return
    name = backend or get_accelerator().communication_backend_name()
    if init_method is not None:
        dist.init_process_group(
            name, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size
        )
        return
    chosen = distributed_port != TORCH_DISTRIBUTED_DEFAULT_PORT
    found = discover(
        port=distributed_port if chosen and "MASTER_PORT" not in os.environ else None,
        world_size=world_size if world_size >= 0 else None,
        rank=rank if rank >= 0 else None,
        ask_mpi=auto_mpi_discovery,
    )
    found.export()
    if verbose:
        _LOGGER.info("init_distributed: %s", found)
    _join(name, found, timeout)


def _join(name: str, found: Discovery, timeout: timedelta) -> None:
    """Meets the other ranks through rank 0 and creates the default group.

    Rank 0 listens only on its own address.
    """
    world_size, timeout_s = found.world_size, timeout.total_seconds()
    card = Card(world_size, "gpu" if name == "nccl" else "cpu", tuple(range(world_size)))
    rendezvous = meet(found.head_ip, found.port, found.rank, card, timeout_s)
    with finishing(rendezvous, timeout_s):
        build_default_group(rendezvous, name, timeout)


def mpi_discovery(
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True
) -> None:
    """Sets torch's five variables from the MPI launcher's variables, or else from MPI itself.

    Call this function in every process that ``mpirun`` has started. It blocks only if it has to
    query MPI itself, through mpi4py.

    Args:
        distributed_port: the port on which rank 0 will listen.
        verbose: whether to log the discovered settings through ``logging``.

    Raises:
        RingError: no launcher started this process, or the launcher disagrees with the existing
            process group.
    """
    found = discover(port=distributed_port, environ=_without_torchs())
    if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (
        found.rank,
        found.world_size,
    ):
        raise RingError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} in the process "
            f"group, but rank {found.rank} of {found.world_size} according to {found.rule}. "
            "Remove the call to mpi_discovery, because the process group already exists."
        )
    _set(found, verbose)


def in_aml() -> bool:
    """Returns whether this process runs in Azure ML."""
    return "AZUREML_EXPERIMENT_ID" in os.environ


def in_aws_sm() -> bool:
    """Returns whether this process runs in Amazon SageMaker."""
    return "SM_TRAINING_ENV" in os.environ


def in_dlts() -> bool:
    """Returns whether this process runs in a DLTS cluster."""
    return "DLTS_JOB_ID" in os.environ


def patch_aml_env_for_torch_nccl_backend(master_port: int = 6105, verbose: bool = True) -> None:
    """Sets torch's five variables, and ``NCCL_SOCKET_IFNAME``, from Azure ML's variables.

    This function does not block.

    Args:
        master_port: the port on which rank 0 listens if there are several machines and MASTER_PORT
            is not set.
        verbose: whether to log the discovered settings through ``logging``.

    Raises:
        RingError: the process is not running in Azure ML, or some Azure ML variables are missing.
    """
    found = _find("azureml", "AZUREML_EXPERIMENT_ID")
    if os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") != str(found.world_size):
        found = replace(found, port=int(os.environ.get("MASTER_PORT", master_port)))
    _set(found, verbose)
    before = os.environ.get("NCCL_SOCKET_IFNAME")
    os.environ["NCCL_SOCKET_IFNAME"] = "^docker0,lo"
    if verbose:
        _LOGGER.info(
            "NCCL_SOCKET_IFNAME: previously %s, now %s",
            before or "not set",
            os.environ["NCCL_SOCKET_IFNAME"],
        )


def patch_aws_sm_env_for_torch_nccl_backend(verbose: bool = True) -> None:
    """Sets torch's five variables from SageMaker's variables.

    If an address and a port are already set, they are kept. This function does not block.

    Args:
        verbose: whether to log the discovered settings through ``logging``.

    Raises:
        RingError: the process is not running in SageMaker, or some SageMaker variables are missing.
    """
    _set(_find("sagemaker", "SM_TRAINING_ENV", "MASTER_ADDR", "MASTER_PORT"), verbose)


def _find(rule: str, variable: str, *kept: str) -> Discovery:
    """Discovers this process's rank from the variables of one launcher.

    Torch's variables are ignored, except the variables in ``kept``.
    """
    if variable not in os.environ or "OMPI_COMM_WORLD_RANK" not in os.environ:
        raise RingError(
            f"this function reads {variable} and OMPI_COMM_WORLD_RANK, but "
            f"{'the second' if variable in os.environ else 'the first'} is not set in the "
            f"environment ({rule}). Call this function in a job on that service, or call "
            "init_distributed, which detects the service."
        )
    return discover(environ=_without_torchs(*kept))


def _without_torchs(*kept: str) -> dict[str, str]:
    left_out = {*VARIABLES.values()} - {*kept}
    return {name: value for name, value in os.environ.items() if name not in left_out}


def _set(found: Discovery, verbose: bool) -> None:
    variables = found.export()
    if verbose:
        _LOGGER.info(
            "set from %s: %s",
            found.rule,
            ", ".join(f"{name}={value}" for name, value in variables.items()),
        )


# -- the log, and all other names


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Combines the logs of all ranks, as ``ringsim.comm.log_summary`` does.

    Call this function on all ranks. Rank 0 prints the table.

    Args:
        show_straggler: whether the table and the dictionary include straggler time.
        return_dict: whether to return a dictionary.

    Returns:
        None, or a dictionary with DeepSpeed's keys: ``summary`` and ``straggler_analysis``, keyed
        by name and size in bytes, and ``metadata``. Unlike in DeepSpeed, each value covers all
        ranks, and each latency applies to one operation.
    """
    table = _log_summary(show_straggler=show_straggler)
    if not return_dict:
        return None
    summary, stragglers = describe(table)
    return {
        "summary": summary,
        "straggler_analysis": stragglers if show_straggler else None,
        "metadata": {
            "world_size": table.world_size,
            "rank": find_place()[0],
            "timestamp": datetime.now(UTC).isoformat(),
        },
    }


def __getattr__(name: str) -> Any:
    """Returns ``ringsim.comm``'s attribute for a name that is not defined here, such as ``cdb``."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(sys.modules["ringsim.comm"], name)


__all__ = [  # for `from ringsim.comm.deepspeed import *`
    *(
        name
        for name, value in globals().items()
        if getattr(value, "__module__", "") == __name__ and not name.startswith("_")
    ),
    *(
        "TorchBackend",
        "configure",
        "destroy_process_group",
        "get_comm_operation_count",
        "get_logged_comm_ops",
        "get_rank",
        "get_world_size",
        "has_comm_data",
        "is_available",
        "is_initialized",
        "reset_log",
        "timed_op",
    ),
]
