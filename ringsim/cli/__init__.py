"""The command line: one verb a job."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import ringsim
from ringsim.cli import demo, doctor, grade, lessons, measure, record, traces, virtual
from ringsim.errors import ArgumentError, Interrupted, RingError, escape

VERBS = (
    demo.add_demo,
    demo.add_generate,
    record.add_trace,
    record.add_merge,
    traces.add_show,
    traces.add_open,
    traces.add_compare,
    traces.add_figures,
    traces.add_explain,
    measure.add_parser,
    virtual.add_parser,
    lessons.add_lessons,
    lessons.add_lab,
    grade.add_parser,
    doctor.add_parser,
)


# What an installation for reading and drawing leaves out: the name it is imported by, and its
# package.
_LEFT_OUT = {"torch": "torch", "cloudpickle": "cloudpickle", "google": "protobuf", "shtab": "shtab"}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors quote what was written without what commands a terminal.

    Those of the verbs are made of it, too.
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
        super().error(escape(message, lines=False))


class _PrintCompletion(argparse.Action):
    """Prints what makes a shell complete our verbs and options, and ends."""

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
        prog="ringsim", description="See how the stages of a pipeline talk."
    )
    parser.add_argument("--version", action="version", version=f"ringsim {ringsim.__version__}")
    how = (
        'print what completes verbs and options in a shell: eval "$(ringsim --print-completion '
        'bash)" in its start-up file'
    )
    parser.add_argument(
        "--print-completion", action=_PrintCompletion, choices=("bash", "zsh", "tcsh"), help=how
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for add_verb in VERBS:
        add_verb(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments, without the program's name; None for those of this process.

    Returns:
        The exit code: 0 done, 1 a run or file failed, 2 a bad argument, 130 interrupted.
    """
    try:
        options, unknown = make_parser().parse_known_args(argv)
        if unknown:
            # the verb's, whose help has what may have been meant
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
            f"{package} must be installed for this, got a Python without it. Install it, see "
            "docs/installing.md.",
            1,
        )
    except KeyboardInterrupt as error:
        return _say(error if isinstance(error, Interrupted) else "interrupted", 130)
    except BrokenPipeError:
        # the reader of our output has left: nothing to say, and nobody to say it to
        sys.stderr.close()
        return 0
    return code


def _say(what: object, code: int) -> int:
    print(f"ringsim: {what}", file=sys.stderr)
    return code
