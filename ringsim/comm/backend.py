"""The protocol of backends: what carries the messages of ``ringsim.comm``.

A backend is an object. Its methods are called exactly as the functions of ``torch.distributed`` are, by position, in torch's order;
arguments at the end that have torch's default value are left out, so a method needs torch's defaults. Nine things are required (the
abstract methods); whatever else a backend has (``all_reduce``, ``barrier``, ``send``, ...) is used, and whatever it has not is built from
what it has (``ringsim.comm.fallbacks``), in the last resort from ``isend`` and ``irecv``. So the smallest backend can do everything.

* Ranks in ``dst`` and ``src`` are global, those in ``group_dst`` and ``group_src`` count within the group; one of the two is given.
* ``group=None`` means all ranks. A group is an opaque value that answers ``size()``, ``rank()`` and ``group_name``, and that the backend's
  own methods accept. On a rank outside the group, ``get_rank(group)`` is -1, and operations on it do nothing and return None.
* A handle answers ``wait(timeout=None) -> bool``, which may be called again, and ``is_completed() -> bool``; that of an ``irecv``, once
  it is complete, also ``source_rank()`` (or ``_source_rank()``, as torch has it), a rank within the group. It may have a method
  ``complete_record(recorder, slot) -> bool``: its wait then completes that record as well (``timed_op``); False where it is over.
* Messages of one (group, source, destination, tag) arrive in the order in which they were sent. An ``isend`` may wait for its receiver.
* A message that a fallback sends has the tag ``FALLBACK_TAG``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from ringsim.errors import ArgumentError

__all__ = ["FALLBACK_TAG", "Backend"]

FALLBACK_TAG: Final = 31_717  # below 2**15, which every MPI can carry


class Backend(ABC):
    """What ``ringsim.comm`` needs of whoever carries its messages.

    Attributes:
        name: what the backend is called in errors and warnings, and in the entry points ``ringsim.backends``.
        direct: whether ``send`` and ``recv`` take all of torch's arguments, left out or not, and ``begin_send`` and ``begin_recv``, which
            then are called for ``isend`` and ``irecv``: it is shorter.
        in_order: whether what a rank posts on a group is carried out one after the other, as NCCL does it.

    Example:
        A backend of one rank, which needs nobody to carry anything:

        >>> class Alone(Backend):
        ...     name = "alone"
        ...     def is_initialized(self): return True
        ...     def init_process_group(self, *args, **kwargs): pass
        ...     def destroy_process_group(self, group=None): pass
        ...     def get_rank(self, group=None): return 0
        ...     def get_world_size(self, group=None): return 1
        ...     def get_process_group_ranks(self, group): return [0]
        ...     def new_group(self, ranks=None, *args, **kwargs): return object()
        ...     def isend(self, tensor, dst=None, group=None, tag=0, group_dst=None): raise ValueError("nobody is there")
        ...     def irecv(self, tensor, src=None, group=None, tag=0, group_src=None): raise ValueError("nobody is there")
        >>> Alone().supports("isend"), Alone().supports("all_reduce"), Alone().get_global_rank(None, 0)
        (True, False, 0)
    """

    name: ClassVar[str]
    direct: bool = False
    in_order: bool = False

    # -- the job: these answer without talking, but for the first two, which every rank calls

    @abstractmethod
    def init_process_group(self, *args: Any, **kwargs: Any) -> None:
        """Joins the ranks, as ``torch.distributed.init_process_group`` does: all ranks call it, and it blocks until all have.

        Args:
            args: torch's, in torch's order (backend, init_method, timeout, world_size, rank, ...); use those that mean something here.
            kwargs: the same by name.
        """

    @abstractmethod
    def new_group(self, ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Makes a group. All ranks call it in the same order, also those outside the group.

        Args:
            ranks: global ranks of the members, None for all.
            args: torch's others (timeout, backend, pg_options, ...); use those that mean something here.
            kwargs: the same by name.

        Returns:
            The group. On ranks outside, a value for which ``get_rank`` is -1.
        """

    @abstractmethod
    def destroy_process_group(self, group: Any = None) -> None:
        """Ends a group, or with None the job: every member calls it when its messages are done."""

    @abstractmethod
    def is_initialized(self) -> bool:
        """Returns whether the ranks are joined."""

    @abstractmethod
    def get_rank(self, group: Any = None) -> int:
        """Returns this rank's number within the group, -1 outside of it; with None its global rank."""

    @abstractmethod
    def get_world_size(self, group: Any = None) -> int:
        """Returns how many ranks the group has, -1 outside of it; with None how many there are."""

    @abstractmethod
    def get_process_group_ranks(self, group: Any) -> list[int]:
        """Returns the global ranks of a group, in the group's order."""

    # -- the messages

    @abstractmethod
    def isend(self, tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None) -> Any:
        """Begins to send a tensor, contiguous or not; does not block. ``tensor`` must not change until the handle is complete.

        Args:
            tensor: what to send, of any shape.
            dst: global rank of the receiver.
            group: both ranks are in it.
            tag: the receiver's must be the same.
            group_dst: rank of the receiver within ``group``, instead of ``dst``.

        Returns:
            A handle; None outside the group.
        """

    @abstractmethod
    def irecv(self, tensor: Any, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None) -> Any:
        """Begins to receive into a tensor, contiguous or not; does not block. It is filled when the handle's ``wait`` has returned.

        Args:
            tensor: where to, as large as what is sent.
            src: global rank of the sender; with neither this nor ``group_src``, anybody.
            group: both ranks are in it.
            tag: the sender's must be the same.
            group_src: rank of the sender within ``group``, instead of ``src``.

        Returns:
            A handle; None outside the group.
        """

    # -- what follows from the above

    def supports(self, op: str) -> bool:
        """Returns whether the backend itself has the operation ``op``; if not, it may still be built from others."""
        return callable(getattr(self, op, None))

    def get_backend(self, group: Any = None) -> str:
        """Returns the name of what carries the messages of ``group``."""
        return self.name

    def get_global_rank(self, group: Any, group_rank: int) -> int:
        """Returns the global rank of a member, given its rank within the group.

        Raises:
            ArgumentError: the group has no such rank.
        """
        ranks = self.get_process_group_ranks(group)
        if not 0 <= group_rank < len(ranks):
            raise ArgumentError(f"group_rank must be in 0..{len(ranks) - 1}, got {group_rank!r} (a group of {ranks}). Name a member.")
        return ranks[group_rank]

    def get_group_rank(self, group: Any, global_rank: int) -> int:
        """Returns the rank within the group of a member, given its global rank.

        Raises:
            ArgumentError: the rank is not in the group.
        """
        ranks = self.get_process_group_ranks(group)
        if global_rank not in ranks:
            raise ArgumentError(f"global_rank must be one of {ranks}, got {global_rank!r}. Name a member of the group.")
        return ranks.index(global_rank)
