"""Writes the operations of the MPI backend down, for the one recorder, as the hooks write down torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringsim.comm.collectives import describe
from ringsim.state import get_state
from ringsim.traces.events import OP_CODES
from ringsim.traces.recorder import Recorder

Begun = tuple[Recorder, int] | None  # who recorded the post of an operation, and where; None where nobody records


class MpiTape:
    """What one recorder has been told: groups, payloads and kinds of operations that have a number already.

    Args:
        recorder: writes the events.
        library: the MPI library and its version, for the trace.
    """

    def __init__(self, recorder: Recorder, library: str) -> None:
        self.recorder = recorder
        self._posts: dict[str, Callable[..., int | None]] = {}
        self._groups: dict[Any, int] = {}
        self._payloads: dict[Any, int] = {}
        recorder.set_meta("backend", "mpi")
        recorder.set_meta("mpi_library", library)

    def post(self, op: str, group: Any, peer: int, tag: int, tensors: Sequence[torch.Tensor], copies: int) -> Begun:
        """Writes down that an operation begins.

        Args:
            op: its name.
            group: where.
            peer: global rank of the other side or of the root, NONE or ANY_SOURCE.
            tag: of a message, else NONE.
            tensors: what its size is reckoned from.
            copies: how many times they count; see ``ringsim.comm.collectives.describe``.
        """
        key = (copies, *((tensor.shape, tensor.dtype) for tensor in tensors))
        payload = self._payloads.get(key)
        if payload is None:
            dtype, shape, size_bytes = describe(list(tensors), copies)
            payload = self._payloads[key] = self.recorder.payload(dtype, shape, size_bytes)
        number = self._groups.get(group)
        if number is None:
            number = self._groups[group] = self.recorder.group(group.group_name, group.ranks)
        post = self._posts.get(op)
        if post is None:
            post = self._posts[op] = self.recorder.make_post(OP_CODES[op])
        slot = post(number, peer, tag, payload)
        return None if slot is None else (self.recorder, slot)


class MpiTapes:
    """Gives the tape of the recorder that is at work now.

    Args:
        library: the MPI library and its version.
    """

    def __init__(self, library: str) -> None:
        self._library = library
        self._current: MpiTape | None = None

    def post(self, op: str, group: Any, peer: int, tag: int, tensors: Sequence[torch.Tensor], copies: int = 1) -> Begun:
        """Writes down that an operation begins, where somebody records; see ``MpiTape.post``."""
        recorder = get_state().recorder
        if recorder is None:
            return None
        tape = self._current
        if tape is None or tape.recorder is not recorder:
            tape = self._current = MpiTape(recorder, self._library)
        return tape.post(op, group, peer, tag, tensors, copies)
