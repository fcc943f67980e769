"""A rank as a member of a group: what the fallbacks ask of a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringsim.comm.backend import FALLBACK_TAG, Backend
from ringsim.comm.handle import Handle
from ringsim.errors import ArgumentError

__all__ = ["Member"]


class Member:
    """This rank within one group of one backend. Ranks here count within the group.

    Args:
        backend: what carries the messages.
        group: the group, None for all ranks.
        op: the operation that is built, for errors.

    Attributes:
        ranks: the global ranks of the group, in order.
        rank: this rank, -1 outside the group.
    """

    def __init__(self, backend: Backend, group: Any, op: str) -> None:
        self.backend = backend
        self.group = group
        self.op = op
        self.rank = backend.get_rank(group)
        self.ranks = backend.get_process_group_ranks(group) if self.rank >= 0 else []
        self.others = [rank for rank in range(len(self.ranks)) if rank != self.rank]

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.ranks)

    def native(self, *ops: str) -> tuple[str, Callable[..., Any]] | None:
        """Returns the first of ``ops`` that the backend itself has, None if it has none of them."""
        return next(((op, getattr(self.backend, op)) for op in ops if op != self.op and self.backend.supports(op)), None)

    def root(self, rank: int | None, group_rank: int | None, name: str, default: int | None = None) -> int:
        """Returns the rank that an operation starts or ends at, within the group.

        Args:
            rank: as the caller gave it, global.
            group_rank: or within the group.
            name: of the argument, for errors.
            default: the global rank if neither is given.

        Raises:
            ArgumentError: neither or both are given, or it is no member.
        """
        if rank is not None and group_rank is not None:
            raise ArgumentError(f"{name} must be given once, got {name}={rank} and group_{name}={group_rank} ({self.op}). Leave one out.")
        if group_rank is None:
            rank = default if rank is None else rank
            if rank not in self.ranks:
                raise ArgumentError(f"{name} must be one of {self.ranks}, got {rank!r} ({self.op}). Name a global rank of the group.")
            return self.ranks.index(rank)
        if not 0 <= group_rank < self.size:
            raise ArgumentError(f"group_{name} must be in 0..{self.size - 1}, got {group_rank!r} ({self.op}). Name a rank of the group.")
        return group_rank

    def check_list(self, tensors: Sequence[Any] | None, name: str) -> list[Any]:
        """Returns ``tensors`` as a list, which must have one entry for each rank."""
        found = list(tensors or ())
        if len(found) != self.size:
            raise ArgumentError(f"{name} must have one entry for each of {self.size} ranks, got {len(found)} ({self.op}). Fill it up.")
        return found

    def check_tensor(self, tensor: Any, name: str, like: torch.Tensor | None = None) -> None:
        """Raises unless ``tensor`` is one, with the dtype and as many elements as ``like``."""
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{name} must be a tensor, got {tensor!r} ({self.op}). Pass a tensor.")
        if like is not None and (tensor.dtype, tensor.numel()) != (like.dtype, like.numel()):
            raise ArgumentError(
                f"{name} must have the dtype and size of what it goes with, {tuple(like.shape)} {like.dtype}, got {tuple(tensor.shape)} "
                f"{tensor.dtype} ({self.op}). Make them alike."
            )

    def check_tensors(self, tensors: Sequence[Any] | None, name: str, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Returns ``tensors`` as a list, which must have a tensor for each rank, all of one dtype."""
        found = self.check_list(tensors, name)
        for tensor in found:
            self.check_tensor(tensor, name)
            if tensor.dtype != (dtype or found[0].dtype):
                raise ArgumentError(
                    f"{name} must have one dtype, {dtype or found[0].dtype}, got {tensor.dtype} ({self.op}). Make them alike."
                )
        return found

    def send(self, tensor: torch.Tensor, rank: int) -> Any:
        """Begins to send to another member; returns the handle."""
        return self.backend.isend(tensor.detach().contiguous(), self.ranks[rank], self.group, FALLBACK_TAG)

    def recv(self, tensor: torch.Tensor, rank: int) -> Any:
        """Begins to receive from another member into a contiguous tensor; returns the handle."""
        return self.backend.irecv(tensor, self.ranks[rank], self.group, FALLBACK_TAG)

    def recv_into(self, tensor: torch.Tensor, rank: int) -> tuple[Any, Callable[[], Any]]:
        """Begins to receive into any tensor; returns the handle, and what puts the message in place once it has come."""
        if tensor.is_contiguous():
            return self.recv(tensor, rank), _nothing
        buffer = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        return self.recv(buffer, rank), lambda: tensor.copy_(buffer)

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> tuple[list[Any], Callable[[], None]]:
        """Begins to send ``outgoing[i]`` to rank i and to receive ``incoming[i]`` from it; what is for oneself is copied later.

        Returns:
            The handles, and what puts the results in place once they are complete.
        """
        own = outgoing[self.rank].detach().clone()  # before anything comes in: the two lists may share memory
        received = [self.recv_into(incoming[rank], rank) for rank in self.others]
        works = [work for work, _ in received] + [self.send(outgoing[rank], rank) for rank in self.others]

        def finish() -> None:
            for _, place in received:
                place()
            incoming[self.rank].copy_(own.view_as(incoming[self.rank]))

        return works, finish

    def share(self, tensor: torch.Tensor) -> tuple[list[Any], list[torch.Tensor]]:
        """Begins to show a tensor to all members; returns the handles, and the tensors of all, filled once they are complete.

        By ``all_gather`` where the backend has it, else by messages.
        """
        own = tensor.detach().contiguous()
        parts = [torch.empty_like(own) for _ in self.ranks]
        native = self.native("all_gather")
        if native:
            return [native[1](parts, own, self.group, True)], parts
        parts[self.rank] = own.clone()
        works = [self.recv(parts[rank], rank) for rank in self.others] + [self.send(own, rank) for rank in self.others]
        return works, parts

    @staticmethod
    def end(works: Sequence[Any], finish: Callable[[], Any], results: Sequence[torch.Tensor], async_op: bool) -> Handle | None:
        """Returns a handle for an asynchronous operation; waits for another."""
        handle = Handle(works, finish, results)
        if async_op:
            return handle
        handle.wait()
        return None


def _nothing() -> None:
    """The message is in its place already."""
