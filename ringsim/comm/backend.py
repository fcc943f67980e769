"""The protocol of backends.

What carries the messages of ``ringsim.comm``, which backend is in force, and torch as a backend. A
backend is an object. Its methods are called exactly as the functions of ``torch.distributed`` are,
by position, in torch's order; arguments at the end that have torch's default value are left out, so
a method needs torch's defaults. Nine methods are required (the abstract ones). Whatever else a
backend has (``all_reduce``, ``barrier``, ``send``, ...) is used. For collectives that it has no
method for, ``start`` may begin a transfer, given the call as ``ringsim.comm.collectives`` has read
and checked it. All the rest is built from ``isend`` and ``irecv`` (``ringsim.comm.built``), so the
smallest backend can do everything.

* Ranks in ``dst`` and ``src`` are global, those in ``group_dst`` and ``group_src`` count within the
  group; one of the two is given.
* ``group=None`` means all ranks. A group is an opaque value that answers ``size()``, ``rank()`` and
  ``group_name``, and that the backend's own methods accept. On a rank outside the group,
  ``get_rank(group)`` is -1, and operations on it do nothing and return None.
* A handle answers ``wait(timeout=None) -> bool``, which may be called again, and
  ``is_completed() -> bool``; that of an ``irecv``, once it is complete, also ``source_rank()`` (or
  ``_source_rank()``, as torch has it), a rank within the group. It may have a method
  ``complete_record(recorder, slot) -> bool``: its wait then completes that record as well
  (``timed_op``); False where it is over.
* Messages of one (group, source, destination, tag) arrive in the order in which they were sent. An
  ``isend`` may wait for its receiver.
* A message that belongs to an operation built from messages has the tag ``FALLBACK_TAG``.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Final

import torch.distributed as dist

from ringsim.comm.collectives import (
    READINGS,
    Call,
    Members,
    OpaqueGroup,
    check_batch,
    read_call,
    to_index,
)
from ringsim.errors import ArgumentError, RingError
from ringsim.state import change_state, get_state
from ringsim.traces.events import OP_CODES

__all__ = [
    "FALLBACK_TAG",
    "GROUP",
    "TORCH",
    "Backend",
    "Membership",
    "TorchBackend",
    "get_backend_object",
    "set_backend",
]

FALLBACK_TAG: Final = 31_717  # below 2**15, which every MPI can carry


class Backend(ABC):
    """What ``ringsim.comm`` needs of whoever carries its messages.

    Attributes:
        name: what the backend is called in errors and warnings, and in the entry points
            ``ringsim.backends``.
        direct: whether all its methods take all of torch's arguments, by name too: then they are
            called with the arguments as they are given, where there is no log.
        in_order: whether what a rank posts on a group is carried out one after the other, as NCCL
            does it.

    Example:
        A backend of one rank, which needs nobody to carry anything:

        >>> class Alone(Backend):
        ...     name = "alone"
        ...
        ...     def is_initialized(self):
        ...         return True
        ...
        ...     def init_process_group(self, *args, **kwargs):
        ...         pass
        ...
        ...     def destroy_process_group(self, group=None):
        ...         pass
        ...
        ...     def get_rank(self, group=None):
        ...         return 0
        ...
        ...     def get_world_size(self, group=None):
        ...         return 1
        ...
        ...     def get_process_group_ranks(self, group):
        ...         return [0]
        ...
        ...     def new_group(self, ranks=None, *args, **kwargs):
        ...         return object()
        ...
        ...     def isend(self, tensor, dst=None, group=None, tag=0, group_dst=None):
        ...         raise ValueError("nobody is there")
        ...
        ...     def irecv(self, tensor, src=None, group=None, tag=0, group_src=None):
        ...         raise ValueError("nobody is there")
        >>> (
        ...     Alone().supports("isend"),
        ...     Alone().supports("all_reduce"),
        ...     Alone().get_global_rank(None, 0),
        ... )
        (True, False, 0)
    """

    name: ClassVar[str]
    direct: bool = False
    in_order: bool = False

    # -- the job: these answer without talking, but for the first two, which every rank calls

    @abstractmethod
    def init_process_group(self, *args: Any, **kwargs: Any) -> None:
        """Joins the ranks, as ``torch.distributed.init_process_group`` does.

        All ranks call it, and it blocks until all have.

        Args:
            args: torch's, in torch's order (backend, init_method, timeout, world_size, rank, ...);
                use those that mean something here.
            kwargs: the same by name.
        """

    @abstractmethod
    def new_group(self, ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Makes a group. All ranks call it in the same order, also those outside the group.

        Args:
            ranks: global ranks of the members, None for all.
            args: torch's others (timeout, backend, pg_options, ...); use those that mean something
                here.
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
        """Returns this rank's number within the group, -1 outside of it.

        With None its global rank.
        """

    @abstractmethod
    def get_world_size(self, group: Any = None) -> int:
        """Returns how many ranks the group has, -1 outside of it; with None how many there are."""

    @abstractmethod
    def get_process_group_ranks(self, group: Any) -> list[int]:
        """Returns the global ranks of a group, in the group's order."""

    # -- the messages

    @abstractmethod
    def isend(
        self,
        tensor: Any,
        dst: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> Any:
        """Begins to send a tensor, contiguous or not; does not block.

        ``tensor`` must not change until the handle is complete.

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
    def irecv(
        self,
        tensor: Any,
        src: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Any:
        """Begins to receive into a tensor, contiguous or not; does not block.

        It is filled when the handle's ``wait`` has returned.

        Args:
            tensor: where to, as large as what is sent.
            src: global rank of the sender; with neither this nor ``group_src``, anybody.
            group: both ranks are in it.
            tag: the sender's must be the same.
            group_src: rank of the sender within ``group``, instead of ``src``.

        Returns:
            A handle; None outside the group.
        """

    # -- collectives

    def start(self, call: Call) -> Any:
        """Begins a collective for which the backend has no method of torch's name.

        Args:
            call: what this rank gives and gets, checked.

        Returns:
            A handle. NotImplemented to have it built from messages.
        """
        return NotImplemented

    def enter(self, op: str, group: Any) -> Members | None:
        """Returns who is in the group of an operation, None where this rank is outside.

        Args:
            op: the operation, for a warning.
            group: as it was given.
        """
        rank = self.get_rank(group)
        return None if rank < 0 else OpaqueGroup(group, self.get_process_group_ranks(group), rank)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Gives a class that has ``start`` the collectives of torch's names that it begins."""
        super().__init_subclass__(**kwargs)
        if cls.start is not Backend.start:
            for name in READINGS:
                if not hasattr(cls, name):
                    setattr(cls, name, _make_collective(name))

    # -- what follows from the above

    def supports(self, op: str) -> bool:
        """Returns whether the backend itself has the operation ``op``.

        If not, it may still be built from others.
        """
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
            raise ArgumentError(
                f"group_rank must be in 0..{len(ranks) - 1}, got {group_rank!r} (a group of "
                f"{ranks}). Name a member."
            )
        return ranks[group_rank]

    def get_group_rank(self, group: Any, global_rank: int) -> int:
        """Returns the rank within the group of a member, given its global rank.

        Raises:
            ArgumentError: the rank is not in the group.
        """
        ranks = self.get_process_group_ranks(group)
        if global_rank not in ranks:
            raise ArgumentError(
                f"global_rank must be one of {ranks}, got {global_rank!r}. Name a member of the "
                "group."
            )
        return ranks.index(global_rank)


def run_collective(
    backend: Backend, start: Callable[[Any, Call], Any], name: str, /, *args: Any, **kwargs: Any
) -> Any:
    """Reads a call of a collective, and has it started; waits for it unless it is asynchronous.

    Args:
        backend: whose groups are meant.
        start: begins it, given the backend and the call; returns the handle.
        name: of torch's function.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The handle of an asynchronous call, else None; None outside the group.
    """
    arguments = READINGS[name].bind(args, kwargs)
    members = backend.enter(name, arguments["group"])
    if members is None:
        return None
    call = read_call(name, arguments, members)
    handle = start(backend, call)
    if call.async_op:
        return handle
    handle.wait(call.timeout)
    return None


def _make_collective(name: str) -> Callable[..., Any]:
    """Makes the method of a collective that ``start`` begins."""

    def communicate(self: Backend, /, *args: Any, **kwargs: Any) -> Any:
        return run_collective(self, type(self).start, name, *args, **kwargs)

    return communicate


class TorchBackend(Backend):
    """Passes everything on to ``torch.distributed``; what torch has, this has, under the same name.

    Example:
        >>> TorchBackend().supports("all_reduce"), TorchBackend().supports("all_reduce_by_pigeon")
        (True, False)
    """

    name = "torch"
    new_group = staticmethod(dist.new_group)
    destroy_process_group = staticmethod(dist.destroy_process_group)
    is_initialized = staticmethod(dist.is_initialized)
    get_rank = staticmethod(dist.get_rank)
    get_world_size = staticmethod(dist.get_world_size)
    get_process_group_ranks = staticmethod(dist.get_process_group_ranks)
    get_backend = staticmethod(dist.get_backend)
    get_global_rank = staticmethod(dist.get_global_rank)
    get_group_rank = staticmethod(dist.get_group_rank)
    isend = staticmethod(dist.isend)
    irecv = staticmethod(dist.irecv)
    # DeepSpeed's benchmarks ask for it
    get_all_gather_function = staticmethod(lambda: dist.all_gather_into_tensor)

    def init_process_group(self, *args: Any, **kwargs: Any) -> None:
        """Calls torch's, or what stands in its place.

        In ranks that have a world already, what joins it.
        """
        dist.init_process_group(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Returns torch's function ``name``."""
        return getattr(dist, name)


TORCH: Final = TorchBackend()


GROUP: Final = "ringsim.backends"  # of the entry points
# Written as entry points, too: a name costs nothing until it is asked for.
_BUILT_IN: Final = {
    name: EntryPoint(name, value, GROUP)
    for name, value in (
        ("torch", "ringsim.comm.backend:TORCH"),
        ("mpi", "ringsim.comm.mpi:MpiBackend"),
    )
}


def get_backend_object() -> Backend:
    """Returns the current backend, which ``ringsim.comm.cdb`` is."""
    return get_state().backend or TORCH


def set_backend(backend: Backend | str) -> Backend:
    """Makes ``ringsim.comm`` send through another backend from now on.

    Every rank calls it, before ``init_process_group`` and ``initialize_distributed``; it does not
    block. Groups and handles of one backend mean nothing to another.

    Args:
        backend: an object that keeps the protocol of ``ringsim.comm.backend.Backend``; or the name
            of one: "torch", "mpi", or an entry point of the group ``ringsim.backends``, which names
            a backend or a class that makes one without arguments.

    Returns:
        The backend.

    Raises:
        ArgumentError: there is no backend of that name, it cannot be loaded, or it is no backend.

    Example:
        >>> set_backend("torch").name
        'torch'
        >>> set_backend("pigeon")
        Traceback (most recent call last):
        ...
        ringsim.errors.ArgumentError: backend must be one of mpi, torch or a Backend, got 'pigeon'. Install the package that brings it.
    """  # noqa: E501
    found = _load(backend) if isinstance(backend, str) else backend
    if not isinstance(found, Backend):
        raise ArgumentError(
            f"backend must be a ringsim.comm.backend.Backend or a name, got {found!r}. Derive "
            "its class from Backend."
        )
    change_state(backend=None if found is TORCH else found)
    return found


def _load(name: str) -> object:
    """Returns what the entry point ``name`` leads to, an object of it if it is a class."""
    known = {**{each.name: each for each in entry_points(group=GROUP)}, **_BUILT_IN}
    if name not in known:
        raise ArgumentError(
            f"backend must be one of {', '.join(sorted(known))} or a Backend, got {name!r}. "
            "Install the package that brings it."
        )
    try:
        found = known[name].load()
        return found() if isinstance(found, type) else found
    except ImportError as error:
        hint = "pip install 'ringsim[mpi]'" if name == "mpi" else "the package that it needs"
        raise ArgumentError(
            f"backend must be loadable, got {name!r}, which lacks {error.name or error}. Install "
            f"it: {hint}."
        ) from error


class Membership:
    """The part of a backend that answers for its groups, which are ``Members``.

    It begins messages by two methods of its own.

    Attributes:
        begin_send: ``isend``, with one argument more: the code that the operation is recorded as.
        begin_recv: the same for ``irecv``.
    """

    name: ClassVar[str]
    begin_send: Callable[..., Any]
    begin_recv: Callable[..., Any]

    @abstractmethod
    def here(self) -> str:
        """Returns which rank this is, for errors."""

    @abstractmethod
    def _everybody(self) -> Any:
        """Returns the group of all ranks; raises RingError where this rank has not joined them."""

    @abstractmethod
    def _exists(self, group: Any) -> bool:
        """Returns whether a group has not been destroyed."""

    def find_group(self, group: Any) -> Any:
        """Returns a group given as torch's functions take it; None where this rank is outside.

        Raises:
            RingError: the ranks are not joined, or the group was destroyed.
            ArgumentError: it is no group of this backend.
        """
        everybody = self._everybody()
        if group is None:
            return everybody
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return None
        if not isinstance(group, type(everybody)):
            raise ArgumentError(
                f"group must be one of the {self.name} backend, got {group!r} ({self.here()}). "
                "Make it with ringsim.comm.new_group, and "
                "call ringsim.comm's functions, not torch.distributed's: DeviceMesh and "
                "ProcessGroup are torch's own."
            )
        if not self._exists(group):
            raise RingError(
                f"the group must exist, got {group} after it was destroyed ({self.here()}). Make "
                "a new one: new_group."
            )
        return group if group.rank() >= 0 else None

    def enter(self, op: str, group: Any) -> Any:
        """Returns the group of an operation.

        Outside of it warns, as torch does, and returns None.
        """
        found = self.find_group(group)
        if found is None:
            warnings.warn(
                f"{op} does nothing on rank {self.get_rank()}, which is not in the group.",
                stacklevel=3,
            )
        return found

    def get_rank(self, group: Any = None) -> int:
        """Returns this rank's number within the group, -1 outside of it.

        With None its global rank.
        """
        found = self.find_group(group)
        return -1 if found is None else found.rank()

    def get_world_size(self, group: Any = None) -> int:
        """Returns how many ranks the group has, -1 outside of it; with None how many there are."""
        found = self.find_group(group)
        return -1 if found is None else found.size()

    def get_process_group_ranks(self, group: Any = None) -> list[int]:
        """Returns the global ranks of a group, in the group's order.

        Raises ArgumentError where this rank is outside.
        """
        found = self.find_group(group)
        if found is None:
            raise ArgumentError(
                "the ranks of a group must be asked for within it, got a question from outside "
                f"({self.here()})."
            )
        return list(found.ranks)

    def isend(
        self,
        tensor: Any,
        dst: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> Any:
        """Begins to send; does not block.

        The tensor must not change until the handle has been waited for.
        """
        return self.begin_send(tensor, dst, group, tag, group_dst)

    def irecv(
        self,
        tensor: Any,
        src: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Any:
        """Begins to receive, from anybody where no source is given; does not block."""
        return self.begin_recv(tensor, src, group, tag, group_src)

    def send(
        self,
        tensor: Any,
        dst: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> None:
        """Sends; blocks until the tensor may change.

        For a large one that may be when its receiver has posted.
        """
        handle = self.begin_send(tensor, dst, group, tag, group_dst, OP_CODES["send"])
        if handle is not None:
            handle.wait()

    def recv(
        self,
        tensor: Any,
        src: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> int:
        """Receives; blocks. Returns the sender's global rank, -1 outside the group."""
        handle = self.begin_recv(tensor, src, group, tag, group_src, OP_CODES["recv"])
        if handle is None:
            return -1
        handle.wait()
        return int(self.find_group(group).ranks[handle.source_rank()])

    def batch_isend_irecv(self, p2p_op_list: Any) -> list[Any]:
        """Begins several messages; does not block.

        The order of sends against recvs does not matter.

        Args:
            p2p_op_list: ``P2POp`` of ``isend`` and ``irecv``, with one group.

        Returns:
            A handle for each.

        Raises:
            ArgumentError: the list is empty, or holds something else.
        """
        begin = {"isend": self.begin_send, "irecv": self.begin_recv}
        calls = check_batch(p2p_op_list, self.here())
        with self._batch():
            works = [
                begin[op](
                    each.tensor, each.peer, each.group, each.tag, None, OP_CODES[f"batch_{op}"]
                )
                for op, each in calls
            ]
        return [work for work in works if work is not None]

    def _batch(self) -> AbstractContextManager[Any]:
        """Returns the context in which the messages of a batch begin."""
        return nullcontext()

    def _members(self, ranks: Sequence[int] | None, sort_ranks: bool) -> tuple[int, ...]:
        """Returns the global ranks that ``new_group`` is asked for, in the group's order."""
        size = self.get_world_size()
        members = (
            tuple(range(size))
            if ranks is None
            else tuple(to_index("ranks", rank) for rank in ranks)
        )
        if len(set(members)) != len(members) or not all(0 <= rank < size for rank in members):
            raise ArgumentError(
                f"ranks must be different ranks from 0 to {size - 1}, got {list(members)} "
                f"({self.here()}). Leave out the others."
            )
        return tuple(sorted(members)) if sort_ranks else members
