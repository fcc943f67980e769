"""In a real Jupyter kernel: functions from cells, pictures, one error, Interrupt, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager
from processes import descendants, gone, until

pytestmark = pytest.mark.timeout(120)

CELL_S = 60.0  # for one cell; a loaded machine needs some time for the first ranks
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Reply:
    """What a cell gave back: (kind, content) of every output, as the notebook format has them."""

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
        reply.outputs += self.follow(cell)
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


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One kernel for the tests that leave it as it was."""
    with kernel(tmp_path_factory.mktemp("kernel")) as running:
        assert running.run("%load_ext ringsim\nimport os, sys, time\nimport ringsim").outputs == []
        yield running


# -- what travels from the cell


def test_functions_globals_and_classes_of_cells_travel(shared: Kernel) -> None:
    shared.run("scale = 10\ndef scaled(x):\n    return scale * x")
    shared.run("class Point:\n    def __init__(self, x):\n        self.x = x")
    shared.run(
        "def worker(shift):\n    def inner(x):\n        return Point(scaled(x) + shift)\n    return inner(ringsim.current_ring().rank)"
    )
    reply = shared.run("points = ringsim.trace(worker, world_size=3, args=(1,)).results\n[(type(p) is Point, p.x) for p in points]")
    assert reply.value == "[(True, 1), (True, 11), (True, 21)]"


def test_a_cell_that_is_edited_and_run_again_counts(shared: Kernel) -> None:
    for text in ("'first'", "'second'"):
        shared.run(f"def helper():\n    return {text}\ndef worker():\n    return helper()")
        assert shared.run("ringsim.trace(worker, world_size=2).results").value == f"[{text}, {text}]"


def test_the_environment_of_the_moment_reaches_the_ranks(shared: Kernel) -> None:
    shared.run("def setting():\n    return os.environ.get('MY_SETTING')")
    for change, seen in (("", None), ("os.environ['MY_SETTING'] = 'now'", "now"), ("del os.environ['MY_SETTING']", None)):
        assert shared.run(f"{change}\nringsim.trace(setting, world_size=2).results").value == repr([seen] * 2)


# -- what is shown


def test_a_trace_is_a_picture_with_words_beside_it(shared: Kernel) -> None:
    shared.run(
        "def neighbours():\n"
        "    import torch\n"
        "    from torch import distributed as dist\n"
        "    ring = ringsim.current_ring()\n"
        "    sent = dist.isend(torch.zeros(2), ring.succ, group=ring.succ_group)\n"
        "    dist.recv(torch.empty(2), ring.pred, group=ring.pred_group)\n"
        "    sent.wait()"
    )
    (shown,) = shared.run("ringsim.trace(neighbours, world_size=4)").shown
    assert set(shown["data"]) == {"image/png", "text/plain"}
    assert shown["data"]["text/plain"].startswith("Trace of 4 ranks (measured, gloo")
    assert shown["metadata"]["image/png"]["alt"].startswith("Trace of 4 ranks that exchanged 4 messages in ")


def test_a_check_shows_its_text_and_the_failing_picture(shared: Kernel) -> None:
    text, picture = shared.run("ringsim.check.hello(lambda numbers: 7, seed=1)").shown
    assert text["data"]["text/plain"].startswith("check.hello: not yet (3 ranks, seed 1)\n  All 3 ranks returned 7")
    assert set(picture["data"]) == {"image/png", "text/plain"}
    assert picture["metadata"]["image/png"]["alt"]


def test_ring_magic_runs_the_cell_on_every_rank(shared: Kernel) -> None:
    shared.run("base = 100\nlarge = object()\nclass Box:\n    large = 3")
    reply = shared.run("%%ring -n 3\nprint('rank', ring.rank, 'sends to', ring.succ)\nbox = Box()\nbase + ring.rank + box.large")
    assert sorted(reply.text.splitlines()) == [f"[rank {rank}] rank {rank} sends to {(rank + 1) % 3}" for rank in range(3)]
    assert reply.errors == []
    (shown,) = reply.shown
    assert set(shown["data"]) == {"image/png", "text/plain"}
    assert shown["metadata"]["image/png"]["alt"].startswith("Trace of 3 ranks")
    assert shared.run("trace.results").value == "[103, 104, 105]"
    assert shared.run("'box' in globals(), trace.output[2]").value == r"(False, 'rank 2 sends to 0\n')"


def test_ring_magic_keeps_the_trace_under_the_name_asked_for(shared: Kernel) -> None:
    reply = shared.run("%%ring -n 2 -o mine\nimport threading\nthreading.Lock()")
    assert reply.errors == []
    assert shared.run("[result[:13] for result in mine.results]").value == "['<unlocked _th', '<unlocked _th']"


# -- what is shown when something is wrong


def test_a_failing_rank_shows_one_error_with_the_line_of_the_cell(shared: Kernel) -> None:
    cell = (
        "def failing():\n"
        "    import torch\n"
        "    from torch import distributed as dist\n"
        "    ring = ringsim.current_ring()\n"
        "    if ring.rank == 1:\n"
        "        raise ValueError('no such layer')  # the student's line\n"
        "    dist.recv(torch.empty(2), ring.pred, group=ring.pred_group)\n"
        "ringsim.trace(failing, world_size=4)"
    )
    reply = shared.run(cell)
    (error,) = reply.errors
    assert error.startswith("RankFailed: rank 1 of 4 raised ValueError: no such layer\n")
    assert "    raise ValueError('no such layer')  # the student's line" in error
    assert "line 6, in failing" in error
    assert error.count("Traceback") == 1
    assert "ringsim/" not in error
    assert "site-packages" not in error
    assert reply.text == ""
    assert shared.run("sys.last_value.rank, sys.last_value.trace.world_size").value == "(1, 4)"


def test_a_failing_ring_cell_counts_its_lines_as_the_notebook_does(shared: Kernel) -> None:
    (error,) = shared.run("%%ring -n 2\nx = 1\nif ring.rank == 1:\n    x / 0").errors
    assert "line 4, in <module>\n      x / 0" in error
    assert "ringsim/" not in error


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("%%ring -n 2\nx = = 1", "    x = = 1\n        ^\nSyntaxError: invalid syntax"),
        ("%%ring -n 0\n1", "ArgumentError: world_size must be an integer from 1 to 1024, got 0."),
        ("%%ring --limit 0\n1", "ArgumentError: --limit must be a positive number of seconds, got 0.0."),
        (
            "import threading\nlock = threading.Lock()\nget_ipython().run_cell_magic('ring', '', 'lock')",
            "ArgumentError: the variable 'lock'",
        ),
        ("%%ring -n 2 --limit 0.5\nimport time\ntime.sleep(30)", "RunTimeout: the run must end within limit_s=0.5 s"),
    ],
)
def test_mistakes_in_a_ring_cell_are_told_in_short(shared: Kernel, cell: str, words: str) -> None:
    (error,) = shared.run(cell).errors
    assert words in error
    assert "ringsim/" not in error


@pytest.mark.parametrize(
    ("line", "words"), [("-m 2", "unrecognized arguments: -m 2"), ("-o 1x", "-o must be the name of a variable, got '1x'")]
)
def test_ring_magic_says_how_it_is_used(shared: Kernel, line: str, words: str) -> None:
    reply = shared.run(f"%%ring {line}\n1")
    assert words in reply.text
    assert "Usage: %%ring [-n RANKS]" in reply.text


# -- how it ends


BLOCKED = """
def blocked():
    import time
    import torch
    from torch import distributed as dist
    ring = ringsim.current_ring()
    print(os.getpid(), force=True)
    if ring.rank == 0:
        time.sleep(1000)  # it might still send: so nobody can call the others stuck
    dist.recv(torch.empty(2), ring.pred, group=ring.pred_group)
ringsim.trace(blocked, world_size=3)
"""


def start_blocked(running: Kernel) -> tuple[str, list[int]]:
    """Starts a cell whose ranks wait for ever; returns the cell, and the ranks' process ids once all have come so far."""
    cell = running.start(BLOCKED)
    pids: list[int] = []
    for kind, content in running.follow(cell):
        if kind != "stream":
            assert kind == "display_data", content  # the progress line, where the machine is busy
            continue
        pids += [int(line.split()[-1]) for line in content["text"].splitlines()]
        if len(pids) == 3:
            break
    return cell, pids


def test_interrupt_ends_a_blocked_cell_and_no_rank_outlives_a_killed_kernel(tmp_path: Path) -> None:
    with kernel(tmp_path) as own:
        assert own.run("%load_ext ringsim\nimport os, sys\nimport ringsim").outputs == []
        own.run("ringsim.trace(os.getpid, world_size=3)")
        cell, pids = start_blocked(own)
        start = time.monotonic()
        own.manager.interrupt_kernel()
        reply = own.finish(cell)
        assert time.monotonic() - start < 1.5  # what ringsim promises
        (error,) = reply.errors
        assert error.startswith("Interrupted: the run was interrupted after ")
        assert all(gone(pid) for pid in pids)
        assert not [name for name in descendants(own.pid).values() if name.startswith("ringsim-rank")]  # reaped, too
        frame = "sys.last_value.trace.to_pandas()"
        assert own.run(f"sorted({frame}['rank']), set({frame}['status'])").value == "([1, 2], {'in_flight'})"
        assert own.run("ringsim.trace(lambda: ringsim.current_ring().rank, world_size=3).results").value == "[0, 1, 2]"
        _, pids = start_blocked(own)
        os.kill(own.pid, signal.SIGKILL)
        assert until(lambda: all(gone(pid) for pid in pids), 1.0), "a rank is left"


def test_nothing_outlives_a_kernel_that_is_shut_down(tmp_path: Path) -> None:
    with kernel(tmp_path) as running:
        running.run("import os, ringsim\nringsim.trace(os.getpid, world_size=4)")
        left = descendants(running.pid)
        assert any(name.startswith("ringsim") for name in left.values()), "the fork server is there"
    assert until(lambda: all(gone(pid) for pid in left), 2.0), left
    assert list(tmp_path.glob("ringsim-*")) == []
