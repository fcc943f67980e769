"""Records torch's operations.

During recording, ringsim replaces methods of ``ProcessGroup`` and ``Work``. Every operation issued
by Python passes through these classes, regardless of the name under which the program called it and
of the time at which the program imported that name. When the last user uninstalls the hooks, the
original methods are restored.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work, c10d_logger, distributed_c10d

from ringsim.comm import handed_over, program_spans
from ringsim.comm.calls import METHODS, Reading, find_splits
from ringsim.comm.checks import Attempt, BufferGuard, Prechecks
from ringsim.comm.dispatcher import Issued, LateWaits, get_dispatcher
from ringsim.comm.ended_groups import check_group
from ringsim.comm.gpu_times import NO_EVENT, NOT_READ, Begun, GpuTimes, find_gpu, is_nccl
from ringsim.comm.group_order import record_end_of_groups, record_new_groups
from ringsim.comm.numbering import COLLECTIVE_NAMES, RECV_NAMES, SEND_NAMES, Names
from ringsim.comm.polling import make_is_completed
from ringsim.comm.program_spans import find_pipelining, make_stage_replacements
from ringsim.comm.torch_private import (
    END_COALESCING,
    NEW_GROUP,
    OF_TORCH,
    SET_DEFAULT,
    START_COALESCING,
    Future,
    Hook,
    Place,
    Replacements,
    is_message,
    present,
    source_rank,
)
from ringsim.errors import RingError
from ringsim.state import change_state, get_state
from ringsim.traces.events import ANY_SOURCE, ERROR, NONE, OK, OP_NAMES
from ringsim.traces.recorder import Hooks, Post, Recorder, fail_posting

FROM_CPP = (
    "Collectives issued from C++ (DistributedDataParallel's reducer, functional collectives) "
    "are not recorded with this version of torch."
)
UNSEEN_ON_GPUS = (
    "For collectives issued from C++ on GPUs, done is the time at which the host issued them. "
    "Their actual end is unknown."
)
UNAWAITED = (
    "ringsim records the end of an operation in wait(). If the program waits in a different "
    "way, for example on a CUDA event, the operation stays in flight."
)


def install(recorder: Recorder, check: str = "basic") -> None:
    """Makes ``recorder`` start recording this process's operations.

    Every call needs a matching ``uninstall``.

    Args:
        recorder: the recorder of the events. Only one recorder can be active at a time; installing
            the same recorder again only counts the call.
        check: the mistakes that raise an error before torch is called: "basic", "full" (including
            misuse of buffers and handles) or "off".

    Raises:
        RingError: a different recorder is active in this process.
    """
    active = get_state().recorder
    if active is not None and active is not recorder:
        raise RingError(
            "cannot install a second recorder while the first is active in this process (rank "
            f"{active.rank} of {active.world_size}). Use the active recorder: "
            "ringsim.state.get_state().recorder."
        )
    recorder.users += 1
    if recorder.users > 1:
        return
    recorder.sites.declare_library(
        os.path.dirname(torch.__file__), speaker=distributed_c10d.__file__
    )
    recorder.set_meta("num_threads", torch.get_num_threads())
    if dist.is_initialized():
        recorder.set_meta("backend", dist.get_backend())
    hooks = _Hooks(recorder, check)
    guard = BufferGuard(recorder) if check == "full" else None
    replacements = hooks.replacements
    if guard is not None:
        replacements |= guard.wrap(replacements)
        guard.start()
    hooks.originals |= put(replacements)
    hooks.look_for_pipelining()
    dispatcher = get_dispatcher()
    dispatcher.listener, dispatcher.on_wait = hooks.make_listener(), hooks.late.begin_tensor

    def undo() -> None:
        put(hooks.originals)
        hooks.forget_completed()
        if sys.exception() is not None:
            hooks.fail_given_up()
        dispatcher.listener = dispatcher.on_wait = None
        hooks.late.stop()
        if guard is not None:
            guard.stop()

    recorder.hooks = Hooks(
        undo,
        on_imports=hooks.look_for_pipelining,
        on_growth=hooks.forget_completed,
        on_reading=hooks.read_gpu_times,
        complete_with=hooks.complete_with,
    )
    if guard is not None:
        recorder.hooks = recorder.hooks._replace(check_end=guard.check_end)
    change_state(recorder=recorder)


def uninstall(recorder: Recorder) -> None:
    """Undoes one ``install`` call; the last call restores torch's own methods."""
    recorder.users -= 1
    if recorder.users == 0:
        recorder.hooks.undo()
        change_state(recorder=None)


def put(replacements: Replacements) -> Replacements:
    """Installs the replacements and returns the replaced functions."""
    originals = {(owner, name): vars(owner)[name] for owner, name in replacements}
    for (owner, name), function in replacements.items():
        setattr(owner, name, function)
    return originals


def find_handle_types(kind: type[Work]) -> Iterator[type[Work]]:
    """Yields ``Work`` and its subclasses that define their own ``wait``."""
    if "wait" in vars(kind):
        yield kind
    for subclass in kind.__subclasses__():
        yield from find_handle_types(subclass)


# not a thread's number: while this key is in the open batches, no operation takes the fast path
_LONG_WAY = 0
_UNSET: Any = object()


def make_get_group_rank() -> Hook:
    """Creates the hook for ``get_group_rank``, which torch calls first in many operations."""
    call = distributed_c10d.get_group_rank

    def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
        check_group(group)
        return call(group, global_rank)

    return get_group_rank


def _begin(recorder: Recorder, slots: list[int], wait_ns: int) -> None:
    """Records that the program has been waiting for operations since ``wait_ns``."""
    for slot in slots:
        recorder.amend(slot, wait_ns=wait_ns)


# the files of torch.distributed's functions and their wrappers
_OF_SPEAKER = (distributed_c10d.__file__, c10d_logger.__file__)


def _is_called_by_torch(frame: FrameType | None) -> bool:
    """Returns whether a torch.distributed function was called by torch's own code.

    In that case, the program has no control over the handle.
    """
    while frame is not None and frame.f_code.co_filename in _OF_SPEAKER:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(OF_TORCH)


def _has_own_limit(timeout: timedelta = timedelta(0), *_: Any, **__: Any) -> bool:
    """Returns whether the program passed a timeout to a monitored barrier.

    The arguments are those of torch's method; without the program's timeout, they contain torch's
    default.
    """
    return timeout not in (timedelta(0), distributed_c10d.default_pg_timeout)


class Pending(NamedTuple):
    """A handle's operations, unless it has only one host operation with a known peer.

    ``since_ns`` is the time of the program's first wait for the handle, if that wait ended at a
    time limit.
    """

    slots: list[int]
    gpu: torch.device | None = None
    ranks: Mapping[int, int] = {}  # for a recv from any source: global ranks by group rank
    since_ns: int = NONE
    limited: bool = False  # whether the program gave the group a timeout


class _Hooks:
    """The replacements for torch's methods, and their state.

    A posted operation is kept by its ``Work``, with a strong reference, until the program waits for
    it, because on Gloo an operation with a dropped handle would lose its message. The hooks are
    closures, because attribute lookups would double their cost.
    """

    def __init__(self, recorder: Recorder, check: str) -> None:
        self.recorder = recorder
        compared = check != "off"
        self.checks = checks = Prechecks(recorder) if compared else None
        self.names = Names(recorder, compared)
        # posted and not yet waited for: the slot of an operation, or all operations of a handle
        self.pending: dict[Work, int] = {}
        self.others: dict[Work, Pending] = {}
        # notes on operations that could not be recorded
        self.missing = set() if get_dispatcher().complete else {FROM_CPP}
        self.missing_on_gpus: tuple[str, ...] = ()
        # handles whose wait failed; a second wait is left to torch
        self.failed: weakref.WeakSet[Work] = weakref.WeakSet()
        # by thread, the slots posted since _start_coalescing, and their GPUs
        self.open_batches: dict[int, list[tuple[int, Begun | None]]] = {}
        self.gpu_times = GpuTimes(recorder.amend, recorder.rank)
        self.nccl_groups: set[int] = set()  # by number
        self.hidden = False  # from torch.compile
        self.waits = waits = {kind: kind.wait for kind in find_handle_types(Work)}
        self.is_completed: Hook = Work.is_completed
        self.wait_unseen: Hook = lambda work, *limit: next(
            waits[kind] for kind in type(work).__mro__ if kind in waits
        )(work, *limit)
        self.late = LateWaits(recorder, self.wait_unseen, self.pending)
        # the slots of futures
        self.futures: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        # groups with a timeout set by the program
        self.limits: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
        self.limited: set[int] = set()  # the numbers of these groups
        self.originals: Replacements = {}  # the replaced functions
        self.replacements: Replacements = {
            **program_spans.make_replacements(recorder, self.late.enter_block),
            **handed_over.make_replacements(recorder.sites),
            **self.make_future_replacements(),
            **(checks.replacements if checks else {}),
        }
        makers: dict[Place, Callable[[], Hook]] = {
            NEW_GROUP: lambda: record_new_groups(recorder, compared, self.limits),
            SET_DEFAULT: lambda: record_end_of_groups(recorder, self.look_for_pipelining),
            START_COALESCING: self.make_start_coalescing,
            END_COALESCING: self.make_end_coalescing,
            (ProcessGroup, "send"): lambda: self.make_message("send", "isend", SEND_NAMES),
            (ProcessGroup, "recv"): lambda: self.make_message("recv", "irecv", RECV_NAMES),
            (ProcessGroup, "recv_anysource"): self.make_recv_anysource,
            **{
                (ProcessGroup, method): functools.partial(self.make_collective, method)
                for method in METHODS
            },
            **{
                (kind, "wait"): functools.partial(self.make_wait, call)
                for kind, call in waits.items()
            },
            (Work, "get_future"): self.make_get_future,
            (torch, "compile"): self.make_compile,
            (distributed_c10d, "get_group_rank"): make_get_group_rank,
            (Work, "is_completed"): lambda: make_is_completed(
                recorder.sites, self.pending, self.finish, checks.refuse if checks else None
            ),
        }
        # versions of torch have different collectives
        for place, make in present(makers).items():
            self.replacements[place] = functools.update_wrapper(make(), getattr(*place))

    def look_for_pipelining(self) -> None:
        """Adds spans to torch's pipeline stages once the program has imported them.

        This method is called for each new group.
        """
        schedules = find_pipelining()
        if schedules is None or (schedules.PipelineScheduleSingle, "step") in self.originals:
            return
        self.originals |= put(make_stage_replacements(schedules))

    # -- the state

    def meet_group(self, group: ProcessGroup) -> tuple[int, dict[int, int]]:
        """Numbers a group.

        After the first group on NCCL, or with a timeout, all operations go through ``keep``.
        """
        self.look_for_pipelining()
        check_group(group)
        entry = self.names.meet_group(group)
        if group in self.limits:
            self.limited.add(entry[0])
            self.open_batches.setdefault(_LONG_WAY, [])
        if entry[0] not in self.nccl_groups and is_nccl(group):
            self.say_what_is_missing(NOT_READ)
            self.nccl_groups.add(entry[0])
            self.open_batches.setdefault(_LONG_WAY, [])
        return entry

    def forget_completed(self) -> None:
        """Releases completed handles that were never waited for.

        Otherwise, a long run would accumulate them. Handles of GPU operations are not queried,
        because that could spoil the capture of a CUDA graph.
        """
        given_up = [work for work, other in list(self.others.items()) if other.since_ns != NONE]
        for work in [*list(self.pending), *given_up]:
            try:
                if self.is_completed(work) and self.take(work) is not None:
                    self.missing.add(UNAWAITED)
            except RuntimeError:  # the operation failed; the program will see the error itself
                continue
        self.say_what_is_missing()

    def fail_given_up(self) -> None:
        """Completes operations that the program gave up waiting for at its own time limit.

        This method is called when an exception ends the program, possibly the exception from the
        limit.
        """
        for work, other in list(self.others.items()):
            if other.since_ns != NONE and self.take(work) is not None:
                _begin(self.recorder, other.slots, other.since_ns)
                self.complete(other.slots, ERROR)

    def complete(self, slots: list[int], status: int = OK) -> None:
        """Completes records."""
        for slot in slots:
            self.recorder.complete(slot, status)

    def finish(self, work: Work) -> None:
        """Completes the record of an operation after ``is_completed`` returned True.

        The program need not wait for the operation any more.
        """
        if work in self.others and self.others[work].gpu is not None:
            return  # its times are read when the program waits
        other = self.take(work)
        if other is None:
            return
        try:
            self.wait_unseen(work)
        except Exception:
            self.others[work] = other  # the operation failed; the program will see the error itself
            return
        for slot in other.slots:
            if other.since_ns == NONE:
                self.recorder.complete_at_once(slot)
            else:
                self.recorder.amend(slot, wait_ns=other.since_ns)
                self.recorder.complete(slot)

    def take(self, work: Work) -> Pending | None:
        """Removes and returns a handle's operations; returns None if the handle is unknown."""
        slot = self.pending.pop(work, None)
        return self.others.pop(work, None) if slot is None else Pending([slot])

    def say_what_is_missing(self, *on_gpus: str) -> None:
        """Adds notes about missing records and GPU operations to the metadata."""
        self.missing_on_gpus = on_gpus or self.missing_on_gpus
        if self.missing or self.missing_on_gpus:
            self.recorder.set_meta("not_recorded", [*sorted(self.missing), *self.missing_on_gpus])

    def complete_with(self, work: Any, slot: int) -> bool:
        """Makes waiting for ``work`` also complete the record at ``slot``.

        Returns False if the handle is unknown.
        """
        other = self.take(work) if isinstance(work, Work) else None
        if other is None:
            return False
        other.slots.append(slot)
        self.others[work] = other
        return True

    def begin_on_gpu(self, group: int, values: Any) -> Begun | None:
        """Records the start of an operation with these arguments on a GPU, or returns None.

        An operation with a handle blocks only in its wait.
        """
        gpu = find_gpu(values) if group in self.nccl_groups else None
        if gpu is None:
            return None
        if getattr(values[-1], "asyncOp", True):
            return Begun(gpu, NO_EVENT)
        return self.gpu_times.begin(gpu)

    def keep(self, work: Work | None, slot: int, group: int, begun: Begun | None = None) -> None:
        """Keeps a posted operation that cannot take the fast path; see ``open_batches``."""
        batch = self.open_batches.get(get_ident())
        if batch is not None:
            batch.append((slot, begun))
        else:
            self.keep_all(work, [slot], group, begun)

    def keep_all(
        self, work: Work | None, slots: list[int], group: int, begun: Begun | None
    ) -> None:
        """Keeps operations that share a handle, or have no handle because they blocked in C++."""
        limited = group in self.limited
        if work is None:
            for slot in slots:
                self.recorder.complete(slot, waited=False)
            if begun is not None:
                self.gpu_times.end(begun, slots)
        elif begun is None and not limited and len(slots) == 1:
            self.pending[work] = slots[0]
        else:
            self.others[work] = Pending(slots, begun and begun.gpu, limited=limited)

    def read_gpu_times(self) -> None:
        """Completes the records of GPU operations and describes their times in the metadata."""
        sentences = self.gpu_times.read()
        if sentences:
            self.say_what_is_missing(*sentences)

    # -- the hooks

    def meet_message(
        self, method: str, post: Post, group: ProcessGroup, tensors: Any, rank: Any, tag: Any
    ) -> tuple[int, int, int]:
        """Returns a message's group, peer and payload numbers if any of them is new or invalid.

        An invalid group, peer or payload may raise an error.
        """
        number, ranks = self.meet_group(group)
        peer = ranks.get(rank, NONE) if isinstance(rank, int) else NONE
        payload = self.names.meet_message(tensors)
        if self.checks is not None:
            self.checks.check_message(
                Attempt(method, number, peer, tag, payload), tensors, rank, len(ranks), post
            )
        return number, peer, payload

    def make_message(self, method: str, poster: str, ops: dict[str, int]) -> Hook:
        """Creates the hook for ``send`` or ``recv``.

        ``ops`` maps the called functions of torch.distributed to operation codes; ``poster`` is the
        function assumed if no frame shows it.
        """
        call, recorder, checks = getattr(ProcessGroup, method), self.recorder, self.checks
        post = recorder.make_post(ops[poster], ops)
        groups, payloads = self.names.groups, self.names.payloads
        pending, open_batches = self.pending, self.open_batches
        meet_message, keep, begin_on_gpu = self.meet_message, self.keep, self.begin_on_gpu

        # The two methods have different names for the third argument. Two parameters cost less than
        # a dictionary. The names are torch's.
        def message(
            self: ProcessGroup,
            tensors: Any,
            rank: Any = None,
            tag: Any = None,
            dstRank: Any = None,  # noqa: N803
            srcRank: Any = None,  # noqa: N803
        ) -> Any:
            if rank is None:
                rank = dstRank if method == "send" else srcRank
            try:
                group, ranks = groups[id(self)]
                peer = ranks[rank]
                tensor = tensors[0]
                payload = payloads[None if tensor.is_meta else tensor.dtype][tensor.shape]
            except Exception:
                group, peer, payload = meet_message(method, post, self, tensors, rank, tag)
            slot = post(group, peer, tag, payload)
            if slot is None:
                return call(self, tensors, rank, tag)
            try:
                work = call(self, tensors, rank, tag)
            except BaseException as error:
                fail_posting(recorder, slot, error)
                if checks is not None:
                    checks.explain(error, tensors, Attempt(method, group, peer, tag, payload))
                raise
            if open_batches or work is None:
                keep(work, slot, group, begin_on_gpu(group, tensors))
            else:
                pending[work] = slot
            return work

        return message

    def make_recv_anysource(self) -> Hook:
        """Creates the hook for ``recv_anysource``."""
        call, hooks, recorder = ProcessGroup.recv_anysource, self, self.recorder
        post = recorder.make_post(RECV_NAMES["irecv"], RECV_NAMES)

        def recv_anysource(self: ProcessGroup, tensors: Any, tag: Any, /) -> Any:
            group, ranks = hooks.names.groups.get(id(self)) or hooks.meet_group(self)
            hooks.names.meet_recv_from_any(group)
            slot = post(group, ANY_SOURCE, tag, hooks.names.meet_message(tensors))
            try:
                work = call(self, tensors, tag)
            except BaseException as error:
                if slot is not None:
                    fail_posting(recorder, slot, error)
                raise
            if slot is not None:
                hooks.others[work] = Pending([slot], ranks=ranks, limited=group in hooks.limited)
            return work

        return recv_anysource

    def make_collective(self, method: str) -> Hook:
        """Creates the hook for a collective."""
        call = getattr(ProcessGroup, method)
        # monitored_barrier returns no handle, and waits itself
        reading, blocks = METHODS[method], method == "monitored_barrier"
        hooks, names, checks, recorder = self, self.names, self.checks, self.recorder
        groups, pending, open_batches = self.names.groups, self.pending, self.open_batches
        post = recorder.make_post(reading.op, COLLECTIVE_NAMES)
        elsewhere = get_dispatcher().recorded_elsewhere

        def collect(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            group, ranks = groups.get(id(self)) or hooks.meet_group(self)
            payload, root, unfit = names.meet_collective(reading, len(ranks), args, kwargs)
            if checks is not None and unfit is not None:
                checks.refuse_collective(
                    Attempt(OP_NAMES[reading.op], group, NONE, None, payload), unfit, post
                )
            slot = post(group, ranks.get(root, NONE), NONE, payload)
            if slot is None:
                return call(self, *args, **kwargs)
            begun = hooks.begin_on_gpu(group, (*args, *kwargs.values())) if open_batches else None
            limited = blocks and _has_own_limit(*args, **kwargs)
            # With its own time limit, the barrier counts as waiting only afterwards: the limit
            # always lets the rank continue, and the program handles torch's error.
            since_ns = time.monotonic_ns() if limited else NONE
            if blocks and not limited:
                recorder.wait(slot)
            try:
                elsewhere.now = True
                work = call(self, *args, **kwargs)
            except BaseException as error:
                if limited:
                    recorder.amend(slot, wait_ns=since_ns)
                if blocks and not isinstance(error, RingError):
                    if not limited:
                        recorder.on_failure()
                    recorder.complete(slot, ERROR)
                else:
                    fail_posting(recorder, slot, error)
                raise
            finally:
                elsewhere.now = False
            if limited:
                recorder.amend(slot, wait_ns=since_ns)
            if open_batches or work is None:
                hooks.keep(work, slot, group, begun)
            else:
                pending[work] = slot
            options = args[-1] if args else kwargs.get("opts")
            if (
                getattr(options, "asyncOp", False)
                and work in pending
                and _is_called_by_torch(sys._getframe(1))
            ):
                hooks.late.add(work, slot, group)
            return work

        return collect

    def make_listener(self) -> Callable[[Issued], Any]:
        """Creates the listener that records the collectives issued from C++."""
        names, recorder, late = self.names, self.recorder, self.late
        posts: dict[Reading, Post] = {}

        def listen(issued: Issued) -> Any:
            reading, slot = issued.reading, None
            try:
                group, ranks = names.groups.get(id(issued.group)) or self.meet_group(issued.group)
                splits = find_splits(reading, len(ranks), issued.args)
                payload = names.meet_tensors(reading, len(ranks), issued.tensors, "", splits)
                post = posts.get(reading) or posts.setdefault(
                    reading, recorder.make_post(reading.op, COLLECTIVE_NAMES)
                )
                slot = post(group, ranks.get(issued.root, NONE), NONE, payload)
            except Exception:
                pass  # the recorder does not understand the operation, but torch may
            if slot is None:
                return issued.hand_on()
            try:
                result = issued.hand_on()
            except BaseException as error:
                fail_posting(recorder, slot, error)
                raise
            if group in self.nccl_groups and any(tensor.is_cuda for tensor in issued.made):
                recorder.complete(slot)  # waiting for it would make the program's stream wait
                self.missing.add(UNSEEN_ON_GPUS)
            else:
                work = Work.unbox(result[-1] if isinstance(result, tuple) else result)
                late.add(work, slot, group, issued.made, sys._getframe(1).f_back)
            return result

        return listen

    def make_start_coalescing(self) -> Hook:
        """Creates the hook for the start of a batch, which collects this thread's operations."""
        call, open_batches = getattr(*START_COALESCING), self.open_batches

        def start_coalescing(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            result = call(self, *args, **kwargs)
            open_batches[get_ident()] = []
            return result

        return start_coalescing

    def make_end_coalescing(self) -> Hook:
        """Creates the hook for the end of a batch, whose operations share one handle."""
        call, complete, keep_all = getattr(*END_COALESCING), self.complete, self.keep_all
        groups, open_batches = self.names.groups, self.open_batches

        def end_coalescing(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            batch = open_batches.pop(get_ident(), [])
            slots = [slot for slot, _ in batch]
            try:
                work = call(self, *args, **kwargs)
            except BaseException:
                complete(slots, ERROR)
                raise
            group, _ = groups.get(id(self), (NONE, {}))
            keep_all(work, slots, group, next((begun for _, begun in batch if begun), None))
            return work

        return end_coalescing

    def make_wait(self, call: Hook) -> Hook:
        """Creates the hook for a handle type's ``wait``."""
        take, failed, wait_for_other = self.pending.pop, self.failed, self.wait_for_other
        recorder, begin, complete = self.recorder, self.recorder.wait, self.recorder.complete

        def wait(self: Work, timeout: Any = _UNSET) -> Any:
            slot = None if timeout is not _UNSET else take(self, None)
            if slot is None:
                return wait_for_other(call, self, *(() if timeout is _UNSET else (timeout,)))
            begin(slot)
            try:
                result = call(self)
            except BaseException:
                failed.add(self)
                # the error ended the wait early: the operation is not done
                recorder.on_failure()
                complete(slot, ERROR)
                raise
            complete(slot)
            return result

        return wait

    def make_compile(self) -> Hook:
        """Creates the hook for ``torch.compile``, which excludes these functions from compilation.

        The compiler fails on some of their calls to groups and handles.
        """
        torchs = torch.compile

        def compile_(*args: Any, **kwargs: Any) -> Any:
            if not self.hidden:
                self.hidden = True
                put(
                    {
                        (owner, name): torch.compiler.disable(vars(owner)[name])
                        for owner, name in self.originals
                        if owner is ProcessGroup or owner in self.waits
                    }
                )
            return torchs(*args, **kwargs)

        return compile_

    def make_get_future(self) -> Hook:
        """Creates the hook for ``get_future``.

        The wait for a future may be in C++, as for collectives issued by C++.
        """
        call, take, late = Work.get_future, self.pending.pop, self.late
        futures, recorder = self.futures, self.recorder

        def get_future(self: Work) -> Any:
            future = call(self)
            if (slot := take(self, None)) is not None:
                late.add(self, slot, recorder.group_of(slot))
                futures[future] = [slot]
            return future

        return get_future

    def make_future_replacements(self) -> Replacements:
        """Creates the functions that record the waits for futures."""
        futures, begin = self.futures, self.late.begin
        wait_for_one, then = Future.wait, Future.then
        wait_for_all, collect = torch.futures.wait_all, torch.futures.collect_all

        def find(some: Iterable[Any]) -> list[int]:
            return [slot for future in some for slot in futures.get(future, ())]

        def wait(self: Any) -> Any:
            has_waited = begin(futures.get(self, ()))
            result = wait_for_one(self)
            has_waited()
            return result

        def then_recorded(self: Any, callback: Any) -> Any:
            result = then(self, callback)
            futures[result] = futures.get(self, [])
            return result

        def wait_all(futures: list[Any]) -> Any:
            has_waited = begin(find(futures))
            result = wait_for_all(futures)
            has_waited()
            return result

        def collect_all(futures: list[Any]) -> Any:
            result = collect(futures)
            self.futures[result] = find(futures)
            return result

        return {
            (Future, "wait"): functools.update_wrapper(wait, wait_for_one),
            (Future, "then"): functools.update_wrapper(then_recorded, then),
            (torch.futures, "wait_all"): functools.update_wrapper(wait_all, wait_for_all),
            (torch.futures, "collect_all"): functools.update_wrapper(collect_all, collect),
        }

    def wait_for_other(self, call: Hook, work: Work, *limit: Any) -> Any:
        """Waits for a handle that cannot take the fast path.

        This method handles waits with a limit, recvs from any source, batches, and handles that
        were already waited for or were posted before recording.
        """
        recorder, other = self.recorder, self.take(work)
        if other is None:
            # A second wait for a Gloo message would hang, and then break the connection.
            if is_message(work) and work.is_completed() and work not in self.failed:
                return True
            return call(work, *limit)
        slots, since_ns = other.slots, other.since_ns
        begun = None if other.gpu is None else self.gpu_times.begin(other.gpu)
        limited = other.limited or any(limit)
        if since_ns == NONE:
            since_ns = time.monotonic_ns()
            for slot in () if limited else slots:
                recorder.wait(slot)
        elif not limited:
            _begin(recorder, slots, since_ns)
        try:
            result = call(work, *limit)
        except BaseException:
            goes_on = begun is None and not is_message(work) and not self.is_completed(work)
            if limited and goes_on:
                self.others[work] = other._replace(since_ns=since_ns)
                raise
            self.failed.add(work)
            if limited:
                _begin(recorder, slots, since_ns)
            else:
                recorder.on_failure()
            self.complete(slots, ERROR)
            raise
        if limited:
            _begin(recorder, slots, since_ns)
        if other.ranks:
            recorder.amend(slots[0], peer=other.ranks.get(source_rank(work), ANY_SOURCE))
        self.complete(slots)
        if begun is not None:
            self.gpu_times.end(begun, slots)
        return result
