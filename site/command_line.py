"""Writes docs/reference/command-line.md from the parser. Run ``python site/command_line.py``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from ringsim.cli import make_parser

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "command-line.md"
HEAD = """# Command line

The `--help` option of each command prints the same information. To complete commands and options in
your shell, add `eval "$(ringsim --print-completion bash)"` (or `zsh`, `tcsh`) to its start-up file.
"""


def find_commands() -> dict[str, argparse.ArgumentParser]:
    """Returns the parsers of all commands, by name."""
    (commands,) = (
        action
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return dict(commands.choices)


def describe_value(action: argparse.Action) -> str:
    """Returns the placeholder for an argument's value, or "" if it takes none."""
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


def describe_argument(action: argparse.Action) -> tuple[str, str]:
    """Returns the names of an argument and its help text."""
    value = describe_value(action)
    names = " ".join(filter(None, [", ".join(action.option_strings), value]))
    text = (action.help or "") % {**vars(action), "prog": "ringsim"}
    return names.replace("|", r"\|"), text.replace("|", r"\|").replace("<", "&lt;")


def write_command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields the lines of the section about a command."""
    yield from (f"\n## ringsim {name}\n", f"{parser.description}\n")
    arguments = [each for each in parser._actions if each.help != argparse.SUPPRESS]
    rows = [describe_argument(each) for each in arguments if each.dest != "help"]
    if rows:
        yield from ("| argument | meaning |", "|---|---|")
        yield from (f"| `{names}` | {text} |" for names, text in rows)
    if parser.epilog:
        examples = re.sub(r"^ +", "", parser.epilog.partition("\n")[2], flags=re.MULTILINE)
        yield f"\n```\n{examples.rstrip()}\n```"


def write_page() -> str:
    """Returns the text of the page."""
    commands = find_commands()
    lines = [line for name, parser in commands.items() for line in write_command(name, parser)]
    return "\n".join([HEAD.rstrip(), *lines]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")
