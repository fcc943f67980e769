"""torchrun on two hosts that share no directory, no process numbers, no name and no clock: one trace an attempt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import RANK_VARIABLES
from test_other_network import HERE, THERE, command
from test_other_network import machines as machines

import ringsim
from ringsim.traces.events import OP_NAMES

AHEAD_S = 5  # of the clock of the second host
PROGRAM = Path(__file__).parent.parent / "programs" / "scripts" / "fails_once.py"
# Runs the rest of its arguments on a host: $1 its name, $2 a directory that it alone sees, $3 its hosts file, $4 gets a copy of $2.
HOST = """
hostname $1 && mount --make-rprivate / && mount -t tmpfs tmpfs $2 && mount --bind $3 /etc/hosts || exit 1
private=$2 copy=$4; shift 4; cd $private; "$@"; code=$?; cp -r $private/. $copy; exit $code
"""


PROCESSES = ["-p", "--mount-proc"]  # an option of `unshare`: process numbers of its own


def on_hosts(machines: tuple[str, str], tmp_path: Path, *options: list[str]) -> list[list[str]]:
    """Returns for each host, which has its own ``options``, the words that run what follows them there; skips where it cannot be made."""
    unshare = [["ip", "netns", "exec", name, "unshare", "-m", "-u", "--kill-child", "-f"] for name in machines]
    try:
        for prefix, more in zip(unshare, options, strict=True):
            prefix += more
            command(*prefix, "true")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"hosts cannot be made here: {getattr(error, 'stderr', '') or error}")
    (tmp_path / "private").mkdir()
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{HERE} node0\n{THERE} node1\n")
    words = [str(tmp_path / "private"), str(tmp_path / "hosts")]
    return [
        [*prefix, "sh", "-c", HOST, "sh", f"node{number}", *words, str(tmp_path / f"node{number}")] for number, prefix in enumerate(unshare)
    ]


def environment(**more: str) -> dict[str, str]:
    """Returns this process's environment without what a launcher left there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(RANK_VARIABLES)}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


# In torchrun's own store ranks meet again only by initialize_distributed: the agents have counted different numbers of restarts.
STORES = {"torchrun's": {}, "of each attempt": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}


@pytest.mark.timeout(330)
@pytest.mark.parametrize("store", ["torchrun's", pytest.param("of each attempt", marks=pytest.mark.soak)])
def test_one_trace_an_attempt_without_a_shared_directory(store: str, machines: tuple[str, str], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    text = PROGRAM.read_text().replace("\ndist.", "\nprint('restarts', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\ndist.", 1)
    if store == "torchrun's":
        text = text.replace('dist.init_process_group("gloo")', "import ringsim\nringsim.initialize_distributed()")
    program.write_text(text)
    ahead = ["-T", "--monotonic", str(AHEAD_S), "--boottime", str(AHEAD_S)]
    hosts = on_hosts(machines, tmp_path, PROCESSES, PROCESSES + ahead)
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--max-restarts=1"]
    words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={HERE}:29400", "--rdzv-id=job"]
    words += ["-m", "ringsim", "trace", "-o", "run.ringtrace", str(program)]
    variables = environment(GLOO_SOCKET_IFNAME="cable", **STORES[store])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    jobs = [subprocess.Popen([*host, *words], env=variables, text=True, **pipes) for host in hosts]
    said = [job.communicate(timeout=300)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    assert "wrote" in said[0]
    assert "restarts 1" in said[1], "whether the other agent counts one, too, depends on what it hears of first"
    first, second = (ringsim.load(tmp_path / "node0" / name) for name in ("run.ringtrace", "run.1.ringtrace"))
    for number, trace in enumerate((first, second)):
        assert trace.hosts == ["node0", "node1"]
        assert not any("did not come" in note for note in trace.metadata["notes"])
        assert (trace.metadata["job"], trace.metadata["attempt"]) == ("job", number)
        assert trace.metadata["complete"] == (number == 1)
    assert sorted(OP_NAMES[op] for op in second.events.op if OP_NAMES[op] != "mark") == ["barrier"] * 2 + ["isend"] * 2 + ["recv"] * 2
    reference, clock = second.clocks
    assert (reference.ranks, reference.how, clock.ranks, clock.how) == ((0,), "reference", (1,), "store")
    assert clock.uncertainty_ns is not None
    assert abs(clock.offset_ns + AHEAD_S * 10**9) <= clock.uncertainty_ns < 10**9
    assert second.makespan_s < AHEAD_S
    assert first.metadata["run_id"] != second.metadata["run_id"]
    assert [end["rank"] for end in first.metadata["ends"] if "sys.exit(no)" in end["about"]] == [1]
    assert sorted(path.name for path in (tmp_path / "node1").iterdir()) == ["run.ringtrace.parts"], "of the attempt that has no receipt"
