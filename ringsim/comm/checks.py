"""Checks operations that torch would accept, or would reject without naming the rank or peer.

A nonexistent rank crashes Gloo, and Gloo silently fails to send a meta tensor. This module finds
such errors before it calls the library. After the library itself has raised an error, the module
explains that error, which costs nothing for correct programs.

The teaching mode (``check="full"``) also finds uses of a buffer while a message is in flight, and
misuses of handles. Between ``isend`` or ``irecv`` and the end of ``wait()``, the tensor belongs to
the library. Using the tensor during that time may work on one machine and produce garbage on the
next::

    work = dist.irecv(buffer, src=0)
    total = buffer.sum()  # too early: reads old values, new ones, or some of each
    work.wait()

The mode checks each torch operation on the recording thread, and compares checksums of a buffer at
the send and at the wait. These checks cost about 20 us per torch operation, and read each sent byte
twice, so the mode is not always on.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
import weakref
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed import ProcessGroup, Work

from ringsim.comm.torch_private import (
    CHECK_NOT_SELF,
    DESCRIBE_CALL,
    WARN_OUTSIDER,
    DispatchMode,
    Hook,
    Replacements,
    present,
    tree_leaves,
    without_modes,
)
from ringsim.errors import ArgumentError, RingError
from ringsim.traces.events import ERROR, NONE
from ringsim.traces.recorder import Post, Recorder

_TAG_MAX = 2**31 - 1
_MESSAGES = ("isend", "irecv", "send_object_list", "recv_object_list")
_KEEP_IT = "Copy the tensor instead: data that stays on a rank needs no message"


class Attempt(NamedTuple):
    """An operation that the program requests: its name and the numbers in its record.

    The ``tag`` is None for a collective.
    """

    op: str
    group: int
    peer: int
    tag: Any
    payload: int


class Prechecks:
    """Checks operations, raises errors at the user's line, and records the errors in the trace.

    Args:
        recorder: the recorder for the findings.

    Attributes:
        replacements: the replacements for torch's functions that handle ranks outside a group,
            sends from a rank to itself, and failed calls.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._warn_outsider: Callable[[str], None] = getattr(*WARN_OUTSIDER, lambda _: None)
        self.replacements: Replacements = present(
            {
                WARN_OUTSIDER: self.refuse_outsider,
                CHECK_NOT_SELF: self.check_not_self,
                # torch's own function also fails if the rank is not in the group
                DESCRIBE_CALL: lambda name, *_, **__: {"func_name": name},
            }
        )

    def check_message(
        self, attempt: Attempt, tensors: Any, rank: Any, size: int, post: Post
    ) -> None:
        """Raises ArgumentError if a message has no data, or if its peer is outside the group.

        See ``explain`` for other errors.

        Args:
            attempt: the message.
            tensors: the tensors of the message.
            rank: the other side, as a rank of the group.
            size: the number of ranks in the group.
            post: a function that records the message as failed from the beginning, because other
                ranks read the record.
        """
        if attempt.peer == NONE and isinstance(rank, int):
            what = (
                f"the other side of a {attempt.op} must be a rank of the group, from 0 to "
                f"{size - 1}, got {rank}"
            )
            self.refuse(
                what,
                "Count ranks from 0, and wrap around after the last rank: (rank + 1) % world_size",
                attempt,
                post,
            )
        if isinstance(tensors, list) and any(
            isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in tensors
        ):
            what = "a tensor to send or receive must hold data, got a tensor on the meta device"
            self.refuse(
                what,
                "Create the tensor on the CPU, for example with torch.empty_like(tensor, "
                "device='cpu')",
                attempt,
                post,
            )

    def refuse_collective(self, attempt: Attempt, tensor: torch.Tensor, post: Post) -> NoReturn:
        """Raises ArgumentError for an unfit tensor that ``find_unfit`` found in a collective."""
        if tensor.is_meta:
            self.refuse(
                "the tensors passed to a collective must hold data, got a tensor on "
                "the meta device",
                "Create the tensor on the CPU",
                attempt,
                post,
            )
        what = (
            "the tensors passed to a collective must have no gaps in memory, got a tensor "
            f"with {_layout(tensor)}"
        )
        self.refuse(what, "Pass tensor.contiguous(), and copy the result back", attempt, post)

    def refuse_outsider(self, op_name: str) -> None:
        """Raises ArgumentError for a message outside its group, where torch only warns.

        Such a message would be lost. A collective outside its group only gets the warning, because
        it does nothing, and many programs intentionally call it on all ranks.
        """
        if op_name not in _MESSAGES:
            self._warn_outsider(op_name)
            return
        self.refuse(
            f"{op_name} was called on a group that does not include this rank",
            "Call it only on members of the group",
        )

    def check_not_self(self, group: ProcessGroup | int, rank: int, what: str) -> None:
        """Raises ArgumentError if a rank sends to itself or is not in the group.

        Torch's own function raises ValueError.
        """
        if not isinstance(group, ProcessGroup):  # torch's value for ranks outside the group
            self.refuse_outsider("isend" if what == "destination" else "irecv")
        elif group.rank() == rank:
            self.refuse(
                f"the {what} of a message must be a different rank, got this rank", _KEEP_IT
            )

    def explain(self, error: BaseException, tensors: Any, attempt: Attempt) -> None:
        """Raises ArgumentError in place of a library error that the arguments caused.

        Returns normally if the arguments do not explain the error.
        """
        if not isinstance(error, Exception) or isinstance(error, RingError):
            return
        try:
            found = find_fault(tensors, attempt.tag, attempt.peer == self._recorder.rank)
        except Exception:
            return  # arguments of an unknown kind: keep the library's own message
        if found is not None:
            self.refuse(*found, attempt)

    def refuse(
        self, what: str, todo: str, attempt: Attempt | None = None, post: Post | None = None
    ) -> NoReturn:
        """Raises ArgumentError at the user's line, and records the error in the trace."""
        recorder, about = self._recorder, ""
        numbers = attempt[1:] if attempt else (NONE,) * 4
        if attempt is not None:
            about = attempt.op
            if attempt.tag is not None:
                if attempt.peer >= 0:
                    about += f" {'to' if attempt.op == 'send' else 'from'} {attempt.peer}"
                about += f", tag {attempt.tag}"
            if attempt.group >= 0:
                about += f", group {recorder.groups[attempt.group].name}"
        if post is not None and (slot := post(*numbers)) is not None:
            recorder.complete(slot, ERROR)
        _complain(recorder, ArgumentError, "invalid_argument", what, about, todo, *numbers)


def _complain(
    recorder: Recorder,
    error: type[RingError],
    kind: str,
    what: str,
    about: str,
    todo: str,
    *numbers: int,
) -> NoReturn:
    """Raises an error, and records it in the trace."""
    where = f"rank {recorder.rank} of {recorder.world_size}"
    if about:
        where += f", {about}"
    message = f"{what} ({where}). {todo}."
    with without_modes():
        recorder.notice(kind, message, *numbers)
    raise error(message) from None


def _layout(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)} and stride {tensor.stride()}"


def find_fault(tensors: Any, tag: Any, to_itself: bool) -> tuple[str, str] | None:
    """Returns a description of the fault and a remedy, or None if the arguments are valid."""
    if isinstance(tag, int) and not 0 <= tag <= _TAG_MAX:
        return (
            f"a tag must be an integer from 0 to {_TAG_MAX:,}, got {tag}",
            "Number the messages from 0",
        )
    for tensor in tensors:
        if tensor.layout != torch.strided:
            words = (
                "a tensor to send or receive must be dense, got a tensor with layout "
                f"{str(tensor.layout).removeprefix('torch.')}"
            )
            return words, "Send tensor.to_dense(), or send the indices and values separately"
        if not tensor.is_contiguous():
            return (
                "a tensor to send or receive must be contiguous, got a tensor with "
                f"{_layout(tensor)}",
                "Send tensor.contiguous(), or receive into a contiguous tensor and copy from it",
            )
    if to_itself:
        return "the other side of a message must be a different rank, got this rank", _KEEP_IT
    return None


# Operations that read only a tensor's properties, not its data, like those whose names begin with
# "new_".
_LOOKS_ONLY = (
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "is_same_size",
)


class _Use(NamedTuple):
    """The buffer of a message in flight.

    The tuple contains the buffer's address range, the sent tensor and its checksum, and a
    description.
    """

    first: int
    end: int
    sent: torch.Tensor | None
    checksum: int
    what: str


class BufferGuard:
    """A guard for message buffers in flight; raises an error if the program uses such a buffer.

    Args:
        recorder: the recorder for the findings.

    Attributes:
        uses: the messages in flight, by handle.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.uses: dict[Work, _Use] = {}  # posted and not yet waited for
        self._waited: weakref.WeakSet[Work] = weakref.WeakSet()
        # Python's registry of warnings: one warning per line
        self._warned: dict[Any, int] = {}
        self._mode = _Watch(self)

    def start(self) -> None:
        """Starts checking the operations on the calling thread."""
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch gives its modes no types

    def stop(self) -> None:
        """Stops checking; must be called on the same thread."""
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # also untyped

    def wrap(self, hooks: Replacements) -> Replacements:
        """Returns a recorder's hooks, wrapped so that this guard checks each call first."""
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
                        "the program changed a buffer before it waited for the send",
                        use.what,
                        "Call wait() before you change the tensor, or send a copy",
                    )
            elif work in self._waited:
                self._complain(
                    "invalid_argument",
                    "wait() was called twice on the same handle",
                    "",
                    "Drop the handle after the first wait(): without ringsim, a second wait() "
                    "hangs",
                    ArgumentError,
                )
            return hook(work, *args, **kwargs)

        return wait

    def _begin(self, tensors: Any, sends: bool) -> _Use | None:
        """Returns the buffer that a message to be posted will use, or None without a buffer."""
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
        if tensor.requires_grad and not sends:  # not an error, because some programs intend it
            warnings.warn_explicit(
                "this rank is receiving a message into a tensor that requires grad (rank "
                f"{self._recorder.rank} of {self._recorder.world_size}, {what}). Autograd does "
                "not track messages, so no gradient is sent back automatically. Receive into "
                "a plain tensor, call requires_grad_() on it afterwards, and send its grad "
                "back.",
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
                    "two messages in flight use overlapping buffers",
                    f"{what}; {use.what}",
                    "Wait for the first message, or use a separate tensor for each message",
                )
        return _Use(first, end, tensor if sends else None, _checksum(tensor) if sends else 0, what)

    def _overlapping(self, first: int, end: int) -> list[_Use]:
        """Returns the uses that overlap the memory from ``first`` to ``end`` (exclusive)."""
        return [use for use in self.uses.values() if use.first < end and first < use.end]

    def look_at(self, tensor: torch.Tensor, operation: str, *, writes: bool) -> None:
        """Raises an error if an operation uses a tensor in the buffer of a message in flight."""
        if not _in_memory(tensor):
            return
        first = tensor.data_ptr()
        lengths = zip(tensor.shape, tensor.stride(), strict=True)
        reach = 1 + sum((size - 1) * stride for size, stride in lengths)
        for use in self._overlapping(first, first + reach * tensor.element_size()):
            if writes or use.sent is None:
                what = (
                    f"{operation} would {'change' if writes else 'read'} a buffer whose message "
                    "has not been waited for"
                )
                self._complain("buffer_hazard", what, use.what, "Call wait() on the handle first")

    def check_end(self) -> None:
        """Raises an error if any posted message was never waited for."""
        if self.uses:
            use, more = next(iter(self.uses.values())), len(self.uses) - 1
            self.uses.clear()
            self._complain(
                "leaked_request",
                "a handle was never waited for",
                use.what + (f" and {more} more" if more else ""),
                "Keep the handles that isend and irecv return, and call wait() on each: otherwise "
                "messages may be lost",
            )

    def _complain(
        self, kind: str, what: str, about: str, todo: str, error: type[RingError] = RingError
    ) -> NoReturn:
        _complain(self._recorder, error, kind, what, about, todo)


class _Watch(DispatchMode):
    """A mode that checks every torch operation on the thread that entered it."""

    def __init__(self, guard: BufferGuard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives its modes no types
        self._guard = guard

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
    """Returns whether a tensor has elements in the host's memory."""
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel() > 0


def _checksum(tensor: torch.Tensor) -> int:
    """Returns a checksum of the bytes of a contiguous tensor."""
    with without_modes():
        plain = tensor.detach().resolve_conj().resolve_neg()
        data: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(data)
