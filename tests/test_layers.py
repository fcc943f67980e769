"""The layer rule: a module imports only from the rows above it, or from earlier in its own row. Read from the source, without importing it.

Imports inside functions count. Imports under ``if TYPE_CHECKING`` do not: they are for type checkers, and nothing runs. The table of dotted
names that the convenience methods of ``Trace`` and ``Bandwidths`` use, like the contents in ``ringsim/__init__.py``, is not an import: that
is the exemption, and the last test names the files that may have one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "ringsim").rglob("*.py"))
}

# Row by row from below, and within a row in the order in which modules may import each other. `ringsim` itself, the table of contents,
# stands outside: it imports nothing when it is imported.
ROWS: tuple[tuple[str, ...], ...] = (
    (
        *(
            "ringsim.errors",
            "ringsim.arguments",
            "ringsim.costs",
            "ringsim.link",
            "ringsim.injections",
            "ringsim.topologies",
            "ringsim.traces",
            "ringsim.traces.events",
        ),
        *("ringsim.pipeline", "ringsim.pipeline.actions", "ringsim.pipeline.schedule"),
        *(f"ringsim.pipeline.schedules.{name}" for name in ("arguments", "rows", "linear", "looped", "vee", "zero_bubble")),
        *("ringsim.pipeline.schedules", "ringsim.pipeline.schedule_text"),
        *("ringsim.pipeline.partition_plan", "ringsim.pipeline.flops"),
        *(f"ringsim.pipeline.{name}" for name in ("dataflow", "lowering", "lockstep", "programs", "costs", "well_formed")),
        *("ringsim.pipeline.evaluator", "ringsim.pipeline.validation"),
        *("ringsim.pipeline.closed_forms", "ringsim.pipeline.uneven_stages"),
        *(f"ringsim.pipeline.generation_{name}" for name in ("map", "plan", "clock")),
    ),
    (
        *("ringsim.state", "ringsim.provenance", "ringsim.node_list", "ringsim.launchers", "ringsim.environment"),
        *("ringsim.published", "ringsim.traces.bandwidths"),
        *(
            f"ringsim.traces.{name}"
            for name in ("tables", "buffer", "call_sites", "hot_path", "lost_peers", "notices", "recorder", "neighbour", "parts", "joining")
        ),
        *("ringsim.computing", "ringsim.charging"),
        *(f"ringsim.traces.{name}" for name in ("stages", "bubbles", "live_activations")),
        *(
            f"ringsim.traces.{name}"
            for name in (
                "units",
                "matching",
                "waits",
                "log_table",
                "log_rows",
                "frames",
                "summary",
                "reached",
                "bandwidths",
                "value",
                "whole_files",
                "files",
            )
        ),
        *("ringsim.calibration", "ringsim.comparison"),
        "ringsim.traces.steps",
        *(
            "ringsim.diagnose",
            *(f"ringsim.diagnose.{name}" for name in ("finding", "waitfor", "doubts", "hints", "verdict", "collective_calls")),
        ),
        *(f"ringsim.diagnose.{name}" for name in ("world_of_events", "activity", "lateness", "mismatches", "leftovers", "explain")),
        "ringsim.simulator",
        *(f"ringsim.simulator.{name}" for name in ("carriers", "cores", "fair_share", "shared_links", "network")),
        *(f"ringsim.simulator.{name}" for name in ("operations", "schedule_operations", "linear_operations", "prices", "wavefront")),
        *(f"ringsim.simulator.{name}" for name in ("compiled", "worklist", "level_order", "critical_path", "sensitivity", "what_if")),
        *(f"ringsim.simulator.{name}" for name in ("schedule_trace", "schedule_run", "schedule_api", "scaling")),
        *(f"ringsim.exchange.{name}" for name in ("foreign", "rows", "boxes", "lanes", "slices", "wire", "perfetto", "perfetto_reading")),
        *(f"ringsim.exchange.{name}" for name in ("chrome", "profiler", "programs", "rounds", "replay", "goal", "chakra")),
        *("ringsim.exchange.otf2_writing", "ringsim.exchange.otf2_reading", "ringsim.exchange"),
    ),
    (
        *("ringsim.printing", "ringsim.background", "ringsim.resolver", "ringsim.roll_call", "ringsim.rendezvous"),
        *(
            f"ringsim.comm.{name}"
            for name in (
                "collectives",
                "group_names",
                "gpu_times",
                "follower",
                "recount",
                "counterparts",
                "torch_names",
                "prechecks",
                "buffer_guard",
                "group_making",
                "torch_hooks",
                "injecting",
                "backend",
                "handle",
                "member",
                "reductions",
                "pickled",
            )
        ),
        *(f"ringsim.comm.{name}" for name in ("built_collectives", "built_messages", "built_objects", "fallbacks", "torch_backend")),
        "ringsim.comm.mpi_group",
        "ringsim.comm.membership",
        *(f"ringsim.comm.mpi_{name}" for name in ("buffers", "handle", "reductions", "tape", "operations", "messages")),
        *(f"ringsim.comm.mpi_{name}" for name in ("reducing", "collectives", "objects", "exit", "process", "backend")),
        *(f"ringsim.comm.{name}" for name in ("log_records", "log_gather", "log_settings")),
        *(f"ringsim.comm.{name}" for name in ("log", "log_report", "log_timed", "functions", "p2p_op", "registry")),
        *(f"ringsim.comm.deepspeed_{name}" for name in ("ops", "queries", "start")),
        *("ringsim.comm", "ringsim.comm.deepspeed"),
        *("ringsim.pair_groups", "ringsim.ring_arguments", "ringsim.ring_building", "ringsim.ring", "ringsim.backend_choice"),
    ),
    (
        *("ringsim.pipeline.adapters", "ringsim.pipeline.adapters.protocol", "ringsim.pipeline.transformer"),
        *(f"ringsim.pipeline.adapters.{name}" for name in ("sequential", "small", "causal_lm", "lookup")),
        *(f"ringsim.pipeline.{name}" for name in ("stage", "stage_flops", "layer_times", "partition")),
        *(
            f"ringsim.pipeline.{name}"
            for name in ("ring_at_hand", "steps", "headers", "routes", "messages", "mailbox", "executor", "rehearsal")
        ),
        *(f"ringsim.pipeline.{name}" for name in ("sharing", "tied", "clipping", "replicas", "dropout", "training")),
        *(f"ringsim.pipeline.{name}" for name in ("single_process", "gradients", "model_checks")),
        *(f"ringsim.pipeline.{name}" for name in ("prompts", "token_choice", "generation_link", "generation")),
        "ringsim.launch",
        *(
            f"ringsim.launch.{name}"
            for name in (
                "config",
                "notebook",
                "job",
                "cause",
                "failure",
                "output",
                "progress",
                "processes",
                "stillness",
                "verdicts",
                "wake",
                "live_part",
            )
        ),
        *(f"ringsim.launch.{name}" for name in ("live_parts", "watcher", "rank", "forkserver", "rank_set")),
        *(
            f"ringsim.launch.{name}"
            for name in ("forked", "portable", "start", "launcher", "board", "joined", "block_ends", "recording", "run", "api")
        ),
        *(f"ringsim.simulator.{name}" for name in ("semantics", "memory", "generators", "streams")),
        *(f"ringsim.simulator.{name}" for name in ("surroundings", "mode_words", "modes", "tape")),
        *(f"ringsim.simulator.{name}" for name in ("hub", "groups", "handles")),
        *(
            f"ringsim.simulator.{name}"
            for name in (
                "parts",
                "moving",
                "post_office",
                "desk",
                "rank_recorder",
                "ranks",
                "ordered_office",
                "messages",
                "collective_times",
                "meetings",
                "collectives",
                "objects",
                "backend",
                "outputs",
            )
        ),
        *("ringsim.simulator.run", "ringsim.simulator.api"),
        *(
            "ringsim.links",
            *(f"ringsim.links.{name}" for name in ("plan", "samples", "rows", "patterns", "ceilings", "gpu", "worker")),
        ),
        *("ringsim.links.here", "ringsim.links.simulated", "ringsim.links.api"),
    ),
    (
        "ringsim.plot",
        *(f"ringsim.plot.{name}" for name in ("style", "paths", "circle", "graph", "matrix", "ring")),
        *(f"ringsim.plot.{name}" for name in ("bars", "density", "rows", "time_axis", "boxes", "arrows")),
        *(f"ringsim.plot.{name}" for name in ("actions", "live_curve", "step_picture", "stages", "timeline", "display")),
        *("ringsim.plot.inner_iterations", "ringsim.plot.schedule", "ringsim.plot.overlay"),
        *(f"ringsim.plot.{name}" for name in ("size_axes", "labels", "achieved", "curves", "curve_lines", "published_marks")),
        *("ringsim.plot.bandwidth_chart", "ringsim.plot.edge_labels", "ringsim.plot.waitfor"),
        *("ringsim.plot.path_line", "ringsim.plot.busy_map", "ringsim.plot.schedule_run"),
    ),
    (
        *(f"ringsim.check.{name}" for name in ("result", "examination", "neighbours", "shares", "pairs", "rounds")),
        *(f"ringsim.check.{name}" for name in ("exchanges", "fits", "timed", "chunks", "causes", "tokens", "settings")),
        *(f"ringsim.check.{name}" for name in ("small_task", "cuts", "handing_over", "boundaries", "orders", "fewest")),
        *("ringsim.check", "ringsim.cell", "ringsim.magics", "ringsim.demo", "ringsim.generation_demo"),
        *(
            f"ringsim.cli.{name}"
            for name in (
                "verb",
                "demo",
                "doctor",
                "generate",
                "show",
                "script",
                "explain",
                "measure",
                "toml_table",
                "description",
                "virtual",
            )
        ),
        *("ringsim.cli", "ringsim.__main__"),
    ),
)
FRONT_DOORS = 5  # the row of the modules that users enter by: these may take names from the contents
THIRD_PARTY: tuple[set[str], ...] = (
    {"numpy"},
    {"numpy", "pandas", "pyarrow", "mpi4py", "numba", "otf2", "_otf2"},
    {"numpy", "torch", "mpi4py"},
    {"numpy", "torch", "cloudpickle", "greenlet", "IPython", "transformers"},
    {"numpy", "matplotlib", "networkx"},  # pictures: never torch
    {"numpy", "torch", "cloudpickle", "matplotlib", "IPython", "ipywidgets"},
)
PLACE = {module: (row, index) for row, modules in enumerate(ROWS) for index, module in enumerate(modules)}


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yields (dotted name, line) for every import of a file, those of type checkers left out; ``from a import b`` yields ``a.b``."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(), str(path))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            waiting.extend(node.orelse)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        else:
            waiting.extend(ast.iter_child_nodes(node))


def own_module(name: str) -> str | None:
    """Returns the module of ringsim that a dotted name means, None for what lies outside."""
    if name.partition(".")[0] != "ringsim":
        return None
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def complaints(module: str, path: Path) -> list[str]:
    """Lists the imports of a module that break the rule."""
    row, index = PLACE[module]
    nowhere = (len(ROWS), 0)
    found = []
    for name, line in imports(path):
        other = own_module(name)
        where = f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}:{line}"
        if other == "ringsim":
            if name != "ringsim.__version__" and row != FRONT_DOORS:
                found.append(f"{where} imports {name}: name the module that defines it, the contents may lead anywhere")
        elif other is not None:
            place = PLACE.get(other, nowhere)
            if place >= (row, index):
                found.append(f"{where} imports {other}, which stands in row {place[0]}, at or after this module's place in row {row}")
        else:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in THIRD_PARTY[row]:
                found.append(f"{where} imports {top}: row {row} may import {sorted(THIRD_PARTY[row])} and the standard library")
    return sorted(found)


def test_every_module_has_a_place() -> None:
    assert set(PLACE) == set(MODULES) - {"ringsim"}, "write new modules into ROWS (and docs/architecture.md), and take old ones out"


@pytest.mark.parametrize("module", sorted(set(MODULES) & set(PLACE)))
def test_module_imports_from_above_only(module: str) -> None:
    assert complaints(module, MODULES[module]) == []


def test_contents_import_nothing() -> None:
    assert {name.partition(".")[0] for name, _ in imports(MODULES["ringsim"])} <= {"importlib", "typing"}


@pytest.mark.parametrize(
    ("module", "source", "why"),
    [
        ("ringsim.errors", "import torch", "row 0 may import"),
        ("ringsim.errors", "def late():\n    from ringsim.state import get_state", "row 1"),
        ("ringsim.plot.style", "import torch.distributed", "row 4 may import"),
        ("ringsim.state", "import ringsim", "the contents may lead anywhere"),
        ("ringsim.state", "from ringsim import trace", "the contents may lead anywhere"),
        ("ringsim.traces.value", "try:\n    import ringsim.plot.ring\nexcept ImportError:\n    pass", "row 4"),
    ],
)
def test_rule_finds_what_breaks_it(tmp_path: Path, module: str, source: str, why: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    (complaint,) = complaints(module, path)
    assert why in complaint


def test_rule_passes_over_imports_of_type_checkers(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ringsim.traces.value import Trace")
    assert complaints("ringsim.errors", path) == []


def test_only_the_named_files_import_by_a_dotted_name() -> None:
    by_name = {"import_module", "__import__"}
    users = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Name) and node.id in by_name) or (isinstance(node, ast.Attribute) and node.attr in by_name)
    }
    assert users == {"ringsim", "ringsim.pipeline", "ringsim.traces.lazy"}
