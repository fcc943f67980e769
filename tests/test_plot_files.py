"""Tests of picture files, and of the texts for sizes and times."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from ringsim.errors import ArgumentError
from ringsim.plot.style import save_figure
from ringsim.traces.units import bytes_text, time_text, time_unit


def test_an_svg_has_a_name_and_a_sentence_for_screen_readers(tmp_path: Path) -> None:
    words = {"title": '<ring> & "co"', "description": r"a \1 of three"}
    save_figure(Figure(), tmp_path / "ring.svg", **words)
    root = ET.parse(tmp_path / "ring.svg").getroot()
    found = [root.find(f"{{http://www.w3.org/2000/svg}}{name}").text for name in ("title", "desc")]
    assert found == list(words.values())
    with pytest.raises(ArgumentError, match=r"must end in .png, .svg or .pdf, got .*ring.jpeg"):
        save_figure(Figure(), tmp_path / "ring.jpeg")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (1023, "1,023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (1024**2 - 1, "1 MiB"),
        (10 * 1024**3, "10 GiB"), (1024**7, "1,024 EiB"),
    ],
)  # fmt: skip
def test_sizes_have_binary_units(size: int, text: str) -> None:
    assert bytes_text(size) == text


@given(st.integers(1, 10**15))
def test_times_are_read_back_to_three_digits(length_ns: int) -> None:
    number, name = time_text(length_ns).split(" ")
    unit = {"s": 1e9, "ms": 1e6, "µs": 1e3, "ns": 1.0}[name]
    assert time_unit(length_ns) == (unit, name)
    assert float(number.replace(",", "")) * unit == pytest.approx(length_ns, rel=0.006)
