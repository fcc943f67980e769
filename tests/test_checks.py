"""The checks before torch is called, and the teaching mode, on torch's fake backend."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_rank import fake_world, recorded
from torch.distributed import ProcessGroup

from ringsim.errors import ArgumentError, RingError

Mistake = Callable[[], Any]


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(3):
        yield


def run(
    program: Mistake, directory: Path, check: str
) -> tuple[RingError | None, list[str], list[str]]:
    """Returns a program's error, the kinds of mistakes in its trace, and the failed operations."""
    error = None
    with recorded(directory, check) as stop:
        try:
            program()
        except RingError as raised:
            error = raised
    trace = stop()
    frame = trace.to_pandas()
    kinds = [finding.kind for finding in trace.explain().findings]
    mistakes = ("invalid_argument", "buffer_hazard")
    failed = [str(op) for op in frame[frame["status"] == "error"]["op"]]
    return error, [kind for kind in kinds if kind in mistakes], failed


def check_mistake(
    mistake: Mistake,
    directory: Path,
    check: str,
    kind: str,
    words: str,
    error: type[RingError],
    wrong: Callable[..., Any] | None = None,
) -> list[str]:
    """Checks a program's error and its line, that of ``wrong``; returns the failed operations."""
    raised, found, failed = run(mistake, directory, check)
    assert type(raised) is error
    assert words in str(raised)
    assert "rank 0 of 3" in str(raised)
    assert found == [kind]
    line = (wrong or mistake).__code__.co_firstlineno
    lines = [frame.lineno for frame in traceback.extract_tb(raised.__traceback__)]
    assert line in lines or f"test_checks.py:{line}" in str(raised)
    return failed


# -- arguments

# Gloo 2.13 ignores gaps: it reduces, or sends, the first elements in memory and leaves the others
# unchanged.
GAPS, WHOLE = (lambda: torch.zeros(4, 4)[:, :2]), (lambda: torch.zeros(4, 2))
GAPPY = "must have no gaps in memory, got a tensor with shape (4, 2) and stride (4, 1)"
OUTSIDE = "was called on a group that does not include this rank"
ITSELF = "must be a different rank, got this rank"
NO_DATA = "must hold data, got a tensor on the meta device"


def outside() -> Any:
    return dist.new_group([1, 2])


# The message, and the operation recorded as failed.
REFUSED: dict[Mistake, tuple[str, list[str]]] = {
    lambda: dist.isend(WHOLE(), 5): ("a rank of the group, from 0 to 2, got 5", ["isend"]),
    lambda: dist.isend(WHOLE(), -1): ("a rank of the group, from 0 to 2, got -1", ["isend"]),
    lambda: dist.isend(torch.zeros(4, device="meta"), 1): (NO_DATA, ["isend"]),
    lambda: dist.all_reduce(torch.zeros(4, device="meta")): (NO_DATA, ["all_reduce"]),
    lambda: dist.all_reduce(GAPS()): (GAPPY, ["all_reduce"]),
    lambda: dist.scatter(WHOLE(), [GAPS()] * 3): (GAPPY, ["scatter"]),
    lambda: dist.recv(WHOLE(), 1, group=outside()): (f"irecv {OUTSIDE}", []),
    lambda: dist.isend(WHOLE(), 1, group=outside()): (f"isend {OUTSIDE}", []),
    lambda: dist.send(WHOLE(), 0): (ITSELF, []),
}
# The same cases if torch itself rejects the operation with its own message.
EXPLAINED: dict[Mistake, tuple[str, list[str]]] = {
    lambda: dist.isend(WHOLE(), 0): (ITSELF, ["isend"]),
    lambda: dist.isend(WHOLE(), 1, tag=-1): ("from 0 to 2,147,483,647, got -1", ["isend"]),
    lambda: dist.isend(torch.zeros(2, 3).t(), 1): (
        "contiguous, got a tensor with shape (3, 2) and stride (1, 3)",
        ["isend"],
    ),
    lambda: dist.isend(torch.zeros(2, 3).to_sparse(), 1): (
        "got a tensor with layout sparse_coo",
        ["isend"],
    ),
}


@pytest.mark.parametrize("mistake", [*REFUSED, *EXPLAINED])
def test_an_operation_that_cannot_be_right_raises(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("something that names neither rank nor peer")

    if mistake in EXPLAINED:
        monkeypatch.setattr(ProcessGroup, "send", refuse)
    words, failed = (REFUSED | EXPLAINED)[mistake]
    found = check_mistake(mistake, tmp_path, "basic", "invalid_argument", words, ArgumentError)
    assert found == failed


def test_an_order_without_gaps_passes_and_a_collective_outside_its_group_warns(
    tmp_path: Path,
) -> None:
    """As in torch, because programs call it on all ranks."""
    group, right = dist.new_group([1, 2]), (None, [], [])
    with pytest.warns(UserWarning, match="does not belong to the given group") as caught:
        assert run(lambda: dist.all_reduce(torch.ones(1), group=group), tmp_path, "basic") == right
    assert len(caught) == 1
    turned = torch.zeros(3, 4).t()
    assert run(lambda: dist.all_reduce(turned), tmp_path / "turned", "basic") == right


# -- the teaching mode: uses of a buffer of 4 x 4, and of its handle, after a message was posted

CHANGED = "would change a buffer whose message has not been waited for"
TWO = "two messages in flight use overlapping buffers"
MISUSES: dict[Callable[[torch.Tensor, Any], Any], tuple[Callable[..., Any], str]] = {
    lambda data, _: data.add_(1): (dist.isend, f"add_ {CHANGED}"),
    lambda data, _: torch.add(torch.ones(4, 4), 1, out=data): (dist.irecv, f"add {CHANGED}"),
    lambda data, work: (data.numpy().fill(1.0), work.wait()): (
        dist.isend,
        "the program changed a buffer before it waited for the send",
    ),
    lambda data, _: float(data[2, 1]): (dist.irecv, "_local_scalar_dense would read a buffer"),
    lambda data, _: dist.irecv(data[3:], 1, tag=2): (dist.irecv, TWO),
    lambda data, _: dist.isend(data, 1): (dist.irecv, TWO),
    lambda _, work: (work.wait(), work.wait()): (
        dist.isend,
        "wait() was called twice on the same handle",
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_misused_buffer_or_handle_raises_at_its_line(
    misuse: Callable[[torch.Tensor, Any], Any], tmp_path: Path
) -> None:
    operation, words = MISUSES[misuse]

    def mistake() -> None:
        data = torch.zeros(4, 4)
        misuse(data, operation(data, 1))

    twice = "twice" in words
    kind, error = ("invalid_argument", ArgumentError) if twice else ("buffer_hazard", RingError)
    check_mistake(mistake, tmp_path / "full", "full", kind, words, error, misuse)
    assert run(mistake, tmp_path / "basic", "basic")[:2] == (None, [])


@pytest.mark.parametrize("check", ["basic", "full"])
def test_a_recv_that_autograd_does_not_see_is_warned_of_once_a_line(
    check: str, tmp_path: Path
) -> None:
    leaf = torch.zeros(4, requires_grad=True)

    def receive() -> None:
        dist.recv(torch.zeros(4), 1)
        dist.send(torch.ones(4, requires_grad=True), 1)
        for _ in range(2):
            dist.recv(leaf, 1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        assert run(receive, tmp_path, check)[0] is None
    words = "this rank is receiving a message into a tensor that requires grad"
    assert [
        str(each.message).startswith(words) for each in caught if each.category is UserWarning
    ] == [True] * (check == "full")
    assert all(Path(each.filename) == Path(__file__) for each in caught)
