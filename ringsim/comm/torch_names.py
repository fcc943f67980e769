"""What torch's functions, groups and payloads are called in the records; groups and payloads are numbered when they are first met."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.distributed import ProcessGroup

from ringsim.comm.collectives import Collective, describe, find_reduction, find_root, find_tensors
from ringsim.comm.counterparts import Counterparts
from ringsim.comm.gpu_times import NOT_READ, is_nccl
from ringsim.comm.group_names import name_and_ranks
from ringsim.traces.events import COLLECTIVE, NONE, OP_CODES, OP_KINDS
from ringsim.traces.recorder import Recorder

__all__ = ["COLLECTIVE_OPS", "NOT_RECORDED", "RECVS", "SENDS", "TorchNames"]

NOT_RECORDED: Final = (
    "Collectives that C++ issues (DistributedDataParallel's reducer, functional collectives) are not recorded.",
    "The end of an operation is recorded in wait(); one awaited otherwise (a future, a CUDA event, is_completed()) stays in flight.",
)

# The functions of torch.distributed that lead to ProcessGroup.send and .recv, and how the trace spells the operation.
SENDS: Final = {
    "isend": OP_CODES["isend"],
    "send": OP_CODES["send"],
    "batch_isend_irecv": OP_CODES["batch_isend"],
    "send_object_list": OP_CODES["send_object_list"],
}
RECVS: Final = {
    "irecv": OP_CODES["irecv"],
    "recv": OP_CODES["recv"],
    "batch_isend_irecv": OP_CODES["batch_irecv"],
    "recv_object_list": OP_CODES["recv_object_list"],
}
# A collective's method is told by its name; torch's functions tell the old spelling from the new.
COLLECTIVE_OPS: Final = {name: code for name, code in OP_CODES.items() if OP_KINDS[code] == COLLECTIVE}


class TorchNames:
    """Numbers groups and payloads.

    Args:
        recorder: gives the numbers, and writes down what they mean.
        counterparts: is told of the groups whose operations can be compared; None for nobody.
        on_nccl: is told the number of each group whose operations end on GPUs.

    Attributes:
        groups: by the id of a group, its number, the global rank of each group rank, and whether its operations are compared with their
            other sides.
        payloads: by dtype and shape, the number of what a message carries.
    """

    def __init__(self, recorder: Recorder, counterparts: Counterparts | None, on_nccl: Callable[[int], None]) -> None:
        self._recorder, self._counterparts, self._on_nccl = recorder, counterparts, on_nccl
        self.groups: dict[int, tuple[int, dict[int, int], bool]] = {}
        self.payloads: dict[torch.dtype | None, dict[torch.Size, int]] = {}
        self._other_payloads: dict[Any, int] = {}
        self._group_names: set[str] = set()
        self._meeting = threading.Lock()  # two threads may meet a group at the same time: it has one number

    def meet_group(self, group: ProcessGroup) -> tuple[int, dict[int, int], bool]:
        """Numbers a group at its first operation; the group itself is not kept alive."""
        with self._meeting:
            return self.groups.get(id(group)) or self._number_group(group)

    def _number_group(self, group: ProcessGroup) -> tuple[int, dict[int, int], bool]:
        name, ranks = name_and_ranks(group)
        # Only where all of a group's operations are recorded is the k-th of one rank the k-th of the others.
        fresh = self._counterparts is not None and name not in self._group_names and _is_fresh(group)
        self._group_names.add(name)
        number = self._recorder.group(name, ranks, fresh=fresh)
        if self._counterparts is not None:
            if fresh:
                self._counterparts.meet_group(number, name, ranks)
            else:
                self._counterparts.pass_over_group(name)
        if is_nccl(group):
            self._recorder.set_meta("not_recorded", (*NOT_RECORDED, NOT_READ))
            self._on_nccl(number)
        entry = number, dict(enumerate(ranks)), fresh
        key, groups = id(group), self.groups
        self.groups[key] = entry
        weakref.finalize(group, groups.pop, key, None).atexit = False
        return entry

    def meet_message(self, tensors: Any) -> int:
        """Numbers the payload of a message at its first occurrence; NONE if there is none: the operation will be refused."""
        try:
            tensor = tensors[0]
            if tensor.is_meta:
                return NONE
            payload = self._number_payload((1, (tensor.shape, tensor.dtype)), [tensor], 1, {})
            self.payloads.setdefault(tensor.dtype, {})[tensor.shape] = payload
        except Exception:
            return NONE
        return payload

    def meet_collective(self, collective: Collective, group_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
        """Numbers the payload of a collective and finds the group rank of its root; NONE where the arguments make no sense."""
        try:
            tensors = find_tensors(collective, args, kwargs)
            reduction = find_reduction(collective, args, kwargs)
            copies = group_size if collective.shards else 1
            strides: list[tuple[int, ...]] = []
            if collective.raw:
                strides = [tensor.stride() for tensor in tensors if tensor.layout == torch.strided and not tensor.is_contiguous()]
            how = {**({"reduction": reduction} if reduction else {}), **({"strides": strides} if strides else {})}
            key = (copies, reduction, *strides, *((tensor.shape, tensor.dtype) for tensor in tensors))
            return self._number_payload(key, tensors, copies, how), find_root(collective, args, kwargs)
        except Exception:
            return NONE, NONE

    def _number_payload(self, key: Any, tensors: list[torch.Tensor], copies: int, how: dict[str, Any]) -> int:
        payload = self._other_payloads.get(key)
        if payload is None:
            dtype, shape, size_bytes = describe(tensors, copies)
            payload = self._recorder.payload(dtype, shape, size_bytes, **how)
            self._other_payloads[key] = payload
        return payload


def _is_fresh(group: ProcessGroup) -> bool:
    """Whether no operation has been posted on a group, on Gloo: it numbers them, whoever posts them."""
    try:
        return "gloo" in group.name() and group._get_sequence_number_for_group() == 0  # type: ignore[attr-defined]
    except RuntimeError:
        return False
