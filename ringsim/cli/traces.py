"""``ringsim trace``, ``show`` and ``explain``.

Record a script on N ranks; show a trace file; say why a run ended as it did.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import ringsim
from ringsim.cli.verb import (
    Verbs,
    add_json,
    add_out,
    add_verb,
    list_rows,
    make_directory,
    tell,
    tell_written,
    write_picture,
    write_pictures,
)
from ringsim.environment import find_launched
from ringsim.errors import ArgumentError, Interrupted, RankFailed, RingError, StartsRanks, escape
from ringsim.launch.job import CHECKS
from ringsim.launch.progress import Progress
from ringsim.traces.display import Style
from ringsim.traces.files import merge
from ringsim.traces.summary import Totals, count_file, count_trace
from ringsim.view.html import to_html

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ringsim.prediction.comparison import Comparison
    from ringsim.traces.value import Trace


NEWEST: Final = "or a script (.py) for its newest trace in this directory"


def add_trace(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb."""
    parser = add_verb(
        verbs,
        "trace",
        "run a torch.distributed script on N ranks, as torchrun would, and record it",
        "ringsim trace -n 4 -o run.ringtrace train.py --steps 10",
        run_trace,
    )
    add_rank_options(parser)
    add_out(parser, "FILE", "trace file to write (default: SCRIPT.ringtrace)")
    parser.add_argument(
        "-f",
        "--force",
        action="store_true",
        help="replace that file if it exists, instead of taking the next free name",
    )
    parser.add_argument(
        "script",
        metavar="SCRIPT",
        help="the script, or with -m the module, followed by its own arguments",
    )
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS
    )


def add_merge(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb."""
    parser = add_verb(
        verbs,
        "merge",
        "join the parts that the ranks of one run left on several hosts",
        "ringsim merge run.ringtrace node1/run.ringtrace.parts node2/run.ringtrace.parts",
        run_merge,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="trace file to write")
    parser.add_argument("parts", nargs="+", metavar="PARTS", help="a directory of parts")


def run_merge(options: argparse.Namespace) -> int:
    """Joins parts and saves the trace; returns the exit code."""
    trace = merge(options.parts)
    trace.save(options.out)
    print(trace.summary())
    tell_written(options.out)
    return 0


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the ranks that a script runs on."""
    parser.add_argument(
        "-n",
        "--ranks",
        type=int,
        help="number of ranks (default: 2, or those that the script, torchrun, srun or mpirun "
        "starts)",
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        default="cpu",
        help="what the ranks compute on (default: cpu)",
    )
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="end the run after this long"
    )
    parser.add_argument(
        "--check",
        choices=CHECKS,
        default="basic",
        help="which mistakes raise an error; full: also buffers used too early and handles never "
        "waited for (default: basic)",
    )


def run_trace(options: argparse.Namespace) -> int:
    """Records a script and saves its trace; returns the exit code."""
    name = options.script.rpartition(".")[2] if options.module else Path(options.script).stem
    out: Path = options.out or Path(f"{name}.ringtrace")
    # by torchrun, srun or mpirun
    if (launched := find_launched()) is not None and launched.world_size > 1:
        launched.export()  # the script's init_process_group knows torchrun's variables only
        return record_rank(options, out)
    if not options.force and out.exists():
        there, out = out, next_free(out)
        print(f"{escape(str(there))} exists: writing {escape(str(out))} (-f replaces it)")
    try:
        trace = run_script(options, keep_at=out.with_name(out.name + ".parts"))
    except (RingError, Interrupted) as error:
        if error.trace is not None:
            error.trace.save(out)
            print(f"what was recorded until then: {escape(str(out))}")
        raise
    trace.save(out)
    print(trace.summary())
    tell_written(out)
    return 0


def next_free(file: Path) -> Path:
    """Returns the path of a file that does not exist yet, with a number.

    Example:
        >>> next_free(Path("no/such/run.ringtrace"))
        PosixPath('no/such/run-2.ringtrace')
    """
    names = (file.with_name(f"{file.stem}-{number}{file.suffix}") for number in itertools.count(2))
    return next(name for name in names if not name.exists())


def find_newest(file: Path) -> Path:
    """Returns the newest trace in this directory of a script, and prints which; another file as is.

    Raises:
        ArgumentError: the script has no trace here.
    """
    if file.suffix != ".py":
        return file
    kept = list_traces(file)
    if not kept:
        raise ArgumentError(
            f"{file} must have been traced in this directory, got no {file.stem}.ringtrace. "
            f"Record it: ringsim trace {file}."
        )
    newest = max(kept, key=lambda trace: trace.stat().st_mtime_ns)
    others = f", the newest of {len(kept)}" if len(kept) > 1 else ""
    print(f"reading {escape(str(newest), lines=False)}{others}", file=sys.stderr)
    return newest


def list_traces(script: Path) -> list[Path]:
    """Returns the files in this directory that ``ringsim trace`` names after a script."""
    names = re.compile(re.escape(script.stem) + r"(-\d+)?\.ringtrace")
    return [file for file in Path().glob("*.ringtrace") if names.fullmatch(file.name)]


def record_rank(options: argparse.Namespace, out: Path) -> int:
    """Records the rank that this process is: a launcher has started it.

    Rank 0 writes the file, and says so.
    """
    from ringsim.launch.worlds import record_program

    if options.ranks is not None:
        raise ArgumentError(
            f"-n must be left out where a launcher starts the ranks, got {options.ranks}. Leave "
            "it out, or the launcher."
        )
    written = record_program(
        options.script, options.arguments, out, check=options.check, module=options.module
    )
    if written is not None:
        print(ringsim.load(written).summary())
        tell_written(written)
    return 0


def run_script(options: argparse.Namespace, *, keep_at: Path | None = None) -> Trace:
    """Runs ``options.script`` with ``options.arguments`` on ranks.

    Those that ``add_rank_options`` describes.

    Args:
        options: the parsed command line.
        keep_at: directory for the ranks' records, None for one that is removed.

    Raises:
        ArgumentError: there is no such script, or ``keep_at`` exists already.
        RingError: the run failed; ``error.trace`` is what was recorded until then.
    """
    from ringsim.launch.api import make_kind
    from ringsim.launch.job import pack_script
    from ringsim.launch.run import RunOptions
    from ringsim.launch.run import run as run_job

    script = Path(options.script)
    if not options.module and not script.is_file():
        raise ArgumentError(
            f"SCRIPT must be a Python file, got {options.script!r}, which is not there."
        )
    if keep_at is not None and keep_at.exists():
        file = keep_at.with_suffix("")
        raise ArgumentError(
            f"{keep_at} must not exist before the run: an earlier run left it. Look at it with: "
            f"ringsim show {file}. Then remove it."
        )
    ranks = 2 if options.ranks is None else options.ranks
    # torch's own limit: the script sets what it wants
    kind = make_kind(ranks, options.device, 1800, ring=False)
    job = replace(
        pack_script(options.script, options.arguments, seed=0, module=options.module),
        check=options.check,
    )
    try:
        return run_job(job, kind, RunOptions(limit_s=options.limit, keep_at=keep_at))
    except StartsRanks:
        if options.ranks is not None:
            raise
    return run_alone(script, options)


def run_alone(script: Path, options: argparse.Namespace) -> Trace:
    """Runs a script that starts its own ranks: anew, in this process.

    Raises:
        RankFailed: the script raised.
        RingError: nobody was rank 0.
    """
    from ringsim.diagnose.failure import indent, report_exception
    from ringsim.launch.ranks import get_launcher
    from ringsim.launch.worlds import record_program

    get_launcher().close()  # with what the ranks have left
    print(f"{script} starts its own ranks: it runs again, without others", flush=True)
    with tempfile.TemporaryDirectory(prefix="ringsim-") as directory:
        path = Path(directory, "run.ringtrace")
        try:
            record_program(
                options.script, options.arguments, path, check=options.check, module=options.module
            )
        except (Exception, SystemExit) as error:
            report = report_exception(0, error)
            text = f"{script} raised {report.error}: {report.text}\n{indent(report.traceback)}"
            raise RankFailed(text, trace=ringsim.load(path) if path.exists() else None) from error
        if not path.exists():
            raise RingError(
                "a script must make a process group to be recorded, got none with a rank 0 "
                f"({script}). Let it make one."
            )
        return ringsim.load(path)


PICTURES: Final = (".png", ".svg", ".pdf", ".html")
# The method of Trace, by the ending of the path.
EXPORTS: Final = {".pftrace": "to_perfetto", ".json": "to_chrome"}


def add_show(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb."""
    parser = add_verb(
        verbs,
        "show",
        "summarise a trace file, and draw it",
        "ringsim show demo/run.ringtrace -o pictures",
        run_show,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help=f"a trace file, {NEWEST}")
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
        help=f"write it for another tool, which the ending says: {', '.join(EXPORTS)}",
    )


def run_show(options: argparse.Namespace) -> int:
    """Summarises, draws and exports a trace file; returns the exit code."""
    out: Path | None = options.out
    if out is not None and out.suffix and not out.is_dir():
        check_ending(out, "Choose one, or a directory.")
    options.file = find_newest(options.file)
    # a summary alone needs no whole trace
    trace = None if out is None and not options.export else ringsim.load(options.file)
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
        elif out.suffix == ".html":
            write_page([trace], out)
        else:
            write_picture(trace.plot_timeline(), out)
    for path in options.export:
        if path.suffix not in EXPORTS:
            raise ArgumentError(
                f"The ending of --export must be one of {', '.join(EXPORTS)}, got {str(path)!r}. "
                "Choose one."
            )
        getattr(trace, EXPORTS[path.suffix])(path)
        tell_written(path)
    return 0


def _count(file: Path, whole_table: bool) -> Totals:
    """Counts a trace file, and says on a terminal how far that is where it takes long."""
    lines: list[Progress] = []

    def on_rank(rank: int, world_size: int) -> None:
        lines[:] = lines or [Progress(world_size)]
        lines[0].update(rank + 1, lambda: "being read")

    try:
        return count_file(file, whole_table=whole_table, on_rank=on_rank)
    finally:
        for line in lines:
            line.clear()


def check_ending(out: Path, hint: str) -> None:
    """Raises ArgumentError unless a path ends as a picture or page does."""
    if out.suffix not in PICTURES:
        raise ArgumentError(
            f"The ending of -o must be one of {', '.join(PICTURES)}, got {str(out)!r}. {hint}"
        )


def write_page(traces: Sequence[Trace], file: Path, names: Sequence[str] = ()) -> None:
    """Writes traces as an interactive page, and says where it is.

    Its directory is created if necessary.
    """
    make_directory(file.parent)
    to_html(traces, file, names)
    tell_written(file)


def add_open(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb."""
    parser = add_verb(
        verbs,
        "open",
        "show trace files in the browser: zoom, hover, search, play",
        "ringsim open run.ringtrace",
        run_open,
    )
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help=f"a trace file, {NEWEST}; or several, on one axis",
    )
    add_out(parser, "FILE", "where to write the page (default: FILE.html)")
    parser.add_argument("--no-browser", action="store_true", help="only write the page")


def run_open(options: argparse.Namespace) -> int:
    """Writes the page of trace files and opens it; returns the exit code."""
    files = [find_newest(path) for path in options.files]
    page = options.out or files[0].with_suffix(".html")
    names = [path.name for path in files] if len(files) > 1 else []
    write_page([ringsim.load(path) for path in files], page, names)
    if not options.no_browser and not webbrowser.open(page.resolve().as_uri()):
        print("no browser was found: open that file in one")
    return 0


def add_compare(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb."""
    example = "ringsim compare before.ringtrace after.ringtrace -o both.html"
    parser = add_verb(
        verbs,
        "compare",
        "say where two runs differ, or how far off a prediction was",
        example,
        run_compare,
    )
    parser.add_argument(
        "files",
        type=Path,
        nargs=2,
        metavar="FILE",
        help=f"before and after, measured and simulated: a trace file, {NEWEST}",
    )
    add_out(
        parser,
        "FILE",
        f"draw one over the other ({', '.join(PICTURES)}); .html has both on one axis",
    )
    add_json(parser)


def run_compare(options: argparse.Namespace) -> int:
    """Compares two trace files; returns the exit code, which does not depend on what differs."""
    if options.out is not None:
        check_ending(options.out, "Choose one.")
    files = [find_newest(path) for path in options.files]
    comparison = ringsim.compare(*ringsim.load(files))
    if not comparison.predicts:
        same = files[0].name == files[1].name
        first, second = (escape(str(file) if same else file.name, lines=False) for file in files)
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
    # the same for all files, and two even if it is one file
    names = replace(comparison, called=None).names
    runs = zip(names, (comparison.real_steps_s, comparison.virtual_steps_s), strict=True)
    return {
        "steps_s": {name: steps_s.tolist() for name, steps_s in runs},
        "median_error": comparison.median_error,
        "differences": list_rows(comparison.differences),
        "parts": list_rows(comparison.parts),
    }


# For what a figure is: the ending of its file, and how it is drawn.
PURPOSES: Final[dict[str, tuple[str, Style]]] = {
    "paper": (".pdf", {"figsize": (3.3, None), "compact": True}),  # the width of a column
    "slide": (".png", {"figsize": (9.6, 5.4), "dpi": 200}),
    "web": (".svg", {}),
}


def add_figures(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb."""
    example = "ringsim figures run.ringtrace --for paper -o figures"
    parser = add_verb(
        verbs, "figures", "draw a trace file for a paper, a slide or a page", example, run_figures
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a trace file (.ringtrace)")
    parser.add_argument(
        "--for",
        dest="purpose",
        choices=PURPOSES,
        default="web",
        help="paper: PDF, 3.3 inches wide, two sizes of letters, no title; slide: PNG, "
        "1920 x 1080; web: SVG (default)",
    )
    parser.add_argument("--dark", action="store_true", help="light on dark")
    add_out(parser, "DIR", "the directory (default: figures)", "figures")


def run_figures(options: argparse.Namespace) -> int:
    """Draws a trace file's ring and timeline, and what else it has to show.

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


def add_explain(verbs: Verbs[argparse.ArgumentParser]) -> None:
    """Adds the verb."""
    parser = add_verb(
        verbs,
        "explain",
        "say why a run ended as it did, or what made it slow",
        "ringsim explain run.ringtrace\n  ringsim explain -n 4 -o waits.png train.py --steps 10",
        run_explain,
    )
    add_rank_options(parser)
    add_out(parser, "PNG", "draw who waits for whom into this file")
    add_json(parser)
    parser.add_argument(
        "script",
        metavar="FILE|SCRIPT",
        help="a trace file, or a script (.py). Of a script, the newest trace in this directory is "
        "read if it is newer than the script. "
        "If there is none, or if you give -n, another option of a run or arguments, the script "
        "is run first.",
    )
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS
    )


def runs_script(options: argparse.Namespace) -> bool:
    """Returns whether ``explain`` is to run a script, not to read its newest trace."""
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
    elif options.arguments:  # which are a script's
        raise ArgumentError(
            f"A trace file must come last, got {' '.join(options.arguments)!r} after it. Put "
            "options before it."
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
