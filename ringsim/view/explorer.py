"""The parts that all explorers share: choices, frames, and how they are displayed.

A notebook and an exported page show the same controls, which ``page/choices.js`` creates. In a
notebook, the kernel computes each frame. A page contains frames for some values of each choice.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringsim.errors import ArgumentError, RingError, is_integer, is_number, say
from ringsim.traces.documents import JsonObject, StrPath
from ringsim.traces.value import Trace
from ringsim.view.html import draw_still, encode, join, pack, page_body, precede, write_page


class Choice(NamedTuple):
    """One choice in an explorer, shown as a slider and a field for numbers or a list for names.

    Attributes:
        name: the name of the corresponding argument of the function that creates a frame.
        label: the displayed name.
        value: the initial value.
        options: the names, or the numbers on the slider, ascending. In a notebook, you can also
            type numbers between them, which must be integers if all options are integers.
        exported: the values that an exported page offers; if empty, the page offers only ``value``.
        unit: the unit of the numbers.
    """

    name: str
    label: str
    value: Any
    options: Sequence[Any]
    exported: Sequence[Any] = ()
    unit: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether the choice is an integer."""
        return all(map(is_integer, self.options))

    def say(self, value: Any) -> str:
        """Returns the text that is displayed for a value."""
        return value if isinstance(value, str) else f"{value:g} {self.unit}".rstrip()

    def check(self, value: Any) -> None:
        """Checks a value.

        Raises:
            ArgumentError: the value is not an option, or not within the range of the options.
        """
        low, high, whole = self.options[0], self.options[-1], self.is_whole
        if isinstance(low, str):
            fits, rule = value in self.options, f"one of {', '.join(self.options)}"
        else:
            fits = (is_integer if whole else is_number)(value) and low <= value <= high
            rule = f"{'an integer' if whole else 'a number'} from {low:g} to {high:g}"
        if not fits:
            raise ArgumentError(f"{self.name} must be {rule}, got {say(value)}.")

    def describe(self, options: Sequence[Any]) -> JsonObject:
        """Returns the choice among some of its options as plain data for JSON."""
        return {**self._asdict(), "options": list(options), "exported": (), "whole": self.is_whole}


class Frame(NamedTuple):
    """The content for one set of choices.

    Attributes:
        sentences: sentences about the results.
        traces: the runs, on one axis.
        table: the rows of a table of results, each with a name in its first cell. The first row
            contains the names of the columns.
    """

    sentences: tuple[str, ...]
    traces: tuple[Trace, ...]
    table: tuple[tuple[str, ...], ...] = ()

    @property
    def text(self) -> str:
        """The sentences and the table as text."""
        widths = [max(map(len, column)) for column in zip(*self.table, strict=True)]
        rows = (zip(row, widths, strict=True) for row in self.table)
        lines = ["   ".join(f"{cell:>{width}}" for cell, width in row) for row in rows]
        return "\n".join([*self.sentences, *lines])


def say_stuck(error: RingError) -> str:
    """Returns a sentence about a deadlock that names its ranks."""
    (finding, *_) = error.diagnosis.findings
    return f"Ranks {', '.join(map(str, finding.ranks))} wait for each other forever."


@dataclass(frozen=True, eq=False)
class Explorer:
    """Sliders for exploring simulated runs.

    On the last line of a cell, an explorer displays itself. `to_html` writes a page whose sliders
    work without a kernel.

    Attributes:
        title: the subject of the explorer.
        make: the function that creates the frame for a set of choices.
        choices: the choices.
        draws: whether a chart of bandwidths is drawn next to the choices.
    """

    title: str
    make: Callable[..., Frame]
    choices: tuple[Choice, ...]
    draws: bool = False

    def frame(self, **values: Any) -> Frame:
        """Computes the frame for a set of choices.

        Args:
            values: the chosen values, keyed by name; all other choices keep their initial values.
                A number may lie between the options of its choice.

        Returns:
            The runs and a text about the results.

        Raises:
            ArgumentError: a value is not possible.
        """
        chosen = {choice.name: choice.value for choice in self.choices} | values
        for choice in self.choices:
            choice.check(chosen[choice.name])
        return self.make(**chosen)

    def to_html(self, path: StrPath) -> None:
        """Writes a page with frames for all exported choices (see `Choice.exported`).

        The sliders on the page work without a kernel and without a network.

        Args:
            path: the file to write; an existing file is replaced.

        Raises:
            TraceFileError: the file cannot be written.
        """
        exported = [choice.exported or (choice.value,) for choice in self.choices]
        frames = list(map(self._compute, itertools.product(*exported)))
        runs = [list(zip(frame.traces, precede(frame.traces), strict=True)) for frame in frames]
        # by identity, because frames share traces
        keys = [[(id(trace), id(first)) for trace, first in each] for each in runs]
        shared = dict(zip(itertools.chain(*keys), itertools.chain(*runs), strict=True))
        numbers = {key: number for number, key in enumerate(shared)}
        packed = [encode(trace, first=first) for trace, first in shared.values()]
        head = {
            "choices": [
                choice.describe(options)
                for choice, options in zip(self.choices, exported, strict=True)
                if len(options) > 1
            ],
            "frames": [
                self._describe(frame) | {"runs": [numbers[key] for key in each]}
                for frame, each in zip(frames, keys, strict=True)
            ],
            "sizes": list(map(len, packed)),
        }
        first = self.frame()
        body = (
            '<div class="ringsim ready explorer"><div class="parts">\n'
            f'<section class="choices" aria-label="choices"><h1>{html.escape(self.title)}</h1>'
            '</section>\n<section class="picture" aria-label="picture"></section>\n'
            '<section class="words" aria-label="words"><pre>'
            f"{html.escape(first.text)}</pre></section>\n"
            f"{page_body('', first.traces)}</div></div>\n"
        )
        data = [pack(join(head, packed))]
        write_page(path, f"ringsim: {self.title}", body, data, "choices.js", "explorer.js")

    def _compute(self, values: Sequence[Any]) -> Frame:
        """Computes the frame for one value of each choice."""
        names = (choice.name for choice in self.choices)
        return self.frame(**dict(zip(names, values, strict=True)))

    def _describe(self, frame: Frame) -> JsonObject:
        """Returns a frame as plain data for JSON, without its traces."""
        return {**frame._asdict(), "traces": (), "draws": self.draws}

    def _ipython_display_(self) -> None:
        """Displays the explorer, and pictures that are visible only if the explorer is not.

        These are a separate output, which the explorer hides, because JupyterLab shows nothing else
        of an output whose widget it cannot restore.
        """
        from IPython.display import display

        from ringsim.view.notebook import View

        first = self.frame()
        view = View(first.traces)
        still = f"ringsim-still-{view.widget.model_id}"
        view.about = {"frame": self._describe(first), "still": still}
        view.widget.choices = [choice.describe(choice.options) for choice in self.choices]
        view.widget.chosen = [choice.value for choice in self.choices]

        def change(_: Any) -> None:
            frame = self._compute(view.widget.chosen)
            view.about["frame"] = self._describe(frame)
            view.show(frame.traces)

        view.widget.observe(change, "chosen")
        data, _ = view.widget._repr_mimebundle_() or ({}, {})
        words = f"Sliders for {self.title}. Run this cell to use them."
        display({**data, "text/plain": words}, raw=True)
        values = ", ".join(f"{choice.label} {choice.say(choice.value)}" for choice in self.choices)
        words = f"Without a kernel, only the initial choice: {values}"
        pictures = "".join(map(draw_still, first.traces))
        text = f'<pre style="white-space: pre">{html.escape(first.text)}</pre>'
        page = f'<div class="{still}"><p>{html.escape(words)}</p>{text}{pictures}</div>'
        display({"text/html": page, "text/plain": f"{words}\n\n{first.text}"}, raw=True)
