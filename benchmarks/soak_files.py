"""Reads a million damaged files of all kinds.

Each file must either load, or raise one of ringsim's errors.

    python benchmarks/soak_files.py [--inputs 1000000] [--seed 0]
    python benchmarks/soak_files.py --atheris [--inputs 1000000]

With ``--atheris``, a fuzzer keeps the inputs that reach new lines; it needs ``pip install
'.[soak]'``. The script prints the number of files that loaded, and the first failure in each round.
To reproduce a failure, use its kind and number (``read_many`` in ``tests/test_damaged_files.py``).
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import matplotlib as mpl

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

REPORT_EVERY_S = 30.0
TURN = 100  # files of one kind, before the next kind has its turn
ROUND = 50_000  # inputs for each process of the fuzzer
MOST_BYTES = 6 * 2**30  # of the address space, two thirds of which torch uses
LIMIT_S = 120  # for one input, in wall time; it is this long because the machine may be busy


def soak(inputs: int, seed: int) -> int:
    """Reads damaged files of all kinds in turn.

    Returns the number of rounds with an error that does not come from ringsim.
    """
    from test_damaged_files import KINDS, read_many

    failures = loaded = done = 0
    begin = last = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        for first in range(seed, seed + inputs // len(KINDS) + 1, TURN):
            for name in KINDS:
                try:
                    loaded += read_many(name, Path(directory, name), range(first, first + TURN))
                except AssertionError:
                    failures += 1
                    print(traceback.format_exc(), flush=True)
            done += TURN * len(KINDS)
            if time.monotonic() - last > REPORT_EVERY_S or done >= inputs:
                last, memory_mb = (
                    time.monotonic(),
                    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                )
                print(
                    (
                        f"{done:,} files in {last - begin:.0f} s, {loaded:,} loaded, {failures} "
                        f"failures, peak memory {memory_mb:.0f} MB"
                    ),
                    flush=True,
                )
    return failures


def soak_with_atheris(inputs: int) -> int:
    """Reads damaged files that a fuzzer chooses.

    The fuzzer observes the lines of ringsim that a file reaches. Returns 1 if it found a failure.
    Each round has its own process, because the tool that observes the lines keeps 16 kB per input.
    """
    with tempfile.TemporaryDirectory() as corpus:
        for done in range(0, inputs, ROUND):
            count = min(ROUND, inputs - done)
            command = [
                sys.executable,
                __file__,
                "--atheris",
                "--inputs",
                str(count),
                "--corpus",
                corpus,
            ]
            if subprocess.run(command, check=False).returncode:
                return 1
            print(
                (
                    f"{done + count:,} files, of which {len(os.listdir(corpus)):,} reached new "
                    "lines; 0 failures"
                ),
                flush=True,
            )
    return 0


def fuzz(inputs: int, corpus: str) -> None:
    """Runs a round of the fuzzer, and ends the process."""
    import atheris

    with atheris.instrument_imports(include=["ringsim"]):
        importlib.import_module("ringsim.diagnose.explain")
        importlib.import_module("ringsim.traces.files")
    from trace_mutations import load_damaged, mutate, real_files

    wholes, left = real_files(), inputs

    def read_one(data: bytes) -> None:
        nonlocal left
        provider = atheris.FuzzedDataProvider(data)
        try:
            load_damaged(mutate(wholes, provider.ConsumeIntInRange), draw=False)
        except Exception:  # any exception is a failure
            print(f"input {data!r}:\n{traceback.format_exc()}", flush=True)
            os._exit(1)
        left -= 1
        # the fuzzer would call exit() while it holds Python's lock, for which threads of pyarrow
        # may wait
        if left == 0:
            os._exit(0)

    options = [
        "-max_len=256",
        "-len_control=0",
        f"-timeout={LIMIT_S}",
        "-rss_limit_mb=2048",
        "-verbosity=0",
        corpus,
    ]
    atheris.Setup([sys.argv[0], *options], read_one)
    atheris.Fuzz()


def main() -> int:
    """Reads the arguments, and runs the requested search."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--inputs", type=int, default=1_000_000, help="the number of files (default: a million)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="the number of the first file of each kind (default: 0)"
    )
    parser.add_argument("--atheris", action="store_true", help="have the fuzzer choose the files")
    parser.add_argument("--corpus", help=argparse.SUPPRESS)
    options = parser.parse_args()
    mpl.use("agg")
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    if options.corpus:
        fuzz(options.inputs, options.corpus)
    if options.atheris:
        return soak_with_atheris(options.inputs)
    return 1 if soak(options.inputs, options.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
