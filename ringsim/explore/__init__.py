"""Explorers: sliders over simulated runs, in a notebook or in one page.

::

    explore.schedule()     two schedules of pipelines side by side: ranks, microbatches, unequal stages, latency, memory
    explore.ring()         a token, a shift or an all-reduce going round a ring, beside what alpha and beta say
    explore.bandwidth()    messages of all sizes on two links
    explore.generation()   how many batches a generation ring needs to be busy, and how many jam it
    explore.deadlock()     who sends first: which orders end, and which wait for ever

Each is the last line of a cell; ``to_html`` writes it as a page that moves without a kernel, and ``frame`` gives what a choice comes to.

Example:
    >>> from ringsim import explore
    >>> print(explore.schedule().frame(left="gpipe", right="1f1b").text)
"""

from ringsim.explore.explorer import Choice, Explorer, Frame
from ringsim.explore.messages import bandwidth, deadlock, ring
from ringsim.explore.pipelines import generation, schedule

__all__ = ["Choice", "Explorer", "Frame", "bandwidth", "deadlock", "generation", "ring", "schedule"]
