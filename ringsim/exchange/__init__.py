"""Exchanges traces with other tools.

``Trace`` has methods that write the formats, and this package has functions that read them::

    Trace.to_perfetto(path)  read_perfetto(path)          ui.perfetto.dev and its trace processor
    Trace.to_chrome(path)    read_chrome(path)            chrome://tracing and other readers of
                                                          Chrome's JSON
    -                        read_profiler(paths)         torch.profiler files, one per rank
    -                        read_flight_recorder(paths)  dumps from torch's flight recorder, one
                                                          per rank
"""

from ringsim.exchange.chrome import read_chrome
from ringsim.exchange.flight_recorder import read_flight_recorder
from ringsim.exchange.perfetto import read_perfetto
from ringsim.exchange.profiler import read_profiler
from ringsim.traces.value import removed

__all__ = [
    "read_chrome",
    "read_flight_recorder",
    "read_perfetto",
    "read_profiler",
]

read_goal = removed("ringsim.exchange.read_goal", "Perfetto's format (read_perfetto)")
read_chakra = removed("ringsim.exchange.read_chakra", "Perfetto's format (read_perfetto)")
read_otf2 = removed("ringsim.exchange.read_otf2", "Perfetto's format (read_perfetto)")
