"""Refuses operations that torch would let pass.

Or would refuse in words that name neither rank nor peer. A rank that does not exist crashes Gloo,
and a meta tensor is silently not sent: these are found before the library is called. What the
library itself refuses is put into words afterwards, which costs nothing where nothing is wrong.

The teaching mode (``check="full"``) also finds who uses a buffer while a message is on its way into
or out of it, and who mistreats a handle. Between ``isend`` or ``irecv`` and the end of ``wait()``
the tensor belongs to the library. Touching it then may go well on one machine and give garbage on
the next::

    work = dist.irecv(buffer, src=0)
    total = buffer.sum()  # too early: reads old values, new ones, or some of each
    work.wait()

It looks at each operation of the recording thread, and compares checksums of a buffer when it is
sent and when it is waited for. That costs about 20 us an operation of torch, and reads each byte
sent twice: too much to have it always on.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
import weakref
import zlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple, NoReturn

import torch
from torch.distributed import ProcessGroup, Work

from ringsim.comm.torch_private import (
    CHECK_NOT_SELF,
    DESCRIBE_CALL,
    WARN_OUTSIDER,
    Hook,
    Replacements,
    TorchDispatchMode,
    present,
    tree_leaves,
    without_modes,
)
from ringsim.errors import ArgumentError, RingError
from ringsim.traces.events import ERROR, NONE
from ringsim.traces.recorder import Post, Recorder

_TAG_MAX: Final = 2**31 - 1
_MESSAGES: Final = ("isend", "irecv", "send_object_list", "recv_object_list")
_KEEP_IT: Final = "What stays on a rank needs no message: copy the tensor"


class Attempt(NamedTuple):
    """An operation that the program asks for.

    What it is called, and its numbers in the record; ``tag`` is None for a collective.
    """

    op: str
    group: int
    peer: int
    tag: Any
    payload: int


class Prechecks:
    """Says what is wrong with an operation, as an error at the user's line and in the trace.

    Args:
        recorder: writes down what was found.

    Attributes:
        replacements: what stands in for those of torch's functions that handle ranks outside a
            group, sends to oneself and failed calls.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._warn_outsider: Callable[[str], None] = getattr(*WARN_OUTSIDER, lambda _: None)
        self.replacements: Replacements = present(
            {
                WARN_OUTSIDER: self.refuse_outsider,
                CHECK_NOT_SELF: self.check_not_self,
                # torch's own function fails in turn where the rank is not in the group
                DESCRIBE_CALL: lambda name, *_, **__: {"func_name": name},
            }
        )

    def check_message(
        self, attempt: Attempt, tensors: Any, rank: Any, size: int, post: Post
    ) -> None:
        """Raises ArgumentError if a message's other side is not in its group.

        Or its tensors hold no data; see ``explain`` for the rest.

        Args:
            attempt: the message.
            tensors: what it carries.
            rank: the other side, as a rank of the group.
            size: how many ranks the group has.
            post: records the message: as failed from the beginning, for other ranks look on.
        """
        if attempt.peer == NONE and isinstance(rank, int):
            what = (
                f"the other side of a {attempt.op} must be a rank of its group, from 0 to "
                f"{size - 1}, got {rank}"
            )
            self.refuse(
                what,
                "Count ranks from 0, and let the last one turn back to 0: (rank + 1) % world_size",
                attempt,
                post,
            )
        if isinstance(tensors, list) and any(
            isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in tensors
        ):
            what = "a tensor to be sent or received must hold data, got one on the device meta"
            self.refuse(
                what,
                "Make it on the CPU, for instance with torch.empty_like(tensor, device='cpu')",
                attempt,
                post,
            )

    def refuse_collective(self, attempt: Attempt, tensor: torch.Tensor, post: Post) -> NoReturn:
        """Raises ArgumentError for a tensor that ``find_unfit`` found in a collective."""
        if tensor.is_meta:
            self.refuse(
                "the tensors of a collective must hold data, got one on the device meta",
                "Make it on the CPU",
                attempt,
                post,
            )
        what = (
            "the tensors of a collective must lie in memory without gaps, got one of "
            f"{_layout(tensor)}"
        )
        self.refuse(what, "Use tensor.contiguous(), and copy the result back", attempt, post)

    def refuse_outsider(self, op_name: str) -> None:
        """Raises ArgumentError if a message on a group that this rank is not in would be lost.

        That is in place of torch's warning. A collective outside its group does nothing, on purpose
        in many programs, which call it on all ranks: there the warning is enough.
        """
        if op_name not in _MESSAGES:
            self._warn_outsider(op_name)
            return
        self.refuse(
            f"{op_name} must be called on a group that this rank is in, got one that it is not in",
            "Call it on its members only",
        )

    def check_not_self(self, group: ProcessGroup | int, rank: int, what: str) -> None:
        """Raises ArgumentError if a rank sends to itself, or is an outsider.

        Torch's own function of that name raises ValueError.
        """
        if not isinstance(group, ProcessGroup):  # what torch gives to ranks that are not in it
            self.refuse_outsider("isend" if what == "destination" else "irecv")
        elif group.rank() == rank:
            self.refuse(f"the {what} of a message must be another rank, got this one", _KEEP_IT)

    def explain(self, error: BaseException, tensors: Any, attempt: Attempt) -> None:
        """Raises ArgumentError in place of an error of the library whose cause is in the arguments.

        Returns where it does not show there.
        """
        if not isinstance(error, Exception) or isinstance(error, RingError):
            return
        try:
            found = find_fault(tensors, attempt.tag, attempt.peer == self._recorder.rank)
        except Exception:
            return  # arguments of some other kind: the library's own words are all there is
        if found is not None:
            self.refuse(*found, attempt)

    def refuse(
        self, what: str, todo: str, attempt: Attempt | None = None, post: Post | None = None
    ) -> NoReturn:
        """Raises ArgumentError at the user's line, and notes it in the trace."""
        recorder = self._recorder
        where = f"rank {recorder.rank} of {recorder.world_size}"
        group, peer, tag, payload = attempt[1:] if attempt else (NONE, NONE, NONE, NONE)
        if attempt is not None:
            where += f", {attempt.op}"
            if tag is not None:
                if peer >= 0:
                    where += f" {'to' if attempt.op == 'send' else 'from'} {peer}"
                where += f", tag {tag}"
            if group >= 0:
                where += f", group {recorder.groups[group].name}"
        if post is not None and (slot := post(group, peer, tag, payload)) is not None:
            recorder.complete(slot, ERROR)
        message = f"{what} ({where}). {todo}."
        recorder.notice("invalid_argument", message, group, peer, tag, payload)
        raise ArgumentError(message) from None


def _layout(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)} and stride {tensor.stride()}"


def find_fault(tensors: Any, tag: Any, to_itself: bool) -> tuple[str, str] | None:
    """Returns what is wrong and what to do."""
    if isinstance(tag, int) and not 0 <= tag <= _TAG_MAX:
        return (
            f"a tag must be an integer from 0 to {_TAG_MAX:,}, got {tag}",
            "Number the messages from 0",
        )
    for tensor in tensors:
        if tensor.layout != torch.strided:
            words = (
                "a tensor to be sent or received must be dense, got one of layout "
                f"{str(tensor.layout).removeprefix('torch.')}"
            )
            return words, "Send tensor.to_dense(), or its indices and values one after the other"
        if not tensor.is_contiguous():
            return (
                f"a tensor to be sent or received must be contiguous, got one of {_layout(tensor)}",
                "Send tensor.contiguous(); receive into a contiguous tensor and copy from there",
            )
    if to_itself:
        return "the other side of a message must be another rank, got this one", _KEEP_IT
    return None


# Operations that read a tensor's properties and not its data, as those do whose names begin with
# "new_".
_LOOKS_ONLY: Final = (
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "is_same_size",
)


class _Use(NamedTuple):
    """A message on its way.

    From where to where in memory, what is sent and its checksum, and what to call it.
    """

    first: int
    end: int
    sent: torch.Tensor | None
    checksum: int
    what: str


class BufferGuard:
    """Remembers which buffers belong to messages, and raises where the program touches one.

    Args:
        recorder: writes down what was found.

    Attributes:
        uses: by handle, the messages that are on their way.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.uses: dict[Work, _Use] = {}  # posted and not yet waited for
        self._waited: weakref.WeakSet[Work] = weakref.WeakSet()
        # Python's own memory of warnings: one for each line
        self._warned: dict[str | tuple[str, type[Warning], int], int] = {}
        self._mode = _Watch(self)

    def start(self) -> None:
        """Begins to look at the operations of the calling thread."""
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch gives its modes no types

    def stop(self) -> None:
        """Ends that, on the same thread."""
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # likewise

    def wrap(self, hooks: Replacements) -> Replacements:
        """Returns what is to stand in place of a recorder's hooks, with this guard in front."""
        wrapped: Replacements = {}
        for place, hook in hooks.items():
            owner, name = place
            if owner is ProcessGroup and name in ("send", "recv", "recv_anysource"):
                wrapped[place] = self._make_message(hook, sends=name == "send")
            elif name == "wait":
                wrapped[place] = self._make_wait(hook)
        return wrapped

    def _make_message(self, hook: Hook, *, sends: bool) -> Hook:
        @functools.wraps(hook)
        def message(group: ProcessGroup, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            use = self._begin(tensors, sends)
            with without_modes():
                work = hook(group, tensors, *args, **kwargs)
            if work is not None and use is not None:
                self.uses[work] = use
            return work

        return message

    def _make_wait(self, hook: Hook) -> Hook:
        @functools.wraps(hook)
        def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
            use = self.uses.pop(work, None)
            if use is not None:
                self._waited.add(work)
                if use.sent is not None and _checksum(use.sent) != use.checksum:
                    self._complain(
                        "buffer_hazard",
                        "a buffer must stay as it is until its send was waited for, got other "
                        "contents",
                        use.what,
                        "Call wait() before the tensor is changed, or send a copy",
                    )
            elif work in self._waited:
                self._complain(
                    "invalid_argument",
                    "a handle must be waited for once, got a second wait()",
                    "",
                    "Drop the handle after the first: without ringsim the second one hangs",
                    ArgumentError,
                )
            return hook(work, *args, **kwargs)

        return wait

    def _begin(self, tensors: Any, sends: bool) -> _Use | None:
        """Returns the use of a buffer that a message is about to make.

        None if there is nothing to guard.
        """
        tensor = tensors[0] if tensors else None
        if (
            not isinstance(tensor, torch.Tensor)
            or not _in_memory(tensor)
            or not tensor.is_contiguous()
        ):
            return None
        frame = self._recorder.sites.find(sys._getframe(1))
        file, line = "an unknown file", 0
        if frame is not None:
            file, line = frame.f_code.co_filename, frame.f_lineno
        what = f"{'send' if sends else 'recv'} posted at {os.path.basename(file)}:{line}"
        if tensor.requires_grad and not sends:  # no error, for some programs mean just that
            warnings.warn_explicit(
                "a tensor to be received into must not require grad, got one that does (rank "
                f"{self._recorder.rank} of {self._recorder.world_size}, {what}). Autograd does not "
                "see messages: no gradient goes back to the sender by itself. Receive into a plain "
                "tensor, call requires_grad_() on it afterwards, and send its grad back.",
                UserWarning,
                file,
                line,
                registry=self._warned,
            )
        first = tensor.data_ptr()
        end = first + tensor.numel() * tensor.element_size()
        for use in self._overlapping(first, end):
            if not sends or use.sent is None:
                self._complain(
                    "buffer_hazard",
                    "a buffer must belong to one message at a time, got two that overlap",
                    f"{what}; {use.what}",
                    "Wait for the first one, or give each a tensor of its own",
                )
        return _Use(first, end, tensor if sends else None, _checksum(tensor) if sends else 0, what)

    def _overlapping(self, first: int, end: int) -> list[_Use]:
        """Returns the uses of memory from ``first`` to ``end`` (exclusive)."""
        return [use for use in self.uses.values() if use.first < end and first < use.end]

    def look_at(self, tensor: torch.Tensor, operation: str, *, writes: bool) -> None:
        """Raises an error if an operation uses a tensor in a buffer that a message is using."""
        if not _in_memory(tensor):
            return
        first = tensor.data_ptr()
        lengths = zip(tensor.shape, tensor.stride(), strict=True)
        reach = 1 + sum((size - 1) * stride for size, stride in lengths)
        for use in self._overlapping(first, first + reach * tensor.element_size()):
            if writes or use.sent is None:
                what = (
                    f"a buffer must not be {'changed' if writes else 'read'} before its message "
                    f"was waited for, got {operation}"
                )
                self._complain("buffer_hazard", what, use.what, "Call wait() on the handle first")

    def check_end(self) -> None:
        """Raises an error if messages were posted and never waited for."""
        if self.uses:
            use, more = next(iter(self.uses.values())), len(self.uses) - 1
            self.uses.clear()
            self._complain(
                "leaked_request",
                "every handle must be waited for, got one that never was",
                use.what + (f" and {more} more" if more else ""),
                "Keep what isend and irecv return, and call wait() on it: such a message may be "
                "lost",
            )

    def _complain(
        self, kind: str, what: str, about: str, todo: str, error: type[RingError] = RingError
    ) -> NoReturn:
        recorder = self._recorder
        where = f"rank {recorder.rank} of {recorder.world_size}"
        if about:
            where += f", {about}"
        message = f"{what} ({where}). {todo}."
        with without_modes():
            recorder.notice(kind, message)
        raise error(message)


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
        if self._guard.uses and func.namespace == "aten" and not func.is_view:
            name = func._schema.name.removeprefix("aten::")
            if name not in _LOOKS_ONLY and not name.startswith("new_"):
                writes = [
                    argument.alias_info is not None and argument.alias_info.is_write
                    for argument in func._schema.arguments
                ]
                for argument, written in [
                    *zip(args, writes, strict=False),
                    *((each, key == "out") for key, each in kwargs.items()),
                ]:
                    for leaf in tree_leaves(argument):
                        if isinstance(leaf, torch.Tensor):
                            self._guard.look_at(leaf, name, writes=written)
        return func(*args, **kwargs)


def _in_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements that lie in the host's memory."""
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel() > 0


def _checksum(tensor: torch.Tensor) -> int:
    """Returns a checksum of the bytes of a contiguous tensor."""
    with without_modes():
        plain = tensor.detach().resolve_conj().resolve_neg()
        data: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(data)
