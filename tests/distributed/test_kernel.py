"""Tests in a real Jupyter kernel."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kernels import CELL_S, Kernel, Reply, start_kernel
from processes import descendants, gone


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Yields one kernel for all tests, which must not change its state."""
    with start_kernel(tmp_path_factory.mktemp("kernel")) as running:
        yield running


def assert_picture(shown: dict[str, Any], begins: str, alt: str) -> None:
    """Checks that a picture has a text version and an alternative text."""
    assert set(shown["data"]) == {"image/png", "text/html", "text/plain"}
    assert shown["data"]["text/plain"].startswith(begins)
    assert shown["metadata"]["image/png"]["alt"].startswith(alt)


# -- functions and values from cells


def test_functions_globals_and_classes_of_cells_travel(kernel: Kernel) -> None:
    kernel.run("class Point:\n    def __init__(self, x):\n        self.x = x")
    kernel.run(
        "def worker(shift):\n    def inner(x):\n        return Point((*scaled(x), *shift))\n    "
        "return inner(ringsim.current_ring().rank)"
    )
    for scale, change, setting in (
        (10, "", None),
        (20, "os.environ['MY_SETTING'] = 'now'", "now"),
        (30, "del os.environ['MY_SETTING']", None),
    ):
        kernel.run(
            f"{change}\nscale = {scale}\ndef scaled(x):\n    return scale * x, "
            "os.environ.get('MY_SETTING')"
        )
        reply = kernel.run(
            "points = ringsim.trace(worker, world_size=3, args=((1,),)).results\n[(type(p) is "
            "Point, p.x) for p in points]"
        )
        assert reply.value == repr([(True, (scale * rank, setting, 1)) for rank in range(3)]), (
            "functions must use the latest version of a cell"
        )


# -- output


@pytest.mark.parametrize(
    "how",
    ["%run {}", "get_ipython().safe_execfile('{}', get_ipython().user_ns, raise_exceptions=True)"],
)
def test_a_script_runs_in_ipython(kernel: Kernel, tmp_path: Path, how: str) -> None:
    """Runs the script by the magic, and by the function that ``ipython script.py`` calls."""
    script = tmp_path / "script.py"
    script.write_text(
        "import ringsim, torch\ndef worker():\n    torch.distributed.all_reduce(sums := "
        "torch.ones(1))\n    return sums.item()\n"
        "if __name__ == '__main__':\n    print(ringsim.trace(worker, world_size=2).results)\n"
    )
    reply = kernel.run(how.format(script))
    assert (reply.text, reply.errors) == ("[2.0, 2.0]\n", [])


def test_ring_magic_runs_the_cell_on_every_rank(kernel: Kernel) -> None:
    kernel.run("base = 100\nlarge = object()\nclass Box:\n    large = 3")
    reply = kernel.run(
        "%%ring -n 3 -o mine\nfrom torch.distributed import barrier\nbarrier()\n"
        "print('rank', ring.rank, 'sends to', ring.succ)\nbox = Box()\n"
        "base + ring.rank + box.large"
    )
    assert sorted(reply.text.splitlines()) == [
        f"[rank {rank}] rank {rank} sends to {(rank + 1) % 3}" for rank in range(3)
    ]
    assert reply.errors == []
    (shown,) = reply.shown
    assert_picture(shown, "Trace of 3 ranks", "Trace of 3 ranks")
    assert kernel.run("mine.results").value == "[103, 104, 105]"
    box = kernel.run("'box' in globals(), mine.output[2]").value
    assert box == r"(False, 'rank 2 sends to 0\n')"


# -- errors


def test_a_failing_rank_shows_one_error_with_the_line_of_the_cell(kernel: Kernel) -> None:
    reply = kernel.run(
        "def failing():\n"
        "    import torch\n"
        "    from torch import distributed as dist\n"
        "    ring = ringsim.current_ring()\n"
        "    if ring.rank == 1:\n"
        "        raise ValueError('no such layer')  # the student's line\n"
        "    dist.recv(torch.empty(2), ring.pred, group=ring.pred_group)\n"
        "ringsim.trace(failing, world_size=4)"
    )
    (error,) = reply.errors
    assert error.startswith("RankFailed: rank 1 of 4 raised ValueError: no such layer\n")
    assert "    raise ValueError('no such layer')  # the student's line" in error
    assert "line 6, in failing" in error
    assert error.count("Traceback") == 1
    assert "ringsim/" not in error
    assert "site-packages" not in error
    assert reply.text == ""
    assert kernel.run("sys.last_value.rank, sys.last_value.trace.world_size").value == "(1, 4)"


LOCK = "import threading\nlock = threading.Lock()\nget_ipython().run_cell_magic('ring', '', 'lock')"


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        # lines are counted as in the notebook
        ("%%ring -n 2\nx = 1\nif ring.rank == 1:\n    x / 0", "line 4, in <module>\n      x / 0"),
        ("%%ring -n 2\nx = = 1", "    x = = 1\n        ^\nSyntaxError: invalid syntax"),
        ("%%ring --limit 0\n1", "ArgumentError: --limit must be a positive number of seconds"),
        (LOCK, "ArgumentError: the variable 'lock'"),
        (
            "%%ring -n 2 --limit 0.5\nimport time\ntime.sleep(30)",
            "RunTimeout: the run did not end within limit_s=0.5 s",
        ),
    ],
)
def test_mistakes_in_a_ring_cell_are_told_in_short(kernel: Kernel, cell: str, words: str) -> None:
    (error,) = kernel.run(cell).errors
    assert words in error
    assert "ringsim/" not in error


def test_ring_magic_says_how_it_is_used(kernel: Kernel) -> None:
    reply = kernel.run("%%ring -o 1x\n1")
    assert "-o must be the name of a variable, got '1x'" in reply.text
    assert "Usage: %%ring [-n RANKS]" in reply.text


# -- interrupts


BLOCKED = """
def blocked():
    import torch
    from torch import distributed as dist
    ring = ringsim.current_ring()
    print(os.getpid(), force=True)
    if ring.rank == 0:
        time.sleep(1000)  # it might still send, so the others are not stuck
    dist.recv(torch.empty(2), ring.pred, group=ring.pred_group)
ringsim.trace(blocked, world_size=3)
"""


def test_interrupt_ends_a_blocked_cell(kernel: Kernel) -> None:
    outputs = kernel.follow(kernel.client.execute(BLOCKED))
    pids: list[int] = []
    while len(pids) < 3:
        kind, content = next(outputs)
        if kind != "display_data":  # a progress line, on a busy machine
            pids += [int(line.split()[-1]) for line in content["text"].splitlines()]
    kernel.manager.interrupt_kernel()
    (error,) = Reply(outputs).errors  # long before rank 0 wakes up
    assert error.startswith("Interrupted: the run was interrupted after ")
    assert all(gone(pid) for pid in pids)
    # the processes have also been reaped
    assert not [
        name for name in descendants(kernel.pid).values() if name.startswith("ringsim-rank")
    ]
    frame = "sys.last_value.trace.to_pandas()"
    waiting = kernel.run(f"sorted({frame}['rank']), set({frame}['status'])").value
    assert waiting == "([1, 2], {'in_flight'})"
    again = "ringsim.trace(lambda: ringsim.current_ring().rank, world_size=3).results"
    assert kernel.run(again).value == "[0, 1, 2]"


# -- debugging


def debug(kernel: Kernel, code: str) -> tuple[list[str], Reply]:
    """Runs a cell whose debugger reads and sets a variable, and returns the prompts."""
    cell = kernel.client.execute(textwrap.dedent(code))
    prompts = []
    for line in ("p secret", "secret = 7", "c"):
        request = kernel.client.get_stdin_msg(timeout=CELL_S)
        prompts.append(request["content"]["prompt"])
        kernel.client.input(line)
    return prompts, Reply(kernel.follow(cell))


def test_a_breakpoint_of_a_simulated_rank_comes_to_its_cell(kernel: Kernel) -> None:
    code = """
        def stops():
            secret = 10 * ringsim.current_ring().rank
            ringsim.compute(0.002)
            if secret == 10:
                breakpoint()
            return secret
        link = ringsim.Link(alpha_s=0, beta_s_per_byte=0)
        ringsim.simulate(stops, world_size=2, link=link, debug=True).results
        """
    prompts, reply = debug(kernel, code)
    assert prompts == ["(rank 1 at 2 ms) "] * 3
    assert (reply.value, reply.errors) == ("[0, 7]", [])
    assert "-> return secret\n10\n" in reply.text


def test_a_breakpoint_of_a_real_rank_comes_to_its_cell(kernel: Kernel) -> None:
    code = """
        def stops():
            secret = 10 * ringsim.current_ring().rank
            if secret == 20:
                breakpoint()
            return secret
        ringsim.trace(stops, world_size=3, debug=True).results
        """
    prompts, reply = debug(kernel, code)
    assert prompts == ["(rank 2) "] * 3
    assert (reply.value, reply.errors) == ("[0, 10, 7]", [])
    assert "-> return secret\n20\n" in reply.text
