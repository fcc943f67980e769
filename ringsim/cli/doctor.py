"""``ringsim doctor``: what works on this machine, and what of ours runs on it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from ringsim import provenance
from ringsim.backend_choice import NO_TORCH, BackendFacts, backend_criteria, backend_facts, choose_backend, criteria_text
from ringsim.cli.verb import Verbs, add_verb
from ringsim.environment import discover
from ringsim.errors import RingError
from ringsim.traces.bandwidths import load as load_table
from ringsim.traces.units import bytes_text


def add_parser(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb."""
    parser = add_verb(
        verbs, "doctor", "say what works on this machine, which backend is used and why", "ringsim doctor --bandwidths links.json", run
    )
    parser.add_argument("--bandwidths", metavar="FILE", help="a table that `ringsim bandwidth -o FILE` measured here, for the comparison")


def run(options: argparse.Namespace) -> int:
    """Does what the verb says; returns the exit code: 0 when ranks can run here."""
    table = load_table(options.bandwidths) if options.bandwidths else None
    facts = backend_facts()
    findings = list(examine(facts))
    for good, what, detail in findings:
        print(f"{'ok' if good else 'no':3} {what:16} {detail}")
    print("\nWhich backend, and why:\n")
    for device in ("cpu", "gpu"):
        choice = choose_backend(device, facts)
        default = ", the default" if device == "cpu" else ""
        print(f'comm_device="{device}"{default}: {choice.backend or "cannot run here"}; {choice.reason}')
    print()
    print(criteria_text(backend_criteria(facts, table)))
    return 0 if all(good for good, what, _ in findings if what in ("torch", "Gloo", "loopback")) else 1


def examine(facts: BackendFacts) -> Iterator[tuple[bool, str, str]]:
    """Yields (works, what, detail) for everything that ringsim stands on."""
    machine = provenance.machine()
    memory = bytes_text(machine["memory_bytes"]) if machine["memory_bytes"] else "memory unknown"
    yield True, "machine", f"{machine['cpu']}, {machine['cores']} cores, {memory}, {machine['platform']}"
    yield True, "Python", f"{sys.version.split()[0]} ({sys.executable})"
    yield from _torch(facts)
    yield _loopback()
    yield _start_method()
    yield _launcher()
    for name in ("numpy", "pandas", "pyarrow", "matplotlib", "networkx", "ipywidgets", "jupyterlab"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield True, name, importlib.metadata.version(name)
            continue
        yield False, name, "not installed"
    yield _processes()


def _torch(facts: BackendFacts) -> Iterator[tuple[bool, str, str]]:
    if not facts.has_torch:
        yield False, "torch", NO_TORCH
        return
    yield True, "torch", importlib.metadata.version("torch")
    gloo, nccl = choose_backend("cpu", facts), choose_backend("gpu", facts)
    yield gloo.backend is not None, "Gloo", 'comm_device="cpu" uses it' if gloo.backend else gloo.reason
    yield bool(facts.gpus), "GPUs", f"{len(facts.gpus)}: {', '.join(facts.gpus)}" if facts.gpus else "none: ranks compute on processors"
    yield nccl.backend is not None, "NCCL", 'comm_device="gpu" uses it' if nccl.backend else nccl.reason


def _loopback() -> tuple[bool, str, str]:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            socket.create_connection(listener.getsockname(), timeout=5).close()
    except OSError as error:
        return False, "loopback", f"127.0.0.1 cannot be used: {error}"
    return True, "loopback", "127.0.0.1 works; runs on this machine open no socket beyond it"


def _start_method() -> tuple[bool, str, str]:
    from ringsim.launch.launcher import has_fork_server

    if has_fork_server():
        return True, "start method", "fork server with torch loaded (milliseconds a rank); ranks end with the launcher, however it ends"
    return (
        True,
        "start method",
        "fresh interpreters (seconds a rank). Only on Linux: the fork server, parked ranks, waking blocked ranks "
        "(here they are ended instead), ending ranks whose interpreter hangs when the launcher is killed",
    )


def _launcher() -> tuple[bool, str, str]:
    """Says what ``initialize_distributed()`` would find in this process; MPI is not started for it."""
    try:
        return True, "launcher", str(discover(ask_mpi=False))
    except RingError as error:
        return False, "launcher", str(error)


def _processes() -> tuple[bool, str, str]:
    """Lists the processes of ringsim on this machine, those of other sessions of this user too."""
    found: dict[str, list[str]] = {}
    for comm in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if comm.stat().st_uid == os.getuid() and (name := comm.read_text().strip()).startswith("ringsim-"):
                found.setdefault(name.removeprefix("ringsim-").rstrip("0123456789"), []).append(comm.parent.name)
    words = {"server": "fork servers", "parked": "parked ranks (they end after a minute)", "rank": "running ranks"}
    text = "; ".join(f"{words.get(kind, kind)}: {', '.join(sorted(pids, key=int))}" for kind, pids in sorted(found.items()))
    return True, "processes", text or "none of ringsim's"
