"""The commands that read traces, such as ``show``, ``compare``, ``explain`` and ``what-if``."""

from __future__ import annotations

import argparse
import re
import sys
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import ringsim
from ringsim.cli.record import add_rank_options, run_script
from ringsim.cli.verb import (
    Verbs,
    add_flag,
    add_json,
    add_out,
    add_rest,
    add_verb,
    check_ending,
    list_rows,
    make_directory,
    make_link,
    save_trace,
    tell,
    tell_written,
    write_picture,
    write_pictures,
)
from ringsim.errors import ArgumentError, Interrupted, RingError, escape_line
from ringsim.exchange.loading import is_profile
from ringsim.launch.progress import Progress
from ringsim.traces.display import Style
from ringsim.traces.summary import Totals, count_file, count_trace
from ringsim.view.html import to_html

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ringsim.prediction.comparison import Comparison
    from ringsim.traces.value import Trace


NEWEST = (
    "directory of torch.profiler files, or script (.py) to use its newest trace in this directory"
)
PICTURES = (".png", ".svg", ".pdf", ".html")
# the method of Trace for each extension of the path
EXPORTS = {".pftrace": "to_perfetto", ".json": "to_chrome"}


def add_show(verbs: Verbs) -> None:
    """Adds the command."""
    parser = add_verb(
        verbs,
        "show",
        "summarise or draw a trace file",
        "ringsim show demo/run.ringtrace -o pictures",
        run_show,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help=f"trace file, {NEWEST}")
    add_out(
        parser,
        "DIR|FILE",
        "draw ring.png and timeline.png into a directory, or the timeline into a file "
        f"({', '.join(PICTURES)}); .html is interactive",
    )
    add_json(parser)
    parser.add_argument(
        "--export",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="export the trace to a file for other viewers: .pftrace (Perfetto) or .json (Chrome)",
    )


def run_show(options: argparse.Namespace) -> int:
    """Summarizes, draws and exports a trace file; returns the exit code."""
    out: Path | None = options.out
    if out is not None and out.suffix and not out.is_dir():
        check_ending("-o", out, PICTURES)
    options.file = find_newest(options.file)
    # the summary of a trace file does not need the whole trace
    is_whole = out is not None or options.export or is_profile(options.file)
    trace = ringsim.load(options.file) if is_whole else None
    totals = (
        _count(options.file, options.json)
        if trace is None
        else count_trace(trace, whole_table=options.json)
    )
    tell(options, lambda: totals, lambda: _numbers(totals))
    if trace is None:
        return 0
    if out is not None:
        if out.is_dir() or not out.suffix:
            write_pictures(trace, out)
        else:
            _write_one(trace, out)
    for path in options.export:
        check_ending("--export", path, EXPORTS)
        getattr(trace, EXPORTS[path.suffix])(path)
        tell_written(path)
    return 0


def _count(file: Path, whole_table: bool) -> Totals:
    """Counts a trace file's contents; shows progress on a terminal if this takes a while."""
    lines: list[Progress] = []

    def on_rank(rank: int, world_size: int) -> None:
        lines[:] = lines or [Progress(world_size)]
        lines[0].update(rank + 1, lambda: "being read")

    try:
        return count_file(file, whole_table=whole_table, on_rank=on_rank)
    finally:
        for line in lines:
            line.close()


def write_page(traces: Sequence[Trace], file: Path, names: Sequence[str] = ()) -> None:
    """Writes traces as an interactive page, and prints its path.

    The path's directory is created if necessary.
    """
    make_directory(file.parent)
    to_html(traces, file, names, source=True)  # as far as the trace files contain it
    tell_written(file)


def _write_one(trace: Trace, file: Path) -> None:
    """Writes a trace as an interactive page, or draws its timeline."""
    if file.suffix == ".html":
        write_page([trace], file)
    else:
        write_picture(trace.plot_timeline(), file)


def add_open(verbs: Verbs) -> None:
    """Adds the command."""
    parser = add_verb(
        verbs,
        "open",
        "view trace files in the browser, where you can zoom, hover, search and play them back",
        "ringsim open run.ringtrace",
        run_open,
    )
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help=f"trace file, {NEWEST}; several files share one time axis",
    )
    add_out(parser, "FILE", "page to write (default: FILE.html)")
    add_flag(parser, "write the page without opening it", "--no-browser")


def run_open(options: argparse.Namespace) -> int:
    """Writes a page with the trace files and opens the page; returns the exit code."""
    files = [find_newest(path) for path in options.files]
    page = options.out or files[0].with_suffix(".html")
    names = [path.name for path in files] if len(files) > 1 else []
    write_page([ringsim.load(path) for path in files], page, names)
    if not options.no_browser and not webbrowser.open(page.resolve().as_uri()):
        print("no browser found: open this file in a browser yourself")
    return 0


def add_compare(verbs: Verbs) -> None:
    """Adds the command."""
    example = "ringsim compare before.ringtrace after.ringtrace -o both.html"
    parser = add_verb(
        verbs,
        "compare",
        "show how two runs differ, or how accurate a prediction was",
        example,
        run_compare,
    )
    parser.add_argument(
        "files",
        type=Path,
        nargs=2,
        metavar="FILE",
        help=(
            "runs to compare: before and after, or measured and simulated; each is a trace file, "
            f"{NEWEST}"
        ),
    )
    add_out(
        parser,
        "FILE",
        f"draw both runs, one above the other ({', '.join(PICTURES)}); .html is interactive",
    )
    add_json(parser)


def run_compare(options: argparse.Namespace) -> int:
    """Compares two trace files; returns the exit code, which does not depend on the result."""
    if options.out is not None:
        check_ending("-o", options.out, PICTURES)
    files = [find_newest(path) for path in options.files]
    comparison = ringsim.compare(*ringsim.load(files))
    if not comparison.predicts:
        same = files[0].name == files[1].name
        first, second = (escape_line(str(file) if same else file.name) for file in files)
        comparison = replace(comparison, called=(first, second))
    tell(options, lambda: comparison, lambda: _differences(comparison))
    if options.out is not None:
        both = [comparison.real, comparison.virtual]
        if options.out.suffix == ".html":
            write_page(both, options.out, comparison.names)
        else:
            write_picture(comparison.plot(), options.out)
    return 0


def _differences(comparison: Comparison) -> dict[str, object]:
    # the keys do not depend on the files, and there are two even if both files are the same
    names = replace(comparison, called=None).names
    runs = zip(names, (comparison.real_steps_s, comparison.virtual_steps_s), strict=True)
    return {
        "steps_s": {name: steps_s.tolist() for name, steps_s in runs},
        "median_error": comparison.median_error,
        "differences": list_rows(comparison.differences),
        "parts": list_rows(comparison.parts),
    }


def add_what_if(verbs: Verbs) -> None:
    """Adds the command."""
    example = "ringsim what-if run.ringtrace --rank 2=0.5 -o predicted.html"
    parser = add_verb(
        verbs, "what-if", "predict how long a recorded run would take with changes", example,
        run_what_if,
    )  # fmt: skip
    parser.add_argument("file", type=Path, metavar="FILE", help=f"trace file, {NEWEST}")
    parser.add_argument(
        "--rank",
        action="append",
        default=[],
        type=pair,
        metavar="RANK=FACTOR",
        help="multiply the computing times of a rank: with 2=0.5, rank 2 computes for half as long",
    )
    parser.add_argument(
        "--link",
        type=pair,
        metavar="US,GB/S",
        help="carry messages on a link with this latency in microseconds and this bandwidth in "
        "1e9 bytes/s",
    )
    parser.add_argument(
        "--sends", choices=("isend",), help="make each blocking send an isend, which does not wait"
    )
    endings = ", ".join(PICTURES)
    add_out(parser, "FILE", f"save the predicted trace (.ringtrace), or draw it ({endings})")
    add_json(parser)


def run_what_if(options: argparse.Namespace) -> int:
    """Predicts a run with changes; returns the exit code."""
    out: Path | None = options.out
    if out is not None:
        check_ending("-o", out, (".ringtrace", *PICTURES))
    trace = ringsim.load(find_newest(options.file))
    ranks = {rank if rank % 1 else int(rank): factor for rank, factor in options.rank}
    link = None if options.link is None else make_link("--link", *options.link)
    predicted = trace.what_if(ranks=ranks, link=link, sends=options.sends)
    tell(
        options,
        predicted.summary,
        lambda: (
            predicted.metadata["prediction"] | {"replay_error": predicted.metadata["replay_error"]}
        ),
    )
    if out is not None:
        (save_trace if out.suffix == ".ringtrace" else _write_one)(predicted, out)
    return 0


def pair(text: str) -> tuple[float, float]:
    """Returns the two numbers of an option; argparse names this function in its errors."""
    first, second = map(float, re.split("[=,]", text))
    return first, second


# the purpose of a figure: the extension of its file, and its style
PURPOSES: dict[str, tuple[str, Style]] = {
    "paper": (".pdf", {"figsize": (3.3, None), "compact": True}),  # the width of a column
    "slide": (".png", {"figsize": (9.6, 5.4), "dpi": 200}),
    "web": (".svg", {}),
}


def add_figures(verbs: Verbs) -> None:
    """Adds the command."""
    example = "ringsim figures run.ringtrace --for paper -o figures"
    parser = add_verb(
        verbs, "figures", "draw a trace file for a paper, a slide or a page", example, run_figures
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="trace file (.ringtrace)")
    parser.add_argument(
        "--for",
        dest="purpose",
        choices=PURPOSES,
        default="web",
        help="paper: PDF, 3.3 inches wide, with the words for its caption in a text file; slide: "
        "PNG, 1920 x 1080; web: SVG (default: web)",
    )
    add_flag(parser, "use a dark background", "--dark")
    add_out(parser, "DIR", "directory for the figures (default: figures)", "figures")


def run_figures(options: argparse.Namespace) -> int:
    """Draws a trace file's ring and timeline, and its bandwidths and waits if it contains any.

    Returns the exit code.
    """
    trace = ringsim.load(options.file)
    ending, look = PURPOSES[options.purpose]
    look = {**look, "theme": "dark" if options.dark else "light"}
    drawn: dict[str, Callable[..., Axes]] = {
        "ring": trace.plot_ring,
        "timeline": trace.plot_timeline,
    }
    if len(trace.messages):
        drawn["bandwidth"] = trace.plot_bandwidth
    if (diagnosis := trace.explain()).edges:
        drawn["waits"] = diagnosis.plot
    for name, plot in drawn.items():
        write_picture(plot(**look), options.out / f"{name}{ending}")
    return 0


def _numbers(totals: Totals) -> dict[str, object]:
    run = totals.run
    about: dict[str, object] = {
        key: run.metadata[key] for key in ("source", "backend", "date") if key in run.metadata
    }
    return {
        **about,
        "world_size": run.world_size,
        "makespan_s": run.makespan_s,
        "messages": totals.num_messages,
        "events": totals.num_events,
        "unmatched": totals.num_unmatched,
        "operations": totals.stats.to_dict(),
    }


def add_explain(verbs: Verbs) -> None:
    """Adds the command."""
    parser = add_verb(
        verbs,
        "explain",
        "explain why a run failed or was slow",
        "ringsim explain run.ringtrace\n  ringsim explain -n 4 -o waits.png train.py --steps 10",
        run_explain,
    )
    add_rank_options(parser)
    add_out(parser, "PNG", "draw a graph of the waiting ranks into this file")
    add_json(parser)
    parser.add_argument(
        "script",
        metavar="FILE|SCRIPT",
        help=f"trace file, {NEWEST}; a script is run first if no trace is newer than the script, "
        "or if you pass arguments or an option that applies to the run, such as -n",
    )
    add_rest(parser)


def runs_script(options: argparse.Namespace) -> bool:
    """Returns whether ``explain`` must run a script instead of reading its newest trace."""
    script = Path(options.script)
    if script.suffix != ".py":
        return False
    asked = (options.ranks, options.limit, options.arguments, options.module)
    if any(asked) or (options.device, options.check) != ("cpu", "basic"):
        return True
    changed_ns = script.stat().st_mtime_ns if script.exists() else 0
    return not any(trace.stat().st_mtime_ns > changed_ns for trace in list_traces(script))


def run_explain(options: argparse.Namespace) -> int:
    """Explains a trace file, or runs a script and explains its run.

    Returns the exit code: 1 if a script failed.
    """
    failed = False
    if runs_script(options):
        try:
            trace = run_script(options)
        except (RingError, Interrupted) as error:
            if error.trace is None:
                raise
            trace, failed = error.trace, True
    elif options.arguments:  # only a script has arguments
        raise ArgumentError(
            f"the trace file must come last, got {' '.join(options.arguments)!r} after it. Put "
            "options before the file."
        )
    else:
        trace = ringsim.load(find_newest(Path(options.script)))
    diagnosis = trace.explain()
    tell(
        options,
        lambda: str(diagnosis),
        lambda: {"failed": failed, "findings": [asdict(finding) for finding in diagnosis.findings]},
    )
    if options.out is not None:
        write_picture(diagnosis.plot(), options.out)
    return 1 if failed else 0


def find_newest(file: Path) -> Path:
    """Returns a script's newest trace in this directory, and prints the trace's name.

    A file that is not a script is returned unchanged.

    Raises:
        ArgumentError: the script has no trace in this directory.
    """
    if file.suffix != ".py":
        return file
    kept = list_traces(file)
    if not kept:
        raise ArgumentError(
            f"this directory contains no trace of {file}, such as {file.stem}.ringtrace. Record "
            f"one: ringsim trace {file}."
        )
    newest = max(kept, key=lambda trace: trace.stat().st_mtime_ns)
    others = f", the newest of {len(kept)}" if len(kept) > 1 else ""
    print(f"reading {escape_line(str(newest))}{others}", file=sys.stderr)
    return newest


def list_traces(script: Path) -> list[Path]:
    """Returns the files in this directory that ``ringsim trace`` names after a script."""
    names = re.compile(re.escape(script.stem) + r"(-\d+)?\.ringtrace")
    return [file for file in Path().glob("*.ringtrace") if names.fullmatch(file.name)]
