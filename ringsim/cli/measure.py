"""``ringsim bandwidth``: measures the links of a ring on this machine."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

import ringsim
from ringsim.cli.verb import (
    Verbs,
    add_flag,
    add_json,
    add_ranks,
    add_verb,
    check_ending,
    list_rows,
    tell,
    tell_written,
    write_picture,
)
from ringsim.environment import find_launched
from ringsim.errors import RingError

if TYPE_CHECKING:
    from ringsim.traces.bandwidths import Bandwidths

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_WAYS = (".json", ".csv", ".png", ".svg")


def add_parser(verbs: Verbs) -> None:
    """Adds the command."""
    parser = add_verb(
        verbs,
        "bandwidth",
        "measure the latency and bandwidth of a ring's links for several message sizes",
        "ringsim bandwidth -n 2 --sizes 8,4K,1M --limit 20 -o links.png -o links.json",
        run,
    )
    add_ranks(parser, "number of ranks (default: 2, or all under torchrun)")
    parser.add_argument(
        "--sizes",
        type=_sizes,
        metavar="LIST",
        help="message sizes, such as 8,4K,1MiB; K is 1024 bytes (default: 8 B to 256 MiB)",
    )
    parser.add_argument(
        "--pattern",
        action="append",
        choices=("pingpong", "oneway", "exchange", "shift", "all_reduce"),
        help="message pattern; repeat the option to measure several patterns (default: pingpong)",
    )
    parser.add_argument(
        "--edge",
        type=_edge,
        metavar="SRC,DST",
        help="measure only this edge of the ring, such as 0,1 (default: each edge in turn)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        default="cpu",
        help="cpu for Gloo, gpu for NCCL (default: cpu)",
    )
    add_flag(parser, "do not measure raw TCP and memory copies", "--no-ceilings")
    parser.add_argument(
        "--limit",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="approximate time limit (default: 60)",
    )
    add_json(parser)
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help=(
            "write the table (.csv, or .json to load later) or the chart (.png, .svg); repeat the "
            "option to write several files"
        ),
    )


def run(options: argparse.Namespace) -> int:
    """Measures the links, and prints and writes the table; returns the exit code."""
    for file in options.out:
        check_ending("-o", file, _WAYS)
    table = ringsim.bandwidth(
        options.ranks,
        options.sizes,
        options.pattern or "pingpong",
        options.device,
        edge=options.edge,
        ceilings=not options.no_ceilings,
        limit_s=options.limit,
    )
    launched = find_launched()
    # if a launcher started the ranks, all have the table, and rank 0 prints it
    if launched is None or launched.rank == 0:
        tell(options, lambda: table, lambda: list_rows(table))
        for file in options.out:
            _write(table, file)
    return 130 if table.metadata["interrupted"] else 0


def _write(table: Bandwidths, file: Path) -> None:
    if file.suffix in (".png", ".svg"):
        write_picture(table.plot(), file)
        return
    if file.suffix == ".json":
        table.save(file)
    else:
        try:
            table.to_pandas().to_csv(file, index=False)
        except OSError as error:
            raise RingError(
                f"cannot write the table: {error}. Create the directory, or choose another file "
                "with -o."
            ) from None
    tell_written(file)


def _sizes(text: str) -> list[int]:
    sizes = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*([kmg]?)(?:i?b)?\s*", word.lower())
        if match is None:
            raise argparse.ArgumentTypeError(
                f"a size must be a number with or without a unit, got {word!r}. Use a size such as "
                "8, 4K or 1MiB."
            )
        sizes.append(int(match[1]) * _UNITS[match[2]])
    return sizes


def _edge(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:,|->|>)(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"an edge must be two ranks, got {text!r}. Use two ranks such as 0,1."
        )
    return int(match[1]), int(match[2])
