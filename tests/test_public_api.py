"""The public names: a fixed list, light to import, with docstrings for arguments and errors."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ringsim
import ringsim.pipeline
from ringsim import exchange

PUBLIC_NAMES = set(
    "Degrade Fail FlopCosts Jitter Link Ring Slow Trace bandwidth calibrate calibration_worker "
    "check comm compare compare_semantics compute current_ring destroy_distributed environment "
    "errors explore "
    "get_comm_device get_pipeline_parallel_pred_group get_pipeline_parallel_succ_group "
    "initialize_distributed load load_ipython_extension mark memory pipeline plot_schedules "
    "predict scale session simulate simulate_schedule span suppress_output topologies trace "
    "traced".split()
)
PUBLIC_MODULES = {"check", "comm", "environment", "errors", "explore", "pipeline", "topologies"}
PIPELINE: dict[str, str] = ringsim.pipeline._CONTENTS
SEED_NAMES = set(
    "partition_model get_stage_layers forward_stage backward_stage send_activation recv_activation "
    "send_gradient recv_gradient rehearse train_step_pipeline train_step_pipeline_afab".split()
)
WITHOUT_TORCH = {
    name for name, module in PIPELINE.items() if module.startswith("ringsim.schedules")
}
with_contents = pytest.mark.parametrize(
    "package", [ringsim, ringsim.pipeline], ids=["ringsim", "pipeline"]
)
HEAVY = ("torch", "matplotlib", "pandas", "pyarrow", "networkx", "IPython", "numpy")


def test_public_names_are_exactly_these() -> None:
    assert set(ringsim.__all__) == PUBLIC_NAMES
    assert set(dir(ringsim)) == PUBLIC_NAMES | {"__version__"}


def test_public_names_are_found_where_the_contents_say() -> None:
    for name in PUBLIC_NAMES:
        value = getattr(ringsim, name)
        assert (
            value.__name__ if inspect.ismodule(value) else value.__module__
        ) == ringsim._CONTENTS[name]
    with pytest.raises(AttributeError, match="no attribute 'traec'"):
        _ = ringsim.traec


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_a_file_that_hides_a_package_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").touch()
    (tmp_path / "script.py").write_text("import ringsim")
    ended = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    assert re.search(rf"ImportError: cannot import {name}: .*{name}\.py shadows ", ended.stderr)


def test_names_of_the_seed_are_in_the_pipeline() -> None:
    assert set(ringsim.pipeline.__all__) >= SEED_NAMES
    assert dir(ringsim.pipeline) == sorted(PIPELINE)
    for name, module in PIPELINE.items():
        assert getattr(ringsim.pipeline, name) is getattr(importlib.import_module(module), name)
        assert getattr(ringsim.pipeline, name).__module__ == module
    with pytest.raises(AttributeError, match="no attribute 'partiton_model'"):
        _ = ringsim.pipeline.partiton_model


def test_docstrings_list_the_contents() -> None:
    listed, of_pipeline = (
        re.findall(r"^    (\w+)  +\S", package.__doc__ or "", re.MULTILINE)
        for package in (ringsim, ringsim.pipeline)
    )
    assert sorted(listed) == sorted(PUBLIC_NAMES)
    assert sorted(set(of_pipeline) & set(PIPELINE)) == sorted(PIPELINE)


@with_contents
def test_type_checkers_see_the_contents(package: ModuleType) -> None:
    block = next(
        node
        for node in ast.parse(Path(package.__file__ or "").read_text()).body
        if isinstance(node, ast.If)
    )
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        (alias,) = node.names
        assert alias.asname == alias.name  # the form of a re-export
        seen[alias.name] = f"ringsim.{alias.name}" if node.module == "ringsim" else node.module
    assert seen == package._CONTENTS


def test_no_module_bears_the_name_of_a_public_function() -> None:
    # Importing ringsim.trace.x would replace the function `ringsim.trace` with the module `trace`.
    modules = {
        info.name.rpartition(".")[2] for info in pkgutil.walk_packages(ringsim.__path__, "ringsim.")
    }
    assert modules >= PUBLIC_MODULES
    assert modules & (PUBLIC_NAMES - PUBLIC_MODULES) == set()


@pytest.mark.parametrize(
    "statement",
    [
        "import ringsim",
        "import ringsim; dir(ringsim); ringsim.errors.RingError",
        "from ringsim import errors",
    ],
)
def test_import_is_light(statement: str) -> None:
    code = f"{statement}\nimport sys\nprint([name for name in {HEAVY} if name in sys.modules])"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert shown.strip() == "[]"


def test_a_worker_is_started_without_torch() -> None:
    code = (
        "import sys, ringsim\nfrom ringsim.launch import job\njob.pack_call(print, (), {}, 0)\n"
        "print('torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "False"
    )


def test_a_pipeline_is_planned_without_torch_and_run_without_transformers() -> None:
    assert {"make_schedule", "by_count", "validate"} <= WITHOUT_TORCH
    names = ", ".join(sorted(WITHOUT_TORCH))
    code = (
        f"import sys; sys.modules['torch'] = None; from ringsim.pipeline import {names}; del "
        "sys.modules['torch'];"
        "sys.modules['transformers'] = None; from ringsim.pipeline import "
        "*; SmallTransformer(5, 4, 1, 1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("package", "name"),
    [
        *((ringsim, name) for name in sorted(PUBLIC_NAMES - PUBLIC_MODULES)),
        *((ringsim.pipeline, name) for name in sorted(PIPELINE)),
    ],
)
def test_docstring_says_what_it_takes_gives_and_raises(package: ModuleType, name: str) -> None:
    value = getattr(package, name)
    text = inspect.getdoc(value) or ""
    assert re.search(r">>> |^Example:$", text, re.MULTILINE), f"{name} needs an example that runs"
    _check_sections(name, value, text)


@pytest.mark.parametrize("name", ["Link", "Ring", "Trace"])
def test_methods_are_documented(name: str) -> None:
    value = getattr(ringsim, name)
    fields = {field.name for field in dataclasses.fields(value)}
    for method, function in vars(value).items():
        text = inspect.getdoc(function) or ""
        called = inspect.isfunction(function)
        if method.startswith("_") or method in fields:
            continue
        if called or isinstance(function, property):
            assert text, f"{name}.{method} needs a docstring"
            if called and len(text.splitlines()) > 1:  # one line may be enough
                _check_sections(f"{name}.{method}", function, text)


def _check_sections(name: str, value: Any, text: str) -> None:
    signature = inspect.signature(value)
    parameters = [each for each in signature.parameters if each not in ("self", "ipython")]
    if parameters and not inspect.isabstract(value):
        assert re.search(r"^(Args|Attributes):$", text, re.MULTILINE), f"{name} needs Args"
        for parameter in parameters:
            assert re.search(rf"\b{parameter}\b", text), f"{name} does not describe {parameter}"
    if inspect.isfunction(value) and signature.return_annotation not in (
        None,
        "None",
        inspect.Signature.empty,
    ):
        assert re.search(r"^(Returns|Yields):$|^Returns\b|^Yields\b", text, re.MULTILINE), (
            f"{name} needs Returns"
        )
    if inspect.isfunction(value) and re.search(
        r"^\s+raise \w", inspect.getsource(value), re.MULTILINE
    ):
        assert re.search(r"^Raises:$", text, re.MULTILINE), f"{name} needs Raises"


def test_a_removed_function_tells_what_to_use() -> None:
    trace = ringsim.simulate_schedule("1f1b", num_ranks=1, num_microbatches=1).trace()
    for name in ("goal", "chakra", "otf2"):
        said = rf"_{name} was removed in ringsim 0\.3\. Use Perfetto's format \(\w+\), or "
        with pytest.raises(ringsim.errors.RingError, match=said):
            getattr(trace, f"to_{name}")("run")
        with pytest.raises(ringsim.errors.RingError, match=said):
            getattr(exchange, f"read_{name}")("run", link=None)
        assert f"read_{name}" not in exchange.__all__


def test_every_error_is_in_the_tree_and_has_a_docstring() -> None:
    errors = importlib.import_module("ringsim.errors")
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, BaseException)
        assert error.__doc__
        assert re.search(rf"\+-- {name}\b", errors.__doc__), f"{name} is not in the tree"
