"""Sessions of simulated ranks: they stay on the virtual clock from one call to the next."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import gone
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ringsim

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("nothing_left_behind")]

LINK = ringsim.Link(alpha_s=1e-3, beta_s_per_byte=1e-9)
rate = 0.5
total: float
model: Any
optimizer: torch.optim.Optimizer
sending: Any
pair: Any
mesh: Any
sharded: Any


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    with ringsim.session(world_size=3, link=LINK) as session:
        yield session


def set_total(value: float) -> None:
    global total
    total = value


def add() -> float:
    global total
    total += rate * ringsim.current_ring().rank
    return total


def meet() -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def pass_on() -> float:
    ring = ringsim.current_ring()
    token = torch.tensor([float(ring.rank)])
    sending = dist.isend(token.clone(), ring.succ, group=ring.succ_group)
    dist.recv(token, ring.pred, group=ring.pred_group)
    sending.wait()
    return token.item()


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such layer")
    dist.barrier()


def refuse(ranks: Any, words: str, worker: Any) -> ringsim.errors.RingError:
    """Checks that a call raises an error, and that the session goes on."""
    with pytest.raises(ringsim.errors.RingError, match=words) as caught:
        ranks.run(worker)
    assert caught.value.trace is not None
    assert ranks.run(meet).results == [3] * 3
    assert ranks.run(pass_on).results == [2, 0, 1]
    return caught.value


# -- variables


def test_each_rank_keeps_its_own_variables(ranks: Any) -> None:
    ranks.run(set_total, 3)
    assert ranks.run(add).results == [3, 3.5, 4]
    assert ranks.run(add).results == [3, 4, 5]
    assert ranks.pull("total") == [3, 4, 5]
    ranks.push(total=7)
    assert ranks[0, 2].run(set_total, 1).results == [None] * 3
    assert [ranks[rank].total for rank in range(3)] == [1, 7, 1]
    assert {"total", "run"} <= set(dir(ranks[1]))
    with pytest.raises(AttributeError, match="rank 1 has no variable 'nothing'"):
        _ = ranks[1].nothing


def test_large_variables_are_references(ranks: Any) -> None:
    ranks.push(batch=torch.ones(1000, 500))
    assert ranks[1].batch.shape == (1000, 500)
    assert torch.equal(ranks[1].batch.get(), torch.ones(1000, 500))


def test_cells_see_the_caller_s_variables_only_when_they_are_new(ranks: Any) -> None:
    def run(source: str, **variables: Any) -> list[Any]:
        trace: ringsim.Trace = ranks.run_cell(source, "<cell>", variables)
        return trace.results

    assert run("data = [start + ring.rank]\ndata", start=40) == [[40], [41], [42]]
    assert run("data.append(start)\nlen(data)", start=40) == [2, 2, 2]
    assert run("start += ring.rank\nstart", start=40) == [40, 41, 42]
    assert run("start", start=40) == [40, 41, 42]
    assert run("start", start=50) == [50, 50, 50]


def test_settings_of_torch_and_random_numbers_continue(ranks: Any) -> None:
    def draw() -> tuple[float, torch.dtype]:
        numbers = torch.rand(1, dtype=torch.float64).item(), torch.get_default_dtype()
        if dist.get_rank() == 1:
            torch.set_default_dtype(torch.float64)
        return numbers

    first, second = ranks.run(draw).results, ranks.run(draw).results
    assert len({number for number, _ in first + second}) == 6
    assert [dtype for _, dtype in second] == [torch.float32, torch.float64, torch.float32]
    ranks[1].run(torch.set_default_dtype, torch.float32)


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
        return next(model.parameters()).detach().flatten().tolist()  # type: ignore[no-any-return]

    ranks.run(build)
    losses = [ranks.run(step).results[0] for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    of_ranks = ranks.run(weights).results
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]


# -- traces


def test_each_call_has_its_own_trace_from_time_0(ranks: Any) -> None:
    for _ in range(2):
        trace = ranks.run(pass_on)
        assert trace.metadata["source"] == "simulated"
        assert trace.makespan_s == pytest.approx(1e-3 + 4e-9)
        messages = trace.to_pandas("messages")
        assert len(messages) == 3
        assert not trace.unmatched
        assert trace.to_pandas()["post_ns"].max() == 0


def test_output_is_shown_with_its_rank(ranks: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def tell() -> None:
        print("forced", dist.get_rank(), force=True)  # type: ignore[call-overload]

    assert ranks.run(tell).output == ["forced 0\n", "forced 1\n", "forced 2\n"]
    assert ranks.run_cell("print('in a cell')", "<cell>", {}).output == ["in a cell\n"] * 3
    assert ranks.run(print, "hidden").output == ["hidden\n"] * 3
    shown = capfd.readouterr().out.splitlines()
    assert sorted(shown) == sorted(
        [f"[rank {rank}] {words}" for rank in range(3) for words in (f"forced {rank}", "in a cell")]
        + ["[rank 0] hidden"]
    )


def test_all_calls_are_one_trace() -> None:
    with ringsim.session(world_size=2, link=LINK) as ranks:
        with pytest.raises(ringsim.errors.RingError, match="no call of this session"):
            ranks.trace()
        ranks.run(ringsim.compute, 2)
        ranks.push(total=1)
        with pytest.raises(ringsim.errors.RankFailed):
            ranks.run(fail_on_one)
        ranks.run(ringsim.compute, 3)
        trace = ranks.trace()
    assert trace.makespan_s == pytest.approx(5)
    table = trace.to_pandas().query("rank == 0 and label.str.startswith('step ', na=False)")
    assert table["label"].tolist() == ["step compute", "step fail_on_one", "step compute"]
    assert table["post_ns"].tolist() == [0, 2_000_000_000, 2_000_000_001]


def test_algorithms_are_counted_per_call(ranks: Any) -> None:
    assert ranks.run(meet).metadata["algorithms"] == ranks.run(meet).metadata["algorithms"]


def test_a_message_may_be_received_in_a_later_call(ranks: Any) -> None:
    def send() -> None:
        global sending
        if dist.get_rank() == 0:
            sending = dist.isend(torch.tensor([4.0]), 1)

    def receive() -> float | None:
        if dist.get_rank() == 0:
            sending.wait()
        if dist.get_rank() != 1:
            return None
        tensor = torch.zeros(1)
        dist.recv(tensor, 0)
        return tensor.item()

    ranks.run(send)
    trace = ranks.run(receive)
    assert trace.results == [None, 4, None]
    assert trace.makespan_s == pytest.approx(1e-3 + 4e-9)


# -- calls that fail


def test_a_session_survives_a_call_that_fails(ranks: Any) -> None:
    ranks.push(total=5)
    error = refuse(ranks, "rank 1 of 3 raised ValueError: no such layer", fail_on_one)
    assert str(error).endswith("The session goes on.")
    assert ranks.pull("total") == [5] * 3


def test_ranks_that_wait_for_each_other_get_their_verdict(ranks: Any) -> None:
    def wait_for_each_other() -> None:
        dist.recv(torch.zeros(1), (dist.get_rank() + 1) % 3)

    for _ in range(2):
        error = refuse(
            ranks,
            "deadlock: ranks 0, 2 and 1 wait|deadlock: ranks 0, 1 and 2 wait",
            wait_for_each_other,
        )
        assert isinstance(error, ringsim.errors.Deadlock)


@pytest.mark.parametrize("how", ["exits", "is killed", "catches everything"])
def test_a_rank_that_is_lost_is_replaced(ranks: Any, how: str) -> None:
    def lose() -> None:
        if dist.get_rank() == 1:
            if how == "exits":
                os._exit(3)
            if how == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                try:
                    dist.recv(torch.zeros(1), 0)
                except BaseException:
                    pass
        dist.barrier()

    ranks.push(total=5)
    refuse(ranks, "rank 1 started again, without variables", lose)
    assert [ranks[0].total, ranks[2].total] == [5, 5]
    with pytest.raises(AttributeError, match="rank 1 has no variable 'total'"):
        _ = ranks[1].total


def test_a_half_done_optimizer_step_is_told(ranks: Any) -> None:
    class Fragile(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            dist.barrier()
            if dist.get_rank() == 2:
                raise ValueError("no such layer")

    def step() -> None:
        Fragile(torch.nn.Linear(1, 1).parameters()).step()

    error = refuse(ranks, "an optimizer step is half done on rank 2", step)
    assert "(1 on rank 0, 1 on rank 1, 0 on rank 2)" in str(error)


def test_a_program_that_destroys_its_groups_finds_them_again(ranks: Any) -> None:
    assert ranks.run(dist.destroy_process_group).results == [None] * 3
    assert ranks.run(meet).results == [3] * 3
    assert ranks.run(pass_on).results == [2, 0, 1]


def test_a_program_may_make_its_own_world_again(ranks: Any) -> None:
    def make_again() -> float:
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        return meet()

    refuse(ranks, "ValueError: no such layer", fail_on_one)
    for _ in range(2):
        assert ranks.run(make_again).results == [3] * 3
    assert ranks.run(meet).results == [3] * 3
    refuse(ranks, "ValueError: no such layer", fail_on_one)


def test_what_was_built_on_old_groups_names_its_remedy(ranks: Any) -> None:
    def build() -> None:
        global pair, mesh, model, sharded
        pair = dist.new_group([0, 2])
        mesh = init_device_mesh("cpu", (3,))
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        sharded = torch.nn.Linear(6, 6)
        fully_shard(sharded)

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

    def use_model() -> float:
        model(torch.ones(2, 4) * dist.get_rank()).sum().backward()
        return float(next(model.parameters()).grad.sum())

    def use_sharded() -> None:
        sharded(torch.ones(2, 6)).sum().backward()

    remedies = [
        (use_pair, r"this process group ended .* Make it again: dist.new_group"),
        (reduce_on_pair, r"this process group ended .* Make it again: dist.new_group"),
        (use_mesh, r"device mesh that ended .* Make it again: init_device_mesh"),
        (use_model, r"Make it again: model = DistributedDataParallel\(model.module\)"),
        (use_sharded, r"Make it again: .* fully_shard\(...\) for FSDP"),
    ]
    ranks.run(build)
    ranks.run(use_sharded)
    refuse(ranks, "ValueError: no such layer", fail_on_one)
    for worker, words in remedies:
        refuse(ranks, words, worker)
    ranks.run(build)
    assert ranks.run(use_pair).results == [1, 1, 4]
    assert ranks.run(use_mesh).results == [3] * 3
    assert ranks.run(use_model).results == [8] * 3
    ranks.run(use_sharded)


# -- calls that end the process of the ranks


def test_an_interrupt_ends_the_call_and_loses_the_variables(ranks: Any) -> None:
    def interrupt() -> None:
        time.sleep(0.5)
        _thread.interrupt_main()

    def compute_forever() -> None:
        dist.barrier()
        while True:
            pass

    ranks.push(total=5)
    threading.Thread(target=interrupt).start()
    with pytest.raises(ringsim.errors.Interrupted, match="ranks 0, 1 and 2 started again") as told:
        ranks.run(compute_forever)
    assert told.value.trace.to_pandas()["op"].tolist() == ["barrier"] * 3
    assert ranks.run(meet).results == [3] * 3
    with pytest.raises(AttributeError, match="rank 0 has no variable 'total'"):
        ranks.pull("total")


def test_a_limit_and_a_crash_end_the_call_and_not_the_session() -> None:
    with ringsim.session(world_size=2, link=LINK, limit_s=20) as ranks:
        (pid, _) = ranks.run(os.getpid).results
        with pytest.raises(ringsim.errors.RunTimeout, match="The session goes on; ranks 0 and 1"):
            ranks.run_cell("while True: pass", "<cell>", {}, limit_s=0.5)
        while not gone(pid):
            time.sleep(0.01)
        (pid, _) = ranks.run(os.getpid).results
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ringsim.errors.RankFailed, match=r"SIGKILL(?s:.)*ranks 0 and 1 started"):
            ranks.run(meet)
        assert ranks.run(meet).results == [2, 2]


def test_sessions_of_both_kinds_and_simulations_do_not_disturb_each_other(ranks: Any) -> None:
    ranks.push(total=5)
    with ringsim.session(world_size=2, link=LINK) as others:
        others.push(total=6)
        with pytest.raises(ringsim.errors.RankFailed):
            others.run(fail_on_one)
        assert ringsim.simulate(meet, world_size=2, link=LINK).results == [2] * 2
        assert others.pull("total") == [6] * 2
    assert ranks.pull("total") == [5] * 3


def test_a_closed_or_idle_session_leaves_no_process(capfd: pytest.CaptureFixture[str]) -> None:
    with ringsim.session(world_size=2, link=LINK) as ranks:
        (pid, _) = ranks.run(os.getpid).results
    idle = ringsim.session(world_size=2, link=LINK, idle_s=0.5)
    (other, _) = idle.run(os.getpid).results
    while not (gone(pid) and gone(other)):
        time.sleep(0.01)
    assert "the session of 2 ranks ended after 0.5 s without a call" in capfd.readouterr().err
    with pytest.raises(ringsim.errors.RingError, match="the session is closed"):
        idle.run(meet)


def test_a_link_that_is_none_is_refused() -> None:
    with pytest.raises(ringsim.errors.ArgumentError, match="Link"):
        ringsim.session(world_size=2, link=3)  # type: ignore[arg-type]
