"""The notebook magic: ``%load_ext ringsim``, then ``%%ring -n 4`` runs a cell on every rank."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, magics_class

import ringsim
from ringsim.errors import ArgumentError
from ringsim.launch.api import make_kind
from ringsim.launch.job import pack_call
from ringsim.launch.run import RunOptions, run


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(f"%%ring: {message}")


def _make_parser() -> _Parser:
    parser = _Parser(prog="%%ring", add_help=False)
    parser.add_argument("-n", "--ranks", type=int, default=4)
    parser.add_argument("--limit", type=float)
    parser.add_argument("-o", "--out", default="trace")
    return parser


def run_cell(source: str, filename: str, names: dict[str, Any]) -> None:
    """Runs the text of a cell on one rank.

    Args:
        source: the cell.
        filename: what tracebacks call it.
        names: variables of the notebook that the cell uses.
    """
    space = {"__name__": "__main__", "ring": ringsim.current_ring(), "ringsim": ringsim, **names}
    exec(compile(source, filename, "exec"), space)


@magics_class
class RingMagics(Magics):
    """The magics of ringsim."""

    shell: InteractiveShell

    @cell_magic
    def ring(self, line: str, cell: str) -> ringsim.Trace:
        """Runs the cell on every rank, shows what each prints, tagged, and then the trace.

        ``%%ring [-n RANKS] [--limit SECONDS] [-o NAME]``

        The cell sees the notebook's variables that it names, as they are now, and ``ring``, this rank's place in the ring. What it assigns
        stays on the ranks. The trace is also kept in the variable NAME (default: ``trace``).
        """
        options = _make_parser().parse_args(shlex.split(line))
        filename = self.shell.compile.cache(cell)  # so that tracebacks show the cell's lines
        code = compile(cell, filename, "exec")
        names = {name: self.shell.user_ns[name] for name in _names_used(code) if name in self.shell.user_ns}
        for own in ("ring", "ringsim", options.out, "_", "__", "___", "In", "Out", "get_ipython", "exit", "quit"):
            names.pop(own, None)
        kind = make_kind(options.ranks, "cpu", 30, ring=True)
        if options.limit is not None and options.limit <= 0:
            raise ArgumentError(f"--limit must be a positive number of seconds, got {options.limit}.")
        job = pack_call(run_cell, (cell, filename, names), {}, seed=0)
        trace = run(job, kind, RunOptions(limit_s=options.limit, show_hidden=True))
        self.shell.user_ns[options.out] = trace
        return trace


def _names_used(code: Any) -> set[str]:
    """Returns the global names that a piece of code, and the functions defined in it, look up."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            names |= _names_used(constant)
    return names


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Registers the magics; IPython calls it for ``%load_ext ringsim``.

    Args:
        shell: the notebook's shell.

    Example:
        >>> from IPython.testing.globalipapp import start_ipython
        >>> shell = start_ipython()
        >>> load_ipython_extension(shell)
        >>> "ring" in shell.magics_manager.magics["cell"]
        True
    """
    shell.register_magics(RingMagics)
