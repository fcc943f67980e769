"""A rank stops recording at the maximum of records, and says so; what is no longer recorded is taken for no fault."""

from __future__ import annotations

import time

import pytest

import ringsim

MAXIMUM = 600  # the real one, two million, takes minutes to reach
ROUNDS = 400  # two messages each: the last 200 messages are not recorded


def stop_at(records: int) -> None:
    from ringsim.state import get_state

    recorder = get_state().recorder
    assert recorder is not None
    recorder._store._max_records = recorder._max_records = records


def to_and_fro(stops: tuple[int, ...]) -> int:
    """Messages both ways; then one that its sender sends late, when a rank that looked stuck would have been found out."""
    import torch
    import torch.distributed as dist

    rank, token = dist.get_rank(), torch.zeros(1)
    if rank in stops:
        stop_at(MAXIMUM)
    for _ in range(ROUNDS):
        for sender in (0, 1):
            if rank == sender:
                token += 1
                dist.send(token, 1 - rank)
            else:
                dist.recv(token, 1 - rank)
    if rank == 0:
        time.sleep(1.5)
        dist.send(token, 1)
    else:
        dist.recv(token, 0)
    dist.barrier()
    return int(token)


@pytest.mark.parametrize("stops", [(0, 1), (0,), (1,)], ids=["both", "the sender", "the receiver"])
def test_a_rank_that_no_longer_records_is_not_taken_for_stuck(stops: tuple[int, ...]) -> None:
    trace = ringsim.trace(to_and_fro, world_size=2, args=(stops,))
    assert trace.results == [2 * ROUNDS, 2 * ROUNDS]
    recorded = {rank: int((trace.events.rank == rank).sum()) for rank in (0, 1)}
    assert recorded == {rank: MAXIMUM if rank in stops else 2 * ROUNDS + 2 for rank in (0, 1)}
    assert trace.metadata["complete"] is False
    stopped = [f"Recording of rank {rank} stopped: the maximum of 600 records was reached." for rank in stops]
    assert [note.partition(" What")[0] for note in trace.metadata["notes"] if note.startswith("Recording")] == stopped
    assert not {finding.kind for finding in trace.explain().findings} - {"late_sender", "late_receiver", "straggler"}
