"""Numbers for the groups and payloads of a rank's operations, and their names.

An event refers to its group and its payload by number; the trace's tables describe both.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ringsim.comm.calls import (
    Reading,
    Tensors,
    describe,
    find_reduction,
    find_root,
    find_splits,
    find_tensors,
    find_unfit,
)
from ringsim.comm.torch_private import is_unused
from ringsim.traces.events import COLLECTIVE, NONE, OP_CODES, OP_KINDS
from ringsim.traces.recorder import Recorder

KnownGroup = tuple[int, dict[int, int]]  # a group's number, and global ranks by group rank
# The functions of torch.distributed that call ProcessGroup.send and .recv, and their operations in
# the trace.
SEND_NAMES = {
    "isend": OP_CODES["isend"],
    "send": OP_CODES["send"],
    "batch_isend_irecv": OP_CODES["batch_isend"],
    "send_object_list": OP_CODES["send_object_list"],
}
RECV_NAMES = {
    "irecv": OP_CODES["irecv"],
    "recv": OP_CODES["recv"],
    "batch_isend_irecv": OP_CODES["batch_irecv"],
    "recv_object_list": OP_CODES["recv_object_list"],
}
# A collective is identified by its method; torch's functions distinguish old and new names.
COLLECTIVE_NAMES = {name: code for name, code in OP_CODES.items() if OP_KINDS[code] == COLLECTIVE}


def name_and_ranks(group: ProcessGroup) -> tuple[str, list[int]]:
    """Returns a group's name, which is the same on all of its ranks, and its global ranks.

    If torch does not know the group, group ranks are returned instead.
    """
    if group is dist.group.WORLD:
        name = "world"
    else:
        try:  # if torch numbered a pair group, its name is in the description
            name = (
                group.group_desc if group.group_desc.startswith("ring:") else str(group.group_name)
            )
        except RuntimeError:  # created without torch's knowledge
            name = ""
    try:
        return name, dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return f"{name or 'unnamed'} (unregistered: group ranks)", list(range(group.size()))


class Names:
    """The numbers of groups and payloads, assigned at their first use.

    Args:
        recorder: the recorder, which assigns the numbers and writes the tables.
        compared: whether readers of the records compare both sides of each operation.

    Attributes:
        groups: the number and the global ranks of each group, by the group's id.
        payloads: the numbers of the messages' payloads, by dtype and shape.
    """

    def __init__(self, recorder: Recorder, compared: bool) -> None:
        self._recorder, self._compared = recorder, compared
        self.groups: dict[int, KnownGroup] = {}
        self.payloads: dict[torch.dtype | None, dict[torch.Size, int]] = {}
        self._of_collectives: dict[Any, int] = {}
        self._seen: set[tuple[str, int]] = set()  # names of groups, and their worlds
        self._used_before: set[str] = set()  # names of groups
        self._from_any: dict[int, str] = {}  # groups on which this rank receives from any source
        # two threads may use a new group at the same time, but it must get one number
        self._meeting = threading.RLock()

    def meet_group(self, group: ProcessGroup) -> KnownGroup:
        """Numbers a group at its first operation; the group itself is not kept alive."""
        with self._meeting:
            found = self.groups.get(id(group))
            if found is None:
                key, groups = id(group), self.groups
                found = groups[key] = self._number_group(group)
                weakref.finalize(group, groups.pop, key, None).atexit = False
            return found

    def _number_group(self, group: ProcessGroup) -> KnownGroup:
        name, ranks = name_and_ranks(group)
        # The k-th operation of one rank is the k-th operation of the others only if all operations
        # of the group are recorded.
        key = name, self._recorder.world
        complete = is_unused(group) or self._recorder.is_settled(name)
        fresh = self._compared and key not in self._seen and complete
        self._seen.add(key)
        if self._compared and not fresh:
            self._used_before.add(name)
            self._recorder.set_meta("used_before", sorted(self._used_before))
            self._say_what_is_not_checked()
        return self._recorder.group(name, ranks, fresh=fresh), dict(enumerate(ranks))

    def meet_recv_from_any(self, group: int) -> None:
        """Records that this rank receives from any source on a group.

        Such a recv cannot be matched with a send, so operations on that group are not compared.
        """
        if self._compared and group >= 0 and group not in self._from_any:
            self._from_any[group] = self._recorder.groups[group].name
            self._recorder.set_meta("from_any", list(self._from_any))
            self._say_what_is_not_checked()

    def _say_what_is_not_checked(self) -> None:
        before = (
            "ringsim did not compare the two sides of operations on group {}, because the group "
            "was used before recording began, or does not use Gloo."
        )
        any_rank = (
            f"ringsim did not compare the messages that rank {self._recorder.rank} received on "
            "group {}, because the rank also received from any source."
        )
        sentences = [
            *map(before.format, sorted(self._used_before)),
            *map(any_rank.format, self._from_any.values()),
        ]
        self._recorder.set_meta("not_checked", sentences)

    def meet_message(self, tensors: Any) -> int:
        """Returns a number for a message's payload, or NONE if torch will reject it."""
        try:
            tensor = tensors[0]
            if tensor.is_meta:
                return NONE
            payload = self._recorder.payload(*describe([tensor], 1))
            self.payloads.setdefault(tensor.dtype, {})[tensor.shape] = payload
        except Exception:
            return NONE
        return payload

    def meet_collective(
        self, reading: Reading, group_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, int, torch.Tensor | None]:
        """Returns the number of a collective's payload, its root, and an unfit tensor, if any.

        The root is a rank of the group. Missing values are NONE and None, even if the arguments are
        invalid.
        """
        try:
            tensors = find_tensors(reading, args, kwargs)
            splits = find_splits(reading, group_size, args)
            payload = self.meet_tensors(
                reading, group_size, tensors, find_reduction(reading, args, kwargs), splits
            )
            return payload, find_root(reading, args, kwargs), find_unfit(reading, tensors, args)
        except Exception:
            return NONE, NONE, None

    def meet_tensors(
        self,
        reading: Reading,
        group_size: int,
        tensors: Tensors,
        reduction: str,
        splits: tuple[tuple[int, ...], ...],
    ) -> int:
        """Numbers the payload of a collective."""
        copies = group_size if reading.shards else 1
        strides = []
        if reading.raw:
            strides = [
                each.stride()
                for each in tensors
                if each.layout == torch.strided and not each.is_contiguous()
            ]
        kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        key = (copies, reduction, splits, *strides, *kinds)
        payload = self._of_collectives.get(key)
        if payload is None:
            payload = self._recorder.payload(
                *describe(tensors, copies), reduction=reduction, strides=strides, splits=splits
            )
            self._of_collectives[key] = payload
        return payload
