"""Running scripts under mpirun, if it is available."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Hydra starts all ranks here, without a job manager
ON_THIS_MACHINE = {"HYDRA_LAUNCHER": "fork", "HYDRA_RMK": "user", "HYDRA_IFACE": "lo"}
ON_THIS_MACHINE |= {"FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
ON_THIS_MACHINE |= {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_btl_tcp_if_include": "lo"}
ON_THIS_MACHINE |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
ON_THIS_MACHINE |= {"OMPI_MCA_rmaps_base_oversubscribe": "1"}


def find_mpirun() -> str | None:
    """Returns the mpirun of the tests' environment, or else of the machine."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("mpirun", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))


def require_mpi() -> str:
    """Returns mpirun; skips the tests if it or mpi4py is missing."""
    mpirun = find_mpirun()
    if mpirun is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpirun and mpi4py must be installed: pip install 'ringsim[mpi]'")
    return mpirun


def run_mpi(ranks: int, *arguments: str, limit_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Runs ``python *arguments`` on a number of ranks, and kills all of them at the limit."""
    command = [require_mpi(), "-n", str(ranks), sys.executable, *arguments]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **ON_THIS_MACHINE, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    try:
        pipes = {"capture_output": True, "stdin": subprocess.DEVNULL, "text": True}
        return subprocess.run(command, env=environment, timeout=limit_s, check=False, **pipes)
    except subprocess.TimeoutExpired as error:  # mpirun was killed, and so were its ranks
        shown = [
            part.decode() if isinstance(part, bytes) else part or ""
            for part in (error.stdout, error.stderr)
        ]
        return subprocess.CompletedProcess(command, 124, *shown)
