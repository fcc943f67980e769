"""A process group of torch whose members are simulated ranks.

torch calls its methods, from Python and from C++ (DistributedDataParallel's reducer, functional
collectives). One object serves all members, and ``rank()`` depends on which rank asks: so a default
that a function bound when it was imported (``group=group.WORLD``) stays right.

Each method turns the arguments of the method of ``ProcessGroup`` into those of the function of
``torch.distributed``, and hands them to the rank that calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from ringsim.simulator.matching import Team
from ringsim.simulator.rank import SimulatedRank

__all__ = ["SimulatedGroup"]

_DEFAULT_TIMEOUT = timedelta(minutes=30)


class SimulatedGroup(ProcessGroup):
    """A process group of simulated ranks.

    Args:
        team: its members.
        name: the name that torch knows it by.
        desc: the description that the program gave it.
        make_group: makes a group of some of its ranks; see ``new_group``.
    """

    def __init__(self, team: Team, name: str, desc: str, make_group: Callable[..., Any]) -> None:
        super().__init__(0, len(team.ranks))  # type: ignore[call-arg]
        self.team = team
        self._name, self._desc, self._make_group = name, desc, make_group

    def __repr__(self) -> str:
        return f"SimulatedGroup({self._name!r}, ranks={list(self.team.ranks)})"

    # -- the questions of torch

    def rank(self) -> int:
        """Returns the calling rank's place in the group, -1 outside."""
        return self.team.rank()

    def size(self) -> int:
        """Returns how many ranks are in the group."""
        return len(self.team.ranks)

    getRank, getSize = rank, size  # noqa: N815 - as C++ calls them

    def name(self) -> str:
        """Returns the name of the backend, as C++ asks for it: not one of those that it knows."""
        return "ringsim"

    getBackendName = _get_backend_name = name  # noqa: N815

    @property
    def group_name(self) -> str:
        """The name that torch knows the group by."""
        return self._name

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        """The description that the program gave the group."""
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def _get_backend(self, device: torch.device) -> SimulatedGroup:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property
    def options(self) -> Any:
        """The options of a backend: its time-out."""
        return SimpleNamespace(_timeout=self.team.limit or _DEFAULT_TIMEOUT)

    bound_device_id = None
    supports_splitting = supports_coalescing = supports_time_estimate = False

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the limit of each operation."""
        self.team.limit = timeout

    _set_default_timeout = set_timeout

    def _has_hooks(self) -> bool:
        return False

    def shutdown(self) -> None:
        """Ends the group for the calling rank; the others go on."""

    abort = shutdown

    def new_group(self, ranks: Sequence[int], **options: Any) -> Any:
        """Creates a group of some ranks; ``dist.new_group`` calls it on all of them."""
        return self._make_group(ranks, **options)

    # -- messages

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        """Begins to send a tensor to a rank of the group."""
        return self._me.begin_message(True, self.team, dst, tensors, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        """Begins to receive a tensor from a rank of the group."""
        return self._me.begin_message(False, self.team, src, tensors, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Begins to receive a tensor from any rank of the group."""
        return self._me.begin_message(False, self.team, None, tensors, tag)

    # -- collectives

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Begins ``broadcast``."""
        return self._begin("broadcast", tensor=_one(tensors), group_src=_root(opts))

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Begins ``all_reduce``."""
        return self._begin("all_reduce", tensor=_one(tensors), op=_op(opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Begins ``all_reduce_coalesced``."""
        return self._begin("all_reduce_coalesced", tensors=tensors, op=_op(opts))

    def reduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Begins ``reduce``."""
        tensor, root = _one(tensors), _root(opts)
        return self._begin("reduce", tensor=tensor, group_dst=root, op=_op(opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Begins ``all_gather``."""
        return self._begin("all_gather", tensor_list=outputs[0], tensor=_one(inputs))

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Begins ``all_gather_coalesced``."""
        return self._begin(
            "all_gather_coalesced", output_tensor_lists=outputs, input_tensor_list=inputs
        )

    def all_gather_single(
        self, output: Tensor, given: Tensor, opts: Any = None, timeout: Any = None
    ) -> Work:
        """Begins ``all_gather_into_tensor``."""
        return self._begin("all_gather_into_tensor", output_tensor=output, input_tensor=given)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Begins ``all_gather_coalesced``, into one tensor for each that is given."""
        pairs = zip(outputs, inputs, strict=True)
        pieces = [output.view(self.size(), *given.shape).unbind() for output, given in pairs]
        rows = [list(row) for row in zip(*pieces, strict=True)]
        arguments = {"output_tensor_lists": rows, "input_tensor_list": inputs}
        return self._me.begin_collective("all_gather_coalesced", self.team, arguments, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Begins ``gather``."""
        taken = outputs[0] if outputs else None
        tensor, root = _one(inputs), _root(opts)
        return self._begin("gather", tensor=tensor, gather_list=taken, group_dst=root)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Begins ``scatter``."""
        given = inputs[0] if inputs else None
        tensor, root = _one(outputs), _root(opts)
        return self._begin("scatter", tensor=tensor, scatter_list=given, group_src=root)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> Work:
        """Begins ``reduce_scatter``."""
        output, op = _one(outputs), _op(opts)
        return self._begin("reduce_scatter", output=output, input_list=inputs[0], op=op)

    def reduce_scatter_single(
        self, output: Tensor, given: Tensor, opts: Any = None, timeout: Any = None
    ) -> Work:
        """Begins ``reduce_scatter_tensor``."""
        return self._begin("reduce_scatter_tensor", output=output, input=given, op=_op(opts))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Begins ``reduce_scatter_tensor`` for each pair of tensors; the last one is done last."""
        pairs = zip(outputs, inputs, strict=True)
        return [self.reduce_scatter_single(output, given, opts) for output, given in pairs][-1]

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_sizes: Any = None,
        input_sizes: Any = None,
        opts: Any = None,
        timeout: Any = None,
    ) -> Work:
        """Begins ``all_to_all_single``."""
        return self._begin(
            "all_to_all_single",
            output=output,
            input=given,
            output_split_sizes=output_sizes,
            input_split_sizes=input_sizes,
        )

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Begins ``all_to_all``."""
        return self._begin("all_to_all", output_tensor_list=outputs, input_tensor_list=inputs)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        """Begins ``barrier``."""
        return self._begin("barrier")

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Blocks until every rank of the group has come here."""
        own = None if timeout == _DEFAULT_TIMEOUT else timeout
        self._me.begin_monitored_barrier(self.team).wait(own)

    # -- the calling rank

    @property
    def _me(self) -> SimulatedRank:
        me: Any = self.team.clock.current
        return me  # type: ignore[no-any-return]

    def _begin(self, name: str, **arguments: Any) -> Work:
        return self._me.begin_collective(name, self.team, arguments)


def _one(tensors: Any) -> Any:
    """Returns the tensor of a list of one; the convenience methods of torch take it as it is."""
    return tensors if isinstance(tensors, Tensor) else tensors[0]


def _root(opts: Any) -> int:
    """Returns the root, a rank of the group, from torch's options or from a number."""
    return int(getattr(opts, "rootRank", opts or 0))


def _op(opts: Any) -> Any:
    """Returns the reduction from torch's options, or from what was given in their place."""
    if opts is None:
        return torch.distributed.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)
