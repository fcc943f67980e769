"""What the ranks of one run are told before they have a job: who they are, and where they leave their evidence."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

# Values that torch, Gloo, NCCL, OpenMP, BLAS, the allocator, the loader or Python read when a process starts. A rank that
# started under other values than the caller's must not run the caller's job.
START_VALUES: Final = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|NUMEXPR|GLOO|NCCL|TORCH|PYTORCH|ATEN|C10|TP|CUDA|CUBLAS|CUDNN|NVIDIA|LD|MALLOC|GLIBC|PYTHON)(_.*)?"
    r"|GLIBC_TUNABLES|TMPDIR|LANG|LC_ALL"
)


CHECKS: Final = ("basic", "full", "off")  # which mistakes ranks refuse to make, see `ringsim.trace`


def start_environment() -> tuple[tuple[str, str], ...]:
    """Returns the part of the environment that is read once, when a process starts."""
    return tuple(sorted((name, value) for name, value in os.environ.items() if START_VALUES.fullmatch(name)))


@dataclass(frozen=True)
class Kind:
    """What a fresh rank must agree on with a call to be of use to it."""

    world_size: int
    comm_device: str
    timeout_s: float
    ring: bool
    environment: tuple[tuple[str, str], ...]
    interpreter: str = sys.executable


@dataclass(frozen=True)
class RankConfig:
    """What one rank is told when it starts.

    Attributes:
        directory: the run's private directory; the rank's records, output and exit status go there.
        keep: whether the directory outlives a launcher that was killed (the run was given a path).
        ring: whether the rank joins the default group and the ring before it takes a job.
    """

    directory: str
    rank: int
    world_size: int
    comm_device: str
    timeout_s: float
    ring: bool
    keep: bool = False

    def for_rank(self, rank: int) -> RankConfig:
        """Returns the same for another rank."""
        return replace(self, rank=rank)

    def to_json(self) -> str:
        """Returns the text that ``from_json`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankConfig:
        """Reads what ``to_json`` wrote."""
        return cls(**json.loads(text))

    @property
    def output_file(self) -> Path:
        """Where everything goes that the rank prints."""
        return Path(self.directory, f"rank-{self.rank}.out")

    @property
    def exit_file(self) -> Path:
        """Where whoever reaps the rank writes its exit status."""
        return Path(self.directory, f"rank-{self.rank}.exit")

    @property
    def port_file(self) -> Path:
        """Where rank 0 writes the port of the rendezvous."""
        return Path(self.directory, "port")
