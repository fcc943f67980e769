"""Writes files as torch.profiler writes them for runs on NCCL, from the documented format.

Times are in µs. A call takes 2 µs in the program, and its kernel is launched after 1 µs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BASE_NS = 1_790_000_000_000_000_000
WORLD = ("0", "default_pg")


class RankProfile:
    """One rank's file.

    Args:
        rank: the rank.
        world_size: the number of ranks.
        groups: the other groups of this rank: torch's name, the description, and the members.
        ahead_us: how far this rank's clock is ahead.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        groups: Iterable[tuple[str, str, list[int]]] = (),
        ahead_us: float = 0,
    ) -> None:
        self.rank, self.ahead_us = rank, ahead_us
        self.groups = {"0": list(range(world_size))} | {name: ranks for name, _, ranks in groups}
        told = [(*WORLD, self.groups["0"]), *groups]
        self.document: dict[str, Any] = {
            "schemaVersion": 1,
            "distributedInfo": {
                "backend": "nccl", "rank": rank, "world_size": world_size, "pg_count": len(told),
                "pg_config": [
                    {"pg_name": name, "pg_desc": word, "backend_config": "cuda:nccl",
                     "pg_size": len(ranks), "ranks": ranks}
                    for name, word, ranks in told
                ],
            },
            "baseTimeNanoseconds": BASE_NS,
            "traceEvents": [{"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": 0.0,
                             "args": {"name": "python"}}],
        }  # fmt: skip
        self.correlation = 0

    def add(self, cat: str, name: str, start: float, end: float, tid: int, **args: Any) -> None:
        """Adds a slice."""
        self.document["traceEvents"].append(
            {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": start + self.ahead_us,
             "dur": end - start, "args": args}
        )  # fmt: skip

    def span(self, name: str, start: float, end: float, tid: int = 7) -> None:
        """Adds a ``record_function`` block."""
        self.add("user_annotation", name, start, end, tid)

    def kernel(
        self, launched: float, start: float, end: float, name: str = "gemm", tid: int = 7
    ) -> None:
        """Adds a kernel and its launch."""
        self.correlation += 1
        self.add("cuda_runtime", "cudaLaunchKernel", launched, launched + 0.5, tid,
                 correlation=self.correlation)  # fmt: skip
        self.add("kernel", name, start, end, 20, stream=20, correlation=self.correlation)

    def record(self, called: str, group: str, at: float, tid: int, **args: Any) -> None:
        """Adds the record of a call."""
        told = {"Collective name": called, "In msg nelems": 256, "Out msg nelems": 256,
                "dtype": "Float", "Process Group Name": group}  # fmt: skip
        self.add("cpu_op", "record_param_comms", at, at + 2, tid, **told | args)

    def call(
        self, called: str, group: str, at: float, start: float, end: float, tid: int = 7,
        **args: Any,
    ) -> None:  # fmt: skip
        """Adds a call, and its kernel from ``start`` to ``end``."""
        self.record(called, group, at, tid, **args)
        self.kernel(at + 1, start, end, "ncclDevKernel_SendRecv(args)", tid)

    def send(self, peer: int, at: float, start: float, end: float, group: str = "0") -> None:
        """Adds a send."""
        self.call("send", group, at, start, end, **{"Dst Rank": peer})

    def recv(self, peer: int, at: float, start: float, end: float, group: str = "0") -> None:
        """Adds a recv."""
        self.call("recv", group, at, start, end, **{"Src Rank": peer})

    def batch(
        self, messages: list[tuple[str, int]], at: float, start: float, end: float, tid: int = 7
    ) -> None:
        """Adds a batch of messages, each "send" or "recv" and the peer, with one kernel."""
        for place, (called, peer) in enumerate(messages):
            key = "Dst Rank" if called == "send" else "Src Rank"
            self.record(called, "0", at + 3 * place, tid, **{key: peer})
        done = at + 3 * len(messages)
        self.span("nccl:coalesced", done, done + 2, tid)
        self.kernel(done + 1, start, end, "ncclDevKernel_SendRecv(args)", tid)

    def write(self, directory: Path) -> Path:
        """Writes the file into a directory, and returns its path."""
        path = directory / f"rank{self.rank}_trace.json"
        path.write_text(json.dumps(self.document))
        return path
