"""Refuses operations that torch would let pass, or would refuse in words that name neither rank nor peer.

A rank that does not exist makes Gloo crash, and a meta tensor is silently not sent: these are found before the library is called. What the
library refuses itself is put into words afterwards, which costs nothing where nothing is wrong.

The teaching mode (``check="full"``) also finds who uses a buffer while a message is still on its way into or out of it, and who mistreats
a handle. Between ``isend`` or ``irecv`` and the end of ``wait()`` the library uses the tensor. What happens to it meanwhile goes
unpunished on one machine and gives garbage on the next::

    work = dist.irecv(buffer, src=0)
    total = buffer.sum()               # too early: what is read here is old, new, or half of each
    work.wait()

Each operation of the recording thread is looked at, and the checksum of a buffer that is sent is compared when it is waited for. That costs
about 20 us an operation of torch, and reads each sent byte twice: too much to have it always.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
from torch.distributed import ProcessGroup, Work, c10d_logger, distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ringsim.errors import ArgumentError, RingError
from ringsim.traces.events import ERROR, NONE
from ringsim.traces.recorder import Recorder

__all__ = ["BufferGuard", "Prechecks", "make_record_refused"]

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


# Operations that read nothing but what a tensor is like.
_LOOKS_ONLY: Final = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "is_same_size")
_NEW: Final = "new_"


@dataclass(frozen=True)
class _Use:
    """A message on its way: from where to where in memory, what is sent and its checksum, and what to call it."""

    first: int
    end: int
    sent: torch.Tensor | None
    checksum: int
    what: str


class BufferGuard:
    """Remembers which buffers are in use, and raises where somebody else uses them.

    Args:
        recorder: writes down what was found.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._uses: dict[Work, _Use] = {}  # posted and not yet waited for
        self._waited: weakref.WeakSet[Work] = weakref.WeakSet()
        self._warned: dict[str | tuple[str, type[Warning], int], int] = {}  # Python's own memory of warnings: one for each line
        self._mode = _Watch(self)

    def start(self) -> None:
        """Begins to look at the operations of the calling thread."""
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch gives its modes no types

    def stop(self) -> None:
        """Ends that, on the same thread."""
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # likewise

    def wrap(self, replacements: dict[tuple[Any, str], Callable[..., Any]]) -> None:
        """Puts this guard in front of the hooks of a recorder.

        Args:
            replacements: by class and name of a method, what stands in its place; changed.
        """
        for name, hook in replacements.items():
            if name in ((ProcessGroup, "send"), (ProcessGroup, "recv"), (ProcessGroup, "recv_anysource")):
                replacements[name] = functools.update_wrapper(self._make_message(hook, name[1]), hook)
            elif name[1] == "wait":
                replacements[name] = functools.update_wrapper(self._make_wait(hook), hook)

    def _make_message(self, hook: Callable[..., Any], method: str) -> Callable[..., Any]:
        sends = method == "send"

        def message(group: ProcessGroup, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            use = self._begin(tensors, sends)
            with _disable_current_modes():
                work = hook(group, tensors, *args, **kwargs)
            if work is not None and use is not None:
                self._uses[work] = use
            return work

        return message

    def _make_wait(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
            use = self._uses.pop(work, None)
            if use is None:
                if work in self._waited:
                    self._complain("invalid_argument", ArgumentError, "a handle must be waited for once, got a second wait()", "",
                                   "Drop the handle after the first: without ringsim the second one hangs")  # fmt: skip
                return hook(work, *args, **kwargs)
            self._waited.add(work)
            if use.sent is not None and _checksum(use.sent) != use.checksum:
                self._complain("buffer_hazard", RingError, "a buffer must stay as it is until its send was waited for, got other contents",
                               use.what, "Call wait() before the tensor is changed, or send a copy")  # fmt: skip
            return hook(work, *args, **kwargs)

        return wait

    def _begin(self, tensors: Any, sends: bool) -> _Use | None:
        """Returns the use of a buffer that a message is about to make; None where there is none to be guarded."""
        tensor = tensors[0] if tensors else None
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return None
        size_bytes = tensor.numel() * tensor.element_size()
        if size_bytes == 0 or not tensor.is_contiguous():
            return None
        file, line = self._find_line()
        if tensor.requires_grad and not sends:
            self._warn_of_grad(file, line)
        first = tensor.data_ptr()
        end, what = first + size_bytes, f"{'send' if sends else 'recv'} posted at {os.path.basename(file)}:{line}"
        for use in self.overlapping(first, end):
            if not sends or use.sent is None:
                self._complain("buffer_hazard", RingError, "a buffer must belong to one message at a time, got two that overlap",
                               f"{what}; {use.what}", "Wait for the first one, or give each a tensor of its own")  # fmt: skip
        return _Use(first, end, tensor if sends else None, _checksum(tensor) if sends else 0, what)

    def overlapping(self, first: int, end: int) -> Iterator[_Use]:
        """Yields the uses of memory from ``first`` to ``end`` (exclusive)."""
        yield from (use for use in self._uses.values() if use.first < end and first < use.end)

    @property
    def is_idle(self) -> bool:
        """Whether no message is on its way."""
        return not self._uses

    def look_at(self, tensor: torch.Tensor, operation: str, *, writes: bool) -> None:
        """Raises where a tensor that an operation reads or writes lies in a buffer that a message is using."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.numel() == 0:
            return
        first = tensor.data_ptr()
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        for use in self.overlapping(first, first + reach * tensor.element_size()):
            if writes or use.sent is None:
                self._complain(
                    "buffer_hazard", RingError,
                    f"a buffer must not be {'changed' if writes else 'read'} before its message was waited for, got {operation}",
                    use.what, "Call wait() on the handle first",
                )  # fmt: skip

    def check_end(self) -> None:
        """Raises where messages were posted and never waited for."""
        if self._uses:
            use, more = next(iter(self._uses.values())), len(self._uses) - 1
            self._uses.clear()
            what = use.what + (f" and {more} more" if more else "")
            self._complain("leaked_request", RingError, "every handle must be waited for, got one that never was", what,
                           "Keep what isend and irecv return, and call wait() on it: such a message may be lost")  # fmt: skip

    def _complain(self, kind: str, error: type[RingError], what: str, about: str, todo: str) -> NoReturn:
        recorder = self._recorder
        where = f"rank {recorder.rank} of {recorder.world_size}" + (f", {about}" if about else "")
        message = f"{what} ({where}). {todo}."
        with _disable_current_modes():
            recorder.notice(kind, message)
        raise error(message)

    def _warn_of_grad(self, file: str, line: int) -> None:
        """Warns where a message is received into a tensor that autograd follows: no error, for some programs mean just that."""
        recorder = self._recorder
        warnings.warn_explicit(
            "a tensor to be received into must not require grad, got one that does "
            f"(rank {recorder.rank} of {recorder.world_size}, recv posted at {os.path.basename(file)}:{line}). "
            "Autograd does not see messages: no gradient goes back to the sender by itself. Receive into a plain tensor, call "
            "requires_grad_() on it afterwards, and send its grad back.",
            UserWarning, file, line, registry=self._warned,
        )  # fmt: skip

    def _find_line(self) -> tuple[str, int]:
        """Returns the user's file and line that led here."""
        frame = self._recorder.sites.find(sys._getframe(1))
        return ("an unknown file", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


class _Watch(TorchDispatchMode):
    """Sees every operation of torch on the thread that entered it."""

    def __init__(self, guard: BufferGuard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives its modes no types
        self._guard = guard

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch: yes would import its compiler, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._guard.is_idle and func.namespace == "aten" and not func.is_view:
            name = func._schema.name.removeprefix("aten::")
            if name not in _LOOKS_ONLY and not name.startswith(_NEW):
                writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments]
                for index, argument in enumerate(args):
                    self._look(argument, name, writes=writes[index])
                for key, argument in kwargs.items():
                    self._look(argument, name, writes=key == "out")
        return func(*args, **kwargs)

    def _look(self, argument: Any, name: str, *, writes: bool) -> None:
        for leaf in tree_leaves(argument):
            if isinstance(leaf, torch.Tensor):
                self._guard.look_at(leaf, name, writes=writes)


def _checksum(tensor: torch.Tensor) -> int:
    """Returns a checksum of the bytes of a contiguous tensor."""
    with _disable_current_modes():
        plain = tensor.detach().resolve_conj().resolve_neg()
        data: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(data)
