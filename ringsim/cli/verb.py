"""What the verbs share: the layout of their help, and writing pictures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ringsim.errors import RingError, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ringsim.traces.value import Trace

Verbs = argparse._SubParsersAction  # argparse has no public name for it


def add_verb(
    verbs: Verbs[argparse.ArgumentParser],
    name: str,
    help_text: str,
    example: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """Adds a verb, with an example at the end of its help."""
    parser = verbs.add_parser(
        name,
        help=help_text,
        description=help_text[0].upper() + help_text[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the option that ``tell`` obeys."""
    parser.add_argument(
        "--json", action="store_true", help="print JSON, for programs, instead of words"
    )


def tell(
    options: argparse.Namespace, words: Callable[[], object], numbers: Callable[[], object]
) -> None:
    """Prints what was found: in words, or as JSON where that was asked for."""
    print(json.dumps(numbers(), indent=2) if options.json else words())


def write_pictures(trace: Trace, directory: Path) -> list[Path]:
    """Draws a trace into a directory, as ``ring.png`` and ``timeline.png``; returns these files."""
    drawn = (("ring", trace.plot_ring), ("timeline", trace.plot_timeline))
    return [write_picture(plot(), directory / f"{name}.png") for name, plot in drawn]


def tell_written(file: object) -> None:
    """Says where something was written; a name may be somebody else's."""
    print(f"wrote {escape(str(file), lines=False)}")


def make_directory(path: Path) -> None:
    """Makes a directory that may be there; raises RingError if it cannot."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise RingError(
            f"a directory must be writable, got {escape(str(path), lines=False)}: {error}. "
            "Choose another place with -o."
        ) from None


def write_picture(axes: Axes, file: Path) -> Path:
    """Writes the figure of some axes and closes it; its directory is created if necessary.

    Returns the file.

    Raises:
        RingError: it cannot be written.
    """
    import matplotlib.pyplot as plt

    from ringsim.plot.style import save_figure

    figure = cast("Figure", axes.figure)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_figure(figure, file, dpi=figure.dpi)
    except (OSError, ValueError) as error:
        raise RingError(
            f"the picture must be writable to {escape(str(file), lines=False)}, got {error}. "
            "Choose another place with -o."
        ) from None
    finally:
        plt.close(figure)
    return file
