"""Finds the rank of this process, the number of ranks and rank 0's address.

The values come from arguments, or from environment variables that a launcher has set, according to
these rules::

    arguments                         values from the caller, each of which takes precedence
    torchrun                          RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: set by
                                      torchrun, or by hand
    azureml, sagemaker, openmpi,      the launcher of this process; MASTER_ADDR and MASTER_PORT, if
    mpich, slurm, pmi                 set, give the address of rank 0
    mpi4py                            asks MPI itself; used only if an MPI launcher is present and
                                      its variables are incomplete

The first rule that applies decides. The innermost launcher comes first, because launchers may start
each other: for example ``mpirun`` in a Slurm job, or torchrun under ``srun``. ringsim guesses
nothing, and only ``Discovery.export`` changes the environment. Without a launcher, you get an error
unless you ask for a world of one (``world_size=1``). Otherwise, a run that was started without the
intended launcher would look successful.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import itertools
import json
import os
import re
import socket
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ringsim.errors import ArgumentError, RingError, name_integers, read_whole

__all__ = ["Discovery", "discover"]

Environ = Mapping[str, str]  # variables
HERE = "127.0.0.1"
DEFAULT_PORT = 29500  # torch's own
VARIABLES = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "head_ip": "MASTER_ADDR",
    "port": "MASTER_PORT",
}
# if one is set, torchrun started this process, regardless of what started torchrun
_ELASTIC = {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"}
_MPI = ("OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "PMI_", "PMIX_")
_AZURE_PORT = 6105  # DeepSpeed's ports on Azure ML, for several machines and for one
_AZURE_PORT_OF_ONE = 54965
# ports derived from a job's number: below the ports that Linux assigns by itself (32768 and up)
_FIRST_PORT, _PORTS = 20000, 10000
_MOST = 2**32  # the limit for ranks, jobs and steps
# step numbers from here on mean a batch script or the shell of salloc, outside of srun
_NO_TASKS = 4294967290
_MOST_NAMES = 1_000_000  # more than any cluster has; limits the memory that a typo can use
_NAME = r"(?:\[[^\[\]\s]+\]|[^\[\],\s])+"  # it may contain commas in brackets
_NAMES = re.compile(f"{_NAME}(?:,{_NAME})*")
# a bracket, or the characters before, between and after brackets
_PART = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_WHOLE = re.compile("[0-9]{1,18}")
_RANGE = re.compile("([0-9]{1,18})(?:-([0-9]{1,18}))?")
_SHOWN = 80  # the most characters of a value in a message


def expand_node_list(text: str) -> list[str]:
    """Expands a list of machines that Slurm has abbreviated.

    The names are in the order in which Slurm numbers the nodes of a step. A bracket contains
    numbers and ranges. Numbers keep their leading zeros. If a name contains several brackets, the
    last bracket varies fastest.

    Raises:
        RingError: the text is not a list in this form.

    Example:
        >>> expand_node_list("node[01-03,07],gpu5")
        ['node01', 'node02', 'node03', 'node07', 'gpu5']

    Source:
        ``scontrol show hostnames``, which expands the same lists (Slurm's manual page for
        scontrol).
    """
    if _NAMES.fullmatch(text) is None:
        raise _wrong(text, "consist of names with ranges in brackets, separated by commas")
    names: list[str] = []
    for name in re.findall(_NAME, text):
        parts: list[list[str]] = []
        count = 1
        for bracket, plain in _PART.findall(name):
            most = (_MOST_NAMES - len(names)) // count
            parts.append([plain] if plain else _spell_ranges(text, bracket, most))
            count *= len(parts[-1])
        names += map("".join, itertools.product(*parts))
    return names


def _spell_ranges(text: str, bracket: str, most: int) -> list[str]:
    """Returns the numbers in a pair of brackets, at most ``most`` of them."""
    numbers: list[str] = []
    for piece in bracket.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise _wrong(text, "contain only numbers and ranges such as 01-03 in its brackets")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise _wrong(text, "contain only ascending ranges")
        if len(numbers) + high - low >= most:
            raise _wrong(text, f"contain at most {_MOST_NAMES} names")
        numbers += [f"{number:0{len(match[1])}}" for number in range(low, high + 1)]
    return numbers


def _wrong(text: str, rule: str) -> RingError:
    return RingError(
        f"a node list must {rule}, got {text[:200]!r}. Correct the SLURM_*_NODELIST variable, or "
        "pass head_ip."
    )


@dataclass(frozen=True)
class Facts:
    """The values that a launcher has set, with None for missing values.

    ``advice`` is the remedy if the address of rank 0 is missing.
    """

    rule: str
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    head_ip: str | None = None
    port: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    advice: str = ""


@dataclass
class _Reader:
    """Reads variables and remembers the ones that it found.

    Each method takes several names and reads the first that is set. An empty variable counts as
    unset.
    """

    environ: Environ
    seen: dict[str, str] = field(default_factory=dict)

    def text(self, *names: str) -> str | None:
        """Returns the value as text."""
        for name in names:
            value = self.environ.get(name, "").strip()
            if value:
                self.seen[name] = value
                return value
        return None

    def whole(self, *names: str, low: int = 0, high: int = _MOST) -> int | None:
        """Returns the value as an integer."""
        value = self.text(*names)
        if value is None:
            return None
        if _WHOLE.fullmatch(value) is None or not low <= int(value) <= high:
            name = next(name for name in names if name in self.seen)
            rule = name_integers(low, high if high < _MOST else None)
            raise RingError(
                f"{name} must be {rule}, got {value!r} (environment). Correct or unset the "
                "variable."
            )
        return int(value)


def _read_torchrun(environ: Environ) -> Facts:
    """Reads the variables that torchrun and ``init_process_group`` use; any may be missing."""
    read = _Reader(environ)
    rank, world_size = read.whole("RANK"), read.whole("WORLD_SIZE", low=1)
    local_rank = read.whole("LOCAL_RANK")
    head_ip, port = read.text("MASTER_ADDR"), read.whole("MASTER_PORT", low=1, high=65535)
    if local_rank is None and head_ip is not None:
        address = read_address(head_ip)
        if head_ip == "localhost" if address is None else address.is_loopback:
            local_rank = rank  # all ranks are on this machine
    return Facts("torchrun", rank, world_size, local_rank, head_ip, port, read.seen)


def _read_openmpi(environ: Environ) -> Facts | None:
    """Reads Open MPI's variables, which Azure ML and SageMaker also set.

    Open MPI itself does not set the address of rank 0; the addresses that it sets belong to
    ``mpirun``.
    """
    read = _Reader(environ)
    if "OMPI_COMM_WORLD_RANK" not in environ and "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    on_azure = "DLTS_JOB_ID" not in environ and read.text("AZUREML_EXPERIMENT_ID") is not None
    training = None if on_azure else read.text("SM_TRAINING_ENV")
    rank, world_size = read.whole("OMPI_COMM_WORLD_RANK"), read.whole("OMPI_COMM_WORLD_SIZE", low=1)
    local_rank = read.whole("OMPI_COMM_WORLD_LOCAL_RANK")
    local_size = read.whole("OMPI_COMM_WORLD_LOCAL_SIZE", low=1)
    alone = world_size is not None and world_size == local_size
    head, port = HERE if alone else None, DEFAULT_PORT
    advice = "On every rank, set MASTER_ADDR to rank 0's machine."
    if on_azure and alone:
        head, port = read.text("AZ_BATCHAI_MPI_MASTER_NODE") or HERE, _AZURE_PORT_OF_ONE
    elif on_azure:
        node = read.text("AZ_BATCH_MASTER_NODE") or ""
        # the port in the variable belongs to Azure Batch
        head, port = node.rpartition(":")[0] or node or None, _AZURE_PORT
    elif training is not None:
        head = (
            head
            or _sagemaker_head(training)
            or _sagemaker_head(f'{{"hosts": {read.text("SM_HOSTS")}}}')
        )
        read.seen["SM_TRAINING_ENV"] = "{...}"  # the value has kilobytes of settings
    else:
        port = _port_of_name(read.text("PMIX_NAMESPACE"))
        advice = (
            "Set the address when you start the ranks: mpirun -x MASTER_ADDR=HOST ..., with "
            "rank 0's machine as HOST."
        )
    rule = "azureml" if on_azure else "openmpi" if training is None else "sagemaker"
    return Facts(rule, rank, world_size, local_rank, head, port, read.seen, advice)


def _sagemaker_head(training: str) -> str | None:
    """Returns rank 0's machine from SageMaker's settings, or else the first machine in its list."""
    try:
        settings = json.loads(training)
    except (ValueError, RecursionError):
        return None
    if not isinstance(settings, dict):
        return None
    head, hosts = settings.get("master_hostname"), settings.get("hosts")
    if not head and isinstance(hosts, list) and hosts:
        head = hosts[0]
    return head if isinstance(head, str) and head else None


def _read_mpich(environ: Environ) -> Facts | None:
    """Reads the variables of MPICH, Intel MPI and MVAPICH2."""
    own = {"HYDI_CONTROL_FD", "MPI_LOCALRANKID", "MPI_RANKID", "MV2_COMM_WORLD_RANK"}
    return _read_pmi(environ, "mpich") if own & environ.keys() else None


def _read_any_pmi(environ: Environ) -> Facts | None:
    """Reads the variables of other PMI launchers, such as PALS and PRRTE; some may be missing."""
    return _read_pmi(environ, "pmi") if {"PMI_RANK", "PMIX_RANK"} & environ.keys() else None


def _read_pmi(environ: Environ, rule: str) -> Facts:
    read = _Reader(environ)
    rank = read.whole("MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_RANKID")
    world_size = read.whole("MV2_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_NRANKS", low=1)
    local_rank = read.whole(
        "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"
    )
    local_size = read.whole(
        "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE", low=1
    )
    alone = world_size is not None and (world_size == local_size or world_size == 1)
    advice = (
        "Set the address when you start the ranks: mpiexec -genv MASTER_ADDR HOST ..., with "
        "rank 0's machine as HOST."
    )
    port = _port_of_name(read.text("PMIX_NAMESPACE", "I_MPI_HYDRA_UUID"))
    return Facts(
        rule,
        rank,
        world_size,
        0 if world_size == 1 else local_rank,
        HERE if alone else None,
        port,
        read.seen,
        advice,
    )


def _read_slurm(environ: Environ) -> Facts | None:
    """Reads the variables of a Slurm step: its tasks and machines.

    A batch script has no step, because it is a single process.
    """
    read = _Reader(environ)
    step = read.whole("SLURM_STEP_ID", "SLURM_STEPID")
    if step is None or step >= _NO_TASKS or "SLURM_PROCID" not in environ:
        return None
    rank, local_rank = read.whole("SLURM_PROCID"), read.whole("SLURM_LOCALID")
    world_size = read.whole("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", low=1)
    job = read.whole("SLURM_JOB_ID", "SLURM_JOBID") or 0
    head = None
    advice = (
        "Set the address before you start the ranks: export MASTER_ADDR=HOST, with rank 0's "
        "machine as HOST."
    )
    if (read.whole("SLURM_HET_SIZE", "SLURM_PACK_SIZE") or 1) > 1:
        advice = f"Each part of a heterogeneous job lists its own machines. {advice}"
    elif (read.text("SLURM_DISTRIBUTION") or "").startswith("arbitrary"):
        advice = (
            "With an arbitrary distribution, rank 0 may not be on the first machine in the "
            f"list. {advice}"
        )
    elif listed := read.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        hosts = expand_node_list(listed)
        head = hosts[0] if len(hosts) > 1 else HERE
    return Facts(
        "slurm",
        rank,
        world_size,
        local_rank,
        head,
        _port_of_number(job + 101 * step),
        read.seen,
        advice,
    )


# In order of priority: a launcher that starts ranks itself comes before the launcher that started
# it. `mpirun` in a Slurm job starts its daemons with `srun`, so ranks also see the SLURM_PROCID of
# their daemon.
LAUNCHERS: tuple[Callable[[Environ], Facts | None], ...] = (
    _read_openmpi,
    _read_mpich,
    _read_slurm,
    _read_any_pmi,
)


def _ask_launchers(environ: Environ) -> list[Facts]:
    return [facts for launcher in LAUNCHERS if (facts := launcher(environ)) is not None]


def _port_of_number(number: int) -> int:
    return _FIRST_PORT + number % _PORTS


def _port_of_name(name: str | None) -> int:
    """Returns a port derived from a job's name, so that two jobs on a machine rarely collide.

    Without a name, returns torch's default port.
    """
    return DEFAULT_PORT if name is None else _port_of_number(zlib.crc32(name.encode()))


def read_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns a host's numeric address, or None if the host is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


@dataclass(frozen=True)
class Discovery:
    """A process's rank and related values, with the rule that found them.

    Attributes:
        rank: the number of the process among all processes, counted from 0.
        world_size: the number of processes.
        local_rank: the number of the process on its machine, counted from 0.
        head_ip: the address or name of rank 0's machine.
        port: the port on which rank 0 listens.
        rule: the rule that applied: "arguments", "torchrun", "azureml", "sagemaker", "openmpi",
            "mpich", "slurm", "pmi" or "mpi4py".
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
            f"rank {self.rank} of {self.world_size}, local rank {self.local_rank}, head "
            f"{self.head_ip}:{self.port}: found by {self.rule}"
        )
        return f"{found} from {_show(self.variables)}" if self.variables else found

    def export(self, environ: MutableMapping[str, str] | None = None) -> dict[str, str]:
        """Writes the values to the environment under torchrun's names.

        Programs and ``init_process_group`` read these variables.

        Args:
            environ: the mapping to write to, or None for this process's environment.

        Returns:
            The five variables that were written.

        Example:
            >>> discover("10.0.0.1", 29500, 4, 2, local_rank=0).export({})["RANK"]
            '2'
        """
        variables = {variable: str(getattr(self, name)) for name, variable in VARIABLES.items()}
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
    """Finds the rank of this process among the processes that were started together.

    Each process calls this function separately. It does not block, with one exception: if an MPI
    launcher's variables are incomplete (several machines and no MASTER_ADDR, or no local rank) and
    mpi4py is installed, all ranks query MPI together.

    Args:
        head_ip: the address or name of rank 0's machine; None to discover it, as for the other
            arguments.
        port: a free port on that machine.
        world_size: the number of processes. A world of 1 requires no other values and uses
            loopback.
        rank: the rank of this process.
        local_rank: the number of this process on its machine.
        environ: the variables to read, or None for this process's environment.
        ask_mpi: whether mpi4py may be imported (which starts MPI) as a last resort.

    Returns:
        The values, with the rule that applied and the variables that it read.

    Raises:
        ArgumentError: an argument is invalid, or contradicts the launcher's values.
        RingError: variables are missing, incomplete or contradictory; the message lists them and
            gives a remedy.

    Example:
        >>> srun = {
        ...     "SLURM_STEP_ID": "0",
        ...     "SLURM_JOB_ID": "4711",
        ...     "SLURM_NTASKS": "8",
        ...     "SLURM_PROCID": "5",
        ...     "SLURM_LOCALID": "1",
        ... }
        >>> found = discover(environ={**srun, "SLURM_STEP_NODELIST": "node[07-08]"})
        >>> found.rank, found.world_size, found.local_rank, found.head_ip, found.port, found.rule
        (5, 8, 1, 'node07', 24711, 'slurm')
    """
    environ = os.environ if environ is None else environ
    given = _check(
        head_ip=head_ip, port=port, world_size=world_size, rank=rank, local_rank=local_rank
    )
    if given.get("world_size") == 1:
        given = {"rank": 0, "local_rank": 0, "head_ip": HERE, **given}
        given.setdefault("port", _free_port())
    if given.keys() == VARIABLES.keys():
        return _conclude(given, Facts("arguments"), given)
    facts = _choose(environ)
    if (
        "world_size" in given
        and "rank" not in given
        and facts.world_size not in (None, given["world_size"])
    ):
        raise ArgumentError(
            f"world_size must be {facts.world_size}, as set by the launcher, got "
            f"{given['world_size']} ({facts.rule}: {_show(facts.variables)}). Pass both rank and "
            "world_size, or neither."
        )
    values = {**_known(facts), **given}
    if missing := [name for name in VARIABLES if name not in values]:
        has_mpi = (
            any(name.startswith(_MPI) for name in environ)
            and importlib.util.find_spec("mpi4py") is not None
        )
        if not has_mpi or not ask_mpi:
            raise _unfinished(missing, facts, given, environ, has_mpi)
        facts = _ask_mpi(facts)
        values = {**_known(facts), **given}
    return _conclude(values, facts, given)


def find_launched() -> Discovery | None:
    """Returns the values set by the launcher of this process, without starting MPI.

    Returns None if there is no launcher, or if torchrun's variables are inconsistent.

    Raises:
        RingError: a launcher has started several ranks, and its variables are incomplete or
            contradict torchrun's.
    """
    try:
        return discover(ask_mpi=False)
    except RingError:
        for facts in _ask_launchers(os.environ):
            if facts.rank is not None and (facts.world_size or 1) > 1:
                raise  # otherwise each of these ranks would start its own ranks
        return None


def _check(**arguments: Any) -> dict[str, Any]:
    """Returns the arguments that are not None, with integers as ``int``.

    ``check_ring_arguments`` checks the other rules.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    head_ip = given.pop("head_ip", HERE)
    if not isinstance(head_ip, str) or not head_ip.strip():
        raise ArgumentError(
            f"head_ip must be an address or a host name, got {head_ip!r}. Pass rank 0's address."
        )
    for name, value in given.items():
        least = 1 if name in ("world_size", "port") else 0
        given[name] = read_whole(
            name,
            value,
            least,
            hint="Pass such an integer, or omit the argument to use the launcher's value.",
        )
    return given if arguments["head_ip"] is None else {**given, "head_ip": head_ip}


def _choose(environ: Environ) -> Facts:
    """Returns the innermost launcher's values, supplemented with torchrun's variables.

    Users also set torchrun's variables by hand.
    """
    torchrun = _read_torchrun(environ)
    if _ELASTIC & environ.keys():
        return torchrun
    complete = _known(torchrun).keys() == VARIABLES.keys()
    launchers = _ask_launchers(environ)
    if not launchers:
        return torchrun
    launcher = launchers[0]
    if complete and (launcher.world_size or 1) < (torchrun.world_size or 1):
        # the launcher started one process per machine, and each of these started its ranks
        return torchrun
    for other in launchers[1:]:
        # any other two launchers are nested
        if (launcher.rule, other.rule) in (("slurm", "pmi"), ("openmpi", "mpich")):
            _compare(launcher, other)
    _compare(launcher, torchrun)
    if complete:
        return torchrun
    return replace(
        launcher, **_known(torchrun), variables={**launcher.variables, **torchrun.variables}
    )


def _known(facts: Facts) -> dict[str, Any]:
    return {name: value for name in VARIABLES if (value := getattr(facts, name)) is not None}


def _compare(one: Facts, other: Facts) -> None:
    """Raises RingError if two launchers disagree about this process."""
    for name in ("world_size", "rank", "local_rank"):
        values = getattr(one, name), getattr(other, name)
        if None not in values and values[0] != values[1]:
            raise RingError(
                f"launchers disagree: {name} is {values[0]} according to {one.rule}, but "
                f"{values[1]} according to {other.rule} (environment: "
                f"{_show({**one.variables, **other.variables})}). Unset the variables of the "
                "launcher that did not start this process, or pass rank, world_size and "
                "local_rank."
            )


def _conclude(values: Mapping[str, Any], facts: Facts, given: Iterable[str]) -> Discovery:
    """Returns the values as a Discovery after checking that they are consistent."""
    if values["rank"] >= values["world_size"]:
        where = f"world_size {values['world_size']}"
        if facts.variables:
            where = f"{facts.rule}: {_show(facts.variables)}"
        what = (
            f"rank must be an integer from 0 to {values['world_size'] - 1}, got "
            f"{values['rank']} ({where})."
        )
        if "rank" in given:
            raise ArgumentError(f"{what} Give each process its own rank.")
        raise RingError(f"{what} Correct these variables.")
    return Discovery(**values, rule=facts.rule, variables=dict(facts.variables))


def _unfinished(
    missing: list[str],
    facts: Facts,
    given: Mapping[str, Any],
    environ: Environ,
    has_mpi: bool,
) -> RingError:
    """Returns the error for missing values; the error lists the known values and a remedy."""
    passed = {name: repr(value) for name, value in given.items()}
    got = _show({**facts.variables, **passed}) or "nothing"
    names, variables = _join(missing), _join([VARIABLES[name] for name in missing])
    if facts.rule != "torchrun":
        last = (
            "With ask_mpi=True, ringsim asks mpi4py, which starts MPI."
            if has_mpi
            else "Or install mpi4py, so that ringsim can ask MPI."
        )
        todo = facts.advice if missing == ["head_ip"] else f"Set {variables} on every rank."
        return RingError(
            f"the launcher did not set {names}; ringsim found {got} ({facts.rule}). {todo} Or "
            f"pass {names}. {last}"
        )
    if facts.variables.keys() & {"RANK", "WORLD_SIZE"}:
        return RingError(
            f"torchrun's variables are incomplete: ringsim found {got}, but not {variables} "
            f"(environment). Set the missing variables, unset the others, or pass {names}."
        )
    todo = (
        "Start this script with torchrun --nproc-per-node N, srun or mpirun, run a function with "
        "ringsim.trace, or pass these arguments."
    )
    if "SLURM_JOB_ID" in environ:
        todo = (
            "This process is in a Slurm job, but not under srun. Start this script with srun, "
            "or pass these arguments."
        )
    return RingError(
        f"no launcher started this process, and no argument provides {names}; ringsim found "
        f"{got}. {todo} For a world of one, pass world_size=1."
    )


def _ask_mpi(facts: Facts) -> Facts:
    """Queries MPI for the missing values; all ranks call this function together."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, world_size = world.Get_rank(), world.Get_size()
    machines = world.allgather(MPI.Get_processor_name())
    local_rank = machines[:rank].count(machines[rank])
    asked = Facts("mpi4py", rank, world_size, local_rank)
    # if mpi4py uses a different MPI from the launcher, every process looks like a world of one
    _compare(facts, asked)
    head = world.bcast((find_address(machines), _free_port()) if rank == 0 else None, root=0)
    # a free port is better than a port derived from the job's name
    port = facts.port if "MASTER_PORT" in facts.variables else head[1]
    return replace(asked, head_ip=facts.head_ip or head[0], port=port, variables=facts.variables)


def find_address(machines: Sequence[str]) -> str:
    """Returns the address at which the others reach the first machine, which is this one.

    Nothing is sent. If all machines are the same, the address is loopback.
    """
    others = {*machines} - {machines[0]}
    if not others:
        return HERE
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((min(others), 9))
            address: str = probe.getsockname()[0]
        except OSError:
            return socket.gethostname()
    return address


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HERE, 0))
        port: int = listener.getsockname()[1]
    return port


def _show(variables: Environ) -> str:
    return ", ".join(
        f"{name}={value if len(value) <= _SHOWN else value[:_SHOWN] + '...'}"
        for name, value in variables.items()
    )


def _join(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def count_crossings(hosts: Sequence[str]) -> int:
    """Counts the links in a ring that connect different known hosts.

    Args:
        hosts: the name of each rank's host, in the ring's order, or "" if unknown.

    Example:
        >>> (
        ...     count_crossings(["node0", "node1", "node0", "node1"]),
        ...     count_crossings(["node0", "node0", "node1", "node1"]),
        ... )
        (4, 2)
    """
    return sum(
        bool(host and after and host != after)
        for host, after in zip(hosts, [*hosts[1:], *hosts[:1]], strict=True)
    )


def order_by_hosts(hosts: Sequence[Any]) -> tuple[int, ...]:
    """Orders ranks so that each host's ranks are adjacent; hosts keep their order of appearance.

    Args:
        hosts: each rank's host, by rank.

    Example:
        >>> order_by_hosts(["node0", "node1", "node0", "node1"])
        (0, 2, 1, 3)
    """
    ranks = defaultdict[Any, list[int]](list)
    for rank, host in enumerate(hosts):
        ranks[host].append(rank)
    return tuple(itertools.chain.from_iterable(ranks.values()))
