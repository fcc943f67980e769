"""ringsim shows how the stages of a pipeline communicate.

It runs a worker on real ``torch.distributed`` ranks, connected in a ring of pairwise process
groups, records every message, and draws the ring and the timeline.

Contents::

    trace                             run a worker on real ranks and record it, or record ranks that
                                      a launcher started
    traced                            decorate a worker with ``trace``
    session                           start ranks that stay, and call functions on them
    load                              read a saved trace
    Trace                             the record of a run: events, messages, results, pictures
    span                              name a piece of work in the timeline
    mark                              name a moment in the timeline
    memory                            count the bytes of a rank's tensors in a block
    compute                           spend time as if computing: sleep, or advance a virtual clock
    Slow                              fault to inject: a rank that computes more slowly
    Degrade                           fault to inject: a slower link
    Fail                              fault to inject: a rank that fails
    Jitter                            fault to inject: computing times that vary
    bandwidth                         measure the latency and bandwidth of a ring's links
    FlopCosts                         costs of computing on a virtual clock, based on the number of
                                      operations
    simulate                          run the same worker on thousands of simulated ranks, on a
                                      virtual clock
    compare_semantics                 find out under which backends a program would hang
    simulate_schedule                 simulate a pipeline step from its schedule and its costs
    plot_schedules                    draw schedules below each other on one time axis
    calibrate                         find this machine's message and computing costs from a trace
    calibration_worker                the worker to trace for ``calibrate``
    compare                           compare two runs: before and after, two schedules, or a run
                                      and its prediction
    predict                           predict a worker or a schedule on many ranks, based on a small
                                      trace
    scale                             predict the recorded step on hundreds of ranks
    Link                              cost of a message on a link: latency, and seconds per byte

    initialize_distributed            join the ring: create the default group and the pair groups
    destroy_distributed               leave the ring
    current_ring                      the ring of this rank
    Ring                              rank, neighbours and pair groups of one rank
    get_pipeline_parallel_pred_group  the pair group to receive on
    get_pipeline_parallel_succ_group  the pair group to send on
    get_comm_device                   "cpu" or "gpu"
    suppress_output                   show only the prints of rank 0

    comm                              torch.distributed's names, on any backend and with a log
    pipeline                          stages, schedules, training and generation
    check                             checks for the exercises of the lessons
    explore                           sliders for simulated runs, in notebooks and on pages
    environment                       find the rank of a process that a launcher started
    errors                            the exceptions that ringsim raises
    topologies                        the links between simulated ranks
    load_ipython_extension            called by ``%load_ext ringsim``

Names are imported on first use, so ``import ringsim`` loads neither torch nor matplotlib, pandas or
pyarrow.

Example:
    >>> import ringsim
    >>> def worker():
    ...     ring = ringsim.current_ring()
    ...     return ring.pred, ring.rank, ring.succ
    >>> ringsim.trace(worker, world_size=2).results
    [(1, 0, 1), (0, 1, 0)]
"""

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

# `python -m ringsim` does not import from the working directory
for _package in ("torch", "numpy") if sys.argv[:1] != ["-m"] else ():
    _found = PathFinder.find_spec(_package)
    # a torch.py next to the script, or in the working directory
    if _found is not None and not _found.submodule_search_locations:
        raise ImportError(
            f"cannot import {_package}: {_found.origin} shadows the package. Rename that file."
        )

# The table of contents: the module that defines names (or the module itself) -> public names.
_BY_MODULE = {
    "ringsim.check": "check",
    "ringsim.comm": "comm",
    "ringsim.comm.live_tensors": "memory",
    "ringsim.compute_costs": "compute FlopCosts",
    "ringsim.environment": "environment",
    "ringsim.errors": "errors",
    "ringsim.exchange.loading": "load",
    "ringsim.explore": "explore",
    "ringsim.faults": "Degrade Fail Jitter Slow",
    "ringsim.launch.api": "trace traced",
    "ringsim.launch.sessions": "session",
    "ringsim.link": "Link",
    "ringsim.magics": "load_ipython_extension",
    "ringsim.measuring.api": "bandwidth",
    "ringsim.measuring.calibrating": "calibration_worker",
    "ringsim.pipeline": "pipeline",
    "ringsim.plot.stacked_schedules": "plot_schedules",
    "ringsim.prediction.calibration": "calibrate",
    "ringsim.prediction.comparison": "compare",
    "ringsim.prediction.scaling": "predict scale",
    "ringsim.provenance": "__version__",
    "ringsim.ring.printing": "suppress_output",
    "ringsim.ring.ring": "current_ring destroy_distributed get_comm_device "
    "get_pipeline_parallel_pred_group get_pipeline_parallel_succ_group initialize_distributed Ring",
    "ringsim.simulator.api": "simulate",
    "ringsim.simulator.comparing": "compare_semantics",
    "ringsim.simulator.schedules": "simulate_schedule",
    "ringsim.topologies": "topologies",
    "ringsim.traces.spans": "mark span",
    "ringsim.traces.value": "Trace",
}
_CONTENTS = {name: module for module, names in _BY_MODULE.items() for name in names.split()}
__all__ = [name for name in _CONTENTS if name != "__version__"]

if TYPE_CHECKING:  # the same table, for type checkers and editors
    from ringsim import check as check
    from ringsim import comm as comm
    from ringsim import environment as environment
    from ringsim import errors as errors
    from ringsim import explore as explore
    from ringsim import pipeline as pipeline
    from ringsim import topologies as topologies
    from ringsim.comm.live_tensors import memory as memory
    from ringsim.compute_costs import FlopCosts as FlopCosts
    from ringsim.compute_costs import compute as compute
    from ringsim.exchange.loading import load as load
    from ringsim.faults import Degrade as Degrade
    from ringsim.faults import Fail as Fail
    from ringsim.faults import Jitter as Jitter
    from ringsim.faults import Slow as Slow
    from ringsim.launch.api import trace as trace
    from ringsim.launch.api import traced as traced
    from ringsim.launch.sessions import session as session
    from ringsim.link import Link as Link
    from ringsim.magics import load_ipython_extension as load_ipython_extension
    from ringsim.measuring.api import bandwidth as bandwidth
    from ringsim.measuring.calibrating import calibration_worker as calibration_worker
    from ringsim.plot.stacked_schedules import plot_schedules as plot_schedules
    from ringsim.prediction.calibration import calibrate as calibrate
    from ringsim.prediction.comparison import compare as compare
    from ringsim.prediction.scaling import predict as predict
    from ringsim.prediction.scaling import scale as scale
    from ringsim.provenance import __version__ as __version__
    from ringsim.ring.printing import suppress_output as suppress_output
    from ringsim.ring.ring import Ring as Ring
    from ringsim.ring.ring import current_ring as current_ring
    from ringsim.ring.ring import destroy_distributed as destroy_distributed
    from ringsim.ring.ring import get_comm_device as get_comm_device
    from ringsim.ring.ring import (
        get_pipeline_parallel_pred_group as get_pipeline_parallel_pred_group,
    )
    from ringsim.ring.ring import (
        get_pipeline_parallel_succ_group as get_pipeline_parallel_succ_group,
    )
    from ringsim.ring.ring import initialize_distributed as initialize_distributed
    from ringsim.simulator.api import simulate as simulate
    from ringsim.simulator.comparing import compare_semantics as compare_semantics
    from ringsim.simulator.schedules import simulate_schedule as simulate_schedule
    from ringsim.traces.spans import mark as mark
    from ringsim.traces.spans import span as span
    from ringsim.traces.value import Trace as Trace
else:  # hidden from type checkers, so that they report a misspelt name

    def __getattr__(name: str) -> Any:
        """Loads a public name from the module that defines it, on first use."""
        module = _CONTENTS.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = import_module(module)
        value = found if module == f"{__name__}.{name}" else getattr(found, name)
        globals()[name] = value  # so that the next use does not call this function
        return value


def __dir__() -> list[str]:
    """Lists the public names, for completion."""
    return sorted(_CONTENTS)
