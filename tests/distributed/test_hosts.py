"""torchrun on three hosts that share no directory, process numbers, name or clock."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import RANK_VARIABLES
from test_other_network import ADDRESSES, HERE, command
from test_other_network import machines as machines

import ringsim

AHEAD_NS = (0, 5 * 10**9, -(10**6))  # offset of each host's clock
PROGRAMS = Path(__file__).parent.parent / "programs"
PROGRAM = PROGRAMS / "scripts" / "fails_once.py"
# Runs the rest of its arguments on a host: $1 its name, $2 a directory that only it sees, $3 its
# hosts file, $4 gets a copy of $2.
HOST = """
hostname $1 && mount --make-rprivate / && mount -t tmpfs tmpfs $2 && mount --bind $3 /etc/hosts || exit 1
private=$2 copy=$4; shift 4; cd $private; "$@"; code=$?; cp -r $private/. $copy; exit $code
"""  # noqa: E501


ROUNDS = 12
IN_TURN = f"""
for _ in range({ROUNDS}):
    for src in range(size):
        for dst in range(size):
            if rank == src != dst:
                dist.send(torch.zeros(2**16), dst)
            elif rank == dst != src:
                dist.recv(torch.zeros(2**16), src)
dist.barrier()
"""
HOSTS_FILE = "127.0.0.1 localhost\n" + "".join(
    f"{address} node{number}\n" for number, address in enumerate(ADDRESSES)
)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PROCESSES = ["-p", "--mount-proc"]  # an option of `unshare`: its own process numbers


def on_hosts(machines: tuple[str, ...], tmp_path: Path, *options: list[str]) -> list[list[str]]:
    """Returns for each host the command prefix that runs a command there.

    Each has its own ``options``; skips if a host cannot be created.
    """
    unshare = [f"ip netns exec {name} unshare -m -u --kill-child -f".split() for name in machines]
    try:
        for prefix, more in zip(unshare, options, strict=True):
            prefix += more
            command(*prefix, "true")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"hosts cannot be made here: {getattr(error, 'stderr', '') or error}")
    (tmp_path / "private").mkdir()
    (tmp_path / "hosts").write_text(HOSTS_FILE)
    words = [str(tmp_path / "private"), str(tmp_path / "hosts")]
    return [
        [*prefix, "sh", "-c", HOST, "sh", f"node{number}", *words, str(tmp_path / f"node{number}")]
        for number, prefix in enumerate(unshare)
    ]


def environment(**more: str) -> dict[str, str]:
    """Returns this process's environment without a launcher's variables."""
    kept = {name: os.environ[name] for name in os.environ if not name.startswith(RANK_VARIABLES)}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def on_each(hosts: list[list[str]], *words: str, **variables: str) -> list[str]:
    """Runs torchrun on all hosts, which must succeed; returns its output on each."""
    options = f"--nnodes={len(hosts)} --max-restarts=1 --rdzv-id=job --rdzv-backend=c10d"
    options += f" --rdzv-endpoint={HERE}:29400 -m ringsim"
    torchrun = [*TORCHRUN, *options.split(), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    known = environment(GLOO_SOCKET_IFNAME="cable", **variables)
    jobs = [subprocess.Popen([*host, *torchrun], env=known, text=True, **pipes) for host in hosts]
    said = [job.communicate()[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(hosts), "\n=====\n".join(said)
    return said


def tell_doctor(said: str) -> dict[str, tuple[bool, str]]:
    """Returns the results of ``ringsim doctor --json``, and the details."""
    return {
        row["what"]: (row["works"], row["detail"])
        for row in json.loads(said[said.index("{") :])["found"]
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("machines", "store"),
    [(3, "torchrun's"), pytest.param(2, "of each attempt", marks=pytest.mark.soak)],
    indirect=["machines"],
)
def test_one_trace_an_attempt_without_a_shared_directory(
    store: str, machines: tuple[str, ...], tmp_path: Path
) -> None:
    """In torchrun's own store, restarted ranks meet only with initialize_distributed.

    See ``test_a_restart_in_the_store_of_torchrun_may_fail_in_torch_and_the_error_says_why``.
    """
    program, size = tmp_path / "program.py", len(machines)
    text = PROGRAM.read_text()
    if store == "torchrun's":
        text = text.replace(
            'dist.init_process_group("gloo")', "import ringsim\nringsim.initialize_distributed()"
        )
        text = text.replace("dist.barrier()", IN_TURN)
        slow = "dev cable root tbf rate 50mbit burst 64kb latency 1s"
        command("tc", "-n", machines[-1], "qdisc", "add", *slow.split())
    program.write_text(text)
    shift = [sys.executable, str(PROGRAMS / "shift_clock.py")]
    ahead = [[*shift, str(ahead_ns)] for ahead_ns in AHEAD_NS[:size]]
    hosts = on_hosts(machines, tmp_path, *(PROCESSES + options for options in ahead))
    variables = {} if store == "torchrun's" else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    said = on_each(hosts, "trace", "-o", "run.ringtrace", str(program), **variables)
    names = [f"node{number}" for number in range(size)]
    told = tell_doctor(on_each(hosts, "doctor", "--json", **variables)[0])
    where = "; ".join(f"{name}: rank {rank}" for rank, name in enumerate(names))
    assert told["hosts"] == (True, where)
    assert told["clocks"][1].startswith(f"{size} clocks; node0: ")
    assert told["listening"][0], "ringsim must not listen on every network"
    assert told["ring"] == (True, f"crosses hosts {size} times")
    assert "wrote" in said[0]
    files = [tmp_path / "node0" / name for name in ("run.ringtrace", "run.1.ringtrace")]
    first, second = map(ringsim.load, files)
    assert (first.hosts[0], first.hosts[-1], second.hosts) == (names[0], names[-1], names), (
        "the first trace must name at least the first and the last host"
    )
    for number, trace in enumerate((first, second)):
        assert (trace.metadata["job"], trace.metadata["attempt"]) == ("job", number)
        assert trace.metadata["complete"] == (number == 1)
    sent = size * (size - 1) * ROUNDS if store == "torchrun's" else 0
    expected = ["barrier", "isend", "recv"] * size + ["send", "recv"] * sent
    assert sorted(second.to_pandas().query("kind != 'mark'")["op"]) == sorted(expected)
    slow = [finding for finding in second.explain().findings if finding.kind == "slow_link"]
    assert sorted(one.ranks for one in slow) == ([(0, 2), (1, 2)] if sent else []), (
        "only links of the host with a slow network must be found"
    )
    assert all(one.hint.startswith("Check the interface of host node2 first") for one in slow)
    hows = ["reference"] + ["store"] * (size - 1)
    assert [(clock.ranks, clock.how) for clock in second.clocks] == [
        ((rank,), how) for rank, how in enumerate(hows)
    ]
    for clock in second.clocks[1:]:
        assert clock.uncertainty_ns is not None
        assert abs(clock.offset_ns + AHEAD_NS[clock.ranks[0]]) <= clock.uncertainty_ns < 10**9
    assert second.makespan_s < 5, "the offset of a clock must not count"
    rows = [label.get_text() for label in second.plot_timeline().get_yticklabels()]
    assert [row.split()[0] for row in rows] == names, "there must be a group of rows per host"
    assert first.metadata["run_id"] != second.metadata["run_id"]
    exited = [end["rank"] for end in first.metadata["ends"] if "sys.exit(no)" in end["about"]]
    assert exited == [size - 1]
    for name in names[1:]:
        left = {path.name for path in (tmp_path / name).iterdir()} - {"failed"}
        assert left == {"run.ringtrace.parts"}, "of an attempt without a receipt"


RESTARTED = """
import os, signal, sys
from datetime import timedelta
import torch.distributed as dist

again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
if again and os.environ["RANK"] == "1":
    signal.pause()  # the store still has the address of its predecessor
dist.init_process_group("gloo", timeout=timedelta(seconds=0.2 if again else 60))
if dist.get_rank() == 1:
    sys.exit("no")
signal.pause()
"""


def test_a_restart_in_the_store_of_torchrun_may_fail_in_torch_and_the_error_says_why(
    tmp_path: Path,
) -> None:
    """The agent keeps its store, with the data of the first ranks."""
    program = tmp_path / "program.py"
    program.write_text(RESTARTED)
    options = "--standalone --nproc-per-node=2 --max-restarts=1 --monitor-interval=0.05 -m ringsim"
    file = str(tmp_path / "run.ringtrace")
    words = [*TORCHRUN, *options.split(), "trace", "-o", file, str(program)]
    ended = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode
    # without an address, it would not connect
    (note,) = re.findall(r"RuntimeError: Gloo connectFullMesh failed .*\n(.*)", ended.stderr)
    assert "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all machines" in note
