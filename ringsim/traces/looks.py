"""The meanings that pictures show, and the look of each: one table for Python and JavaScript.

The table is ``ringsim/data/looks.json``. Stills, the interactive view, explorers and verdicts take
all their colours from it, so that a colour means the same everywhere. Each meaning has a name, a
short name for narrow places, a colour for light and for dark backgrounds, and a texture for readers
who cannot distinguish colours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import NamedTuple
from zlib import crc32

from ringsim.traces.documents import JsonObject
from ringsim.traces.units import span_text


class Meaning(NamedTuple):
    r"""A meaning in pictures and its look.

    Attributes:
        name: the name in legends.
        short: the name in narrow places, such as "F" for a forward pass.
        light: the colour on a light background, as "#RRGGBB".
        dark: the colour on a dark background.
        texture: one of the characters ``/ \ | - + x .``, or "" for none.
        glyph: the character in the legend of the interactive view, or "" for what is drawn as bars.
    """

    name: str
    short: str
    light: str
    dark: str
    texture: str
    glyph: str = ""


def read_table() -> dict[str, dict[str, dict[str, str]]]:
    """Returns the table: meanings by name, in families such as "computing" and "state"."""
    table: JsonObject = json.loads((files("ringsim") / "data/looks.json").read_text("utf-8"))
    return table


LOOKS = {name: Meaning(**look) for family in read_table().values() for name, look in family.items()}
_COMPUTATIONS = ("forward", "backward", "input_grad", "weight_grad")
# numbers in names, and the duration in the name of a ``ringsim.compute`` span
_UNLIKE = re.compile(r"(?<=^compute )[\d.]+ \S*s$|[\d.…]+")
_OTHERS = tuple(name for name in LOOKS if name.startswith("span_"))


def find_meanings(labels: Iterable[str]) -> list[str]:
    """Finds the meaning of each span of a run by its label.

    Spans that are not part of a pipeline step get one of six looks, which depends on their label
    without its numbers. Two such labels share a look only if a run has more than six.

    Args:
        labels: the labels, each at most once.

    Returns:
        For each label, a key of ``LOOKS``.

    Example:
        >>> find_meanings(["forward", "step 1f1b", "Optimizer.step#SGD.step"])
        ['forward', 'step', 'optimizer']
    """
    stems = [_UNLIKE.sub("", span_text(label)).strip() for label in labels]
    looks = _share_out(sorted({stem for stem in stems if not _known(stem)}))
    return [_known(stem) or looks[stem] for stem in stems]


def _known(stem: str) -> str:
    if (kind := stem.partition(" (")[0]) in _COMPUTATIONS:  # such as "forward (DDP)"
        return kind
    if stem.split(" ")[0] == "step":
        return "step"
    return "optimizer" if stem.lower().startswith("optimizer") else ""


def _share_out(stems: Sequence[str]) -> dict[str, str]:
    """Returns a look for each label: the label's own look, or the next one that is free."""
    looks: dict[str, str] = {}
    for number, stem in enumerate(stems):
        at = crc32(stem.encode()) % len(_OTHERS)
        if number < len(_OTHERS):
            while _OTHERS[at] in looks.values():
                at = (at + 1) % len(_OTHERS)
        looks[stem] = _OTHERS[at]
    return looks


def contrast(one: str, other: str) -> float:
    """Returns the contrast ratio of two colours, from 1 to 21.

    Source:
        WCAG 2.1, "contrast ratio" and "relative luminance".

    Example:
        >>> contrast("#FFFFFF", "#000000")
        21.0
    """
    dark, light = sorted(map(_luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def readable_ink(colour: str) -> str:
    """Returns the colour, black or white, that is easier to read on a colour.

    The contrast is at least 4.5.

    Example:
        >>> readable_ink("#F1E08C"), readable_ink("#961921")
        ('#000000', '#FFFFFF')
    """
    inks = LOOKS["on_light"].light, LOOKS["on_dark"].light
    return max(inks, key=lambda ink: contrast(ink, colour))
