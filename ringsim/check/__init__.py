"""Checks for the exercises of the lessons: does the answer hold, and if not, why.

A check runs a student's function on fresh ranks, with sizes and data drawn at random, and looks at what was recorded and returned;
``diagnose`` compares what somebody reads from a trace. A check never raises for a wrong answer and always returns within about 15 seconds::

    check.hello(sum_share)             notebooks/00_four_processes: each rank adds up its share
    check.pair_groups(pair_groups)     notebooks/01_ring: which pairs of ranks make a ring
    check.ring(pass_round)             notebooks/01_ring: numbers passed round on the pair groups
    check.no_deadlock(exchange)        notebooks/02_send_recv_deadlock: all send and receive, and nobody waits for ever
    check.alphabeta(fit)               notebooks/03_bandwidth: alpha and beta from the times of messages
    check.timed_op(timed_op)           notebooks/08_communication_layer: a decorator that times and changes nothing
    check.ring_all_reduce(all_reduce)  notebooks/08_communication_layer: an all-reduce in chunks, by the bytes that it sends
    check.diagnose(trace, kind, ...)   notebooks/09_diagnose: what is wrong in a trace, with whom, and what shows it

The files: ``result`` is what a check returns, ``examination`` runs an answer and says how a run ended, ``neighbours`` has the rule of the
ring, ``shares``, ``pairs``, ``rounds``, ``exchanges``, ``fits``, ``timed``, ``chunks`` and ``causes`` know one exercise each.

Example:
    >>> from ringsim import check
    >>> def pair_groups(N):
    ...     return [(0, 1), (1, 2), (2, 3), (3, 0)]
    >>> result = check.pair_groups(pair_groups, seed=1)
    >>> result.passed, result.world_size
    (False, 1)
    >>> print(result.reason)
    A ring of 1 rank has no pairs, got 4: (0, 1), (1, 2), (2, 3), (3, 0).
"""

from ringsim.check.causes import diagnose
from ringsim.check.chunks import ring_all_reduce
from ringsim.check.exchanges import no_deadlock
from ringsim.check.fits import alphabeta
from ringsim.check.pairs import pair_groups
from ringsim.check.result import CheckResult
from ringsim.check.rounds import ring
from ringsim.check.shares import hello
from ringsim.check.timed import timed_op

__all__ = ["CheckResult", "alphabeta", "diagnose", "hello", "no_deadlock", "pair_groups", "ring", "ring_all_reduce", "timed_op"]
