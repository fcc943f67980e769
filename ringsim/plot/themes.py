"""Renders pictures for notebooks as SVG that follows the light or dark theme of the page.

Each colour in the file is a variable, whose dark value applies where the element that contains the
picture has a dark colour scheme. JupyterLab sets the scheme of its pages to that of its theme.
"""

from __future__ import annotations

import re

from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.text import Text

from ringsim.plot import style
from ringsim.traces.looks import LOOKS, readable_ink

MOST_ELEMENTS = 2500  # more bars and words would take more than about half a megabyte
GROUND = style.GROUND.lower()
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
# words on a bar: matplotlib writes the plain background of the words before the words
_ON_BAR = re.compile(
    r'(<g id="patch_\d+"><path d="[^"]*"(?: clip-path="[^"]*")? style="fill: (#[0-9a-f]{6})[^"]*"/>'
    r'</g>(?:<g clip-path="[^"]*">)?<g)(?: style="fill: #[0-9a-f]{6}")?( transform=)'
)
_UNSEEN = re.compile(r"<!--.*?-->\s*|<metadata>.*?</metadata>\s*|(?<=>)\s+(?=<)", re.DOTALL)
_PATH = re.compile(r'(?<= d=")[^"]*(?=")')


def themed_svg(figure: Figure, description: str) -> str:
    """Renders a figure, drawn for a light ground, as SVG with the colours of both themes.

    Returns "" for a figure with more than ``MOST_ELEMENTS`` elements, which would be large.
    """
    boxes = sum(len(group.get_paths()) for group in figure.findobj(Collection))
    if boxes + len(figure.findobj(Text)) > MOST_ELEMENTS:
        return ""
    svg = _UNSEEN.sub("", style.figure_svg(figure, description=description))
    # a tenth of a point is enough
    svg = _PATH.sub(lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), svg)
    colours = sorted(set(_COLOUR.findall(svg)))
    night = dict(zip(colours, style.turn_dark(colours), strict=True))
    night[GROUND] = LOOKS["jupyter"].dark
    names: dict[tuple[str, str], str] = {}

    def name(light: str, dark: str) -> str:
        return f"var({names.setdefault((light, dark), f'--c{len(names)}')})"

    def write_on_bar(found: re.Match[str]) -> str:
        start, bar, end = found.groups()
        words = name(readable_ink(bar), readable_ink(night[bar]))
        return f'{start} style="fill:{words}"{end}'

    svg = _ON_BAR.sub(write_on_bar, svg)
    svg = _COLOUR.sub(lambda found: name(found[0], night[found[0]]), svg)
    day = "".join(f"{one}:{light};" for (light, _), one in names.items())
    dark = "".join(f"{one}:{dark};" for (_, dark), one in names.items())
    rules = f"<style>svg{{{day}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    start, end = svg.split("<defs>", 1)
    return f"{start}{rules}<defs>{end}"
