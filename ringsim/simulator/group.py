"""Defines a torch process group whose members are simulated ranks.

One object serves all members, and the result of ``rank()`` depends on the calling rank. A default
argument that a function bound at import (``group=group.WORLD``) therefore stays valid. The group
passes each operation to the rank that calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.distributed import Work

from ringsim.comm.ended_groups import check_group
from ringsim.comm.python_group import DEFAULT_TIMEOUT, PythonGroup
from ringsim.simulator.rank import SimulatedRank
from ringsim.simulator.work import Team


class SimulatedGroup(PythonGroup):
    """A process group of simulated ranks.

    Args:
        team: the members of the group.
        name: the group's name in torch.
        desc: the program's description of the group.
        make_group: a function that creates a group of some of the group's ranks; see ``new_group``.
    """

    def __init__(self, team: Team, name: str, desc: str, make_group: Callable[..., Any]) -> None:
        super().__init__(0, len(team.ranks), name, desc, backend_name="ringsim")
        self.team, self._make_group = team, make_group

    def __repr__(self) -> str:
        return f"SimulatedGroup({self._name!r}, ranks={list(self.team.ranks)})"

    def rank(self) -> int:
        """Returns the calling rank's position in the group, or -1 if the rank is not a member."""
        return self.team.rank()

    @property
    def options(self) -> Any:
        """The options of the backend, which consist of its timeout."""
        return SimpleNamespace(_timeout=self.team.limit or DEFAULT_TIMEOUT)

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of each operation."""
        self.team.limit = timeout

    def new_group(self, ranks: Sequence[int], **options: Any) -> Any:
        """Creates a process group from the given ranks; each of them calls this method."""
        return self._make_group(ranks, **options)

    def begin_message(self, sends: bool, place: int | None, tensors: Any, tag: int) -> Work:
        """Starts one of the calling rank's messages."""
        return self._me.begin_message(sends, self.team, place, tensors, tag)

    def begin_collective(
        self, name: str, arguments: Mapping[str, Any], carried: Sequence[Tensor] | None = None
    ) -> Work:
        """Starts the calling rank's part in a collective."""
        check_group(self)
        return self._me.begin_collective(name, self.team, arguments, carried)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Blocks until every rank of the group has called this method."""
        own = None if timeout == DEFAULT_TIMEOUT else timeout
        self._me.begin_monitored_barrier(self.team).wait(own)

    @property
    def _me(self) -> SimulatedRank:
        me: Any = self.team.clock.current
        return me  # type: ignore[no-any-return]
