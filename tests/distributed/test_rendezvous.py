"""Every wrong start ends in one clear error, on every rank that is there, within the time limit: real processes, real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rank_server import Ended, RankServer, free_port

from ringsim.comm import bootstrap
from ringsim.comm.bootstrap import listen
from ringsim.errors import ArgumentError, RendezvousFailed
from ringsim.ring import current_ring, destroy_distributed, initialize_distributed

pytestmark = pytest.mark.timeout(60)
HERE = "127.0.0.1"
SHORT_S = 1.5
LONG_S = 40.0
SLACK_S = 10.0  # two loaded cores: what must not happen takes 30 minutes


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    with RankServer() as running:
        yield running


def join(
    port: int,
    count: int,
    rank: int,
    timeout_s: float = LONG_S,
    *,
    head: str = HERE,
    device: str = "cpu",
    ring: list[int] | None = None,
    after_s: float = 0.0,
) -> tuple[int, int]:
    time.sleep(after_s)
    initialize_distributed(head, port, count, rank, 0, device, timeout_s=timeout_s, ring_ranks=ring)
    neighbours = current_ring().pred, current_ring().succ
    destroy_distributed()
    return neighbours


def join_with(port: int, count: int, rank: int, timeout_s: float, options: dict[str, Any]) -> tuple[int, int]:
    return join(port, count, rank, timeout_s, **options)


def refused(ended: list[Ended], words: str, *, limit_s: float, error: type[Exception] = RendezvousFailed) -> None:
    """Checks that every rank ended with an error of ours that holds these words, within its limit."""
    for each in ended:
        assert (each.how, each.error) == ("raised", error.__name__), each
        assert words in each.value
        assert each.value.endswith(".")
        assert each.took_s < limit_s + SLACK_S


def met(ended: list[Ended]) -> None:
    count = len(ended)
    assert [(each.how, each.value) for each in ended] == [("returned", ((rank - 1) % count, (rank + 1) % count)) for rank in range(count)]


@contextlib.contextmanager
def stranger(answer: bytes | None) -> Iterator[int]:
    """A listener that is no rank 0: it keeps silent, or answers everything with the same bytes."""
    with listen(HERE, 0) as listener:
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


# --- what works ---


@pytest.mark.parametrize("head", ["127.0.0.1", "localhost", "::1"])
@pytest.mark.parametrize("count", [1, 3])
def test_addresses_and_names(server: RankServer, head: str, count: int) -> None:
    port = free_port(head)
    met(server.run(join_with, [(port, count, rank, LONG_S, {"head": head}) for rank in range(count)]))


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_late_is_waited_for(server: RankServer, late: int) -> None:
    port = free_port()
    met(server.run(join_with, [(port, 3, rank, LONG_S, {"after_s": 0.3 if rank == late else 0.0}) for rank in range(3)]))


def test_sixty_four_ranks_meet(server: RankServer) -> None:
    port = free_port()
    met(server.run(join, [(port, 64, rank) for rank in range(64)], limit_s=50))


def test_under_torchrun_the_agents_store_is_used_again_and_again(server: RankServer) -> None:
    """Torchrun keeps a store at MASTER_PORT itself, so rank 0 must not try to listen there."""
    listener = listen(HERE, 0)
    port = listener.getsockname()[1]
    store = bootstrap.host(listener, LONG_S)
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": "0"}
    for _ in range(2):
        met(server.run(join, [(port, 3, rank) for rank in range(3)], environment=environment))
    environment["TORCHELASTIC_RESTART_COUNT"] = "1"
    met(server.run(join, [(port, 3, rank) for rank in range(3)], environment=environment))
    del store


# --- rank 0 cannot listen ---


def test_port_taken(server: RankServer) -> None:
    with stranger(None) as port:
        first, second = server.run(join, [(port, 2, rank, SHORT_S) for rank in range(2)])
    refused([first], f"port must be free on rank 0's machine, got {port}", limit_s=SHORT_S)
    assert first.took_s < SHORT_S + 1, "nothing to wait for"
    refused([second], "got a listener that does not answer as rank 0 does (rank 1 of 2, head 127.0.0.1:", limit_s=SHORT_S)


def test_two_rank_0(server: RankServer) -> None:
    """The second finds the port taken; the first is told which rank is missing."""
    port = free_port()
    ended = server.run(join, [(port, 2, 0, SHORT_S), (port, 2, 0, SHORT_S)])
    taken = [each for each in ended if "port must be free" in each.value]
    waiting = [each for each in ended if each not in taken]
    assert len(taken) == len(waiting) == 1
    refused(taken, "a second process started as rank 0", limit_s=SHORT_S)
    refused(waiting, "rank 0 present, rank 1 missing", limit_s=SHORT_S)


@pytest.mark.parametrize("head", ["192.0.2.1", "2001:db8::1"])
def test_head_is_another_machine_for_rank_0(server: RankServer, head: str) -> None:
    refused(
        server.run(join_with, [(free_port(), 1, 0, SHORT_S, {"head": head})]),
        "head_ip must be an address of rank 0's own machine",
        limit_s=0,
    )


@pytest.mark.parametrize("head", ["0.0.0.0", "::"])
@pytest.mark.parametrize("rank", [0, 1])
def test_head_is_no_address_to_reach(server: RankServer, head: str, rank: int) -> None:
    ended = server.run(join_with, [(free_port(), 2, rank, SHORT_S, {"head": head})])
    refused(ended, f"head_ip must be one address that the ranks can reach, got '{head}'", limit_s=0, error=ArgumentError)


# --- nobody, or somebody else, at head_ip ---


def test_rank_0_missing(server: RankServer) -> None:
    port = free_port()
    ended = server.run(join, [(port, 3, rank, SHORT_S) for rank in (1, 2)])
    refused(ended, "rank 0 must answer at head_ip and port within the time limit, got", limit_s=SHORT_S)
    refused(ended, "Rank 0 is missing", limit_s=SHORT_S)
    assert "(rank 2 of 3, head 127.0.0.1:" in ended[1].value


def test_head_unreachable(server: RankServer) -> None:
    ended = server.run(join_with, [(29500, 2, 1, SHORT_S, {"head": "192.0.2.1"})])
    refused(ended, "rank 0 must answer at head_ip and port within the time limit, got", limit_s=SHORT_S)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("head", ["no-such-machine.invalid", "a name with spaces", "x" * 300])
def test_head_unknown(server: RankServer, rank: int, head: str) -> None:
    ended = server.run(join_with, [(free_port(), 2, rank, SHORT_S, {"head": head})])
    refused(ended, "head_ip must be an address or a name that this machine knows, got", limit_s=SHORT_S)


@pytest.mark.parametrize(
    "answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(4096)], ids=["silent", "empty", "web server", "zeros"]
)
def test_stranger_at_the_port(server: RankServer, answer: bytes | None) -> None:
    """Torch's client waits for such a listener without any limit."""
    with stranger(answer) as port:
        ended = server.run(join, [(port, 2, 1, SHORT_S)])
    refused(ended, "rank 0 must answer at head_ip and port within the time limit, got a", limit_s=SHORT_S)


# --- who is there disagrees, or is not all ---


@pytest.mark.parametrize(
    ("present", "missing"), [([0, 1, 3], "ranks 0-1, 3 present, rank 2 missing"), ([0], "rank 0 present, ranks 1-3 missing")]
)
def test_rank_missing(server: RankServer, present: list[int], missing: str) -> None:
    port = free_port()
    ended = server.run(join, [(port, 4, rank, SHORT_S) for rank in present])
    refused(ended, f"every rank must be there in time, got a time-out: {missing}", limit_s=SHORT_S)
    assert [f"(rank {rank} of 4)" in each.value for rank, each in zip(present, ended, strict=True)] == [True] * len(present)


def test_rank_missing_and_time_limits_differ(server: RankServer) -> None:
    """Who gives up first says so to all: nobody waits for its own limit."""
    port = free_port()
    ended = server.run(join, [(port, 3, 0, LONG_S), (port, 3, 1, SHORT_S)], limit_s=30)
    refused(ended, "ranks 0-1 present, rank 2 missing", limit_s=SHORT_S)


def test_rank_there_twice(server: RankServer) -> None:
    port = free_port()
    ended = server.run(join, [(port, 3, rank) for rank in (0, 1, 1)], limit_s=30)
    refused(ended, "each rank must be there once, got two processes that say they are rank 1", limit_s=0)
    refused(ended, "rank 2 missing", limit_s=0)


@pytest.mark.parametrize(("odd", "size"), [(0, 3), (0, 5), (2, 3), (2, 5)])
def test_world_sizes_differ(server: RankServer, odd: int, size: int) -> None:
    """Torch ran the smaller world in silence, or waited."""
    port = free_port()
    ended = server.run(join, [(port, size if rank == odd else 4, rank, 5.0) for rank in range(4)], limit_s=30)
    refused(ended, "world_size must be the same on every rank, got", limit_s=0)


def test_rings_differ(server: RankServer) -> None:
    port = free_port()
    rings = [[0, 1], [0, 1, 2], [2]]
    ended = server.run(join_with, [(port, 3, rank, LONG_S, {"ring": rings[rank]}) for rank in range(3)], limit_s=30)
    refused(ended, "ring_ranks must be the same on every rank of a ring, got [0, 1] on rank 0 and [0, 1, 2] on rank 1", limit_s=0)


@pytest.mark.parametrize(
    ("rank", "options"), [(2, {}), (-1, {}), ("0", {}), (0, {"device": "tpu"}), (0, {"ring": [1]}), (0, {"head": 127})]
)
def test_wrong_argument_opens_nothing_and_waits_for_nobody(server: RankServer, rank: Any, options: dict[str, Any]) -> None:
    refused(server.run(join_with, [(free_port(), 2, rank, LONG_S, options)], limit_s=30), " must ", limit_s=0, error=ArgumentError)


def fail_then_start(port: int) -> tuple[int, int]:
    """Starts in vain, keeps the error with all that its traceback holds, and starts again."""
    with pytest.raises(RendezvousFailed, match="rank 0 present, rank 1 missing") as caught:
        join(port, 2, 0, 0.3)
    assert caught.value.__traceback__ is not None
    return join(port, 1, 0)


def test_a_failed_start_leaves_the_port_free(server: RankServer) -> None:
    met(server.run(fail_then_start, [(free_port(),)]))


# --- the listening socket ---


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_listen_on_loopback_only(host: str) -> None:
    with listen(host, 0) as listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")


def test_listen_where_somebody_listens() -> None:
    with listen(HERE, 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(RendezvousFailed, match=f"^port must be free on rank 0's machine, got {port}"):
            listen(HERE, port)


def test_a_name_that_is_not_answered_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: never.wait(30))
    begin = time.monotonic()
    with pytest.raises(RendezvousFailed, match=r"this machine knows, got 'slow\.example': no answer within"):
        listen("slow.example", 0, timeout_s=0.1)
    assert time.monotonic() - begin < SLACK_S
    never.set()
