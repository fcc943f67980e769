"""The notebook magic: after ``%load_ext ringsim``, ``%%ring -n 4`` runs a cell on four ranks.

With ``--keep``, the ranks stay for the next cells, see ``_Kept``.

The modules of IPython and of the launcher are imported only on use.
"""

from __future__ import annotations

import argparse
import dis
import re
import shlex
import sys
import traceback
from collections.abc import Mapping, Set
from contextlib import suppress
from types import CodeType
from typing import TYPE_CHECKING, Any, NoReturn

import ringsim
from ringsim.errors import ArgumentError, check_limit
from ringsim.launch.namespace import find_size, run_source

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ringsim.launch.sessions import Session

_USAGE = (
    "%%ring [-n RANKS] [--keep] [--sim] [0,1] [--live] [--limit SECONDS] [-o NAME], "
    "or %ring [pull NAME | push NAME ... | stop]"
)
_NO_RANKS = (
    "no ranks are kept; kept ranks end after an hour without a cell. Start some with "
    "%%ring -n 4 --keep."
)
_NUM_RANKS = 4
_LINK = ringsim.Link(alpha_s=10e-6, beta_s_per_byte=1e-10)  # of simulated ranks
_RANK = r"ranks\[(\d+)\]\.\w*$"
# Names that have their own value on a rank, or no value that could be sent.
_NOT_SENT = {"ring", "ringsim", "_", "__", "___", "In", "Out", "get_ipython", "exit", "quit"}
# the last name exists since Python 3.12
_LOOKUPS = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}
_STORES = {"STORE_NAME", "STORE_GLOBAL"}


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Registers ``%%ring`` and ``%ring``; IPython calls this function for ``%load_ext ringsim``.

    Args:
        ipython: the notebook's shell.

    Example:
        >>> from IPython.testing.globalipapp import start_ipython
        >>> shell = start_ipython()
        >>> load_ipython_extension(shell)
        >>> "ring" in shell.magics_manager.magics["cell"]
        True
    """
    kept = _Kept(ipython)

    def ring(line: str, cell: str | None = None) -> Any:
        """Runs the cell on every rank.

        Usage: ``%%ring [-n RANKS] [--keep] [--sim] [0,1] [--live] [--limit SECONDS] [-o NAME]``

        Shows each rank's output, tagged with the rank, and then the trace.

        The cell can use the notebook's variables, with their current values, and ``ring``, which is
        this rank's place in the ring. The cell's assignments stay on the ranks. The trace's
        ``results`` contain the value of the last line on each rank. The trace is also stored in the
        variable NAME (default: ``trace``).

        Without ``--keep``, the ranks end with the cell. With ``--keep``, they stay for the next
        cells with ``--keep``, which find all variables. ``%%ring 0,1`` runs the cell on some of
        these ranks. They end with ``%ring stop``, with the kernel, or after an hour without a cell.
        With ``--keep --sim``, these ranks are simulated, and messages take 10 us and 0.1 ns per
        byte. To choose another link, use ``ringsim.session``.

        With ``--live``, the ranks are shown while they run.

        * ``%ring`` lists the ranks, the number of calls, and the memory that each rank uses.
        * ``%ring pull loss`` returns a variable's value on each rank.
        * ``%ring push batch`` sends variables of the notebook to all ranks.
        * ``%ring stop`` ends the ranks.

        In the notebook, the variable ``ranks`` is their session: ``ranks[2].loss`` is a variable
        of rank 2.
        """
        return kept.do(line) if cell is None else _run_cell(kept, line, cell)

    # IPython types it as a method
    ipython.register_magic_function(ring, "line_cell")  # type: ignore[arg-type]
    ipython.set_hook("complete_command", kept.complete, re_key=f".*{_RANK}")


def _run_cell(kept: _Kept, line: str, cell: str) -> ringsim.Trace:
    from ringsim.launch.api import make_kind
    from ringsim.launch.job import pack_call
    from ringsim.launch.recorded_cells import is_replaying, name_run, replay
    from ringsim.launch.run import RunOptions, run

    options = _make_parser().parse_args(shlex.split(line))
    if not options.out.isidentifier():
        raise _usage_error(f"-o must be the name of a variable, got {options.out!r}")
    num_ranks = _NUM_RANKS if options.ranks is None else options.ranks
    variables = kept.shell.user_ns
    if is_replaying():
        name, stays = name_run(cell, num_ranks), options.keep or options.only
        variables[options.out] = shown = replay(name, variables if stays else {})
        return shown
    kind = make_kind(num_ranks, "cpu", 30, ring=True)
    if options.limit is not None:
        check_limit("--limit", options.limit)
    if options.sim and not options.keep:
        raise _usage_error("--sim needs --keep")
    session = kept.get(options) if options.keep or options.only else None
    # include the %%ring line, so that tracebacks number lines like the notebook
    source = f"\n{cell}"
    # so that tracebacks find the lines, and name the cell
    filename = kept.shell.compile.cache(source, len(variables["In"]) - 1)
    code = _compile(source, filename)
    names = (_find_names(code, _LOOKUPS) - _NOT_SENT - {options.out}) & variables.keys()
    sent = {name: variables[name] for name in names}
    how: dict[str, Any] = {"limit_s": options.limit, "live": options.live}
    try:
        if session is None:
            space = {"__name__": "__main__", **sent}
            job = pack_call(run_source, (source, filename, space), {}, seed=0)
            trace = run(job, kind, RunOptions(show_hidden=True, **how))
        else:
            kept.drop_old(sent, _find_names(code, _STORES))
            trace = session.run_cell(source, filename, sent, ranks=options.only, **how)
    except ArgumentError:
        _refuse_unsendable(sent)
        raise
    variables[options.out] = trace
    return trace


class _Kept:
    """The ranks that a notebook keeps, which are a session.

    If the notebook and a cell on the ranks assign the same variable, the later assignment counts::

        notebook: x = 1
        %%ring:   x = ring.rank         x is 1 in the notebook: noted as old
        %%ring:   print(x)              x is still old, and not sent: prints the rank
        notebook: x = 2
        %%ring:   print(x)              prints 2

    Attributes:
        shell: the notebook's shell.
    """

    _session: Session | None = None

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self._old: dict[str, Any] = {}  # the notebook's values at the ranks' last assignments

    def get(self, options: argparse.Namespace) -> Session:
        """Returns the session for a cell, and starts it if necessary."""
        session = self._session
        if session is None or not session.is_open:
            if options.ranks is None and (session is not None or not options.keep):
                raise ArgumentError(_NO_RANKS)
            link = _LINK if options.sim else None
            session = ringsim.session(world_size=options.ranks or _NUM_RANKS, link=link)
            self._session = self.shell.user_ns["ranks"] = session
            self._old = {"ranks": session}
        if options.ranks not in (None, len(session)):
            raise ArgumentError(
                f"this notebook keeps {len(session)} ranks, and -n asks for {options.ranks}. "
                "Leave -n out, or end the ranks with %ring stop."
            )
        if options.sim and not session.is_simulated:
            raise ArgumentError(
                "this notebook keeps real ranks. Leave --sim out, or end the ranks with %ring stop."
            )
        try:
            _ = session[options.only or ()]
        except IndexError as error:
            raise _usage_error(f"{error}"[:-1]) from None
        return session

    def drop_old(self, variables: dict[str, Any], assigned: set[str]) -> None:
        """Removes old values from a cell's variables, and notes those that the cell makes old."""
        space = self.shell.user_ns
        for name in variables.keys() & self._old.keys():
            if variables[name] is self._old[name]:
                del variables[name]
        self._old |= {name: space[name] for name in assigned & space.keys()}

    def complete(self, _shell: InteractiveShell, event: Any) -> list[str]:
        """Returns the variables of a rank, for completion after ``ranks[2].``."""
        rank = re.findall(_RANK, event.text_until_cursor)[0]
        with suppress(Exception):  # the ranks may have ended
            return [f".{name}" for name in dir(self.shell.user_ns["ranks"][int(rank)])]
        return []

    def do(self, line: str) -> Any:
        """Carries out ``%ring``, ``%ring pull``, ``%ring push`` or ``%ring stop``."""
        session, space = self._session, self.shell.user_ns
        if session is None or not session.is_open:
            if line.strip() not in ("", "stop"):
                raise ArgumentError(_NO_RANKS)
            sys.stdout.write(f"{_NO_RANKS}\n")
            return None
        match line.split():
            case []:
                sys.stdout.write(f"{session.describe()}\n")
            case ["stop"]:
                session.close()
                self._session = None
            case ["pull", name]:
                try:
                    return session.pull(name)
                except AttributeError as error:
                    raise ArgumentError(
                        f"{error}. To look at another rank, use ranks[2].{name}."
                    ) from None
            case ["push", *names]:
                if missing := set(names) - space.keys():
                    raise _usage_error(f"the notebook has no variable {missing.pop()!r}")
                variables = {name: space[name] for name in names}
                session.push(**variables)
                self._old |= variables
            case _:
                raise _usage_error(f"%ring cannot {line!r}")
        return None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _usage_error(message)


def _make_parser() -> _Parser:
    parser = _Parser(prog="%%ring", add_help=False)
    parser.add_argument("only", nargs="?", type=_read_ranks)
    parser.add_argument("-n", "--ranks", type=int)
    for flag in ("--keep", "--sim", "--live"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--limit", type=float)
    parser.add_argument("-o", "--out", default="trace")
    return parser


def _read_ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise _usage_error(f"the ranks must be numbers such as 0,1, got {text!r}") from None


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


def _refuse_unsendable(variables: Mapping[str, Any]) -> None:
    """Raises ArgumentError if a variable cannot be sent to the ranks."""
    for name, value in variables.items():
        if find_size(value) is None:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise ArgumentError(
                f"the variable {name!r} cannot be sent to the ranks, because a {kind} cannot be "
                "pickled. Create it inside the cell."
            ) from None


def _find_names(code: CodeType, instructions: Set[str]) -> set[str]:
    r"""Returns the global names in these instructions of a piece of code and its functions.

    Example:
        >>> code = compile("print((lambda x: x.data + shift)(part))", "<cell>", "exec")
        >>> sorted(_find_names(code, _LOOKUPS))
        ['part', 'print', 'shift']
        >>> sorted(_find_names(compile("import os\nclass A: x = 1", "", "exec"), _STORES))
        ['A', 'os']
    """
    names = {each.argval for each in dis.get_instructions(code) if each.opname in instructions}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            # there, this one assigns attributes of classes
            names |= _find_names(constant, instructions - {"STORE_NAME"})
    return names
