"""Simulated ranks that stay, and run one call of a session after the other.

Between two calls, each rank rests on its own stack, and no time passes on the virtual clock::

    ringsim.launch.kept              the process of the simulation
    -------------------              -----------------------------
    call, packed          -------->  each rank: loads the call into its namespace, runs it, rests
    trace or error        <--------  all ranks rest, or can never continue: these are unwound
                                     after an error: makes the groups again

A rank that can be neither run to its end nor unwound is replaced by a new rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ringsim.comm.ended_groups import end_objects, note_ended
from ringsim.comm.torch_hooks import make_get_group_rank, put
from ringsim.launch.job import Job, show_lines
from ringsim.launch.namespace import Namespace
from ringsim.launch.process import Process
from ringsim.launch.rank import load_job
from ringsim.launch.system import name_process
from ringsim.simulator.rank import SimulatedRank
from ringsim.simulator.settings import Settings
from ringsim.simulator.simulation import Outcome, Simulation, begin
from ringsim.state import change_state


class _KeptSimulation(Simulation):
    """A simulation whose ranks run one call after the other.

    ``more`` of an outcome holds the numbers of optimizer steps that began and ended in the call,
    for each rank that has kept its variables.

    Args:
        world_size, link, seed: as in ``ringsim.simulate``.
    """

    def __init__(self, world_size: int, link: Any, seed: int) -> None:
        settings = Settings(world_size, link, None, "rendezvous", None, seed, (), True, "threads")
        super().__init__(b"", settings, {})
        self._prepare_process()
        put({(distributed_c10d, "get_group_rank"): make_get_group_rank()})
        register_optimizer_step_pre_hook(lambda *_: self._count_step(ended=False))
        register_optimizer_step_post_hook(lambda *_: self._count_step(ended=True))
        self._job: Job
        self._shows_hidden = False
        self._spaces: dict[SimulatedRank, Namespace] = {}
        self._joined: set[SimulatedRank] = set()  # the ranks that belong to the present groups
        self._steps: Counter[tuple[int, bool]] = Counter()  # of optimizers: rank, whether ended
        self._rested: dict[int, tuple[int, int]] = {}  # these numbers, of ranks at rest

    def _count_step(self, *, ended: bool) -> None:
        self._steps[self._clock.current.number, ended] += 1

    def call(self, job: Job, cells: Mapping[str, str], shows_hidden: bool) -> Outcome:
        """Runs a call on the ranks in ``job.only``."""
        name_process("ringsim-clock")
        self._job, self._shows_hidden = job, shows_hidden
        show_lines(job.lines)
        for each in self._steps, self._rested, self._outputs:
            each.clear()
        for team in self._worlds.teams:
            if team.meetings:
                team.meetings.algorithms.clear()
        self._begin(b"", cells)
        self._clock.begin_again()
        outcome = self._run()
        for rank in self._ranks:
            if rank.number not in self._rested:
                rank.ended = True
                self._spaces.pop(rank, None)
                self._ranks[rank.number] = self._make_rank(rank.number)
        if outcome.error is not None or len(self._joined) < self._size:
            end_objects()
            self._worlds.begin_again()
            self._joined.clear()
        name_process("ringsim-idle")
        return replace(outcome, more={**self._rested})

    def _live(self, rank: SimulatedRank) -> None:
        while True:
            super()._live(rank)
            if not dist.is_initialized():
                self._joined.discard(rank)
            rank.begin_again()
            number = rank.number
            self._rested[number] = self._steps[number, False], self._steps[number, True]
            self._clock.rest()

    def _load(self, rank: SimulatedRank) -> Callable[[], Any]:
        if rank not in self._spaces:
            self._spaces[rank] = Namespace()
            self._enter(rank)
        elif rank not in self._joined:
            note_ended()
            self._worlds.join(rank)
            change_state(ring=self._make_ring(rank.number))
        self._joined.add(rank)
        outputs = self._outputs
        change_state(hidden_output=outputs.write if self._shows_hidden else outputs.hide)
        return load_job(self._job, rank.number, self._spaces[rank])


def serve(process: Process, world_size: int, link: Any, seed: int, *call: Any) -> Any:
    """Runs a call of a session in its process.

    Args:
        process: this process.
        world_size: the number of ranks.
        link: the link, as in ``ringsim.simulate``.
        seed: the seed of all ranks.
        call: the call, the names of notebook cells, and whether to show output that print
            suppression hides.
    """
    process.kept = process.kept or begin(_KeptSimulation, process, world_size, link, seed)
    return process.kept.call(*call)
