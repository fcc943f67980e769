"""Colours that everybody can tell apart, units, and files that are the same byte for byte."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import Story, pipeline

from ringsim.plot import charts, style, timeline
from ringsim.plot.layout import OPERATION_LOOKS, SPAN_LOOKS
from ringsim.plot.ring import CLOSING_COLOUR, CLOSING_TEXTURE, PAIR_COLOURS, PAIR_TEXTURES, arc, arrow, beside, place, ribbon
from ringsim.plot.steps import ACTION_LOOKS, BUBBLE_LOOK
from ringsim.traces.units import bytes_text, time_text, time_unit

STEP_LOOKS = (*ACTION_LOOKS.values(), BUBBLE_LOOK)

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency", 2009: severity 1.
VISION = {
    "normal": np.eye(3),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour: str, vision: str) -> np.ndarray:
    """CIE L*a*b* of a colour as somebody sees it; distances of 2 can just be seen side by side."""
    srgb = np.array(mpl.colors.to_rgb(colour))
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(VISION[vision] @ linear, 0, 1) / (TO_XYZ @ np.ones(3))
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("looks", [OPERATION_LOOKS, SPAN_LOOKS, STEP_LOOKS], ids=["operations", "spans", "steps"])
def test_looks_differ_for_every_eye(looks: tuple[style.Look, ...], vision: str) -> None:
    for one, other in combinations(looks, 2):
        distance = np.linalg.norm(lab(one.colour, vision) - lab(other.colour, vision))
        assert distance > 20 or one.hatch != other.hatch, (one, other)


@pytest.mark.parametrize("looks", [OPERATION_LOOKS, SPAN_LOOKS, STEP_LOOKS], ids=["operations", "spans", "steps"])
def test_looks_differ_in_grey(looks: tuple[style.Look, ...]) -> None:
    for one, other in combinations(looks, 2):
        lighter = abs(lab(one.colour, "normal")[0] - lab(other.colour, "normal")[0])
        assert lighter > 15 or one.hatch != other.hatch, (one, other)


def test_a_texture_can_be_seen_on_its_colour() -> None:
    for look in (*OPERATION_LOOKS, *SPAN_LOOKS, *STEP_LOOKS):
        if look.hatch:
            assert np.linalg.norm(lab(look.colour, "normal") - lab(look.ink, "normal")) > 12, look


@pytest.mark.parametrize("vision", VISION)
def test_backends_differ_for_every_eye(vision: str) -> None:
    for one, other in combinations([charts.pen(backend).colour for backend in ("gloo", "nccl", "mpi", "tcp", "mine")], 2):
        assert np.linalg.norm(lab(one, vision) - lab(other, vision)) > 15


@pytest.mark.parametrize("vision", VISION)
def test_pair_groups_differ_for_every_eye(vision: str) -> None:
    looks = [*zip(PAIR_COLOURS, PAIR_TEXTURES, strict=True), (CLOSING_COLOUR, CLOSING_TEXTURE)]
    for (colour, texture), (other_colour, other_texture) in combinations(looks, 2):
        assert np.linalg.norm(lab(colour, vision) - lab(other_colour, vision)) > 15
        assert texture != other_texture


@pytest.mark.parametrize(
    "colour", [style.INK, style.MUTED, *(charts.pen(backend).ink for backend in ("gloo", "nccl", "mpi", "tcp", "mine"))]
)
def test_words_can_be_read_on_white(colour: str) -> None:
    srgb = np.array(mpl.colors.to_rgb(colour))
    luminance = TO_XYZ[1] @ np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    assert 1.05 / (luminance + 0.05) > 4.5  # WCAG AA


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1 MiB"),
        (10 * 1024**3, "10 GiB"),
        (1024**7, "1,024 EiB"),
    ],
)
def test_sizes_have_binary_units(size_bytes: int, text: str) -> None:
    assert bytes_text(size_bytes) == text


@given(st.integers(1, 10**15))
def test_times_are_read_back_to_three_digits(length_ns: int) -> None:
    number, name = time_text(length_ns).split(" ")
    unit = {"s": 1e9, "ms": 1e6, "µs": 1e3, "ns": 1.0}[name]
    assert time_unit(length_ns) == (unit, name)
    assert float(number.replace(",", "")) * unit == pytest.approx(length_ns, rel=0.006)


def test_an_arrow_is_as_wide_as_it_should_be_and_ends_at_its_path() -> None:
    path = arc(0.0, 1.0)
    corners = arrow(path, 0.05, head=0.1)
    assert corners[len(corners) // 2].tolist() == path[-1].tolist()
    assert np.hypot(*(corners[0] - corners[-1])) == pytest.approx(0.05)
    assert np.hypot(*beside(path, 0.1).T) == pytest.approx(np.full(len(path), 1.1), abs=2e-3)  # the left of clockwise is outside
    outline = ribbon(path, 0.2)
    assert np.hypot(*(outline[0] - outline[-1])) == pytest.approx(0.2)
    assert place(np.pi / 2).tolist() == pytest.approx([1, 0])


SCRIPT = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
import matplotlib as mpl
mpl.use("Agg")
from pathlib import Path
from synthetic import pipeline
from ringsim.plot import style
from ringsim.plot.ring import plot_ring
from ringsim.plot.timeline import plot_timeline, trace_png
trace = pipeline(4)
print(hashlib.sha256(trace_png(trace)).hexdigest())
for plot in (plot_ring, plot_timeline):
    for ending in (".svg", ".png"):
        path = Path(sys.argv[2], plot.__name__ + ending)
        style.save_figure(plot(trace).figure, path, title="a < b", description="c & d")
        print(hashlib.sha256(path.read_bytes()).hexdigest())
"""


def test_two_processes_draw_the_same_bytes(tmp_path: Path) -> None:
    found = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        # Neither the order of hashes, nor the time zone, nor a user's style may matter.
        (folder / "matplotlibrc").write_text(f"font.size: {10 + int(seed)}\naxes.grid: True\n")
        environment = os.environ | {"PYTHONHASHSEED": seed, "TZ": f"Etc/GMT-{seed}", "MATPLOTLIBRC": str(folder)}
        command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(folder)]
        found.append(subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout.split())
    assert found[0] == found[1]
    assert len(set(found[0])) == 5


def test_an_svg_says_what_it_shows_and_carries_no_date(tmp_path: Path) -> None:
    from ringsim.plot.ring import plot_ring

    figure = plot_ring(pipeline(3)).figure
    style.save_figure(figure, tmp_path / "ring.svg", title='<ring> & "co"', description=r"a \1 of three")
    plt.close(figure)
    root = ET.parse(tmp_path / "ring.svg").getroot()
    assert root.get("role") == "img"
    space = "{http://www.w3.org/2000/svg}"
    assert root.find(f"{space}title").text == '<ring> & "co"'
    assert root.find(f"{space}desc").text == r"a \1 of three"
    text = (tmp_path / "ring.svg").read_text()
    assert "dc:date" not in text
    assert sum(element.get("id", "").startswith("rank-") for element in root.iter()) == 3
    assert sum(element.get("id", "").startswith("group-ring") for element in root.iter()) == 3


@pytest.mark.parametrize("world_size", [1, 4, 17])
def test_the_notebooks_picture(world_size: int) -> None:
    trace = pipeline(world_size)
    before = plt.get_fignums()
    data = timeline.trace_png(trace)
    assert plt.get_fignums() == before  # nothing for the notebook to show a second time
    width, height = struct.unpack(">II", data[16:24])
    assert 900 <= width <= 1500
    assert 300 <= height <= 1200
    assert trace.describe().encode() in data
    assert hashlib.sha256(timeline.trace_png(trace)).digest() == hashlib.sha256(data).digest()


def test_nothing_in_the_notebooks_picture_reaches_its_edge() -> None:
    """A frame of white all around: no word is cut off."""
    for trace in (pipeline(4), pipeline(17), Story(2).trace(), Story(1).trace()):
        pixels = plt.imread(io.BytesIO(timeline.trace_png(trace)))[:, :, :3]
        frame = np.concatenate(
            [pixels[:3].reshape(-1, 3), pixels[-3:].reshape(-1, 3), pixels[:, :3].reshape(-1, 3), pixels[:, -3:].reshape(-1, 3)]
        )
        assert (frame == 1.0).all()
