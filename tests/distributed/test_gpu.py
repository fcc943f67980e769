"""Ranks on GPUs with NCCL, one per GPU or several that share one; these tests need a GPU."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matplotlib.text import Text
from one_gpu_rank import make_step
from rank_server import free_port
from torch import nn

import ringsim
from ringsim.errors import ArgumentError
from ringsim.exchange import read_flight_recorder
from ringsim.pipeline import cross_entropy
from ringsim.schedules import SCHEDULE_NAMES

GPUS = torch.cuda.device_count() if dist.is_nccl_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("nothing_left_behind"),
    pytest.mark.skipif(
        GPUS == 0, reason="needs a GPU and a CUDA build of torch: this machine has none"
    ),
]


def pass_once() -> float:
    """Passes each rank's number to its successor, on the GPUs."""
    ring = ringsim.current_ring()
    token = torch.full((1024,), float(ring.rank), device="cuda")
    arriving = torch.empty_like(token)
    if ring.world_size > 1:
        send = dist.P2POp(dist.isend, token, ring.succ, ring.succ_group)
        recv = dist.P2POp(dist.irecv, arriving, ring.pred, ring.pred_group)
        for operation in (send, recv) if ring.rank % 2 == 0 else (recv, send):
            for work in dist.batch_isend_irecv([operation]):
                work.wait()
    dist.all_reduce(token)
    torch.cuda.synchronize()
    return float(arriving[0]) if ring.world_size > 1 else float(token[0])


def test_every_rank_has_a_gpu_of_its_own() -> None:
    trace = ringsim.trace(pass_once, world_size=GPUS, comm_device="gpu")
    assert trace.results == [float((rank - 1) % GPUS) for rank in range(GPUS)]
    assert trace.metadata["backend"] == "nccl"
    said = "".join(trace.metadata["not_recorded"])
    assert said.count("come from CUDA events") == GPUS
    assert len(trace.messages) == (GPUS if GPUS > 1 else 0)


def reduce_after_work() -> None:
    """Reduces after work that takes the GPU about a tenth of a second."""
    tensor = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(tensor)  # connects
    torch.cuda.synchronize()
    ringsim.mark("before")
    torch.cuda._sleep(200_000_000)  # cycles
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    torch.cuda._sleep(200_000_000)
    dist.all_reduce(tensor)
    ringsim.mark("queued")
    torch.cuda.synchronize()
    ringsim.mark("done")


def test_an_operation_is_done_when_the_gpu_is() -> None:
    trace = ringsim.trace(reduce_after_work, world_size=GPUS, comm_device="gpu")
    events = trace.to_pandas()
    for rank, said in enumerate(
        sentence for sentence in trace.metadata["not_recorded"] if sentence.startswith("On rank")
    ):
        within = re.search(r"3 operations come from CUDA events, within ([\d,]+) ns", said)
        assert within, said
        within_ns = int(within[1].replace(",", ""))
        mine = events[events["rank"] == rank]
        at = mine[mine["op"] == "mark"].set_index("label")["post_ns"]
        first, second = mine[mine["op"] == "all_reduce"].iloc[1:].itertuples()
        assert first.post_ns < at["queued"] < first.wait_ns <= first.done_ns, (
            "the program must continue before the GPU begins"
        )
        assert first.done_ns < second.wait_ns <= second.done_ns <= at["done"] + within_ns
        # The operation blocked the stream, not the work that was queued before it.
        assert first.done_ns - first.wait_ns < (first.wait_ns - at["before"]) / 2


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(
        ArgumentError, match=rf"less than {GPUS}, the number of GPUs on this machine, got {GPUS}"
    ):
        ringsim.trace(pass_once, world_size=GPUS + 1, comm_device="gpu")


# -- several ranks on one GPU


def run(job: str, directory: Path, ranks: int, **more: str) -> list[tuple[int, str]]:
    """Runs a job of ``one_gpu_rank.py`` on ranks that share a GPU; see ``run_command``."""
    program = str(Path(__file__).with_name("one_gpu_rank.py"))
    return run_command([program, job, str(directory)], ranks, **more)


def run_command(arguments: list[str], ranks: int, **more: str) -> list[tuple[int, str]]:
    """Runs Python on ranks that share a GPU.

    Returns each rank's exit code and output.
    """
    common = {"LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", **more}
    common |= {"MASTER_PORT": str(free_port()), "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **common, "RANK": str(rank), "NCCL_HOSTID": f"of rank {rank}"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]
    found = []
    for process in processes:
        try:
            output, _ = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        found.append((process.returncode, output))
    return found


def results_of(job: str, directory: Path, ranks: int = 2) -> tuple[list[Any], ringsim.Trace]:
    ended = run(job, directory, ranks)
    assert [code for code, _ in ended] == [0] * ranks, "\n".join(output for _, output in ended)
    results = [json.loads((directory / f"{job}-{rank}.json").read_text()) for rank in range(ranks)]
    trace = ringsim.load(directory / f"{job}.ringtrace")
    assert trace.metadata["backend"] == "nccl"
    return results, trace


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_on_one_gpu_may_receive_first(ranks: int, tmp_path: Path) -> None:
    results, trace = results_of("receive_first", tmp_path, ranks)
    assert results == [[float((rank - 1) % ranks)] * 4 for rank in range(ranks)]
    assert len(trace.messages) == ranks
    assert not trace.unmatched
    said = "".join(trace.metadata["not_recorded"])
    assert said.count("the times of 2 operations come from CUDA events") == ranks, said


def test_only_the_first_messages_of_a_ring_connect_its_ranks(tmp_path: Path) -> None:
    results, trace = results_of("first_contact", tmp_path)
    for first_s, *later_s in results:
        assert first_s > 3 * statistics.median(later_s), results
    assert len(trace.messages) == 10


def test_a_measured_curve_of_ranks_on_one_gpu_is_labelled(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    command = "-m ringsim bandwidth --device gpu --no-ceilings --sizes 8,64K,16M --limit 15 -o"
    ended = run_command([*command.split(), str(file)], 2)
    assert [code for code, _ in ended] == [0, 0], "\n".join(output for _, output in ended)
    table = ringsim.traces.bandwidths.load(file)
    measured = table.to_pandas().query("kind == 'measured'")
    assert set(measured["backend"]) == {"nccl"}
    assert set(measured["size_bytes"]) == {8, 1 << 16, 1 << 24}
    labels = [text.get_text() for text in table.plot().figure.findobj(Text)]
    assert any("NCCL over sockets, one GPU" in label for label in labels), labels


def test_batches_go_round_and_their_messages_are_paired(tmp_path: Path) -> None:
    results, trace = results_of("batch", tmp_path)
    # three hops, each adding ten: 1 + 30 and 0 + 30
    assert results == [[61.0, 61.0]] * 2
    assert len(trace.messages) == 6
    assert set(trace.to_pandas("messages")["size_bytes"]) == {4096}


@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_of_every_schedule_have_the_gradients_of_one_process(
    ranks: int, tmp_path: Path
) -> None:
    results, _ = results_of("pipeline", tmp_path, ranks)
    model, inputs, targets = make_step(torch.device("cuda", 0))
    losses = [
        cross_entropy(model(each), target) for each, target in zip(inputs, targets, strict=True)
    ]
    loss = torch.stack(losses).mean()
    loss.backward()
    for schedule in SCHEDULE_NAMES:
        found = [result[schedule] for result in results]
        assert [each[0] for each in found] == pytest.approx([loss.item()] * ranks, rel=1e-5)
        ours = {name: values for each in found for name, values in each[1].items()}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(
                torch.tensor(ours[name]), parameter.grad.cpu(), rtol=1e-4, atol=1e-6
            )


def test_replicas_have_the_mean_of_their_gradients(tmp_path: Path) -> None:
    results, _ = results_of("replicas", tmp_path)
    assert results == [[[0.5], [4.0, 4.0]]] * 2


def test_the_reductions_of_ddp_are_seen(tmp_path: Path) -> None:
    results, trace = results_of("data_parallel", tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    (model(torch.full((4, 8), 1.0)).sum() + model(torch.full((4, 8), 2.0)).sum()).backward()
    assert results[0] == results[1]
    for found, parameter in zip(results[0], model.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(torch.tensor(found), parameter.grad / 2, rtol=1e-3, atol=1e-5)
    assert "all_reduce" in set(trace.to_pandas()["op"])


def test_a_hang_ends_by_torchs_watchdog_and_its_dump_names_the_rank(tmp_path: Path) -> None:
    options = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "2000"}
    options["TORCH_FR_DUMP_TEMP_FILE"] = str(tmp_path / "dump_")
    ended = run("hang", tmp_path, 2, **options)
    assert ended[0][0] != 0, ended[0][1]
    said = str(read_flight_recorder(sorted(tmp_path.glob("dump_*"))).explain())
    assert "all_reduce" in said, said
    assert "rank 1" in said, said
