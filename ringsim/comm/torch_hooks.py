"""Shows torch's operations to the recorder, by patching the class ``ProcessGroup``; and the making and the end of process groups.

Every operation that Python issues passes that class, whatever name it was called by and whenever that name was imported. The originals are
back, the very same objects, when the last user uninstalls the hooks. Groups and payloads are numbered when they are first met.

A rank that makes another group than its peers waits for them for half an hour, and one that destroys its groups leaves others in the
middle of what they do there, so both are recorded. The n-th group that a rank makes meets the n-th of every other, whatever its members:
torch numbers them so. Its record is a collective on a group of its own, ``GROUPS``, with the members in place of a shape. A group that
its members alone make (``use_local_synchronization``) is named by torch after them and the number of groups the rank is in already. So is
its record, on a group of these members: where they are in different numbers of groups, they wait for each other in vain.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work, distributed_c10d

from ringsim.comm.checks import BufferGuard, Prechecks, make_record_refused
from ringsim.comm.collectives import METHODS, Reading, describe, find_reduction, find_root, find_tensors, find_unfit
from ringsim.comm.gpu_times import NO_EVENT, NOT_READ, Begun, GpuTimes, find_gpu, is_nccl
from ringsim.errors import RendezvousFailed, RingError
from ringsim.state import change_state, get_state
from ringsim.traces.events import ANY_SOURCE, COLLECTIVE, DESTROYED, ERROR, MADE_ANEW, NONE, OP_CODES, OP_KINDS, OP_NAMES
from ringsim.traces.parts import PartReader
from ringsim.traces.recorder import Recorder, fail_posting

__all__ = [
    "COLLECTIVE_OPS",
    "GROUPS",
    "NOT_RECORDED",
    "RECVS",
    "SENDS",
    "TorchNames",
    "name_and_ranks",
    "record_end_of_groups",
    "record_new_groups",
]


def name_and_ranks(group: ProcessGroup) -> tuple[str, list[int]]:
    """Returns a group's name, the same on all of its ranks, and the global rank of each of its ranks.

    Args:
        group: any process group; of one that was made behind torch's back nobody knows which global ranks are in it.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> name_and_ranks(dist.group.WORLD)
        ('world', [0])
        >>> dist.destroy_process_group()
    """
    name = _name(group)
    try:
        return name, dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return f"{name or 'unnamed'} (unregistered: group ranks)", list(range(group.size()))


def _name(group: ProcessGroup) -> str:
    if group is distributed_c10d.GroupMember.WORLD:
        return "world"
    try:  # where torch numbered a pair group, its name stands in the description
        return group.group_desc if group.group_desc.startswith("ring:") else str(group.group_name)
    except RuntimeError:  # made behind torch's back
        return ""


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
        compared: whether operations are to be compared with their other sides, by whoever reads the records.
        on_nccl: is told the number of each group whose operations end on GPUs.

    Attributes:
        groups: by the id of a group, its number, and the global rank of each group rank.
        payloads: by dtype and shape, the number of what a message carries.
    """

    def __init__(self, recorder: Recorder, compared: bool, on_nccl: Callable[[int], None]) -> None:
        self._recorder, self._compared, self._on_nccl = recorder, compared, on_nccl
        self.groups: dict[int, tuple[int, dict[int, int]]] = {}
        self.payloads: dict[torch.dtype | None, dict[torch.Size, int]] = {}
        self._other_payloads: dict[Any, int] = {}
        self._group_names: set[str] = set()
        self._names: dict[int, str] = {}
        self._from_any: list[int] = []  # groups on which this rank receives from any source
        self._used_before: list[str] = []  # names of groups
        self._meeting = threading.Lock()  # two threads may meet a group at the same time: it has one number

    def meet_group(self, group: ProcessGroup) -> tuple[int, dict[int, int]]:
        """Numbers a group at its first operation; the group itself is not kept alive."""
        with self._meeting:
            return self.groups.get(id(group)) or self._number_group(group)

    def _number_group(self, group: ProcessGroup) -> tuple[int, dict[int, int]]:
        name, ranks = name_and_ranks(group)
        # Only where all of a group's operations are recorded is the k-th of one rank the k-th of the others.
        fresh = self._compared and name not in self._group_names and _is_fresh(group)
        self._group_names.add(name)
        number = self._recorder.group(name, ranks, fresh=fresh)
        self._names[number] = name
        if self._compared and not fresh:
            self._used_before.append(name)
            self._recorder.set_meta("used_before", self._used_before)
            self._say_what_is_not_checked()
        if is_nccl(group):
            self._recorder.set_meta("not_recorded", (*NOT_RECORDED, NOT_READ))
            self._on_nccl(number)
        entry = number, dict(enumerate(ranks))
        key, groups = id(group), self.groups
        self.groups[key] = entry
        weakref.finalize(group, groups.pop, key, None).atexit = False
        return entry

    def meet_recv_from_any(self, group: int) -> None:
        """Writes down that this rank receives from any source on a group: which send that meets is not known, so nothing is compared."""
        if self._compared and group not in self._from_any:
            self._from_any.append(group)
            self._recorder.set_meta("from_any", self._from_any)
            self._say_what_is_not_checked()

    def _say_what_is_not_checked(self) -> None:
        sentences = [
            f"Both sides of an operation were not compared on group {name}: it was used before the recording began, or is not Gloo's."
            for name in sorted(set(self._used_before))
        ]
        sentences += [
            f"What rank {self._recorder.rank} received on group {self._names[number]} was not compared: some of it was from any rank."
            for number in self._from_any
        ]
        self._recorder.set_meta("not_checked", sentences)

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

    def meet_collective(self, collective: Reading, group_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
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


GROUPS: Final = "groups of the world"
_LOCAL: Final = 4  # place of the argument use_local_synchronization after ranks
_FUNCTION: Final = "_new_group_with_tag"  # what new_group, split_group and device meshes call
_SETTER: Final = "_update_default_pg"  # what init_process_group and destroy_process_group call


class _GroupOrder:
    """Holds the groups that this rank makes against those that other ranks make in their place, before torch is called.

    It is the one comparison that is made before the damage: nothing wakes a rank that waits for others in torch's store.

    Args:
        recorder: writes this rank's own records, beside theirs.
    """

    def __init__(self, recorder: Recorder) -> None:
        assert recorder.directory is not None  # our own invariant: a real rank writes files
        self._recorder, self._directory = recorder, recorder.directory
        self._made = 0
        self._others: dict[int, PartReader] = {}
        self._records: dict[int, dict[int, Any]] = {}  # by rank and slot, the groups that the others make

    def check(self, members: list[int]) -> None:
        """Compares the next group of this rank with what its neighbours in the world make there, as far as they have come.

        Raises:
            RendezvousFailed: another rank makes another group.
        """
        me, size = self._recorder.rank, self._recorder.world_size
        steps = [1 << power for power in range(size.bit_length())]  # whoever disagrees with all others is found with few looks
        for rank in sorted({(me + step) % size for power in steps for step in (power, -power)} - {me}):
            made = self._groups_of(rank)
            if self._made < len(made):
                theirs, place = made[self._made]
                if list(theirs) != members:
                    raise RendezvousFailed(
                        f"all ranks must make the same groups in the same order, got {members} here and {list(theirs)} in rank {rank}'s "
                        f"new_group{place} (rank {me} of {size}). Call new_group for every group on every rank, in one order, also for "
                        "groups that the rank is not in."
                    )
        self._made += 1

    def _groups_of(self, rank: int) -> list[tuple[tuple[int, ...], str]]:
        """Returns the members of the groups that a rank has made, or makes now, and where its program does."""
        part = self._others.setdefault(rank, PartReader(self._directory, rank))
        if not part.is_live():
            return []  # what an earlier run left is not to be taken for the present
        records, unread = self._records.setdefault(rank, {}), True
        while unread:
            batch = part.advance()
            makings = np.flatnonzero(batch.records["op"] == OP_CODES["new_group"])
            for slot, record in zip(batch.slots[makings].tolist(), batch.records[makings], strict=True):
                number = int(record["group"])
                if number in part.fresh and part.names["group"][number].name == GROUPS:
                    records[slot] = record
            unread = part.more
        made = []
        for _, record in sorted(records.items()):
            payload = part.names["payload"].get(int(record["payload"]))
            if payload is not None and not (record["status"] == ERROR and record["wait_ns"] == NONE):  # else it was refused
                file = part.names["file"].get(int(record["file"]), "")
                made.append((payload.shape, f" at {os.path.basename(file)}:{record['line']}" if file else ""))
        return made


def record_new_groups(recorder: Recorder, compared: bool) -> dict[tuple[Any, str], Callable[..., Any]]:
    """Makes the replacement for torch's function that makes groups.

    Args:
        recorder: writes the records.
        compared: whether they are compared with those of the other ranks.

    Returns:
        The replacement by (owner, name); nothing where a version of torch does not have the function, which is private.
    """
    call = getattr(distributed_c10d, _FUNCTION, None)
    if call is None:
        return {}
    post = recorder.make_post(OP_CODES["new_group"])
    order = _GroupOrder(recorder) if compared else None

    def post_making(ranks: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        if not dist.is_initialized():
            return None
        try:
            world = list(range(dist.get_world_size()))
            members = sorted(world if ranks is None else map(int, ranks))
        except (TypeError, ValueError):
            return None  # torch says what is wrong with them
        if kwargs.get("use_local_synchronization", args[_LOCAL] if len(args) > _LOCAL else False):
            if recorder.rank not in members:
                return None  # it passes by
            before = len(distributed_c10d._world.pg_names)
            group = recorder.group(f"groups of {members} after {before} others", members)
            return post(group, NONE, NONE, recorder.payload("ranks", members, 0))
        group = recorder.group(GROUPS, world, fresh=compared)
        payload = recorder.payload("ranks", members, 0)
        slot = post(group, NONE, NONE, payload)
        if slot is not None and order is not None:
            try:
                order.check(members)
            except RendezvousFailed as error:
                recorder.complete(slot, ERROR)
                recorder.notice("group_order_mismatch", str(error), group, NONE, NONE, payload)
                raise
        return slot

    @functools.wraps(call)
    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        slot = post_making(ranks, args, kwargs)
        if slot is None:
            return call(ranks, *args, **kwargs)
        recorder.wait(slot)
        try:
            group = call(ranks, *args, **kwargs)
        except BaseException:
            recorder.complete(slot, ERROR)
            recorder.on_failure()
            raise
        recorder.complete(slot)
        return group

    return {(distributed_c10d, _FUNCTION): new_group}


def record_end_of_groups(recorder: Recorder) -> dict[tuple[Any, str], Callable[..., Any]]:
    """Makes the replacement for torch's function that sets the default group: to none when it is destroyed, and all groups with it.

    Args:
        recorder: writes a mark then, and another where a program makes its groups anew.

    Returns:
        The replacement by (owner, name); nothing where a version of torch does not have the function, which is private.
    """
    call = getattr(distributed_c10d, _SETTER, None)
    if call is None:
        return {}
    destroyed = False

    @functools.wraps(call)
    def set_default(group: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal destroyed
        if group is None or destroyed:
            destroyed = group is None
            recorder.mark(DESTROYED if destroyed else MADE_ANEW)
        return call(group, *args, **kwargs)

    return {(distributed_c10d, _SETTER): set_default}


_ON_GPU: Final = 0  # no thread's number: while it is among the open batches, no operation takes the short way
_UNSET: Final[Any] = object()
_MESSAGE_TYPES: Final = (12, 13, 14)  # what Work._get_op_type says of send, recv and recv from anybody


def install(recorder: Recorder, check: str = "basic") -> None:
    """Shows this process's operations to ``recorder`` from now on; every call needs its ``uninstall``.

    Args:
        recorder: writes the events. There can be one at a time; installing the same one again is counted, and changes nothing.
        check: which mistakes are refused before torch gets to see the operation: "basic", "full" (with those in the use of buffers and
            handles) or "off".

    Raises:
        RingError: another recorder is at work in this process.
    """
    active = get_state().recorder
    if active is not None and active is not recorder:
        raise RingError(
            f"the recorder of a process must be the only one, got a second while one records (rank {active.rank} of {active.world_size}). "
            "Use the one that records: ringsim.state.get_state().recorder."
        )
    recorder.users += 1
    if recorder.users > 1:
        return
    recorder.sites.declare_library(os.path.dirname(torch.__file__), speaker=distributed_c10d.__file__)
    recorder.set_meta("num_threads", torch.get_num_threads())
    if dist.is_initialized():
        recorder.set_meta("backend", dist.get_backend())
    recorder.set_meta("not_recorded", NOT_RECORDED)
    hooks, guard = _Hooks(recorder, check), BufferGuard(recorder) if check == "full" else None
    if guard is not None:
        guard.wrap(hooks.replacements)
        guard.start()
        recorder.check_end = guard.check_end
    originals = [(owner, name, vars(owner)[name]) for owner, name in hooks.replacements]
    for (owner, name), hook in hooks.replacements.items():
        setattr(owner, name, hook)

    def undo() -> None:
        for owner, name, original in originals:
            setattr(owner, name, original)
        if guard is not None:
            guard.stop()

    recorder.undo_hooks = undo
    recorder.on_growth = hooks.forget_completed
    recorder.on_reading = hooks.read_gpu_times
    recorder.complete_with = hooks.complete_with
    change_state(recorder=recorder)


def uninstall(recorder: Recorder) -> None:
    """Takes back one ``install``; the last one puts torch's own methods back."""
    recorder.users -= 1
    if recorder.users == 0:
        recorder.undo_hooks()
        change_state(recorder=None)


def find_handle_types(kind: type[Work]) -> Iterator[type[Work]]:
    """Yields ``Work`` and those of its subclasses that have a ``wait`` of their own."""
    if "wait" in vars(kind):
        yield kind
    for subclass in kind.__subclasses__():
        yield from find_handle_types(subclass)


class _Hooks:
    """The replacements for torch's methods, and what they have to remember.

    A posted operation is remembered by its ``Work``, with a strong reference, until the program waits for it: on Gloo an operation whose
    handle is dropped would lose its message.
    """

    def __init__(self, recorder: Recorder, check: str) -> None:
        self.recorder = recorder
        self.checks = None if check == "off" else Prechecks(recorder)
        compared = check != "off"
        self.names = TorchNames(recorder, compared, self.take_the_long_way)
        self.pending: dict[Work, int] = {}  # posted, not yet waited for: its slot
        self.pending_from_any: dict[Work, tuple[int, dict[int, int]]] = {}  # the same for recv from anybody: its slot, the group's ranks
        self.pending_others: dict[Work, tuple[list[int], torch.device | None]] = {}  # for several operations, or on a GPU: slots, the GPU
        self.failed: weakref.WeakSet[Work] = weakref.WeakSet()  # waited for in vain; waiting again is torch's business
        self.open_batches: dict[int, list[tuple[int, Begun | None]]] = {}  # thread: slots posted since _start_coalescing, on which GPU
        self.gpu_times = GpuTimes(recorder.amend, recorder.rank)
        self.nccl_groups: set[int] = set()  # by number
        hooks: dict[str, Callable[..., Any]] = {
            "send": self.make_message("send", "dstRank", "isend", SENDS),
            "recv": self.make_message("recv", "srcRank", "irecv", RECVS),
            "recv_anysource": self.make_recv_anysource(),
            "_start_coalescing": self.make_start_coalescing(),
            "_end_coalescing": self.make_end_coalescing(),
            # Versions of torch differ in which collectives they have.
            **{method: self.make_collective(method) for method in METHODS if hasattr(ProcessGroup, method)},
        }
        self.replacements: dict[tuple[Any, str], Callable[..., Any]] = dict(self.checks.replacements) if self.checks else {}
        self.replacements |= record_new_groups(recorder, compared) | record_end_of_groups(recorder)
        for method, hook in hooks.items():
            self.replacements[ProcessGroup, method] = functools.update_wrapper(hook, getattr(ProcessGroup, method))
        for kind in find_handle_types(Work):
            call = kind.wait
            hook = self.make_wait(call)
            self.replacements[kind, "wait"] = functools.update_wrapper(hook, call)

    def take_the_long_way(self, group: int) -> None:
        """Makes operations go through ``keep``, which knows of GPUs: a group on NCCL has been met."""
        self.nccl_groups.add(group)
        self.open_batches.setdefault(_ON_GPU, [])

    def give_up(self, work: Work) -> None:
        """Remembers that a wait has failed; raises where somebody knows why it had to.

        Raises:
            RingError: the verdict of whoever cut the wait short.
        """
        self.failed.add(work)
        self.recorder.on_failure()

    def forget_completed(self) -> None:
        """Lets go of handles that nobody waits for and that say they are complete, so that a long run does not hoard them.

        Those of operations on GPUs are not asked: that could spoil the capture of a CUDA graph.
        """
        for work in list(self.pending):
            try:
                completed = work.is_completed()
            except RuntimeError:  # it failed, which is for the program to find out
                continue
            if completed:
                self.pending.pop(work, None)

    def complete_with(self, work: Any, slot: int) -> bool:
        """Makes the wait for ``work`` complete the record at ``slot`` too; False where nobody is known to wait for it."""
        if not isinstance(work, Work):
            return False
        mine = self.pending.pop(work, None)
        if mine is not None:
            self.pending_others[work] = [mine, slot], None
        elif work in self.pending_others:
            self.pending_others[work][0].append(slot)
        else:
            return False
        return True

    def begin_on_gpu(self, group: int, values: Any) -> Begun | None:
        """Notes that an operation with these arguments begins on a GPU; None for others. One with a handle blocks in its wait only."""
        gpu = find_gpu(values) if group in self.nccl_groups else None
        if gpu is None:
            return None
        return Begun(gpu, NO_EVENT) if getattr(values[-1], "asyncOp", True) else self.gpu_times.begin(gpu)

    def keep(self, work: Work | None, slot: int, begun: Begun | None = None) -> None:
        """Remembers a posted operation, where the short way does not do: no handle, within a batch, or on a GPU (``begun`` there)."""
        batch = self.open_batches.get(get_ident())
        if batch is not None:
            batch.append((slot, begun))
        else:
            self.keep_all(work, [slot], begun)

    def keep_all(self, work: Work | None, slots: list[int], begun: Begun | None) -> None:
        """Remembers operations that have one handle, or none because they blocked in C++."""
        if work is not None and begun is None and len(slots) == 1:
            self.pending[work] = slots[0]
        elif work is not None:
            self.pending_others[work] = slots, begun and begun.gpu
        else:
            for slot in slots:
                self.recorder.complete(slot, waited=False)
            if begun is not None:
                self.gpu_times.end(begun, slots)

    def read_gpu_times(self) -> None:
        """Completes the records of operations on GPUs, and says in the record what their times are."""
        said = self.gpu_times.read()
        if said:
            self.recorder.set_meta("not_recorded", (*NOT_RECORDED, *said))

    # -- the hooks: closures, for attribute look-ups would cost as much as the rest -----------------------------------------------------

    def make_message(self, method: str, peer_name: str, poster: str, ops: dict[str, int]) -> Callable[..., Any]:
        """Makes the hook for ``send`` or ``recv``.

        Args:
            method: the method's name.
            peer_name: how torch calls its argument for the other side's group rank.
            poster: the function of torch.distributed that the operation is named after where no frame tells.
            ops: codes by the name of the function of torch.distributed.
        """
        call = getattr(ProcessGroup, method)
        recorder = self.recorder
        post = recorder.make_post(ops[poster], ops)
        groups, payloads, pending, open_batches = self.names.groups, self.names.payloads, self.pending, self.open_batches
        meet_group, meet_message = self.names.meet_group, self.names.meet_message
        keep, begin_on_gpu = self.keep, self.begin_on_gpu
        checks = self.checks

        record_refused = make_record_refused(recorder, ops[poster], ops)

        def complain(error: BaseException, slot: int, tensors: Any, peer: int, tag: Any, group: int, payload: int) -> None:
            fail_posting(recorder, slot, error)
            if checks is not None:
                checks.explain(error, method, tensors, peer, tag, group, payload)

        def message(self: ProcessGroup, tensors: Any, rank: Any = None, tag: Any = None, **named: Any) -> Any:
            if named:
                rank = named.pop(peer_name, rank)
                if named:
                    return call(self, tensors, rank, tag, **named)  # torch says what is wrong with it
            try:
                group, ranks = groups[id(self)]
            except KeyError:
                group, ranks = meet_group(self)
            try:
                peer = ranks[rank]
            except (KeyError, TypeError):
                peer = NONE  # no such rank
                if checks is not None:
                    checks.refuse_rank(method, rank, ranks, group, tag, meet_message(tensors), record_refused)
            try:
                tensor = tensors[0]
                payload = payloads[None if tensor.is_meta else tensor.dtype][tensor.shape]
            except Exception:
                payload = meet_message(tensors)
                if payload == NONE and checks is not None:
                    checks.refuse_tensors(method, tensors, peer, group, tag, record_refused)
            slot = post(group, peer, tag, payload)
            if slot is None:
                return call(self, tensors, rank, tag)
            try:
                work = call(self, tensors, rank, tag)
            except BaseException as error:
                complain(error, slot, tensors, peer, tag, group, payload)
                raise
            if open_batches or work is None:
                keep(work, slot, begin_on_gpu(group, tensors))
            else:
                pending[work] = slot
            return work

        return message

    def make_recv_anysource(self) -> Callable[..., Any]:
        """Makes the hook for ``recv_anysource``."""
        call = ProcessGroup.recv_anysource
        recorder, names, pending_from_any = self.recorder, self.names, self.pending_from_any
        post = recorder.make_post(RECVS["irecv"], RECVS)

        def recv_anysource(self: ProcessGroup, tensors: Any, tag: Any, /) -> Any:
            group, ranks = names.groups.get(id(self)) or names.meet_group(self)
            payload = names.meet_message(tensors)
            names.meet_recv_from_any(group)
            slot = post(group, ANY_SOURCE, tag, payload)
            if slot is None:
                return call(self, tensors, tag)
            try:
                work = call(self, tensors, tag)
            except BaseException as error:
                fail_posting(recorder, slot, error)
                raise
            if work is not None:
                pending_from_any[work] = slot, ranks
            return work

        return recv_anysource

    def make_collective(self, method: str) -> Callable[..., Any]:
        """Makes the hook for a collective."""
        call = getattr(ProcessGroup, method)
        collective, blocks = METHODS[method], method == "monitored_barrier"  # the one that gives no handle, and waits itself
        hooks, names, checks, recorder = self, self.names, self.checks, self.recorder
        pending, open_batches = self.pending, self.open_batches
        post = recorder.make_post(collective.op, COLLECTIVE_OPS)
        record_refused = make_record_refused(recorder, collective.op, COLLECTIVE_OPS)

        def collect(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            group, ranks = names.groups.get(id(self)) or names.meet_group(self)
            payload, root = names.meet_collective(collective, len(ranks), args, kwargs)
            if checks is not None and (unfit := find_unfit(collective, args, kwargs)) is not None:
                checks.refuse_collective(OP_NAMES[collective.op], unfit, group, payload, record_refused)
            slot = post(group, ranks.get(root, NONE), NONE, payload)
            if slot is None:
                return call(self, *args, **kwargs)
            begun = hooks.begin_on_gpu(group, (*args, *kwargs.values())) if open_batches else None
            try:
                if blocks:
                    recorder.wait(slot)
                work = call(self, *args, **kwargs)
            except BaseException as error:
                if blocks and not isinstance(error, RingError):
                    recorder.on_failure()
                    recorder.complete(slot, ERROR)
                else:
                    fail_posting(recorder, slot, error)
                raise
            if open_batches or work is None:
                hooks.keep(work, slot, begun)
            else:
                pending[work] = slot
            return work

        return collect

    def make_start_coalescing(self) -> Callable[..., Any]:
        """Makes the hook for the start of a batch: the operations of this thread belong to it from here on."""
        call, open_batches = ProcessGroup._start_coalescing, self.open_batches

        def start_coalescing(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            result = call(self, *args, **kwargs)
            open_batches[get_ident()] = []
            return result

        return start_coalescing

    def make_end_coalescing(self) -> Callable[..., Any]:
        """Makes the hook for the end of a batch: its operations are done when the one handle is."""
        call, open_batches, keep_all, recorder = ProcessGroup._end_coalescing, self.open_batches, self.keep_all, self.recorder

        def end_coalescing(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            batch = open_batches.pop(get_ident(), [])
            slots = [slot for slot, _ in batch]
            try:
                work = call(self, *args, **kwargs)
            except BaseException:
                for slot in slots:
                    recorder.complete(slot, ERROR)
                raise
            keep_all(work, slots, next((begun for _, begun in batch if begun), None))
            return work

        return end_coalescing

    def make_wait(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the hook for the ``wait`` of a type of handles."""
        take, give_up, wait_for_other = self.pending.pop, self.give_up, self.wait_for_other
        begin, complete = self.recorder.wait, self.recorder.complete

        def wait(self: Work, timeout: Any = _UNSET) -> Any:
            slot = take(self, None)
            if slot is None:
                return wait_for_other(call, self) if timeout is _UNSET else wait_for_other(call, self, timeout)
            begin(slot)
            try:
                result = call(self) if timeout is _UNSET else call(self, timeout)
            except BaseException:
                give_up(self)  # where it raises, the wait was cut short: the operation is not done
                complete(slot, ERROR)
                raise
            complete(slot)
            return result

        return wait

    def wait_for_other(self, call: Callable[..., Any], work: Work, *timeout: Any) -> Any:
        """Waits for a recv from anybody, a batch, a handle that was waited for before, or one that was posted before recording."""
        recorder = self.recorder
        from_any = self.pending_from_any.pop(work, None)
        slots, gpu = self.pending_others.pop(work, ([], None)) if from_any is None else ([from_any[0]], None)
        if not slots:
            # A second wait for a message of Gloo would hang, and then break the connection.
            message = work._get_op_type() in _MESSAGE_TYPES  # type: ignore[attr-defined]
            return True if message and work.is_completed() and work not in self.failed else call(work, *timeout)
        for slot in slots:
            recorder.wait(slot)
        begun = None if gpu is None else self.gpu_times.begin(gpu)
        try:
            result = call(work, *timeout)
        except BaseException:
            self.give_up(work)
            for slot in slots:
                recorder.complete(slot, ERROR)
            raise
        if from_any is not None:
            recorder.amend(slots[0], peer=from_any[1].get(work._source_rank(), ANY_SOURCE))
        for slot in slots:
            recorder.complete(slot)
        if begun is not None:
            self.gpu_times.end(begun, slots)
        return result
