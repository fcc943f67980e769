"""The ranks of a session: processes, or one process that simulates them.

Both kinds run one call after the other, in namespaces that stay. After a call that fails, hangs or
is interrupted, they get ready for the next one, and the error lists what was lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ringsim.errors import name_ranks
from ringsim.launch.alone import Alone, start_alone
from ringsim.launch.job import Job, RankKind
from ringsim.launch.protocol import STOP
from ringsim.launch.ranks import get_launcher
from ringsim.launch.run import Run, RunOptions
from ringsim.traces.cells import name_cells
from ringsim.traces.value import Trace

_READY_S = 30.0  # for ranks to get ready for the next call
_STOP_S = 0.5  # for a rank to stop its program


def list_lost(steps: Mapping[int, tuple[int, int]], world_size: int) -> str:
    """Returns the parts of the ranks' state that a failed call has lost, in words.

    Args:
        steps: the numbers of optimizer steps that began and ended in the call, for each rank that
            has kept its variables.
        world_size: the number of ranks.
    """
    dead = [rank for rank in range(world_size) if rank not in steps]
    lost = f"; {name_ranks(dead)} started again, without variables" if dead else ""
    if halves := [rank for rank, (begun, done) in steps.items() if begun != done]:
        lost += f"; an optimizer step is half done on {name_ranks(halves)}"
    if len({done for _, done in steps.values()}) > 1:
        numbers = ", ".join(f"{done} on rank {rank}" for rank, (_, done) in steps.items())
        lost += f"; the ranks made different numbers of optimizer steps ({numbers})"
    return lost


class RealRanks:
    """Ranks that are processes.

    Attributes:
        close: ends them.
        steps: what ``list_lost`` needs to know about the last call.
    """

    _epoch = 0  # how often the groups were made again

    def __init__(self, kind: RankKind) -> None:
        self._rank_set = get_launcher().get(kind)
        self.close = self._rank_set.close

    def run(self, job: Job, options: RunOptions) -> Trace:
        """Runs a call, and returns its trace. If it fails, gets ready for the next one."""
        if dead := self._rank_set.find_dead():
            self._renew(dead)
            warnings.warn(
                f"{name_ranks(dead)} of the session died between two calls and started again, "
                "without variables.",
                stacklevel=5,
            )
        directory = self._rank_set.begin_call()
        job = replace(job, directory=str(directory), epoch=self._epoch)
        run = _KeptRun(self._rank_set, job, options)
        has_groups = False
        try:
            trace = run.finish()
            has_groups = all(one.left and one.left[0] for one in run.ranks)
            return trace
        except BaseException:
            run.stop_ranks()
            raise
        finally:
            self.steps = {one.rank: one.left[1] for one in run.ranks if one.left}
            if not has_groups:
                self._renew(range(run.size) - self.steps.keys())
            shutil.rmtree(directory, ignore_errors=True)

    def _renew(self, dead: Collection[int]) -> None:
        """Replaces the dead ranks; in the next call, all ranks make their groups again."""
        self._epoch += 1
        (self._rank_set.home / "port").unlink(missing_ok=True)
        for rank in dead:
            self._rank_set.replace(rank)


class _KeptRun(Run):
    """A call of a session: its end is not the end of the ranks."""

    def stop_ranks(self) -> None:
        """Stops the program on ranks that still run it; a rank that does not stop is killed."""
        for one in self.ranks:
            if one.left is None:
                one.tell(STOP)
        self.wait_until_idle(_STOP_S)
        for one in self.ranks:
            if one.left is None and one.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)

    def dismiss(self) -> None:
        """Waits until every rank is ready for the next call."""
        self.wait_until_idle(_READY_S)


class SimulatedRanks:
    """Ranks on a virtual clock, which share one process.

    Args:
        settings: the number of ranks, the link and the seed.
    """

    def __init__(self, *settings: Any) -> None:
        self._settings, self._process = settings, start_alone()

    def close(self) -> None:
        """Ends the process."""
        self._process.close()

    def run(self, job: Job, options: RunOptions) -> Trace:
        """See ``RealRanks``."""
        self.steps: dict[int, tuple[int, int]] = {}
        call = *self._settings, job, name_cells(job.lines), options.show_hidden
        try:
            outcome: Any = Alone(
                self._process, "ringsim.simulator.kept:serve", call, options.limit_s
            ).finish()
            self.steps = outcome.more
        finally:
            if not self.steps:  # the process runs on in the call, or is dead
                self.close()
                self._process = start_alone()
        trace: Trace = outcome.end()
        return trace
