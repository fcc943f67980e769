"""Who started this process?

Its rank, the number of ranks and where rank 0 is, found in what its launcher left in the
environment.

::

    arguments                         what the caller passes takes precedence, value by value
    torchrun                          RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: set by
                                      torchrun, or by hand
    azureml, sagemaker, openmpi,      the launcher of this process; MASTER_ADDR and MASTER_PORT,
                                      where set, say where rank 0 is
    mpich, slurm, pmi
    mpi4py                            asks MPI itself; only where a launcher of MPI is present and
                                      did not say everything

The first rule that applies decides, from the innermost launcher outwards, since launchers start
each other: ``mpirun`` in a Slurm job, torchrun under ``srun``. Nothing is guessed, and only
``Discovery.export`` changes the environment. A process that no launcher started gets an error that
says so: a world of one must be asked for (``world_size=1``), or a forgotten launcher would look
like a run.
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
from typing import Any, Final

from ringsim.errors import ArgumentError, RingError, read_whole

__all__ = ["Discovery", "discover"]

HERE: Final = "127.0.0.1"
DEFAULT_PORT: Final = 29500  # torch's own
_VARIABLES: Final = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "head_ip": "MASTER_ADDR",
    "port": "MASTER_PORT",
}
# torchrun started this process, whatever started torchrun
_ELASTIC: Final = {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"}
_MPI: Final = ("OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "PMI_", "PMIX_")
_AZURE_PORT: Final = 6105  # DeepSpeed's for several machines on Azure ML, and for one
_AZURE_PORT_OF_ONE: Final = 54965
# ports made from a job's number: below those that Linux assigns by itself (32768 and up)
_FIRST_PORT, _PORTS = 20000, 10000
_MOST: Final = 2**32  # of ranks, jobs and steps
# from here on a step is a batch script, or the shell of salloc, in which nobody has called srun
_NO_TASKS: Final = 4294967290
_MOST_NAMES: Final = 1_000_000  # no cluster has more, and a misprint must not fill the memory
_NAME: Final = re.compile(r"(?:\[[^\[\]\s]+\]|[^\[\],\s])+")  # commas within a bracket belong to it
# a bracket, or the letters before, between and after
_PART: Final = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_WHOLE: Final = re.compile("[0-9]{1,18}")
_RANGE: Final = re.compile("([0-9]{1,18})(?:-([0-9]{1,18}))?")
_SHOWN: Final = 80  # characters of a value in a message


def expand_node_list(text: str) -> list[str]:
    """Writes out a list of machines as Slurm shortens it.

    In the order in which Slurm numbers the nodes of a step. A bracket holds numbers and ranges; a
    number keeps its leading zeros; of several brackets in a name the last one runs fastest.

    Raises:
        RingError: the text is no such list.

    Example:
        >>> expand_node_list("node[01-03,07],gpu5")
        ['node01', 'node02', 'node03', 'node07', 'gpu5']

    Source:
        ``scontrol show hostnames``, which writes out the same lists (Slurm's manual page of
        scontrol).
    """
    names: list[str] = []
    begin = 0
    while begin <= len(text):
        name = _NAME.match(text, begin)
        if name is None or text[name.end() : name.end() + 1] not in ("", ","):
            raise _wrong(text, "names with ranges in brackets, and commas between them")
        parts: list[list[str]] = []
        count = 1
        for part in _PART.finditer(name.group()):
            parts.append(
                [part[2]]
                if part[1] is None
                else _spell_ranges(text, part[1], (_MOST_NAMES - len(names)) // count)
            )
            count *= len(parts[-1])
        names += map("".join, itertools.product(*parts))
        begin = name.end() + 1
    return names


def _spell_ranges(text: str, bracket: str, most: int) -> list[str]:
    """Returns the numbers that a bracket stands for, at most ``most``."""
    numbers: list[str] = []
    for piece in bracket.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise _wrong(text, "numbers and ranges such as 01-03 within brackets")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise _wrong(text, "ranges that go up")
        if len(numbers) + high - low >= most:
            raise _wrong(text, f"a list of at most {_MOST_NAMES} names")
        numbers += [f"{number:0{len(match[1])}}" for number in range(low, high + 1)]
    return numbers


def _wrong(text: str, rule: str) -> RingError:
    return RingError(
        f"a node list must be {rule}, got {text[:200]!r}. Correct the SLURM_*_NODELIST variable "
        "that says so, or pass head_ip."
    )


@dataclass(frozen=True)
class Facts:
    """What a launcher says; None for what it does not.

    ``advice`` is what to do where the head is missing.
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
    """Reads variables, of several names the first that is set, and remembers which.

    An empty one counts as not set.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.seen: dict[str, str] = {}

    def text(self, *names: str) -> str | None:
        """Returns the value as text."""
        for name in names:
            value = self._environ.get(name, "").strip()
            if value:
                self.seen[name] = value
                return value
        return None

    def whole(self, *names: str, low: int = 0, high: int = _MOST) -> int | None:
        """Returns the value as a whole number."""
        value = self.text(*names)
        if value is None:
            return None
        if _WHOLE.fullmatch(value) is None or not low <= int(value) <= high:
            name = next(name for name in names if name in self.seen)
            span = f"from {low} to {high}" if high < _MOST else f"of {low} or more"
            raise RingError(
                f"{name} must be a whole number {span}, got {value!r} (environment). Correct it, "
                "or unset it."
            )
        return int(value)


def _read_torchrun(environ: Mapping[str, str]) -> Facts:
    """Reads the variables that torchrun sets and ``init_process_group`` reads.

    All of its facts may be None.
    """
    read = _Reader(environ)
    rank, world_size = read.whole("RANK"), read.whole("WORLD_SIZE", low=1)
    local_rank = read.whole("LOCAL_RANK")
    head_ip, port = read.text("MASTER_ADDR"), read.whole("MASTER_PORT", low=1, high=65535)
    if local_rank is None and head_ip is not None and _is_loopback(head_ip):
        local_rank = rank  # all ranks are on this machine
    return Facts("torchrun", rank, world_size, local_rank, head_ip, port, read.seen)


def _read_openmpi(environ: Mapping[str, str]) -> Facts | None:
    """Open MPI does not say where rank 0 is: its addresses are those of ``mpirun``.

    Azure ML and SageMaker, which use it, do.
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
    advice = "Set MASTER_ADDR to the machine of rank 0, on every rank."
    if on_azure and alone:
        head, port = read.text("AZ_BATCHAI_MPI_MASTER_NODE") or HERE, _AZURE_PORT_OF_ONE
    elif on_azure:
        node = read.text("AZ_BATCH_MASTER_NODE") or ""
        # the port in the variable is that of Azure Batch
        head, port = node.rpartition(":")[0] or node or None, _AZURE_PORT
    elif training is not None:
        head = (
            head
            or _sagemaker_head(training)
            or _sagemaker_head(f'{{"hosts": {read.text("SM_HOSTS")}}}')
        )
        read.seen["SM_TRAINING_ENV"] = "{...}"  # it holds kilobytes of settings
    else:
        port = _port_of_name(read.text("PMIX_NAMESPACE"))
        advice = (
            "Say it at the start: mpirun -x MASTER_ADDR=HOST ..., where HOST is the machine that "
            "rank 0 runs on."
        )
    rule = "azureml" if on_azure else "openmpi" if training is None else "sagemaker"
    return Facts(rule, rank, world_size, local_rank, head, port, read.seen, advice)


def _sagemaker_head(training: str) -> str | None:
    """Returns the first machine that SageMaker's settings name; some only list all machines."""
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


def _read_mpich(environ: Mapping[str, str]) -> Facts | None:
    """The launchers of MPICH, Intel MPI and MVAPICH2.

    They also tell each rank its number on its machine.
    """
    own = {"HYDI_CONTROL_FD", "MPI_LOCALRANKID", "MPI_RANKID", "MV2_COMM_WORLD_RANK"}
    return _read_pmi(environ, "mpich") if own & environ.keys() else None


def _read_any_pmi(environ: Mapping[str, str]) -> Facts | None:
    """Other launchers with a process management interface often do not say everything.

    For example PALS and PRRTE.
    """
    return _read_pmi(environ, "pmi") if {"PMI_RANK", "PMIX_RANK"} & environ.keys() else None


def _read_pmi(environ: Mapping[str, str], rule: str) -> Facts:
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
        "Say it at the start: mpiexec -genv MASTER_ADDR HOST ..., where HOST is the machine that "
        "rank 0 runs on."
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


def _read_slurm(environ: Mapping[str, str]) -> Facts | None:
    """``srun`` numbers its tasks and lists the machines of its step.

    A batch script has no step, and is one process.
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
        "Say it before the start: export MASTER_ADDR=HOST, where HOST "
        "is the machine that rank 0 runs on."
    )
    if (read.whole("SLURM_HET_SIZE", "SLURM_PACK_SIZE") or 1) > 1:
        advice = f"Each part of a heterogeneous job lists its own machines. {advice}"
    elif (read.text("SLURM_DISTRIBUTION") or "").startswith("arbitrary"):
        advice = (
            "With an arbitrary distribution the first machine of the list need not be that of "
            f"rank 0. {advice}"
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


# In the order in which they are asked: a launcher that starts ranks itself before one that started
# that launcher. `mpirun` in a Slurm job starts its daemons by `srun`, so ranks see their daemon's
# SLURM_PROCID, too.
LAUNCHERS: Final[tuple[Callable[[Mapping[str, str]], Facts | None], ...]] = (
    _read_openmpi,
    _read_mpich,
    _read_slurm,
    _read_any_pmi,
)


def _ask_launchers(environ: Mapping[str, str]) -> list[Facts]:
    return [facts for launcher in LAUNCHERS if (facts := launcher(environ)) is not None]


def _port_of_number(number: int) -> int:
    return _FIRST_PORT + number % _PORTS


def _port_of_name(name: str | None) -> int:
    """Returns a port made from a job's name, so that two jobs on one machine rarely meet.

    Torch's own where there is no name.
    """
    return DEFAULT_PORT if name is None else _port_of_number(zlib.crc32(name.encode()))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Discovery:
    """Which rank a process is, and how that was found.

    Attributes:
        rank: its number among all, from 0.
        world_size: how many processes there are.
        local_rank: its number on its machine, from 0.
        head_ip: address or name of rank 0's machine.
        port: where rank 0 listens.
        rule: what said so: "arguments", "torchrun", "azureml", "sagemaker", "openmpi", "mpich",
            "slurm", "pmi" or "mpi4py".
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
        """Writes the finding into the environment under torchrun's names.

        Programs and ``init_process_group`` read these.

        Args:
            environ: what to write into; None for this process's environment.

        Returns:
            The five variables that were written.

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
    """Finds out which of the processes that were started together this one is.

    Each process calls it for itself. It does not block, except under the last rule: where a
    launcher of MPI has not said everything (several machines and no MASTER_ADDR, or no local rank)
    and mpi4py is installed, MPI is asked on all ranks together.

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
        ArgumentError: an argument breaks its rule, or does not fit what the launcher says.
        RingError: variables contradict each other, are incomplete or missing; the message lists
            them and says what to do.

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
    if given.keys() == _VARIABLES.keys():
        return _conclude(given, Facts("arguments"), given)
    facts = _choose(environ)
    if (
        "world_size" in given
        and "rank" not in given
        and facts.world_size not in (None, given["world_size"])
    ):
        raise ArgumentError(
            f"world_size must be {facts.world_size} as the launcher says, since rank is left to "
            f"it, got {given['world_size']} ({facts.rule}: {_show(facts.variables)}). Pass both, "
            "or neither."
        )
    values = {**_known(facts), **given}
    if missing := [name for name in _VARIABLES if name not in values]:
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
    """Returns what the launcher of this process says, without starting MPI.

    None where there is none, or torchrun's variables do not fit.

    Raises:
        RingError: a launcher has started several ranks, and what it says is not enough, or
            contradicts torchrun's variables.
    """
    try:
        return discover(ask_mpi=False)
    except RingError:
        for facts in _ask_launchers(os.environ):
            if facts.rank is not None and (facts.world_size or 1) > 1:
                raise  # each of these ranks would start ranks of its own
        return None


def _check(**arguments: Any) -> dict[str, Any]:
    """Returns the arguments that are not None, whole numbers as ``int``.

    ``check_ring_arguments`` checks their other rules.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    head_ip = given.pop("head_ip", HERE)
    if not isinstance(head_ip, str) or not head_ip.strip():
        raise ArgumentError(
            f"head_ip must be an address or a name as text, got {head_ip!r}. Pass rank 0's address."
        )
    for name, value in given.items():
        least = 1 if name in ("world_size", "port") else 0
        given[name] = read_whole(
            name, value, least, hint="Pass one, or leave it out to have it found."
        )
    return given if arguments["head_ip"] is None else {**given, "head_ip": head_ip}


def _choose(environ: Mapping[str, str]) -> Facts:
    """Returns what the innermost launcher says.

    Completed by torchrun's variables, which are also set by hand.
    """
    torchrun = _read_torchrun(environ)
    if _ELASTIC & environ.keys():
        return torchrun
    complete = _known(torchrun).keys() == _VARIABLES.keys()
    launchers = _ask_launchers(environ)
    if not launchers:
        return torchrun
    launcher = launchers[0]
    if complete and (launcher.world_size or 1) < (torchrun.world_size or 1):
        # a launcher that started one process a machine, each of which started its ranks
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
    return {name: value for name in _VARIABLES if (value := getattr(facts, name)) is not None}


def _compare(one: Facts, other: Facts) -> None:
    """Raises where both say who this process is, and disagree."""
    for name in ("world_size", "rank", "local_rank"):
        values = getattr(one, name), getattr(other, name)
        if None not in values and values[0] != values[1]:
            raise RingError(
                f"{name} must be one number, got {values[0]} from {one.rule} and {values[1]} "
                f"from {other.rule} (environment: {_show({**one.variables, **other.variables})}). "
                "Unset the variables of the launcher that did not start this process, or pass "
                "rank, world_size and local_rank."
            )


def _conclude(values: Mapping[str, Any], facts: Facts, given: Iterable[str]) -> Discovery:
    """Returns the finding, if its numbers are consistent."""
    if values["rank"] >= values["world_size"]:
        where = f"world_size {values['world_size']}"
        if facts.variables:
            where = f"{facts.rule}: {_show(facts.variables)}"
        what = (
            f"rank must be a whole number from 0 to {values['world_size'] - 1}, got "
            f"{values['rank']} ({where})."
        )
        if "rank" in given:
            raise ArgumentError(f"{what} Give each process its own.")
        raise RingError(f"{what} Correct these variables.")
    return Discovery(**values, rule=facts.rule, variables=dict(facts.variables))


def _unfinished(
    missing: list[str],
    facts: Facts,
    given: Mapping[str, Any],
    environ: Mapping[str, str],
    has_mpi: bool,
) -> RingError:
    """Makes the error that says what is not known, what is, and what to do."""
    passed = {name: repr(value) for name, value in given.items()}
    got = _show({**facts.variables, **passed}) or "nothing"
    names, variables = _join(missing), _join([_VARIABLES[name] for name in missing])
    if facts.rule != "torchrun":
        last = (
            "mpi4py would be asked, which starts MPI."
            if has_mpi
            else "Or install mpi4py, which knows."
        )
        todo = facts.advice if missing == ["head_ip"] else f"Set {variables} on every rank."
        return RingError(
            f"{names} must be said by the launcher, got {got} ({facts.rule}). {todo} Or pass "
            f"{names}. {last}"
        )
    if facts.variables.keys() & {"RANK", "WORLD_SIZE"}:
        return RingError(
            f"torchrun's variables must be set together, got {got} and no {variables} "
            "(environment). "
            f"Set what is missing, unset the others, or pass {names}."
        )
    todo = (
        "Start this script by torchrun --nproc-per-node N, srun or mpirun, run a function by "
        "ringsim.trace, pass them,"
    )
    if "SLURM_JOB_ID" in environ:
        todo = "This is a Slurm job outside of srun: start this script by srun, pass them,"
    return RingError(
        f"{names} must come from a launcher or from arguments, got {got} (no launcher started "
        f"this process). {todo} "
        "or pass world_size=1 for a world of one."
    )


def _ask_mpi(facts: Facts) -> Facts:
    """Asks MPI for what the launcher did not say; all ranks do so together."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, world_size = world.Get_rank(), world.Get_size()
    machines = world.allgather(MPI.Get_processor_name())
    others = [machine for machine in machines if machine != machines[0]]
    local_rank = machines[:rank].count(machines[rank])
    asked = Facts("mpi4py", rank, world_size, local_rank)
    # if mpi4py belongs to another MPI than the launcher, every process looks like a world of one
    _compare(facts, asked)
    head = world.bcast(
        (address_towards(others[0]) if others else HERE, _free_port()) if rank == 0 else None,
        root=0,
    )
    # a free port is better than one made from the job's name
    port = facts.port if "MASTER_PORT" in facts.variables else head[1]
    return replace(asked, head_ip=facts.head_ip or head[0], port=port, variables=facts.variables)


def address_towards(machine: str) -> str:
    """Returns this machine's address on the way to another one; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((machine, 9))
            address: str = probe.getsockname()[0]
        except OSError:
            return socket.gethostname()
    return address


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HERE, 0))
        port: int = listener.getsockname()[1]
    return port


def _show(variables: Mapping[str, str]) -> str:
    return ", ".join(
        f"{name}={value if len(value) <= _SHOWN else value[:_SHOWN] + '...'}"
        for name, value in variables.items()
    )


def _join(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def count_crossings(hosts: Sequence[str]) -> int:
    """Counts the links of a ring that lead from one known host to another.

    Args:
        hosts: name of each rank's host, in the ring's order; "" where it is not known.

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
    """Orders ranks so that those of a host follow each other, and the hosts as they first occur.

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
