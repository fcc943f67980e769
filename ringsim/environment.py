"""Who am I? A process's rank, the number of ranks and where rank 0 is, found in what its launcher left in the environment.

::

    arguments                         what the caller passes comes first, value by value
    torchrun                          RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: by torchrun, or by hand
    azureml, sagemaker, openmpi,      the launcher of this process; MASTER_ADDR and MASTER_PORT, where set, say where rank 0 is
    mpich, slurm, pmi
    mpi4py                            asks MPI itself; only where a launcher of MPI is there and did not say everything

The first that fires is taken, from the innermost launcher outwards, since launchers start each other: ``mpirun`` in a Slurm job, torchrun
under ``srun``. The environment is never changed, except by ``Discovery.export``. A process that nothing started finds nothing, and is told
so: a world of one must be asked for (``world_size=1``), for a forgotten launcher would otherwise look like a run.
"""

from __future__ import annotations

import importlib.util
import operator
import os
import socket
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ringsim.errors import ArgumentError, RingError
from ringsim.launchers import HERE, LAUNCHERS, Facts, read_torchrun

__all__ = ["Discovery", "discover"]

_VARIABLES: Final = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "head_ip": "MASTER_ADDR",
    "port": "MASTER_PORT",
}
_ELASTIC: Final = {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"}  # torchrun started this process, whatever started torchrun
_MPI: Final = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_")
_SHOWN: Final = 80  # letters of a value in a message


@dataclass(frozen=True)
class Discovery:
    """Who a process is, and how that was found.

    Attributes:
        rank: its number among all, from 0.
        world_size: how many processes there are.
        local_rank: its number on its machine, from 0.
        head_ip: address or name of rank 0's machine.
        port: where rank 0 listens.
        rule: what said so: "arguments", "torchrun", "azureml", "sagemaker", "openmpi", "mpich", "slurm", "pmi" or "mpi4py".
        variables: the variables that were read, with their values.

    Example:
        >>> print(discover("10.0.0.1", 29500, 4, 2, local_rank=0))
        rank 2 of 4, local rank 0, head 10.0.0.1:29500: found by arguments
    """

    rank: int
    world_size: int
    local_rank: int
    head_ip: str
    port: int
    rule: str
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        found = (
            f"rank {self.rank} of {self.world_size}, local rank {self.local_rank}, head {self.head_ip}:{self.port}: found by {self.rule}"
        )
        return f"{found} from {_show(self.variables)}" if self.variables else found

    def export(self, environ: MutableMapping[str, str] | None = None) -> dict[str, str]:
        """Writes the finding into the environment under torchrun's names, for programs and ``init_process_group``, which read those.

        Args:
            environ: what to write into; None for this process's environment.

        Returns:
            The five variables as they are now.

        Example:
            >>> discover("10.0.0.1", 29500, 4, 2, local_rank=0).export({})["RANK"]
            '2'
        """
        variables = {variable: str(getattr(self, name)) for name, variable in _VARIABLES.items()}
        (os.environ if environ is None else environ).update(variables)
        return variables


def discover(
    head_ip: str | None = None,
    port: int | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    local_rank: int | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    ask_mpi: bool = True,
) -> Discovery:
    """Finds out who this process is among those that were started with it.

    Every process calls it by itself. It does not block, except under the last rule: MPI is asked on all ranks together, where a launcher
    of MPI has not said everything (several machines and no MASTER_ADDR, or no rank on the machine) and mpi4py is installed.

    Args:
        head_ip: address or name of rank 0's machine; None to find it, and so for the others.
        port: a free port there.
        world_size: how many processes there are. 1 needs nothing else: a world of one, on loopback.
        rank: this process's number among them.
        local_rank: its number on its machine.
        environ: the variables to read; None for this process's environment.
        ask_mpi: whether mpi4py may be imported (which starts MPI) as the last resort.

    Returns:
        The finding, with the rule that fired and the variables that it read.

    Raises:
        ArgumentError: an argument breaks its rule, or does not go with what the launcher says.
        RingError: variables contradict each other, are set by half, or are not there; the message lists them and says what to do.

    Example:
        >>> srun = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
        >>> found = discover(environ={**srun, "SLURM_STEP_NODELIST": "node[07-08]"})
        >>> found.rank, found.world_size, found.local_rank, found.head_ip, found.port, found.rule
        (5, 8, 1, 'node07', 24711, 'slurm')
    """
    environ = os.environ if environ is None else environ
    given = _check(head_ip=head_ip, port=port, world_size=world_size, rank=rank, local_rank=local_rank)
    if given.get("world_size") == 1:
        given = {"rank": 0, "local_rank": 0, "head_ip": HERE, **given}
        given.setdefault("port", _free_port())
    if given.keys() == _VARIABLES.keys():
        return _conclude(given, Facts("arguments"), given)
    facts = _choose(environ)
    if "world_size" in given and "rank" not in given and facts.world_size not in (None, given["world_size"]):
        raise ArgumentError(
            f"world_size must be {facts.world_size} as the launcher says, for rank is left to it, got {given['world_size']} "
            f"({facts.rule}: {_show(facts.variables)}). Pass both, or neither."
        )
    values = {**_known(facts), **given}
    if missing := _VARIABLES.keys() - values.keys():
        has_mpi = any(name.startswith(_MPI) for name in environ) and importlib.util.find_spec("mpi4py") is not None
        if not has_mpi or not ask_mpi:
            raise _unfinished([name for name in _VARIABLES if name in missing], facts, given, environ, has_mpi)
        facts = _ask_mpi(facts)
        values = {**_known(facts), **given}
    return _conclude(values, facts, given)


def _check(**arguments: Any) -> dict[str, Any]:
    """Returns the arguments that are given, whole numbers as ``int``; ``check_ring_arguments`` knows their other rules."""
    given = {name: value for name, value in arguments.items() if value is not None}
    for name, value in given.items():
        if name == "head_ip":
            if not isinstance(value, str) or not value.strip():
                raise ArgumentError(f"head_ip must be an address or a name as text, got {value!r}. Pass rank 0's address.")
            continue
        try:
            given[name] = None if isinstance(value, bool) else operator.index(value)
        except TypeError:
            given[name] = None
        low = 1 if name in ("world_size", "port") else 0
        if given[name] is None or given[name] < low:
            raise ArgumentError(
                f"{name} must be a whole number of {low} or more, got {value!r}. Pass one, or leave it out to have it found."
            )
    return given


def _choose(environ: Mapping[str, str]) -> Facts:
    """Returns what the innermost launcher says, completed by torchrun's variables, which people set by hand too."""
    torchrun = read_torchrun(environ)
    if _ELASTIC & environ.keys():
        return torchrun
    complete = _known(torchrun).keys() == _VARIABLES.keys()
    said = [facts for launcher in LAUNCHERS if (facts := launcher(environ)) is not None]
    if not said:
        return torchrun
    launcher = said[0]
    if complete and (launcher.world_size or 1) < (torchrun.world_size or 1):
        return torchrun  # a launcher that started one process a machine, each of which started its ranks
    for other in said[1:]:
        if (launcher.rule, other.rule) in (("slurm", "pmi"), ("openmpi", "mpich")):  # any other pair is one inside the other
            _compare(launcher, other)
    _compare(launcher, torchrun)
    if complete:
        return torchrun
    return replace(launcher, **_known(torchrun), variables={**launcher.variables, **torchrun.variables})


def _known(facts: Facts) -> dict[str, Any]:
    """Returns the values that were said."""
    return {name: value for name in _VARIABLES if (value := getattr(facts, name)) is not None}


def _compare(one: Facts, other: Facts) -> None:
    """Raises where both say who this process is, and disagree."""
    for name in ("world_size", "rank", "local_rank"):
        values = getattr(one, name), getattr(other, name)
        if None not in values and values[0] != values[1]:
            raise RingError(
                f"{name} must be one number, got {values[0]} from {one.rule} and {values[1]} from {other.rule} "
                f"(environment: {_show({**one.variables, **other.variables})}). Unset the variables of the launcher that did not start this"
                " process, or pass rank, world_size and local_rank."
            )


def _conclude(values: Mapping[str, Any], facts: Facts, given: Iterable[str]) -> Discovery:
    """Returns the finding, if its numbers go together."""
    if values["rank"] >= values["world_size"]:
        where = f"{facts.rule}: {_show(facts.variables)}" if facts.variables else f"world_size {values['world_size']}"
        what = f"rank must be a whole number from 0 to {values['world_size'] - 1}, got {values['rank']} ({where})."
        raise ArgumentError(f"{what} Give each process its own.") if "rank" in given else RingError(f"{what} Correct these variables.")
    return Discovery(**values, rule=facts.rule, variables=dict(facts.variables))


def _unfinished(missing: list[str], facts: Facts, given: Mapping[str, Any], environ: Mapping[str, str], has_mpi: bool) -> RingError:
    """Says what is not known, what is, and what to do."""
    got = _show({**facts.variables, **{name: repr(value) for name, value in given.items()}}) or "nothing"
    names = _join(missing)
    if facts.rule == "torchrun":
        if facts.variables.keys() & {"RANK", "WORLD_SIZE"}:
            unset = _join([_VARIABLES[name] for name in missing])
            return RingError(
                f"torchrun's variables must be set together, got {got} and no {unset} (environment). "
                f"Set what is missing, unset the others, or pass {names}."
            )
        todo = "Start this script by torchrun --nproc-per-node N, srun or mpirun, run a function by ringsim.trace, pass them, "
        if "SLURM_JOB_ID" in environ:
            todo = "This is a Slurm job outside of srun: start this script by srun, pass them, "
        return RingError(
            f"{names} must come from a launcher or from arguments, got {got} (no launcher started this process). {todo}"
            "or pass world_size=1 for a world of one."
        )
    last = "mpi4py would be asked, which starts MPI." if has_mpi else "Or install mpi4py, which knows."
    todo = facts.advice if missing == ["head_ip"] else f"Set {_join([_VARIABLES[name] for name in missing])} on every rank."
    return RingError(f"{names} must be said by the launcher, got {got} ({facts.rule}). {todo} Or pass {names}. {last}")


def _ask_mpi(facts: Facts) -> Facts:
    """Asks MPI for what the launcher has not said; all ranks do so together."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, world_size = world.Get_rank(), world.Get_size()
    machines = world.allgather(MPI.Get_processor_name())
    others = [machine for machine in machines if machine != machines[0]]
    local_rank = machines[:rank].count(machines[rank])
    asked = Facts("mpi4py", rank, world_size, local_rank)
    _compare(facts, asked)  # mpi4py of another MPI than the launcher's takes every process for a world of one
    head = world.bcast((_address_towards(others[0]) if others else HERE, _free_port()) if rank == 0 else None, root=0)
    port = facts.port if "MASTER_PORT" in facts.variables else head[1]  # a free one is better than one made from the job's name
    return replace(asked, head_ip=facts.head_ip or head[0], port=port, variables=facts.variables)


def _address_towards(machine: str) -> str:
    """Returns this machine's address on the way to another one; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect((machine, 9))
            address: str = way.getsockname()[0]
        except OSError:
            return socket.gethostname()
    return address


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HERE, 0))
        port: int = listener.getsockname()[1]
    return port


def _show(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value if len(value) <= _SHOWN else value[:_SHOWN] + '...'}" for name, value in variables.items())


def _join(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
