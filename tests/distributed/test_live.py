"""Runs that are shown while they run: in a terminal, in a log, on a page, and from elsewhere."""

from __future__ import annotations

import http.client
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from processes import until

import ringsim

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
RINGSIM = (sys.executable, "-m", "ringsim")


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)


def write_script(body: str, name: str = "train.py") -> str:
    begin = "import time, ringsim, torch, torch.distributed as dist\n"
    Path(name).write_text(f"{begin}dist.init_process_group('gloo')\n{body}")
    return name


# rank 2 is late in each of three steps, and the others wait for it
LATE = """
for step in range(3):
    with ringsim.span("step mine"):
        if dist.get_rank() == 2:
            with ringsim.span("forward"):
                time.sleep(2)
        dist.all_reduce(torch.ones(4))
        if dist.get_rank() == 0:
            dist.send(torch.ones(1), 1)
        if dist.get_rank() == 1:
            dist.recv(torch.ones(1), 0)
"""


class Terminal:
    """A command in a pseudo-terminal of 100 columns.

    Attributes:
        text: everything that it has written.
    """

    def __init__(self, *command: str) -> None:
        self._master, slave = pty.openpty()
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        environment = os.environ | {"COLUMNS": "100", "LINES": "24"}
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
        os.close(slave)
        self.text = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self.text += os.read(self._master, 1 << 16).decode(errors="replace")
            except OSError:  # the command has ended
                return

    def wait(self) -> int:
        """Waits for the end; returns the exit code."""
        code = self.process.wait(timeout=240)
        self.close()
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()


def lines_on_screen(text: str) -> list[str]:
    """Returns the lines that a terminal shows after it has received a text."""
    lines, row = [""], 0
    for up, erases, piece in re.findall(r"\x1b\[(\d+)A|(\r\x1b\[J)|([^\x1b\r]+|\r)", text):
        if up:
            row -= int(up)
        elif erases:
            lines[row:] = [""]
        elif piece != "\r":
            first, *more = piece.split("\n")
            lines[row] += first
            for line in more:
                row += 1
                lines[row:] = [line]
    return [line for line in lines if line]


def test_a_terminal_shows_a_line_per_rank_and_whom_it_waits_for() -> None:
    script = write_script(LATE + "print('rank', dist.get_rank(), 'is done')\n")
    with closing(Terminal(*RINGSIM, "trace", "--live", "-n", "3", script)) as terminal:
        assert terminal.wait() == 0
    text = terminal.text
    waits = r"rank [01] waits \d+\.\d s for rank 2: all_reduce \(world, float32\[4\], 16 bytes\) at"
    assert re.search(rf"{waits} train.py:\d+", text)
    assert re.search(r'rank 2 is still in "forward", for \d\.\d s', text)
    assert re.search(r"ringsim: 3 ranks, \d+ s, 0 done, loading torch [0-3]/3", text)
    assert re.search(r"ringsim: 3 ranks, \d+ s, 0 done, 2 messages, step 3", text)
    screen = lines_on_screen(text)
    # the output is kept, and the lines are gone
    shown = [line for line in screen if line.startswith("[rank")]
    assert sorted(shown) == [f"[rank {rank}] rank {rank} is done" for rank in range(3)]
    assert not [line for line in screen if re.match(r"ringsim: |rank \d (waits|is)", line)]


def test_the_ordinary_progress_line_names_the_phase() -> None:
    """In 0.3.0 the line was "ringsim: 4 ranks, 8 s, 0 done" in all phases."""
    script = write_script(LATE)
    with closing(Terminal(*RINGSIM, "trace", "-n", "3", script)) as terminal:
        assert terminal.wait() == 0
    assert re.search(r"ringsim: 3 ranks, \d+ s, 0 done, 2 messages, step 3", terminal.text)
    assert "rank 1 waits" not in terminal.text


def test_without_a_terminal_the_lines_are_printed_to_the_log() -> None:
    script = write_script("time.sleep(3 if dist.get_rank() else 0)\ndist.barrier()\n")
    command = [*RINGSIM, "trace", "--live", "-n", "2", script]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0
    assert "\x1b" not in ran.stderr
    assert "rank 0 has not begun\nrank 1 has not begun\n" in ran.stderr
    assert "ringsim:" not in ran.stdout
    assert "2 ranks" in ran.stdout  # the summary


def test_watch_shows_a_run_of_another_terminal() -> None:
    body = (
        "import os, pathlib\npathlib.Path(f'pid{dist.get_rank()}').write_text(str(os.getpid()))\n"
        "time.sleep(600 if dist.get_rank() else 0)\ndist.barrier()\n"
    )
    script = write_script(body, f"train{os.getpid()}.py")  # other runs of this user are listed, too
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [*RINGSIM, "trace", "-n", "2", script, "--flag"]
    with subprocess.Popen(command, **quiet, start_new_session=True) as run:
        try:
            assert until(lambda: f"{script} --flag" in watch().stdout, 200)
            listed = watch().stdout
            directory = Path.cwd() / f"train{os.getpid()}.ringtrace.parts"
            assert f"\n{directory}: {script} --flag\n" in listed
            missing = watch("other.py")
            assert missing.returncode == 2
            assert "RUN must name exactly one of your runs, got 'other.py'" in missing.stderr
            assert str(directory) in missing.stderr
            for name in (script, str(directory), Path("pid1").read_text()):
                with closing(Terminal(*RINGSIM, "watch", name)) as terminal:
                    assert until(lambda shown=terminal: "rank 0 waits" in shown.text, 100)
                    assert re.search(r"rank 0 waits \d+\.\d s for rank 1: barrier", terminal.text)
                    os.killpg(terminal.process.pid, signal.SIGINT)
                    assert terminal.wait() == 130
            assert run.poll() is None  # it has not noticed
            with closing(Terminal(*RINGSIM, "watch", script)) as terminal:
                assert until(lambda: "rank 0 waits" in terminal.text, 100)
                run.send_signal(signal.SIGINT)
                assert terminal.wait() == 0
            first, second, *_ = lines_on_screen(terminal.text)
            assert first == "The run has ended."  # the lines are gone
            assert second.startswith("Trace of 2 ranks (measured")  # the whole run
        finally:
            run.kill()
    assert str(directory) not in watch().stdout


def test_watch_shows_one_call_of_a_session_to_its_end() -> None:
    """The ranks continue to live after the call, and the records of the call disappear.

    At first, no more ranks than half of the limit of open files could be watched.
    """
    script = f"session{os.getpid()}.py"
    Path(script).write_text(
        "import pathlib, time, ringsim\n"
        "def call():\n"
        "    for _ in range(7000):\n"
        "        with ringsim.span('step'):\n"
        "            pass\n"
        "    while not pathlib.Path('go').exists():\n"
        "        time.sleep(0.02)\n"
        "ranks = ringsim.session(world_size=4)\n"
        "ranks.run(call)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, script], start_new_session=True) as run:
        try:
            assert until(lambda: script in watch().stdout, 200)
            few = ("bash", "-c", 'ulimit -Sn 9; exec "$@"', "-")
            with closing(Terminal(*few, *RINGSIM, "watch", script)) as terminal:
                assert until(lambda: "rank 1 is busy outside any span" in terminal.text, 100)
                Path("go").touch()
                assert terminal.wait() == 0
            # more than the newest part, and still true after the records are gone
            assert "28,000 events" in terminal.text
            assert run.poll() is None
            assert until(lambda: script not in watch().stdout, 100)
        finally:
            run.kill()


def test_the_calls_of_a_session_are_shown_while_they_run() -> None:
    Path("calls.py").write_text(
        "import time, ringsim, torch.distributed as dist\n"
        "def late(rank):\n"
        "    time.sleep(2 if dist.get_rank() == rank else 0)\n"
        "    dist.barrier()\n"
        "    return dist.get_rank()\n"
        "with ringsim.session(world_size=2, live=True) as ranks:\n"
        "    print([ranks.run(late, rank).results for rank in range(2)])\n"
    )
    with closing(Terminal(sys.executable, "calls.py")) as terminal:
        assert terminal.wait() == 0
    for rank in range(2):
        waits = rf"rank {1 - rank} waits \d\.\d s for rank {rank}: barrier \(world\) at calls.py:4"
        assert re.search(waits, terminal.text)
    assert lines_on_screen(terminal.text) == ["[[0, 1], [0, 1]]"]


def watch(*name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RINGSIM, "watch", *name], capture_output=True, text=True, timeout=100)


# -- in the browser

# rank 1 computes until the test has looked; rank 0 waits for it
HELD = """
import pathlib
for step in range(2):
    with ringsim.span("step mine"):
        if dist.get_rank() == 1:
            with ringsim.span("forward"):
                while not pathlib.Path(f"go{step}").exists():
                    time.sleep(0.02)
        dist.barrier()
"""


@pytest.fixture
def browser(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yields a real browser; the "browser" that ringsim opens only writes down the address."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
    if CHROMIUM is None:
        pytest.skip("needs a browser: install chromium")
    opener = Path("opener").absolute()
    opener.write_text('#!/bin/sh\necho "$1" > address\n')
    opener.chmod(0o700)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setenv("BROWSER", str(opener))
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def read_address() -> str:
    path = Path("address")
    assert until(lambda: path.exists() and path.read_text().endswith("\n"), 100)
    return path.read_text().strip()


def ask(address: str) -> int:
    """Returns the status of the answer to a request, or 0 if there is no server.

    The port of a server that has ended may already belong to a different process.
    """
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException):
        return 0


def test_a_page_shows_the_run_while_it_runs_and_then_the_whole_run(browser: Any) -> None:
    script, said = write_script(HELD), list[str]()
    with closing(Terminal(*RINGSIM, "trace", "--live", "-n", "2", script)) as terminal:
        address = read_address()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{43}/", address)
        server, _, secret = address.rpartition("/")[0].rpartition("/")
        wrong = secret[:-1] + ("a" if secret[-1] != "a" else "b")
        for path in ("/", "/run", f"/{wrong}/", f"/{wrong}/run", f"/{secret}", f"/{secret}/x"):
            assert ask(server + path) == 404, path
        page = browser.new_page(viewport={"width": 1200, "height": 700})
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(address)

        def get(script: str) -> Any:
            return page.evaluate(f"(() => {{ const view = window.ringsim; return {script}; }})()")

        def shows(script: str, limit_s: float = 200) -> bool:
            return until(lambda: bool(get(script)) or page.wait_for_timeout(50), limit_s)

        # rank 0 has waited for a while, and its wait has turned red
        waits = "waitsAt(view.runs[0], view.timeline.head)"
        assert shows(f"view?.runs[0].size && {waits}[0].for.join() === '1'")
        states = "view.runs[0].parts({waits}[0].event, (from, until, state) => found.push(state))"
        colours = f"(() => {{ const found = []; {states.format(waits=waits)}; return found; }})()"
        assert get(f"{colours}.includes(COLLECTIVE)")
        assert shows(f"{colours}.includes(UNFINISHED)")
        end = get("view.timeline.end")
        assert shows(f"view.timeline.end > {end} && view.timeline.head === view.timeline.end")
        source = page.locator('[data-part="source"]')
        assert source.inner_text().startswith("step 1 · 2 ranks")
        assert "rank 0 waits" in page.locator("#panel").inner_text()
        assert "for rank 1: barrier" in page.locator("#panel").inner_text()
        page.locator('[data-part="legend"]').get_by_text("waiting for more than 1 s").wait_for()
        # a selection holds the view
        get("view.select({ run: view.runs[0], event: 0 })")
        assert until(lambda: "Esc" in source.inner_text() or page.wait_for_timeout(50), 100)
        held = get("view.timeline.end")
        page.wait_for_timeout(1000)
        assert get("view.timeline.end") == held
        page.locator('[data-part="stage"]').press("Escape")
        assert shows(f"view.timeline.end > {held}")
        Path("go0").touch()
        assert shows("view.runs[0].head.progress === 'step 2'")
        Path("go1").touch()
        assert terminal.wait() == 0
    assert shows("view.constructor === Page && view.runs[0].head.progress === ''", 20)
    whole = ringsim.load("train.ringtrace")
    assert get("view.runs[0].size") == len(whole.events)
    assert "measured on" in source.inner_text()
    assert ask(address) == 0
    assert said == []


def test_a_page_of_watch_ends_with_the_whole_run(browser: Any) -> None:
    script = write_script("import sys\n" + HELD, f"held{os.getpid()}.py")
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*RINGSIM, "trace", "-n", "2", script], **quiet) as run:
        try:
            assert until(lambda: script in watch().stdout, 200)
            with closing(Terminal(*RINGSIM, "watch", script)) as terminal:
                page = browser.new_page()
                page.goto(read_address())
                runs = "window.ringsim?.runs[0]"
                shown = f"{runs}?.head.progress === 'step 1'"
                assert until(lambda: page.evaluate(shown) or page.wait_for_timeout(50), 200)
                for step in range(2):
                    Path(f"go{step}").touch()
                assert terminal.wait() == 0
                assert until(lambda: page.evaluate(f"{runs}.head.progress") == "", 20)
            assert run.wait() == 0
        finally:
            run.kill()
    whole = ringsim.load(Path(script).with_suffix(".ringtrace"))
    assert page.evaluate(f"{runs}.size") == len(whole.events)
    assert "measured on" in page.locator('[data-part="source"]').inner_text()


def test_an_interrupt_ends_the_run_and_the_page_keeps_it(browser: Any) -> None:
    script = write_script(HELD)
    with closing(Terminal(*RINGSIM, "trace", "--live", "-n", "2", script)) as terminal:
        page = browser.new_page()
        page.goto(address := read_address())
        runs = "window.ringsim?.runs[0]"
        shown = f"{runs}?.columns.op.length > 3"
        assert until(lambda: page.evaluate(shown) or page.wait_for_timeout(50), 200)
        os.killpg(terminal.process.pid, signal.SIGINT)
        assert terminal.wait() == 130
        assert until(lambda: page.evaluate(f"{runs}.head.progress") == "", 20)
    assert ask(address) == 0


def test_a_page_that_nobody_opens_does_not_hold_the_run_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The thread and the port end with the run, also after an error."""
    monkeypatch.setattr(
        "ringsim.view.live.webbrowser.open", lambda address: addresses.append(address)
    )
    monkeypatch.setattr("ringsim.view.live._START_S", 0.0)
    monkeypatch.setattr("ringsim.launch.live._has_browser", lambda: True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    addresses: list[str] = []
    threads = set(threading.enumerate())

    def fail() -> None:
        raise ValueError("as intended")

    with pytest.raises(ringsim.errors.RankFailed, match="as intended") as caught:
        ringsim.trace(fail, world_size=2, live=True)
    assert caught.value.trace is not None
    assert ringsim.trace(lambda: 7, world_size=2, live=True).results == [7, 7]
    assert [ask(address) for address in addresses] == [0, 0]
    assert set(threading.enumerate()) <= threads


def test_live_is_refused_for_ranks_of_a_launcher() -> None:
    with pytest.raises(ringsim.errors.ArgumentError, match="live must be omitted with a path"):
        ringsim.trace("run.ringtrace", live=True)  # type: ignore[call-overload]
    script = write_script("")
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ran = subprocess.run(
        [*RINGSIM, "trace", "--live", script], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert "--live cannot be used if a launcher starts the ranks" in ran.stderr
