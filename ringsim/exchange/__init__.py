"""Traces for other tools, and from them.

Written by methods of ``Trace``, read by functions of this package::

    Trace.to_perfetto(path)     read_perfetto(path)     ui.perfetto.dev, and its trace processor
    Trace.to_chrome(path)       read_chrome(path)       chrome://tracing and what else reads its
                                                        JSON
    Trace.to_goal(path)         read_goal(path, link)   LogGOPSim, ATLAHS: programs, run here on
                                                        the virtual clock
    Trace.to_chakra(directory)  read_chakra(...)        ASTRA-sim: the same
    Trace.to_otf2(directory)    read_otf2(directory)    Vampir, Scalasca; archives of Score-P.
                                                        Needs the package otf2
    -                           read_profiler(paths)    files of torch.profiler, one a rank
    -                           read_flight_recorder(paths)   dumps of torch's flight recorder, one
                                                              a rank
"""

from ringsim.exchange.chakra import read_chakra
from ringsim.exchange.chrome import read_chrome, read_profiler
from ringsim.exchange.flight_recorder import read_flight_recorder
from ringsim.exchange.goal import read_goal
from ringsim.exchange.otf2 import read_otf2
from ringsim.exchange.perfetto import read_perfetto

__all__ = [
    "read_chakra",
    "read_chrome",
    "read_flight_recorder",
    "read_goal",
    "read_otf2",
    "read_perfetto",
    "read_profiler",
]
