"""Rank 0 on torch's fake backend, which runs torch.distributed in one process without messages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

import ringsim
from ringsim.launch import merging
from ringsim.launch import recording as blocks


@contextmanager
def fake_world(size: int = 4, backend: str = "fake") -> Iterator[ProcessGroup]:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=size)
    assert dist.group.WORLD is not None
    try:
        yield dist.group.WORLD
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def recorded(
    directory: Path, check: str = "basic", now: Callable[[], int] | None = None
) -> Iterator[Callable[[], ringsim.Trace]]:
    """Records like ``ringsim.trace(path)``, but does not wait for missing ranks.

    It yields a function that ends the recording and returns the trace. ``now`` replaces the clock.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "WAIT_S", 0.0)
        patch.setattr(merging, "WAIT_AFTER_ERROR_S", 0.0)
        if now is not None:
            patch.setattr(blocks, "Recorder", partial(blocks.Recorder, now=now))
        directory.mkdir(exist_ok=True)
        block = ringsim.trace(directory / "run.ringtrace", check=check)

        def stop() -> ringsim.Trace:
            if block.written is None:
                block.__exit__(*sys.exc_info())
            return block.trace

        block.__enter__()
        try:
            yield stop
        finally:
            stop()
