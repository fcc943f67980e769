"""Frozen results for users, as text: simulated traces, makespans, signatures, the fault table, exported files, old trace files.

``python tests/golden/freeze.py`` rewrites the files, and ``test_golden.py`` checks each of them. The script uses only public names, so
internal changes do not affect the files. A change of these files is a change for users: describe it in the changelog.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import importlib
import importlib.util
import inspect
import io
import json
import linecache
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

import ringsim
from ringsim import comm, errors
from ringsim.comm import deepspeed
from ringsim.pipeline import Costs, evaluate, make_schedule, to_text, validate

HERE = Path(__file__).parent
TESTS = HERE.parent
for folder in (HERE, TESTS, TESTS / "distributed"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

import programs  # noqa: E402

FIRST_ROWS = 40  # the rows of a table kept as text; a hash covers all rows
OLD = ("old_simulated", "old_measured")  # trace files written by an earlier version
EXPORTED = ("messages_by_tag_and_shape", "reductions", "training_1f1b")


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# Traces


def tell_table(frame: pd.DataFrame) -> Iterator[str]:
    """Yields the first rows as text, and a hash of each column; paths are shortened to their last part."""
    frame = frame.copy()
    if "file" in frame:
        frame["file"] = [str(file).rpartition("/")[2] for file in frame["file"].astype(object)]
    words = pd.DataFrame({name: [str(value) for value in frame[name].astype(object)] for name in frame}, columns=list(frame))
    yield f"{len(frame)} rows"
    for name, column in words.items():
        text = frame[name].dtype == object and pd.api.types.is_string_dtype(frame[name])  # the dtype in pandas 2
        yield f"{name}: {digest(chr(10).join(column))} ({'str' if text else frame[name].dtype.name})"
    yield ",".join(words)
    yield from (",".join(row) for row in words.head(FIRST_ROWS).itertuples(index=False))


def tell_findings(diagnosis: Any) -> Iterator[str]:
    for finding in diagnosis.findings:
        operations = [f"{each.op} of rank {each.rank} at line {each.line}, {each.status}" for each in finding.operations]
        yield f"finding: {finding.kind}, ranks {list(finding.ranks)}; {'; '.join(operations)}"


def run(name: str) -> tuple[Any, errors.RingError | None]:
    """Returns the trace of a program, and its error, if any."""
    worker, world_size, options = programs.PROGRAMS[name]
    try:
        return ringsim.simulate(worker, world_size=world_size, **options), None
    except errors.RingError as error:
        return error.trace, error


def tell_trace(trace: Any) -> Iterator[str]:
    yield f"makespan {round(trace.makespan_s * 1e9)} ns"
    yield f"metadata: {', '.join(sorted(trace.metadata))}"
    yield from tell_findings(trace.explain())
    yield f"unmatched: {len(trace.unmatched)}"
    for which in ("events", "messages"):
        yield f"\n{which}"
        yield from tell_table(trace.to_pandas(which))


def freeze_trace(name: str) -> str:
    trace, error = run(name)
    lines = (
        [f"raised {type(error).__name__}"]
        if error is not None
        else [f"rank {rank}: {result!r}" for rank, result in enumerate(trace.results)]
    )
    return "\n".join([*lines, *tell_trace(trace), ""])


def freeze_old(name: str) -> str:
    return "\n".join([*tell_trace(ringsim.load(HERE / f"{name}.ringtrace")), ""])


# Makespans

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_h2", "zb_v", "dualpipe_v")
SIZES = [(1, 1), (1, 4), (2, 2), (2, 5), (3, 3), (3, 8), (4, 4), (4, 8), (4, 12), (6, 6), (6, 18)]
ONE_COST = {
    "unit": Costs(),
    "late": Costs(latency=Fraction(1, 2)),
    "slow forward": Costs(forward=3, input=2, weight=1, latency=1),
    "slow backward": Costs(forward=1, backward=Fraction(7, 3), latency=2),
}


def rising_costs(num_stages: int) -> Costs:
    """Returns costs that differ between stages."""
    return Costs(*([Fraction(start + stage, 3) for stage in range(num_stages)] for start in (1, 2, 3)), latency=Fraction(1, 4))


def tell_time(make: Callable[[], Any]) -> str:
    """Returns an exact time, or the name of the error."""
    try:
        time = make()
    except errors.RingError as error:
        return type(error).__name__
    return str(Fraction(time).limit_denominator(10**6)) if isinstance(time, float) else str(time)


def freeze_makespans(name: str) -> str:
    lines = []
    for num_ranks, num_microbatches in SIZES:
        lines.append(f"{num_ranks} ranks, {num_microbatches} microbatches")
        try:
            schedule = make_schedule(name, num_ranks, num_microbatches)
        except errors.RingError as error:
            lines.append(f"  {type(error).__name__}")
        else:
            lines += tell_schedule(name, schedule, {"num_ranks": num_ranks, "num_microbatches": num_microbatches})
    return "\n".join([*lines, ""])


def tell_schedule(name: str, schedule: Any, counts: dict[str, int]) -> Iterator[str]:
    def simulated(costs: Costs, **options: Any) -> str:
        return tell_time(lambda: ringsim.simulate_schedule(name, costs, **counts, **options).makespan)

    validate(schedule)
    yield f"  actions {digest(to_text(schedule))}"
    for which, costs in {**ONE_COST, "rising": rising_costs(schedule.num_stages)}.items():
        for semantics in ("rendezvous", "buffered"):
            exact = tell_time(partial(lambda *given: evaluate(*given).makespan, schedule, costs, semantics))
            quick = [simulated(costs, semantics=semantics, ahead=ahead) for ahead in (0, 1, 3)]
            yield f"  {which}, {semantics}: {exact}; {' '.join(quick)}"
    link = ringsim.Link(alpha_s=1, beta_s_per_byte=2)
    yield f"  over a link: {' '.join(simulated(Costs(4, 3, 2), link=link, size_bytes=size) for size in (0, 1, 3))}"
    runs = ringsim.simulate_schedule(name, list(ONE_COST.values()), **counts)
    yield f"  all at once: {' '.join(str(Fraction(time).limit_denominator(1000)) for time in runs.makespan)}"
    run = ringsim.simulate_schedule(name, Costs(1, 1, 1, latency=1), **counts)
    reasons = ", ".join(f"{reason} {count}" for reason, count in run.critical_path.by_reason.items())
    yield f"  idle {' '.join(f'{time:g}' for time in run.idle)}; on the critical path: {reasons}"


# Names

PUBLIC = ("ringsim", "ringsim.pipeline", "ringsim.comm", "ringsim.comm.deepspeed", "ringsim.errors", "ringsim.check", "ringsim.topologies",
          "ringsim.exchange", "ringsim.environment", "ringsim.pipeline.closed_forms")  # fmt: skip


DEEPSPEED = """
    ProcessGroup ReduceOp all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce all_reduce_coalesced
    all_to_all all_to_all_single allgather_fn barrier batch_isend_irecv broadcast broadcast_object_list configure
    destroy_process_group enable_symm_mem_for_group gather get_all_ranks_from_group get_comm_operation_count get_global_rank
    get_local_rank get_local_rank_from_launcher get_logged_comm_ops get_rank get_world_group get_world_rank_from_launcher
    get_world_size get_world_size_from_launcher has_all_gather_into_tensor has_all_reduce_coalesced has_coalescing_manager
    has_comm_data has_reduce_scatter_tensor in_aml in_aws_sm in_dlts inference_all_reduce init_distributed initialize_mesh_device
    irecv is_available is_initialized isend log_summary monitored_barrier mpi_discovery new_group patch_aml_env_for_torch_nccl_backend
    patch_aws_sm_env_for_torch_nccl_backend recv reduce reduce_scatter reduce_scatter_fn reduce_scatter_tensor reset_log scatter send
    set_backend timed_op
""".split()


def tell_signature(value: Any) -> str:
    """Returns a signature with names and defaults, without annotations."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    kept = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    text = str(signature.replace(parameters=kept, return_annotation=signature.empty))
    while (shorter := re.sub(r"<[^<>]*>", "...", text)) != text:  # a default without a readable text
        text = shorter
    return text


def tell_class(name: str, kind: type) -> Iterator[str]:
    """Yields the arguments, attributes and methods of a class, except for those of Python's own classes."""
    yield name if issubclass(kind, enum.Enum) else f"{name}{tell_signature(kind)}"  # an Enum has Python's signature
    known = {each for base in kind.__mro__ if base.__module__ in ("builtins", "typing", "enum") for each in vars(base)}
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    for member in sorted({*(each for each in dir(kind) if not each.startswith("_")), *fields} - known):
        value = inspect.getattr_static(kind, member, None)
        method = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        yield f"  {name}.{member}{tell_signature(method) if inspect.isfunction(method) else ''}"


def tell_value(name: str, value: Any) -> Iterator[str]:
    if inspect.ismodule(value):
        yield f"{name}: a module"
    elif inspect.isclass(value) and issubclass(value, BaseException):
        yield from (f"{name}: an error, caught as {base.__name__}" for base in value.__mro__ if base is not object)
    elif inspect.isclass(value):
        yield from tell_class(name, value)
    else:
        yield f"{name}{tell_signature(value) if callable(value) else ': a value'}"


def public_names(module: Any) -> list[str]:
    """Returns the public names of a module; for ``ringsim.comm``, only those that torch.distributed lacks."""
    import torch.distributed

    if module is deepspeed:
        return DEEPSPEED
    if module is not comm:
        return sorted(module.__all__)
    own = [name for name in dir(module) if not name.startswith("_") and not hasattr(torch.distributed, name)]
    return [name for name in own if not inspect.ismodule(getattr(module, name))]


def freeze_names(module_name: str) -> str:
    package, _, name = module_name.rpartition(".")
    module = getattr(__import__(package, fromlist=[name]), name) if package else importlib.import_module(name)  # from package import name
    return "\n".join([line for name in public_names(module) for line in tell_value(name, getattr(module, name))] + [""])


def freeze_results() -> str:
    """Returns the classes of results that users get from calls."""
    trace, _ = run("training_1f1b")
    step = ringsim.simulate_schedule("1f1b", num_ranks=2, num_microbatches=4)
    diagnosis = run("all_send_first")[0].explain()
    evaluation = evaluate(make_schedule("1f1b", 2, 4))
    calibration = ringsim.calibrate(ringsim.load(HERE / "old_measured.ringtrace"))
    found = {
        "Events": trace.events, "Messages": trace.messages, "Waits": trace.waits, "Bubble": trace.bubble(),
        "PeakActivations": trace.peak_activations(), "Unmatched": run("all_send_first")[0].unmatched[0],
        "Diagnosis": diagnosis, "Finding": diagnosis.findings[0], "Operation": diagnosis.findings[0].operations[0],
        "ScheduleRun": step, "CriticalPath": step.critical_path, "Sensitivity": step.sensitivity(),
        "WhatIfs": ringsim.simulate_schedule("1f1b", [Costs()], num_ranks=2, num_microbatches=4),
        "TimedAction": evaluation.actions[0][0], "TimedMessage": evaluation.messages[0], "Calibration": calibration,
    }  # fmt: skip
    return "\n".join([line for name, value in found.items() for line in tell_class(name, type(value))] + [""])


def freeze_commands() -> str:
    """Returns the arguments of each command, one per line, so that new ones may be added."""
    from ringsim.cli import main

    def usage(*arguments: str) -> str:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            main([*arguments, "--help"])
        return said.getvalue()

    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "1000"
    try:
        verbs = re.findall(r"^    ([a-z-]+)(?: |$)", usage(), re.MULTILINE)
        taken = {verb: re.findall(r"\[.*?\]|\S+", usage(verb).splitlines()[0])[3:] for verb in verbs}
        return "".join(f"ringsim {verb} {one}\n" for verb, each in taken.items() for one in each)
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)


# Faults


def fault_rows() -> dict[str, list[str]]:
    """Returns the table of tests/distributed/faults.md: kind, ranks and error of each row."""
    rows = {}
    for line in (TESTS / "distributed" / "faults.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"\d+[a-z]?", cells[0]):
            rows[cells[0]] = cells[3:6]
    return rows


def freeze_fault_table() -> str:
    return "\n".join([f"{row}: {kind}, {ranks}, {error}" for row, (kind, ranks, error) in fault_rows().items()] + [""])


def freeze_simulated_faults() -> str:
    """Returns the end of each fault program on simulated ranks, one per line; program lines are quoted as text."""
    import fault_programs
    import test_simulated_faults as simulated

    lines = []
    for row in simulated.NUMBERS:
        fault = fault_programs.FAULTS[row]
        error: Any = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                trace: Any = ringsim.simulate(fault.worker, world_size=fault.size, args=fault.args(), link=simulated.LINK)
            except errors.RingError as raised:
                error, trace = raised, raised.trace
        said = [f"{row}: {'ends' if error is None else type(error).__name__}"]
        findings = (trace.explain() if error is None else error.diagnosis).findings
        for finding in findings[:1]:
            said.append(f"{finding.kind}, ranks {list(finding.ranks)}")
            said += [f"rank {each.rank}, {each.op}: {linecache.getline(each.file, each.line).strip()}" for each in finding.operations]
        lines.append(" | ".join(said))
    return "\n".join([*lines, ""])


# Files for other tools


def tell_text(text: str) -> str:
    lines = text.splitlines()
    return "\n".join([f"{len(lines)} lines, {digest(text)}", *lines[:200], ""])


def freeze_chrome(trace: Any, there: Path) -> str:
    trace.to_chrome(there)
    content = json.loads(there.read_text())
    events = content.pop("traceEvents")
    content["otherData"]["ringsim"] = sorted(content["otherData"]["ringsim"])  # frozen elsewhere, and contains this folder's path
    return tell_text("\n".join(json.dumps(each, sort_keys=True).replace(str(HERE), "golden") for each in (content, *events)))


def freeze_perfetto(trace: Any, there: Path) -> str:
    from google.protobuf import text_format
    from published_schemas import PERFETTO, compile_schema

    trace.to_perfetto(there)
    parsed = compile_schema(PERFETTO)["Trace"].FromString(there.read_bytes())
    lines = [text_format.MessageToString(packet, as_one_line=True).replace(str(HERE), "golden") for packet in parsed.packet]
    return tell_text("\n".join(line for line in lines if '"metadata' not in line and "metadata\\" not in line))


WRITERS = {"chrome": freeze_chrome, "perfetto": freeze_perfetto}


def freeze_export(tool: str, name: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return WRITERS[tool](run(name)[0], Path(folder) / f"run.{'json' if tool == 'chrome' else tool}")


# All of them

FILES: dict[str, Callable[[], str]] = {
    **{f"traces/{name}.txt": lambda name=name: freeze_trace(name) for name in programs.PROGRAMS},  # type: ignore[misc]
    **{f"{name}.txt": lambda name=name: freeze_old(name) for name in OLD},  # type: ignore[misc]
    **{f"makespans/{name}.txt": lambda name=name: freeze_makespans(name) for name in SCHEDULES},  # type: ignore[misc]
    **{f"names/{module}.txt": lambda module=module: freeze_names(module) for module in PUBLIC},  # type: ignore[misc]
    "names/results.txt": freeze_results,
    "names/commands.txt": freeze_commands,
    "faults/table.txt": freeze_fault_table,
    "faults/simulated.txt": freeze_simulated_faults,
    **{f"exports/{name}.{tool}.txt": lambda tool=tool, name=name: freeze_export(tool, name) for tool in WRITERS for name in EXPORTED},  # type: ignore[misc]
}


def main() -> None:
    for file, freeze in FILES.items():
        (HERE / file).parent.mkdir(exist_ok=True)
        (HERE / file).write_text(freeze())


if __name__ == "__main__":
    main()
