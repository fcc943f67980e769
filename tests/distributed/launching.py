"""What the tests of launching share."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import ringsim


def pass_round(rounds: int = 1, *, step: float = 1.0) -> float:
    """Passes a number round the ring; every rank adds to it."""
    import torch
    import torch.distributed as dist

    ring = ringsim.current_ring()
    token = torch.tensor([float(ring.rank)])
    for _ in range(rounds if ring.world_size > 1 else 0):
        with ringsim.span("add", stage=ring.rank):
            token = token + step
        sent = dist.isend(token, ring.succ, group=ring.succ_group)
        token = torch.empty(1)
        dist.recv(token, ring.pred, group=ring.pred_group)
        sent.wait()
    return float(token)


@contextlib.contextmanager
def running_script(directory: Path, body: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a script that traces, in a session and a temporary directory ("theirs") of its own, and ends it whatever happens."""
    script = directory / "script.py"
    script.write_text(textwrap.dedent(body))
    (directory / "theirs").mkdir()
    environment = {**os.environ, "TMPDIR": str(directory / "theirs")}
    with subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
