"""Traces for other tools, and from them.

Written by methods of ``Trace``, read by functions of this package::

    Trace.to_perfetto(path)      read_perfetto(path)     ui.perfetto.dev, and its trace processor
    Trace.to_chrome(path)        read_chrome(path)       chrome://tracing and what else reads its JSON
    -                            read_profiler(paths)    files of torch.profiler, one a rank
"""

from ringsim.exchange.chrome import read_chrome
from ringsim.exchange.perfetto_reading import read_perfetto
from ringsim.exchange.profiler import read_profiler

__all__ = ["read_chrome", "read_perfetto", "read_profiler"]
