"""Every wrong start ends with one clear error, on every present rank, within the time limit."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rank_server import Ended, RankServer, free_port
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ringsim import current_ring, destroy_distributed, initialize_distributed
from ringsim.errors import ArgumentError, RendezvousFailed

HERE = "127.0.0.1"
SHORT_S = 1.5
LONG_S = 100.0
SLACK_S = 60.0  # for two loaded cores: a failing test takes LONG_S, or 30 minutes
Start = tuple[int, Any, float, dict[str, Any]]  # ranks, this rank, time limit, options of `join`


def join(
    port: int,
    count: int,
    rank: int,
    timeout_s: float = LONG_S,
    options: dict[str, Any] | None = None,
) -> tuple[int, int]:
    values = {"head": HERE, "device": "cpu", "ring": None, "after_s": 0.0} | (options or {})
    time.sleep(values["after_s"])
    place = values["head"], port, count, rank, 0, values["device"]
    initialize_distributed(*place, timeout_s=timeout_s, ring_ranks=values["ring"])
    neighbours = current_ring().pred, current_ring().succ
    destroy_distributed()
    return neighbours


def met(ended: list[Ended]) -> None:
    count = len(ended)
    assert [(each.how, each.value) for each in ended] == [
        ("returned", ((rank - 1) % count, (rank + 1) % count)) for rank in range(count)
    ]


@contextlib.contextmanager
def stranger(answer: bytes | None) -> Iterator[int]:
    """A listener other than rank 0: it is silent, or answers everything with the same bytes."""
    with socket.create_server((HERE, 0)) as listener:
        connections = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connections.append(connection)
                    if answer is not None:
                        connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        thread.join(10)
        for connection in connections:
            connection.close()


# -- correct starts


@pytest.mark.parametrize(
    ("head", "count", "late"), [(HERE, 1, 0), ("localhost", 3, 0), ("::1", 3, 1), (HERE, 64, -1)]
)
def test_ranks_meet_by_addresses_and_names_and_wait_for_who_is_late(
    server: RankServer, head: str, count: int, late: int
) -> None:
    port = free_port(head)
    options = [{"head": head, "after_s": 0.3 if rank == late else 0.0} for rank in range(count)]
    met(server.run(join, [(port, count, rank, LONG_S, options[rank]) for rank in range(count)]))


def test_under_torchrun_the_agents_store_is_used_again_and_again(server: RankServer) -> None:
    """Torchrun itself keeps a store at MASTER_PORT, so rank 0 must not try to listen there."""
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    port = store.port
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port)}
    for restart in ("0", "0", "1"):
        environment["TORCHELASTIC_RESTART_COUNT"] = restart
        met(server.run(join, [(port, 3, rank) for rank in range(3)], environment=environment))
    del store


# -- wrong starts

ANSWERS: dict[str, bytes | None] = {
    "silent": None,
    "web server": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "zeros": bytes(4096),
}
UNANSWERED = "rank 0 did not answer at head_ip and port within the time limit:"


def ranks(count: int, present: list[int], limit_s: float = SHORT_S) -> list[Start]:
    return [(count, rank, limit_s, {}) for rank in present]


# The ranks that start, the message of their errors, and the time limit. The rank that gives up
# first informs all others.
FAILURES: dict[str, tuple[list[Start], str, float]] = {
    "rank 0 is missing": (ranks(3, [1, 2]), UNANSWERED, SHORT_S),
    "rank 2 is missing": (
        ranks(4, [0, 1, 3]),
        "not all ranks arrived within the time limit: ranks 0-1, 3 present, rank 2 missing",
        SHORT_S,
    ),
    "the head is unreachable": ([(2, 1, SHORT_S, {"head": "192.0.2.1"})], UNANSWERED, SHORT_S),
    "a rank is there twice": (ranks(3, [0, 1, 1], LONG_S), "two processes have rank 1", 0),
    "rings differ": (
        [(3, rank, LONG_S, {"ring": ring}) for rank, ring in enumerate([[0, 1], [0, 1, 2], [2]])],
        "different values of ring_ranks: rank 0 passed [0, 1], but rank 1 passed [0, 1, 2]",
        0,
    ),
}


@pytest.fixture(scope="module")
def failed(server: RankServer) -> dict[str, list[Ended]]:
    """Returns the ends of all starts that must fail, which run at the same time."""
    scenarios = {name: (free_port(), starts) for name, (starts, _, _) in FAILURES.items()}
    scenarios["two ranks 0"] = free_port(), ranks(2, [0, 0])
    with contextlib.ExitStack() as stack:
        for name, answer in ANSWERS.items():
            scenarios[name] = stack.enter_context(stranger(answer)), ranks(2, [1])
        scenarios["port taken"] = stack.enter_context(stranger(None)), ranks(2, [0, 1])
        starts = [(port, *start) for port, each in scenarios.values() for start in each]
        ended = iter(server.run(join, starts))
        return {name: [next(ended) for _ in each] for name, (_, each) in scenarios.items()}


def refused(ended: list[Ended], words: str, *, limit_s: float) -> None:
    """Checks that every rank ended with a RendezvousFailed with this text, within its limit."""
    for each in ended:
        assert (each.how, each.error) == ("raised", RendezvousFailed.__name__), each
        assert words in each.value
        assert each.value.endswith(".")
        assert each.took_s < limit_s + SLACK_S


@pytest.mark.parametrize("name", FAILURES)
def test_a_start_that_fails_says_why_on_every_rank(
    failed: dict[str, list[Ended]], name: str
) -> None:
    starts, words, limit_s = FAILURES[name]
    refused(failed[name], words, limit_s=limit_s)
    if words == UNANSWERED:
        refused(failed[name], "Rank 0 is missing", limit_s=limit_s)
    for (count, rank, _, _), each in zip(starts, failed[name], strict=True):
        assert f"rank {rank} of {count}" in each.value


def test_a_wrong_argument_opens_nothing_and_waits_for_nobody() -> None:
    wrong: list[dict[str, Any]] = [{"device": "tpu"}, {"ring": [1]}, {"head": 127}]
    for rank, options in [(2, {}), (-1, {}), ("0", {}), *((0, each) for each in wrong)]:
        with pytest.raises(ArgumentError, match=" must "):
            join(1, 2, rank, SHORT_S, options)


def test_a_port_where_somebody_else_listens(failed: dict[str, list[Ended]]) -> None:
    """Torch's client waits for an unrelated listener without any limit."""
    for name in ANSWERS:
        refused(failed[name], f"{UNANSWERED} the process listening there", limit_s=SHORT_S)
    first, second = failed["port taken"]
    refused([first], "cannot listen on 127.0.0.1, port", limit_s=0)
    refused(
        [second],
        "listening there does not respond as rank 0 would (rank 1 of 2, head 127.0.0.1:",
        limit_s=SHORT_S,
    )
    # The second rank 0 finds the port in use; the first reports the missing rank.
    waiting, taken = sorted(
        failed["two ranks 0"], key=lambda each: "the port is already in use" in each.value
    )
    refused([taken], "a second process started as rank 0", limit_s=SHORT_S)
    refused([waiting], "rank 0 present, rank 1 missing", limit_s=SHORT_S)


def fail_then_start(port: int) -> tuple[int, int]:
    """Fails to start, keeps the error with everything its traceback refers to, and starts again."""
    with pytest.raises(RendezvousFailed, match="rank 0 present, rank 1 missing") as caught:
        join(port, 2, 0, 0.3)
    assert caught.value.__traceback__ is not None
    return join(port, 1, 0)


def test_a_failed_start_leaves_the_port_free(server: RankServer) -> None:
    met(server.run(fail_then_start, [(free_port(),)]))
