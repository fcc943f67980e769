"""The notebook magic: after ``%load_ext ringsim``, ``%%ring -n 4`` runs a cell on four ranks.

The ranks import this module for ``run_on_rank``. They need neither IPython nor the launcher, so the
module imports both only on use.
"""

from __future__ import annotations

import argparse
import dis
import shlex
import traceback
from types import CodeType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import ringsim
from ringsim.errors import ArgumentError
from ringsim.launch.namespace import run_source
from ringsim.ring.packing import dumps

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ringsim.launch.job import Job

_USAGE: Final = "%%ring [-n RANKS] [--limit SECONDS] [-o NAME]"
# Names that have their own value on a rank, or no value that could be sent.
_NOT_SENT: Final = {"ring", "ringsim", "_", "__", "___", "In", "Out", "get_ipython", "exit", "quit"}
# the last name exists since Python 3.12
_LOOKUPS: Final = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Registers ``%%ring``; IPython calls this function for ``%load_ext ringsim``.

    Args:
        ipython: the notebook's shell.

    Example:
        >>> from IPython.testing.globalipapp import start_ipython
        >>> shell = start_ipython()
        >>> load_ipython_extension(shell)
        >>> "ring" in shell.magics_manager.magics["cell"]
        True
    """

    def ring(line: str, cell: str) -> ringsim.Trace:
        """Runs the cell on every rank.

        Usage: ``%%ring [-n RANKS] [--limit SECONDS] [-o NAME]``

        Shows each rank's output, tagged with the rank, and then the trace.

        The cell can use the notebook's variables, with their current values, and ``ring``, which is
        this rank's place in the ring. The cell's assignments stay on the ranks. The trace's
        ``results`` contain the value of the last line on each rank. The trace is also stored in the
        variable NAME (default: ``trace``).
        """
        return _run_cell(ipython, line, cell)

    # IPython types it as a method
    ipython.register_magic_function(ring, "cell")  # type: ignore[arg-type]


def _run_cell(shell: InteractiveShell, line: str, cell: str) -> ringsim.Trace:
    from ringsim.launch.api import make_kind
    from ringsim.launch.recorded_cells import is_replaying, name_run, replay
    from ringsim.launch.run import RunOptions, run

    options = _make_parser().parse_args(shlex.split(line))
    if not options.out.isidentifier():
        raise _usage_error(f"-o must be the name of a variable, got {options.out!r}")
    if is_replaying():
        shell.user_ns[options.out] = shown = replay(name_run(cell, options.ranks))
        return shown
    kind = make_kind(options.ranks, "cpu", 30, ring=True)
    if options.limit is not None and not options.limit > 0:
        raise ArgumentError(
            f"--limit must be a positive number of seconds, got {options.limit}. Use --limit 30, "
            "for example."
        )
    # include the %%ring line, so that tracebacks number lines like the notebook
    source = f"\n{cell}"
    filename = shell.compile.cache(source)  # so that tracebacks find the lines
    used = names_used(_compile(source, filename)) - _NOT_SENT - {options.out}
    variables = {name: shell.user_ns[name] for name in used if name in shell.user_ns}
    job = _pack(source, filename, variables)
    trace = run(job, kind, RunOptions(limit_s=options.limit, show_hidden=True))
    shell.user_ns[options.out] = trace
    return trace


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _usage_error(message)


def _make_parser() -> _Parser:
    parser = _Parser(prog="%%ring", add_help=False)
    parser.add_argument("-n", "--ranks", type=int, default=4)
    parser.add_argument("--limit", type=float)
    parser.add_argument("-o", "--out", default="trace")
    return parser


def _usage_error(message: str) -> Exception:
    from IPython.core.error import UsageError

    return UsageError(f"{message}. Usage: {_USAGE}")


def _compile(source: str, filename: str) -> CodeType:
    """Compiles the cell.

    Raises:
        ArgumentError: the cell is not valid Python (IPython would show a SyntaxError with all
            internal frames).
    """
    try:
        return compile(source, filename, "exec")
    except SyntaxError as error:
        raise ArgumentError(
            "the cell is not valid Python:\n"
            + "".join(traceback.format_exception_only(error)).rstrip()
        ) from None


def _pack(source: str, filename: str, variables: dict[str, Any]) -> Job:
    """Packs the cell and its variables.

    Raises:
        ArgumentError: a variable cannot be sent to the ranks.
    """
    from ringsim.launch.job import pack_call

    try:
        return pack_call(run_on_rank, (source, filename), variables, seed=0)
    except ArgumentError:
        for name, value in variables.items():
            try:
                dumps(value)
            except Exception:  # pickling runs code of the value's class, which may raise anything
                kind = f"{type(value).__module__}.{type(value).__qualname__}"
                raise ArgumentError(
                    f"the variable {name!r} cannot be sent to the ranks, because a {kind} cannot "
                    "be pickled. Create it inside the cell."
                ) from None
        raise


def names_used(code: CodeType) -> set[str]:
    """Returns the global names that a piece of code, or any function defined in it, looks up.

    Example:
        >>> sorted(names_used(compile("print((lambda x: x.data + shift)(part))", "<cell>", "exec")))
        ['part', 'print', 'shift']
    """
    names = {str(each.argval) for each in dis.get_instructions(code) if each.opname in _LOOKUPS}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_used(constant)
    return names


def run_on_rank(source: str, filename: str, /, **variables: Any) -> Any:
    """Runs a cell's code on this rank and returns the value of the last line.

    The cell can use ``ringsim``, and also ``ring``, which is this rank's place in its ring.

    Args:
        source: the text of the cell.
        filename: the file name for tracebacks.
        variables: the notebook's variables that the cell uses.

    Returns:
        The value of the last statement, or the value's repr if it cannot be pickled; None if the
        last statement is not an expression.

    Example:
        >>> def worker():
        ...     return run_on_rank("double = 2 * number; double + ring.rank", "<cell>", number=4)
        >>> ringsim.trace(worker, world_size=2).results
        [8, 9]
    """
    space = {
        "__name__": "__main__",
        "ring": ringsim.current_ring(),
        "ringsim": ringsim,
        **variables,
    }
    return run_source(source, filename, space)
