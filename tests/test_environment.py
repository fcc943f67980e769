"""Discovery from the variables of launchers: complete, incomplete, and contradictory.

Each file of ``tests/environments`` has the variables of some ranks of one start, their origin, and
the expected values.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from ringsim.cli import make_parser
from ringsim.environment import Discovery, discover, expand_node_list
from ringsim.errors import ArgumentError, RingError

RECORDED = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "environments").glob("*.json"))
}
RULES = {"torchrun", "azureml", "sagemaker", "openmpi", "mpich", "slurm", "pmi"}
HAND = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
HAND |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def no_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)


def environ(name: str, index: int = 0, **changes: str | None) -> dict[str, str]:
    """Returns the variables of one recorded rank; a change to None removes a variable."""
    variables = {**RECORDED[name]["every_rank"], **RECORDED[name]["ranks"][index], **changes}
    return {name: value for name, value in variables.items() if value is not None}


# --- whole environments ---


def test_every_rule_is_recorded() -> None:
    assert {record["expected"]["rule"] for record in RECORDED.values()} == RULES
    assert all(record["what"] and record["origin"] for record in RECORDED.values())


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_environment(name: str) -> None:
    expected = RECORDED[name]["expected"]
    for index, (rank, local_rank) in enumerate(
        zip(expected["ranks"], expected["local_ranks"], strict=True)
    ):
        variables = environ(name, index)
        before = dict(variables)
        found = discover(environ=variables)
        assert variables == before
        read = {
            key: "{...}" if key == "SM_TRAINING_ENV" else variables[key]
            for key in expected["variables"]
        }
        place = expected["head_ip"], expected["port"], expected["rule"]
        assert found == Discovery(rank, expected["world_size"], local_rank, *place, read)
        assert f"found by {expected['rule']} from " in str(found)
        theirs: dict[str, str] = {"RANK": "77", "OTHER": "stays"}
        written = found.export(theirs)
        assert theirs == {"OTHER": "stays", **written}
        assert discover(environ=theirs) == replace(found, rule="torchrun", variables=written)
    # arguments take precedence over the launcher
    found = discover(port=1234, head_ip="elsewhere", environ=environ(name))
    assert (found.port, found.head_ip, found.rank) == (1234, "elsewhere", 0)
    assert found.rule == expected["rule"]
    given = Discovery(2, 3, 0, "h", 1, "arguments")
    assert discover("h", 1, 3, 2, 0, environ=environ(name)) == given


@pytest.mark.parametrize("name", RECORDED)
def test_a_variable_that_is_missing_changes_nothing_or_is_named(name: str) -> None:
    """An incomplete set may not give another rank or world, or crash."""
    whole = discover(environ=environ(name))
    for missing in RECORDED[name]["expected"]["variables"]:
        if (name, missing) == ("slurm_part_of_job", "SLURM_STEP_NUM_TASKS"):
            continue  # then the job's number is the only one; srun always sets the step's
        try:
            found = discover(environ=environ(name, 0, **{missing: None}))
        except RingError as error:
            said = str(error)
        else:
            assert (found.rank, found.world_size) == (whole.rank, whole.world_size), missing
            continue
        assert re.search(r"ringsim found .*\. [A-Z].*\.$", said), missing


def test_the_process_environment_is_read_and_written_when_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, **environ("slurm_two_nodes", 5)})
    found = discover()
    assert "RANK" not in os.environ
    found.export()
    written = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR")]
    assert written == ["5", "1", "node01"]


def test_ports_of_jobs_differ_and_stay_in_their_range() -> None:
    def port(job: int, step: int = 0) -> int:
        numbers = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        return discover(environ=environ("slurm_two_nodes", 0, **numbers)).port

    ports = {port(job) for job in range(4711, 400000, 391)}
    assert 20000 <= min(ports) <= max(ports) < 30000
    assert len(ports) > 900
    assert len({port(job, step) for job in (100, 101) for step in (0, 1)}) == 4


# --- not the usual set, and yet enough ---

OLD_NAMES = [f"SLURM_{name}" for name in ("STEP_ID", "JOB_ID", "STEP_NODELIST", "JOB_NODELIST")]
OLD_NAMES += ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"]
OF_TORCHRUN_IN_SLURM = {
    name: value
    for name, value in environ("torchrun_in_slurm", 3).items()
    if name.startswith("SLURM")
}


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        ({"world_size": 1}, {},
         {"rank": 0, "world_size": 1, "local_rank": 0, "head_ip": "127.0.0.1",
          "rule": "arguments"}),
        ({"world_size": 1, "port": 5, "local_rank": 3}, {}, {"port": 5, "local_rank": 3}),
        ({"rank": 1, "local_rank": 0}, {"WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "7"},
         {"rank": 1, "rule": "torchrun"}),
        # Old names of variables.
        ({}, environ("slurm_two_nodes", 3, **dict.fromkeys(OLD_NAMES)),
         {key: getattr(discover(environ=environ("slurm_two_nodes", 3)), key)
          for key in ("port", "head_ip")} | {"world_size": 8}),
        # Two machines with one task each, in which something other than torchrun starts four ranks.
        ({}, {**OF_TORCHRUN_IN_SLURM, **HAND, "RANK": "3", "WORLD_SIZE": "4"},
         {"rank": 3, "world_size": 4, "rule": "torchrun"}),
        # Platform MPI, of which DeepSpeed's benchmarks read no size.
        ({}, {"MPI_RANKID": "3", "MPI_NRANKS": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
         {"rank": 3, "world_size": 4, "local_rank": 1, "rule": "mpich"}),
        ({}, {"MPI_RANKID": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h"},
         {"rank": 3, "world_size": 4}),
        # SageMaker documents settings without the first machine's name, next to SM_HOSTS.
        ({}, environ("sagemaker_two_nodes", 2, SM_TRAINING_ENV='{"hosts": ["a", "b"]}',
                     SM_HOSTS=None), {"head_ip": "a"}),
        ({}, environ("sagemaker_two_nodes", 2, SM_TRAINING_ENV='{"master_hostname": "b"}'),
         {"head_ip": "b"}),
        ({}, environ("sagemaker_two_nodes", 2, SM_TRAINING_ENV="{}"),
         {"head_ip": "algo-1", "rank": 2}),
        # This only looks like Azure ML.
        ({}, environ("azureml_one_node", 0, DLTS_JOB_ID="7"), {"rule": "openmpi"}),
    ],
)  # fmt: skip
def test_found_all_the_same(
    arguments: dict[str, Any], variables: dict[str, str], expected: dict[str, Any]
) -> None:
    found = discover(**arguments, environ=variables)
    assert {key: getattr(found, key) for key in expected} == expected
    assert 0 < found.port < 65536


# --- nothing, not enough, or too much ---

NO_STEP = dict.fromkeys(name for name in environ("slurm_two_nodes") if "STEP" in name)
# a batch script, or the shell of salloc: one process
OUTSIDE = "in a Slurm job, but not under srun. Start this script with srun"
NOT_SET = "^the launcher did not set"
DISAGREE = "^launchers disagree:"
NO_LAUNCHER = "no launcher started this process"


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        # No launcher.
        ({"HOME": "/"},
         f"{NO_LAUNCHER}.*found nothing.*torchrun --nproc-per-node N, srun .*ringsim.trace"),
        ({"AZUREML_EXPERIMENT_ID": "x"}, NO_LAUNCHER),
        ({"SM_TRAINING_ENV": environ("sagemaker_one_node")["SM_TRAINING_ENV"]}, NO_LAUNCHER),
        *((environ("slurm_two_nodes", 0,
                   **{**NO_STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": step}), OUTSIDE)
          for step in (None, "4294967290", "4294967291")),
        # A launcher whose variables are incomplete.
        ({**HAND, "MASTER_PORT": ""}, "ringsim found RANK=1.*, but not MASTER_PORT "),
        ({**HAND, "LOCAL_RANK": " "}, "but not LOCAL_RANK "),
        (environ("openmpi41_two_nodes", MASTER_ADDR=None),
         rf"{NOT_SET} head_ip.*\(openmpi\)\. .*: mpirun -x MASTER_ADDR=HOST"),
        (environ("mpich4_two_nodes", MASTER_ADDR=None), "mpiexec -genv MASTER_ADDR HOST"),
        (environ("azureml_two_nodes", AZ_BATCH_MASTER_NODE=None), "set MASTER_ADDR to rank 0's"),
        *((environ("sagemaker_two_nodes", 0, SM_TRAINING_ENV=settings, SM_HOSTS=None),
           rf"{NOT_SET} head_ip; .* SM_TRAINING_ENV=\{{\.\.\.\}}, OMPI_COMM_WORLD_RANK=0")
          for settings in ("[]", "not JSON", '{"master_hostname": 7}', '{"hosts": [7]}')),
        (environ("openmpi41", OMPI_COMM_WORLD_LOCAL_RANK=None),
         f"{NOT_SET} local_rank.* Set LOCAL_RANK on every rank. Or pass local_rank"),
        (environ("slurm_pmix", SLURM_STEP_ID=None, SLURM_STEPID=None),
         f"{NOT_SET} world_size, local_rank and head_ip; .*PMIX_RANK=0"),
        # Rank 0 may not be on the first machine of the list.
        *((environ("slurm_two_nodes", **change), f"{NOT_SET} head_ip.* export MASTER_ADDR=HOST")
          for change in ({"SLURM_HET_SIZE": "2"}, {"SLURM_DISTRIBUTION": "arbitrary"})),
        # Launchers that contradict each other.
        (environ("openmpi41", **{**HAND, "WORLD_SIZE": "2", "RANK": "0"}),
         f"{DISAGREE} world_size is 4 according to openmpi, but 2 .*RANK=0.*Unset"),
        (environ("mpich5_hydra", LOCAL_RANK="1"), f"{DISAGREE} local_rank is 0 .*mpich.* 1 "),
        (environ("slurm_pmi2", PMI_RANK="3"), f"{DISAGREE} rank is 0 .*slurm, but 3 .*pmi"),
        (environ("openmpi41", **environ("mpich5_hydra", 1)), f"{DISAGREE} world_size is 4 .*mpich"),
        # Text that is not a number.
        *(({**HAND, "RANK": value}, "^RANK must be a non-negative integer, got ")
          for value in ("one", "-1", "1.0", "²", "9" * 5000)),
        ({**HAND, "WORLD_SIZE": "0"}, "^WORLD_SIZE must be a positive integer, got '0'"),
        *(({**HAND, "MASTER_PORT": port},
           f"^MASTER_PORT must be an integer from 1 to 65535, got '{port}'")
          # the latter is what Kubernetes makes of a service called master
          for port in ("65536", "tcp://10.0.0.1:2345")),
        ({**HAND, "RANK": "2"},
         r"rank must be an integer from 0 to 1, got 2 \(torchrun: RANK=2, WORLD_SIZE=2"),
    ],
)  # fmt: skip
def test_what_does_not_say_who_this_is_is_told(variables: dict[str, str], sentence: str) -> None:
    with pytest.raises(RingError, match=sentence) as caught:
        discover(environ=variables)
    words = str(caught.value)
    assert ("For a world of one, pass world_size=1" in words) == (NO_LAUNCHER in words)
    given = discover("h", 1, 2, 0, 0, environ=variables)
    assert given.rule == "arguments", "arguments need no launcher"


@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        ({"rank": 1, "world_size": 1}, {},
         (r"rank must be an integer from 0 to 0, got 1 \(world_size "
         r"1\)\. Give each process its own")),
        ({"world_size": 2}, environ("slurm_two_nodes"),
         r"world_size must be 8, .*the launcher, got 2 \(slurm: .*Pass both"),
        *(({name: value}, HAND, f"^{name} must be .*, got {value!r}") for name, value in [
            ("rank", "0"), ("rank", True), ("rank", -1), ("port", 0), ("world_size", 2.0),
            ("head_ip", ""), ("head_ip", 7),
        ]),
    ],
)  # fmt: skip
def test_wrong_arguments(
    arguments: dict[str, Any], variables: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        discover(**arguments, environ=variables)


# --- mpi4py ---


def install_mpi4py(
    monkeypatch: pytest.MonkeyPatch, rank: int = 0, machines: tuple[str, ...] = (), head: Any = None
) -> None:
    """Replaces mpi4py with a fake: ``rank`` on ``machines``, and ``head`` broadcast by rank 0.

    Without machines, the fake has no MPI.
    """
    world = SimpleNamespace(
        Get_rank=lambda: rank,
        Get_size=lambda: len(machines),
        allgather=lambda mine: list(machines),
        bcast=lambda value, root: value if rank == root else head,
    )
    package = ModuleType("mpi4py")
    package.__spec__ = importlib.machinery.ModuleSpec("mpi4py", None)
    if machines:
        package.MPI = SimpleNamespace(COMM_WORLD=world, Get_processor_name=lambda: machines[rank])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", package)


def test_mpi_is_asked_for_what_its_launcher_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    without_head = environ("openmpi5_two_nodes", 3, MASTER_ADDR=None)
    install_mpi4py(monkeypatch, 3, ("a", "b", "a", "b"), ("10.9.8.7", 4321))
    found = discover(environ=without_head)
    read = {name: without_head[name] for name in found.variables}
    assert found == Discovery(3, 4, 1, "10.9.8.7", 4321, "mpi4py", read)
    assert found.variables["OMPI_COMM_WORLD_RANK"] == "3"
    assert discover(environ={**without_head, "MASTER_PORT": "77"}).port == 77
    # of the latter, the address on the way to the other machine
    for machines in (("localhost", "localhost"), ("here", "localhost")):
        install_mpi4py(monkeypatch, 0, machines)
        assert discover(environ={"PMIX_RANK": "0"}).head_ip == "127.0.0.1"
    # with the mpi4py of another MPI, every process looks like a world of one
    install_mpi4py(monkeypatch, 0, ("here",))
    with pytest.raises(RingError, match=f"{DISAGREE} world_size is 4 .*openmpi, but 1 .*mpi4py"):
        discover(environ=environ("openmpi5_two_nodes", 1, MASTER_ADDR=None))


def test_mpi_is_not_asked_where_nothing_of_mpi_is_there_or_everything_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_mpi4py(monkeypatch)  # importing MPI from it would fail
    for name, record in RECORDED.items():
        assert discover(environ=environ(name)).rule == record["expected"]["rule"]
    with pytest.raises(RingError, match=NO_LAUNCHER):
        discover(environ={"PATH": "/bin"})
    with pytest.raises(RingError, match="With ask_mpi=True, ringsim asks mpi4py"):
        discover(environ={"PMIX_RANK": "0"}, ask_mpi=False)


# --- Slurm's lists of machines ---


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node[01-03,07],gpu5", "node01 node02 node03 node07 gpu5"),
        ("a[1-2]b[3-4]", "a1b3 a1b4 a2b3 a2b4"),
        ("n[098-101]-ib,localhost", "n098-ib n099-ib n100-ib n101-ib localhost"),
        ("n[9-11]", "n9 n10 n11"),
        ("[1-2]x", "1x 2x"),
        ("node01,node01", "node01 node01"),
    ],
)
def test_a_node_list_is_written_out(text: str, names: str) -> None:
    assert expand_node_list(text) == names.split()


WRONG = (
    ", ,a a,,b a[ a] a[] a[1 a1] a[[1]] a[1]] a[,] a[1,] a[1-] a[-1] a[x] a[3-1] a[1-2-3] a[1-9:2] "
    "a[٣] a[0-999999999]"
)


@pytest.mark.parametrize(
    "text", ["", "a b", "a[0-999]b[0-999]c[0-1]", f"a[{'9' * 5000}]", *WRONG.split()]
)
def test_other_text_is_no_node_list(text: str) -> None:
    with pytest.raises(
        RingError, match=r"^a node list must .*, got .*\. Correct the SLURM_\*_NODELIST variable"
    ):
        expand_node_list(text)


def test_the_manifest_for_kubernetes_starts_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = pytest.importorskip("yaml")
    text = (Path(__file__).parent.parent / "docs" / "how-to" / "launchers.md").read_text()
    service, job = yaml.safe_load_all(text.split("```yaml\n")[1].split("```")[0])
    name, pods, count = job["metadata"]["name"], job["spec"]["template"]["spec"], job["spec"]
    assert service["spec"] == {"clusterIP": "None", "selector": {"job-name": name}}
    assert service["metadata"]["name"] == pods["subdomain"]
    assert (count["completionMode"], count["parallelism"]) == ("Indexed", count["completions"])
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")  # set by Kubernetes in a pod
    (container,) = pods["containers"]
    program, *words = shlex.split(os.path.expandvars(container["command"][2]))
    given = get_args_parser().parse_args(words)
    found = program, given.nnodes, given.node_rank
    assert found == ("torchrun", str(count["completions"]), 1)
    assert given.master_addr == f"{name}-0.{pods['subdomain']}", "the name of pod 0"
    assert (given.module, given.training_script) == (True, "ringsim")
    options = make_parser().parse_args(given.training_script_args)
    assert (options.script, options.arguments) == ("train.py", ["--steps", "10"])
