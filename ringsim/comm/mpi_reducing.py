"""The collectives that reduce, on MPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.distributed import ReduceOp

from ringsim.comm.mpi_buffers import (
    check_alike,
    check_count,
    check_tensor,
    check_tensors,
    for_receiving,
    for_sending,
    size_of,
)
from ringsim.comm.mpi_group import MpiGroup
from ringsim.comm.mpi_handle import MpiHandle
from ringsim.comm.mpi_operations import MpiOperations, Started
from ringsim.comm.mpi_reductions import Reduction, plan_reduction
from ringsim.errors import ArgumentError

_SUM: Final = ReduceOp.SUM


class MpiReducing(MpiOperations):
    """The collectives of ``torch.distributed`` that reduce; see there for the arguments, and ``MpiCollectives`` for who calls them."""

    def all_reduce(self, tensor: torch.Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False) -> MpiHandle | None:
        """Reduces everybody's tensor in place, with the result on all ranks."""
        found = self._enter("all_reduce", group)
        if found is None:
            return None
        values = check_tensor("tensor", tensor)
        return self._reduce_everywhere("all_reduce", found, [values], op, async_op)

    def all_reduce_coalesced(self, tensors: Any, op: Any = _SUM, group: Any = None, async_op: bool = False) -> MpiHandle | None:
        """Reduces several tensors of one dtype at once, in place, with the results on all ranks."""
        found = self._enter("all_reduce_coalesced", group)
        if found is None:
            return None
        values = check_tensors("tensors", tensors if isinstance(tensors, list | tuple) else [tensors])
        if not values:
            raise ArgumentError(f"tensors must be at least one, got an empty list ({self.here()}). Leave the call out on all ranks.")
        check_alike("tensors", values, values[0], same_shape=False)
        return self._reduce_everywhere("all_reduce_coalesced", found, values, op, async_op)

    def _reduce_everywhere(self, name: str, group: MpiGroup, tensors: list[torch.Tensor], op: Any, async_op: bool) -> MpiHandle | None:
        reduction = plan_reduction(tensors[0].dtype, op)
        if len(tensors) == 1:
            stage, bring = for_receiving(_real(tensors[0]))
            if bring is not None:
                stage.copy_(_real(tensors[0]))
        else:
            stage = torch.cat([for_sending(_real(tensor)).reshape(-1) for tensor in tensors])

            def bring() -> None:
                for tensor, piece in zip(tensors, stage.split([_real(tensor).numel() for tensor in tensors]), strict=True):
                    _real(tensor).copy_(piece.view_as(_real(tensor)))

        def start() -> Started:
            in_mpi = self._numbers(reduction, stage)
            if in_mpi is None:
                everything = torch.empty((group.size(), *stage.shape), dtype=stage.dtype)
                request = group.comm.Iallgather(self._bytes(stage), self._bytes(everything, group.size()))
                return Started(request, (stage, everything), _then(lambda: stage.copy_(reduction.reduce_in_order(everything)), bring))
            request = group.comm.Iallreduce(self._working().mpi.IN_PLACE, in_mpi, self._op(reduction))
            return Started(request, stage, _then(lambda: reduction.finish(stage, group.size()), bring))

        return self._collect(name, group, start, tensors, async_op)

    def reduce(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        op: Any = _SUM,
        group: Any = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> MpiHandle | None:
        """Reduces everybody's tensor into the root's; those of other ranks stay as they are."""
        found = self._enter("reduce", group)
        if found is None:
            return None
        values, root = check_tensor("tensor", tensor), found.place_of("dst", dst, group_dst)
        reduction, is_root = plan_reduction(values.dtype, op), found.rank() == root
        mine = for_sending(_real(values))
        total = torch.empty_like(mine) if is_root else mine

        def finish() -> None:
            reduction.finish(total, found.size())
            _real(values).copy_(total)

        def start() -> Started:
            in_mpi = self._numbers(reduction, mine)
            if in_mpi is None:
                everything = torch.empty((found.size() if is_root else 0, *mine.shape), dtype=mine.dtype)
                receive = self._bytes(everything, found.size()) if is_root else None
                request = found.comm.Igather(self._bytes(mine), receive, root)
                reduce = (lambda: _real(values).copy_(reduction.reduce_in_order(everything))) if is_root else None
                return Started(request, (mine, everything), reduce and _then(reduce, None))
            receive = self._numbers(reduction, total) if is_root else None
            request = found.comm.Ireduce(in_mpi, receive, self._op(reduction), root)
            return Started(request, (mine, total), finish if is_root else None)

        return self._collect("reduce", found, start, [values], async_op, root=root)

    def reduce_scatter(
        self, output: torch.Tensor, input_list: Any, op: Any = _SUM, group: Any = None, async_op: bool = False
    ) -> MpiHandle | None:
        """Reduces everybody's list of tensors, and gives each rank the one of its place. The tensors may differ in size."""
        found = self._enter("reduce_scatter", group)
        if found is None:
            return None
        result, inputs = check_tensor("output", output), check_tensors("input_list", input_list)
        check_count("input_list", inputs, found.size())
        check_alike("input_list", inputs, result, same_shape=False)
        if inputs[found.rank()].numel() != result.numel():
            raise ArgumentError(
                f"output must be as large as input_list[{found.rank()}], {inputs[found.rank()].numel()} elements, got {result.numel()} "
                f"({self.here()}). Make it so."
            )
        counts = [_real(each).numel() for each in inputs]
        flat = torch.cat([for_sending(_real(each)).reshape(-1) for each in inputs])
        return self._reduce_and_scatter("reduce_scatter", found, result, flat, counts, inputs, op, async_op)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        op: Any = _SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> MpiHandle | None:
        """Reduces everybody's tensor, and gives each rank its part of it."""
        found = self._enter("reduce_scatter_tensor", group)
        if found is None:
            return None
        result, values = check_tensor("output", output), check_tensor("input", input)
        check_alike("output", [result], values, same_shape=False)
        self._check_parts("input", values, "output", result, found)
        counts = [_real(result).numel()] * found.size()
        flat = for_sending(_real(values)).reshape(-1)
        return self._reduce_and_scatter("reduce_scatter_tensor", found, result, flat, counts, [values], op, async_op)

    _reduce_scatter_base = reduce_scatter_single = reduce_scatter_tensor

    def _reduce_and_scatter(
        self,
        name: str,
        group: MpiGroup,
        output: torch.Tensor,
        flat: torch.Tensor,
        counts: list[int],
        inputs: list[torch.Tensor],
        op: Any,
        async_op: bool,
    ) -> MpiHandle | None:
        """Reduces ``flat``, shape (sum of counts), and brings the part of ``counts`` that is this rank's into ``output``."""
        reduction, mine = plan_reduction(output.dtype, op), counts[group.rank()]
        part = torch.empty(mine, dtype=flat.dtype)

        def bring() -> None:
            _real(output).copy_(part.view_as(_real(output)))

        def start() -> Started:
            in_mpi = self._numbers(reduction, flat)
            if in_mpi is None:
                size = flat.element_size()
                everything = torch.empty((group.size(), mine), dtype=flat.dtype)
                offsets = [sum(counts[:place]) * size for place in range(group.size())]
                send = [self._memory(flat), ([count * size for count in counts], offsets), self._working().mpi.BYTE]
                request = group.comm.Ialltoallv(send, self._bytes(everything, group.size()))
                return Started(
                    request, (flat, everything), _then(lambda: part.copy_(reduction.reduce_in_order(everything)), bring), [output]
                )
            request = group.comm.Ireduce_scatter(in_mpi, self._numbers(reduction, part), counts, self._op(reduction))
            return Started(request, (flat, part, counts), _then(lambda: reduction.finish(part, group.size()), bring), [output])

        return self._collect(name, group, start, inputs, async_op)

    # -- what the collectives share

    def _memory(self, tensor: torch.Tensor) -> Any:
        return self._working().mpi.buffer.fromaddress(tensor.data_ptr(), size_of(tensor))

    def _bytes(self, tensor: torch.Tensor, parts: int = 1) -> list[Any]:
        """Returns a plain tensor as MPI takes it; with ``parts`` as so many equal pieces, one for each rank."""
        return [self._memory(tensor), size_of(tensor) // parts, self._working().mpi.BYTE]

    def _numbers(self, reduction: Reduction, tensor: torch.Tensor) -> list[Any] | None:
        """Returns a plain tensor as MPI takes it to reduce it, None where it cannot."""
        if reduction.type_name is None:
            return None
        return [self._memory(tensor), tensor.numel(), getattr(self._working().mpi, reduction.type_name)]

    def _op(self, reduction: Reduction) -> Any:
        return getattr(self._working().mpi, reduction.name)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a complex tensor as pairs of real numbers, which is how it is summed; any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _then(first: Callable[[], Any], second: Callable[[], None] | None) -> Callable[[], None]:
    def both() -> None:
        first()
        if second is not None:
            second()

    return both
