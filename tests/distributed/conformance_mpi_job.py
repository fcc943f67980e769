"""One rank of the conformance job on MPI: ``mpirun -n 4 python conformance_mpi_job.py REPORTS``."""

from __future__ import annotations

import datetime as dt
import sys

from conformance import run_rules
from test_conformance_mpi import SKIPS

from ringsim import comm


def main() -> None:
    comm.set_backend("mpi")
    comm.init_process_group("mpi", timeout=dt.timedelta(seconds=20))
    run_rules(comm, sys.argv[1], SKIPS)
    comm.destroy_process_group()


if __name__ == "__main__":
    main()
