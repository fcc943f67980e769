"""The parts that all explorers share.

These are the choices and their frames, the sliders in a notebook, and a page that needs no kernel.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ringsim.errors import ArgumentError, RingError, say
from ringsim.traces.value import Trace
from ringsim.view.html import encode, join, pack, page_body, write_page

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["Choice", "Explorer", "Frame", "say_stuck"]


class Choice(NamedTuple):
    """One choice in an explorer, shown as a slider for numbers or a list for names.

    Attributes:
        name: the name of the corresponding argument of the function that creates a frame.
        label: the displayed name.
        value: the initial value.
        options: the possible values.
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
    def is_number(self) -> bool:
        """Whether the choice is shown as a slider."""
        return not isinstance(self.options[0], str)

    def say(self, option: Any) -> str:
        """Returns the text that is displayed for an option."""
        return f"{option:g} {self.unit}".rstrip() if self.is_number else str(option)


class Frame(NamedTuple):
    """The content for one set of choices: runs on one axis, and a text about the results."""

    text: str
    traces: tuple[Trace, ...]


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
        tab: the panel that is open initially, or "" for the view's default.
    """

    title: str
    make: Callable[..., Frame]
    choices: tuple[Choice, ...]
    tab: str = ""

    def frame(self, **values: Any) -> Frame:
        """Computes the frame for a set of choices.

        Args:
            values: the chosen values, keyed by name; all other choices keep their initial values.

        Returns:
            The runs and a text about the results.

        Raises:
            ArgumentError: a value is not one of its choice's options.
        """
        chosen = {choice.name: choice.value for choice in self.choices} | values
        for choice in self.choices:
            if chosen[choice.name] not in choice.options:
                raise ArgumentError(
                    f"{choice.name} must be one of {', '.join(map(str, choice.options))}, got "
                    f"{say(chosen[choice.name])}. Choose one of these options."
                )
        return self.make(**chosen)

    def to_html(self, path: str | PathLike[str]) -> None:
        """Writes a page with frames for all exported choices (see `Choice.exported`).

        The sliders on the page work without a kernel and without a network.

        Args:
            path: the file to write; an existing file is replaced.

        Raises:
            TraceFileError: the file cannot be written.
        """
        exported = [choice.exported or (choice.value,) for choice in self.choices]
        names = [choice.name for choice in self.choices]
        frames = [
            self.frame(**dict(zip(names, values, strict=True)))
            for values in itertools.product(*exported)
        ]
        # by identity, because frames share traces
        traces = {id(trace): trace for frame in frames for trace in frame.traces}
        numbers = {key: number for number, key in enumerate(traces)}
        packed = list(map(encode, traces.values()))
        head = {
            "choices": [
                {
                    "label": choice.label,
                    "options": list(map(choice.say, options)),
                    "at": options.index(choice.value),
                    "numbers": choice.is_number,
                }
                for choice, options in zip(self.choices, exported, strict=True)
                if len(options) > 1
            ],
            "tab": self.tab,
            "frames": [
                {"text": frame.text, "runs": [numbers[id(trace)] for trace in frame.traces]}
                for frame in frames
            ],
            "sizes": list(map(len, packed)),
        }
        first = self.frame()
        body = (
            '<div class="ringsim ready explorer"><section class="choices" aria-label="choices">'
            f"<h1>{html.escape(self.title)}</h1><form></form>"
            f'<pre tabindex="0" aria-live="polite">{html.escape(first.text)}</pre></section>\n'
            f"{page_body('', first.traces)}</div>\n"
        )
        write_page(path, f"ringsim: {self.title}", "explorer.js", body, [pack(join(head, packed))])

    def _ipython_display_(self) -> None:
        """Displays the sliders, the text and the view.

        Below them, it displays the pictures for the initial choice, which a saved notebook keeps.
        """
        import ipywidgets
        from IPython.display import display

        from ringsim.view.notebook import View

        first = self.frame()
        words = ipywidgets.HTML()
        view = View(first.traces, self.tab)
        controls = {choice.name: _control(choice) for choice in self.choices}

        def show(frame: Frame) -> None:
            words.value = f'<pre style="line-height: 1.3">{html.escape(frame.text)}</pre>'

        def change(_: Any) -> None:
            frame = self.frame(**{name: control.value for name, control in controls.items()})
            show(frame)
            view.show(frame.traces)

        for control in controls.values():
            control.observe(change, "value")
        show(first)
        box = ipywidgets.VBox(
            [
                ipywidgets.GridBox(
                    list(controls.values()),
                    layout={"grid_template_columns": "repeat(auto-fill, 320px)"},
                ),
                words,
                view.widget,
            ]
        )
        display(
            {
                **box._repr_mimebundle_(),
                "text/plain": f"Sliders for {self.title}. Run this cell to use them.",
            },
            raw=True,
        )
        chosen = ", ".join(f"{choice.label} {choice.say(choice.value)}" for choice in self.choices)
        display(
            {"text/plain": f"The initial choice, for saved notebooks: {chosen}\n\n{first.text}"},
            raw=True,
        )
        for trace in first.traces:
            display(trace)


def _control(choice: Choice) -> Any:
    import ipywidgets

    kind = ipywidgets.SelectionSlider if choice.is_number else ipywidgets.Dropdown
    options = [(choice.say(option), option) for option in choice.options]
    return kind(
        options=options,
        value=choice.value,
        description=choice.label,
        style={"description_width": "100px"},
    )
