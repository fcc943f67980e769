"""The command line, with one function per command."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import ringsim
from ringsim.cli import demo, doctor, grade, lessons, measure, record, traces, virtual, watch
from ringsim.errors import ArgumentError, Interrupted, RingError, escape_line

VERBS = (
    demo.add_demo,
    demo.add_generate,
    record.add_trace,
    watch.add_parser,
    record.add_merge,
    traces.add_show,
    traces.add_open,
    traces.add_compare,
    traces.add_figures,
    traces.add_explain,
    traces.add_what_if,
    measure.add_parser,
    virtual.add_parser,
    lessons.add_lessons,
    lessons.add_lab,
    grade.add_parser,
    doctor.add_parser,
)


# The modules that an installation for reading and drawing leaves out, and their packages.
_LEFT_OUT = {"torch": "torch", "cloudpickle": "cloudpickle", "google": "protobuf", "shtab": "shtab"}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors quote arguments without terminal control characters.

    The commands' parsers are also instances of this class.
    """

    def error(self, message: str) -> NoReturn:
        wrong = re.search(
            r"invalid choice: '(.*)' \(choose from (.*)\)|unrecognized arguments: ([^\s=]+)",
            message,
        )
        if wrong:
            choice, choices, option = wrong.groups()
            known = (
                re.findall(r"\w+", choices)
                if choices
                else re.findall(r"--[\w-]+", self.format_help())
            )
            near = difflib.get_close_matches(choice or option, known, n=1)
            message += f". Did you mean {near[0]}?" if near else ""
        super().error(escape_line(message))


class _PrintCompletion(argparse.Action):
    """Prints a shell script that completes commands and options, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: object,
        shell: Any,
        option_string: str | None = None,
    ) -> None:
        import shtab

        print(shtab.complete(parser, shell))
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    parser: argparse.ArgumentParser = _Parser(
        prog="ringsim",
        description="Record, simulate and draw the messages between torch.distributed ranks.",
    )
    parser.add_argument("--version", action="version", version=f"ringsim {ringsim.__version__}")
    how = (
        "print a script that completes commands and options; for bash, add this line to ~/.bashrc: "
        'eval "$(ringsim --print-completion bash)"'
    )
    parser.add_argument(
        "--print-completion", action=_PrintCompletion, choices=("bash", "zsh", "tcsh"), help=how
    )
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add_verb in VERBS:
        add_verb(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments, without the program's name, or None for the arguments of this process.

    Returns:
        The exit code: 0 for success, 1 if a run or file failed, 2 for a bad argument, 130 if
        interrupted.
    """
    try:
        options, unknown = make_parser().parse_known_args(argv)
        if unknown:
            # the command's parser, whose help lists the options that the user may have meant
            options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        code: int = options.run(options)
    except ArgumentError as error:
        return _say(error, 2)
    except RingError as error:
        return _say(error, 1)
    except ModuleNotFoundError as error:
        package = _LEFT_OUT.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        return _say(
            f"this command needs {package}, which is not installed. Install it: see "
            "docs/how-to/install.md.",
            1,
        )
    except KeyboardInterrupt as error:
        return _say(error if isinstance(error, Interrupted) else "interrupted", 130)
    except BrokenPipeError:
        # the reader of our output has gone, so a message would reach no one
        sys.stderr.close()
        return 0
    return code


def _say(message: object, code: int) -> int:
    print(f"ringsim: {message}", file=sys.stderr)
    return code
