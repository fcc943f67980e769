"""Checks for the exercises of the lessons: does the answer hold, and if not, why.

A check runs a student's function on fresh ranks, with sizes and data drawn at random, and looks at what was recorded and returned;
``diagnose`` compares what somebody reads from a trace. A check never raises for a wrong answer and always returns within about 15 seconds::

    check.hello(sum_share)             notebooks/00_four_processes: each rank adds up its share
    check.pair_groups(pair_groups)     notebooks/01_ring: which pairs of ranks make a ring
    check.ring(pass_round)             notebooks/01_ring: numbers passed round on the pair groups
    check.no_deadlock(exchange)        notebooks/02_send_recv_deadlock: all send and receive, and nobody waits for ever
    check.alphabeta(fit)               notebooks/03_bandwidth: alpha and beta from the times of messages
    check.partition(partition)         notebooks/04_stages: which layers each stage gets
    check.hand_over(hand_over)         notebooks/04_stages: a tensor of any shape to the next stage, in two messages
    check.gradients(step)              notebooks/05_gradients: a step over stages, with the gradients of one process
    check.schedule(order)              notebooks/06_schedules: 1F1B, one list of actions a rank
    check.fast_schedule(order)         notebooks/06_schedules: an order that fills the bubble, within a limit of memory
    check.fewest_microbatches(choose)  notebooks/06_schedules: as few microbatches as a limit on the bubble allows
    check.token_ring(exchange)         notebooks/07_generation_ring: messages of a generation ring, in an order that never jams
    check.inner_iterations(choose)     notebooks/07_generation_ring: how many batches on their way make stages busy
    check.timed_op(timed_op)           notebooks/08_communication_layer: a decorator that times and changes nothing
    check.ring_all_reduce(all_reduce)  notebooks/08_communication_layer: an all-reduce in chunks, by the bytes that it sends
    check.diagnose(trace, kind, ...)   notebooks/09_diagnose: what is wrong in a trace, with whom, and what shows it

The files: ``result`` is what a check returns, ``examination`` runs an answer and says how a run ended, ``neighbours`` has the rule of the
ring, ``small_task`` a model to train; ``shares``, ``pairs``, ``rounds``, ``exchanges``, ``fits``, ``cuts``, ``handing_over``,
``boundaries``, ``orders``, ``fewest``, ``tokens``, ``settings``, ``timed``, ``chunks`` and ``causes`` know the exercises.

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

from ringsim.check.boundaries import gradients
from ringsim.check.causes import diagnose
from ringsim.check.chunks import ring_all_reduce
from ringsim.check.cuts import partition
from ringsim.check.exchanges import no_deadlock
from ringsim.check.fewest import fewest_microbatches
from ringsim.check.fits import alphabeta
from ringsim.check.handing_over import hand_over
from ringsim.check.orders import fast_schedule, schedule
from ringsim.check.pairs import pair_groups
from ringsim.check.result import CheckResult
from ringsim.check.rounds import ring
from ringsim.check.settings import inner_iterations
from ringsim.check.shares import hello
from ringsim.check.timed import timed_op
from ringsim.check.tokens import token_ring

__all__ = [
    "CheckResult",
    "alphabeta",
    "diagnose",
    "fast_schedule",
    "fewest_microbatches",
    "gradients",
    "hand_over",
    "hello",
    "inner_iterations",
    "no_deadlock",
    "pair_groups",
    "partition",
    "ring",
    "ring_all_reduce",
    "schedule",
    "timed_op",
    "token_ring",
]
