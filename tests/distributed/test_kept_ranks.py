"""Cells that keep their ranks: ``%%ring --keep``, in real kernels and in a terminal."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pexpect
import pytest
from kernels import CELL_S, Kernel, Reply, start_kernel
from processes import descendants, gone, until


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Yields one kernel for all tests; its ranks still run when it is shut down."""
    with start_kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        yield kernel
        assert kernel.run("%%ring --keep\n1").errors == []
        assert ranks_of(kernel) != []


@pytest.fixture
def kernel(running: Kernel) -> Kernel:
    """Yields the kernel with three kept ranks, on which x is 5."""
    setting = "import time, torch\nimport torch.distributed as dist\nx = 5"
    reply = running.run(f"%%ring -n 3 --keep\n{setting}")
    assert reply.errors == []
    assert set(reply.shown[-1]["data"]) == {"text/plain"}, "there is nothing to draw"
    return running


def ranks_of(kernel: Kernel) -> list[int]:
    """Returns the processes of the kept ranks."""
    names = descendants(kernel.pid).items()
    return [pid for pid, name in names if re.fullmatch(r"ringsim-(idle|rank\d+)", name)]


def results(kernel: Kernel, cell: str) -> str:
    """Runs a cell on the kept ranks; returns the text of its results."""
    reply = kernel.run(cell)
    assert reply.errors == []
    assert reply.shown[-1]["data"]["text/plain"].startswith("Trace of 3 ranks")
    return kernel.run("trace.results").value


# -- variables


def test_what_a_cell_defines_is_there_in_the_next(kernel: Kernel) -> None:
    kernel.run(
        "%%ring --keep\nimport math\ntorch = __import__('torch')\n"
        "def area(r):\n    return math.floor(r * scale)\n"
        "scale = ring.rank\nmodel = torch.nn.Linear(2, 1)\n"
        "wrapped = torch.nn.parallel.DistributedDataParallel(model)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    )
    assert results(kernel, "%%ring --keep\nscale += 1\narea(10)") == "[10, 20, 30]"
    step = (
        "%%ring --keep\noptimizer.zero_grad()\nloss = wrapped(torch.ones(1, 2)).square().mean()\n"
        "loss.backward()\noptimizer.step()\nfloat(loss)"
    )
    first, second = (eval(results(kernel, step)) for _ in range(2))
    assert first[0] == first[1] == first[2] > second[0]
    assert "all_reduce" in kernel.run("set(trace.to_pandas()['op'])").value


def test_without_keep_each_cell_has_fresh_ranks(kernel: Kernel) -> None:
    kernel.run("%%ring -n 2\nfresh = 1")
    (error,) = kernel.run("%%ring -n 2\nfresh").errors
    assert "NameError: name 'fresh' is not defined" in error
    kernel.run("%%ring --keep\nfresh = 1")
    (error,) = kernel.run("%%ring -n 2\nfresh").errors
    assert "NameError: name 'fresh' is not defined" in error
    assert results(kernel, "%%ring --keep\nfresh") == "[1, 1, 1]"


def test_the_later_assignment_counts(kernel: Kernel) -> None:
    kernel.run("y = 1\nlocked = __import__('threading').Lock()")
    assert results(kernel, "%%ring --keep\ny") == "[1, 1, 1]"
    kernel.run("%%ring --keep\ny = 10 + ring.rank\ndef locked():\n    return 4")
    assert results(kernel, "%%ring --keep\ny, locked()") == "[(10, 4), (11, 4), (12, 4)]"
    kernel.run("y = 2")
    assert results(kernel, "%%ring --keep\ny") == "[2, 2, 2]"
    kernel.run("%%ring --keep\ny += 1")
    kernel.run("%ring push y")
    assert results(kernel, "%%ring --keep\ny += ring.rank\ny") == "[2, 3, 4]"
    assert results(kernel, "%%ring --keep\ny") == "[2, 3, 4]"
    (error,) = kernel.run("%%ring --keep\nkey = running, LOCK").errors
    assert "NameError" in error
    kernel.run("LOCK = __import__('threading').Lock()")
    (error,) = kernel.run("%%ring --keep\nLOCK").errors
    assert error.startswith("ArgumentError: the variable 'LOCK' cannot be sent")


def test_variables_are_pulled_pushed_and_completed(kernel: Kernel) -> None:
    kernel.run("%%ring --keep\nloss = ring.rank / 2")
    assert kernel.run("%ring pull loss").value == "[0.0, 0.5, 1.0]"
    assert kernel.run("losses = %ring pull loss\nlosses[1], ranks[2].loss").value == "(0.5, 1.0)"
    kernel.run("batch, rate = [1, 2], 3\n%ring push batch rate")
    assert results(kernel, "%%ring --keep\nrate * len(batch)") == "[6, 6, 6]"
    assert {".loss", ".batch", ".run"} <= set(complete(kernel, "ranks[2]."))
    assert complete(kernel, "print(ranks[2].los") == [".loss"]
    assert complete(kernel, "ranks[7].lo") == []
    assert complete(kernel, "ranks[") == ["0", "1", "2"]


def complete(kernel: Kernel, code: str) -> list[str]:
    answer = kernel.client.complete(code, reply=True, timeout=CELL_S)
    return [str(match) for match in answer["content"]["matches"]]


# -- which ranks


def test_some_ranks_run_a_cell(kernel: Kernel) -> None:
    assert results(kernel, "%%ring 0,2\nx += ring.rank\nx") == "[5, None, 7]"
    assert kernel.run("%ring pull x").value == "[5, 5, 7]"
    assert results(kernel, "%%ring 1 -o other\nx") == "[5, None, 7]"
    assert kernel.run("other.results").value == "[None, 5, None]"


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("%%ring -n 4 --keep\n1", "this notebook keeps 3 ranks, and -n asks for 4. Leave -n out"),
        ("%%ring 3\n1", "a rank must be an integer from 0 to 2, got 3. Usage: %%ring"),
        ("%%ring 0-2\n1", "the ranks must be numbers such as 0,1, got '0-2'. Usage: %%ring"),
        ("%ring start", "%ring cannot 'start'. Usage: %%ring"),
        ("%ring push nothing", "the notebook has no variable 'nothing'. Usage: %%ring"),
        ("%ring pull nothing", "ArgumentError: rank 0 has no variable 'nothing'."),
        ("%%ring --keep\nx = = 1", "SyntaxError: invalid syntax"),
    ],
)
def test_mistakes_are_told_in_short(kernel: Kernel, cell: str, words: str) -> None:
    reply = kernel.run(cell)
    said = "".join([reply.text, *reply.errors])
    assert words in said
    assert "ringsim/" not in said
    assert results(kernel, "%%ring --keep\nx") == "[5, 5, 5]"


def test_ring_lists_its_ranks(kernel: Kernel) -> None:
    before = kernel.run("%ring").text
    kernel.run("%%ring --keep\nlarge = bytearray(100_000_000) if ring.rank == 1 else None")
    first, *lines = kernel.run("%ring").text.splitlines()
    calls = int(re.match(r"3 ranks, (\d+) calls", before)[1])  # type: ignore[index]
    assert first == f"3 ranks, {calls + 1} calls"
    found = [re.fullmatch(r"rank (\d): process (\d+), ([\d.]+) MiB", line) for line in lines]
    numbers, pids, memory = zip(*(each.groups() for each in found if each), strict=True)
    assert numbers == ("0", "1", "2")
    assert sorted(map(int, pids)) == sorted(ranks_of(kernel))
    assert float(memory[1]) > float(memory[0]) + 80


# -- while a cell runs


def test_output_is_tagged_and_comes_while_the_cell_runs(kernel: Kernel, tmp_path: Path) -> None:
    told = tmp_path / "told"
    outputs = kernel.follow(
        kernel.client.execute(
            "%%ring --keep\nimport os, time\nprint('waits', ring.rank)\n"
            f"while not os.path.exists({str(told)!r}):\n    time.sleep(0.01)\nprint('ends')"
        )
    )
    text = ""
    while text.count("waits") < 3:
        kind, content = next(outputs)
        text += content["text"] if kind == "stream" else ""
    assert sorted(text.splitlines()) == [f"[rank {rank}] waits {rank}" for rank in range(3)]
    told.touch()
    rest = Reply(outputs)
    assert sorted(rest.text.splitlines()) == [f"[rank {rank}] ends" for rank in range(3)]


@pytest.mark.parametrize("ranks", ["--keep", "-n 2"])
def test_a_cell_is_shown_while_it_runs(kernel: Kernel, tmp_path: Path, ranks: str) -> None:
    told = tmp_path / "told"
    outputs = kernel.follow(
        kernel.client.execute(
            f"%%ring {ranks} --live\nimport os, time\n"
            f"while not os.path.exists({str(told)!r}):\n    time.sleep(0.01)\n'the end'"
        )
    )
    live = 0
    while live < 3:  # pieces for the widget
        kind, content = next(outputs)
        message = content["data"] if kind == "comm_msg" else {}
        live += message.get("content") == {"live": True}
    told.touch()
    rest = Reply(outputs)
    assert rest.errors == []
    assert "version" in rest.messages[-1]["content"]  # the whole run
    assert rest.value.startswith("Trace of ")
    assert "'the end'" in kernel.run("trace.results").value


# -- cells that fail


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("if ring.rank == 1:\n    x / 0", "RankFailed: rank 1 of 3 raised ZeroDivisionError"),
        ("dist.recv(torch.empty(1), ring.pred)", "Deadlock: deadlock: ranks 0, "),
        ("import os\nif ring.rank == 1:\n    os._exit(3)\ndist.barrier()", "rank 1 of 3"),
    ],
)
def test_a_cell_fails_and_the_others_go_on(kernel: Kernel, code: str, words: str) -> None:
    (error,) = kernel.run(f"%%ring --keep\n{code}").errors
    assert words in error
    assert "The session goes on" in error
    assert "ringsim/" not in error
    assert results(kernel, "%%ring --keep\nimport torch.distributed as dist\ndist.barrier()") == (
        "[None, None, None]"
    )
    assert results(kernel, "%%ring 0,2\nx") == "[5, None, 5]"


def test_a_limit_ends_the_cell_and_not_the_ranks(kernel: Kernel) -> None:
    (error,) = kernel.run("%%ring --keep --limit 0.5\ntime.sleep(100)").errors
    assert error.startswith("RunTimeout: the run did not end within limit_s=0.5 s")
    assert results(kernel, "%%ring --keep\nx") == "[5, 5, 5]"


@pytest.mark.parametrize(
    "waits", ["time.sleep(1000)", "dist.recv(torch.empty(1), 0)", "while True: pass"]
)
def test_an_interrupt_stops_the_cell_and_not_the_ranks(kernel: Kernel, waits: str) -> None:
    before = sorted(ranks_of(kernel))
    outputs = kernel.follow(
        kernel.client.execute(
            "%%ring --keep\nprint('started')\nif ring.rank == 0:\n    time.sleep(1000)\n" + waits
        )
    )
    text = ""
    while text.count("started") < 3:
        kind, content = next(outputs)
        text += content["text"] if kind == "stream" else ""
    kernel.manager.interrupt_kernel()
    begin_s = time.monotonic()
    (error,) = Reply(outputs).errors
    took_s = time.monotonic() - begin_s
    assert error.startswith("Interrupted: the run was interrupted after ")
    assert "The session goes on." in error
    assert took_s < 0.5 * (1 + os.getloadavg()[0])  # on a busy machine, everything takes longer
    assert results(kernel, "%%ring --keep\nx") == "[5, 5, 5]"
    assert sorted(ranks_of(kernel)) == before


# -- several sessions


def test_a_notebook_has_another_session_beside_its_own(kernel: Kernel) -> None:
    reply = kernel.run(
        "def set_x(value):\n    global x\n    x = value\n"
        "with ringsim.session(world_size=2) as others:\n"
        "    others.run(set_x, 7)\n"
        "    get_ipython().run_cell_magic('ring', '--keep', 'x += 1')\n"
        "    print(others.pull('x'), ranks.pull('x'))"
    )
    assert (reply.text, reply.errors) == ("[7, 7] [6, 6, 6]\n", [])
    (error,) = kernel.run("others.pull('x')").errors
    assert error.startswith("RingError: the session is closed.")


def test_two_notebooks_keep_ranks_at_once(kernel: Kernel, tmp_path: Path) -> None:
    with start_kernel(tmp_path) as second:
        second.run("%%ring -n 3 --keep\nimport torch.distributed as dist\nx = 'second'")
        cell = "%%ring --keep\nfor _ in range(50): dist.barrier()\nx"
        running = [(each, each.client.execute(cell)) for each in (kernel, second)]
        for each, message in running:
            assert Reply(each.follow(message)).errors == []
        assert kernel.run("trace.results").value == "[5, 5, 5]"
        assert second.run("trace.results").value == "['second', 'second', 'second']"
        second.run("%ring stop")
        assert results(kernel, "%%ring --keep\nx") == "[5, 5, 5]"


# -- the end of the ranks


def test_stop_ends_the_ranks(kernel: Kernel) -> None:
    pids = ranks_of(kernel)
    assert len(pids) == 3
    reply = kernel.run("%ring stop")
    assert (reply.text, reply.errors) == ("", [])
    assert until(lambda: all(gone(pid) for pid in pids))
    for line in ("%ring", "%ring stop"):
        reply = kernel.run(line)
        assert reply.text.startswith("no ranks are kept")
        assert reply.errors == []
    for line in ("%ring pull x", "%ring push x", "%%ring 0,1\nx"):
        (error,) = kernel.run(line).errors
        assert error.startswith("ArgumentError: no ranks are kept")
    (error,) = kernel.run("ranks[0].x").errors
    assert error.startswith("RingError: the session is closed.")
    (error,) = kernel.run("%%ring -n 3 --keep\nx").errors
    assert "NameError: name 'x' is not defined" in error


def test_ranks_that_have_ended_are_not_replaced_in_silence(kernel: Kernel) -> None:
    kernel.run("ranks.close()")
    (error,) = kernel.run("%%ring --keep\nx").errors
    assert error.startswith("ArgumentError: no ranks are kept; kept ranks end after an hour")
    assert results(kernel, "%%ring -n 3 --keep\nring.rank") == "[0, 1, 2]"


def test_simulated_ranks_stay(kernel: Kernel) -> None:
    (error,) = kernel.run("%%ring --keep --sim\n1").errors
    assert error.startswith("ArgumentError: this notebook keeps real ranks. Leave --sim out")
    assert "--sim needs --keep. Usage: %%ring" in kernel.run("%%ring --sim\n1").text
    kernel.run("%ring stop")
    reply = kernel.run(
        "%%ring -n 3 --keep --sim\nimport torch, torch.distributed as dist\nx = ring.rank\n"
        "print('here is', x)"
    )
    assert sorted(reply.text.splitlines()) == [f"[rank {rank}] here is {rank}" for rank in range(3)]
    sum_up = (
        "%%ring --keep\ntotal = torch.ones(1) * x\ndist.all_reduce(total)\nx += 1\ntotal.item()"
    )
    assert results(kernel, sum_up) == "[3.0, 3.0, 3.0]"
    kernel.run("rate = 3")
    assert results(kernel, "%%ring 1\nx + rate") == "[None, 5, None]"
    (error,) = kernel.run("%%ring --keep\ndist.recv(torch.empty(1), ring.pred)").errors
    assert error.startswith("Deadlock: deadlock: ranks 0, 2 and 1 wait for each other.")
    assert error.endswith("The session goes on.")
    assert results(kernel, sum_up) == "[6.0, 6.0, 6.0]"
    assert kernel.run("%ring pull x").value == "[2, 3, 4]"
    assert complete(kernel, "ranks[2].tot") == [".total"]
    first, line = kernel.run("%ring").text.splitlines()
    assert first.startswith("3 ranks, ")
    assert re.fullmatch(r"ranks 0, 1 and 2: process \d+, [\d.]+ MiB", line)
    message = kernel.client.execute("%%ring --keep\nwhile True: pass")
    time.sleep(1)
    kernel.manager.interrupt_kernel()
    (error,) = Reply(kernel.follow(message)).errors
    assert error.startswith("Interrupted: the simulation was interrupted after ")
    assert "ranks 0, 1 and 2 started again, without variables" in error
    (error,) = kernel.run("%%ring --keep\ntotal").errors
    assert "NameError: name 'total' is not defined" in error
    (pid,) = ranks_of(kernel)
    kernel.run("%ring stop")
    assert until(lambda: gone(pid))


def test_ranks_end_with_a_kernel_that_is_killed(tmp_path: Path) -> None:
    pids: dict[int, str] = {}
    with suppress(RuntimeError), start_kernel(tmp_path) as kernel:
        kernel.run("%%ring -n 2 --keep\nx = 5")
        pids = descendants(kernel.pid)
        assert len(ranks_of(kernel)) == 2
        os.kill(kernel.pid, signal.SIGKILL)
        assert until(lambda: gone(kernel.pid))
        raise RuntimeError  # there is nothing to shut down
    assert until(lambda: all(gone(pid) for pid in pids))


def test_a_terminal_keeps_ranks(tmp_path: Path) -> None:
    command = ["-m", "IPython", "--simple-prompt", "--no-banner", "--colors=nocolor"]
    environment: Any = {
        **os.environ,
        "IPYTHONDIR": str(tmp_path),
        "TERM": "dumb",
        "PYTHON_COLORS": "0",
    }
    terminal = pexpect.spawn(
        sys.executable, command, env=environment, encoding="utf-8", timeout=CELL_S, echo=False
    )

    def run(code: str, then: str) -> None:
        terminal.expect(r"In \[\d+\]: ")
        terminal.sendline(code)
        terminal.expect(then)

    try:
        run("%load_ext ringsim", "\n")
        run("%%ring -n 2 --keep\nx = 40 + ring.rank\n\n", "Trace of 2 ranks")
        run("%%ring --keep\nprint('now', x + 1)\n\n", "now 4[12]")
        run("%%ring --keep\nimport time\nprint('started')\ntime.sleep(1000)\n\n", "1] started")
        terminal.sendintr()
        terminal.expect("Interrupted: the run was interrupted(?s:.)*The session goes on")
        run("%ring pull x", r"\[40, 41\]")
        pids = descendants(terminal.pid)
        assert {"ringsim-idle"} <= set(pids.values())
        run("exit", pexpect.EOF)
        assert until(lambda: all(gone(pid) for pid in pids))
    finally:
        terminal.close(force=True)
