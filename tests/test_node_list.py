"""Slurm's lists of machines, written out: against a compressor that shortens lists as Slurm does, and by hand."""

from __future__ import annotations

import re
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringsim.environment import expand_node_list
from ringsim.errors import RingError


def compress(names: list[str]) -> str:
    """Shortens neighbours that differ in their last number alone, by ranges where the numbers count up by one with the same width."""
    split = [re.fullmatch(r"(.*?)(\d*)(\D*)", name) for name in names]
    pieces = [(match[1], match[2], match[3]) for match in split if match]
    parts = []
    for (stem, has_number, suffix), group in groupby(pieces, key=lambda piece: (piece[0], bool(piece[1]), piece[2])):
        numbers = [number for _, number, _ in group]
        if not has_number:
            parts += [stem + suffix] * len(numbers)
            continue
        runs: list[list[str]] = []
        for number in numbers:
            follows = runs and int(number) == int(runs[-1][-1]) + 1 and number == f"{int(number):0{len(runs[-1][0])}}"
            if follows:
                runs[-1].append(number)
            else:
                runs.append([number])
        parts.append(f"{stem}[{','.join(run[0] if len(run) == 1 else f'{run[0]}-{run[-1]}' for run in runs)}]{suffix}")
    return ",".join(parts)


WORD = st.text("abgnx-._", min_size=1, max_size=4)
NUMBER = st.integers(0, 120).flatmap(lambda number: st.integers(1, 4).map(lambda width: f"{number:0{width}}"))
NAME = st.one_of(WORD, st.builds("{}{}{}".format, WORD, NUMBER, st.sampled_from(["", "-ib", ".cluster"])))
RUN = st.builds(
    lambda stem, first, count, width: [f"{stem}{number:0{width}}" for number in range(first, first + count)],
    *(WORD, st.integers(0, 1000), st.integers(1, 40), st.integers(1, 4)),
)


@given(st.lists(st.one_of(RUN, NAME.map(lambda name: [name])), min_size=1, max_size=6))
def test_what_was_shortened_comes_back(runs: list[list[str]]) -> None:
    names = [name for run in runs for name in run]
    assert expand_node_list(compress(names)) == names


def test_the_compressor_shortens() -> None:
    assert compress(["node01", "node02", "node03", "node07", "gpu5"]) == "node[01-03,07],gpu[5]"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node[01-03,07],gpu5", "node01 node02 node03 node07 gpu5"),
        ("a[1-2]b[3-4]", "a1b3 a1b4 a2b3 a2b4"),
        ("rack[0-1]node[09-10]-ib,login", "rack0node09-ib rack0node10-ib rack1node09-ib rack1node10-ib login"),
        ("localhost", "localhost"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[9-11]", "n9 n10 n11"),
        ("[1-2]x", "1x 2x"),
        ("node01,node01", "node01 node01"),
    ],
)
def test_forms(text: str, names: str) -> None:
    assert expand_node_list(text) == names.split()


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ",",
            "a,",
            ",a",
            "a,,b",
            "a b",
            "a[",
            "a]",
            "a[]",
            "a[1",
            "a1]",
            "a[[1]]",
            "a[1]]",
            "a[,]",
            "a[1,]",
            "a[1-]",
            "a[-1]",
            "a[x]",
        ),
        *("a[3-1]", "a[1-2-3]", "a[1-9:2]", "a[٣]", "a[0-999999999]", "a[0-999]b[0-999]c[0-1]", f"a[{'9' * 5000}]"),
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(RingError, match=r"^a node list must be .*, got .*\. Correct the SLURM_\*_NODELIST variable"):
        expand_node_list(text)
