"""Sessions: ranks that stay, with their variables, from one call to the next."""

from __future__ import annotations

import _thread
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gone
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import ringsim

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("nothing_left_behind")]

rate = 0.5
total: float
model: torch.nn.Module
optimizer: torch.optim.Optimizer
sending: Any
pair: Any
mesh: Any
sharded: Any


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    with ringsim.session(world_size=3) as session:
        session.run(set_total, 0)  # its processes have started
        yield session


def set_total(value: float) -> None:
    global total
    total = value


def add() -> float:
    global total
    total += rate * ringsim.current_ring().rank
    return total


def test_variables_of_one_call_are_there_in_the_next(ranks: Any) -> None:
    ranks.run(set_total, 3)
    assert ranks.run(add).results == [3, 3.5, 4]
    assert ranks.run(add).results == [3, 4, 5]
    assert ranks.pull("total") == [3, 4, 5]
    assert ranks[1].total == 4


def test_a_variable_of_the_caller_is_sent_again_only_if_it_has_changed(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halve() -> float:
        global rate
        rate /= 2
        return rate

    assert [ranks.run(halve).results[0] for _ in range(2)] == [0.25, 0.125]
    monkeypatch.setattr("test_sessions.rate", 8.0)
    assert ranks.run(halve).results[0] == 4


def test_a_model_trains_on_over_calls(ranks: Any) -> None:
    def build() -> None:
        global model, optimizer
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4) * (1 + dist.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def weights() -> list[float]:
        return next(model.parameters()).detach().flatten().tolist()

    ranks.run(build)
    losses = [ranks.run(step).results[0] for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    of_ranks = ranks.run(weights).results
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]


def test_each_call_is_a_trace(ranks: Any) -> None:
    def pass_on() -> float:
        ring = ringsim.current_ring()
        token = torch.tensor([float(ring.rank)])
        sending = dist.isend(token.clone(), ring.succ, group=ring.succ_group)
        dist.recv(token, ring.pred, group=ring.pred_group)
        sending.wait()
        print("got", token.item(), force=True)
        return token.item()

    for _ in range(2):
        trace = ranks.run(pass_on)
        assert trace.results == [2, 0, 1]
        assert trace.output == ["got 2.0\n", "got 0.0\n", "got 1.0\n"]
        assert len(trace.to_pandas("messages")) == 3
        assert not trace.unmatched
        assert "not_checked" not in trace.metadata


def test_some_ranks_run_a_call(ranks: Any) -> None:
    ranks.push(total=7)
    assert ranks[0, 2].run(set_total, 1).results == [None] * 3
    assert ranks.pull("total") == [1, 7, 1]
    with pytest.raises(IndexError, match="from 0 to 2, got 3"):
        ranks[3]


def test_large_variables_are_references(ranks: Any) -> None:
    ranks.push(batch=torch.ones(1000, 500), small=torch.ones(2))
    reference = ranks[1].batch
    assert (reference.kind, reference.shape) == ("Tensor", (1000, 500))
    assert reference.size_bytes > 2_000_000
    assert torch.equal(reference.get(), torch.ones(1000, 500))
    assert torch.equal(ranks[1].small, torch.ones(2))
    assert {"batch", "small", "run"} <= set(dir(ranks[1]))


def test_a_variable_that_is_missing_is_named(ranks: Any) -> None:
    with pytest.raises(AttributeError, match="rank 1 has no variable 'nothing'"):
        _ = ranks[1].nothing


def test_cells_run_in_the_namespace_of_the_ranks(ranks: Any) -> None:
    def run(source: str, **variables: Any) -> list[Any]:
        trace: ringsim.Trace = ranks.run_cell(source, "<cell>", variables)
        return trace.results

    assert run("data = [start + ring.rank]\ndata", start=40) == [[40], [41], [42]]
    assert run("data.append(start)\nlen(data)", start=40) == [2, 2, 2]
    assert run("def double(): return [2 * each for each in data]") == [None] * 3
    assert run("double()[0]") == [80, 82, 84]
    assert ranks.run_cell("data", "<cell>", {}, ranks=[1]).results == [None, [41, 40], None]


def test_closed_sessions_refuse() -> None:
    with ringsim.session(world_size=1) as ranks:
        pass
    ranks.close()
    with pytest.raises(ringsim.errors.RingError, match="the session is closed"):
        ranks.run(add)


# -- calls that fail


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such layer")
    if dist.get_rank() == 2:
        time.sleep(60)
    dist.barrier()


def meet() -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def refuse(ranks: Any, words: str, worker: Any) -> ringsim.errors.RingError:
    """Checks that a call raises an error, and that the session goes on."""
    with pytest.raises(ringsim.errors.RingError, match=words) as caught:
        ranks.run(worker)
    assert ranks.run(meet).results == [3] * 3
    return caught.value


def test_a_session_survives_a_call_that_fails(ranks: Any) -> None:
    ranks.push(total=5)
    error = refuse(ranks, "rank 1 of 3 raised ValueError: no such layer", fail_on_one)
    assert "The session goes on." in str(error)
    assert error.trace is not None
    assert ranks.pull("total") == [5] * 3


def test_ranks_that_wait_for_each_other_get_their_verdict(ranks: Any) -> None:
    def wait_for_each_other() -> None:
        dist.recv(torch.zeros(1), (dist.get_rank() + 1) % 3)

    error = refuse(ranks, "deadlock: ranks 0, 1 and 2 wait", wait_for_each_other)
    assert isinstance(error, ringsim.errors.Deadlock)


def test_a_dead_rank_is_replaced_and_the_others_keep_their_variables(ranks: Any) -> None:
    def die() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    ranks.push(total=5)
    refuse(ranks, r"SIGKILL(?s:.)*rank 1 started again, without variables", die)
    assert [ranks[0].total, ranks[2].total] == [5, 5]
    with pytest.raises(AttributeError, match="rank 1 has no variable 'total'"):
        _ = ranks[1].total


def test_a_rank_that_cannot_be_stopped_is_replaced(ranks: Any) -> None:
    def refuse_to_stop() -> None:
        while dist.get_rank() == 2:
            with contextlib.suppress(BaseException):
                time.sleep(60)
        raise ValueError("no such layer")

    refuse(ranks, "ValueError(?s:.)*rank 2 started again, without variables", refuse_to_stop)


def test_an_interrupt_stops_the_call_and_not_the_session(ranks: Any) -> None:
    def take_long() -> None:
        print("started", force=True)
        if dist.get_rank() == 0:
            dist.recv(torch.zeros(1), 1)
        while dist.get_rank() == 1:
            pass
        time.sleep(60)

    def interrupt() -> None:
        nonlocal interrupted_s
        time.sleep(0.5)
        interrupted_s = time.monotonic()
        _thread.interrupt_main()

    interrupted_s = 0.0
    ranks.push(total=5)
    threading.Thread(target=interrupt).start()
    with pytest.raises(ringsim.errors.Interrupted, match=r"The session goes on\.") as caught:
        ranks.run(take_long)
    took_s = time.monotonic() - interrupted_s
    assert took_s < 0.5 * (1 + os.getloadavg()[0])  # on a busy machine, everything takes longer
    assert caught.value.trace.metadata["world_size"] == 3
    assert ranks.run(meet).results == [3] * 3
    assert ranks.pull("total") == [5] * 3


def test_a_half_done_optimizer_step_is_told(ranks: Any) -> None:
    class Fragile(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            dist.barrier()
            if dist.get_rank() == 2:
                raise ValueError("no such layer")

    def step() -> None:
        Fragile(torch.nn.Linear(1, 1).parameters()).step()

    error = refuse(ranks, "an optimizer step is half done on rank 2", step)
    assert "different numbers of optimizer steps (1 on rank 0, 1 on rank 1, 0 on rank 2)" in str(
        error
    )


def test_a_program_that_destroys_its_groups_finds_them_again(ranks: Any) -> None:
    assert ranks.run(dist.destroy_process_group).results == [None] * 3
    assert ranks.run(meet).results == [3] * 3


def test_a_message_may_be_received_in_a_later_call(ranks: Any) -> None:
    def send() -> None:
        global sending
        if dist.get_rank() == 0:
            sending = dist.isend(torch.tensor([4.0]), 1)

    def receive() -> float | None:
        if dist.get_rank() != 1:
            return None
        tensor = torch.zeros(1)
        dist.recv(tensor, 0)
        return tensor.item()

    ranks.run(send)
    assert ranks.run(receive).results == [None, 4, None]


# -- what was built on the groups of a failed call


def test_a_model_of_ddp_names_how_it_is_built_again(ranks: Any) -> None:
    def build() -> None:
        global model
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))

    def fail_before_backward() -> None:
        loss = model(torch.ones(2, 4)).sum()
        if dist.get_rank() == 1:
            raise ValueError("no such layer")
        loss.backward()

    def step() -> float:
        model(torch.ones(2, 4) * dist.get_rank()).sum().backward()
        return float(next(model.parameters()).grad.sum())

    def build_again() -> None:
        global model
        model = torch.nn.parallel.DistributedDataParallel(model.module)
        model.zero_grad()

    ranks.run(build)
    refuse(ranks, "ValueError: no such layer", fail_before_backward)
    refuse(ranks, r"Make it again: model = DistributedDataParallel\(model.module\)", step)
    ranks.run(build_again)
    assert ranks.run(step).results == [8] * 3


def test_own_groups_and_device_meshes_name_how_they_are_made_again(ranks: Any) -> None:
    def build() -> None:
        global pair, mesh
        pair = dist.new_group([0, 2])
        mesh = init_device_mesh("cpu", (3,))

    def use_pair() -> float:
        tensor = torch.ones(1)
        if dist.get_rank() == 0:
            dist.send(tensor * 4, 2, group=pair)
        if dist.get_rank() == 2:
            dist.recv(tensor, 0, group=pair)
        return tensor.item()

    def reduce_on_pair() -> None:
        if dist.get_rank() != 1:
            dist.all_reduce(torch.ones(1), group=pair)

    def use_mesh() -> float:
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=mesh.get_group())
        return tensor.item()

    def gather() -> float:
        return float(distribute_tensor(torch.ones(6), mesh, [Shard(0)]).full_tensor().sum())

    ranks.run(build)
    assert ranks.run(gather).results == [6] * 3
    refuse(ranks, "ValueError: no such layer", fail_on_one)
    for worker in use_pair, reduce_on_pair:
        refuse(ranks, r"this process group ended .* Make it again: dist.new_group", worker)
    for worker in use_mesh, gather:
        refuse(ranks, r"device mesh that ended .* Make it again: init_device_mesh", worker)
    ranks.run(build)
    assert ranks.run(use_pair).results == [1, 1, 4]
    assert ranks.run(use_mesh).results == [3] * 3
    assert ranks.run(gather).results == [6] * 3


def test_a_module_of_fsdp_names_how_it_is_made_again(ranks: Any) -> None:
    def build() -> None:
        global sharded
        sharded = torch.nn.Linear(6, 6)
        fully_shard(sharded)

    def step() -> float:
        loss = sharded(torch.ones(2, 6)).sum()
        loss.backward()
        return float(loss.detach())

    def build_again() -> None:
        global sharded
        ended = sharded
        build()
        for new, old in zip(sharded.parameters(), ended.parameters(), strict=True):
            new.detach().to_local().copy_(old.detach().to_local())

    ranks.run(build)
    before = ranks.run(step).results
    refuse(ranks, "ValueError: no such layer", fail_on_one)
    refuse(ranks, r"this process group ended .* or fully_shard\(...\) for FSDP", step)
    ranks.push(build=build)
    ranks.run(build_again)
    assert ranks.run(step).results == before


# -- the life of a session


def test_all_calls_are_one_trace_with_a_step_each(tmp_path: Path) -> None:
    with ringsim.session(world_size=2) as ranks:
        with pytest.raises(ringsim.errors.RingError, match="no call of this session"):
            ranks.trace()
        ranks.run(meet)
        with pytest.raises(ringsim.errors.RankFailed):
            ranks.run(fail_on_one)
        ranks.run_cell("print('in a cell', force=True)\nring.rank", "<cell>", {})
        trace = ranks.trace()
    assert (trace.results, trace.output) == ([0, 1], ["in a cell\n"] * 2)
    table = trace.to_pandas()
    mine = table[table["rank"] == 0]
    assert mine["op"].tolist() == ["span", "all_reduce", "span", "barrier", "span"]
    assert mine["label"].dropna().tolist() == ["step meet", "step fail_on_one", "step cell"]
    assert mine["post_ns"].is_monotonic_increasing
    trace.save(tmp_path / "session.ringtrace")
    assert ringsim.load(tmp_path / "session.ringtrace") == trace


def test_two_sessions_at_once_and_a_run_beside_them(ranks: Any) -> None:
    ranks.push(total=5)
    with ringsim.session(world_size=2) as others:
        others.push(total=6)
        with pytest.raises(ringsim.errors.RankFailed):
            others.run(fail_on_one)
        assert ringsim.trace(meet, world_size=2).results == [2] * 2
        assert others.pull("total") == [6] * 2
        assert others.run(meet).results == [2] * 2
    assert ranks.pull("total") == [5] * 3
    assert ranks.run(meet).results == [3] * 3


def kill(ranks: Any, rank: int, use: Callable[[], Any]) -> list[str]:
    """Kills a rank between two calls, and uses the session; returns the warnings.

    Kills it again, and waits longer, if its death was noticed only during the use.
    """
    for pause_s in (0.2, 2, 20):
        os.kill(ranks.run(os.getpid).results[rank], signal.SIGKILL)
        time.sleep(pause_s)
        with (
            contextlib.suppress(ringsim.errors.RankFailed),
            warnings.catch_warnings(record=True, action="always") as told,
        ):
            use()
            return [f"{os.path.basename(each.filename)}: {each.message}" for each in told]
    raise AssertionError


def test_a_rank_that_dies_between_two_calls_is_replaced(ranks: Any) -> None:
    def look() -> None:
        with pytest.raises(AttributeError, match="rank 2 has no variable 'total'"):
            ranks.pull("total")

    ranks.push(total=5)
    before = ranks.run(os.getpid).results
    (told,) = kill(ranks, 1, lambda: ranks.run(meet))
    assert told.startswith("test_sessions.py: rank 1 of the session died between two calls")
    assert ranks.run(meet).results == [3] * 3
    ranks.push(total=5)
    (told,) = kill(ranks, 2, look)
    assert "rank 2 of the session died between two calls and started again" in told
    after = ranks.run(os.getpid).results
    assert after[0] == before[0]
    assert not {after[1], after[2]} & {*before}


def test_a_session_without_calls_ends_by_itself(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = ringsim.session(world_size=1, idle_s=0.5)
    (pid,) = ranks.run(os.getpid).results
    while not gone(pid):
        time.sleep(0.01)
    assert "the session of 1 ranks ended after 0.5 s without a call" in capfd.readouterr().err
    with pytest.raises(ringsim.errors.RingError, match="the session is closed"):
        ranks.run(meet)


SCRIPT = """
import os
import ringsim

def count():
    global calls
    calls = globals().get("calls", 0) + 1
    return os.getpid(), calls

ranks = ringsim.session(world_size=2)
ranks.run(count)
print(*ranks.run(count).results, flush=True)
"""


@pytest.mark.parametrize("how", ["closed stdin", "-i", "killed"])
def test_a_session_in_a_script_leaves_nothing(how: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT + ("os.kill(os.getpid(), 9)" * (how == "killed")))
    files = tmp_path / "files"
    files.mkdir()
    command = [sys.executable, *(["-i"] if how == "-i" else []), "script.py"]
    shell = f"{shlex.join(command)} <&-" if how == "closed stdin" else shlex.join(command)
    ended = subprocess.run(
        ["sh", "-c", shell],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(files)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert ended.returncode in ((0,) if how != "killed" else (-9, 137))
    (first, calls), (second, again) = re.findall(r"\((\d+), (\d)\)", ended.stdout)
    assert (calls, again) == ("2", "2")
    while any(files.iterdir()) or not (gone(int(first)) and gone(int(second))):
        time.sleep(0.01)


def test_a_session_without_a_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def die() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    monkeypatch.setattr("ringsim.launch.ranks.has_fork_server", lambda: False)
    with ringsim.session(world_size=2) as ranks:
        ranks.push(total=5)
        with pytest.raises(ringsim.errors.RankFailed, match="ValueError: no such layer"):
            ranks.run(fail_on_one)
        assert ranks.run(meet).results == [2] * 2
        assert ranks.pull("total") == [5] * 2
        with pytest.raises(ringsim.errors.RankFailed, match="rank 1 started again"):
            ranks.run(die)
        assert ranks.run(meet).results == [2] * 2
        assert ranks[0].total == 5
