"""Collectives on MPI.

Each is one nonblocking operation of MPI, and what must be done with its result. Data that is only moved travels as bytes, whatever its
dtype; what is reduced is reduced by MPI, or, where MPI has not the type, gathered and reduced in torch in the order of the ranks.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.distributed import ReduceOp

from ringsim.comm.mpi_buffers import (
    check_alike,
    check_count,
    check_tensor,
    check_tensors,
    flatten,
    for_receiving,
    for_sending,
    size_of,
    unflatten,
)
from ringsim.comm.mpi_group import MpiGroup
from ringsim.comm.mpi_handle import MpiHandle
from ringsim.comm.mpi_operations import Started
from ringsim.comm.mpi_reducing import MpiReducing
from ringsim.errors import ArgumentError

_SUM: Final = ReduceOp.SUM


class MpiCollectives(MpiReducing):
    """The collectives of ``torch.distributed``; see there for the arguments.

    Every rank of the group calls them, in the same order. They block until this rank's part is done; with ``async_op=True`` they return
    a handle. Outside the group they do nothing.
    """

    def broadcast(
        self, tensor: torch.Tensor, src: int | None = None, group: Any = None, async_op: bool = False, group_src: int | None = None
    ) -> MpiHandle | None:
        """Gives all ranks the root's tensor."""
        found = self._enter("broadcast", group)
        if found is None:
            return None
        values = check_tensor("tensor", tensor)
        root = found.place_of("src", src, group_src)
        is_root = found.rank() == root
        stage, bring = (for_sending(values), None) if is_root else for_receiving(values)

        def start() -> Started:
            return Started(found.comm.Ibcast(self._bytes(stage), root), stage, bring)

        return self._collect("broadcast", found, start, [values], async_op, root=root)

    def all_gather(self, tensor_list: Any, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> MpiHandle | None:
        """Fills each rank's list with everybody's tensor, by rank."""
        found = self._enter("all_gather", group)
        if found is None:
            return None
        values, outputs = check_tensor("tensor", tensor), check_tensors("tensor_list", tensor_list)
        check_count("tensor_list", outputs, found.size())
        check_alike("tensor_list", outputs, values)
        return self._gather_everywhere("all_gather", found, [values], [[output] for output in outputs], async_op)

    def all_gather_into_tensor(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> MpiHandle | None:
        """Fills each rank's output with everybody's input behind each other, by rank."""
        found = self._enter("all_gather_into_tensor", group)
        if found is None:
            return None
        values, output = check_tensor("input_tensor", input_tensor), check_tensor("output_tensor", output_tensor)
        check_alike("output_tensor", [output], values, same_shape=False)
        self._check_parts("output_tensor", output, "input_tensor", values, found)
        plain, (stage, bring) = for_sending(values), for_receiving(output)

        def start() -> Started:
            request = found.comm.Iallgather(self._bytes(plain), self._bytes(stage, found.size()))
            return Started(request, (plain, stage), bring)

        return self._collect("all_gather_into_tensor", found, start, [output], async_op)

    _all_gather_base = all_gather_single = all_gather_into_tensor

    def all_gather_coalesced(
        self, output_tensor_lists: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
    ) -> MpiHandle | None:
        """Fills the list of each rank with everybody's list of tensors."""
        found = self._enter("all_gather_coalesced", group)
        if found is None:
            return None
        inputs = check_tensors("input_tensor_list", input_tensor_list)
        check_count("output_tensor_lists", output_tensor_lists, found.size())
        outputs = [check_tensors(f"output_tensor_lists[{place}]", each) for place, each in enumerate(output_tensor_lists)]
        for place, each in enumerate(outputs):
            check_count(f"output_tensor_lists[{place}]", each, len(inputs))
            for output, values in zip(each, inputs, strict=True):
                check_alike(f"output_tensor_lists[{place}]", [output], values)
        return self._gather_everywhere("all_gather_coalesced", found, inputs, outputs, async_op)

    def _gather_everywhere(
        self, op: str, group: MpiGroup, inputs: list[torch.Tensor], outputs: list[list[torch.Tensor]], async_op: bool
    ) -> MpiHandle | None:
        mine, everything = flatten(inputs), [output for each in outputs for output in each]
        flat = torch.empty(len(mine) * group.size(), dtype=torch.uint8)

        def start() -> Started:
            request = group.comm.Iallgather(self._bytes(mine), self._bytes(flat, group.size()))
            return Started(request, (mine, flat), lambda: unflatten(flat, everything))

        return self._collect(op, group, start, everything, async_op)

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: Any = None,
        dst: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> MpiHandle | None:
        """Fills the root's list with everybody's tensor, by rank. The root is rank 0 where none is given."""
        found = self._enter("gather", group)
        if found is None:
            return None
        values, root = check_tensor("tensor", tensor), self._root(found, "dst", dst, group_dst)
        outputs = self._list_at_root("gather_list", gather_list, values, found, root)
        mine = for_sending(values)
        flat = torch.empty(size_of(mine) * len(outputs), dtype=torch.uint8)

        def start() -> Started:
            request = found.comm.Igather(self._bytes(mine), self._bytes(flat, found.size()) if outputs else None, root)
            return Started(request, (mine, flat), lambda: unflatten(flat, outputs), outputs)

        return self._collect("gather", found, start, [values], async_op, copies=found.size(), root=root)

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: Any = None,
        src: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> MpiHandle | None:
        """Gives each rank its tensor of the root's list. The root is rank 0 where none is given."""
        found = self._enter("scatter", group)
        if found is None:
            return None
        values, root = check_tensor("tensor", tensor), self._root(found, "src", src, group_src)
        inputs = self._list_at_root("scatter_list", scatter_list, values, found, root)
        flat, (stage, bring) = flatten(inputs), for_receiving(values)

        def start() -> Started:
            request = found.comm.Iscatter(self._bytes(flat, found.size()) if inputs else None, self._bytes(stage), root)
            return Started(request, (flat, stage), bring)

        return self._collect("scatter", found, start, [values], async_op, copies=found.size(), root=root)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - torch's name
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> MpiHandle | None:
        """Sends a piece of the input, cut along its first dimension, to each rank, and joins what comes from each."""
        found = self._enter("all_to_all_single", group)
        if found is None:
            return None
        values, result = check_tensor("input", input), check_tensor("output", output)
        check_alike("output", [result], values, same_shape=False)
        sent = [rows * _row_size(values) for rows in self._cut("input", values, input_split_sizes, found)]
        received = [rows * _row_size(result) for rows in self._cut("output", result, output_split_sizes, found)]
        plain, (stage, bring) = for_sending(values), for_receiving(result)

        def start() -> Started:
            byte = self._working().mpi.BYTE
            send = [self._memory(plain), (sent, _offsets(sent)), byte]
            receive = [self._memory(stage), (received, _offsets(received)), byte]
            return Started(found.comm.Ialltoallv(send, receive), (plain, stage), bring, [result])

        return self._collect("all_to_all_single", found, start, [values], async_op)

    def all_to_all(self, output_tensor_list: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False) -> MpiHandle | None:
        """Sends each rank its tensor of the input list, and fills the output list with what comes from each."""
        found = self._enter("all_to_all", group)
        if found is None:
            return None
        inputs, outputs = check_tensors("input_tensor_list", input_tensor_list), check_tensors("output_tensor_list", output_tensor_list)
        check_count("input_tensor_list", inputs, found.size())
        check_count("output_tensor_list", outputs, found.size())
        check_alike("input_tensor_list", inputs, inputs[0], same_shape=False)
        check_alike("output_tensor_list", outputs, inputs[0], same_shape=False)
        sent, received = [size_of(each) for each in inputs], [size_of(each) for each in outputs]
        flat, result = flatten(inputs), torch.empty(sum(received), dtype=torch.uint8)

        def start() -> Started:
            byte = self._working().mpi.BYTE
            send = [self._memory(flat), (sent, _offsets(sent)), byte]
            receive = [self._memory(result), (received, _offsets(received)), byte]
            return Started(found.comm.Ialltoallv(send, receive), (flat, result), lambda: unflatten(result, outputs), outputs)

        return self._collect("all_to_all", found, start, inputs, async_op)

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None) -> MpiHandle | None:
        """Blocks until every rank of the group has come here."""
        found = self._enter("barrier", group)
        if found is None:
            return None
        return self._collect("barrier", found, lambda: Started(found.comm.Ibarrier()), [], async_op, timeout=timeout)

    def _list_at_root(self, what: str, tensors: Any, like: torch.Tensor, group: MpiGroup, root: int) -> list[torch.Tensor]:
        """Returns the list that only the root has, checked; on other ranks an empty one."""
        if group.rank() != root:
            if tensors:
                raise ArgumentError(f"{what} must be left out on all ranks but the root, got {len(tensors)} tensors ({self.here()}).")
            return []
        outputs = check_tensors(what, tensors)
        check_count(what, outputs, group.size())
        check_alike(what, outputs, like)
        return outputs


def _row_size(tensor: torch.Tensor) -> int:
    return size_of(tensor) // max(tensor.shape[0], 1)


def _offsets(sizes: list[int]) -> list[int]:
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += size
    return offsets
