"""A process in a job of MPI: how it finds MPI, and what is different in it until the job ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

from torch.distributed import distributed_c10d

from ringsim.comm.mpi_exit import watch_exit
from ringsim.errors import ArgumentError, RingError

_LAST_WORDS_S: Final = 0.2  # mpirun drops what is still in the pipes to it when the job is ended: the error would stay unseen


def import_mpi() -> Any:
    """Returns ``mpi4py.MPI``; the first import starts MPI in this process.

    Raises:
        RingError: it is missing, or finds no MPI.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RingError(
            f"mpi4py and an MPI library must be installed for the mpi backend, got {type(error).__name__}: {error}. "
            "Install both from PyPI: pip install 'ringsim[mpi]'."
        ) from error
    return MPI


def enter_job(everybody: Any) -> Callable[[], None]:
    """Lets a failure end all ranks, and torch's functions say where to go; returns what undoes both.

    Args:
        everybody: the communicator of all ranks.
    """

    def end_job(code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_LAST_WORDS_S)
        everybody.Abort(code)

    undo_hook = _end_all_ranks_on_failure(end_job)
    undo_exit = watch_exit(end_job)
    undo_signpost = _point_torch_to_ringsim()

    def undo() -> None:
        undo_signpost()
        undo_exit()
        undo_hook()

    return undo


def _end_all_ranks_on_failure(end_job: Callable[[int], None]) -> Callable[[], None]:
    """Lets an exception that ends this process end the job: the others would wait for it until their limits, and MPI at its end."""
    before = sys.excepthook

    def end_all(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        end_job(1)

    def undo() -> None:
        if sys.excepthook is end_all:
            sys.excepthook = before

    sys.excepthook = end_all
    return undo


def _point_torch_to_ringsim() -> Callable[[], None]:
    """Lets torch's own functions, which find no default group here, name those to call instead."""
    before = distributed_c10d._get_default_group

    def get_default_group() -> Any:
        try:
            return before()
        except ValueError as error:
            raise ArgumentError(
                "the functions of torch.distributed must have a process group of torch's, got none: MPI joins the ranks of this job. "
                "Call those of ringsim.comm, from ringsim import comm as dist; DeviceMesh is torch's alone."
            ) from error

    def undo() -> None:
        if distributed_c10d._get_default_group is get_default_group:
            distributed_c10d._get_default_group = before

    distributed_c10d._get_default_group = get_default_group
    return undo
