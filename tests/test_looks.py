"""All colours come from one table, and remain distinct for every kind of colour vision."""

from __future__ import annotations

import ast
import io
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib.colors import CSS4_COLORS, to_hex
from pictures import CONTRAST, contrast, distance, lab
from PIL import Image
from synthetic import known, trace_of
from test_view_browser import CHROMIUM, Open, Shown, browser, open_page  # noqa: F401

import ringsim
from ringsim import explore
from ringsim.pipeline import make_schedule, plot_schedule
from ringsim.traces.looks import LOOKS, find_meanings, read_table, readable_ink

PACKAGE = Path(ringsim.__file__).parent
TABLE = read_table()
THEMES = pytest.mark.parametrize("theme", ["light", "dark"])
COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b|#[0-9a-fA-F]{3}\b|\b(rgb|hsl)a?\(")
COMPUTING = ("forward", "backward", "input_grad", "weight_grad")


def test_nothing_but_the_table_sets_a_colour() -> None:
    said = []
    for path in [*PACKAGE.rglob("*.py"), *(PACKAGE / "view/page").iterdir()]:
        text = path.read_text("utf-8")
        if path.name != "looks.py":  # its examples contain colours
            said += [f"{path.name}: {found[0]}" for found in COLOUR.finditer(text)]
        if path.suffix == ".py" and path.parent.name in ("plot", "view"):
            words = [
                node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)
            ]
            said += [f"{path.name}: {word}" for word in words if word in CSS4_COLORS]
    assert said == []


@THEMES
def test_words_on_every_colour_and_in_every_colour_can_be_read(theme: str) -> None:
    ground = getattr(LOOKS["ground"], theme)
    for look in LOOKS.values():
        colour = getattr(look, theme)
        assert contrast(readable_ink(colour), colour) >= CONTRAST
    words = [*TABLE["backend"], "ink", "muted", "problem", "slow", "your_mark"]
    assert min(contrast(getattr(LOOKS[name], theme), ground) for name in words) >= CONTRAST


@THEMES
@pytest.mark.parametrize("family", ["computing", "state", "group"])
def test_meanings_differ_for_every_colour_vision_and_in_print(family: str, theme: str) -> None:
    looks = {name: LOOKS[name] for name in TABLE[family]}
    for (one, a), (other, b) in combinations(looks.items(), 2):
        colours = getattr(a, theme), getattr(b, theme)
        assert distance(*colours) > 8, (one, other)
        in_grey = abs(lab(colours[0])[0] - lab(colours[1])[0])
        assert a.texture != b.texture or in_grey > 15, (one, other)


def test_a_span_keeps_its_look_whatever_else_a_run_contains() -> None:
    alone = find_meanings(["load"])
    assert find_meanings(["forward", "load", "step gpipe"]) == ["forward", *alone, "step"]
    assert find_meanings(["load 1", "load 22"]) == alone * 2, "numbers do not count"
    assert len(set(find_meanings(f"name {letter}" for letter in "abcdef"))) == 6


def colour_of(view: Shown, event: int) -> str:
    """Returns the most common colour of an event's bar, without its name and texture."""
    view.until("!view.waiting && !view.later")
    run = "timeline.runs[0]"
    box = view.part("bars").bounding_box()
    left, right, (top, bottom) = view.get(
        f"[timeline.x({run}.post[a]), timeline.x({run}.endOf(a)), timeline.placeOf({run}, a)]",
        event,
    )
    clip = {
        "x": box["x"] + left + 2, "y": box["y"] + top + 2, "width": right - left - 4,
        "height": bottom - top - 4,
    }  # fmt: skip
    picture = Image.open(io.BytesIO(view.page.screenshot(clip=clip))).convert("RGB")
    _, colour = max(picture.getcolors(1 << 24))
    return to_hex([channel / 255 for channel in colour]).upper()


def legend_colours(figure: Any) -> dict[str, str]:
    patches = figure.findobj(mpl.patches.Patch)
    return {patch.get_label(): to_hex(patch.get_facecolor()).upper() for patch in patches}


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: install chromium")
@pytest.mark.xdist_group("browser")
@THEMES
def test_still_page_explorer_and_lesson_show_a_run_in_the_same_colours(
    theme: str,
    open_page: Open,  # noqa: F811
) -> None:
    trace = trace_of(known("zb_h1", 2, 2))
    expected = {LOOKS[name].name: getattr(LOOKS[name], theme) for name in COMPUTING}
    del expected["backward"]  # this schedule divides each backward pass
    stills = [
        trace.plot_timeline(theme=theme),
        plot_schedule(make_schedule("zb_h1", 2, 2), theme=theme),
    ]
    for still in stills:
        assert expected.items() <= legend_colours(still.figure).items()
    explorer = explore.schedule()
    for shown in (trace, explorer):
        view = open_page(shown)
        view.page.evaluate("(dark) => window.ringsim.setTheme(dark)", theme == "dark")
        frame = "timeline.runs[0]"
        names = view.get(f"Array.from({{length: {frame}.size}}, (_, i) => {frame}.label(i))")
        seen = {name: colour_of(view, names.index(name)) for name in COMPUTING if name in names}
        assert seen == {name: getattr(LOOKS[name], theme) for name in seen}
        assert "forward" in seen


def test_a_colour_on_light_paper_has_one_colour_on_dark_paper() -> None:
    drawn = [
        name for family in TABLE if family not in ("verdict", "paper") for name in TABLE[family]
    ]
    pairs = {(LOOKS[name].light, LOOKS[name].dark) for name in drawn}
    assert len(pairs) == len(dict(pairs))
