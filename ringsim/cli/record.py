"""``ringsim trace`` and ``merge``: record a script on N ranks, and join recorded parts."""

from __future__ import annotations

import argparse
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import ringsim
from ringsim.cli.verb import (
    Verbs,
    add_flag,
    add_module,
    add_out,
    add_ranks,
    add_rest,
    add_verb,
    keep_what_was_recorded,
    save_trace,
    tell_written,
)
from ringsim.environment import find_launched
from ringsim.errors import ArgumentError, RankFailed, RingError, StartsRanks, escape
from ringsim.launch.job import CHECKS
from ringsim.traces.files import merge
from ringsim.traces.sources import attach_sources

if TYPE_CHECKING:
    from ringsim.traces.value import Trace


def add_trace(verbs: Verbs) -> None:
    """Adds the command."""
    parser = add_verb(
        verbs,
        "trace",
        "run a torch.distributed script on N ranks, like torchrun, and record it",
        "ringsim trace -n 4 -o run.ringtrace train.py --steps 10",
        run_trace,
    )
    add_rank_options(parser)
    add_out(parser, "FILE", "trace file to write (default: SCRIPT.ringtrace)")
    words = "overwrite an existing trace file (default: use the next free name)"
    add_flag(parser, words, "-f", "--force")
    words = "also save the source code of your files, which the page of the trace then shows"
    add_flag(parser, words, "--source")
    words = "show the run while it runs, in your browser or as one line per rank"
    add_flag(parser, words, "--live")
    parser.add_argument(
        "script",
        metavar="SCRIPT",
        help="script (or module, with -m), followed by its arguments",
    )
    add_rest(parser)


def add_merge(verbs: Verbs) -> None:
    """Adds the command."""
    parser = add_verb(
        verbs,
        "merge",
        "join the parts that a run's ranks wrote on several hosts",
        "ringsim merge run.ringtrace node1/run.ringtrace.parts node2/run.ringtrace.parts",
        run_merge,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="trace file to write")
    parser.add_argument("parts", nargs="+", metavar="PARTS", help="directory that contains parts")


def run_merge(options: argparse.Namespace) -> int:
    """Joins the parts and saves the trace; returns the exit code."""
    trace = merge(options.parts)
    print(trace.summary())
    save_trace(trace, options.out)
    return 0


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the ranks on which a script runs."""
    add_ranks(
        parser,
        "number of ranks (default: 2, or as many as the script, torchrun, srun or mpirun starts)",
    )
    add_module(parser)
    parser.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        default="cpu",
        help="device of the ranks (default: cpu)",
    )
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="stop the run after this time"
    )
    parser.add_argument(
        "--check",
        choices=CHECKS,
        default="basic",
        help=(
            "set of mistakes that raise an error; full adds buffers used too early and handles "
            "never waited for (default: basic)"
        ),
    )


def run_trace(options: argparse.Namespace) -> int:
    """Records a script and saves its trace; returns the exit code."""
    name = options.script.rpartition(".")[2] if options.module else Path(options.script).stem
    out: Path = options.out or Path(f"{name}.ringtrace")
    # launched by torchrun, srun or mpirun
    if (launched := find_launched()) is not None and launched.world_size > 1:
        launched.export()  # the script's init_process_group knows torchrun's variables only
        return record_rank(options, out)
    if not options.force and out.exists():
        there, out = out, next_free(out)
        print(
            f"{escape(str(there))} exists, writing {escape(str(out))} instead (use -f to overwrite)"
        )
    with keep_what_was_recorded(out, source=options.source):
        parts = out.with_name(out.name + ".parts")
        trace = run_script(options, keep_at=parts, live=options.live)
    trace.save(out, source=options.source)
    print(trace.summary())
    tell_written(out)
    return 0


def next_free(file: Path) -> Path:
    """Returns the first numbered path that does not exist yet.

    Example:
        >>> next_free(Path("no/such/run.ringtrace"))
        PosixPath('no/such/run-2.ringtrace')
    """
    names = (file.with_name(f"{file.stem}-{number}{file.suffix}") for number in itertools.count(2))
    return next(name for name in names if not name.exists())


def record_rank(options: argparse.Namespace, out: Path) -> int:
    """Records this process as one rank of a launcher's job.

    Rank 0 writes the file, and prints its path.
    """
    from ringsim.launch.worlds import record_program

    if options.ranks is not None:
        raise ArgumentError(
            f"-n cannot be used if a launcher starts the ranks, got {options.ranks}. Remove -n, or "
            "run without the launcher."
        )
    if options.live:
        raise ArgumentError(
            "--live cannot be used if a launcher starts the ranks. Remove it, and use ringsim "
            "watch in another terminal."
        )
    written = record_program(
        options.script, options.arguments, out, check=options.check, module=options.module
    )
    if written is not None:
        trace = ringsim.load(written)
        if options.source:
            attach_sources(trace).save(written, source=True)
        print(trace.summary())
        tell_written(written)
    return 0


def run_script(
    options: argparse.Namespace, *, keep_at: Path | None = None, live: bool = False
) -> Trace:
    """Runs ``options.script`` on ranks, with ``options.arguments``.

    Args:
        options: the parsed command line, with the options of ``add_rank_options``.
        keep_at: the directory for the ranks' records, or None for a temporary one.
        live: whether to show the run while it runs.

    Raises:
        ArgumentError: there is no such script, or ``keep_at`` already exists.
        RingError: the run failed; ``error.trace`` is the trace up to the failure.
    """
    from ringsim.launch.api import make_kind
    from ringsim.launch.job import pack_script
    from ringsim.launch.run import RunOptions, run

    script = Path(options.script)
    if not options.module and not script.is_file():
        raise ArgumentError(
            f"no such script: {options.script!r}. Pass the path of a Python file, or -m MODULE."
        )
    if keep_at is not None and keep_at.exists():
        file = keep_at.with_suffix("")
        raise ArgumentError(
            f"{keep_at} already exists, because a previous run left it behind. To see that run, "
            f"use: ringsim show {file}. Then remove the directory."
        )
    ranks = 2 if options.ranks is None else options.ranks
    # torch's default timeout; the script may set its own
    kind = make_kind(ranks, options.device, 1800, ring=False)
    job = replace(
        pack_script(options.script, options.arguments, module=options.module),
        check=options.check,
    )
    try:
        return run(job, kind, RunOptions(limit_s=options.limit, keep_at=keep_at, live=live))
    except StartsRanks:
        if options.ranks is not None:
            raise
    return run_alone(script, options)


def run_alone(script: Path, options: argparse.Namespace) -> Trace:
    """Runs a script in this process, because the script starts its own ranks.

    Raises:
        RankFailed: the script raised an error.
        RingError: no process was rank 0.
    """
    from ringsim.diagnose.failure import indent, report_exception
    from ringsim.launch.ranks import get_launcher
    from ringsim.launch.worlds import record_program

    get_launcher().close()  # with everything that the first ranks have left
    print(f"{script} starts its own ranks: running it again in a single process", flush=True)
    with tempfile.TemporaryDirectory(prefix="ringsim-") as directory:
        path = Path(directory, "run.ringtrace")
        try:
            record_program(
                options.script, options.arguments, path, check=options.check, module=options.module
            )
        except (Exception, SystemExit) as error:
            report = report_exception(0, error)
            text = f"{script} raised {report.error}: {report.text}\n{indent(report.traceback)}"
            trace = attach_sources(ringsim.load(path)) if path.exists() else None
            raise RankFailed(text, trace=trace) from error
        if not path.exists():
            raise RingError(
                f"nothing to record: {script} created no process group that contains rank 0. Call "
                "init_process_group in the script."
            )
        return attach_sources(ringsim.load(path))
