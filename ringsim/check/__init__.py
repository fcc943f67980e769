"""Checks for the lessons' exercises: they judge an answer and explain any mistake.

A check runs a student's function on new ranks, with random sizes and data, and judges the trace and
the results; ``diagnose`` judges your diagnosis of a trace. A check always returns, and never raises
an error for a wrong answer. An answer that computes forever fails. An answer that sleeps for long,
or does not get enough CPU time, is *undecided*. A busy machine never makes an answer fail::

    check.hello(sum_share)             notebooks/00_four_processes: add up a share on each rank
    check.pair_groups(pair_groups)     notebooks/01_ring: list the pairs of ranks in a ring
    check.ring(pass_round)             notebooks/01_ring: pass numbers around on the pair groups
    check.no_deadlock(exchange)        notebooks/02_send_recv_deadlock: send and receive on all
                                       ranks without a deadlock
    check.every_order(add_up, order=...)  notebooks/02_send_recv_deadlock: choose an order that
                                       deadlocks, and repair the program for every order
    check.alphabeta(fit)               notebooks/03_bandwidth: fit alpha and beta to message times
    check.partition(partition)         notebooks/04_stages: divide layers among stages
    check.hand_over(hand_over)         notebooks/04_stages: send a tensor of any shape to the next
                                       stage, in two messages
    check.gradients(step)              notebooks/05_gradients: run a training step across stages,
                                       with the same gradients as one process
    check.schedule(order)              notebooks/06_schedules: write 1F1B, as a list of actions per
                                       rank
    check.fast_schedule(order)         notebooks/06_schedules: write an order that fills the bubble,
                                       within a memory limit
    check.token_ring(exchange)         notebooks/07_generation_ring: exchange the messages of a
                                       generation ring without a deadlock
    check.inner_iterations(choose)     notebooks/07_generation_ring: choose the number of batches
                                       that keeps stages busy
    check.timed_op(timed_op)           notebooks/08_communication_layer: write a decorator that
                                       measures time and changes nothing else
    check.ring_all_reduce(all_reduce)  notebooks/08_communication_layer: write an all-reduce in
                                       chunks, judged by the bytes that it sends
    check.fewest_microbatches(choose)  notebooks/10_prediction: choose the fewest microbatches
                                       within a limit for the bubble
    check.slow_link(slowest_link)      notebooks/11_slow_link: find the two hosts with a slow link
                                       between them
    check.average_gradients(average)   notebooks/12_data_parallel: average the gradients of the
                                       replicas of a stage, in one bucket
    check.ring_attention(exchange)     notebooks/13_ring_attention: pass blocks of keys and values
                                       around a ring while each rank attends
    check.bucket_hooks(overlap)        notebooks/14_sharding: average gradients in buckets, during
                                       the backward pass
    check.sharded_step(step)           notebooks/14_sharding: update only a shard of the parameters
    check.sharded_linear(apply)        notebooks/14_sharding: gather a layer's weight, and free it
                                       in time
    check.tensor_parallel(mlp)         notebooks/15_tensors_in_parallel: run a layer whose matrices
                                       are cut among ranks, with the right gradients
    check.mesh_order(choose_order)     notebooks/16_which_parallelism: order the dimensions of a
                                       mesh, so that few bytes cross between hosts
    check.prediction(said, found)      all lessons: compare a prediction with the result
    check.diagnose(trace, kind, ...)   notebooks/09_diagnose: name the fault in a trace, its ranks,
                                       and an event that shows it
    check.patient(name)                notebooks/09_diagnose: not a check, but a trace to diagnose,
                                       a different one for each name

All checks share the module ``examination``; every other module belongs to one lesson.

Example:
    >>> from ringsim import check
    >>> def pair_groups(N):
    ...     return [(0, 1), (1, 2), (2, 3), (3, 0)]
    >>> result = check.pair_groups(pair_groups, seed=1)
    >>> result.passed, result.world_size
    (False, 1)
    >>> print(result.reason)
    A ring of 1 rank has no pairs, but your answer has 4: (0, 1), (1, 2), (2, 3), (3, 0).
"""

from ringsim.check.attention import ring_attention
from ringsim.check.backward import gradients
from ringsim.check.causes import diagnose
from ringsim.check.communication import ring_all_reduce, timed_op
from ringsim.check.examination import CheckResult
from ringsim.check.fits import alphabeta
from ringsim.check.four_processes import hello
from ringsim.check.generation import inner_iterations, token_ring
from ringsim.check.hosts import slow_link
from ringsim.check.layouts import mesh_order
from ringsim.check.patients import patient
from ringsim.check.predictions import prediction
from ringsim.check.replicas import average_gradients
from ringsim.check.rings import pair_groups, ring
from ringsim.check.schedules import fast_schedule, fewest_microbatches, schedule
from ringsim.check.send_recv import every_order, no_deadlock
from ringsim.check.sharding import bucket_hooks, sharded_linear, sharded_step
from ringsim.check.stages import hand_over, partition
from ringsim.check.tensors import tensor_parallel

__all__ = [
    "CheckResult",
    "alphabeta",
    "average_gradients",
    "bucket_hooks",
    "diagnose",
    "every_order",
    "fast_schedule",
    "fewest_microbatches",
    "gradients",
    "hand_over",
    "hello",
    "inner_iterations",
    "mesh_order",
    "no_deadlock",
    "pair_groups",
    "partition",
    "patient",
    "prediction",
    "ring",
    "ring_all_reduce",
    "ring_attention",
    "schedule",
    "sharded_linear",
    "sharded_step",
    "slow_link",
    "tensor_parallel",
    "timed_op",
    "token_ring",
]
