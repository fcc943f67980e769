"""The interactive page in a real browser: Debian's Chromium, headless, with nothing reachable."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic import Story, pipeline
from test_hostile_names import hostile_file

import ringsim
from ringsim import Trace
from ringsim.pipeline import Costs
from ringsim.view import html
from ringsim.view.explorer import Choice, Explorer, Frame

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: install chromium"),
    pytest.mark.xdist_group("browser"),
]
READY = "window.ringsim && window.ringsim.frame !== undefined"
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens the page of traces.

    In the end nothing was complained about, and nothing asked for but the file.
    """
    said: list[str] = []
    context = browser.new_context(viewport={"width": 1200, "height": 700})
    # drawing the still picture takes longer than all the rest
    monkeypatch.setattr(html, "MOST_PICTURED", 20)

    def open_it(*traces: Any, fragment: str = "") -> Any:
        if isinstance(traces[0], Explorer):
            traces[0].to_html(tmp_path / "run.html")
        else:
            html.to_html(traces, tmp_path / "run.html")
        page = context.new_page()
        page.on("console", lambda message: said.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on(
            "request",
            lambda request: (
                said.append(request.url) if not request.url.startswith(("data:", "file:")) else None
            ),
        )
        page.goto((tmp_path / "run.html").as_uri() + fragment)
        until(page, READY)
        return page

    yield open_it
    context.close()
    assert said == []


def until(page: Any, condition: str) -> None:
    """Waits for a condition; the page's policy forbids what Playwright would do for that."""
    deadline = time.monotonic() + 120
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


def two_that_meet() -> Story:
    """Rank 1 receives from 1 ms on what rank 0 sends at 4 ms.

    A second message goes the other way.
    """
    story = Story(2)
    story.op(0, "span", (0, -1, 4), label="compute", microbatch=3)
    story.op(0, "send", (4, 4, 6), peer=1, group="world", tag=7, size_bytes=4096)
    story.op(0, "recv", (6, 6, 8), peer=1, group="world", tag=8, size_bytes=64)
    story.op(1, "recv", (1, 1, 6), peer=0, group="world", tag=7, size_bytes=4096)
    story.op(1, "send", (7, 7, 8), peer=0, group="world", tag=8, size_bytes=64)
    return story


def text(page: Any, part: str) -> str:
    """Returns what a part of the page says, once the page has come to rest."""
    until(page, "!window.ringsim.waiting && !window.ringsim.later")
    shown: str = page.locator(f'[data-part="{part}"]').inner_text()
    return shown


def at(page: Any, rank: int, event: int) -> tuple[float, float]:
    """Returns where on the page the middle of an event's bar is."""
    script = """([event]) => {
        const { timeline } = window.ringsim, [run] = timeline.runs, box = timeline.canvas.getBoundingClientRect();
        return [box.x + timeline.x((run.post[event] + run.endOf(event)) / 2), box.y + timeline.middleOf(run, event)];
    }"""  # noqa: E501
    x, y = page.evaluate(script, [event])
    return x, y


def test_hovering_and_clicking_tell_what_an_event_was(open_page: Open) -> None:
    page = open_page(two_that_meet().trace())
    page.mouse.move(*at(page, 1, 3))
    assert text(page, "tip").split("\n")[0] == "recv from 0"
    assert "blocked: late sender: 3 ms" in text(page, "tip")
    assert "Rank 1 waited 3 ms because rank 0 sent later." in text(page, "tip")
    assert "other side: rank 0, from 4 ms to 6 ms" in text(page, "tip")
    page.mouse.click(*at(page, 1, 3))
    until(page, "window.ringsim.timeline.selected?.event === 3")
    page.get_by_text("go there").wait_for()
    panel = text(page, "panel")
    for said in (
        "transfer\n2 ms",
        "tag\n7",
        "float32[1024], 4 KiB",
        "bandwidth\n0.00205 GB/s",
        "send to 1",
    ):
        assert said in panel
    page.get_by_text("pin", exact=True).click()
    page.get_by_text("go there").first.click()
    until(page, "window.ringsim.timeline.selected.event === 1")
    # the pinned card stays while others come and go
    page.locator('[data-part="stage"]').press("ArrowLeft")
    assert "compute 3" in text(page, "panel")
    assert "recv from 0" in text(page, "panel")
    page.get_by_text("unpin").click()
    assert "recv from 0" not in text(page, "panel")


def test_wheel_drag_and_keys_move_the_window(open_page: Open) -> None:
    page = open_page(two_that_meet().trace())
    window = "[window.ringsim.timeline.from, window.ringsim.timeline.until]"
    whole = page.evaluate(window)
    x, y = at(page, 0, 1)
    time = "window.ringsim.timeline.time({})"
    page.mouse.move(x, y)
    under = page.evaluate(time.format(x))
    page.mouse.wheel(0, -400)
    until(page, f"window.ringsim.timeline.until < {whole[1]}")
    # it zooms at the pointer, to a pixel or two
    assert page.evaluate(time.format(x)) == pytest.approx(under, abs=whole[1] / 500)
    before = page.evaluate(window)
    page.mouse.down()
    page.mouse.move(x - 100, y, steps=3)
    page.mouse.up()
    after = page.evaluate(window)
    assert after[0] > before[0]
    assert after[1] - after[0] == pytest.approx(before[1] - before[0])
    page.locator('[data-part="stage"]').press("f")
    assert page.evaluate(window) == whole
    box = page.locator('[data-part="stage"]').bounding_box()
    low = page.evaluate("window.ringsim.timeline.rowHeight")
    # along the ruler it measures; with Shift the box fills the view
    for y, is_measured in ((10, True), (150, False)):
        page.keyboard.down("Shift")
        page.mouse.move(box["x"] + 200, box["y"] + y)
        page.mouse.down()
        page.mouse.move(box["x"] + 400, box["y"] + y + 30, steps=2)
        begin, end = page.evaluate("window.ringsim.timeline.tape")
        assert [begin, end] == pytest.approx([page.evaluate(time.format(x)) for x in (200, 400)])
        page.mouse.up()
        page.keyboard.up("Shift")
        assert page.evaluate(window) == (
            whole if is_measured else [pytest.approx(begin), pytest.approx(end)]
        )
    assert page.evaluate("window.ringsim.timeline.rowHeight") == 2 * low
    # the whole run leads there
    page.mouse.click(
        box["x"] + 600, page.locator('[data-part="overview"]').bounding_box()["y"] + 20
    )
    assert sum(page.evaluate(window)) / 2 == pytest.approx(
        (600 - 76) / (box["width"] - 76) * 8e6, rel=0.01
    )
    touch = page.context.new_cdp_session(page)
    page.locator('[data-part="stage"]').press("f")
    for kind, spots in (
        ("Start", [300, 500]),
        ("Move", [280, 520]),
        ("Move", [200, 600]),
        ("End", []),
    ):
        points = [
            {"x": box["x"] + spot, "y": box["y"] + 100, "id": finger}
            for finger, spot in enumerate(spots)
        ]
        touch.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": points})
    until(page, f"{window}[1] - {window}[0] < {0.6 * (whole[1] - whole[0])}")
    page.locator('[data-part="stage"]').press("f")
    for key, holds in (
        ("w", lambda old, new: new[1] - new[0] < old[1] - old[0]),
        ("s", lambda old, new: new[1] - new[0] > old[1] - old[0]),
        ("d", lambda old, new: new[0] > old[0]),
        ("a", lambda old, new: new[0] < old[0]),
    ):
        before = page.evaluate(window)
        page.locator('[data-part="stage"]').press(key)
        assert holds(before, page.evaluate(window)), key


def test_arrow_keys_walk_and_say_where_they_are(open_page: Open) -> None:
    page = open_page(two_that_meet().trace())
    stage = page.locator('[data-part="stage"]')
    stage.press("ArrowRight")
    walked = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Enter", "End", "Home", "Escape"):
        walked.append(page.evaluate("window.ringsim.timeline.selected.event"))
        said = text(page, "live")
        stage.press(key)
    # rank 0 from event to event; below it what rank 1 did then; the other side of that
    assert walked == [0, 1, 2, 3, 1, 2, 0]
    assert said.startswith("rank 0: compute 3, from 0 ns")
    assert page.evaluate("window.ringsim.timeline.selected") is None
    page.get_by_role("tab", name="selection").focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("[document.activeElement.textContent, window.ringsim.tab]") == [
        "table",
        "table",
    ]


def test_search_finds_and_leaves_the_rest_pale(open_page: Open) -> None:
    page = open_page(two_that_meet().trace())
    for query, found in (
        ("recv", 2),
        ("rank:1 size>100", 1),
        ("tag:7", 2),
        ("compute", 1),
        ("microbatch:3 op:span label:c", 1),
        ("no", 0),
    ):
        page.locator('[data-part="search"]').fill(query)
        assert text(page, "hits") == f"{found} found", query
    page.locator('[data-part="search"]').fill("tag:8")
    walked = []
    for key in ("Enter", "Enter", "Enter", "Shift+Enter"):
        page.locator('[data-part="search"]').press(key)
        walked.append(page.evaluate("window.ringsim.timeline.selected.event"))
    assert walked == [2, 4, 2, 4]


def test_playing_moves_the_line_and_steps_go_from_message_to_message(open_page: Open) -> None:
    page = open_page(two_that_meet().trace())
    head = "window.ringsim.timeline.head"
    page.get_by_label("next message").click()
    assert page.evaluate(head) == 4e6
    page.get_by_label("next message").click()
    assert page.evaluate(head) == 7e6
    page.get_by_label("message before").click()
    assert page.evaluate(head) == 4e6
    page.get_by_label("play", exact=True).click()
    until(page, f"{head} > 4.05e6")
    page.get_by_label("pause").click()
    assert not page.evaluate("window.ringsim.playing")
    page.emulate_media(reduced_motion="reduce")
    page.evaluate(f"{head} = 0")
    assert page.evaluate(f"(window.ringsim.play(), {head})") == 4e6  # from message to message
    until(page, "!window.ringsim.playing")
    assert page.evaluate(head) == 7e6


def test_a_playing_that_was_paused_does_not_go_on_beside_the_next(open_page: Open) -> None:
    page = open_page(two_that_meet().trace())
    page.evaluate("""(() => {  // in one task, so that no frame comes between
        const view = window.ringsim;
        view.play(), view.play();
        window.matchMedia = () => ({ matches: true });
        view.timeline.head = 0;
        view.play();
    })()""")
    until(page, "!window.ringsim.playing")
    assert page.evaluate("window.ringsim.timeline.head") == 7e6


def test_panels_count_what_is_in_the_window(open_page: Open) -> None:
    page = open_page(two_that_meet().trace(), fragment="#t=0,5000000")
    page.get_by_role("tab", name="statistics").click()
    assert "send\tworld\t1\t4 KiB" in text(page, "panel")
    assert "rank 0\trank 1\t1\t4 KiB" in text(page, "panel")
    page.get_by_role("button", name="matrix").click()
    ring = page.locator('[data-part="ring"]').bounding_box()
    page.mouse.move(
        ring["x"] + 36 + 0.75 * (ring["width"] - 40), ring["y"] + 20 + 0.25 * (ring["width"] - 40)
    )
    until(
        page,
        """document.querySelector('[data-part="ring"]').title === "rank 0 to rank 1: 4 KiB in 1 message" """,  # noqa: E501
    )
    page.get_by_role("tab", name="table").click()
    assert text(page, "panel").count("compute") == 1
    page.get_by_role("tab", name="bandwidth").click()
    page.get_by_label("bandwidth against size").wait_for()


def test_a_flag_leads_to_the_finding(open_page: Open) -> None:
    story = Story(2)
    for rank in range(2):
        story.op(rank, "span", (0, -1, 50), label="compute")
        story.op(
            rank,
            "recv",
            (50 + rank, 50 + rank, -1),
            peer=1 - rank,
            group="world",
            tag=0,
            size_bytes=4,
        )
    page = open_page(story.trace())
    assert "rank 0 waits" in text(page, "panel")
    x = page.evaluate("window.ringsim.timeline.flags()[0].x")
    box = page.locator('[data-part="stage"]').bounding_box()
    page.mouse.click(box["x"] + x, box["y"] + 26)
    until(
        page,
        (
            "window.ringsim.timeline.selected?.run.kind(window.ringsim.timeline.selected.event) "
            "=== 'recv'"
        ),
    )


def test_notes_stand_under_the_findings_or_alone(
    open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.2.0 had them in the text of a diagnosis alone."""
    quiet, stuck = Story(2), Story(2)
    for rank in range(2):
        quiet.op(rank, "barrier", (1, 1, 2), group="world")
        stuck.op(rank, "recv", (1, 1, -1), peer=1 - rank, group="world", tag=0, size_bytes=4)
    page = open_page(quiet.trace())
    page.get_by_role("tab", name="findings").click()
    assert text(page, "panel") == "No rank waited for a late one."
    found = dataclasses.replace(
        stuck.trace().explain(), notes=("rank 0 got over <b>this</b> \x1b[1m",)
    )
    monkeypatch.setattr(Trace, "explain", lambda trace: found)
    assert (
        text(open_page(stuck.trace()), "panel").splitlines()[-1]
        == "rank 0 got over <b>this</b> \\x1b[1m"
    )


def test_a_link_keeps_the_view_and_two_runs_share_an_axis(open_page: Open) -> None:
    shown = (
        "#t=1000000,3000000&h=2000000&y=7,128&e=1,5&p=0,3,1,2&m=1500000,2500000&"
        "q=op%3Arecv+rank%3A1&tab=table&show=bubbles"
    )
    page = open_page(pipeline(4), pipeline(2), fragment=shown)
    timeline = "window.ringsim.timeline"
    numbers = ", ".join(
        f"{timeline}.{name}" for name in ("from", "until", "head", "top", "rowHeight")
    )
    assert page.evaluate(f"[{numbers}]") == [1e6, 3e6, 2e6, 7, 128]
    assert page.evaluate(
        f"[{timeline}.runs.indexOf({timeline}.selected.run), {timeline}.selected.event]"
    ) == [1, 5]
    assert "Events from 1 ms to 3 ms" in text(page, "panel")
    assert page.evaluate("location.hash") == shown
    page.evaluate("window.ringsim.clear()")
    text(page, "panel")
    assert (
        page.evaluate("location.hash")
        == "#t=1000000,3000000&h=2000000&y=7,128&p=0,3,1,2&tab=table&show=bubbles"
    )
    assert page.evaluate(f"{timeline}.rows.map((row) => [row.number, row.rank])") == [
        [0, 0],
        [1, 0],
        [0, 1],
        [1, 1],
        [0, 2],
        [0, 3],
    ]


def test_a_thousand_ranks_scroll(open_page: Open) -> None:
    story = Story(1000, ring=False)
    for rank in range(1000):
        story.op(
            rank, "isend", (0, 4, 5), peer=(rank + 1) % 1000, group="world", tag=0, size_bytes=4096
        )
        story.op(
            rank, "irecv", (1, 2, 5), peer=(rank - 1) % 1000, group="world", tag=0, size_bytes=4096
        )
    page = open_page(story.trace())
    stage, view = (
        page.locator('[data-part="stage"]'),
        (
            "(({ timeline: { top, rowHeight, height } }) => [top / rowHeight, height - "
            "RULER])(window.ringsim)"
        ),
    )
    text(page, "legend")  # the page has come to rest
    first, room = page.evaluate(view)
    assert first == 0
    stage.hover()
    page.mouse.wheel(0, 300)
    until(page, f"{view}[0] === 100")  # rows of 3 pixels
    stage.press("PageDown")
    assert page.evaluate(view)[0] == pytest.approx(100 + room / 3)
    stage.press("End")  # selects nothing where nothing is selected
    for _ in range(6):
        stage.press("PageDown")
    # the last rank stands at the bottom
    assert page.evaluate(view)[0] == pytest.approx(1000 - room / 3)
    assert page.get_by_role("button", name="matrix").get_attribute("aria-pressed") == "true"


def test_what_is_drawn_is_what_happened(open_page: Open) -> None:
    """The pixels of the bars, from events one by one and from bins, beside the times."""
    page = open_page(two_that_meet().trace())
    script = """([event, share]) => {
        const { timeline } = window.ringsim, [run] = timeline.runs;
        timeline.draw();
        const x = timeline.x(run.post[event] + share * (run.endOf(event) - run.post[event])), [low, high] = timeline.placeOf(run, event);
        const { ratio } = timeline, at = Math.round((low + high) / 2 * ratio) * timeline.canvas.width + Math.round(x * ratio);
        const states = STATES.map((state, number) => number).filter((state) => timeline.pixels.some((stripe) =>
            [255, 170].some((share) => stripe[state][share] === timeline.buffer[at])));
        return states.map((state) => STATES[state].name);
    }"""  # noqa: E501
    for most in (30000, -1):
        page.evaluate(f"window.ringsim.timeline.countBars = () => {30000 - most}")
        assert page.evaluate(script, [3, 0.3]) == ["blocked: late sender"]
        assert page.evaluate(script, [3, 0.8]) == ["transfer"]
        assert page.evaluate(script, [0, 0.5]) == ["span"]
        page.evaluate("window.ringsim.search('op:send')")
        assert page.evaluate(script, [1, 0.8]) == ["transfer"]
        assert page.evaluate(script, [3, 0.8]) == []  # pale
        page.evaluate("window.ringsim.search('')")
        # too close for the bins of the whole run
        page.evaluate("window.ringsim.timeline.show(3.9e6, 4.1e6)")
        assert page.evaluate(script, [3, 0.59]) == ["blocked: late sender"]
        assert page.evaluate(script, [3, 0.61]) == ["transfer"]
        page.evaluate("window.ringsim.timeline.fit()")


def test_steps_bubbles_and_the_critical_path_are_those_of_the_schedule(open_page: Open) -> None:
    runs = [
        ringsim.simulate_schedule(
            name, Costs(latency=0.1), num_ranks=4, num_microbatches=8, num_chunks=chunks
        )
        for name, chunks in (("interleaved_1f1b", 2), ("1f1b", 1))
    ]
    page = open_page(
        *[run.trace() for run in runs], fragment="#by=stage&show=path,bubbles&tab=steps"
    )
    for number, run in enumerate(runs):
        found = page.evaluate("""(number) => {
            const run = window.ringsim.runs[number], [step, ...more] = findSteps(run), path = findCriticalPath(run);
            const idle = [...step.computes.keys()].map((rank) => {
                let sum = 0;
                bubbles(run, step, rank, (from, until) => { sum += until - from; });
                return sum;
            });
            const peaks = [...step.computes.keys()].map((rank) => peakIn(liveActivations(run, [step], rank), 0, Infinity));
            const on = (ranks) => path.reduce((sum, { to, from, until }) => sum + ((to === undefined) === ranks ? until - from : 0), 0);
            const joined = path.every(({ from }, k) => k === 0 || from === path[k - 1].until);
            return { more: more.length, idle, peaks, share: bubbleShare(run, step), computing: on(true), travelling: on(false), joined };
        }""", number)  # fmt: skip  # noqa: E501
        trace = run.trace()
        assert (found["more"], found["joined"], tuple(found["peaks"])) == (
            0,
            True,
            trace.peak_activations().peaks,
        )
        assert found["idle"] == pytest.approx(trace.bubble().idle)
        assert found["share"] == pytest.approx(trace.bubble().of_total)
        assert found["computing"] * 1e-9 == pytest.approx(float(run.critical_path.computing))
        assert found["travelling"] * 1e-9 == pytest.approx(float(run.critical_path.travelling))
    said = text(page, "panel")
    assert "interleaved_1f1b\t0 ns\t58.4 s\t17.8 %" in said
    assert "rank 0 at most 11, rank 1 at most 9" in page.locator("#panel canvas").get_attribute(
        "aria-label"
    )
    rows = (
        "window.ringsim.timeline.rows.map(({ group, rank, number }) => [group, rank, "
        "number].join())"
    )
    assert page.evaluate(rows)[:3] == ["0,0,0", "0,0,1", "1,1,0"]
    page.locator('[data-part="stage"]').press("c")
    page.get_by_role("button", name="bubbles").click()
    page.get_by_label("order of the rows").select_option("rank")
    text(page, "panel")
    assert page.evaluate("location.hash").endswith("&tab=steps&show=")
    assert page.get_by_role("button", name="critical path").get_attribute("aria-pressed") == "false"


def test_a_hostile_trace_is_only_shown(open_page: Open, tmp_path: Path) -> None:
    page = open_page(ringsim.load(hostile_file(tmp_path / "hostile.ringtrace", "pipeline")))
    page.locator('[data-part="stage"]').press("ArrowRight")
    page.get_by_role("tab", name="table").click()
    assert page.locator("script").count() == 2  # the data and the program


def test_it_works_in_a_frame_that_may_nothing_but_run_scripts(
    open_page: Open, browser: Any, tmp_path: Path
) -> None:
    open_page(two_that_meet().trace())
    (tmp_path / "frame.html").write_text(
        '<iframe sandbox="allow-scripts" src="run.html" width="1000" height="600"></iframe>'
    )
    page = browser.new_page()
    page.goto((tmp_path / "frame.html").as_uri())
    frame = page.frames[1]
    until(frame, READY)
    assert frame.evaluate("window.ringsim.runs[0].size") == 5
    page.close()


def test_printers_and_browsers_without_scripts_get_the_still_picture(open_page: Open) -> None:
    page = open_page(two_that_meet().trace())
    picture = page.locator("img")
    assert not picture.is_visible()
    page.emulate_media(media="print")
    assert picture.is_visible()
    assert not page.locator('[data-part="bars"]').is_visible()
    picture.evaluate("(picture) => picture.remove()")  # as of a large trace
    assert page.locator('[data-part="bars"]').is_visible()
    page.evaluate("window.ringsim.setTheme(true); dispatchEvent(new Event('beforeprint'))")
    assert not page.evaluate("window.ringsim.timeline.dark")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("window.ringsim.timeline.dark")


def test_choices_of_an_explorer_bring_their_runs(open_page: Open) -> None:
    def compute(ranks: int, name: str) -> Frame:
        story = Story(ranks)
        for rank in range(ranks):
            story.op(rank, "span", (0, -1, 4), label=name)
        return Frame(f"{ranks} ranks <b>{name}</b>", (story.trace(),))

    choices = (
        Choice("ranks", "ranks", 2, (1, 2, 3), (2, 3)),
        Choice("name", "kind", "a", ("a", "b"), ("a", "b")),
    )
    page = open_page(Explorer("an example", compute, choices))
    assert page.locator("pre").first.inner_text() == "2 ranks <b>a</b>"
    page.get_by_role("tab", name="table").click()
    page.get_by_role("button", name="light / dark").click()
    dark = page.locator(".explorer").get_attribute("data-theme")
    page.get_by_role("slider", name="ranks").press("ArrowRight")
    page.get_by_role("combobox", name="kind").select_option("b")
    until(page, "window.ringsim.runs[0].ranks === 3")
    assert page.locator("pre").first.inner_text() == "3 ranks <b>b</b>"
    assert page.get_by_role("slider", name="ranks").get_attribute("aria-valuetext") == "3"
    assert text(page, "panel").count("b") >= 3  # the table is still open, and of the new run
    assert (
        page.locator(".explorer > .ringsim").get_attribute("data-theme")
        == dark
        == page.locator(".explorer").get_attribute("data-theme")
    )
