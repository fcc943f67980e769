"""DeepSpeed's names.

The tests cover their signatures, a program written for ``deepspeed.comm``, and errors of DeepSpeed
that ringsim must not have.
"""

from __future__ import annotations

import inspect
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import modest_backend
import pytest
import torch
import torch.distributed as torch_dist
from rank_server import RankServer, free_port, results

from ringsim import comm
from ringsim.comm import deepspeed as dist
from ringsim.errors import ArgumentError, RingError

SHOWN: dict[Any, str] = {dist.ReduceOp.SUM: "ReduceOp.SUM"}
FIVE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def five_unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Undoes a test's changes to the environment."""
    for name in (*FIVE, "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def run(server: RankServer, function: Any, size: int = 2) -> list[Any]:
    port = str(free_port())
    return results(server.run(function, [(port, rank, size) for rank in range(size)]))


def place(port: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    for name, value in zip(FIVE, (rank, size, rank, "127.0.0.1", port), strict=True):
        os.environ[name] = str(value)


@pytest.mark.parametrize(
    ("name", "arguments"),  # as in DeepSpeed 0.19.8; all of them are in the golden names
    [
        (
            "inference_all_reduce",
            "tensor, op=ReduceOp.SUM, group=None, async_op=False, prof=False, "
            "log_name='all_reduce', debug=None",
        ),
        ("allgather_fn", "output_tensor, input_tensor, group=None, async_op=False, debug=None"),
        ("has_reduce_scatter_tensor", ""),
    ],
)
def test_signature_is_deepspeeds(name: str, arguments: str) -> None:
    function = getattr(dist, name)
    defaults = {each.name: each.default for each in inspect.signature(function).parameters.values()}
    shown = [
        name if value is inspect.Parameter.empty else f"{name}={SHOWN.get(value, repr(value))}"
        for name, value in defaults.items()
    ]
    assert ", ".join(shown) == arguments
    assert function.__name__ == name


def test_every_function_says_what_it_does_and_torchs_names_win_in_ringsim_comm() -> None:
    assert [name for name in dist.__all__ if not getattr(dist, name).__doc__] == []
    assert comm.ReduceOp is torch_dist.ReduceOp
    assert comm.ProcessGroup is torch_dist.ProcessGroup
    assert "output_tensor_lists" in inspect.signature(comm.all_gather_coalesced).parameters
    assert dist.ProcessGroup(3, [0, 1]).size == 2


# A program for deepspeed.comm: with that import it also runs on DeepSpeed 0.19.8.
PROGRAM = """
import torch

dist.init_distributed(dist_backend="gloo", verbose=False)
rank, size = dist.get_rank(), dist.get_world_size()
assert dist.is_initialized() and dist.get_local_rank() == rank
dist.configure(enabled=True, prof_all=True, verbose=False)

tensor = torch.tensor([float(rank)])
dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
assert tensor.item() == size - 1
dist.all_reduce(tensor=tensor, op=torch.distributed.ReduceOp.SUM, log_name="gradients")
dist.inference_all_reduce(torch.ones(2))

gathered = torch.empty(size * 2)
dist.all_gather_into_tensor(output_tensor=gathered, tensor=torch.full((2,), float(rank)))
assert gathered.tolist() == [float(each) for each in range(size) for _ in range(2)]
again = torch.empty(size * 2)
dist.allgather_fn(again, torch.full((2,), float(rank)))
assert torch.equal(again, gathered)

share = torch.empty(2)
dist.reduce_scatter_fn(share, torch.arange(2.0 * size))
assert share.tolist() == [size * (2.0 * rank), size * (2.0 * rank + 1)]

objects = [{"rank": rank}] if rank == 0 else [None]
dist.broadcast_object_list(objects, src=0)
assert objects == [{"rank": 0}]

work = dist.isend(torch.full((3,), float(rank)), (rank + 1) % size, tag=7)
received = torch.empty(3)
dist.irecv(received, (rank - 1) % size, tag=7).wait()
work.wait()
assert received[0] == (rank - 1) % size

pair = dist.new_group([0, 1])
assert dist.get_all_ranks_from_group(pair) == [0, 1] and dist.get_global_rank(pair, 1) == 1
dist.broadcast(tensor, 0, pair)
dist.barrier()

assert dist.has_comm_data() and dist.get_comm_operation_count() > 0
stats = dist.log_summary(show_straggler=True, return_dict=True)
found = {name: {size: entry["count"] for size, entry in sizes.items()} for name, sizes in stats["summary"].items()}
dist.reset_log()
dist.configure(enabled=False)
dist.destroy_process_group()
"""  # noqa: E501


def program(port: str, rank: int, size: int) -> Any:
    place(port, rank, size)
    scope: dict[str, Any] = {"dist": dist}
    exec(compile(PROGRAM, "program.py", "exec"), scope)
    return scope["found"], scope["stats"]


def test_a_program_for_deepspeed_runs_with_the_import_changed(server: RankServer) -> None:
    for found, stats in run(server, program):
        assert found["all_reduce"] == {4: 1, 8: 1}
        assert found["gradients"] == {4: 1}
        assert {"all_gather_into_tensor", "broadcast", "barrier", "isend", "irecv"} <= set(found)
        entry = stats["summary"]["all_reduce"][4]
        measured = "total_latency_ms avg_latency_ms tput_avg_gbps busbw_avg_gbps".split()
        assert set(entry) == {"count", "msg_size_bytes", "msg_size_str", *measured}
        late = stats["straggler_analysis"]["all_reduce"][4]
        whole_ms = late["avg_comm_lat_ms"] + late["avg_straggler_ms"]
        assert whole_ms == pytest.approx(entry["avg_latency_ms"])
        assert stats["metadata"]["world_size"] == 2


def faults(port: str, rank: int, size: int) -> Any:
    place(port, rank, size)
    dist.init_distributed("gloo", verbose=False)
    dist.configure(enabled=True, prof_all=False)
    other, ones = 1 - rank, torch.ones(2)
    dist.all_reduce(ones, dist.ReduceOp.SUM, None, False, True)  # prof by position
    outputs = [torch.empty(1), torch.empty(1)]
    # no KeyError: 'log_name'
    dist.all_to_all(outputs, [torch.ones(1), torch.ones(1)], None, False, True)
    dist.broadcast_object_list([1], 0, None, None, True)
    dist.all_gather_object([None] * size, 1, None, True)
    # would block forever if isend blocked
    works = [dist.isend(ones, other), dist.irecv(torch.empty(2), other)]
    for work in works:
        work.wait()
    coalesced = [torch.empty(4), torch.empty(6)]
    handle = dist.all_gather_coalesced(coalesced, [torch.ones(2), torch.ones(3)], async_op=True)
    assert handle is not None
    handle.wait()
    tensors = [torch.ones(2), torch.ones(3)]
    dist.all_reduce_coalesced(tensors, dist.ReduceOp.SUM)
    stats = dist.log_summary(return_dict=True)
    # a rank of this server ends without removing the log's directory
    dist.configure(enabled=False)
    # On a backend that lacks them, DeepSpeed 0.19.8 silently returns None, and the output is
    # unchanged.
    modest_backend.register()
    group = torch_dist.new_group(backend="modest")
    gathered, share, outputs = torch.zeros(4), torch.zeros(2), [torch.zeros(2)]
    with pytest.warns(RuntimeWarning):
        dist.all_gather_into_tensor(gathered, torch.full((2,), rank + 1.0), group)
    with pytest.warns(RuntimeWarning):
        dist.reduce_scatter_tensor(share, torch.ones(4), group=group)
    dist.all_gather_coalesced(outputs, [torch.ones(1)], group)
    has = dist.has_all_gather_into_tensor(), dist.has_reduce_scatter_tensor()
    dist.destroy_process_group()
    sums = [each.sum().item() for each in (*coalesced, *tensors)]
    built = [each.tolist() for each in (gathered, share, *outputs)]
    return sorted(stats["summary"]), sums, built, has  # type: ignore[index]


def test_what_fails_in_deepspeed_works(server: RankServer) -> None:
    logged = ["all_gather_object", "all_reduce", "all_to_all", "broadcast_object_list"]
    built = [[1.0, 1.0, 2.0, 2.0], [2.0, 2.0], [1.0, 1.0]]
    assert run(server, faults) == [(logged, [4.0, 6.0, 4.0, 6.0], built, (True, True))] * 2


def test_a_reduction_of_deepspeed_is_torchs_of_that_name() -> None:
    for op in dist.ReduceOp:
        if op is not dist.ReduceOp.UNUSED:
            assert dist.to_torch(op) == getattr(torch_dist.ReduceOp, op.name)
    with pytest.raises(ArgumentError, match="op must be a reduction"):
        dist.to_torch(dist.ReduceOp.UNUSED)


# -- the environment

OPEN_MPI = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "3412", strict=True)
}


def test_azure_needs_no_interface_to_be_set(five_unset: pytest.MonkeyPatch) -> None:
    # DeepSpeed 0.19.8 reads NCCL_SOCKET_IFNAME unguarded when verbose.
    azure = {"AZUREML_EXPERIMENT_ID": "x", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}
    for name, value in {**OPEN_MPI, **azure}.items():
        five_unset.setenv(name, value)
    assert dist.in_aml()
    assert not dist.in_dlts()
    dist.patch_aml_env_for_torch_nccl_backend(verbose=True)
    assert [os.environ[name] for name in FIVE] == ["3", "4", "1", "10.0.0.4", "6105"]
    assert os.environ["NCCL_SOCKET_IFNAME"] == "^docker0,lo"
    dist.patch_aml_env_for_torch_nccl_backend(master_port=7000)
    assert os.environ["MASTER_PORT"] == "6105"  # a variable that is set is kept


def test_sagemaker_sets_all_that_it_says(
    five_unset: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # DeepSpeed 0.19.8 logs MASTER_ADDR and MASTER_PORT, which it never sets: a KeyError.
    for name, value in {**OPEN_MPI, "SM_TRAINING_ENV": '{"master_hostname": "algo-1"}'}.items():
        five_unset.setenv(name, value)
    assert dist.in_aws_sm()
    with caplog.at_level("INFO", "ringsim.comm"):
        dist.patch_aws_sm_env_for_torch_nccl_backend(verbose=True)
    assert [os.environ[name] for name in FIVE] == ["3", "4", "1", "algo-1", "29500"]
    assert "MASTER_ADDR=algo-1" in caplog.text
    five_unset.setenv("MASTER_PORT", "7000")
    dist.patch_aws_sm_env_for_torch_nccl_backend()
    assert os.environ["MASTER_PORT"] == "7000"  # a variable that is set is kept


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (
            dist.patch_aml_env_for_torch_nccl_backend,
            r"reads \w+ and OMPI_COMM_WORLD_RANK, but the first is not set",
        ),
        # DeepSpeed 0.19.8 ends in `No module named 'mpi4py'`.
        (dist.init_distributed, "no launcher started this process(.|\n)*torchrun"),
        (
            lambda: dist.init_distributed(dist_init_required=False),
            "dist_init_required is False, but no default process group exists",
        ),
        (
            lambda: dist.init_distributed("gloo", timeout=30),
            r"timeout must be a datetime\.timedelta, got 30",
        ),  # type: ignore[arg-type]
    ],
)
def test_an_unknown_place_or_a_wrong_argument_is_one_clear_error(
    five_unset: pytest.MonkeyPatch, start: Any, message: str
) -> None:
    with pytest.raises(RingError, match=message):
        start()


def test_init_distributed_takes_a_url_a_configuration_and_a_second_call(
    five_unset: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = {"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["barrier"]}}
    url = f"file://{tmp_path}/store"
    place = {"init_method": url, "rank": 0, "world_size": 1}
    dist.init_distributed("gloo", config=config, timeout=timedelta(seconds=20), **place)
    dist.init_distributed("gloo")
    dist.barrier()
    dist.all_reduce(torch.ones(1))
    assert dist.get_logged_comm_ops() == ["barrier"]
    dist.configure(enabled=False)
    dist.destroy_process_group()
