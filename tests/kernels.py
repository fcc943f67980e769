"""A Jupyter kernel, driven as a notebook drives it."""

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

CELL_S = 60.0  # for one cell; a loaded machine needs some time for the first ranks
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Reply:
    """What a cell gave back.

    Attributes:
        outputs: (kind, content) of every output, as the notebook format has them.
    """

    def __init__(self) -> None:
        self.outputs: list[tuple[str, dict[str, Any]]] = []

    @property
    def text(self) -> str:
        """All that was printed."""
        return "".join(content["text"] for kind, content in self.outputs if kind == "stream")

    @property
    def errors(self) -> list[str]:
        """What each error shows, without colours."""
        return [_COLOURS.sub("", "\n".join(content["traceback"])) for kind, content in self.outputs if kind == "error"]

    @property
    def shown(self) -> list[dict[str, Any]]:
        """Content of each rich output."""
        return [content for kind, content in self.outputs if kind in ("execute_result", "display_data")]

    @property
    def value(self) -> str:
        """The text of the cell's value."""
        (content,) = [content for kind, content in self.outputs if kind == "execute_result"]
        text: str = content["data"]["text/plain"]
        return text


class Kernel:
    """A running kernel and a client of it."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client

    @property
    def pid(self) -> int:
        """The kernel's process."""
        pid = self.manager.provisioner.pid  # type: ignore[union-attr]  # it is there while the kernel runs
        assert isinstance(pid, int)
        return pid

    def run(self, code: str) -> Reply:
        """Runs a cell and returns what it gave back, errors included."""
        return self.finish(self.start(code))

    def start(self, code: str) -> str:
        """Starts a cell and returns its number for ``follow``."""
        return self.client.execute(code)

    def finish(self, cell: str) -> Reply:
        """Waits for a cell to end."""
        reply = Reply()
        for output in self.follow(cell):
            reply.outputs.append(output)
        return reply

    def follow(self, cell: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the outputs of a cell as they come, until it has ended."""
        deadline = time.monotonic() + CELL_S
        while True:
            message = self.client.get_iopub_msg(timeout=max(deadline - time.monotonic(), 0.01))
            if message["parent_header"].get("msg_id") != cell:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return
            if kind in ("stream", "error", "execute_result", "display_data"):
                yield kind, content


@contextmanager
def kernel(directory: Path) -> Iterator[Kernel]:
    """A kernel that works in ``directory``; it is shut down at the end, if it is still there."""
    manager = KernelManager(kernel_name="python3", transport="ipc", ip=str(directory / "channel"))
    manager.start_kernel(cwd=str(directory), env={**os.environ, "TMPDIR": str(directory)})
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=CELL_S)
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        if manager.is_alive():
            manager.shutdown_kernel(now=False)
        manager.cleanup_resources()
