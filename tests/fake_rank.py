"""Rank 0 on torch's fake backend, recorded.

One process, no messages, every function of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from ringsim.comm.injecting import install_with
from ringsim.comm.torch_hooks import uninstall
from ringsim.faults import Injection
from ringsim.traces.events import Events
from ringsim.traces.recorder import Recorder
from ringsim.traces.runs import read_parts

SIZE = 4
Stop = Callable[[], tuple[Events, dict[str, Any]]]


@contextmanager
def fake_world(size: int = SIZE) -> Iterator[ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@contextmanager
def recording(
    recorder: Recorder, check: str = "basic", inject: Sequence[Injection] = ()
) -> Iterator[Stop]:
    """Shows operations to a recorder until what it gives is called.

    That returns the events and what the rank says.
    """
    install_with(inject, recorder, check)

    def stop() -> tuple[Events, dict[str, Any]]:
        if recorder.users:
            uninstall(recorder)
            recorder.close()
        return read_parts(Path(recorder.directory), start_ns=0)

    try:
        yield stop
    finally:
        stop()
