"""``ringsim doctor``: what works on this machine, and what of ours runs on it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from ringsim import provenance
from ringsim.cli.verb import Verbs, add_verb
from ringsim.environment import discover
from ringsim.errors import RingError
from ringsim.traces.units import bytes_text


def add_parser(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb."""
    add_verb(verbs, "doctor", "say what works on this machine: backends, GPUs, start method, versions", "ringsim doctor", run)


def run(_options: argparse.Namespace) -> int:
    """Does what the verb says; returns the exit code: 0 when ranks can run here."""
    findings = list(examine())
    for good, what, detail in findings:
        print(f"{'ok' if good else 'no':3} {what:16} {detail}")
    return 0 if all(good for good, what, _ in findings if what in ("torch", "Gloo", "loopback")) else 1


def examine() -> Iterator[tuple[bool, str, str]]:
    """Yields (works, what, detail) for everything that ringsim stands on."""
    machine = provenance.machine()
    memory = bytes_text(machine["memory_bytes"]) if machine["memory_bytes"] else "memory unknown"
    yield True, "machine", f"{machine['cpu']}, {machine['cores']} cores, {memory}, {machine['platform']}"
    yield True, "Python", f"{sys.version.split()[0]} ({sys.executable})"
    yield from _torch()
    yield _loopback()
    yield _start_method()
    yield _launcher()
    for name in ("numpy", "pandas", "pyarrow", "matplotlib", "networkx", "ipywidgets", "jupyterlab"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield True, name, importlib.metadata.version(name)
            continue
        yield False, name, "not installed"
    yield _processes()


def _torch() -> Iterator[tuple[bool, str, str]]:
    if importlib.util.find_spec("torch") is None:
        yield False, "torch", "not installed: traces can be read and drawn, ranks cannot run"
        return
    import torch
    import torch.distributed as dist

    yield True, "torch", torch.__version__
    if not dist.is_available():
        yield False, "Gloo", "this torch was built without torch.distributed"
        return
    yield dist.is_gloo_available(), "Gloo", 'comm_device="cpu" uses it' if dist.is_gloo_available() else "this torch was built without it"
    gpus = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(gpus))
    yield gpus > 0, "GPUs", f"{gpus}: {names}" if gpus else "none: ranks compute on processors"
    nccl = dist.is_nccl_available() and gpus > 0
    detail = f'comm_device="gpu" uses it, up to {gpus} ranks (one a GPU)' if nccl else "needs a GPU and a CUDA build of torch"
    yield nccl, "NCCL", detail


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
