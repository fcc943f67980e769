"""``ringsim grade``: grades a student's notebook."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path

from ringsim.cli.verb import Verbs, add_verb, tell_written
from ringsim.errors import escape_line


def add_parser(verbs: Verbs) -> None:
    """Adds the command."""
    parser = add_verb(
        verbs,
        "grade",
        "grade the exercises of a notebook in a separate kernel",
        "ringsim grade 01_ring.ipynb --lesson handed_out/01_ring.ipynb --seed 7 --csv",
        run,
    )
    parser.add_argument("notebook", type=Path, help="lesson with a student's answers")
    parser.add_argument(
        "--seed",
        type=int,
        help="seed for the sizes and data of all checks (default: a random seed, which is printed)",
    )
    parser.add_argument(
        "--lesson",
        type=Path,
        metavar="FILE",
        help="lesson as it was handed out, whose checks are used",
    )
    parser.add_argument(
        "--assignment",
        type=Path,
        metavar="DIR",
        help="write an assignment for nbgrader and otter into this directory instead of grading",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print everything as JSON")
    form.add_argument("--csv", action="store_true", help="print one CSV row per exercise")


def run(options: argparse.Namespace) -> int:
    """Grades a notebook or writes an assignment; returns the exit code."""
    from ringsim.check import grading  # on use: a process that only reads traces does not load it

    if options.assignment is not None:
        for file in grading.write_assignment(options.notebook, options.assignment):
            tell_written(file)
        return 0
    graded = grading.grade(options.notebook, seed=options.seed, lesson=options.lesson)
    rows = graded["exercises"]
    if options.json:
        print(json.dumps(graded, indent=2))
    elif options.csv:
        table = csv.DictWriter(sys.stdout, ["notebook", "seed", *rows[0]])
        table.writeheader()
        table.writerows(
            {"notebook": graded["notebook"], "seed": graded["seed"], **row} for row in rows
        )
    else:
        for row in rows:
            text = (
                f"{row['exercise']:<24} {row['points']}/{row['of']}  {row['verdict']:<9}  "
                f"{row['reason']}"
            )
            print(escape_line(text))
        print(f"{graded['points']} of {graded['of']} points (seed {graded['seed']})")
    return 0
