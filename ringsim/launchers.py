"""What each launcher says to the processes that it starts, read from their environment.

A function for each launcher reads its variables and returns what they say as ``Facts``, or None where that launcher started nothing.
Nothing is guessed: what is not said is None. ``ringsim.environment`` chooses among them.
"""

from __future__ import annotations

import ipaddress
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from ringsim.errors import RingError
from ringsim.node_list import expand_node_list

__all__ = ["DEFAULT_PORT", "HERE", "LAUNCHERS", "Facts", "read_torchrun"]

HERE: Final = "127.0.0.1"
DEFAULT_PORT: Final = 29500  # torch's own
_AZURE_PORT: Final = 6105  # DeepSpeed's for several machines on Azure ML, and for one
_AZURE_PORT_OF_ONE: Final = 54965
_FIRST_PORT, _PORTS = 20000, 10000  # ports made from a job's number: below those that Linux hands out by itself (32768 and up)
_MOST: Final = 2**32  # of ranks, jobs and steps
_NO_TASKS: Final = 4294967290  # from here on a step is a batch script, or the shell of salloc, in which nobody has called srun


@dataclass(frozen=True)
class Facts:
    """What a launcher says.

    Attributes:
        rule: the name of the launcher.
        rank: this process's number, None where nothing says it; so for the others.
        world_size: how many processes there are.
        local_rank: this process's number on its machine.
        head_ip: rank 0's machine.
        port: where rank 0 listens.
        variables: the variables that were read, with their values.
        advice: what to do where the head is not known.
    """

    rule: str
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    head_ip: str | None = None
    port: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    advice: str = ""


class _Reader:
    """Reads variables and remembers which."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.seen: dict[str, str] = {}

    def text(self, *names: str) -> str | None:
        """Returns the first of the variables that is set to something."""
        for name in names:
            value = self._environ.get(name, "").strip()
            if value:
                self.seen[name] = value
                return value
        return None

    def whole(self, *names: str, low: int = 0, high: int = _MOST) -> int | None:
        """Returns the first of the variables that is set to something, which must be a whole number."""
        value = self.text(*names)
        if value is None:
            return None
        if not (value.isascii() and value.isdigit()) or len(value) > 18 or not low <= int(value) <= high:
            name = next(name for name in names if name in self.seen)
            span = f"from {low} to {high}" if high < _MOST else f"of {low} or more"
            raise RingError(f"{name} must be a whole number {span}, got {value!r} (environment). Correct it, or unset it.")
        return int(value)


def read_torchrun(environ: Mapping[str, str]) -> Facts:
    """Reads the variables that torchrun sets and ``init_process_group`` reads; all of its facts may be None.

    ``LOCAL_RANK`` may be missing where all ranks are on one machine: it is the rank then.

    Args:
        environ: the environment.

    Example:
        >>> facts = read_torchrun({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
        >>> facts.rank, facts.world_size, facts.local_rank, facts.head_ip, facts.port
        (1, 2, 1, '127.0.0.1', 29500)
    """
    read = _Reader(environ)
    rank, world_size = read.whole("RANK"), read.whole("WORLD_SIZE", low=1)
    local_rank = read.whole("LOCAL_RANK")
    head_ip, port = read.text("MASTER_ADDR"), read.whole("MASTER_PORT", low=1, high=65535)
    if local_rank is None and rank is not None and head_ip is not None and _is_loopback(head_ip):
        local_rank = rank
    return Facts("torchrun", rank, world_size, local_rank, head_ip, port, read.seen)


def _read_azureml(environ: Mapping[str, str]) -> Facts | None:
    """Azure ML starts ranks by Open MPI, and says where rank 0 is."""
    read = _Reader(environ)
    if read.text("AZUREML_EXPERIMENT_ID") is None or "DLTS_JOB_ID" in environ or "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    rank, world_size, local_rank, local_size = _read_openmpi_ranks(read)
    if world_size is not None and world_size == local_size:
        head: str | None = read.text("AZ_BATCHAI_MPI_MASTER_NODE") or HERE
        port = _AZURE_PORT_OF_ONE
    else:
        node = read.text("AZ_BATCH_MASTER_NODE")
        head = node and (node.rpartition(":")[0] or node)
        port = _AZURE_PORT  # the one in the variable belongs to Azure Batch
    return Facts("azureml", rank, world_size, local_rank, head, port, read.seen, "Set MASTER_ADDR to the machine of rank 0, on every rank.")


def _read_sagemaker(environ: Mapping[str, str]) -> Facts | None:
    """SageMaker starts ranks by Open MPI, and says which machine is the first."""
    read = _Reader(environ)
    training = read.text("SM_TRAINING_ENV")
    if training is None or "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    rank, world_size, local_rank, local_size = _read_openmpi_ranks(read)
    head = HERE if world_size is not None and world_size == local_size else _sagemaker_head(training)
    read.seen["SM_TRAINING_ENV"] = "{...}"  # kilobytes of settings
    return Facts(
        "sagemaker", rank, world_size, local_rank, head, DEFAULT_PORT, read.seen, "Set MASTER_ADDR to the machine of rank 0, on every rank."
    )


def _read_openmpi(environ: Mapping[str, str]) -> Facts | None:
    """Open MPI says nothing of where rank 0 is: its addresses are those of ``mpirun`` and of the daemons."""
    read = _Reader(environ)
    if "OMPI_COMM_WORLD_RANK" not in environ and "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    rank, world_size, local_rank, local_size = _read_openmpi_ranks(read)
    head = HERE if world_size is not None and world_size == local_size else None
    port = _port_of_name(read.text("PMIX_NAMESPACE"))
    advice = "Say it at the start: mpirun -x MASTER_ADDR=HOST ..., where HOST is the machine that rank 0 runs on."
    return Facts("openmpi", rank, world_size, local_rank, head, port, read.seen, advice)


def _read_mpich(environ: Mapping[str, str]) -> Facts | None:
    """Hydra, the launcher of MPICH, Intel MPI and MVAPICH, tells each rank its place on its machine too."""
    return _read_pmi(environ, "mpich") if {"MPI_LOCALRANKID", "HYDI_CONTROL_FD"} & environ.keys() else None


def _read_any_pmi(environ: Mapping[str, str]) -> Facts | None:
    """What other launchers with a process management interface say (PALS, PRRTE); often not everything."""
    return _read_pmi(environ, "pmi") if "PMI_RANK" in environ or "PMIX_RANK" in environ else None


def _read_pmi(environ: Mapping[str, str], rule: str) -> Facts:
    read = _Reader(environ)
    rank, world_size = read.whole("PMI_RANK", "PMIX_RANK"), read.whole("PMI_SIZE", low=1)
    local_rank = read.whole("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID")
    local_size = read.whole("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE", low=1)
    alone = world_size is not None and (world_size == local_size or world_size == 1)
    advice = "Say it at the start: mpiexec -genv MASTER_ADDR HOST ..., where HOST is the machine that rank 0 runs on."
    port = _port_of_name(read.text("PMIX_NAMESPACE", "I_MPI_HYDRA_UUID"))
    return Facts(rule, rank, world_size, 0 if world_size == 1 else local_rank, HERE if alone else None, port, read.seen, advice)


def _read_slurm(environ: Mapping[str, str]) -> Facts | None:
    """``srun`` numbers its tasks and lists the machines of its step; a batch script has no step, and is one process."""
    read = _Reader(environ)
    step = read.whole("SLURM_STEP_ID", "SLURM_STEPID")
    if step is None or step >= _NO_TASKS or "SLURM_PROCID" not in environ:
        return None
    rank, local_rank = read.whole("SLURM_PROCID"), read.whole("SLURM_LOCALID")
    world_size = read.whole("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", low=1)
    job = read.whole("SLURM_JOB_ID", "SLURM_JOBID") or 0
    head = None
    advice = "Say it before the start: export MASTER_ADDR=HOST, where HOST is the machine that rank 0 runs on."
    if (read.whole("SLURM_HET_SIZE", "SLURM_PACK_SIZE") or 1) > 1:
        advice = f"Each part of a heterogeneous job lists its own machines. {advice}"
    elif (read.text("SLURM_DISTRIBUTION") or "").startswith("arbitrary"):
        advice = f"With an arbitrary distribution the first machine of the list need not be that of rank 0. {advice}"
    elif listed := read.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        hosts = expand_node_list(listed)
        head = hosts[0] if len(hosts) > 1 else HERE
    return Facts("slurm", rank, world_size, local_rank, head, _port_of_number(job + 101 * step), read.seen, advice)


# In the order in which they are asked: who starts the ranks itself before who started that one. Azure ML and SageMaker are Open MPI
# with an address. `mpirun` in a Slurm job starts its daemons by `srun`, so ranks see their daemon's SLURM_PROCID beside their own number.
LAUNCHERS: Final[tuple[Callable[[Mapping[str, str]], Facts | None], ...]] = (
    *(_read_azureml, _read_sagemaker, _read_openmpi, _read_mpich),
    *(_read_slurm, _read_any_pmi),
)


def _read_openmpi_ranks(read: _Reader) -> tuple[int | None, int | None, int | None, int | None]:
    """Returns rank, world size, rank on this machine and number of ranks on it."""
    return (
        read.whole("OMPI_COMM_WORLD_RANK"),
        read.whole("OMPI_COMM_WORLD_SIZE", low=1),
        read.whole("OMPI_COMM_WORLD_LOCAL_RANK"),
        read.whole("OMPI_COMM_WORLD_LOCAL_SIZE", low=1),
    )


def _sagemaker_head(training: str) -> str | None:
    """Returns the first machine that SageMaker's settings name."""
    try:
        settings = json.loads(training)
    except ValueError:
        return None
    head = settings.get("master_hostname") if isinstance(settings, dict) else None
    return head if isinstance(head, str) and head else None


def _port_of_number(number: int) -> int:
    return _FIRST_PORT + number % _PORTS


def _port_of_name(name: str | None) -> int:
    """Returns a port made from a job's name, so that two jobs on one machine rarely meet; torch's own where there is no name."""
    return DEFAULT_PORT if name is None else _port_of_number(zlib.crc32(name.encode()))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
