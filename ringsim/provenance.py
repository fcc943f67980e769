"""Records where measurements come from: the machine, versions and date below every picture."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import os
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata as packages
from pathlib import Path
from typing import Any

__version__ = "0.3.0"  # pyproject.toml reads it from here


def machine() -> dict[str, Any]:
    """Returns a description of this machine.

    Returns:
        ``cpu`` (the model name), ``cores`` (the number of logical cores that this process may use),
        ``memory_bytes`` (None if unknown) and ``platform``. Host and user names are omitted,
        because you may share a trace.

    Example:
        >>> sorted(machine())
        ['cores', 'cpu', 'memory_bytes', 'platform']
    """
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        "memory_bytes": _memory_bytes(),
        "platform": platform.platform(terse=True),
    }


def versions() -> dict[str, str]:
    """Returns the versions of ringsim and Python, and of torch and numpy if installed.

    This function does not import torch or numpy.

    Example:
        >>> versions()["python"] == platform.python_version()
        True
    """
    installed = {
        name: version for name in ("torch", "numpy") if (version := _installed(name)) is not None
    }
    return {"ringsim": __version__, "python": platform.python_version(), **installed}


def measured_run(world_size: int, backend: str, start_unix_ns: int) -> dict[str, Any]:
    """Returns the metadata about the origin of a measured trace.

    Args:
        world_size: the number of ranks.
        backend: the backend: "gloo", "nccl" or "mpi".
        start_unix_ns: the start of the run, in ns since 1970.
    """
    return {
        "format": 1,
        "source": "measured",
        "world_size": world_size,
        "backend": backend,
        "comm_device": "gpu" if backend == "nccl" else "cpu",
        "start_unix_ns": start_unix_ns,
        "date": dt.datetime.fromtimestamp(start_unix_ns / 1e9, tz=dt.UTC).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
    }


_DOUBTFUL = "doubtful constants: "


def note_doubts(doubts: Iterable[str]) -> list[str]:
    """Turns doubts about a prediction's constants into notes for the trace.

    `footer` recognizes these notes.

    Example:
        >>> footer({"source": "simulated", "notes": note_doubts(["the machine was busy"])})
        'simulated, from doubtful constants'
    """
    return [_DOUBTFUL + doubt for doubt in doubts]


def describe_replay(metadata: Mapping[str, Any]) -> str:
    """Returns the error of a predicted trace's replay in words, or "" for other traces.

    Args:
        metadata: the metadata of a trace.

    Example:
        >>> describe_replay({"source": "predicted", "replay_error": -0.03})
        'the replay itself is 3 % off'
    """
    error = metadata.get("replay_error")
    if metadata.get("source") != "predicted" or not isinstance(error, float):
        return ""
    return name_error(error)


def name_error(error: float) -> str:
    """Returns the error of a replay in words.

    Args:
        error: the error, as a share of the run's duration.
    """
    return f"the replay itself is {percent_text(error)} off"


def percent_text(share: float) -> str:
    """Formats the size of a share in percent.

    Example:
        >>> percent_text(-0.126), percent_text(0.001)
        ('13 %', 'less than 1 %')
    """
    return f"{100 * abs(share):.0f} %" if abs(share) >= 0.005 else "less than 1 %"


def footer(metadata: Mapping[str, Any]) -> str:
    """Returns the line printed below a picture: the source, machine, backend, version and date.

    Args:
        metadata: the metadata of a trace; missing entries are omitted.

    Example:
        >>> footer(
        ...     {
        ...         "source": "measured",
        ...         "machine": {"cpu": "EPYC 7B13", "cores": 2},
        ...         "backend": "gloo",
        ...         "versions": {"torch": "2.13.0"},
        ...         "date": "2026-11-20",
        ...     }
        ... )
        'measured on EPYC 7B13, 2 cores, gloo, torch 2.13.0, 2026-11-20'
        >>> footer({"source": "predicted", "replay_error": -0.03, "backend": "gloo"})
        'predicted (the replay itself is 3 % off) from a run: gloo'
        >>> footer({})
        'origin unknown'
    """
    source, known, release = (
        metadata.get("source"),
        metadata.get("machine") or {},
        metadata.get("versions") or {},
    )
    cores = known.get("cores")
    parts = [
        known.get("cpu"),
        f"{cores} core{'' if cores == 1 else 's'}" if cores else None,
        metadata.get("backend"),
        next(
            (f"{name} {release[name]}" for name in ("torch", "ringsim") if release.get(name)), None
        ),
        metadata.get("date"),
    ]
    details = ", ".join(str(part) for part in parts if part)
    begin = ("part of a run, " if "part" in metadata else "") + str(source or "origin unknown")
    if error := describe_replay(metadata):
        begin += f" ({error}) from a run"
    if any(str(note).startswith(_DOUBTFUL) for note in metadata.get("notes") or ()):
        begin += ", from doubtful constants"
    if not details:
        return begin
    return f"{begin} on {details}" if source and known.get("cpu") else f"{begin}: {details}"


@functools.cache  # every run calls it
def _installed(name: str) -> str | None:
    try:
        return packages.version(name)
    except packages.PackageNotFoundError:
        return None


@functools.cache
def _cpu() -> str:
    """Returns the processor's model name, read from /proc/cpuinfo on Linux."""
    with contextlib.suppress(OSError):
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Hardware", "cpu model") and value.strip():
                return " ".join(value.split())
    return platform.processor() or platform.machine() or "unknown processor"


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
