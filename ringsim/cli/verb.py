"""Code that the commands share: the layout of their help, their output, and pictures."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ringsim.errors import ArgumentError, Interrupted, RingError, escape, escape_line
from ringsim.link import Link
from ringsim.traces.units import capitalise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ringsim.traces.value import Trace

# argparse has no public name for it
Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_verb(
    verbs: Verbs,
    name: str,
    help_text: str,
    example: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """Adds a command, with an example at the end of its help."""
    parser = verbs.add_parser(
        name,
        help=help_text,
        description=capitalise(help_text) + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_out(
    parser: argparse.ArgumentParser, metavar: str, help_text: str, default: str | None = None
) -> None:
    """Adds the option for the output path."""
    parser.add_argument("-o", "--out", type=Path, default=default, metavar=metavar, help=help_text)


def add_flag(parser: argparse.ArgumentParser, help_text: str, *names: str) -> None:
    """Adds an option without a value."""
    parser.add_argument(*names, action="store_true", help=help_text)


def add_module(parser: argparse.ArgumentParser) -> None:
    """Adds the option to run a module instead of a script."""
    add_flag(parser, "run SCRIPT as a module, like python -m", "-m", "--module")


def add_ranks(parser: argparse.ArgumentParser, help_text: str, default: int | None = None) -> None:
    """Adds the option for the number of ranks."""
    parser.add_argument("-n", "--ranks", type=int, default=default, help=help_text)


def add_rest(parser: argparse.ArgumentParser) -> None:
    """Adds a script's own arguments, which end the command line and are not in its help."""
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the option that makes ``tell`` print JSON."""
    add_flag(parser, "print machine-readable JSON instead of text", "--json")


def tell(
    options: argparse.Namespace, words: Callable[[], object], numbers: Callable[[], object]
) -> None:
    """Prints the results in words, or as JSON if the user asked for JSON."""
    print(json.dumps(numbers(), indent=2) if options.json else words())


def list_rows(table: Any) -> Any:
    """Returns the rows of a table as JSON objects."""
    return json.loads(table.to_pandas().to_json(orient="records"))


def write_pictures(trace: Trace, directory: Path) -> None:
    """Draws a trace as ``ring.png`` and ``timeline.png`` in a directory, and prints their paths."""
    write_picture(trace.plot_ring(), directory / "ring.png")
    write_picture(trace.plot_timeline(), directory / "timeline.png")


def tell_written(file: object) -> None:
    """Prints the path of a written file, escaped because the file name may be untrusted."""
    print(f"wrote {escape_line(str(file))}")


def save_trace(trace: Trace, file: Path) -> None:
    """Saves a trace, and prints its path."""
    trace.save(file)
    tell_written(file)


@contextlib.contextmanager
def keep_what_was_recorded(file: Path | None, *, source: bool = False) -> Iterator[None]:
    """Saves the partial trace of a failing run, and prints the file's path."""
    try:
        yield
    except (RingError, Interrupted) as error:
        if error.trace is not None and file is not None:
            error.trace.save(file, source=source)
            print(f"wrote the trace up to the failure: {escape(str(file))}")
        raise


def check_ending(option: str, file: Path, endings: Iterable[str]) -> None:
    """Raises ArgumentError if an option cannot write files with this extension."""
    if file.suffix not in endings:
        raise ArgumentError(
            f"the file for {option} must end in {' or '.join(endings)}, got {str(file)!r}. Change "
            "its extension."
        )


def make_link(options: str, latency_us: float, bandwidth_gbps: float) -> Link:
    """Returns the link that the user has described; raises ArgumentError if it is impossible."""
    if not (0 <= latency_us < math.inf and bandwidth_gbps > 0):
        raise ArgumentError(
            f"{options} must be a non-negative latency and a positive bandwidth, got "
            f"{latency_us:g} and {bandwidth_gbps:g}. Use microseconds and 1e9 bytes/s."
        )
    return Link(latency_us * 1e-6, 1e-9 / bandwidth_gbps)


def make_directory(path: Path) -> None:
    """Creates a directory if it does not exist; raises RingError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise RingError(
            f"cannot create the directory {escape_line(str(path))}: {error}. "
            "Choose another directory."
        ) from None


def write_picture(axes: Axes, file: Path) -> None:
    """Saves the figure that contains the given axes, closes it, and prints the file's path.

    The path's directory is created if necessary.

    Raises:
        RingError: the file cannot be written.
    """
    import matplotlib.pyplot as plt

    from ringsim.plot.style import caption, save_figure

    figure = cast("Figure", axes.figure)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_figure(figure, file, dpi=figure.dpi)
    except (OSError, ValueError) as error:
        raise RingError(
            f"cannot write the picture to {escape_line(str(file))}: {error}. "
            "Choose another path with -o."
        ) from None
    finally:
        plt.close(figure)
    tell_written(file)
    if caption(figure):
        tell_written(file.with_suffix(".caption.txt"))
