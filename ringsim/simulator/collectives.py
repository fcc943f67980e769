"""The collectives of a simulated rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ringsim.comm.built import check_reduction, reduce_parts
from ringsim.comm.collectives import check_alike, check_count, describe
from ringsim.errors import ArgumentError
from ringsim.simulator.groups import SimulatedGroup
from ringsim.simulator.meetings import attend
from ringsim.simulator.moving import check_tensor, check_tensors
from ringsim.simulator.parts import Part
from ringsim.simulator.ranks import RankCore
from ringsim.simulator.tape import Kind
from ringsim.traces.events import NONE, OP_CODES, Payload

__all__ = ["Collectives"]

_SUM: Final = ReduceOp.SUM
Parts = Sequence[Part]


class Collectives(RankCore):
    """The collectives of ``torch.distributed``; see there for the arguments.

    Every rank of the group calls them, in the same order. They block until all have; with ``async_op=True`` they return a handle. Outside
    the group they do nothing. Reductions are taken in the order of the ranks. What is given is read before anything is written: the
    tensors of a rank may share memory.
    """

    def broadcast(
        self, tensor: Tensor, src: int | None = None, group: Any = None, async_op: bool = False, group_src: int | None = None
    ) -> Part | None:
        """Gives all ranks the root's tensor."""
        found = self._enter("broadcast", group)
        if found is None:
            return None
        values, root = check_tensor("tensor", tensor), found.place_of("src", src, group_src)

        def perform(parts: Parts) -> None:
            for part in parts:
                if part.place != root:
                    part.outputs[0].copy_(parts[root].inputs[0])

        return self._collect("broadcast", found, [values], [values], perform, async_op, root=root)

    def all_reduce(self, tensor: Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Part | None:
        """Reduces everybody's tensor in place, with the result on all ranks."""
        found = self._enter("all_reduce", group)
        if found is None:
            return None
        return self._reduce_everywhere("all_reduce", found, [check_tensor("tensor", tensor)], op, async_op)

    def all_reduce_coalesced(self, tensors: Any, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Part | None:
        """Reduces several tensors of one dtype at once, in place, with the results on all ranks."""
        found = self._enter("all_reduce_coalesced", group)
        if found is None:
            return None
        values = check_tensors("tensors", tensors if isinstance(tensors, list | tuple) else [tensors])
        if not values:
            raise ArgumentError(f"tensors must be at least one, got an empty list ({self.here()}). Leave the call out on all ranks.")
        check_alike("tensors", values, values[0], same_shape=False)
        return self._reduce_everywhere("all_reduce_coalesced", found, values, op, async_op)

    def _reduce_everywhere(self, name: str, group: SimulatedGroup, tensors: list[Tensor], op: Any, async_op: bool) -> Part | None:
        check_reduction(op)

        def perform(parts: Parts) -> None:
            totals = [reduce_parts([part.inputs[index] for part in parts], op) for index in range(len(tensors))]
            for part in parts:
                for output, total in zip(part.outputs, totals, strict=True):
                    output.copy_(total)

        return self._collect(name, group, tensors, tensors, perform, async_op, reduction=op)

    def reduce(
        self,
        tensor: Tensor,
        dst: int | None = None,
        op: Any = _SUM,
        group: Any = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Part | None:
        """Reduces everybody's tensor into the root's; those of other ranks stay as they are."""
        found = self._enter("reduce", group)
        if found is None:
            return None
        values, root = check_tensor("tensor", tensor), found.place_of("dst", dst, group_dst)
        check_reduction(op)

        def perform(parts: Parts) -> None:
            parts[root].outputs[0].copy_(reduce_parts([part.inputs[0] for part in parts], op))

        return self._collect("reduce", found, [values], [values], perform, async_op, root=root, reduction=op)

    def reduce_scatter(self, output: Tensor, input_list: Any, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Part | None:
        """Reduces everybody's list of tensors, and gives each rank the one of its place. The tensors may differ in size."""
        found = self._enter("reduce_scatter", group)
        if found is None:
            return None
        result, inputs = check_tensor("output", output), check_tensors("input_list", input_list)
        check_count("input_list", inputs, found.size())
        check_alike("input_list", inputs, result, same_shape=False)
        mine = inputs[found.rank()]
        if mine.numel() != result.numel():
            raise ArgumentError(
                f"output must be as large as input_list[{found.rank()}], {mine.numel()} elements, got {result.numel()} ({self.here()}). "
                "Make it so."
            )
        check_reduction(op)

        def perform(parts: Parts) -> None:
            totals = [reduce_parts([each.inputs[place] for each in parts], op) for place in range(len(parts))]
            for part, total in zip(parts, totals, strict=True):
                part.outputs[0].copy_(total.view_as(part.outputs[0]))

        return self._collect("reduce_scatter", found, inputs, [result], perform, async_op, reduction=op)

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's name
        op: Any = _SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Part | None:
        """Reduces everybody's tensor, and gives each rank its part of it."""
        found = self._enter("reduce_scatter_tensor", group)
        return None if found is None else self._reduce_to_parts("reduce_scatter_tensor", found, output, input, op, async_op)

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's name
        op: Any = _SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Part | None:
        """The newer name of ``reduce_scatter_tensor``."""
        found = self._enter("reduce_scatter_single", group)
        return None if found is None else self._reduce_to_parts("reduce_scatter_single", found, output, input, op, async_op)

    def _reduce_to_parts(self, name: str, found: SimulatedGroup, output: Tensor, given: Tensor, op: Any, async_op: bool) -> Part | None:
        result, values = check_tensor("output", output), check_tensor("input", given)
        check_alike("output", [result], values, same_shape=False)
        self._check_parts("input", values, "output", result, found)
        check_reduction(op)

        def perform(parts: Parts) -> None:
            total = reduce_parts([part.inputs[0].reshape(-1) for part in parts], op)
            for part, piece in zip(parts, total.chunk(len(parts)), strict=True):
                part.outputs[0].copy_(piece.view_as(part.outputs[0]))

        return self._collect(name, found, [values], [result], perform, async_op, reduction=op)

    def all_gather(self, tensor_list: Any, tensor: Tensor, group: Any = None, async_op: bool = False) -> Part | None:
        """Fills each rank's list with everybody's tensor, by rank."""
        found = self._enter("all_gather", group)
        if found is None:
            return None
        values, outputs = check_tensor("tensor", tensor), check_tensors("tensor_list", tensor_list)
        check_count("tensor_list", outputs, found.size())
        check_alike("tensor_list", outputs, values)
        return self._collect("all_gather", found, [values], outputs, _gather_everywhere, async_op, carried=outputs)

    def all_gather_coalesced(
        self, output_tensor_lists: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False
    ) -> Part | None:
        """Fills the list of each rank with everybody's list of tensors."""
        found = self._enter("all_gather_coalesced", group)
        if found is None:
            return None
        inputs = check_tensors("input_tensor_list", input_tensor_list)
        check_count("output_tensor_lists", output_tensor_lists, found.size())
        outputs: list[Tensor] = []
        for place, each in enumerate(output_tensor_lists):
            row = check_tensors(f"output_tensor_lists[{place}]", each)
            check_count(f"output_tensor_lists[{place}]", row, len(inputs))
            for output, values in zip(row, inputs, strict=True):
                check_alike(f"output_tensor_lists[{place}]", [output], values)
            outputs += row
        return self._collect("all_gather_coalesced", found, inputs, outputs, _gather_everywhere, async_op, carried=outputs)

    def all_gather_into_tensor(self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> Part | None:
        """Fills each rank's output with everybody's input behind each other, by rank."""
        found = self._enter("all_gather_into_tensor", group)
        return None if found is None else self._gather_into("all_gather_into_tensor", found, output_tensor, input_tensor, async_op)

    def all_gather_single(self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> Part | None:
        """The newer name of ``all_gather_into_tensor``."""
        found = self._enter("all_gather_single", group)
        return None if found is None else self._gather_into("all_gather_single", found, output_tensor, input_tensor, async_op)

    def _gather_into(self, name: str, found: SimulatedGroup, output_tensor: Tensor, input_tensor: Tensor, async_op: bool) -> Part | None:
        values, output = check_tensor("input_tensor", input_tensor), check_tensor("output_tensor", output_tensor)
        check_alike("output_tensor", [output], values, same_shape=False)
        self._check_parts("output_tensor", output, "input_tensor", values, found)

        def perform(parts: Parts) -> None:
            whole = torch.cat([part.inputs[0].reshape(-1) for part in parts])
            for part in parts:
                part.outputs[0].copy_(whole.view_as(part.outputs[0]))

        return self._collect(name, found, [values], [output], perform, async_op, carried=[output])

    def gather(
        self,
        tensor: Tensor,
        gather_list: Any = None,
        dst: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Part | None:
        """Fills the root's list with everybody's tensor, by rank. The root is rank 0 where none is given."""
        found = self._enter("gather", group)
        if found is None:
            return None
        values, root = check_tensor("tensor", tensor), self._root(found, "dst", dst, group_dst)
        outputs = self._list_at_root("gather_list", gather_list, values, found, root)

        def perform(parts: Parts) -> None:
            values = [part.inputs[0] for part in parts]
            values[root] = values[root].clone()  # the list may share its memory
            for output, value in zip(parts[root].outputs, values, strict=True):
                output.copy_(value)

        return self._collect("gather", found, [values], outputs, perform, async_op, copies=found.size(), root=root)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: Any = None,
        src: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Part | None:
        """Gives each rank its tensor of the root's list. The root is rank 0 where none is given."""
        found = self._enter("scatter", group)
        if found is None:
            return None
        values, root = check_tensor("tensor", tensor), self._root(found, "src", src, group_src)
        inputs = self._list_at_root("scatter_list", scatter_list, values, found, root)

        def perform(parts: Parts) -> None:
            own = parts[root].inputs[root].clone()  # its place may share the memory of other pieces
            for part, piece in zip(parts, parts[root].inputs, strict=True):
                if part.place != root:
                    part.outputs[0].copy_(piece)
            parts[root].outputs[0].copy_(own)

        return self._collect("scatter", found, inputs, [values], perform, async_op, copies=found.size(), root=root, carried=[values])

    def all_to_all(self, output_tensor_list: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False) -> Part | None:
        """Sends each rank its tensor of the inputs, and fills the outputs with what comes from each. Sizes may differ."""
        found = self._enter("all_to_all", group)
        if found is None:
            return None
        inputs, outputs = check_tensors("input_tensor_list", input_tensor_list), check_tensors("output_tensor_list", output_tensor_list)
        check_count("input_tensor_list", inputs, found.size())
        check_count("output_tensor_list", outputs, found.size())
        check_alike("tensors", [*inputs, *outputs], inputs[0], same_shape=False)
        return self._collect("all_to_all", found, inputs, outputs, _exchange, async_op)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's name
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Part | None:
        """Sends a piece of the input, cut along its first dimension, to each rank, and joins what comes from each."""
        found = self._enter("all_to_all_single", group)
        if found is None:
            return None
        values, result = check_tensor("input", input), check_tensor("output", output)
        check_alike("output", [result], values, same_shape=False)
        pieces = values.split(self._cut("input", values, input_split_sizes, found))
        places = result.split(self._cut("output", result, output_split_sizes, found))
        return self._collect("all_to_all_single", found, pieces, places, _exchange, async_op, carried=[values], results=[result])

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None) -> Part | None:
        """Blocks until every rank of the group has come here."""
        found = self._enter("barrier", group)
        if found is None:
            return None
        return self._collect("barrier", found, [], [], _nothing, async_op, timeout=timeout)

    def monitored_barrier(self, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Blocks until every rank of the group has come here; where one never does, the simulation says which."""
        found = self._enter("monitored_barrier", group)
        if found is not None:
            self._collect("monitored_barrier", found, [], [], _nothing, False, timeout=timeout)

    # -- what the collectives share

    def _collect(
        self,
        name: str,
        group: SimulatedGroup,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        perform: Callable[[Parts], None],
        async_op: bool,
        *,
        copies: int = 1,
        root: int = NONE,
        reduction: Any = None,
        carried: Sequence[Tensor] | None = None,
        results: Sequence[Tensor] | None = None,
        timeout: Any = None,
    ) -> Part | None:
        """Begins a collective; waits for it unless ``async_op``.

        Args:
            name: of the operation.
            group: where.
            inputs: what this rank gives.
            outputs: what it gets.
            perform: moves the data, once all have come.
            async_op: whether to return the handle.
            copies: how many times the tensors count for the size.
            root: group rank of the root.
            reduction: how it reduces.
            carried: what its size is reckoned from, where that is not the inputs.
            results: what the handle returns, where that is not the outputs.
            timeout: limit of the wait.
        """
        if self.hooked:
            self._before_operation()
        how = "" if reduction is None else str(getattr(reduction, "op", reduction)).rpartition(".")[2]
        payload = Payload(*describe(list(inputs if carried is None else carried), copies), how)
        kind = Kind(self.tape.number_payload(payload), payload)
        slot = -1
        if self.records:
            peer = NONE if root == NONE else group.ranks[root]
            slot = self.tape.post(self.clock.now, self.number, OP_CODES[name], group.number, peer, NONE, kind.number, sys._getframe(1))
        part = Part(OP_CODES[name], self, slot, group, kind, name, group.rank(), inputs, outputs, outputs if results is None else results)
        part.root = root
        self.clock.polls = 0
        attend(part, self.world.carrier, perform)
        if async_op:
            return part
        part.wait(timeout)
        return None

    def _list_at_root(self, what: str, tensors: Any, like: Tensor, group: SimulatedGroup, root: int) -> list[Tensor]:
        """Returns the list that only the root has, checked; on other ranks an empty one."""
        if group.rank() != root:
            if tensors:
                raise ArgumentError(f"{what} must be left out on all ranks but the root, got {len(tensors)} tensors ({self.here()}).")
            return []
        outputs = check_tensors(what, tensors)
        check_count(what, outputs, group.size())
        check_alike(what, outputs, like)
        return outputs


def _gather_everywhere(parts: Parts) -> None:
    values = [tensor.clone() for part in parts for tensor in part.inputs]  # outputs may share memory with inputs
    for part in parts:
        for output, value in zip(part.outputs, values, strict=True):
            output.copy_(value)


def _exchange(parts: Parts) -> None:
    kept = [[piece.clone() for piece in part.inputs] for part in parts]  # outputs may share memory with inputs
    for part in parts:
        for output, row in zip(part.outputs, kept, strict=True):
            output.copy_(row[part.place].view_as(output))


def _nothing(parts: Parts) -> None:
    """Nothing is moved."""
