"""The English of the project: patterns that native writers avoid do not come back.

Checked are prose in Markdown and lessons, docstrings, comments, and the texts of messages. An
exception needs a line in ``tests/english.txt``: the file, a colon, and the piece of text.
"""

from __future__ import annotations

import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from test_house import ROOT, TRACKED

# pattern: a better way to write it
PATTERNS = {
    r"(?:^|[.:;] )What(?:ever)? (?!is\b|are\b|do\b|does\b|did\b|if\b)[^?]*$": "name the thing",
    r"(?:^|[.;:(] )Where (?!is\b|are\b|do\b|does\b|did\b)[^,?]*,[^?]*$": "If, or When",
    r", where (?:it|they|there|that|no|nothing|this)\b": "if, or when",
    r"\b(?:says?|said|saying|tells?|told|telling)"
    r" (?:what|which|how|where|who|whose|when|why|whether)\b": "report, list, describe, show",
    r"\b(?:Returns|Yields|Gives) (?:what|which|how|where|who|when|why)\b": "a noun",
    r"\bTells whether\b": "Returns whether",
    r"(?i:\b(?:nobody|somebody|whoever)\b)": "rank, process or user",
    r"\b(?:[Bb]eside|[Ll]ikewise|[Aa]new|in vain|by turns)\b": "next to, also, again",
    r"\b(?:stands?|stood) (?:in|under|there|alone|beside)\b": "is, or is listed",
    r",? too[.;:)]": "also",
    r"\b(?:under way|mend(?:ed|s|ing)?)\b": "in flight, fix",
}


def texts_of(path: Path) -> Iterator[str]:
    """Yields the pieces of prose in a file, each on one line."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from re.split(r"\n\s*\n", source)
    elif path.suffix == ".ipynb":
        for cell in json.loads(source)["cells"]:
            if cell["cell_type"] == "markdown":
                yield from re.split(r"\n\s*\n", "".join(cell["source"]))
    else:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                yield from re.split(r"\n\s*\n", token.string.strip("\"'# "))


def find_patterns(path: Path) -> Iterator[str]:
    """Yields "file: piece of text (remedy)" for each place that has one of the patterns."""
    for text in texts_of(path):
        plain = re.sub(r"`[^`]*`", "`code`", " ".join(text.split()))
        for sentence in re.split(r"(?<=[.?!:;]) ", plain):
            for pattern, remedy in PATTERNS.items():
                if found := re.search(pattern, sentence):
                    piece = sentence[max(found.start() - 30, 0) : found.end() + 30].strip()
                    yield f"{path.relative_to(ROOT).as_posix()}: {piece} ({remedy})"


def test_no_pattern_comes_back() -> None:
    """Each place is rewritten, or listed with the exceptions."""
    allowed = (ROOT / "tests" / "english.txt").read_text(encoding="utf-8").splitlines()
    exceptions = [line.split(": ", 1) for line in allowed if line and line[0] != "#"]
    found = [
        place
        for path in TRACKED
        if path.suffix in (".md", ".ipynb", ".py")
        and path.name != "test_english.py"
        and "golden" not in path.parts  # frozen
        for place in find_patterns(path)
        if not any(place.startswith(name + ": ") and piece in place for name, piece in exceptions)
    ]
    assert not found, f"{len(found)} places:\n" + "\n".join(found)
