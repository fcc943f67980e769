"""Measures notebook sessions of four ranks, of which one raises, hangs or is killed.

    python benchmarks/notebook_peers.py DIRECTORY [--tools ipyparallel ...] [--cases killed ...]

For each tool, the script makes a virtual environment in DIRECTORY, unless it is there. Each case
starts a kernel and four ranks, assigns a variable on them, and runs a cell that fails. A last cell
prints the variable and calls all_reduce. A cell that is busy after ``--limit`` seconds is
interrupted, and is frozen if it is busy a minute later. In the case "interrupted", the interrupt
comes after 5 s. Then the kernel is shut down. The processes that remain 15 s later are counted and
killed. The outputs of the cells are appended to DIRECTORY/TOOL/cells.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple, TextIO

from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpecManager
from paired import where

MARK = "NOTEBOOK_PEERS"  # an environment variable of the kernel and of all that it starts
INTERRUPT_AFTER_S = 5.0
FROZEN_AFTER_S = 60.0
LEFT_AFTER_S = 15.0


class Tool(NamedTuple):
    """A tool that runs cells on ranks.

    Attributes:
        start: the cells that start four ranks with Gloo, and define ``rank`` on them.
        on_ranks: makes the cell that runs some code on all ranks.
        source: what pip installs, if it isn't the name of the tool.
        kernel: the module that runs the notebook's kernel.
    """

    start: tuple[str, ...]
    on_ranks: Callable[[str], str]
    source: str = ""
    kernel: str = "ipykernel_launcher"


IMPORTS = "import os, signal, time, torch, torch.distributed as dist\n"
FREE_ADDRESS = """\
import socket
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
"""
JOIN = "dist.init_process_group('gloo', init_method=address, rank=rank, world_size=4)"
MONARCH = """\
from monarch.actor import Actor, current_rank, endpoint, this_host
class Ranks(Actor):
    def __init__(self):
        self.names = {"rank": current_rank().rank}
    @endpoint
    def run(self, code):
        exec(code, self.names)
ranks = this_host().spawn_procs({"ranks": 4}).spawn("ranks", Ranks)
"""


def accelerated(code: str) -> str:
    """Returns a cell that runs code with accelerate's launcher."""
    body = f"global x\nrank = PartialState(cpu=True).process_index\n{code}"
    start = "notebook_launcher(work, num_processes=4, use_port=address.rpartition(':')[2])"
    return f"def work():\n{textwrap.indent(body, '    ')}\n{start}"


TOOLS = {
    # This script never calls nbdistributed's %dist_reset, which ends all processes on the machine
    # whose commands match "python.*worker" or "torch.*distributed". Messages to ranks that still
    # import torch are lost, so the script waits.
    "nbdistributed": Tool(
        (
            "%load_ext nbdistributed",
            "%dist_init -n 4",
            "%sx sleep 30",
            f"%%distributed\n{IMPORTS}",
        ),
        "%%distributed\n{}".format,
    ),
    "ipyparallel": Tool(
        (
            "import ipyparallel\n"
            "engines = ipyparallel.Cluster(n=4).start_and_connect_sync(activate=True)[:]",
            f"{FREE_ADDRESS}engines.push({{'address': address}}, block=True)\n"
            "engines.scatter('rank', range(4), flatten=True, block=True)",
            f"%%px\n{IMPORTS}{JOIN}",
        ),
        "%%px\n{}".format,
    ),
    "torchmonarch": Tool(
        (
            MONARCH,
            f"{FREE_ADDRESS}ranks.run.call(f'address = {{address!r}}').get()",
            f"ranks.run.call({IMPORTS + JOIN!r}).get()",
        ),
        lambda code: f"ranks.run.call({code!r}).get()",
    ),
    "accelerate": Tool(
        (f"{IMPORTS}{FREE_ADDRESS}from accelerate import PartialState, notebook_launcher",),
        accelerated,
    ),
    # Its toolbar in JupyterLab restarts the kernel as this module, with these variables.
    "jupyter-distributed": Tool(
        (f"{IMPORTS}dist.init_process_group('gloo')\nrank = dist.get_rank()",),
        "{}".format,
        kernel="jupyter_distributed.kernel",
    ),
    # The magic that keeps ranks; its rows of the page come from "--tools ringsim".
    "ringsim": Tool(
        ("%load_ext ringsim", f"%%ring -n 4 --keep\n{IMPORTS}rank = dist.get_rank()"),
        "%%ring -n 4 --keep\n{}".format,
        source=str(Path(__file__).parent.parent),
    ),
}

KEEP = "x = 40 + rank"
NEXT = """\
print(f"rank {rank} has x = {globals().get('x')}", flush=True)
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {rank} has the sum {total.item():g}", flush=True)"""
CASES = {
    "nothing": "pass",
    "raises": """\
if rank == 2:
    raise ValueError("bad batch")
dist.all_reduce(torch.ones(1))""",
    "hangs": """\
if rank == 2:
    dist.recv(torch.zeros(1), src=3)""",
    "killed": """\
if rank == 2:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))""",
    "interrupted": """\
if rank == 2:
    dist.recv(torch.zeros(1), src=3)
dist.all_reduce(torch.ones(1))""",
}


class Cell(NamedTuple):
    """The end of a cell.

    Attributes:
        end: "ok", "error", "frozen" or "kernel died".
        seconds: the time until it ended or was interrupted.
        interrupted: the time from the interrupt until it ended; None without an interrupt.
        told: the time until it showed an error.
        text: its output, and the reply of the kernel.
    """

    end: str
    seconds: float
    interrupted: float | None
    told: float | None
    text: str


class Kernel:
    """A kernel of a virtual environment."""

    def __init__(self, environment: Path, module: str, mark: str) -> None:
        self.mark = mark
        folder = environment / "kernels" / "peer"
        folder.mkdir(parents=True, exist_ok=True)
        spec = {
            "argv": [
                str(environment / "bin" / "python"),
                *("-m", module, "-f", "{connection_file}"),
            ],
            "display_name": "peer",
            "language": "python",
            "interrupt_mode": "signal" if module == "ipykernel_launcher" else "message",
            "env": {
                "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
                "OMP_NUM_THREADS": "1",
                "JUPYTER_DISTRIBUTED_WORLD_SIZE": "4",
                MARK: mark,
            },
        }
        (folder / "kernel.json").write_text(json.dumps(spec))
        specs = KernelSpecManager(kernel_dirs=[str(folder.parent)])
        self.manager = KernelManager(kernel_name="peer", kernel_spec_manager=specs)
        with (environment / "terminal.txt").open("a") as terminal:
            self.manager.start_kernel(stdout=terminal, stderr=terminal)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code: str, patience_s: float) -> Cell:
        """Runs a cell, and interrupts it if it is busy for longer than ``patience_s``."""
        began, stopped, told, texts, end = time.monotonic(), None, None, list[str](), ""
        request = self.client.execute(code)
        while not end:
            message = self.read_message()
            now = time.monotonic()
            if message is not None and message["parent_header"].get("msg_id") == request:
                texts.append(find_text(message["msg_type"], message["content"]))
                if told is None and re.search(r"^\W*\w*Error\b", texts[-1], re.MULTILINE):
                    told = now - began
                if message["content"].get("execution_state") == "idle":
                    reply = self.read_reply(request)
                    end = reply["status"]
                    texts.append(f"{end} {reply.get('ename', '')} {reply.get('evalue', '')}\n")
            elif not self.manager.is_alive():
                end = "kernel died"
            elif stopped is None and now - began > patience_s:
                self.manager.interrupt_kernel()
                stopped = now
            elif stopped is not None and now - stopped > FROZEN_AFTER_S:
                end = "frozen"
        if stopped is None:
            return Cell(end, now - began, None, told, "".join(texts))
        return Cell(end, stopped - began, now - stopped, told, "".join(texts))

    def read_message(self) -> Any:
        """Returns the kernel's next message, or None if it says nothing for a while."""
        try:
            return self.client.get_iopub_msg(timeout=0.1)
        except Empty:
            return None

    def read_reply(self, request: str) -> Any:
        """Returns the kernel's reply to a request."""
        while True:
            reply = self.client.get_shell_msg(timeout=5)
            if reply["parent_header"]["msg_id"] == request:
                return reply["content"]

    def processes(self) -> dict[int, str]:
        """Returns the commands of the kernel and of the processes that it started."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:  # it has ended
                continue
            if f"{MARK}={self.mark}".encode() in variables and command:
                found[int(folder.name)] = command
        return found

    def close(self) -> list[str]:
        """Shuts the kernel down, kills the processes that remain, and returns their commands."""
        self.client.stop_channels()
        self.manager.shutdown_kernel()
        ends = time.monotonic() + LEFT_AFTER_S
        while (left := self.processes()) and time.monotonic() < ends:
            time.sleep(0.5)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return list(left.values())


def find_text(kind: str, content: dict[str, Any]) -> str:
    """Returns the text that a message adds to the output of its cell."""
    if kind == "stream":
        text = content["text"]
    elif kind == "error":
        text = "\n".join(content["traceback"]) + "\n"
    elif kind in ("display_data", "execute_result", "update_display_data"):
        text = content["data"].get("text/plain", "") + "\n"
    else:
        return ""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)


def install(environment: Path, name: str) -> str:
    """Makes a virtual environment, and returns the versions in it, or pip's last words."""
    python = environment / "bin" / "python"
    torch = f"torch=={version('torch').partition('+')[0]}"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        command = [python, "-m", "pip", "install", "-q", TOOLS[name].source or name, torch]
        pip = subprocess.run([*command, "numpy", "ipykernel"], capture_output=True, text=True)
        if pip.returncode:
            return f"not installed: {pip.stderr.strip().splitlines()[-1]}"
    names = [name, "torch", "numpy", "ipykernel"]
    code = f"from importlib.metadata import version\nprint(*map(version, {names}))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return ", ".join(map(" ".join, zip(names, found.stdout.split(), strict=True)))


def measure(name: str, environment: Path, case: str, limit_s: float, log: TextIO) -> None:
    """Runs a case, and prints how each cell ended."""
    tool = TOOLS[name]
    kernel = Kernel(environment, tool.kernel, f"{name}-{case}-{os.getpid()}")

    def step(label: str, code: str, patience_s: float = limit_s) -> Cell:
        cell = kernel.run(code, patience_s)
        line = f"{name:20}{case:12}{label:16}{cell.end:12}{cell.seconds:6.1f} s"
        if cell.told is not None:
            line += f", an error after {cell.told:.1f} s"
        if cell.interrupted is not None:
            line += f", {cell.interrupted:.1f} s after the interrupt"
        line += f"; {len(kernel.processes())} processes"
        print(line, flush=True)
        print(f"=== {line}\n{cell.text}", file=log, flush=True)
        return cell

    try:
        for code in tool.start:
            step("start", code, 120)
        step("keep a variable", tool.on_ranks(KEEP))
        patience_s = INTERRUPT_AFTER_S if case == "interrupted" else limit_s
        cell = step("the case", tool.on_ranks(CASES[case]), patience_s)
        if cell.end != "frozen":
            step("the next cell", tool.on_ranks(NEXT))
    finally:
        left = kernel.close()
        print(f"{name:20}{case:12}{len(left)} processes left", flush=True)
        print("=== left", *left, sep="\n", file=log, flush=True)


def main() -> None:
    """Prints how each cell of each case ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="where the virtual environments are")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--limit", type=float, default=90, help="seconds until the interrupt (default: 90)"
    )
    options = parser.parse_args()
    print(where(), flush=True)
    for name in options.tools:
        environment = options.directory.resolve() / name
        found = install(environment, name)
        print(f"{name}: {found}", flush=True)
        if found.startswith("not installed"):
            continue
        with (environment / "cells.txt").open("a") as log:
            for case in options.cases:
                measure(name, environment, case, options.limit, log)


if __name__ == "__main__":
    main()
