"""The interactive page in a real browser: Debian's Chromium, headless and offline."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from synthetic import Story, pipeline
from test_hostile_names import hostile_file
from test_sources import LINK, all_send_first, send_next
from test_sources import stuck as stuck_in_code

import ringsim
from ringsim import Trace, explore
from ringsim.cli import main
from ringsim.pipeline import Costs
from ringsim.traces.events import MARK, SPAN
from ringsim.traces.program import find_program

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: install chromium"),
    pytest.mark.xdist_group("browser"),
]
Open = Callable[..., "Shown"]


class Shown:
    """A page in the browser; scripts can use ``view`` for its view, and ``timeline``."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def get(self, script: str, *values: Any) -> Any:
        """Returns the value of an expression; ``values`` are its ``a``, ``b``, ..."""
        names = ", ".join("abcd"[: len(values)])
        head = f"const view = window.ringsim, timeline = view?.timeline, [{names}] = values;"
        return self.page.evaluate(f"(values) => {{ {head} return {script}; }}", list(values))

    def until(self, script: str) -> None:
        """Waits for a condition; the page's policy forbids Playwright's own way of doing so."""
        deadline = time.monotonic() + 120
        while not self.get(script):
            assert time.monotonic() < deadline, script
            self.page.wait_for_timeout(20)

    def part(self, name: str) -> Any:
        return self.page.locator(f'[data-part="{name}"]')

    def text(self, name: str) -> str:
        """Returns the text of a part of the page, after the page has settled."""
        self.until("!view.waiting && !view.later")
        return str(self.part(name).inner_text())

    def at(self, event: int) -> tuple[float, float]:
        """Returns the position of the middle of an event's bar on the page."""
        run, box = "timeline.runs[0]", self.part("bars").bounding_box()
        middle = f"({run}.post[a] + {run}.endOf(a)) / 2"
        x, y = self.get(f"[timeline.x({middle}), timeline.middleOf({run}, a)]", event)
        return box["x"] + x, box["y"] + y

    def press(self, *keys: str) -> None:
        for key in keys:
            self.part("stage").press(key)

    def tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name).click()

    @property
    def window(self) -> Any:
        return self.get("[timeline.from, timeline.until]")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens the page of traces or of an explorer.

    At the end it checks that the page reported no error and requested only the file.
    """
    said: list[str] = []
    context = browser.new_context(viewport={"width": 1200, "height": 700})
    # drawing the still picture takes longer than everything else
    monkeypatch.setattr("ringsim.view.html.MOST_PICTURED", 20)

    def open_it(*shown: Any, fragment: str = "") -> Shown:
        page = context.new_page()
        if len(shown) == 1:
            more = {"source": True} if isinstance(shown[0], Trace) else {}
            shown[0].to_html(tmp_path / "run.html", **more)
        else:
            files = [f"{tmp_path}/{number}.ringtrace" for number in range(len(shown))]
            for trace, file in zip(shown, files, strict=True):
                trace.save(file)
            main(["open", *files, "-o", f"{tmp_path}/run.html", "--no-browser"])
        page.on("console", lambda message: said.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("request", lambda request: said.append(request.url))
        page.goto((tmp_path / "run.html").as_uri() + fragment)
        view = Shown(page)
        view.until("view?.frame !== undefined")
        return view

    yield open_it
    context.close()
    assert [line for line in said if not line.startswith(("data:", "file:"))] == []


def two_that_meet() -> Trace:
    """Rank 1 receives from 1 ms on; rank 0 sends the message at 4 ms.

    A second message goes in the other direction.
    """
    story = Story(2)
    story.span(0, "compute", 0, 4, microbatch=3)
    first = {"group": "world", "tag": 7, "size_bytes": 4096}
    second = {"group": "world", "tag": 8, "size_bytes": 64}
    story.op(0, "send", (4, 4, 6), peer=1, **first)
    story.op(0, "recv", (6, 6, 8), peer=1, **second)
    story.op(1, "recv", (1, 1, 6), peer=0, **first)
    story.op(1, "send", (7, 7, 8), peer=0, **second)
    return story.trace()


def test_the_legend_follows_a_running_run(open_page: Open) -> None:
    """It was drawn again only if the number of its entries changed."""

    def computes(name: str) -> Trace:
        story = Story(1)
        story.span(0, name, 0, 4)
        return story.trace()

    shown = open_page(computes("forward"), computes("backward"))
    live = "new LiveView(view.root, [view.runs[0]]).open(false)"
    legend = f"(() => {{ const live = {live}; live.renew(view.runs[1]); return live; }})()"
    assert "backward" in shown.get(f"{legend}.part('legend').textContent")


def test_hovering_and_clicking_tell_what_an_event_was(open_page: Open) -> None:
    view = open_page(two_that_meet())
    view.page.mouse.move(*view.at(3))
    assert view.text("tip").splitlines() == [
        "recv from 0",
        "rank 1, 1 ms to 6 ms (5 ms)",
        "other side: rank 0, from 4 ms to 6 ms",
        "Rank 1 waited 3 ms because rank 0 was late to send.",
    ]
    view.page.mouse.click(*view.at(3))
    view.until("timeline.selected?.event === 3")
    assert not view.part("tip").is_visible(), "the panel has the card"
    view.page.get_by_text("go there").wait_for()
    panel = view.text("panel")
    for said in ("transfer\n2 ms", "tag\n7", "float32[1024], 4 KiB", "0.00205 GB/s", "send to 1"):
        assert said in panel
    view.page.get_by_text("pin", exact=True).click()
    view.page.get_by_text("go there").first.click()
    view.until("timeline.selected.event === 1")
    # the pinned card stays while other cards change
    view.press("ArrowLeft")
    assert "compute 3" in view.text("panel")
    assert "recv from 0" in view.text("panel")
    view.page.get_by_text("unpin", exact=True).click()
    assert "recv from 0" not in view.text("panel")


def test_wheel_drag_keys_overview_and_two_fingers_move_the_window(open_page: Open) -> None:
    view = open_page(two_that_meet())
    whole, page, mouse = view.window, view.page, view.page.mouse
    x, y = view.at(1)
    mouse.move(x, y)
    under = view.get("timeline.time(a)", x)
    mouse.wheel(0, -400)
    view.until(f"timeline.until < {whole[1]}")
    # it zooms at the pointer, to a pixel or two
    assert view.get("timeline.time(a)", x) == pytest.approx(under, abs=whole[1] / 500)
    before = view.window
    mouse.down()
    mouse.move(x - 100, y, steps=3)
    mouse.up()
    after = view.window
    assert after[0] > before[0]
    assert after[1] - after[0] == pytest.approx(before[1] - before[0])
    view.press("f")
    assert view.window == whole
    for key, low, high in (("w", 1, -1), ("s", -1, 1), ("d", 1, 1), ("a", -1, -1)):
        old = view.window
        view.press(key)
        new = view.window
        assert (new[0] - old[0]) * low > 0, key
        assert (new[1] - old[1]) * high > 0, key
    box = view.part("stage").bounding_box()
    page.mouse.click(box["x"] + 600, view.part("overview").bounding_box()["y"] + 20)
    middle = view.get("(600 - GUTTER) / (a - GUTTER)", box["width"]) * 8e6
    assert sum(view.window) / 2 == pytest.approx(middle, rel=0.01)
    view.press("f")
    touch = page.context.new_cdp_session(page)
    for kind, spots in (("Start", [300, 500]), ("Move", [280, 520]), ("Move", [200, 600])):
        fingers = [{"x": box["x"] + spot, "y": box["y"] + 100} for spot in spots]
        points = [finger | {"id": number} for number, finger in enumerate(fingers)]
        touch.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": points})
    view.until(f"timeline.until - timeline.from < {0.6 * (whole[1] - whole[0])}")


def test_an_area_has_sums_and_can_fill_the_view(open_page: Open) -> None:
    """A drag on the ruler selects times of all ranks, and one with Shift those of some ranks."""
    view = open_page(two_that_meet())
    whole, low, page = view.window, view.get("timeline.rowHeight"), view.page
    stage = view.part("stage").bounding_box()
    x0, x1 = view.get("[timeline.x(2e6), timeline.x(7.5e6)]")
    for y, sums in (
        (10, ("2 ranks: 2 messages sent, 4.063 KiB", "blocked: late sender\t3 ms")),
        (150, ("1 rank: 1 message sent, 4 KiB", "compute\t2 ms\t36.4 %")),
    ):
        page.keyboard.down("Shift")
        page.mouse.move(stage["x"] + x0, stage["y"] + y)
        page.mouse.down()
        page.mouse.move(stage["x"] + x1, stage["y"] + y + 30, steps=2)
        page.mouse.up()
        page.keyboard.up("Shift")
        assert view.get("timeline.tape") == pytest.approx([2e6, 7.5e6], rel=0.01)
        panel = view.text("panel")
        assert [said for said in sums if said not in panel] == [], panel
        assert view.window == whole
    view.press("z")
    assert view.window == pytest.approx([2e6, 7.5e6], rel=0.01)
    assert view.get("timeline.rowHeight") == pytest.approx(2 * low, abs=2)
    view.press("f", "ArrowRight", "Shift+ArrowRight", "Shift+ArrowDown")
    assert view.get("[...timeline.tape, ...timeline.box]") == [0, 6e6, 0, 1]
    view.press("Escape")
    assert view.get("timeline.tape") is None
    assert view.get("timeline.rowHeight") == low


def test_keys_work_at_once_and_the_panel_can_be_resized(open_page: Open) -> None:
    view = open_page(two_that_meet())
    page, keys, hint = view.page, view.page.keyboard, view.part("hint")
    whole, beside = view.window, view.part("side").bounding_box()
    assert hint.locator("p").all_inner_texts()[2:] == ["Press ? for all keys."]
    keys.press("w")
    assert view.window[1] < whole[1]
    page.reload()
    view.until("view?.frame !== undefined")
    assert not hint.is_visible(), "the hint must stay closed"
    page.get_by_role("button", name="light/dark").click()
    dark = view.get("timeline.dark")
    keys.press(" ")
    assert (view.get("view.playing"), view.get("timeline.dark")) == (True, dark)
    for key in (" ", "/", "b", "w"):
        keys.press(key)
    assert (view.part("search").input_value(), view.get("[...timeline.hidden]")) == (
        "bw",
        ["critical_path"],
    )
    view.part("search").fill("rank:1 foo:1")
    assert view.text("hits").startswith("no field foo. Fields: rank, size")
    view.part("search").press("Escape")
    keys.press("?")
    assert "zoom to the selected area" in view.text("keys")
    keys.press("Escape")
    assert not view.part("help").is_visible()
    controls = "[...view.root.querySelectorAll('button, select, input:not([type=range])')]"
    assert view.get(f"{controls}.filter((one) => !one.title).map((one) => one.outerHTML)") == []
    view.part("divider").press("ArrowLeft")
    width, stage = view.part("side").bounding_box(), view.part("stage").bounding_box
    assert width["width"] > beside["width"]
    view.until(f"timeline.width === {stage()['width']}")
    keys.press("q")
    assert (view.part("side").is_visible(), stage()["width"]) == (False, 1200)
    keys.press("q")
    page.set_viewport_size({"width": 390, "height": 700})  # there, the panel is below
    view.tab("statistics")
    view.until("timeline.width === 390")
    assert view.part("panel").bounding_box()["y"] > stage()["y"] + stage()["height"]
    assert view.get("document.documentElement.scrollWidth") == 390
    assert view.get("view.part('panel').scrollWidth <= view.part('panel').clientWidth")


def test_the_legend_shows_and_hides_everything_that_is_drawn(open_page: Open) -> None:
    run = ringsim.simulate_schedule("1f1b", Costs(latency=0.1), num_ranks=4, num_microbatches=4)
    view = open_page(run.trace())
    view.text("panel")
    drawn = "(timeline.draw(), [timeline.canvas.toDataURL(), timeline.overlay.innerHTML])"
    entries = view.part("legend").get_by_role("button").all()
    names = [entry.inner_text().split(" ", 1)[1] for entry in entries]
    assert {"forward", "backward", "step", "bubble", "critical path", "message"} < {*names}
    for name, entry in zip(names, entries, strict=True):
        before, was_on = view.get(drawn), entry.get_attribute("aria-pressed")
        entry.click()
        assert view.get(drawn) != before, name
        assert entry.get_attribute("aria-pressed") != was_on, name
        entry.click()
        assert view.get(drawn) == before, name


def test_arrow_keys_walk_and_say_where_they_are(open_page: Open) -> None:
    view = open_page(two_that_meet())
    view.press("ArrowRight")
    walked = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Enter", "End", "Home", "Escape"):
        walked.append(view.get("timeline.selected.event"))
        said = view.text("live")
        view.press(key)
    # rank 0 from event to event; then rank 1 at that time; then the other side of its event
    assert walked == [0, 1, 2, 3, 1, 2, 0]
    assert said.startswith("rank 0: compute 3, start 0 ns")
    assert view.get("timeline.selected") is None
    view.page.get_by_role("tab", name="selection").focus()
    view.page.keyboard.press("ArrowLeft")
    assert view.get("[document.activeElement.textContent, view.tab]") == ["table", "table"]


def test_search_finds_and_leaves_the_rest_pale(open_page: Open) -> None:
    view = open_page(two_that_meet())
    for query, found in {
        "recv": 2, "rank:1 size>100": 1, "tag:7": 2, "compute": 1, "no": 0,
        "microbatch:3 op:span label:c": 1,
    }.items():  # fmt: skip
        view.part("search").fill(query)
        assert view.text("hits") == f"{found} found", query
    view.part("search").fill("tag:8")
    walked = []
    for key in ("Enter", "Enter", "Enter", "Shift+Enter"):
        view.part("search").press(key)
        walked.append(view.get("timeline.selected.event"))
    assert walked == [2, 4, 2, 4]


def test_playing_moves_the_line_and_steps_go_from_message_to_message(open_page: Open) -> None:
    view = open_page(two_that_meet())
    for label, head in (("next message", 4e6), ("next message", 7e6), ("previous message", 4e6)):
        view.page.get_by_label(label).click()
        assert view.get("timeline.head") == head
    view.page.get_by_label("play", exact=True).click()
    view.until("timeline.head > 4.05e6")
    view.page.get_by_label("pause").click()
    assert not view.get("view.playing")
    # with reduced motion, it goes from message to message, and only once after a pause
    view.page.emulate_media(reduced_motion="reduce")
    view.get("(view.play(), view.play(), timeline.head = 0, view.play())")
    view.until("!view.playing")
    assert view.get("timeline.head") == 7e6


def test_panels_count_what_is_in_the_window(open_page: Open) -> None:
    view = open_page(two_that_meet(), fragment="#t=0,5000000")
    view.tab("statistics")
    assert "send\tworld\t1\t4 KiB" in view.text("panel")
    assert "rank 0\trank 1\t1\t4 KiB" in view.text("panel")
    view.page.get_by_role("button", name="matrix").click()
    ring = view.part("ring").bounding_box()
    side = ring["width"] - 40
    view.page.mouse.move(ring["x"] + 36 + 0.75 * side, ring["y"] + 20 + 0.25 * side)
    said = "rank 0 to rank 1: 4 KiB in 1 message; click to filter"
    view.until(f"""document.querySelector('[data-part="ring"]').title === "{said}" """)
    view.tab("table")
    assert view.text("panel").count("compute") == 1
    view.tab("bandwidth")
    view.page.get_by_label("bandwidth against size").wait_for()


def stuck() -> Trace:
    """Two ranks that compute, and then wait for each other."""
    story = Story(2)
    for rank in range(2):
        story.span(rank, "compute", 0, 50)
        more = {"peer": 1 - rank, "group": "world", "tag": 0, "size_bytes": 4}
        story.op(rank, "recv", (50 + rank, 50 + rank, -1), **more)
    return story.trace()


def all_reduce() -> Trace:
    """Four ranks that call all_reduce; rank 1 comes last, and the second time never."""
    story = Story(4)
    for rank in range(4):
        late = 3 if rank == 1 else rank / 10
        story.span(rank, "compute", 0, late)
        story.op(rank, "all_reduce", (late, late, 4), group="world", size_bytes=4096)
        if rank != 1:
            story.op(rank, "all_reduce", (5, 5, -1), group="world", size_bytes=64)
    return story.trace()


COLLISIONS = """view.ring.boxes.flatMap((a, k) => view.ring.boxes.slice(0, k)
    .filter((b) => (a.text || b.text) && a.x < b.x + b.width && b.x < a.x + a.width
        && a.y < b.y + b.height && b.y < a.y + a.height).map((b) => [a, b]))"""


@pytest.mark.parametrize(
    ("trace", "head", "seen", "said"),
    [
        (all_reduce(), 2e6, "all_reduce 3/4 4 KiB", "rank 0 waits for rank 1, rank 1 computes"),
        (all_reduce(), 9e6, "all_reduce 3/4 64 B", "rank 0 waits for rank 1, rank 1 has ended"),
        (stuck(), 60e6, "0 waits for 1 waits for 0", "0 waits for rank 1, rank 1 waits for rank 0"),
        (two_that_meet(), 2e6, "4 KiB", "rank 0 computes, rank 1 waits for rank 0"),
        (two_that_meet(), 5e6, "4 KiB", "rank 0 waits in send to 1, rank 1 waits in recv from 0"),
        (pipeline(20), 9e6, "77 messages: 4.751 MiB · 1 barrier", "waits for rank"),
    ],
    ids=["late", "missing", "circle", "late_sender", "transfer", "many"],
)
def test_the_ring_shows_who_waits_for_whom(
    open_page: Open, trace: Trace, head: float, seen: str, said: str
) -> None:
    view = open_page(trace)
    for width in (340, 260):
        view.get("document.querySelector('.side').style.width = a", f"{width}px")
        view.get("(timeline.head = a, view.ring.draw())", head)
        assert seen in view.get("view.ring.boxes.map(({ text }) => text)")
        assert view.get(COLLISIONS) == []
        assert said in view.part("ring").get_attribute("aria-label")


def test_the_ring_filters_the_timeline(open_page: Open) -> None:
    for trace, query, found in (
        (two_that_meet(), "rank:1", 2), (all_reduce(), "op:all_reduce group:world", 7),
        (two_that_meet(), "from:0 to:1", 2), (stuck(), "rank:0 peer:1", 1),
    ):  # fmt: skip
        view = open_page(trace)
        view.get("(timeline.head ||= 5.5e6, view.ring.draw())")
        x, y = view.get(
            """(({ box, points }) => box ? [box.x + box.width / 2, box.y + box.height / 2]
                : points[30])(view.ring.targets.find(({ query }) => query === a))""",
            query,
        )
        for text, does in ((query, "show all"), ("", "filter")):
            view.part("ring").click(position={"x": x, "y": y})
            assert view.part("search").input_value() == text
            assert view.text("hits") == (f"{found} found" if text else "")
            assert view.part("ring").get_attribute("title").endswith(f"click to {does}")
    # a run with a fault opens at its end
    for key, said in (("ArrowRight", "rank 0 waits for rank 1"), ("ArrowLeft", "rank 1 waits")):
        view.part("ring").press(key)
        assert view.text("live").startswith(said)
    for text in ("rank:1", ""):
        view.part("ring").press("Enter")
        assert view.part("search").input_value() == text


def test_a_flag_leads_to_the_finding_and_notes_stand_below(
    open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.2.0 had the notes only in the text of a diagnosis."""
    notes = ("rank 0 got over <b>this</b> \x1b[1m",)
    found = dataclasses.replace(stuck().explain(), notes=notes)
    monkeypatch.setattr(Trace, "explain", lambda trace: found)
    view = open_page(stuck())
    said = view.text("panel")
    assert "rank 0 waits" in said
    assert said.splitlines()[-1] == "rank 0 got over <b>this</b> \\x1b[1m"
    box = view.part("stage").bounding_box()
    view.page.mouse.click(box["x"] + view.get("timeline.flags()[0].x"), box["y"] + 26)
    view.until("timeline.selected?.run.kind(timeline.selected.event) === 'recv'")


def test_a_link_keeps_the_view_and_two_runs_share_an_axis(open_page: Open) -> None:
    kept = "#t=1000000,3000000&h=2000000&y=7,128"
    marked = "m=1500000,2500000&q=op%3Arecv+rank%3A1"
    shown = f"{kept}&e=1,5&p=0,3,1,2&{marked}&tab=table&hide=transfer,critical_path"
    view = open_page(pipeline(4), pipeline(2), fragment=shown)
    names = ("from", "until", "head", "top", "rowHeight")
    assert [view.get(f"timeline.{name}") for name in names] == [1e6, 3e6, 2e6, 7, 128]
    selected = "[timeline.runs.indexOf(timeline.selected.run), timeline.selected.event]"
    assert view.get(selected) == [1, 5]
    assert "Events from 1 ms to 3 ms" in view.text("panel")
    assert view.get("location.hash") == shown
    view.get("view.clear()")
    view.text("panel")
    assert view.get("location.hash") == f"{kept}&p=0,3,1,2&tab=table&hide=transfer,critical_path"
    rows = view.get("timeline.rows.map((row) => [row.number, row.rank])")
    assert rows == [[0, 0], [1, 0], [0, 1], [1, 1], [0, 2], [0, 3]]


def test_a_second_run_is_compared_and_a_predicted_one_has_the_recorded_one_behind(
    open_page: Open,
) -> None:
    def run(took_ms: float, begin_ms: float, source: str) -> Trace:
        story = Story(2)
        for rank in range(2):
            until = begin_ms + (took_ms if rank else 10)
            story.span(rank, "forward", begin_ms, until, microbatch=3)
            story.span(rank, "backward", until, until + 10)
        return story.trace(source=source)

    names = "timeline.rows.map((row) => [row.number, row.rank])"
    view = open_page(run(10, 0, "measured"), run(13, 500, "measured"))
    assert view.get("timeline.runs.map((run) => run.head.name)") == ["0.ringtrace", "1.ringtrace"]
    assert view.get("[timeline.from, timeline.lags.map(([, late]) => [...late])]") == [
        0, [[0, 0], [3e6, 3e6]],
    ]  # fmt: skip
    assert view.get(names) == [[0, 0], [1, 0], [0, 1], [1, 1]]
    assert view.get("timeline.names.map((name) => name.at(-1))") == ["F3", "B"] * 4
    view = open_page(run(10, 0, "measured"), run(13, 500, "predicted"))
    assert view.get(names) == [[1, 0], [1, 1]]
    assert "recorded" in view.text("legend")
    assert view.get("timeline.rowOf(timeline.runs[0], 1)") == 1


def test_a_thousand_ranks_scroll(open_page: Open) -> None:
    story = Story(1000, ring=False)
    for rank in range(1000):
        story.op(rank, "barrier", (0, 1, 2), group="world")
    view = open_page(story.trace())
    view.text("legend")  # the page has settled
    view.get("(timeline.setRowHeight(100), timeline.scroll(-1e9))")  # otherwise all rows fit
    view.part("stage").hover()
    view.page.mouse.wheel(0, 300)
    view.until("timeline.top === 300")
    view.press(*["PageDown"] * 20)
    bottom = "timeline.y(timeline.rowOf(timeline.runs[0], 999) + 1) - timeline.height"
    assert view.get(bottom) == pytest.approx(0)


def test_rows_of_a_thousand_ranks_fold_except_for_the_straggler(open_page: Open) -> None:
    story = Story(400, ring=False)
    for rank in range(400):
        took = 8 if rank == 217 else 4
        story.span(rank, "compute", 0, took)
        story.op(rank, "all_reduce", (took, took, 9), group="world")
    view = open_page(story.trace())
    names = "timeline.rows.map((row) => [row.ranks[0], row.ranks.at(-1)])"
    rows = view.get(names)
    assert [217, 217] in rows
    assert len(rows) < 40
    ranks = view.get("timeline.rows.flatMap((row) => row.ranks)")
    assert sorted(ranks) == list(range(400))
    assert view.get("timeline.rows.length * timeline.rowHeight <= timeline.height")
    # in the strip below, the straggler computes while all others wait
    strip = """[...new Uint32Array(timeline.overview.getContext("2d").getImageData(
        GUTTER + Math.round((timeline.width - GUTTER) * 6 / 9), 0, 1, 48).data.buffer)]"""
    assert len(set(view.get(strip))) == 3  # the computation, waits, nothing
    view.part("stage").click(position={"x": 20, "y": 45})
    view.until("timeline.rows.some((row) => row.ranks.join() === '1')")
    view.part("stage").click(position={"x": 20, "y": 40})
    assert view.get(names) == rows


def test_the_page_finds_the_program_as_python_does_and_shows_stuck_operations(
    open_page: Open,
) -> None:
    def worker() -> None:
        import torch
        import torch.distributed as dist

        rank, token = dist.get_rank(), torch.zeros(4)
        ringsim.compute(0.001)
        dist.send(token, 1 - rank)

    with pytest.raises(ringsim.errors.Deadlock) as stuck:
        ringsim.simulate(worker, world_size=2, link=ringsim.Link(1e-5, 0))
    view = open_page(stuck.value.trace)
    assert "never finished" in view.text("legend")
    assert "failed" not in view.text("legend")
    trace = ringsim.load(Path(__file__).parent.parent / "figures/data/pipeline.ringtrace")
    gaps = find_program(trace.events)
    view = open_page(trace)
    start = int(trace.events.post_ns[trace.events.kind != MARK].min())
    found = view.get(
        """(([run]) => {
            const lanes = run.head.counts.flatMap((_, rank) => run.lanesIn(rank, "program"));
            const events = lanes.flatMap(({ events }) => [...events]);
            const at = (column, first) => events.map((i) => column[i - first]);
            const sides = [at(run.before, run.size), at(run.after, run.size)];
            return [...sides, at(run.post, 0), at(run.done, 0)];
        })(timeline.runs)"""
    )
    expected = gaps.before, gaps.after, gaps.start_ns - start, gaps.end_ns - start
    assert found == [column.tolist() for column in expected]
    assert len(gaps.before) > 0


def test_what_is_drawn_is_what_happened(open_page: Open) -> None:
    """The pixels of the bars, drawn from events and from bins, are compared with the times."""
    view = open_page(two_that_meet())
    script = """(() => {
        const [run] = timeline.runs, { ratio } = timeline;
        timeline.draw();
        const x = timeline.x(run.post[a] + b * (run.endOf(a) - run.post[a]));
        const [low, high] = timeline.placeOf(run, a), y = Math.round((low + high) / 2 * ratio);
        const at = y * timeline.canvas.width + Math.round(x * ratio);
        const pixels = timeline.buffer.subarray(at, at + 2); // one of them may belong to a texture
        const shown = (state) => timeline.pixels.some((stripe) =>
            [255, 170].some((share) => pixels.includes(stripe[state][share])));
        return STATES.filter((state, number) => shown(number)).map(({ name }) => name);
    })()"""
    for most in (30000, -1):
        view.get(f"timeline.countBars = () => {30000 - most}")
        for event, share, state in (
            (3, 0.3, "blocked: late sender"), (3, 0.8, "transfer"), (0, 0.5, "span"),
        ):  # fmt: skip
            assert view.get(script, event, share) == [state]
        view.get("view.search('op:send')")
        assert view.get(script, 1, 0.8) == ["transfer"]
        assert view.get(script, 3, 0.8) == []  # pale
        view.get("view.search('')")
        view.get("timeline.show(3.9e6, 4.1e6)")  # too close for the bins of the whole run
        assert view.get(script, 3, 0.59) == ["blocked: late sender"]
        assert view.get(script, 3, 0.61) == ["transfer"]
        view.get("timeline.fit()")


def late_for_all_reduce() -> None:
    ringsim.compute(0.001 * (1 + dist.get_rank()))
    dist.all_reduce(torch.zeros(1))


def word_of(function: Callable[..., Any], line: int) -> str:
    """Returns a line of a function, such as "test.py:14", counted from its first line."""
    code = function.__code__
    return f"{Path(code.co_filename).name}:{code.co_firstlineno + line}"


def test_the_code_shows_where_each_rank_is(open_page: Open) -> None:
    """The playhead moves the cursors, a line selects its operations, and an operation its line."""
    computes, reduces = (word_of(late_for_all_reduce, line) for line in (1, 2))
    trace = ringsim.simulate(late_for_all_reduce, world_size=2, link=LINK)
    view = open_page(trace, fragment="#tab=code&h=500000")
    view.page.locator(".code").wait_for()
    said = "[...document.querySelectorAll('.code title')].map((one) => one.textContent)"
    assert view.get(said) == [f"rank {rank} computes at {computes}" for rank in (0, 1)]
    code = view.page.locator(".code li:not(.far)").all_inner_texts()
    assert "def late_for_all_reduce() -> None:" in " ".join(code)
    assert "import pytest" not in " ".join(code)  # folded, because it is far away
    view.page.get_by_role("button", name="all lines").click()
    assert view.page.get_by_text("import pytest", exact=True).is_visible()
    # a click on an operation moves the line, and marks the operation's line
    events = trace.to_pandas()
    first, second = events.index[events["op"] == "all_reduce"]
    view.page.mouse.click(*view.at(int(first)))
    waits = [
        f"rank 0 waits at {reduces} for rank 1 at {computes}",
        f"rank 1 computes at {computes}",
    ]
    view.until("document.querySelector('.code .here')?.innerText.includes('all_reduce')")
    assert view.get(said) == waits
    assert view.get("document.querySelectorAll('.code svg > path').length") == 1
    view.text("panel")
    assert view.page.locator(".code [aria-live]").text_content() == waits[0]
    # a line selects its operations, also by keys, and the search box shows how
    line = view.page.get_by_role("button", name="dist.all_reduce(torch.zeros(1))")
    line.click()
    assert view.text("hits") == "2 found"
    assert view.get("[...[...timeline.found.values()][0]]") == [0, 1, 0, 1]
    walked = []
    for button in ("next", "next", "previous"):
        view.page.get_by_role("button", name=button, exact=True).click()
        walked.append(view.get("timeline.selected.event"))
    assert walked == [second, first, second]
    view.text("panel")
    assert view.get(said) == [f"rank {rank} waits at {reduces}" for rank in (0, 1)]
    line.press("ArrowUp")
    view.page.keyboard.press("Enter")
    assert view.part("search").input_value() == f"line:{computes}"
    view.page.keyboard.press("Enter")  # again: no search
    assert view.get("[view.part('search').value, timeline.found, view.tab]") == ["", None, "code"]


def test_the_program_shows_the_function_and_the_lines_around_it(open_page: Open) -> None:
    trace = ringsim.simulate(late_for_all_reduce, world_size=2, link=LINK)
    is_span, post_ns = trace.events.kind == SPAN, trace.events.post_ns
    done_ns = np.where(is_span, post_ns + 1, trace.events.done_ns)  # then the program runs
    trace = dataclasses.replace(trace, events=dataclasses.replace(trace.events, done_ns=done_ns))
    for shown, function in ((trace, "late_for_all_reduce, "), (trace.redact(), "")):
        view = open_page(shown)
        event = view.get("timeline.runs[0].lanesIn(1, 'program')[0].events[0]")
        view.page.mouse.move(*view.at(event))
        line = late_for_all_reduce.__code__.co_firstlineno
        words = f"{function}{Path(__file__).name}:{line + 1} to {line + 2}"
        assert words in view.text("tip").splitlines()


def test_a_deadlock_is_a_circle_in_the_code(open_page: Open) -> None:
    view = open_page(stuck_in_code())
    view.tab("code")
    view.page.locator(".code").wait_for()
    word = word_of(all_send_first, 1)  # the caller of the wrapper that sends
    titles = view.page.locator(".code title").all_text_contents()
    assert titles == [
        f"rank {k} waits at {word} for rank {(k + 1) % 3} at {word}" for k in range(3)
    ]
    assert view.page.locator(".code svg > path.stuck").count() == 3
    send = view.page.get_by_role("button", name="dist.send(tensor, ")
    send.click()  # the wrapper's own line has the same operations
    assert view.text("hits") == "3 found"
    assert view.part("search").input_value() == f"line:{word_of(send_next, 1)}"
    assert open_page(pipeline(2)).page.get_by_role("tab", name="code").count() == 0


READ_STEP = """(() => {
    const run = view.runs[a], [{ bubble }, ...more] = run.head.steps;
    const [, others, begins, ends] = run.tables.path;
    const idle = run.head.counts.map((_, rank) => {
        const [ends, begins] = run.rowsOf("bubbles", rank);
        return begins.reduce((sum, begin, k) => sum + ends[k] - begin, 0);
    });
    const peaks = idle.map((_, rank) => Math.max(0, ...liveIn(run, rank, 0, Infinity)[1]));
    const on = (stays) => others.reduce((sum, other, k) =>
        sum + ((other < 0) === stays ? ends[k] - begins[k] : 0), 0);
    const joined = begins.every((begin, k) => k === 0 || begin === ends[k - 1]);
    return { more: more.length, idle, peaks, share: bubble,
        computing: on(true), travelling: on(false), joined };
})()"""


def test_steps_bubbles_and_the_critical_path_are_those_of_the_schedule(open_page: Open) -> None:
    costs = Costs(latency=0.1)
    runs = [
        ringsim.simulate_schedule(name, costs, num_ranks=4, num_microbatches=8, num_chunks=chunks)
        for name, chunks in (("interleaved_1f1b", 2), ("1f1b", 1))
    ]
    traces = [run.trace() for run in runs]
    view = open_page(*traces, fragment="#by=stage&hide=&tab=steps")
    for number, (run, trace) in enumerate(zip(runs, traces, strict=True)):
        found = view.get(READ_STEP, number)
        assert (found["more"], found["joined"]) == (0, True)
        assert tuple(found["peaks"]) == trace.peak_activations().peaks
        assert found["idle"] == pytest.approx(trace.bubble().idle)
        assert found["share"] == pytest.approx(trace.bubble().of_total)
        for name in ("computing", "travelling"):
            assert found[name] * 1e-9 == pytest.approx(float(getattr(run.critical_path, name)))
    said = view.text("panel")
    assert "interleaved_1f1b" in said
    assert "58.4 s\t17.8 %" in said
    curve = view.page.locator("#panel svg").get_attribute("aria-label")
    assert "rank 0 at most 11, rank 1 at most 9" in curve
    rows = view.get("timeline.rows.map(({ group, rank, number }) => [group, rank, number])")
    assert rows[:3] == [[0, 0, 0], [0, 0, 1], [1, 1, 0]]
    view.press("c")
    view.page.get_by_role("button", name="bubble").click()
    view.page.get_by_label("order of the rows").select_option("rank")
    view.text("panel")
    assert view.get("location.hash").endswith("&tab=steps&hide=critical_path,bubble")


def test_a_hostile_trace_is_only_shown(open_page: Open, tmp_path: Path) -> None:
    view = open_page(ringsim.load(hostile_file(tmp_path / "hostile.ringtrace", "pipeline")))
    view.press("ArrowRight")
    view.tab("table")
    assert view.page.locator("script").count() == 2  # the data and the program


def test_it_works_in_a_frame_that_may_nothing_but_run_scripts(
    open_page: Open, browser: Any, tmp_path: Path
) -> None:
    open_page(two_that_meet())
    (tmp_path / "frame.html").write_text(
        '<iframe sandbox="allow-scripts" src="run.html" width="1000" height="600"></iframe>'
    )
    page = browser.new_page()
    page.goto((tmp_path / "frame.html").as_uri())
    view = Shown(page.frames[1])
    view.until("view?.frame !== undefined")
    assert view.get("view.runs[0].size") == 5
    page.close()


def test_printers_and_browsers_without_scripts_get_the_still_picture(open_page: Open) -> None:
    view = open_page(two_that_meet())
    picture, bars = view.page.locator("img"), view.part("bars")
    assert not picture.is_visible()
    view.page.emulate_media(media="print")
    assert (picture.is_visible(), bars.is_visible()) == (True, False)
    picture.evaluate("(picture) => picture.remove()")  # as for a large trace
    assert bars.is_visible()
    view.get("(view.setTheme(true), dispatchEvent(new Event('beforeprint')))")
    assert not view.get("timeline.dark")
    view.get("dispatchEvent(new Event('afterprint'))")
    assert view.get("timeline.dark")


def test_choices_of_an_explorer_bring_their_runs(open_page: Open) -> None:
    view = open_page(explore.deadlock())
    page, words = view.page, view.page.locator(".words")
    assert words.inner_text().startswith("The run never ends.")
    circle = page.get_by_role("img", name="Ranks 0, 1, 2, 3 wait for each other in a circle.")
    assert circle.locator("text").all_text_contents() == [*["send"] * 4, *"0123"]
    view.tab("table")
    page.get_by_role("button", name="light/dark").click()
    outer, inner = page.locator(".explorer"), page.locator(".parts > .ringsim")
    dark = outer.get_attribute("data-theme")
    page.get_by_role("combobox", name="rank 2 first").select_option("receives")
    says = "document.querySelector('.words').innerText.startsWith('The run ends after"
    view.until(f"{says}')")
    assert circle.count() == 0
    assert "recv" in view.text("panel")  # the table is still open, and shows the new run
    slider = page.get_by_role("slider", name="size")
    slider.press("ArrowRight")
    view.until(f"!{says} 51.6')")
    assert slider.get_attribute("aria-valuetext") == "1024 KiB"
    assert inner.get_attribute("data-theme") == dark == outer.get_attribute("data-theme")
    field = page.get_by_role("spinbutton", name="size")
    assert field.input_value() == "1024"
    field.fill("70")
    field.press("Enter")
    view.until(f"{says} 51.6')")
    assert (field.input_value(), slider.get_attribute("aria-valuetext")) == ("4", "4 KiB")
    said = "size is one of 4, 1024 on this page: 4 KiB is nearest to 70."
    assert page.get_by_role("status").inner_text() == said


def test_an_explorer_is_an_aligned_grid_with_its_picture_first(open_page: Open) -> None:
    view = open_page(explore.bandwidth())
    for width in (1400, 1000, 390):
        view.page.set_viewport_size({"width": width, "height": 900})
        rows = view.get(
            "[...document.querySelectorAll('.choices label')].map((label) => "
            "[label, document.getElementById(label.htmlFor), label.nextSibling.nextSibling]"
            ".map((one) => one.getBoundingClientRect())"
            ".map(({left, right, top, bottom}) => [left, right, (top + bottom) / 2]))"
        )
        assert len(rows) == 4
        for label, slider, field in rows:
            assert label[1] <= slider[0] < slider[1] <= field[0] < field[1] <= width
            assert label[2] == pytest.approx(slider[2], abs=2)
            assert label[2] == pytest.approx(field[2], abs=2)
        assert len({tuple(edge for part in row for edge in part[:2][1:]) for row in rows}) <= 2
        chart, table, drawn = (
            view.get(f"document.querySelector('{part}').getBoundingClientRect().toJSON()")
            for part in (".picture svg", ".words table", ".parts > .ringsim")
        )
        assert chart["bottom"] < 900, "the chart is above the fold"
        assert chart["bottom"] < drawn["top"]
        assert table["left"] > chart["right"] or table["top"] >= drawn["bottom"]
        assert view.get("document.documentElement.scrollWidth") <= width
