"""A torch process group whose operations are written in Python.

Torch calls the group's methods from Python and from C++ (DistributedDataParallel's reducer,
functional collectives). Each method converts the arguments of the ``ProcessGroup`` method to those
of the ``torch.distributed`` function, and passes them on. Messages go to ``begin_message``, and
collectives to ``begin_collective``. The groups on the virtual clock and on MPI are such groups.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from ringsim.comm.torch_private import is_registered

DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's


# Torch's types give each method several signatures. These methods accept the arguments of all.
# mypy: disable-error-code="override, assignment"


class PythonGroup(ProcessGroup):
    """A process group written in Python, which converts torch's arguments.

    Args:
        rank: this process's place in the group.
        size: the number of ranks in the group.
        name: torch's name for the group; torch sets it later if it is empty.
        desc: the program's description of the group; torch sets it later if it is empty.
        backend_name: the name of the backend.
        timeout: the time limit for each operation.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        name: str = "",
        desc: str = "",
        *,
        backend_name: str = "python",
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size, self._name, self._desc = rank, size, name, desc
        self._backend_name = backend_name
        self.timeout = timeout

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r}, {self.size()} ranks)"

    # -- methods of subclasses

    @abstractmethod
    def begin_message(self, sends: bool, place: int | None, tensors: Any, tag: int) -> Work:
        """Begins a send or a recv; does not block.

        Args:
            sends: whether the operation is a send.
            place: the other side's rank in the group, or None for any source.
            tensors: a list with one tensor.
            tag: the tag of the message.
        """

    @abstractmethod
    def begin_collective(
        self, name: str, arguments: Mapping[str, Any], carried: Sequence[Tensor] | None = None
    ) -> Work:
        """Begins a collective; does not block.

        Args:
            name: the name of the function of ``torch.distributed``.
            arguments: the arguments of the function, by name, with roots as ``group_src`` and
                ``group_dst``.
            carried: the tensors whose size is recorded, if the function's own tensors are parts of
                them.
        """

    @abstractmethod
    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Blocks until every rank in the group has called this method."""

    # -- torch's queries

    def rank(self) -> int:
        """Returns the calling rank's place in the group, or -1 outside it."""
        return self._rank

    def size(self) -> int:
        """Returns the number of ranks in the group."""
        return self._size

    # the names used by C++

    def getRank(self) -> int:  # noqa: N802
        """Returns the same value as ``rank``."""
        return self.rank()

    def getSize(self) -> int:  # noqa: N802
        """Returns the same value as ``size``."""
        return self.size()

    def name(self) -> str:
        """Returns the name of the backend."""
        return self._backend_name

    getBackendName = _get_backend_name = name  # noqa: N815

    @property
    def group_name(self) -> str:
        """Torch's name for the group."""
        return self._name

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        """The program's description of the group."""
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def _get_backend(self, device: torch.device) -> PythonGroup:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        # from 2.15, torch's flight recorder inspects a new group if it has device types
        return [torch.device("cpu")] if is_registered(self) else []

    @property
    def options(self) -> Any:
        """The options of the backend, with its timeout."""
        return SimpleNamespace(_timeout=self.timeout)

    bound_device_id = None
    supports_splitting = supports_coalescing = supports_time_estimate = False

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit for each operation."""
        self.timeout = timeout

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def _has_hooks(self) -> bool:
        return False

    def shutdown(self) -> None:
        """Ends the group for the calling rank, but not for the others."""

    def abort(self) -> None:
        """Ends the group immediately."""
        self.shutdown()

    # -- messages

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        """Starts sending a tensor to a rank in the group."""
        return self.begin_message(True, dst, tensors, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        """Begins to receive a tensor from a rank of the group."""
        return self.begin_message(False, src, tensors, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Begins to receive a tensor from any rank of the group."""
        return self.begin_message(False, None, tensors, tag)

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
        return self._begin("reduce", tensor=_one(tensors), group_dst=_root(opts), op=_op(opts))

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
        """Begins ``all_gather_coalesced``, with one output tensor per input tensor."""
        pairs = zip(outputs, inputs, strict=True)
        pieces = [output.view(self.size(), *given.shape).unbind() for output, given in pairs]
        rows = [list(row) for row in zip(*pieces, strict=True)]
        arguments = {"output_tensor_lists": rows, "input_tensor_list": inputs}
        return self.begin_collective("all_gather_coalesced", arguments, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Begins ``gather``."""
        taken, root = outputs[0] if outputs else None, _root(opts)
        return self._begin("gather", tensor=_one(inputs), gather_list=taken, group_dst=root)

    def gather_single(
        self, output: Tensor, given: Tensor, opts: Any = None, timeout: Any = None
    ) -> Work:
        """Begins ``gather_single``; torch 2.15 and later call it."""
        root = _root(opts)
        taken = output if self.rank() == root else None
        return self._begin("gather_single", tensor=given, gather_tensor=taken, group_dst=root)

    gather_into_tensor = gather_single

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Begins ``scatter``."""
        given, root = inputs[0] if inputs else None, _root(opts)
        return self._begin("scatter", tensor=_one(outputs), scatter_list=given, group_src=root)

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
        """Begins ``reduce_scatter_tensor`` for each pair of tensors; the last call ends last."""
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

    def _begin(self, name: str, **arguments: Any) -> Work:
        return self.begin_collective(name, arguments)


def _one(tensors: Any) -> Any:
    """Returns the only tensor in a list; torch's convenience methods pass the tensor itself."""
    return tensors if isinstance(tensors, Tensor) else tensors[0]


def _root(opts: Any) -> int:
    """Returns the root as a group rank, from torch's options or from a number."""
    return int(getattr(opts, "rootRank", opts or 0))


def _op(opts: Any) -> Any:
    """Returns the reduction from torch's options, or the given reduction itself."""
    if opts is None:
        return torch.distributed.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)
