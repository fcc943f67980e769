"""The view in a notebook: in a real kernel, and in JupyterLab itself in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from socket import socket
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from synthetic import Story
from test_view import unpack

import ringsim
from ringsim import Trace
from ringsim.errors import ArgumentError

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = pytest.mark.xdist_group("browser")


def stuck() -> Trace:
    """Ranks that compute for 10 ms each, and then wait for each other forever."""
    story = Story(2)
    for rank in range(2):
        story.span(rank, "compute", 0, 10)
        more = {"peer": 1 - rank, "group": "world", "tag": 0, "size_bytes": 4}
        story.op(rank, "recv", (10 + rank, 10 + rank, -1), **more)
    return story.trace()


def test_python_reads_and_leads_the_view_without_a_notebook() -> None:
    met = ringsim.simulate_schedule("gpipe", num_ranks=2, num_microbatches=1).trace()
    trace = stuck()
    view = trace.view()
    assert view.window == pytest.approx((0.0, trace.makespan_s))
    assert len(view.selection) == 4
    view.window = (0.0, 0.005)
    assert view.selection["kind"].tolist() == ["span", "span"]
    (finding,) = trace.explain().findings
    view.goto(finding)
    assert view.selection["op"].tolist() == ["recv"]
    assert view.selection["rank"].tolist() == [finding.operations[0].rank]
    view.show([trace, met])
    assert view.window == pytest.approx((0.0, met.makespan_s))
    view.goto(0)
    view.widget.selected = [1, int(met.messages.send[0])]
    # both sides of a message
    assert view.selection.index.tolist() == sorted([met.messages.send[0], met.messages.recv[0]])
    for wrong in (4, -1, "recv", ringsim.errors):
        with pytest.raises(ArgumentError, match="what must be a finding"):
            trace.view().goto(wrong)
    for window in ((1, 1), (2, 1), (float("nan"), 1)):
        with pytest.raises(ArgumentError, match="window must be two times"):
            view.window = window


def run(begins_ms: float) -> Trace:
    story = Story(1)
    for number in range(3):
        begin_ms = begins_ms + 10 * number
        story.span(0, f"part {number}", begin_ms, begin_ms + 4)
    return story.trace()


def test_traces_on_one_axis_are_aligned_at_their_first_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In 0.2.0 each trace began at its own time, unlike on a page."""
    sent: list[bytes] = []
    shown = run(0).view()
    monkeypatch.setattr(shown.widget, "send", lambda message, buffers: sent.extend(buffers))
    shown.show([run(0), run(300)])
    posts = [np.cumsum(unpack(packed)[1]["post"]).tolist() for packed in sent]
    assert posts == [[300_000_000, 310_000_000, 320_000_000]] * 2
    assert shown.window == pytest.approx((0.3, 0.324))
    shown.window = (0.309, 0.315)
    # of the first trace, in its own times
    assert shown.selection["label"].tolist() == ["part 1"]
    assert shown.selection["post_ns"].tolist() == [10_000_000]


HERE = str(Path(__file__).parent)
CELLS = [
    f"import sys\nsys.path.insert(0, {HERE!r})\n"
    "from test_view_notebook import stuck\nview = stuck().view()\nview",
    "view.window",
    "from ringsim import explore\nexplore.deadlock()",
    """import ringsim, torch, torch.distributed as dist
def send_first():
    dist.send(torch.zeros(1), 1 - dist.get_rank())
try:
    ringsim.simulate(send_first, world_size=2, link=ringsim.Link(1e-5, 1e-9))
except ringsim.errors.Deadlock as error:
    trace = error.trace
trace.view()""",
]


def notebook(cells: int) -> nbformat.NotebookNode:
    # without it JupyterLab asks
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    return nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in CELLS[:cells]], metadata=kernel
    )


def test_a_saved_notebook_holds_the_picture_and_not_the_trace() -> None:
    ran = NotebookClient(notebook(1), timeout=240).execute()
    widget, picture = ran.cells[0].outputs
    assert set(widget.data) == {"application/vnd.jupyter.widget-view+json", "text/plain"}
    assert "Run this cell" in widget.data["text/plain"]
    assert "image/png" in picture.data
    widgets = ran.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"]
    (state,) = (each["state"] for each in widgets.values() if "_esm" in each["state"])
    kept = {name: value for name, value in state.items() if name != "_esm"}
    assert len(str(kept)) < 1000, "the widget must keep only numbers and the program"


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Starts JupyterLab on a free port with its own settings; yields its address and folder."""
    pytest.importorskip("jupyterlab", reason="needs JupyterLab: pip install 'ringsim[lab]'")
    folder, own = tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("own")
    with closing(socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = "JUPYTER_CONFIG JUPYTER_DATA JUPYTERLAB_SETTINGS JUPYTERLAB_WORKSPACES".split()
    environment = os.environ | {f"{name}_DIR": str(own) for name in names}
    environment["IPYTHONDIR"] = str(own)
    environment["PYTHONPATH"] = str(Path(ringsim.__file__).parent.parent)
    options = [
        f"--port={port}",
        "--ServerApp.port_retries=0",
        "--IdentityProvider.token=",
        "--ServerApp.disable_check_xsrf=True",
        f"--ServerApp.root_dir={folder}",
        # it starts sooner without them
        "--ServerApp.jpserver_extensions={'jupyter_lsp': False, 'jupyter_server_terminals': False}",
    ]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", *options]
    url = f"http://127.0.0.1:{port}"
    quiet: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    with subprocess.Popen(command, env=environment, **quiet) as server:
        try:
            until(lambda: answers(f"{url}/api"))
            yield url, folder
        finally:
            with urllib.request.urlopen(f"{url}/api/kernels") as answer:
                for kernel in json.load(answer):
                    where = f"{url}/api/kernels/{kernel['id']}"
                    urllib.request.urlopen(urllib.request.Request(where, method="DELETE")).close()
            server.kill()  # after a request to terminate, it may wait long for unfinished work


def answers(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(url).status == 200)
    except OSError:
        return False


def until(condition: Any) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.05)


@pytest.fixture
def page() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
    if CHROMIUM is None:
        pytest.skip("needs a browser: install chromium")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1500, "height": 1400})
        page.set_default_timeout(100_000)
        # on a busy machine JupyterLab may first ask a question, such as which kernel to use
        dialog = page.locator(".jp-Dialog")
        page.add_locator_handler(dialog, lambda: dialog.locator(".jp-mod-accept").first.click())
        yield page
        chromium.close()


def run_cell(page: Any, number: int, then: str) -> None:
    """Runs a cell and waits for its output."""
    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(number)

    # JupyterLab drops requests that come before it is connected with the kernel; on a busy machine
    # it shows late that it has taken one, and a second request would run the cell twice
    def is_sent() -> bool:
        cell.locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
        for _ in range(50):
            page.wait_for_timeout(100)
            if cell.locator(".jp-InputPrompt").inner_text() != "[ ]:":
                return True
        return False

    until(is_sent)
    cell.locator(then).first.wait_for()


def window_of(page: Any) -> list[float]:
    """Returns the window of the view, as known to Python."""
    run_cell(page, 1, ".jp-OutputArea-output")
    said = page.locator(".jp-CodeCell").nth(1).locator(".jp-OutputArea-output").inner_text()
    return [float(time) for time in said.strip("()").split(", ")]


def test_in_jupyterlab_the_view_moves_and_python_knows(lab: tuple[str, Path], page: Any) -> None:
    url, folder = lab
    nbformat.write(notebook(4), folder / "run.ipynb")
    page.goto(f"{url}/lab/tree/run.ipynb?reset")
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    run_cell(page, 0, ".ringsim.ready")
    page.locator(".jp-CodeCell img").wait_for()  # the picture below it
    stage = page.locator(".ringsim .stage")
    cells = page.locator(".jp-Cell").count()
    stage.focus()
    for key in ("d", "d", "w", "w", "w"):  # D D deletes a cell if JupyterLab receives it
        stage.press(key)
    assert page.locator(".jp-Cell").count() == cells
    # Notebook 7 checks this element first
    assert page.evaluate("document.activeElement.hasAttribute('data-lm-suppress-shortcuts')")
    # the view reports its position once it has settled
    until(lambda: np.ptp(window_of(page)) < stuck().makespan_s / 1.5)
    assert window_of(page)[0] > 0
    page.evaluate(
        "document.body.style.cssText = '--jp-widgets-color: #eeeeee; --jp-ui-font-color1: "
        "#eeeeee; --jp-content-font-color1: #eeeeee'"
    )
    page.locator('.ringsim[data-theme="dark"]').wait_for()
    run_cell(page, 2, ".parts > .ringsim.ready")  # a choice shows another run and other words
    explorer = page.locator(".jp-CodeCell").nth(2)
    explorer.locator(".words").get_by_text("The run never ends.").wait_for()
    explorer.locator("select").first.select_option("receives")
    explorer.get_by_text("The run ends after 61.6 µs").wait_for()
    explorer.get_by_text("blocked: late sender").wait_for()
    field = explorer.get_by_role("spinbutton", name="size")
    field.fill("512")  # between the options
    field.press("Enter")
    explorer.get_by_text("The run ends after 270 µs").wait_for()
    still = explorer.get_by_text("Without a kernel")
    assert still.count() == 1
    assert not still.is_visible()
    run_cell(page, 3, ".ringsim.ready")  # the code of a cell
    view = page.locator(".jp-CodeCell").nth(3)
    view.get_by_role("tab", name="code").click()
    first = view.locator(".code title").first
    first.wait_for(state="attached")
    assert re.fullmatch(r"rank 0 waits at (In\[\d+\]:3) for rank 1 at \1", first.text_content())
    page.keyboard.press("Control+s")
    until(lambda: "image/png" in (folder / "run.ipynb").read_text())
    saved = nbformat.read(folder / "run.ipynb", as_version=4)
    assert len(str(saved.cells[0].outputs[0])) < 1000

    (session,) = page.request.get(f"{url}/api/sessions").json()
    page.request.delete(f"{url}/api/sessions/{session['id']}")
    # opened again without a kernel
    saved.metadata.kernelspec = {"name": "gone", "display_name": "gone"}
    nbformat.write(saved, folder / "again.ipynb")
    page.goto(f"{url}/lab/tree/again.ipynb?reset")
    page.locator(".jp-CodeCell img").first.wait_for()
    page.get_by_text("Without a kernel, only the initial choice: rank 0 first sends").wait_for()
    page.locator(".jp-CodeCell").nth(2).locator("img").wait_for()
    assert page.locator(".ringsim").count() == 0


@pytest.mark.distributed
def test_in_jupyterlab_ranks_stay_from_cell_to_cell(lab: tuple[str, Path], page: Any) -> None:
    url, folder = lab
    sources = [
        "%load_ext ringsim",
        "%%ring -n 2 --keep\nx = 40 + ring.rank",
        "%%ring --keep\nprint('x is', x)",
        "%%ring --keep\nimport time\nprint('started')\ntime.sleep(1000)",
        "%ring pull x",
        "ranks[1].",
    ]
    kept = notebook(0)
    kept.cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(kept, folder / "kept.ipynb")
    page.goto(f"{url}/lab/tree/kept.ipynb?reset")
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    cell = page.locator(".jp-Notebook .jp-CodeCell")
    run_cell(page, 0, ".jp-InputPrompt:has-text('[1]')")
    run_cell(page, 1, ".jp-OutputArea-output:has-text('Trace of 2 ranks')")
    run_cell(page, 2, ".jp-OutputArea-output:has-text('[rank 1] x is 41')")
    run_cell(page, 3, ".jp-OutputArea-output:has-text('[rank 1] started')")
    page.get_by_title("Interrupt the kernel").click()
    error = "Interrupted: the run was interrupted"
    cell.nth(3).locator(f".jp-OutputArea-output:has-text('{error}')").wait_for()
    run_cell(page, 4, ".jp-OutputArea-output:has-text('[40, 41]')")
    cell.nth(5).locator(".cm-content").click()
    page.keyboard.press("End")

    # JupyterLab drops answers that come late, such as the first
    def is_completed() -> bool:
        page.keyboard.press("Tab")
        page.wait_for_timeout(1000)
        return bool(page.locator(".jp-Completer-item:has-text('x')").count())

    until(is_completed)


GAME = """import torch, torch.distributed as dist
from ringsim import explore
def collect():
    if dist.get_rank() > 0:
        return dist.send(torch.zeros(1), 0)
    dist.recv(torch.zeros(1))
    dist.recv(torch.zeros(1), 1)
game = explore.scheduler(collect)
game.play()"""


def test_in_jupyterlab_buttons_choose_the_next_rank(lab: tuple[str, Path], page: Any) -> None:
    url, folder = lab
    game = notebook(0)
    game.cells = [nbformat.v4.new_code_cell(source) for source in (GAME, "game.order")]
    nbformat.write(game, folder / "game.ipynb")
    page.goto(f"{url}/lab/tree/game.ipynb?reset")
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    run_cell(page, 0, "button")
    output = page.locator(".jp-CodeCell").nth(0).locator(".jp-OutputArea")
    for choice, order in (
        ("rank 1", "1"),
        ("rank 2", "1, 2"),
        ("back", "1"),
        ("rank 0", "1, 0"),
        ("rank 0", "1, 0, 0"),
    ):
        output.get_by_role("button", name=choice).click()
        output.get_by_text(f"order so far: {order}\n").wait_for()
    output.get_by_role("button", name="rank 2").click()
    output.get_by_text("rank 0 waits for rank 1, which can no longer answer").first.wait_for()
    assert output.get_by_role("button", name="rank 0").is_disabled()
    assert output.locator("img, svg").first.is_visible()
    run_cell(page, 1, ".jp-OutputArea-output:has-text('(1, 0, 0, 2)')")


DEBUGGED = """import ringsim
def stops():
    secret = 10 * ringsim.current_ring().rank
    if secret == 10:
        breakpoint()
    return secret
ringsim.trace(stops, world_size=2, debug=True).results"""


@pytest.mark.distributed
def test_in_jupyterlab_a_breakpoint_asks_below_its_cell(lab: tuple[str, Path], page: Any) -> None:
    url, folder = lab
    debugged = notebook(0)
    debugged.cells = [nbformat.v4.new_code_cell(DEBUGGED)]
    nbformat.write(debugged, folder / "debugged.ipynb")
    page.goto(f"{url}/lab/tree/debugged.ipynb?reset")
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    run_cell(page, 0, ".jp-Stdin-input")
    asks = page.locator(".jp-Stdin-input")
    for line in ("secret = 7", "c"):
        until(lambda: asks.count() == 1)  # an answered one goes
        assert page.locator(".jp-Stdin-prompt").last.inner_text().strip() == "(rank 1)"
        asks.fill(line)
        asks.press("Enter")
        page.get_by_text(f"(rank 1) {line}").wait_for()
    page.locator(".jp-CodeCell .jp-OutputArea-output:has-text('[0, 7]')").wait_for()


LIVE = """import pathlib, time
import torch.distributed as dist
import ringsim
def worker():
    while dist.get_rank() and not pathlib.Path("go").exists():
        time.sleep(0.02)
    dist.barrier()
# the browser may need longer than the usual limit for a blocked operation
trace = ringsim.trace(worker, world_size=2, live=True, timeout_s=300)"""


@pytest.mark.distributed
def test_in_jupyterlab_a_widget_shows_the_run_while_it_runs(
    lab: tuple[str, Path], page: Any
) -> None:
    url, folder = lab
    cells = [nbformat.v4.new_code_cell(LIVE)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), folder / "live.ipynb")
    page.goto(f"{url}/lab/tree/live.ipynb?reset")
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    run_cell(page, 0, ".ringsim.ready")
    cell = page.locator(".jp-CodeCell").nth(0)
    # the kernel is busy, and the ring shows who waits for whom
    cell.get_by_text("rank 0 waits").wait_for()
    cell.get_by_text("waiting for more than 1 s").wait_for()
    assert cell.locator(".jp-InputPrompt").inner_text() == "[*]:"
    assert "for rank 1: barrier" in cell.locator("#panel").inner_text()
    (folder / "go").touch()
    cell.get_by_text("measured on").wait_for()
    cell.locator(".jp-InputPrompt:has-text('[1]:')").wait_for()
    cell.get_by_text("waiting for more than 1 s").wait_for(state="detached")
    assert cell.locator(".ringsim").count() == 1


LESSONS = Path(HERE).parent / "notebooks"


@pytest.mark.distributed
@pytest.mark.timeout(900)  # a whole lesson
@pytest.mark.parametrize(
    "lesson",
    ["13_ring_attention", "14_sharding", "15_tensors_in_parallel", "16_which_parallelism"],
)
def test_in_jupyterlab_a_lesson_judges_a_wrong_and_a_right_answer(
    lesson: str, lab: tuple[str, Path], page: Any
) -> None:
    url, folder = lab
    shutil.copytree(LESSONS / "data", folder / "data")
    shutil.copy(LESSONS / f"{lesson}.ipynb", folder)
    code = [
        cell
        for cell in nbformat.read(LESSONS / f"{lesson}.ipynb", as_version=4).cells
        if cell.cell_type == "code"
    ]
    tags = [cell.metadata.get("tags", []) for cell in code]
    solutions = [number for number, each in enumerate(tags) if "solution" in each]
    page.goto(f"{url}/lab/tree/{lesson}.ipynb?reset")
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    for number in range(solutions[-1] + 1):
        cell = page.locator(".jp-Notebook .jp-CodeCell").nth(number)
        said = cell.locator(".jp-OutputArea-output")
        if number in solutions:
            cell.locator(".jp-Placeholder").click()  # unfolds it
        run_cell(page, number, f".jp-InputPrompt:has-text('[{number + 1}]:')")
        failed = cell.locator("[data-mime-type*=error], [data-mime-type*=stderr]")
        assert failed.all_inner_texts() == []
        if number in solutions:
            said.get_by_text(re.compile(r"check\.\w+: passed")).wait_for()
        elif "exercise" in tags[number]:
            said.get_by_text(re.compile(r"check\.\w+: not yet")).wait_for()
            hint = said.locator("details").first
            hint.locator("summary").first.click()
            assert hint.evaluate("hint => hint.open && hint.innerText.length > 20")
