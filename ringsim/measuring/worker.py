"""The measuring code that every rank runs.

The ranks measure one block after the other, each until its estimate is steady or its time is up.

::

    for each block
        all ranks         wait at a barrier, so that no other edge is busy; rank 0 then sends the
                          time for the block
        its ranks         warm up
        repeat            the leader sends the number of steps to run next, 0 if the estimate is
                          steady or the time is up; the ranks then run the steps, and each rank that
                          times the block records a span per step with the block's label
"""

from __future__ import annotations

import functools
import itertools
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ringsim import comm as dist
from ringsim.comm import torch_hooks
from ringsim.errors import ArgumentError
from ringsim.measuring.plan import (
    STREAM,
    Floats,
    Plan,
    PlannedRow,
    parts_of,
    step_ns,
    steps_wanted,
    timed_ranks,
)
from ringsim.ring import Ring, current_ring
from ringsim.ring.pairs import all_pairs
from ringsim.state import get_state
from ringsim.traces.bandwidths import ONE_GPU
from ringsim.traces.recorder import Recorder


def group_of(block: PlannedRow, ring: Ring) -> dist.ProcessGroup:
    """Returns the pair group for a block's edge; this rank must be at one end of the edge."""
    group = ring.succ_group if ring.rank == block.src else ring.pred_group
    assert group is not None
    return group


def make_step(
    block: PlannedRow, ring: Ring, outgoing: torch.Tensor, incoming: torch.Tensor
) -> Callable[[], None] | None:
    """Returns a function that runs this rank's part of one step, or None if the rank has no part.

    All ranks that have a part must call the function the same number of times. It blocks until the
    step is done.

    Args:
        block: the block to measure.
        ring: this rank's ring.
        outgoing: the tensor to send: uint8 of shape (size_bytes,), or for all_reduce float32 of
            shape (size_bytes / 4,).
        incoming: the tensor to receive into, with the same dtype and shape.
    """
    if block.pattern == "all_reduce":
        return lambda: dist.all_reduce(outgoing)
    if block.pattern == "shift":
        return lambda: _shift(ring, outgoing, incoming)
    if ring.rank not in (block.src, block.dst):
        return None
    group, first = group_of(block, ring), ring.rank == block.src
    peer = block.dst if first else block.src

    def pingpong() -> None:
        if first:
            dist.send(outgoing, peer, group=group)
            dist.recv(incoming, peer, group=group)
        else:
            dist.recv(incoming, peer, group=group)
            dist.send(outgoing, peer, group=group)

    def oneway() -> None:
        post, tensor = (dist.isend, outgoing) if first else (dist.irecv, incoming)
        works = [post(tensor, peer, group=group) for _ in range(STREAM)]
        for work in works:
            _wait(work)

    # one batch, because with NCCL each side's send would be queued behind its own unanswered recv
    def exchange() -> None:
        recv = dist.P2POp(dist.irecv, incoming, peer, group)
        send = dist.P2POp(dist.isend, outgoing, peer, group)
        for work in dist.batch_isend_irecv([recv, send]):
            work.wait()

    return {"pingpong": pingpong, "oneway": oneway, "exchange": exchange}[block.pattern]


def _shift(ring: Ring, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    send = None
    if ring.comm_device == "gpu" and ring.ranks.index(ring.rank) % 2 == 0:
        # the first NCCL recv between two ranks blocks until the other side sends
        send = dist.isend(outgoing, ring.succ, group=ring.succ_group)
    recv = dist.irecv(incoming, ring.pred, group=ring.pred_group)
    send = send or dist.isend(outgoing, ring.succ, group=ring.succ_group)
    _wait(recv)
    _wait(send)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


_WORD_BYTES = 16


def make_copy(block: PlannedRow, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    """Returns a function that runs one step of "memcpy".

    The step copies between two buffers in the same memory; on a CPU, it uses one thread.
    """
    if source.is_cuda:
        one: Callable[[], object] = functools.partial(target.copy_, source)
    else:
        one = functools.partial(np.copyto, target.numpy(), source.numpy())

    def copy() -> None:
        for _ in range(block.copies):
            one()

    return copy


class Loopback:
    """A TCP connection over loopback between the two ranks of an edge.

    Both ranks must create the connection at the same time; the constructor blocks until both have
    created it. It raises OSError if the ranks cannot connect, for example because they are on
    different machines.
    """

    def __init__(self, block: PlannedRow, ring: Ring, timeout_s: float) -> None:
        self._first = ring.rank == block.src
        group = group_of(block, ring)
        # the port, and a secret that identifies the peer
        if self._first:
            card = torch.zeros(1 + _WORD_BYTES, dtype=torch.int32, device=ring.device)
            dist.recv(card, block.dst, group=group)
            port, *word = card.tolist()
            self._connection = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
            self._connection.sendall(bytes(word))
        else:
            with socket.create_server(("127.0.0.1", 0), backlog=1) as server:
                server.settimeout(timeout_s)
                secret = secrets.token_bytes(_WORD_BYTES)
                numbers = [server.getsockname()[1], *secret]
                card = torch.tensor(numbers, dtype=torch.int32, device=ring.device)
                dist.send(card, block.src, group=group)
                self._connection = _accept(server, secret, timeout_s)
        self._connection.settimeout(timeout_s)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def make_step(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> Callable[[], None]:
        """Returns a function that runs this rank's part of one round trip.

        The buffers must be uint8 tensors in host memory.
        """
        give, take = outgoing.numpy().data, incoming.numpy().data
        connection = self._connection

        def go_first() -> None:
            connection.sendall(give)
            _receive(connection, take)

        def answer() -> None:
            _receive(connection, take)
            connection.sendall(give)

        return go_first if self._first else answer

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


def _accept(server: socket.socket, secret: bytes, timeout_s: float) -> socket.socket:
    """Returns the connection to the peer that knows the secret, and closes any other connection."""
    while True:
        connection, _ = server.accept()
        connection.settimeout(timeout_s)
        shown = bytearray(_WORD_BYTES)
        _receive(connection, memoryview(shown))
        if secrets.compare_digest(bytes(shown), secret):
            return connection
        connection.close()


def _receive(connection: socket.socket, target: memoryview) -> None:
    while target:
        count = connection.recv_into(target)
        if count == 0:
            raise ConnectionError("the rank at the other end closed the loopback connection")
        target = target[count:]


def time_steps(step: Callable[[], None], count: int) -> list[float]:
    """Runs steps on the current GPU and returns each step's time in ns.

    The times come from CUDA events on the current stream. NCCL's ``wait`` returns as soon as the
    work is queued, and makes the current stream wait for the work. An event recorded afterwards
    therefore shows when the GPU was done.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    events[-1].synchronize()
    return [before.elapsed_time(after) * 1e6 for before, after in itertools.pairwise(events)]


def check_gpus(world_size: int) -> None:
    """Raises ArgumentError unless each rank on this machine can have its own GPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if world_size > count:
        others = "world_size=1, which measures copies in the GPU's memory, or " if count else ""
        raise ArgumentError(
            f'world_size must be at most {count} (the number of GPUs) with comm_device="gpu", got '
            f"{world_size}. NCCL does not allow two ranks on one GPU. Pass "
            f'{others}comm_device="cpu".'
        )


def place_of(local_rank: int) -> dict[str, Any]:
    """Returns the location of this rank's GPU, as JSON values.

    Returns:
        A dictionary with the keys ``host`` (equal for all ranks on a machine), ``gpu`` (the GPU's
        number on the machine), ``name``, ``uuid`` (equal for all ranks on this GPU) and ``peers``.
        The peers are the machine's GPUs whose memory this GPU can read; the list is empty if the
        environment forbids NCCL to use peer access.
    """
    forbidden = (
        os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0")
        or os.environ.get("NCCL_P2P_LEVEL") == "LOC"
    )
    peers = [
        other
        for other in range(0 if forbidden else torch.cuda.device_count())
        if other != local_rank and torch.cuda.can_device_access_peer(local_rank, other)
    ]
    return {
        "host": socket.gethostname(),
        "gpu": local_rank,
        "name": torch.cuda.get_device_name(local_rank),
        "uuid": str(torch.cuda.get_device_properties(local_rank).uuid),
        "peers": peers,
    }


def paths_between(ranks: Sequence[int], places: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns NCCL's data paths on a ring's edges, as far as torch and the environment show them.

    Args:
        ranks: the ring's ranks in order.
        places: each rank's result of ``place_of``, in rank order.

    Returns:
        The path of each edge (such as "0>1"): "p2p" if one GPU can read the other's memory,
        "host-staged" if the data goes through the machine's memory, "network" if the GPUs are on
        different machines, or "sockets, one GPU" if both ranks share a GPU (NCCL_HOSTID), so that
        no link is measured.
    """
    paths = {}
    for src, dst in all_pairs(ranks):
        here, there = places[src], places[dst]
        if here["uuid"] == there["uuid"]:
            path = ONE_GPU
        elif here["host"] != there["host"]:
            path = "network"
        else:
            path = "p2p" if there["gpu"] in here["peers"] else "host-staged"
        paths[f"{src}>{dst}"] = path
    return paths


WARM_UP = "warm-up"
_LARGE_BYTES = 2**24


def measure(plan: Plan) -> dict[str, Any]:
    """Measures all blocks in a plan.

    Call it on every rank of the default group with the same plan; it blocks until all ranks have
    measured. The run must be recorded, because the times come from the recording.

    Returns:
        A dictionary with the keys ``times_ns`` (for each block, the times per message in the steps
        that this rank timed, from CUDA events on a GPU), ``host``, ``interface`` (the network
        interface set for Gloo, or None) and ``place`` (the place of the rank's GPU, or None).
    """
    recorder, ring = get_state().recorder, current_ring()
    assert recorder is not None
    return {
        "times_ns": _Meter(plan, ring, recorder).run(),
        "host": socket.gethostname(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "place": place_of(ring.local_rank) if ring.comm_device == "gpu" else None,
    }


@contextmanager
def not_recorded(recorder: Recorder) -> Iterator[None]:
    """Removes the recorder's hooks for the duration of a ``with`` block."""
    users = recorder.users
    for _ in range(users):
        torch_hooks.uninstall(recorder)
    try:
        yield
    finally:
        for _ in range(users):
            torch_hooks.install(recorder)


class _Meter:
    def __init__(self, plan: Plan, ring: Ring, recorder: Recorder) -> None:
        self._plan, self._ring, self._recorder = plan, ring, recorder
        self._gpu = ring.comm_device == "gpu"
        self._buffers: list[torch.Tensor] = []
        self._loopback: Loopback | None = None
        self._times_ns: dict[PlannedRow, Floats] = {}

    def run(self) -> dict[PlannedRow, Floats]:
        deadline_s = time.monotonic() + self._plan.limit_s
        blocks = self._without_loopback_between_machines()
        try:
            for place, block in enumerate(blocks):
                share_s = self._meet((deadline_s - time.monotonic()) / (len(blocks) - place))
                if share_s <= 0:
                    break
                self._measure(block, share_s)
        finally:
            if self._loopback is not None:
                self._loopback.close()
        return self._times_ns

    def _without_loopback_between_machines(self) -> list[PlannedRow]:
        blocks = list(self._plan.blocks)
        if not any(block.backend == "tcp" for block in blocks):
            return blocks
        hosts: list[Any] = [None] * self._ring.world_size
        dist.all_gather_object(hosts, socket.gethostname())
        return [
            block
            for block in blocks
            if block.backend != "tcp" or hosts[block.src] == hosts[block.dst]
        ]

    def _meet(self, share_s: float) -> float:
        """Waits for all ranks and returns rank 0's time limit for the next block."""
        if self._ring.world_size == 1:
            return share_s
        # if no device is given, NCCL guesses one from the rank
        dist.barrier(device_ids=[self._ring.local_rank] if self._gpu else None)
        share_s = min(share_s, self._plan.timeout_s / 4)
        told = torch.tensor([share_s], dtype=torch.float64, device=self._ring.device)
        dist.broadcast(told, src=self._ring.ranks[0])
        return float(told.item())

    def _measure(self, block: PlannedRow, share_s: float) -> None:
        step = self._step_of(block)
        if step is None:
            return
        tells = self._ring.rank in timed_ranks(block, self._ring.ranks)
        warm_up, label = (WARM_UP, block.label) if tells else (None, None)
        with not_recorded(self._recorder):
            found = np.zeros(0)
            fresh = self._repeat(block, step, 1 if block.size_bytes >= _LARGE_BYTES else 3, warm_up)
            while True:
                wanted = steps_wanted(block, found, share_s, fresh) if tells else 0
                count = self._agree(block, wanted)
                if count == 0:
                    break
                fresh = self._repeat(block, step, count, label)
                found = np.concatenate([found, fresh])
        if tells:
            self._times_ns[block] = found

    def _step_of(self, block: PlannedRow) -> Callable[[], None] | None:
        """Returns a function that runs this rank's part of a step, or None if it has no part."""
        rank = self._ring.rank
        if (block.src >= 0 and rank not in (block.src, block.dst)) or (
            block.pattern == "copy" and rank != self._ring.ranks[0]
        ):
            return None
        outgoing, incoming = self._buffers_of(block)
        if block.backend == "memcpy":
            return make_copy(block, outgoing, incoming)
        if block.backend == "tcp":
            if self._loopback is None:
                self._loopback = Loopback(block, self._ring, self._plan.timeout_s)
            return self._loopback.make_step(outgoing, incoming)
        return make_step(block, self._ring, outgoing, incoming)

    def _buffers_of(self, block: PlannedRow) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a step's send and receive buffers after touching all of their pages."""
        size = block.size_bytes
        if not self._buffers or len(self._buffers[0]) < size:
            self._buffers = []  # free the smaller buffers first
            self._buffers = [
                torch.empty(size, dtype=torch.uint8, device=self._ring.device).fill_(0)
                for _ in range(2)
            ]
        outgoing, incoming = (buffer[:size] for buffer in self._buffers)
        if block.pattern == "all_reduce":
            return outgoing.view(torch.float32), incoming.view(torch.float32)
        return outgoing, incoming

    def _repeat(
        self, block: PlannedRow, step: Callable[[], None], count: int, name: str | None
    ) -> Floats:
        """Runs ``count`` steps and returns their times in ns.

        If ``name`` is given, each step is recorded as a span.
        """
        if self._gpu:
            return np.array(time_steps(step, count)) / parts_of(block)
        if name is None:
            for _ in range(count):
                step()
            return np.zeros(0)
        recorder = self._recorder
        begin, end, before = recorder.span_begin, recorder.span_end, recorder.bookmark()
        for _ in range(count):
            slot = begin(name)
            step()
            if slot is not None:
                end(slot)
        records = recorder.records_since(before)
        return step_ns(block, records["post_ns"], records["done_ns"])

    def _agree(self, block: PlannedRow, count: int) -> int:
        if block.backend == "memcpy" or self._ring.world_size == 1:
            return count
        told = torch.tensor([count], dtype=torch.int64, device=self._ring.device)
        leader = timed_ranks(block, self._ring.ranks)[0]
        if block.src < 0:
            dist.broadcast(told, src=leader)
        elif self._ring.rank == leader:
            other = block.dst if leader == block.src else block.src
            dist.send(told, other, group=group_of(block, self._ring))
        else:
            dist.recv(told, leader, group=group_of(block, self._ring))
        return int(told.item())
