"""Checks for the exercises of the lessons: does the answer hold, and if not, why.

A check runs a student's function on fresh ranks, with random sizes and data, and looks at what was
recorded and returned; ``diagnose`` compares what somebody reads from a trace. A check never raises
for a wrong answer, and always returns: an answer that computes for ever has failed, one that sleeps
for long, or gets no processor, is *undecided*. None fails because the machine is busy::

    check.hello(sum_share)             notebooks/00_four_processes: each rank adds up its share
    check.pair_groups(pair_groups)     notebooks/01_ring: which pairs of ranks make a ring
    check.ring(pass_round)             notebooks/01_ring: numbers passed round on the pair groups
    check.no_deadlock(exchange)        notebooks/02_send_recv_deadlock: all send and receive, and
                                       nobody waits forever
    check.alphabeta(fit)               notebooks/03_bandwidth: alpha and beta from the times of
                                       messages
    check.partition(partition)         notebooks/04_stages: which layers each stage gets
    check.hand_over(hand_over)         notebooks/04_stages: a tensor of any shape to the next stage,
                                       in two messages
    check.gradients(step)              notebooks/05_gradients: a step over stages, with the
                                       gradients of one process
    check.schedule(order)              notebooks/06_schedules: 1F1B, one list of actions a rank
    check.fast_schedule(order)         notebooks/06_schedules: an order that fills the bubble,
                                       within a limit of memory
    check.token_ring(exchange)         notebooks/07_generation_ring: messages of a generation ring,
                                       in an order that never jams
    check.inner_iterations(choose)     notebooks/07_generation_ring: how many batches on their way
                                       make stages busy
    check.timed_op(timed_op)           notebooks/08_communication_layer: a decorator that times and
                                       changes nothing
    check.ring_all_reduce(all_reduce)  notebooks/08_communication_layer: an all-reduce in chunks, by
                                       the bytes that it sends
    check.fewest_microbatches(choose)  notebooks/10_prediction: as few microbatches as a limit on
                                       the bubble allows
    check.slow_link(slowest_link)      notebooks/11_slow_link: which two hosts have a slow link
                                       between them
    check.average_gradients(average)   notebooks/12_data_parallel: the mean over the replicas of a
                                       stage, in one bucket
    check.prediction(said, found)      all of them: what was predicted, beside what was found
    check.diagnose(trace, kind, ...)   notebooks/09_diagnose: what is wrong in a trace, with whom,
                                       and what shows it
    check.patient(name)                notebooks/09_diagnose: no check, but a trace to diagnose,
                                       another for each name

``examination`` has what all checks share; each other file belongs to one lesson.

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

from ringsim.check.backward import gradients
from ringsim.check.causes import diagnose
from ringsim.check.communication import ring_all_reduce, timed_op
from ringsim.check.examination import CheckResult
from ringsim.check.fits import alphabeta
from ringsim.check.four_processes import hello
from ringsim.check.generation import inner_iterations, token_ring
from ringsim.check.hosts import slow_link
from ringsim.check.patients import patient
from ringsim.check.predictions import prediction
from ringsim.check.replicas import average_gradients
from ringsim.check.rings import pair_groups, ring
from ringsim.check.schedules import fast_schedule, fewest_microbatches, schedule
from ringsim.check.send_recv import no_deadlock
from ringsim.check.stages import hand_over, partition

__all__ = [
    "CheckResult",
    "alphabeta",
    "average_gradients",
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
    "patient",
    "prediction",
    "ring",
    "ring_all_reduce",
    "schedule",
    "slow_link",
    "timed_op",
    "token_ring",
]
