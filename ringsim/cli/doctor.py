"""``ringsim doctor``: a report on this machine, its backends, and the running ringsim processes.

The backend depends on where the tensors are: "cpu" always means Gloo and "gpu" always means NCCL.
Machines differ in whether a backend works, in its network, and in its speed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import math
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ringsim import provenance
from ringsim.cli.job import Fact, examine_job
from ringsim.cli.verb import Verbs, add_json, add_verb, tell
from ringsim.environment import discover, find_launched
from ringsim.errors import ArgumentError, RingError
from ringsim.traces.bandwidths import Bandwidths
from ringsim.traces.bandwidths import load as load_table
from ringsim.traces.units import bytes_text, count

_STORE_PEER = "::ffff:127.0.0.1"  # loopback, as torch's store client sees it
_LOOK_UPS = 32  # at the same time: with this many, ranks have been observed to wait
# the C library waits five seconds for a silent name server, and then asks again
_LOOK_UP_LIMIT_S = 6.0
_SLOW_LOOK_UP_S = 0.5
NO_TORCH = "torch is not installed: you can read and draw traces, but not run ranks"
NOT_TRIED = "ringsim's analysis of hangs on NCCL has not run on a GPU yet"
MEASURE = {
    "gloo": "not measured: run `ringsim bandwidth`",
    "nccl": "not measured: run `ringsim bandwidth --device gpu`",
}


@dataclass(frozen=True)
class BackendFacts:
    """The facts about the backends, from torch and the environment.

    Attributes:
        has_torch: whether torch is installed.
        has_gloo: whether this torch was built with Gloo.
        has_nccl: whether this torch was built with NCCL.
        gpus: the names of the GPUs that torch finds.
        direct_pairs: the number of GPU pairs that can read each other's memory, over NVLink or
            PCIe (torch does not report which).
        interface: the network interface that Gloo would use between ranks on this machine; None if
            Gloo chooses.
    """

    has_torch: bool = False
    has_gloo: bool = False
    has_nccl: bool = False
    gpus: tuple[str, ...] = ()
    direct_pairs: int = 0
    interface: str | None = None


@dataclass(frozen=True)
class BackendChoice:
    """The backend for a ``comm_device`` on this machine, and the reason in one sentence.

    The backend is "gloo" or "nccl", or None if it cannot run here.
    """

    comm_device: str
    backend: str | None
    reason: str


@dataclass(frozen=True)
class Criterion:
    """One row of the comparison: a criterion, and its value for each backend on this machine."""

    name: str
    nccl: str
    gloo: str


def add_parser(verbs: Verbs) -> None:
    """Adds the command."""
    parser = add_verb(
        verbs,
        "doctor",
        "check this machine, and show which backend is used and why",
        "ringsim doctor --bandwidths links.json",
        run,
    )
    parser.add_argument(
        "--bandwidths",
        metavar="FILE",
        help=(
            "bandwidths to show in the comparison, measured on this machine with `ringsim "
            "bandwidth -o FILE`"
        ),
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the findings; returns the exit code: 0 if ranks can run here."""
    table = load_table(options.bandwidths) if options.bandwidths else None
    facts = backend_facts()
    findings = list(examine(facts))
    with contextlib.suppress(RingError):  # the "launcher" line reports it
        launched = find_launched()
        if facts.has_torch and launched is not None and launched.world_size > 1:
            found = examine_job()
            if found is None:
                return 0  # rank 0 prints it
            findings += found
    choices = [choose_backend(device, facts) for device in ("cpu", "gpu")]
    criteria = backend_criteria(facts, table)

    def words() -> str:
        lines = [
            f"{'ok' if good else 'no':3} {what:16} {detail}" for good, what, detail in findings
        ]
        for choice, default in zip(choices, (", the default", ""), strict=True):
            lines.append(
                f'comm_device="{choice.comm_device}"{default}: '
                f"{choice.backend or 'cannot run here'}; {choice.reason}"
            )
        return "\n".join([*lines, criteria_text(criteria)])

    def numbers() -> dict[str, object]:
        return {
            "found": [
                {"works": good, "what": what, "detail": detail} for good, what, detail in findings
            ],
            "backends": [asdict(choice) for choice in choices],
            "criteria": [asdict(row) for row in criteria],
        }

    tell(options, words, numbers)
    needed = {"torch", "Gloo", "loopback", "job"}
    return int(any(what in needed and not good for good, what, _ in findings))


def examine(facts: BackendFacts) -> Iterator[Fact]:
    """Yields (works, what, detail) for everything that ringsim depends on."""
    machine = provenance.machine()
    memory = bytes_text(machine["memory_bytes"]) if machine["memory_bytes"] else "memory unknown"
    yield (
        True,
        "machine",
        f"{machine['cpu']}, {machine['cores']} cores, {memory}, {machine['platform']}",
    )
    yield True, "Python", f"{sys.version.split()[0]} ({sys.executable})"
    yield from _torch(facts)
    yield _loopback()
    yield _name_look_up()
    yield _start_method()
    yield _launcher()
    yield _packages()
    yield _processes()


def _packages() -> Fact:
    there, missing = [], []
    for name in "numpy pandas pyarrow matplotlib networkx ipywidgets jupyterlab".split():
        try:
            there.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    texts = filter(None, (", ".join(there), ", ".join(missing)))
    return not missing, "packages", "; not installed: ".join(texts)


def _torch(facts: BackendFacts) -> Iterator[Fact]:
    if not facts.has_torch:
        yield False, "torch", NO_TORCH
        return
    yield True, "torch", importlib.metadata.version("torch")
    yield _backend("Gloo", "cpu", facts)
    if facts.gpus:
        yield True, "GPUs", f"{len(facts.gpus)}: {', '.join(facts.gpus)}"
    else:
        yield False, "GPUs", "none: ranks compute on CPUs"
    works, what, detail = _backend("NCCL", "gpu", facts)
    yield works, what, f"{detail}; {NOT_TRIED}"


def _backend(what: str, comm_device: str, facts: BackendFacts) -> Fact:
    choice = choose_backend(comm_device, facts)
    if choice.backend is None:
        return False, what, choice.reason
    return True, what, f'used for comm_device="{comm_device}"'


def _loopback() -> Fact:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            socket.create_connection(listener.getsockname(), timeout=5).close()
    except OSError as error:
        return False, "loopback", f"127.0.0.1 cannot be used: {error}"
    return True, "loopback", "127.0.0.1 works, and ranks on this machine listen only there"


def _name_look_up() -> Fact:
    """Measures the name lookup that torch's store client performs for each rank.

    The client looks up the name of the address that it has connected to. Many ranks ask at the same
    time, and a name server may drop some requests in a burst, so this function sends a burst.
    """
    took_s: list[float] = []

    def look_up() -> None:
        begin_s = time.monotonic()
        with contextlib.suppress(OSError):  # "no such name" is also an answer
            socket.getnameinfo((_STORE_PEER, 0), socket.NI_NUMERICSERV)
        took_s.append(time.monotonic() - begin_s)

    threads = [threading.Thread(target=look_up, daemon=True) for _ in range(_LOOK_UPS)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + _LOOK_UP_LIMIT_S
    for thread in threads:
        thread.join(max(deadline_s - time.monotonic(), 0.0))
    slowest_s = max(took_s) if len(took_s) == len(threads) else math.inf
    if slowest_s < _SLOW_LOOK_UP_S:
        return True, "name look-up", f"looking up {_STORE_PEER} takes {1e3 * slowest_s:.1f} ms"
    how_long = (
        f"{slowest_s:.1f} s" if math.isfinite(slowest_s) else f"more than {_LOOK_UP_LIMIT_S:.0f} s"
    )
    return (
        False,
        "name look-up",
        f"looking up {_STORE_PEER} takes {how_long}, and torch looks up this name whenever a rank "
        f"starts. Add this line to /etc/hosts: {_STORE_PEER} localhost",
    )


def _start_method() -> Fact:
    from ringsim.launch.ranks import has_fork_server

    text = (
        "fresh interpreters (seconds per rank). The following work only on Linux: the fork server, "
        "parked ranks, waking blocked ranks (here they are killed), and killing ranks whose "
        "interpreter hangs when the launcher is killed"
    )
    if has_fork_server():
        text = (
            "fork server with torch loaded (milliseconds per rank); ranks always end with the "
            "launcher"
        )
    return True, "start method", text


def _launcher() -> Fact:
    """Describes what ``initialize_distributed()`` would find here, without starting MPI."""
    try:
        return True, "launcher", str(discover(ask_mpi=False))
    except RingError as error:
        # only the failure; the remedy is for a program that calls initialize_distributed()
        return False, "launcher", str(error).partition(". ")[0]


def _processes() -> Fact:
    """Lists this user's ringsim processes on this machine."""
    found = defaultdict[str, list[str]](list)
    for comm in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            name = comm.read_text().strip()
            if comm.stat().st_uid == os.getuid() and name.startswith("ringsim-"):
                found[name.removeprefix("ringsim-").rstrip("0123456789")].append(comm.parent.name)
    words = {
        "server": "fork servers",
        "parked": "parked ranks (they end after a minute)",
        "rank": "running ranks",
        "idle": "ranks of sessions, between two calls",
    }
    text = "; ".join(
        f"{words.get(kind, kind)}: {', '.join(sorted(pids, key=int))}"
        for kind, pids in sorted(found.items())
    )
    return True, "processes", text or "no ringsim processes"


def backend_facts() -> BackendFacts:
    """Collects the facts about the backends on this machine.

    This starts no process, and initialises no GPU if torch finds none.
    """
    if importlib.util.find_spec("torch") is None:
        return BackendFacts()
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return BackendFacts(has_torch=True)
    from ringsim.comm.bootstrap import loopback_interface  # needs torch.distributed

    gpus = torch.cuda.device_count()
    reach = torch.cuda.can_device_access_peer
    return BackendFacts(
        has_torch=True,
        has_gloo=dist.is_gloo_available(),
        has_nccl=dist.is_nccl_available(),
        gpus=tuple(torch.cuda.get_device_name(index) for index in range(gpus)),
        direct_pairs=sum(
            reach(one, other) and reach(other, one)
            for one, other in itertools.combinations(range(gpus), 2)
        ),
        interface=os.environ.get("GLOO_SOCKET_IFNAME") or loopback_interface(),
    )


def choose_backend(comm_device: str, facts: BackendFacts) -> BackendChoice:
    """Returns the backend for ``comm_device``, whether it can run here, and the reason.

    Raises:
        ArgumentError: ``comm_device`` is neither "cpu" nor "gpu".

    Example:
        >>> choose_backend("gpu", BackendFacts(has_torch=True, has_gloo=True, has_nccl=True)).reason
        'NCCL moves tensors between GPUs, and torch finds no GPU here'
    """
    if comm_device not in ("cpu", "gpu"):
        raise ArgumentError(
            f'comm_device must be "cpu" (Gloo) or "gpu" (NCCL), got {comm_device!r}.'
        )
    backend: str | None = None
    if not facts.has_torch:
        reason = NO_TORCH
    elif comm_device == "cpu" and not facts.has_gloo:
        reason = "this torch was built without Gloo, which moves tensors between CPUs"
    elif comm_device == "cpu":
        backend, reason = "gloo", "the tensors are in host memory, and Gloo works on every machine"
    elif not facts.gpus:
        reason = "NCCL moves tensors between GPUs, and torch finds no GPU here"
    elif not facts.has_nccl:
        reason = "this torch was built without NCCL: it needs a CUDA build"
    else:
        most = count(len(facts.gpus), "rank")
        backend = "nccl"
        reason = (
            f"the tensors are in GPU memory; up to {most} here, one on each GPU, because NCCL "
            "refuses two ranks on one GPU"
        )
    return BackendChoice(comm_device, backend, reason)


def backend_criteria(facts: BackendFacts, table: Bandwidths | None = None) -> list[Criterion]:
    """Compares the backends on this machine by tensor location, interconnect, bandwidth and use.

    Args:
        facts: the facts about the backends.
        table: bandwidths measured on this machine, if available.

    Example:
        >>> for row in backend_criteria(
        ...     BackendFacts(has_torch=True, has_gloo=True, interface="lo")
        ... )[:2]:
        ...     print(f"{row.name}: {row.gloo}")
        tensor location: host memory
        interconnect: TCP sockets over lo, also between ranks on one machine
    """
    over = f"TCP sockets over {facts.interface}" if facts.interface else "TCP sockets"
    gpus = ", ".join(f"{facts.gpus.count(name)} x {name}" for name in dict.fromkeys(facts.gpus))
    no_use = "" if choose_backend("gpu", facts).backend else " (not on this machine)"
    return [
        Criterion(
            "tensor location",
            f"GPU memory: {gpus}" if gpus else "GPU memory; no GPU here",
            "host memory",
        ),
        Criterion(
            "interconnect", _between_gpus(facts), f"{over}, also between ranks on one machine"
        ),
        Criterion("bandwidth", _bandwidth("nccl", facts, table), _bandwidth("gloo", facts, table)),
        Criterion(
            "use",
            f"ranks on GPUs, one each{no_use}",
            "ranks on CPUs; tensors offloaded to host memory; learning on any machine",
        ),
    ]


def criteria_text(criteria: Sequence[Criterion]) -> str:
    """Returns the criteria as text, with one line for each backend."""
    return "\n".join(
        f"{row.name:16} NCCL (GPU)  {row.nccl}\n{'':16} Gloo (CPU)  {row.gloo}" for row in criteria
    )


def _between_gpus(facts: BackendFacts) -> str:
    number = len(facts.gpus)
    if not number:
        return "NVLink, PCIe or a network between GPUs; none here"
    if number == 1:
        return "none: this machine has only one GPU"
    pairs = number * (number - 1) // 2
    if facts.direct_pairs == pairs:
        return (
            f"all {number} GPUs can read each other's memory, over NVLink "
            "or PCIe (torch does not report which)"
        )
    return (
        f"{facts.direct_pairs} of {count(pairs, 'GPU pair')} can read each other's memory; the "
        "others go through host memory"
    )


def _bandwidth(backend: str, facts: BackendFacts, table: Bandwidths | None) -> str:
    """Returns the measured or the published bandwidth, or the command that measures it."""
    measured = None if table is None else _measured(backend, table)
    if measured is not None:
        return measured
    if backend == "nccl" and not facts.gpus:
        # on use: it loads Matplotlib, which most commands do not need
        from ringsim.plot.published import FIGURES

        rates = [
            figure.bandwidth_gb_per_s for figure in FIGURES if figure.bandwidth_gb_per_s is not None
        ]
        return (
            f"cannot be measured here; published: {min(rates):g} to {max(rates):g} GB/s, depending "
            "on the link (docs/how-to/measure-links.md)"
        )
    return MEASURE[backend]


def _measured(backend: str, table: Bandwidths) -> str | None:
    found = [key for key in table.fits if key[1] == backend and key[0] != "all_reduce"]
    if not found:
        return None
    slowest = max(found, key=lambda key: table.fits[key].beta_s_per_byte)
    pattern, _, src, dst = slowest
    best = np.nanmax(table.columns["algbw_gb_per_s"][table.where(*slowest)])
    text = f"up to {best:.3g} GB/s ({pattern} {src} -> {dst})"
    half_bytes = table.fits[slowest].n_half_bytes
    if math.isfinite(half_bytes):
        text += f", half of that at {bytes_text(round(half_bytes))}"
    return f"{text}, measured {table.metadata.get('date') or ''}".rstrip()
