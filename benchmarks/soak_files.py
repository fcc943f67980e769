"""Reads a million damaged files of all kinds.

Every result must be an answer or an error of ringsim.

    python benchmarks/soak_files.py [--inputs 1000000] [--seed 0]
    python benchmarks/soak_files.py --atheris [--inputs 1000000]
        # pip install '.[soak]': keeps inputs that reach new lines

Prints the first failure of a round with the kind and number that reproduce it (``read_many`` of
``tests/test_damaged_files.py``), and the number of files that loaded.
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
TURN = 100  # files of a kind before the next kind has its turn
ROUND = 50_000  # inputs of a fuzzer's process
MOST_BYTES = 6 * 2**30  # of addresses, of which torch takes two thirds
LIMIT_S = 120  # for one input, on the wall's clock: the machine may be busy with other things


def soak(inputs: int, seed: int) -> int:
    """Reads damaged files of all kinds in turns.

    Returns the number of rounds with an error that is not ringsim's.
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
                        f"failures, most memory {memory_mb:.0f} MB"
                    ),
                    flush=True,
                )
    return failures


def soak_with_atheris(inputs: int) -> int:
    """The same, the choices made by a fuzzer that sees which lines of ringsim they reach.

    Returns 1 if it found something. Each round is a process, because the tool that watches the
    lines keeps 16 kB per input.
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
                    f"{done + count:,} files, {len(os.listdir(corpus)):,} of them reached new "
                    "lines, 0 failures"
                ),
                flush=True,
            )
    return 0


def fuzz(inputs: int, corpus: str) -> None:
    """A round of the fuzzer; it ends the process."""
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
        except Exception:  # any exception is a finding
            print(f"input {data!r}:\n{traceback.format_exc()}", flush=True)
            os._exit(1)
        left -= 1
        # the fuzzer would call exit() with Python's lock in its hands, for which threads of pyarrow
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
    """Runs what the arguments say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--inputs", type=int, default=1_000_000, help="how many files (default: a million)"
    )
    parser.add_argument("--seed", type=int, default=0, help="number of the first file of each kind")
    parser.add_argument("--atheris", action="store_true", help="let atheris make the choices")
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
