"""Refuses operations that torch would let pass, or would refuse in words that name neither rank nor peer.

A rank that is not there makes Gloo crash, and a meta tensor is silently not sent: these are found before the library is called. What the
library refuses by itself is put into words afterwards, which costs nothing where nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import torch
from torch.distributed import ProcessGroup, c10d_logger, distributed_c10d

from ringsim.errors import ArgumentError, RingError
from ringsim.traces.events import ERROR, NONE
from ringsim.traces.recorder import Recorder

__all__ = ["Prechecks", "make_record_refused"]

_TAG_MAX: Final = 2**31 - 1
_MESSAGES: Final = ("isend", "irecv", "send_object_list", "recv_object_list")


class Prechecks:
    """Says what is wrong with an operation, as an error at the user's line and in the trace.

    Args:
        recorder: writes down what was found.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._warn_outsider: Callable[[str], None] = getattr(distributed_c10d, "_warn_not_in_group", _do_nothing)
        # Functions of torch that its operations call where a rank is not in the group, to see who sends to itself, and to log an error.
        wanted: dict[tuple[Any, str], Callable[..., Any]] = {
            (distributed_c10d, "_warn_not_in_group"): self.refuse_outsider,
            (distributed_c10d, "_check_not_self_rank"): self.check_not_self,
            (c10d_logger, "_get_msg_dict"): _describe_failed_call,
        }
        # They are private: another version of torch may not have them.
        self.replacements = {place: function for place, function in wanted.items() if hasattr(*place)}

    def refuse_rank(
        self, op: str, rank: Any, ranks: Mapping[int, int], group: int, tag: Any, payload: int, record: Callable[..., None]
    ) -> None:
        """Raises ArgumentError where a message's other side, a group rank, is none of the group's; returns where it is not even a number.

        Args:
            op: "send" or "recv".
            rank: the other side.
            ranks: global ranks by group rank.
            group: number of the group.
            tag: tag of the message.
            payload: number of what it carries.
            record: ``record(group, peer, tag, payload)`` writes the operation down as failed.
        """
        if isinstance(rank, int):
            record(group, NONE, tag, payload)
            self._refuse(
                f"the other side of a {op} must be a rank of its group, from 0 to {len(ranks) - 1}, got {rank}",
                self._where(op, None, tag, group),
                "Count ranks from 0, and let the last one turn back to 0: (rank + 1) % world_size",
                group, NONE, tag, payload,
            )  # fmt: skip

    def refuse_tensors(self, op: str, tensors: Any, peer: int, group: int, tag: Any, record: Callable[..., None]) -> None:
        """Raises ArgumentError where an operation's tensors hold no data; returns otherwise. Arguments as of ``refuse_rank``."""
        if isinstance(tensors, list) and any(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in tensors):
            record(group, peer, tag, NONE)
            self._refuse(
                "a tensor to be sent or received must hold data, got one on the device meta",
                self._where(op, peer, tag, group),
                "Make it on the CPU, for instance with torch.empty_like(tensor, device='cpu')",
                group, peer, tag, NONE,
            )  # fmt: skip

    def refuse_collective(self, op: str, tensor: torch.Tensor, group: int, payload: int, record: Callable[..., None]) -> NoReturn:
        """Raises ArgumentError for a tensor that ``find_unfit`` found in a collective. Other arguments as of ``refuse_rank``."""
        record(group, NONE, NONE, payload)
        if tensor.is_meta:
            what, todo = "the tensors of a collective must hold data, got one on the device meta", "Make it on the CPU"
        else:
            shape, stride = tuple(tensor.shape), tensor.stride()
            what = f"the tensors of a collective must lie in memory without gaps, got one of shape {shape} and stride {stride}"
            todo = "Use tensor.contiguous(), and copy the result back"
        self._refuse(what, self._where(op, None, None, group), todo, group, NONE, NONE, payload)

    def refuse_outsider(self, op_name: str) -> None:
        """Raises ArgumentError in place of torch's warning, where a message on a group that this rank is not in would be lost.

        A collective outside its group does nothing, on purpose in many programs, which call it on all ranks: there the warning is enough.
        """
        if op_name not in _MESSAGES:
            self._warn_outsider(op_name)
            return
        self._refuse(
            f"{op_name} must be called on a group that this rank is in, got one that it is not in",
            f"rank {self._recorder.rank} of {self._recorder.world_size}",
            "Call it on the group's ranks only",
        )

    def check_not_self(self, group: ProcessGroup | int, rank: int, what: str) -> None:
        """Raises ArgumentError where a rank sends to itself, as torch's own function of that name raises ValueError, or is an outsider."""
        if not isinstance(group, ProcessGroup):  # what torch gives to ranks that are not in it
            self.refuse_outsider("isend" if what == "destination" else "irecv")
        elif group.rank() == rank:
            self._refuse(
                f"the {what} of a message must be another rank, got this one",
                f"rank {self._recorder.rank} of {self._recorder.world_size}",
                "What stays on a rank needs no message: copy the tensor",
            )

    def explain(self, error: BaseException, op: str, tensors: Any, peer: int, tag: Any, group: int, payload: int) -> None:
        """Raises ArgumentError in place of an error of the library whose cause shows in the arguments; returns where it does not.

        Args:
            error: what the library raised.
            op: "send", "recv", or the name of a collective.
            tensors: what was to be sent or received, a list.
            peer: the other side, a global rank.
            tag: tag of the message, None for a collective.
            group: number of the group.
            payload: number of what it carries.
        """
        if not isinstance(error, Exception) or isinstance(error, RingError):
            return
        try:
            found = _find_fault(tensors, tag, peer == self._recorder.rank)
        except Exception:
            return  # arguments of some other kind: the library's own words are all there is
        if found is not None:
            self._refuse(found[0], self._where(op, peer, tag, group), found[1], group, peer, tag, payload)

    def _where(self, op: str, peer: int | None, tag: Any, group: int) -> str:
        recorder = self._recorder
        words = [f"rank {recorder.rank} of {recorder.world_size}", op]
        if tag is not None:
            words[1] += f"{' to' if op == 'send' else ' from'} {peer}" if peer is not None and peer >= 0 else ""
            words.append(f"tag {tag}")
        if group >= 0:
            words.append(f"group {recorder.groups[group].name}")
        return ", ".join(words)

    def _refuse(
        self, what: str, where: str, todo: str, group: int = NONE, peer: int = NONE, tag: Any = NONE, payload: int = NONE
    ) -> NoReturn:
        message = f"{what} ({where}). {todo}."
        known = isinstance(tag, int) and -(2**31) <= tag <= _TAG_MAX
        self._recorder.notice("invalid_argument", message, group, peer, tag if known else NONE, payload)
        raise ArgumentError(message) from None


def make_record_refused(recorder: Recorder, op: int, ops: dict[str, int]) -> Callable[..., None]:
    """Makes the function that records an operation which torch will not see: failed from the beginning, for other ranks look on."""
    post = recorder.make_post(op, ops)

    def record_refused(group: int, peer: int, tag: Any, payload: int) -> None:
        slot = post(group, peer, tag, payload)
        if slot is not None:
            recorder.complete(slot, ERROR)

    return record_refused


def _do_nothing(_: str) -> None:
    pass


def _describe_failed_call(name: str, *_: Any, **__: Any) -> dict[str, Any]:
    """Returns what torch's log of failed calls says of one: torch's own function fails in turn where the rank is not in the group."""
    return {"func_name": name}


def _find_fault(tensors: Any, tag: Any, to_itself: bool) -> tuple[str, str] | None:
    """Returns what is wrong and what to do."""
    if isinstance(tag, int) and not 0 <= tag <= _TAG_MAX:
        return f"a tag must be an integer from 0 to {_TAG_MAX:,}, got {tag}", "Number the messages from 0"
    for tensor in tensors:
        if tensor.layout != torch.strided:
            words = f"a tensor to be sent or received must be dense, got one of layout {str(tensor.layout).removeprefix('torch.')}"
            return words, "Send tensor.to_dense(), or its indices and values one after the other"
        if not tensor.is_contiguous():
            shape, stride = tuple(tensor.shape), tensor.stride()
            words = f"a tensor to be sent or received must be contiguous, got one of shape {shape} and stride {stride}"
            return words, "Send tensor.contiguous(); receive into a contiguous tensor and copy from there"
    if to_itself:
        return "the other side of a message must be another rank, got this one", "What stays on a rank needs no message: copy the tensor"
    return None
