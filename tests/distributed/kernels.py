"""Real Jupyter kernels for tests."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager
from processes import descendants, gone, until

CELL_S = 150.0  # limit for one cell; on a busy machine the first ranks take some time
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
Output = tuple[str, dict[str, Any]]  # kind and content, as in the notebook format


class Reply:
    """The outputs of a cell."""

    def __init__(self, outputs: Iterator[Output]) -> None:
        self.text, self.errors, self.shown, self.value = "", [], [], ""
        self.messages: list[dict[str, Any]] = []  # to widgets
        for kind, content in outputs:
            if kind == "stream":
                self.text += content["text"]
            elif kind == "error":
                self.errors.append(_COLOURS.sub("", "\n".join(content["traceback"])))
            elif kind == "comm_msg":
                self.messages.append(content["data"])
            elif "display_id" not in content.get("transient", {}):
                # other outputs are progress lines
                self.shown.append(content)
                self.value = content["data"]["text/plain"]


class Kernel:
    """A running kernel and a client of it."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client
        # the id exists while the kernel runs
        self.pid: int = manager.provisioner.pid  # type: ignore[union-attr, assignment]

    def run(self, code: str) -> Reply:
        """Runs a cell; returns its outputs, including errors."""
        return Reply(self.follow(self.client.execute(code)))

    def follow(self, cell: str) -> Iterator[Output]:
        """Yields the outputs of a cell as they arrive, until it ends."""
        deadline = time.monotonic() + CELL_S
        while True:
            message = self.client.get_iopub_msg(timeout=max(deadline - time.monotonic(), 0.01))
            if message["parent_header"].get("msg_id") != cell:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return
            if kind in ("stream", "error", "execute_result", "display_data", "comm_msg"):
                yield kind, content


@contextmanager
def start_kernel(directory: Path) -> Iterator[Kernel]:
    """Starts a kernel with ringsim, which leaves neither processes nor files at its end."""
    manager = KernelManager(kernel_name="python3", transport="ipc", ip=str(directory / "channel"))
    manager.start_kernel(cwd=str(directory), env={**os.environ, "TMPDIR": str(directory)})
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=CELL_S)
        running = Kernel(manager, client)
        first = running.run("%load_ext ringsim\nimport os, sys, time\nimport ringsim")
        assert (first.text, first.errors) == ("", [])
        yield running
        left = descendants(running.pid)
        assert any(name.startswith("ringsim") for name in left.values()), "no fork server"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=False)
        manager.cleanup_resources()
    assert until(lambda: all(gone(pid) for pid in left)), left
    assert until(lambda: list(directory.glob("ringsim-*")) == [])
