"""``ringsim.comm`` has the surface of ``torch.distributed``.

The tests compare it with the installed version of torch, and with the oldest and newest supported
versions.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import pickle
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as native

import ringsim
from ringsim import comm
from ringsim.comm import functions
from ringsim.errors import ArgumentError, RingError

HERE = Path(__file__).parent / "signatures"
SNAPSHOTS = [json.loads(path.read_text()) for path in sorted(HERE.glob("torch-*.json"))]
EXTRAS = ["prof", "log_name", "debug"]
# reading this name warns
PUBLIC = sorted(name for name in dir(native) if not name.startswith("_") and name != "reduce_op")
WRAPPED = {**functions.FUNCTIONS, **functions.MANAGING}
BY_SNAPSHOT = [
    pytest.param(name, text, id=f"{snapshot['torch']}-{name}")
    for snapshot in SNAPSHOTS
    for name, text in snapshot["functions"].items()
]


def signature_of(text: str) -> inspect.Signature:
    """Returns the signature for the parameters of a snapshot."""
    names = {"ReduceOp": native.ReduceOp, "GroupMember": native.GroupMember, "SHRINK_DEFAULT": 0}
    scope: dict[str, Any] = {}
    exec(f"def function({text}): ...", names, scope)
    return inspect.signature(scope["function"])


def outline(signature: inspect.Signature) -> list[tuple[str, Any, bool]]:
    """Returns name, kind and presence of a default of each parameter, except the log's."""
    return [
        (each.name, each.kind, each.default is each.empty)
        for each in signature.parameters.values()
        if each.name not in EXTRAS
    ]


# -- the installed torch


def test_every_public_name_is_there() -> None:
    # its own submodule `log` is not torch's logger of that name
    assert {*PUBLIC} <= {*dir(comm)}
    own = vars(sys.modules["ringsim.comm"])
    for name in [name for name in PUBLIC if name not in own and name != "P2POp"]:
        assert getattr(comm, name) is WRAPPED.get(name, getattr(native, name)), name
    assert {name for name in PUBLIC if name in own} <= {"log", "P2POp", *WRAPPED}
    assert all(getattr(comm, name) is WRAPPED[name] for name in WRAPPED)
    assert issubclass(comm.P2POp, native.P2POp)
    assert inspect.signature(comm.P2POp) == inspect.signature(native.P2POp)
    assert inspect.getdoc(comm.P2POp) == inspect.getdoc(native.P2POp)
    assert comm.distributed_c10d is native.distributed_c10d
    with pytest.raises(AttributeError, match=r"nor torch\.distributed has an attribute"):
        _ = comm.all_reduce_by_pigeon


def test_every_function_that_takes_a_group_is_timed_or_known_to_send_nothing() -> None:
    takes_group = {
        name
        for name in PUBLIC
        if isinstance(getattr(native, name), types.FunctionType)
        and "group" in inspect.signature(getattr(native, name)).parameters
    }
    assert takes_group <= {*WRAPPED, *functions.QUESTIONS}


@pytest.mark.parametrize("name", sorted(WRAPPED))
def test_function_is_torchs_by_signature_name_and_docstring(name: str) -> None:
    ours = WRAPPED[name]
    if not hasattr(native, name):  # from a later torch, and built from messages
        assert "built" in str(ours.__doc__)
        return
    theirs = getattr(native, name)
    expected, found = inspect.signature(theirs), inspect.signature(ours)
    added = [parameter for parameter in found.parameters if parameter not in expected.parameters]
    assert added == (EXTRAS if name in functions.FUNCTIONS else [])
    assert all(found.parameters[extra].kind is inspect.Parameter.KEYWORD_ONLY for extra in added)
    assert (
        found.replace(
            parameters=[each for each in found.parameters.values() if each.name not in added]
        )
        == expected
    )
    assert (ours.__name__, ours.__qualname__) == (theirs.__name__, theirs.__qualname__)
    assert inspect.getdoc(ours) == inspect.getdoc(theirs)
    assert pickle.loads(pickle.dumps(ours)) is ours


@pytest.mark.filterwarnings("ignore")
def test_star_brings_what_torchs_star_brings() -> None:
    theirs: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    exec("from torch.distributed import *", theirs)
    exec("from ringsim.comm import *", ours)
    wanted = {name for name in theirs if not isinstance(theirs[name], types.ModuleType)}
    assert wanted | {"cdb", "set_backend", "log_summary"} <= set(ours)
    assert not {"functions", "backend", "Any", "annotations"} & set(ours)


def test_functions_that_a_tool_has_wrapped_are_taken_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tests several wrappers in several places."""
    wrappers: list[Any] = [
        functools.partial,
        lambda function: lambda *args, **kwargs: function(*args, **kwargs),
    ]
    names = "isend irecv send all_reduce batch_isend_irecv barrier get_rank new_group"
    for number, name in enumerate(names.split()):
        for owner in (native, native.distributed_c10d)[number % 3 == 0 :]:
            monkeypatch.setattr(owner, name, wrappers[number % 2](getattr(native, name)))
    spec: Any = importlib.util.spec_from_file_location("wrapped_functions", functions.__file__)
    fresh: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert fresh.FUNCTIONS.keys() == functions.FUNCTIONS.keys()
    found = inspect.signature(fresh.FUNCTIONS["isend"])
    assert list(found.parameters) == list(inspect.signature(comm.isend).parameters)
    monkeypatch.setattr(native, "get_rank", lambda group=None: 5)
    assert comm.get_rank() == 5


# -- the oldest and the newest supported versions


def test_snapshots_are_of_the_oldest_and_the_newest_and_as_the_script_makes_them() -> None:
    project = tomllib.loads((HERE.parent.parent / "pyproject.toml").read_text())["project"]
    (needs,) = (line for line in project["dependencies"] if line.startswith("torch>="))
    lowest = needs.partition(">=")[2]
    assert [snapshot["torch"].startswith(lowest) for snapshot in SNAPSHOTS] == [True, False]
    code = "import json, make_snapshot; print(json.dumps(make_snapshot.snapshot_of_installed()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, check=True)
    made = json.loads(done.stdout)
    installed = torch.__version__.partition("+")[0]
    assert all(snapshot == made for snapshot in SNAPSHOTS if snapshot["torch"] == installed)
    # the source and Python's introspection agree
    for name, text in made["functions"].items():
        assert outline(signature_of(text)) == outline(inspect.signature(getattr(native, name)))


@pytest.mark.parametrize(("name", "text"), BY_SNAPSHOT)
def test_function_and_fallback_take_what_torch_takes(name: str, text: str) -> None:
    wanted = signature_of(text)
    communicates = "group" in wanted.parameters or name == "batch_isend_irecv"
    assert name in WRAPPED or name in functions.QUESTIONS or not communicates, (
        "a new function of torch needs a fallback, or an entry in QUESTIONS"
    )
    if communicates and not hasattr(native, name) and name not in functions.QUESTIONS:
        assert outline(inspect.signature(WRAPPED[name])) == outline(wanted)
    if name == "monitored_barrier":  # groups in Python have their own
        return
    called: list[Any] = []
    function = functions.make_function(
        name, wanted, lambda *args, **kwargs: called.append((args, kwargs))
    )
    assert outline(inspect.signature(function)) == outline(wanted)
    values = {
        each.name: object()
        for each in wanted.parameters.values()
        if each.kind is each.POSITIONAL_OR_KEYWORD
    }
    function(**values)
    function(*values.values())
    assert called == [((), values), (tuple(values.values()), {})]


# -- backends


@pytest.fixture
def joined() -> Iterator[None]:
    native.init_process_group("gloo", store=native.HashStore(), rank=0, world_size=1)
    yield
    native.destroy_process_group()


class Alone(comm.MessageGroup):
    """A backend for one rank, such as a user might write."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size, backend_name="alone", timeout=timeout)

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Any:
        raise ValueError("there is no other rank")

    irecv = isend  # type: ignore[assignment]


def register_alone() -> None:
    native.Backend.register_backend("alone", Alone, devices=["cpu"])


def test_set_backend_holds_for_groups_from_then_on(joined: None) -> None:
    register_alone()
    assert comm.set_backend("alone") == comm.cdb
    assert comm.cdb.name == "alone"
    group = comm.new_group()
    assert isinstance(group, Alone)
    assert comm.get_backend(group) == "alone"
    assert comm.get_backend() == "gloo"  # which existed before
    assert comm.get_backend(comm.new_group(backend="gloo")) == "gloo"
    assert comm.set_backend("torch").name == comm.cdb.name == "torch"
    assert comm.get_backend(comm.new_group()) == "gloo"
    assert comm.cdb.get_world_size() == 1


def test_init_process_group_takes_the_backend_that_was_set() -> None:
    register_alone()
    comm.set_backend("alone")
    comm.init_process_group(store=native.HashStore(), rank=0, world_size=1)
    try:
        assert comm.get_backend() == "alone"
    finally:
        native.destroy_process_group()
        comm.set_backend("torch")


def test_a_simulated_rank_has_a_backend_of_its_own() -> None:
    def choose() -> str:
        if native.get_rank() == 0:
            comm.set_backend("gloo")
        comm.barrier()
        return comm.cdb.name

    link = ringsim.Link(alpha_s=1.0, beta_s_per_byte=0.0)
    assert ringsim.simulate(choose, world_size=2, link=link).results == ["gloo", "torch"]
    assert comm.cdb.name == "torch"


def test_backend_is_found_by_its_entry_point_and_anything_else_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "noted-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: noted\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[ringsim.backends]\nalone = test_comm_surface:register_alone\n"
        "value = test_comm_surface:HERE\nlost = not_there:register\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    others = [name for name in native.Backend.backend_list if name != "alone"]
    monkeypatch.setattr(native.Backend, "backend_list", others)
    assert comm.set_backend("alone").name == "alone"
    wrong: dict[Any, str] = {
        "pigeon": "backend must be one of .*, got 'pigeon'",
        3: "backend must be the name of .* registered with torch, .*register_backend",
        Alone: "backend must be the name of .* registered with torch, .*MessageGroup",
        "value": "the entry point 'value', ",
        "lost": "not_there is missing",
    }
    for backend, message in wrong.items():
        with pytest.raises(ArgumentError, match=message):
            comm.set_backend(backend)
    assert comm.cdb.name == "alone"


@pytest.mark.parametrize("name", ["Backend", "TorchBackend", "Membership", "get_backend_object"])
def test_names_that_are_gone_say_what_takes_their_place(name: str) -> None:
    with pytest.raises(RingError, match=r"Use ringsim\.comm|MessageGroup"):
        getattr(importlib.import_module("ringsim.comm.backend"), name)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_operation_that_the_installed_torch_lacks_is_built(
    monkeypatch: pytest.MonkeyPatch, joined: None
) -> None:
    monkeypatch.delattr(native, "all_gather_single", raising=False)
    made = {name: rest for name, *rest in functions._find_communicating()}
    signature, function = made["all_gather_single"]
    assert function is None
    out = torch.zeros(2)
    functions.make_function("all_gather_single", signature, None)(out, torch.ones(2))
    assert out.tolist() == [1, 1]
